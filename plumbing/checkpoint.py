"""Saves and restores checkpoints: folders that `from_pretrained` can load, each with trainer.pt.

trainer.pt   the number of finished steps; the moments of the policy's optimizer; with LoRA the
             matrices A and B; with PPO the critic and its optimizer's moments
"""

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from accelerate.utils import gather_object

from errors import InputError, Terminated, check_output, rank_of
from flags import saved_settings, shown_settings, stage_folder
from plumbing.alarms import MOST_FAILED
from plumbing.files import (
    Run,
    best_checkpoint,
    checkpoints,
    prune,
    read_state,
    settings_text,
)
from policy import save_policy
from scale.lora import load_lora, lora_state
from scale.shards import in_parts, load_moments, load_weights, whole_moments, whole_weights
from settings import Settings
from update import TrainState

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)


# What the signals that this process received ask for.
ENDING = SimpleNamespace(
    signals=[],  # their numbers
    at_once=True,  # whether a signal ends the stage at once, or after the step
)


def print_once(text: str) -> None:
    """Prints in one process of each machine."""
    if rank_of("LOCAL_RANK") == 0:
        print(text)


def end_soon(number: int, *_) -> None:
    """Handles a signal. While models are loaded, and in a dry run, the stage ends at once. While
    the main process samples, scores or evaluates with unsharded weights, it saves the finished
    steps and ends at once (`saved_on_error`). Otherwise the stage ends after the step, with a
    checkpoint. A second Ctrl-C ends it without saving.
    """
    ENDING.signals.append(number)
    if ENDING.signals.count(signal.SIGINT) > 1:
        raise KeyboardInterrupt
    if number == signal.SIGINT and rank_of("RANK") == 0:
        with contextlib.suppress(OSError):  # not print(): the signal may have interrupted one
            os.write(2, b"\nfinished steps are saved first; Ctrl-C again ends at once\n")
    if ENDING.at_once:
        ENDING.at_once = False  # another signal must not interrupt the saving
        raise Terminated(number)


@contextlib.contextmanager
def as_command(settings: Settings) -> Iterator[None]:
    """Surrounds the training of one stage in a command. Prints the stage's settings before it, and
    after it the stage's folder (not in a dry run). If a signal ends the training, prints whether
    there is a checkpoint instead, and exits with 128 + the signal's number.
    """
    folder = stage_folder(settings)
    check_output(folder / "settings.json", "--output_dir")  # before models are loaded
    print_once(f"{shown_settings(settings)}\nfolder: {folder}")
    ENDING.signals = []
    ENDING.at_once = True
    # A signal that is ignored stays ignored, such as SIGHUP under nohup.
    handled = [n for n in SIGNALS if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, end_soon) for number in handled}
    try:
        yield
    except KeyboardInterrupt as error:
        number = signal.Signals(*error.args or (signal.SIGINT,))
        saved = checkpoints(folder)
        last = f"last checkpoint: {saved[-1]} (go on with --resume)" if saved else "no checkpoint"
        with contextlib.suppress(OSError):  # the terminal may be closed
            print_once(f"\nended by {number.name}; {last}")
        sys.exit(128 + number)
    finally:
        for handler in before.items():
            signal.signal(*handler)
        ENDING.signals = []
    # FSDP2's modules are in reference cycles; the next stage or evaluation needs their memory.
    gc.collect()
    if not settings.dry_run:
        more = (
            f" --data HELD_OUT_FILE --corpus {settings.corpus or 'FILE'}" if settings.data else ""
        )
        print_once(f"done: {folder} (python eval.py --model {best_checkpoint(settings)}{more})")


def save(run: Run, state: TrainState, step: int) -> None:
    """Saves the state after `step` finished steps, unless there are none, or this checkpoint
    exists. If weights are sharded, all processes must call `save`, because it gathers the weights.
    """
    if not step:
        return
    trainer_state = {"step": step, "optimizer": whole_moments(state.policy, state.optimizer)}
    if run.settings.lora_rank:
        trainer_state["lora"] = lora_state(state.policy)
    if state.critic is not None:
        trainer_state["critic"] = whole_weights(state.critic)
        trainer_state["critic_optimizer"] = whole_moments(state.critic, state.critic_optimizer)
    weights = whole_weights(state.policy.language_model) if in_parts(state.policy) else None
    path = run.folder / f"checkpoint-{step:06d}"
    if not run.writes or path.exists():
        return
    tokenizer = state.environment.tokenizer
    save_policy(state.policy, tokenizer, path, trainer_state, settings_text(run.settings), weights)
    prune(run.settings)


def save_if_due(run: Run, state: TrainState, record: dict) -> None:
    """Saves a checkpoint if one is due after this step. If any process got a signal, also saves one
    and ends the run. If a search failed in more than MOST_FAILED of the step's trajectories, the
    step made no update: a checkpoint of the steps before it is saved, and the run ends on all
    processes.
    """
    step = record["step"]
    s = run.settings
    ended = gather_object(ENDING.signals[:1])
    failed = record["failed_rows"] > MOST_FAILED
    done = step if failed else step + 1
    if failed or ended or any(n and done % n == 0 for n in (s.steps, s.save_every, s.eval_every)):
        save(run, state, done)
    if failed:
        raise InputError(
            f"step {step}: a search failed in {record['failed_rows']:.0%} of the trajectories: look"
            " at the retriever, the summariser and --timeout, then start again (--resume goes on)"
        )
    if ended:
        raise Terminated(ended[0])


@contextlib.contextmanager
def saved_on_error(run: Run, state: TrainState, step: int) -> Iterator[None]:
    """Saves the finished steps if an error or a signal ends sampling, scoring or an evaluation.
    These change no weights, so the state is still that after the last update. Of several processes
    only the main one saves; if weights are sharded, none does, because all would have to take part.
    """
    saves = run.writes and not in_parts(state.policy)
    try:
        ENDING.at_once = saves
        if saves and ENDING.signals:  # a signal came during the update, or during a save
            raise Terminated(ENDING.signals[0])
        yield
    except (Exception, Terminated):
        ENDING.at_once = False  # another signal must not break the saving
        if saves:
            save(run, state, step)
        if ENDING.signals:  # the signal may have ended another process, which caused this error
            raise Terminated(ENDING.signals[0]) from None
        raise
    finally:
        ENDING.at_once = False


@contextlib.contextmanager
def saved_before_updates(run: Run, state: TrainState, step: int) -> Iterator[None]:
    """Saves the finished steps if an error ends a step before its first optimizer step, after which
    the weights would be of no whole number of steps. Otherwise as saved_on_error.
    """
    version = state.version
    try:
        yield
    except Exception:
        if run.writes and not in_parts(state.policy) and state.version == version:
            save(run, state, step)
        raise


def resume(state: TrainState) -> int:
    """Restores the state of the last checkpoint, except the weights that `build_state` has loaded
    from it. Returns its step.
    """
    settings = state.settings
    path = state.start
    trainer_state = read_state(Path(path))
    saved = saved_settings(path)
    for name in ("recipe", "variant", "model", "lora_rank", "optimizer"):
        # The model's folder may have moved. paged_adamw8bit has the same moments as adamw8bit.
        ours, theirs = (Path(str(getattr(s, name))).name for s in (settings, saved))
        if ours.removeprefix("paged_") != theirs.removeprefix("paged_"):
            raise InputError(
                f"--resume: {path} was made with --{name} {getattr(saved, name)}: do the same, or "
                "leave --resume out to start again"
            )
    if (state.critic is None) == ("critic" in trainer_state):
        raise InputError(f"--resume: {path} was made with another --algorithm: {saved.algorithm}")
    if settings.lora_rank:
        load_lora(state.policy, trainer_state["lora"])
    load_moments(state.policy, state.optimizer, trainer_state["optimizer"])
    if state.critic is not None:
        load_weights(state.critic, trainer_state["critic"])
        load_moments(state.critic, state.critic_optimizer, trainer_state["critic_optimizer"])
    return trainer_state["step"]
