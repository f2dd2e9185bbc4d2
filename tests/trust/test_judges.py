"""Judges whose server is ill or dead: after some requests without an answer, a one-line error."""

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


GONE = 200, said("yes")  # for the probe; then the server is stopped
DEAD = [
    (95, (500, b"ill")),
    (98, (200, b"<html>")),
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
