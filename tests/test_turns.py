"""rollout.py and trajectory.py by hand, without a model: where a turn ends, and its mask."""

import pytest
from transformers import ByT5Tokenizer

from data import Question
from prompts import PROTOCOLS
from rollout import StopRule, encode
from trajectory import Segment, Trajectory

LETTERS = ByT5Tokenizer()  # a token is a letter
RULE = StopRule(LETTERS, PROTOCOLS["when_to_search"].stop_tags, {LETTERS.eos_token_id})


def played() -> Trajectory:
    t = Trajectory(Question("q", "?", ["!"]), PROTOCOLS["ur2"], prompt_ids=[9])
    t.append_model([1, 2, 3], [-0.1, -0.2, -0.3], "ask")
    t.append_environment([4, 5], "[]", "documents")
    t.append_model([6], [-0.4], "!")
    return t


def test_the_mask_by_hand():
    # Three sampled tokens, the last of them a closing tag; two of the environment; the EOS token.
    assert played().response_mask == [1, 1, 1, 0, 0, 1]


def test_log_probs_and_segments_beside_the_mask():
    t = played()
    assert t.response_ids == [1, 2, 3, 4, 5, 6]
    assert t.logprobs == [-0.1, -0.2, -0.3, 0.0, 0.0, -0.4]
    said = [("model", "ask"), ("documents", "[]"), ("model", "!")]
    assert t.segments == [Segment(*one) for one in said]


@pytest.mark.parametrize(
    ("text", "limit", "reason"),
    [
        ("who <search> Ana </search>", 99, "query"),
        ("</search>", 99, "query"),  # as many letters as the turn has
        ("so <answer> Norland </answer>", 99, "answer"),
        ("who <search> Ana </search", 99, None),  # goes on
        ("a < b > c", 99, None),
        ("I imagine <information> Norland </information>", 99, None),
        ("ab", 3, None),
        ("abc", 3, "length"),
        ("</search>", 9, "query"),  # the tag counts at the limit, too
    ],
)
def test_why_a_turn_is_over_with_its_last_token(text, limit, reason):
    assert RULE.reason(encode(LETTERS, text), limit) == reason


def test_a_turn_with_the_end_of_the_text_is_over_whatever_its_length():
    assert RULE.reason([*encode(LETTERS, "a"), LETTERS.eos_token_id], 2) == "eos"
