"""Two launchers on this host act as two machines over TCP. They take the same steps as one machine,
and if a part of the run is gone, the rest ends with a one-line error.
"""

import os
from pathlib import Path

import psutil
import pytest
import torch
from accelerate import Accelerator
from conftest import flags, message, rows_of
from processes import exit_code, in_two_processes, quiet_port, wait_for
from test_launch import start

from scale.shards import check_alike


@pytest.fixture
def one_core():
    """Restricts the processes of a test to one core, so that each uses one thread, however many of
    them share a machine.
    """
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("a process cannot choose its cores here")
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


def machines(logs: Path, arguments: list[str]) -> list:
    """Starts the launchers of a run on two machines with one process each, and returns them."""
    address = f"--num_machines 2 --main_process_ip 127.0.0.1 --main_process_port {quiet_port()}"
    pairs = [(rank, f"{address} --machine_rank {rank}") for rank in (0, 1)]
    return [start("ddp", logs / str(rank), arguments, more) for rank, more in pairs]


@pytest.mark.slow
def test_two_machines_take_exactly_the_steps_of_one_with_two_processes(model, tmp_path, one_core):
    one, two = (tmp_path / name / "t" / "stage1" for name in ("one", "two"))
    runs = [start("ddp", tmp_path / "logs", flags(model, tmp_path / "one", "--algorithm ppo"))]
    runs += machines(tmp_path / "logs2", flags(model, tmp_path / "two", "--algorithm ppo"))
    assert [exit_code(run) for run in runs] == [0, 0, 0]
    assert rows_of(one) == rows_of(two) and len(rows_of(one)) == 2
    for name in ("model.safetensors", "trainer.pt"):
        first, second = (folder / "checkpoint-000002" / name for folder in (one, two))
        assert first.read_bytes() == second.read_bytes()


@pytest.mark.slow
def test_if_one_machine_is_gone_the_other_ends_with_a_one_line_error(model, tmp_path):
    gone, other = machines(tmp_path / "logs", flags(model, tmp_path, "--steps 5000"))
    wait_for(tmp_path / "t" / "stage1" / "metrics.jsonl", "\n", gone)
    for process in [*psutil.Process(gone.pid).children(), gone]:
        process.kill()
    assert exit_code(other) == 1
    assert_one_error_line(tmp_path / "logs" / "1")


@pytest.mark.slow
@pytest.mark.fault(19)
def test_a_process_without_launcher_and_peer_ends_with_a_one_line_error(model, tmp_path):
    launcher = start("ddp", tmp_path / "logs", flags(model, tmp_path, "--steps 5000"))
    wait_for(tmp_path / "t" / "stage1" / "metrics.jsonl", "\n", launcher)
    first, second = psutil.Process(launcher.pid).children()
    for process in (launcher, second):
        process.kill()
    first.wait(100)
    assert_one_error_line(tmp_path / "logs")


def assert_one_error_line(logs: Path) -> None:
    output = "".join(path.read_text() for path in logs.rglob("std*.log"))
    assert output.count("error: ") == 1 and "Traceback" not in output, output


def compare_machines() -> None:
    """Compares two machines that are alike, have different weights, have different checkpoints."""
    rank, model = Accelerator().process_index, torch.nn.Linear(2, 2)
    for value, step, alike in ((1, 2, True), (1 + rank / 2, 2, False), (1, 2 + rank, False)):
        for p in model.parameters():
            torch.nn.init.constant_(p, value)
        if alike:
            check_alike(model, f"checkpoint-{step}")
        else:
            assert "different weights: give all" in message(
                check_alike, model, f"checkpoint-{step}"
            )


def test_machines_that_hold_different_weights_or_checkpoints_do_not_begin():
    in_two_processes(compare_machines)
