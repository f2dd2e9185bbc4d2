"""plumbing/build.py and files.py: what settings stand for, and where a run's files lie."""

import dataclasses
import json
import os
import re
from types import SimpleNamespace

import pytest
from conftest import message

from data import Document, Question, SearchRequest
from errors import InputError
from papers import RECIPES
from plumbing import build
from plumbing import questions as questions_file
from plumbing.files import checkpoints, prompt_sections, settings_text
from prompts import PROTOCOLS
from rewards import check_questions
from settings import Settings, resolve, stage_folder
from summarizer import FALLBACK_TEXT
from world.world import LOOK_UPS

EVERYWHERE = [(name, stage) for name in RECIPES for stage in RECIPES[name]]
READ = (Document("1", "Ana", "Born in Kelmouth."),)


# ------------------------------------------------------------------------- questions and passages


@pytest.mark.parametrize("name, stage", EVERYWHERE)
def test_the_built_in_questions_of_every_stage_have_what_its_reward_reads(name, stage):
    settings = resolve(name, stage, tiny=True)
    questions = check_questions(questions_file.training_questions(settings), settings)
    tasks = settings.direct_tasks.split(",")
    assert all(q.may_search == (q.kind != "direct" and q.task not in tasks) for q in questions)
    assert all(question.id.startswith("train/") for question in questions)
    assert len(questions_file.load_documents(settings, [])) > 100


def test_a_share_of_training_golds_is_worded_otherwise_and_none_that_is_evaluated():
    settings = resolve("r1_searcher", 2, True, {"reworded": 0.7})
    asked = questions_file.training_questions(settings)
    plain = questions_file.training_questions(dataclasses.replace(settings, reworded=0.0))
    changed = [(q, p) for q, p in zip(asked, plain, strict=True) if q != p]
    assert all(q.answers == [f"{p.answers[0]} proper"] for q, p in changed)
    assert {q.kind for q, _ in changed} == {*LOOK_UPS}
    assert len(changed) / sum(q.kind in LOOK_UPS for q in asked) == pytest.approx(0.7, abs=0.05)
    held_out = questions_file.world_questions(settings, "test")
    assert all(" proper" not in question.answers[0] for question in held_out)


def test_without_retrieval_no_question_may_search_and_of_a_file_alone_nothing_is_searched():
    questions = [Question("q", "?", [])]
    assert questions_file.as_asked(questions, Settings()) == questions
    assert not questions_file.as_asked(questions, Settings(retrieval=False))[0].may_search
    assert questions_file.load_documents(Settings(data="q"), questions) == []


@pytest.mark.parametrize(
    "protocol, question, said",
    [
        ("arena", {}, "has no references"),
        ("arena", {"references": READ, "task": "summary"}, "--variant summaries is for"),
        ("arena_summary", {"references": READ}, "is of task qa"),
    ],
)
def test_what_arena_s_prompt_lacks_is_one_line_before_a_model_is_loaded(protocol, question, said):
    asked = [Question("q", "?", ["a"], **question)], Settings(protocol=protocol)
    assert re.search(f"question q .*{said}", message(questions_file.as_asked, *asked))
    assert questions_file.as_asked([Question("q", "?", ["a"])], Settings())  # the others read none


def test_held_out_questions_are_drawn_with_the_seed_and_not_trained_on():
    questions = [Question(str(i), "?", ["a"]) for i in range(50)]
    own = Settings(data="q", model="m", eval_every=2, eval_questions=10)

    def hold_out(**changes):
        return questions_file.hold_out(questions, dataclasses.replace(own, **changes))

    trained_on, held_out = hold_out()
    assert (trained_on, held_out) == hold_out() != hold_out(seed=1)
    assert len(held_out) == 10 and {*map(id, trained_on + held_out)} == {*map(id, questions)}
    assert hold_out(eval_every=0) == (questions, [])
    error = message(questions_file.hold_out, questions[:10], own)
    assert re.search(r"--eval_every: 10 questions are held out, .* has 10", error)
    # the built-in world has a split for it; they are asked as the others are
    trained_on, held_out = hold_out(data="", retrieval=False)
    assert trained_on == questions and len(held_out) == 50
    assert all(q.id.startswith("dev/") and not q.may_search for q in held_out)


TAGGED = "Be brief: <|begin_of_query|> ask, \\boxed{} answer."  # the tags must be in it


def prompted(tmp_path, text, **given) -> Settings:
    (tmp_path / "p.txt").write_text(text)
    return Settings(prompt_file=str(tmp_path / "p.txt"), **given)


def test_a_prompt_file_without_sections_is_the_policys_instruction_and_nothing_else(tmp_path):
    ours = build.build_protocol(prompted(tmp_path, f"  {TAGGED}\n"))
    # the built-in world's tiny models know no other words for a fallback
    changes = {"prompts": {"policy": TAGGED}, "fallback_text": FALLBACK_TEXT}
    assert ours == dataclasses.replace(PROTOCOLS["ur2"], **changes)


def test_only_the_tiny_models_read_none_for_a_fallback(tmp_path):
    def shown(**given) -> str:
        return build.build_protocol(Settings(**given)).fallback_text

    papers = PROTOCOLS["ur2"].fallback_text
    (tmp_path / "settings.json").write_text(settings_text(Settings()))
    trained = str(tmp_path)
    assert shown() == shown(retriever="http") == shown(model=trained, corpus="c") == FALLBACK_TEXT
    assert shown(model="m") == FALLBACK_TEXT  # the built-in world's questions and documents
    assert shown(model="m", retriever="http") == shown(model="m", corpus="c") == papers
    assert shown(model="m", data="d") == papers != FALLBACK_TEXT


def test_a_file_has_sections_a_folder_has_files_and_both_say_the_same(tmp_path):
    others = {"policy:direct:math": "A \\boxed{sum}.", "judge": "Is [it]?\n[no 1]"}
    sections = {"policy": TAGGED} | others
    text = TAGGED + "".join(f"\n[{name}] \n{words}\n" for name, words in others.items())
    settings = prompted(tmp_path, text, judge="m")
    assert prompt_sections(settings) == sections
    folder = tmp_path / "prompts"
    folder.mkdir()
    for name, words in sections.items():
        (folder / f"{name.replace(':', '.')}.txt").write_text(words)
    assert prompt_sections(dataclasses.replace(settings, prompt_file=str(folder))) == sections
    # the judge's is no prompt of the policy, and another one makes no other predictions
    assert build.build_protocol(settings).prompts.keys() == {"policy", "policy:direct:math"}


def test_judge_and_reader_are_told_what_the_prompt_file_has_for_them(tmp_path, monkeypatch):
    text = "[judge]\nBe just.\n[reader]\nRead {evidence}: {question}"
    settings = prompted(tmp_path, text, judge="m", reader="m")
    llm = SimpleNamespace()
    monkeypatch.setattr(build, "load_llm", lambda *_, **__: llm)
    for ask, told in (
        (build.build_judge, "Be just."),
        (build.build_reader, "Read {evidence}: {question}"),
    ):
        ask(settings)
        assert llm.instruction == told


def test_a_prompt_file_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe: a pipe or a device"):
        build.build_protocol(Settings(prompt_file=str(tmp_path / "pipe")))


def test_a_prompt_without_the_tags_that_are_read_is_one_line(tmp_path):
    settings = prompted(tmp_path, "Be brief: \\boxed{} answer.")
    said = message(build.build_protocol, settings)
    assert "protocol ur2 is parsed by its tags: the text must show <|begin_of_query|>" in said
    build.build_protocol(dataclasses.replace(settings, retrieval=False))  # it may not search


@pytest.mark.parametrize(
    "text, said",
    [
        ("[judge]\n \n[reader]\nRead.", "p.txt, section judge: it is empty"),
        (" \n", "p.txt, section policy: it is empty"),
        ("[juge]\nBe just.", "section juge: unknown; one of judge, reader, policy, policy:direct,"),
        ("[policy:maths]\nAdd.", "section policy:maths: unknown"),
        ("[policy:direct]\nAdd.", "section policy:direct: .* the text must show .boxed"),
        ("[policy:choice]\n<|begin_of_query|>", "the text must show correct answer is"),
        ("[summarizer]\nBe brief.", "p.txt: none of its sections is for a model of this run"),
        ("[judge]\nIs {gold} right?", "section judge: the gap {gold} is unknown or missing"),
        ("[reader]\nRead {evidence}.", "the gap {question} is unknown or missing"),
        ("[policy:math]\n{options} \\boxed{}", "the gap {question} is unknown or missing"),
        ("[policy]\n{question} {evidence}", "policy: the gap {evidence} is unknown or missing"),
        ("[policy]\n{question} {references}", "the gap {references} is unknown or missing"),
        ("[summarizer:math]\n{query}", "section summarizer:math: the gap {documents} is"),
    ],
)
def test_a_prompt_file_that_cannot_be_used_is_one_line_with_its_section(text, said, tmp_path):
    with pytest.raises(InputError, match=said) as error:
        prompt_sections(prompted(tmp_path, text), strict=True)
    assert "\n" not in str(error.value)


def test_of_arena_a_layout_has_references_and_an_empty_folder_is_one_line(tmp_path):
    tags = "<answer> a </answer> {question}"
    said = message(prompt_sections, prompted(tmp_path, tags, protocol="arena"))
    assert "the gap {references} is unknown or missing" in said
    (tmp_path / "empty").mkdir()
    said = message(prompt_sections, Settings(prompt_file=str(tmp_path / "empty")), True)
    assert "empty: none of its sections is for a model of this run" in said


# ----------------------------------------------------------------------------------------- search


def test_search_honours_boost_and_number_of_documents():
    settings = resolve("ur2", 1, True, {"documents_per_search": 3, "summarizer": "none"})
    documents = questions_file.load_documents(settings, [])
    request = SearchRequest(Question("q", "?", []), f"about {documents[5].title}")
    (found,) = build.build_search(settings, documents)([request])
    assert len(found.documents) == 3 and found.documents[0] == documents[5] and not found.fallback


def test_a_protocol_that_asks_nothing_builds_no_retriever(monkeypatch):
    seen = []
    monkeypatch.setattr(build, "make_retriever", lambda _, its, *__: seen.append(its.retriever))
    build.build_search(resolve("arena", 1, True, {"retriever": "dense", "encoder": "e5"}), [])
    assert seen == ["empty"]


def test_a_model_that_summarises_has_its_time_and_its_log(monkeypatch, tmp_path):
    """A search waits for all tries of its model too: three of --timeout for each of its turns."""
    model = SimpleNamespace(ask=lambda requests: ["Notes."], at_once=16, rejected=())
    model.tail = lambda text, *_: text
    monkeypatch.setattr(build, "load_llm", lambda *_, **__: model)
    log = tmp_path / "log.jsonl"
    question = Question("q", "?", [], references=READ, supporting=(1,))
    asked = [SearchRequest(question, "Ana", f"as {n}") for n in range(40)]

    def search_with(summarizer):
        settings = Settings(retriever="oracle", timeout=5.0, summarizer=summarizer)
        return build.build_search(settings, [], log=str(log))

    search = search_with("m")
    assert search(asked[:1])[0].text == "Notes."
    assert json.loads(log.read_text())["summary"] == "Notes."
    turns = [search.seconds(asked[:n]) / 15 for n in (7, 16, 17)]
    assert turns == [1, 1, 2]  # the same query after another reasoning is another request
    monkeypatch.setattr(build, "make_retriever", lambda *_: SimpleNamespace(seconds=lambda n, k: n))
    assert search_with("m").seconds(asked) == 1 + 3 * 15  # one query
    assert search_with("math=a,other=b").seconds(asked[:17]) == 1 + 2 * 2 * 15  # two models


# ----------------------------------------------------------------------------------- where it lies


def test_a_run_is_named_after_paper_data_and_seed_unless_it_has_a_name():
    assert str(stage_folder(Settings(world_seed=3, seed=1))) == "runs/ur2-world3-seed1/stage1"
    several = Settings(data="d/hotpot.json,x.json", stage=2)
    assert str(stage_folder(several, 1)) == "runs/ur2-hotpot-seed0/stage1"
    assert str(stage_folder(Settings(run_name="mine", output_dir="r"))) == "r/mine/stage1"


def test_only_finished_checkpoints_count_oldest_first(tmp_path):
    for name in ("000010", "000002", "000030.partial"):
        (tmp_path / f"checkpoint-{name}").mkdir()
    (tmp_path / "predictions").mkdir()
    assert [p.name for p in checkpoints(tmp_path)] == ["checkpoint-000002", "checkpoint-000010"]
    assert checkpoints(tmp_path / "nowhere") == []
