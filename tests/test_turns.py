"""Tests of rollout.py and trajectory.py without a model: the end of a turn, and the mask."""

import pytest
from transformers import ByT5Tokenizer

from data import Question
from papers import PROTOCOLS
from plumbing.record import to_record
from rewards import good_format
from rollout import Environment, StopRule, encode
from settings import Settings
from trajectory import Segment, Trajectory

LETTERS = ByT5Tokenizer()  # each letter is a token
RULE = StopRule(LETTERS, PROTOCOLS["when_to_search"].stop_tags, {LETTERS.eos_token_id})


def test_the_mask_is_one_only_on_tokens_of_the_model():
    # The model sampled three tokens; the environment wrote two; the model sampled one more.
    t = Trajectory(Question("q", "?", ["!"]), PROTOCOLS["ur2"])
    t.append_model([1, 2, 3], [-0.1, -0.2, -0.3], "ask")
    t.append_environment([4, 5], "[]", "documents")
    t.append_model([6], [-0.4], "!")
    assert t.response_mask == [1, 1, 1, 0, 0, 1]
    assert t.response_ids == [1, 2, 3, 4, 5, 6]
    assert t.logprobs == [-0.1, -0.2, -0.3, 0.0, 0.0, -0.4]
    expected = [("model", "ask"), ("documents", "[]"), ("model", "!")]
    assert t.segments == [Segment(*one) for one in expected]


@pytest.mark.parametrize(
    ("text", "limit", "reason"),
    [
        ("who <search> Ana </search>", 99, "query"),
        ("</search>", 99, "query"),  # the turn has only the tag
        ("so <answer> Norland </answer>", 99, "answer"),
        ("who <search> Ana </search", 99, None),  # the turn goes on
        ("a < b > c", 99, None),
        ("I imagine <information> Norland </information>", 99, None),
        ("ab", 3, None),
        ("abc", 3, "length"),
        ("</search>", 9, "query"),  # a tag that ends at the limit still counts
    ],
)
def test_the_reason_why_a_turn_ends_after_these_tokens(text, limit, reason):
    assert RULE.reason(encode(LETTERS, text), limit) == reason


def test_eos_ends_a_turn_even_if_the_limit_is_reached():
    assert RULE.reason([*encode(LETTERS, "a"), LETTERS.eos_token_id], 2) == "eos"


def test_what_follows_a_stop_tag_inside_its_own_token_is_not_text_of_the_model():
    """A token may be "><": under When to Search the "<" would be text outside of the sections."""
    letters, protocol = ByT5Tokenizer(), PROTOCOLS["when_to_search"]
    letters.add_tokens(["><"])
    row = Trajectory(Question("q", "Where?", ["Norland"]), protocol)
    text = "<think> a </think><reflect> b </reflect><answer> Norland </answer>"
    ids = encode(letters, f"{text}<")
    environment = Environment(letters, protocol, None, Settings(max_context=4096))
    environment.end_turn(row, ids, [-0.1] * len(ids), "answer")
    assert row.response_ids == ids and row.text == text
    assert good_format(row)
    assert len(to_record(row, letters)["tokens"]) == len(ids)
