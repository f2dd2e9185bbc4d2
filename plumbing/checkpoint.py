"""Saves and restores checkpoints: folders that `from_pretrained` can load, each with trainer.pt.

trainer.pt   the number of finished steps; the moments of the policy's optimizer; with LoRA the
             matrices A and B; with PPO the critic and its optimizer's moments
"""

import contextlib
import gc
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from accelerate.utils import gather_object

from errors import InputError, Terminated, check_output, raise_terminated
from flags import saved_settings, shown_settings, stage_folder
from plumbing.alarms import MOST_FAILED
from plumbing.build import make_accelerator
from plumbing.files import (
    Run,
    best_checkpoint,
    checkpoints,
    prune,
    read_state,
    settings_text,
    starting_model,
)
from policy import save_policy
from scale.lora import load_lora, lora_state
from scale.shards import in_parts, load_moments, load_weights, whole_moments, whole_weights
from settings import Settings
from update import TrainState

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)


@contextlib.contextmanager
def as_command(settings: Settings) -> Iterator[None]:
    """Surrounds the training of one stage in a command. Prints the stage's settings before it, and
    after it the stage's folder (not in a dry run). If a signal ends the training, prints whether
    there is a checkpoint instead, and exits with 128 + the signal's number.
    """
    # The accelerator prints in one process of each machine. Trap: PartialState().print would too,
    # but an accelerator that is made after it ignores ACCELERATE_USE_CPU.
    print_once, folder = make_accelerator(settings).print, stage_folder(settings)
    check_output(folder / "settings.json", "--output_dir")  # before models are loaded
    print_once(f"{shown_settings(settings)}\nfolder: {folder}")
    # A signal that is ignored stays ignored, such as SIGHUP under nohup.
    handled = [n for n in SIGNALS if signal.getsignal(n) != signal.SIG_IGN]
    before = [signal.signal(number, raise_terminated) for number in handled]
    try:
        yield
    except KeyboardInterrupt as error:
        number = signal.Signals(*error.args or (signal.SIGINT,))
        with contextlib.suppress(OSError):  # the terminal may be closed
            print_once(f"\nended by {number.name}; {saved_last(folder)}")
        sys.exit(128 + number)
    finally:
        list(map(signal.signal, handled, before))
    # FSDP2's modules are in reference cycles; the next stage or evaluation needs their memory.
    gc.collect()
    if not settings.dry_run:
        more = " --data HELD_OUT_FILE" if settings.data else ""
        more += f" --corpus {shlex.quote(settings.corpus)}" if settings.corpus else ""
        print_once(f"done: {folder} (python eval.py --model {best_checkpoint(folder)}{more})")


def saved_last(folder: Path) -> str:
    saved = checkpoints(folder)
    return f"last checkpoint: {saved[-1]} (go on with --resume)" if saved else "no checkpoint"


def open_run(run: Run, state: TrainState) -> int:
    """Restores a resumed run's state, prepares the run's folder, and lets the run handle signals.
    Returns the number of steps that are already done.
    """
    state.run = run
    first_step = resume(run, state) if run.settings.resume else 0
    run.open(first_step)
    for number in SIGNALS:
        if signal.getsignal(number) is raise_terminated:
            signal.signal(number, run.terminate)
    return first_step


def save(run: Run, state: TrainState, step: int) -> None:
    """Saves the state after `step` finished steps, but not in a dry run, and not if this checkpoint
    exists. If weights are sharded, all processes must call `save`, because it gathers the weights.
    """
    if run.settings.dry_run:
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
    text, tokenizer = settings_text(run.settings), state.environment.tokenizer
    save_policy(state.policy, tokenizer, path, trainer_state, text, weights)
    prune(run.folder, run.settings.keep_checkpoints)


def save_if_due(run: Run, state: TrainState, record: dict) -> None:
    """Saves a checkpoint if one is due after this step. If any process got a signal, also saves one
    and ends the run. If a search failed in more than MOST_FAILED of the step's trajectories, the
    step made no update: a checkpoint of the steps before it is saved, if there are any, and the run
    ends on all processes.
    """
    step = record["step"]
    if record["failed_rows"] > MOST_FAILED:
        if step:  # before the first update there is nothing to save
            save(run, state, step)
        raise InputError(
            f"step {step}: a search failed in {record['failed_rows']:.0%} of the trajectories: look"
            " at the retriever, the summariser and --timeout, then start again (--resume goes on)"
        )
    ended = max(gather_object([run.signals]))
    done, s = step + 1, run.settings
    if ended or any(n and done % n == 0 for n in (s.steps, s.save_every, s.eval_every)):
        save(run, state, done)
    if ended:
        raise_terminated(*ended)


@contextlib.contextmanager
def saved_on_error(run: Run, state: TrainState, step: int) -> Iterator[None]:
    """Saves the finished steps if an error or a signal ends sampling, scoring or an evaluation.
    These change no weights, so the state is still that after the last update. Of several processes
    only the main one saves; if weights are sharded, none does, because all would have to take part.
    """
    saves = run.writes and (state.accelerator.num_processes == 1 or not in_parts(state.policy))
    try:
        run.may_stop_now = saves
        if saves and run.signals:  # a signal came during the update, or during a save
            raise_terminated(*run.signals)
        yield
    except (Exception, Terminated):
        run.may_stop_now = False  # another signal must not break the saving
        if step and saves:
            save(run, state, step)
        if run.signals:  # the signal may have ended another process, which caused this error
            raise_terminated(*run.signals)
        raise
    finally:
        run.may_stop_now = False


def resume(run: Run, state: TrainState) -> int:
    """Restores the state of the last checkpoint, except the weights that `build_state` has loaded
    from it. Returns its step.
    """
    settings, path = run.settings, starting_model(run.settings)[0]
    trainer_state, saved = read_state(Path(path)), saved_settings(path)
    for name in ("lora_rank", "optimizer"):  # paged_adamw8bit has the same moments as adamw8bit
        ours, theirs = (str(getattr(s, name)).removeprefix("paged_") for s in (settings, saved))
        if ours != theirs:
            raise InputError(
                f"--resume: {path} was made with --{name} {theirs}: do the same, or leave --resume "
                "out to start again"
            )
    if settings.lora_rank:
        load_lora(state.policy, trainer_state["lora"])
    load_moments(state.policy, state.optimizer, trainer_state["optimizer"])
    if state.critic is not None:
        load_weights(state.critic, trainer_state["critic"])
        load_moments(state.critic, state.critic_optimizer, trainer_state["critic_optimizer"])
    return trainer_state["step"]
