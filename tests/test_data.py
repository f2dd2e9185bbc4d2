"""data.py: every layout, on records small enough to check by eye and on real slices; every bad file
in one line.
"""

import csv
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data import (
    Document,
    Question,
    corpus_from_questions,
    first_layout,
    load_attempts,
    load_corpus,
    load_datasets,
    load_questions,
    save_questions,
)
from errors import InputError
from formats.layouts import CORPUS_LAYOUTS, LAYOUTS, detect
from formats.records import append_jsonl, finished_records, short

ROOT = Path(__file__).resolve().parents[1]
SLICES = ROOT.parent / "shared" / "data"

def detect_layout(record):
    return detect(record, LAYOUTS)


OWN = {"id": "q1", "question": "Who?", "answers": ["Ana"]}
R1 = {"idx": 7, "question": "Who?", "answer": "Ana"}
FLASHRAG = {"id": "test_0", "question": "Who?", "golden_answers": ["Ana", "Ana Bell"]}
HOTPOT = {
    "_id": "h1",
    "question": "Which?",
    "answer": "yes",
    "type": "comparison",
    "level": "hard",
    "supporting_facts": [["C", 0], ["A", 1], ["C", 2]],
    "context": [["A", ["One.", " Two."]], ["B", ["Three."]], ["C", ["Four."]]],
}
HUB = {
    **{k: v for k, v in HOTPOT.items() if k != "_id"},
    "id": "h1",
    "supporting_facts": {"title": ["C", "A", "C"], "sent_id": [0, 1, 2]},
    "context": {"title": ["A", "B", "C"], "sentences": [["One.", " Two."], ["Three."], ["Four."]]},
}

MUSIQUE = {
    "id": "2hop__1_2",
    "question": "Where?",
    "answer": "Kelmouth",
    "answer_aliases": ["Kel", "Kelmouth", ""],
    "answerable": True,
    "paragraphs": [
        {"idx": 0, "title": "A", "paragraph_text": "One.", "is_supporting": False},
        {"idx": 1, "title": "B", "paragraph_text": "Two.", "is_supporting": True},
        {"idx": 2, "title": "B", "paragraph_text": "Three.", "is_supporting": True},
    ],
    "question_decomposition": [
        {"id": 1, "paragraph_support_idx": 1},
        {"id": 2, "paragraph_support_idx": 2},
    ],
}
MMLU = {
    "question_id": 70,
    "question": "Which?",
    "options": ["B", "red"],
    "answer": "B",
    "answer_index": 1,
    "category": "law",
}
MEDQA = {
    "question": "Which?",
    "options": {"B": "green", "A": "red"},
    "answer": "green",
    "answer_idx": "B",
}
MATH = {
    "problem": "1 + 1?",
    "solution": "It is \\boxed{2}.",
    "answer": "2",
    "level": 5,
    "unique_id": "test/algebra/1.json",
}
MINERVA = {"problem": "1/2?", "solution": "First \\boxed{1}, then \\boxed{\\frac{1}{2}}.", "idx": 4}
GSM8K = {"question": "How much?", "answer": "9 * 2 = <<9*2=18>>18 #### no\n#### 18"}
VERL = {
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "Answer it. Question: Who?\n"}],
    "reward_model": {"ground_truth": {"target": ["Ana", "Ana Bell"]}, "style": "rule"},
    "extra_info": {"index": 3, "split": "train"},
}
PLAIN = {"id": "p1", "question": "Who?", "answer": "Ana", "source": "x", "level": "easy"}
ROLLOUTS = {**R1, "pred_anses": ["", " Ana "]}


def without(record, *names):
    return {k: v for k, v in record.items() if k not in names}


@pytest.fixture
def write(tmp_path):
    def write(*records, name="questions.jsonl"):
        """Records as JSON lines; str and bytes are written as they are."""
        lines = [
            r if isinstance(r, bytes) else (r if isinstance(r, str) else json.dumps(r)).encode()
            for r in records
        ]
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\n".join(lines))
        return path

    return write


def real(name):
    path = SLICES / name
    if not path.exists():
        pytest.skip(f"the real slice {path} is not here")
    return path


def message(call, *args, **kwargs) -> str:
    """The InputError's text, which must be one line."""
    with pytest.raises(InputError) as caught:
        call(*args, **kwargs)
    text = str(caught.value)
    assert text and "\n" not in text
    return text


# ------------------------------------------------------------------------------------------ layouts


@pytest.mark.parametrize(
    ("record", "layout"),
    [
        (OWN, "own"),
        (R1, "r1_searcher"),
        ({**R1, "gen_text_store": ""}, "r1_searcher"),
        ({**R1, "pred_anses": ["", "Ana"]}, "r1_searcher"),
        ({**R1, "source": "math", "level": "hard", "subject": "Algebra"}, "r1_searcher"),
        (FLASHRAG, "flashrag"),
        (HOTPOT, "hotpotqa"),
        (HUB, "hotpotqa_hub"),
        ({**HOTPOT, "evidences": [["A", "x", "B"]]}, "2wiki"),
        ({**HUB, "evidences": []}, "2wiki"),
        (MUSIQUE, "musique"),
        (MMLU, "mmlu_pro"),
        (MEDQA, "medqa"),
        ({**MEDQA, "options": ["red", "green"], "meta_info": "step1"}, "medqa"),
        (MATH, "math"),
        ({**without(MATH, "problem"), "question": "1 + 1?", "id": 0}, "math"),
        (MINERVA, "math"),
        (GSM8K, "gsm8k"),
        (VERL, "verl"),
        (PLAIN, "plain"),
        (without(PLAIN, "id", "source", "level"), "plain"),
        ({**OWN, "solution": "so"}, "own"),
    ],
)
def test_each_layout_is_recognised_from_one_record(record, layout):
    assert detect_layout(record) == layout


@pytest.mark.parametrize(
    "record", [OWN, R1, FLASHRAG, HOTPOT, HUB, MUSIQUE, MMLU, MEDQA, MATH, GSM8K]
)
def test_a_record_without_its_question_is_still_recognised(record):
    assert detect_layout(without(record, "question")) == detect_layout(record)


def test_an_unknown_layout_lists_the_fields_found_and_every_known_layout(write):
    text = message(load_questions, write({"prompt": "Who?", "gold": "Ana"}))
    assert "questions.jsonl, line 1: unknown layout" in text and "'prompt', 'gold'" in text
    assert all(name in text for name in LAYOUTS)


def test_our_own_layout_needs_only_id_question_and_answers(write):
    assert load_questions(write(OWN)) == [Question("q1", "Who?", ["Ana"])]


def test_what_is_saved_is_what_is_loaded(tmp_path):
    questions = [
        Question("1", "Wer ist Ödön?", ["a", "b"], source="one_hop", level="easy"),
        Question(
            "2",
            "Which?",
            ["B"],
            "choice",
            ("red", "green"),
            (Document("9", "T", "x"), Document("4", "", "y")),
            (2,),
        ),
    ]
    save_questions(tmp_path / "saved.jsonl", questions)
    assert load_questions(tmp_path / "saved.jsonl") == questions
    second = json.loads((tmp_path / "saved.jsonl").read_text(encoding="utf-8").splitlines()[1])
    assert second["references"][0] == {"id": "9", "title": "T", "text": "x"} and second[
        "supporting"
    ] == [2]


def test_r1_searchers_idx_becomes_a_string_id_and_its_answer_a_list(write):
    (question,) = load_questions(write(R1))
    assert (question.id, question.answers, question.task, question.kind) == (
        "7",
        ["Ana"],
        "qa",
        "qa",
    )


def test_only_the_source_math_makes_the_task_math(write):
    rows = [
        {**R1, "idx": i, "source": source, "level": 3} for i, source in enumerate(["math", "rag"])
    ]
    questions = load_questions(write(*rows))
    assert [(q.task, q.source, q.level) for q in questions] == [
        ("math", "math", "3"),
        ("qa", "rag", "3"),
    ]


def test_flashrag_keeps_every_golden_answer(write):
    assert load_questions(write(FLASHRAG))[0].answers == ["Ana", "Ana Bell"]


def test_flashrag_choices_turn_an_index_from_zero_into_a_letter(write):
    (question,) = load_questions(
        write({**FLASHRAG, "choices": ["red", "green", "blue"], "golden_answers": [2]})
    )
    assert (question.task, question.options, question.answers) == (
        "choice",
        ("red", "green", "blue"),
        ["C"],
    )
    text = message(load_questions, write({**FLASHRAG, "choices": ["red"], "golden_answers": [1]}))
    assert "line 1: field 'golden_answers': 1 is none of the 1 options" in text


@pytest.mark.parametrize("record", [HOTPOT, HUB])
def test_supporting_facts_become_reference_numbers_from_one_each_once(write, record):
    (question,) = load_questions(write(record))
    assert question.supporting == (1, 3)  # C is paragraph 3 and named twice, A is paragraph 1
    assert [d.title for d in question.references] == ["A", "B", "C"]
    assert question.references[0].text == "One. Two."
    assert (question.id, question.source, question.level) == ("h1", "hotpotqa_comparison", "hard")


def test_of_two_paragraphs_with_one_title_the_first_is_the_gold_one(write):
    record = {**HOTPOT, "context": [*HOTPOT["context"], ["C", ["Five."]]]}
    assert load_questions(write(record))[0].supporting == (1, 3)


@pytest.mark.parametrize("facts", [[["C", 0], ["Z", 1]], [["Z", 0]]])
def test_where_a_gold_title_has_no_paragraph_no_number_is_given_and_the_count_is_told(
    write, capsys, facts
):
    path = write(
        HOTPOT, {**HOTPOT, "_id": "h2", "supporting_facts": facts}
    )  # as in HotpotQA's fullwiki files
    assert [q.supporting for q in load_questions(path)] == [(1, 3), ()]
    assert "of 2 questions with paragraphs, 1 have no gold paragraph" in capsys.readouterr().err


def test_hotpotqa_without_a_type_is_grouped_as_hotpotqa(write):
    assert load_questions(write(without(HOTPOT, "type")))[0].kind == "hotpotqa"


def test_2wiki_is_hotpotqas_layout_with_sentences_that_bring_no_blank(write):
    record = {
        **HOTPOT,
        "evidences": [],
        "type": "inference",
        "context": [["A", ["One.", "Two."]], ["C", ["Four."]]],
    }
    (question,) = load_questions(write(record))
    assert question.references[0].text == "One. Two."
    assert question.source == "2wiki_inference"


def test_musiques_gold_paragraphs_are_numbered_by_place_and_aliases_count_as_right(write):
    (question,) = load_questions(write(MUSIQUE))
    assert question.supporting == (
        2,
        3,
    )  # idx 1 and 2 count from 0; both have the title B, so titles would not tell them apart
    assert question.answers == ["Kelmouth", "Kel"] and question.source == "musique_2hop"
    assert [d.text for d in question.references] == ["One.", "Two.", "Three."]


def test_paragraphs_of_title_and_text_are_references_and_none_is_gold(write, capsys):
    record = {
        "id": "x1",
        "question": "Where?",
        "answer": "Kelmouth",
        "paragraphs": [{"title": "A", "text": "One."}],
        "cot": "",
    }
    (question,) = load_questions(write(record))
    assert question == Question(
        "x1", "Where?", ["Kelmouth"], references=(Document("x1:1", "A", "One."),)
    )
    assert capsys.readouterr().err == ""


def test_an_unanswerable_record_is_an_error_and_skip_bad_leaves_it_out(write, capsys):
    path = write(MUSIQUE, {**MUSIQUE, "answerable": False})  # MuSiQue-Full gives both one id
    assert "line 2: question 2hop__1_2 has no answer: field 'answerable' is false" in message(
        load_questions, path
    )
    assert (
        len(load_questions(path, skip_bad=True)) == 1
        and "1 of 2 records skipped" in capsys.readouterr().err
    )


def test_mmlu_pro_reads_a_letter_as_a_letter_even_where_an_option_reads_like_it(write):
    (question,) = load_questions(write(MMLU))
    assert (question.id, question.task, question.answers, question.source) == (
        "70",
        "choice",
        ["B"],
        "law",
    )


@pytest.mark.parametrize("options", [MEDQA["options"], ["red", "green"]])
def test_medqas_options_stand_under_letters_or_in_a_list_and_its_id_is_the_line(write, options):
    (question,) = load_questions(write({**MEDQA, "options": options}))
    assert (question.id, question.options, question.answers, question.task) == (
        "1",
        ("red", "green"),
        ["B"],
        "choice",
    )


def test_a_math_answer_stands_beside_the_solution_or_in_its_last_box(write):
    assert [(q.id, q.answers, q.task, q.level) for q in load_questions(write(MATH))] == [
        ("test/algebra/1.json", ["2"], "math", "5")
    ]
    (question,) = load_questions(write(MINERVA))
    assert (question.id, question.answers, question.task) == ("4", [r"\frac{1}{2}"], "math")


def test_gsm8ks_answer_stands_behind_the_last_mark(write):
    assert [(q.id, q.answers, q.task) for q in load_questions(write(GSM8K))] == [
        ("1", ["18"], "math")
    ]


@pytest.mark.parametrize(
    "gold", [{"target": ["Ana", "Ana Bell"]}, ["Ana", "Ana Bell"], "Ana<|answer_split|>Ana Bell"]
)
def test_verl_records_give_the_question_behind_the_instruction_and_all_answers(write, gold):
    (question,) = load_questions(write({**VERL, "reward_model": {"ground_truth": gold}}))
    assert (question.id, question.question, question.answers, question.source) == (
        "nq:3",
        "Who?",
        ["Ana", "Ana Bell"],
        "nq",
    )


def test_a_summary_is_a_task_of_our_own_layout(write):
    record = {**OWN, "task": "summary", "references": [{"id": "1", "text": "x"}]}
    assert load_questions(write(record))[0].task == "summary"


def test_published_rollout_answers_come_with_their_question(write):
    (attempts,) = load_attempts(write(ROLLOUTS))
    assert (attempts.id, attempts.question.answers, attempts.predictions) == (
        "7",
        ["Ana"],
        ["", " Ana "],
    )
    assert "'pred_anses' is empty" in message(load_attempts, write({**R1, "pred_anses": []}))
    assert "rollouts (idx, question, answer, pred_anses[])" in message(load_attempts, write(R1))


@pytest.mark.parametrize(
    ("lines", "ids"),
    [
        (
            ["Who came?\tAna", "Who left?\t['Bo', \"Bo's\"]", 'When?\t"[""1"", ""2""]"'],
            ["1", "2", "3"],
        ),
        (
            [
                "Question\tAnswer",
                "Who came?\tAna",
                "Who left?\t['Bo', \"Bo's\"]",
                'When?\t["1", "2"]',
            ],
            ["2", "3", "4"],
        ),
        (
            [
                "ID\tquestion\tanswers\tsource",
                "a\tWho came?\tAna\tx",
                "b\tWho left?\t['Bo', \"Bo's\"]\tx",
                'c\tWhen?\t["1", "2"]\tx',
            ],
            ["a", "b", "c"],
        ),
    ],
)
def test_a_table_of_questions_is_read_with_and_without_a_header(write, lines, ids):
    questions = load_questions(write(*lines, name="q.tsv"))
    assert [q.answers for q in questions] == [["Ana"], ["Bo", "Bo's"], ["1", "2"]] and [
        q.id for q in questions
    ] == ids
    assert load_questions(write(*lines, name="q.txt")) == questions


def test_an_interval_in_brackets_is_one_answer(write):
    answers = [
        q.answers
        for q in load_questions(
            write("Which x?\t[1, 2)", "Which y?\t[1, 2]", "Which z?\t[]", name="q.tsv")
        )
    ]
    assert answers == [["[1, 2)"], ["[1, 2]"], ["[]"]]


def test_a_table_of_passages_given_for_questions_is_an_error(write):
    assert "line 1: field 'question': '5' is a number" in message(
        load_questions, write("5\tA passage.", name="c.tsv")
    )


def test_a_table_whose_header_lacks_the_answers_is_an_error(write):
    path = write("id\tquestion", "1\tWho?", name="q.tsv")
    assert "line 2: question 1 has no answer" in message(load_questions, path)


def test_gzipped_files_are_read_as_they_are_and_a_broken_one_is_one_line(tmp_path):
    path = tmp_path / "nq.jsonl.gz"
    path.write_bytes(
        packed := gzip.compress(
            "\n".join(json.dumps({**OWN, "id": str(i)}) for i in range(1000)).encode()
        )
    )
    assert len(load_questions(path)) == 1000 and list(load_datasets(path)) == ["nq"]
    (tmp_path / "c.tsv.gz").write_bytes(gzip.compress(b"5\tA passage."))
    assert load_corpus(tmp_path / "c.tsv.gz") == [Document("5", "", "A passage.")]
    for broken in (
        packed[: len(packed) // 2],
        packed[:20] + b"xx" + packed[22:],
        packed[:-8] + b"12345678",
    ):
        path.write_bytes(broken)
        assert "nq.jsonl.gz: a broken gzip file" in message(load_questions, path)


def test_hotpotqa_from_the_hub_as_parquet_is_what_it_is_as_json(write, tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `data`")
    from pyarrow import parquet

    parquet.write_table(
        pyarrow.Table.from_pylist([HUB, {**HUB, "id": "h2"}]), tmp_path / "hub.parquet"
    )
    assert load_questions(tmp_path / "hub.parquet") == load_questions(
        write(HUB, {**HUB, "id": "h2"})
    )
    passages = [{"title": "A", "text": "One."}, {"title": "B", "text": "Two."}]
    parquet.write_table(pyarrow.Table.from_pylist(passages), tmp_path / "c.parquet")
    assert load_corpus(tmp_path / "c.parquet") == load_corpus(write(*passages))
    (tmp_path / "half.parquet").write_bytes((tmp_path / "c.parquet").read_bytes()[:200])
    assert "half.parquet: not a readable parquet file" in message(
        load_corpus, tmp_path / "half.parquet"
    )
    parquet.write_table(
        pyarrow.table({"id": [1.5], "question": ["Who?"], "answers": [["Ana"]]}),
        tmp_path / "bad.parquet",
    )
    assert "record 1: field 'id': expected a string or a whole number" in message(
        load_questions, tmp_path / "bad.parquet"
    )


def test_a_json_list_is_read_like_json_lines(write):
    assert (
        load_questions(
            write(json.dumps([HOTPOT, {**HOTPOT, "_id": "h2"}], indent=1), name="dev.json")
        )[1].id
        == "h2"
    )


def test_blank_lines_a_byte_order_mark_and_line_separators_inside_a_text_do_no_harm(write):
    path = write(
        b"\xef\xbb\xbf" + json.dumps(OWN).encode(),
        "",
        '{"id": "q2", "question": "a\u2028b", "answers": ["c"]}\r',
        "",
    )
    assert [q.question for q in load_questions(path)] == ["Who?", "a\u2028b"]


# ------------------------------------------------------------------------------------ bad questions

BAD_SECOND_LINES = {
    "bad JSON": ('{"id": "q2", "question"', ["not valid JSON", "column"]),
    "no object": ("[1]", ["expected an object", "a list"]),
    "no id": (without(OWN, "id"), ["'id' is missing"]),
    "id of a wrong type": ({**OWN, "id": 1.5}, ["'id'", "1.5"]),
    "true as an id": ({**OWN, "id": True}, ["'id'", "true/false"]),
    "no question": ({"id": "q2", "answers": ["a"]}, ["'question' is missing"]),
    "empty question": ({**OWN, "id": "q2", "question": " "}, ["'question' is empty"]),
    "question of a wrong type": (
        {**OWN, "id": "q2", "question": ["Who?"]},
        ["'question'", "expected a string", "a list"],
    ),
    "no answers": ({"id": "q2", "question": "Who?"}, ["question q2 has no answer", "'answers'"]),
    "empty list of answers": (
        {**OWN, "id": "q2", "answers": []},
        ["question q2 has no answer", "'answers'"],
    ),
    "an empty answer": (
        {**OWN, "id": "q2", "answers": ["Ana", ""]},
        ["question q2 has no answer", "'answers'"],
    ),
    "answers of a wrong type": (
        {**OWN, "id": "q2", "answers": "Ana"},
        ["'answers'", "expected a list", "a string"],
    ),
    "an answer of a wrong type": (
        {**OWN, "id": "q2", "answers": ["a", 18]},
        ["'answers', item 2", "expected a string", "18"],
    ),
    "unknown task": ({**OWN, "id": "q2", "task": "poem"}, ["'task'", "qa, math, choice"]),
    "choice without options": ({**OWN, "id": "q2", "task": "choice"}, ["'options' is missing"]),
    "supporting from zero": ({**OWN, "id": "q2", "supporting": [0]}, ["'supporting'", "0"]),
    "a reference without text": (
        {**OWN, "id": "q2", "references": [{"id": "1"}]},
        ["'references', item 1", "'text'"],
    ),
    "source of a wrong type": ({**OWN, "id": "q2", "source": ["x"]}, ["'source'", "a list"]),
    "duplicate id": (OWN, ["'id'", "duplicate", "'q1'", "line 1"]),
    "broken UTF-8": (
        b'{"id": "q2", "question": "caf\xe9", "answers": ["a"]}',
        ["byte 30", "UTF-8"],
    ),
}  # the \xe9 is byte 30: {"id": "q2", and a blank are 13, "question": a blank and a quote 13, caf 3


@pytest.mark.parametrize("case", BAD_SECOND_LINES)
def test_a_malformed_record_is_one_line_with_file_line_and_field(write, case):
    record, expected = BAD_SECOND_LINES[case]
    text = message(load_questions, write(OWN, record))
    assert "questions.jsonl, line 2: " in text and text.endswith(
        "correct it, or leave it out with --skip_bad"
    )
    for part in expected:
        assert part in text


@pytest.mark.parametrize("case", BAD_SECOND_LINES)
def test_skip_bad_leaves_the_malformed_record_out_and_says_so(write, capsys, case):
    path = write(OWN, BAD_SECOND_LINES[case][0], {**OWN, "id": "q3"})
    assert [q.id for q in load_questions(path, skip_bad=True)] == ["q1", "q3"]
    assert (
        "1 of 3 records skipped; the first: " in (error := capsys.readouterr().err)
        and "line 2" in error
    )


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({**R1, "answer": ""}, ["question 7 has no answer", "'answer'"]),
        (without(R1, "answer"), ["question 7 has no answer", "'answer'"]),
        ({**R1, "answer": 5}, ["'answer'", "expected a string", "5"]),
        (without(R1, "question"), ["'question' is missing"]),
        ({**FLASHRAG, "golden_answers": []}, ["question test_0 has no answer", "'golden_answers'"]),
        ({**HOTPOT, "supporting_facts": [["A"]]}, ["'supporting_facts', item 1"]),
        ({**HOTPOT, "context": "A"}, ["'context'", "expected a list"]),
        (
            {**HOTPOT, "context": [["A", "One."], ["C", []]]},
            ["'context', item 1", "list of sentences"],
        ),
        ({**HUB, "context": {"title": ["A", "C"], "sentences": [[]]}}, ["'context'", "one length"]),
        (without(HOTPOT, "answer"), ["question h1 has no answer", "'answer'"]),
        (without(MUSIQUE, "answer"), ["question 2hop__1_2 has no answer", "'answer'"]),
        (
            {**MUSIQUE, "paragraphs": [{"title": "A"}]},
            ["'paragraphs', item 1", "'paragraph_text' is missing"],
        ),
        (
            {**MUSIQUE, "question_decomposition": [{"paragraph_support_idx": 9}]},
            ["'question_decomposition', item 1", "idx 9"],
        ),
        ({**MMLU, "answer": "C"}, ["'answer'", "'C' is none of the 2 options"]),
        (
            {**MMLU, "answer_index": 0},
            ["'answer' and 'answer_index' name different options: B and A"],
        ),
        ({**MEDQA, "answer": "blue"}, ["'answer_idx'", "option B is 'green'", "'blue'"]),
        ({**MEDQA, "answer_idx": "E"}, ["'answer_idx'", "'E' is none of the 2 options"]),
        ({**MEDQA, "options": {"A": "red", "C": "green"}}, ["'options'", "A, B"]),
        ({**MINERVA, "solution": "no box"}, ["question 4 has no answer", "'solution'"]),
        ({**GSM8K, "answer": "so #### "}, ["question 1 has no answer", "####"]),
        ({**VERL, "prompt": [{"role": "system", "content": "x"}]}, ["'prompt'", "'user'"]),
        (
            {**VERL, "reward_model": {}},
            ["question nq:3 has no answer", "reward_model.ground_truth"],
        ),
    ],
)
def test_other_layouts_name_their_own_fields(write, record, expected):
    text = message(load_questions, write(record))
    assert "questions.jsonl, line 1: " in text
    for part in expected:
        assert part in text


# ------------------------------------- every field of every layout, missing and of every wrong type

VALUES = {
    "missing": None,
    "null": None,
    "empty": "",
    "blank": " ",
    "5": 5,
    "1.5": 1.5,
    "NaN": float("nan"),
    "true": True,
    "[]": [],
    "[1]": [1],
    "[[]]": [[]],
    "[null]": [None],
    "{}": {},
    "{a}": {"a": 1},
    "deep": json.loads("[" * 900 + "]" * 900),
}
TEXT, OPTIONAL, LEVEL = "", "missing null empty blank", "missing null empty blank 5"
ID, ID_OR_LINE, FLAG, IGNORED = "5", "missing 5", "missing null true", " ".join(VALUES)
RICH_OWN = {
    **OWN,
    "task": "choice",
    "options": ["a", "b"],
    "answers": ["A"],
    "source": "s",
    "level": "l",
    "references": [{"id": "1", "title": "T", "text": "x"}],
    "supporting": [1],
}
# layout -> (a good record, {field: the values that load all the same}); a field that is not named
# accepts none of them
FIELDS = {
    "own": (
        RICH_OWN,
        {
            "id": ID,
            "task": "missing null empty",
            "supporting": "missing null [] [1]",
            "source": OPTIONAL,
            "level": LEVEL,
        },
    ),
    "r1_searcher": (
        {**R1, "source": "rag", "level": "hard", "subject": "x"},
        {"idx": ID, "source": OPTIONAL, "level": LEVEL, "subject": IGNORED},
    ),
    "flashrag": (
        {**FLASHRAG, "choices": ["red", "green"], "golden_answers": [1], "metadata": {}},
        {"id": ID, "golden_answers": "[1]", "metadata": IGNORED},
    ),
    "hotpotqa": (
        HOTPOT,
        {"_id": ID, "type": OPTIONAL, "level": LEVEL, "supporting_facts": "[]", "context": "[]"},
    ),
    "hotpotqa_hub": (
        HUB,
        {"id": ID, "type": OPTIONAL, "level": LEVEL, "supporting_facts": "[]", "context": "[]"},
    ),
    "2wiki": (
        {**HOTPOT, "evidences": []},
        {
            "_id": ID,
            "type": OPTIONAL,
            "level": LEVEL,
            "supporting_facts": "[]",
            "context": "[]",
            "evidences": IGNORED,
        },
    ),
    "musique": (
        MUSIQUE,
        {
            "id": ID,
            "answer_aliases": "missing null []",
            "answerable": FLAG,  # its steps are for a check only
            "question_decomposition": "missing null [] [1] [[]] [null] deep",
        },
    ),
    "verl": (VERL, {"data_source": OPTIONAL, "extra_info": "missing null {} {a}"}),
    "medqa": (MEDQA, {}),
    "mmlu_pro": (MMLU, {"question_id": ID, "answer_index": "missing null", "category": OPTIONAL}),
    "math": (
        MATH,
        {
            "unique_id": ID_OR_LINE,
            "level": LEVEL,
            "answer": "missing null empty",
            "solution": IGNORED,
        },
    ),
    "gsm8k": (GSM8K, {}),
    "plain": (PLAIN, {"id": ID_OR_LINE, "source": OPTIONAL, "level": LEVEL}),
    "rollouts": (ROLLOUTS, {"idx": ID}),
    "contents": ({"id": "a", "contents": "T\nx"}, {"id": ID_OR_LINE}),
    "title_text": (
        {"id": "a", "title": "T", "text": "x"},
        {"id": ID_OR_LINE, "title": OPTIONAL, "text": OPTIONAL},
    ),
    "tsv_abstract": ({"id": "a", "passage": "Title: T Text: x"}, {"id": ID}),
    "tsv_chunk": ({"id": "a", "passage": "T   x"}, {"id": ID}),
    "tsv": ({"id": "a", "passage": "x"}, {"id": ID}),
}
# Two fields that must agree: the message names the other one.
OTHER_NAMES = {
    ("flashrag", "choices"): "golden_answers",
    ("musique", "paragraphs"): "question_decomposition",
}


def test_the_table_of_fields_has_every_layout():
    assert set(FIELDS) == set(LAYOUTS) | set(CORPUS_LAYOUTS) | {"rollouts"}


@pytest.mark.parametrize(
    ("layout", "name"), [(layout, name) for layout in FIELDS for name in FIELDS[layout][0]]
)
def test_a_field_that_is_missing_or_of_a_wrong_type_is_named_or_has_a_meaning(
    write, capsys, layout, name
):
    good, accepted = FIELDS[layout]
    load = (
        load_corpus
        if layout in CORPUS_LAYOUTS
        else load_attempts
        if layout == "rollouts"
        else load_questions
    )
    ids = [field for field in ("id", "_id", "idx", "question_id", "unique_id") if field in good]
    first = {**good, **dict.fromkeys(ids, "first")} | (
        {"extra_info": {"index": 9}} if layout == "verl" else {}
    )
    for shown, value in VALUES.items():
        path = write(first, without(good, name) if shown == "missing" else {**good, name: value})
        if shown in accepted.get(name, "").split():
            assert len(load(path)) == 2, shown
            continue
        text = message(load, path)
        assert "questions.jsonl, line 2: " in text and len(text) < 500, shown
        assert f"'{name}" in text or OTHER_NAMES.get((layout, name), "-") in text, (shown, text)
        capsys.readouterr()
        assert len(load(path, skip_bad=True)) == 1
        assert "1 of 2 records skipped; the first: " in capsys.readouterr().err


BAD_INSIDE = [
    (
        {**MUSIQUE, "paragraphs": [{"text": "One.", "is_supporting": "false"}]},
        "'paragraphs', item 1: field 'is_supporting'",
    ),
    (
        {**MUSIQUE, "paragraphs": [{"text": "One.", "title": 5}]},
        "'paragraphs', item 1: field 'title'",
    ),
    ({**MUSIQUE, "paragraphs": [{"text": None}]}, "'paragraphs', item 1: field 'text' is missing"),
    (
        {**MUSIQUE, "paragraphs": [{**p, "idx": [p["idx"]]} for p in MUSIQUE["paragraphs"]]},
        "no paragraph has the idx 1",
    ),
    (
        {**HUB, "supporting_facts": {"title": ["A", None], "sent_id": [0, 0]}},
        "'supporting_facts', item 2",
    ),
    ({**HUB, "context": {"title": ["A"], "sentences": ["One."]}}, "'context', item 1"),
    ({**VERL, "extra_info": {"index": [3]}}, "'extra_info.index'"),
    (
        {**VERL, "reward_model": {"ground_truth": {"target": [1]}}},
        "'reward_model.ground_truth', item 1",
    ),
    ({**VERL, "prompt": [{"role": "user", "content": ["Who?"]}]}, "'prompt'"),
    ({**RICH_OWN, "answers": ["C"]}, "'answers': 'C' is none of the 2 options"),
    (
        {**RICH_OWN, "references": [{"id": None, "text": "x"}]},
        "'references', item 1: field 'id' is missing",
    ),
    ({**MEDQA, "options": {"A": "red", "B": 5}}, "'options'"),
    (r'{"id": "q2", "question": "a \ud83d smile?", "answers": ["a"]}', "half a character"),
    ('{"id": ' + "9" * 5000 + "}", "not valid JSON"),
    ("[" * 100_000, "not valid JSON"),
    ({"id": "q2", "question": "Who?" * 2_500_000, "answers": 5}, "'answers'"),
]  # the last is one line of 10 MB


@pytest.mark.parametrize(("record", "expected"), BAD_INSIDE)
def test_what_is_wrong_inside_of_a_field_is_named_too(write, record, expected):
    text = message(load_questions, write(record))
    assert "questions.jsonl, line 1: " in text and expected in text and len(text) < 500


def test_a_value_that_is_nested_too_deep_to_be_shown_is_shown_as_such():
    value = []
    for _ in range(10_000):
        value = [value]
    assert short(value) == "[[[..."


def test_both_halves_of_an_escaped_character_are_one(write):
    assert (
        load_questions(write(r'{"id": "q", "question": "\ud83d\ude00?", "answers": ["a"]}'))[
            0
        ].question
        == "😀?"
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            '{"answer": {"h1": "yes"}, "sp": {"h1": [["A", 0]]}}',
            ["line 1", "predictions: python eval.py --predictions FILE"],
        ),
        (
            json.dumps({"answer": {"h1": "yes"}, "sp": {}}, indent=1),
            ["record 1", "looks like predictions"],
        ),
        (
            json.dumps({"id": "1", "question": "Who?", "golds": ["a"], "prediction": "b"}),
            ["line 1", "looks like predictions"],
        ),
        (
            json.dumps({"version": 1, "data": [OWN]}),
            ["records under 'data'", "as a list, or one on each line"],
        ),
        (json.dumps({"q1": OWN, "q2": OWN}, indent=1), ["records under 'q1'"]),
        ("{\n" + json.dumps(OWN)[1:] + "\n" + json.dumps(OWN), ["line 3: not valid JSON"]),
    ],
)
def test_an_object_where_records_are_expected_is_told_what_to_do(write, content, expected):
    text = message(load_questions, write(content))
    for part in expected:
        assert part in text


def test_one_record_over_several_lines_is_a_record(write):
    assert load_questions(write(json.dumps(OWN, indent=1))) == load_questions(write(OWN))


def test_in_a_json_list_the_record_is_counted_instead_of_the_line(write):
    text = message(
        load_questions,
        write(json.dumps([HOTPOT, {**HOTPOT, "_id": "h2", "answer": None}], indent=1)),
    )
    assert "questions.jsonl, record 2: question h2 has no answer" in text


def test_a_broken_json_list_names_its_line(write):
    assert "questions.jsonl, line 3: not valid JSON" in message(
        load_questions, write("[", json.dumps(OWN), "oops]")
    )
    assert "questions.jsonl, line 2: not UTF-8" in message(load_questions, write("[", b'"\xff"]'))


@pytest.mark.parametrize(
    ("content", "expected"),
    [("", "file is empty"), (" \n\n", "file is empty"), ("[]", "no record")],
)
def test_a_file_without_records_is_an_error(write, content, expected):
    assert expected in message(load_questions, write(content)) and expected in message(
        load_corpus, write(content)
    )


def test_a_missing_file_and_a_folder_are_errors(tmp_path):
    for load in (load_questions, load_corpus):
        assert "nowhere.jsonl: no such file" in message(load, tmp_path / "nowhere.jsonl")
    assert "a folder: name the files in it" in message(load_questions, tmp_path)
    assert "no question file was named" in message(load_questions, " , ")


def test_skip_bad_does_not_turn_a_file_without_a_usable_record_into_an_empty_list(write):
    assert (
        "no record to use" in (text := message(load_questions, write("{x", "{"), skip_bad=True))
        and "line 1" in text
    )


# --------------------------------------------------------------------- a file that a run appends to


def test_a_half_written_last_line_is_cut_off_and_what_is_appended_stands_on_its_own(tmp_path):
    path = tmp_path / "log.jsonl"
    assert finished_records(path) == []
    append_jsonl(path, [{"id": 1, "text": "a\u2028b"}])
    with open(path, "a") as file:
        file.write('{"id": 2, "te')
    before = path.read_bytes()
    assert (
        finished_records(path, cut=False) == [{"id": 1, "text": "a\u2028b"}]
        and path.read_bytes() == before
    )
    assert finished_records(path) == [{"id": 1, "text": "a\u2028b"}]
    append_jsonl(path, [{"id": 2}])
    assert [record["id"] for record in finished_records(path)] == [1, 2]


def test_a_last_record_that_lacks_only_its_newline_is_kept(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"id": 1}')
    assert finished_records(path) == [{"id": 1}]
    append_jsonl(path, [{"id": 2}])
    assert len(finished_records(path)) == 2


def test_a_broken_line_in_the_middle_is_an_error_and_nothing_is_thrown_away(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"id": 1}\n{"id"\n{"id": 3}\n')
    assert "log.jsonl, line 2: not valid JSON" in message(finished_records, path)
    assert path.read_text().count("\n") == 3


# ------------------------------------------------------------------------------------ several files


def test_ids_that_two_files_share_get_the_files_stem_and_others_stay(write):
    a, b = (
        write(R1, {**R1, "idx": 8}, name="hotpot.jsonl"),
        write(R1, {**R1, "idx": 9}, name="wiki.jsonl"),
    )
    expected = ["hotpot:7", "8", "wiki:7", "9"]
    assert [q.id for q in load_questions(f"{a},{b}")] == expected
    assert [q.id for q in load_questions([a, str(b)])] == expected


def test_files_of_different_layouts_are_merged(write):
    paths = [
        write(R1, name="a.jsonl"),
        write(HOTPOT, name="b.jsonl"),
        write(json.dumps([HUB | {"id": "h2"}]), name="c.json"),
    ]
    assert [q.id for q in load_questions(paths)] == ["7", "h1", "h2"]


def test_the_same_file_twice_is_an_error_because_its_questions_would_share_a_group(write):
    path = write(R1)
    again = path.parent / ".." / path.parent.name / path.name
    assert "questions.jsonl: named twice" in message(load_questions, [path, again])


def test_datasets_are_named_by_their_files_and_questions_are_theirs_one_after_the_other(write):
    files = [write(R1, {**R1, "idx": 8}, name="hotpot.jsonl"), write(R1, name="wiki.jsonl")]
    datasets = load_datasets(files)
    assert {name: [q.id for q in questions] for name, questions in datasets.items()} == {
        "hotpot": ["hotpot:7", "8"],
        "wiki": ["wiki:7"],
    }
    assert load_questions(files) == datasets["hotpot"] + datasets["wiki"]


def test_two_files_of_one_stem_are_told_apart_by_their_folders_and_then_by_their_paths(write):
    names = ["nq/test.jsonl", "wiki/test.jsonl", "dev.jsonl", "old/wiki/test.jsonl"]
    datasets = load_datasets(
        [write({**R1, "idx": i % 3}, name=name) for i, name in enumerate(names)]
    )
    (nq, wiki, dev, old), ids = (
        datasets,
        [q.id for questions in datasets.values() for q in questions],
    )
    assert (
        (nq, dev) == ("nq/test", "dev")
        and wiki.endswith("/wiki/test.jsonl")
        and old.endswith("/old/wiki/test.jsonl")
    )
    assert ids == ["nq/test:0", "1", "2", f"{old}:0"]


def test_a_file_name_with_a_comma_is_one_file(write):
    assert load_questions(str(write(OWN, name="a,b.jsonl")))[0].id == "q1"


# ------------------------------------------------------------------------------------------ corpora


def test_contents_are_split_at_the_first_line_and_only_the_outer_quotes_go(write):
    rows = [
        {"id": 0, "contents": '"Ana Bell"\nBorn in "Kelmouth".\nTwice.'},
        {"id": "x", "contents": '""Heroes" (album)"\nA record.'},
        {"id": "y", "contents": "no title here"},
    ]
    assert load_corpus(write(*rows)) == [
        Document("0", "Ana Bell", 'Born in "Kelmouth".\nTwice.'),
        Document("x", '"Heroes" (album)', "A record."),
        Document("y", "", "no title here"),
    ]


def test_title_and_text_without_an_id_get_the_line_number(write):
    assert load_corpus(write({"title": "A", "text": "x"}, {"title": "B", "text": "y"}))[
        1
    ] == Document("2", "B", "y")
    assert load_corpus(write({"id": "p7", "title": "A", "text": "x"})) == [Document("p7", "A", "x")]


def test_a_json_list_is_a_corpus_too(write):
    assert load_corpus(write(json.dumps([{"title": "A", "text": "x"}]), name="c.json")) == [
        Document("1", "A", "x")
    ]


@pytest.mark.parametrize("header", [[], ["id\ttext"], ["ID\tText\r"]])
def test_tab_separated_passages_with_and_without_a_header(write, header):
    path = write(*header, "5\tA plain passage.\r", "6\tAnother.", name="c.tsv")
    assert load_corpus(path) == [
        Document("5", "", "A plain passage."),
        Document("6", "", "Another."),
    ]


def test_a_header_may_name_a_title_column(write):
    path = write("id\ttext\ttitle", '1\t"The ""Bell"" rang."\tBells', name="c.tsv")
    assert load_corpus(path) == [Document("1", "Bells", 'The "Bell" rang.')]


def test_r1_searchers_abstracts_lose_their_csv_quotes(write):
    path = write(
        "0\tTitle: Ana: a life Text:  Born.",
        '1\t"Title: Bell Text:  The ""great"" bell."',
        name="c.tsv",
    )
    assert load_corpus(path) == [
        Document("0", "Ana: a life", "Born."),
        Document("1", "Bell", 'The "great" bell.'),
    ]


def test_a_chunk_that_merely_begins_with_a_quoted_word_keeps_its_quotes(write):
    path = write(
        "0\tA   first chunk", '1\t"Heroes" (album)   a record called "Heroes"', name="c.tsv"
    )
    assert load_corpus(path)[1] == Document("1", '"Heroes" (album)', 'a record called "Heroes"')


@pytest.mark.parametrize(
    ("rows", "name", "expected"),
    [
        (
            [{"title": "A", "text": "x"}, {"title": "", "text": ""}],
            "c.jsonl",
            ["line 2", "'text' is empty"],
        ),
        (
            [{"title": "A", "text": "x"}, {"title": "B", "text": 3}],
            "c.jsonl",
            ["line 2", "'text'", "expected a string"],
        ),
        (
            [{"id": 1, "contents": "a"}, {"id": "1", "contents": "c"}],
            "c.jsonl",
            ["line 2", "'id': duplicate id '1'", "line 1"],
        ),
        (
            [{"id": "1", "contents": "a\nb"}, {"id": "2"}],
            "c.jsonl",
            ["line 2", "'contents' is missing"],
        ),
        ([{"id": "1", "contents": "a\nb"}, "{"], "c.jsonl", ["line 2", "not valid JSON"]),
        (
            [{"passage_text": "x"}],
            "c.jsonl",
            ["line 1", "unknown layout", "'passage_text'", *CORPUS_LAYOUTS],
        ),
        (
            ["1\tx", "2 y"],
            "c.tsv",
            ["line 2", "1 tab-separated columns, expected 2", "id, passage"],
        ),
        (["1\tx\ty"], "c.tsv", ["line 1", "3 tab-separated columns"]),
        (["1\tx", b"2\t\xff"], "c.tsv", ["line 2", "byte 3", "UTF-8"]),
        (["1\tx", "1\ty"], "c.tsv", ["line 2", "duplicate id '1'"]),
        (
            ["1\tTitle: A Text: x", "2\tno mark"],
            "c.tsv",
            ["line 2", "'text'", "Title: ... Text: ..."],
        ),
        (["id\ttext"], "c.tsv", ["no record"]),
    ],
)
def test_a_malformed_corpus_is_one_line_with_file_line_and_field(write, rows, name, expected):
    text = message(load_corpus, write(*rows, name=name))
    for part in [name, *expected]:
        assert part in text


# --------------------------------------------------------------------------------- folders of texts


def test_a_folder_of_texts_is_a_corpus_in_the_order_of_its_names(write, tmp_path, capsys):
    write("# Bells", "The bell [rings](http://x).", name="b/bell.MD")
    write(b"\xef\xbb\xbfAna came.\r", "She stayed.\r", name="a notes.txt")
    write(" ".join(["word"] * 300) + ".", name="b.txt")
    for name in (".hidden.txt", ".git/x.md", "b/table.csv", "README"):
        write("Not this.", name=name)
    (tmp_path / "z.md.gz").write_bytes(gzip.compress(b"Packed."))
    corpus = load_corpus(tmp_path)
    assert corpus[0] == Document("a notes.txt#1", "a notes", "Ana came. She stayed.")
    assert [(d.id, d.title) for d in corpus[1:]] == [
        ("b/bell.MD#1", "Bells"),
        ("b.txt#1", "b"),
        ("b.txt#2", "b"),
        ("z.md.gz#1", "z"),
    ]
    assert (corpus[1].text, corpus[4].text) == (
        "The bell rings.",
        "Packed.",
    ) and capsys.readouterr().err == ""


def test_one_text_is_a_corpus_too_and_a_txt_file_with_records_still_holds_records(write):
    assert load_corpus(write("[Ana](x) came.", name="a.md")) == [
        Document("a.md#1", "a", "Ana came.")
    ]
    path = write("---\r\ntitle: Bells\r\n---\r\nIt rang.", name="a.md")
    assert load_corpus(path) == [Document("a.md#1", "Bells", "It rang.")]
    assert load_corpus(write("[1] Ana came.", name="a.txt")) == [
        Document("a.txt#1", "a", "[1] Ana came.")
    ]
    assert load_corpus(write({"id": "7", "title": "A", "text": "x"}, name="c.txt")) == [
        Document("7", "A", "x")
    ]
    assert load_corpus(write("7\tx", name="c.txt")) == [Document("7", "", "x")]


def test_texts_without_words_are_left_out_and_counted(write, tmp_path, capsys):
    write("Ana came.", name="a.txt")
    write("", name="b.txt")
    write("# Only a heading", name="c.md")
    assert len(load_corpus(tmp_path)) == 1
    assert (
        "2 of 3 files skipped; the first: " in (error := capsys.readouterr().err)
        and "b.txt: no words in it" in error
    )


@pytest.mark.parametrize("broken", [b"caf\xe9.", b"\xff\xfeA\x00n\x00a\x00"])
def test_a_text_that_is_not_utf8_is_named_with_its_line_and_skip_bad_leaves_it_out(
    write, tmp_path, capsys, broken
):
    path = write("One.", broken, name="b.txt")
    write("Ana came.", name="a.txt")
    expected = f"{path}, line 2: not UTF-8: save the file as UTF-8, or leave it out with --skip_bad"
    assert message(load_corpus, tmp_path) == expected
    assert [d.id for d in load_corpus(tmp_path, skip_bad=True)] == ["a.txt#1"]
    assert "1 of 2 files skipped" in capsys.readouterr().err
    (tmp_path / "a.txt").unlink()
    assert "no file to use" in message(load_corpus, tmp_path, skip_bad=True)


def test_a_folder_without_texts_says_which_endings_are_read(write, tmp_path):
    write("x", name="a.rst")
    assert "no file in it ends in .txt or .md" in message(load_corpus, tmp_path)


def test_links_that_go_round_in_circles_end_and_what_is_linked_is_read_once(write, tmp_path):
    write("Ana came.", name="here/a.txt")
    write("Bo left.", name="there/b.txt")
    (tmp_path / "here" / "loop").symlink_to(tmp_path / "here")
    (tmp_path / "here" / "more").symlink_to(tmp_path / "there")
    (tmp_path / "there" / "back").symlink_to(tmp_path / "here")
    os.mkfifo(tmp_path / "here" / "pipe.txt")  # to open it would wait for ever
    assert [d.id for d in load_corpus(tmp_path / "here")] == ["a.txt#1", "more/b.txt#1"]
    (tmp_path / "here" / "gone.txt").symlink_to("nowhere.txt")
    assert "gone.txt: no such file" in message(load_corpus, tmp_path / "here")
    (tmp_path / "here" / "gone.txt").unlink()
    (tmp_path / "here" / "gone.txt").symlink_to("gone.txt")
    assert "gone.txt" in message(load_corpus, tmp_path / "here")


def test_a_file_name_that_is_no_text_makes_an_id_that_can_be_written(tmp_path):
    with open(os.fsencode(tmp_path) + b"/caf\xe9.txt", "wb") as file:
        file.write(b"Ana came.")
    (document,) = load_corpus(tmp_path)
    assert document.id.encode() == b"caf?.txt#1" and document.title.encode()


def test_paragraphs_of_questions_become_a_corpus_without_repetitions(write):
    other = {**HOTPOT, "_id": "h2", "context": [["A", ["One.", " Two."]], ["C", ["Five."]]]}
    corpus = corpus_from_questions(load_questions(write(HOTPOT, other)))
    # A with the same text counts once; C has another text in the second record and counts twice.
    assert [(d.title, d.text) for d in corpus] == [
        ("A", "One. Two."),
        ("B", "Three."),
        ("C", "Four."),
        ("C", "Five."),
    ]
    assert [d.id for d in corpus] == [
        "h1:1",
        "h1:2",
        "h1:3",
        "h2:2",
    ]  # the first record that brings a paragraph names it


def test_references_with_one_id_but_different_texts_get_different_ids():
    questions = [
        Question(str(i), "?", ["a"], references=(Document("1", "T", f"text {i}"),))
        for i in range(3)
    ]
    assert len({d.id for d in corpus_from_questions(questions)}) == 3


def test_questions_without_paragraphs_make_no_corpus(write):
    assert "no paragraphs" in message(corpus_from_questions, load_questions(write(OWN)))


# -------------------------------------------------------------------------------------- real slices


@pytest.mark.parametrize(
    ("name", "count", "sources"),
    [
        ("ircot/hotpotqa_gold_plus_1_distractor.jsonl", 29, {""}),
        (
            "ircot/musique_gold_plus_1_distractor.jsonl",
            20,
            {"musique_2hop", "musique_3hop", "musique_4hop"},
        ),
        ("qa_eval/2wiki_500.jsonl", 500, {""}),
        ("qa_eval/bamboogle.jsonl", 125, {""}),
        ("qa_eval/flashrag_nq_16.jsonl", 17, {""}),
        ("train/r1_searcher_stage1_80.jsonl", 80, {""}),
        ("train/r1_searcher_stage2_100.jsonl", 100, {""}),
        ("train/ur2_stage2_150.jsonl", 150, {"math", "rag"}),
        (
            "hotpotqa/official_train_distractor_20.json",
            20,
            {"hotpotqa_bridge", "hotpotqa_comparison"},
        ),
        (
            "hotpotqa/hf_layout_dev_distractor_20.jsonl",
            20,
            {"hotpotqa_bridge", "hotpotqa_comparison"},
        ),
    ],
)
def test_real_question_files_load_whole(name, count, sources):
    questions = load_questions(real(name))
    assert len(questions) == count == len({q.id for q in questions})
    assert {q.source for q in questions} == sources
    assert all((q.task == "math") == (q.source == "math") for q in questions)


def test_the_gold_paragraphs_of_real_hotpotqa_records_are_the_ones_their_facts_name():
    path = real("hotpotqa/official_train_distractor_20.json")
    for record, question in zip(
        json.loads(path.read_text(encoding="utf-8")), load_questions(path), strict=True
    ):
        titles = {question.references[number - 1].title for number in question.supporting}
        assert titles == {title for title, _ in record["supporting_facts"]}


@pytest.mark.parametrize(
    ("name", "count", "task"),
    [
        ("math/math500_60.jsonl", 60, "math"),
        ("math/gsm8k_test_20.jsonl", 20, "math"),
        ("mcq/medqa_5options_50.jsonl", 50, "choice"),
        ("mcq/mmlupro_80.jsonl", 80, "choice"),
        ("mcq/mmlupro_health_30.jsonl", 30, "choice"),
        ("musique/official_train_15.jsonl", 15, "qa"),
    ],
)
def test_real_math_choice_and_musique_files_load_whole(name, count, task):
    questions = load_questions(real(name))
    assert len(questions) == count and {q.task for q in questions} == {task}
    assert all(
        set(q.answers) <= set("ABCDEFGHIJ"[: len(q.options)]) for q in questions if task == "choice"
    )


def test_the_gold_paragraphs_of_real_musique_records_are_those_of_its_decomposition():
    path = real("musique/official_train_15.jsonl")
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for record, question in zip(records, load_questions(path), strict=True):
        steps = {step["paragraph_support_idx"] + 1 for step in record["question_decomposition"]}
        assert set(question.supporting) == steps


def test_a_real_parquet_file_loads_or_says_what_it_needs():
    path = real("qa_eval/deepresearcher_verl_7x12.parquet")
    try:
        import pyarrow
    except ImportError:
        assert "pip install pyarrow" in message(load_questions, path)
    else:
        assert len(load_questions(path)) == 84


def test_real_rollout_answers_come_nine_or_ten_a_question():
    attempts = load_attempts(real("train/r1_searcher_stage1_80.jsonl"))
    assert len(attempts) == 80 and {len(a.predictions) for a in attempts} == {9, 10}


def test_two_real_files_that_both_count_from_one_stay_apart():
    questions = load_questions(
        [real("qa_eval/hotpotqa_500.jsonl"), real("qa_eval/musique_500.jsonl")]
    )
    assert len({q.id for q in questions}) == 1000 and questions[0].id == "hotpotqa_500:1"


@pytest.mark.parametrize(
    ("name", "count", "title"),
    [
        ("corpus/flashrag_wiki_sample_500.jsonl", 500, "Evan Morris"),
        ("corpus/search_r1_example_10.jsonl", 10, "Evan Morris"),
        ("corpus/hipporag_2wiki_1200.jsonl", 1200, "Teutberga"),
        ("corpus/r1_searcher_title_abs_100.tsv", 100, "Professional Football League of Ukraine"),
        ("corpus/r1_searcher_kilt_100.tsv", 93, "A"),
    ],
)
def test_real_corpora_load_whole_with_titles_and_texts(name, count, title):
    corpus = load_corpus(real(name))
    assert len(corpus) == count == len({d.id for d in corpus})
    assert corpus[0].title == title and all(d.title and d.text for d in corpus)


def test_real_csv_quoted_abstracts_are_what_a_csv_reader_makes_of_them():
    path = real(
        "corpus/r1_searcher_title_abs_100.tsv"
    )  # every field that begins with a quote in this file is a CSV field
    with open(path, encoding="utf-8", newline="") as file:
        expected = [row[1] for row in csv.reader(file, delimiter="\t")]
    assert [f"Title: {d.title} Text:  {d.text}" for d in load_corpus(path)] == [
        text.rstrip() for text in expected
    ]


# ----------------------------------------------------------------------------------- python data.py


def run(*arguments):
    return subprocess.run(
        [sys.executable, "data.py", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True
    )


def test_the_file_shows_layout_counts_and_a_record_of_questions_and_of_a_corpus(write):
    output = run(write(HOTPOT, {**HOTPOT, "_id": "h2", "type": "bridge"})).stdout
    assert (
        "hotpotqa" in output
        and "hotpotqa_comparison 1" in output
        and "qa 2" in output
        and "Which?" in output
    )
    output = run(write("5\tTitle: Ana Text: Born.", name="c.tsv")).stdout
    assert "tsv_abstract" in output and "documents  1" in output and "Ana" in output


def test_the_file_shows_a_folder_of_texts_and_tells_predictions_apart(write, tmp_path):
    output = run(write("# Bells", "It rang.", name="texts/a.md").parent).stdout
    assert "layout     text" in output and "documents  1" in output and "a.md#1" in output
    assert (
        "python eval.py --predictions FILE"
        in run(write({"id": "1", "question": "?", "prediction": "a"})).stderr
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("5\tA passage.", (True, "tsv")),
        ("Who came?\tAna", (False, "plain")),
        ("question\tanswer\nWho?\tAna", (False, "plain")),
    ],
)
def test_a_table_is_told_to_hold_questions_by_its_header_or_by_blanks_in_its_first_column(
    write, line, expected
):
    assert first_layout(write(line, name="t.tsv")) == expected


def test_the_file_ends_with_one_line_and_code_2_on_bad_input(write):
    result = run(write(OWN, "{"))
    assert result.returncode == 2 and result.stdout == ""
    assert (
        result.stderr.startswith("error: ")
        and result.stderr.count("\n") == 1
        and "line 2" in result.stderr
    )
    result = run(write(OWN, "{"), "--skip_bad")
    assert result.returncode == 0 and "1 of 2 records skipped" in result.stderr


def test_a_second_name_of_a_text_is_no_second_text(tmp_path):
    (tmp_path / "b.txt").write_text("Ana Bell was born in Kelmouth.")
    (tmp_path / "a.txt").symlink_to(tmp_path / "b.txt")
    assert [d.id for d in load_corpus(tmp_path)] == ["b.txt#1"]


def test_no_name_is_not_this_folder(capsys, monkeypatch):
    with pytest.raises(InputError, match="no question file was named"):
        load_questions("")
