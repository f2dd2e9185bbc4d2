"""Tests convert.py: each data set on a small record and on a real slice, and its errors."""

import json
import sys

import pytest
from conftest import ROOT, message

import convert
from data import Document, Hop, Question, load_questions

SLICES = ROOT.parent / "shared" / "data"
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
TRIPLES = [["Heat", "director", "Ana Bell"], ["Ana Bell", "place of death", "Kelmouth"]]
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
        {"id": 1, "question": "Heat >> director", "answer": "Ana Bell"},
        {"id": 2, "question": "Where did #1 die?", "answer": "Kelmouth"},
    ],
}
MMLU = {"question_id": 70, "question": "Which?", "options": ["B", "red"], "answer": "A"}
MEDQA = {"question": "Which?", "options": ["red", "green"], "answer": "green", "answer_idx": "B"}
MATH = {"problem": "1 + 1?", "solution": "It is \\boxed{2}.", "answer": "2", "level": 5}
MINERVA = {"problem": "1/2?", "solution": "First \\boxed{1}, then \\boxed{\\frac{1}{2}}.", "idx": 4}
VERL = {
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "Answer it. Question: Who?\n"}],
    "reward_model": {"ground_truth": {"target": ["Ana", "Ana Bell"]}, "style": "rule"},
    "extra_info": {"index": 3, "split": "train"},
}
POPQA = {"id": 4, "question": "Who?", "possible_answers": '["Ana", "Ana Bell"]', "s_pop": 3}
TRIVIAQA = {"question": "Who?", "question_id": "tc_2", "answer": {"value": "Ana", "type": "x"}}
R1 = {"idx": 7, "question": "Who?", "answer": "Ana"}


@pytest.fixture
def one(tmp_path, monkeypatch):
    """Returns a function: runs convert.py on one record and loads the question that it writes."""

    def one(kind, record) -> Question:
        path, out = tmp_path / "published.jsonl", tmp_path / "ours.jsonl"
        path.write_text(json.dumps(record) + "\n")
        monkeypatch.setattr(sys, "argv", ["convert.py", kind, str(path), str(out)])
        convert.main()
        (question,) = load_questions(out)
        return question

    return one


@pytest.mark.parametrize("record", [HOTPOT, HUB])
def test_supporting_facts_become_distinct_reference_numbers_that_count_from_one(one, record):
    question = one("hotpotqa", record)
    assert question.supporting == (1, 3)  # C is paragraph 3 and is named twice; A is paragraph 1
    assert question.references[0] == Document("1", "A", "One. Two.")
    assert (question.id, question.source, question.level) == ("h1", "hotpotqa_comparison", "hard")
    facts = {"supporting_facts": [["C", 0], ["Z", 1]]}  # HotpotQA's fullwiki files have such titles
    assert one("hotpotqa", HOTPOT | facts).supporting == ()


def test_2wikis_triples_become_hops(one):
    question = one("2wiki", HOTPOT | {"evidences": TRIPLES})
    assert question.source == "2wiki_comparison" and question.supporting == (1, 3)
    places = Hop("place of death of Ana Bell", "Kelmouth")
    assert question.hops == (Hop("director of Heat", "Ana Bell"), places)


def test_musiques_gold_paragraphs_are_numbered_by_place_and_aliases_are_answers(one):
    question = one("musique", MUSIQUE)
    # The field idx counts from 0. Both gold paragraphs have the title B, so only places differ.
    assert question.supporting == (2, 3)
    assert question.answers == ["Kelmouth", "Kel"] and question.source == "musique_2hop"
    steps = Hop("Heat >> director", "Ana Bell"), Hop("Where did Ana Bell die?", "Kelmouth")
    assert question.hops == steps


ANA_OF_VERL = Question("nq:3", "Who?", ["Ana", "Ana Bell"], source="nq")
ANA_OF_POPQA = Question("4", "Who?", ["Ana", "Ana Bell"], source="popqa")
MEDQA_ONE = Question("1", "Which?", ["B"], "choice", ("red", "green"))


@pytest.mark.parametrize(
    ("kind", "record", "expected"),
    [
        # MMLU-Pro's answer is a letter, even if an option has the same text.
        (
            "mmlu_pro",
            MMLU | {"category": "law"},
            Question("70", "Which?", ["A"], "choice", ("B", "red"), source="law"),
        ),
        ("medqa", MEDQA, MEDQA_ONE),
        ("medqa", MEDQA | {"options": {"B": "green", "A": "red"}}, MEDQA_ONE),
        ("math", MATH, Question("1", "1 + 1?", ["2"], "math", level="5")),
        ("math", MINERVA, Question("4", "1/2?", [r"\frac{1}{2}"], "math")),
        (
            "gsm8k",
            {"question": "How much?", "answer": "9 * 2 = <<9*2=18>>18 #### no\n#### 18"},
            Question("1", "How much?", ["18"], "math"),
        ),
        (
            "ur2",
            R1 | {"source": "math", "level": "hard"},
            Question("7", "Who?", ["Ana"], "math", source="math", level="hard"),
        ),
        ("popqa", POPQA, ANA_OF_POPQA),
        ("popqa", POPQA | {"possible_answers": ["Ana", "Ana Bell"]}, ANA_OF_POPQA),
        (
            "triviaqa",
            TRIVIAQA | {"answer": {"value": "Ana", "aliases": ["Bell", "Ana", ""]}},
            Question("tc_2", "Who?", ["Ana", "Bell"], source="triviaqa"),
        ),
        ("triviaqa", TRIVIAQA, Question("tc_2", "Who?", ["Ana"], source="triviaqa")),
        ("gsm8k", R1 | {"answer": 18}, Question("7", "Who?", ["18"], "math")),
        (
            "verl",
            VERL | {"reward_model": {"ground_truth": {"target": 42}}},
            Question("nq:3", "Who?", ["42"], source="nq"),
        ),
        ("verl", VERL, ANA_OF_VERL),
        (
            "verl",
            VERL | {"reward_model": {"ground_truth": "Ana<|answer_split|>Ana Bell"}},
            ANA_OF_VERL,
        ),
    ],
)
def test_a_published_record_becomes_a_question(kind, record, expected, one):
    assert one(kind, record) == expected


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"question": "Is 'Question: Who?' one?"}, "Answer. Question: no"),
        ({"extra_info": {"index": 3, "question": "Is 'Question: Who?' one?"}}, "no"),
        ({}, "Answer a Question: so.\n Question: Is 'Question: Who?' one?\n"),
        ({}, "Answer it. Question: Is 'Question: Who?' one?\n"),
        ({}, "Question: Is 'Question: Who?' one?"),
        ({}, "Is it one?"),
    ],
)
def test_verls_question_is_a_field_or_follows_the_first_marker(fields, prompt, one):
    record = VERL | {"prompt": [{"role": "user", "content": prompt}]} | fields
    expected = prompt if prompt == "Is it one?" else "Is 'Question: Who?' one?"
    assert one("verl", record).question == expected


@pytest.mark.parametrize(
    ("kind", "record", "expected"),
    [
        ("hotpotqa", R1, "line 1: field 'context' is missing"),
        ("musique", MUSIQUE | {"answerable": False}, "field 'answers'"),
        ("math", MINERVA | {"solution": "no box"}, "field 'answers'"),
    ],
)
def test_a_record_that_cannot_be_used_is_an_error_with_its_place(kind, record, expected, one):
    assert expected in message(one, kind, record)


def test_parquet_files_are_read_with_pyarrow(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `data`")
    from pyarrow import parquet

    path, records = tmp_path / "hub.parquet", [HUB, {**HUB, "id": "h2"}]
    parquet.write_table(pyarrow.Table.from_pylist(records), path)
    assert [record["id"] for record in convert.convert("hotpotqa", path)] == ["h1", "h2"]


def test_a_record_without_a_source_is_of_the_data_set_that_its_file_is_named_after(tmp_path):
    path = tmp_path / "hotpotqa_500.jsonl"
    path.write_text("\n".join(map(json.dumps, (R1, R1 | {"source": "math"}))))
    assert [r["source"] for r in convert.convert("r1_searcher", path)] == ["hotpotqa", "math"]


# -------------------------------------------------------------------------------------- real slices


@pytest.mark.parametrize(
    ("kind", "name", "count"),
    [
        ("r1_searcher", "train/r1_searcher_stage1_80.jsonl", 80),
        ("ur2", "train/ur2_stage2_150.jsonl", 150),
        ("hotpotqa", "hotpotqa/official_train_distractor_20.json", 20),
        ("hotpotqa", "hotpotqa/hf_layout_dev_distractor_20.jsonl", 20),
        ("math", "math/math500_60.jsonl", 60),
        ("gsm8k", "math/gsm8k_test_20.jsonl", 20),
        ("medqa", "mcq/medqa_5options_50.jsonl", 50),
        ("mmlu_pro", "mcq/mmlupro_health_30.jsonl", 30),
        ("musique", "musique/official_train_15.jsonl", 15),
    ],
)
def test_real_files_are_converted_completely(kind, name, count):
    if not (SLICES / name).exists():
        pytest.skip(f"the real slice {SLICES / name} is missing")
    assert len(convert.convert(kind, SLICES / name)) == count
