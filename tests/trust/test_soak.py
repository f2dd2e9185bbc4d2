"""A long run: 300 steps with a retriever that fails on four of every 24 requests, in six ways.
Memory, threads and open files do not grow.
"""

import itertools
import os
import threading
from pathlib import Path

import pytest
from conftest import rows_of, settings_for, threads_since
from test_sockets import Faulty, good, http, with_lists

import train
from plumbing import checkpoint

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
    """Returns a good reply to twenty calls, then one kind of bad reply to four, and so on: a batch
    that fails is sent again in two halves, so four bad replies fail one query of it.
    """
    call = next(calls)
    reply = ILL[call // 24 % len(ILL)] if call % 24 >= 20 else good
    return http(b"", length=100) if reply == "slow" else reply(payload)


def resources(before) -> tuple[int, int, int]:
    """Returns this process's resident bytes, its threads that are not in `before`, and its open
    files.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return (
        pages * os.sysconf("SC_PAGE_SIZE"),
        len(threads_since(before)),
        len(os.listdir("/proc/self/fd")),
    )


def mean(numbers) -> float:
    return sum(numbers) / len(numbers)


@pytest.mark.fault(235)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc/self/statm")
@pytest.mark.parametrize(
    "steps", [pytest.param(300, marks=pytest.mark.trust), pytest.param(40, marks=pytest.mark.slow)]
)
def test_memory_threads_and_open_files_do_not_grow(
    steps, model, tmp_path, started, monkeypatch, capfd
):
    usage, collect, before = [], train.collect, threading.enumerate()

    def watched(state, step):
        usage.append(resources(before))
        return collect(state, step)

    monkeypatch.setattr(train, "collect", watched)
    # With four trajectories in a step, one query may fail most of them; this run goes on.
    for module in (train, checkpoint):
        monkeypatch.setattr(module, "MOST_FAILED", 1)
    server = started(Faulty(flapping))
    more = f"--retriever http --retriever_url {server.base} --timeout 1 --steps {steps}"
    folder = train.train(settings_for(model, tmp_path, more))
    rows = rows_of(folder)
    assert len(rows) == steps and sum(row["search_errors"] > 0 for row in rows) > steps / 20
    assert "Traceback" not in capfd.readouterr().err
    part = min(50, steps // 4)
    memory, threads, files = zip(*usage[part // 5 :], strict=True)  # the first steps fill caches
    assert mean(memory[-part:]) < 1.03 * mean(memory[:part])
    # The last connection may be about to close, so the smallest counts are compared.
    assert min(threads[-part:]) <= max(threads[:part]) and min(files[-part:]) <= max(files[:part])
