"""synthesize.py: drafts in the exact form, votes that a habit cannot win, harder examples, and a
file that goes on.
"""

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from data import Question, load_questions
from errors import InputError
from lab import synthesize as module
from lab.synthesize import (
    ANSWER,
    WRITE,
    Draft,
    Rejected,
    Settings,
    agreed,
    grade_drafts,
    parse_draft,
    pick_examples,
    reordered,
    synthesize,
    write_request,
)
from prompts import question_text

SLICES = Path(__file__).resolve().parents[2] / "shared" / "data"
GIVEN = [
    Question(
        f"g{i}", f"Which given thing is number {i}?", ["B"], "choice", ("red", f"right{i}", "blue")
    )
    for i in range(6)
]


def written(name="one", options=("wrong a", "right", "wrong b"), letter="B"):
    lines = "\n".join(f"{chr(65 + i)}. {option}" for i, option in enumerate(options))
    return f"Question: Which thing is called {name}?\n{lines}\nAnswer: {letter}"


class Model:
    """Writes question 0, 1, 2, ...; answers by finding "right" among the options, or as `vote(text,
    number)` says.
    """

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
        return (
            "The correct answer is:"
            f" {next(line[0] for line in text.splitlines() if line.endswith('. right'))}"
        )


def message(call, *args, **kwargs):
    with pytest.raises(InputError) as error:
        call(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


# ----------------------------------------------------------------------------------------- the form


def test_a_draft_in_the_exact_form_is_read():
    assert parse_draft(written()) == Draft(
        "Which thing is called one?", ("wrong a", "right", "wrong b"), 1
    )


def test_blank_lines_indents_and_a_question_of_several_lines_are_no_fault():
    reply = "\n Question: A long story.\nWhich thing is it?\n\nA. x\n  B. y\nC. z\n\nAnswer: C\n"
    assert parse_draft(reply) == Draft("A long story. Which thing is it?", ("x", "y", "z"), 2)


@pytest.mark.parametrize(
    "reply, reason",
    [
        (None, "no reply"),
        (" \n", "no reply"),
        (
            "Sure! " + written(),
            "not one question and one answer",
        ),  # the question does not begin a line
        ("Sure!\n" + written(), "another form"),
        (written() + "\n" + written(), "not one question and one answer"),
        (written() + "\nAnswer: A", "not one question and one answer"),
        (written() + "\nB is right because.", "another form"),
        (written(letter="B and C"), "another form"),
        (written(letter="b"), "another form"),
        (written(letter="D"), "answer letter"),
        (written().replace("C. ", "D. "), "option letters"),
        (written().replace("B. ", "A. "), "option letters"),
        (written(options=("a", "b"), letter="A"), "option letters"),
        (written(options=[f"o{i}" for i in range(11)]), "option letters"),
        (written(options=("Right", "right ", "b")), "options alike"),
        (
            written(options=("the right", "right", "b")),
            "options alike",
        ),  # an article is no difference
        (written(options=("x " * 41, "right", "b")), "length"),
        ("Question: Who?\nA. x\nB. y\nC. z\nAnswer: A", "length"),
        (written("word " * 200), "length"),
    ],
)
def test_a_draft_in_any_other_form_is_dropped_under_its_reason(reply, reason):
    with pytest.raises(Rejected) as rejected:
        parse_draft(reply)
    assert str(rejected.value) == reason


def test_signs_alone_tell_options_apart():
    assert parse_draft(written(options=("+", "-", "*"))).options == (
        "+",
        "-",
        "*",
    )  # normalised, all three are empty


def test_the_number_of_options_may_be_fixed():
    assert len(parse_draft(written(), options=3).options) == 3
    with pytest.raises(Rejected, match="option letters"):
        parse_draft(written(), options=4)


# ---------------------------------------------------------------------------------------- the votes

DRAFT = Draft("Which thing is it?", ("right", "b", "c", "d"), 0)


def test_the_right_option_moves_on_by_a_letter_from_turn_to_turn():
    shown = [reordered(DRAFT, turn, seed=0) for turn in range(4)]
    letters = [question.answers[0] for question in shown]
    assert sorted(letters) == ["A", "B", "C", "D"]
    assert all(
        q.options[ord(q.answers[0]) - 65] == "right"
        and sorted(q.options) == ["b", "c", "d", "right"]
        for q in shown
    )
    assert ord(letters[1]) - ord(letters[0]) in (1, -3)


def test_a_model_that_likes_a_letter_wins_at_most_one_of_three_votes():
    (votes,) = grade_drafts(
        Model(vote=lambda text, number: "The correct answer is: B"), [DRAFT], range(3), 0, Counter()
    )
    assert sum(votes) <= 1 and not agreed(votes, "majority")


def test_a_model_that_knows_wins_all_and_one_without_a_word_none_and_that_is_counted():
    result = Counter()
    assert (
        grade_drafts(Model(), [DRAFT], range(3), 0, result) == [[True] * 3]
        and result["unreadable"] == 0
    )
    assert grade_drafts(
        Model(vote=lambda text, number: [None, "", "I do not know"][number]),
        [DRAFT],
        range(3),
        0,
        result,
    ) == [[False] * 3]
    assert result["unreadable"] == 3


@pytest.mark.parametrize(
    "votes, by_all, by_majority",
    [
        ([True, True, True], True, True),
        ([True, True, False], False, True),
        ([True, False, False], False, False),
        ([True, False], False, False),  # half is no majority
    ],
)
def test_all_or_most_votes_must_agree(votes, by_all, by_majority):
    assert (agreed(votes, "all"), agreed(votes, "majority")) == (by_all, by_majority)


def test_a_draft_that_its_writer_does_not_answer_so_is_dropped(tmp_path):
    model = Model(
        write=lambda number: written(str(number), letter="A" if number else "B")
    )  # A, "wrong a", but for the first
    result = synthesize(GIVEN, model, 3, tmp_path / "out.jsonl", max_attempts=4, quiet=True)
    assert (result["made"], result["votes"], result["attempts"]) == (1, 3, 4)


# ----------------------------------------------------------------------------------- the difficulty


@pytest.mark.parametrize(
    "right, level",
    [(10, "easy"), (8, "easy"), (7, "medium"), (5, "medium"), (4, "hard"), (2, "hard")],
)
def test_the_level_is_the_mean_score_of_k_answers_of_the_other_model(tmp_path, right, level):
    def answer(text, number):
        wanted = ". right" if number % 10 < right else ". wrong a"
        return next(line[0] for line in text.splitlines() if line.endswith(wanted))

    answerer = Model(vote=answer)
    synthesize(
        GIVEN, Model(), 1, tmp_path / "out.jsonl", Settings(k=10), answerer, at_once=1, quiet=True
    )
    (question,) = load_questions(tmp_path / "out.jsonl")
    assert question.level == level and answerer.answered == 10 and answerer.written == 0


def test_what_hardly_anybody_answers_so_is_dropped_as_too_hard(tmp_path):
    answerer = Model(
        vote=lambda text, number: next(
            line[0] for line in text.splitlines() if line.endswith(". wrong a")
        )
    )
    result = synthesize(
        GIVEN, Model(), 1, tmp_path / "out.jsonl", answerer=answerer, max_attempts=3, quiet=True
    )
    assert result["too hard"] == 3 and not (tmp_path / "out.jsonl").exists()


def test_the_answers_that_set_the_difficulty_are_no_requests_of_the_votes(tmp_path):
    model = Model()  # writer and answerer in one
    synthesize(GIVEN, model, 1, tmp_path / "out.jsonl", Settings(k=3), at_once=1, quiet=True)
    _, votes, answers = model.batches
    shown = [text for _, text in votes + answers]
    assert len(votes) == len(answers) == 3 and len({text.split("\n")[0] for text in shown}) == 1
    # 3 options have 6 orders: the six requests hold more orders than the votes' three
    assert len(set(shown)) > 3


# ------------------------------------------------------------------------------------- the examples


def test_a_request_shows_the_examples_in_the_form_that_a_draft_must_have():
    instruction, text = write_request(GIVEN[:2])
    assert instruction == WRITE
    first, second = text.split("\n\n")
    assert (
        first == "Question: Which given thing is number 0?\nA. red\nB. right0\nC. blue\nAnswer: B"
    )
    assert parse_draft(second).options == ("red", "right1", "blue")


def test_examples_are_drawn_per_attempt_and_the_same_again():
    picked = [[q.id for q in pick_examples(GIVEN, [], 3, seed=0, attempt=a)] for a in range(8)]
    assert picked == [
        [q.id for q in pick_examples(GIVEN, [], 3, seed=0, attempt=a)] for a in range(8)
    ]
    assert len({tuple(ids) for ids in picked}) > 4 and all(len(set(ids)) == 3 for ids in picked)
    assert (
        picked[0] != [q.id for q in pick_examples(GIVEN, [], 3, seed=1, attempt=0)]
        or picked[1] != picked[0]
    )


def test_hard_questions_come_first_and_one_given_one_always_stays():
    hard = [Question(f"h{i}", "?", ["A"], "choice", ("x", "y", "z")) for i in range(5)]
    for attempt in range(9):
        kinds = Counter(q.id[0] for q in pick_examples(GIVEN, hard, 3, 0, attempt))
        assert kinds == {"h": 2, "g": 1}
    assert Counter(q.id[0] for q in pick_examples(GIVEN, hard[:1], 3, 0, 0)) == {"h": 1, "g": 2}
    assert Counter(q.id[0] for q in pick_examples(GIVEN, hard, 1, 0, 0)) == {"g": 1}


def test_what_was_found_hard_is_an_example_of_the_next_round(tmp_path):
    def answer(text, number):  # right three times of ten: hard
        return next(
            line[0]
            for line in text.splitlines()
            if line.endswith(". right" if number % 10 < 3 else ". wrong a")
        )

    model = Model()
    synthesize(
        GIVEN,
        model,
        4,
        tmp_path / "out.jsonl",
        Settings(k=10),
        Model(vote=answer),
        at_once=2,
        quiet=True,
    )
    rounds = [
        [text for instruction, text in batch] for batch in model.batches if batch[0][0] == WRITE
    ]
    assert len(rounds) == 2 and all("is called" not in text for text in rounds[0])
    assert all(
        text.count("is called") == 2 and text.count("Which given thing") == 1 for text in rounds[1]
    )


def test_only_choice_questions_with_one_readable_answer_are_examples():
    open_question, two = (
        Question("1", "?", ["x"]),
        Question("2", "?", ["A", "B"], "choice", ("x", "y", "z")),
    )
    assert module.examples_among([open_question, two, GIVEN[0]]) == [GIVEN[0]]
    assert "no multiple-choice question" in message(module.examples_among, [open_question, two])


# ----------------------------------------------------------------------------------------- the file


def test_questions_are_stored_in_our_own_layout_with_the_right_option_under_its_letter(tmp_path):
    synthesize(GIVEN, Model(), 12, tmp_path / "out.jsonl", quiet=True)
    questions = load_questions(tmp_path / "out.jsonl")
    assert [q.id for q in questions] == [f"synthetic-0-{i}" for i in range(12)]
    for question in questions:
        assert question.options[ord(question.answers[0]) - 65] == "right"
        assert (question.task, question.source, question.level) == ("choice", "synthetic", "easy")
    assert len({q.answers[0] for q in questions}) > 1  # the writer always has it at B


def test_no_question_is_made_twice_nor_one_of_those_given(tmp_path):
    replies = [written("a"), written("a "), written("b"), GIVEN[0].question]
    replies[3] = f"Question: {GIVEN[0].question}\nA. x\nB. right\nC. z\nAnswer: B"
    result = synthesize(
        GIVEN,
        Model(write=lambda n: replies[n]),
        9,
        tmp_path / "out.jsonl",
        max_attempts=4,
        quiet=True,
    )
    assert (result["made"], result["asked before"]) == (2, 2)


def test_attempts_are_bounded_and_every_drop_is_counted(tmp_path):
    model = Model(
        write=lambda number: [None, "no", written(letter="Z"), written("x", ("a", "a", "b"))][
            number % 4
        ]
    )
    result = synthesize(GIVEN, model, 5, tmp_path / "out.jsonl", max_attempts=12, quiet=True)
    assert model.written == result["attempts"] == 12 and result["made"] == 0
    counted = {reason: n for reason, n in result.items() if n and reason != "attempts"}
    assert counted == {
        "no reply": 3,
        "not one question and one answer": 3,
        "answer letter": 3,
        "options alike": 3,
    }
    shown = module.report(result, 5, 0)
    assert (
        "0 of 5 questions; this run made 0 in 12 attempts" in shown and "options alike 3" in shown
    )


def test_without_a_bound_ten_attempts_for_each_question_are_made(tmp_path):
    model = Model(write=lambda number: "no")
    assert (
        synthesize(GIVEN, model, 3, tmp_path / "out.jsonl", quiet=True)["attempts"]
        == 30
        == model.written
    )


def test_an_interrupted_run_goes_on_with_the_number_still_missing(tmp_path):
    path = tmp_path / "out.jsonl"

    def interrupted(number):
        if number == 5:
            raise KeyboardInterrupt
        return written(str(number))

    with pytest.raises(KeyboardInterrupt):
        synthesize(GIVEN, Model(write=interrupted), 8, path, at_once=2, quiet=True)
    with open(path, "a") as file:
        file.write('{"id": "synthetic-0-9", "ques')  # cut short in the middle of a line
    result = synthesize(
        GIVEN,
        Model(write=lambda number: written(f"later {number}")),
        8,
        path,
        at_once=2,
        quiet=True,
    )
    assert result["made"] == 4 and len(load_questions(path)) == 8
    assert [q.id for q in load_questions(path)] == [f"synthetic-0-{i}" for i in range(8)]


def test_a_full_file_asks_nobody(tmp_path):
    synthesize(GIVEN, Model(), 2, tmp_path / "out.jsonl", quiet=True)
    idle = Model()
    assert (
        synthesize(GIVEN, idle, 2, tmp_path / "out.jsonl", quiet=True)["attempts"] == 0
        and not idle.batches
    )


def test_a_file_of_other_questions_is_not_appended_to(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text(json.dumps({"id": "q1", "question": "Who?", "answers": ["Ana"]}) + "\n")
    assert "holds other questions" in message(synthesize, GIVEN, Model(), 2, path, quiet=True)


# ------------------------------------------------------------------------------- the real interface


@pytest.fixture
def server():
    """An OpenAI-compatible server on localhost that writes numbered questions and knows the right
    option.
    """
    model = Model()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            instruction, text = (m["content"] for m in payload["messages"])
            with lock:
                reply = model.reply(instruction, text) if instruction in (WRITE, ANSWER) else "yes"
            body = json.dumps({"choices": [{"message": {"content": reply}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    lock = threading.Lock()
    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}/v1#writer", model
    running.shutdown()
    running.server_close()


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "given.jsonl"
    rows = [
        {
            "id": q.id,
            "question": q.question,
            "answers": q.answers,
            "task": "choice",
            "options": q.options,
        }
        for q in GIVEN
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_command_line_makes_a_file_over_a_real_server_and_goes_on_with_it(
    tmp_path, server, data, capsys
):
    spec, model = server
    flags = ["--llm", spec, "--data", data, "--out", str(tmp_path / "out.jsonl"), "--k", "4"]
    module.main([*flags, "--count", "3"])
    assert (
        "3 of 3 questions; this run made 3" in (shown := capsys.readouterr().out)
        and "easy 3" in shown
    )
    module.main([*flags, "--count", "5"])
    assert "5 of 5 questions; this run made 2" in capsys.readouterr().out
    questions = load_questions(tmp_path / "out.jsonl")
    assert len({q.id for q in questions}) == 5 and all(
        "right" in question_text(q) for q in questions
    )
    written_before = model.written
    module.main([*flags, "--count", "5"])
    assert (
        "this run made 0 in 0 attempts" in capsys.readouterr().out
        and model.written == written_before
    )


def test_real_questions_serve_as_examples(tmp_path):
    path = SLICES / "mcq" / "mmlupro_80.jsonl"
    if not path.exists():
        pytest.skip(f"the real slice {path} is not here")
    given = load_questions(path)
    model = Model()
    synthesize(given, model, 2, tmp_path / "out.jsonl", quiet=True)
    shown = model.batches[0][0][1]
    assert shown.count("Question: ") == 3 == shown.count("\nAnswer: ")


@pytest.mark.parametrize(
    "change, expected",
    [
        (["--llm", ""], "--llm is missing"),
        (["--count", "0"], "--count 0"),
        (["--options", "2"], "--options 2"),
        (["--agree", "some"], "--agree some"),
        (["--data", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--lmm", "x"], "unknown flag --lmm"),
        (["--llm", "http://127.0.0.1:9/v1#m", "--llm_timeout", "1"], "no answer"),
    ],
)
def test_flags_that_cannot_be_are_one_line(tmp_path, data, change, expected):
    flags = [
        "--llm",
        "http://127.0.0.1:9/v1#m",
        "--data",
        data,
        "--out",
        str(tmp_path / "out.jsonl"),
    ]
    assert expected in message(module.main, [*flags, *change])


def test_python_synthesize_shows_drafts_and_why_they_are_dropped(capsys):
    module.main([])
    shown = capsys.readouterr().out
    assert (
        "kept:   What is the capital of Norland?" in shown
        and "options alike 1" in shown
        and "votes 1" in shown
    )
