"""Texts made to do harm, thousands of them: pages, questions and what a model writes, through the
environment, real rollouts, parsing, every reward, the log and the screen.
"""

import copy
import json
import random
from itertools import groupby

import numpy as np
import pytest
from conftest import small
from hypothesis import Phase, given
from hypothesis import settings as examples_of
from hypothesis import strategies as st
from test_engine import make_talkative, random_policy
from tokenizers import AddedToken

import metrics
import rollout
from data import Document, Question, SearchResult, clean
from errors import InputError
from formats.records import append_jsonl
from plumbing.record import told
from prompts import PROTOCOLS, build_prompt, control_tokens
from rewards import REWARDS, Extras, tfidf_embedder
from rollout import Environment, RolloutSettings, decode, encode, play_by_turns
from scale.engine import play_in_slots
from settings import Settings
from trajectory import Trajectory, show, trajectory_from_text

TAGS = sorted({tag for protocol in PROTOCOLS.values() for tag in protocol.tags})
WORDS = """
<|im_start|> <|im_end|> <|eot_id|> <|endoftext|> <eos> <pad> <unk> </s> <EOS> ＜eos＞ ＜／search＞
＜ ＞ ｜ ⟦ ⟧ { } [ ] \\boxed{ \\boxed{Sudria} [1] ² 東 " \\ \\ud83d bell Norland 1e999
\ud83d \udc00 \x1b[2J \x1b]0;t\x07 \x00 \u202e
""".split()
LINES = [" ", "\n", "\r", "\x85", "\u2028", "\r\nstep   99  reward 99.00", "correct answer is: B"]
PIECES = [*TAGS, *(tag[: len(tag) // 2] for tag in TAGS), *WORDS, *LINES]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=6), max_size=12).map("".join)
EMBED = tfidf_embedder([Document("", "", "town of ana bell")])
SEARCHING = [name for name, protocol in PROTOCOLS.items() if protocol.query_tags]


@pytest.fixture(autouse=True)
def no_algebra(monkeypatch):
    """Other tests have slow answers."""
    monkeypatch.setattr(metrics, "has_math_verify", lambda: False)


@pytest.fixture(scope="module")
def tagged(bpe):
    """Byte-level BPE to which a tag is one added token, as the toy tokenizer has them."""
    tokenizer = copy.deepcopy(bpe)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return tokenizer


def check_row(row: Trajectory, tokenizer, environment: Environment) -> None:
    """Ids and mask are those of the segments; the environment wrote no tag but its frame's."""
    assert len(row.response_ids) == len(row.response_mask) == len(row.logprobs)
    control = control_tokens(tokenizer).keys() - {tokenizer.unk_token_id}
    frame = [i for i in environment.block("x") if i in control] if row.searches else []
    pairs = zip(row.response_ids, row.response_mask, strict=True)
    runs = [(mask, [i for i, _ in run]) for mask, run in groupby(pairs, lambda pair: pair[1])]
    stretches = groupby(row.segments, lambda segment: segment.writer == "model")
    for (mask, ids), (own, segments) in zip(runs, stretches, strict=True):
        texts = [(segment.writer, segment.text) for segment in segments]
        assert mask == own
        if own:
            assert decode(tokenizer, ids) == "".join(text for _, text in texts)
            continue
        encoded = [(writer, encode(tokenizer, text)) for writer, text in texts]
        assert ids == [i for _, some in encoded for i in some]
        for read in (some for writer, some in encoded if writer == "documents"):
            assert [i for i in read if i in control] == frame
            text = decode(tokenizer, read)
            assert all(
                text.count(tag) == (tag in row.protocol.documents_tags) for tag in row.protocol.tags
            )


def check_shown(row: Trajectory) -> None:
    """No control, no line that looks like the log's, no mark that the environment did not set."""
    lines = show(row, {"answer": 1.0}).split("\n")
    assert all(map(str.isprintable, lines))
    assert sum(not line.startswith("| ") for line in lines) <= 4
    wrote = sum(segment.writer != "model" for segment in row.segments)
    assert [sum(line.count(sign) for line in lines) for sign in "⟦⟧"] == [wrote, wrote]


def check_rewards(row: Trajectory) -> None:
    for reward in REWARDS.values():
        try:
            terms = reward(row, Settings(), 0, Extras(True, "x", EMBED, None))
        except InputError:  # of another protocol
            continue
        assert np.isfinite(list(terms.values())).all()


def check_written(name, tokenizer, page, turn, asked, file) -> None:
    """One row: a turn of the model, a page, another turn."""
    protocol = PROTOCOLS[name]
    task = "summary" if "summary" in name else ("qa", "math", "choice")[len(asked) % 3]
    references = (Document("d", page, page),)
    question = Question("1", asked, ["A"], task, ("ana", page), references, (1,))
    plain = Question("1", "x", ["A"], task, ("ana", "x"), (Document("d", "x", "x"),), (1,))
    prompts = [build_prompt(protocol, its, tokenizer) for its in (question, plain)]
    control = control_tokens(tokenizer).keys() - {tokenizer.unk_token_id}
    assert [i for i in prompts[0] if i in control] == [i for i in prompts[1] if i in control]
    row = Trajectory(question, protocol, prompts[0])
    environment = Environment(tokenizer, protocol, None, RolloutSettings(max_context=9999))
    results = [SearchResult([Document(page, turn, page)] * 2), SearchResult(text=page or "x")]
    for said, result in zip((turn, "x"), [*results, SearchResult(error=page)], strict=False):
        ids = encode(tokenizer, clean(said) or "x")
        environment.end_turn(row, ids, [-1.0] * len(ids), "query")
        if protocol.query_tags:
            environment.write(row, page, result)
    environment.end_turn(row, encode(tokenizer, "x"), [-1.0], "eos")
    check_row(row, tokenizer, environment)
    check_shown(row)
    for its in (row, trajectory_from_text(question, row.text, protocol)):
        check_rewards(its)
    file.unlink(missing_ok=True)
    append_jsonl(file, [told(row, tokenizer)])
    (line,) = file.read_bytes().split(b"\n")[:-1]
    assert json.loads(line)["stop_reason"] == "eos"


def fuzz(count: int, tokenizer, file) -> None:
    kept = {"database": None, "phases": [Phase.generate]}  # as it was found, not made small

    @examples_of(max_examples=count, derandomize=True, deadline=None, **kept)
    @given(st.sampled_from(sorted(PROTOCOLS)), TEXTS, TEXTS, TEXTS)
    def check(name, page, turn, asked):
        check_written(name, tokenizer, page, turn, asked, file)

    check()


@pytest.mark.fault(141)
@pytest.mark.parametrize("count", [100, pytest.param(2500, marks=pytest.mark.trust)])
@pytest.mark.parametrize("kind", ["toy_tokenizer", "tagged"])
def test_no_hostile_text_breaks_or_forges_anything(count, kind, request, tmp_path):
    fuzz(count, request.getfixturevalue(kind), tmp_path / "rows.jsonl")


@pytest.mark.parametrize("place", ["rollout.without_control", "trajectory.harmless"])
def test_the_same_texts_forge_where_nobody_cleans(place, toy_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(place, lambda text, *_: clean(text))
    with pytest.raises(AssertionError):
        fuzz(100, toy_tokenizer, tmp_path / "rows.jsonl")


# ------------------------------------------------------------------------------------ real rollouts
def hostile_search(draw: random.Random):
    """Every result is another; some are texts, errors, fallbacks, or of no documents."""

    def text() -> str:
        return "".join(draw.choices(PIECES, k=draw.randrange(1, 30)))

    def find(_):
        documents = [Document(text(), text(), text()) for _ in range(draw.randrange(4))]
        kinds = [SearchResult(documents)] * 3 + [SearchResult(text=text())]
        return draw.choice([*kinds, SearchResult(error=text()), SearchResult(documents, "", True)])

    return lambda requests: [find(request) for request in requests]


@pytest.mark.fault(142)
@pytest.mark.parametrize("count", [1, pytest.param(45, marks=pytest.mark.trust)])
@pytest.mark.parametrize("play", [play_by_turns, play_in_slots])
@pytest.mark.parametrize("kind", ["toy_tokenizer", "tagged"])
def test_real_rows_hold_no_token_that_a_page_forged(count, play, kind, request):
    tokenizer, searches = request.getfixturevalue(kind), 0
    for seed in range(count):
        for name in SEARCHING:
            draw, protocol = random.Random(f"{seed} {name}"), PROTOCOLS[name]
            policy = random_policy(len(tokenizer) + 5, draw)
            policy = make_talkative(policy, tokenizer, protocol, draw)
            limits = {"max_turn_tokens": 20, "document_tokens": draw.choice([8, 60])}
            settings = Settings(group_size=2, max_context=1024, max_searches=3, **limits)
            environment = Environment(tokenizer, protocol, hostile_search(draw), settings)
            asked = Question("1", "".join(draw.choices(PIECES, k=5)), ["x"])
            for row in rollout.rollout(policy, environment, [asked], seed, play):
                check_row(row, tokenizer, environment)
                check_shown(row)
                check_rewards(row)
                searches += len(row.searches)
    assert searches > 5 * count
