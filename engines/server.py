"""Samples with vLLM servers: separate processes that read the policy's weights from a folder.

    a rollout begins   If the policy's weights have changed, each server reads them from a folder of
                       safetensors and drops its cached keys. Then each proves that it has them: the
                       log-probs of 16 tokens that it samples are those of the policy.
    a turn             POST /v1/completions: a row's token ids -> the new ids and their log-probs
    between turns      one batch of searches for all rows

    python -m engines.server --model DIR                       starts a server with the right flags
    python -m engines.server --model DIR -- --tensor-parallel-size 4       adds flags of vLLM's own

A row is a trajectory. Four errors would go unnoticed without the proof. (1) A server has not read
the weights. (2) Its prefix cache still has keys that older weights computed. (3) It was restarted,
or another run uses it too. (4) It samples from another distribution, because generation_config.json
supplies parameters that a request leaves out.

A reload leaves old weights in an output head that is tied to the embeddings, so a served model must
have an untied head (`python -m engines.server` unties it). The server's arithmetic differs from the
trainer's, so π_old's log-probs must be computed again.

If training has several processes, each sends its own share of the rows to the servers. The first
process writes the weights and lets the servers read them; all others help to gather sharded
weights, tensor by tensor. A request that fails ends the run; its last steps are saved. vLLM is
never imported. Left out: SGLang, sending weights by NCCL or IPC, a server on the trainer's own GPU,
rows that go on sampling while others search.
"""

import contextlib
import json
import math
import os
import re
import shlex
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from accelerate import PartialState
from safetensors.torch import save_file

from errors import FlagParser, InputError, run_main
from policy import best_device, in_bf16, load_policy
from retrievers.net import Fault, fetch_json
from rollout import StopRule, Turn, generate_by_turns
from scale.lora import merged_weights
from scale.shards import cut, full

# Limit of the requests that a process has under way, per server; it is also vLLM's default batch
# size on a GPU with less than 70 GiB.
AT_ONCE = 256
SLOWEST = 1.0  # seconds allowed per new token; a busy server needs 0.02 to 0.2, without queueing
RELOADING = 600.0  # seconds allowed for a pause (it waits for running requests) and for a reload
PROBE = 160  # limit of a probe's prompt tokens, above the size of a cache block (128 on a CPU)
SAMPLED = 16  # tokens that a probe samples
# Limits of a probe's mean |server's − trainer's log-prob|. In fp32 this mean is about 1e-6; in bf16
# it is larger, because a bf16 number has only 8 significant bits.
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.1}
# If a request lacks a sampling parameter, a server without `--generation-config vllm` takes it from
# generation_config.json. So each request has them all.
BODY = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "ignore_eos": True,  # the end tokens are in stop_token_ids
    "include_stop_str_in_output": True,
    "return_token_ids": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "add_special_tokens": False,
    "logprobs": 0,
}


# -------------------------------------------------------------------------------------- the servers
class Fleet:
    """The servers of a run. A request that fails raises the InputError that ends the run; it names
    the command that starts a suitable server.

    sent   the version of the weights that the servers were sent last
    """

    def __init__(self, policy, environment):
        self.policy = policy
        self.dtype = torch.bfloat16 if in_bf16(policy.device) else torch.float32
        self.settings = environment.settings
        self.context = environment.max_context
        self.urls = self.settings.engine.split(",")
        self.sent = -1
        # Any ids can be the probe's prompt, if they fill a block of the prefix cache.
        self.prompt = [*range(min(PROBE, self.context - SAMPLED))]

    def error(self, url: str, problem) -> InputError:
        return InputError(
            f"--engine {url}: {problem}: start it by `{COMMAND} --model "
            f"{self.settings.model or 'DIR'} -- --max-model-len {self.context}`"
        )

    def ask(self, url: str, route: str, *keys, payload=None, timeout=None):
        """Sends a GET, or a POST of `payload`; returns reply[keys[0]][keys[1]]..."""
        try:
            reply = fetch_json(url + route, payload, timeout or self.settings.timeout)
            for key in keys:
                reply = reply[key]
            return reply
        except Fault as fault:
            raise self.error(url, fault) from None
        except (LookupError, TypeError):
            raise self.error(url, f"a reply without {key!r}") from None

    def check(self) -> None:
        """Raises an InputError if a server has no room for the context, or if its model has a tied
        head.
        """
        for url in self.urls:
            model = self.ask(url, "/v1/models", "data", 0)
            room = model.get("max_model_len", 0)
            config = Path(str(model.get("root")), "config.json")
            if room < self.context:
                raise self.error(url, f"its context has {room} tokens, fewer than --max_context")
            if config.exists() and json.loads(config.read_text()).get("tie_word_embeddings"):
                raise self.error(
                    url, "its head is tied to the embeddings: a reload would not change it"
                )

    # ---------------------------------------------------------------------------------- the weights
    def refresh(self, version: int) -> None:
        """Sends the weights to every server, unless this version was sent last, and lets each prove
        that it has them. All processes must call this.
        """
        if version != self.sent:
            self.send()
            self.sent = version
        for url in self.urls:
            self.check_fresh(url)

    def send(self) -> None:
        name = re.sub(r"\W+", "-", f"policy-of-{self.settings.engine}")
        folder = Path(self.settings.served, name).absolute()
        try:
            write_weights(self.policy.language_model, folder, self.dtype)
            if PartialState().is_main_process:
                with ThreadPoolExecutor(len(self.urls)) as threads:
                    [*threads.map(partial(self.reload, folder), self.urls)]  # raises their errors
            PartialState().wait_for_everyone()
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def reload(self, folder: Path, url: str) -> None:
        """Makes a server read the weights in `folder`. Sampling is paused meanwhile, and all cached
        keys are dropped.
        """
        reading = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self.ask(url, "/pause?mode=wait", payload={}, timeout=RELOADING)
        try:
            self.ask(url, "/collective_rpc", payload=reading, timeout=RELOADING)
            self.forget(url)
        finally:
            self.ask(url, "/resume", payload={})

    def forget(self, url: str) -> None:
        """Empties the prefix cache. Just after a request has ended, the server may refuse this."""
        for _ in range(3):
            if self.ask(url, "/reset_prefix_cache", "success", payload={}) is True:
                return
            time.sleep(0.5)
        raise self.error(url, "it keeps the keys of former weights in its prefix cache")

    @torch.no_grad()
    def check_fresh(self, url: str) -> None:
        """Raises an InputError if the log-probs of tokens that a server samples are not those of
        the policy. All processes must call this, because a forward pass gathers sharded weights.
        """
        temperature = self.settings.temperature
        probe = {"prompt": self.prompt, "max_tokens": SAMPLED, "temperature": temperature}
        ids, logprobs = self.sample(url, probe)
        tokens = torch.tensor([self.prompt + ids], device=self.policy.device)  # [1, L]
        scored = self.policy(tokens, temperature)[0].cpu()  # [T]
        cut(self.policy)
        gap = (scored[-len(logprobs) :] - torch.tensor(logprobs)).abs().mean().item()
        if not gap <= LIMITS[self.dtype]:
            raise self.error(
                url,
                f"a probe's log-probs are on average {gap:.2g} from the policy's, over "
                f"{LIMITS[self.dtype]}: it has other weights, or samples from another distribution",
            )

    # ------------------------------------------------------------------------------------- sampling
    def sample(self, url: str, body: dict) -> tuple:
        """Returns the new ids and their log-probs. The reply's `text` is not used, because it may
        end inside a token.
        """
        limit = self.settings.timeout + SLOWEST * body["max_tokens"]
        reply = self.ask(url, "/v1/completions", "choices", 0, payload=BODY | body, timeout=limit)
        with contextlib.suppress(KeyError, TypeError):
            new = reply["token_ids"]
            logprobs = reply["logprobs"]["token_logprobs"]
            complete = 0 < len(new) == len(logprobs) and reply["finish_reason"] != "abort"
            if complete and math.isfinite(sum(logprobs + new)):
                return new, logprobs
        raise self.error(url, "it returned an incomplete turn")


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
    """Sends the policy's weights to the servers, then yields the policy. All processes must enter
    this context together.
    """
    policy.fleet.refresh(version)
    yield policy


def cut_turn(rule: StopRule, new: list, logprobs: list, max_new_tokens: int) -> tuple:
    """Returns a turn as our stop rule ends it: ids, log-probs, reason. Normally the server has
    ended it there too.
    """
    for count in range(1, len(new) + 1):
        if reason := rule.reason(new[:count], max_new_tokens):
            return new[:count], logprobs[:count], reason
    return new, logprobs, "length"


def sample_on_servers(policy, environment, rows) -> list[Turn]:
    """Samples one turn of every trajectory. Rows with the same prompt are sampled on the same
    server, which has the prompt's keys in its cache.
    """
    fleet, rule = policy.fleet, environment.stop_rule(policy)
    body = {
        "temperature": environment.settings.temperature,
        "stop": list(rule.stop_tags),
        "stop_token_ids": sorted(rule.eos_ids),
    }

    def sample(row) -> Turn:
        url = fleet.urls[hash(tuple(row.prompt_ids)) % len(fleet.urls)]
        most = environment.turn_tokens_left(row)
        new, logprobs = fleet.sample(url, body | {"prompt": row.ids, "max_tokens": most})
        return Turn(most, *cut_turn(rule, new, logprobs, most))

    with ThreadPoolExecutor(AT_ONCE * len(fleet.urls)) as threads:
        return [*threads.map(sample, rows)]


# Samples all trajectories on the servers of `policy.fleet`, and runs their searches.
generate_on_server = partial(generate_by_turns, sample=sample_on_servers)


# -------------------------------------------------------------------------------------- the command
COMMAND = "python -m engines.server"
VENV = Path(__file__).resolve().parent.parent / ".venv-vllm/bin"
# vLLM has its routes for new weights only in dev mode.
VARIABLES = {"VLLM_SERVER_DEV_MODE": "1"}
ON_CPU = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB
FLAGS = (
    "--generation-config vllm --logprobs-mode processed_logprobs --enable-prefix-caching"
    " --served-model-name policy --host 127.0.0.1"
)


def main(arguments=None) -> None:
    """Writes a copy of the model with an untied head, then replaces this process by the server."""
    parser = FlagParser(COMMAND, allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", default="8000")
    options, theirs = parser.parse_known_args(arguments)
    vllm = shutil.which("vllm") or shutil.which("vllm", path=VENV)
    if vllm is None:
        raise InputError("vllm is not installed: `make vllm` (for CPUs), or put it on the PATH")
    policy, tokenizer = load_policy(options.model, frozen=True)
    flags = f"{FLAGS} --port {options.port}"
    device, variables = best_device(), VARIABLES
    dtype = torch.bfloat16 if in_bf16(device) else torch.float32
    if device == "cpu":
        variables = VARIABLES | ON_CPU
        flags += f" --dtype {str(dtype).partition('.')[2]} --enforce-eager"
    name = re.sub(r"\W+", "-", f"{options.model}-{options.port}")
    folder = Path("runs/served", name).absolute()
    write_weights(policy.language_model, folder, dtype)
    policy.config.update({"tie_word_embeddings": False, "dtype": dtype})
    policy.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    theirs = [word for word in theirs if word != "--"]
    command = [vllm, "serve", str(folder), *flags.split(), *theirs]
    print(variables, shlex.join(command), flush=True)
    os.execve(vllm, command, os.environ | variables)


if __name__ == "__main__":
    run_main(main)
