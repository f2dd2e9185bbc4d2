"""lab/synthesize.py: drafts in the exact form, votes no habit wins, and a file that goes on."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
from conftest import chat_server, message

from data import Document, Question, load_questions
from errors import InputError
from formats.records import append_jsonl
from lab import synthesize as module
from lab.synthesize import (
    ABOUT,
    ANSWER,
    DRAFTS,
    HARDEN,
    SHOTS,
    WRITE,
    SynthesizeSettings,
    drafts_in,
    grade_drafts,
    parse_draft,
    pick_examples,
    question_about,
    reordered,
    shown,
    synthesize,
)
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
    """Writes question 0, 1, 2, ..., one per request; makes each harder; answers "right", or what
    `vote(text, number)` says.
    """

    def __init__(self, write=lambda number: written(str(number)), vote=None, harden=harder):
        self.write, self.vote, self.harden, self.batches = write, vote, harden, []
        self.written = self.answered = 0

    def ask(self, requests):
        self.batches.append(requests)
        return [self.reply(instruction, text) for instruction, text in requests]

    def reply(self, instruction, text):
        if instruction == WRITE:
            self.written += 1
            return self.write(self.written - 1)
        if instruction == HARDEN:
            return self.harden(text)
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
    """make(writer, count, answerer, at_once, verifier): the counts, and the questions there are."""

    def make(model, count, answerer=None, at_once=8, verifier=None, k=10):
        monkeypatch.setattr(module, "AT_ONCE", at_once)
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
    assert parse_draft(written(options=signs[:3])) == "option letters"  # 4 to 10, UR² C.5
    assert parse_draft(written(options=[f"o{i}" for i in range(10)])).answers == ["B"]


@pytest.mark.parametrize(
    "reply, reason",
    [
        (None, "no reply"),
        # the question does not begin a line
        ("Sure! " + written(), "another form"),
        (written() + "\n" + written(), "another form"),
        (written() + "\nAnswer: A", "another form"),
        (written(letter="B and C"), "another form"),
        (written(letter="E"), "answer letter"),
        (written().replace("C. ", "E. "), "option letters"),
        (written().replace("B. ", "A. "), "option letters"),
        (written(options=("a", "b"), letter="A"), "option letters"),
        (written(options=[f"o{i}" for i in range(11)]), "option letters"),
        (written(options=("Right", "right ", "b", "c")), "options alike"),
        (written(options=("the right", "right", "b", "c")), "options alike"),  # but for an article
        (written(options=("x " * 41, "right", "b", "c")), "length"),
        ("Question: Who?\nA. x\nB. y\nC. z\nD. w\nAnswer: A", "length"),
        (written("word " * 200), "length"),
    ],
)
def test_a_draft_in_any_other_form_is_dropped_under_its_reason(reply, reason):
    assert parse_draft(reply) == reason


def test_a_reply_holds_ten_drafts_and_each_has_another_number(make):
    many = [written(str(number)) for number in range(12)]
    reply = "Here they are:\n\n" + "\n\n".join(many)
    assert [text.strip() for text in drafts_in(reply)] == many[:DRAFTS] and DRAFTS == 10
    assert drafts_in("none at all") == ["none at all"] and drafts_in(None) == [None]
    result, questions = make(Model(write=lambda number: reply if number else "no"), 9, at_once=2)
    # request 0 came to nothing; the drafts of request 1 have the numbers from 10 on
    assert [question.id for question in questions] == [f"synthetic-0-{10 + i}" for i in range(9)]
    assert (result["requests"], result["another form"]) == (2, 1)


def test_each_draft_is_made_harder_by_a_second_request_and_dropped_if_that_fails(make):
    def harden(text):
        return "I would rather not." if "called 1?" in text else harder(text)

    model = Model(harden=harden)
    result, questions = make(model, 3, at_once=3)
    assert [question.question for question in questions] == [
        "Which odd thing is called 0?",
        "Which odd thing is called 2?",
    ]
    assert all(len(question.options) == 5 for question in questions)
    assert model.batches[1] == [(HARDEN, written(str(number))) for number in range(3)]
    assert result["another form"] == 1


def test_the_second_request_names_the_sub_domain_too(make):
    model = Model(harden=lambda text: harder(text) + "\n\nPart: Micro economics." * ("0?" in text))
    _, questions = make(model, 2)
    assert [question.source for question in questions] == ["micro economics", "synthetic"]


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
def test_all_three_votes_of_the_verifier_must_agree_with_the_draft(make, right, made):
    other = Model(vote=lambda text, n: option(text, "right" if n % 3 < right else "wrong a"))
    writer = Model()
    result, _ = make(writer, 8, Model(), verifier=other)
    assert result["made"] == made and (result["votes"] > 0) == (made == 0)
    assert writer.answered == 0  # it does not check its own


# ----------------------------------------------------------------------------------- the difficulty


@pytest.mark.parametrize("right, level", [(8, "easy"), (7, "medium"), (2, "hard")])
def test_the_level_is_the_mean_score_of_k_answers_of_the_other_model(make, right, level):
    answerer = right_in(right)
    _, (question,) = make(Model(), 1, answerer, at_once=1)
    assert question.level == level and answerer.answered == 10 and answerer.written == 0


def test_what_hardly_anybody_answers_so_is_dropped_as_too_hard(make):
    result, questions = make(Model(), 3, right_in(1))
    assert result["too hard"] == 3 and questions == []
    assert SynthesizeSettings().k == 20  # UR² 3.3, 4.1


def test_the_answers_that_set_the_difficulty_are_no_requests_of_the_votes(make):
    model = Model()  # writer and answerer in one
    make(model, 1, at_once=1, k=3)
    _, _, votes, answers = model.batches
    texts = [text for _, text in votes + answers]
    assert len(votes) == len(answers) == 3 and len({text.split("\n")[0] for text in texts}) == 1
    assert len(set(texts)) > 3  # the six requests hold more orders than the votes' three


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
    make(model, 4, right_in(3), at_once=2)
    rounds = [[text for _, text in batch] for batch in model.batches if batch[0][0] == WRITE]
    assert len(rounds) == 2 and all("is called" not in text for text in rounds[0])
    counts = [(text.count("is called"), text.count("Which given thing")) for text in rounds[1]]
    assert counts == [(2, 3), (2, 3)]  # the two that there are


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
    assert model.written == result["requests"] == 20
    reasons = ["no reply", "another form", "answer letter", "options alike"]
    dropped = {reason: n for reason, n in result.items() if n and reason != "requests"}
    assert dropped == dict.fromkeys(reasons, 5)


def test_an_interrupted_run_goes_on_with_the_number_still_missing(make, tmp_path):
    def interrupted(number):
        if number == 5:
            raise KeyboardInterrupt
        return written(str(number))

    with pytest.raises(KeyboardInterrupt):
        make(Model(write=interrupted), 8, at_once=2)
    with open(tmp_path / "out.jsonl", "a") as file:
        file.write('{"id": "synthetic-0-40", "ques')  # cut short in the middle of a line
    later = Model(write=lambda number: written(f"later {number}"))
    result, questions = make(later, 8, at_once=2)
    assert result["made"] == 4
    assert [question.id for question in questions] == [f"synthetic-0-{10 * i}" for i in range(8)]


def test_a_file_of_other_questions_is_not_appended_to(make, tmp_path):
    append_jsonl(tmp_path / "out.jsonl", [asdict(Question("q1", "Who?", ["Ana"]))])
    assert "holds other questions" in message(make, Model(), 2)


# ------------------------------------------------------------------------------ about passages
PASSAGE = Document("p", "Ana Bell", "Ana Bell was born in Kelmouth. She draws maps.")


def test_a_question_on_a_passage_brings_it_as_its_gold_reference():
    reply = "\nQuestion: Where was Ana Bell born?\nAnswer: the Kelmouth.\n"
    question = question_about((PASSAGE, reply))
    assert (question.question, question.answers) == ("Where was Ana Bell born?", ["the Kelmouth."])
    assert question.references == (PASSAGE,) and question.supporting == (1,)


@pytest.mark.parametrize(
    "reply, reason",
    [
        (None, "another form"),
        ("Where was she born? Kelmouth", "another form"),
        ("Question: Who?\nAnswer: Ana\nAnswer: Bell", "another form"),
        ("Question: Where does Ana live?\nAnswer: Norland", "not in the passage alone"),
        ("Question: Where does Ana live?\nAnswer: Kel", "not in the passage alone"),  # half a word
        ("Question: Who lives in Kelmouth?\nAnswer: Kelmouth", "not in the passage alone"),
        ("Question: Where does Ana live?\nAnswer: ...", "not in the passage alone"),
        ("Question: Who is it?\nAnswer: Ana Bell", "asked before"),
    ],
)
def test_a_question_that_its_passage_does_not_answer_is_dropped(reply, reason):
    assert question_about((PASSAGE, reply), {"who is it"}) == reason


# ------------------------------------------------------------------------------- the real interface


def on_towns(instruction, text):
    """Asks for the town of each passage, and reads it; the fourth passage it misreads."""
    name, town = text.split()[0], text.partition(" in ")[2].split(".")[0]
    if instruction == ABOUT:
        return f"Question: In which town does {name} live?\nAnswer: {town}"
    return "nowhere" if "D" in text.split()[0] else town


def test_a_folder_of_documents_becomes_questions_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for name in "ABCDEF":
        (tmp_path / "texts" / f"{name}.txt").write_text(f"{name}na lives in {name}town. It rains.")
    with chat_server(on_towns) as server:
        flags = ["--llm", server, "--corpus", "texts", "--out", "out.jsonl", "--count"]
        module.main([*flags, "2"])
        assert "out.jsonl: 2 of 2 questions: qa 2" in capsys.readouterr().out
        module.main([*flags, "9"])
        assert "read otherwise 1" in capsys.readouterr().out
    questions = load_questions("out.jsonl")
    assert sorted(question.answers[0] for question in questions) == [f"{c}town" for c in "ABCEF"]
    assert all(
        question.references[0].text.startswith(question.answers[0][0]) for question in questions
    )


@pytest.mark.parametrize(
    "change, expected",
    [
        (["--corpus", "texts"], "--data, questions to write after, or --corpus"),
        (["--data", "", "--corpus", "t", "--k", "3"], "leave out --answerer and --k"),
        (["--data", "", "--corpus", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--data", ""], "--data, questions to write after, or --corpus"),
    ],
)
def test_passages_or_examples_are_given_and_not_both(flags, change, expected):
    assert expected in message(module.main, [*flags, *change])


@pytest.fixture
def flags(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # replies are kept in runs/llm_cache
    append_jsonl(tmp_path / "given.jsonl", map(asdict, GIVEN))
    return ["--llm", "http://127.0.0.1:9/v1#m", "--data", "given.jsonl", "--out", "out.jsonl"]


def test_the_command_line_makes_a_file_over_a_real_server_and_goes_on_with_it(flags, capsys):
    model = Model()

    def answer(instruction, text):
        known = instruction in (WRITE, HARDEN, ANSWER)
        return model.reply(instruction, text) if known else "yes"

    def run(count):
        others = ["--verifier", server, "--answerer", server]
        module.main([*flags, "--llm", server, *others, "--k", "4", "--count", count])
        return capsys.readouterr().out

    with chat_server(answer) as server:
        shown = run("3")
        assert "out.jsonl: 3 of 3 questions: easy 3" in shown and "this run: made 3" in shown
        assert "5 of 5 questions" in run("5")
        before = model.written
        assert "this run: made 0, requests 0" in run("5") and model.written == before
    questions = load_questions("out.jsonl")
    assert len({question.id for question in questions}) == 5
    assert all("right" in question_text(question) for question in questions)


@pytest.mark.parametrize(
    "change, expected",
    [
        (["--llm", ""], "--llm is missing"),
        (["--count", "0"], "--count 0"),
        (["--data", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--lmm", "x"], "unknown flag --lmm"),
        (["--timeout", "1"], "no answer"),
    ],
)
def test_flags_that_cannot_be_are_one_line(flags, change, expected):
    assert expected in message(module.main, [*flags, *change])
