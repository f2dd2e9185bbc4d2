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
from conftest import ScriptedModel, command_line, message

import eval as evaluation
from data import Document, Question, SearchRequest
from eval import last_checkpoint, settings_of
from flags import stage_folder
from plumbing import build
from plumbing.questions import evaluation_questions, training_questions, with_retrieved
from retriever import make_retriever
from retrievers.controls import make_control
from rewards import example
from settings import Settings
from trajectory import trajectory_from_text
from trajectory_metrics import prediction_metrics
from world.world import KINDS

OPTIONS = evaluation.Options(questions=3)


def run(words: str, *more) -> None:
    """Runs `python eval.py WORDS MORE` in this process."""
    evaluation.main([*words.split(), *map(str, more)])


def score(words: str) -> None:
    """Runs `python eval.py WORDS`, which with --predictions ends before torch is loaded."""
    with pytest.raises(SystemExit):
        evaluation.score_only(words.split())


def records_in(path) -> list[dict]:
    """Returns the records of a file of JSON lines."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def write(path, records) -> str:
    """Writes the records as JSON lines and returns the path."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


# -------------------------------------------------------------------- the metrics of one trajectory


WHERE = "where does Ana Bell live ?"
FOUND = "<observation>\nAna Bell was born in Norland.\n</observation>"
SEARCHED = f"<search> Ana Bell </search>\n{FOUND}\n"
BOX = "<original_evidence> {} </original_evidence>"
ANSWER = "<answer> {} </answer>"


ASKED = Question("q", WHERE, ["Norland"])


def r_search(body, question=ASKED):
    """Returns the trajectory of an r_search transcript."""
    return trajectory_from_text(question, body, "r_search")


def test_the_metrics_of_r_search_cover_its_evidence_too():
    # The evidence has 5 words, and "lives" is in no document: support 4/5.
    text = SEARCHED + BOX.format("Ana Bell lives in Norland.") + ANSWER.format("Norland")
    expected = {"format": 1, "evidence": 1, "support": 0.8}
    assert expected.items() <= prediction_metrics(r_search(text)).items()
    # Without evidence the support is left out, not 0.
    numbers = prediction_metrics(r_search(ANSWER.format("Norland")))
    assert (numbers["format"], numbers["evidence"]) == (1, 0) and "support" not in numbers


@pytest.mark.parametrize(
    "answer, cited, supporting, expected",
    [
        # Gold are 1 and 3. All correct (Table 13) needs exactly these and the right answer.
        ("Norland", 1, (1, 3), {"relevance": 0.5, "exact_set": 0, "all_correct": 0}),
        ("Norland", 2, (1, 3), {"relevance": 1, "exact_set": 1, "all_correct": 1}),
        ("Sudria", 2, (1, 3), {"relevance": 1, "exact_set": 1, "all_correct": 0}),
        ("Norland", 2, (), {}),  # without gold numbers the relevance is left out, not 0
    ],
)
def test_the_metrics_of_arena_cover_citations(answer, cited, supporting, expected):
    trajectory = example("arena", answer, cited)
    question = dataclasses.replace(trajectory.question, supporting=supporting)
    numbers = prediction_metrics(dataclasses.replace(trajectory, question=question))
    names = {"relevance", "exact_set", "all_correct"} & {*numbers}
    assert {name: numbers[name] for name in names} == expected


def test_the_metrics_of_a_summary_are_rouge():
    pytest.importorskip("rouge_score", reason="the extra rouge is not installed")
    question = Question("q", "sum it up", ["the cat lay down"], task="summary")
    summary = "<summary> The cat sat down. </summary>"
    numbers = prediction_metrics(trajectory_from_text(question, summary, "arena_summary"))
    assert {*numbers} >= {"rouge1", "rouge2", "rougeL", "rouge", "format"} and "em" not in numbers


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
        "rollout": lambda _, environment, questions, *seed, **options: list(
            map(r_search, 2 * texts, questions)
        ),
    }
    for name, patch in patches.items():
        monkeypatch.setattr(evaluation, name, patch)
    return tmp_path / "p.jsonl"


def others(monkeypatch, **known):
    """Makes load_llm return the given stand-ins by their names."""
    monkeypatch.setattr(build, "load_llm", lambda spec, settings, device: known[spec])


def test_reader_and_judge_are_called_after_all_predictions_are_written(
    written, monkeypatch, capsys
):
    reader = ScriptedModel(lambda text: "Norland")
    judge = ScriptedModel(lambda text: None if "answer: Sudria" in text else "yes")
    reader.failures = 1
    others(monkeypatch, R=reader, J=judge)
    run("--reader R --judge J --decoding paper --temperature 0.1 --out", written)
    assert {request[2:] for request in reader.batches[0]} == {(0.1, 0.5)}  # R-Search A.3
    out = capsys.readouterr().out
    records = records_in(written)
    assert [r["reader_prediction"] for r in records] == ["Norland", ""]
    assert [r["metrics"]["judged"] for r in records] == [None, 1]
    assert "1 verdicts are unreadable and left" in out
    assert "reader_em" in out and "reader: no answer to 1 of its requests" in out


def test_the_readers_whole_reply_is_scored_in_evaluation_too_under_whole_reply(
    written, monkeypatch
):
    # R-Search eq. 4. The reply has three words, one of them right: F1 = 2 · 1 / (3 + 1).
    others(monkeypatch, R=ScriptedModel(lambda text: "Norland\nas told"))
    given = evaluation.settings_of
    monkeypatch.setattr(
        evaluation, "settings_of", lambda flags: given({"whole_reply": True} | flags)
    )
    run("--reader R --out", written)
    again = Path(f"{written}.again")
    variant = "--recipe r_search --variant whole_reply"
    score(f"--predictions={written} --reader R {variant} --out {again}")
    score(f"--predictions={written} --reader R {variant} --out {again}")
    assert Path(f"{again}.old1").exists()  # nothing written is lost
    for path in (written, again):
        assert records_in(path)[0]["metrics"]["reader_f1"] == 0.5


def test_an_interrupt_of_the_reader_keeps_all_rollouts(written, monkeypatch):
    others(monkeypatch, R=Mock(instruction="", ask=Mock(side_effect=KeyboardInterrupt)))
    with pytest.raises(KeyboardInterrupt):
        run("--reader R --out", written)
    assert [record["metrics"]["em"] for record in records_in(written)] == [0, 1]


def test_several_data_sets_are_evaluated_together_and_a_record_names_its_own(written, monkeypatch):
    datasets = {name: [Question(name + i, WHERE, ["Norland"]) for i in "12"] for name in "ab"}
    monkeypatch.setattr(evaluation, "evaluation_questions", lambda *_: (datasets, []))
    monkeypatch.setattr(evaluation, "QUESTIONS_AT_ONCE", 3)
    run("--out", written)
    records = [(r["id"], r["dataset"]) for r in records_in(written)]
    assert records == [("a1", "a"), ("a2", "a"), ("b1", "b"), ("b2", "b")]


# --------------------------------------------------------------- choosing a checkpoint and settings


@pytest.mark.parametrize("data, warned", [("q.jsonl", True), ("held_out.jsonl", False)])
def test_a_warning_names_a_model_that_was_trained_on_the_same_questions(
    data, warned, written, tmp_path, capsys
):
    model = save_settings(tmp_path, data="q.jsonl", model="m")
    run(f"--data {data} --model {model} --out {written}")
    warning = "warning: the model was trained on these questions"
    assert (warning in capsys.readouterr().out) == warned


def test_the_last_stage_is_evaluated_unless_a_stage_is_given(trained, tmp_path):
    flags, run = {"output_dir": str(trained)}, f"{trained}/ur2-world0-seed0"
    settings = settings_of(flags)
    assert (settings.model, settings.max_turn_tokens) == (f"{run}/stage2/checkpoint-000002", 16)
    assert last_checkpoint(flags | {"stage": 1}) == f"{run}/stage1/checkpoint-000002"
    assert settings_of({"model": f"{run}/stage1"}).model == f"{run}/stage1/checkpoint-000002"
    # No run has this seed, so the built-in model is evaluated.
    assert last_checkpoint(flags | {"seed": 7}) == ""
    # Stage 0 is the built-in model even if a run exists.
    assert settings_of(flags | {"stage": 0}).model == ""
    # A run on a file is found under the name that training gave it; some papers have one stage.
    flags = {"output_dir": str(tmp_path), "recipe": "vanilla_rl", "data": "d/hotpot.json"}
    folder = stage_folder(Settings(**flags), 1) / "checkpoint-000003"
    folder.mkdir(parents=True)
    assert last_checkpoint(flags) == str(folder)
    assert "no checkpoint for these flags" in message(last_checkpoint, flags | {"stage": 2})


def save_settings(folder, **settings) -> str:
    """Makes the folder look like a checkpoint with these settings and returns its path."""
    (folder / "config.json").write_text("{}")
    (folder / "settings.json").write_text(json.dumps(dataclasses.asdict(Settings(**settings))))
    return str(folder)


SAVED = {"recipe": "r_search", "data": "old.jsonl", "corpus": "old_corpus.jsonl", "model": "m"}
SAVED |= {"judge": "j", "reader": "r", "summarizer": "owner/small", "load_in_8bit": True}
CHOICES = SAVED | {"turn_tokens": {"choice": 1536}}


@pytest.mark.parametrize(
    "saved, flags, expected",
    [
        # Greedy, with the rest of training's settings, but without the reader and judge of its
        # reward.
        (SAVED, "", {"temperature": 0.0, "judge": "", "reader": "", "load_in_8bit": True}),
        (SAVED, "--temperature 0.7 --data q --retriever empty", {"temperature": 0.7, "corpus": ""}),
        # Another question file does not search the old corpus. "from-data" is not an old corpus: it
        # means the paragraphs of the new questions.
        (SAVED | {"corpus": "from-data"}, "--data new.jsonl", {"corpus": "from-data"}),
        # When to Search section 4.1: a judge that decides correctness is that of training.
        (SAVED | {"reward": "when_to_search_stage2"}, "", {"judge": "j"}),
        # The paper's sampling: that of the checkpoint's recipe.
        (SAVED, "--decoding paper", {"temperature": 0.1, "top_p": 1.0}),
        (SAVED, "--decoding paper --temperature 0.7", {"temperature": 0.7}),
        (SAVED, "--recipe r1_searcher", {"protocol": "r1_searcher", "max_searches": 8}),
        # A limit that is given applies to every task (UR² C.4: 1,536 for choices, 512 for others).
        (CHOICES, "", {"turn_tokens": {"choice": 1536}}),
        (CHOICES, "--max_turn_tokens 9", {"turn_tokens": {}, "max_turn_tokens": 9}),
        # A hub model has no settings.json and gets the settings of the paper's last stage.
        (None, "", {"stage": 2, "max_turn_tokens": 512}),
        (None, "--recipe r1_searcher --retriever given", {"document_tokens": 4096}),
        # A search limit that is given applies to every task; D.2's prompt allows five.
        (None, "--variant five_queries", {"max_searches": 4, "task_searches": {"qa": 5}}),
        (None, "--variant five_queries --max_searches 2", {"max_searches": 2, "task_searches": {}}),
    ],
)
def test_the_settings_of_an_evaluation(saved, flags, expected, tmp_path):
    model = save_settings(tmp_path, **saved) if saved else "owner/model"
    flags = f"--model {model} {flags}" + " --data q --corpus c" * (saved is None)
    settings, _ = evaluation.parse(flags.split())
    assert {name: getattr(settings, name) for name in expected} == expected


def test_retriever_given_returns_all_references_of_the_question_that_searches():
    """ARENA 4.3: each search of a released checkpoint returns the given references."""
    documents = [Document(str(i), "t", str(i)) for i in range(7)]
    retriever = make_control("given", [], 0)
    question = Question("q", "?", ["a"], references=tuple(documents))
    assert retriever(SearchRequest(question, "x"), 2) == documents
    error = message(retriever, SearchRequest(ASKED, "x"), 2)
    assert "--retriever given: question q has no references" in error


@pytest.mark.parametrize(
    "words, fragment",
    [
        ("--model ./nowhere", "no such directory"),
        ("--lr 3", "unknown flag --lr"),
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
    monkeypatch.chdir(tmp_path)  # a folder without a trained run
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    assert fragment in command_line(evaluation.main, words.split(), capsys)


# ------------------------------------------------------------------- the questions of an evaluation


@pytest.mark.parametrize("retriever, text", [("bm25", "a city"), ("empty", "None")])
def test_retrieved_references_replace_the_given_ones(retriever, text):
    corpus = [Document(str(i), title, "a city") for i, title in enumerate(["t", "Ana Bell", "u"])]
    question = Question("q", "ana bell", ["a"], references=tuple(corpus[:1]), supporting=(1,))
    settings = Settings(protocol="arena", documents_per_search=1, retriever=retriever)
    (changed,) = with_retrieved([question], make_retriever(corpus, settings), settings)
    assert [document.text for document in changed.references] == [text]
    assert changed.supporting == ()  # it is unknown which of the retrieved references are gold


def test_a_failed_search_for_references_is_a_one_line_error(monkeypatch):
    failed = lambda _, requests, k: [None] * len(requests)  # noqa: E731
    monkeypatch.setattr("plumbing.questions.retrieve", failed)
    options = dataclasses.replace(OPTIONS, references="retrieved")
    error = message(evaluation_questions, Settings(protocol="arena", retriever="empty"), options)
    assert "--references retrieved: a search failed" in error


def test_questions_of_a_file_are_drawn_by_the_seed_and_zero_takes_all(tmp_path):
    records = [{"id": str(i), "question": f"{i} ?", "answers": ["a"]} for i in range(50)]
    path = write(tmp_path / "q.jsonl", records)

    def drawn(count, seed=0, suffix=""):
        settings = Settings(data=path + suffix, model="m", retriever="empty", seed=seed)
        datasets, _ = evaluation_questions(settings, dataclasses.replace(OPTIONS, questions=count))
        return datasets["q"]

    chosen = drawn(20)
    assert len(chosen) == 20 and chosen == drawn(20) != drawn(20, seed=1)
    assert len(drawn(0)) == 50
    # An evaluation of FILE:N draws the same questions as training.
    assert drawn(0, suffix=":7") == training_questions(Settings(data=f"{path}:7", model="m"))


def test_predictions_of_each_model_and_variant_get_a_file_of_their_own():
    settings = Settings(model="../m", data="hotpot.json", recipe="arena", variant="code")
    name = "m-arena-code-hotpot.json-t1-bm25.jsonl"
    assert evaluation.default_out(settings, OPTIONS) == Path("runs/predictions", name)


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
        assert re.findall(r"\n\| (\w+)", table) == ["kind", *KINDS, "all"]
        assert len(records_in(re.search("predictions: (.*)", table)[1])) == 10


def test_questions_of_some_kinds_are_drawn_of_each(tmp_path):
    """UR² 4.2: 500 questions each of History, Law and others of MMLU-Pro."""
    kinds = ["History", "law", "health"] * 4
    records = [{"question": f"{i} ?", "answers": ["a"], "source": k} for i, k in enumerate(kinds)]
    settings = Settings(data=write(tmp_path / "q.jsonl", records), model="m", retriever="empty")
    options = [dataclasses.replace(OPTIONS, kinds=names) for names in ("Law, history", "histroy")]
    (chosen,) = evaluation_questions(settings, options[0])[0].values()
    assert Counter(q.kind for q in chosen) == {"History": 3, "law": 3}
    assert "are History, health, law" in message(evaluation_questions, settings, options[1])


def test_an_evaluation_logs_its_summaries_if_it_is_asked_to(written, monkeypatch):
    logs = []
    monkeypatch.setattr(evaluation, "build_search", lambda *given: logs.append(given[3]))
    for flag in ("", "--log_summaries"):
        run(f"--out {written} {flag}")
    assert logs == ["", written.with_name("summaries.jsonl")]
