"""A question, a document, and the layouts they come in on disk.

    Question   what is asked, the answers that count, and, where the record has them, options and
               numbered references
    Document   one passage of a corpus: id, title, text
    SearchRequest -> SearchResult   what the rollout hands to a search function, and what it gets
    back

    file -> records -> layout (named by the first record) -> Question or Document

A layout is one row of a table: its name, the fields that an error message shows, a test on the
first record, and a function (record, number) -> Question. A new layout is one such function and one
row. Whatever is wrong with a file is an InputError of one line that names the file, the line, the
field and what to do; nothing is repaired in silence. records.py reads the files; a folder of texts
is a corpus too, cut by chunks.py. Left out: corpora beyond memory.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from errors import FlagParser, InputError, run_main
from formats.records import (
    PASSAGE_COLUMNS,
    QUESTION_COLUMNS,
    as_id,
    first_line,
    id_field,
    id_or_number,
    is_tsv,
    level_text,
    need,
    need_answers,
    need_id,
    need_strings,
    open_error,
    optional_flag,
    optional_text,
    read_records,
    read_whole,
    report_skipped,
    short,
    type_name,
)
from formats.text_folder import passages
from metrics import last_boxed


@dataclass(frozen=True)
class Document:
    """One passage. `id` is a string even where the file has a number."""

    id: str
    title: str
    text: str


@dataclass(frozen=True)
class Question:
    """One question with every answer that counts as right.

    task         "qa" (open answer), "math" (graded by math equality), "choice" (a letter into
                 `options`) or "summary" (`answers` are reference summaries of the references)
    references   passages that come with the record; `supporting` holds the 1-based numbers of the
                 gold ones, as a prompt shows them
    source       the kind that evaluation tables group by ("one_hop", "hotpotqa", ...)
    may_search   False: it is asked with the prompt without retrieval (UR² section 3.3)
    """

    id: str
    question: str
    answers: list[str]
    task: str = "qa"
    options: tuple[str, ...] = ()
    references: tuple[Document, ...] = ()
    supporting: tuple[int, ...] = ()
    source: str = ""
    level: str = ""
    may_search: bool = True

    @property
    def kind(self) -> str:
        return self.source or self.task


@dataclass(frozen=True)
class SearchRequest:
    """One query of one row. The question rides along for the oracle control and for summarisers."""

    question: Question
    query: str


@dataclass(frozen=True)
class SearchResult:
    """What a search function gives back for one request.

    text       the one passage that the policy reads (a summary); "" shows `documents` themselves,
               numbered
    fallback   the summariser found that the query asks for no fact (UR²)
    """

    documents: list[Document] = field(default_factory=list)
    text: str = ""
    fallback: bool = False
    error: str | None = None


# ------------------------------------------------------------------------ layouts of question files

TASKS = ("qa", "math", "choice", "summary")


def from_own(record: dict, number: int) -> Question:
    """The fields of `Question`, as `save_questions` writes them; only id, question and answers must
    be there.
    """
    question_id = need_id(record)
    need_answers(record, "answers", list, question_id)
    task = optional_text(record, "task") or "qa"
    if task not in TASKS:
        raise InputError(f"field 'task': {short(task)} is none of {', '.join(TASKS)}")
    options = tuple(need_strings(record, "options")) if record.get("options") is not None else ()
    if task == "choice" and not options:
        raise InputError("field 'options' is missing: task 'choice' needs them")
    references = tuple(
        from_reference(item, i) for i, item in enumerate(need_list(record, "references"), 1)
    )
    supporting = tuple(need_list(record, "supporting"))
    for index in supporting:
        if type(index) is not int or not 1 <= index <= len(references):
            raise InputError(
                f"field 'supporting': {short(index)} is no number from 1 to {len(references)}, the"
                " references"
            )
    source, level = optional_text(record, "source"), level_text(record)
    answers = need_strings(record, "answers")
    answers = (
        [letter_of(answer, options, "answers") for answer in answers]
        if task == "choice"
        else answers
    )
    return Question(
        question_id,
        need(record, "question", str),
        answers,
        task,
        options,
        references,
        supporting,
        source,
        level,
    )


def need_list(record: dict, name: str) -> list:
    return [] if record.get(name) is None else need(record, name, list)


def from_reference(item: object, number: int) -> Document:
    if not isinstance(item, dict):
        raise InputError(
            f"field 'references', item {number}: expected an object, found {type_name(item)}"
        )
    try:
        return Document(need_id(item), optional_text(item, "title"), need(item, "text", str))
    except InputError as error:
        raise InputError(f"field 'references', item {number}: {error}") from None


def from_flashrag(record: dict, number: int) -> Question:
    """With `choices` the golden answers are numbers from 0; ours are letters."""
    question_id, question = need_id(record), need(record, "question", str)
    golds = need_answers(record, "golden_answers", list, question_id)
    if not record.get("choices"):
        return Question(question_id, question, need_strings(record, "golden_answers"))
    options = need_strings(record, "choices")
    letters = [option_letter(gold, options, "golden_answers") for gold in golds]
    return Question(question_id, question, letters, "choice", tuple(options))


def option_letter(gold: object, options: list[str], name: str) -> str:
    """The letter of a gold option that is given as a number from 0, as the option's text or as its
    letter.
    """
    letters = [chr(65 + i) for i in range(len(options))]
    if type(gold) is int and 0 <= gold < len(options):
        return letters[gold]
    if gold in options:
        return letters[options.index(gold)]
    if gold in letters:
        return gold
    raise InputError(f"field {name!r}: {short(gold)} is none of the {len(options)} options")


def from_r1_searcher(record: dict, number: int) -> Question:
    """R1-Searcher's and UR²'s files: one answer string; UR² adds source, level and subject,
    R1-Searcher rollout answers.
    """
    question_id, question = need_id(record), need(record, "question", str)
    answers = need_answers(record, "answer", str, question_id)
    source = optional_text(record, "source")
    task = "math" if source == "math" else "qa"
    return Question(question_id, question, answers, task, source=source, level=level_text(record))


def from_plain(record: dict, number: int) -> Question:
    """A table of questions and answers. Several answers stand in one column as a list: ["Ana", "Ana
    Bell"].
    """
    question_id, question = id_or_number(record, number), need(record, "question", str)
    if question.strip().isdigit():
        raise InputError(
            f"field 'question': {short(question)} is a number: passages go where a corpus is"
            " asked for"
        )
    answers = answer_list(need_answers(record, "answer", str, question_id)[0])
    source = optional_text(record, "source")
    return Question(question_id, question, answers, source=source, level=level_text(record))


def answer_list(text: str) -> list[str]:
    """'["Ana", "Ana Bell"]', in JSON or as Python prints it, is two answers; "[1, 2)" is one."""
    for read in (json.loads, ast.literal_eval) if text.startswith("[") else ():
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            answers = read(text)
            if (
                answers
                and isinstance(answers, list)
                and all(isinstance(answer, str) and answer.strip() for answer in answers)
            ):
                return answers
    return [text]


def from_hotpotqa(record: dict, number: int) -> Question:
    """HotpotQA as published or on the hub, and 2WikiMultihopQA. Paragraph n of `context` is
    reference n.
    """
    question_id, question = need_id(record), need(record, "question", str)
    answers = need_answers(record, "answer", str, question_id)
    paragraphs = titled_pairs(record, "context", "sentences")
    references = tuple(
        Document(f"{question_id}:{i}", title, join_sentences(sentences, i))
        for i, (title, sentences) in enumerate(paragraphs, 1)
    )
    facts = titled_pairs(record, "supporting_facts", "sent_id")
    supporting = reference_numbers([title for title, _ in facts], references)
    kind, dataset = optional_text(record, "type"), "2wiki" if "evidences" in record else "hotpotqa"
    source = f"{dataset}_{kind}" if kind else dataset
    return Question(
        question_id, question, answers, "qa", (), references, supporting, source, level_text(record)
    )


def from_musique(record: dict, number: int) -> Question:
    """The paragraphs are numbered by their place, from 1; `idx` counts from 0. Aliases of the
    answer count as right. Records cut from such a file with their paragraphs as {title, text} are
    read too; they tell no gold paragraph.
    """
    question_id, question = need_id(record), need(record, "question", str)
    if optional_flag(record, "answerable") is False:
        raise InputError(
            f"question {question_id} has no answer: field 'answerable' is false, its paragraphs do"
            " not hold one"
        )
    answers = need_answers(record, "answer", str, question_id)
    aliases = (
        need_strings(record, "answer_aliases") if record.get("answer_aliases") is not None else []
    )
    items = need(record, "paragraphs", list)
    paragraphs = [from_paragraph(item, f"{question_id}:{i}", i) for i, item in enumerate(items, 1)]
    check_support(record, [item.get("idx") for item in items])
    supporting = tuple(i for i, (_, gold) in enumerate(paragraphs, 1) if gold)
    hops = re.match(r"\d+hop", question_id)
    source = f"musique_{hops.group()}" if hops else "musique" if supporting else ""
    answers = list(dict.fromkeys([*answers, *(alias for alias in aliases if alias.strip())]))
    return Question(
        question_id,
        question,
        answers,
        "qa",
        (),
        tuple(p for p, _ in paragraphs),
        supporting,
        source,
    )


def from_paragraph(item: object, document_id: str, number: int) -> tuple[Document, bool]:
    """(the paragraph, is it gold)"""
    try:
        if not isinstance(item, dict):
            raise InputError(f"expected an object, found {type_name(item)}")
        text = need(item, "text" if "text" in item else "paragraph_text", str)
        return Document(document_id, optional_text(item, "title"), text), bool(
            optional_flag(item, "is_supporting")
        )
    except InputError as error:
        raise InputError(f"field 'paragraphs', item {number}: {error}") from None


def check_support(record: dict, known: list) -> None:
    """Every paragraph that a step of the decomposition names must be there: a gold id without a
    paragraph is a data error.
    """
    for i, step in enumerate(need_list(record, "question_decomposition"), 1):
        index = step.get("paragraph_support_idx") if isinstance(step, dict) else None
        if index is not None and index not in known:
            raise InputError(
                f"field 'question_decomposition', item {i}: no paragraph has the idx {short(index)}"
            )


def from_mmlu_pro(record: dict, number: int) -> Question:
    """The letter is the answer; `answer_index` counts from 0 and must say the same."""
    question_id, question = need_id(record), need(record, "question", str)
    answer = need_answers(record, "answer", str, question_id)[0]
    options = need_strings(record, "options")
    letters = {"answer": letter_of(answer, options, "answer")}
    if record.get("answer_index") is not None:
        letters["answer_index"] = option_letter(record["answer_index"], options, "answer_index")
    if len(set(letters.values())) > 1:
        raise InputError(
            "fields 'answer' and 'answer_index' name different options:"
            f" {' and '.join(letters.values())}"
        )
    category = optional_text(record, "category")
    return Question(
        question_id, question, [letters["answer"]], "choice", tuple(options), source=category
    )


def letter_of(letter: object, options: Sequence[str], name: str) -> str:
    """A letter is a letter here, even where an option happens to read "B"."""
    letters = [chr(65 + i) for i in range(len(options))]
    if letter not in letters:
        raise InputError(f"field {name!r}: {short(letter)} is none of the {len(options)} options")
    return letter


def from_medqa(record: dict, number: int) -> Question:
    """Options as {"A": text, ...} or as a list; `answer` is the text of the option that the letter
    `answer_idx` names.
    """
    question_id, question = id_or_number(record, number), need(record, "question", str)
    text = need_answers(record, "answer", str, question_id)[0]
    options = (
        lettered(record["options"])
        if isinstance(record.get("options"), dict)
        else need_strings(record, "options")
    )
    letter = letter_of(need(record, "answer_idx", str), options, "answer_idx")
    if options[ord(letter) - 65].strip() != text.strip():
        raise InputError(
            f"field 'answer_idx': option {letter} is {short(options[ord(letter) - 65])}, 'answer'"
            f" {short(text)}"
        )
    return Question(question_id, question, [letter], "choice", tuple(options))


def lettered(options: dict) -> list[str]:
    expected = [chr(65 + i) for i in range(len(options))]
    if sorted(options) != expected or not all(
        isinstance(option, str) for option in options.values()
    ):
        raise InputError(
            f"field 'options': expected texts under {', '.join(expected)}, found {short(options)}"
        )
    return [options[letter] for letter in expected]


def from_math(record: dict, number: int) -> Question:
    """MATH-500 and Minerva: a worked solution, and the answer beside it or in its last box."""
    question_id = id_or_number(record, number)
    question = need(record, "question" if "question" in record else "problem", str)
    if record.get("answer") not in (None, ""):
        answer = need(record, "answer", str)
    else:
        answer = last_boxed(need(record, "solution", str))
        if not answer:
            raise InputError(
                f"question {question_id} has no answer: no field 'answer', and no \\boxed{{...}} in"
                " 'solution'"
            )
    return Question(question_id, question, [answer], "math", level=level_text(record))


def from_gsm8k(record: dict, number: int) -> Question:
    """The answer stands behind the last "####" of the worked solution."""
    question_id, question = id_or_number(record, number), need(record, "question", str)
    answer = need(record, "answer", str).rpartition("####")[2].strip()
    if not answer:
        raise InputError(
            f"question {question_id} has no answer: nothing stands behind '####' in field 'answer'"
        )
    return Question(question_id, question, [answer], "math")


def from_verl(record: dict, number: int) -> Question:
    """verl's training records (Search-R1 and others): the question ends the user's message, and may
    stand behind an instruction and "Question:"; several answers come as a list, under "target", or
    joined by <|answer_split|>.
    """
    source = optional_text(record, "data_source")
    extra = {} if record.get("extra_info") is None else need(record, "extra_info", dict)
    index = number if extra.get("index") is None else as_id(extra["index"], "extra_info.index")
    question_id = f"{source}:{index}".lstrip(":")
    said = [
        m.get("content")
        for m in need(record, "prompt", list)
        if isinstance(m, dict) and m.get("role") == "user"
    ]
    if not said or not isinstance(said[-1], str):
        raise InputError("field 'prompt': no message of the role 'user' with a text")
    question = said[-1].rpartition("Question:")[2].strip()
    if not question:
        raise InputError("field 'prompt': the user's message holds no question")
    golds = need(record, "reward_model", dict).get("ground_truth")
    golds = golds.get("target") if isinstance(golds, dict) else golds
    golds = golds.split("<|answer_split|>") if isinstance(golds, str) else golds
    name = "reward_model.ground_truth"
    need_answers({name: golds}, name, list, question_id)
    return Question(question_id, question, need_strings({name: golds}, name), source=source)


def titled_pairs(record: dict, name: str, second: str) -> list[tuple[str, object]]:
    """[[title, x], ...] as published, or {"title": [...], second: [...]} as on the hub."""
    value = record.get(name)
    if isinstance(value, dict):
        titles, others = value.get("title"), value.get(second)
        if (
            not isinstance(titles, list)
            or not isinstance(others, list)
            or len(titles) != len(others)
        ):
            raise InputError(
                f"field {name!r}: expected two lists of one length, 'title' and {second!r}"
            )
        value = list(zip(titles, others, strict=True))
    else:
        value = need(record, name, list)
    for i, pair in enumerate(value, 1):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise InputError(
                f"field {name!r}, item {i}: expected a title and its {second}, found {short(pair)}"
            )
    return value


def join_sentences(sentences: object, number: int) -> str:
    if not isinstance(sentences, list) or not all(
        isinstance(sentence, str) for sentence in sentences
    ):
        raise InputError(
            f"field 'context', item {number}: expected a list of sentences, found"
            f" {short(sentences)}"
        )
    # HotpotQA's sentences begin with their blank, 2Wiki's do not: "".join is right for the first
    # alone.
    return " ".join(sentence.strip() for sentence in sentences if sentence.strip())


def reference_numbers(titles: list[str], references: tuple[Document, ...]) -> tuple[int, ...]:
    """The 1-based numbers of the paragraphs with these titles, each once, in the order of the
    references. None at all where a title has no paragraph: in HotpotQA's fullwiki files they were
    retrieved, and half of the gold would pass for all.
    """
    numbers: dict[str, int] = {}
    for i, reference in enumerate(references, 1):
        numbers.setdefault(reference.title, i)
    found = {numbers.get(title) for title in titles}
    return () if None in found else tuple(sorted(found))


class Layout(NamedTuple):
    """One way to write a record. `recognise` looks at names that only this layout has, so that a
    record that lacks its question or its answer is still told what it lacks.
    """

    shown: str
    recognise: Callable[[dict], bool]
    convert: Callable[[dict, int], Question | Document]


_OWN_FIELDS = {f.name for f in fields(Question)}
_PLAIN_FIELDS = {
    "id",
    "_id",
    "question_id",
    "question",
    "answer",
    "source",
    "level",
    "type",
    "category",
    "subject",
}


def _is_hotpotqa(record: dict) -> bool:
    return "context" in record and ("supporting_facts" in record or "_id" in record)


def _is_hub_hotpotqa(record: dict) -> bool:
    return _is_hotpotqa(record) and isinstance(record["context"], dict)


def _is_2wiki(record: dict) -> bool:
    return "evidences" in record and _is_hotpotqa(record)


def _is_r1_searcher(record: dict) -> bool:
    return "idx" in record and ("question" in record or "answer" in record)


def _is_plain(record: dict) -> bool:
    return "question" in record and "answer" in record and set(record) <= _PLAIN_FIELDS


def _is_own(record: dict) -> bool:
    return "answers" in record or ("question" in record and set(record) <= _OWN_FIELDS)


def _is_medqa(record: dict) -> bool:
    return "options" in record and "answer_idx" in record


def _is_mmlu_pro(record: dict) -> bool:
    return "options" in record and ("answer_index" in record or "question_id" in record)


def _is_math(record: dict) -> bool:
    return "solution" in record and "answers" not in record


def _is_gsm8k(record: dict) -> bool:
    return isinstance(record.get("answer"), str) and "####" in record["answer"]


# The first row that recognises a record wins.
LAYOUTS: dict[str, Layout] = {
    "flashrag": Layout(
        "id, question, golden_answers[]", lambda record: "golden_answers" in record, from_flashrag
    ),
    "2wiki": Layout(
        "_id, question, answer, supporting_facts, context, evidences", _is_2wiki, from_hotpotqa
    ),
    "hotpotqa_hub": Layout(
        "id, question, answer, supporting_facts{}, context{}", _is_hub_hotpotqa, from_hotpotqa
    ),
    "hotpotqa": Layout(
        "_id, question, answer, supporting_facts[], context[]", _is_hotpotqa, from_hotpotqa
    ),
    "musique": Layout(
        "id, paragraphs[{title, paragraph_text}], question, answer",
        lambda r: "paragraphs" in r,
        from_musique,
    ),
    "verl": Layout(
        "data_source, prompt[], reward_model{ground_truth}",
        lambda record: "reward_model" in record,
        from_verl,
    ),
    "medqa": Layout("question, options, answer, answer_idx", _is_medqa, from_medqa),
    "mmlu_pro": Layout(
        "question_id, question, options[], answer, answer_index", _is_mmlu_pro, from_mmlu_pro
    ),
    "math": Layout("problem, solution[, answer]", _is_math, from_math),
    "gsm8k": Layout("question, answer = '... #### 18'", _is_gsm8k, from_gsm8k),
    "r1_searcher": Layout("idx, question, answer", _is_r1_searcher, from_r1_searcher),
    "plain": Layout("[id,] question, answer; or question<TAB>answer", _is_plain, from_plain),
    "own": Layout("id, question, answers[]", _is_own, from_own),
}


_PREDICTED = {"prediction", "predictions", "pred", "pred_ans", "pred_answer"}


def detect_layout(record: dict) -> str:
    """The name of the layout that this record is written in."""
    return _detect(record, LAYOUTS)


def _detect(record: dict, table: dict[str, Layout]) -> str:
    for name, layout in table.items():
        if layout.recognise(record):
            return name
    if _PREDICTED & set(record) or isinstance(record.get("answer"), dict):
        raise InputError("this looks like predictions: python eval.py --predictions FILE")
    for name, value in record.items():
        inner = value[0] if isinstance(value, list) and value else value
        if isinstance(inner, dict) and any(layout.recognise(inner) for layout in table.values()):
            raise InputError(
                f"one object with the records under {short(name)}: save them as a list, or one on"
                " each line"
            )
    known = "; ".join(f"{name} ({layout.shown})" for name, layout in table.items())
    found = textwrap.shorten(", ".join(map(repr, record)), 300, placeholder=" ...") or "none"
    raise InputError(
        f"unknown layout: it has the fields {found}; known are {known}: convert the file to one of"
        " them"
    )


# -------------------------------------------------------------------------- layouts of corpus files


def from_contents(record: dict, number: int) -> Document:
    """contents = '"Title"\\ntext'; a title may hold quotes itself, so only the outer pair goes."""
    contents = need(record, "contents", str)
    title, newline, text = contents.partition("\n")
    if not newline:
        return Document(id_or_number(record, number), "", contents.strip())
    title = title.strip()
    if len(title) >= 2 and title[0] == title[-1] == '"':
        title = title[1:-1]
    return checked(id_or_number(record, number), title, text, "contents")


def from_title_text(record: dict, number: int) -> Document:
    title = optional_text(record, "title")
    text = optional_text(record, "text") if title.strip() else need(record, "text", str)
    return checked(id_or_number(record, number), title, text, "text")


def from_abstract(record: dict, number: int) -> Document:
    """R1-Searcher's abstracts: "Title: X Text:  Y"."""
    passage = need(record, "passage", str)
    title, mark, text = passage.partition(" Text:")
    if not mark or not title.startswith("Title:"):
        raise InputError(f"field 'text': expected 'Title: ... Text: ...', found {short(passage)}")
    return checked(need_id(record), title.removeprefix("Title:"), text, "text")


def from_chunk(record: dict, number: int) -> Document:
    """R1-Searcher's pages: the title, three blanks, a piece of the page."""
    title, gap, text = need(record, "passage", str).partition("   ")
    return checked(need_id(record), title if gap else "", text if gap else title, "text")


def from_passage(record: dict, number: int) -> Document:
    return checked(need_id(record), "", need(record, "passage", str), "text")


def checked(document_id: str, title: str, text: str, name: str) -> Document:
    if not title.strip() and not text.strip():
        raise InputError(f"field {name!r} is empty")
    return Document(document_id, title.strip(), text.strip())


def _begins(record: dict) -> str:
    return record["passage"] if isinstance(record.get("passage"), str) else ""


# A tab-separated line arrives as {"id", "passage"}.
CORPUS_LAYOUTS: dict[str, Layout] = {
    "contents": Layout(
        'id, contents = "\\"Title\\"\\ntext"', lambda r: "contents" in r, from_contents
    ),
    "title_text": Layout("[id,] title, text", lambda r: "text" in r, from_title_text),
    "tsv_abstract": Layout(
        "id<TAB>Title: ... Text: ...", lambda r: _begins(r).startswith("Title:"), from_abstract
    ),
    "tsv_chunk": Layout(
        "id<TAB>title, three blanks, text", lambda r: "   " in _begins(r).strip(), from_chunk
    ),
    "tsv": Layout("id<TAB>text", lambda r: "passage" in r, from_passage),
}


# --------------------------------------------------------------------------------- folders of texts

TEXT_ENDINGS = (".txt", ".md")


def text_ending(path: Path) -> str:
    return next(
        (
            ending
            for ending in TEXT_ENDINGS
            if path.name.lower().removesuffix(".gz").endswith(ending)
        ),
        "",
    )


def is_text(path: Path) -> bool:
    """A folder, a Markdown file, or a .txt file that does not hold records all the same."""
    if path.is_dir() or text_ending(path) == ".md":
        return True
    return (
        text_ending(path) == ".txt"
        and not is_tsv(path)
        and not first_line(path).startswith((b"{", b"[{"))
    )


def text_files(folder: Path) -> list[Path]:
    """The texts in a folder and the folders below it, sorted; hidden ones are left out, and so is
    what a link leads to a second time: links may go round in circles.
    """

    def fail(error: OSError) -> None:
        raise open_error(Path(error.filename), error)

    found, seen = [], set()
    for root, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and os.path.realpath(root) not in seen
        ]
        files = [
            Path(root, name)
            for name in names
            if not name.startswith(".") and os.path.realpath(root) not in seen
        ]
        found += [
            file for file in files if text_ending(file) and (file.is_file() or not file.exists())
        ]  # a pipe would hang
        seen.add(os.path.realpath(root))
    if not found:
        raise InputError(
            f"{folder}: no file in it ends in {' or '.join(TEXT_ENDINGS)}: name a folder of texts,"
            " or a file"
        )
    # Of two names of one file the real one stays: sorted by path, links behind it.
    once = {
        os.path.realpath(file): file
        for file in sorted(found, key=lambda file: (file.is_symlink(), file), reverse=True)
    }
    return sorted(once.values())


def load_texts(path: Path, skip_bad: bool) -> list[Document]:
    """Passages of about 100 words (chunks.py) of one text or of a folder of them; their ids are
    "file in the folder#number".
    """
    files, root = (text_files(path), path) if path.is_dir() else ([path], path.parent)
    documents, problems, used = [], [], 0
    for file in tqdm(
        files, desc="passages", unit="file", dynamic_ncols=True, leave=False, disable=None
    ):
        name = (
            file.relative_to(root).as_posix().encode(errors="replace").decode()
        )  # Linux allows names that are no text
        try:
            text = read_whole(file).replace("\r\n", "\n").replace("\r", "\n")
        except InputError as error:
            if not skip_bad:
                raise InputError(f"{error}, or leave it out with --skip_bad") from None
            problems.append(str(error))
            continue
        found = passages(text, stem(Path(name)), markdown=text_ending(file) == ".md")
        documents += [
            Document(f"{name}#{i}", title, passage) for i, (title, passage) in enumerate(found, 1)
        ]
        problems, used = (
            problems if found else problems + [f"{file}: no words in it"],
            used + bool(found),
        )
    report_skipped(path, used, problems, "file")
    return documents


# -------------------------------------------------------------------------------------- whole files


def load_questions(path: str | Path | list, skip_bad: bool = False) -> list[Question]:
    """Questions of one file or of several (a list, or names with commas between them), with ids
    that are unique over all.

    `skip_bad` leaves malformed records out and says so on stderr.
    """
    return [
        question for questions in load_datasets(path, skip_bad).values() for question in questions
    ]


def load_datasets(path: str | Path | list, skip_bad: bool = False) -> dict[str, list[Question]]:
    """`load_questions` by file: {name: its questions}, in the order given. A name is the file's
    stem, or more of its path where two files share that ("nq/test", "hotpotqa/test").

    An id that several files use gets the file's name in front, in each of them: two data sets both
    count from 1, and questions that share an id would share a group.
    """
    files = named_files(path)
    names = dataset_names(files)
    loaded = {
        name: _load(file, LAYOUTS, skip_bad, QUESTION_COLUMNS)
        for name, file in zip(names, files, strict=True)
    }
    uses = Counter(question.id for questions in loaded.values() for question in questions)
    named = {
        name: [
            replace(question, id=f"{name}:{question.id}") if uses[question.id] > 1 else question
            for question in questions
        ]
        for name, questions in loaded.items()
    }
    for question_id, count in Counter(
        question.id for questions in named.values() for question in questions
    ).items():
        if count > 1:
            raise InputError(
                f"question id {question_id!r} comes from two files: rename one of the files, or"
                " leave one out"
            )
    return named


def stem(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).stem


def dataset_names(files: list[Path]) -> list[str]:
    """For each file the shortest of stem, folder/stem and whole path that no other file shares."""
    choices = [
        (stem(file), f"{file.absolute().parent.name}/{stem(file)}", str(file.resolve()))
        for file in files
    ]
    uses = Counter(name for names in choices for name in names)
    for file, (*_, whole) in zip(files, choices, strict=True):
        if uses[whole] > 1:
            raise InputError(
                f"{file}: named twice, its questions would share their ids: name it once"
            )
    return [next(name for name in names if uses[name] == 1) for names in choices]


@dataclass(frozen=True)
class Attempts:
    """A question and what a model answered in several rollouts; "" where it gave no answer."""

    question: Question
    predictions: list[str]

    @property
    def id(self) -> str:
        return self.question.id


def from_attempts(record: dict, number: int) -> Attempts:
    predictions = need_strings(record, "pred_anses")
    if not predictions:
        raise InputError("field 'pred_anses' is empty: there is no rollout to score")
    return Attempts(from_r1_searcher(record, number), predictions)


ATTEMPT_LAYOUTS = {
    "rollouts": Layout(
        "idx, question, answer, pred_anses[]", lambda r: "pred_anses" in r, from_attempts
    )
}


def load_attempts(path: str | Path, skip_bad: bool = False) -> list[Attempts]:
    """Published rollout answers: R1-Searcher's stage 1 file has ten for each question."""
    return _load(Path(path), ATTEMPT_LAYOUTS, skip_bad)


def load_corpus(path: str | Path, skip_bad: bool = False) -> list[Document]:
    """Passages of one file: JSONL, a JSON list, tab-separated lines or parquet, where a record
    without id gets its line's number; or of a text or a folder of texts (.txt, .md), cut into
    pieces of about 100 words.
    """
    path = Path(path)
    return (
        load_texts(path, skip_bad)
        if is_text(path)
        else _load(path, CORPUS_LAYOUTS, skip_bad, PASSAGE_COLUMNS)
    )


def named_files(path: str | Path | list) -> list[Path]:
    if isinstance(path, list | tuple):
        return [file for item in path for file in named_files(item)]
    if path and Path(path).exists():  # a name may hold a comma; "" would be this folder
        return [Path(path)]
    names = [name.strip() for name in str(path).split(",") if name.strip()]
    if not names:
        raise InputError("no question file was named")
    return [Path(name) for name in names]


def _load(
    path: Path, table: dict[str, Layout], skip_bad: bool, columns: tuple[str, ...] = ()
) -> list:
    """Every record of a file through one layout, with unique ids."""
    layout, items, places, problems = None, [], {}, []
    for number, place, record in read_records(path, columns):
        try:
            if isinstance(record, InputError):
                raise record
            layout = layout or table[_detect(record, table)]
            item = layout.convert(record, number)
            if item.id in places:
                raise InputError(
                    f"field {id_field(record)!r}: duplicate id {short(item.id)}, first in"
                    f" {places[item.id]}"
                )
        except InputError as error:
            problems.append(f"{path}, {place}: {error}")
            if not skip_bad:
                unknown = layout is None and isinstance(record, dict)
                raise InputError(
                    problems[0]
                    + ("" if unknown else ": correct it, or leave it out with --skip_bad")
                ) from None
        else:
            items.append(item)
            places[item.id] = place
    report_skipped(path, len(items), problems, "record")
    report_gold(path, items)
    return items


def report_gold(path: Path, items: list) -> None:
    """Some questions of a file know their gold paragraphs and some do not: that is seldom meant."""
    gold = [
        bool(item.supporting) for item in items if isinstance(item, Question) and item.references
    ]
    if any(gold) and not all(gold):
        print(
            f"{path}: of {len(gold)} questions with paragraphs, {gold.count(False)} have no gold"
            " paragraph",
            file=sys.stderr,
        )


def corpus_from_questions(questions: list[Question]) -> list[Document]:
    """The questions' own paragraphs as a corpus, each once however many questions bring it."""
    documents: dict[tuple[str, str], Document] = {}
    ids: set[str] = set()
    for document in (reference for question in questions for reference in question.references):
        key = (document.title, document.text)
        if key not in documents and document.text:
            document = (
                document
                if document.id not in ids
                else replace(document, id=f"{document.id}#{len(documents)}")
            )
            documents[key] = document
            ids.add(document.id)
    if not documents:
        raise InputError(
            "these questions bring no paragraphs: name a corpus file instead of from-data"
        )
    return list(documents.values())


def save_questions(path: str | Path, questions: list[Question]) -> None:
    """Our own JSONL: one line per question, the fields of `Question`, references as {id, title,
    text}.
    """
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(
            json.dumps(asdict(question), ensure_ascii=False) + "\n" for question in questions
        )


# ----------------------------------------------------------------------------------- python data.py


def first_layout(path: Path) -> tuple[bool, str]:
    """(is it a corpus, the layout's name), from the first record that can be read."""
    if is_text(path):
        return True, "text"
    tsv = is_tsv(path)
    for _, place, record in read_records(path, ("first", "second") if tsv else ()):
        if isinstance(record, dict):
            if set(record) == {"first", "second"}:  # no header: ids have no blanks, questions do
                names = QUESTION_COLUMNS if " " in record["first"].strip() else PASSAGE_COLUMNS
                record = dict(zip(names, record.values(), strict=True))
            corpus = "question" not in record and any(
                layout.recognise(record) for layout in CORPUS_LAYOUTS.values()
            )
            try:
                return corpus, _detect(record, CORPUS_LAYOUTS if corpus else LAYOUTS)
            except InputError as error:
                raise InputError(f"{path}, {place}: {error}") from None
    return tsv, "unreadable"  # loading it says why


def show(path: Path, skip_bad: bool) -> None:
    corpus, layout = first_layout(path)
    items = load_corpus(path, skip_bad) if corpus else load_questions(path, skip_bad)
    print(f"{path}\nlayout     {layout}\n{'documents ' if corpus else 'questions '} {len(items):,}")
    if corpus:
        print(f"words      {sum(len(d.text.split()) for d in items) / len(items):.0f} per document")
    else:
        for name in ("source", "task"):
            counts = Counter(getattr(question, name) or "-" for question in items)
            print(
                f"{name:10} "
                + ", ".join(f"{kind} {count:,}" for kind, count in counts.most_common())
            )
    print("first record")
    for name, value in asdict(items[0]).items():
        if value:
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            print(f"  {name:10} {textwrap.shorten(shown, 300, placeholder=' ...')}")


def main() -> None:
    parser = FlagParser(description="Say what a question file or a corpus file holds.")
    parser.add_argument(
        "file",
        help="questions, passages or a folder of texts; several files with commas between them",
    )
    parser.add_argument(
        "--skip_bad", action="store_true", help="leave malformed records out and count them"
    )
    args = parser.parse_args()
    for path in named_files(args.file):
        show(path, args.skip_bad)


if __name__ == "__main__":
    run_main(main)
