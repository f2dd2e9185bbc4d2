"""vLLM as the sampler: other processes, on GPUs of their own, sample with the policy's weights.

    a rollout begins   are the weights newer than those of the servers? Then a folder of safetensors
                       is written, every server reads it, drops the keys of the former weights, and
                       shows that it did: by checksums (the first time) and a probe row (each time)
    a turn             POST /v1/completions: all ids of a row -> the new ids and their log-probs
    between turns      one search for all rows that wait, while the others are sampled

    python -m scale.server --model DIR                          starts a server as it is needed here
    python -m scale.server --model DIR -- --tensor-parallel-size 4           with vLLM's own flags

Three things can be wrong without a sign, so they are looked at: weights that were not read, keys of
former weights in the server's prefix cache, and a distribution that is not the trained one, because
generation_config.json fills what a request leaves open. A reload writes nothing into an output head
that is tied to the embeddings, so the served copy is always untied. The samples are those of the
server's arithmetic, not of the trainer's: π_old must be scored again.

Of several processes each plays its share of the rows, and the first gives the servers their
weights: FSDP puts them together in all processes, tensor by tensor. vLLM is never imported. Left
out: SGLang, weights by NCCL or IPC, a server that sleeps on the trainer's own GPU.
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
import time
from collections import deque
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
from rollout import StopRule, context_of, encode, end_ids, start_thread
from scale.lora import merged_weights
from scale.shards import cut, full

UNNAMED = "default"  # the version of weights that nobody has named: those of a server's start
RETRIES = 2  # of a request that failed
AT_ONCE = 256  # requests of a process to a server: by default vLLM batches as many
SLOWEST = 1.0  # seconds for a token; a full server takes 0.02 to 0.2, but rows wait for a place
RELOADING = 600.0  # seconds for running requests to end, or for the weights to be read
PROBE = 160  # tokens of a probe's prompt: more than a block of a CPU's cache, which has 128
SAMPLED = 16  # tokens that a probe samples
# Mean |log-prob of the server − of the trainer| of a probe: in fp32 it is 1e-6, bf16 has 8 bits.
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.1}
ROUTES = (
    "completions tokenize pause resume collective_rpc reset_prefix_cache weight_info"
    " update_weight_version weight_checker"
)
# A request says all of it: what it leaves open comes from the checkpoint's generation_config.json.
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
    """One address. Each method raises Fault if the server is ill, or is none of vLLM's."""

    url: str
    timeout: float  # seconds for what takes no time

    def ask(self, route: str, *keys, payload=None, timeout=None):
        """The reply to a GET, or to a POST of `payload`: reply[key][key]..."""
        reply = fetch_json(self.url + route, payload, timeout or self.timeout)
        try:
            for key in keys:
                reply = reply[key]
            return reply
        except (LookupError, TypeError):
            raise Fault(f"a reply without {key!r}") from None

    def version(self) -> str:
        """The name of its weights."""
        return retrying(lambda: str(self.ask("/weight_info", "weight_version")), RETRIES)

    def reload(self, folder: Path, version: str) -> None:
        """Reads the weights in `folder`. Meanwhile no row is sampled, and no key of one stays."""
        reading = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self.ask("/pause?mode=wait", payload={}, timeout=RELOADING)
        try:
            self.ask("/collective_rpc", payload=reading, timeout=RELOADING)
            retrying(self.forget, RETRIES)
            self.ask("/update_weight_version", payload={"new_version": version})
        finally:
            self.ask("/resume", payload={})
        if self.version() != version:
            raise Fault("it does not name its weights as it was asked to")

    def forget(self) -> None:
        """Drops all keys. Right after a row has ended its keys may still be held for a moment."""
        if self.ask("/reset_prefix_cache", "success", payload={}) is not True:
            raise Fault("it keeps the keys of former weights in its prefix cache")

    def prove(self, folder: Path) -> None:
        """Compares its checksums with those of files in `folder`: of norms [H], and of embeddings
        and head [V, H] unless ranks share them. vLLM rounds V up to 64.
        """
        asked = {"payload": {"action": "checksum"}, "timeout": RELOADING}
        checksums = self.ask("/weight_checker", "checksums", **asked)
        for file in folder.glob("*norm.*" if ":tp1:" in str(checksums) else "*[!j].weight.*"):
            weight = load_file(file)[file.stem]
            if weight.ndim == 2:
                weight = pad(weight, (0, 0, 0, -len(weight) % 64))
            ours = hashlib.sha256(weight.view(torch.uint8).numpy().data).hexdigest()
            theirs = {its for name, its in checksums.items() if name.endswith(f":{file.stem}")}
            if theirs != {ours}:  # a tied head has none, and a reload would leave it as it is
                raise Fault(
                    f"its {file.stem} is not the policy's: is it another model, or is its head tied"
                    " to the embeddings?"
                )

    def sample(self, body: dict) -> tuple:
        """New ids and their log-probs. Trap: the reply's `text` is cut inside the last token."""
        limit = self.timeout + SLOWEST * body["max_tokens"]
        choice = self.ask("/v1/completions", "choices", 0, payload=BODY | body, timeout=limit)
        with contextlib.suppress(KeyError, TypeError):
            new, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            whole = 0 < len(new) == len(logprobs) and choice["finish_reason"] != "abort"
            if whole and math.isfinite(sum(logprobs + new)):
                return new, logprobs
        raise Fault("a turn that is not whole")


def start(results, owner, work, *arguments) -> None:
    """Puts (owner, what `work` returns or raises) into `results`, from a thread of its own."""
    start_thread(lambda: work(*arguments), lambda found: results.put((owner, found)))


def first_does(work):
    """What `work()` returns in the first process, for all; its InputError is raised in all."""
    box = [None, None]
    if PartialState().is_main_process:
        try:
            box[0] = work()
        except InputError as error:
            box[1] = str(error)
    found, wrong = broadcast_object_list(box)
    if wrong:
        raise InputError(wrong)
    return found


class Fleet:
    """The servers of a run, and which version of the policy's weights they have."""

    def __init__(self, policy, environment):
        self.policy, self.settings = policy, environment.settings
        self.run, self.sent = secrets.token_hex(4), ""
        urls = self.settings.engine.split(",")
        self.servers = [Server(url, self.settings.timeout) for url in urls]
        self.proven = set()  # those whose checksums were compared since they started
        self.context = environment.max_context
        self.text = "".join([environment.protocol.instruction, *environment.protocol.tags])
        self.ids = encode(environment.tokenizer, self.text)

    def wrong(self, server: Server, why) -> InputError:
        """The line that ends a run, with the command that starts a server as it is needed."""
        how = f"--model {self.settings.model or 'DIR'} --max_context {self.context}"
        return InputError(f"--engine {server.url}: {why}: start it by `{COMMAND} {how}`")

    def check(self) -> None:
        """Is each server vLLM, with all routes, and does it fit the policy?"""
        asked = {"prompt": self.text, "add_special_tokens": False}
        for server in self.servers:
            try:
                routes = str(server.ask("/openapi.json", "paths"))
                for name in ROUTES.split():
                    if f"/{name}'" not in routes:
                        raise Fault(
                            f"it has no route /{name}; needed is vLLM 0.32 or newer, with"
                            " VLLM_SERVER_DEV_MODE=1"
                        )
                context = server.ask("/v1/models", "data", 0, "max_model_len")
                if context < self.context:
                    raise Fault(f"its context has {context} tokens, fewer than --max_context")
                if server.ask("/tokenize", "tokens", payload=asked) != self.ids:
                    raise Fault("its tokens are not those of the policy's tokenizer")
            except Fault as fault:
                raise self.wrong(server, fault) from None

    def of_each(self, servers: list, work) -> list:
        """(server, work(server)) of those that do it, all at once; a server that fails is lost."""
        results = queue.SimpleQueue()
        for server in servers:
            start(results, server, work, server)
        found = [results.get() for _ in servers]
        for server, its in found:
            if isinstance(its, Exception):
                self.lose(server, its)
        return [pair for pair in found if pair[0] in self.alive]

    def lose(self, server: Server, error: Exception) -> None:
        """A server that fails is left out until the next rollout; without one the run ends."""
        if not isinstance(error, Fault):
            raise error
        if server in self.alive:  # the first of its rows
            self.alive = [other for other in self.alive if other != server]
            if not (self.alive and self.sent):
                raise self.wrong(server, error)
            print(f"warning: {server.url} is left out of this rollout: {error}", file=sys.stderr)

    # ---------------------------------------------------------------------------------- the weights
    def look(self, version: int) -> tuple:
        """(the name of these weights, servers that answer, those that have others). Unnamed weights
        are those of a restarted server; a name of somebody else's means that another run uses it.
        """
        self.alive, current = self.servers, f"{self.run}.{version}"
        found = self.of_each(self.servers, Server.version)
        for server, its in found:
            if self.sent and its != UNNAMED and not its.startswith(self.run):
                raise self.wrong(server, f"another run has given it its weights ({its})")
        self.proven -= {server for server, its in found if its == UNNAMED}
        return current, self.alive, [server for server, its in found if its != current]

    def refresh(self, version: int) -> None:
        """Gives the servers weights of this version if theirs are others. All processes call it."""
        current, self.alive, stale = first_does(lambda: self.look(version))
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
                if server not in self.proven:
                    server.prove(folder)
                self.proven.add(server)
                return retrying(lambda: server.sample(probe), RETRIES)  # the first one may be slow

            try:
                write_weights(self.policy.language_model, folder, dtype)
                probes, self.alive = first_does(lambda: (self.of_each(stale, renew), self.alive))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            for server, (ids, logprobs) in probes:
                gap, limit = self.gap(prompt + ids, logprobs), LIMITS[dtype]
                if not gap <= limit:
                    why = f"a probe's log-probs are {gap:.2g} from the policy's, not {limit}"
                    raise self.wrong(server, f"{why}: other weights, or another distribution")
        self.sent = current

    @torch.no_grad()
    def gap(self, ids: list, logprobs: list) -> float:
        """Mean |log-prob of the server − of the policy| of the last `ids`. All processes call it: a
        forward pass of weights in parts needs them.
        """
        tokens = torch.tensor([ids], device=self.policy.device)  # [1, L]
        scored = self.policy(tokens, self.settings.temperature)[0].cpu()  # [T]
        cut(self.policy)
        return (scored[-len(logprobs) :] - torch.tensor(logprobs)).abs().mean().item()


@torch.no_grad()
def write_weights(model, folder: Path, dtype: torch.dtype) -> None:
    """The whole model, a file for each tensor, and a head that is tied to the embeddings written
    out. The first process writes; the others help to put weights together that are in parts.
    """
    try:
        if main := PartialState().is_main_process:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            size = dtype.itemsize * sum(its.numel() for its in model.state_dict().values())
            if shutil.disk_usage(folder).free < size:  # /dev/shm of a container has 64 MB
                raise OSError(f"no room for {size / 1e6:,.1f} MB")
        for name, weight in merged_weights(model):
            whole = full(weight.to(dtype))  # parts are rounded before they travel
            if main:
                held = {name: whole.to("cpu", copy=True).contiguous()}
                save_file(held, folder / f"{name}.safetensors", {"format": "pt"})
    except Exception as error:  # the library has errors of its own for a full disk
        raise InputError(
            f"{folder}: weights cannot be written ({error}): make room, or name another folder with"
            " --served"
        ) from None


# ------------------------------------------------------------------------------------ the rollout
@contextlib.contextmanager
def to_serve(policy, version: int):
    """The policy while its servers have these weights. All processes must enter at once."""
    policy.fleet.refresh(version)
    yield policy


class Turns:
    """The turns of a rollout: which server a row asks, what it asks, and what came back."""

    def __init__(self, fleet: Fleet, environment, ends: set):
        settings, tags = environment.settings, environment.protocol.stop_tags
        self.fleet, self.environment, self.results = fleet, environment, queue.SimpleQueue()
        self.rule = StopRule(environment.tokenizer, tags, ends)
        self.under_way = self.disagreed = 0
        self.prompts = {}  # -> number: rows of a prompt stay on one server, which has its keys
        self.body = {"temperature": settings.temperature, "stop": list(tags)}
        self.body["stop_token_ids"] = sorted(ends)

    def start(self, row) -> None:
        """A thread asks for the row's next turn."""
        first, alive = PartialState().process_index, self.fleet.alive
        number = self.prompts.setdefault(tuple(row.prompt_ids), len(self.prompts) + first)
        server, max_new_tokens = alive[number % len(alive)], self.environment.turn_tokens_left(row)
        start(self.results, (row, server), self.sample, server, row.ids, max_new_tokens)
        self.under_way += 1

    def sample(self, server: Server, ids: list, max_new_tokens: int) -> tuple:
        """A turn as our stop rule ends it: ids, log-probs and the reason. Trap: a server that was
        restarted would go on with the weights of its start, so it is not tried again.
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
        """The rows whose turn is over, at least one. A row whose server is lost asks another."""
        found, rows = [self.results.get()], []
        while not self.results.empty():
            found.append(self.results.get())
        self.under_way -= len(found)
        for (row, server), turn in found:
            if isinstance(turn, Exception):
                self.fleet.lose(server, turn)
                self.start(row)
            else:
                self.environment.end_turn(row, *turn)
                rows.append(row)
        return rows


def generate_on_server(policy, environment, trajectories, progress=None) -> None:
    """Samples on `policy.fleet` while other rows wait for their searches."""
    turns = Turns(policy.fleet, environment, end_ids(policy, environment.tokenizer))
    waiting, most = deque(trajectories), environment.settings.max_num_seqs
    while waiting or turns.under_way:
        while waiting and turns.under_way < (most or AT_ONCE * len(policy.fleet.alive)):
            turns.start(waiting.popleft())
        rows = turns.finished()
        environment.run_searches([row for row in rows if not row.stop_reason])
        asking = [row for row in rows if not row.stop_reason]
        waiting.extendleft(asking)
        if progress:
            progress(len(rows) - len(asking))
    if turns.disagreed:
        print(f"warning: {turns.disagreed} turns are cut by our stop rule alone", file=sys.stderr)


# -------------------------------------------------------------------------------------- the command
COMMAND = "python -m scale.server"
OWN = Path(__file__).resolve().parent.parent / ".venv-vllm/bin"
FLAGS = (
    "--generation-config vllm --logprobs-mode processed_logprobs --enable-prefix-caching"
    " --served-model-name policy --host 127.0.0.1"
)


def main(arguments=None) -> None:
    """Writes an untied copy of the model, and becomes the server."""
    ours, _, theirs = shlex.join(arguments or sys.argv[1:]).partition(" -- ")
    parser = FlagParser(COMMAND)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", default="8000")
    parser.add_argument("--max_context")
    asked = parser.parse_args(shlex.split(ours))
    vllm = shutil.which("vllm") or shutil.which("vllm", path=OWN)
    if vllm is None:
        raise InputError("there is no vllm: `make vllm` (for CPUs), or put one where PATH finds it")
    policy, tokenizer = load_policy(asked.model, frozen=True)
    flags = f"{FLAGS} --port {asked.port}"
    flags += f" --max-model-len {asked.max_context or context_of(policy)}"
    dtype, needed = torch.bfloat16, {"VLLM_SERVER_DEV_MODE": "1"}  # else no route for new weights
    if not torch.cuda.is_available():
        dtype, flags = torch.float32, f"{flags} --dtype float32 --enforce-eager"
        needed |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB
    name = re.sub(r"\W+", "-", f"{asked.model}-{asked.port}")
    folder = Path("runs/served", name).absolute()
    write_weights(policy.language_model, folder, dtype)
    policy.config.update({"tie_word_embeddings": False, "dtype": dtype})
    policy.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    command = [vllm, "serve", str(folder), *flags.split(), *shlex.split(theirs)]
    print(needed, shlex.join(command), flush=True)
    os.execve(vllm, command, os.environ | needed)


if __name__ == "__main__":
    run_main(main)
