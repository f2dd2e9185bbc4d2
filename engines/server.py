"""Samples with vLLM servers: separate processes that read the policy's weights from a folder.

    a rollout begins   Each server without the policy's present weights reads them from a folder of
                       safetensors and drops its cached keys. Checksums (at its first reading) and a
                       probe (at each reading: the log-probs of 16 sampled tokens) verify this.
    a turn             POST /v1/completions: a row's token ids -> the new ids and their log-probs
    between turns      one batch of searches for rows whose turn is over; other rows go on sampling

A row is a trajectory.

    python -m engines.server --model DIR                       starts a server with the right flags
    python -m engines.server --model DIR -- --tensor-parallel-size 4       adds flags of vLLM's own

Three errors would go unnoticed without checks. (1) A server has not read the weights. (2) Its
prefix cache still has keys that older weights computed. (3) It samples from another distribution,
because generation_config.json supplies sampling parameters that a request leaves out.

A reload may leave old weights in an output head that is tied to the embeddings, so a served model
must have an untied head (`python -m engines.server` unties it). The server's arithmetic differs
from the trainer's, so π_old's log-probs must be computed again.

If training has several processes, each sends its own share of the rows to the servers. The first
process writes the weights and lets the servers read them; all others help to gather sharded
weights, tensor by tensor. vLLM is never imported. Left out: SGLang, sending weights by NCCL or IPC,
a server on the trainer's own GPU.
"""

import contextlib
import hashlib
import math
import os
import queue
import re
import secrets
import shlex
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from errors import FlagParser, InputError, run_main
from policy import load_policy
from retrievers.net import Fault, fetch_json, retrying
from rollout import StopRule, context_of, encode, end_ids
from scale.lora import merged_weights
from scale.shards import cut, full

UNNAMED = "default"  # vLLM's name for the version of the weights that a server started with
RETRIES = 2  # how often `retrying` repeats a failed request, at most
# Limit of the requests that a process has under way, per server, if --max_num_seqs is 0. On a GPU
# with less than 70 GiB this is also vLLM's default batch size.
AT_ONCE = 256
SLOWEST = 1.0  # seconds allowed per new token; a busy server needs 0.02 to 0.2, without queueing
RELOADING = 600.0  # seconds allowed for a pause (it waits for running requests), reload or checksum
PROBE = 160  # limit of a probe's prompt tokens, above the size of a cache block (128 on a CPU)
SAMPLED = 16  # tokens that a probe samples
# Limits of a probe's mean |server's − trainer's log-prob|. In fp32 this mean is about 1e-6; in bf16
# it is larger, because a bf16 number has only 8 significant bits.
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.1}
ROUTES = (
    "completions tokenize pause resume collective_rpc reset_prefix_cache weight_info"
    " update_weight_version weight_checker"
)
# If a request lacks a sampling parameter, a server without `--generation-config vllm` takes it from
# generation_config.json. So each request has them all.
BODY = {
    **dict.fromkeys(("top_p", "repetition_penalty"), 1.0),
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty"), 0.0),
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "return_token_ids"), True),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), False),
    **{"add_special_tokens": False, "top_k": -1, "logprobs": 0},
}


# -------------------------------------------------------------------------------------- the servers
@dataclass(frozen=True)
class Server:
    """A vLLM server. Each method raises Fault if the server fails or a reply lacks a field."""

    url: str
    timeout: float  # seconds for a request, unless `ask` is given another timeout

    def ask(self, route: str, *keys, payload=None, timeout=None):
        """Sends a GET, or a POST of `payload`; returns reply[keys[0]][keys[1]]..."""
        reply = fetch_json(self.url + route, payload, timeout or self.timeout)
        try:
            for key in keys:
                reply = reply[key]
            return reply
        except (LookupError, TypeError):
            raise Fault(f"a reply without {key!r}") from None

    def version(self) -> str:
        """Returns the version name of the server's weights."""
        return retrying(lambda: str(self.ask("/weight_info", "weight_version")), RETRIES)

    def reload(self, folder: Path, version: str) -> None:
        """Makes the server read the weights in `folder`. Sampling is paused meanwhile, and all
        cached keys are dropped.
        """
        reading = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self.ask("/pause?mode=wait", payload={}, timeout=RELOADING)
        try:
            self.ask("/collective_rpc", payload=reading, timeout=RELOADING)
            retrying(self.forget, RETRIES)
            self.ask("/update_weight_version", payload={"new_version": version})
        finally:
            self.ask("/resume", payload={})
        if self.version() != version:
            raise Fault("it does not report the version of the weights that it was sent")

    def forget(self) -> None:
        """Empties the prefix cache. Just after a request has ended, the server may refuse this."""
        if self.ask("/reset_prefix_cache", "success", payload={}) is not True:
            raise Fault("it keeps the keys of former weights in its prefix cache")

    def check_weights(self, folder: Path) -> None:
        """Compares the server's checksums of norms, embeddings [V, H] and head [V, H] with those of
        the files in `folder`, and raises a Fault if one differs. Under tensor parallelism each rank
        has only a part of embeddings and head; then only norms are compared. vLLM pads V to a
        multiple of 64.
        """
        asked = {"payload": {"action": "checksum"}, "timeout": RELOADING}
        checksums = self.ask("/weight_checker", "checksums", **asked)
        if not isinstance(checksums, dict):
            raise Fault("its checksums are not a table")
        for file in folder.glob("*norm.*" if ":tp1:" in str(checksums) else "*[!j].weight.*"):
            weight = load_file(file)[file.stem]
            if weight.ndim == 2:
                weight = pad(weight, (0, 0, 0, -len(weight) % 64))
            ours = hashlib.sha256(weight.view(torch.uint8).numpy().data).hexdigest()
            theirs = {
                str(value) for name, value in checksums.items() if name.endswith(f":{file.stem}")
            }
            if theirs != {ours}:  # also true for a tied head, which has no checksum
                raise Fault(
                    f"its {file.stem} is not the policy's: is it another model, or is its head tied"
                    " to the embeddings?"
                )

    def sample(self, body: dict) -> tuple:
        """Returns the new ids and their log-probs. The reply's `text` is not used, because it may
        end inside a token.
        """
        limit = self.timeout + SLOWEST * body["max_tokens"]
        choice = self.ask("/v1/completions", "choices", 0, payload=BODY | body, timeout=limit)
        with contextlib.suppress(KeyError, TypeError):
            new = choice["token_ids"]
            logprobs = choice["logprobs"]["token_logprobs"]
            complete = 0 < len(new) == len(logprobs) and choice["finish_reason"] != "abort"
            if complete and math.isfinite(sum(logprobs + new)):
                return new, logprobs
        raise Fault("it returned an incomplete turn")


def start_thread(work: Callable, report: Callable) -> threading.Thread:
    """Calls `work()` in a thread and passes its result, or the error that it raises, to `report`.
    It is a daemon thread, so that the run can end while a server hangs.
    """

    def run() -> None:
        try:
            report(work())
        except Exception as error:
            report(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def start(results, owner, work, *arguments) -> None:
    """Runs work(*arguments) in a thread that puts (owner, result or exception) into `results`."""
    start_thread(lambda: work(*arguments), lambda result: results.put((owner, result)))


def run_in_first(work):
    """Runs `work()` in the first process only; all processes get its result or its InputError."""
    box = [None, None]
    if PartialState().is_main_process:
        try:
            box[0] = work()
        except InputError as error:
            box[1] = str(error)
    result, message = broadcast_object_list(box)
    if message:
        raise InputError(message)
    return result


class Fleet:
    """Holds the servers of a run and the version of the weights that were last sent to them."""

    def __init__(self, policy, environment):
        self.policy = policy
        self.settings = environment.settings
        self.run = secrets.token_hex(4)
        self.sent = ""
        urls = self.settings.engine.split(",")
        self.servers = [Server(url, self.settings.timeout) for url in urls]
        self.verified = set()  # servers whose checksums were compared since they started
        self.context = environment.max_context
        self.text = "".join([environment.protocol.instruction, *environment.protocol.tags])
        self.ids = encode(environment.tokenizer, self.text)

    def to_error(self, server: Server, problem) -> InputError:
        """Returns the error that ends a run, with the command that starts a suitable server."""
        return InputError(
            f"--engine {server.url}: {problem}: start it by `{COMMAND} --model "
            f"{self.settings.model or 'DIR'} --max_context {self.context}`"
        )

    def check(self) -> None:
        """Checks that each server has vLLM's routes, enough context and the policy's tokenizer."""
        question = {"prompt": self.text, "add_special_tokens": False}
        for server in self.servers:
            try:
                routes = str(server.ask("/openapi.json", "paths"))
                for name in ROUTES.split():
                    if f"/{name}'" not in routes:
                        raise Fault(
                            f"it has no route /{name}; use vLLM 0.32 or newer, with"
                            " VLLM_SERVER_DEV_MODE=1"
                        )
                context = server.ask("/v1/models", "data", 0, "max_model_len")
                if context < self.context:
                    raise Fault(f"its context has {context} tokens, fewer than --max_context")
                if server.ask("/tokenize", "tokens", payload=question) != self.ids:
                    raise Fault("its tokens are not those of the policy's tokenizer")
            except Fault as fault:
                raise self.to_error(server, fault) from None

    def run_on_each(self, servers: list, work) -> list:
        """Runs `work` on all servers at once and returns (server, work(server)) of those that
        succeed; the others are dropped.
        """
        results = queue.SimpleQueue()
        for server in servers:
            start(results, server, work, server)
        pairs = [results.get() for _ in servers]
        for server, result in pairs:
            if isinstance(result, Exception):
                self.drop(server, result)
        return [pair for pair in pairs if pair[0] in self.alive]

    def drop(self, server: Server, error: Exception) -> None:
        """Leaves a failed server out until the next rollout. The run ends if no server is left,
        if the first weights were not sent yet, or if `error` is not a Fault.
        """
        if not isinstance(error, Fault):
            raise error
        if server in self.alive:  # False if an earlier request to it has failed
            self.alive = [other for other in self.alive if other != server]
            if not (self.alive and self.sent):
                raise self.to_error(server, error)
            print(f"warning: {server.url} is left out of this rollout: {error}", file=sys.stderr)

    # ---------------------------------------------------------------------------------- the weights
    def find_stale(self, version: int) -> tuple:
        """Returns (the name of this version, servers that answer, those of them with other
        weights). A restarted server names its version UNNAMED. Once this run has sent weights, a
        server that has another run's weights is an error.
        """
        self.alive = self.servers
        current = f"{self.run}.{version}"
        versions = self.run_on_each(self.servers, Server.version)
        for server, name in versions:
            if self.sent and name != UNNAMED and not name.startswith(self.run):
                raise self.to_error(server, f"another run has sent it weights ({name})")
        self.verified -= {server for server, name in versions if name == UNNAMED}
        return current, self.alive, [server for server, name in versions if name != current]

    def refresh(self, version: int) -> None:
        """Sends the weights, named after `version`, to each server that has other weights, and then
        compares a probe's log-probs with the policy's. All processes must call this.
        """
        current, self.alive, stale = run_in_first(lambda: self.find_stale(version))
        if stale:
            dtype = torch.float32 if self.policy.device.type == "cpu" else torch.bfloat16
            folder = Path(
                self.settings.served, re.sub(r"\W+", "-", f"policy-of-{self.settings.engine}")
            ).absolute()
            prompt = (self.ids * PROBE)[: min(PROBE, self.context - SAMPLED)]
            probe = {"temperature": self.settings.temperature, "prompt": prompt}
            probe["max_tokens"] = SAMPLED

            def renew(server: Server) -> tuple:
                server.reload(folder, current)
                if server not in self.verified:
                    server.check_weights(folder)
                self.verified.add(server)
                # A failed probe is sent again: the first request after a reload may be too slow.
                return retrying(lambda: server.sample(probe), RETRIES)

            try:
                write_weights(self.policy.language_model, folder, dtype)
                probes, self.alive = run_in_first(
                    lambda: (self.run_on_each(stale, renew), self.alive)
                )
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            for server, (ids, logprobs) in probes:
                gap = self.logprob_gap(prompt + ids, logprobs)
                limit = LIMITS[dtype]
                if not gap <= limit:
                    raise self.to_error(
                        server,
                        f"a probe's log-probs are on average {gap:.2g} from the policy's, over"
                        f" {limit}: it has other weights, or samples from another distribution",
                    )
        self.sent = current

    @torch.no_grad()
    def logprob_gap(self, ids: list, logprobs: list) -> float:
        """Returns the mean |server's − policy's log-prob| of the last len(logprobs) `ids`. All
        processes must call this, because a forward pass gathers sharded weights from all.
        """
        tokens = torch.tensor([ids], device=self.policy.device)  # [1, L]
        scored = self.policy(tokens, self.settings.temperature)[0].cpu()  # [T]
        cut(self.policy)
        return (scored[-len(logprobs) :] - torch.tensor(logprobs)).abs().mean().item()


@torch.no_grad()
def write_weights(model, folder: Path, dtype: torch.dtype) -> None:
    """Writes the whole model, one file per tensor; a head that is tied to the embeddings gets a
    file too. Only the first process writes; the others help to gather sharded weights.
    """
    try:
        if main := PartialState().is_main_process:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        for name, weight in merged_weights(model):
            whole = full(weight.to(dtype))  # rounded first, so that `full` gathers fewer bytes
            if main:
                tensors = {name: whole.to("cpu", copy=True).contiguous()}
                save_file(tensors, folder / f"{name}.safetensors", {"format": "pt"})
    # On a full disk, save_file raises SafetensorError, not OSError. In a container, /dev/shm (the
    # default of --served) may have only 64 MB.
    except Exception as error:
        raise InputError(
            f"{folder}: weights cannot be written ({error}): make room, or in training name another"
            " folder with --served"
        ) from None


# ------------------------------------------------------------------------------------ the rollout
@contextlib.contextmanager
def to_serve(policy, version: int):
    """Sends the policy's weights to each server that has other weights, then yields the policy. All
    processes must enter this context together.
    """
    policy.fleet.refresh(version)
    yield policy


class Turns:
    """Runs the turns of a rollout: sends each row to a server and collects the replies."""

    def __init__(self, fleet: Fleet, environment, ends: set):
        settings = environment.settings
        tags = environment.protocol.stop_tags
        self.fleet = fleet
        self.environment = environment
        self.results = queue.SimpleQueue()
        self.rule = StopRule(environment.tokenizer, tags, ends)
        self.under_way = self.disagreed = 0
        self.prompts = {}  # prompt -> number; the number selects the server of the prompt's rows
        self.body = {"temperature": settings.temperature, "stop": list(tags)}
        self.body["stop_token_ids"] = sorted(ends)

    def start(self, row) -> None:
        """Starts a thread that requests the row's next turn."""
        first = PartialState().process_index
        alive = self.fleet.alive
        number = self.prompts.setdefault(tuple(row.prompt_ids), len(self.prompts) + first)
        server = alive[number % len(alive)]
        max_new_tokens = self.environment.turn_tokens_left(row)
        start(self.results, (row, server), self.sample, server, row.ids, max_new_tokens)
        self.under_way += 1

    def sample(self, server: Server, ids: list, max_new_tokens: int) -> tuple:
        """Returns a turn, cut by our stop rule: ids, log-probs and the stop reason. Trap: a
        server that restarts has the weights of its start again. So a failed request is repeated
        only if the server still reports the version of the weights that this run sent.
        """
        body = self.body | {"prompt": ids, "max_tokens": max_new_tokens}
        new, logprobs = retrying(
            lambda: server.sample(body),
            RETRIES,
            wait=lambda seconds: time.sleep(seconds) or server.version() != self.fleet.sent,
        )
        for count in range(1, len(new) + 1):
            if reason := self.rule.reason(new[:count], max_new_tokens):
                break
        self.disagreed += not reason or count < len(new)
        return new[:count], logprobs[:count], reason or "length"

    def finished(self) -> list:
        """Waits for at least one reply or failure and returns all rows whose turn is over, perhaps
        none. If a row's server has failed, the row is sent to another server.
        """
        results = [self.results.get()]
        rows = []
        while not self.results.empty():
            results.append(self.results.get())
        self.under_way -= len(results)
        for (row, server), turn in results:
            if isinstance(turn, Exception):
                self.fleet.drop(server, turn)
                self.start(row)
            else:
                self.environment.end_turn(row, *turn)
                rows.append(row)
        return rows


def generate_on_server(policy, environment, trajectories, progress=None) -> None:
    """Samples all trajectories on the servers of `policy.fleet`, and runs their searches."""
    turns = Turns(policy.fleet, environment, end_ids(policy, environment.tokenizer))
    waiting = deque(trajectories)
    limit = environment.settings.max_num_seqs
    while waiting or turns.under_way:
        while waiting and turns.under_way < (limit or AT_ONCE * len(policy.fleet.alive)):
            turns.start(waiting.popleft())
        rows = turns.finished()
        environment.run_searches([row for row in rows if not row.stop_reason])
        asking = [row for row in rows if not row.stop_reason]
        waiting.extendleft(asking)
        if progress:
            progress(len(rows) - len(asking))
    if turns.disagreed:
        print(
            f"warning: in {turns.disagreed} turns the server's stop rule and ours disagreed",
            file=sys.stderr,
        )


# -------------------------------------------------------------------------------------- the command
COMMAND = "python -m engines.server"
VENV = Path(__file__).resolve().parent.parent / ".venv-vllm/bin"
FLAGS = (
    "--generation-config vllm --logprobs-mode processed_logprobs --enable-prefix-caching"
    " --served-model-name policy --host 127.0.0.1"
)


def main(arguments=None) -> None:
    """Writes a copy of the model with an untied head, then replaces this process by the server."""
    ours, _, theirs = shlex.join(arguments or sys.argv[1:]).partition(" -- ")
    parser = FlagParser(COMMAND)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", default="8000")
    parser.add_argument("--max_context")
    options = parser.parse_args(shlex.split(ours))
    vllm = shutil.which("vllm") or shutil.which("vllm", path=VENV)
    if vllm is None:
        raise InputError("vllm is not installed: `make vllm` (for CPUs), or put it on the PATH")
    policy, tokenizer = load_policy(options.model, frozen=True)
    flags = f"{FLAGS} --port {options.port}"
    flags += f" --max-model-len {options.max_context or context_of(policy)}"
    # vLLM has its routes for new weights only in dev mode.
    dtype = torch.bfloat16
    variables = {"VLLM_SERVER_DEV_MODE": "1"}
    if not torch.cuda.is_available():
        dtype = torch.float32
        flags = f"{flags} --dtype float32 --enforce-eager"
        variables |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB
    name = re.sub(r"\W+", "-", f"{options.model}-{options.port}")
    folder = Path("runs/served", name).absolute()
    write_weights(policy.language_model, folder, dtype)
    policy.config.update({"tie_word_embeddings": False, "dtype": dtype})
    policy.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    command = [vllm, "serve", str(folder), *flags.split(), *shlex.split(theirs)]
    print(variables, shlex.join(command), flush=True)
    os.execve(vllm, command, os.environ | variables)


if __name__ == "__main__":
    run_main(main)
