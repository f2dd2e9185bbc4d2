"""The layouts that questions and passages come in on disk: one row of a table each.

    file -> records -> layout (named by the first record) -> the fields of a Question or a Document

A row holds the signs of a layout and a function (record, its number in the file) -> fields. The
first row whose signs a record has wins; they are names that only this layout has, so that a record
without its question is still told what it lacks. A new layout is one function and one row. Whatever
is wrong is one line with file, line, field and what to do; nothing is repaired in silence.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from errors import InputError
from formats.records import read_records, report_skipped, short, type_name
from metrics import last_boxed

TASKS = ("qa", "math", "choice", "summary")
ID_FIELDS = ("id", "_id", "idx", "question_id", "unique_id")

# ------------------------------------------------------------------------------- fields of a record


def wrong(name: str, what: str) -> InputError:
    return InputError(f"field {name!r}: {what}")


def no_answer(why: str) -> InputError:
    return InputError(f"the question has no answer: {why}")


def optional(record: dict, name: str, kind: type = str):
    """record[name], which must be of this kind; an empty one where it is missing or null."""
    value = record.get(name)
    if value is not None and not isinstance(value, kind):
        found = f"{type_name(value)} {short(value)}"
        raise wrong(name, f"expected {type_name(kind())}, found {found}")
    return kind() if value is None else value


def need(record: dict, name: str, kind: type = str):
    """record[name], which must be there and be of this kind; a string must have words."""
    if record.get(name) is None:
        raise InputError(f"field {name!r} is missing")
    value = optional(record, name, kind)
    if kind is str and not value.strip():
        raise InputError(f"field {name!r} is empty")
    return value


def need_strings(record: dict, name: str) -> list[str]:
    items = need(record, name, list)
    for i, item in enumerate(items, 1):
        if not isinstance(item, str):
            raise InputError(f"field {name!r}, item {i}: expected a string, found {short(item)}")
    return items


def each(record: dict, name: str, read: Callable[[dict, int], object]) -> list:
    """read(item, its number from 1) for each object of a list that may be missing."""
    found = []
    for number, item in enumerate(optional(record, name, list), 1):
        try:
            if not isinstance(item, dict):
                raise InputError(f"expected an object, found {type_name(item)}")
            found.append(read(item, number))
        except InputError as error:
            raise InputError(f"field {name!r}, item {number}: {error}") from None
    return found


def id_field(record: dict) -> str:
    """The name under which this record keeps its id."""
    return next((name for name in ID_FIELDS if name in record), "id")


def need_id(record: dict, number: int | None = None) -> str:
    """`number`: its place in the file, where the records of a layout may have no id."""
    name = id_field(record)
    return as_id(record.get(name, number), name)


def as_id(value: object, name: str) -> str:
    if value is None or (isinstance(value, str) and not value.strip()):
        raise InputError(f"field {name!r} is missing or empty")
    if isinstance(value, bool) or not isinstance(value, str | int):
        found = f"{type_name(value)} {short(value)}"
        raise wrong(name, f"expected a string or a whole number, found {found}")
    return str(value)


def asked(record: dict, number: int | None = None, name: str = "question") -> dict:
    """The fields of almost every layout; `number`: its records may have no id."""
    level = record.get("level")  # MATH's is 3, UR²'s is "hard"
    return {
        "id": need_id(record, number),
        "question": need(record, name),
        "source": optional(record, "source"),
        "level": str(level) if type(level) is int else optional(record, "level"),
    }


def gold_answers(record: dict, name: str, kind: type = str) -> list[str]:
    """One answer, or a list of them: never none, never "" (every prediction would cover it)."""
    if record.get(name) in (None, "", []):
        raise no_answer(f"field {name!r} is missing or empty")
    answers = [need(record, name)] if kind is str else need_strings(record, name)
    if not all(answer.strip() for answer in answers):
        raise no_answer(f"field {name!r} holds an empty string")
    return answers


def choice(letters: list[str], options: Sequence[str]) -> dict:
    return {"answers": letters, "task": "choice", "options": tuple(options)}


def letter_of(gold: object, options: Sequence[str], name: str, spelled: bool = False) -> str:
    """The letter of a gold option. `spelled`: it may be a number from 0 or the option's text, too;
    otherwise a letter is a letter, even where an option happens to read "B".
    """
    letters = [chr(65 + i) for i in range(len(options))]
    if spelled and type(gold) is int and 0 <= gold < len(options):
        return letters[gold]
    if spelled and gold in options:
        return letters[options.index(gold)]
    if gold not in letters:
        raise wrong(name, f"{short(gold)} is none of the {len(options)} options")
    return gold


def lettered(options: dict) -> list[str]:
    """{"A": text, "B": text} -> [text, text]"""
    letters = [chr(65 + i) for i in range(len(options))]
    if sorted(options) != letters or not all(isinstance(text, str) for text in options.values()):
        expected = f"expected texts under {', '.join(letters)}"
        raise wrong("options", f"{expected}, found {short(options)}")
    return [options[letter] for letter in letters]


# ------------------------------------------------------------------------ layouts of question files


def from_own(record: dict, number: int) -> dict:
    """The fields of `data.Question`; only id, question and answers must be there."""
    fields, answers = asked(record), gold_answers(record, "answers", list)
    task = optional(record, "task") or "qa"
    if task not in TASKS:
        raise wrong("task", f"{short(task)} is none of {', '.join(TASKS)}")
    options = need_strings(record, "options") if record.get("options") is not None else []
    if task == "choice":
        if not options:
            raise InputError("field 'options' is missing: task 'choice' needs them")
        answers = [letter_of(answer, options, "answers") for answer in answers]
    references = each(record, "references", from_paragraph)
    for index in optional(record, "supporting", list):
        if type(index) is not int or not 1 <= index <= len(references):
            known = f"1 to {len(references)}, the references"
            raise wrong("supporting", f"{short(index)} is no number from {known}")
    may_search = record.get("may_search") is None or optional(record, "may_search", bool)
    fields |= {"answers": answers, "task": task, "may_search": may_search, "options": options}
    return fields | {"references": references, "supporting": record.get("supporting") or []}


def from_paragraph(item: dict, number: int) -> dict:
    text = need(item, "paragraph_text" if "paragraph_text" in item else "text")
    return {"id": need_id(item, number), "title": optional(item, "title"), "text": text}


def from_flashrag(record: dict, number: int) -> dict:
    """With `choices` the golden answers are numbers from 0; ours are letters."""
    fields, name = asked(record), "golden_answers"
    if not record.get("choices"):
        return fields | {"answers": gold_answers(record, name, list)}
    options = need_strings(record, "choices")
    letters = [letter_of(gold, options, name, True) for gold in need(record, name, list)]
    return fields | choice(gold_answers({name: letters}, name, list), options)


def from_r1_searcher(record: dict, number: int) -> dict:
    """R1-Searcher's and UR²'s files; UR²'s `source` says which questions are mathematics."""
    fields = asked(record)
    task = "math" if fields["source"] == "math" else "qa"
    return fields | {"answers": gold_answers(record, "answer"), "task": task}


def from_rollouts(record: dict, number: int) -> dict:
    """R1-Searcher's published rollout answers; "" where the model gave none."""
    predictions = need_strings(record, "pred_anses")
    if not predictions:
        raise InputError("field 'pred_anses' is empty: there is no rollout to score")
    return from_r1_searcher(record, number) | {"predictions": predictions}


def from_plain(record: dict, number: int) -> dict:
    """A table. Several answers stand in one column as a list: ["Ana", "Ana Bell"]."""
    fields = asked(record, number)
    if fields["question"].strip().isdigit():
        advice = "passages go where a corpus is asked for"
        raise wrong("question", f"{short(fields['question'])} is a number: {advice}")
    return fields | {"answers": answer_list(gold_answers(record, "answer")[0])}


def answer_list(text: str) -> list[str]:
    """'["Ana", "Ana Bell"]', in JSON or as Python prints it, is two answers; "[1, 2)" is one."""
    for read in (json.loads, ast.literal_eval) if text.startswith("[") else ():
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            answers = read(text)
            if answers and all(isinstance(answer, str) and answer.strip() for answer in answers):
                return answers
    return [text]


def from_hotpotqa(record: dict, number: int) -> dict:
    """HotpotQA, published or hub, and 2WikiMultihopQA: paragraph n of `context` is reference n."""
    fields = asked(record)
    references = [
        {"id": f"{fields['id']}:{i}", "title": title, "text": join_sentences(sentences, i)}
        for i, (title, sentences) in enumerate(titled_pairs(record, "context", "sentences"), 1)
    ]
    titles = [title for title, _ in titled_pairs(record, "supporting_facts", "sent_id")]
    kind, source = optional(record, "type"), "2wiki" if "evidences" in record else "hotpotqa"
    fields |= {"answers": gold_answers(record, "answer"), "references": references}
    fields["source"] = f"{source}_{kind}" if kind else source
    return fields | {"supporting": reference_numbers(titles, references)}


def titled_pairs(record: dict, name: str, second: str) -> list[tuple[str, object]]:
    """[[title, x], ...] as published, or {"title": [...], second: [...]} as on the hub."""
    pairs = record.get(name)
    if isinstance(pairs, dict):
        columns = pairs.get("title"), pairs.get(second)
        if not all(isinstance(c, list) for c in columns) or len(columns[0]) != len(columns[1]):
            raise wrong(name, f"expected two lists of one length, 'title' and {second!r}")
        pairs = list(zip(*columns, strict=True))
    for i, pair in enumerate(need({name: pairs}, name, list), 1):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            expected = f"expected a title and its {second}, found {short(pair)}"
            raise InputError(f"field {name!r}, item {i}: {expected}")
    return pairs


def join_sentences(sentences: object, number: int) -> str:
    if not isinstance(sentences, list) or not all(isinstance(text, str) for text in sentences):
        expected = f"expected a list of sentences, found {short(sentences)}"
        raise InputError(f"field 'context', item {number}: {expected}")
    # HotpotQA's sentences begin with their blank, 2Wiki's do not: "".join is right for the first.
    return " ".join(text.strip() for text in sentences if text.strip())


def reference_numbers(titles: list[str], references: list[dict]) -> list[int]:
    """The numbers of the first paragraphs with these titles. None at all where a title has none: in
    HotpotQA's fullwiki files they were retrieved, and half of the gold would pass for all.
    """
    numbers: dict[str, int] = {}
    for i, reference in enumerate(references, 1):
        numbers.setdefault(reference["title"], i)
    found = {numbers.get(title) for title in titles}
    return [] if None in found else sorted(found)


def from_musique(record: dict, number: int) -> dict:
    """Paragraphs are numbered by place, from 1 (`idx` is from 0); aliases count as right. Records
    cut from such a file, with paragraphs of {title, text}, tell no gold paragraph.
    """
    fields = asked(record)
    if record.get("answerable") is not None and not optional(record, "answerable", bool):
        raise no_answer("field 'answerable' is false")
    answers = gold_answers(record, "answer")
    if record.get("answer_aliases") is not None:
        answers += [alias for alias in need_strings(record, "answer_aliases") if alias.strip()]
    need(record, "paragraphs", list)
    references = each(record, "paragraphs", from_paragraph)
    for i, reference in enumerate(references, 1):
        reference["id"] = f"{fields['id']}:{i}"
    gold = each(record, "paragraphs", lambda item, i: optional(item, "is_supporting", bool) and i)
    check_steps(record)
    fields |= {"answers": list(dict.fromkeys(answers)), "references": references}
    fields["supporting"] = [i for i in gold if i]
    hops = re.match(r"\d+hop", fields["id"])
    fields["source"] = f"musique_{hops.group()}" if hops else "musique" if any(gold) else ""
    return fields


def check_steps(record: dict) -> None:
    """A step of the decomposition whose paragraph is not there is an error of the data."""
    known = [paragraph.get("idx") for paragraph in record["paragraphs"]]
    for i, step in enumerate(optional(record, "question_decomposition", list), 1):
        index = step.get("paragraph_support_idx") if isinstance(step, dict) else None
        if index is not None and index not in known:
            missing = f"no paragraph has the idx {short(index)}"
            raise InputError(f"field 'question_decomposition', item {i}: {missing}")


def from_mmlu_pro(record: dict, number: int) -> dict:
    """The letter is the answer; `answer_index` counts from 0 and must say the same."""
    fields, answer = asked(record), gold_answers(record, "answer")[0]
    options = need_strings(record, "options")
    letter = letter_of(answer, options, "answer")
    if record.get("answer_index") is not None:
        other = letter_of(record["answer_index"], options, "answer_index", spelled=True)
        if letter != other:
            raise wrong("answer_index", f"it names option {other}, 'answer' names {letter}")
    return fields | choice([letter], options) | {"source": optional(record, "category")}


def from_medqa(record: dict, number: int) -> dict:
    """`options` is {"A": text, ...} or a list; `answer` the text under the letter `answer_idx`."""
    fields, answer = asked(record, number), gold_answers(record, "answer")[0]
    named = isinstance(record.get("options"), dict)
    options = lettered(record["options"]) if named else need_strings(record, "options")
    letter = letter_of(need(record, "answer_idx"), options, "answer_idx")
    text = options[ord(letter) - 65]
    if text.strip() != answer.strip():
        raise wrong("answer_idx", f"option {letter} is {short(text)}, 'answer' {short(answer)}")
    return fields | choice([letter], options)


def from_math(record: dict, number: int) -> dict:
    """MATH-500 and Minerva: a worked solution, and the answer beside it or in its last box."""
    fields = asked(record, number, "question" if "question" in record else "problem")
    if record.get("answer") not in (None, ""):
        answer = need(record, "answer")
    elif not (answer := last_boxed(need(record, "solution"))):
        raise no_answer("no field 'answer', and no \\boxed{...} in 'solution'")
    return fields | {"answers": [answer], "task": "math"}


def from_gsm8k(record: dict, number: int) -> dict:
    fields, answer = asked(record, number), need(record, "answer").rpartition("####")[2].strip()
    if not answer:
        raise no_answer("nothing stands behind '####' in field 'answer'")
    return fields | {"answers": [answer], "task": "math"}


def from_verl(record: dict, number: int) -> dict:
    """verl's training records (Search-R1 and others): the question ends the user's message, and may
    stand behind an instruction and "Question:"; several answers come as a list, under "target", or
    joined by <|answer_split|>.
    """
    source, extra = optional(record, "data_source"), optional(record, "extra_info", dict)
    index = as_id(number if extra.get("index") is None else extra["index"], "extra_info.index")
    messages = [item for item in need(record, "prompt", list) if isinstance(item, dict)]
    said = [message.get("content") for message in messages if message.get("role") == "user"]
    if not said or not isinstance(said[-1], str):
        raise wrong("prompt", "no message of the role 'user' with a text")
    question = said[-1].rpartition("Question:")[2].strip()
    if not question:
        raise wrong("prompt", "the user's message holds no question")
    name, golds = (
        "reward_model.ground_truth",
        need(record, "reward_model", dict).get("ground_truth"),
    )
    golds = golds.get("target") if isinstance(golds, dict) else golds
    golds = golds.split("<|answer_split|>") if isinstance(golds, str) else golds
    fields = {"id": f"{source}:{index}".lstrip(":"), "question": question, "source": source}
    return fields | {"answers": gold_answers({name: golds}, name, list)}


# -------------------------------------------------------------------------- layouts of corpus files


def document(record: dict, number: int, title: str, text: str) -> dict:
    """The fields of a passage; one without id has the number of its line."""
    if not title.strip() and not text.strip():
        raise InputError(f"field {'contents' if 'contents' in record else 'text'!r} is empty")
    return {"id": need_id(record, number), "title": title.strip(), "text": text.strip()}


def from_contents(record: dict, number: int) -> dict:
    """contents = '"Title"\\ntext'; a title may hold quotes itself, so only the outer pair goes."""
    title, newline, text = need(record, "contents").partition("\n")
    if not newline:
        return document(record, number, "", title)
    title = title.strip()
    quoted = len(title) >= 2 and title[0] == title[-1] == '"'
    return document(record, number, title[1:-1] if quoted else title, text)


def from_title_text(record: dict, number: int) -> dict:
    title = optional(record, "title")
    text = optional(record, "text") if title.strip() else need(record, "text")
    return document(record, number, title, text)


def from_abstract(record: dict, number: int) -> dict:
    """R1-Searcher's abstracts: "Title: X Text:  Y"."""
    passage = need(record, "passage")
    title, mark, text = passage.partition(" Text:")
    if not mark or not title.startswith("Title:"):
        raise wrong("text", f"expected 'Title: ... Text: ...', found {short(passage)}")
    return document(record, number, title.removeprefix("Title:"), text)


def from_chunk(record: dict, number: int) -> dict:
    """R1-Searcher's pages: the title, three blanks, a piece of the page."""
    title, gap, text = need(record, "passage").partition("   ")
    return document(record, number, title if gap else "", text if gap else title)


def from_passage(record: dict, number: int) -> dict:
    return document(record, number, "", need(record, "passage"))


# --------------------------------------------------------------------------------------- the tables


class Layout(NamedTuple):
    """signs: the fields that a record must have, "a|b" for one of two; `also`: a further test."""

    signs: str
    convert: Callable[[dict, int], dict]
    also: Callable[[dict], bool] = lambda record: True

    def recognise(self, record: dict) -> bool:
        names = [sign.split("|") for sign in self.signs.split()]
        return all(any(name in record for name in either) for either in names) and self.also(record)


OWN = "id question answers task options references supporting source level may_search".split()
PLAIN = "id _id question_id question answer source level type category subject".split()


def begins(record: dict) -> str:
    return record["passage"].strip() if isinstance(record["passage"], str) else ""


LAYOUTS = {
    "flashrag": Layout("golden_answers", from_flashrag),
    "2wiki": Layout("context supporting_facts|_id evidences", from_hotpotqa),
    "hotpotqa": Layout("context supporting_facts|_id", from_hotpotqa),
    "musique": Layout("paragraphs", from_musique),
    "verl": Layout("reward_model", from_verl),
    "medqa": Layout("options answer_idx", from_medqa),
    "mmlu_pro": Layout("options answer_index|question_id", from_mmlu_pro),
    "math": Layout("solution", from_math, lambda record: "answers" not in record),
    "gsm8k": Layout("answer", from_gsm8k, lambda record: "####" in str(record["answer"])),
    "r1_searcher": Layout("idx question|answer", from_r1_searcher),
    "plain": Layout("question answer", from_plain, lambda record: set(record) <= set(PLAIN)),
    "own": Layout(
        "question|answers", from_own, lambda record: "answers" in record or set(record) <= set(OWN)
    ),
}
ATTEMPT_LAYOUTS = {"rollouts": Layout("pred_anses", from_rollouts)}
CORPUS_LAYOUTS = {  # a tab-separated line arrives as {"id", "passage"}
    "contents": Layout("contents", from_contents),
    "title_text": Layout("text", from_title_text),
    "tsv_abstract": Layout("passage", from_abstract, lambda r: begins(r).startswith("Title:")),
    "tsv_chunk": Layout("passage", from_chunk, lambda r: "   " in begins(r)),
    "tsv": Layout("passage", from_passage),
}
PREDICTED = {"prediction", "predictions", "pred", "pred_ans", "pred_answer"}


def detect(record: dict, table: dict[str, Layout]) -> str:
    """The name of the layout that this record is written in."""
    for name, layout in table.items():
        if layout.recognise(record):
            return name
    if PREDICTED & set(record) or isinstance(record.get("answer"), dict):
        raise InputError("this looks like predictions: python eval.py --predictions FILE")
    for name, value in record.items():
        inner = value[0] if isinstance(value, list) and value else value
        if isinstance(inner, dict) and any(layout.recognise(inner) for layout in table.values()):
            how = "save them as a list, or one on each line"
            raise InputError(f"one object with the records under {short(name)}: {how}")
    known = "; ".join(f"{name} ({layout.signs})" for name, layout in table.items())
    found = textwrap.shorten(", ".join(map(repr, record)), 300, placeholder=" ...") or "none"
    found = f"it has the fields {found}; known are {known}"
    raise InputError(f"unknown layout: {found}: convert the file to one of them")


def read_fields(
    path: Path, table: dict[str, Layout], columns: tuple[str, ...] = (), skip_bad: bool = False
) -> Iterator[dict]:
    """The fields of every record of a file, through one layout, with unique ids."""
    layout, places, problems = None, {}, []
    for number, place, record in read_records(path, columns):
        try:
            if isinstance(record, InputError):
                raise record
            layout = layout or table[detect(record, table)]
            fields = layout.convert(record, number)
            if fields["id"] in places:
                again = f"duplicate id {short(fields['id'])}, first in {places[fields['id']]}"
                raise wrong(id_field(record), again)
        except InputError as error:
            problems.append(f"{path}, {place}: {error}")
            if not skip_bad:
                unknown = layout is None and isinstance(record, dict)
                advice = "" if unknown else ": correct it, or leave it out with --skip_bad"
                raise InputError(problems[0] + advice) from None
        else:
            places[fields["id"]] = place
            yield fields
    report_skipped(path, len(places), problems, "record")
