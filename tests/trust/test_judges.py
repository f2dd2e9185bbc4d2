"""Models of others that say odd things or nothing: counted, told in one line, never believed on."""

import json

import pytest
from conftest import ScriptedServer, message, said

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
        return Judge(ServerLLM(f"{self.base}#m", 32, 0.5, str(cache)))


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


@pytest.mark.parametrize(
    "reply, verdict", [pytest.param(*its, marks=fault(number)) for number, *its in READ]
)
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


DEAD = [
    (95, (500, b"ill")),
    (96, (429, b"slower")),
    (97, (401, b"who are you?")),
    (98, (200, b"<html>")),
    (99, (200, b"{}")),
    (100, (200, b"[]")),
    (101, (200, b"null")),
    (102, None),
]


@pytest.mark.parametrize(
    "reply", [pytest.param(reply, marks=fault(number)) for number, reply in DEAD]
)
def test_a_dead_server_is_one_line_after_three_batches(reply, started):
    judge = started(Server(reply)).judge()
    for number in range(2):
        assert judge.verdicts(batch(number)) == [None] * 8
    told = message(judge.verdicts, batch(2))
    assert "3 batches in a row without an answer (" in told
    assert "start it again; the replies so far are kept" in told


@fault(103)
def test_a_server_that_is_gone_is_one_line_after_three_batches(started):
    server = started(Server((200, said("yes"))))
    judge = server.judge()
    server.shutdown()
    server.server_close()
    for number in range(2):
        assert judge.verdicts(batch(number)) == [None] * 8
    assert "3 batches in a row without an answer (" in message(judge.verdicts, batch(2))


@fault(106)
def test_a_server_that_was_ill_is_asked_again(started, tmp_path):
    server = started(Server((200, said("I am ill"))))
    judge = server.judge(tmp_path)
    assert judge.verdicts(batch(0)) == [None] * 8
    server.reply = 200, said("yes")
    assert judge.verdicts(batch(0)) == [True] * 8 == server.judge(tmp_path).verdicts(batch(0))


@fault(107)
def test_a_reply_that_was_changed_on_disk_is_asked_for_anew(started, tmp_path, capsys):
    server = started(Server((200, said("no"))))
    server.judge(tmp_path).verdicts(batch(0))
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text().replace('"reply": "no"', '"reply": "yes"'))
    assert server.judge(tmp_path).verdicts(batch(0)) == [False] * 8
    assert capsys.readouterr().err.count("8 replies are not what was written: they are asked") == 1
    records = [record for *_, record in read_records(path)]
    earlier = [{"key": its["key"], "reply": its["reply"]} for its in records[-8:]]
    path.write_text("".join(json.dumps(its) + "\n" for its in earlier))
    asked = len(server.posts)
    assert server.judge(tmp_path).verdicts(batch(0)) == [False] * 8
    assert len(server.posts) == asked + 1  # the probe
