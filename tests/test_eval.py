"""eval.py: the numbers of a trajectory, whose settings count, evaluations that go on, and real
records from the first to the last command.
"""

import dataclasses
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT, command_line
from test_compute_rewards import Model

import eval as evaluation
import train
from data import Document, Question
from errors import InputError
from eval import Evaluation, Options, last_checkpoint, prediction_metrics, settings_of
from plumbing import build
from plumbing.predictions import score_command
from plumbing.questions import evaluation_questions, training_questions, with_retrieved
from prompts import PROTOCOLS
from retrievers.controls import make_control
from rewards import example
from settings import Settings, check_settings, stage_folder
from trajectory import trajectory_from_text
from world.world import KINDS

HOTPOTQA = ROOT.parent / "shared" / "data" / "hotpotqa"
ANSWER_SCORES = ("em", "f1", "cem")
# of all that search
COLUMNS = (*ANSWER_SCORES, "searched", "searches", "successful", "queries", "rejected")
COLUMNS += ("failed_rows", "repeated", "fallbacks", "documents_cut", "format")
OPTIONS = evaluation.Options(questions=3)


def run(words: str, *more) -> None:
    """`python eval.py WORDS`, in this process."""
    command = score_command if words.startswith("--predictions") else evaluation.main
    command([*words.split(), *map(str, more)])


def records_in(path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def write(path, records) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


# ----------------------------------------------------------------------------------- one trajectory


@pytest.mark.parametrize("protocol", ["ur2", "r1_searcher"])
def test_a_trajectory_is_graded_by_answer_searches_fallbacks_and_format(protocol):
    # Two searches, the second one a fallback; "Kelmouth, Norland" for "Norland": F1 2/3, cover-EM 1
    numbers = prediction_metrics(example(protocol, "Kelmouth, Norland"))
    scores = (0, pytest.approx(2 / 3), 1)
    assert numbers == dict(zip(COLUMNS, (*scores, 1, 2, 1, 2, 0, 0, 0, 1, 0, 1), strict=True))
    trajectory = example(protocol, "x " * 11)
    trajectory.searches[0].cut = True
    numbers = prediction_metrics(trajectory)
    assert (numbers["format"], numbers["documents_cut"]) == (0, 0.5)  # one of two
    assert "documents_cut" not in prediction_metrics(example(protocol, searches=0))
    assert all(prediction_metrics(example(name))["format"] == 1 for name in PROTOCOLS)


WHERE = "where does Ana Bell live ?"
FOUND = "<observation>\nAna Bell was born in Norland.\n</observation>"
SEARCHED = f"<search> Ana Bell </search>\n{FOUND}\n"
BOX = "<original_evidence> {} </original_evidence>"
ANSWER = "<answer> {} </answer>"


def r_search(body, question=None):
    return trajectory_from_text(question or Question("q", WHERE, ["Norland"]), body, "r_search")


def test_r_search_is_graded_by_its_evidence_too():
    evidence = BOX.format("Ana Bell lives in Norland.")
    answer = ANSWER.format("Norland")
    expected = dict(zip(COLUMNS, (1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 1), strict=True))
    # 5 words of evidence, of which "lives" stands in no document: 4/5
    whole = prediction_metrics(r_search(SEARCHED + evidence + answer))
    assert whole == expected | {"evidence": 1, "support": 0.8}
    for text, form in ((answer, 1), (SEARCHED + answer, 0)):  # a search asks for evidence
        numbers = prediction_metrics(r_search(text))
        assert (numbers["format"], numbers["evidence"]) == (form, 0)
        assert "support" not in numbers  # and not a support of 0


def test_the_format_of_when_to_search_is_its_grammar_whatever_a_search_costs():
    # 9 searches at 0.3 each are 2.7, which the reward refuses (2 is its bound): here is no price
    turn = "<search> a </search>\n<information>\nfound\n</information>\n<reflect> r </reflect>"
    transcript = f"<think> t </think>{turn * 9}{ANSWER.format('a')}"
    for text, form in ((transcript, 1), (transcript + " sure", 0)):
        numbers = prediction_metrics(
            trajectory_from_text(Question("q", "?", ["a"]), text, "when_to_search")
        )
        assert (numbers["format"], numbers["searches"], tuple(numbers)) == (form, 9, COLUMNS)
        assert numbers["repeated"] == 8  # all but the first ask for "a"


def test_arena_is_graded_by_its_citations_and_a_summary_by_rouge():
    # cites 1, gold is 1 and 3: some overlap 0.5; set F1 2 · 1 / (1 + 2)
    trajectory = example("arena", searches=1)
    answer = {"em": 1, "f1": 1, "cem": 1, "format": 1}
    half = answer | {"relevance": 0.5, "exact_set": 0, "set_f1": 2 / 3, "all_correct": 0}
    assert prediction_metrics(trajectory) == half
    assert prediction_metrics(example("arena", "Norland </answer> so"))["format"] == 0
    # All correct (Table 13): the whole set, and the answer too
    for text, right in (("Norland", 1), ("Sudria", 0)):
        numbers = prediction_metrics(example("arena", text))
        assert (numbers["exact_set"], numbers["all_correct"]) == (1, right)
    # without gold numbers relevance is left out, and not 0
    question = dataclasses.replace(trajectory.question, supporting=())
    assert prediction_metrics(trajectory_from_text(question, trajectory.text, "arena")) == answer
    question = Question("q", "sum it up", ["the cat lay down"], task="summary")
    summary = "<summary> The cat sat down. </summary>"
    numbers = prediction_metrics(trajectory_from_text(question, summary, "arena_summary"))
    assert set(numbers) == {"rouge1", "rouge2", "rougeL", "rouge", "format"}


# ---------------------------------------------------------------------------------- asked of others

WITH_EVIDENCE = SEARCHED + BOX.format("Ana Bell was born in Norland.") + ANSWER.format("Sudria")


@pytest.fixture
def written(tmp_path, monkeypatch):
    """An evaluation of two r_search transcripts through `main`, without a model."""
    texts = [WITH_EVIDENCE, ANSWER.format("Norland")]
    questions = [Question(i, WHERE, ["Norland"], source="people") for i in "01"]
    settings = Settings(protocol="r_search", retriever="empty", model="m", output_dir=str(tmp_path))
    patches = {
        "settings_of": lambda given: dataclasses.replace(settings, **given),
        "evaluation_questions": lambda *_: ({"people": questions}, []),
        "weights_version": lambda *_: "1",
        "load_model": lambda *_, **__: (None, None),
        "build_environment": lambda *_: None,
        "check_prompts": lambda *_: None,
        "rollout": lambda _, environment, some, *how: list(map(r_search, texts, some)),
    }
    for name, patch in patches.items():
        monkeypatch.setattr(evaluation, name, patch)
    return tmp_path / "p.jsonl"


def others(monkeypatch, **known):
    monkeypatch.setattr(build, "load_llm", lambda spec, settings, device: known[spec])


def test_reader_and_judge_are_asked_after_all_predictions_are_written(
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
    assert "1 of 2 verdicts are unreadable" in out and "judge: 1 got no reply at all" in out
    assert "reader_em" in out
    silent.failures = 1
    others(monkeypatch, R=silent)
    run("--reader R --fresh --out", written)
    assert "reader: no answer to 1 of its requests" in capsys.readouterr().out
    monkeypatch.setattr(build, "load_reader", lambda *_: (toy_policy, None))
    monkeypatch.setattr(build, "LocalLLM", lambda *_, **__: reader)
    run("--reader built-in --fresh --out", written)
    assert '"reader_em": 1.0' in written.read_text()


def test_an_interrupt_while_others_are_asked_loses_no_rollout_and_they_can_be_asked_again(
    written, monkeypatch, capsys
):
    def interrupted(text):
        raise KeyboardInterrupt

    asked = Model(lambda text: "Norland")
    others(monkeypatch, R=Model(interrupted), S=asked, J=asked)
    with pytest.raises(SystemExit) as end:
        run("--reader R --out", written)
    assert end.value.code == 130 and str(written) in capsys.readouterr().out.splitlines()[-1]
    before = written.read_text()
    assert len(before.splitlines()) == 2
    monkeypatch.setattr(evaluation, "load_model", lambda *_: pytest.fail("a model was loaded"))
    again = f"{written}.again"
    run(f"--predictions={written} --reader S --judge J --out {again} --json {again}.json")
    assert written.read_text() == before and '"judged": null' in Path(again).read_text()
    # each is right where the other is not
    summary = json.loads(Path(f"{again}.json").read_text())["people"]
    assert summary["reader_em"][0] == summary["em"][0] == 0.5


def test_several_data_sets_are_one_pass_and_one_table(written, monkeypatch):
    # the first text is wrong and the second right: for the other set both are wrong
    golds = {"nq": "Norland", "wiki": "Ostland"}
    two = {name: [Question(name + i, WHERE, [gold]) for i in "12"] for name, gold in golds.items()}
    monkeypatch.setattr(evaluation, "evaluation_questions", lambda *_: (two, []))
    monkeypatch.setattr(evaluation, "QUESTIONS_AT_ONCE", 2)
    run("--out", written, "--json", f"{written}.json")
    summary = json.loads(Path(f"{written}.json").read_text())
    assert [*summary] == ["nq", "wiki", "mean of datasets", "all"]
    assert [summary[name]["em"][0] for name in ("nq", "wiki", "mean of datasets")] == [0.5, 0, 0.25]
    # the predictions alone give the same table
    run("--predictions", written, "--json", f"{written}.again.json")
    assert json.loads(Path(f"{written}.again.json").read_text()) == summary


def test_two_evaluations_are_compared_in_pairs(written, tmp_path, capsys):
    # another's file has no gold answers: they are those of --data
    other = write(tmp_path / "other.jsonl", [{"id": i, "prediction": "Norland"} for i in "01"])
    asked = [{"id": i, "question": WHERE, "answers": ["Norland"]} for i in "01"]
    run("--out", written, "--against", other, "--data", write(tmp_path / "q.jsonl", asked))
    out = capsys.readouterr().out
    assert "paired: 2 questions of both runs (0 only here, 0 only there)" in out
    assert "-0.500 [" in out


def test_another_punctuation_scores_the_predictions_anew(written, monkeypatch, tmp_path):
    row = r_search(ANSWER.format("Nor land"), Question("1", "?", ["Nor-land"]))  # "norland"
    monkeypatch.setattr(evaluation, "evaluation_questions", lambda *_: ({"a": [row.question]}, []))
    monkeypatch.setattr(evaluation, "rollout", lambda *_: [row])
    run(f"--punctuation space --json {tmp_path}/t.json --out", written)
    assert json.loads((tmp_path / "t.json").read_text())["qa"]["em"][0] == 1
    assert records_in(written)[0]["metrics"]["em"] == 0  # in the file it stays as its paper has it


# ----------------------------------------------------------------- which checkpoint, which settings


def test_the_checkpoints_own_settings_count_made_greedy_and_flags_override_them(trained):
    settings = settings_of({"output_dir": str(trained)})
    assert settings.model == f"{trained}/ur2-world0-seed0/stage2/checkpoint-000002"
    assert (settings.max_turn_tokens, settings.summarizer) == (16, "extractive")
    assert (settings.temperature, settings.top_p, settings.title_boost) == (0.0, 1.0, 4)
    flagged = settings_of({"output_dir": str(trained), "temperature": 0.7, "max_turn_tokens": 9})
    assert (flagged.temperature, flagged.max_turn_tokens) == (0.7, 9)


def test_it_says_that_its_questions_are_those_of_training(written, tmp_path, capsys):
    model = save_settings(tmp_path, data="q.jsonl", model="m")
    for data, warned in (("q.jsonl", True), ("held_out.jsonl", False)):
        settings = Settings(protocol="r_search", data=data, model=model)
        Evaluation(settings, Options(out=str(written))).announce()
        output = capsys.readouterr().out
        assert output.splitlines()[-1].startswith(f"{model}: ")
        assert ("warning: the model was trained on these questions" in output) == warned


def test_the_last_stage_is_evaluated_unless_one_is_named(trained, tmp_path):
    given = {"output_dir": str(trained)}
    assert "stage1" in last_checkpoint(given | {"stage": 1})
    assert last_checkpoint(given | {"seed": 7}) == ""  # nothing trained: the built-in model
    before = settings_of(given | {"stage": 0})  # also where a run exists
    # the built-in world's settings, not the paper's 10
    assert (before.model, before.documents_per_search) == ("", 1)
    # a run on a file has the name that training gave it; a paper may have one stage only
    for name, value, stage in (("data", "d/hotpot.json", 2), ("recipe", "vanilla_rl", 1)):
        given = {"output_dir": str(tmp_path), name: value}
        assert last_checkpoint(given) == ""
        last = stage_folder(Settings(**given), stage) / "checkpoint-000003"
        last.mkdir(parents=True)
        assert last_checkpoint(given) == str(last)
    with pytest.raises(InputError, match="vanilla_rl has stages 1"):
        last_checkpoint(given | {"stage": 2})


def save_settings(folder, **settings) -> str:
    """A folder that looks like a checkpoint of ours."""
    (folder / "config.json").write_text("{}")
    (folder / "settings.json").write_text(json.dumps(dataclasses.asdict(Settings(**settings))))
    return str(folder)


def test_another_question_file_does_not_search_the_old_corpus(tmp_path):
    model = save_settings(tmp_path, data="old.jsonl", corpus="old_corpus.jsonl", model="m")
    new = {"model": model, "data": "new.jsonl"}
    with pytest.raises(InputError, match="--data needs --corpus"):
        check_settings(settings_of(new), training=False)
    assert settings_of({"model": model}).corpus == "old_corpus.jsonl"
    # "from-data" is no old corpus: it means the records that are asked
    there = {"retriever": "http", "retriever_url": "http://x"}
    save_settings(tmp_path, data="old.jsonl", corpus="from-data", model="m", **there)
    assert (settings_of(new).corpus, settings_of(new).retriever_url) == ("from-data", "http://x")
    check_settings(settings_of(new | {"retriever": "bm25"}), False)  # the old address is not read


def test_what_only_training_asks_for_is_not_asked_of_an_evaluation(tmp_path):
    given = {"judge": "http://gone:1/v1#m", "reader": "owner/gone"}
    model = save_settings(tmp_path, in_8bit="others", summarizer="owner/small", **given)
    settings = check_settings(settings_of({"model": model}), training=False)
    assert (settings.judge, settings.reader) == ("", "")
    assert (settings.summarizer, settings.in_8bit) == ("owner/small", "others")


def test_the_judge_of_right_and_wrong_is_the_same_in_training_and_evaluation(tmp_path):
    # When to Search section 4.1; UR²'s judge grades mathematics in its reward alone
    model = save_settings(tmp_path, reward="when_to_search_stage2", judge="http://j:1/v1#m")
    assert settings_of({"model": model}).judge == "http://j:1/v1#m"
    assert settings_of({"model": model, "judge": "other"}).judge == "other"
    assert settings_of({"model": model, "judge": ""}).judge == ""


def test_a_model_of_another_recipe_is_evaluated_under_the_one_that_is_named(tmp_path):
    model = save_settings(tmp_path, recipe="ur2")
    settings = settings_of({"model": model, "recipe": "r1_searcher"})
    assert (settings.protocol, settings.max_searches, settings.model) == ("r1_searcher", 8, model)
    hub = {"model": "Qwen/Qwen2.5-3B"}  # it has no settings: those of the paper's last stage
    assert (settings_of(hub).stage, settings_of(hub).max_turn_tokens) == (2, 512)
    assert settings_of(hub | {"stage": 1}).stage == 1
    assert settings_of(hub | {"recipe": "vanilla_rl"}).stage == 1


def test_the_papers_decoding_is_what_the_flags_say(tmp_path, capsys):
    def sampling(words, model="m"):
        settings, _ = evaluation.parse(f"--model {model} {words}".split())
        return settings.temperature, settings.top_p

    paper = "--decoding paper"
    assert sampling("") == sampling(f"{paper} --recipe r1_searcher") == (0.0, 1.0)
    assert sampling(paper) == (0.3, 0.5)  # UR²
    assert sampling(f"{paper} --temperature 0.7") == (0.7, 0.5)
    # a checkpoint's own recipe counts
    assert sampling(paper, save_settings(tmp_path, recipe="r_search", model="m")) == (0.1, 1.0)
    capsys.readouterr()
    for recipe, said in (("arena", "greedy"), ("when_to_search", "greedy"), ("ur2", "")):
        sampling(f"{paper} --recipe {recipe}")
        assert capsys.readouterr().out.endswith(f"{said}\n" if said else "")


def test_a_limit_that_is_given_counts_for_every_task_and_says_so(tmp_path, capsys):
    """UR² C.4 has 3,072 tokens for mathematics and 1,536 for choice."""
    model = save_settings(tmp_path, turn_tokens="math=3072,choice=1536", model="m")
    for flag, most, turns in (("", 512, "math=3072,choice=1536"), ("--max_turn_tokens 9", 9, "")):
        settings, _ = evaluation.parse(f"--model {model} {flag}".split())
        assert (settings.max_turn_tokens, settings.turn_tokens) == (most, turns)
        assert capsys.readouterr().out == (f"{flag} applies to every task\n" if flag else "")


def test_a_number_of_searches_that_is_given_counts_for_every_task():
    """UR² D.2's prompt has five queries for open questions."""
    five = {"recipe": "ur2", "variant": "five_queries", "model": "m", "data": "d"}
    for given, most, tasks in (({}, 4, "qa=5"), ({"max_searches": 2}, 2, "")):
        settings = settings_of(five | given)
        assert (settings.max_searches, settings.task_searches) == (most, tasks)


def test_thoughts_have_tokens_of_their_own_and_are_no_part_of_the_answer(written, monkeypatch):
    """ARENA 4.3, note 2: of a model that thinks by itself, and was not trained."""
    settings = evaluation.room_to_think(Settings(turn_tokens="math=3072,choice=1536"), 100)
    assert (settings.max_turn_tokens, settings.turn_tokens) == (612, "math=3172,choice=1636")
    assert evaluation.parse("--model m --thinking 100".split())[0].max_turn_tokens == 612
    question = Question("0", "?", ["a"], references=(Document("", "t", "x"),))
    thought = "<think>[2] <answer>b</answer></think>"

    def thoughtful(*_):
        return [trajectory_from_text(question, thought + arena(question).text, "arena")]

    monkeypatch.setattr(evaluation, "rollout", thoughtful)
    monkeypatch.setattr(evaluation, "evaluation_questions", lambda *_: ({"people": [question]}, []))
    for flags, good in (("", 0), ("--thinking 100", 1)):
        run(f"{flags} --fresh --out", written)
        (record,) = records_in(written)
        assert record["metrics"]["format"] == good and record["prediction"] == "a"
        assert record["transcript"].startswith(thought)


def test_every_search_may_find_all_references_of_its_own_record():
    """ARENA 4.3: released checkpoints that search are shown the given references."""
    documents = [Document(str(i), "t", str(i)) for i in range(7)]
    questions = [Question(str(n), "?", ["a"], references=tuple(documents[n:])) for n in (0, 3)]
    retriever = make_control("given", [], 0)
    assert retriever.search(["x", "y"], 2, questions) == [documents, documents[3:]]
    with pytest.raises(InputError, match="--retriever given: question q has none"):
        retriever.search(["x"], 2, [Question("q", "?", ["a"])])
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
        ("--run_name typo", "no checkpoint of that run"),
        ("--lr 3", "unknown flag --lr"),
        ("--in_8bit base,others", "so it can only be others"),
        ("--split all", "one of train, dev, test"),
        ("--retriever_url http://x", "only --retriever http reads it"),
        ("--reader m", "protocol ur2 has none"),
        ("--recipe r_search --reader built-in --model m --data f --corpus c", "only its own world"),
        ("--against none.jsonl", "no such file"),
        ("--judge http://127.0.0.1:9/v1#m", "127.0.0.1:9"),
        ("--model m --json {runs}/file/x", "--json {runs}/file/x: cannot be written there"),
        ("--decoding both --out p.jsonl", "leave --out out"),
        ("--decoding both --temperature 1", "leave --temperature out"),
        ("--recipe r1_searcher --thinking 9", "protocol r1_searcher has a <think> section"),
        ("--stage 0 --references retrieved", "the prompt of ur2 has no references"),
        ("--references both", "one of given, retrieved"),
        ("--recipe arena --references retrieved --model m --data {runs}/q", "the corpus is empty"),
    ],
)
def test_bad_input_is_one_line_before_a_model_is_loaded(
    words, fragment, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(evaluation, "load_model", lambda *_, **__: pytest.fail("it was loaded"))
    monkeypatch.setattr(evaluation, "build_search", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    question_file(tmp_path / "q")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    arguments = words.format(runs=tmp_path).split()  # in an empty folder: nothing was trained
    assert fragment.format(runs=tmp_path) in command_line(evaluation.main, arguments, capsys)


def test_help_has_its_sections_and_looks_for_no_model(capsys):
    with pytest.raises(SystemExit):
        run("--recipe r1_searcher --model none --help all")
    said = capsys.readouterr().out
    assert "\nretriever.py:\n" in said and "\neval.py:\n" in said
    assert "--top_p" in said and "--lr" not in said
    assert "(8; default 4)" in said  # R1-Searcher's searches


# -------------------------------------------------------------------------------- what is evaluated


def test_the_built_in_world_gives_so_many_held_out_questions_of_every_kind():
    datasets, documents = evaluation_questions(Settings(), OPTIONS)
    (questions,) = datasets.values()
    assert Counter(q.kind for q in questions) == dict.fromkeys(KINDS, 3)
    assert all(q.id.startswith("test/") for q in questions if q.kind == "one_hop")
    _, other = evaluation_questions(Settings(), dataclasses.replace(OPTIONS, fact_seed=9))
    assert [d.title for d in other] == [d.title for d in documents] and other != documents


def question_file(path, count=5) -> str:
    fields = {"references": [{"id": "1", "title": "t", "text": "x"}], "answers": ["a"]}
    return write(path, [{"id": str(i), "question": f"{i} ?"} | fields for i in range(count)])


def test_of_a_file_questions_are_drawn_with_the_seed_or_the_first_and_zero_takes_all(tmp_path):
    files = [question_file(tmp_path / name, 50) for name in ("q.jsonl", "r.jsonl")]

    def ids(seed=0, **changes):
        settings = Settings(data=",".join(files), model="m", retriever="empty", seed=seed)
        datasets, _ = evaluation_questions(settings, dataclasses.replace(OPTIONS, **changes))
        return [int(q.id.removeprefix("q:")) for q in datasets["q"]]

    drawn = ids(questions=20)
    assert drawn == ids(questions=20) == sorted(set(drawn)) != list(range(20))
    assert len(drawn) == 20 and ids(1, questions=20) != drawn
    assert ids(questions=0) == ids(questions=60) == list(range(50))


@pytest.mark.parametrize(
    "retriever, text", [("bm25", "a city"), ("empty", "None"), ("oracle", "x")]
)
def test_retrieved_references_stand_in_the_place_of_the_given_ones(retriever, text, tmp_path):
    given = {"supporting": [1], "references": [{"id": "1", "title": "t", "text": "x"}]}
    asked = {"id": "0", "question": "ana bell", "answers": ["a"]}
    corpus = [{"id": str(i), "title": "t", "text": "y"} for i in range(3)]
    corpus.append({"id": "9", "title": "Ana Bell", "text": "a city"})
    files = {"data": write(tmp_path / "q.jsonl", [asked | given])}
    files["corpus"] = write(tmp_path / "c.jsonl", corpus)
    settings = Settings(protocol="arena", documents_per_search=1, retriever=retriever, **files)
    options = dataclasses.replace(OPTIONS, references="retrieved")
    (result,) = evaluation_questions(settings, options)[0]["q"]
    assert [document.text for document in result.references] == [text]
    # which of them are gold is not known
    assert result.supporting == () and {"relevance", "all_correct"}.isdisjoint(
        prediction_metrics(arena(result))
    )
    other = Evaluation(settings, options).made_with("v")
    assert other != Evaluation(settings, OPTIONS).made_with("v")


def test_a_search_for_references_that_fails_is_one_line(monkeypatch):
    failing = "retrievers.controls.EmptyRetriever.search"
    monkeypatch.setattr(failing, lambda self, queries, k: [None])
    settings = Settings(protocol="arena", retriever="empty")
    with pytest.raises(InputError, match="a search failed: try the same command again"):
        with_retrieved([Question("q", "?", ["a"])], [], settings)


def arena(question):
    text = "<relevance>[1]</relevance><analysis> a </analysis>" + ANSWER.format("a")
    return trajectory_from_text(question, text, "arena")


def test_other_settings_weights_questions_passages_or_words_are_another_evaluation(tmp_path):
    data = tmp_path / "q.jsonl"
    prompt = tmp_path / "p.txt"
    settings = Settings(model="m", data=str(data), corpus="from-data", prompt_file=str(prompt))

    def made(version="v", samples=1, count=2, words="Say A.", **changes):
        question_file(data, count)
        prompt.write_text(f"{words} <|begin_of_query|> \\boxed{{}}")
        options = dataclasses.replace(OPTIONS, samples=samples)
        return Evaluation(dataclasses.replace(settings, **changes), options).made_with(version)

    assert made() == made(judge="J", reader="R", run_name="n", output_dir="elsewhere", timeout=1.0)
    others = [made("w"), made(samples=2), made(count=1), made(words="Say B."), made(top_p=0.5)]
    assert all(other != made() for other in others)


def test_predictions_always_lie_under_the_runs_folder():
    for model in ("/", "/m", "../m", "a/b c/checkpoint-000001", "C:/x/y", ""):
        out = evaluation.default_out(Settings(model=model), OPTIONS)
        assert out.parent == Path("runs/predictions") and not out.name.startswith((".", "-"))


# ------------------------------------------------------------------------------------ and once more


@pytest.fixture
def few(trained, tmp_path, monkeypatch):
    """Evaluate two questions of each of the five kinds, four at a time."""
    monkeypatch.setattr(evaluation, "QUESTIONS_AT_ONCE", 4)

    def few(name: str, *more) -> Path:
        run(f"--output_dir {trained} --questions 2 --out", tmp_path / name, *more)
        return tmp_path / name

    return few


def test_a_greedy_evaluation_is_the_same_twice_and_samples_of_a_seed_are_too(few):
    for temperature in (0, 2):  # at 1 two samples may be the same text
        how = ("--samples", 8, "--temperature", temperature)
        one, other = (few(f"{temperature}{again}.jsonl", *how) for again in "ab")
        records = records_in(one)
        assert records == records_in(other)
        assert [r["sample"] for r in records] == [*range(8)] * 10
        texts = {r["transcript"] for r in records[:8]}  # of one question
        assert (len(texts) == 1) == (temperature == 0)


def test_an_interrupted_evaluation_goes_on_and_gives_the_numbers_of_an_unbroken_one(
    few, monkeypatch, capsys
):
    def sampled(name, *more):
        path = few(name, "--samples", 2, "--temperature", 1, *more)
        return path.read_bytes(), capsys.readouterr().out

    unbroken, _ = sampled("unbroken.jsonl")
    generate, calls, out = evaluation.rollout, [], few("p.jsonl")  # other settings: put aside

    def third_time_interrupted(policy, environment, some, seed, *more):
        calls.append((seed, len(records_in(out))))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return generate(policy, environment, some, seed, *more)

    monkeypatch.setattr(evaluation, "rollout", third_time_interrupted)
    with pytest.raises(SystemExit) as end:
        sampled("p.jsonl")
    assert end.value.code == 130
    assert f"finished predictions are in {out}" in capsys.readouterr().out.splitlines()[-1]
    assert calls == [(0, 0), (4, 8), (8, 16)]  # what was finished was written when the next began
    with open(out, "a") as file:
        file.write('{"id": "half a li')  # killed while it wrote
    made, output = sampled("p.jsonl")
    assert made == unbroken and "16 of 20 predictions exist: the evaluation continues" in output
    assert calls[3:] == [(8, 16)]  # the third batch only was made again
    # other settings: nothing of it counts, and nothing is lost
    made, output = sampled("p.jsonl", "--seed", 1)
    assert made != unbroken and "are kept as p.jsonl.old2" in output and len(calls) == 7
    assert out.with_name("p.jsonl.old2").read_bytes() == unbroken


def test_a_line_that_was_lost_or_doubled_and_a_half_finished_batch_are_noticed(few, capsys):
    out = few("p.jsonl")
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    for number, damaged in enumerate((lines[1:], lines * 2, lines[:7]), 1):
        out.write_bytes(b"".join(damaged))
        few("p.jsonl")
        kept = out.with_name(f"p.jsonl.old{number}").read_bytes()
        assert out.read_bytes() == whole and kept == b"".join(damaged)
    # 7 of 10: one batch of 4, and 3 of the next
    assert "4 of 10 predictions exist" in capsys.readouterr().out


def test_failed_searches_are_told_of_and_made_again(few, monkeypatch, capsys):
    out = few("p.jsonl")
    healthy = out.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "build_search", lambda *_: lambda requests: 1 / 0)
        few("p.jsonl", "--fresh")
    assert "searches failed (the first: ZeroDivisionError" in capsys.readouterr().err
    few("p.jsonl")
    assert out.read_bytes() == healthy and "searches failed" not in capsys.readouterr().err


def test_the_table_has_its_kinds_and_both_decodings_are_two_evaluations(trained, tmp_path, capsys):
    shutil.copytree(trained, runs := tmp_path / "runs")
    run(f"--output_dir {runs} --questions 2 --decoding both")
    tables = capsys.readouterr().out.split("questions of the built-in world")[1:]
    for temperature, table in zip("10", tables, strict=True):
        assert f"temperature {temperature}, retriever bm25" in table
        assert [line.split()[0] for line in table.splitlines()[1:8]] == ["kind", *KINDS, "all"]
        assert len(records_in(re.search("predictions: (.*)", table)[1])) == 10
    run(f"--output_dir {runs} --questions 2 --stage 0")
    assert capsys.readouterr().out.startswith("the built-in model, before RL: 10 questions")


def test_an_evaluation_draws_the_questions_that_a_training_draws(tmp_path):
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


def test_real_hotpotqa_records_run_from_the_first_to_the_last_command(model, tmp_path, capsys):
    data = HOTPOTQA / "official_train_distractor_20.json"
    runs = tmp_path / "runs"
    if not data.exists():
        pytest.skip(f"no HotpotQA records in {HOTPOTQA}")
    for stage in (1, 2):  # they roll out, search, are rewarded and change the weights
        start = f"--data {data} --output_dir {runs} --stage {stage}"
        start += f" --model {model}" * (stage == 1)
        train.main([*start.split(), *REAL.split()])
        rows = records_in(runs / "real" / f"stage{stage}" / "metrics.jsonl")
        assert len(rows) == 2 and any(row["inserted_tokens"] for row in rows)
        # stage 2 pays nothing for a search: often all rewards are 0
        assert stage == 2 or any(row["grad_norm"] > 0 for row in rows)
    run(f"--output_dir {runs} --run_name real --questions 20 --samples 4 --temperature 0.8 --all")
    output = capsys.readouterr().out
    assert f"stage 2 starts from {runs}/real/stage1/checkpoint-000002" in output
    assert f"questions of {data.stem}" in output
    predictions = records_in(output.splitlines()[-1].removeprefix("predictions: "))
    metrics = [record["metrics"] for record in predictions]
    # at most 60 tokens of documents are shown, beside their frame
    shown = [numbers for numbers in metrics if numbers["successful"]]
    assert shown and all(0 < numbers["shown"] < 70 < numbers["retrieved"] for numbers in shown)
    assert [record["hops"] for record in predictions] == [2] * 80 and "compression: " in output
