"""engine.py: slots give what row by row gives, token for token; only the work differs."""

import dataclasses
import random
from collections import Counter

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from data import Document, InputError, Question, SearchResult
from policy import Policy, collate
from prompts import PROTOCOLS, build_prompt
from rollout import rollout
from tests.conftest import small

FAMILIES = [(Qwen2Config, Qwen2ForCausalLM), (Qwen3Config, Qwen3ForCausalLM), (LlamaConfig, LlamaForCausalLM)]
WORDS = "who was born in which country the town of city and a is year company people".split()


def random_policy(vocab_size: int, draw: random.Random) -> Policy:
    config, model = draw.choice(FAMILIES)
    sizes = small(num_hidden_layers=draw.choice([1, 2, 3]), num_key_value_heads=draw.choice([1, 2, 4]), head_dim=8,
                  tie_word_embeddings=draw.random() < 0.3, max_position_embeddings=2048)  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draw.randrange(2**31))
        return Policy(model(config(vocab_size=vocab_size, **sizes))).eval()


def make_talkative(policy: Policy, tokenizer, protocol, draw: random.Random) -> Policy:
    """Make it like its tags, each at some places of the text: else a random model would ask well-formed queries never."""
    begin, end = protocol.query_tags or protocol.answer_tags
    tags = [begin, end, *(protocol.answer_tags or ()), tokenizer.eos_token]
    rhythm = draw.randrange(5, 12)
    liked = [(tokenizer.convert_tokens_to_ids(begin), rhythm, 1), (tokenizer.convert_tokens_to_ids(end), rhythm, 4)]
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
    """A search whose answer depends on the query alone: documents of all lengths, failures, fallbacks, single texts."""
    def search(requests):
        results = []
        for request in requests:
            draw = random.Random(f"{seed} {request.query}")
            documents = [Document("d", "", " ".join(draw.choices(WORDS, k=draw.randrange(1, 60)))) for _ in range(draw.randrange(4))]
            kinds = [SearchResult(documents)] * 6 + [SearchResult(documents, fallback=True), SearchResult(error="down")]
            results.append(draw.choice(kinds))
        search.calls.append(len(requests))
        return results

    search.calls = []
    return search


def schedule(tokenizer, seed: int) -> tuple[Policy, dict]:
    """A random policy and random settings of `rollout`: prompts, groups, limits, and fewer slots than rows."""
    draw = random.Random(seed)
    protocol = PROTOCOLS[draw.choice(["ur2", "ur2_search", "r1_searcher", "r_search", "when_to_search", "arena"])]
    lengths = [draw.randrange(1, 30) for _ in range(draw.randrange(1, 5))]
    document = Document("r", "", "town")
    questions = [Question(str(i), " ".join(draw.choices(WORDS, k=n)), ["x"], references=(document,)) for i, n in enumerate(lengths)]
    group_size = draw.randrange(1, 5)
    longest = max(len(build_prompt(protocol, question, tokenizer)) for question in questions)
    policy = make_talkative(random_policy(len(tokenizer) + 5, draw), tokenizer, protocol, draw)
    return policy, {
        "questions": questions, "search": library(seed), "protocol": protocol, "group_size": group_size,
        "max_searches": draw.choice([0, 1, 2, 3, 3]), "max_turn_tokens": draw.choice([1, 4, 9, 14, 25, 25]), "notices": draw.random() < 0.8,
        "document_tokens": draw.choice([8, 30, 100]), "max_context": longest + 33 + draw.choice([0, 60, 150, 1000, 1000, 1000]),
        "retrieval": [draw.random() < 0.9 for _ in questions], "batch_size": draw.randrange(len(questions) * group_size + 1),
    }  # fmt: skip


def without_seconds(trajectory):
    return [dataclasses.replace(search, seconds=0.0) for search in trajectory.searches]


def is_tie(policy, trajectory, other) -> bool:
    """Where the two part, did the policy like both tokens the same up to rounding?"""
    pairs = zip(trajectory.ids, other.ids, strict=False)
    place = next(i for i, (a, b) in enumerate(pairs) if a != b)
    with torch.no_grad():
        logits = policy.language_model(input_ids=torch.tensor([trajectory.ids[:place]]), position_ids=torch.arange(place)[None]).logits[0, -1]
    return bool((logits[trajectory.ids[place]] - logits[other.ids[place]]).abs() < 1e-4)


def assert_same(policy, ours, theirs) -> None:
    for a, b in zip(ours, theirs, strict=True):
        if a.response_ids != b.response_ids and is_tie(policy, a, b):
            continue
        assert a.prompt_ids == b.prompt_ids and a.response_ids == b.response_ids
        assert a.response_mask == b.response_mask and a.segments == b.segments
        assert without_seconds(a) == without_seconds(b) and a.refusals == b.refusals
        assert (a.stop_reason, a.question, a.retrieval) == (b.stop_reason, b.question, b.retrieval)
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def play_schedules(tokenizer, seeds) -> Counter:
    """Both engines on each schedule, compared; counts what happened in them."""
    seen = Counter()
    for seed in seeds:
        policy, settings = schedule(tokenizer, seed)
        theirs = rollout(policy, tokenizer, temperature=0.0, retries=0, **settings)
        ours = rollout(policy, tokenizer, temperature=0.0, retries=0, engine="slots", **settings)
        assert_same(policy, ours, theirs)
        seen["rows"] += len(ours)
        seen["fewer slots"] += 0 < settings["batch_size"] < len(ours)
        for t in ours:
            seen.update([t.stop_reason, f"{len(t.searches)} searches", *(r.reason for r in t.refusals)])
            seen["tokens"] += sum(t.response_mask)
    return seen


def test_greedy_rollouts_in_slots_are_those_of_generate_token_for_token(toy_tokenizer, capsys):
    seen = play_schedules(toy_tokenizer, range(40))
    assert capsys.readouterr().err == ""  # no fall back, which would compare generate with itself
    assert min(seen[name] for name in ("eos", "answer", "length", "refused", "malformed", "limit", "2 searches")) > 0, seen
    assert seen["fewer slots"] > 10


@pytest.mark.slow
def test_and_so_are_five_hundred_more(toy_tokenizer):
    print(play_schedules(toy_tokenizer, range(1000, 1500)))
