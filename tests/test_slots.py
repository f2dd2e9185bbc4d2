"""Tests of engines/slots.py: greedy slots sample the same tokens as `generate` with less work."""

import dataclasses
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from conftest import model_of, random_policy, roll, small
from transformers import AutoConfig

from data import Document, Question, SearchResult
from engines import slots
from engines.slots import Engine, affordable, generate_in_slots, pick, thin_products
from papers import PROTOCOLS
from policy import Policy, collate
from prompts import build_prompt
from rollout import encode, generate_by_turns
from scale.packing import beginning

UR2 = PROTOCOLS["ur2"]
QA = Question("1", "In which country was Ana Bell born?", ["Norland"])
WORDS = "who was born in which country the town of city and a is year company people".split()
PLAYS = {"hf": generate_by_turns, "slots": generate_in_slots}


def play(policy, tokenizer, questions=(QA,), search=None, engine="slots", **settings):
    """Returns a rollout of `engine` with these settings."""
    settings = {"max_turn_tokens": 12, "generate": PLAYS[engine]} | settings
    return roll(policy, tokenizer, questions, search or library(0), **settings)


def draw_policy(vocab_size: int, draw: random.Random) -> Policy:
    kind = draw.choice(["qwen2", "qwen3", "llama", "mistral"])
    sizes = small(
        sliding_window=None,
        vocab_size=vocab_size,
        num_hidden_layers=draw.choice([1, 2, 3]),
        num_key_value_heads=draw.choice([1, 2, 4]),
        head_dim=8,
        tie_word_embeddings=draw.random() < 0.3,
        max_position_embeddings=2048,
    )
    return random_policy(AutoConfig.for_model(kind, **sizes), draw.randrange(2**31))


def change_logits(policy: Policy, change) -> Policy:
    """Lets `change(logits [B, n, V], positions [B, n])` change the logits of every pass."""
    model, seen = policy.language_model, {}

    def remember(_model, _arguments, inputs):
        seen["positions"] = inputs["position_ids"]

    def hook(_head, _hidden, logits):
        logits = logits.view(len(logits), -1, logits.shape[-1])  # slots need only the last ones
        change(logits, seen["positions"][:, -logits.shape[1] :])

    model.base_model.register_forward_pre_hook(remember, with_kwargs=True)
    model.get_output_embeddings().register_forward_hook(hook)
    return policy


def make_talkative(policy: Policy, tokenizer, protocol, draw: random.Random) -> Policy:
    """Makes tags likely at some positions, because a random model would hardly ever search."""
    begin, end = protocol.query_tags or protocol.answer_tags
    period = draw.randrange(5, 12)
    likely_tags = [(begin, period, 1), (end, period, 4)]
    for tag in (*(protocol.answer_tags or ()), tokenizer.eos_token):
        likely_tags.append((tag, draw.randrange(20, 60), 0))
    bonus = draw.choice([0.0, 8.0, 15.0, 30.0])

    def raise_logits(logits, positions):
        for tag, interval, phase in likely_tags:
            token = tokenizer.convert_tokens_to_ids(tag)
            logits[..., token] += bonus * (positions % interval == phase)

    return change_logits(policy, raise_logits)


def library(seed: int):
    """Returns a search function whose results depend only on the query: documents of several
    lengths, failures and fallbacks.
    """

    def search(requests):
        search.calls.append(len(requests))
        return [find(random.Random(f"{seed} {request.query}")) for request in requests]

    def find(draw):
        lengths = [draw.randrange(1, 60) for _ in range(draw.randrange(4))]
        documents = [Document("d", "", " ".join(draw.choices(WORDS, k=k))) for k in lengths]
        rare = [SearchResult(documents, fallback=True), SearchResult(error="down")]
        return draw.choice([SearchResult(documents)] * 6 + rare)

    search.calls = []
    return search


def schedule(tokenizer, seed: int) -> tuple[Policy, dict]:
    """Returns a random policy and random arguments of `play`: prompts, group size and limits, often
    with fewer slots than rows.
    """
    draw = random.Random(seed)
    names = ["ur2", "ur2_search", "r1_searcher", "r_search", "when_to_search", "arena"]
    protocol = PROTOCOLS[draw.choice(names)]
    questions = []
    for number in range(draw.randrange(1, 5)):
        text = " ".join(draw.choices(WORDS, k=draw.randrange(1, 30)))
        searches = draw.random() < 0.9
        pages = (Document("r", "", "town"),)
        questions.append(Question(str(number), text, ["x"], references=pages, may_search=searches))
    group_size = draw.randrange(1, 5)
    longest = max(len(build_prompt(protocol, question, tokenizer)) for question in questions)
    policy = make_talkative(draw_policy(len(tokenizer) + 5, draw), tokenizer, protocol, draw)
    return policy, {
        "questions": questions,
        "search": library(seed),
        "protocol": protocol,
        "temperature": 0.0,
        "group_size": group_size,
        "max_searches": draw.choice([0, 1, 2, 3, 3]),
        "max_turn_tokens": draw.choice([1, 4, 9, 14, 25, 25]),
        "max_context": longest + 33 + draw.choice([0, 60, 150, 1000, 1000, 1000]),
        "document_tokens": draw.choice([8, 30, 100]),
        "max_num_seqs": draw.randrange(len(questions) * group_size + 1),
    }


def is_tie(policy, trajectory, other, gap: float) -> bool:
    """Returns whether both tokens are equally likely, up to `gap`, at the first difference of the
    two rows. (fp32 logits below 64 are rounded to steps of 4e-6.)
    """
    pairs = zip(trajectory.ids, other.ids, strict=False)
    place = next(i for i, (a, b) in enumerate(pairs) if a != b)
    ids = torch.tensor([trajectory.ids[:place]])
    positions = torch.arange(place)[None]
    with torch.no_grad():
        logits = policy.language_model(input_ids=ids, position_ids=positions).logits[0, -1]
    return bool((logits[trajectory.ids[place]] - logits[other.ids[place]]).abs() < gap)


def assert_same(policy, actual, expected, gap: float = 2e-5) -> int:
    """Asserts that rows without a tie are equal; returns the number of rows with a tie. Log-probs
    may differ by the `gap` of a tie, or by 1e-4 if that is more.
    """

    def plain(trajectory):  # log-probs are compared below; seconds are not compared
        searches = [dataclasses.replace(s, seconds=0.0) for s in trajectory.searches]
        return dataclasses.replace(trajectory, logprobs=[], searches=searches)

    ties = 0
    for a, b in zip(actual, expected, strict=True):
        if a.response_ids != b.response_ids and is_tie(policy, a, b, gap):
            ties += 1
        else:
            assert plain(a) == plain(b)
            assert a.logprobs == pytest.approx(b.logprobs, abs=max(gap, 1e-4))
    return ties


@pytest.mark.parametrize(
    "seeds", [range(30), pytest.param(range(1000, 1500), marks=pytest.mark.slow)]
)
def test_greedy_rollouts_in_slots_equal_those_of_generate(seeds, toy_tokenizer, capsys):
    seen = Counter()
    for seed in seeds:
        policy, settings = schedule(toy_tokenizer, seed)
        in_slots, by_generate = (
            play(policy, toy_tokenizer, engine=engine, **settings) for engine in ("slots", "hf")
        )
        seen["rows"] += len(in_slots)
        seen["ties"] += assert_same(policy, in_slots, by_generate)
        seen["fewer slots"] += 0 < settings["max_num_seqs"] < len(in_slots)
        for t in in_slots:
            seen.update([t.stop_reason, f"{len(t.searches)} searches"])
            seen.update(rejected.reason for rejected in t.rejected_queries)
    assert capsys.readouterr().err == ""  # a fallback would compare `generate` with itself
    kinds = ("eos", "answer", "length", "rejected", "malformed", "limit", "2 searches")
    assert min(seen[kind] for kind in kinds) > 0 and seen["fewer slots"] > 10, seen
    # The number of ties depends on the machine's rounding. It must be small, because a row with a
    # tie is not compared.
    assert seen["ties"] < 0.01 * seen["rows"] or len(seeds) == 30


def scripted_policy(bpe, text: str) -> Policy:
    """Returns a policy whose first turn is `text`."""
    start = len(build_prompt(PROTOCOLS["ur2"], QA, bpe)) - 1
    script = dict(enumerate(encode(bpe, text)))

    def follow_script(logits, positions):
        for row, place in enumerate(positions[:, -1].tolist()):
            if place - start in script:
                logits[row, -1, script[place - start]] += 1000.0

    return change_logits(draw_policy(len(bpe) + 5, random.Random(1)), follow_script)


# ----------------------------------------------------------------------------------------- sampling


def test_slots_in_bf16_record_nearly_the_log_probs_of_the_policy(toy_tokenizer, monkeypatch):
    monkeypatch.setattr("policy.PRECISION", "bf16")
    policy = draw_policy(len(toy_tokenizer), random.Random(0))
    rows = play(policy, toy_tokenizer, [QA] * 8)
    batch = collate(rows, [0.0] * 8, 1)
    gap = policy(batch.tokens, mask=batch.response_mask) - batch.old_logprobs  # [B, T]
    assert 0 < gap.abs().max() < 0.1


@pytest.mark.parametrize("thin", [0, 8])  # with 8, more rows take the usual product
def test_thin_products_give_the_same_outputs_and_end_with_the_block(thin, monkeypatch):
    monkeypatch.setattr(slots, "LARGE", 600)
    monkeypatch.setattr(slots, "THIN", thin)
    sizes, product = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: sizes.append(a.numel()) or product(a, b))
    model = model_of("qwen2", **small(vocab_size=50)).eval()  # its keys have a bias
    for rows in (1, 4):
        tokens = torch.arange(rows * 4).view(rows, 4)
        with torch.no_grad():
            usual = model(tokens).logits
            sizes.clear()
            with thin_products(model):
                torch.testing.assert_close(model(tokens).logits, usual, atol=1e-5, rtol=1e-5)
        assert bool(sizes) == (rows * 4 <= thin) and all(size >= 600 for size in sizes)
    with pytest.raises(KeyboardInterrupt), thin_products(model):
        raise KeyboardInterrupt
    assert not any("forward" in vars(layer) for layer in model.modules())


@pytest.mark.parametrize("point, expected", [(0.0, 1), (1 - 2**-53, 2)])
def test_pick_never_draws_an_index_of_probability_zero(point, expected, monkeypatch):
    point = torch.tensor([[point]], dtype=torch.float64)
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: point)
    assert pick(torch.tensor([[0.0, 0.5, 0.5, 0.0]])).item() == expected


# ------------------------------------------------- prefilled tokens, decoding steps and searches


@pytest.fixture
def work(monkeypatch):
    """Records the work of engines: prefilled tokens, and the rows of each decoding step."""
    work = {"filled": 0, "steps": []}
    hidden = Engine.hidden
    logits = Engine.logits

    def count_tokens(self, rows, count, slots):
        work["filled"] += len(rows) * count
        return hidden(self, rows, count, slots)

    def count_rows(self, rows):
        work["filled"] -= len(rows)  # a decoding step
        work["steps"].append(len(rows))
        return logits(self, rows)

    monkeypatch.setattr(Engine, "hidden", count_tokens)
    monkeypatch.setattr(Engine, "logits", count_rows)
    return work


@pytest.mark.parametrize("slots", [0, 1, 3])
def test_a_prompt_is_computed_once_per_group_and_each_sampled_token_once(qwen2, bpe, work, slots):
    questions = [dataclasses.replace(QA, id=str(i), question="who " * i) for i in range(1, 4)]
    rows = play(qwen2, bpe, questions, group_size=4, max_num_seqs=slots)
    assert not any(t.searches or t.rejected_queries for t in rows)  # a random model does not search
    prompts = [t.prompt_ids for t in rows[::4]]
    shared = len(beginning(prompts))  # the instruction
    expected = shared + sum(len(ids) - 1 - shared for ids in prompts)
    # A prompt may also find the beginning of its question in a slot.
    assert expected - 3 <= work["filled"] <= expected
    assert sum(work["steps"]) == sum(len(t.response_ids) for t in rows)
    assert max(work["steps"]) == (slots or 12)


def test_inserted_tokens_are_computed_once_and_earlier_tokens_not_again(toy_tokenizer, work):
    searches = 0
    for seed in range(100, 130):
        policy, settings = schedule(toy_tokenizer, seed)
        work.update(filled=0, steps=[])
        # What several rows have in common would be computed once.
        settings |= {"group_size": 1, "questions": settings["questions"][:1]}
        rows = play(policy, toy_tokenizer, **settings)
        # After a turn the keys of all tokens but the last sampled one are cached. Before the next
        # turn this token and the inserted ones are prefilled, except the last of them.
        assert work["filled"] == sum(len(t.prompt_ids) - 1 + t.response_mask.count(0) for t in rows)
        assert sum(work["steps"]) == sum(sum(t.response_mask) for t in rows)
        searches += sum(len(t.searches) for t in rows)
    assert searches > 3


def test_searches_wait_until_half_of_the_running_rows_want_one(bpe):
    # The script goes by position: with two more tokens in the prompt, a row skips the first two
    # tokens of the script and searches two steps earlier.
    script = "word " * 20 + "{} Ana {}".format(*UR2.query_tags)
    search = library(0)
    texts = [QA.question + " a" * more for more in (0, 2, 4, 6)]
    questions = [dataclasses.replace(QA, question=text) for text in texts]
    play(scripted_policy(bpe, script), bpe, questions, search, max_turn_tokens=60, max_context=600)
    assert search.calls[0] == 2 and sum(search.calls) == 4


# ---------------------------------------------------------- unsupported models, and limited memory


def test_a_model_that_slots_do_not_support_gets_one_warning_and_plain_generate(bpe, capsys):
    policy = Policy(model_of("gpt2", **small(vocab_size=len(bpe) + 5))).eval()
    for _ in range(2):
        ids = [play(policy, bpe, engine=engine, max_context=300)[0].ids for engine in PLAYS]
        assert ids[0] == ids[1]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith('warning: engine "slots": gpt2 is not one of llama')


@pytest.mark.parametrize("rows_that_fit, slots", [(2.5, 2), (0.5, 1)])
def test_with_little_memory_there_are_fewer_slots_but_at_least_one(
    qwen2, monkeypatch, rows_that_fit, slots
):
    # A place takes 256 bytes: 2 layers, keys and values, 2 heads of 8 numbers in fp32. A slot of
    # 256 + 64 places and 16 bytes for each of 707 logits take 93,232 bytes. 0.8 of the free memory
    # is used, and two processes share it.
    free = SimpleNamespace(available=2 * rows_that_fit * 93_232 / 0.8)
    monkeypatch.setattr("engines.slots.psutil.virtual_memory", lambda: free)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert affordable(qwen2.language_model, 256) == slots
