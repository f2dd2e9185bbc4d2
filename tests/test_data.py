"""Tests data.py: every layout on small records and on real slices, and one-line errors."""

import gzip
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from conftest import message, of_fault

import data
from data import (
    Document,
    Question,
    corpus_from_questions,
    first_layout,
    load_attempts,
    load_corpus,
    load_datasets,
    load_questions,
)
from formats.layouts import LAYOUTS, detect
from formats.records import append_jsonl, finished_records
from retrievers.controls import gold_passages

ROOT = Path(__file__).resolve().parents[1]
SLICES = ROOT.parent / "shared" / "data"

OWN = {"id": "q1", "question": "Who?", "answers": ["Ana"]}
R1 = {"idx": 7, "question": "Who?", "answer": "Ana"}
UR2 = {**R1, "source": "rag", "level": "hard"}
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
    **{name: value for name, value in HOTPOT.items() if name != "_id"},
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
    "question_decomposition": [{"paragraph_support_idx": 1}, {"paragraph_support_idx": 2}],
}
CHOICE = {"question": "Which?", "options": ["B", "red"], "answer": "B"}
MMLU = {**CHOICE, "question_id": 70, "answer_index": 1, "category": "law"}
LETTERED = {"B": "green", "A": "red"}
MEDQA = {"question": "Which?", "options": LETTERED, "answer": "green", "answer_idx": "B"}
SOLVED = {"problem": "1 + 1?", "solution": "It is \\boxed{2}.", "answer": "2"}
MATH = {**SOLVED, "level": 5, "unique_id": "test/algebra/1.json"}
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
IRCOT = {
    "dataset": "hotpotqa",
    "level": "hard",
    "question_id": "h1",
    "question_text": "Which?",
    "answers_objects": [{"number": "", "date": {}, "spans": ["yes", "it is"]}],
    "contexts": MUSIQUE["paragraphs"],
}


def without(record, *names):
    return {k: v for k, v in record.items() if k not in names}


@pytest.fixture
def write(tmp_path):
    def write(*records, name="questions.jsonl"):
        """Writes the records as JSON lines (str and bytes unchanged) and returns the path."""
        texts = [r if isinstance(r, str | bytes) else json.dumps(r) for r in records]
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\n".join(t if isinstance(t, bytes) else t.encode() for t in texts))
        return path

    return write


@pytest.fixture
def one(write):
    """Returns a function that loads the question of a single record."""

    def one(record) -> Question:
        (question,) = load_questions(write(record))
        return question

    return one


def real(name):
    """Returns the path of a real slice, or skips the test if the slice is missing."""
    path = SLICES / name
    if not path.exists():
        pytest.skip(f"the real slice {path} is missing")
    return path


# ------------------------------------------------------------------------------------------ layouts


EXAMPLES = {
    "own": [OWN, {**OWN, "solution": "so"}],
    "r1_searcher": [R1, ROLLOUTS],
    "ur2": [UR2, {**UR2, "source": "math", "subject": "Algebra"}],
    "flashrag": [FLASHRAG],
    "hotpotqa": [HOTPOT, HUB, {**HOTPOT, "evidences": [["A", "x", "B"]]}],
    "musique": [MUSIQUE],
    "choice": [MMLU, MEDQA, {**MEDQA, "options": ["red", "green"], "meta_info": "step1"}],
    "math": [MATH, MINERVA, {**without(MATH, "problem"), "question": "1 + 1?", "id": 0}],
    "gsm8k": [GSM8K],
    "verl": [VERL],
    "ircot": [IRCOT, {name: IRCOT[name] for name in IRCOT if name != "dataset"}],
    "plain": [PLAIN, without(PLAIN, "id", "source", "level")],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_is_recognised_from_one_record_even_without_its_question(layout):
    for record in EXAMPLES[layout]:
        assert detect(record, LAYOUTS) == layout
        if layout not in ("plain", "verl"):
            assert detect(without(record, "question"), LAYOUTS) == layout


def test_an_unknown_layout_lists_the_fields_of_the_record_and_every_known_layout(write):
    text = message(load_questions, write({"prompt": "Who?", "gold": "Ana"}))
    assert "questions.jsonl, line 1: unknown layout" in text and "'prompt', 'gold'" in text
    assert all(name in text for name in LAYOUTS) and "own (id question answers)" in text


def test_questions_written_as_json_lines_load_as_the_same_questions(write):
    references = (Document("9", "T", "x"), Document("4", "", "y"))
    questions = [
        Question("1", "Wer ist Ödön?", ["a", "b"], source="one_hop", level="easy"),
        Question("2", "Which?", ["B"], "choice", ("red", "green"), references, (2,)),
        Question("3", "1 + 1?", ["2"], "math", may_search=False),
        Question("4", "So?", ["x"], "summary", references=references),
    ]
    assert load_questions(write(*map(asdict, questions))) == questions


def test_only_the_source_math_makes_the_task_math(one):
    assert one(OWN) == Question("q1", "Who?", ["Ana"])
    assert one(R1) == Question("7", "Who?", ["Ana"]) and one(R1).kind == "qa"
    for source, task in (("math", "math"), ("rag", "qa")):
        question = one({**R1, "source": source, "level": 3})
        assert (question.task, question.source, question.level) == (task, source, "3")


def test_flashrag_keeps_every_golden_answer(one):
    assert one(FLASHRAG).answers == ["Ana", "Ana Bell"]


@pytest.mark.parametrize("record", [HOTPOT, HUB])
def test_supporting_facts_become_distinct_reference_numbers_that_count_from_one(one, record):
    question = one(record)
    assert question.supporting == (1, 3)  # C is paragraph 3 and is named twice; A is paragraph 1
    assert question.references[0] == Document("h1:1", "A", "One. Two.")
    assert [d.title for d in question.references] == ["A", "B", "C"]
    assert (question.id, question.source, question.level) == ("h1", "hotpotqa_comparison", "hard")


@pytest.mark.parametrize("facts", [[["C", 0], ["Z", 1]], [["Z", 0]]])
def test_a_gold_title_without_a_paragraph_gives_no_gold_numbers_and_a_warning(write, capsys, facts):
    """HotpotQA's fullwiki files have such titles."""
    path = write(HOTPOT, {**HOTPOT, "_id": "h2", "supporting_facts": facts})
    assert [q.supporting for q in load_questions(path)] == [(1, 3), ()]
    assert "of 2 questions with references, 1 have no gold reference" in capsys.readouterr().err


def test_2wiki_has_hotpotqas_layout_and_its_sentences_are_joined_by_blanks(one):
    context = [["A", ["One.", "Two."]], ["C", ["Four."]], ["C", ["Five."]]]  # the first C is gold
    question = one({**HOTPOT, "evidences": [], "type": "inference", "context": context})
    assert question.references[0].text == "One. Two." and question.source == "2wiki_inference"
    assert question.supporting == (1, 2)
    assert one(without(HOTPOT, "type")).kind == "hotpotqa"


def test_musiques_gold_paragraphs_are_numbered_by_place_and_aliases_are_answers(one):
    question = one(MUSIQUE)
    # The field idx counts from 0. Both gold paragraphs have the title B, so only places differ.
    assert question.supporting == (2, 3)
    assert question.answers == ["Kelmouth", "Kel"] and question.source == "musique_2hop"
    assert [d.text for d in question.references] == ["One.", "Two.", "Three."]


def test_unmarked_paragraphs_become_references_and_none_is_gold(one, capsys):
    paragraphs = [{"title": "A", "text": "One."}]
    question = one({**R1, "idx": "x1", "paragraphs": paragraphs, "cot": ""})
    references = (Document("x1:1", "A", "One."),)
    assert question == Question("x1", "Who?", ["Ana"], references=references)
    assert capsys.readouterr().err == ""


def test_mmlu_pros_answer_letter_is_a_letter_even_if_an_option_has_the_same_text(one):
    expected = Question("70", "Which?", ["A"], "choice", ("B", "red"), source="law")
    assert one({**MMLU, "answer": "A", "answer_index": 0}) == expected
    assert one(MMLU) == replace(expected, answers=["B"])


@pytest.mark.parametrize("options", [LETTERED, ["red", "green"]])
def test_medqas_options_are_a_dict_or_a_list_and_the_id_is_the_line_number(one, options):
    expected = Question("1", "Which?", ["B"], "choice", ("red", "green"))
    assert one({**MEDQA, "options": options}) == expected


def test_a_math_answer_is_a_field_or_the_solutions_last_box_or_follows_a_mark(one):
    assert one(MATH) == Question("test/algebra/1.json", "1 + 1?", ["2"], "math", level="5")
    assert one(MINERVA) == Question("4", "1/2?", [r"\frac{1}{2}"], "math")
    assert one(GSM8K) == Question("1", "How much?", ["18"], "math")


@pytest.mark.parametrize("gold", [["Ana", "Ana Bell"], "Ana<|answer_split|>Ana Bell", None])
def test_verl_records_give_the_question_after_the_instruction_and_all_answers(one, gold):
    record = {**VERL, "reward_model": {"ground_truth": gold}} if gold else VERL
    assert one(record) == Question("nq:3", "Who?", ["Ana", "Ana Bell"], source="nq")


def test_published_answers_of_rollouts_are_loaded_with_their_question(write):
    (attempts,) = load_attempts(write(ROLLOUTS))
    assert attempts.question == Question("7", "Who?", ["Ana"])
    assert attempts.predictions == ["", " Ana "]
    assert "'pred_anses': it is empty" in message(load_attempts, write({**R1, "pred_anses": []}))
    assert "rollouts (idx question answer pred_anses)" in message(load_attempts, write(R1))


# ---------------------------------------------------------------------- tables, gzip and parquet

BO = "['Bo', \"Bo's\"]"  # a list as Python prints it


@pytest.mark.parametrize(
    ("lines", "ids"),
    [
        (["Who came?\tAna", f"Who left?\t{BO}", 'When?\t"[""1"", ""2""]"'], "1 2 3"),
        (["Question\tAnswer", "Who?\tAna", f"Who left?\t{BO}", 'When?\t["1", "2"]'], "2 3 4"),
        (["ID\tquestion\tanswer", "a\tA?\tAna", f"b\tB?\t{BO}", 'c\tC?\t["1", "2"]'], "a b c"),
    ],
)
def test_a_table_of_questions_is_read_with_and_without_a_header(write, lines, ids):
    questions = load_questions(write(*lines, name="q.tsv"))
    assert [q.answers for q in questions] == [["Ana"], ["Bo", "Bo's"], ["1", "2"]]
    assert [q.id for q in questions] == ids.split()
    assert load_questions(write(*lines, name="q.txt")) == questions


@pytest.mark.parametrize("text", ["[1, 2)", "[1, 2]", "[]", "[" * 1000])
def test_a_bracketed_text_that_is_not_a_list_of_strings_is_one_answer(write, text):
    (question,) = load_questions(write(f"Which x?\t{text}", name="q.tsv"))
    assert question.answers == [text]


@pytest.mark.parametrize(
    "name, text, error",
    [
        (
            "c.tsv",
            "5\tA passage.",
            "field 'question': '5' is a number: is this a file of passages?",
        ),
        ("q.csv", "question,answer\nWho?,Ana", "q.csv: a CSV file is not read: save it with tabs"),
    ],
)
def test_another_table_is_rejected_as_a_question_file(name, text, error, write):
    assert error in message(load_questions, write(text, name=name))


@pytest.mark.fault(229)
def test_gzipped_files_are_read_and_a_broken_one_is_a_one_line_error(tmp_path):
    path = tmp_path / "nq.jsonl.gz"
    packed = gzip.compress(json.dumps(OWN).encode())
    path.write_bytes(packed)
    (dataset,) = load_datasets(path).items()
    assert dataset == ("nq", [Question("q1", "Who?", ["Ana"])])
    path.write_bytes(packed[:-10])
    assert "nq.jsonl.gz: a broken gzip file" in message(load_questions, path)
    path.write_bytes(gzip.compress(b" " * 2**20, 1) * 200)  # 200 MB of blanks
    assert "nq.jsonl.gz: the file is empty" in message(load_questions, path)


def test_parquet_files_load_like_json_files(write, tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `data`")
    from pyarrow import parquet

    path, records = tmp_path / "hub.parquet", [HUB, {**HUB, "id": "h2"}]
    parquet.write_table(pyarrow.Table.from_pylist(records), path)
    assert load_questions(path) == load_questions(write(*records))
    path.write_bytes(b"PAR1" + bytes(range(256)) * 9 + b"PAR1")
    assert "hub.parquet: not a readable parquet file" in message(load_corpus, path)


@pytest.mark.fault(232)
def test_without_pyarrow_a_parquet_file_gives_an_error_that_names_the_package(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install pyarrow" in message(load_questions, write("PAR1", name="q.parquet"))


def test_a_json_list_and_one_record_over_several_lines_are_read_like_json_lines(write, one):
    path = write(json.dumps([HOTPOT, {**HOTPOT, "_id": "h2"}], indent=1), name="dev.json")
    assert [q.id for q in load_questions(path)] == ["h1", "h2"]
    assert one(json.dumps(OWN, indent=1)) == one(OWN)
    # The two halves of an escaped surrogate pair become one character.
    assert one(r'{"id": "q", "question": "\ud83d\ude00?", "answers": ["a"]}').question == "😀?"


def test_blank_lines_a_byte_order_mark_and_line_separators_in_texts_are_read(write):
    first, second = b"\xef\xbb\xbf" + json.dumps(OWN).encode(), {**OWN, "id": "q2"}
    second = json.dumps({**second, "question": "a\u2028b"}, ensure_ascii=False) + "\r"
    questions = load_questions(write(first, "", second, ""))
    assert [q.question for q in questions] == ["Who?", "a\u2028b"]


def test_the_printed_example_loads(write, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["data.py", "--example"])
    data.main()
    lines = capsys.readouterr().out.splitlines()
    several, chosen, referring = load_questions(write(*lines[:3]))
    assert len(several.answers) == 2 and chosen.answers == ["A"]
    assert [d.title for d in gold_passages(referring)] == ["Ana Bell", "Kelmouth"]
    assert len(load_corpus(write(*lines[3:], name="corpus.jsonl"))) == 2


@pytest.mark.parametrize("answer", ["answer", "answers", "golden_answers"])
def test_lists_of_answers_and_records_without_an_id_are_read(write, answer):
    records = [{"question": f"Who is {n}?", answer: ["Ana", "Ana Bell"]} for n in (1, 2)]
    questions = load_questions(write(*records))
    assert [q.id for q in questions] == ["1", "2"]  # a record without an id gets its line number
    assert questions[1].answers == ["Ana", "Ana Bell"]


# ---------------------------------------------------------------------------- bad question files

Q2 = {**OWN, "id": "q2"}


BAD_SECOND_LINES = [
    ('{"id": "q2", "question"', "not valid JSON ( column 24"),
    ("[1]", "expected an object {...}, found [1]"),
    ({**Q2, "question": ["Who?"]}, "'question': expected str, found ['Who?']"),
    ({**Q2, "answers": ["Ana", ""]}, "field 'answers' has no answer, or a blank one"),
    ({**Q2, "answers": ["a", 18]}, "'answers', item 2: expected str, found 18"),
    ({**Q2, "task": "poem"}, "'task' qa, math, choice"),
    ({**Q2, "task": "choice"}, "'options' is missing"),
    ({**Q2, "supporting": [0]}, "'supporting' 0"),
    ({**Q2, "references": [{"id": "1"}]}, "'text' is missing"),
    ({**Q2, "references": ["x"]}, "'references', item 1: expected dict"),
    (OWN, "'id': duplicate 'q1' line 1"),
    # The bad byte follows 29 bytes: `{"id": "q2", ` has 13, `"question": "` has 13, `caf` has 3.
    of_fault(225, b'{"id": "q2", "question": "caf\xe9", "answers": ["a"]}', "byte 30 UTF-8"),
]


def assert_parts(text, expected):
    """Asserts that the text has each word of `expected`, in this order."""
    place = 0
    for word in expected.split():
        assert word in text[place:], (word, text)
        place = text.index(word, place)


@pytest.mark.parametrize(("record", "expected"), BAD_SECOND_LINES)
def test_the_error_of_a_malformed_record_names_file_line_and_field(write, capsys, record, expected):
    text = message(load_questions, write(OWN, record))
    assert_parts(text, f"questions.jsonl, line 2: {expected}")
    assert text.endswith("correct or delete it, or leave it out with --skip_bad")
    path = write(OWN, record, {**OWN, "id": "q3"})
    assert [q.id for q in load_questions(path, skip_bad=True)] == ["q1", "q3"]
    assert_parts(capsys.readouterr().err, "1 of 3 records skipped; the first: line 2")


PREDICTION = {"id": "1", "question": "Who?", "golds": ["a"], "prediction": "b"}
BAD_FIRST_LINES = [
    ({**HOTPOT, "supporting_facts": [["A"]]}, "'supporting_facts' a title ['A']"),
    ({**HOTPOT, "context": [["A", "One."], ["C", []]]}, "'context' expected list 'One.'"),
    ({**HUB, "context": {"title": ["A", "C"], "sentences": [[]]}}, "'context' ['C', None]"),
    ({**MUSIQUE, "paragraphs": [{"text": "One.", "is_supporting": "false"}]}, "'is_supporting'"),
    ({**MUSIQUE, "answerable": False}, "has no answer: field 'answerable' is false"),
    ({**MMLU, "answer": "C"}, "'answer' 'C' is none of the 2 options"),
    ({**MEDQA, "options": {"A": "red", "C": "green"}}, "'options', item 2"),
    ({**MINERVA, "solution": "no box"}, "field 'solution' has no answer, or a blank one"),
    ({**GSM8K, "answer": "so #### "}, "field 'answer' has no answer, or a blank one"),
    ({**VERL, "prompt": [{"role": "system", "content": "x"}]}, "'prompt' is missing"),
    ({**VERL, "reward_model": {"ground_truth": {"target": [1]}}}, "ground_truth', item 1"),
    (PREDICTION, "unknown layout 'prediction'"),
    ({"version": 1, "data": [OWN]}, "the record has the fields 'version', 'data'; known are"),
    (
        "{\n" + json.dumps(OWN)[1:] + "\n" + json.dumps(OWN),
        "questions.jsonl: not valid JSON line 3",
    ),
    of_fault(
        224, r'{"id": "q2", "question": "a \ud83d?", "answers": ["a"]}', "surrogates not allowed"
    ),
    of_fault(226, {**OWN, "answers": 5}, "'answers' 5"),
    of_fault(227, '{"id": ' + "[" * 100_000 + "]" * 100_000 + "}", "not valid JSON"),
    of_fault(230, '{"id": NaN, "question": "Who?", "answers": ["a"]}', "field 'id'"),
    ({"id": "q2", "question": "Who?" * 2_500_000, "answers": 5}, "'answers'"),  # a line of 10 MB
]


@pytest.mark.parametrize(("record", "expected"), BAD_FIRST_LINES)
def test_errors_of_other_layouts_and_inside_nested_fields_name_the_field(write, record, expected):
    text = message(load_questions, write(record))
    assert_parts(text, f"questions.jsonl {expected}")
    assert len(text) < 1000


def test_in_a_json_list_the_error_names_the_record_or_the_line_of_broken_json(write):
    path = write(json.dumps([HOTPOT, {**HOTPOT, "_id": "h2", "answer": None}], indent=1))
    assert "record 2: field 'answer' has no answer" in message(load_questions, path)
    text = message(load_questions, write("[", json.dumps(OWN), "oops]"))
    assert_parts(text, "questions.jsonl: not valid JSON line 3")


@pytest.mark.fault(228, 231)
@pytest.mark.parametrize("load", [load_questions, load_corpus])
def test_a_missing_file_and_a_file_without_records_are_errors(write, tmp_path, load):
    for content in ("", " \n\n", b"\xef\xbb\xbf"):
        assert "file is empty" in message(load, write(content))
    assert "no record" in message(load, write("[]"))
    assert "nowhere.jsonl: no such file" in message(load, tmp_path / "nowhere.jsonl")
    text = message(load, write("{x", "{"), skip_bad=True)
    assert "no record to use" in text and "line 1" in text


def test_a_folder_and_an_empty_name_are_rejected_as_question_files(tmp_path):
    assert "a folder: name the files in it" in message(load_questions, tmp_path)
    assert "no question file was named" in message(load_questions, " , ")


# --------------------------------------------------------------------- a file that a run appends to


def test_a_half_written_last_line_is_cut_off_before_the_next_is_appended(tmp_path):
    path, first = tmp_path / "log.jsonl", {"id": 1, "text": "a\u2028b"}
    assert finished_records(path) == []
    append_jsonl(path, [first])
    with open(path, "a") as file:
        file.write('{"id": 2, "te')
    before = path.read_bytes()
    assert finished_records(path, cut=False) == [first] and path.read_bytes() == before
    assert finished_records(path) == [first]
    append_jsonl(path, [{"id": 2}])
    assert finished_records(path) == [first, {"id": 2}]


def test_a_last_line_without_a_newline_gets_one_before_the_next_is_appended(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"id": 1}')
    append_jsonl(path, [{"id": 2}])
    assert path.read_text() == '{"id": 1}\n{"id": 2}\n'


# -------------------------------------------------------------------------- several question files


def ids(questions):
    return [question.id for question in questions]


def test_ids_that_two_files_share_get_the_files_name_and_other_ids_stay(write):
    a = write(R1, {**R1, "idx": 8}, name="hotpot.jsonl")
    b = write(R1, {**R1, "idx": 9}, name="wiki.jsonl")
    datasets = load_datasets([a, str(b)])
    assert ids(datasets["hotpot"]) == ["hotpot:7", "8"]
    assert ids(datasets["wiki"]) == ["wiki:7", "9"]
    assert load_questions(f"{a},{b}") == datasets["hotpot"] + datasets["wiki"]


def test_naming_a_file_twice_is_an_error(write):
    path = write(R1, name="hotpot.jsonl")
    again = path.parent / ".." / path.parent.name / path.name
    assert "hotpot.jsonl: named twice" in message(load_questions, [path, again])


def test_files_with_the_same_stem_are_named_by_their_folders_or_by_their_paths(write):
    names = ["nq/test.jsonl", "wiki/test.jsonl", "dev.jsonl", "old/wiki/test.jsonl"]
    paths = [write({**R1, "idx": i % 3}, name=name) for i, name in enumerate(names)]
    datasets = load_datasets(paths)
    assert list(datasets) == ["nq/test", str(paths[1]), "dev", str(paths[3])]
    assert [ids(questions) for questions in datasets.values()][3] == [f"{paths[3]}:0"]


# ------------------------------------------------------------------------------------------ corpora


def test_contents_are_split_after_the_first_line_and_only_outer_quotes_are_removed(write):
    contents = ['"Ana Bell"\nBorn in "Kelmouth".\nTwice.', '""Heroes" (album)"\nA record.', "none"]
    assert load_corpus(write(*({"id": i, "contents": contents[i]} for i in range(3)))) == [
        Document("0", "Ana Bell", 'Born in "Kelmouth".\nTwice.'),
        Document("1", '"Heroes" (album)', "A record."),
        Document("2", "", "none"),
    ]


QUOTE = "a quote that is not closed"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            ["\ufeff", "5\tA plain passage.\r", "6\tAnother."],
            [("", "A plain passage."), ("", "Another.")],
        ),
        (["ID\tText\r", "5\tA plain passage."], [("", "A plain passage.")]),
        (["id\ttext\ttitle", '1\t"The ""Bell"" rang."\tBells'], [("Bells", 'The "Bell" rang.')]),
        (["0\tTitle: Ana: a life Text:  Born."], [("Ana: a life", "Born.")]),
        (['1\t"Title: Bell Text:  The ""great"" bell."'], [("Bell", 'The "great" bell.')]),
        (['1\t"B   a quote that is not closed', "2\tC   x"], [("B", QUOTE), ("C", "x")]),
    ],
)
def test_a_table_of_passages_is_read_with_and_without_a_header(write, lines, expected):
    documents = load_corpus(write(*lines, name="c.tsv"))
    assert [(document.title, document.text) for document in documents] == expected
    assert documents[0].id == next(line for line in lines if line[0].isdigit())[0]


AX, CONTENTS = {"title": "A", "text": "x"}, {"id": "1", "contents": "a\nb"}


@pytest.mark.parametrize(
    ("rows", "name", "expected"),
    [
        ([AX, {"title": "", "text": ""}], "c.jsonl", "line 2: the title and the text are empty"),
        ([AX, {"title": "B", "text": 3}], "c.jsonl", "line 2: 'text' expected str"),
        ([CONTENTS, CONTENTS], "c.jsonl", "line 2: 'id': duplicate id '1' line 1"),
        ([CONTENTS, {"id": "2"}], "c.jsonl", "line 2: 'contents' is missing"),
        ([{"passage_text": "x"}], "c.jsonl", "line 1: unknown layout 'passage_text' contents tsv"),
        (["1\tx", "2 y"], "c.tsv", "line 2: 1 tab-separated columns, expected 2 (id, passage)"),
        (["1\tx", b"2\t\xff"], "c.tsv", "line 2: byte 3 UTF-8"),
        (["id\ttext"], "c.tsv", "no record"),
    ],
)
def test_the_error_of_a_malformed_corpus_names_file_line_and_field(write, rows, name, expected):
    assert_parts(message(load_corpus, write(*rows, name=name)), f"{name} {expected}")


def test_the_paragraphs_of_questions_become_a_corpus_without_repetitions(write):
    other = {**HOTPOT, "_id": "h2", "context": [["A", ["One.", " Two."]], ["C", ["Five."]]]}
    corpus = corpus_from_questions(load_questions(write(HOTPOT, other)))
    # A has the same text in both records and counts once; C has two texts and counts twice.
    assert [d.text for d in corpus] == ["One. Two.", "Three.", "Four.", "Five."]
    # A paragraph of the corpus has the id of the first record with this text.
    assert [d.id for d in corpus] == ["h1:1", "h1:2", "h1:3", "h2:2"]


def test_references_with_one_id_but_different_texts_get_different_ids(write):
    # The third reference would get the id of the second.
    references = [*map(Document, ("1", "1#2", "1"), "TTT", "abc")]
    questions = [Question("q", "?", ["a"], references=references)]
    assert len({d.id for d in corpus_from_questions(questions)}) == 3
    assert "no references" in message(corpus_from_questions, load_questions(write(OWN)))


def numbered(write, name, count):
    """Writes a file of `count` questions whose ids are numbered and returns the path."""
    return write(*[{**R1, "idx": f"{name} {i}"} for i in range(count)], name=f"{name}.jsonl")


def test_a_mixture_draws_the_given_number_of_questions_per_file_by_the_seed(write):
    # ARENA draws 10,000 questions of HotpotQA, 10,000 of 2Wiki and 5,000 of MuSiQue; here 1/1000.
    files = [numbered(write, name, size) for name, size in (("a", 90), ("b", 30), ("c", 5))]
    spec = "{}:10,{}:10,{}:5".format(*files)
    drawn, whole = load_datasets(spec, seed=7), load_datasets(files)
    assert {name: len(questions) for name, questions in drawn.items()} == {"a": 10, "b": 10, "c": 5}
    for name, questions in drawn.items():  # each question is drawn once, and the file's order stays
        assert [q for q in whole[name] if q in questions] == questions
    assert load_datasets(spec, seed=8) != drawn
    # The draw from one file does not depend on the others; a file without :N is used whole.
    other = load_datasets(f"{files[1]},{files[0]}:10", seed=7)
    assert other["a"] == drawn["a"] and other["b"] == whole["b"]


def test_a_file_name_may_contain_a_colon_and_drawing_too_many_is_an_error(write):
    path = numbered(write, "a,b", 4)
    assert len(load_questions(f"{path}:1")) == 1  # a file name may contain a comma
    colon = path.rename(path.with_name("data:2"))
    # The name is not read as 2 questions of a file "data".
    assert len(load_questions(str(colon))) == 4
    assert "--data data:2:5: give a number from 1 to 4" in message(load_questions, f"{colon}:5")


# -------------------------------------------------------------------------------------- real slices


HOPS = "musique_2hop musique_3hop musique_4hop"
KINDS = "hotpotqa_bridge hotpotqa_comparison"


@pytest.mark.parametrize(
    ("name", "count", "sources", "tasks"),
    [
        ("ircot/hotpotqa_gold_plus_1_distractor.jsonl", 29, "", "qa"),
        ("ircot/musique_gold_plus_1_distractor.jsonl", 20, HOPS, "qa"),
        ("qa_eval/2wiki_500.jsonl", 500, "", "qa"),
        ("qa_eval/bamboogle.jsonl", 125, "", "qa"),
        ("qa_eval/flashrag_nq_16.jsonl", 17, "", "qa"),
        ("train/r1_searcher_stage1_80.jsonl", 80, "", "qa"),
        ("train/r1_searcher_stage2_100.jsonl", 100, "", "qa"),
        ("train/ur2_stage2_150.jsonl", 150, "math rag", "math qa"),
        ("hotpotqa/official_train_distractor_20.json", 20, KINDS, "qa"),
        ("hotpotqa/hf_layout_dev_distractor_20.jsonl", 20, KINDS, "qa"),
        ("math/math500_60.jsonl", 60, "", "math"),
        ("math/gsm8k_test_20.jsonl", 20, "", "math"),
        ("mcq/medqa_5options_50.jsonl", 50, "", "choice"),
        ("mcq/mmlupro_health_30.jsonl", 30, "health", "choice"),
        ("musique/official_train_15.jsonl", 15, HOPS, "qa"),
    ],
)
def test_real_question_files_load_completely(name, count, sources, tasks):
    questions = load_questions(real(name))
    assert len(questions) == count == len({q.id for q in questions})
    assert {q.source for q in questions} == set(sources.split() or [""])
    assert {q.task for q in questions} == set(tasks.split())
    for question in questions:
        letters = set("ABCDEFGHIJ"[: len(question.options)])
        assert question.task != "choice" or set(question.answers) <= letters


def test_gold_paragraphs_of_real_records_are_those_of_their_question_decomposition():
    path = real("musique/official_train_15.jsonl")
    records = map(json.loads, path.read_text().splitlines())
    for record, question in zip(records, load_questions(path), strict=True):
        steps = {step["paragraph_support_idx"] + 1 for step in record["question_decomposition"]}
        assert set(question.supporting) == steps


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
def test_real_corpora_load_completely_with_titles_and_texts(name, count, title):
    corpus = load_corpus(real(name))
    assert len(corpus) == count == len({d.id for d in corpus})
    assert corpus[0].title == title and all(d.title and d.text for d in corpus)


# ----------------------------------------------------------------------------------- python data.py


def run(*arguments):
    """Runs `python data.py ARGUMENTS` and returns the finished process."""
    command = [sys.executable, "data.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_data_py_prints_layout_counts_and_a_record_of_questions_and_of_a_corpus(write):
    output = run(write(HOTPOT, {**HOTPOT, "_id": "h2", "type": "bridge"})).stdout
    assert_parts(output, "hotpotqa questions 2 hotpotqa_comparison 1 qa 2 Which?")
    output = run(write("5\tTitle: Ana Text: Born.", name="c.tsv")).stdout
    assert_parts(output, "tsv_abstract documents 1 Ana")
    assert_parts(run().stdout, "flashrag id question golden_answers tsv")
    folder = write("# Bells", "It rang.", name="texts/a.md").parent
    assert_parts(run(folder).stdout, "layout text documents 1 a.md#1")


def test_a_table_holds_questions_if_it_has_their_header_or_blanks_in_column_one(write):
    for lines, expected in {
        "5\tA passage.": (True, "tsv"),
        "Who came?\tAna": (False, "plain"),
        "question\tanswer\nWho?\tAna": (False, "plain"),
    }.items():
        assert first_layout(write(lines, name="t.tsv")) == expected


def test_data_py_ends_with_a_one_line_error_and_code_2_on_bad_input(write):
    result = run(write(OWN, "{"))
    assert result.returncode == 2 and result.stdout == "" and result.stderr.count("\n") == 1


# ------------------------------------------------------------------- R-Search's data in IRCoT files


def test_ircots_spans_become_answers_and_marked_paragraphs_become_gold(one):
    question = one(IRCOT)
    assert (question.id, question.question, question.answers) == ("h1", "Which?", ["yes", "it is"])
    # The second and third paragraphs are marked as gold; idx counts from 0.
    assert question.supporting == (2, 3) and question.references[2].text == "Three."
    assert (question.kind, question.level) == ("hotpotqa", "hard")
    # MuSiQue's id holds the number of hops; 2Wiki's records do not name their data set.
    assert one({**IRCOT, "question_id": "3hop1__9"}).kind == "musique_3hop"
    assert one(without(IRCOT, "dataset")).source == ""
