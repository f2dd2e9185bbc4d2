"""Tests engines/server.py: servers sample the same rows as slots, with the newest weights, and each
fault of a server is an error of one line. Tests use a stub; those marked `vllm` a real server.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from unittest.mock import patch

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
    rows_of,
    save_searching_model,
)
from processes import command, exit_code, in_two_processes, quiet_port, wait_until
from safetensors.torch import load_file
from stub_vllm import StubVLLM
from transformers import AutoModelForCausalLM, LlamaConfig

import train
from engines import server
from engines.server import Fleet, generate_on_server, to_serve
from engines.slots import generate_in_slots
from errors import InputError
from flags import check_settings, parse, resolve
from papers import PROTOCOLS, paper_of
from plumbing.build import build_environment, build_search
from plumbing.files import checkpoints
from plumbing.questions import built_in_world, world_questions
from policy import Policy, collate, load_policy, save_policy
from rewards import REWARDS
from rollout import StopRule, rollout
from world.toy import load_toy, shape

JSON, START = "application/json", "start it by `python -m engines.server --model"


# ------------------------------------------------------------------------------- models and servers
@pytest.fixture(scope="session")
def small(tmp_path_factory) -> str:
    """Returns the path of a model that sometimes searches. Its head is tied to its embeddings."""
    return save_searching_model(tmp_path_factory.mktemp("served") / "model")


def widened(model, to: int = 32):
    """Returns a model that computes the same function with a head size of 32, the smallest one that
    vLLM serves on a CPU; the built-in model has 16. Rotary pair i of 8 keeps its frequency
    θ^(−2i/16) = (θ²)^(−2i/32), and the other pairs are zero. q is multiplied by √2, because
    attention scores are divided by √32 instead of √16.
    """
    config = model.config
    heads = model.config.num_attention_heads
    size = config.hidden_size // heads
    places = torch.cat([torch.arange(size // 2), to // 2 + torch.arange(size // 2)])
    rows = (torch.arange(heads)[:, None] * to + places).flatten()
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps")
    theta = config.rope_parameters["rope_theta"] ** (to / size)
    wide = LlamaConfig(
        **{name: getattr(config, name) for name in fields},
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


@pytest.fixture(scope="session")
def wide(tmp_path_factory) -> str:
    """Returns the path of the built-in model after its warm-up, with wider heads."""
    arguments = (0, PROTOCOLS["ur2"], paper_of("ur2").warmed_up(""), str(ROOT / "runs"), "")
    policy, tokenizer = load_toy(*arguments)
    path = tmp_path_factory.mktemp("served") / "wide"
    save_policy(Policy(widened(policy.language_model)), tokenizer, path)
    return str(path)


@pytest.fixture
def model(request) -> str:
    """Returns the model that a test uses: the built-in model if the server is real."""
    real = request.node.get_closest_marker("vllm")
    return request.getfixturevalue("wide" if real else "small")


@pytest.fixture(scope="session")
def untied(small, tmp_path_factory) -> str:
    """Returns the path of a copy of the small model whose head is not tied."""
    tied, tokenizer = load_policy(small, frozen=True)
    state = tied.language_model.state_dict()
    tied.config.tie_word_embeddings = False
    copied = AutoModelForCausalLM.from_config(tied.config)
    copied.load_state_dict(state)
    folder = tmp_path_factory.mktemp("served") / "copy"
    save_policy(Policy(copied), tokenizer, folder)
    return str(folder)


@contextlib.contextmanager
def real_server(model: str, folder: Path):
    """Yields vLLM as a function (path, payload) -> (status, body) with the attributes `base` and
    `pid`. It takes a minute to start.
    """
    port = quiet_port()
    log = folder / "log"
    words = f"-m engines.server --model {model} --port {port}"
    with open(log, "w") as out:
        options = {"cwd": folder, "env": ENVIRONMENT, "stdout": out, "stderr": out}
        process = subprocess.Popen(
            [sys.executable, *words.split()], start_new_session=True, **options
        )

    def request(path: str, payload) -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", port, timeout=100)
        with contextlib.closing(connection):
            method, headers = "GET" if payload is None else "POST", {"Content-Type": JSON}
            connection.request(method, path, json.dumps(payload), headers)
            reply = connection.getresponse()
            return reply.status, reply.read()

    request.base, request.pid = f"http://127.0.0.1:{port}", process.pid

    def ready() -> bool:
        with contextlib.suppress(OSError):
            return request("/weight_info", None)[0] == 200
        return process.poll() is not None

    try:
        for _ in range(4):  # it may take longer on a busy machine
            with contextlib.suppress(pytest.fail.Exception):
                wait_until(ready, log=log)
        assert process.poll() is None and ready(), log.read_text()[-2000:]
        yield request
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # the engine is a second process of this group
        process.wait()


@pytest.fixture(scope="module")
def vllm(wide, tmp_path_factory):
    with real_server(wide, tmp_path_factory.mktemp("vllm")) as request:
        yield request


@pytest.fixture(params=["stub", pytest.param("vllm", marks=pytest.mark.vllm)])
def served(request, started):
    """Returns a function that starts a server whose weights have no version name yet. Its `faults`
    map routes to a fault: (status, body), or a function of path, payload and the healthy server.
    """
    real = request.param == "vllm"
    healthy = (
        request.getfixturevalue("vllm") if real else StubVLLM(request.getfixturevalue("untied"))
    )
    healthy("/update_weight_version", {"new_version": "default"})

    def start(**faults):
        def script(path, payload):
            fault = faults.get(path.partition("?")[0].rpartition("/")[2].removesuffix(".json"))
            if callable(fault):
                return fault(path, payload, healthy)
            return fault or healthy(path, payload)

        server = started(ScriptedServer(script))
        server.faults, server.healthy, server.questions = faults, healthy, 192 if real else 16
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
def searches_in_common(policy, environment, version: int, count: int, largest: float) -> int:
    """Checks that greedy rows of a server equal those of slots, token by token, and that its
    log-probs are the policy's, at another temperature too: no gap may reach `largest`. Returns the
    rows' number of searches.
    """
    expected = rows(policy, environment, count, generate_in_slots)
    with to_serve(policy, version):
        greedy = rows(policy, environment, count)
        sampled = rows(policy, environment, count, temperature=0.7)
    batch = collate(sampled, [0.0] * count, 1)
    with torch.no_grad():
        scored = policy(batch.tokens, 0.7, batch.response_mask)  # [B, T]
    gaps = (scored - batch.sampled_logprobs)[batch.response_mask > 0].abs()
    pairs = list(zip(expected, greedy, strict=True))
    same = [content(a) == content(b) for a, b in pairs]
    pairs = [zip(a.logprobs, b.logprobs, strict=False) for a, b in pairs]
    greedy_gap = max(abs(p - q) for row in pairs for p, q in row)
    searches = sum(len(row.searches) for row in greedy)
    print(f"{version}: {sum(same)}/{count} {searches} searches {greedy_gap:.1e} {gaps.mean():.1e}")
    assert all(same) and gaps.mean() < 5e-6 and max(greedy_gap, gaps.max()) < largest
    return searches


def test_greedy_rows_equal_those_of_slots_with_new_weights_and_with_large_logits(served, model):
    policy, environment = fleet_of(model, stub_or_real := served())
    policy.fleet.check()
    searches = []
    norm = policy.language_model.model.norm.weight
    for version in range(3):
        with torch.no_grad():
            for weight in policy.parameters():
                weight += (version == 1) * 0.003 * torch.randn_like(weight)
            norm *= 3 if version == 2 else 1  # logits three times as large
        # Logits of the third version are three times as large, and so are their rounding errors.
        count = stub_or_real.questions
        largest = 1e-4 if version == 2 else 5e-5
        searches.append(searches_in_common(policy, environment, version, count, largest))
    # The real server has the built-in model, which searches only after it has learned to.
    if stub_or_real.questions < 192:
        assert min(searches) > stub_or_real.questions / 8
    # The folder with the weights is removed after it was read.
    assert not list(Path("/dev/shm").glob("policy-of-*"))


def test_every_step_samples_with_the_weights_after_the_step_before(served, model, tmp_path):
    sampler = served()
    metrics = run(model, tmp_path, sampler.base, "--steps 3 --eval_every 2")
    sent = [body["new_version"] for path, body in sampler.posts if path == "/update_weight_version"]
    assert [name[-2:] for name in sent] == [
        ".0",
        ".1",
        ".2",
    ]  # the evaluation and the third step share the last
    assert all(row["logprob_gap_max"] < 2e-5 for row in metrics)


@pytest.mark.vllm
@pytest.mark.parametrize("served", ["vllm"], indirect=True)
def test_stage_1_learns_on_a_server_as_in_slots(served, model, tmp_path):
    rewards = []
    for name, engine in (("slots", "slots"), ("server", served().base)):
        options = {"model": model, "steps": 12, "output_dir": str(tmp_path), "engine": engine}
        options["run_name"] = name
        folder = train.train(check_settings(resolve("ur2", 1, True, options)))
        metrics = rows_of(folder)
        rewards.append(torch.tensor([row["reward"] for row in metrics]))
        print(name, rewards[-1].tolist())
    slots, on_server = rewards
    assert on_server[-3:].mean() > on_server[:3].mean() + 1
    assert (on_server[-3:].mean() - slots[-3:].mean()).abs() < 3 * slots[-6:].std() + 0.2
    assert max(row["logprob_gap"] for row in metrics) < 1e-5
    assert max(row["logprob_gap_max"] for row in metrics) < 5e-4
    policy, environment = fleet_of(str(checkpoints(folder)[-1]), served())
    # Rounding depends on which rows share a batch: of a trained policy's 3,000 tokens, one or two
    # have a gap of up to 8e-5, and the mean is 5e-7.
    assert searches_in_common(policy, environment, 0, 192, 5e-4) > 96


# ------------------------------------------------------------------ weights that are not the newest
# Replies of a server that claims to have read the weights, and to have done as it was asked.
READ, SUCCESS = (200, b'{"results": [null]}'), (200, b'{"success": true}')
UNCLEARED = lambda path, payload, healthy: healthy(f"{path}&clear_cache=false", payload)  # noqa: E731
WRONG_PROBE, WRONG_VERSION = "a probe's log-probs are", "does not have the weights"
STALE = {
    "weights are not read": ({"collective_rpc": READ}, WRONG_PROBE),
    "keys not dropped": ({"pause": UNCLEARED, "reset_prefix_cache": SUCCESS}, WRONG_PROBE),
    "keys in use": ({"reset_prefix_cache": (200, b'{"success": false}')}, "the keys of former"),
    "the version name is not set": ({"update_weight_version": SUCCESS}, WRONG_VERSION),
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
    def update(state, batch):
        record = original_update(state, batch)
        sampler.faults |= faults
        for weight in state.policy.parameters():  # the rewards of a group may have been equal
            weight += 0.03 * torch.randn_like(weight)
        return record

    monkeypatch.setattr(train, "update", update)
    options = "--eval_every 1" if "evaluation" in name else ""
    line = message(run, model, tmp_path, sampler.base, options)
    assert problem in line and f"{START} {model} --max_context 256" in line
    assert [path.name for path in checkpoints(tmp_path / "t/stage1")] == ["checkpoint-000001"]
    faults = sampler.faults.clear() or {}  # `update` injects none from here on
    assert len(run(model, tmp_path, sampler.base, f"{options} --resume")) == 2


def test_weights_are_sent_once_and_a_server_that_has_others_afterwards_is_an_error(served, model):
    policy, _ = fleet_of(model, sampler := served())
    for _ in range(2):
        with to_serve(policy, 4):
            pass
    assert [path for path, _ in sampler.posts].count("/collective_rpc") == 1
    for name in ("default", "theirs.4"):  # of a restarted server; of one that another run uses too
        with pytest.raises(InputError, match="was it restarted, or does"), to_serve(policy, 4):
            sampler.healthy("/update_weight_version", {"new_version": name})


# --------------------------------------------------------------------- faults before the first step
UNSUITABLE = {
    "another server": ({"models": (404, b"Not Found")}, "HTTP 404 Not Found"),
    "a short context": ({"models": (200, b'{"data": [{"max_model_len": 9}]}')}, "has 9 tokens"),
    "no vLLM": ({"models": (200, b'{"data": []}')}, "a reply without 0"),
}


@pytest.mark.parametrize("name", UNSUITABLE)
def test_an_unsuitable_server_is_one_line_before_the_first_step(name, served, model, tmp_path):
    faults, problem = UNSUITABLE[name]
    line = message(run, model, tmp_path, served(**faults).base)
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
    line = message(policy.fleet.refresh, 0)
    assert "is not callable" in line and "another folder with --served" in line
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


# ------------------------------------------------------------ servers that a test starts for itself
def train_and_kill(group: int, words: list) -> None:
    """Trains, and kills the server's processes at the first turn with new weights. The rewards
    differ, because equal rewards give no step and no new weights.
    """
    original_sample = Fleet.sample

    def sample(self, url, body):
        if "stop" in body and self.sent == 1:  # a turn, not a probe
            os.killpg(group, signal.SIGKILL)
        return original_sample(self, url, body)

    def rewards_by_index(trajectories, *_):
        count = len(trajectories)
        return [{"place": float(index)} for index in range(count)], [True] * count

    Fleet.sample, train.compute_rewards = sample, rewards_by_index
    train.main(words)


@pytest.mark.vllm
def test_a_killed_server_is_one_line_and_the_step_is_saved(wide, tmp_path):
    with real_server(wide, tmp_path) as vllm_server:
        arguments = flags(
            wide, tmp_path, f"--engine {vllm_server.base} --timeout 20 --save_every 2"
        )
        assert exit_code(command(tmp_path / "out", train_and_kill, vllm_server.pid, arguments)) == 2
    log = (tmp_path / "out").read_text()
    last_line = log.splitlines()[-1]
    assert last_line.startswith(f"error: --engine {vllm_server.base}: ") and START in last_line, log
    assert "Traceback" not in log
    assert [path.name for path in checkpoints(tmp_path / "t/stage1")] == ["checkpoint-000001"]


@pytest.mark.vllm
def test_new_weights_are_sent_and_the_seconds_per_gib_printed(wide, tmp_path):
    """Prints the seconds per GiB for writing and for reading half a GiB of fp32 weights."""
    tokenizer = load_policy(wide, frozen=True)[1]
    path = tmp_path / "large"
    model = model_of("llama", **shape(len(tokenizer), 2048, 16, 8192))
    save_policy(Policy(model), tokenizer, path)
    gib, temporary = model.num_parameters() / 2**28, tempfile.TemporaryDirectory(dir="/dev/shm")
    with temporary as folder, real_server(path, tmp_path) as vllm_server:
        fleet = fleet_of(wide, vllm_server)[0].fleet
        for version in "123":
            start = time.perf_counter()
            server.write_weights(model, Path(folder), torch.float32)
            written = time.perf_counter()
            fleet.reload(vllm_server.base, folder, version)
            read = time.perf_counter() - written
            print(f"{gib:.2f} GiB: {(written - start) / gib:.2f}, {read / gib:.2f} s/GiB")


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
    execve_arguments = []
    monkeypatch.setattr(os, "execve", lambda *values: execve_arguments.extend(values))
    server.main(arguments)
    program, command, environment = execve_arguments
    assert program == f"{tmp_path}/vllm" and environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert "--host 127.0.0.1 --port 81 --max-model-len 256" in " ".join(command)
    assert command[-2:] == ["--tensor-parallel-size", "4"]
    copied = Path(command[2])
    state = load_policy(model, frozen=True)[0].language_model.state_dict()
    for name, weight in state.items():
        assert torch.equal(load_file(copied / f"{name}.safetensors")[name], weight)
    assert "lm_head.weight" in state
    assert json.loads((copied / "config.json").read_text())["tie_word_embeddings"] is False
