"""Judges whose replies are unreadable or missing: they are counted, and a dead server is a one-line
error.
"""

import pytest
from conftest import message, of_fault, said
from test_llm import Server

from data import Question
from other_models import llm
from other_models.judge import Judge
from other_models.llm import ServerLLM


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    monkeypatch.setattr(llm, "BACKOFF", 0.01)
    monkeypatch.setattr(llm, "RETRIES", 0)
    monkeypatch.setattr(llm, "GIVE_UP", 20)


def judge_of(server: Server, seconds: float = 30.0) -> Judge:
    return Judge(ServerLLM(f"{server.base}#m", 32, seconds))


def batch(number: int) -> list:
    return [(Question(str(n), "who ?", ["me"]), f"answer {number} {n}") for n in range(8)]


READ = [
    (85, said("purple monkey dishwasher"), None),
    (86, said("yes and no"), None),
    (88, said("<think> on and on"), None),
    (89, said("no\n\nbut then:\nyes"), True),
    (90, said(None), None),
]


@pytest.mark.parametrize("reply, verdict", [of_fault(*row) for row in READ])
def test_an_unreadable_reply_is_counted(reply, verdict, started):
    server = started(Server(lambda text: (200, reply)))
    judge = judge_of(server)
    for number in range(4):  # such replies do not mean that the server is down
        assert judge.verdicts(batch(number)) == [verdict] * 8
    assert len(server.texts()) == 32 and judge.unreadable == 32 * (verdict is None)


GONE = 200, said("yes")  # for the probe; then the server is stopped
DEAD = [
    (95, (500, b"ill")),
    (98, (200, b"<html>")),
    (101, (200, b"null")),
    (103, GONE),
]


@pytest.mark.parametrize("reply", [of_fault(*row) for row in DEAD])
def test_a_dead_server_is_a_one_line_error_after_some_requests(reply, started):
    server = started(Server(lambda text: reply))
    judge = judge_of(server)
    if reply is GONE:
        server.stop()
    for number in range(2):
        assert judge.verdicts(batch(number)) == [None] * 8
    error_line = message(judge.verdicts, batch(2))
    assert "20 requests in a row without an answer (" in error_line


@pytest.mark.fault(106)
def test_a_server_that_was_ill_is_asked_again(started):
    server = started(Server(lambda text: "I am ill"))
    judge = judge_of(server)
    assert judge.verdicts(batch(0)) == [None] * 8
    server.say = lambda text: "yes"
    assert judge.verdicts(batch(0)) == [True] * 8
