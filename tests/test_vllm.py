"""scale/server.py: servers sample what slots sample, with the newest weights, and a server that is
broken is one line. Most tests ask a stub; those marked `vllm` ask the real server.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import processes
import pytest
import torch
from conftest import (
    ENVIRONMENT,
    ScriptedServer,
    closed_port,
    command_line,
    flags,
    message,
    model_of,
    rows_of,
    started,
    traces,
)
from processes import quiet_port, wait_until
from safetensors.torch import load_file
from stub_vllm import StubVLLM
from test_shards import in_two

import train
from plumbing.build import build_environment, build_search
from plumbing.files import checkpoints
from plumbing.questions import built_in_world, world_questions
from policy import Policy, collate, load_policy, save_policy
from prompts import PROTOCOLS
from rewards import REWARDS
from rollout import rollout
from scale import server
from scale.engine import generate_in_slots
from scale.server import Fleet, Turns, generate_on_server, to_serve
from settings import check_settings, parse, resolve
from sft import SFTSettings, train_sft
from world.toy import make_tokenizer, shape
from world.world import World

START = "start it by `python -m scale.server --model"
QUESTIONS = 24


# ------------------------------------------------------------------------------ models and servers
@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    """A model that searches now and then. Its head is tied to its embeddings, and its attention
    heads have 32 places, the fewest that vLLM serves on a CPU.
    """
    tokenizer = make_tokenizer(PROTOCOLS["ur2"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy = Policy(model_of("llama", **shape(len(tokenizer), 64, 2, 64)))
    questions = World(0).questions("train", "one_hop")
    examples = traces(tokenizer, questions[:8])
    train_sft(policy, lambda step: examples, SFTSettings(30, 1e-2))
    path = tmp_path_factory.mktemp("served") / "model"
    save_policy(policy, tokenizer, path)
    return str(path)


@pytest.fixture(scope="module")
def vllm(model, tmp_path_factory):
    """vLLM as (path, payload) -> (status, body). It takes a minute to start."""
    port, folder = quiet_port(), tmp_path_factory.mktemp("vllm")
    words, log = f"-m scale.server --model {model} --port {port}", folder / "log"
    with open(log, "w") as out:
        options = {"cwd": folder, "env": ENVIRONMENT, "stdout": out, "stderr": out}
        command = [sys.executable, *words.split()]
        process = subprocess.Popen(command, start_new_session=True, **options)

    def ask(path: str, payload) -> tuple[int, bytes]:
        with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=100)) as connection:
            method = "GET" if payload is None else "POST"
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, json.dumps(payload), headers)
            reply = connection.getresponse()
            return reply.status, reply.read()

    def answers() -> bool:
        with contextlib.suppress(OSError):
            return ask("/weight_info", None)[0] == 200
        return process.poll() is not None

    try:
        with patch.object(processes, "PATIENCE", 400):
            wait_until(answers, log=log)
        assert process.poll() is None, log.read_text()[-2000:]
        yield ask
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # the engine is another process of this group
        process.wait()


@pytest.fixture(params=["stub", pytest.param("vllm", marks=pytest.mark.vllm)])
def served(request, started, model):
    """A server without weights of a run. `faults` replace the answers of routes: (status, body), or
    a function of the path, the payload and the healthy server `behind`.
    """
    real = request.param == "vllm"
    behind = request.getfixturevalue("vllm") if real else StubVLLM(model)
    return script_faults(behind, started)


@pytest.fixture
def stub(started, model):
    return script_faults(StubVLLM(model), started)


def script_faults(behind, started) -> ScriptedServer:
    behind("/update_weight_version", {"new_version": "default"})

    def script(path, payload):
        fault = scripted.faults.get(path.rpartition("/")[2])
        if callable(fault):
            return fault(path, payload, behind)
        return fault or behind(path, payload)

    scripted = started(ScriptedServer(script))
    scripted.faults, scripted.behind = {}, behind
    return scripted


def fleet_of(model: str, base: str, **changes):
    """Returns (policy, environment) of a run on this server."""
    given = {"model": model, "engine": base, "group_size": 1, "timeout": 20.0}
    given |= {"max_turn_tokens": 24, "documents_per_search": 1, "document_tokens": 60}
    settings = resolve("ur2", 1, True, given | changes)
    policy, tokenizer = load_policy(model)
    search = build_search(settings, built_in_world(settings).documents)
    environment = build_environment(settings, tokenizer, search, policy)
    policy.fleet = Fleet(policy.eval(), environment)
    return policy, environment


def rows(policy, environment, count: int, generate=generate_on_server, temperature=0.0) -> list:
    """Returns rollouts of `count` questions, by default greedy."""
    questions, settings = world_questions(environment.settings, "dev"), environment.settings
    questions = questions[:: len(questions) // count][:count]
    environment.settings = replace(settings, temperature=temperature)
    sampled = rollout(policy, environment, questions, 0, generate)
    environment.settings = settings
    return sampled


def content(row) -> tuple:
    searches = [(search.query, search.text) for search in row.searches]
    return row.ids, row.response_mask, row.stop_reason, searches, len(row.rejected_queries)


def run(model, runs, engine: str, more: str = ""):
    """Trains two steps of stage 1, in which every second row is paid: where the rewards of all
    groups are equal there are no new weights. Returns the rows of its metrics.
    """
    words = flags(model, runs, f"--engine {engine} --max_turn_tokens 16 --timeout 20 {more}")
    settings, turns = replace(parse(words), eval_questions=2), itertools.count()
    with patch.dict(REWARDS, ur2_stage1=lambda *_: {"format": next(turns) % 2.0}):
        return rows_of(train.train(settings))


# ------------------------------------------------------------------------------------- as in slots
def check_rows_of_server(policy, environment, version: int) -> None:
    """Greedy rows on a server are those of slots, to the token, and its log-probs are the policy's,
    also at another temperature.
    """
    expected = rows(policy, environment, QUESTIONS, generate_in_slots)
    with to_serve(policy, version):
        found = rows(policy, environment, QUESTIONS)
        sampled = rows(policy, environment, QUESTIONS, temperature=0.7)
    assert [content(row) for row in found] == [content(row) for row in expected]
    assert sum(len(row.searches) for row in found) > QUESTIONS / 8
    batch = collate(sampled, [0.0] * QUESTIONS, 1)
    with torch.no_grad():
        scored = policy(batch.tokens, 0.7, batch.response_mask)  # [B, T]
    gaps = [((scored - batch.sampled_logprobs) * batch.response_mask).abs().max().item()]
    for ours, theirs in zip(expected, found, strict=True):
        gaps += [abs(p - q) for p, q in zip(ours.logprobs, theirs.logprobs, strict=True)]
    # The third version's logits are three times as large, and so are their rounding errors.
    assert max(gaps) < (1e-4 if version == 2 else 5e-5)


def test_greedy_rows_are_those_of_slots_also_with_new_and_with_sharp_weights(served, model):
    policy, environment = fleet_of(model, served.base)
    norm = policy.language_model.model.norm.weight
    for version in range(3):
        with torch.no_grad():
            for weight in policy.parameters():
                weight += (version == 1) * 0.003 * torch.randn_like(weight)
            norm *= 3 if version == 2 else 1
        check_rows_of_server(policy, environment, version)
    assert not list(Path("/dev/shm").glob("policy-of-*"))  # the weights are removed after reading


def test_every_step_samples_with_the_weights_of_the_last_one(served, model, tmp_path):
    records = run(model, tmp_path, served.base, "--steps 3 --eval_every 2")
    sent = [its["new_version"] for path, its in served.posts if path == "/update_weight_version"]
    assert [name[-2:] for name in sent] == [".0", ".1", ".2"]  # one also for the evaluation
    assert all(record["logprob_gap_max"] < 2e-5 for record in records)


# ----------------------------------------------------------------------------- weights that are old
NOT_READ = {"collective_rpc": (200, b'{"results": [null]}')}
LOST = {"completions": (500, b"no memory")}
PROBED = "a probe's log-probs are"
STALE = {  # name -> (faults, fragment of the message, flags)
    "weights that are not read": (NOT_READ, PROBED, ""),
    "keys that stay": ({"reset_prefix_cache": (200, b'{"success": true}')}, PROBED, ""),
    "keys in use": ({"reset_prefix_cache": (200, b'{"success": false}')}, "the keys of former", ""),
    "a server that is lost": (LOST, "HTTP 500 no memory", ""),
    "a server that is lost in an evaluation": (LOST, "HTTP 500 no memory", "--eval_every 1"),
}


@pytest.mark.parametrize("name", STALE)
def test_a_fault_after_a_step_is_one_line_and_the_step_is_saved(
    name, served, model, tmp_path, monkeypatch
):
    (faults, fragment, more), update = STALE[name], train.update

    @torch.no_grad()
    def update_and_break(state, batch):
        record = update(state, batch)
        served.faults |= faults
        for weight in state.policy.parameters():  # the rewards of a group may have been equal
            weight += 0.03 * torch.randn_like(weight)
        return record

    monkeypatch.setattr(train, "update", update_and_break)
    line = message(run, model, tmp_path, served.base, more)
    assert fragment in line and f"{START} {model} --max_context 256" in line
    assert [path.name for path in checkpoints(tmp_path / "t/stage1")] == ["checkpoint-000001"]
    served.faults, faults = {}, {}
    assert len(run(model, tmp_path, served.base, f"{more} --resume")) == 2


def test_the_first_weights_are_compared_by_checksums(served, model):
    policy, _ = fleet_of(model, served.base)
    served.faults |= NOT_READ
    with torch.no_grad():
        policy.language_model.model.norm.weight += 1e-6  # so little that no log-prob shows it
    assert "is not the policy's: is it another model" in message(policy.fleet.refresh, 0)


def test_a_tied_head_is_refused_since_a_reload_would_not_reach_it(stub, model):
    stub.behind.model = load_policy(model, frozen=True)[0].language_model
    policy, _ = fleet_of(model, stub.base)
    assert "its head is tied to the embeddings" in message(policy.fleet.refresh, 0)


def test_a_restarted_server_gets_the_weights_again_and_another_run_s_ends_this_one(served, model):
    policy, _ = fleet_of(model, served.base)
    for name, sent in (("", 1), ("", 1), ("default", 2)):
        if name:
            served.behind("/update_weight_version", {"new_version": name})
        policy.fleet.refresh(4)
        paths = [path for path, _ in served.posts]
        assert paths.count("/collective_rpc") == paths.count("/weight_checker") == sent
    served.behind("/update_weight_version", {"new_version": "theirs.4"})
    assert "another run has sent it weights (theirs.4)" in message(policy.fleet.refresh, 4)


def test_a_folder_without_room_is_one_line_and_keeps_nothing(model, stub, tmp_path, monkeypatch):
    policy, _ = fleet_of(model, stub.base, served=str(tmp_path))
    monkeypatch.setattr(server, "save_file", lambda *_: 1 / 0)  # any error of safetensors
    assert "another folder with --served" in message(policy.fleet.refresh, 0)
    assert not list(tmp_path.iterdir())


# -------------------------------------------------------------------------------- broken servers
EMPTY = (200, b'{"choices": [{"token_ids": [], "logprobs": {"token_logprobs": []}}]}')
BROKEN = {  # name -> (faults, fragment of the message)
    "another server": ({"weight_info": (404, b"Not Found")}, "HTTP 404 Not Found"),
    "another reply": ({"weight_info": (200, b"{}")}, "a reply without 'weight_version'"),
    "a long row": ({"completions": (400, b"too long")}, "HTTP 400 too long"),
    "half a reply": (
        {"completions": lambda path, payload, behind: (200, behind(path, payload)[1][:-20])},
        "not JSON, or half of one",
    ),
    "no tokens": ({"completions": EMPTY}, "an incomplete turn"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_server_is_one_line_before_the_first_step(name, stub, model, tmp_path):
    stub.faults, fragment = BROKEN[name]
    line = message(run, model, tmp_path, stub.base)
    assert fragment in line and START in line and not list(tmp_path.rglob("metrics.jsonl"))


def test_a_server_that_is_not_there_is_one_line(model, tmp_path, closed_port):
    line = message(run, model, tmp_path, f"http://127.0.0.1:{closed_port}")
    assert "Connection refused" in line and START in line


@pytest.mark.parametrize(
    "words, fragment",
    [
        ("--engine slotz", "not an address: give --engine slots"),
        ("--engine http://a:1,ftp://b", "'ftp://b': not an address"),
        ("--served x", "--served: only --engine http://... reads it"),
    ],
)
def test_flags_that_make_no_sense_are_refused(words, fragment):
    assert fragment in message(parse, words.split())


def test_training_refuses_top_p_and_an_evaluation_refuses_servers():
    settings = resolve("ur2", 1, True)
    assert "--top_p 0.9" in message(check_settings, replace(settings, top_p=0.9))
    settings = replace(settings, engine="http://a:1")
    assert "an evaluation samples in its own process" in message(check_settings, settings, False)


def test_a_turn_is_tried_three_times_but_not_on_a_server_that_was_restarted(stub, model):
    policy, environment = fleet_of(model, stub.base)
    policy.fleet.refresh(0)
    left = [503, 503]
    stub.faults["completions"] = lambda path, payload, behind: (
        (left.pop(), b"busy") if left else behind(path, payload)
    )
    assert rows(policy, environment, 1)[0].stop_reason and not left
    left.append(503)
    stub.behind("/update_weight_version", {"new_version": "default"})
    assert "HTTP 503 busy" in message(rows, policy, environment, 1)


def test_a_turn_is_cut_where_our_stop_rule_ends_it(model):
    policy, environment = fleet_of(model, "http://a:1")
    turns, end = Turns(policy.fleet, environment, {1}), environment.tokenizer.eos_token_id
    for sampled, kept in (([5, end, 6], ([5, end], "eos")), ([5, 6], ([5, 6], "length"))):
        stub = SimpleNamespace(sample=lambda body, its=sampled: (its, [-1.0] * len(its)))
        ids, logprobs, reason = turns.sample(stub, [3, 4], 9)
        assert (ids, reason) == kept and len(logprobs) == len(ids)


# ----------------------------------------------------------------- several servers and processes
@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_of_two_processes_one_sends_the_weights_to_two_servers_and_both_processes_sample(
    sharding, model, started, tmp_path
):
    servers = [script_faults(StubVLLM(model), started) for _ in range(2)]
    urls = ",".join(its.base for its in servers)
    in_two(sharding, run, model, tmp_path, urls)
    assert all(record["logprob_gap_max"] < 2e-5 for record in rows_of(tmp_path / "t/stage1"))
    for its in servers:
        paths = [path for path, _ in its.posts]
        assert paths.count("/collective_rpc") == 2 and paths.count("/v1/completions") > 2


# -------------------------------------------------------------------------------------- the command
def test_the_command_writes_an_untied_copy_and_becomes_a_server(
    model, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(server, "VENV", tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ["--model", model, "--port", "81", "--", "--tensor-parallel-size", "4"]
    assert "make vllm" in command_line(server.main, words, capsys)
    (tmp_path / "vllm").touch(0o755)
    became = []
    monkeypatch.setattr(os, "execve", lambda *given: became.extend(given))
    server.main(words)
    file, command, environment = became
    assert file == f"{tmp_path}/vllm" and environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert "--host 127.0.0.1 --port 81 --max-model-len 256" in " ".join(command)
    assert command[-2:] == ["--tensor-parallel-size", "4"]
    copied, state = Path(command[2]), load_policy(model, frozen=True)[0].language_model.state_dict()
    assert "lm_head.weight" in state
    for name, weight in state.items():
        assert torch.equal(load_file(copied / f"{name}.safetensors")[name], weight)
    assert json.loads((copied / "config.json").read_text())["tie_word_embeddings"] is False
