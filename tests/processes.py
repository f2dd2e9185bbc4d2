"""Starts, waits for and ends the processes of tests: every wait has a limit.

A test process has threads (servers, searches that hang). A fork copies the locks that they hold,
and a process that waits for such a lock waits for ever. So tests fork their processes from one
server process, a new interpreter that has imported everything and has no threads.
"""

import contextlib
import functools
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest
import torch
from accelerate.state import AcceleratorState

from errors import run_main

TESTS = Path(__file__).resolve().parent
FORKS = multiprocessing.get_context("forkserver")
STARTED = []  # by the running test
PATIENCE = 100  # seconds; less than the time limit of a test, so that the error shows the log


def start_server() -> None:
    """Starts the server process from which others are forked, unless it already runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS.parent), str(TESTS)]))
        FORKS.set_forkserver_preload(["conftest"])
        forkserver.ensure_running()


# ------------------------------------------------------------------------------------------- start
def start_process(work, *arguments, log: Path | None = None):
    """Starts work(*arguments), which must pickle, in a new process and returns the process, which
    prints into `log` if there is one.
    """
    start_server()
    environment = dict(os.environ)  # the server still has the environment and cores of its start
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    given = (environment, cores, log, work, arguments)
    process = FORKS.Process(target=begin, args=given, daemon=True)
    process.log = log
    process.start()
    STARTED.append(process)
    return process


def begin(environment: dict, cores: set | None, log: Path | None, work, arguments) -> None:
    """Prepares a forked process and runs `work` in it."""
    os.environ.clear()
    os.environ.update(environment)
    if cores:
        os.sched_setaffinity(0, cores)
    if log is not None:
        file = open(log, "a", buffering=1, encoding="utf-8")  # noqa: SIM115, stays open
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
    heed_signals()
    AcceleratorState._reset_state(reset_partial_state=True)
    work(*arguments)


def heed_signals() -> None:
    """Stops ignoring SIGINT, which a background job ignores, and SIGHUP, which nohup ignores."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def as_command(work, *arguments) -> None:
    run_main(lambda: work(*arguments))


def command(log: Path, work, *arguments):
    """Starts `work` as a command: `run_main` determines the exit code and the last line."""
    return start_process(as_command, work, *arguments, log=log)


def as_rank(rank: int, count: int, port: int, environment: dict, work, *arguments) -> None:
    """Runs `work` as one of `count` processes, in the environment that torchrun gives them. The
    test process holds the store through which they meet.
    """
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "ACCELERATE_USE_CPU": "1",
        **environment,
    }
    work(*arguments)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def start_ranks(log: Path, work, *arguments, environment: dict | None = None, count=2) -> list:
    """Starts work(*arguments) in `count` processes that form a group."""
    # With port 0 the store chooses a free port, which nobody else can take in between.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = (count, store.port, environment or {}, work, *arguments)
    ranks = [start_process(as_rank, rank, *given, log=log) for rank in range(count)]
    for process in ranks:
        process.store = store  # this keeps the store alive as long as the processes
    return ranks


def in_processes(count: int, work, *arguments, environment: dict | None = None) -> None:
    """Runs work(*arguments) in `count` processes at once; all must end with exit code 0."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        ranks = start_ranks(log, work, *arguments, environment=environment, count=count)
        codes = exit_codes(ranks)
        assert codes == [0] * count, f"exit codes {codes}\n{log_of(log)}"


in_two_processes = functools.partial(in_processes, 2)


# ------------------------------------------------------------------------------- waiting and ending
def exit_codes(processes: list, grace: float = 1) -> list[int]:
    """Waits for the processes and returns their exit codes. After one has failed, the others are
    killed after `grace` seconds, as a launcher would end them. If none has failed and one does not
    end in PATIENCE seconds, all are killed and the test fails.
    """
    limit, failed = time.monotonic() + PATIENCE, False
    while None in (codes := [process.exitcode for process in processes]):
        if any(codes) and not failed:
            failed, limit = True, time.monotonic() + grace
        if time.monotonic() > limit:
            break
        time.sleep(0.01)
    for process in processes:
        kill(process)
    if None in codes and not failed:
        pytest.fail(f"it does not end:\n{log_of(processes[0].log)}")
    return [process.exitcode for process in processes]


def exit_code(process) -> int:
    return exit_codes([process])[0]


def log_of(log: Path | None) -> str:
    return log.read_text(errors="replace") if log is not None and log.exists() else "(no log)"


def kill(process) -> None:
    """Kills a process and its children."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
    process.kill()
    process.join(60)


def wait_until(there, process=None, log: Path | None = None) -> None:
    """Waits until there() is true. Fails if the process ends before, or after PATIENCE seconds."""
    limit = time.monotonic() + PATIENCE
    while not there():
        over = process is not None and process.exitcode is not None
        if (over and not there()) or time.monotonic() > limit:
            what = f"exit code {process.exitcode}" if over else "it has waited long enough"
            pytest.fail(f"{what}:\n{log_of(log or getattr(process, 'log', None))}")
        time.sleep(0.01)


def wait_for(path: Path, text: str, process=None) -> None:
    """Waits until the file contains this text."""
    wait_until(lambda: path.exists() and text in path.read_text(), process, log=path)


def quiet_port() -> int:
    """Returns a free port below 32,768: the system never chooses one of these when it is asked for
    any free port.
    """
    for port in range(10_000 + os.getpid() * 7 % 20_000, 32_768):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    pytest.fail("no port is free")


@pytest.fixture(autouse=True)
def nothing_goes_on():
    """Kills the processes that a test has started and not ended."""
    yield
    while STARTED:
        kill(STARTED.pop())
