"""vLLM as the sampler: other processes, on GPUs of their own, sample with the policy's weights.

    a rollout begins   If the policy's weights are newer than those of the servers, a folder of
                       safetensors is written; every server reads it and drops its cached keys.
                       Checksums (the first time) and a probe row (each time) verify this.
    a turn             POST /v1/completions: all ids of a row -> the new ids and their log-probs
    between turns      one search for all waiting rows, while the others are sampled

    python -m scale.server --model DIR                       starts a server with the right flags
    python -m scale.server --model DIR -- --tensor-parallel-size 4       adds flags of vLLM's own

Three things can go wrong silently, so they are checked: weights that were not read, keys of former
weights in the server's prefix cache, and a distribution that is not the trained one, because
generation_config.json supplies what a request leaves out. A reload writes nothing into an output
head that is tied to the embeddings, so the served copy is always untied. The server's arithmetic
differs from the trainer's: π_old's log-probs must be computed again.

With several processes, each generates its share of the rows, and the first one sends the weights to
the servers: under FSDP all processes gather them, tensor by tensor. vLLM is never imported. Left
out: SGLang, weights by NCCL or IPC, a server that sleeps on the trainer's own GPU.
"""

import contextlib
import hashlib
import os
import queue
import re
import secrets
import shlex
import shutil
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from safetensors.torch import load_file, save_file

from errors import FlagParser, InputError, run_main
from policy import load_policy
from retrievers.net import Fault, fetch_json, retrying
from rollout import StopRule, context_of, encode, end_ids, start_thread
from scale.lora import merged_weights
from scale.shards import cut, full

UNNAMED = "default"  # vLLM's version name of the weights that a server started with
RETRIES = 2  # how often a failed request is repeated
AT_ONCE = 256  # requests of a process to a server at once: vLLM's default batch size
SLOWEST = 1.0  # seconds per token; a full server takes 0.02 to 0.2, but rows queue for a place
RELOADING = 600.0  # seconds for the weights to be read
PROBE = 160  # tokens of a probe's prompt: more than one cache block, which has 128 on a CPU
SAMPLED = 16  # tokens that a probe samples
# Mean |log-prob of the server − of the trainer| of a probe: in fp32 it is 1e-6, bf16 has 8 bits.
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.1}
# What a request leaves out would come from the checkpoint's generation_config.json.
BODY = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logprobs": 0,
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "return_token_ids": True,
    "add_special_tokens": False,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
}


# -------------------------------------------------------------------------------------- the servers
@dataclass(frozen=True)
class Server:
    """A vLLM server. Each method raises Fault if the server fails or does not answer as vLLM."""

    url: str
    timeout: float  # seconds for requests that sample nothing

    def ask(self, route: str, *keys, payload=None, timeout=None):
        """Sends a GET, or a POST of `payload`, and returns reply[key][key]..."""
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
        """Makes the server read the weights in `folder` and drop all cached keys."""
        reading = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self.ask("/collective_rpc", payload=reading, timeout=RELOADING)
        retrying(self.forget, RETRIES)
        self.ask("/update_weight_version", payload={"new_version": version})

    def forget(self) -> None:
        """Empties the prefix cache. The server may refuse for a moment after a row has ended."""
        if self.ask("/reset_prefix_cache", "success", payload={}) is not True:
            raise Fault("it keeps the keys of former weights in its prefix cache")

    def check_weights(self, folder: Path) -> None:
        """Compares the server's checksums of norms with those of the files in `folder`. A head that
        is tied to the embeddings has no checksum, and a reload would not change it.
        """
        asked = {"payload": {"action": "checksum"}, "timeout": RELOADING}
        checksums = self.ask("/weight_checker", "checksums", **asked)
        if "lm_head.weight" not in str(checksums):
            raise Fault("its head is tied to the embeddings")
        for file in folder.glob("*norm.*"):
            weight = load_file(file)[file.stem]  # [H], whole on every rank
            ours = hashlib.sha256(weight.view(torch.uint8).numpy().data).hexdigest()
            theirs = {value for name, value in checksums.items() if name.endswith(f":{file.stem}")}
            if theirs != {ours}:
                raise Fault(f"its {file.stem} is not the policy's: is it another model?")

    def sample(self, body: dict) -> tuple:
        """Returns new ids and their log-probs. Trap: the reply's `text` may end inside a token."""
        limit = self.timeout + SLOWEST * body["max_tokens"]
        choice = self.ask("/v1/completions", "choices", 0, payload=BODY | body, timeout=limit)
        with contextlib.suppress(KeyError, TypeError):
            new, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            if 0 < len(new) == len(logprobs) and choice["finish_reason"] != "abort":
                return new, logprobs
        raise Fault("it returned an incomplete turn")


def start(results, owner, work, *arguments) -> None:
    """Runs work(*arguments) in a thread, which puts (owner, result or exception) into `results`."""
    start_thread(lambda: work(*arguments), lambda result: results.put((owner, result)))


def run_in_first(work):
    """Runs `work()` in the first process only; all processes get its result or its InputError."""
    box = [None]
    if PartialState().is_main_process:
        try:
            box[0] = work()
        except InputError as error:
            box[0] = error
    [result] = broadcast_object_list(box)
    if isinstance(result, InputError):
        raise result
    return result


class Fleet:
    """Keeps the servers of a run, and the version of the policy's weights that they have."""

    def __init__(self, policy, environment):
        self.policy, self.settings = policy, environment.settings
        self.run, self.sent = secrets.token_hex(4), ""
        urls = self.settings.engine.split(",")
        self.servers = [Server(url, self.settings.timeout) for url in urls]
        self.context = environment.max_context
        self.ids = encode(environment.tokenizer, environment.protocol.instruction)

    def to_error(self, server: Server, problem) -> InputError:
        """Returns the error that ends a run, with the command that starts a suitable server."""
        flags = f"--model {self.settings.model or 'DIR'} --max_context {self.context}"
        return InputError(f"--engine {server.url}: {problem}: start it by `{COMMAND} {flags}`")

    def result_of(self, server: Server, result):
        """Returns the result of a server's thread, or raises the error that it holds."""
        if isinstance(result, Fault):
            raise self.to_error(server, result)
        if isinstance(result, Exception):
            raise result
        return result

    def run_on_each(self, servers: list, work) -> list:
        """Runs `work` on these servers at once and returns (server, work(server)) of each."""
        results = queue.SimpleQueue()
        for server in servers:
            start(results, server, work, server)
        pairs = [results.get() for _ in servers]
        return [(server, self.result_of(server, result)) for server, result in pairs]

    # ---------------------------------------------------------------------------------- the weights
    def find_stale(self, version: int) -> tuple[str, list[Server]]:
        """Returns the name of this version and the servers that have other weights. A restarted
        server's weights are unnamed; a foreign name means that another run uses it.
        """
        current = f"{self.run}.{version}"
        versions = self.run_on_each(self.servers, Server.version)
        for server, name in versions:
            if self.sent and name != UNNAMED and not name.startswith(self.run):
                raise self.to_error(server, f"another run has sent it weights ({name})")
        return current, [server for server, name in versions if name != current]

    def refresh(self, version: int) -> None:
        """Sends weights of this version to the servers that have others. All processes call it."""
        self.sent, stale = run_in_first(lambda: self.find_stale(version))
        if not stale:
            return
        dtype = torch.float32 if self.policy.device.type == "cpu" else torch.bfloat16
        name = re.sub(r"\W+", "-", f"policy-of-{self.settings.engine}")
        folder = Path(self.settings.served, name).absolute()
        prompt = (self.ids * PROBE)[:PROBE]
        probe = {"prompt": prompt, "max_tokens": SAMPLED, "temperature": self.settings.temperature}

        def renew(server: Server) -> tuple:
            known = server.version().startswith(self.run)
            server.reload(folder, self.sent)
            if not known:
                server.check_weights(folder)
            return retrying(lambda: server.sample(probe), RETRIES)  # the first one may be slow

        try:
            write_weights(self.policy.language_model, folder, dtype)
            probes = run_in_first(lambda: self.run_on_each(stale, renew))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        for server, (ids, logprobs) in probes:
            gap, limit = self.logprob_gap(prompt + ids, logprobs), LIMITS[dtype]
            if not gap <= limit:
                problem = f"a probe's log-probs are {gap:.2g} from the policy's, over {limit}"
                hint = "other weights, or another distribution"
                raise self.to_error(server, f"{problem}: {hint}")

    @torch.no_grad()
    def logprob_gap(self, ids: list, logprobs: list) -> float:
        """Returns the mean |log-prob of the server − of the policy| over the last `ids`. All
        processes call it: a forward pass of sharded weights needs them.
        """
        tokens = torch.tensor([ids], device=self.policy.device)  # [1, L]
        scored = self.policy(tokens, self.settings.temperature)[0].cpu()  # [T]
        cut(self.policy)
        return (scored[-len(logprobs) :] - torch.tensor(logprobs)).abs().mean().item()


@torch.no_grad()
def write_weights(model, folder: Path, dtype: torch.dtype) -> None:
    """Writes the whole model, one file per tensor, including a head that is tied to the embeddings.
    The first process writes; the others take part in gathering sharded weights.
    """
    try:
        if main := PartialState().is_main_process:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        for name, weight in merged_weights(model):
            whole = full(weight.to(dtype))  # shards are rounded before they are sent
            if main:
                tensors = {name: whole.to("cpu", copy=True).contiguous()}
                save_file(tensors, folder / f"{name}.safetensors", {"format": "pt"})
    except Exception as error:  # safetensors raises errors of its own for a full disk
        hint = "make room, or name another folder with --served"  # a container's /dev/shm has 64 MB
        raise InputError(f"{folder}: weights cannot be written ({error}): {hint}") from None


# ------------------------------------------------------------------------------------ the rollout
@contextlib.contextmanager
def to_serve(policy, version: int):
    """Yields the policy after its servers have received these weights. All processes must enter
    together.
    """
    policy.fleet.refresh(version)
    yield policy


class Turns:
    """Runs the turns of a rollout: sends each row to a server and collects the replies."""

    def __init__(self, fleet: Fleet, environment, ends: set):
        settings, tags = environment.settings, environment.protocol.stop_tags
        self.fleet, self.environment, self.results = fleet, environment, queue.SimpleQueue()
        self.rule = StopRule(environment.tokenizer, tags, ends)
        self.under_way = 0
        self.prompts = {}  # prompt -> number: rows of a prompt share a server and its cache
        self.body = {"temperature": settings.temperature, "stop": list(tags)}
        self.body["stop_token_ids"] = sorted(ends)

    def start(self, row) -> None:
        """Starts a thread that requests the row's next turn."""
        servers, max_new_tokens = self.fleet.servers, self.environment.turn_tokens_left(row)
        next_number = PartialState().process_index + len(self.prompts)
        number = self.prompts.setdefault(tuple(row.prompt_ids), next_number)
        server = servers[number % len(servers)]
        start(self.results, (row, server), self.sample, server, row.ids, max_new_tokens)
        self.under_way += 1

    def sample(self, server: Server, ids: list, max_new_tokens: int) -> tuple:
        """Returns a turn, cut by our stop rule: ids, log-probs and the reason. Trap: a restarted
        server would sample with the weights it started with, so it is not asked again.
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
        return new[:count], logprobs[:count], reason or "length"

    def finished(self) -> list:
        """Waits for at least one turn and returns all rows whose turn is over."""
        results = [self.results.get()]
        while not self.results.empty():
            results.append(self.results.get())
        self.under_way -= len(results)
        for (row, server), turn in results:
            self.environment.end_turn(row, *self.fleet.result_of(server, turn))
        return [row for (row, _), _ in results]


def generate_on_server(policy, environment, trajectories, progress=None) -> None:
    """Samples on `policy.fleet` while other rows wait for their searches."""
    turns = Turns(policy.fleet, environment, end_ids(policy, environment.tokenizer))
    limit = environment.settings.max_num_seqs or AT_ONCE * len(policy.fleet.servers)
    waiting = deque(trajectories)
    while waiting or turns.under_way:
        while waiting and turns.under_way < limit:
            turns.start(waiting.popleft())
        rows = turns.finished()
        environment.run_searches([row for row in rows if not row.stop_reason])
        asking = [row for row in rows if not row.stop_reason]
        waiting.extendleft(asking)
        if progress:
            progress(len(rows) - len(asking))


# -------------------------------------------------------------------------------------- the command
COMMAND = "python -m scale.server"
VENV = Path(__file__).resolve().parent.parent / ".venv-vllm/bin"
FLAGS = (
    "--generation-config vllm --logprobs-mode processed_logprobs --enable-prefix-caching"
    " --served-model-name policy --host 127.0.0.1"
)


def main(arguments=None) -> None:
    """Writes an untied copy of the model, then replaces this process by the server."""
    parser = FlagParser(COMMAND)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", default="8000")
    parser.add_argument("--max_context")
    parser.add_argument("vllm_flags", nargs="*", help="flags of vLLM's own, after --")
    options = parser.parse_args(arguments)
    vllm = shutil.which("vllm") or shutil.which("vllm", path=VENV)
    if vllm is None:
        raise InputError("there is no vllm: `make vllm` (for CPUs), or put one on the PATH")
    policy, tokenizer = load_policy(options.model, frozen=True)
    flags = f"{FLAGS} --port {options.port}"
    flags += f" --max-model-len {options.max_context or context_of(policy)}"
    # Without dev mode there is no route for new weights.
    dtype, variables = torch.bfloat16, {"VLLM_SERVER_DEV_MODE": "1"}
    if not torch.cuda.is_available():
        dtype, flags = torch.float32, f"{flags} --dtype float32 --enforce-eager"
        variables |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB
    folder = Path("runs/served", options.port).absolute()
    write_weights(policy.language_model, folder, dtype)
    policy.config.update({"tie_word_embeddings": False, "dtype": dtype})
    policy.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    command = [vllm, "serve", str(folder), *flags.split(), *options.vllm_flags]
    print(variables, shlex.join(command), flush=True)
    os.execve(vllm, command, os.environ | variables)


if __name__ == "__main__":
    run_main(main)
