"""ask.py: one question, search by search, and what is searched."""

import dataclasses
import json
import sys
import threading

import pytest
from conftest import command_line

import ask
from errors import InputError
from retriever import BM25
from retrievers.serve import RetrievalServer
from rollout import main as show_script
from world.world import World

KNOWN = World(0).questions("test", "one_hop")[3].question  # every tiny model knows its words


@pytest.fixture
def asked(trained, capsys):
    """asked("words", ...) -> what `python ask.py` says, as lines."""

    def asked(*arguments) -> list[str]:
        ask.main([*map(str, arguments), "--runs", str(trained)])
        return capsys.readouterr().out.splitlines()

    return asked


@pytest.fixture
def refused(trained, capsys):
    return lambda *words: command_line(ask.main, [*words, "--runs", trained], capsys)


def question_in(lines: list[str]) -> str:
    shown = next(line for line in lines if line.startswith("question: "))
    return shown.removeprefix("question: ").split("   gold: ")[0]


def test_without_a_question_a_held_out_one_is_shown_search_by_search(asked, trained):
    assert asked()[0] == f"model: {trained}/ur2-world0-seed0/stage2/checkpoint-000002"
    # Greedily this model does not search here, and after stage 2 seldom.
    lines = asked("--name", "ur2-world0-seed0", "--stage", 1, "--temperature", 1, "--seed", 5)
    assert lines[0] == f"model: {trained}/ur2-world0-seed0/stage1/checkpoint-000002"
    assert lines[1] == f"searches: the built-in world (bm25, {len(World(0).documents)} passages)"
    # ⟦what was found⟧ stands in the trajectory, and above it after its query
    assert lines[2].startswith("search 1: ") and lines[3].startswith("    -> ")
    assert question_in(lines) in {q.question for q in World(0).questions("test", "two_hop")}
    assert "⟦" in "".join(lines) and "searches; answer" in lines[-1]
    assert asked("--stage", 0)[0] == "model: the built-in one, before RL"


def test_words_that_the_model_does_not_know_are_one_line_with_a_question_it_knows(refused, asked):
    said = refused("who invented the steam engine ?")
    assert "it knows only its own world's words; try: " in said
    known = World(0).questions("test", "arithmetic")[3]  # the answers of its own world are known
    for question in (said.rpartition("try: ")[2], known.question):
        assert "   gold: unknown" not in "".join(asked(question))


def test_another_model_is_asked_only_with_something_to_search(model, refused, asked, tmp_path):
    """A foreign model would search the built-in world's inventions, and nobody would notice."""
    given, corpus = ("--model", model), tmp_path / "c.jsonl"
    said = refused(KNOWN, *given)
    assert f"{model} did not begin as the built-in model: say what it shall search" in said
    assert "--corpus" in said and "--retriever_url" in said
    corpus.write_text("".join(f'{{"id": "{i}", "title": "t", "text": "x"}}\n' for i in "12"))
    lines = asked(KNOWN, *given, "--corpus", corpus, "--max_turn_tokens", 12)
    assert lines[:2] == [f"model: {model}", f"searches: {corpus} (bm25, 2 passages)"]
    assert question_in(lines) == KNOWN and "gold: unknown" in "".join(lines)
    assert "what shall be asked?" in refused(*given, "--corpus", corpus)
    assert asked(KNOWN, *given, "--retriever", "empty")[1] == "searches: empty"
    # in a protocol without queries they come with the question
    assert "question asked has no references" in refused(KNOWN, *given, "--recipe", "arena")


def test_a_server_is_asked_in_place_of_a_corpus(model, asked, refused):
    with RetrievalServer(BM25(World(0).documents), port=0) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        given = (KNOWN, "--model", model, "--retriever_url", url)
        assert asked(*given, "--retriever", "http")[1] == f"searches: {url}"
        server.shutdown()
    assert "only --retriever http reads it" in refused(*given)


def test_a_checkpoint_that_learned_from_a_model_of_elsewhere_is_one_too(trained, tmp_path, refused):
    """Only what began as the built-in model knows the built-in world."""
    (last,) = (trained / "ur2-world0-seed0" / "stage2").glob("checkpoint-*2")
    settings = json.loads((last / "settings.json").read_text())
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "settings.json").write_text(json.dumps(settings | {"model": "owner/name"}))
    assert "did not begin as the built-in model" in refused("a ?", "--model", tmp_path)


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
    assert asked(*given)[1].endswith("its passages come with the question")


@pytest.mark.parametrize(
    "words, said",
    [
        (["a ?", "--samples", "3"], "ask.py: unknown flag --samples"),
        (["where", "was", "zork", "born", "?"], "knows only its own world's words"),
        (["a ?", "--judge", "m"], "ask.py: --judge has no meaning here"),
        (["a ?", "--sampling_copy", "bf16"], "unknown flag --sampling_copy"),
        (["--model", "./nowhere"], "no such directory"),
        (["--max_context", "99999"], "the model has"),
    ],
)
def test_bad_input_is_one_line(words, said, refused):
    assert said in refused(*words)


def test_rollout_itself_shows_a_scripted_trajectory_and_its_mask(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rollout.py"])
    show_script()
    text, asked, found, answered = capsys.readouterr().out.split("\n\n")
    assert "1 searches; answer 'Norland'; ended by answer" in text
    assert asked.startswith("model: 'Her") and asked.endswith("mask: {1}")
    assert "ids: [75, 104, 117, " in asked  # H, e, r: the byte and three
    assert found.startswith("documents:") and found.endswith("mask: {0}")
    assert answered.startswith("model: 'So it is") and answered.endswith("mask: {1}\n")
    monkeypatch.setattr(sys, "argv", ["rollout.py", "a question"])
    with pytest.raises(InputError, match="to ask: python"):
        show_script()
