"""Tries a run: an estimate from four short trajectories, then a small step, and a report on it.

    python train.py --dry_run ...      with the flags of the run

A whole step may take hours on a laptop. So the estimate comes first, and the step that follows has
at most SOME questions with at most SOME trajectories each, whatever the recipe says.
"""

import copy
import time
from dataclasses import replace

import torch

from plumbing.alarms import alarms
from plumbing.files import console_line
from trajectory import Trajectory
from update import TrainState

SOME = 4
SHORT = 32  # tokens of a turn in the trajectories of the estimate


def try_out(state: TrainState, sample) -> None:
    """Samples four short trajectories with train.py's `shared_rollout`, prints about how long a
    step takes, and makes the step of this dry run small. The estimate counts each trajectory of the
    step like one of the four, and the update as if it took as long as the rollout.
    """
    whole = state.settings
    short = copy.copy(state.environment)
    short.settings = replace(whole, group_size=1, max_turn_tokens=SHORT, turn_tokens={})
    start = time.perf_counter()
    rows = sample(state, short, state.stream.take(0)[:SOME], whole.seed)
    each = 2 * (time.perf_counter() - start) / len(rows)
    step = each * whole.questions_per_step * whole.group_size
    state.accelerator.print(
        f"time: about {step:.0f} s ({step / 60:.1f} minutes) for each of the {whole.steps} steps, "
        f"{each:.2g} s a trajectory (rough: from four trajectories with turns of at most {SHORT} "
        "tokens)"
    )
    state.settings = state.environment.settings = replace(
        whole,
        questions_per_step=min(whole.questions_per_step, SOME),
        group_size=min(whole.group_size, SOME),
    )
    state.stream.attempts = 1


def report(state: TrainState, record: dict, trajectories: list[Trajectory]) -> None:
    """Prints the line of the small step and what it predicts about the run."""
    environment = state.environment
    prompts = [len(t.prompt_ids) for t in trajectories]
    longest = max(map(environment.max_trajectory_tokens, trajectories))
    lines = [
        console_line(record),
        f"prompts: {min(prompts)} to {max(prompts)} tokens; trajectories at most {longest} of "
        f"{environment.max_context} tokens of context",
    ]
    if torch.cuda.is_available():
        lines.append(f"GPU memory: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at its peak")
    raised = alarms([record], environment.settings, patience=1).values()
    lines += map("alarm: {}".format, raised)
    if not raised:
        lines.append("nothing found that would keep the run from learning")
    state.accelerator.print(*lines, sep="\n")
