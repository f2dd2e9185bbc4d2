"""Tests of tests/processes.py: a process that fails or hangs fails the test that started it."""

import os
import threading

import pytest
from processes import (
    exit_codes,
    in_two_processes,
    start_process,
    wait_for,
    wait_until,
)


def hang() -> None:
    print("it hangs", flush=True)
    threading.Event().wait()


def fail_as_second() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("the second one fails")
    hang()


def test_if_one_of_two_processes_fails_the_other_is_ended_and_the_error_is_shown():
    with pytest.raises(AssertionError, match="the second one fails"):
        in_two_processes(fail_as_second)


def test_a_process_that_hangs_is_killed_and_its_log_is_shown(tmp_path, monkeypatch):
    log = tmp_path / "log"
    process = start_process(hang, log=log)
    wait_for(log, "it hangs", process)
    monkeypatch.setattr("processes.PATIENCE", 0)
    with pytest.raises(pytest.fail.Exception, match="it does not end:\nit hangs"):
        exit_codes([process])
    assert process.exitcode == -9
    with pytest.raises(pytest.fail.Exception, match="exit code -9"):
        wait_until(lambda: False, process)
