"""eval.py: means with intervals, the settings of the checkpoint, and real records from the first to
the last command.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from conftest import (
    ENVIRONMENT,
    ROOT,
    command_line,
    save_searching_model,
    traces,
    train_bpe,
)
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import eval as evaluation
import recipes
import train
from data import Document, Question, load_questions
from errors import InputError
from eval import (
    add_reader,
    add_verdicts,
    default_out,
    demo,
    evaluate,
    grade,
    last_checkpoint,
    material,
    pick,
    prediction_record,
    recipe_of,
)
from other_models.judge import Judge
from plumbing.report import summarise
from policy import Policy, load_policy, save_policy
from prompts import PROTOCOLS, prompt_text
from recipes import Recipe, build_search, checkpoints
from retriever import make_retriever
from retrievers.remote import RetrievalServer
from rewards import STORIES, example, tell
from sft import train_sft
from trajectory import trajectory_from_text
from world.toy import World

HOTPOTQA = ROOT.parent / "shared" / "data" / "hotpotqa"
SMALL = {
    "group_size": 2,
    "questions_per_step": 2,
    "steps": 2,
    "max_turn_tokens": 16,
    "max_searches": 2,
    "lr": 1e-3,
}


# ----------------------------------------------------------------------------------- one trajectory


@pytest.mark.parametrize("protocol", ["ur2", "r1_searcher"])
def test_a_trajectory_is_graded_by_answer_searches_fallbacks_and_format(protocol):
    # The demo story: two searches, the second one a fallback; "Kelmouth, Norland" for "Norland": F1
    # 2/3, cover-EM 1
    numbers = grade(example(protocol, "Kelmouth, Norland"))
    assert numbers == {
        "em": 0,
        "f1": pytest.approx(2 / 3),
        "cem": 1,
        "searched": 1,
        "searches": 2,
        "fallbacks": 1,
        "format": 1,
    }
    assert tuple(numbers) == evaluation.COLUMNS
    broken = (
        "x " * 11
        if protocol == "r1_searcher"
        else "a b c d e f g h i j k l m n o p q r s t u v w x y z"
    )
    assert grade(example(protocol, broken))["format"] == 0


# ------------------------------------------------------------------------------ the other protocols


def test_every_protocol_has_a_format_of_its_own():
    assert set(evaluation.FORMATS) == {*PROTOCOLS, "baseline"}
    for name in PROTOCOLS:
        if name != "ur2_search":  # the stories are told in the papers' own tags
            assert grade(tell(STORIES[0], name))["format"] == 1, name


def r_search(body, question=None):
    return trajectory_from_text(
        question or Question("q", "where does Ana Bell live ?", ["Norland"]), body, "r_search"
    )


SEARCHED = (
    "<search> Ana Bell </search>\n<observation>\nAna Bell was born in Norland.\n</observation>\n"
)


def test_r_search_is_graded_by_its_evidence_too():
    # 5 words of evidence, of which "lives" stands in no document: 4/5
    text = (
        SEARCHED
        + "<original_evidence> Ana Bell lives in Norland. </original_evidence> <answer> Norland"
        " </answer>"
    )
    assert grade(r_search(text)) == {
        "em": 1,
        "f1": 1,
        "cem": 1,
        "searched": 1,
        "searches": 1,
        "fallbacks": 0,
        "format": 1,
        "evidence": 1,
        "support": 0.8,
    }


def test_r_search_without_evidence_has_no_support_rather_than_a_support_of_0():
    numbers = grade(r_search("<answer> Norland </answer>"))
    assert (numbers["format"], numbers["evidence"]) == (1, 0) and "support" not in numbers


@pytest.mark.parametrize(
    "body, right",
    [
        ("<answer> a </answer>", 1),  # nothing was searched: no evidence is asked for
        (SEARCHED + "<answer> a </answer>", 0),
        (SEARCHED + "<original_evidence> e </original_evidence><answer> a </answer>", 1),
        (
            SEARCHED + "<original_evidence> e </original_evidence><original_evidence> e"
            " </original_evidence><answer> a </answer>",
            0,
        ),
        (SEARCHED + "<original_evidence> </original_evidence><answer> a </answer>", 0),
        (SEARCHED + "<original_evidence> e </original_evidence>", 0),
        ("<answer> a </answer><answer> a </answer>", 0),
    ],
)
def test_the_format_of_r_search_is_one_answer_and_after_a_search_one_evidence(body, right):
    assert grade(r_search(body))["format"] == right


def when_to_search(searches, reflect=True, answer="Norland"):
    """think, so many times (search, information, reflect), answer."""
    after = "<reflect> r </reflect>" if reflect else ""
    turn = "<search> Ana Bell </search>\n\n<information>\nfound\n</information>\n\n" + after
    text = f"<think> t </think>{turn * searches}<answer> {answer} </answer>"
    return trajectory_from_text(Question("q", "?", ["Norland"]), text, "when_to_search")


def test_the_format_of_when_to_search_is_its_grammar_whatever_a_search_costs():
    # 9 searches at 0.3 each would be 2.7, which the reward refuses (2 is its bound): evaluation
    # prices nothing
    for searches in (0, 1, 9):
        numbers = grade(when_to_search(searches))
        assert (
            numbers["format"] == 1
            and numbers["searches"] == searches
            and tuple(numbers) == evaluation.COLUMNS
        )
    assert grade(when_to_search(2, answer="Sudria"))["format"] == 1  # also of a wrong answer
    right = when_to_search(1)
    for wrong in (right.text + " sure", right.text.removeprefix("<think> t </think>")):
        assert grade(trajectory_from_text(right.question, wrong, "when_to_search"))["format"] == 0
    assert (
        grade(when_to_search(1, reflect=False))["format"] == 0
    )  # after each information a reflect


def test_arena_is_graded_by_its_citations_and_has_no_search_columns():
    # cites 1, gold is 1 and 3: some overlap 0.5; set F1 2 · 1 / (1 + 2)
    assert grade(example("arena")) == {
        "em": 1,
        "f1": 1,
        "cem": 1,
        "format": 1,
        "relevance": 0.5,
        "exact_set": 0,
        "set_f1": pytest.approx(2 / 3),
    }
    all_of_them = grade(tell(STORIES[7], "arena"))  # cites 1 to 4: F1 2 · 2 / (4 + 2)
    assert (all_of_them["relevance"], all_of_them["exact_set"], all_of_them["set_f1"]) == (
        0.5,
        0,
        pytest.approx(2 / 3),
    )


def test_without_gold_numbers_relevance_is_left_out_and_not_0():
    told = example("arena")
    question = dataclasses.replace(told.question, supporting=())
    assert set(grade(trajectory_from_text(question, told.text, "arena"))) == {
        "em",
        "f1",
        "cem",
        "format",
    }


def test_a_summary_is_graded_by_rouge():
    # "the cat sat down" for "the cat lay down": words 3 of 4 and 4, pairs 1 of 3 and 3, subsequence
    # 3 of 4 and 4
    question = Question("q", "sum it up", ["the cat lay down"], task="summary")
    numbers = grade(trajectory_from_text(question, "<answer> The cat sat down. </answer>", "arena"))
    scores = {
        "rouge1": 3 / 4,
        "rouge2": 1 / 3,
        "rougeL": 3 / 4,
        "rouge": (3 / 4 + 1 / 3 + 3 / 4) / 3,
    }
    assert numbers == {**{k: pytest.approx(v) for k, v in scores.items()}, "format": 0}


# ------------------------------------------------------------------------- numbers that are missing

# ---------------------------------------------------------------------------------- asked of others


class Scripted:
    """In place of a model: what it says, by what stands in the text; it remembers what it was
    asked.
    """

    def __init__(self, replies):
        self.replies, self.asked, self.failures = replies, [], 0

    def ask(self, requests):
        self.asked.append([text for _, text in requests])
        found = [
            next((r for word, r in self.replies.items() if word in text), "")
            for _, text in requests
        ]
        self.failures += found.count(None)
        return found


def stored(body, golds, question="where does Ana Bell live ?", **more):
    return prediction_record(
        r_search(body, Question(**{"id": "q", "question": question, "answers": golds, **more})), 0
    )


WITH_EVIDENCE = (
    SEARCHED
    + "<original_evidence> Ana Bell was born in Norland. </original_evidence> <answer> Sudria"
    " </answer>"
)


def test_another_model_answers_from_the_evidence_and_its_scores_stand_beside_the_policys():
    reader = Scripted({"Norland": "the far Norland"})
    records = [
        stored(WITH_EVIDENCE, ["Norland"]),
        stored("<answer> Norland </answer>", ["Norland"]),
    ]
    found = add_reader(records, reader)
    assert reader.asked == [
        ["Ana Bell was born in Norland.\nwhere does Ana Bell live ?"]
    ]  # nobody is asked without evidence
    assert [r["reader_prediction"] for r in found] == ["the far Norland", ""]
    # "far norland" for "norland": P 1/2, R 1, F1 2/3; the policy itself said Sudria, and then
    # Norland without evidence
    assert [(r["metrics"]["reader_em"], r["metrics"]["reader_f1"]) for r in found] == [
        (0, pytest.approx(2 / 3)),
        (0, 0),
    ]
    assert [r["metrics"]["em"] for r in found] == [0, 1] and [r["prediction"] for r in found] == [
        "Sudria",
        "Norland",
    ]
    assert "reader_em" not in records[0]["metrics"]


def test_only_records_of_a_protocol_with_evidence_have_it_and_a_reader_of_others_is_refused():
    assert stored("<answer> a </answer>", ["a"])["evidence"] is None
    other = prediction_record(example("ur2"), 0)
    assert "evidence" not in other
    with pytest.raises(InputError, match="no 'evidence'"):
        add_reader([other], Scripted({}))


def test_an_unreadable_verdict_is_neither_right_nor_wrong():
    judge = Judge(
        Scripted(
            {
                "answer: Norland": "The same.\nyes",
                "answer: Sudria": "no",
                "answer: Kelmouth": "Hard to say.",
            }
        )
    )
    answers = ["Norland", "Sudria", "Kelmouth", ""]
    bodies = [f"<answer> {answer} </answer>" for answer in answers]
    records = add_verdicts([stored(b, ["Norway"], id=str(i)) for i, b in enumerate(bodies)], judge)
    assert [r["metrics"]["judged"] for r in records] == [
        1,
        0,
        None,
        0,
    ]  # no answer is wrong, and nobody is asked
    assert (judge.asked, judge.unreadable) == (3, 1)
    assert summarise(records)["all"]["judged"][0] == pytest.approx(1 / 3)


def test_a_stored_choice_question_is_judged_with_its_options():
    question = Question("q", "which ?", ["B"], task="choice", options=("Sudria", "Norland"))
    saved = json.loads(
        json.dumps(prediction_record(trajectory_from_text(question, "\\boxed{B}", "ur2"), 0))
    )
    judge = Judge(Scripted({"A. Sudria\nB. Norland": "yes"}))
    assert add_verdicts([saved], judge)[0]["metrics"]["judged"] == 1


@pytest.fixture
def written(tmp_path, monkeypatch):
    """An evaluation of two r_search transcripts through `main`, without a model."""
    questions = [
        Question(str(i), "where does Ana Bell live ?", ["Norland"], source="people")
        for i in range(2)
    ]
    texts = [WITH_EVIDENCE, "<answer> Norland </answer>"]
    recipe = Recipe(protocol="r_search", retriever="empty", model="m", runs=str(tmp_path))
    monkeypatch.setattr(
        evaluation,
        "recipe_of",
        lambda given: dataclasses.replace(recipe, judge=given.get("judge", "")),
    )
    monkeypatch.setattr(evaluation, "material", lambda recipe, options: ({"people": questions}, []))
    monkeypatch.setattr(evaluation, "weights_version", lambda *_: "1")
    monkeypatch.setattr(evaluation, "load_model", lambda *_, **__: (None, None))
    monkeypatch.setattr(evaluation, "check_prompts", lambda *_, **__: None)
    monkeypatch.setattr(
        evaluation,
        "rollout",
        lambda policy, tokenizer, some, *_, **__: list(map(r_search, texts, some)),
    )
    return tmp_path / "p.jsonl"


def scripted_others(monkeypatch, **others):
    monkeypatch.setattr(evaluation, "build_llm", lambda recipe, spec, device: others[spec])


def test_reader_and_judge_are_asked_after_all_predictions_are_written(written, monkeypatch, capsys):
    reader, judge = (
        Scripted({"Norland": "Norland"}),
        Scripted({"answer: Sudria": None, "answer: Norland": "yes"}),
    )
    scripted_others(monkeypatch, R=reader, J=judge)
    evaluation.main(["--out", str(written), "--reader", "R", "--judge", "J"])
    out = capsys.readouterr().out
    records = [json.loads(line) for line in written.read_text().splitlines()]
    assert [r["evidence"] for r in records] == ["Ana Bell was born in Norland.", None]
    assert [r["reader_prediction"] for r in records] == ["Norland", ""]
    assert [r["metrics"]["judged"] for r in records] == [None, 1]
    assert "judge: 1 of 2 verdicts unreadable (50.0%)" in out
    assert "reader_f1" in out and "judged" in out and not list(written.parent.glob("*.partial"))


def test_an_interrupt_while_others_are_asked_loses_no_rollout_and_they_can_be_asked_again(
    written, monkeypatch, capsys
):
    class Interrupted:
        def ask(self, requests):
            raise KeyboardInterrupt

    scripted_others(monkeypatch, R=Interrupted(), S=Scripted({"Norland": "Norland"}))
    with pytest.raises(SystemExit) as end:
        evaluation.main(["--out", str(written), "--reader", "R"])
    assert end.value.code == 130 and str(written) in capsys.readouterr().out.splitlines()[-1]
    before = written.read_text()
    assert len(before.splitlines()) == 2 and "reader_em" not in before
    monkeypatch.setattr(
        evaluation, "load_model", lambda *_, **__: pytest.fail("a model was loaded")
    )
    again = written.with_name("again.jsonl")
    evaluation.main(
        [
            "--predictions",
            str(written),
            "--reader",
            "S",
            "--out",
            str(again),
            "--json",
            str(written) + ".json",
        ]
    )
    assert written.read_text() == before and "reader_em" in again.read_text()
    summary = json.loads(Path(str(written) + ".json").read_text())
    assert (
        summary["people"]["reader_em"][0] == 0.5 and summary["all"]["em"][0] == 0.5
    )  # each is right where the other is not


def test_stored_predictions_alone_give_their_table_and_nothing_is_written(written, capsys):
    evaluation.main(["--out", str(written)])
    first = capsys.readouterr().out.splitlines()
    files = sorted(written.parent.iterdir())
    evaluation.main(["--predictions", str(written)])
    assert (
        capsys.readouterr().out.splitlines() == first[1:-1]
    )  # without "so many questions of ..." and "predictions: ..."
    assert sorted(written.parent.iterdir()) == files


def test_a_reader_that_gives_no_answer_is_told_of(written, monkeypatch, capsys):
    scripted_others(monkeypatch, R=Scripted({"Norland": None}))
    evaluation.main(["--out", str(written), "--reader", "R"])
    assert "reader: no answer to 1 of its requests" in capsys.readouterr().out


def test_the_built_in_reader_is_the_built_in_worlds_whatever_the_checkpoint_was_trained_with(
    written, monkeypatch
):
    def build(recipe, device):
        assert recipe.cross_model == ""
        return Scripted({"Norland": "Norland"})

    monkeypatch.setattr(evaluation, "build_cross_model", build)
    evaluation.main(["--out", str(written), "--reader", "built-in"])
    assert '"reader_em": 1.0' in written.read_text()


# ----------------------------------------------------------------- which checkpoint, which settings


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs folder of a small stage 1 and stage 2 on the built-in world, under the default name."""
    folder = tmp_path_factory.mktemp("trained")
    model = save_searching_model(folder / "model")
    for stage in (1, 2):
        small = [word for k, v in SMALL.items() for word in (f"--{k}", str(v))]
        train.main(
            [
                "--model",
                model,
                "--runs",
                str(folder),
                "--stage",
                str(stage),
                "--documents_per_search",
                "1",
                *small,
                "--document_tokens",
                "40",
                "--summarizer",
                "extractive",
                "--seed",
                "0",
            ]
        )
    return folder


def test_the_checkpoints_own_settings_count_made_greedy_and_flags_override_them(trained):
    recipe = recipe_of({"runs": str(trained)})
    assert recipe.model == str(trained / "ur2-world0-seed0" / "stage2" / "checkpoint-000002")
    assert (recipe.max_turn_tokens, recipe.summarizer, recipe.documents_per_search) == (
        16,
        "extractive",
        1,
    )
    assert (recipe.temperature, recipe.top_p) == (0.0, 1.0)
    flagged = recipe_of(
        {"runs": str(trained), "temperature": 0.7, "max_turn_tokens": 9, "retriever": "empty"}
    )
    assert (flagged.temperature, flagged.max_turn_tokens, flagged.retriever) == (0.7, 9, "empty")
    assert flagged.summarizer == "extractive"


def test_the_last_stage_is_evaluated_unless_one_is_named(trained):
    given = {"runs": str(trained)}
    assert "stage2" in last_checkpoint(given) and "stage1" in last_checkpoint({**given, "stage": 1})
    assert (
        last_checkpoint({**given, "seed": 7}) == ""
    )  # nothing trained: the built-in model, before RL
    with pytest.raises(InputError, match="no checkpoint of that run"):
        last_checkpoint({**given, "name": "typo"})


def test_the_run_on_a_file_is_found_under_the_name_that_training_gave_it(tmp_path):
    folder = recipes.stage_folder(Recipe(data="d/hotpot.json", runs=str(tmp_path), stage=2))
    (folder / "checkpoint-000003").mkdir(parents=True)
    assert last_checkpoint({"runs": str(tmp_path), "data": "d/hotpot.json"}) == str(
        folder / "checkpoint-000003"
    )


def save_settings(folder, **settings):
    (folder / "config.json").write_text("{}")
    (folder / "settings.json").write_text(json.dumps(dataclasses.asdict(Recipe(**settings))))
    return str(folder)


def test_another_question_file_does_not_search_the_old_corpus(tmp_path):
    model = save_settings(tmp_path, data="old.jsonl", corpus="old_corpus.jsonl", model="m")
    with pytest.raises(InputError, match="--data needs --corpus"):
        recipe_of({"model": model, "data": "new.jsonl"})
    assert recipe_of({"model": model}).corpus == "old_corpus.jsonl"
    # "from-data" is no old corpus: it means the records that are asked
    model = save_settings(tmp_path, data="old.jsonl", corpus="from-data", model="m")
    assert recipe_of({"model": model, "data": "new.jsonl"}).corpus == "from-data"


def test_settings_of_an_older_version_are_read_and_broken_ones_are_one_line(tmp_path):
    model = save_settings(tmp_path, max_searches=7)
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "gone_since": 1}))
    assert recipe_of({"model": model}).max_searches == 7
    path.write_text("{")
    with pytest.raises(InputError, match="not a settings file"):
        recipe_of({"model": model})


def test_a_model_of_another_recipe_is_evaluated_under_the_one_that_is_named(tmp_path):
    model = save_settings(tmp_path, recipe="ur2")
    recipe = recipe_of({"model": model, "recipe": "r1_searcher"})
    assert (recipe.protocol, recipe.max_searches, recipe.model) == ("r1_searcher", 8, model)


@pytest.fixture
def one_stage(monkeypatch):
    """A paper with a stage 1 and no other, in the built-in world too."""
    monkeypatch.setitem(
        recipes.RECIPES, "one_stage", {1: {"max_searches": 3, "reward": "ur2_stage2"}}
    )
    monkeypatch.setitem(recipes.BUILT_IN, "one_stage", {1: {}})


def test_a_paper_with_one_stage_has_its_last_checkpoint_there(one_stage, tmp_path):
    folder = tmp_path / "one_stage-world0-seed0" / "stage1" / "checkpoint-000004"
    assert last_checkpoint({"runs": str(tmp_path), "recipe": "one_stage"}) == ""
    folder.mkdir(parents=True)
    assert last_checkpoint({"runs": str(tmp_path), "recipe": "one_stage"}) == str(folder)
    with pytest.raises(InputError, match="one_stage has stages 1"):
        last_checkpoint({"runs": str(tmp_path), "recipe": "one_stage", "stage": 2})


def test_a_model_without_settings_is_evaluated_under_the_papers_last_stage(one_stage):
    recipe = recipe_of({"model": "Qwen/Qwen2.5-3B", "recipe": "one_stage"})
    assert (recipe.stage, recipe.max_searches) == (1, 3)
    assert recipe_of({"model": "Qwen/Qwen2.5-3B"}).stage == 2
    assert recipe_of({"model": "Qwen/Qwen2.5-3B", "stage": 1}).stage == 1


def test_the_judge_of_the_reward_is_not_asked_unless_evaluation_names_one(tmp_path):
    model = save_settings(tmp_path, judge="http://gone:1/v1#m", summary_log="log.jsonl")
    recipe = recipe_of({"model": model})
    assert (recipe.judge, recipe.summary_log) == ("", "")  # and no training log is written on
    assert recipe_of({"model": model, "judge": "other"}).judge == "other"


def test_a_hub_model_is_evaluated_with_the_papers_settings():
    recipe = recipe_of({"model": "Qwen/Qwen2.5-3B"})
    assert (recipe.max_turn_tokens, recipe.documents_per_search, recipe.temperature) == (
        512,
        10,
        0.0,
    )


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--retriever", "bm26"], "did you mean bm25?"),
        (["--question", "3"], "did you mean --questions?"),
        (["--samples", "0"], "--samples must be at least 1"),
        (["--questions", "-1"], "--samples must be at least 1"),
        (["--model", "./nowhere"], "no such directory"),
        (["--recipe", "ur3"], "did you mean ur2?"),
        (["--name", "typo"], "no checkpoint of that run"),
        (["--data", "f.jsonl"], "--data needs --model"),
        (["--lr", "3"], "unknown flag --lr"),
        (["--split", "all"], "invalid choice"),
        (["--reader", "m"], "protocol ur2 does not have"),
        (["--predictions", "none.jsonl"], "no such file"),
        (["--predictions", "p", "--model", "m"], "--model has no meaning with --predictions"),
        (["--predictions", "p", "--recipe", "ur3"], "did you mean ur2?"),
        (["--judge", "http://127.0.0.1:9/v1#m"], "127.0.0.1:9"),
    ],
)
def test_bad_input_of_eval_is_one_line(arguments, said, tmp_path, capsys):
    assert said in command_line(evaluation.main, [*arguments, "--runs", tmp_path], capsys)


def test_a_missing_question_file_is_one_line_before_the_model_is_loaded(
    trained, capsys, monkeypatch
):
    monkeypatch.setattr(
        evaluation, "load_model", lambda *_, **__: pytest.fail("the model was loaded first")
    )
    arguments = [
        "--model",
        trained / "model",
        "--data",
        trained / "none.jsonl",
        "--corpus",
        "from-data",
    ]
    assert "no such file" in command_line(evaluation.main, arguments, capsys)


# -------------------------------------------------------------------------------- what is evaluated


def test_the_built_in_world_gives_so_many_held_out_questions_of_every_kind():
    recipe = Recipe()
    options = {"split": "test", "questions": 3, "fact_seed": None}
    datasets, documents = material(recipe, options)
    questions = datasets["the built-in world"]
    assert len(questions) == 15 and {
        q.id.split("/")[0] for q in questions if q.kind == "one_hop"
    } == {"test"}
    again, other = material(recipe, {**options, "fact_seed": 9})
    redrawn = again["the built-in world"]
    assert [q.question for q in redrawn if q.kind == "one_hop"] == [
        q.question for q in questions if q.kind == "one_hop"
    ]
    assert [d.title for d in other] == [d.title for d in documents] and other != documents


def test_of_a_file_the_first_questions_are_taken_and_zero_takes_all(tmp_path):
    records = [json.dumps({"id": i, "question": "?", "answers": ["a"]}) + "\n" for i in range(5)]
    (tmp_path / "q.jsonl").write_text("".join(records))
    recipe = Recipe(data=str(tmp_path / "q.jsonl"), model="m", retriever="empty")
    options = {"split": "test", "fact_seed": None}
    assert [q.id for q in material(recipe, {**options, "questions": 2})[0]["q"]] == ["0", "1"]
    assert len(material(recipe, {**options, "questions": 0})[0]["q"]) == 5


def test_predictions_are_written_as_they_come(trained, tmp_path, monkeypatch):
    recipe = recipe_of({"runs": str(trained), "temperature": 1.0})
    policy, tokenizer = load_policy(recipe.model)
    questions = World(0).questions("test", "one_hop", 4)
    search, rollout, out = (
        build_search(recipe, World(0).documents),
        evaluation.rollout,
        tmp_path / "new" / "p.jsonl",
    )
    monkeypatch.setattr(evaluation, "QUESTIONS_AT_ONCE", 2)
    calls = []

    def interrupted(*arguments, **settings):
        calls.append(len(out.read_text().splitlines()))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return rollout(*arguments, **settings)

    monkeypatch.setattr(evaluation, "rollout", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(policy, tokenizer, questions, search, recipe, samples=3, out=out, quiet=True)
    assert calls == [
        0,
        6,
    ]  # when the second batch began, the first one's 2 · 3 predictions were there
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["id"], r["sample"]) for r in records] == [
        (q.id, s) for q in questions[:2] for s in range(3)
    ]
    assert all(
        set(r["metrics"]) == set(evaluation.COLUMNS) and r["golds"] and r["transcript"]
        for r in records
    )


def test_greedy_evaluation_is_the_same_twice_and_samples_of_a_seed_are_too(trained):
    for temperature in (0.0, 2.0):  # at 1 two samples may be the same text
        recipe = recipe_of({"runs": str(trained), "temperature": temperature})
        policy, tokenizer = load_policy(recipe.model)
        search, questions = (
            build_search(recipe, World(0).documents),
            World(0).questions("test", "one_hop", 2),
        )
        runs = [
            evaluate(policy, tokenizer, questions, search, recipe, 8, quiet=True) for _ in range(2)
        ]
        assert runs[0] == runs[1]
        texts = {record["transcript"] for record in runs[0][:8]}  # of one question
        assert (len(texts) == 1) == (temperature == 0)


def test_a_search_over_http_gives_the_very_predictions_of_the_search_here(trained, tmp_path):
    """The same corpus, once in process and once behind `retriever.py serve`'s server."""
    world = World(0)
    with RetrievalServer(make_retriever("bm25", world.documents), port=0) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        for name, more in (
            ("here", []),
            ("there", ["--retriever", "http", "--retriever_url", url]),
        ):
            out = ["--out", str(tmp_path / name), "--title_boost", "1"]
            evaluation.main(["--runs", str(trained), "--questions", "2", *out, *more])
        server.shutdown()
    records = [json.loads(line) for line in (tmp_path / "there").read_text().splitlines()]
    assert (tmp_path / "there").read_text() == (tmp_path / "here").read_text() and any(
        r["searches"] for r in records
    )


def test_an_interrupted_evaluation_goes_on_and_gives_the_numbers_of_an_unbroken_one(
    trained, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(evaluation, "QUESTIONS_AT_ONCE", 4)
    rollout, calls = evaluation.rollout, []

    def third_time_interrupted(*arguments, **settings):
        calls.append(settings["seed"])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return rollout(*arguments, **settings)

    def run(out, *more):
        sampled = ["--questions", "2", "--samples", "2", "--temperature", "1"]
        evaluation.main(["--runs", str(trained), *sampled, "--out", str(out), *more])
        return capsys.readouterr().out

    unbroken, out = tmp_path / "unbroken.jsonl", tmp_path / "p.jsonl"
    run(unbroken)
    monkeypatch.setattr(evaluation, "rollout", third_time_interrupted)
    with pytest.raises(SystemExit):
        run(out)
    with open(out, "a") as file:
        file.write('{"id": "half a li')  # killed while it wrote
    assert "16 of 20 predictions are there already" in run(out)
    assert out.read_bytes() == unbroken.read_bytes() and calls == [
        0,
        4,
        8,
        8,
    ]  # the third batch only was made again
    assert "20 of 20 predictions are there already" in run(out) and len(calls) == 4
    # other settings, or --fresh: nothing of it counts, and nothing is lost
    assert "are kept as p.jsonl.old" in run(out, "--seed", "1") and len(calls) == 7
    assert out.read_bytes() != unbroken.read_bytes() == (tmp_path / "p.jsonl.old").read_bytes()
    run(out, "--seed", "1", "--fresh")
    assert len(calls) == 10


def test_a_line_that_was_lost_or_doubled_is_noticed_and_nothing_is_thrown_away(
    trained, tmp_path, capsys
):
    out = tmp_path / "p.jsonl"
    command = ["--runs", str(trained), "--questions", "2", "--out", str(out)]
    evaluation.main(command)
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    for number, damaged in (("", lines[1:]), ("2", lines + lines)):
        out.write_bytes(b"".join(damaged))
        evaluation.main(command)
        assert out.read_bytes() == whole and (
            tmp_path / f"p.jsonl.old{number}"
        ).read_bytes() == b"".join(damaged)


def test_failed_searches_are_told_of_and_made_again(trained, tmp_path, monkeypatch, capsys):
    """A score of trajectories that could not search is not the model's."""
    out, real = tmp_path / "p.jsonl", evaluation.build_search
    command = [
        "--runs",
        str(trained),
        "--questions",
        "2",
        "--out",
        str(out),
        "--search_retries",
        "0",
    ]
    evaluation.main(command)
    healthy = out.read_bytes()
    assert any(json.loads(line)["searches"] for line in healthy.splitlines())
    monkeypatch.setattr(evaluation, "build_search", lambda *_: lambda requests: 1 / 0)
    evaluation.main([*command, "--fresh"])
    assert "searches failed (the first: ZeroDivisionError" in capsys.readouterr().err
    monkeypatch.setattr(evaluation, "build_search", real)
    evaluation.main(command)
    assert out.read_bytes() == healthy and "searches failed" not in capsys.readouterr().err


def test_another_prompt_under_the_same_name_is_another_evaluation(tmp_path):
    prompt, questions = tmp_path / "p.txt", [Question("1", "?", ["a"])]
    made = []
    for words in ("Say A.", "Say B."):
        prompt.write_text(words)
        made.append(
            evaluation.signature(Recipe(model="m", prompt_file=str(prompt)), 1, "v", questions, [])
        )
    assert made[0] != made[1]


def test_a_judge_that_went_away_is_told_of_and_stored_verdicts_are_kept():
    records = [stored(f"<answer> {a} </answer>", ["Norway"], id=a) for a in ("Norland", "Sudria")]
    records[0]["metrics"]["judged"] = 1.0
    judge = Judge(Scripted({"answer: Norland": None, "answer: Sudria": "no"}))
    assert [r["metrics"]["judged"] for r in add_verdicts(records, judge)] == [
        1.0,
        0.0,
    ] and judge.silent == 1


@pytest.mark.parametrize("flag", ["--out", "--json"])
def test_a_place_that_cannot_be_written_is_one_line_before_the_work(flag, tmp_path):
    (tmp_path / "file").write_text("")
    for place, said in (
        (tmp_path, "that is a folder"),
        (tmp_path / "file" / "x", "cannot be written there"),
    ):
        with pytest.raises(InputError, match=f"{flag} {place}: {said}"):
            evaluation.main(["--model", "m", "--runs", str(tmp_path), flag, str(place)])


def test_a_half_finished_batch_is_made_again(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluation, "QUESTIONS_AT_ONCE", 4)
    out = tmp_path / "p.jsonl"
    command = ["--runs", str(trained), "--questions", "2", "--out", str(out)]
    evaluation.main(command)
    whole = out.read_bytes()
    out.write_bytes(
        b"".join(whole.splitlines(keepends=True)[:7])
    )  # 7 of 10: one batch of 4, and 3 of the next
    evaluation.main(command)
    assert (
        "4 of 10 predictions are there already" in capsys.readouterr().out
        and out.read_bytes() == whole
    )


def test_other_weights_or_passages_are_another_evaluation(tmp_path):
    recipe, questions = Recipe(model="m"), [Question("1", "?", ["a"])]
    made = evaluation.signature(recipe, 1, "v1", questions, [Document("1", "t", "x")])
    assert made == evaluation.signature(
        dataclasses.replace(recipe, judge="J"), 1, "v1", questions, [Document("1", "t", "x")]
    )
    for other in [
        evaluation.signature(recipe, 1, "v2", questions, [Document("1", "t", "x")]),
        evaluation.signature(recipe, 2, "v1", questions, [Document("1", "t", "x")]),
        evaluation.signature(recipe, 1, "v1", questions, [Document("1", "t", "y")]),
        evaluation.signature(
            recipe, 1, "v1", [Question("1", "?", ["b"])], [Document("1", "t", "x")]
        ),
        evaluation.signature(
            dataclasses.replace(recipe, top_p=0.5), 1, "v1", questions, [Document("1", "t", "x")]
        ),
    ]:
        assert other != made


def test_several_data_sets_are_one_pass_and_one_table(written, monkeypatch, capsys):
    asked = "where does Ana Bell live ?"
    two = {
        name: [Question(f"{name}{i}", asked, ["Norland"]) for i in range(2)]
        for name in ("nq", "wiki")
    }
    monkeypatch.setattr(evaluation, "material", lambda *_: (two, []))
    answers = ["Norland", "Sudria", "Sudria", "Sudria"]
    monkeypatch.setattr(
        evaluation,
        "rollout",
        lambda policy, tokenizer, some, *_, **__: [
            r_search(f"<answer> {a} </answer>", q) for a, q in zip(answers, some, strict=True)
        ],
    )
    evaluation.main(["--out", str(written), "--json", str(written) + ".json", "--markdown"])
    rows = [
        line.split("|")[1].strip()
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("|")
    ]
    assert rows == ["kind", "---", "nq", "wiki", "mean of datasets", "all"]
    summary = json.loads(Path(str(written) + ".json").read_text())
    assert (
        summary["nq"]["em"][0],
        summary["wiki"]["em"][0],
        summary["mean of datasets"]["em"][0],
    ) == (0.5, 0, 0.25)
    # the predictions alone give the same table
    evaluation.main(["--predictions", str(written), "--json", str(written) + ".again.json"])
    assert json.loads(Path(str(written) + ".again.json").read_text()) == summary


def test_two_evaluations_are_compared_in_pairs(written, capsys):
    evaluation.main(["--out", str(written)])
    evaluation.main(["--out", str(written), "--against", str(written)])
    out = capsys.readouterr().out
    assert (
        "paired: 2 questions of both runs (0 only in this one, 0 only in the other)" in out
        and "+0.000 [+0.000" in out
    )


def test_the_papers_decoding_is_what_the_flags_say(tmp_path):
    def sampling(*arguments):
        recipe, _ = evaluation.parse(["--model", "m", "--runs", str(tmp_path), *arguments])
        return recipe.temperature, recipe.top_p

    assert sampling() == (0.0, 1.0)
    assert sampling("--decoding", "paper") == (0.3, 0.5)  # UR²
    assert sampling("--decoding", "paper", "--recipe", "r_search") == (0.1, 1.0)
    assert sampling("--decoding", "paper", "--recipe", "r1_searcher") == (0.0, 1.0)
    assert sampling("--decoding", "paper", "--temperature", "0.7") == (0.7, 0.5)
    # a checkpoint's own recipe counts, and what it recorded on a GPU is nothing to an evaluation
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").write_text("{}")
    saved = Recipe(recipe="r_search", protocol="r_search", cuda_graphs=True, model="m")
    (tmp_path / "c" / "settings.json").write_text(json.dumps(dataclasses.asdict(saved)))
    recipe, _ = evaluation.parse(["--model", str(tmp_path / "c"), "--decoding", "paper"])
    assert (recipe.recipe, recipe.temperature, recipe.cuda_graphs) == ("r_search", 0.1, False)


def test_both_decodings_in_one_go_are_the_two_evaluations(trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path / "runs")
    few = ["--runs", str(tmp_path / "runs"), "--questions", "1"]
    evaluation.main([*few, "--temperature", "1", "--fresh"])
    evaluation.main([*few, "--fresh"])
    alone = capsys.readouterr().out
    evaluation.main([*few, "--decoding", "both", "--fresh"])
    both = (
        "\n".join(
            line for line in capsys.readouterr().out.splitlines() if "are kept as" not in line
        )
        + "\n"
    )
    assert both == alone and "temperature 1" in alone and "temperature 0" in alone


@pytest.mark.parametrize(
    "more, said",
    [
        (("--out", "p.jsonl"), "--out is for one"),
        (("--json", "t.json"), "--json is for one"),
        (("--predictions", "p.jsonl"), "--predictions is for one"),
        (("--temperature", "1"), "leave --temperature out"),
    ],
)
def test_both_decodings_with_what_is_for_one_is_one_line(more, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=said):
        evaluation.main(["--decoding", "both", *more])


def test_ctrl_c_names_the_predictions_that_are_finished(trained, tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation, "rollout", interrupted)
    with pytest.raises(SystemExit) as end:
        evaluation.main(
            ["--runs", str(trained), "--questions", "1", "--out", str(tmp_path / "p.jsonl")]
        )
    assert (
        end.value.code == 130
        and str(tmp_path / "p.jsonl") in capsys.readouterr().out.splitlines()[-1]
    )


def test_python_eval_prints_the_table_and_writes_predictions_and_json(trained, tmp_path, capsys):
    evaluation.main(
        ["--runs", str(trained), "--questions", "2", "--json", str(tmp_path / "t.json")]
    )
    out = capsys.readouterr().out
    assert "10 questions of the built-in world" in out and "temperature 0" in out
    assert [line.split()[0] for line in out.splitlines()[1:8]] == ["kind", *recipes.KINDS, "all"]
    path = Path(out.splitlines()[-1].removeprefix("predictions: "))
    assert path.parent == trained / "predictions" and len(path.read_text().splitlines()) == 10
    assert json.loads((tmp_path / "t.json").read_text())["all"]["questions"] == 10


@pytest.mark.parametrize("model", ["/", "/m", "../m", "a/b c/checkpoint-000001", "C:/x/y", ""])
def test_predictions_always_lie_under_the_runs_folder(model):
    out = default_out(Recipe(model=model, runs="runs"), {"split": "test"})
    assert out.parent == Path("runs/predictions") and not out.name.startswith((".", "-"))


# ------------------------------------------------------------------------------------ one live look


def test_the_demo_shows_a_held_out_two_hop_question_search_by_search(trained, capsys):
    demo(["--runs", str(trained), "--temperature", "1"])
    out = capsys.readouterr().out
    assert "stage2/checkpoint-000002" in out.splitlines()[0]
    shown = next(line for line in out.splitlines() if line.startswith("question: "))
    question = shown.removeprefix("question: ").split("   gold: ")[0]
    assert question in {q.question for q in World(0).questions("test", "two_hop")}
    assert "searches; answer" in out


def test_the_demo_answers_a_question_of_its_own_world_and_refuses_words_it_does_not_know(
    trained, capsys
):
    asked = World(0).questions("test", "one_hop")[3]
    demo([asked.question, "--runs", str(trained)])
    assert f"question: {asked.question}   gold: {asked.answers[0]}" in capsys.readouterr().out
    with pytest.raises(InputError, match="knows only its own world's words; try: ") as error:
        demo(["who invented the steam engine ?", "--runs", str(trained)])
    assert "\n" not in str(error.value)


def test_a_question_of_ones_own_has_no_known_answer():
    questions = [
        Question("1", "a ?", ["x"], source="one_hop"),
        Question("2", "b ?", ["y"], source="two_hop"),
    ]
    assert pick(questions, "").id == "2" and pick(questions[:1], "").id == "1"
    assert pick(questions, "a ?").answers == ["x"] and pick(questions, "c ?") == Question(
        "asked", "c ?", []
    )


def test_python_rollout_runs_the_demo(trained):
    command = [sys.executable, "rollout.py", "--runs", str(trained)]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0 and "searches; answer" in done.stdout, done.stderr


# ---------------------------------------------------------------------- real records, real commands


def hotpotqa(name) -> Path:
    if not (HOTPOTQA / name).exists():
        pytest.skip(f"no HotpotQA records in {HOTPOTQA}")
    return HOTPOTQA / name


def save_real_model(path, data, family):
    """A random model with a byte-level BPE tokenizer trained on the records and a chat template,
    shown a few traces of searching for a moment: random weights alone would hardly ever write a
    query.
    """
    questions = load_questions(data)
    protocol = PROTOCOLS["ur2"]
    texts = [protocol.instruction, *(tag for tag in protocol.tags for _ in range(3))] * 20
    texts += [text for q in questions for text in (q.question, *(r.text for r in q.references[:2]))]
    tokenizer = train_bpe(texts, vocab_size=600)
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(0)
    model = (
        Qwen2ForCausalLM(Qwen2Config(**sizes))
        if family == "qwen2"
        else LlamaForCausalLM(LlamaConfig(**sizes))
    )
    policy = Policy(model)
    # One query and one answer for all questions, and for each a trace that does without the search:
    # whatever it is asked, it searches about every other time, so the rewards of a group differ.
    found = [Document("", "who is it", q.references[0].text) for q in questions]
    asked = [
        Question(q.id, q.question, ["it"], references=(d,))
        for q, d in zip(questions, found, strict=True)
    ]
    searching, direct = (traces(tokenizer, asked, search=search) for search in (True, False))
    both = [example for pair in zip(searching, direct, strict=True) for example in pair]
    losses = train_sft(
        policy, lambda step: [both[(4 * step + i) % len(both)] for i in range(4)], 60, 3e-3
    )
    save_policy(policy, tokenizer, path)
    assert "<|im_start|>assistant" in prompt_text(protocol, questions[0], tokenizer)
    return losses


REAL = {
    **SMALL,
    "max_turn_tokens": 40,
    "max_searches": 1,
    "documents_per_search": 2,
    "document_tokens": 60,
    "save_every": 1,
    "group_size": 4,
    "trajectories_per_update": 4,
    "show_every": 1,
    "temperature": 0.8,
    "lr": 1e-4,
    "tokens_per_micro_batch": 700,
}


def real_flags(model, data, runs):
    small = [word for k, v in REAL.items() for word in (f"--{k}", str(v))]
    return [
        "--model",
        str(model),
        "--data",
        str(data),
        "--corpus",
        "from-data",
        "--runs",
        str(runs),
        "--name",
        "real",
        *small,
    ]


def check_real_run(runs, questions):
    """Two stages that rolled out, searched, were rewarded and changed the weights."""
    for stage in (1, 2):
        folder = runs / "real" / f"stage{stage}"
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [0, 1]
        assert (
            sum(row["searches"] for row in rows) >= 1
            and sum(row["inserted_tokens"] for row in rows) > 40
        )
        assert stage == 2 or any(
            row["grad_norm"] > 0 for row in rows
        )  # stage 2 pays nothing for a search: often all are 0
        loaded = AutoModelForCausalLM.from_pretrained(checkpoints(folder)[-1])
        assert all(p.isfinite().all() for p in loaded.parameters())
        samples = (folder / "samples.txt").read_text()
        assert "⟦<|begin_of_documents|>\n(1) " in samples and any(
            q.question in samples for q in questions
        )


@pytest.mark.slow
def test_real_hotpotqa_records_run_to_the_end_on_the_real_command_lines(tmp_path):
    data = hotpotqa("official_train_distractor_20.json")
    save_real_model(tmp_path / "model", data, "qwen2")
    arguments = real_flags(tmp_path / "model", data, tmp_path / "runs")
    python = Path(sys.executable).parent
    config = [f"--config_file={path}" for path in [ROOT / "configs" / "cpu.yaml"] if path.exists()]
    said = []
    for command in (
        [python / "accelerate", "launch", *config, "train.py", "--stage", "1", *arguments],
        [python / "accelerate", "launch", *config, "train.py", "--stage", "2", *arguments],
        [
            sys.executable,
            "eval.py",
            "--runs",
            tmp_path / "runs",
            "--name",
            "real",
            "--questions",
            "3",
        ],
    ):
        environment = ENVIRONMENT | {
            "PATH": f"{python}:{os.environ['PATH']}",
            "ACCELERATE_USE_CPU": "1",
        }
        done = subprocess.run(
            list(map(str, command)),
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        said.append(done.stdout)
    check_real_run(tmp_path / "runs", load_questions(data))
    assert f"stage 2 starts from {tmp_path}/runs/real/stage1/checkpoint-000002" in said[1]
    assert f"3 questions of {data.stem}" in said[2] and "\nall " in said[2]
    predictions = (
        Path(said[2].splitlines()[-1].removeprefix("predictions: ")).read_text().splitlines()
    )
    assert len(predictions) == 3 and any(json.loads(line)["searches"] for line in predictions)


def test_the_hub_layout_and_a_llama_run_to_the_end_too(tmp_path, capsys):
    data = hotpotqa("hf_layout_dev_distractor_20.jsonl")
    losses = save_real_model(tmp_path / "model", data, "llama")
    assert losses[-1] < losses[0]
    for stage in ("1", "2"):
        train.main(
            [
                "--stage",
                stage,
                *real_flags(tmp_path / "model", data, tmp_path / "runs"),
                "--optimizer",
                "adamw8bit",
                "--gradient_checkpointing",
                "--algorithm",
                "grpo",
                "--kl_coef",
                "0.01",
            ]
        )
    check_real_run(tmp_path / "runs", load_questions(data))
    capsys.readouterr()
    evaluation.main(
        [
            "--runs",
            str(tmp_path / "runs"),
            "--name",
            "real",
            "--questions",
            "2",
            "--retriever",
            "oracle",
        ]
    )
    assert "2 questions of" in capsys.readouterr().out


def test_stage_0_is_the_model_before_rl_even_where_a_run_exists(trained):
    recipe = recipe_of({"runs": str(trained), "stage": 0})
    assert (
        recipe.model == "" and recipe.documents_per_search == 1
    )  # the built-in world's settings, not the paper's 10
