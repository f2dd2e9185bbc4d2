"""scale/server.py: rows that servers sample are those of slots, with the newest weights; whatever
is wrong with a server is one line. With a stub server here, and marked `vllm` with the real one.
"""

import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import (
    ENVIRONMENT,
    ROOT,
    ScriptedServer,
    command_line,
    flags,
    message,
    model_of,
    nobody_listens,
    rows_of,
    settings_for,
    started,
    traces,
)
from processes import in_two_processes, quiet_port, wait_until
from safetensors.torch import load_file
from stub_vllm import Faulty, StubVLLM, forward
from transformers import AutoModelForCausalLM, LlamaConfig

import train
from errors import InputError
from papers import paper_of
from plumbing.build import build_environment, build_search, built_in_world, world_questions
from plumbing.files import checkpoints
from policy import Policy, collate, load_policy, load_tokenizer, save_policy
from prompts import PROTOCOLS
from rollout import rollout
from scale import server
from scale.engine import play_in_slots
from scale.server import Fleet, Turns, generate_on_server, to_serve
from settings import check_settings, parse, resolve
from sft import SFTSettings, train_sft
from world.toy import load_toy, make_tokenizer, shape
from world.world import World

FLAGS = (
    """--corpus= --max_turn_tokens 12 --group_size 2 --questions_per_step 2 --eval_questions 2"""
)
UP = {"seconds": 0.0}


# ------------------------------------------------------------------------------- models and servers
@pytest.fixture(scope="session")
def small_model(tmp_path_factory) -> str:
    """A model that searches now and then; its head is tied to its embeddings."""
    tokenizer = make_tokenizer(PROTOCOLS["ur2"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy = Policy(model_of("qwen2", **shape(len(tokenizer), 64, 2, 64)))
    examples = traces(tokenizer, World(0).questions("train", "one_hop")[:8])
    train_sft(policy, lambda step: examples, SFTSettings(30, 1e-2))
    path = tmp_path_factory.mktemp("served") / "model"
    save_policy(policy, tokenizer, path)
    return str(path)


@pytest.fixture(scope="session")
def untied(small_model, tmp_path_factory) -> str:
    """The same with a head of its own, as it is served."""
    policy, tokenizer = load_policy(small_model, frozen=True)
    config = copy.deepcopy(policy.config)
    config.tie_word_embeddings = False
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(policy.language_model.state_dict())
    folder = tmp_path_factory.mktemp("served") / "copy"
    save_policy(Policy(model), tokenizer, folder)
    return str(folder)


def widened(model, to: int = 32):
    """The same function with heads of 32 places, the fewest that vLLM serves on a CPU; the built-in
    ones have 16. Rotary place i of 8 keeps its frequency θ^(−2i/16) = (θ²)^(−2i/32), all others are
    zero, and q grows by √2: scores are divided by √32, and no more by √16.
    """
    config, heads = model.config, model.config.num_attention_heads
    size = config.hidden_size // heads
    places = torch.cat([torch.arange(size // 2), to // 2 + torch.arange(size // 2)])
    rows = (torch.arange(heads)[:, None] * to + places).flatten()
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps")
    theta = config.rope_parameters["rope_theta"] ** (to / size)
    wide = LlamaConfig(
        **{name: getattr(config, name) for name in kept},
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), heads),
        **{"head_dim": to, "attention_bias": True, "max_position_embeddings": 256},
        **{"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None},
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    state = AutoModelForCausalLM.from_config(wide).state_dict()
    for name, weight in model.state_dict().items():
        if "o_proj" in name:
            state[name].zero_()[:, rows] = weight
        elif "_proj" in name and "attn" in name:
            state[name].zero_()[rows] = weight * ((to / size) ** 0.5 if "q_proj" in name else 1)
        else:
            state[name] = weight
    for name in state:
        state[name] = torch.zeros_like(state[name]) if "o_proj.bias" in name else state[name]
    wide = AutoModelForCausalLM.from_config(wide)
    wide.load_state_dict(state)
    return wide


def test_a_model_with_wider_heads_is_the_same_function(toy_policy):
    tokens = torch.randint(0, 100, (2, 40))
    with torch.no_grad():
        ours, wide = toy_policy(tokens), Policy(widened(toy_policy.language_model)).eval()(tokens)
    torch.testing.assert_close(wide, ours, atol=2e-5, rtol=0)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    """(address, model) of a real server of the built-in world's model, started by scale.server."""
    folder, protocol = tmp_path_factory.mktemp("vllm"), PROTOCOLS["ur2"]
    policy, tokenizer = load_toy(0, protocol, paper_of("ur2").warmed_up(""), str(ROOT / "runs"), "")
    model, port = str(folder / "wide"), quiet_port()
    save_policy(Policy(widened(policy.language_model)), tokenizer, model)
    words = [sys.executable, "-m", "scale.server", "--model", model, "--port", str(port)]
    with open(folder / "log", "w") as log:
        of = {"cwd": folder, "env": ENVIRONMENT, "stdout": log, "stderr": log}
        process = subprocess.Popen(words, start_new_session=True, **of)
    try:
        there = lambda: forward(f"http://127.0.0.1:{port}")("/weight_info", None)[0] == 200
        for _ in range(3):  # it takes a minute, or three beside other work
            with contextlib.suppress(pytest.fail.Exception):
                wait_until(
                    lambda: process.poll() is not None or is_there(there), log=folder / "log"
                )
        assert process.poll() is None and is_there(there), (folder / "log").read_text()[-3000:]
        yield f"http://127.0.0.1:{port}", model
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the engine is another process of this group
        process.wait()


def is_there(ask) -> bool:
    with contextlib.suppress(OSError):
        return ask()
    return False


@pytest.fixture(params=["stub", pytest.param("vllm", marks=pytest.mark.vllm)])
def served(request):
    """(a fresh server without faults, the model that it serves, how many questions it is asked)."""
    if request.param == "vllm":
        url, model = request.getfixturevalue("vllm")
        forward(url)("/update_weight_version", {"new_version": "default"})
        return forward(url), model, 192
    names = ("untied", "small_model")
    copied, model = (request.getfixturevalue(name) for name in names)
    return StubVLLM(copied), model, 24


@pytest.fixture
def fast(monkeypatch):
    """What waits for a server waits for less."""
    monkeypatch.setattr(server, "SLOWEST", 0.05)
    kept = server.retrying
    quick = {"backoff": 0.01}
    monkeypatch.setattr(server, "retrying", lambda *given, **named: kept(*given, **quick, **named))


def run_flags(model, runs, engine: str, more: str = "") -> list[str]:
    return flags(model, runs, f"--engine {engine} --max_turn_tokens 16 --timeout 20 {more}")


def fleet_of(model: str, engine: str, **changes):
    """(policy, environment) of a run on these servers."""
    given = {"model": model, "engine": engine, "group_size": 1, "max_turn_tokens": 24}
    given |= {"documents_per_search": 1, "document_tokens": 60, "timeout": 20.0}
    settings = resolve("ur2", 1, True, given | changes)
    policy, tokenizer = load_policy(model)
    search = build_search(settings, built_in_world(settings).documents)
    environment = build_environment(settings, tokenizer, search)
    policy.fleet = Fleet(policy.eval(), environment)
    return policy, environment


def played(policy, environment, count: int, play, temperature=0.0) -> list:
    """Rollouts of questions of all kinds, the first `count`."""
    settings = environment.settings
    questions = world_questions(settings, "dev", -(-count // len(paper_of("ur2").world.kinds)))
    environment = copy.copy(environment)
    environment.settings = replace(settings, temperature=temperature)
    return rollout(policy, environment, questions[:count], 0, play)


def parts_of(row) -> tuple:
    searches = [(search.query, search.text) for search in row.searches]
    return row.ids, row.response_mask, row.stop_reason, searches, len(row.refusals)


def gap_of(policy, rows, temperature=1.0) -> float:
    """Largest |log-prob as sampled − the policy's|."""
    batch = collate(rows, [0.0] * len(rows), 1)
    with torch.no_grad():
        scored = policy(batch.tokens, temperature, batch.response_mask)
    return ((scored - batch.sampled_logprobs) * batch.response_mask).abs().max().item()


# -------------------------------------------------------------------------------------- they are as
def moved(policy, seed: int, size: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.parameters():
            weight += size * torch.randn(weight.shape, generator=draw)


def test_greedy_rows_are_those_of_slots_also_with_new_weights_and_with_sharp_ones(served, started):
    script, model, count = served
    asked = started(ScriptedServer(Faulty(script)))
    policy, environment = fleet_of(model, asked.base)
    policy.fleet.check()
    for version in range(3):
        if version == 1:
            moved(policy, 1, 0.003)
        if version == 2:  # logits three times as large: probabilities of almost 1
            with torch.no_grad():
                policy.language_model.model.norm.weight *= 3
        ours = played(policy, environment, count, play_in_slots)
        with to_serve(policy, version) as on_server:
            rows = played(on_server, environment, count, generate_on_server)
            sampled = played(on_server, environment, count, generate_on_server, 0.7)
        same = [parts_of(a) == parts_of(b) for a, b in zip(ours, rows, strict=True)]
        assert sum(same) == count, f"version {version}: {sum(same)} of {count} are the same"
        assert sum(len(row.searches) for row in rows) > count / 8
        pairs = [
            (a, b) for x, y in zip(ours, rows, strict=True) for a, b in zip(x.logprobs, y.logprobs)
        ]
        apart = max(abs(a - b) for a, b in pairs)
        gaps = gap_of(policy, rows), gap_of(policy, sampled, 0.7)
        searches = sum(len(row.searches) for row in rows)
        print(f"{version}: {sum(same)} of {count}, {searches} searches, {apart:.1e} apart, {gaps}")
        assert max(apart, *gaps) < 2e-5
    assert not list(Path("/dev/shm").glob("policy-of-*"))  # what was read is removed


def test_a_run_trains_with_weights_that_each_step_sends(served, started, tmp_path):
    script, model, _ = served
    asked = started(ScriptedServer(Faulty(script)))
    more = "--steps 3 --temperature 0.8 --eval_every 2 --eval_questions 2"
    train.main(run_flags(model, tmp_path, asked.base, more))
    versions = [
        given["new_version"] for path, given in asked.posts if path == "/update_weight_version"
    ]
    # The first has no step before it; the evaluation of step 1 needs what the step has learned.
    assert [name.rpartition(".")[2] for name in versions] == ["0", "1", "2"]
    rows = rows_of(tmp_path / "t" / "stage1")
    assert len(rows) == 3 and all(row["logprob_gap_max"] < 2e-5 for row in rows)
    assert script("/weight_info", None)[1] == json.dumps(
        {"weight_version": versions[-1]}
    ).encode() or (json.loads(script("/weight_info", None)[1])["weight_version"] == versions[-1])


# ------------------------------------------------------------------------ weights that are not ours
def unread(path, payload, server):
    return 200, b'{"results": [null]}'


def uncleared(path, payload, server):
    return server(path + "&clear_cache=false", payload)


def kept(path, payload, server):
    return 200, b'{"success": true}'


def unlucky(path, payload, server):
    return 200, b'{"success": false}'


STALE = {
    "weights that are not read": ({"collective_rpc": unread}, "a probe's log-probs are"),
    "keys that stay": ({"pause": uncleared, "reset_prefix_cache": kept}, "a probe's log-probs are"),
    "keys that it cannot drop": (
        {"reset_prefix_cache": unlucky},
        "keeps the keys of former weights",
    ),
    "a name that it does not take": ({"update_weight_version": kept}, "its weights are of version"),
}


@pytest.mark.parametrize("name", STALE)
def test_stale_weights_end_the_run_with_a_line_and_what_was_learned(
    name, served, started, tmp_path
):
    (script, model, _), (faults, said) = served, STALE[name]
    faulty = Faulty(script)
    asked = started(ScriptedServer(faulty))
    learned = []

    def log(run, record, *rest):
        learned.append(record)
        faulty.faults = faults

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Run, "log", log)
        line = message(train.train, parse(run_flags(model, tmp_path, asked.base, "--lr 1e-2")))
    assert said in line and f"python -m scale.server --model {model}" in line
    assert len(learned) == 1
    [saved] = checkpoints(tmp_path / "t" / "stage1")
    assert saved.name == "checkpoint-000001"


def test_the_first_weights_are_compared_by_checksums(served, started):
    script, model, _ = served
    asked = started(ScriptedServer(Faulty(script, collective_rpc=unread)))
    policy, _ = fleet_of(model, asked.base)
    moved(policy, 3, 1e-6)  # so little that no log-prob shows it
    assert "is not the policy's" in message(policy.fleet.refresh, 0)


def test_a_server_that_was_restarted_gets_the_weights_again_and_another_run_s_ends_this(
    served, started
):
    script, model, _ = served
    asked = started(ScriptedServer(faulty := Faulty(script)))
    policy, environment = fleet_of(model, asked.base)
    policy.fleet.refresh(4)
    policy.fleet.refresh(4)
    assert faulty.asked.count("collective_rpc") == 1
    script("/update_weight_version", {"new_version": "default"})
    policy.fleet.refresh(4)
    assert faulty.asked.count("collective_rpc") == faulty.asked.count("weight_checker") == 2
    script("/update_weight_version", {"new_version": "somebody.4"})
    assert "another run has given it its weights (somebody.4)" in message(policy.fleet.refresh, 4)


# ------------------------------------------------------------------------- wrong from the beginning
def without(name: str):
    def fault(path, payload, server):
        status, body = server(path, payload)
        return status, body.replace(name.encode(), b"/else")

    return fault


def shorter(path, payload, server):
    status, body = server(path, payload)
    return status, json.dumps({"data": [{"id": "policy", "max_model_len": 200}]}).encode()


def other_tokens(path, payload, server):
    return 200, b'{"tokens": [1, 2]}'


def not_there(path, payload, server):
    return 404, b'{"detail": "Not Found"}'


WRONG = {
    "another server": ({"openapi.json": not_there}, "HTTP 404"),
    "no dev mode": ({"openapi.json": without("/collective_rpc")}, "no route /collective_rpc"),
    "an old version": ({"openapi.json": without("/weight_info")}, "VLLM_SERVER_DEV_MODE=1"),
    "a short context": ({"models": shorter}, "its context has 200 tokens and rows here 256"),
    "another vocabulary": ({"tokenize": other_tokens}, "its tokens are not those"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_server_that_cannot_do_it_is_one_line_before_the_first_step(
    name, served, started, tmp_path
):
    (script, model, _), (faults, said) = served, WRONG[name]
    asked = started(ScriptedServer(Faulty(script, **faults)))
    line = message(train.train, parse(run_flags(model, tmp_path, asked.base)))
    assert said in line and "start it by `python -m scale.server --model" in line
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_nobody_there_is_one_line(small_model, tmp_path, closed_port):
    line = message(
        train.train, parse(run_flags(small_model, tmp_path, f"http://127.0.0.1:{closed_port}"))
    )
    assert "Connection refused" in line and "python -m scale.server" in line


def test_a_tied_head_is_refused_since_a_reload_would_not_reach_it(small_model, started):
    asked = started(ScriptedServer(StubVLLM(small_model)))
    policy, _ = fleet_of(small_model, asked.base)
    assert "its output head is tied to the embeddings" in message(policy.fleet.refresh, 0)


def test_a_full_memory_is_one_line_and_leaves_nothing(
    small_model, untied, started, tmp_path, monkeypatch
):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(server, "save_file", full)
    asked = started(ScriptedServer(StubVLLM(untied)))
    policy, _ = fleet_of(small_model, asked.base, served=str(tmp_path))
    line = message(policy.fleet.refresh, 0)
    assert "No space left on device" in line and "another folder with --served" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "given, said",
    [
        ("--engine slotz", "not an address: give --engine slots"),
        ("--engine http://me:secret@host:8000", "password"),
        ("--engine http://a:1,ftp://b", "'ftp://b': not an address"),
        ("--served x", "--served: only --engine http://... reads it"),
        ("--engine http://a:1 --sampling_copy bf16", "--sampling_copy: the servers"),
    ],
)
def test_flags_that_make_no_sense_are_refused(given, said):
    assert said in message(parse, given.split())
    assert "secret" not in message(parse, given.split())


def test_training_refuses_top_p_and_an_evaluation_servers():
    settings = replace(resolve("ur2", 1, True), top_p=0.9)
    assert "--top_p 0.9" in message(check_settings, settings)
    settings = replace(resolve("ur2", 1, True), engine="http://a:1")
    assert "an evaluation samples by itself" in message(check_settings, settings, training=False)


# ------------------------------------------------------------------------------ wrong in the middle
def refuses(path, payload, server):
    return 400, b'{"error": {"message": "too long"}}'


def halves(path, payload, server):
    return 200, server(path, payload)[1][:-20]


def empties(path, payload, server):
    return 200, b'{"choices": [{"token_ids": [], "logprobs": null, "finish_reason": "stop"}]}'


def infinite(path, payload, server):
    reply = json.loads(server(path, payload)[1])
    reply["choices"][0]["logprobs"]["token_logprobs"][0] = float("inf")
    return 200, json.dumps(reply).encode()


def aborts(path, payload, server):
    reply = json.loads(server(path, payload)[1])
    reply["choices"][0]["finish_reason"] = "abort"
    return 200, json.dumps(reply).encode()


def says_nothing(path, payload, server):
    return None


BROKEN = {"400": refuses, "half a reply": halves, "no tokens": empties, "infinite": infinite}
BROKEN |= {"an abort": aborts, "silence": says_nothing}


@pytest.mark.parametrize("name", BROKEN)
def test_the_rows_of_a_broken_server_go_to_the_others_and_the_last_one_s_end_is_a_line(
    name, served, started, fast, capsys
):
    script, model, _ = served
    broken, whole = Faulty(script), Faulty(script)
    urls = [started(ScriptedServer(faulty)).base for faulty in (broken, whole)]
    policy, environment = fleet_of(model, ",".join(urls), timeout=1.0, max_turn_tokens=8)
    policy.fleet.refresh(0)
    broken.faults["completions"] = BROKEN[name]
    rows = played(policy, environment, 8, generate_on_server)
    assert all(row.stop_reason for row in rows)
    expected = played(policy, environment, 8, play_in_slots)
    assert [row.ids for row in rows] == [row.ids for row in expected]
    err = capsys.readouterr().err
    assert err.count(f"warning: {urls[0]} is left out of this rollout") == 1
    # At the next rollout it is asked again, and the last one that fails ends the run.
    policy.fleet.refresh(0)
    assert len(policy.fleet.alive) == 2
    whole.faults["completions"] = BROKEN[name]
    assert "start it by `python -m scale.server" in message(
        played, policy, environment, 8, generate_on_server
    )


def test_what_fails_twice_is_tried_again_but_not_on_a_server_that_was_restarted(
    served, started, fast
):
    script, model, _ = served
    asked = started(ScriptedServer(faulty := Faulty(script)))
    policy, environment = fleet_of(model, asked.base)
    policy.fleet.refresh(0)
    left = [2]

    def twice(path, payload, server):
        left[0] -= 1
        return server(path, payload) if left[0] < 0 else (503, b"busy")

    faulty.faults["completions"] = twice
    [row] = played(policy, environment, 1, generate_on_server)
    assert row.stop_reason and left[0] < 0
    left[0] = 1
    script("/update_weight_version", {"new_version": "default"})
    assert "HTTP 503" in message(played, policy, environment, 1, generate_on_server)


def test_a_turn_that_goes_on_beyond_our_end_is_cut_there(served, started, capsys):
    script, model, _ = served

    def longer(path, payload, server):
        reply = json.loads(server(path, payload)[1])
        choice = reply["choices"][0]
        if choice["finish_reason"] == "stop" and len(choice["token_ids"]) < payload["max_tokens"]:
            choice["token_ids"] += [7]
            choice["logprobs"]["token_logprobs"] += [-9.0]
        return 200, json.dumps(reply).encode()

    asked = started(ScriptedServer(faulty := Faulty(script)))
    policy, environment = fleet_of(model, asked.base)
    policy.fleet.refresh(0)
    expected = played(policy, environment, 4, generate_on_server)
    faulty.faults["completions"] = longer
    rows = played(policy, environment, 4, generate_on_server)
    assert [parts_of(row) for row in rows] == [parts_of(row) for row in expected]
    assert "turns are cut by our stop rule alone" in capsys.readouterr().err


def test_a_server_that_is_lost_in_a_run_leaves_what_was_learned(served, started, fast, tmp_path):
    script, model, _ = served
    asked = started(ScriptedServer(faulty := Faulty(script)))
    kept_log = train.Run.log

    def log(run, *given):
        kept_log(run, *given)
        faulty.faults["completions"] = lambda *_: (500, b"out of memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Run, "log", log)
        line = message(train.train, parse(run_flags(model, tmp_path, asked.base)))
    assert "out of memory" in line
    [saved] = checkpoints(tmp_path / "t" / "stage1")
    assert saved.name == "checkpoint-000001"
    faulty.faults.clear()
    train.main(run_flags(model, tmp_path, asked.base, "--resume"))
    assert len(rows_of(tmp_path / "t" / "stage1")) == 2


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_stage_1_learns_on_a_server_as_in_slots(vllm, tmp_path):
    url, model = vllm
    rewards = {}
    for name, engine in (("slots", "slots"), ("server", url)):
        forward(url)("/update_weight_version", {"new_version": "default"})
        given = {"model": model, "steps": 12, "runs": str(tmp_path), "name": name, "engine": engine}
        folder = train.train(check_settings(resolve("ur2", 1, True, given)))
        rewards[name] = [row["reward"] for row in rows_of(folder)]
        print(name, [round(reward, 2) for reward in rewards[name]])
    gaps = [row["logprob_gap_max"] for row in rows_of(folder)]
    print("largest gaps", gaps)
    slots, ours = (torch.tensor(rewards[name]) for name in ("slots", "server"))
    assert ours[-3:].mean() > ours[:3].mean() + 0.5
    assert (ours[-3:].mean() - slots[-3:].mean()).abs() < 3 * slots[-6:].std() + 0.2
    assert max(gaps) < 2e-5


# ------------------------------------------------------------------------------------ two processes
def two_runs(arguments: list[str]) -> None:
    train.main(arguments)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_of_two_processes_one_gives_the_weights_and_both_play(
    sharding, small_model, untied, started, tmp_path
):
    asked = started(ScriptedServer(StubVLLM(untied)))
    fsdp = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
    }
    given = run_flags(small_model, tmp_path, asked.base, "--questions_per_step 4")
    in_two_processes(two_runs, given, environment=fsdp if sharding == "fsdp2" else {})
    rows = rows_of(tmp_path / "t" / "stage1")
    assert len(rows) == 2 and all(row["logprob_gap_max"] < 2e-5 for row in rows)
    reloads = [path for path, _ in asked.posts if path == "/collective_rpc"]
    assert len(reloads) == 2


# -------------------------------------------------------------------------------------- the command
def test_the_command_writes_an_untied_copy_and_becomes_a_server(
    small_model, tmp_path, monkeypatch, capsys
):
    fake = tmp_path / "vllm"
    fake.write_text("#!/bin/sh\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    became = []
    monkeypatch.setattr(os, "execve", lambda *given: became.append(given))
    server.main(["--model", small_model, "--port", "8123", "--", "--tensor-parallel-size", "4"])
    [(file, command, environment)] = became
    assert file == str(fake) and environment["VLLM_SERVER_DEV_MODE"] == "1"
    words = " ".join(command)
    assert "--host 127.0.0.1 --port 8123 --max-model-len 256" in words
    assert words.endswith("--tensor-parallel-size 4") and "processed_logprobs" in words
    copied, state = {}, load_policy(small_model, frozen=True)[0].language_model.state_dict()
    for file in Path(command[2]).glob("*.safetensors"):
        copied |= load_file(file)
    assert copied.keys() == state.keys() and "lm_head.weight" in copied
    assert all(torch.equal(its, state[name]) for name, its in copied.items())
    config = json.loads(Path(command[2], "config.json").read_text())
    assert config["tie_word_embeddings"] is False and config["dtype"] == "float32"
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert load_tokenizer(command[2]).get_vocab() == load_tokenizer(small_model).get_vocab()
    assert command[2] in capsys.readouterr().out


def test_without_vllm_the_command_says_how_to_get_it(small_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(server, "OWN", tmp_path)
    assert "make vllm" in command_line(server.main, ["--model", small_model], capsys)
