"""engine.py: slots give what row by row gives, token for token; only the work differs."""

import dataclasses
import itertools
import random
from collections import Counter, deque
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from data import Document, Question, SearchResult
from errors import InputError
from policy import Policy, collate, without_dropout
from prompts import PROTOCOLS, build_prompt
from rollout import Environment, Limits, decode, encode, play_queue, rollout, warn_once
from scale.engine import Engine, affordable, attending_to_slots, obstacle, pick
from tests.conftest import small

FAMILIES = [
    (Qwen2Config, Qwen2ForCausalLM),
    (Qwen3Config, Qwen3ForCausalLM),
    (LlamaConfig, LlamaForCausalLM),
]
QA = Question("1", "In which country was Ana Bell born?", ["Norland"])
READ = dataclasses.replace(QA, references=(Document("a", "Ana Bell", "born in Kelmouth"),))
WORDS = "who was born in which country the town of city and a is year company people".split()


def random_policy(vocab_size: int, draw: random.Random) -> Policy:
    config, model = draw.choice(FAMILIES)
    sizes = small(
        num_hidden_layers=draw.choice([1, 2, 3]),
        num_key_value_heads=draw.choice([1, 2, 4]),
        head_dim=8,
        tie_word_embeddings=draw.random() < 0.3,
        max_position_embeddings=2048,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draw.randrange(2**31))
        return Policy(model(config(vocab_size=vocab_size, **sizes))).eval()


def make_talkative(policy: Policy, tokenizer, protocol, draw: random.Random) -> Policy:
    """Make it like its tags, each at some places of the text: else a random model would ask
    well-formed queries never.
    """
    begin, end = protocol.query_tags or protocol.answer_tags
    tags = [begin, end, *(protocol.answer_tags or ()), tokenizer.eos_token]
    rhythm = draw.randrange(5, 12)
    liked = [
        (tokenizer.convert_tokens_to_ids(begin), rhythm, 1),
        (tokenizer.convert_tokens_to_ids(end), rhythm, 4),
    ]
    liked += [(tokenizer.convert_tokens_to_ids(tag), draw.randrange(20, 60), 0) for tag in tags[2:]]

    def like(_model, _arguments, inputs, output):
        places = inputs["position_ids"][:, -output.logits.shape[1] :]  # [B, n]
        for token, every, at in liked:
            output.logits[..., token] += bonus * (places % every == at)
        return output

    bonus = draw.choice([0.0, 8.0, 15.0, 30.0])
    policy.language_model.register_forward_hook(like, with_kwargs=True)
    return policy


def library(seed: int):
    """A search whose answer depends on the query alone: documents of all lengths, failures,
    fallbacks, single texts.
    """

    def search(requests):
        results = []
        for request in requests:
            draw = random.Random(f"{seed} {request.query}")
            texts = [
                " ".join(draw.choices(WORDS, k=draw.randrange(1, 60)))
                for _ in range(draw.randrange(4))
            ]
            documents = [Document("d", "", text) for text in texts]
            kinds = [SearchResult(documents)] * 6 + [
                SearchResult(documents, fallback=True),
                SearchResult(error="down"),
            ]
            results.append(draw.choice(kinds))
        search.calls.append(len(requests))
        return results

    search.calls = []
    return search


def schedule(tokenizer, seed: int) -> tuple[Policy, dict]:
    """A random policy and random settings of `rollout`: prompts, groups, limits, and fewer slots
    than rows.
    """
    draw = random.Random(seed)
    protocol = PROTOCOLS[
        draw.choice(["ur2", "ur2_search", "r1_searcher", "r_search", "when_to_search", "arena"])
    ]
    texts = [
        " ".join(draw.choices(WORDS, k=draw.randrange(1, 30))) for _ in range(draw.randrange(1, 5))
    ]
    questions = [
        Question(str(i), text, ["x"], references=(Document("r", "", "town"),))
        for i, text in enumerate(texts)
    ]
    group_size = draw.randrange(1, 5)
    longest = max(len(build_prompt(protocol, question, tokenizer)) for question in questions)
    policy = make_talkative(random_policy(len(tokenizer) + 5, draw), tokenizer, protocol, draw)
    return policy, {
        "questions": questions,
        "search": library(seed),
        "protocol": protocol,
        "group_size": group_size,
        "max_searches": draw.choice([0, 1, 2, 3, 3]),
        "max_turn_tokens": draw.choice([1, 4, 9, 14, 25, 25]),
        "max_context": longest + 33 + draw.choice([0, 60, 150, 1000, 1000, 1000]),
        "notices": draw.random() < 0.8,
        "document_tokens": draw.choice([8, 30, 100]),
        "retrieval": [draw.random() < 0.9 for _ in questions],
        "batch_size": draw.randrange(len(questions) * group_size + 1),
    }


def without_seconds(trajectory):
    return [dataclasses.replace(search, seconds=0.0) for search in trajectory.searches]


def is_tie(policy, trajectory, other) -> bool:
    """Where the two part, did the policy like both tokens the same up to rounding?"""
    pairs = zip(trajectory.ids, other.ids, strict=False)
    place = next(i for i, (a, b) in enumerate(pairs) if a != b)
    ids, positions = torch.tensor([trajectory.ids[:place]]), torch.arange(place)[None]
    with torch.no_grad():
        logits = policy.language_model(input_ids=ids, position_ids=positions).logits[0, -1]
    return bool((logits[trajectory.ids[place]] - logits[other.ids[place]]).abs() < 1e-4)


def assert_same(policy, ours, theirs) -> int:
    """The same to the letter; rows that part at two tokens which are equally likely are let through
    and counted.
    """
    ties = 0
    for a, b in zip(ours, theirs, strict=True):
        if a.response_ids != b.response_ids and is_tie(policy, a, b):
            ties += 1
            continue
        assert a.prompt_ids == b.prompt_ids and a.response_ids == b.response_ids
        assert a.response_mask == b.response_mask and a.segments == b.segments
        assert without_seconds(a) == without_seconds(b) and a.refusals == b.refusals
        assert (a.stop_reason, a.question, a.retrieval) == (b.stop_reason, b.question, b.retrieval)
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
    return ties


def play_schedules(tokenizer, seeds) -> Counter:
    """Both engines on each schedule, compared; counts what happened in them."""
    seen = Counter()
    for seed in seeds:
        policy, settings = schedule(tokenizer, seed)
        theirs = rollout(policy, tokenizer, temperature=0.0, retries=0, **settings)
        ours = rollout(policy, tokenizer, temperature=0.0, retries=0, engine="slots", **settings)
        seen["ties"] += assert_same(policy, ours, theirs)
        seen["rows"] += len(ours)
        seen["fewer slots"] += 0 < settings["batch_size"] < len(ours)
        for t in ours:
            seen.update(
                [t.stop_reason, f"{len(t.searches)} searches", *(r.reason for r in t.refusals)]
            )
            seen["tokens"] += sum(t.response_mask)
    return seen


def test_greedy_rollouts_in_slots_are_those_of_generate_token_for_token(toy_tokenizer, capsys):
    seen = play_schedules(toy_tokenizer, range(30))
    assert capsys.readouterr().err == ""  # no fall back, which would compare generate with itself
    assert (
        min(
            seen[name]
            for name in ("eos", "answer", "length", "refused", "malformed", "limit", "2 searches")
        )
        > 0
    ), seen
    assert seen["fewer slots"] > 10


@pytest.mark.slow
def test_and_so_are_five_hundred_more(toy_tokenizer, capsys):
    seen = play_schedules(toy_tokenizer, range(1000, 1500))
    assert seen["ties"] <= 3 and seen["3 searches"] > 50 and capsys.readouterr().err == ""


def speaking_by_place(policy: Policy, script: dict[int, int]) -> Policy:
    """At place p of any text, this token; elsewhere what the model likes."""

    def speak(_model, _arguments, inputs, output):
        for row, place in enumerate(inputs["position_ids"][:, -1].tolist()):
            if place in script:
                output.logits[row, -1, script[place]] += 1000.0
        return output

    policy.language_model.register_forward_hook(speak, with_kwargs=True)
    return policy


def test_a_tag_that_ends_inside_a_token_ends_the_turn_in_slots_too(bpe):
    ur2 = PROTOCOLS["ur2"]
    asks = f"I look. {ur2.query_tags[0]} Ana {ur2.query_tags[1]}"
    said = encode(bpe, asks + "\n\n and on")
    cut = len(encode(bpe, asks + "\n\n"))
    assert decode(bpe, said[:cut]).endswith("|>\n\n") and decode(bpe, said[: cut - 1]).endswith(
        "_query"
    )  # "|>\n\n" is one
    start = len(build_prompt(ur2, QA, bpe)) - 1
    script = {start + i: token for i, token in enumerate(said)}
    script |= {start + 150: bpe.eos_token_id}
    policy = speaking_by_place(random_policy(len(bpe) + 5, random.Random(1)), script)
    both = [
        rollout(
            policy,
            bpe,
            QA,
            library(0),
            ur2,
            3,
            temperature=0.0,
            engine=engine,
            batch_size=2,
            max_turn_tokens=60,
        )
        for engine in ("hf", "slots")
    ]
    assert_same(policy, *both)
    for t in both[1]:
        assert t.response_ids[:cut] == said[:cut] and t.response_mask[: cut + 1] == [1] * cut + [0]
        assert [s.query for s in t.searches] == ["Ana"]


# ----------------------------------------------------------------------------------------- sampling


def sampled(policy, tokenizer, group_size=1, questions=QA, engine="slots", **settings):
    settings = {"protocol": "ur2", "seed": 0, "max_turn_tokens": 12, "max_context": 400, **settings}
    return rollout(
        policy, tokenizer, questions, library(0), group_size=group_size, engine=engine, **settings
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_recorded_log_probs_are_those_of_the_scoring_pass(request, bpe, family, temperature):
    policy = request.getfixturevalue(family)
    questions = [QA, dataclasses.replace(QA, id="2", question="Who?")]
    trajectories = sampled(
        policy, bpe, 4, questions, temperature=temperature, batch_size=5, max_turn_tokens=40
    )
    batch = collate(trajectories, [0.0] * 8, 4)
    with torch.no_grad():
        scored = policy(batch.tokens, temperature) * batch.response_mask
    assert batch.response_mask.sum() > 200
    assert torch.allclose(batch.old_logprobs, scored, atol=1e-4)


def chi_square(counts: Counter, expected: dict) -> tuple[float, int]:
    """(statistic, degrees of freedom); outcomes expected less than five times are taken
    together.
    """
    common = {outcome: e for outcome, e in expected.items() if e >= 5}
    rest = sum(expected.values()) - sum(common.values())
    statistic = sum((counts[outcome] - e) ** 2 / e for outcome, e in common.items())
    others = sum(counts.values()) - sum(counts[outcome] for outcome in common)
    return (
        (statistic + (others - rest) ** 2 / rest, len(common))
        if rest >= 5
        else (statistic, len(common) - 1)
    )


def two_tokens(policy, ids, temperature, top_p, tokenizer) -> dict:
    """Probability of every pair that can follow `ids`, by enumeration; after EOS there is no second
    token.
    """

    def after(texts):
        with torch.no_grad():
            logits = policy.language_model(input_ids=torch.tensor(texts)).logits[:, -1].double()
        p, order = (logits / temperature).softmax(-1).sort(descending=True)
        p[p.cumsum(-1) - p >= top_p] = 0  # the smallest set that holds top_p
        return torch.zeros_like(p).scatter(1, order, p / p.sum(-1, keepdim=True))

    first = after([ids])[0]
    second = after([[*ids, token] for token in range(len(first))])
    pairs = {
        (a, b): float(first[a] * second[a, b])
        for a in first.nonzero()[:, 0].tolist()
        for b in range(len(first))
    }
    ends = {(tokenizer.eos_token_id,): float(first[tokenizer.eos_token_id])}
    return {pair: p for pair, p in pairs.items() if pair[0] != tokenizer.eos_token_id} | ends


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.6, 1.0), (1.0, 0.8)])
def test_samples_have_the_models_own_distribution(toy_tokenizer, temperature, top_p):
    policy = random_policy(len(toy_tokenizer), random.Random(3))
    with torch.no_grad():  # a flatter head: more pairs have a chance
        policy.language_model.get_output_embeddings().weight *= 0.5
    count = 3000
    rows = sampled(
        policy,
        toy_tokenizer,
        count,
        protocol="arena",
        questions=[READ],
        max_turn_tokens=2,
        temperature=temperature,
        top_p=top_p,
        batch_size=500,
    )
    expected = two_tokens(policy, rows[0].prompt_ids, temperature, top_p, toy_tokenizer)
    counts = Counter(tuple(t.response_ids) for t in rows)
    assert all(expected[pair] > 0 for pair in counts)  # nothing outside the nucleus
    statistic, freedom = chi_square(counts, {pair: count * p for pair, p in expected.items()})
    assert (
        freedom > 5 and abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5
    )  # mean freedom, variance 2 freedom


def test_picking_takes_each_index_as_often_as_it_should_and_never_one_of_probability_zero():
    probabilities = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).repeat(10_000, 1)
    torch.manual_seed(0)
    picked = pick(probabilities)[:, 0].bincount(minlength=5).tolist()
    assert picked[0] == picked[2] == picked[4] == 0
    assert picked[1] == pytest.approx(2500, abs=217)  # five deviations of sqrt(10000 · 3/16) = 43.3


def test_a_point_at_either_end_falls_on_something_possible(monkeypatch):
    for point in (0.0, 1 - 2**-53):
        monkeypatch.setattr(
            torch,
            "rand",
            lambda *shape, point=point, **_: torch.full(shape, point, dtype=torch.float64),
        )
        assert pick(torch.tensor([[0.0, 0.5, 0.5, 0.0]])).item() == (1 if point == 0 else 2)


def test_a_seed_makes_a_rollout_reproducible_and_leaves_the_global_state(qwen2, bpe):
    state = torch.random.get_rng_state()
    one, two, other = (sampled(qwen2, bpe, 4, seed=seed, batch_size=3) for seed in (5, 5, 6))
    assert (
        [t.response_ids for t in one]
        == [t.response_ids for t in two]
        != [t.response_ids for t in other]
    )
    assert torch.equal(state, torch.random.get_rng_state())
    assert len({tuple(t.response_ids) for t in one}) == 4  # samples of one prompt differ


# ------------------------------------------------------------------------------------ the work done


@pytest.fixture
def work(monkeypatch):
    """What an engine computes: tokens caught up, rows per decoding step, the caches it made."""
    done = {"caught": 0, "steps": [], "caches": []}
    prefill, logits, init = Engine.prefill, Engine.logits, Engine.__init__

    def count_prefill(self, rows):
        done["caught"] += sum(row.missing for row in rows)
        return prefill(self, rows)

    def count_logits(self, tokens, *rest):
        done["steps"].append(len(tokens))
        return logits(self, tokens, *rest)

    def keep(self, *arguments, **settings):
        init(self, *arguments, **settings)
        done["caches"].append(self.cache)

    monkeypatch.setattr(Engine, "prefill", count_prefill)
    monkeypatch.setattr(Engine, "logits", count_logits)
    monkeypatch.setattr(Engine, "__init__", keep)
    return done


@pytest.mark.parametrize("slots", [0, 1, 2, 3, 5])
def test_a_prompt_is_computed_once_for_its_group_and_a_row_step_for_every_sampled_token(
    qwen2, bpe, work, slots
):
    questions = [dataclasses.replace(QA, id=str(i), question="who " * i) for i in range(1, 4)]
    rows = sampled(qwen2, bpe, 4, questions, batch_size=slots)
    assert not any(t.searches or t.refusals for t in rows)  # a random model asks nothing
    assert work["caught"] == sum(len(t.prompt_ids) - 1 for t in rows[::4])
    assert sum(work["steps"]) == sum(len(t.response_ids) for t in rows)
    assert max(work["steps"]) == (slots or 12)
    assert {cache.slots for cache in work["caches"]} == {slots or 12}


def test_inserted_text_is_computed_once_and_the_row_goes_on_behind_it(toy_tokenizer, work):
    searches = 0
    for seed in range(100, 130):
        policy, settings = schedule(toy_tokenizer, seed)
        work.update(caught=0, steps=[])
        settings["group_size"] = 1  # greedy samples of one prompt are one text, computed once
        rows = rollout(
            policy, toy_tokenizer, temperature=0.0, retries=0, engine="slots", **settings
        )
        # What stands behind a row's cached tokens is what it sampled last and what was inserted;
        # all but the last is caught up.
        assert work["caught"] == sum(len(t.prompt_ids) - 1 + t.response_mask.count(0) for t in rows)
        assert sum(work["steps"]) == sum(sum(t.response_mask) for t in rows)
        searches += sum(len(t.searches) for t in rows)
    assert searches > 5


def test_rows_that_ask_at_one_moment_are_answered_in_one_call(bpe):
    start = len(build_prompt("ur2", QA, bpe)) - 1
    asks = encode(bpe, "{} Ana {}".format(*PROTOCOLS["ur2"].query_tags))
    policy = speaking_by_place(
        random_policy(len(bpe) + 5, random.Random(1)), {start + i: t for i, t in enumerate(asks)}
    )
    search = library(0)
    rows = rollout(
        policy,
        bpe,
        QA,
        search,
        "ur2",
        6,
        engine="slots",
        max_turn_tokens=30,
        max_context=600,
        seed=1,
    )
    assert search.calls[0] == 6 and all(t.searches[0].query == "Ana" for t in rows)


def test_a_fast_asker_waits_until_as_many_wait_as_decode():
    # Four rows; row r asks after 2 (r + 1) tokens. Rows 0 and 1 are answered together when both
    # wait, not row 0 alone.
    engine, environment, asked = scripted_queue([[2, 3], [4, 3], [6, 3], [8, 3]])
    play_queue(engine, environment, deque(environment.rows), None)
    assert asked[0] == [0, 1] and sorted(itertools.chain(*asked)) == [0, 1, 2, 3]


class ScriptedEnvironment:
    """Turn lengths per row: all turns but the last end in a query."""

    def __init__(self, turns):
        self.rows = [
            SimpleNamespace(number=i, turns=list(t), ids=[1, 2, 3 + i], stop_reason="")
            for i, t in enumerate(turns)
        ]
        self.limits, self.asked = SimpleNamespace(turn_room=lambda row: row.turns.pop(0)), []

    def end_turn(self, row, ids, logprobs, reason):
        row.ids = row.ids + ids
        row.stop_reason = "" if row.turns else reason

    def answer(self, asking):
        self.asked += [sorted(row.number for row in asking)] if asking else []
        for row in asking:
            row.ids = [*row.ids, 4, 5, 6]


def scripted_queue(turns):
    environment = ScriptedEnvironment(turns)
    model = random_policy(40, random.Random(0)).language_model
    engine = Engine(
        model, len(turns), 64, set(), lambda turn, room: "length" if len(turn) >= room else None
    )
    return engine, environment, environment.asked


def test_a_recorded_step_is_replayed_with_what_it_is_given_and_gives_the_same_rows(
    qwen2, monkeypatch
):
    # No CUDA here: a recording that computes again, from the addresses, slots and width that were
    # recorded and from no others.
    shapes, outcomes, cache = [], [], None

    class Graph:
        def __init__(self, step):
            self.step, self.aim, self.result = (
                step,
                (cache.write, cache.read, cache.width),
                step().clone(),
            )
            shapes.append(tuple(self.result.shape[:1]) + (cache.width,))

        def pool(self):
            return None

        def replay(self):
            cache.write, cache.read, cache.width = self.aim
            self.result.copy_(self.step())

    def record(step, pool):
        graph = Graph(step)
        return graph, graph.result

    monkeypatch.setattr("scale.engine.record", record)
    for graphs in (False, True):
        engine = Engine(
            qwen2.language_model,
            5,
            600,
            set(),
            lambda turn, room: "length" if len(turn) >= room else None,
            temperature=0.0,
            graphs=graphs,
        )
        cache = engine.cache
        queue = deque(
            [
                ([1, 2, 3, 4], 3),
                ([1, 2, 3, 4], 6),
                ([7, 8], 90),
                ([9], 5),
                ([5, 6, 7], 20),
                ([3], 530),
                ([4, 4], 9),
            ]
        )
        outcomes.append(run_queue(engine, queue))
    assert outcomes[0] == outcomes[1]
    # five rows, and as they end 4, 2, 1; the longest passes place 512
    assert sorted(shapes) == [(1, 512), (1, 608), (2, 512), (4, 512), (5, 512)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_a_recorded_step_gives_the_plain_step_s_logits_and_rows():
    model = random_policy(40, random.Random(0)).language_model.to(
        "cuda"
    )  # fp32: bf16 logits are often tied
    outcomes, logits = [], []
    for graphs in (False, True):
        engine = Engine(
            model,
            5,
            600,
            set(),
            lambda turn, room: "length" if len(turn) >= room else None,
            0.0,
            graphs=graphs,
        )
        queue = deque(
            [
                ([1, 2, 3, 4], 3),
                ([1, 2, 3, 4], 6),
                ([7, 8], 90),
                ([9], 5),
                ([5, 6, 7], 20),
                ([3], 530),
                ([4, 4], 9),
            ]
        )
        outcomes.append(run_queue(engine, queue))
        with torch.no_grad(), attending_to_slots(model):
            last = torch.tensor([[5], [6]], device="cuda")
            logits.append(engine.logits(last, torch.zeros_like(last), 8).clone())
    assert outcomes[0] == outcomes[1]
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)


def run_queue(engine, queue) -> list:
    """[(ids, turn)] of each row, sorted."""
    done = []
    with torch.no_grad():
        while queue or engine.taken:
            while queue and engine.vacant:
                engine.add(None, *queue.popleft())
            for row in engine.decode():
                done.append((row.ids, row.turn))
                engine.release(row)
    return sorted(done)


def test_no_questions_are_no_work(qwen2, bpe):
    assert sampled(qwen2, bpe, questions=[]) == []


def test_progress_hears_of_every_row_that_ends(qwen2, bpe):
    heard = []
    sampled(qwen2, bpe, 7, batch_size=3, progress=heard.append)
    assert sum(heard) == 7 and all(heard)


def test_the_model_is_left_as_it_was_also_when_a_search_raises(qwen2, bpe):
    def broken(requests):
        raise InputError("the summariser is down")

    start = len(build_prompt("ur2", QA, bpe)) - 1
    asks = encode(bpe, "{} Ana {}".format(*PROTOCOLS["ur2"].query_tags))
    policy = speaking_by_place(
        random_policy(len(bpe) + 5, random.Random(1)), {start + i: t for i, t in enumerate(asks)}
    )
    policy.train()
    before = policy.config._attn_implementation
    with pytest.raises(InputError, match="summariser"):
        rollout(policy, bpe, QA, broken, "ur2", engine="slots")
    assert policy.language_model.training and policy.config._attn_implementation == before


# ----------------------------------------------------------------------- what it cannot be used for


def odd_policy(kind, vocab_size):
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=vocab_size,
            n_embd=32,
            n_layer=2,
            n_head=4,
            bos_token_id=None,
            eos_token_id=None,
        )
        return Policy(GPT2LMHeadModel(without_dropout(config))).eval()
    if kind == "mistral":
        return Policy(
            MistralForCausalLM(MistralConfig(vocab_size=vocab_size, **small(), sliding_window=16))
        ).eval()
    if kind == "dynamic":
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        return Policy(
            LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **small(), rope_parameters=rope))
        ).eval()
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    return Policy(Qwen2ForCausalLM(Qwen2Config(vocab_size=vocab_size, **small(), **window))).eval()


@pytest.mark.parametrize(
    "kind, why",
    [
        ("gpt2", "no rotary positions"),
        ("mistral", "a sliding window"),
        ("qwen2", "sliding_attention"),
        ("dynamic", "dynamic"),
    ],
)
def test_a_model_that_cannot_be_driven_is_named_once_and_plain_generate_takes_over(
    bpe, capsys, kind, why
):
    warn_once.cache_clear()
    policy = odd_policy(kind, len(bpe) + 5)
    both = [
        sampled(policy, bpe, 2, engine=engine, max_context=300)
        for engine in ("hf", "slots", "slots")
    ]
    assert (
        [t.response_ids for t in both[0]]
        == [t.response_ids for t in both[1]]
        == [t.response_ids for t in both[2]]
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith('warning: engine "slots": ') and why in line and "plain generate" in line


def test_a_family_nobody_named_is_tried_first(bpe, monkeypatch):
    mistral = Policy(
        MistralForCausalLM(MistralConfig(vocab_size=len(bpe) + 5, **small(), sliding_window=None))
    ).eval()
    assert obstacle(mistral.language_model) == ""
    assert_same(
        mistral,
        *(sampled(mistral, bpe, 3, temperature=0.0, engine=engine) for engine in ("slots", "hf")),
    )
    # and one whose positions are not what it is told is found out
    rotary = mistral.language_model.model.rotary_emb
    monkeypatch.setattr(
        rotary,
        "forward",
        lambda x, p, f=rotary.forward: f(x, torch.arange(p.shape[1])[None].expand_as(p)),
    )
    assert "other logits" in obstacle(mistral.language_model)


def test_too_little_memory_means_fewer_slots_and_for_not_even_one_generate(
    qwen2, bpe, work, monkeypatch, capsys
):
    warn_once.cache_clear()
    # [2 layers, keys and values, 2 heads of 8] in fp32 = 256 bytes a place; 256 + 64 places are 80
    # KiB, 2.5 of them 200 KiB
    monkeypatch.setattr("scale.engine.free_memory", lambda device: 200 * 1024 / 0.8)
    assert affordable(qwen2.language_model, 256) == 2
    sampled(qwen2, bpe, 4, max_context=256, max_turn_tokens=100)
    assert [cache.slots for cache in work["caches"]] == [2] and max(work["steps"]) == 2
    monkeypatch.setattr("scale.engine.free_memory", lambda device: 60 * 1024)
    rows = sampled(qwen2, bpe, 4, max_context=256, max_turn_tokens=100)
    assert (
        "no memory for one row of 256 tokens" in capsys.readouterr().err
        and len(work["caches"]) == 1
    )
    assert all(t.stop_reason for t in rows)


def test_memory_is_taken_as_slots_are_filled(qwen2):
    # 64 slots of 100,000 places: 256 bytes · 6.4 million = 1.6 GB if it were written
    engine = Engine(qwen2.language_model, 64, 100_000, set(), lambda turn, room: "length")
    before = resident()
    engine.add(None, [1, 2, 3], 1)
    with torch.no_grad():
        engine.decode()
    assert resident() - before < 200


def resident() -> float:
    """MiB of this process that are in memory."""
    pages = Path("/proc/self/statm")
    if not pages.exists():
        pytest.skip("no /proc here")
    return int(pages.read_text().split()[1]) * 4 / 1024


def test_an_engine_nobody_knows_is_refused(qwen2, bpe):
    with pytest.raises(InputError, match="'warp'"):
        sampled(qwen2, bpe, engine="warp")


def test_a_prompt_that_leaves_no_room_is_refused_as_ever(qwen2, bpe):
    with pytest.raises(InputError, match="kept for the answer"):
        sampled(qwen2, bpe, max_context=100)


def test_longest_bounds_every_trajectory(toy_tokenizer):
    for seed in range(2000, 2020):
        policy, settings = schedule(toy_tokenizer, seed)
        settings = {**settings, "max_context": None}
        names = ("max_searches", "max_turn_tokens", "document_tokens", "notices")
        limits = Limits(max_context=2048, **{name: settings[name] for name in names})
        environment = Environment(toy_tokenizer, settings["protocol"], None, limits, 0, 1.0)
        for t in rollout(
            policy, toy_tokenizer, temperature=0.0, retries=0, engine="slots", **settings
        ):
            assert len(t.ids) <= environment.longest(len(t.prompt_ids))
