"""ask.py: one question, search by search, and what is searched."""

import json
import sys

import pytest
from conftest import command_line

import ask
from data import load_questions
from errors import InputError
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


@pytest.fixture
def corpus(tmp_path) -> str:
    (tmp_path / "notes").mkdir()
    for town in ("kelmouth", "varen"):
        (tmp_path / "notes" / f"{town}.txt").write_text(f"{town} is a town .\n")
    return str(tmp_path / "notes")


def question_in(lines: list[str]) -> str:
    shown = next(line for line in lines if line.startswith("question: "))
    return shown.removeprefix("question: ").split("   gold: ")[0]


def test_without_a_question_a_held_out_one_is_shown_search_by_search(asked):
    lines = asked("--temperature", 1)  # greedily this model does not search here
    assert lines[0].endswith("stage2/checkpoint-000002") and lines[0].startswith("model: ")
    assert lines[1] == f"searches: the built-in world (bm25, {len(World(0).documents)} passages)"
    # ⟦what was found⟧ stands in the trajectory, and above it after its query
    assert lines[2].startswith("search 1: ") and lines[3].startswith("    -> ")
    assert question_in(lines) in {q.question for q in World(0).questions("test", "two_hop")}
    assert "⟦" in "".join(lines) and "searches; answer" in lines[-1]
    assert asked("--stage", 0)[0] == "model: the built-in one, before RL"


@pytest.mark.parametrize("kind", ["one_hop", "arithmetic"])
def test_the_answer_to_a_question_of_its_own_world_is_known(kind, asked):
    question = World(0).questions("test", kind)[3]
    gold = " | ".join(question.answers)
    assert f"question: {question.question}   gold: {gold}" in asked(question.question)


def test_words_that_the_model_does_not_know_are_one_line_with_a_question_it_knows(refused, asked):
    said = refused("who invented the steam engine ?")
    assert "it knows only its own world's words; try: " in said
    assert "   gold: unknown" not in "".join(asked(said.rpartition("try: ")[2]))


def test_another_model_is_asked_only_with_something_to_search(model, refused, asked, corpus):
    """A foreign model would search the built-in world's inventions, and nobody would notice."""
    for question in (KNOWN, ""):
        said = refused(question, "--model", model)
        assert f"--model {model} knows nothing of the built-in world" in said
        assert "--corpus" in said and "--retriever_url" in said
    lines = asked(KNOWN, "--model", model, "--corpus", corpus, "--max_turn_tokens", 12)
    assert lines[:2] == [f"model: {model}", f"searches: {corpus} (bm25, 2 passages)"]
    assert question_in(lines) == KNOWN and "gold: unknown" in "".join(lines)
    assert "what shall be asked?" in refused("--model", model, "--corpus", corpus)
    nothing = asked(KNOWN, "--model", model, "--retriever", "empty")
    assert nothing[1] == "searches: nothing (empty)"
    # a protocol without queries has its passages from the question
    assert "question asked has no references" in refused(
        KNOWN, "--model", model, "--recipe", "arena"
    )


def test_a_server_is_asked_in_place_of_a_corpus(model, trained, monkeypatch, asked, refused):
    monkeypatch.setattr(ask, "build_search", lambda settings, documents, device: documents.clear)
    monkeypatch.setattr(ask, "rollout", lambda *_: [ask.Trajectory(None, None)])
    monkeypatch.setattr(ask, "show", lambda _: "")
    url = "http://127.0.0.1:9"
    lines = asked(KNOWN, "--model", model, "--retriever", "http", "--retriever_url", url)
    assert lines[1] == f"searches: {url} (http)"
    assert "say what it shall search" in refused("a ?", "--model", model, "--retriever_url", url)


def test_a_checkpoint_that_learned_from_a_model_of_elsewhere_is_one_too(trained, tmp_path, refused):
    """Only what began as the built-in model knows the built-in world."""
    (last,) = (trained / "ur2-world0-seed0" / "stage2").glob("checkpoint-*2")
    settings = json.loads((last / "settings.json").read_text())
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "settings.json").write_text(json.dumps(settings | {"model": "owner/name"}))
    assert "knows nothing of the built-in world" in refused("a ?", "--model", tmp_path)


def test_a_question_file_brings_questions_answers_and_passages(model, tmp_path, asked, refused):
    questions = World(0).questions("test", "one_hop")[:3]
    lines = []
    for q in questions:
        found = [{"id": d.id, "title": d.title, "text": d.text} for d in q.references]
        lines.append(
            {"id": q.id, "question": q.question, "answers": q.answers, "references": found}
        )
    data = tmp_path / "q.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = ("--model", model, "--data", data)
    assert "--data needs --corpus" in refused(*given)
    shown = asked(*given, "--corpus", "from-data")
    count = len({d.text for q in load_questions(data) for d in q.references})
    assert shown[1] == f"searches: the paragraphs of {data} (bm25, {count} passages)"
    assert question_in(shown) == questions[0].question  # the file's first
    gold = " | ".join(questions[2].answers)
    again = asked(questions[2].question, *given, "--corpus", "from-data")
    assert f"question: {questions[2].question}   gold: {gold}" in again


@pytest.mark.parametrize(
    "words, said",
    [
        (["a ?", "--lr", "3"], "ask.py: unknown flag --lr"),
        (["a ?", "--samples", "3"], "ask.py: unknown flag --samples"),
        (["a ?", "b ?"], "unknown flag b ?"),
        (["a ?", "--judge", "m"], "ask.py: --judge has no meaning here"),
        (["a ?", "--sampling_copy", "bf16"], "unknown flag --sampling_copy"),
        (["--model", "./nowhere"], "no such directory"),
        (["--max_context", "99999"], "the model has"),
    ],
)
def test_bad_input_is_one_line(words, said, refused):
    assert said in refused(*words)


def test_help_names_every_section_and_loads_nothing(monkeypatch, capsys):
    monkeypatch.setattr(ask, "settings_of", lambda *_: pytest.fail("settings were looked for"))
    with pytest.raises(SystemExit) as end:
        ask.main(["--help"])
    said = capsys.readouterr().out
    assert end.value.code == 0 and "\nrollout.py:\n" in said and "\nretriever.py:\n" in said


def test_rollout_itself_shows_a_scripted_trajectory_text_ids_and_mask(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rollout.py"])
    show_script()
    text, tokens = capsys.readouterr().out.split("\n\n")
    assert "1 searches; answer 'Norland'; ended by answer" in text
    masks = [line.split(maxsplit=2) for line in tokens.splitlines()[1:]]
    told = {token: mask for mask, _, token in masks}
    assert told["'<search>'"] == told["'</answer>'"] == "1" and told["'<information>'"] == "0"
    monkeypatch.setattr(sys, "argv", ["rollout.py", "a question"])
    with pytest.raises(InputError, match="to ask: python"):
        show_script()
