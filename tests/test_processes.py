"""tests/processes.py itself: what is forked copies no lock, and what is left over is seen."""

import os
import socket
import subprocess
import sys
import threading
from multiprocessing import forkserver
from pathlib import Path

import pytest
from processes import (
    exit_code,
    exit_codes,
    in_two_processes,
    ports_left,
    processes_left,
    start_process,
    threads_left,
    wait_for,
    wait_until,
)

from plumbing import build


def report_imports(out: Path) -> None:
    out.write_text(f"{'train' in sys.modules} {build.set_threads.__name__}")


def test_what_is_forked_has_the_imports_and_its_server_has_no_thread(tmp_path):
    assert exit_code(start_process(report_imports, tmp_path / "out")) == 0
    assert (tmp_path / "out").read_text() == "True <lambda>"  # and takes no more than one core
    tasks = Path(f"/proc/{forkserver._forkserver._forkserver_pid}/task")
    assert not tasks.exists() or len([*tasks.iterdir()]) == 1


LOCK = threading.Lock()


def take_lock() -> None:
    assert LOCK.acquire(timeout=1)


def test_a_lock_that_the_test_holds_is_free_in_what_it_starts():
    with LOCK:
        assert exit_code(start_process(take_lock)) == 0


def hang() -> None:
    print("it hangs", flush=True)
    threading.Event().wait()


def fail_as_second() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("the second one fails")
    hang()


def test_one_of_two_processes_that_fails_ends_the_other_and_its_error_is_shown():
    with pytest.raises(AssertionError, match="the second one fails"):
        in_two_processes(fail_as_second)


def test_what_hangs_is_killed_and_its_log_is_shown(tmp_path, monkeypatch):
    log = tmp_path / "log"
    process = start_process(hang, log=log)
    wait_for(log, "it hangs", process)
    monkeypatch.setattr("processes.PATIENCE", 0)
    with pytest.raises(pytest.fail.Exception, match="it does not end:\nit hangs"):
        exit_codes([process])
    assert process.exitcode == -9
    with pytest.raises(pytest.fail.Exception, match="exit code -9"):
        wait_until(lambda: False, process)


def test_a_process_a_thread_and_a_port_that_are_left_are_seen():
    assert not [*processes_left(), *threads_left(), *ports_left()]
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, name="a thread")
    thread.start()
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert ports_left() == [f"port {server.getsockname()[1]}"]
    assert threads_left() == ["a thread"]
    assert [its.pid for its in processes_left()] == [process.pid]
    ended.set()
    thread.join()
    process.communicate()
