"""Models of others that say odd things or nothing: counted, told in one line, never believed on."""

import json

import pytest
from conftest import ScriptedServer, message, of_fault, said

from data import Question
from formats.records import read_records
from other_models import llm
from other_models.judge import Judge
from other_models.llm import ServerLLM

fault = pytest.mark.fault


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    monkeypatch.setattr(llm, "BACKOFF", 0.01)
    monkeypatch.setattr(llm, "RETRIES", 0)
    monkeypatch.setattr(llm, "GIVE_UP", 4)


class Server(ScriptedServer):
    """Answers the probe well, and all else with `reply`."""

    def __init__(self, reply):
        super().__init__(self.chat)
        self.base, self.reply = f"{self.base}/v1", reply

    def chat(self, path, payload):
        if payload["messages"][-1]["content"] == llm.PROBE[1]:
            return 200, said("yes")
        return self.reply

    def judge(self, cache="") -> Judge:
        seconds = 30 if self.reply else 0.5  # only silence has to be waited for
        return Judge(ServerLLM(f"{self.base}#m", 32, seconds, str(cache)))


def batch(number: int) -> list:
    return [(Question(str(n), "who ?", ["me"]), f"answer {number} {n}") for n in range(8)]


READ = [
    (85, said("purple monkey dishwasher"), None),
    (86, said("yes and no"), None),
    (87, said(""), None),
    (88, said("<think> on and on"), None),
    (89, said("no\n\nbut then:\nyes"), True),
    (90, said(None), None),
    (91, said(7), None),
    (92, said([{"text": "yes"}]), None),
    (93, said("x" * 3_000_000 + "\nyes"), None),
]


@pytest.mark.parametrize("reply, verdict", [of_fault(*row) for row in READ])
def test_what_cannot_be_read_is_counted_and_not_kept(reply, verdict, started, tmp_path):
    server = started(Server((200, reply)))
    judge = server.judge(tmp_path)
    for number in range(4):
        assert judge.verdicts(batch(number)) == [verdict] * 8
    assert judge.unreadable == (32 if verdict is None else 0)
    (kept,) = tmp_path.iterdir()
    assert len(kept.read_text().splitlines()) == (0 if verdict is None else 32)
    asked = len(server.posts)
    judge.verdicts(batch(0))
    assert len(server.posts) - asked == (8 if verdict is None else 0)


GONE = 200, said("yes")  # and then it is stopped
DEAD = [
    (95, (500, b"ill")),
    (96, (429, b"slower")),
    (97, (401, b"who are you?")),
    (98, (200, b"<html>")),
    (99, (200, b"{}")),
    (100, (200, b"[]")),
    (101, (200, b"null")),
    (102, None),
    (103, GONE),
]


@pytest.mark.parametrize("reply", [of_fault(*row) for row in DEAD])
def test_a_dead_server_is_one_line_after_three_batches(reply, started):
    server = started(Server(reply))
    judge = server.judge()
    if reply is GONE:
        server.stop()
    for number in range(2):
        assert judge.verdicts(batch(number)) == [None] * 8
    told = message(judge.verdicts, batch(2))
    assert "3 batches in a row without an answer (" in told
    assert "start it again; the replies so far are kept" in told


@fault(106)
def test_a_server_that_was_ill_is_asked_again(started, tmp_path):
    server = started(Server((200, said("I am ill"))))
    judge = server.judge(tmp_path)
    assert judge.verdicts(batch(0)) == [None] * 8
    server.reply = 200, said("yes")
    assert judge.verdicts(batch(0)) == [True] * 8 == server.judge(tmp_path).verdicts(batch(0))
