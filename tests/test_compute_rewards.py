"""Whom a step's rewards ask, what is right, what other models say, and what is counted."""

import numpy as np
import pytest

from data import Document, Question
from errors import InputError
from other_models.judge import Judge, add_verdicts
from other_models.reader import add_reader
from plumbing import build
from rewards import compute_rewards, example
from settings import Settings, parse, resolve
from trajectory import RejectedQuery, Search, trajectory_from_text
from trajectory_metrics import search_metrics, token_metrics, trajectory_metrics, without_thinking

OPTIONS = {"task": "choice", "options": ("elm", "oak")}


class Model:
    """In place of another model: answer(text) for each request, and the batches that it was
    asked.
    """

    failures, instruction = 0, ""

    def __init__(self, answer):
        self.answer, self.batches, self.requests = answer, [], []

    def ask(self, requests, readable=None):
        self.requests += requests
        self.batches.append([text for _, text, *_ in requests])
        return [self.answer(text) for text in self.batches[-1]]


def made(name: str, documents=(), **changes):
    """Returns the settings of a recipe's first stage and the models that its reward asks."""
    settings = resolve(name, 1, True, changes)
    return settings, build.build_other_models(settings, list(documents), "cpu")


def scored(rows, name: str, documents=(), **changes):
    """Returns the terms and whether each answer is right, and what the other models count."""
    settings, others = made(name, documents, **changes)
    reward_terms, correct = compute_rewards(rows, settings, 0, others)
    return reward_terms, correct, {name: count() for name, count in others.stats.items()}


# ----------------------------------------------------------------------------------- who is asked


def test_the_reader_is_asked_once_for_all_that_searched(monkeypatch):
    reader = Model(lambda text: "Norland" if "Norland" in text.split("\n")[0] else "Sudria")
    monkeypatch.setattr(build, "build_reader", lambda *_: reader)
    rows = [example("r_search"), example("r_search", searches=0), example("r_search", "Sudria")]
    reward_terms, correct, stats = scored(rows, "r_search")
    # two of the three searched and have evidence, which names the country
    assert len(reader.batches) == 1 and len(reader.batches[0]) == 2
    assert all(text.endswith("In which country was Ana Bell born?") for text in reader.batches[0])
    paid = [(terms["evidence"], terms["answer"]) for terms in reward_terms]
    assert paid == [(1, 1), (0, 1), (1, 0)]  # the reader's answer is not the policy's
    assert correct == [True, True, False] and stats == {"reader_failures": 0}


def test_the_readers_whole_reply_is_paid_where_the_variant_says_so(monkeypatch):
    # three words with one in common: 2 · 1 / (3 + 1)
    monkeypatch.setattr(build, "build_reader", lambda *_: Model(lambda text: "Norland\nit is"))
    reward_terms, *_ = scored([example("r_search")], "r_search", whole_reply=True)
    assert reward_terms[0]["evidence"] == 0.5


def test_without_the_evidence_reward_no_reader_is_loaded(monkeypatch):
    monkeypatch.setattr(build, "build_reader", lambda *_: pytest.fail("a reader was loaded"))
    for name in ("r_search", "ur2"):
        _, others = made(name, evidence_reward=False)
        assert others.readings([example("r_search")]) == [""]


def test_another_data_set_asks_for_a_reader_of_the_evidence():
    with pytest.raises(InputError, match=r"--reader http.*--variant without_evidence"):
        build.build_reader(Settings(recipe="r_search", data="another.jsonl"))


def judged(monkeypatch, reply, rows, name="when_to_search", **changes):
    """Returns what `scored` does, and the judge's batches, if a judge gives one reply to all."""
    judge = Model(lambda text: reply)
    monkeypatch.setattr(build, "load_llm", lambda *_, **__: judge)
    return *scored(rows, name, judge="j", **changes), judge.batches


@pytest.mark.parametrize(
    "reply, marks, correct, unreadable",
    [
        ("no", [-0.4, -0.4], [False, False], 0),
        ("yes", [1, 1], [True, True], 0),
        ("I cannot say", [1, -0.4], [True, False], 1),  # the metric decides
    ],
)
def test_the_judge_s_verdict_goes_before_the_metric(reply, marks, correct, unreadable, monkeypatch):
    # Two searches each, β = 0.3. Stage 1: right 1, wrong −1 + 0.6.
    rows = [example("when_to_search", "Norland"), example("when_to_search", "Sudria")]
    reward_terms, right, stats, batches = judged(monkeypatch, reply, rows)
    assert [c["answer"] for c in reward_terms] == pytest.approx(marks) and right == correct
    assert stats["judge_unreadable"] == unreadable  # a share of those that were asked
    assert len(batches) == 1 and len(batches[0]) == 2  # once, for all


def test_the_judge_is_asked_only_where_right_and_wrong_are_asked_for(monkeypatch):
    rows = [example("ur2", "Sudria")]
    assert judged(monkeypatch, "yes", rows, "ur2")[1::2] == ([False], [])
    dynamic = {"reward": "ur2_stage2", "algorithm": "dapo"}
    reward_terms, correct, _, batches = judged(monkeypatch, "yes", rows, "ur2", **dynamic)
    assert correct == [True] and len(batches) == 1  # dynamic sampling asks
    assert reward_terms[0]["answer"] == 0  # but UR²'s reward has its own metric


@pytest.mark.parametrize(
    "reply, answers", [("yes", [1, 1]), ("no", [0, 0]), ("I cannot say", [1, 2 / 3])]
)
def test_arena_s_accuracy_is_the_verdict_of_a_judge_and_without_one_the_metric(
    reply, answers, monkeypatch
):
    # unreadable: the metric, here F1; "Norland, Kelmouth" for "Norland": P = 1/2, R = 1
    rows = [example("arena"), example("arena", "Norland, Kelmouth")]
    reward_terms, *_ = judged(monkeypatch, reply, rows, "arena", answer_metric="f1")
    assert [c["answer"] for c in reward_terms] == pytest.approx(answers)
    assert [c["bonus"] for c in reward_terms] == [10 * (answer == 1) for answer in answers]


def retrieval(second: str, documents=()) -> float:
    """Returns When to Search's term of a trajectory that searches for "ana bell", then `second`."""
    found = "</search><information>ana bell of kelmouth</information><reflect>b</reflect>"
    text = f"<think>t</think><search>ana bell{found}<search>{second}{found}<answer>e</answer>"
    asked = Question("q", "Where was Ana born?", ["e"])
    trajectory = trajectory_from_text(asked, text, "when_to_search")
    return scored([trajectory], "when_to_search", documents)[0][0]["retrieval"]


def test_similar_queries_are_measured_over_the_corpus_of_the_run():
    # "zzz" is in no passage, so it does not make the second query another one: cosine 1, and −1 of
    # the retrieval term.
    documents = [Document("1", "ana bell", "kelmouth"), Document("2", "ida roth", "norland")]
    assert retrieval("ana bell zzz", documents) == pytest.approx(-1)


def test_without_a_corpus_a_word_counts_that_the_step_asked_for_or_found():
    assert retrieval("ana bell zzz") == pytest.approx(-1)
    # of the two texts both have ana (idf 1), one each bell and kelmouth (ln(3 / 2) + 1)
    assert retrieval("ana kelmouth") == pytest.approx(-1 / (1 + (np.log(3 / 2) + 1) ** 2))


# ----------------------------------------------------------------------------------- what is right


@pytest.mark.parametrize(
    "text, question, em, f1, cem",
    [
        ("\\boxed{The Norland!}", {"answers": ["Norland"]}, 1, 1, 1),
        ("\\boxed{Kelmouth, Norland}", {"answers": ["Norland"]}, 0, 2 / 3, 1),  # P = 1/2, R = 1
        ("no box", {"answers": ["Norland"]}, 0, 0, 0),
        ("\\boxed{0.50}", {"answers": ["\\frac12", "x"], "task": "math"}, 1, 1, 1),
        ("The correct answer is: B.", {"answers": ["B"], **OPTIONS}, 1, 1, 1),
        ("The correct answer is: A.", {"answers": ["B"], **OPTIONS}, 0, 0, 0),
    ],
)
def test_answers_are_scored_by_their_task(text, question, em, f1, cem):
    trajectory = trajectory_from_text(Question("q", "?", **question), text, "ur2")
    numbers = trajectory_metrics(trajectory)
    assert [numbers[name] for name in ("em", "f1", "cem")] == pytest.approx([em, f1, cem])
    assert scored([trajectory], "ur2")[1] == [bool(em)]


@pytest.mark.parametrize(
    "protocol, same",
    [
        ("r_search", "AnaBell AnaBell"),  # "-" and "_" go
        ("r1_searcher", "Ana Bell Ana Bell"),  # both are a blank
        ("arena", "AnaBell Ana Bell"),  # "-" goes, "_" is a blank
    ],
)
def test_punctuation_is_deleted_where_the_paper_s_scorer_deletes_it(protocol, same):
    for gold in ("AnaBell AnaBell", "Ana Bell Ana Bell", "AnaBell Ana Bell"):
        question = Question("q", "?", [gold])
        told = "<answer> Ana-Bell Ana_Bell </answer>"
        trajectory = trajectory_from_text(question, told, protocol)
        assert trajectory_metrics(trajectory)["em"] == (gold == same)
        if protocol == "arena":  # the reward and the evaluation agree
            assert scored([trajectory], "arena")[0][0]["answer"] == (gold == same)


# --------------------------------------------------------------------- records of an evaluation


def record(answer, gold="Norland", evidence=None, **question):
    """As it lies in a predictions file: em of the answer, and what a reader may see."""
    asked = {"id": "q", "question": "where ?", "golds": [gold], "task": "qa"} | question
    metrics = {"em": float(answer == gold)}
    return asked | {"prediction": answer, "evidence": evidence, "metrics": metrics}


def test_a_reader_answers_from_the_evidence_and_its_scores_stand_beside_the_policys():
    reader = Model(lambda text: "the far Norland")
    records = [record("Sudria", evidence="Ana was born in Norland."), record("Norland")]
    found = add_reader(records, reader)
    assert reader.batches == [["Ana was born in Norland.\nwhere ?"]]  # nobody without evidence
    assert [r["reader_prediction"] for r in found] == ["the far Norland", ""]
    # "far norland" for "norland": P 1/2, R 1, F1 2/3
    scores = [(r["metrics"]["reader_em"], r["metrics"]["reader_f1"]) for r in found]
    assert scores == [(0, pytest.approx(2 / 3)), (0, 0)]
    assert [r["metrics"]["em"] for r in found] == [0, 1]
    assert [set(r["metrics"]) for r in records] == [{"em"}, {"em"}]  # they stay as they were


def test_an_unreadable_verdict_is_neither_right_nor_wrong_and_none_leaves_what_is_there():
    replies = {"Norland": "The same.\nyes", "Sudria": "no", "Kelmouth": "Hard to say."}
    judge = Judge(Model(lambda text: replies[text.rpartition("answer: ")[2]]))
    records = add_verdicts([record(answer, "Norway") for answer in (*replies, "")], judge)
    # no answer is wrong, and the judge is not asked
    assert [r["metrics"]["judged"] for r in records] == [1, 0, None, 0]
    assert (judge.asked, judge.unreadable) == (3, 1)
    assert add_verdicts(records, Judge(Model(lambda text: None))) == records


def test_searches_and_their_tokens_are_counted():
    def words(text, **_):
        return {"input_ids": text.split()}

    t = example("ur2", searches=0)
    t.append_model([7] * 4, [0.0] * 4, "<|begin_of_query|> x <|end_of_query|>")
    t.append_environment([8] * 9, "None", "documents")
    t.rejected_queries = [RejectedQuery("direct", "x")]
    # "(1) t: w w ...": 10 words and 90, of which 5 and 10 are shown
    found = [[Document("1", "t", "w " * count)] for count in (8, 88)]
    t.searches = [Search("Ana Bell", found[0], "w " * 5), Search("Roth", found[1], "w " * 10)]
    t.searches += [Search("ana bell?", found[0], "None", fallback=True), Search("z", [], "None")]
    t.searches += [Search("x", [], "Search is unavailable.", error="down")]
    expected = {"searched": 1, "searches": 5, "successful": 2, "repeated": 1}
    expected |= {"queries": 1, "rejected": 1, "failed_rows": 1}
    assert search_metrics(t) == expected | {"fallbacks": 1, "documents_cut": 0}
    counts = {"written": 4, "retrieved": 100, "shown": 15, "compression": 5.5}
    assert token_metrics(t, words) == counts
    t.searches = []
    assert token_metrics(t, words) == {"written": 4, "retrieved": 0, "shown": 0}


@pytest.mark.parametrize(
    "opened, texts, left, thinking, unfinished",
    [
        ("", ["<think> a b </think> A"], " A", 4, 0),
        ("<think>", [" a b </think> A"], " A", 4, 0),  # the chat template opens it
        ("<think>", [" a b"], "", 3, 1),
        ("", ["A <think> b"], "A ", 2, 1),
        # a search in a thought, which goes on behind it; then another that has no end
        ("", ["<think> a", " b", " c </think> A <think> d"], " A ", 6, 1),
        ("", ["A"], "A", None, 0),
    ],
)
def test_what_a_model_thought_is_no_text_of_its_own_and_is_counted(
    opened, texts, left, thinking, unfinished
):
    t = trajectory_from_text(Question("q", "?", ["a"]), "", "ur2")
    t.segments, t.opened = [], opened
    for text in texts:
        t.append_model([], [], text)
        t.append_environment([], "found", "documents")
    t = without_thinking(t)
    assert t.model_text == left
    assert sorted(t.text) == sorted(opened + "found".join(texts) + "found")  # nothing is lost
    numbers = token_metrics(t, lambda text, **_: {"input_ids": text.split()})
    assert numbers.get("thinking") == thinking and numbers.get("unfinished", 0) == unfinished


def test_a_term_that_is_left_out_asks_nobody(monkeypatch):
    """When to Search Table 4: w/o r_a has no use for a verdict, and w/o r_s none for vectors."""
    rows = [example("when_to_search", "Sudria")]
    assert judged(monkeypatch, "yes", rows, variant="without_r_a")[1::2] == ([False], [])
    for variant, embeds in (("without_r_s", False), ("", True)):
        _, others = made("when_to_search", variant=variant)
        assert bool(others.embedder(rows)) is embeds
    for variant, flag in (("without_r_a", "judge"), ("without_r_s", "embedder")):
        words = f"--recipe when_to_search --stage 1 --variant {variant} --{flag} x".split()
        with pytest.raises(InputError, match=rf"--{flag}: --reward .* does not read it"):
            parse(words)


@pytest.mark.parametrize("variant", ["", "f1"])
def test_arena_s_accuracy_is_f1_or_a_verdict_and_not_both(variant):
    """ARENA 5.3."""
    words = ["--recipe", "arena", "--judge", "http://j:1/v1#m", "--variant", variant]
    words += ["--answer_metric", "f1"] * (not variant)
    with pytest.raises(InputError, match=r"--answer_metric f1 with --judge: .* one of the two"):
        parse(words)
