"""Hours in minutes: 300 steps under a retriever that fails each fifth time, each time otherwise."""

import itertools
import os
import threading
from pathlib import Path

import pytest
from conftest import rows_of, settings_for, threads_since
from test_sockets import Faulty, good, http, with_lists

import train
from retrievers import remote

ILL = [
    lambda payload: http(b"ill", code=500),
    lambda payload: good(payload)[:-20],
    lambda payload: b"",
    lambda payload: http(b"<html>"),
    with_lists(-1),
    "slow",
]
calls = itertools.count()


def flapping(payload) -> bytes:
    call = next(calls)
    ill = ILL[call // 6 % len(ILL)] if call % 6 > 3 else good  # also when it is sent again
    return http(b"", length=100) if ill == "slow" else ill(payload)


def now(before) -> tuple[int, int, int]:
    """(resident bytes, threads that were not in `before`, open files) of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return (
        pages * os.sysconf("SC_PAGE_SIZE"),
        len(threads_since(before)),
        len(os.listdir("/proc/self/fd")),
    )


def mean(numbers) -> float:
    return sum(numbers) / len(numbers)


@pytest.mark.fault(235)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells what is resident")
@pytest.mark.parametrize(
    "steps", [pytest.param(300, marks=pytest.mark.trust), pytest.param(40, marks=pytest.mark.slow)]
)
def test_memory_threads_and_files_stay_what_they_are(
    steps, model, tmp_path, started, monkeypatch, capfd
):
    monkeypatch.setattr(remote, "BACKOFF", 0.01)
    monkeypatch.setattr(remote, "RETRIES", 0)
    seen, collect, before = [], train.collect, threading.enumerate()

    def watched(state, step):
        seen.append(now(before))
        return collect(state, step)

    monkeypatch.setattr(train, "collect", watched)
    server = started(Faulty(flapping))
    more = f"--retriever http --retriever_url {server.base} --timeout 1 --steps {steps}"
    folder = train.train(settings_for(model, tmp_path, more))
    rows = rows_of(folder)
    assert len(rows) == steps and sum(row["search_errors"] > 0 for row in rows) > steps / 20
    assert "Traceback" not in capfd.readouterr().err
    part = min(50, steps // 4)
    memory, threads, files = zip(*seen[part // 5 :], strict=True)  # behind the first steps' caches
    assert mean(memory[-part:]) < 1.03 * mean(memory[:part])
    # The last connection may be about to close: what leaks is there at every step.
    assert min(threads[-part:]) <= max(threads[:part]) and min(files[-part:]) <= max(files[:part])
