"""Tries a run: takes one small step, and reports what that step predicts about the run.

    python train.py --dry_run ...      with the flags of the run

A whole step may take hours on a laptop. So the small one has at most SOME questions with at most
SOME trajectories each, whatever the recipe says.
"""

from dataclasses import replace

import torch

from plumbing.alarms import alarms
from plumbing.files import console_line
from settings import Settings
from trajectory import Trajectory
from update import TrainState

SOME = 4


def make_small(state: TrainState) -> None:
    """Makes the step of this dry run small."""
    whole = state.settings
    state.settings = state.environment.settings = replace(
        whole,
        questions_per_step=min(whole.questions_per_step, SOME),
        group_size=min(whole.group_size, SOME),
    )
    state.stream.attempts = 1


def report(
    state: TrainState, whole: Settings, record: dict, trajectories: list[Trajectory]
) -> None:
    """Prints the line of the small step, about how long a step of the `whole` run takes, and what
    would keep it from learning. The estimate counts each trajectory of a step like one of these,
    and the update as if it took as long as the rollout.
    """
    environment = state.environment
    prompts = [len(t.prompt_ids) for t in trajectories]
    longest = max(map(environment.max_trajectory_tokens, trajectories))
    each = 2 * record["rollout_seconds"] / len(trajectories)
    step = each * whole.questions_per_step * whole.group_size
    raised = alarms([record], environment.settings, patience=1).values()
    lines = [
        console_line(record),
        f"time: about {step:.0f} s ({step / 60:.1f} minutes) for each of the {whole.steps} steps, "
        f"{each:.2g} s a trajectory (rough: from {len(trajectories)} trajectories)",
        f"prompts: {min(prompts)} to {max(prompts)} tokens; trajectories at most {longest} of "
        f"{environment.max_context} tokens of context",
    ]
    if torch.cuda.is_available():
        lines.append(f"GPU memory: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at its peak")
    lines += map("alarm: {}".format, raised)
    if not raised:
        lines.append("nothing found that would keep the run from learning")
    state.accelerator.print(*lines, sep="\n")
