"""lab/synthesize.py: drafts in the exact form, votes no habit wins, and a file that goes on."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
from conftest import chat_server, message

from data import Question, load_questions
from errors import InputError
from formats.records import append_jsonl
from lab import synthesize as module
from lab.synthesize import (
    ANSWER,
    WRITE,
    SynthesizeSettings,
    grade_drafts,
    parse_draft,
    pick_examples,
    reordered,
    synthesize,
    write_request,
)
from prompts import question_text


def given(number):
    options, asked = ("red", f"right{number}", "blue"), f"Which given thing is number {number}?"
    return Question(f"g{number}", asked, ["B"], "choice", options)


GIVEN = [given(number) for number in range(6)]


def written(name="one", options=("wrong a", "right", "wrong b"), letter="B"):
    lines = "\n".join(f"{chr(65 + i)}. {option}" for i, option in enumerate(options))
    return f"Question: Which thing is called {name}?\n{lines}\nAnswer: {letter}"


def option(text, ending):
    """The letter of the option that ends so."""
    return next(line[0] for line in text.splitlines() if line.endswith(f". {ending}"))


class Model:
    """Writes question 0, 1, 2, ...; answers "right", or what `vote(text, number)` says."""

    def __init__(self, write=lambda number: written(str(number)), vote=None):
        self.write, self.vote, self.written, self.answered, self.batches = write, vote, 0, 0, []

    def ask(self, requests):
        self.batches.append(requests)
        return [self.reply(instruction, text) for instruction, text in requests]

    def reply(self, instruction, text):
        if instruction == WRITE:
            self.written += 1
            return self.write(self.written - 1)
        assert instruction == ANSWER
        self.answered += 1
        if self.vote:
            return self.vote(text, self.answered - 1)
        return f"The correct answer is: {option(text, 'right')}"


def right_in(share):
    """A model that is right in the first `share` of every ten answers."""
    return Model(vote=lambda text, n: option(text, "right" if n % 10 < share else "wrong a"))


@pytest.fixture
def make(tmp_path, monkeypatch):
    """make(model, count, answerer, at_once, settings): the counts, and the questions there are."""

    def make(model, count, answerer=None, at_once=8, **settings):
        monkeypatch.setattr(module, "AT_ONCE", at_once)
        how = SynthesizeSettings(out=str(tmp_path / "out.jsonl"), count=count, **settings)
        result = synthesize(GIVEN, model, answerer or model, how)
        return result, load_questions(how.out) if Path(how.out).read_text() else []

    return make


# ----------------------------------------------------------------------------------------- the form


def test_a_draft_in_the_exact_form_is_read():
    long = "\n Question: A long story.\nWhich thing is it?\n\nA. x\n  B. y\nC. z\n\nAnswer: C\n"
    draft = parse_draft(long)  # blank lines, indents and a question of several lines are no fault
    assert draft.question == "A long story. Which thing is it?"
    assert (draft.options, draft.answers, draft.task) == (("x", "y", "z"), ["C"], "choice")
    signs = ("+", "-", "*")  # normalised, all three are empty
    assert parse_draft(written(options=signs), options=3).options == signs
    assert parse_draft(written(options=signs), options=4) == "option letters"


@pytest.mark.parametrize(
    "reply, reason",
    [
        (None, "no reply"),
        # the question does not begin a line
        ("Sure! " + written(), "another form"),
        (written() + "\n" + written(), "another form"),
        (written() + "\nAnswer: A", "another form"),
        (written(letter="B and C"), "another form"),
        (written(letter="D"), "answer letter"),
        (written().replace("C. ", "D. "), "option letters"),
        (written().replace("B. ", "A. "), "option letters"),
        (written(options=("a", "b"), letter="A"), "option letters"),
        (written(options=[f"o{i}" for i in range(11)]), "option letters"),
        (written(options=("Right", "right ", "b")), "options alike"),
        (written(options=("the right", "right", "b")), "options alike"),  # but for an article
        (written(options=("x " * 41, "right", "b")), "length"),
        ("Question: Who?\nA. x\nB. y\nC. z\nAnswer: A", "length"),
        (written("word " * 200), "length"),
    ],
)
def test_a_draft_in_any_other_form_is_dropped_under_its_reason(reply, reason):
    assert parse_draft(reply) == reason


# ---------------------------------------------------------------------------------------- the votes

DRAFT = Question("", "Which thing is it?", ["A"], "choice", ("right", "b", "c", "d"))


def test_the_right_option_moves_on_by_a_letter_from_turn_to_turn():
    shown = [reordered(DRAFT, turn, seed=0) for turn in range(4)]
    places = [ord(question.answers[0]) - 65 for question in shown]
    assert [(place - places[0]) % 4 for place in places] == [0, 1, 2, 3]
    for question, place in zip(shown, places, strict=True):
        assert question.options[place] == "right"
        assert sorted(question.options) == ["b", "c", "d", "right"]


def test_a_model_that_likes_a_letter_wins_at_most_one_of_three_votes():
    model = Model(vote=lambda text, number: "The correct answer is: B")
    (votes,) = grade_drafts(model, [DRAFT], range(3), 0, Counter())
    assert votes <= 1


def test_a_model_that_knows_wins_all_and_one_without_a_word_none_and_that_is_counted():
    result = Counter()
    assert grade_drafts(Model(), [DRAFT], range(3), 0, result) == [3]
    assert result["unreadable"] == 0
    silent = Model(vote=lambda text, number: [None, "", "I do not know"][number])
    assert grade_drafts(silent, [DRAFT], range(3), 0, result) == [0]
    assert result["unreadable"] == 3


@pytest.mark.parametrize("right, made", [(3, 8), (2, 0)])
def test_all_three_votes_must_agree_with_the_draft(make, right, made):
    writer = Model(vote=lambda text, n: option(text, "right" if n % 3 < right else "wrong a"))
    result, _ = make(writer, 8, Model())
    assert result["made"] == made and (result["votes"] > 0) == (made == 0)


# ----------------------------------------------------------------------------------- the difficulty


@pytest.mark.parametrize("right, level", [(8, "easy"), (7, "medium"), (2, "hard")])
def test_the_level_is_the_mean_score_of_k_answers_of_the_other_model(make, right, level):
    answerer = right_in(right)
    _, (question,) = make(Model(), 1, answerer, at_once=1, k=10)
    assert question.level == level and answerer.answered == 10 and answerer.written == 0


def test_what_hardly_anybody_answers_so_is_dropped_as_too_hard(make):
    result, questions = make(Model(), 1, right_in(1))
    assert result["too hard"] == 10 and questions == []


def test_the_answers_that_set_the_difficulty_are_no_requests_of_the_votes(make):
    model = Model()  # writer and answerer in one
    make(model, 1, at_once=1, k=3)
    _, votes, answers = model.batches
    shown = [text for _, text in votes + answers]
    assert len(votes) == len(answers) == 3 and len({text.split("\n")[0] for text in shown}) == 1
    # 3 options have 6 orders: the six requests hold more orders than the votes' three
    assert len(set(shown)) > 3


# ------------------------------------------------------------------------------------- the examples


def picked(hard, attempt):
    return [question.id for question in pick_examples(GIVEN, hard, 0, attempt)]


def test_a_request_shows_the_examples_in_the_form_that_a_draft_must_have():
    instruction, text = write_request(GIVEN[:2])
    first, second = text.split("\n\n")
    assert instruction == WRITE and parse_draft(second).options == ("red", "right1", "blue")
    asked = "Question: Which given thing is number 0?"
    assert first == f"{asked}\nA. red\nB. right0\nC. blue\nAnswer: B"


def test_examples_are_drawn_per_attempt_and_the_same_again():
    draws = [picked([], attempt) for attempt in range(8)]
    assert draws == [picked([], attempt) for attempt in range(8)]
    assert len({tuple(ids) for ids in draws}) > 4 and all(len(set(ids)) == 3 for ids in draws)


def test_hard_questions_come_first_and_one_given_one_always_stays():
    found = [Question(f"h{i}", "?", ["A"], "choice", ("x", "y", "z")) for i in range(5)]
    for hard, kinds in ((found, "ghh"), (found[:1], "ggh")):
        for attempt in range(9):
            assert "".join(sorted(name[0] for name in picked(hard, attempt))) == kinds


def test_what_was_found_hard_is_an_example_of_the_next_round(make):
    model = Model()
    make(model, 4, right_in(3), at_once=2, k=10)
    rounds = [[text for _, text in batch] for batch in model.batches if batch[0][0] == WRITE]
    assert len(rounds) == 2 and all("is called" not in text for text in rounds[0])
    counts = [(text.count("is called"), text.count("Which given thing")) for text in rounds[1]]
    assert counts == [(2, 1), (2, 1)]


def test_only_choice_questions_with_one_readable_answer_are_examples():
    others = [Question("1", "?", ["x"]), Question("2", "?", ["A", "B"], "choice", ("x", "y", "z"))]
    assert module.examples_among([*others, GIVEN[0]]) == [GIVEN[0]]
    assert "no multiple-choice question" in message(module.examples_among, others)


# ----------------------------------------------------------------------------------------- the file


def test_questions_are_stored_in_our_own_layout_with_the_right_option_under_its_letter(make):
    _, questions = make(Model(), 12)
    assert [question.id for question in questions] == [f"synthetic-0-{i}" for i in range(12)]
    for question in questions:
        assert question.options[ord(question.answers[0]) - 65] == "right"
        assert (question.task, question.source, question.level) == ("choice", "synthetic", "easy")
    assert len({question.answers[0] for question in questions}) > 1  # the writer has it at B


def test_no_question_is_made_twice_nor_one_of_those_given(make):
    copy = f"Question: {GIVEN[0].question}\nA. x\nB. right\nC. z\nAnswer: B"
    replies = [written("a"), written("a "), written("b"), copy]
    result, _ = make(Model(write=lambda number: replies[number % 4]), 3)
    assert (result["made"], result["asked before"], result["attempts"]) == (2, 28, 30)


def test_attempts_are_bounded_and_every_drop_is_counted(make):
    bad = [None, "no", written(letter="Z"), written("x", ("a", "a", "b"))]
    model = Model(write=lambda number: bad[number % 4])
    result, _ = make(model, 2)
    assert model.written == result["attempts"] == 20
    reasons = ["no reply", "another form", "answer letter", "options alike"]
    dropped = {reason: n for reason, n in result.items() if n and reason != "attempts"}
    assert dropped == dict.fromkeys(reasons, 5)


def test_an_interrupted_run_goes_on_with_the_number_still_missing(make, tmp_path):
    def interrupted(number):
        if number == 5:
            raise KeyboardInterrupt
        return written(str(number))

    with pytest.raises(KeyboardInterrupt):
        make(Model(write=interrupted), 8, at_once=2)
    with open(tmp_path / "out.jsonl", "a") as file:
        file.write('{"id": "synthetic-0-9", "ques')  # cut short in the middle of a line
    later = Model(write=lambda number: written(f"later {number}"))
    result, questions = make(later, 8, at_once=2)
    assert result["made"] == 4
    assert [question.id for question in questions] == [f"synthetic-0-{i}" for i in range(8)]


def test_a_file_of_other_questions_is_not_appended_to(make, tmp_path):
    append_jsonl(tmp_path / "out.jsonl", [asdict(Question("q1", "Who?", ["Ana"]))])
    assert "holds other questions" in message(make, Model(), 2)


# ------------------------------------------------------------------------------- the real interface


@pytest.fixture
def flags(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # replies are kept in runs/llm_cache
    append_jsonl(tmp_path / "given.jsonl", map(asdict, GIVEN))
    return ["--llm", "http://127.0.0.1:9/v1#m", "--data", "given.jsonl", "--out", "out.jsonl"]


def test_the_command_line_makes_a_file_over_a_real_server_and_goes_on_with_it(flags, capsys):
    model = Model()

    def answer(instruction, text):
        return model.reply(instruction, text) if instruction in (WRITE, ANSWER) else "yes"

    def run(count):
        module.main([*flags, "--llm", server, "--k", "4", "--count", count])
        return capsys.readouterr().out

    with chat_server(answer) as server:
        shown = run("3")
        assert "out.jsonl: 3 of 3 questions: easy 3" in shown and "this run: made 3" in shown
        assert "5 of 5 questions" in run("5")
        before = model.written
        assert "this run: made 0, attempts 0" in run("5") and model.written == before
    questions = load_questions("out.jsonl")
    assert len({question.id for question in questions}) == 5
    assert all("right" in question_text(question) for question in questions)


@pytest.mark.parametrize(
    "change, expected",
    [
        (["--llm", ""], "--llm is missing"),
        (["--count", "0"], "--count 0"),
        (["--options", "2"], "--options 2"),
        (["--options", "11"], "--options 11"),
        (["--votes", "5"], "--votes: 3 votes, and all must agree"),
        (["--data", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--lmm", "x"], "unknown flag --lmm"),
        (["--llm_timeout", "1"], "write --timeout"),
        (["--timeout", "1"], "no answer"),
    ],
)
def test_flags_that_cannot_be_are_one_line(flags, change, expected):
    assert expected in message(module.main, [*flags, *change])
