"""Tests ask.py: the answer to a question with all searches, the documents, and typed lines."""

import dataclasses
import json
import re
from types import SimpleNamespace

import pytest
from conftest import command_line

import ask
from data import harmless
from settings import Settings
from world.world import KINDS, World

KNOWN = World(0).questions("test", "one_hop")[3].question  # every tiny model knows its words


@pytest.fixture
def typed(monkeypatch):
    """Returns a function typed("line", ...) that types these lines, and then Ctrl-D."""

    def typed(*lines) -> None:
        lines = iter(lines)

        def read_line(_) -> str:
            if (line := next(lines, None)) is None:
                raise EOFError
            return line

        monkeypatch.setattr("builtins.input", read_line)

    return typed


@pytest.fixture
def run_ask(trained, capsys, typed):
    """Returns a function that runs `python ask.py` and returns the lines of its output. Without a
    question in the arguments, KNOWN is typed.
    """

    def run_ask(*arguments) -> list[str]:
        typed(KNOWN)
        ask.main([*map(str, arguments), "--output_dir", str(trained)])
        return capsys.readouterr().out.splitlines()

    return run_ask


@pytest.fixture
def session(trained, capsys, typed):
    """Returns a function that types lines into a session with the stage 1 model and returns its
    output.
    """

    def session(*lines, options=("--run_name", "ur2-world0-seed0", "--stage", "1")) -> str:
        typed(*lines)
        ask.main([*options, "--temperature", "1", "--seed", "5", "--output_dir", str(trained)])
        return capsys.readouterr().out

    return session


@pytest.fixture
def error_of(trained, capsys):
    return lambda *arguments: command_line(ask.main, [*arguments, "--output_dir", trained], capsys)


def question_in(lines: list[str]) -> str:
    line = next(line for line in lines if line.startswith("question: "))
    return line.removeprefix("question: ").split("   gold: ")[0]


def test_a_session_shows_the_model_the_documents_and_possible_questions(run_ask, trained):
    assert run_ask()[0] == f"model: {trained}/ur2-world0-seed0/stage2/checkpoint-000002"
    # With greedy decoding this model does not search here, and the one after stage 2 rarely does.
    lines = run_ask("--run_name", "ur2-world0-seed0", "--stage", 1, "--temperature", 1, "--seed", 5)
    assert lines[0] == f"model: {trained}/ur2-world0-seed0/stage1/checkpoint-000002"
    assert lines[1] == f"searches: the built-in world (bm25, {len(World(0).documents)} documents)"
    assert "its world of people, cities and companies; ask, for example:" in lines[2]
    known = {q.question for kind in KINDS for q in World(0).questions("test", kind)}
    assert {line.strip() for line in lines[3:6]} <= known
    assert question_in(lines) == KNOWN
    assert "⟦" in "".join(lines) and "searches; answer" in lines[-1]
    assert run_ask("--stage", 0)[0] == "model: the built-in one, before RL"


def test_the_examples_are_of_the_kinds_that_the_protocol_has(capsys):
    one_hop = SimpleNamespace(kind="one_hop", question="where was ana born ?")
    ask.print_examples(SimpleNamespace(settings=Settings(recipe="arena"), questions=[one_hop]))
    assert "for example:\n    where was ana born ?\n" in capsys.readouterr().out


def test_the_streamed_text_is_that_of_the_trajectory(trained, monkeypatch, session):
    rows = []
    original_rollout = ask.rollout
    monkeypatch.setattr(
        ask, "rollout", lambda *a, **named: rows.extend(original_rollout(*a, **named)) or rows[-1:]
    )
    output = session(KNOWN)
    body = output.partition("   gold: ")[2].partition("\n")[2].rpartition("\n[")[0]
    text = body.replace("⟦", "").replace("⟧", "")
    # Documents begin in the line of the query.
    assert text.replace("\n| ", "") == harmless(rows[0].text).replace("\n| ", "")
    assert rows[0].searches and body.count("⟦") == sum(
        segment.writer != "model" for segment in rows[0].segments
    )
    # The same seed gives the same trajectory if the text is not streamed.
    monkeypatch.setattr(ask.Streamer, "on_finalized_text", lambda *_, **__: None)
    session(KNOWN)
    assert rows[1].response_ids == rows[0].response_ids


def test_no_empty_line_is_shown_around_documents(session):
    shown = session(KNOWN)
    assert "<|end_of_query|>⟦<|begin_of_documents|>\n| " in shown
    assert "\n| <|end_of_documents|>⟧\n| " in shown and not re.search(r"\n\| *\n", shown)


def test_a_model_that_neither_searches_nor_answers_gets_a_sentence(run_ask, model):
    """No sentence after an answer without a search: the question may need none."""
    options = (KNOWN, "--model", model, "--retriever", "empty", "--max_turn_tokens")
    *_, end, sentence = run_ask(*options, 1)
    assert end == "[0 searches; answer None; ended by length]"
    assert sentence.startswith("the model never searched, or never answered in the form of its")
    assert "coldstart" not in "".join(run_ask(*options, 40))


def test_a_missing_retrieval_server_is_one_line(error_of, closed_port):
    url = f"http://127.0.0.1:{closed_port}"
    assert "no retriever answers" in error_of(
        "--stage", 0, "--retriever", "http", "--retriever_url", url
    )


@pytest.mark.parametrize(
    "line, reply",
    [
        ("who is zork ?", "knows only its own world's words; try: "),
        ("What is 17 + 25?", "the model does not know '17'"),
    ],
)
def test_a_wrong_line_gets_a_reply_of_one_line_and_the_next_is_read(session, line, reply):
    output = session(line, "", KNOWN)
    assert reply in output and output.count("error: ") == 1
    assert "searches; answer" in output.splitlines()[-1]


def test_words_that_the_model_does_not_know_are_one_line_with_a_known_question(error_of, run_ask):
    error = error_of("who invented the steam engine ?")
    assert "it knows only its own world's words; try: " in error
    known = [World(0).questions(split, "one_hop")[3].question for split in ("train", "dev")]
    # The answers to questions of the built-in world are known.
    for question in (error.rpartition("try: ")[2], *known):
        assert "   gold: " in "".join(run_ask(question))


def test_a_foreign_model_needs_documents_to_search(model, error_of, run_ask, tmp_path):
    """Otherwise it would silently search the invented facts of the built-in world."""
    options, corpus = ("--model", model), tmp_path / "c.jsonl"
    error = error_of(KNOWN, *options)
    assert f"{model} was not trained from the built-in model, so it needs something" in error
    assert "--corpus" in error and "--retriever_url" in error
    corpus.write_text("".join(f'{{"id": "{i}", "title": "t", "text": "x"}}\n' for i in "12"))
    lines = run_ask(KNOWN, *options, "--corpus", corpus, "--max_turn_tokens", 12)
    assert lines[:2] == [f"model: {model}", f"searches: {corpus} (bm25, 2 documents)"]
    assert f"question: {KNOWN}" in lines and "gold: " not in "".join(lines)
    assert run_ask(KNOWN, *options, "--retriever", "empty")[1] == "searches: empty"
    # In a protocol without queries, the documents come with the question.
    assert "question asked has no references" in error_of(KNOWN, *options, "--recipe", "arena")


def test_a_checkpoint_trained_from_a_foreign_model_is_foreign_too(trained, tmp_path, error_of):
    """Only a model whose training began with the built-in model knows the built-in world."""
    (checkpoint,) = (trained / "ur2-world0-seed0" / "stage2").glob("checkpoint-*2")
    settings = json.loads((checkpoint / "settings.json").read_text())
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "settings.json").write_text(json.dumps(settings | {"model": "owner/name"}))
    assert "was not trained from the built-in model" in error_of("a ?", "--model", tmp_path)


def test_several_unquoted_words_are_one_question(run_ask):
    assert (
        question_in(run_ask("where", "was", "ana", "grau", "born", "?"))
        == "where was ana grau born ?"
    )


def test_a_question_file_supplies_questions_answers_and_passages(
    model, tmp_path, run_ask, error_of
):
    questions, data = World(0).questions("test", "one_hop")[:3], tmp_path / "q.jsonl"
    data.write_text("".join(json.dumps(dataclasses.asdict(q)) + "\n" for q in questions))
    options = ("--model", model, "--data", data)
    assert "--data needs --corpus" in error_of(*options)
    lines = run_ask(*options, "--corpus", "from-data")
    assert lines[1].startswith("searches: from-data (bm25, ")
    gold = " | ".join(questions[2].answers)
    options = (questions[2].question, *options, "--corpus", "from-data")
    assert f"question: {questions[2].question}   gold: {gold}" in run_ask(*options)
    options = (questions[2].question, "--model", model, "--data", data, "--recipe", "arena")
    assert run_ask(*options)[1].endswith("the documents come with the question")


@pytest.mark.parametrize(
    "words, error",
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
def test_bad_input_is_one_line(words, error, error_of):
    assert error in error_of(*words)
