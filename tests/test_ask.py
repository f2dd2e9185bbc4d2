"""ask.py: one question, search by search, and what is searched."""

import dataclasses
import json
import sys
import threading

import pytest
from conftest import command_line

import ask
from data import harmless
from errors import InputError
from retriever import BM25
from retrievers.serve import RetrievalServer
from rollout import main as show_script
from world.world import KINDS, World

KNOWN = World(0).questions("test", "one_hop")[3].question  # every tiny model knows its words


@pytest.fixture
def typed(monkeypatch):
    """typed("line", ...): what is typed into a session, before Ctrl-D."""

    def typed(*lines) -> None:
        lines = iter(lines)

        def line(_) -> str:
            if (said := next(lines, None)) is None:
                raise EOFError
            if isinstance(said, type):
                raise said
            return said

        monkeypatch.setattr("builtins.input", line)

    return typed


@pytest.fixture
def asked(trained, capsys, typed):
    """asked("words", ...) -> what `python ask.py` says, as lines; without words it is /try."""

    def asked(*arguments) -> list[str]:
        typed("/try")
        ask.main([*map(str, arguments), "--output_dir", str(trained)])
        return capsys.readouterr().out.splitlines()

    return asked


@pytest.fixture
def session(trained, capsys, typed):
    """session("line", ...) -> what it answers to these lines, with the stage 1 model."""

    def session(*lines, given=("--run_name", "ur2-world0-seed0", "--stage", "1")) -> str:
        typed(*lines)
        ask.main([*given, "--temperature", "1", "--seed", "5", "--output_dir", str(trained)])
        return capsys.readouterr().out

    return session


@pytest.fixture
def refused(trained, capsys):
    return lambda *words: command_line(ask.main, [*words, "--output_dir", trained], capsys)


def question_in(lines: list[str]) -> str:
    shown = next(line for line in lines if line.startswith("question: "))
    return shown.removeprefix("question: ").split("   gold: ")[0]


def test_a_session_says_what_is_loaded_and_what_it_can_be_asked(asked, trained):
    assert asked()[0] == f"model: {trained}/ur2-world0-seed0/stage2/checkpoint-000002"
    # Greedily this model does not search here, and after stage 2 seldom.
    lines = asked("--run_name", "ur2-world0-seed0", "--stage", 1, "--temperature", 1, "--seed", 5)
    assert lines[0] == f"model: {trained}/ur2-world0-seed0/stage1/checkpoint-000002"
    assert lines[1] == f"searches: the built-in world (bm25, {len(World(0).documents)} documents)"
    assert "sums of 1 to 9; try" in lines[2]
    known = {q.question for kind in KINDS for q in World(0).questions("test", kind)}
    assert {line.strip() for line in lines[3:6]} <= known
    assert question_in(lines) in {q.question for q in World(0).questions("test", "two_hop")}
    assert "⟦" in "".join(lines) and "searches; answer" in lines[-1]
    assert asked("--stage", 0)[0] == "model: the built-in one, before RL"


def test_what_is_heard_is_the_trajectory(trained, monkeypatch, session):
    rows = []
    kept = ask.rollout
    monkeypatch.setattr(ask, "rollout", lambda *given: rows.extend(kept(*given)) or rows[-1:])
    said = session(KNOWN)
    body = said.partition("   gold: ")[2].partition("\n")[2].rpartition("\n[")[0]
    heard = body.replace("⟦", "").replace("⟧", "")
    assert heard.rstrip("\n| ") == harmless(rows[0].text).rstrip("\n| ")
    assert rows[0].searches and body.count("⟦") == sum(
        segment.writer != "model" for segment in rows[0].segments
    )
    # as the same seed gives it unheard
    monkeypatch.setattr(ask.Streamer, "on_finalized_text", lambda *_, **__: None)
    session(KNOWN)
    assert rows[1].response_ids == rows[0].response_ids


def test_another_question_each_time(session):
    said = session("/try", "/try", given=("--run_name", "ur2-world0-seed0"))
    assert len({line for line in said.splitlines() if line.startswith("question: ")}) == 2


def test_a_server_that_is_not_there_is_one_line(refused, closed_port):
    url = f"http://127.0.0.1:{closed_port}"
    assert "no retriever answers" in refused(
        "--stage", 0, "--retriever", "http", "--retriever_url", url
    )


@pytest.mark.parametrize(
    "line, said",
    [
        ("/foo", "error: /foo: unknown; /help lists them"),
        ("/sav x", "did you mean /save?"),
        ("/save /tmp/x.html", "error: /save: nothing was asked yet"),
        ("who is zork ?", "knows only its own world's words; try: "),
        ("What is 17 + 25?", "the model does not know '17'"),
    ],
)
def test_whatever_is_wrong_is_a_line_and_the_session_goes_on(session, line, said):
    heard = session(line, "", "/help", KNOWN)
    assert said in heard and heard.count("error: ") == 1
    assert "/quit" in heard and "searches; answer" in heard.splitlines()[-1]


def test_ctrl_c_stops_an_answer_and_quit_the_session(session, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    kept = ask.rollout
    monkeypatch.setattr(ask, "rollout", stopped)
    heard = session(KNOWN, "/help", "/quit", "/foo")
    assert "\nstopped\n" in heard and "/try" in heard and "/foo" not in heard
    monkeypatch.setattr(ask, "rollout", kept)
    with pytest.raises(KeyboardInterrupt):  # at the prompt: run_main ends with 130
        session(KeyboardInterrupt)


def test_a_model_or_a_disk_that_breaks_is_told_and_the_session_goes_on(session, monkeypatch):
    heard = session(KNOWN, "/save /proc/x.html", KNOWN)
    assert "/proc/x.html" in heard.partition("error: ")[2] and heard.count("searches; answer") == 2

    def broken(*_):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(ask, "rollout", broken)
    assert "error: RuntimeError: no kernel" in session(KNOWN, "/help")


def test_words_that_the_model_does_not_know_are_one_line_with_a_question_it_knows(refused, asked):
    said = refused("who invented the steam engine ?")
    assert "it knows only its own world's words; try: " in said
    known = [World(0).questions(split, "one_hop")[3].question for split in ("train", "dev")]
    for question in (said.rpartition("try: ")[2], *known):  # the answers of its world are known
        assert "   gold: unknown" not in "".join(asked(question))


def test_another_model_is_asked_only_with_something_to_search(model, refused, asked, tmp_path):
    """A foreign model would search the built-in world's inventions, and nobody would notice."""
    given, corpus = ("--model", model), tmp_path / "c.jsonl"
    said = refused(KNOWN, *given)
    assert f"{model} was not trained in the built-in world, so it needs something" in said
    assert "--corpus" in said and "--retriever_url" in said
    corpus.write_text("".join(f'{{"id": "{i}", "title": "t", "text": "x"}}\n' for i in "12"))
    lines = asked(KNOWN, *given, "--corpus", corpus, "--max_turn_tokens", 12)
    assert lines[:2] == [f"model: {model}", f"searches: {corpus} (bm25, 2 documents)"]
    assert question_in(lines) == KNOWN and "gold: unknown" in "".join(lines)
    assert "/try: no questions are known here" in "".join(asked(*given, "--corpus", corpus))
    assert asked(KNOWN, *given, "--retriever", "empty")[1] == "searches: empty"
    # in a protocol without queries they come with the question
    assert "question asked has no references" in refused(KNOWN, *given, "--recipe", "arena")


def test_a_checkpoint_that_learned_from_a_model_of_elsewhere_is_one_too(trained, tmp_path, refused):
    """Only what began as the built-in model knows the built-in world."""
    (last,) = (trained / "ur2-world0-seed0" / "stage2").glob("checkpoint-*2")
    settings = json.loads((last / "settings.json").read_text())
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "settings.json").write_text(json.dumps(settings | {"model": "owner/name"}))
    assert "was not trained in the built-in world" in refused("a ?", "--model", tmp_path)


def test_words_without_quotes_are_one_question(asked):
    assert (
        question_in(asked("where", "was", "ana", "grau", "born", "?"))
        == "where was ana grau born ?"
    )


def test_a_question_file_brings_questions_answers_and_passages(model, tmp_path, asked, refused):
    questions, data = World(0).questions("test", "one_hop")[:3], tmp_path / "q.jsonl"
    data.write_text("".join(json.dumps(dataclasses.asdict(q)) + "\n" for q in questions))
    given = ("--model", model, "--data", data)
    assert "--data needs --corpus" in refused(*given)
    shown = asked(*given, "--corpus", "from-data")
    assert shown[1].startswith("searches: from-data (bm25, ")
    assert question_in(shown) == questions[0].question  # the file's first
    gold = " | ".join(questions[2].answers)
    given = (questions[2].question, *given, "--corpus", "from-data")
    assert f"question: {questions[2].question}   gold: {gold}" in asked(*given)
    given = (questions[2].question, "--model", model, "--data", data, "--recipe", "arena")
    assert asked(*given)[1].endswith("the documents come with the question")


@pytest.mark.parametrize(
    "words, said",
    [
        (["a ?", "--samples", "3"], "ask.py: unknown flag --samples"),
        (["where", "was", "zork", "born", "?"], "knows only its own world's words"),
        (["a ?", "--judge", "m"], "ask.py: --judge has no meaning here"),
        (["a ?", "--sampling_copy", "bf16"], "unknown flag --sampling_copy"),
        (["a ?", "--engine", "hf"], "unknown flag --engine"),
        (["--model", "./nowhere"], "no such directory"),
        (["a ?", "--max_context", "99999"], "the model has"),
    ],
)
def test_bad_input_is_one_line(words, said, refused):
    assert said in refused(*words)
