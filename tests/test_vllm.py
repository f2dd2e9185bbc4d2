"""Tests engines/server.py: servers sample the same rows as slots, with the newest weights, and each
fault of a server is an error of one line. The server is a stub; test_real.py has a real one.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch
from urllib.request import urlopen

import pytest
import torch
from conftest import (
    ENVIRONMENT,
    ScriptedServer,
    command_line,
    flags,
    message,
    rows_of,
    save_searching_model,
)
from processes import in_two_processes, quiet_port, wait_until
from safetensors.torch import load_file
from stub_vllm import StubVLLM
from transformers import AutoModelForCausalLM

import train
from engines import server
from engines.server import Fleet, generate_on_server, to_serve
from engines.slots import generate_in_slots
from errors import InputError
from flags import parse, resolve
from plumbing.build import build_environment, build_search
from plumbing.files import checkpoints
from plumbing.questions import built_in_world, world_questions
from policy import Policy, collate, load_policy, save_policy
from rewards import REWARDS
from rollout import StopRule, rollout

START = "start it by `python -m engines.server --model"


# ------------------------------------------------------------------------------- models and servers
@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    """Returns the path of a model that sometimes searches. Its head is tied to its embeddings."""
    return save_searching_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="session")
def untied(model, tmp_path_factory) -> str:
    """Returns the path of a copy of the model whose head is not tied."""
    tied, tokenizer = load_policy(model, frozen=True)
    state = tied.language_model.state_dict()
    tied.config.tie_word_embeddings = False
    copied = AutoModelForCausalLM.from_config(tied.config)
    copied.load_state_dict(state)
    folder = tmp_path_factory.mktemp("served") / "copy"
    save_policy(Policy(copied), tokenizer, folder)
    return str(folder)


@contextlib.contextmanager
def real_server(model: str, folder: Path):
    """Yields the address of vLLM, as an object with the attribute `base`. It takes a minute to
    start.
    """
    port = quiet_port()
    log = folder / "log"
    words = f"-m engines.server --model {model} --port {port}"
    with open(log, "w") as out:
        options = {"cwd": folder, "env": ENVIRONMENT, "stdout": out, "stderr": out}
        process = subprocess.Popen(
            [sys.executable, *words.split()], start_new_session=True, **options
        )

    base = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        with contextlib.suppress(OSError):
            return urlopen(f"{base}/v1/models").status == 200
        return process.poll() is not None

    try:
        for _ in range(4):  # it may take longer on a busy machine
            with contextlib.suppress(pytest.fail.Exception):
                wait_until(ready, log=log)
        assert process.poll() is None and ready(), log.read_text()[-2000:]
        yield SimpleNamespace(base=base)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # the engine is a second process of this group
        process.wait()


@pytest.fixture
def served(untied, started):
    """Returns a function that starts a server. Its `faults` map routes to a fault: (status, body),
    or a function of path, payload and the healthy server.
    """
    healthy = StubVLLM(untied)

    def start(**faults):
        def script(path, payload):
            fault = faults.get(path.partition("?")[0].rpartition("/")[2].removesuffix(".json"))
            if callable(fault):
                return fault(path, payload, healthy)
            return fault or healthy(path, payload)

        server = started(ScriptedServer(script))
        server.faults = faults
        return server

    return start


def fleet_of(model: str, *servers, **changes):
    """Returns (policy, environment) of a run that samples on these servers."""
    settings = {
        "model": model,
        "engine": ",".join(server.base for server in servers),
        "group_size": 1,
    }
    settings |= {"max_turn_tokens": 24, "documents_per_search": 1, "document_tokens": 60}
    settings = resolve("ur2", 1, True, settings | {"timeout": 20.0} | changes)
    policy, tokenizer = load_policy(model)
    search = build_search(settings, built_in_world(settings).documents)
    environment = build_environment(settings, tokenizer, search, policy)
    policy.fleet = Fleet(policy.eval(), environment)
    return policy, environment


def rows(policy, environment, count: int, generate=generate_on_server, temperature=0.0) -> list:
    """Returns the rows of a rollout of `count` questions, greedy by default."""
    questions = world_questions(environment.settings, "dev")
    settings = environment.settings
    questions = questions[:: len(questions) // count][:count]
    environment.settings = replace(settings, temperature=temperature)
    sampled = rollout(policy, environment, questions, 0, generate)
    environment.settings = settings
    return sampled


def content(row) -> tuple:
    searches = [(search.query, search.text) for search in row.searches]
    return row.ids, row.response_mask, row.stop_reason, searches, len(row.rejected_queries)


def run(model, runs, engine: str, options: str = ""):
    """Trains two steps of stage 1 and returns the rows of its metrics. Every second row has reward
    1, because with equal rewards in all groups there would be no new weights.
    """
    arguments = flags(model, runs, f"--engine {engine} --max_turn_tokens 16 --timeout 20 {options}")
    settings = replace(parse(arguments), eval_questions=2)
    calls = itertools.count()
    with patch.dict(REWARDS, ur2_stage1=lambda *_: {"format": next(calls) % 2.0}):
        return rows_of(train.train(settings))


# ------------------------------------------------------------------------ the same rows as in slots
def gap(policy, row, temperature: float) -> float:
    """Returns the largest difference of a row's log-probs from those of the policy."""
    batch = collate([row], [0.0], 1)
    with torch.no_grad():
        scored = policy(batch.tokens, temperature, batch.response_mask)  # [1, T]
    return (scored - batch.sampled_logprobs).mul(batch.response_mask).abs().max().item()


@pytest.mark.parametrize("version", [0, 1])
def test_greedy_rows_equal_those_of_slots_with_the_newest_weights(version, served, model):
    policy, environment = fleet_of(model, served())
    policy.fleet.check()
    with torch.no_grad():
        for weight in policy.parameters():
            weight += version * 0.003 * torch.randn_like(weight)
    expected = rows(policy, environment, 16, generate_in_slots)
    with to_serve(policy, version):
        greedy = rows(policy, environment, 16)
        sampled = rows(policy, environment, 16, temperature=0.7)
    assert [content(row) for row in greedy] == [content(row) for row in expected]
    assert sum(len(row.searches) for row in greedy) > 2
    assert all(gap(policy, row, 1.0) < 5e-5 for row in greedy)
    assert all(gap(policy, row, 0.7) < 5e-5 for row in sampled)
    # The folder with the weights is removed after it was read.
    assert not list(Path("/dev/shm").glob("policy-of-*"))


def test_every_step_samples_with_the_weights_after_the_step_before(served, model, tmp_path):
    sampler = served()
    metrics = run(model, tmp_path, sampler.base, "--steps 3 --eval_every 2")
    # The evaluation and the third step share the last weights.
    assert [path for path, _ in sampler.posts].count("/collective_rpc") == 3
    assert all(row["logprob_gap_max"] < 2e-5 for row in metrics)


# ------------------------------------------------------------------ weights that are not the newest
# Replies of a server that claims to have read the weights, and to have done as it was asked.
READ, SUCCESS = (200, b'{"results": [null]}'), (200, b'{"success": true}')
UNCLEARED = lambda path, payload, healthy: healthy(f"{path}&clear_cache=false", payload)  # noqa: E731
WRONG_PROBE = "a probe's log-probs are"
STALE = {
    "weights are not read": ({"collective_rpc": READ}, WRONG_PROBE),
    "keys not dropped": ({"pause": UNCLEARED, "reset_prefix_cache": SUCCESS}, WRONG_PROBE),
    "keys in use": ({"reset_prefix_cache": (200, b'{"success": false}')}, "the keys of former"),
    "the server is lost": ({"completions": (500, b"no memory")}, "HTTP 500 no memory"),
}
STALE["the server is lost in an evaluation"] = STALE["the server is lost"]


@pytest.mark.slow
@pytest.mark.parametrize("name", STALE)
def test_a_fault_after_a_step_is_one_line_and_the_step_is_saved(
    name, served, model, tmp_path, monkeypatch
):
    sampler = served()
    faults, problem = STALE[name]
    original_update = train.update

    @torch.no_grad()
    def update(state, *arguments):
        record = original_update(state, *arguments)
        sampler.faults |= faults
        for weight in state.policy.parameters():  # the rewards of a group may have been equal
            weight += 0.03 * torch.randn_like(weight)
        return record

    monkeypatch.setattr(train, "update", update)
    options = "--eval_every 1" if "evaluation" in name else ""
    line = message(run, model, tmp_path, sampler.base, options)
    assert problem in line and f"{START} {model} -- --max-model-len 256" in line
    assert [path.name for path in checkpoints(tmp_path / "t/stage1")] == ["checkpoint-000001"]
    faults = sampler.faults.clear() or {}  # `update` injects none from here on
    assert len(run(model, tmp_path, sampler.base, f"{options} --resume")) == 2


def test_weights_are_sent_once_and_a_server_that_has_others_later_is_an_error(served, model):
    policy, _ = fleet_of(model, sampler := served())
    for _ in range(2):
        with to_serve(policy, 4):
            pass
    assert [path for path, _ in sampler.posts].count("/collective_rpc") == 1
    with torch.no_grad():  # as if the server had been restarted, or another run used it too
        for weight in policy.parameters():
            weight += 0.03 * torch.randn_like(weight)
    with pytest.raises(InputError, match=WRONG_PROBE), to_serve(policy, 4):
        pass


# --------------------------------------------------------------------- faults before the first step
UNSUITABLE = [
    ((404, b"Not Found"), "HTTP 404 Not Found"),  # another server
    ((200, b'{"data": [{"max_model_len": 9}]}'), "its context has 9 tokens"),
]


@pytest.mark.parametrize("models, problem", UNSUITABLE)
def test_an_unsuitable_server_is_one_line_before_the_first_step(
    models, problem, served, model, tmp_path
):
    line = message(run, model, tmp_path, served(models=models).base)
    assert problem in line and START in line and not list(tmp_path.rglob("metrics.jsonl"))


def test_a_port_without_a_server_is_one_line(model, tmp_path, closed_port):
    line = message(run, model, tmp_path, f"http://127.0.0.1:{closed_port}")
    assert "Connection refused" in line and START in line


def test_a_server_with_a_tied_head_is_refused_since_a_reload_would_not_change_it(model, started):
    policy, _ = fleet_of(model, started(ScriptedServer(StubVLLM(model))))
    assert "its head is tied to the embeddings" in message(policy.fleet.check)


def test_a_full_disk_is_one_line_and_leaves_no_files(model, served, tmp_path, monkeypatch):
    policy, _ = fleet_of(model, served(), served=str(tmp_path))
    monkeypatch.setattr(server, "save_file", None)  # any exception is reported as one line
    assert "another folder with --served" in message(policy.fleet.refresh, 0)
    assert not list(tmp_path.iterdir())


# -------------------------------------------------------------------------- faults during a rollout
HALF = lambda path, payload, healthy: (200, healthy(path, payload)[1][:-20])  # noqa: E731
SILENT = lambda *_: None  # noqa: E731


EMPTY = (200, b'{"choices": [{"token_ids": [], "logprobs": {"token_logprobs": []}}]}')
BROKEN = {"half a reply": HALF, "no tokens": EMPTY, "silence": SILENT}


@pytest.mark.parametrize("name", BROKEN)
def test_a_request_that_fails_ends_the_rollout_in_one_line(name, served, model, monkeypatch):
    monkeypatch.setattr(server, "SLOWEST", 0.01)
    policy, environment = fleet_of(model, broken := served(), served())
    policy.fleet.refresh(0)
    policy.fleet.settings = replace(policy.fleet.settings, timeout=1.0)
    broken.faults["completions"] = BROKEN[name]
    line = message(rows, policy, environment, 6)
    assert line.startswith(f"--engine {broken.base}: ") and START in line


def test_the_rows_of_two_servers_are_those_of_slots(served, model):
    policy, environment = fleet_of(model, *(samplers := [served(), served()]))
    with to_serve(policy, 0):
        actual = rows(policy, environment, 6)
    expected = rows(policy, environment, 6, generate_in_slots)
    assert [row.ids for row in actual] == [row.ids for row in expected]
    turns = [[path for path, body in s.posts if "stop" in (body or {})] for s in samplers]
    assert all(turns)  # both have sampled


def test_a_turn_is_cut_where_our_stop_rule_ends_it(toy_tokenizer):
    rule = StopRule(toy_tokenizer, {}, {7})
    assert server.cut_turn(rule, [5, 7, 6], [-1.0, -2.0, -3.0], 9) == ([5, 7], [-1.0, -2.0], "eos")
    assert server.cut_turn(rule, [5, 6], [-1.0, -2.0], 9) == ([5, 6], [-1.0, -2.0], "length")


# ------------------------------------------------------------------------------------ two processes
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}


@pytest.mark.parametrize("environment", [{}, FSDP])
def test_of_two_processes_one_sends_the_weights_and_both_sample(
    environment, model, untied, started, tmp_path
):
    sampler = started(ScriptedServer(StubVLLM(untied)))
    in_two_processes(run, model, tmp_path, sampler.base, environment=environment)
    assert all(row["logprob_gap_max"] < 2e-5 for row in rows_of(tmp_path / "t/stage1"))
    assert [path for path, _ in sampler.posts].count("/collective_rpc") == 2


# -------------------------------------------------------------------------------------- the command
def test_the_command_writes_an_untied_copy_and_becomes_a_server(
    model, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(server, "VENV", tmp_path)
    monkeypatch.chdir(tmp_path)
    arguments = ["--model", model, "--port", "81", "--", "--tensor-parallel-size", "4"]
    assert "make vllm" in command_line(server.main, arguments, capsys)
    (tmp_path / "vllm").touch(0o755)
    with patch.object(os, "execve") as execve:
        server.main(arguments)
    program, command, environment = execve.call_args.args
    assert program == f"{tmp_path}/vllm" and environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert "--host 127.0.0.1 --port 81" in " ".join(command)
    assert command[-2:] == ["--tensor-parallel-size", "4"]
    copied = Path(command[2])
    state = load_policy(model, frozen=True)[0].language_model.state_dict()
    for name, weight in state.items():
        assert torch.equal(load_file(copied / f"{name}.safetensors")[name], weight)
    assert "lm_head.weight" in state
    assert json.loads((copied / "config.json").read_text())["tie_word_embeddings"] is False
