"""Tests data.py: the layouts that are read as they are, several files, and one-line errors."""

import gzip
import json
from dataclasses import asdict, replace

import pytest
from conftest import message, of_fault

from data import (
    Document,
    Hop,
    Question,
    corpus_from_questions,
    load_corpus,
    load_datasets,
    load_questions,
)
from formats.records import append_jsonl, finished_records

OWN = {"id": "q1", "question": "Who?", "answers": ["Ana"]}
FLASHRAG = {"id": "test_0", "question": "Who?", "golden_answers": ["Ana", "Ana Bell"]}


@pytest.fixture
def write(tmp_path):
    def write(*records, name="questions.jsonl"):
        """Writes the records as JSON lines (bytes unchanged) and returns the path."""
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in records]
        path.write_bytes(b"\n".join(lines))
        return path

    return write


@pytest.fixture
def one(write):
    """Returns a function that loads the question of a single record."""

    def one(record) -> Question:
        (question,) = load_questions(write(record))
        return question

    return one


# ------------------------------------------------------------------------------------------ layouts
def test_questions_written_as_json_lines_load_as_the_same_questions(write):
    references = (Document("9", "T", "x"), Document("4", "", "y"))
    questions = [
        Question("1", "Wer ist Ödön?", ["a", "b"], source="one_hop", level="easy"),
        Question("2", "Which?", ["B"], "choice", ("7", "green"), references, (2,)),
        Question("3", "1 + 1?", ["2"], "math", may_search=False),
    ]
    written = [asdict(questions[0]), asdict(questions[1]) | {"options": [7, "green"]}]
    written.append({"answers": [2], "decomposition": [{"query": "q"}]})
    written[-1] |= {"question": "1 + 1?", "task": "math", "may_search": False}
    questions[-1] = replace(questions[-1], hops=(Hop("q"),))
    assert load_questions(write(*written)) == questions


def test_flashrag_keeps_every_golden_answer(one):
    assert one(FLASHRAG) == Question("test_0", "Who?", ["Ana", "Ana Bell"])


@pytest.mark.parametrize(
    "name, kind",
    [
        ("hotpotqa/train.jsonl", "hotpotqa"),  # FlashRAG's
        ("2wikimultihopqa/dev.jsonl", "2wiki"),
        ("HotpotQA_500.jsonl", "hotpotqa"),  # R1-Searcher's
        ("nq/test.jsonl", "qa"),
        ("hotpotqa_2wiki.jsonl", "qa"),  # both
    ],
)
def test_a_file_without_sources_counts_as_the_data_set_that_it_is_named_after(name, kind, write):
    records = [FLASHRAG, OWN | {"source": "2wiki_inference"}]
    assert [q.kind for q in load_questions(write(*records, name=name))] == [kind, "2wiki_inference"]


def test_a_merged_file_has_the_data_set_in_kind_and_id(write):
    """Search-R1's test.parquet begins each of its seven data sets with the id test_0."""
    names = ["nq", "triviaqa", "popqa"]
    questions = load_questions(write(*(FLASHRAG | {"data_source": name} for name in names)))
    assert [(q.id, q.kind) for q in questions] == [(f"{name}:test_0", name) for name in names]


def test_numbers_are_answers_and_blank_aliases_are_dropped(one):
    assert one(OWN | {"answers": [42, "forty-two", 0.5]}).answers == ["42", "forty-two", "0.5"]
    assert one(FLASHRAG | {"golden_answers": [0, "", "Ana", " ", None]}).answers == ["0", "Ana"]


@pytest.mark.fault(229)
def test_gzipped_files_are_read_and_a_broken_one_is_an_error(tmp_path):
    path = tmp_path / "nq.jsonl.gz"
    packed = gzip.compress(json.dumps(OWN).encode())
    path.write_bytes(packed)
    (dataset,) = load_datasets(path).items()
    assert dataset == ("nq", [Question("q1", "Who?", ["Ana"])])
    path.write_bytes(packed[:-10])
    with pytest.raises(EOFError, match="Compressed file ended"):
        load_questions(path)


def test_a_json_list_is_read_like_json_lines(write):
    path = write(json.dumps([OWN, OWN | {"id": "q2"}], indent=1).encode(), name="dev.json")
    assert [q.id for q in load_questions(path)] == ["q1", "q2"]


def test_blank_lines_a_byte_order_mark_and_line_separators_in_texts_are_read(write):
    first, second = b"\xef\xbb\xbf" + json.dumps(OWN).encode(), {"question": "a\u2028b"}
    second = json.dumps(second | {"answers": ["x"]}, ensure_ascii=False).encode() + b"\r"
    questions = load_questions(write(first, b"", second, b""))
    assert [q.question for q in questions] == ["Who?", "a\u2028b"]
    assert questions[1].id == "3"  # a record without an id gets its line number


@pytest.mark.fault(224)
def test_half_a_character_is_read_as_a_question_mark(one):
    question = one({"id": "q", "question": "😀 \ud83d", "answers": ["a\ud83d"]})
    assert (question.question, question.answers) == ("😀 ?", ["a?"])


# ---------------------------------------------------------------------------- bad question files
Q2 = OWN | {"id": "q2"}
BAD_SECOND_LINES = [
    (b'{"id": "q2", "question"', "no JSON (Expecting ':' delimiter"),
    (b"[1]", "expected an object {...}, found [1]"),
    (Q2 | {"question": ["Who?"]}, "field 'question': expected str, found ['Who?']"),
    (Q2 | {"question": " "}, "field 'question' is missing"),
    (Q2 | {"answers": [" ", ""]}, "field 'answers' is missing or empty"),
    (Q2 | {"answers": [["Ana"]]}, "expected answers that are texts or numbers, found [['Ana']]"),
    ({"question": "Who?", "answer": "Ana"}, "field 'answers' is missing or empty: convert.py"),
    of_fault(226, Q2 | {"answers": 5}, "field 'answers': expected list, found 5"),
    (Q2 | {"task": "poem"}, "field 'task': 'poem' is none of qa, math, choice"),
    (Q2 | {"task": "choice", "options": ["x"]}, "field 'answers': expected letters of the 1 opti"),
    (Q2 | {"supporting": [0]}, "field 'supporting': expected numbers from 1 to 0"),
    (Q2 | {"references": [{"id": "1"}]}, "field 'text' is missing"),
    (Q2 | {"references": [{"title": "Ana", "body": "Born."}]}, "field 'text' is missing"),
    (b"question,answers", "no JSON (Expecting value"),
    (OWN, "field 'id': an earlier record has the id 'q1' too"),
    of_fault(225, b'{"id": "q2", "question": "caf\xe9", "answers": ["a"]}', "'utf-8' codec"),
    of_fault(230, b'{"id": "", "question": "Who?", "answers": ["a"]}', "field 'id'"),
    of_fault(230, b'{"id": NaN, "question": "Who?", "answers": ["a"]}', "field 'id'"),
]


@pytest.mark.parametrize(("record", "expected"), BAD_SECOND_LINES)
def test_the_error_of_a_malformed_record_names_file_line_and_field(write, capsys, record, expected):
    text = message(load_questions, write(OWN, record))
    assert f"questions.jsonl, line 2: {expected}" in text
    assert text.endswith("correct or delete it, or leave it out with --skip_bad")
    path = write(OWN, record, OWN | {"id": "q3"})
    assert [q.id for q in load_questions(path, skip_bad=True)] == ["q1", "q3"]
    assert f"1 of 3 records skipped; the first: {path}, line 2" in capsys.readouterr().err


@pytest.mark.fault(228)
@pytest.mark.parametrize("load", [load_questions, load_corpus])
def test_a_missing_file_and_a_file_without_records_are_errors(write, tmp_path, load):
    for content in (b" \n\n", b"[]"):
        assert "no record to use" in message(load, write(content))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load(tmp_path / "nowhere.jsonl")
    assert "no record to use" in message(load, write(b"{x"), skip_bad=True)


# --------------------------------------------------------------------- a file that a run appends to
def test_a_half_written_last_line_is_not_read(tmp_path):
    path, first = tmp_path / "log.jsonl", {"id": 1, "text": "a\u2028b"}
    assert finished_records(path) == []
    append_jsonl(path, [first])
    with open(path, "a") as file:
        file.write('{"id": 2, "te')
    assert finished_records(path) == [first]


# -------------------------------------------------------------------------- several question files
def test_ids_that_two_files_share_get_the_files_name_and_other_ids_stay(write):
    a = write(OWN, Q2, name="hotpot.jsonl")
    b = write(OWN, OWN | {"id": "q3"}, name="wiki.jsonl")
    datasets = load_datasets(f"{a},{b}")
    assert [q.id for q in datasets["hotpot"]] == ["hotpot:q1", "q2"]
    assert [q.id for q in datasets["wiki"]] == ["wiki:q1", "q3"]
    assert load_questions(f"{a},{b}") == datasets["hotpot"] + datasets["wiki"]
    same = write(Q2, name="nq/wiki.jsonl")  # files with the same stem are named by their paths
    assert [*load_datasets(f"{b},{same}")] == [str(b), str(same)]


def test_a_mixture_draws_the_given_number_of_questions_per_file_by_the_seed(write):
    """ARENA draws 10,000 questions of HotpotQA, 10,000 of 2Wiki and 5,000 of MuSiQue."""
    ids = [str(number) for number in range(30)]
    a, b = (write(*(OWN | {"id": i} for i in ids), name=f"{name}.jsonl") for name in "ab")
    drawn = load_datasets(f"{a}:9,{b}", seed=7)
    numbers = [int(question.id.removeprefix("a:")) for question in drawn["a"]]
    assert len({*numbers}) == 9 and numbers == sorted(numbers) and len(drawn["b"]) == 30
    # The draw from one file does not depend on the others, nor an id on what is drawn.
    assert [int(q.id) for q in load_questions(f"{a}:9", seed=7)] == numbers
    assert [q.id[:2] for q in load_questions(f"{a}:1,{b}:1")] == ["a:", "b:"]
    same = write(*(OWN | {"id": i} for i in ids), name="c/a.jsonl")  # named by its path
    assert {q.id.rpartition(":")[0] for q in load_questions(f"{a}:1,{same}:1")} == {
        str(a),
        str(same),
    }


# ------------------------------------------------------------------------------------------ corpora
def test_contents_are_split_after_the_first_line_and_only_outer_quotes_are_removed(write):
    contents = ['"Ana Bell"\nBorn in "Kelmouth".\nTwice.', '""Heroes" (album)"\nA record.']
    contents += ["none", "none"]  # a passage with several ids is in the corpus once
    assert load_corpus(write(*({"id": i, "contents": contents[i]} for i in range(4)))) == [
        Document("0", "Ana Bell", 'Born in "Kelmouth".\nTwice.'),
        Document("1", '"Heroes" (album)', "A record."),
        Document("2", "", "none"),
    ]


@pytest.mark.parametrize(
    "record",
    [
        {"title": "Ana", "contents": '"Ana"\nBorn.\nTwice.'},
        {"title": '"Ana"', "contents": "Ana\nBorn.\nTwice.", "text": "Born."},
        {"content": "Ana\nBorn.\nTwice."},
        {"title": "Ana", "text": "Born.\nTwice.", "contents": None},
    ],
)
def test_a_title_beside_the_contents_is_kept_and_counts_once(write, record):
    assert load_corpus(write(record)) == [Document("1", "Ana", "Born.\nTwice.")]


def test_the_paragraphs_of_questions_become_a_corpus_without_repetitions():
    a, b, c = (Document("1", "T", text) for text in ("x", "y", ""))
    questions = [Question("q", "?", ["a"], references=some) for some in ((a, b, c), (b, a))]
    assert corpus_from_questions(questions) == [Document("1", "T", "x"), Document("2", "T", "y")]
