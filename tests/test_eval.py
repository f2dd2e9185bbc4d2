"""Tests eval.py: the metrics of a trajectory, the settings of an evaluation, interrupted and
repeated evaluations, and real records through training and evaluation.
"""

import dataclasses
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
from conftest import ROOT, command_line, message
from test_compute_rewards import Model

import eval as evaluation
import train
from convert import convert
from data import Document, Question
from eval import Evaluation, Options, last_checkpoint, settings_of
from flags import check_settings, stage_folder
from formats.records import write_records
from papers import PROTOCOLS
from plumbing import build, report
from plumbing.questions import evaluation_questions, training_questions, with_retrieved
from retrievers.controls import make_control
from rewards import example
from settings import Settings
from trajectory import trajectory_from_text
from trajectory_metrics import prediction_metrics
from world.world import KINDS

HOTPOTQA = ROOT.parent / "shared" / "data" / "hotpotqa"
ANSWER_SCORES = ("em", "f1", "cem")
# the metrics of an evaluation of every protocol that searches; training logs others too
COLUMNS = (*ANSWER_SCORES, "searched", "searches", "successful", "queries", "rejected")
COLUMNS += ("failed_rows", "repeated", "fallbacks", "documents_cut", "format")
OPTIONS = evaluation.Options(questions=3)


def table_metrics(trajectory) -> dict:
    """Returns the metrics of a trajectory that a table may have."""
    numbers = prediction_metrics(trajectory)
    return {name: numbers[name] for name in numbers if name in report.COLUMNS}


def run(words: str, *more) -> None:
    """Runs `python eval.py WORDS MORE` in this process."""
    evaluation.main([*words.split(), *map(str, more)])


def records_in(path) -> list[dict]:
    """Returns the records of a file of JSON lines."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def write(path, records) -> str:
    """Writes the records as JSON lines and returns the path."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


# -------------------------------------------------------------------- the metrics of one trajectory


@pytest.mark.parametrize("protocol", ["ur2", "r1_searcher"])
def test_the_metrics_of_a_trajectory_cover_answer_searches_fallbacks_and_format(protocol):
    # Two searches, the second a fallback. "Kelmouth, Norland" for "Norland": F1 2/3, cover-EM 1.
    numbers = table_metrics(example(protocol, "Kelmouth, Norland"))
    scores = (0, pytest.approx(2 / 3), 1)
    assert numbers == dict(zip(COLUMNS, (*scores, 1, 2, 1, 2, 0, 0, 0, 1, 0, 1), strict=True))
    trajectory = example(protocol, "x " * 11)
    trajectory.searches[0].cut = True
    numbers = table_metrics(trajectory)
    assert (numbers["format"], numbers["documents_cut"]) == (0, 0.5)  # one of two searches
    assert "documents_cut" not in table_metrics(example(protocol, searches=0))
    assert all(table_metrics(example(name))["format"] == 1 for name in PROTOCOLS)


WHERE = "where does Ana Bell live ?"
FOUND = "<observation>\nAna Bell was born in Norland.\n</observation>"
SEARCHED = f"<search> Ana Bell </search>\n{FOUND}\n"
BOX = "<original_evidence> {} </original_evidence>"
ANSWER = "<answer> {} </answer>"


def r_search(body, question=None):
    """Returns the trajectory of an r_search transcript."""
    return trajectory_from_text(question or Question("q", WHERE, ["Norland"]), body, "r_search")


def test_the_metrics_of_r_search_cover_its_evidence_too():
    evidence = BOX.format("Ana Bell lives in Norland.")
    answer = ANSWER.format("Norland")
    expected = dict(zip(COLUMNS, (1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 1), strict=True))
    # The evidence has 5 words, and "lives" is in no document: support 4/5.
    whole = table_metrics(r_search(SEARCHED + evidence + answer))
    assert whole == expected | {"evidence": 1, "support": 0.8}
    # After a search the format requires evidence; without a search it does not.
    for text, form in ((answer, 1), (SEARCHED + answer, 0)):
        numbers = table_metrics(r_search(text))
        assert (numbers["format"], numbers["evidence"]) == (form, 0)
        assert "support" not in numbers  # left out, not 0


def test_the_format_of_when_to_search_does_not_depend_on_the_cost_of_searches():
    # 9 searches at 0.3 each cost 2.7, above the reward's bound of 2; the metric ignores the cost.
    turn = "<search> a </search>\n<information>\nfound\n</information>\n<reflect> r </reflect>"
    transcript = f"<think> t </think>{turn * 9}{ANSWER.format('a')}"
    for text, form in ((transcript, 1), (transcript + " sure", 0)):
        numbers = table_metrics(
            trajectory_from_text(Question("q", "?", ["a"]), text, "when_to_search")
        )
        assert (numbers["format"], numbers["searches"], {*numbers}) == (form, 9, {*COLUMNS})
        assert numbers["repeated"] == 8  # all searches after the first repeat the query "a"


def test_the_metrics_of_arena_cover_citations():
    # The answer cites 1, gold are 1 and 3: overlap 0.5.
    trajectory = example("arena", searches=1)
    answer = {"em": 1, "f1": 1, "cem": 1, "format": 1}
    half = answer | {"relevance": 0.5, "exact_set": 0, "all_correct": 0}
    assert table_metrics(trajectory) == half
    assert table_metrics(example("arena", "Norland </answer> so"))["format"] == 0
    # All correct (Table 13) needs the exact set of citations and the right answer.
    for text, right in (("Norland", 1), ("Sudria", 0)):
        numbers = table_metrics(example("arena", text))
        assert (numbers["exact_set"], numbers["all_correct"]) == (1, right)
    # Without gold numbers the relevance is left out, not 0.
    question = dataclasses.replace(trajectory.question, supporting=())
    assert table_metrics(trajectory_from_text(question, trajectory.text, "arena")) == answer


def test_the_metrics_of_a_summary_are_rouge():
    pytest.importorskip("rouge_score", reason="the extra rouge is not installed")
    question = Question("q", "sum it up", ["the cat lay down"], task="summary")
    summary = "<summary> The cat sat down. </summary>"
    numbers = table_metrics(trajectory_from_text(question, summary, "arena_summary"))
    assert set(numbers) == {"rouge1", "rouge2", "rougeL", "rouge", "format"}


# --------------------------------------------------------------------------------- reader and judge

WITH_EVIDENCE = SEARCHED + BOX.format("Ana Bell was born in Norland.") + ANSWER.format("Sudria")


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Patches evaluations to use two r_search transcripts and no model; returns a path."""
    texts = [WITH_EVIDENCE, ANSWER.format("Norland")]
    questions = [Question(i, WHERE, ["Norland"], source="people") for i in "01"]
    settings = Settings(protocol="r_search", retriever="empty", model="m", output_dir=str(tmp_path))
    patches = {
        "settings_of": lambda flags: dataclasses.replace(settings, **flags),
        "evaluation_questions": lambda *_: ({"people": questions}, []),
        "load_model": lambda *_, **__: (None, lambda text, **_: {"input_ids": text.split()}),
        "build_environment": lambda *_: None,
        "check_prompts": lambda questions, *_: questions,
        "rollout": lambda _, environment, questions, *options: list(
            map(r_search, texts, questions)
        ),
    }
    for name, patch in patches.items():
        monkeypatch.setattr(evaluation, name, patch)
    return tmp_path / "p.jsonl"


def others(monkeypatch, **known):
    """Makes load_llm return the given stand-ins by their names."""
    monkeypatch.setattr(build, "load_llm", lambda spec, settings, device: known[spec])


def test_reader_and_judge_are_called_after_all_predictions_are_written(
    written, monkeypatch, toy_policy, capsys
):
    reader = Model(lambda text: "Norland")
    silent = Model(lambda text: None)
    judge = Model(lambda text: None if "answer: Sudria" in text else "yes")
    others(monkeypatch, R=reader, J=judge)
    run("--reader R --judge J --decoding paper --temperature 0.1 --out", written)
    assert {request[2:] for request in reader.requests} == {(0.1, 0.5)}  # R-Search A.3
    out = capsys.readouterr().out
    records = records_in(written)
    assert [r["evidence"] for r in records] == ["Ana Bell was born in Norland.", None]
    assert [r["reader_prediction"] for r in records] == ["Norland", ""]
    assert [r["metrics"]["judged"] for r in records] == [None, 1]
    assert {r["judge_sees"] for r in records} == {"question"}
    assert "1 verdicts are unreadable and left" in out and "judge: no verdict on 1 answers" in out
    assert "reader_em" in out
    silent.failures = 1
    others(monkeypatch, R=silent)
    run("--reader R --out", written)
    assert "reader: no answer to 1 of its requests" in capsys.readouterr().out
    monkeypatch.setattr(build, "load_reader", lambda *_: (toy_policy, None))
    monkeypatch.setattr(build, "LocalLLM", lambda *_, **__: reader)
    run("--reader built-in --out", written)
    assert '"reader_em": 1.0' in written.read_text()


def test_an_interrupt_of_the_reader_keeps_all_rollouts_and_it_can_be_asked_again(
    written, monkeypatch
):
    def interrupted(text):
        raise KeyboardInterrupt

    others(monkeypatch, R=Model(interrupted), S=Model(lambda text: "Norland"))
    with pytest.raises(KeyboardInterrupt):
        run("--reader R --out", written)
    before = written.read_text()
    assert len(before.splitlines()) == 2
    monkeypatch.setattr(evaluation, "load_model", lambda *_: pytest.fail("a model was loaded"))
    again = Path(f"{written}.again")
    run(f"--predictions={written} --reader S --out {again}")
    # The reader is right exactly where the policy's answer is wrong.
    assert written.read_text() == before
    metrics = [record["metrics"] for record in records_in(again)]
    assert [(m["em"], m["reader_em"]) for m in metrics] == [(0, 1), (1, 0)]


def test_several_data_sets_are_evaluated_together_and_printed_in_one_table(written, monkeypatch):
    # For nq the first text is wrong and the second right; for wiki both are wrong.
    golds = {"nq": "Norland", "wiki": "Ostland"}
    datasets = {
        name: [Question(name + i, WHERE, [gold]) for i in "12"] for name, gold in golds.items()
    }
    monkeypatch.setattr(evaluation, "evaluation_questions", lambda *_: (datasets, []))
    monkeypatch.setattr(evaluation, "QUESTIONS_AT_ONCE", 2)
    run("--out", written, "--json", f"{written}.json")
    summary = json.loads(Path(f"{written}.json").read_text())
    assert [*summary] == ["nq", "wiki", "mean of datasets", "all"]
    assert [summary[name]["em"][0] for name in ("nq", "wiki", "mean of datasets")] == [0.5, 0, 0.25]
    # Scoring the predictions file alone gives the same table.
    run("--predictions", written, "--json", f"{written}.again.json")
    assert json.loads(Path(f"{written}.again.json").read_text()) == summary


def test_two_evaluations_are_compared_in_pairs(written, tmp_path, capsys):
    # The other file has no gold answers; they come from --data.
    other = write(tmp_path / "other.jsonl", [{"id": i, "prediction": "Norland"} for i in "01"])
    questions = [{"id": i, "question": WHERE, "answers": ["Norland"]} for i in "01"]
    run("--out", written, "--against", other, "--data", write(tmp_path / "q.jsonl", questions))
    out = capsys.readouterr().out
    # The two questions have the same text, so they count as two samples of one question.
    assert "paired: 1 questions of both runs (0 only here, 0 only there)" in out
    assert "difference -0.500 [" in out


# --------------------------------------------------------------- choosing a checkpoint and settings


def test_an_evaluation_uses_the_checkpoints_settings_greedily_and_flags_override_them(trained):
    settings = settings_of({"output_dir": str(trained)})
    assert settings.model == f"{trained}/ur2-world0-seed0/stage2/checkpoint-000002"
    assert (settings.max_turn_tokens, settings.summarizer) == (16, "extractive")
    assert (settings.temperature, settings.top_p, settings.title_boost) == (0.0, 1.0, 4)
    flagged = settings_of({"output_dir": str(trained), "temperature": 0.7, "max_turn_tokens": 9})
    assert (flagged.temperature, flagged.max_turn_tokens) == (0.7, 9)


def test_a_warning_names_a_model_that_was_trained_on_the_same_questions(written, tmp_path, capsys):
    model = save_settings(tmp_path, data="q.jsonl", model="m")
    for data, warned in (("q.jsonl", True), ("held_out.jsonl", False)):
        settings = Settings(protocol="r_search", data=data, model=model)
        Evaluation(settings, Options(out=str(written))).announce()
        output = capsys.readouterr().out
        assert output.splitlines()[-1].startswith(f"{model}: ")
        assert ("warning: the model was trained on these questions" in output) == warned


def test_the_last_stage_is_evaluated_unless_a_stage_is_given(trained, tmp_path):
    flags = {"output_dir": str(trained)}
    assert "stage1" in last_checkpoint(flags | {"stage": 1})
    # No run has this seed, so the built-in model is evaluated.
    assert last_checkpoint(flags | {"seed": 7}) == ""
    # Stage 0 is the built-in model even if a run exists.
    untrained = settings_of(flags | {"stage": 0})
    # documents_per_search is that of the built-in world, not the paper's 10.
    assert (untrained.model, untrained.documents_per_search) == ("", 1)
    # A run on a file is found under the name that training gave it; some papers have one stage.
    for name, value, stage in (("data", "d/hotpot.json", 2), ("recipe", "vanilla_rl", 1)):
        flags = {"output_dir": str(tmp_path), name: value}
        assert last_checkpoint(flags) == ""
        folder = stage_folder(Settings(**flags), stage) / "checkpoint-000003"
        folder.mkdir(parents=True)
        assert last_checkpoint(flags) == str(folder)
    assert "no checkpoint for these flags" in message(last_checkpoint, flags | {"stage": 2})


def save_settings(folder, **settings) -> str:
    """Makes the folder look like a checkpoint with these settings and returns its path."""
    (folder / "config.json").write_text("{}")
    (folder / "settings.json").write_text(json.dumps(dataclasses.asdict(Settings(**settings))))
    return str(folder)


def test_another_question_file_does_not_search_the_old_corpus(tmp_path):
    model = save_settings(tmp_path, data="old.jsonl", corpus="old_corpus.jsonl", model="m")
    flags = {"model": model, "data": "new.jsonl"}
    assert "--data needs --corpus" in message(check_settings, settings_of(flags), training=False)
    assert settings_of({"model": model}).corpus == "old_corpus.jsonl"
    # "from-data" is not an old corpus: it means the paragraphs of the new questions.
    remote = {"retriever": "http", "retriever_url": "http://x"}
    save_settings(tmp_path, data="old.jsonl", corpus="from-data", model="m", **remote)
    assert (settings_of(flags).corpus, settings_of(flags).retriever_url) == (
        "from-data",
        "http://x",
    )
    check_settings(settings_of(flags | {"retriever": "bm25"}), False)  # the old address is ignored


def test_a_folder_of_a_stage_means_its_last_checkpoint(trained):
    stage = trained / "ur2-world0-seed0" / "stage1"
    settings = settings_of({"model": str(stage)})
    assert settings.model == str(stage / "checkpoint-000002") and settings.stage == 1


def test_the_judge_and_reader_of_training_are_not_used_in_an_evaluation(tmp_path):
    models = {"judge": "http://gone:1/v1#m", "reader": "owner/gone"}
    model = save_settings(tmp_path, load_in_8bit=True, summarizer="owner/small", **models)
    settings = check_settings(settings_of({"model": model}), training=False)
    assert (settings.judge, settings.reader) == ("", "")
    assert (settings.summarizer, settings.load_in_8bit) == ("owner/small", True)


def test_a_judge_that_decides_correctness_is_the_same_in_training_and_evaluation(tmp_path):
    # When to Search section 4.1. UR²'s judge grades mathematics, and only in the reward.
    model = save_settings(tmp_path, reward="when_to_search_stage2", judge="http://j:1/v1#m")
    assert settings_of({"model": model}).judge == "http://j:1/v1#m"
    assert settings_of({"model": model, "judge": "other"}).judge == "other"
    assert settings_of({"model": model, "judge": ""}).judge == ""


def test_a_model_is_evaluated_with_the_recipe_that_is_given(tmp_path):
    model = save_settings(tmp_path, recipe="ur2")
    settings = settings_of({"model": model, "recipe": "r1_searcher"})
    assert (settings.protocol, settings.max_searches, settings.model) == ("r1_searcher", 8, model)
    # A hub model has no settings.json and gets the settings of the paper's last stage.
    hub = {"model": "Qwen/Qwen2.5-3B"}
    assert (settings_of(hub).stage, settings_of(hub).max_turn_tokens) == (2, 512)
    assert settings_of(hub | {"stage": 1}).stage == 1
    assert settings_of(hub | {"recipe": "vanilla_rl"}).stage == 1


def test_decoding_paper_sets_the_papers_temperature_and_top_p(tmp_path):
    def sampling(words, model="m"):
        settings, _ = evaluation.parse(f"--model {model} {words}".split())
        return settings.temperature, settings.top_p

    paper = "--decoding paper"
    assert sampling("") == sampling(f"{paper} --recipe r1_searcher") == (0.0, 1.0)
    assert sampling(paper) == (0.3, 0.5)  # UR²
    assert sampling(f"{paper} --temperature 0.7") == (0.7, 0.5)
    # A checkpoint's own recipe decides.
    assert sampling(paper, save_settings(tmp_path, recipe="r_search", model="m")) == (0.1, 1.0)
    for recipe in ("arena", "when_to_search"):  # their papers do not say how they sample
        assert sampling(f"{paper} --recipe {recipe}") == (0.0, 1.0)


def test_a_token_limit_that_is_given_applies_to_every_task(tmp_path):
    """UR² C.4 allows 3,072 tokens for mathematics and 1,536 for multiple choice."""
    model = save_settings(tmp_path, turn_tokens={"math": 3072, "choice": 1536}, model="m")
    for flag, limit, task_limits in (
        ("", 512, {"math": 3072, "choice": 1536}),
        ("--max_turn_tokens 9", 9, {}),
    ):
        settings, _ = evaluation.parse(f"--model {model} {flag}".split())
        assert (settings.max_turn_tokens, settings.turn_tokens) == (limit, task_limits)


def test_a_search_limit_that_is_given_applies_to_every_task():
    """UR² D.2's prompt allows five queries for open questions."""
    flags = {"recipe": "ur2", "variant": "five_queries", "model": "m", "data": "d"}
    for more, limit, task_limits in (({}, 4, {"qa": 5}), ({"max_searches": 2}, 2, {})):
        settings = settings_of(flags | more)
        assert (settings.max_searches, settings.task_searches) == (limit, task_limits)


def test_retriever_given_returns_all_references_of_the_question_that_searches():
    """ARENA 4.3: each search of a released checkpoint returns the given references."""
    documents = [Document(str(i), "t", str(i)) for i in range(7)]
    questions = [Question(str(n), "?", ["a"], references=tuple(documents[n:])) for n in (0, 3)]
    retriever = make_control("given", [], 0)
    assert retriever.search(["x", "y"], 2, questions) == [documents, documents[3:]]
    error = message(retriever.search, ["x"], 2, [Question("q", "?", ["a"])])
    assert "--retriever given: question q has no references" in error
    settings = settings_of({"model": "m", "retriever": "given", "recipe": "r1_searcher"})
    assert settings.document_tokens == 4096 and not check_settings(settings, False).corpus
    assert (
        settings_of({"model": "m", "retriever": "given", "document_tokens": 9}).document_tokens == 9
    )


@pytest.mark.parametrize(
    "words, fragment",
    [
        ("--question 3", "did you mean --questions?"),
        ("--samples 0", "--samples 0: must be at least 1"),
        ("--model ./nowhere", "no such directory"),
        ("--run_name typo", "no checkpoint for these flags"),
        ("--lr 3", "unknown flag --lr"),
        ("--split all", "one of train, dev, test"),
        ("--recipe r_search --reader built-in --model m --data f --corpus c", "only its own world"),
        ("--against none.jsonl", "No such file"),
        ("--judge http://127.0.0.1:9/v1#m", "127.0.0.1:9"),
    ],
)
def test_bad_input_is_a_one_line_error_before_a_model_is_loaded(
    words, fragment, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(
        evaluation, "load_model", lambda *_, **__: pytest.fail("a model was loaded")
    )
    monkeypatch.setattr(evaluation, "build_search", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    question_file(tmp_path / "q")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    arguments = words.format(runs=tmp_path).split()  # the folder has no trained run
    assert fragment.format(runs=tmp_path) in command_line(evaluation.main, arguments, capsys)


def test_help_has_its_flags_and_does_not_look_for_a_model(capsys):
    with pytest.raises(SystemExit):
        run("--recipe r1_searcher --model none --help all")
    output = capsys.readouterr().out
    assert "--top_p" in output and "--lr" not in output


# ------------------------------------------------------------------- the questions of an evaluation


def test_the_built_in_world_gives_the_same_number_of_test_questions_per_kind():
    datasets, _ = evaluation_questions(Settings(), OPTIONS)
    (questions,) = datasets.values()
    assert Counter(q.kind for q in questions) == dict.fromkeys(KINDS, 3)
    assert all(q.id.startswith("test/") for q in questions if q.kind == "one_hop")


def question_file(path, count=5) -> str:
    """Writes a file of `count` questions with a reference each and returns the path."""
    fields = {"references": [{"id": "1", "title": "t", "text": "x"}], "answers": ["a"]}
    return write(path, [{"id": str(i), "question": f"{i} ?"} | fields for i in range(count)])


@pytest.mark.parametrize(
    "retriever, text", [("bm25", "a city"), ("empty", "None"), ("oracle", "x")]
)
def test_retrieved_references_replace_the_given_ones(retriever, text, tmp_path):
    references = {"supporting": [1], "references": [{"id": "1", "title": "t", "text": "x"}]}
    question = {"id": "0", "question": "ana bell", "answers": ["a"]}
    corpus = [{"id": str(i), "title": "t", "text": "y"} for i in range(3)]
    corpus.append({"id": "9", "title": "Ana Bell", "text": "a city"})
    files = {"data": write(tmp_path / "q.jsonl", [question | references])}
    files["corpus"] = write(tmp_path / "c.jsonl", corpus)
    settings = Settings(protocol="arena", documents_per_search=1, retriever=retriever, **files)
    options = dataclasses.replace(OPTIONS, references="retrieved")
    (evaluated,) = evaluation_questions(settings, options)[0]["q"]
    assert [document.text for document in evaluated.references] == [text]
    # It is unknown which of the retrieved references are gold.
    cites = "<relevance>[1]</relevance><analysis> a </analysis><answer> a </answer>"
    numbers = prediction_metrics(trajectory_from_text(evaluated, cites, "arena"))
    assert evaluated.supporting == () and {"relevance", "all_correct"}.isdisjoint(numbers)


def test_a_failed_search_for_references_is_a_one_line_error(monkeypatch):
    monkeypatch.setattr("retrievers.controls.Control.search", Mock(return_value=[None]))
    settings = Settings(protocol="arena", retriever="empty")
    error = message(with_retrieved, [Question("q", "?", ["a"])], [], settings)
    assert "--references retrieved: a search failed" in error


def test_questions_of_a_file_are_drawn_by_the_seed_and_zero_takes_all(tmp_path):
    files = [question_file(tmp_path / name, 50) for name in ("q.jsonl", "r.jsonl")]

    def ids(seed=0, **changes):
        settings = Settings(data=",".join(files), model="m", retriever="empty", seed=seed)
        datasets, _ = evaluation_questions(settings, dataclasses.replace(OPTIONS, **changes))
        return [int(q.id.removeprefix("q:")) for q in datasets["q"]]

    drawn = ids(questions=20)
    assert drawn == ids(questions=20) == sorted(set(drawn)) != list(range(20))
    assert len(drawn) == 20 and ids(1, questions=20) != drawn
    assert ids(questions=0) == ids(questions=60) == list(range(50))


def test_predictions_are_always_written_below_the_runs_folder():
    for model in ("/", "/m", "../m", "a/b c/checkpoint-000001", "C:/x/y", ""):
        out = evaluation.default_out(Settings(model=model), OPTIONS)
        assert out.parent == Path("runs/predictions") and not out.name.startswith((".", "-"))


def test_predictions_of_two_recipes_or_variants_on_one_model_get_two_files():
    def name(**changes):
        settings = Settings(model="qwen", data="hotpot.json", **changes)
        return evaluation.default_out(settings, OPTIONS).name

    assert name() == "qwen-ur2-hotpot.json-t1-bm25.jsonl"
    assert name(recipe="arena", variant="code") == "qwen-arena-code-hotpot.json-t1-bm25.jsonl"


# ------------------------------------------------------------- repeated and interrupted evaluations


@pytest.fixture
def few(trained, tmp_path, monkeypatch):
    """Returns a function that evaluates two questions of each of five kinds, four at a time."""
    monkeypatch.setattr(evaluation, "QUESTIONS_AT_ONCE", 4)

    def few(name: str, *more) -> Path:
        run(f"--output_dir {trained} --questions 2 --out", tmp_path / name, *more)
        return tmp_path / name

    return few


def test_a_greedy_evaluation_and_samples_of_one_seed_are_reproducible(few):
    for temperature in (0, 2):  # at temperature 1 two samples might be equal
        options = ("--samples", 8, "--temperature", temperature)
        one, other = (few(f"{temperature}{again}.jsonl", *options) for again in "ab")
        records = records_in(one)
        assert records == records_in(other)
        assert [r["sample"] for r in records] == [*range(8)] * 10
        texts = {r["transcript"] for r in records[:8]}  # the samples of one question
        assert (len(texts) == 1) == (temperature == 0)


def test_an_interrupted_evaluation_leaves_its_finished_batches_and_a_repeated_one_keeps_the_file(
    few, monkeypatch, capsys
):
    whole = few("whole.jsonl").read_bytes()
    generate, calls, out = evaluation.rollout, [], few("p.jsonl")
    assert out.read_bytes() == whole

    def interrupted_in_the_third_call(policy, environment, questions, seed, *more):
        calls.append((seed, len(records_in(out)) if seed else 0))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return generate(policy, environment, questions, seed, *more)

    monkeypatch.setattr(evaluation, "rollout", interrupted_in_the_third_call)
    with pytest.raises(KeyboardInterrupt):
        few("p.jsonl")
    printed = capsys.readouterr().out
    assert f"retriever bm25; predictions: {out}" in printed
    assert calls == [(0, 0), (4, 4), (8, 8)]  # a batch is written before the next one starts
    assert out.read_bytes() == b"".join(whole.splitlines(keepends=True)[:8])
    assert f"the file that was {out} is kept as p.jsonl.old1" in printed
    assert out.with_name("p.jsonl.old1").read_bytes() == whole
    assert few("p.jsonl").read_bytes() == whole  # the evaluation starts again from the beginning


def test_failed_searches_are_reported(few, monkeypatch, capsys):
    monkeypatch.setattr(evaluation, "build_search", lambda *_: lambda requests: 1 / 0)
    few("p.jsonl")
    assert "searches failed (the first: ZeroDivisionError" in capsys.readouterr().err


def test_the_table_has_a_row_per_kind_and_decoding_both_runs_two_evaluations(
    trained, tmp_path, capsys
):
    shutil.copytree(trained, runs := tmp_path / "runs")
    run(f"--output_dir {runs} --questions 2 --decoding both")
    tables = capsys.readouterr().out.split("questions of the built-in world")[1:]
    for temperature, table in zip("10", tables, strict=True):
        assert f"temperature {temperature}, retriever bm25" in table
        assert [line.split()[0] for line in table.splitlines()[1:8]] == ["kind", *KINDS, "all"]
        assert len(records_in(re.search("predictions: (.*)", table)[1])) == 10
    run(f"--output_dir {runs} --questions 2 --stage 0")
    assert capsys.readouterr().out.startswith("the built-in model, before RL: 10 questions")


def test_an_evaluation_draws_the_same_questions_as_training(tmp_path):
    records = [{"id": str(i), "question": f"q{i} ?", "answers": ["a"]} for i in range(40)]
    path = write(tmp_path / "q.jsonl", records)
    for seed in (0, 3):
        settings = Settings(model="m", data=f"{path}:7", seed=seed)
        datasets, _ = evaluation_questions(settings, evaluation.Options(questions=0))
        assert datasets == {"q": training_questions(settings)} and len(datasets["q"]) == 7


# ------------------------------------------------------------------------------------ real records

REAL = """--corpus from-data --run_name real --questions_per_step 4 --steps 2 --max_turn_tokens 40
    --max_searches 1 --documents_per_search 2 --document_tokens 60 --save_every 1 --group_size 8
    --trajectories_per_update 0 --temperature 0.8 --lr 1e-4 --tokens_per_micro_batch 700"""


def test_real_hotpotqa_records_run_through_both_stages_and_an_evaluation(model, tmp_path, capsys):
    published = HOTPOTQA / "official_train_distractor_20.json"
    runs, data = tmp_path / "runs", tmp_path / "hotpot.jsonl"
    if not published.exists():
        pytest.skip(f"no HotpotQA records in {HOTPOTQA}")
    write_records(data, convert("hotpotqa", published))
    for stage in (1, 2):  # each stage rolls out, searches, rewards and updates the weights
        start = f"--data {data} --output_dir {runs} --stage {stage}"
        start += f" --model {model}" * (stage == 1)
        train.main([*start.split(), *REAL.split()])
        rows = records_in(runs / "real" / f"stage{stage}" / "metrics.jsonl")
        assert len(rows) == 2 and any(row["inserted_tokens"] for row in rows)
        # Stage 2 does not reward searching, so all rewards may be 0.
        assert stage == 2 or any(row["grad_norm"] > 0 for row in rows)
    run(f"--output_dir {runs} --run_name real --questions 20 --samples 4 --temperature 0.8 --all")
    output = capsys.readouterr().out
    assert f"stage 2 starts from {runs}/real/stage1/checkpoint-000002" in output
    assert f"questions of {data.stem}" in output
    predictions = records_in(output.splitlines()[-1].removeprefix("predictions: "))
    metrics = [record["metrics"] for record in predictions]
    # At most 60 tokens of documents are shown, plus the tags around them.
    shown = [numbers for numbers in metrics if numbers["successful"]]
    assert shown and all(0 < numbers["shown"] < 70 < numbers["retrieved"] for numbers in shown)
    assert len(predictions) == 80
