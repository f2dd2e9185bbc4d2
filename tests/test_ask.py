"""Tests ask.py: the answer to a question with all searches, the documents, and typed lines."""

import dataclasses
import io
import json

import pytest
from conftest import command_line

import ask
from world.world import KINDS, World

KNOWN = World(0).questions("test", "one_hop")[3].question  # every tiny model knows its words
STAGE_1 = "--run_name ur2-world0-seed0 --stage 1 --temperature 1 --seed 5".split()


@pytest.fixture
def run_ask(trained, capsys, monkeypatch):
    """Returns a function that runs `python ask.py` with typed lines, and returns its output."""

    def run_ask(*arguments, lines=(KNOWN,)) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
        ask.main([*map(str, arguments), "--output_dir", str(trained)])
        return capsys.readouterr().out

    return run_ask


@pytest.fixture
def error_of(trained, capsys):
    return lambda *arguments: command_line(ask.main, [*arguments, "--output_dir", trained], capsys)


def test_without_a_question_it_reads_lines_and_shows_model_documents_and_examples(run_ask, trained):
    assert f"model: {trained}/ur2-world0-seed0/stage2/checkpoint-000002\n" in run_ask()
    # With greedy decoding this model does not search here.
    output = run_ask(*STAGE_1, lines=("", KNOWN, KNOWN))
    assert output.startswith(f"model: {trained}/ur2-world0-seed0/stage1/checkpoint-000002\n")
    documents = len(World(0).documents)
    assert f"searches: the built-in world (bm25, {documents} documents)\n" in output
    known = {q.question for kind in KINDS for q in World(0).questions("train", kind)}
    assert output.splitlines()[3].strip() in known
    assert output.count(f"\nquestion: {KNOWN}   gold: ") == output.count("searches; answer") == 2
    assert "model: the built-in one, before RL\n" in run_ask("--stage", 0)


def test_a_model_that_neither_searches_nor_answers_gets_a_sentence(run_ask, model):
    """No sentence after an answer without a search: the question may need none."""
    options = (KNOWN, "--model", model, "--retriever", "empty", "--max_turn_tokens")
    *_, end, sentence = run_ask(*options, 1).splitlines()
    assert end == "[0 searches; answer None; ended by length]"
    assert sentence.startswith("the model never searched, or never answered in the form of its")
    assert "coldstart" not in run_ask(*options, 40)


def test_a_line_with_words_that_the_model_does_not_know_gets_a_reply_and_the_next_is_read(run_ask):
    output = run_ask("--stage", 0, lines=("What is 17 + 25?", "who is zork ?", KNOWN))
    assert "the model does not know '17': it knows only its own world's words; try: " in output
    assert output.count("the model does not know") == output.count("searches; answer") + 1 == 2


def test_a_foreign_model_needs_documents_to_search(model, error_of, run_ask, tmp_path):
    """Otherwise it would silently search the invented facts of the built-in world."""
    options, corpus = ("--model", model), tmp_path / "c.jsonl"
    error = error_of(KNOWN, *options)
    assert f"{model} was not trained from the built-in model, so it needs something" in error
    corpus.write_text('{"id": "1", "title": "t", "text": "1"}\n')
    words = ("What", "is", "17", "+", "25?")  # several arguments are one question
    output = run_ask(*words, *options, "--corpus", corpus, "--max_turn_tokens", 12)
    assert output.startswith(f"model: {model}\nsearches: {corpus} (bm25, 1 documents)\n")
    assert "\nquestion: What is 17 + 25?\n" in output


def test_a_question_file_supplies_questions_answers_and_passages(model, tmp_path, run_ask):
    question, data = World(0).questions("test", "one_hop")[0], tmp_path / "q.jsonl"
    data.write_text(json.dumps(dataclasses.asdict(question)))
    options = (question.question, "--model", model, "--data", data)
    output = run_ask(*options, "--corpus", "from-data")
    assert "\nsearches: from-data (bm25, " in output
    assert f"\nquestion: {question.question}   gold: {question.answers[0]}\n" in output
