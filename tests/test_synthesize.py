"""Tests lab/synthesize.py: the form of drafts, their checks and difficulty, and the output file."""

import re
from dataclasses import asdict
from random import Random

import pytest
from conftest import chat_server, message

from data import Question, load_questions
from formats.records import append_jsonl
from lab import synthesize as module
from lab.synthesize import (
    ANSWER,
    DRAFTS,
    HARDEN,
    VERIFY,
    WRITE,
    SynthesizeSettings,
    asked_often,
    drafts_in,
    parse_draft,
    reordered,
    shown,
    synthesize,
)
from other_models.llm import LLM


def example_question(number):
    text, options = f"Which given thing is number {number}?", ("red", f"right{number}")
    options += ("blue", "green")
    return Question(f"g{number}", text, ["B"], "choice", options)


EXAMPLES = [example_question(number) for number in range(6)]


FOUR = ("wrong a", "right", "wrong b", "wrong c")


def draft_text(name="one", options=FOUR, letter="B"):
    lines = "\n".join(f"{chr(65 + i)}. {option}" for i, option in enumerate(options))
    return f"Question: Which thing is called {name}?\n{lines}\nAnswer: {letter}"


def option(text, ending):
    """Returns the letter of the option that ends with these words."""
    return re.search(rf"(.)\. {ending}$", text, re.MULTILINE)[1]


def hardened(text):
    """Adds an option, and a word to the question."""
    return text.replace("thing is", "odd thing is").replace("\nAnswer", "\nE. wrong d\nAnswer")


class Model:
    """A scripted model. By default it writes question 0, 1, 2, ..., one per request, makes each
    harder, calls all correct, and chooses the option "right". A test may replace the reply to an
    instruction by a function of the text and the number of the request.
    """

    def __init__(self, **changes):
        self.requests = []
        self.replies = {
            WRITE: lambda text, number: draft_text(str(number)),
            HARDEN: lambda text, number: hardened(text),
            VERIFY: lambda text, number: "It is.\nCorrect.",
            ANSWER: lambda text, number: f"The correct answer is: {option(text, 'right')}",
        }
        self.replies |= {globals()[name.upper()]: reply for name, reply in changes.items()}

    def ask(self, requests):
        return [self.reply(*request) for request in requests]

    def texts(self, instruction):
        return [text for other, text, _ in self.requests if other == instruction]

    def reply(self, instruction, text, temperature=0.0, *_):
        number = len(self.texts(instruction))
        self.requests.append((instruction, text, temperature))
        return self.replies[instruction](text, number)


def right_in(share):
    """Returns a model that is right in the first `share` of every ten answers."""
    return Model(answer=lambda text, n: option(text, "right" if n % 10 < share else "wrong a"))


@pytest.fixture
def make(tmp_path):
    """Returns a function that runs `synthesize` with these models and returns its questions."""

    def make(model, count, answerer=None, verifier=None, k=10):
        settings = SynthesizeSettings(out=str(tmp_path / "out.jsonl"), count=count, k=k)
        return synthesize(EXAMPLES, [model, verifier or model, answerer or model], settings)

    return make


# ----------------------------------------------------------------------------------------- the form


def test_a_draft_in_the_exact_form_is_read():
    reply = "\n Question: A story.\nWhich thing is it?\n\nA. x\n  B. y\nC. z\nD. w\n\nAnswer: C\n"
    draft = parse_draft(reply)  # blank lines, indents and a question of several lines are allowed
    assert draft.question == "A story. Which thing is it?"
    assert (draft.options, draft.answers, draft.task) == (("x", "y", "z", "w"), ["C"], "choice")
    signs = ("+", "-", "*", "/")  # after normalisation all four are empty
    assert parse_draft(draft_text(options=signs)).options == signs
    assert parse_draft(draft_text(options=[f"o{i}" for i in range(10)])).answers == ["B"]
    question = "Question: Which given thing is number 0?"  # examples in a request have this form
    assert shown(EXAMPLES[0]) == f"{question}\nA. red\nB. right0\nC. blue\nD. green\nAnswer: B"
    assert parse_draft(shown(EXAMPLES[0])).options == EXAMPLES[0].options


@pytest.mark.parametrize(
    "reply",
    [
        None,
        "Sure! " + draft_text(),  # the question is not at the beginning of a line
        draft_text() + "\n" + draft_text(),
        draft_text() + "\nAnswer: A",
        draft_text(letter="B and C"),
        draft_text(letter="E"),
        draft_text().replace("C. ", "E. "),
        draft_text().replace("B. ", "A. "),
        draft_text(options=("+", "-", "*")),  # UR² C.5 allows 4 to 10 options
        draft_text(options=[f"o{i}" for i in range(11)]),
        draft_text(options=("Right", "right ", "b", "c")),
        draft_text(options=("the right", "right", "b", "c")),  # they differ only in an article
    ],
)
def test_a_draft_in_any_other_form_is_dropped(reply):
    assert parse_draft(reply) is None


def test_each_draft_is_made_harder_by_a_second_request_and_dropped_if_that_fails(make):
    replies = ["\n\nPart: Micro economics.", None, ""]  # the sub-domain, no reply, no sub-domain
    model = Model(
        harden=lambda text, n: None if replies[n] is None else hardened(text) + replies[n]
    )
    questions = [(q.question, len(q.options), q.source) for q in make(model, 3)][:2]
    assert questions == [
        ("Which odd thing is called 0?", 5, "micro economics"),
        ("Which odd thing is called 2?", 5, "synthetic"),
    ]
    assert model.texts(HARDEN) == [draft_text(str(number)) for number in range(3)]


# --------------------------------------------------------------------------------- the verification


def test_the_answer_letter_follows_the_right_option_into_another_order():
    draft = Question("", "Which thing is it?", ["B"], "choice", FOUR)
    orders = [reordered(draft, Random(seed)) for seed in range(20)]
    assert all(q.options[ord(q.answers[0]) - 65] == "right" for q in orders)
    assert all({*q.options} == {*FOUR} for q in orders)
    assert {q.answers[0] for q in orders} == set("ABCD")


@pytest.mark.parametrize(
    "last_verdict, count",
    [
        ("It holds.\n**Correct**", 1),
        ("B is right as well.\nincorrect", 0),
        ("The correct answer is: B", 0),  # neither correct nor incorrect
        (None, 0),
    ],
)
def test_the_verifier_reads_the_answer_and_all_three_verdicts_must_be_correct(
    make, last_verdict, count
):
    writer = Model()
    verifier = Model(verify=lambda text, number: "correct" if number < 2 else last_verdict)
    assert len(make(writer, 1, verifier=verifier)) == count
    texts = verifier.texts(VERIFY)
    assert len(verifier.requests) == len(set(texts)) == 3  # equal requests would be sent only once
    assert writer.texts(VERIFY) == []
    for number, text in enumerate(texts, 1):
        assert text.startswith("Question: Which odd thing is called 0?\nA. ")
        assert text.endswith(f"\nAnswer: {option(text, 'right')}\n(attempt {number})")


# ----------------------------------------------------------------------------------- the difficulty


@pytest.mark.parametrize("right, levels", [(8, ["easy"]), (7, ["medium"]), (2, ["hard"]), (1, [])])
def test_what_hardly_any_sample_answers_is_dropped_else_the_mean_score_is_the_level(
    make, right, levels
):
    answerer = right_in(right)
    assert [question.level for question in make(Model(), 1, answerer)] == levels
    assert len(answerer.texts(ANSWER)) == len(answerer.requests) == 10


class Counting(LLM):
    """Gives a different reply to each request."""

    def replies(self, requests):
        yield from ((request, f"reply {n}") for n, request in enumerate(requests))


def test_the_answers_that_decide_the_difficulty_are_twenty_step_by_step_samples(make):
    model = Model()
    make(model, 1, k=SynthesizeSettings.k)
    assert len(set(model.texts(ANSWER))) == 20 and "step by step" in ANSWER  # UR² 3.3, 4.1
    assert {
        temperature for instruction, _, temperature in model.requests if instruction == ANSWER
    } == {1.0}
    # The question and the order of its options are the same in all requests.
    assert len({text.rpartition("\n")[0] for text in model.texts(ANSWER)}) == 1
    llm = Counting("counting", 9)  # equal requests would share a reply, so these must differ
    assert len({*asked_often(llm, ANSWER, "What is it?", 20)}) == 20


# ------------------------------------------------------------------------------------- the examples


def test_what_was_found_hard_is_an_example_of_the_next_round(make):
    model = Model()
    make(model, 3, right_in(3))
    kinds = ("is called", "Which given thing")
    counts = [[text.count(kind) for kind in kinds] for text in model.texts(WRITE)]
    assert counts == [[0, 5], [1, 4], [2, 3]]


# ----------------------------------------------------------------------------------------- the file


def test_questions_are_stored_in_our_layout_with_the_letter_of_the_right_option(make, tmp_path):
    questions = make(Model(), 12)
    assert load_questions(tmp_path / "out.jsonl") == questions and len(questions) == 12
    for question in questions:
        assert question.options[ord(question.answers[0]) - 65] == "right"
        assert (question.task, question.level) == ("choice", "easy")
    # The writer always puts the right option at B.
    assert len({question.answers[0] for question in questions}) > 1


def test_no_question_is_accepted_twice_and_attempts_are_bounded(make):
    copy = f"Question: {EXAMPLES[0].question}\nA. x\nB. right\nC. z\nD. w\nAnswer: B"
    replies = [
        draft_text("a"),
        draft_text("a "),
        draft_text("b"),
        copy,
        None,
        draft_text(letter="Z"),
    ]
    model = Model(write=lambda text, number: replies[number % 6])
    assert len(make(model, 9)) == 2 and len(model.texts(WRITE)) == 9


def test_an_interrupted_run_leaves_its_finished_questions(make, tmp_path):
    def interrupted(text, number):
        if number == 5:
            raise KeyboardInterrupt
        return draft_text(str(number))

    with pytest.raises(KeyboardInterrupt):
        make(Model(write=interrupted), 8)
    assert len(load_questions(tmp_path / "out.jsonl")) == 5


# -------------------------------------------------------------------------------------- the command


@pytest.fixture
def flags(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    append_jsonl(tmp_path / "given.jsonl", map(asdict, EXAMPLES))
    return ["--llm", "http://127.0.0.1:9/v1#m", "--data", "given.jsonl", "--out", "out.jsonl"]


def test_the_command_writes_a_file_with_a_real_server(flags, capsys):
    model = Model()

    def answer(instruction, text):  # other instructions are a probe of the server
        return model.reply(instruction, text) if instruction in model.replies else "yes"

    with chat_server(answer) as server:
        options = ["--llm", server, "--verifier", server, "--k", "4", "--count", "3"]
        module.main([*flags, *options])
    assert "out.jsonl: 3 of 3 questions: {'easy': 3}" in capsys.readouterr().out
    assert len(load_questions("out.jsonl")) == 3
    assert "out.jsonl already exists" in message(module.main, flags)


@pytest.mark.parametrize(
    "change, expected",
    [
        (["--llm", ""], "--llm is missing"),
        (["--timeout", "1"], "no answer"),
    ],
)
def test_wrong_flags_are_an_error_of_one_line(flags, change, expected):
    assert expected in message(module.main, [*flags, *change])
