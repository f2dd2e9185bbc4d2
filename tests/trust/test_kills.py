"""Stopped runs (kill -9 at any moment, SIGTERM), when resumed, end exactly as unbroken runs do."""

import contextlib
import functools
import itertools
import os
import random
import signal
import time
from pathlib import Path

import pytest
from conftest import flags, rows_of, same_end
from processes import as_command, command, exit_code, exit_codes, start_ranks, wait_for

import train
from flags import DAPO
from formats.trajectories import read_trajectories
from plumbing import checkpoint, files
from plumbing.files import checkpoints
from world import toy

fault = pytest.mark.fault
ALGORITHMS = {
    "grpo": "--algorithm grpo --kl_coef 0.05",
    "reinforce_pp_baseline": "--algorithm reinforce_pp_baseline",
    "dapo": "--algorithm dapo",
    "ppo": "--algorithm ppo",
}
FAULTS = {"reinforce_pp_baseline": 1, "grpo": 2, "dapo": 3, "ppo": 4}
STEPS = "--steps 8 --save_every 2 --keep_checkpoints 2"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_before(owner, name: str, nth: int = 1) -> None:
    """Replaces `owner.name`: its nth call kills this process."""
    real, calls = getattr(owner, name), []

    def counted(*arguments, **named):
        calls.append(name)
        if len(calls) == nth:
            die()
        return real(*arguments, **named)

    setattr(owner, name, counted)


def kill_half_deleted() -> None:
    """Replaces `shutil.rmtree`: on a checkpoint it deletes one file and kills this process."""

    def half_deleted(path, **_):
        if path.exists() and path.name.startswith("checkpoint"):
            (path / "config.json").unlink()
            die()

    files.shutil.rmtree = half_deleted


# the moment of the kill -> (number of the fault, function that prepares the kill, arguments of it)
POINTS = {
    "before the rename": (8, kill_before, Path, "rename", 2),
    "after the rename": (9, kill_before, checkpoint, "prune", 2),
    "an old checkpoint half deleted": (10, kill_half_deleted),
    "metrics rewritten in a resume": (12, kill_before, os, "replace", 1),
    "trajectories rewritten in a resume": (12, kill_before, Path, "replace", 1),
}


def train_run(arguments: list[str]) -> None:
    """Runs the training command; tests start it in a separate process."""
    # All of the model's answers are wrong, so the filter by correctness would drop every group.
    DAPO["filter_by"] = "total"
    train.main(arguments)


def killed_at(point: str, arguments: list[str]) -> None:
    """Runs the training command; the first process is killed at this point."""
    if os.environ.get("RANK", "0") == "0":
        _, prepare_kill, *kill_arguments = POINTS[point]
        prepare_kill(*kill_arguments)
    train_run(arguments)


QUICK = ("before the rename", "after the rename", "metrics rewritten in a resume")


def start(processes: int, log: Path, work, *arguments) -> list:
    """Starts a run in one process or in two, which print into `log`."""
    if processes == 1:
        return [command(log, work, *arguments)]
    return start_ranks(log, as_command, work, *arguments)


def send(run: list, number: int) -> None:
    for process in run:
        with contextlib.suppress(ProcessLookupError):  # it may have ended already
            os.kill(process.pid, number)


@pytest.fixture(scope="module")
def unbroken(model, tmp_path_factory):
    """Returns a function from (algorithm, processes) to the stage folder of the unbroken run and
    the seconds that the run took.
    """

    @functools.cache
    def run(algorithm: str, processes: int) -> tuple[Path, float]:
        runs, started_at = tmp_path_factory.mktemp("unbroken"), time.monotonic()
        arguments = flags(model, runs, f"{ALGORITHMS[algorithm]} {STEPS}")
        codes = exit_codes(start(processes, runs / "log", train_run, arguments))
        assert codes == [0] * processes, (runs / "log").read_text()
        return runs / "t" / "stage1", time.monotonic() - started_at

    return run


def assert_resumes_alike(model, runs, algorithm: str, processes: int, unbroken) -> None:
    """Resumes the killed run and asserts that it ends as the unbroken run does."""
    folder, whole = runs / "t" / "stage1", unbroken(algorithm, processes)[0]
    done = checkpoints(folder)
    more = " --resume" * bool(done)
    arguments = flags(model, runs, f"{ALGORITHMS[algorithm]} {STEPS}{more}")
    if not done or files.step_of(done[-1]) < 8:  # otherwise the kill came after the last step
        codes = exit_codes(start(processes, runs / "log", train_run, arguments))
        assert codes == [0] * processes, (runs / "log").read_text()
    assert same_end(folder, whole)
    of_steps, expected = ([t["step"] for t in read_trajectories(x)] for x in (folder, whole))
    assert of_steps == expected and not [*folder.glob("*.partial")]


def cases(faults: dict, quick=()) -> list:
    """Returns each name in `faults` with each algorithm, in one process and in two. Outside
    `make trust` only the names in `quick` run, and those only with GRPO in one process.
    """
    params = []
    for name, algorithm, processes in itertools.product(faults, ALGORITHMS, (1, 2)):
        marks = [fault(FAULTS[algorithm], *faults[name]), *[fault(5)] * (processes == 2)]
        if name not in quick or (algorithm, processes) != ("grpo", 1):
            marks.append(pytest.mark.trust)
        params.append(pytest.param(name, algorithm, processes, marks=marks))
    return params


@pytest.mark.parametrize("moment, algorithm, processes", cases(dict.fromkeys(range(20), ())))
def test_a_kill_at_a_random_moment(moment, algorithm, processes, model, unbroken, tmp_path):
    seconds = unbroken(algorithm, processes)[1]
    arguments = flags(model, tmp_path, f"{ALGORITHMS[algorithm]} {STEPS}")
    run = start(processes, tmp_path / "log", train_run, arguments)
    time.sleep(random.Random(f"{algorithm} {processes} {moment}").uniform(0.05, 1) * seconds)
    send(run, signal.SIGKILL)
    exit_codes(run)
    assert_resumes_alike(model, tmp_path, algorithm, processes, unbroken)


@pytest.mark.slow
@pytest.mark.parametrize(
    "point, algorithm, processes", cases({name: point[:1] for name, point in POINTS.items()}, QUICK)
)
def test_a_kill_at_a_chosen_point(point, algorithm, processes, model, unbroken, tmp_path):
    first, log = flags(model, tmp_path, f"{ALGORITHMS[algorithm]} {STEPS}"), tmp_path / "log"
    if "in a resume" in point:
        exit_codes(start(processes, log, killed_at, "before the rename", first))
        first.append("--resume")
    codes = exit_codes(start(processes, log, killed_at, point, first))
    assert codes[0] == -signal.SIGKILL, log.read_text()
    assert_resumes_alike(model, tmp_path, algorithm, processes, unbroken)


# ------------------------------------------------------------------------------- the built-in model
def slow_first_run(arguments: list[str]) -> None:
    """Runs the training command with a warm-up that takes a minute."""

    def slow_warm_up(*_):
        print("warming up", flush=True)
        time.sleep(60)

    toy.warm_up = slow_warm_up
    train.main(arguments)


@fault(15)
def test_sigterm_in_the_warm_up(tmp_path):
    log = tmp_path / "log"
    process = command(log, slow_first_run, ["--output_dir", str(tmp_path), "--dry_run"])
    wait_for(log, "warming up", process)
    process.terminate()
    assert exit_code(process) == 143 and "ended by SIGTERM" in log.read_text()


# ------------------------------------------------------------------------------ SIGTERM, launchers
LONG = "--steps 5000 --save_every 5000"


@fault(21)
@pytest.mark.parametrize("processes", [1, 2])
def test_sigterm_saves_what_was_learned(processes, model, tmp_path):
    folder, log = tmp_path / "t" / "stage1", tmp_path / "log"
    run = start(processes, log, train.main, flags(model, tmp_path, LONG))
    wait_for(folder / "metrics.jsonl", '"step": 2', run[0])
    send(run, signal.SIGTERM)
    codes, text = exit_codes(run, grace=60), log.read_text()
    assert codes[0] == 143 and "Traceback" not in text, text
    assert "ended by SIGTERM; last checkpoint:" in text
    (saved,) = checkpoints(folder)
    assert files.step_of(saved) in (len(rows_of(folder)), len(rows_of(folder)) - 1)
