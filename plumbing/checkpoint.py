"""What a run goes on from: the policy as a directory that HF loads, and beside it trainer.pt.

trainer.pt   step, the optimizer's moments; with LoRA what was learned; with PPO the critic
"""

import contextlib
from collections.abc import Iterator

import torch

from errors import InputError, Terminated
from plumbing.files import Run, prune, saved_settings, settings_text, starting_model
from policy import save_policy
from scale.lora import load_lora, lora_state
from scale.shards import in_parts, load_moments, load_weights, whole_moments, whole_weights
from update import Parts


def save(run: Run, parts: Parts, step: int) -> None:
    """After `step` finished steps. All processes call it: weights in parts are put together."""
    state = {"step": step, "optimizer": whole_moments(parts.policy, parts.optimizer)}
    if run.settings.lora_rank:
        state["lora"] = lora_state(parts.policy)
    if parts.critic is not None:
        state["critic"] = whole_weights(parts.critic)
        state["critic_optimizer"] = whole_moments(parts.critic, parts.critic_optimizer)
    weights = whole_weights(parts.policy.language_model) if in_parts(parts.policy) else None
    path = run.folder / f"checkpoint-{step:06d}"
    if not run.main or path.exists():
        return
    text, tokenizer = settings_text(run.settings), parts.environment.tokenizer
    save_policy(parts.policy, tokenizer, path, state, text, weights)
    prune(run.folder, run.settings.keep_checkpoints)


@contextlib.contextmanager
def kept(run: Run, parts: Parts, step: int) -> Iterator[None]:
    """What was learned before this step stays where its sampling or scoring ends in an error or by
    SIGTERM. Of several processes the others would wait.
    """
    try:
        yield
    except (InputError, Terminated):
        if step and parts.accelerator.num_processes == 1:
            save(run, parts, step)
        raise


def resume(run: Run, parts: Parts) -> int:
    """Put back what the last checkpoint holds; returns its step."""
    settings, path = run.settings, starting_model(run.settings)[0]
    anew = "leave --resume out to start anew"
    # mmap: 8 processes share one copy of the file in memory. Of a 7B model the moments are 57 GiB.
    state = torch.load(f"{path}/trainer.pt", map_location="cpu", weights_only=True, mmap=True)
    if bool(settings.lora_rank) != ("lora" in state):
        how = "with" if "lora" in state else "without"
        raise InputError(f"--resume: {path} was made {how} --lora_rank: do the same, or {anew}")
    if parts.critic is not None and "critic" not in state:
        raise InputError(f"--resume: {path} was not made by PPO and has no critic: {anew}")
    if state["step"] >= settings.steps:
        done = f"{state['step']} of --steps {settings.steps} steps are done"
        raise InputError(f"--resume: {done}; raise --steps to go on")
    if settings.lora_rank:
        load_lora(parts.policy, state["lora"])
    load_moments(parts.policy, parts.optimizer, state["optimizer"])
    if parts.critic is not None:
        load_weights(parts.critic, state["critic"])
        load_moments(parts.critic, parts.critic_optimizer, state["critic_optimizer"])
    now, before = vars(settings), vars(saved_settings(path))
    changed = [n for n in now if n not in ("resume", "doctor") and now[n] != before[n]]
    if changed:
        told = ", ".join(f"{name}={now[name]} (was {before[name]})" for name in changed)
        run.accelerator.print(f"resumed with other settings: {told}")
    return state["step"]
