"""lab/synthesize.py: drafts in the exact form, a verifier that judges, and a file that goes on."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
from conftest import chat_server, message

from data import Question, load_questions
from formats.records import append_jsonl
from lab import synthesize as module
from lab.synthesize import (
    ANSWER,
    DRAFTS,
    HARDEN,
    SHOTS,
    VERIFY,
    WRITE,
    SynthesizeSettings,
    asked_often,
    drafts_in,
    parse_draft,
    pick_examples,
    reordered,
    shown,
    synthesize,
)
from other_models.llm import LLM
from prompts import question_text


def given(number):
    asked, options = f"Which given thing is number {number}?", ("red", f"right{number}")
    options += ("blue", "green")
    return Question(f"g{number}", asked, ["B"], "choice", options)


GIVEN = [given(number) for number in range(6)]


FOUR = ("wrong a", "right", "wrong b", "wrong c")


def written(name="one", options=FOUR, letter="B"):
    lines = "\n".join(f"{chr(65 + i)}. {option}" for i, option in enumerate(options))
    return f"Question: Which thing is called {name}?\n{lines}\nAnswer: {letter}"


def option(text, ending):
    """The letter of the option that ends so."""
    return next(line[0] for line in text.splitlines() if line.endswith(f". {ending}"))


def harder(text):
    """One more option, and one more word in the question."""
    return text.replace("thing is", "odd thing is").replace("\nAnswer", "\nE. wrong d\nAnswer")


class Model:
    """Writes question 0, 1, 2, ..., one per request; makes each harder; finds all correct; answers
    "right", or what `answer(text, number)` says.
    """

    def __init__(self, write=lambda number: written(str(number)), answer=None, harden=harder):
        self.write, self.answer, self.harden, self.asked = write, answer, harden, []
        self.verdict = lambda text, number: "It is.\nCorrect."

    def ask(self, requests):
        return [self.reply(*request) for request in requests]

    def count(self, instruction):
        return [asked for asked, *_ in self.asked].count(instruction)

    def reply(self, instruction, text, temperature=0.0, *_):
        number = self.count(instruction)
        self.asked.append((instruction, text, temperature))
        if instruction == WRITE:
            return self.write(number)
        if instruction == HARDEN:
            return self.harden(text)
        if instruction == VERIFY:
            return self.verdict(text, number)
        assert instruction == ANSWER
        if self.answer:
            return self.answer(text, number)
        return f"Of these one fits.\nThe correct answer is: {option(text, 'right')}"


def right_in(share):
    """A model that is right in the first `share` of every ten answers."""
    return Model(answer=lambda text, n: option(text, "right" if n % 10 < share else "wrong a"))


@pytest.fixture
def make(tmp_path):
    """make(writer, count, answerer, verifier): the counts, and the questions there are."""

    def make(model, count, answerer=None, verifier=None, k=10):
        how = SynthesizeSettings(out=str(tmp_path / "out.jsonl"), count=count, k=k)
        result = synthesize(GIVEN, model, verifier or model, answerer or model, how)
        return result, load_questions(how.out) if Path(how.out).read_text() else []

    return make


# ----------------------------------------------------------------------------------------- the form


def test_a_draft_in_the_exact_form_is_read():
    long = (
        "\n Question: A long story.\nWhich thing is it?\n\nA. x\n  B. y\nC. z\nD. w\n\nAnswer: C\n"
    )
    draft = parse_draft(long)  # blank lines, indents and a question of several lines are no fault
    assert draft.question == "A long story. Which thing is it?"
    assert (draft.options, draft.answers, draft.task) == (("x", "y", "z", "w"), ["C"], "choice")
    signs = ("+", "-", "*", "/")  # normalised, all four are empty
    assert parse_draft(written(options=signs)).options == signs
    assert parse_draft(written(options=signs[:3])) is None  # 4 to 10, UR² C.5
    assert parse_draft(written(options=[f"o{i}" for i in range(10)])).answers == ["B"]


@pytest.mark.parametrize(
    "reply",
    [
        None,
        "Sure! " + written(),  # the question does not begin a line
        written() + "\n" + written(),
        written() + "\nAnswer: A",
        written(letter="B and C"),
        written(letter="E"),
        written().replace("C. ", "E. "),
        written().replace("B. ", "A. "),
        written(options=("a", "b"), letter="A"),
        written(options=[f"o{i}" for i in range(11)]),
        written(options=("Right", "right ", "b", "c")),
        written(options=("the right", "right", "b", "c")),  # alike but for an article
    ],
)
def test_a_draft_in_any_other_form_is_dropped(reply):
    assert parse_draft(reply) is None


def test_a_reply_holds_ten_drafts_and_each_has_another_number(make):
    many = [written(str(number)) for number in range(12)]
    reply = "Here they are:\n\n" + "\n\n".join(many)
    assert [text.strip() for text in drafts_in(reply)] == many[:DRAFTS] and DRAFTS == 10
    assert drafts_in("none at all") == ["none at all"] and drafts_in(None) == [None]
    result, questions = make(Model(write=lambda number: reply if number else "no"), 9)
    # request 0 came to nothing; the drafts of request 1 have the numbers from 10 on
    assert [question.id for question in questions] == [f"synthetic-0-{10 + i}" for i in range(9)]
    assert (result["requests"], result["another form"]) == (2, 1)


def test_each_draft_is_made_harder_by_a_second_request_and_dropped_if_that_fails(make):
    def harden(text):
        return "I would rather not." if "called 1?" in text else harder(text)

    model = Model(harden=harden)
    result, questions = make(model, 3)
    assert [question.question for question in questions] == [
        "Which odd thing is called 0?",
        "Which odd thing is called 2?",
    ]
    assert all(len(question.options) == 5 for question in questions)
    edited = [text for instruction, text, _ in model.asked if instruction == HARDEN]
    assert edited == [written(str(number)) for number in range(3)]
    assert result["another form"] == 1


def test_the_second_request_names_the_sub_domain_too(make):
    model = Model(harden=lambda text: harder(text) + "\n\nPart: Micro economics." * ("0?" in text))
    _, questions = make(model, 2)
    assert [question.source for question in questions] == ["micro economics", "synthetic"]


# --------------------------------------------------------------------------------- the verification


def test_the_right_option_keeps_its_text_in_another_order():
    draft = Question("", "Which thing is it?", ["B"], "choice", FOUR)
    orders = [reordered(draft, seed) for seed in range(20)]
    assert all(q.options[ord(q.answers[0]) - 65] == "right" for q in orders)
    assert all(sorted(q.options) == sorted(FOUR) for q in orders)
    assert {q.answers[0] for q in orders} == set("ABCD")


@pytest.mark.parametrize(
    "last, made",
    [
        ("It holds.\n**Correct**", 1),
        ("B is right as well.\nincorrect", 0),
        ("The correct answer is: B", 0),  # no verdict
        (None, 0),
    ],
)
def test_the_verifier_reads_the_answer_and_all_three_verdicts_must_be_correct(make, last, made):
    writer, verifier = Model(), Model()
    verifier.verdict = lambda text, number: "correct" if number < 2 else last
    result, questions = make(writer, 1, verifier=verifier)
    assert (result["made"], result["incorrect"]) == (len(questions), 1 - made) == (made, 1 - made)
    texts = [text for _, text, _ in verifier.asked]
    assert len(set(texts)) == 3  # equal requests would be asked once
    for text in texts:
        asked, _, attempt = text.rpartition("\n")
        assert attempt in ("(attempt 1)", "(attempt 2)", "(attempt 3)")
        assert asked.startswith("Question: Which odd thing is called 0?\nA. ")
        assert asked.endswith(f"\nAnswer: {option(asked, 'right')}")
    assert writer.count(VERIFY) == 0 and verifier.count(ANSWER) == 0  # it judges, and never guesses


# ----------------------------------------------------------------------------------- the difficulty


@pytest.mark.parametrize("right, level", [(8, "easy"), (7, "medium"), (2, "hard")])
def test_the_level_is_the_mean_score_of_k_answers_of_the_other_model(make, right, level):
    answerer = right_in(right)
    _, (question,) = make(Model(), 1, answerer)
    assert question.level == level and answerer.count(ANSWER) == len(answerer.asked) == 10


def test_what_hardly_anybody_answers_so_is_dropped_as_too_hard(make):
    result, questions = make(Model(), 3, right_in(1))
    assert result["too hard"] == 3 and questions == []
    assert SynthesizeSettings().k == 20  # UR² 3.3, 4.1


class Counting(LLM):
    """Every reply is another one."""

    def replies(self, requests):
        yield from ((request, f"reply {self.asked + n}") for n, request in enumerate(requests))


def test_the_answers_that_set_the_difficulty_are_twenty_samples_of_reasoning(make):
    model = Model()
    make(model, 1, k=20)
    answers = [(text, degree) for kind, text, degree in model.asked if kind == ANSWER]
    assert len(set(answers)) == 20 and {degree for _, degree in answers} == {1.0}
    assert len({text.rpartition("\n")[0] for text, _ in answers}) == 1  # one question, one order
    assert "step by step" in ANSWER
    llm = Counting("counting", 9)  # equal requests share a reply: these must not be equal
    replies = asked_often(llm, ANSWER, ["What is it?", "And that?"], 20)
    assert [len(its) for its in replies] == [20, 20] and len({*replies[0], *replies[1]}) == 40


# ------------------------------------------------------------------------------------- the examples


def picked(hard, attempt):
    return [question.id for question in pick_examples(GIVEN, hard, 0, attempt)]


def test_a_request_shows_the_examples_in_the_form_that_a_draft_must_have():
    asked = "Question: Which given thing is number 0?"
    assert shown(GIVEN[0]) == f"{asked}\nA. red\nB. right0\nC. blue\nD. green\nAnswer: B"
    assert parse_draft(shown(GIVEN[1])).options == ("red", "right1", "blue", "green")


def test_examples_are_drawn_per_attempt_and_the_same_again():
    draws = [picked([], attempt) for attempt in range(8)]
    assert draws == [picked([], attempt) for attempt in range(8)]
    assert len({tuple(ids) for ids in draws}) > 4
    assert all(len(set(ids)) == SHOTS == 5 for ids in draws)


def test_hard_questions_come_first_and_one_given_one_always_stays():
    found = [Question(f"h{i}", "?", ["A"], "choice", ("x", "y", "z")) for i in range(5)]
    for hard, kinds in ((found, "ghhhh"), (found[:1], "ggggh")):
        for attempt in range(9):
            assert "".join(sorted(name[0] for name in picked(hard, attempt))) == kinds


def test_hard_examples_come_from_all_sub_domains_in_turn():
    found = [Question(f"h{i}", "?", ["A"], "choice", source="many") for i in range(9)]
    found += [Question(f"h{i}", "?", ["A"], "choice", source=f"rare{i}") for i in (9, 10)]
    draws = [picked(found, attempt) for attempt in range(9)]
    for ids in draws:  # of 4 hard ones: one of each of the three, and a second of the large one
        assert {"h9", "h10"} <= set(ids) and sum(name[0] == "h" for name in ids) == 4
    assert len({name for ids in draws for name in ids}) > 10


def test_what_was_found_hard_is_an_example_of_the_next_round(make):
    model = Model()
    make(model, 3, right_in(3))
    rounds = [text for kind, text, _ in model.asked if kind == WRITE]
    counts = [(text.count("is called"), text.count("Which given thing")) for text in rounds]
    assert counts == [(0, 5), (1, 4), (2, 3)]  # those that there are


def test_only_choice_questions_with_one_readable_answer_are_examples():
    others = [Question("1", "?", ["x"]), Question("2", "?", ["A", "B"], "choice", ("x", "y", "z"))]
    assert module.examples_among([*others, GIVEN[0]]) == [GIVEN[0]]
    assert "no multiple-choice question" in message(module.examples_among, others)


# ----------------------------------------------------------------------------------------- the file


def test_questions_are_stored_in_our_own_layout_with_the_right_option_under_its_letter(make):
    _, questions = make(Model(), 12)
    assert [question.id for question in questions] == [f"synthetic-0-{10 * i}" for i in range(12)]
    for question in questions:
        assert question.options[ord(question.answers[0]) - 65] == "right"
        assert (question.task, question.level) == ("choice", "easy")
    assert len({question.answers[0] for question in questions}) > 1  # the writer has it at B


def test_no_question_is_made_twice_nor_one_of_those_given(make):
    copy = f"Question: {GIVEN[0].question}\nA. x\nB. right\nC. z\nD. w\nAnswer: B"
    replies = [written("a"), written("a "), written("b"), copy]
    result, _ = make(Model(write=lambda number: replies[number % 4]), 9)
    # 9 requests, the ninth asks "a" again; made harder "a" is another question than "a" was, and
    # only then is it known to be old
    assert (result["made"], result["asked before"], result["requests"]) == (2, 7, 9)


def test_attempts_are_bounded_and_every_drop_is_counted(make):
    bad = [None, "no", written(letter="Z"), written("x", ("a", "a", "b", "c"))]
    model = Model(write=lambda number: bad[number % 4])
    result, _ = make(model, 20)
    assert model.count(WRITE) == 20
    assert {reason: n for reason, n in result.items() if n} == {"requests": 20, "another form": 20}


def test_an_interrupted_run_goes_on_with_the_number_still_missing(make, tmp_path):
    def interrupted(number):
        if number == 5:
            raise KeyboardInterrupt
        return written(str(number))

    with pytest.raises(KeyboardInterrupt):
        make(Model(write=interrupted), 8)
    with open(tmp_path / "out.jsonl", "a") as file:
        file.write('{"id": "synthetic-0-50", "ques')  # cut short in the middle of a line
    later = Model(write=lambda number: written(f"later {number}"))
    result, questions = make(later, 8)
    assert result["made"] == 3
    assert [question.id for question in questions] == [f"synthetic-0-{10 * i}" for i in range(8)]


def test_a_file_of_other_questions_is_not_appended_to(make, tmp_path):
    append_jsonl(tmp_path / "out.jsonl", [asdict(Question("q1", "Who?", ["Ana"]))])
    assert "holds questions from elsewhere" in message(make, Model(), 2)


# ------------------------------------------------------------------------------- the real interface


@pytest.fixture
def flags(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # replies are kept in runs/llm_cache
    append_jsonl(tmp_path / "given.jsonl", map(asdict, GIVEN))
    return ["--llm", "http://127.0.0.1:9/v1#m", "--data", "given.jsonl", "--out", "out.jsonl"]


def test_the_command_line_makes_a_file_over_a_real_server_and_goes_on_with_it(flags, capsys):
    model = Model()

    def answer(instruction, text):
        known = instruction in (WRITE, HARDEN, VERIFY, ANSWER)
        return model.reply(instruction, text) if known else "yes"

    def run(count):
        others = ["--verifier", server, "--answerer", server]
        module.main([*flags, "--llm", server, *others, "--k", "4", "--count", count])
        return capsys.readouterr().out

    with chat_server(answer) as server:
        shown = run("3")
        assert "out.jsonl: 3 of 3 questions: easy 3" in shown and "this run: made 3" in shown
        assert "5 of 5 questions" in run("5")
        before = len(model.asked)
        assert "this run: made 0, requests 0" in run("5") and len(model.asked) == before
    questions = load_questions("out.jsonl")
    assert len({question.id for question in questions}) == 5
    assert all("right" in question_text(question) for question in questions)


@pytest.mark.parametrize(
    "change, expected",
    [
        (["--llm", ""], "--llm is missing"),
        (["--data", ""], "--data is missing"),
        (["--count", "0"], "--count 0"),
        (["--data", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--lmm", "x"], "unknown flag --lmm"),
        (["--timeout", "1"], "no answer"),
    ],
)
def test_flags_that_cannot_be_are_one_line(flags, change, expected):
    assert expected in message(module.main, [*flags, *change])
