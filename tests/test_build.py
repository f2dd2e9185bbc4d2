"""plumbing/build.py and files.py: what settings stand for, and where a run's files lie."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from data import Document, Question, SearchRequest
from errors import InputError
from papers import RECIPES
from plumbing import build
from plumbing.build import (
    as_asked,
    build_parts,
    build_protocol,
    build_search,
    built_in_kinds,
    passages,
    training_questions,
)
from plumbing.files import checkpoints, stage_folder, starting_model
from rewards import check_questions
from settings import Settings, parse, resolve
from update import ALGORITHMS

EVERYWHERE = [(name, stage) for name in RECIPES for stage in RECIPES[name]]


def asked(search, query: str):
    return search([SearchRequest(Question("q", "?", []), query)])[0]


# ------------------------------------------------------------------------- questions and passages


@pytest.mark.parametrize("name, stage", EVERYWHERE)
def test_the_built_in_questions_of_every_stage_have_what_its_reward_reads(name, stage):
    settings = resolve(name, stage, tiny=True)
    questions = check_questions(training_questions(settings), settings)
    assert {question.kind for question in questions} == set(built_in_kinds(settings))
    assert all(question.id.startswith("train/") for question in questions)
    assert len(passages(settings, [])) > 100


def test_without_retrieval_no_question_may_search():
    questions = [Question("q", "?", [])]
    assert as_asked(questions, Settings()) == questions
    assert not as_asked(questions, Settings(retrieval=False))[0].may_search


def test_a_prompt_file_replaces_the_instruction_and_nothing_else(tmp_path):
    (tmp_path / "p.txt").write_text("  Be brief.\n")
    plain = build_protocol(Settings())
    ours = build_protocol(Settings(prompt_file=str(tmp_path / "p.txt")))
    assert ours == dataclasses.replace(plain, instruction="Be brief.")


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--corpus", "{}/none.jsonl"], "no such file"),
        (["--corpus", "{}/empty.jsonl"], "empty"),
        (["--prompt_file", "{}/none.txt"], "--prompt_file"),
        (["--start_from", "{}/none"], "none"),
        (["--resume"], "--resume: no checkpoint"),
    ],
)
def test_what_is_missing_stops_before_the_model_is_loaded(flags, said, tmp_path, monkeypatch):
    (tmp_path / "empty.jsonl").write_text("")
    monkeypatch.setattr(build, "load_trained", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(InputError, match=said) as error:
        build_parts(parse([flag.format(tmp_path) for flag in flags] + ["--runs", str(tmp_path)]))
    assert "\n" not in str(error.value)


# ----------------------------------------------------------------------------------------- search


def test_search_honours_retriever_boost_and_number_of_documents():
    settings = resolve("ur2", 1, True, {"documents_per_search": 3, "summarizer": "none"})
    documents = passages(settings, [])
    found = asked(build_search(settings, documents), f"about {documents[5].title}")
    assert len(found.documents) == 3 and found.documents[0] == documents[5] and not found.fallback
    nothing = dataclasses.replace(settings, retriever="empty")
    assert asked(build_search(nothing, documents), "x").documents == []


def test_a_protocol_that_asks_nothing_builds_no_retriever(monkeypatch):
    seen = []
    monkeypatch.setattr(
        build, "make_retriever", lambda documents, settings, *_: seen.append(settings)
    )
    build_search(resolve("arena", 1, True, {"retriever": "dense", "encoder": "e5"}), [])
    assert [settings.retriever for settings in seen] == ["empty"]


def test_a_model_that_summarises_has_its_time_and_its_log(monkeypatch, tmp_path):
    """A search waits for all tries of its model too: three requests of --timeout each."""
    monkeypatch.setattr(build, "build_llm", lambda *_: SimpleNamespace(ask=lambda r: ["Notes."]))
    settings, log = Settings(retriever="oracle", timeout=5.0), tmp_path / "log.jsonl"
    assert not hasattr(build_search(settings, []), "seconds")
    search = build_search(dataclasses.replace(settings, summarizer="m"), [], log=str(log))
    assert search.seconds(7) == 15
    monkeypatch.setattr(build, "make_retriever", lambda *_: SimpleNamespace(seconds=lambda n, k: n))
    elsewhere = build_search(dataclasses.replace(settings, summarizer="m"), [])
    assert elsewhere.seconds(7) == 22
    references = (Document("1", "Ana", "Born in Kelmouth."),)
    question = Question("q", "?", [], references=references, supporting=(1,))
    assert search([SearchRequest(question, "Ana")])[0].text == "Notes."
    assert json.loads(log.read_text())["summary"] == "Notes."


def test_a_retriever_elsewhere_needs_no_corpus_here():
    flags = ["--retriever", "http", "--retriever_url", "http://x", "--data", "q", "--model", "m"]
    assert passages(parse(flags), []) == []


# ----------------------------------------------------------------------------------- where it lies


def test_a_run_is_named_after_paper_data_and_seed_unless_it_has_a_name():
    assert str(stage_folder(Settings(world_seed=3, seed=1))) == "runs/ur2-world3-seed1/stage1"
    several = Settings(data="d/hotpot.json,x.json", stage=2)
    assert str(stage_folder(several, 1)) == "runs/ur2-hotpot-seed0/stage1"
    assert str(stage_folder(Settings(name="mine", runs="r"))) == "r/mine/stage1"


def test_only_finished_checkpoints_count_oldest_first(tmp_path):
    for name in ("000010", "000002", "000030.partial"):
        (tmp_path / f"checkpoint-{name}").mkdir()
    (tmp_path / "predictions").mkdir()
    assert [p.name for p in checkpoints(tmp_path)] == ["checkpoint-000002", "checkpoint-000010"]
    assert checkpoints(tmp_path / "nowhere") == []


def test_a_stage_starts_from_what_it_is_told_then_from_stage_1_then_from_the_model(tmp_path):
    settings = Settings(runs=str(tmp_path), name="r", stage=2)
    start, said = starting_model(settings)
    assert start == "" and "there is no stage 1 checkpoint in" in said
    (tmp_path / "r" / "stage1" / "checkpoint-000004").mkdir(parents=True)
    assert starting_model(settings)[0].endswith("stage1/checkpoint-000004")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    assert starting_model(dataclasses.replace(settings, start_from=str(other)))[0] == str(other)
    (tmp_path / "r" / "stage2" / "checkpoint-000002").mkdir(parents=True)
    again = dataclasses.replace(settings, start_from=str(other), resume=True)
    assert starting_model(again)[0].endswith("stage2/checkpoint-000002")


def test_every_algorithm_has_what_the_loop_calls():
    for module in ALGORITHMS.values():
        for name in ("compute_advantages", "compute_token_weights", "compute_loss"):
            assert callable(getattr(module, name))
