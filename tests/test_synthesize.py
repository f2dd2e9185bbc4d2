"""Tests lab/synthesize.py: the form of drafts, their checks and difficulty, and the output file."""

import re
from dataclasses import asdict

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


def test_a_reply_has_up_to_ten_drafts_and_every_question_gets_its_own_number(make):
    drafts = [draft_text(str(number)) for number in range(12)]
    reply = "Here they are:\n\n" + "\n\n".join(drafts)
    assert [text.strip() for text in drafts_in(reply)] == drafts[:DRAFTS] and DRAFTS == 10
    assert drafts_in("none at all") == drafts_in(None) == []
    model = Model(write=lambda text, number: reply if number else "no")
    assert [q.id for q in make(model, 9)] == [f"synthetic-{i}" for i in range(9)]
    assert len(model.texts(WRITE)) == 2  # no draft of the first reply was in the form


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
    orders = [reordered(draft, seed) for seed in range(20)]
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
    make, last_verdict, count, capsys
):
    writer = Model()
    verifier = Model(verify=lambda text, number: "correct" if number < 2 else last_verdict)
    assert len(make(writer, 1, verifier=verifier)) == count
    assert f"1 new drafts: {count} correct, {count} of them not too hard" in capsys.readouterr().out
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
    replies = asked_often(llm, ANSWER, ["What is it?", "And that?"], 20)
    assert [len(row) for row in replies] == [20, 20] and len({*replies[0], *replies[1]}) == 40


# ------------------------------------------------------------------------------------- the examples


def picked(hard, attempt):
    return [question.id for question in pick_examples(EXAMPLES, hard, 0, attempt)]


def test_examples_depend_on_the_attempt_and_are_reproducible():
    draws = [picked([], attempt) for attempt in range(8)]
    assert draws == [picked([], attempt) for attempt in range(8)]
    assert len({*map(tuple, draws)}) > 4
    assert all(len(set(ids)) == SHOTS == 5 for ids in draws)


def test_hard_examples_come_from_all_sub_domains_in_turn():
    hard = [Question(f"h{i}", "?", ["A"], "choice", source="many") for i in range(9)]
    hard += [Question(f"h{i}", "?", ["A"], "choice", source=f"rare{i}") for i in (9, 10)]
    draws = [picked(hard, attempt) for attempt in range(9)]
    for ids in draws:  # one of each sub-domain, a second one of the largest, and one of --data
        assert {"h9", "h10"} <= set(ids) and sum(name[0] == "h" for name in ids) == 4
    assert len({name for ids in draws for name in ids}) > 10


def test_what_was_found_hard_is_an_example_of_the_next_round(make):
    model = Model()
    make(model, 3, right_in(3))
    kinds = ("is called", "Which given thing")
    counts = [[text.count(kind) for kind in kinds] for text in model.texts(WRITE)]
    assert counts == [[0, 5], [1, 4], [2, 3]]


def test_only_choice_questions_with_one_readable_answer_are_examples():
    others = [Question("1", "?", ["x"]), Question("2", "?", ["A", "B"], "choice", ("x", "y", "z"))]
    assert module.examples_among([*others, EXAMPLES[0]]) == [EXAMPLES[0]]
    assert "no multiple-choice question" in message(module.examples_among, others)


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


def test_an_interrupted_run_continues_with_the_questions_still_missing(make, tmp_path):
    def interrupted(text, number):
        if number == 5:
            raise KeyboardInterrupt
        return draft_text(str(number))

    with pytest.raises(KeyboardInterrupt):
        make(Model(write=interrupted), 8)
    with open(tmp_path / "out.jsonl", "a") as file:
        file.write('{"id": "synthetic-5", "ques')  # the last line is incomplete
    second_model = Model(write=lambda text, number: draft_text(f"later {number}"))
    assert [question.id for question in make(second_model, 8)] == [
        f"synthetic-{i}" for i in range(8)
    ]
    assert len(second_model.texts(WRITE)) == 3


def test_a_file_of_other_questions_is_not_appended_to(make, tmp_path):
    append_jsonl(tmp_path / "out.jsonl", [asdict(Question("q1", "Who?", ["Ana"]))])
    assert "holds questions from elsewhere" in message(make, Model(), 2)


# -------------------------------------------------------------------------------------- the command


@pytest.fixture
def flags(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    append_jsonl(tmp_path / "given.jsonl", map(asdict, EXAMPLES))
    return ["--llm", "http://127.0.0.1:9/v1#m", "--data", "given.jsonl", "--out", "out.jsonl"]


def test_the_command_writes_a_file_with_a_real_server_and_later_continues_it(flags, capsys):
    model = Model()

    def answer(instruction, text):  # other instructions are a probe of the server
        return model.reply(instruction, text) if instruction in model.replies else "yes"

    with chat_server(answer) as server:
        for count, any_requests in ((3, True), (5, True), (5, False)):
            before = len(model.requests)
            options = ["--verifier", server, "--answerer", server]
            module.main([*flags, "--llm", server, *options, "--k", "4", "--count", str(count)])
            assert (len(model.requests) > before) == any_requests
            summary = f"out.jsonl: {count} of {count} questions: {{'easy': {count}}}"
            assert summary in capsys.readouterr().out
    assert len(load_questions("out.jsonl")) == 5


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
def test_wrong_flags_are_an_error_of_one_line(flags, change, expected):
    assert expected in message(module.main, [*flags, *change])
