"""The layouts that questions and passages come in on disk: one row of a table each.

    file -> records -> layout (named by the first record) -> the fields of a Question or a Document

A row holds a layout's fields and a function (record, its number in the file) -> our fields. The
first row that recognises a record wins, by names that only this layout has: so a record without its
question is still told what it lacks. A new layout is one function and one row. Whatever is wrong is
one line with file, line, field and what to do; nothing is repaired in silence.
"""

from __future__ import annotations

import ast
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


def optional(record: dict, name: str, kind: type = str):
    """record[name], which must be of this kind; an empty one where it is missing or null."""
    value = record.get(name)
    if value is not None and not isinstance(value, kind):
        raise wrong(name, f"expected {type_name(kind())}, found {type_name(value)} {short(value)}")
    return kind() if value is None else value


def need(record: dict, name: str, kind: type = str):
    """record[name], which must be there and be of this kind; a string must have words."""
    value = optional(record, name, kind)
    if record.get(name) is None or (kind is str and not value.strip()):
        raise InputError(f"field {name!r} is missing or empty")
    return value


def need_strings(record: dict, name: str) -> list[str]:
    items = need(record, name, list)
    for i, item in enumerate(items, 1):
        if not isinstance(item, str):
            raise InputError(f"field {name!r}, item {i}: expected a string, found {short(item)}")
    return items


def paragraphs_of(record: dict, name: str, question_id: str = "") -> list[dict]:
    """The passages that come with a question, numbered by the question where it says so."""
    found = []
    for number, item in enumerate(optional(record, name, list), 1):
        try:
            if not isinstance(item, dict):
                raise InputError(f"expected an object, found {type_name(item)}")
            optional(item, "is_supporting", bool)
            text = need(item, "paragraph_text" if "paragraph_text" in item else "text")
            item_id = f"{question_id}:{number}" if question_id else need_id(item, number)
            found.append({"id": item_id, "title": optional(item, "title"), "text": text})
        except InputError as error:
            raise InputError(f"field {name!r}, item {number}: {error}") from None
    return found


def id_field(record: dict) -> str:
    """The name under which this record keeps its id."""
    return next((name for name in ID_FIELDS if name in record), "id")


def need_id(record: dict, number: int | None = None, name: str = "") -> str:
    """`number`: its place in the file, where the records of a layout may have no id."""
    name = name or id_field(record)
    value = record.get(name, number)
    return str(value) if type(value) is int else need({name: value}, name)


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
    value = optional(record, name, kind)
    answers = [value] if kind is str else need_strings({name: value}, name)
    if not answers or not all(answer.strip() for answer in answers):
        raise InputError(f"the question has no answer: field {name!r} is missing or empty")
    return answers


def choice(letters: list[str], options: Sequence[str]) -> dict:
    return {"answers": letters, "task": "choice", "options": tuple(options)}


def letter_of(gold: object, options: Sequence[str], name: str, spelled: bool = False) -> str:
    """The letter of a gold option. `spelled`: it may be a number from 0 or the option's text, too;
    otherwise a letter is a letter, even where an option happens to read "B".
    """
    letters = [chr(65 + i) for i in range(len(options))]
    place = options.index(gold) if gold in options else gold
    if spelled and type(place) is int and 0 <= place < len(options):
        return letters[place]
    if gold not in letters:
        raise wrong(name, f"{short(gold)} is none of the {len(options)} options")
    return gold


def option_texts(record: dict) -> list[str]:
    """`options` as a list, or as {"A": text, "B": text}."""
    options = record.get("options")
    if isinstance(options, dict):
        letters = [chr(65 + i) for i in range(len(options))]
        if sorted(options) != letters:
            raise wrong("options", f"expected texts under {', '.join(letters)}")
        record = {"options": [options[letter] for letter in letters]}
    return need_strings(record, "options")


# ------------------------------------------------------------------------ layouts of question files


def from_own(record: dict, number: int) -> dict:
    """The fields of `data.Question`; only id, question and answers must be there."""
    fields, answers = asked(record), gold_answers(record, "answers", list)
    task = optional(record, "task") or "qa"
    if task not in TASKS:
        raise wrong("task", f"{short(task)} is none of {', '.join(TASKS)}")
    options = []
    if task == "choice" or record.get("options"):
        options = need_strings(record, "options")
    if task == "choice":
        answers = [letter_of(answer, options, "answers") for answer in answers]
    references = paragraphs_of(record, "references")
    for index in optional(record, "supporting", list):
        if type(index) is not int or not 1 <= index <= len(references):
            known = f"1 to {len(references)}, the references"
            raise wrong("supporting", f"{short(index)} is no number from {known}")
    may_search = record.get("may_search") is None or optional(record, "may_search", bool)
    fields |= {"answers": answers, "task": task, "may_search": may_search, "options": options}
    return fields | {"references": references, "supporting": record.get("supporting") or []}


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
    """'["Ana", "Ana Bell"]', as JSON or Python print it, is two answers; "[1, 2)" is one."""
    with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
        answers = ast.literal_eval(text) if text.startswith("[") else []
        if answers and all(isinstance(answer, str) and answer.strip() for answer in answers):
            return answers
    return [text]


def from_hotpotqa(record: dict, number: int) -> dict:
    """HotpotQA, published or hub, and 2WikiMultihopQA: paragraph n of `context` is reference n."""
    fields, references = asked(record), []
    for i, (title, sentences) in enumerate(titled_pairs(record, "context", "sentences"), 1):
        found = need_strings({"context": sentences}, "context")
        # HotpotQA's sentences begin with their blank, 2Wiki's do not.
        text = " ".join(sentence.strip() for sentence in found if sentence.strip())
        references.append({"id": f"{fields['id']}:{i}", "title": title, "text": text})
    titles = [reference["title"] for reference in references]
    gold = {title for title, _ in titled_pairs(record, "supporting_facts", "sent_id")}
    # A title without a paragraph, as in the retrieved ones of HotpotQA's fullwiki files: no gold
    # at all, for half of it would pass for all.
    whole = gold <= set(titles)
    kind, source = optional(record, "type"), "2wiki" if "evidences" in record else "hotpotqa"
    return fields | {
        "answers": gold_answers(record, "answer"),
        "references": references,
        "supporting": sorted(titles.index(title) + 1 for title in gold) if whole else [],
        "source": f"{source}_{kind}" if kind else source,
    }


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


def from_musique(record: dict, number: int) -> dict:
    """Paragraphs are numbered by place, from 1 (`idx` is from 0); aliases count as right. Records
    cut from such a file, with paragraphs of {title, text}, tell no gold paragraph.
    """
    fields = asked(record)
    if record.get("answerable") is not None and not optional(record, "answerable", bool):
        raise InputError("the question has no answer: field 'answerable' is false")
    answers = gold_answers(record, "answer")
    if record.get("answer_aliases") is not None:
        answers += [alias for alias in need_strings(record, "answer_aliases") if alias.strip()]
    need(record, "paragraphs", list)
    references = paragraphs_of(record, "paragraphs", fields["id"])
    steps = [s for s in optional(record, "question_decomposition", list) if isinstance(s, dict)]
    known = [None, *(item.get("idx") for item in record["paragraphs"])]
    for index in [step.get("paragraph_support_idx") for step in steps]:
        if index not in known:
            raise wrong("question_decomposition", f"no paragraph has the idx {short(index)}")
    gold = [i for i, item in enumerate(record["paragraphs"], 1) if item.get("is_supporting")]
    hops = re.match(r"\d+hop", fields["id"])
    fields["source"] = f"musique_{hops.group()}" if hops else "musique" if gold else ""
    found = {"answers": list(dict.fromkeys(answers)), "references": references}
    return fields | found | {"supporting": gold}


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
    """`answer` is the text of the option that the letter `answer_idx` names."""
    fields, answer = asked(record, number), gold_answers(record, "answer")[0]
    options = option_texts(record)
    letter = letter_of(need(record, "answer_idx"), options, "answer_idx")
    text = options[ord(letter) - 65]
    if text.strip() != answer.strip():
        raise wrong("answer_idx", f"option {letter} is {short(text)}, 'answer' {short(answer)}")
    return fields | choice([letter], options)


def from_math(record: dict, number: int) -> dict:
    """MATH-500, Minerva and GSM8K: the answer stands in a field, behind the last "####" of a worked
    one, or in the solution's last box.
    """
    fields = asked(record, number, "problem" if "problem" in record else "question")
    answer = optional(record, "answer").rpartition("####")[2].strip()
    answer = answer or last_boxed(optional(record, "solution"))
    if not answer:
        places = "'answer', behind its '####' or in a box of 'solution'"
        raise InputError(f"the question has no answer in {places}")
    return fields | {"answers": [answer], "task": "math"}


def from_verl(record: dict, number: int) -> dict:
    """verl's training records (Search-R1 and others). The question ends the user's message, maybe
    behind "Question:"; answers are a list, under "target", or joined by <|answer_split|>.
    """
    extra = optional(record, "extra_info", dict)
    index = number if extra.get("index") is None else extra["index"]
    index = need_id({"extra_info.index": index}, name="extra_info.index")
    messages = [item for item in need(record, "prompt", list) if isinstance(item, dict)]
    said = [message.get("content") for message in messages if message.get("role") == "user"]
    last = said[-1] if said and isinstance(said[-1], str) else ""
    question = last.rpartition("Question:")[2].strip()
    if not question:
        raise wrong("prompt", "no message of the role 'user' holds a question")
    golds, name = need(record, "reward_model", dict), "reward_model.ground_truth"
    golds = golds.get("ground_truth")
    golds = golds.get("target") if isinstance(golds, dict) else golds
    golds = golds.split("<|answer_split|>") if isinstance(golds, str) else golds
    source, answers = optional(record, "data_source"), gold_answers({name: golds}, name, list)
    question_id = f"{source}:{index}".lstrip(":")
    return {"id": question_id, "question": question, "source": source, "answers": answers}


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
    """fields: those with "!" tell the layout from others (of "!a|b" one is enough), with `also`."""

    fields: str
    convert: Callable[[dict, int], dict]
    also: Callable[[dict], bool] = lambda record: True

    def recognise(self, record: dict) -> bool:
        signs = [name[1:].split("|") for name in self.fields.split() if name.startswith("!")]
        return all(any(name in record for name in sign) for sign in signs) and self.also(record)


PLAIN_FIELDS = set("id _id question_id question answer source level type category subject".split())
OWN_FIELDS = {"id", "question", "answers", "task", "options", "references", "supporting"}
OWN_FIELDS |= {"source", "level", "may_search"}


def is_own(record: dict) -> bool:
    return "answers" in record or ("question" in record and set(record) <= OWN_FIELDS)


def begins(record: dict) -> str:
    return record["passage"].strip() if isinstance(record.get("passage"), str) else ""


LAYOUTS = {
    "flashrag": Layout("id question !golden_answers", from_flashrag),
    "2wiki": Layout("question answer !supporting_facts|_id !context !evidences", from_hotpotqa),
    "hotpotqa": Layout("question answer !supporting_facts|_id !context", from_hotpotqa),
    "musique": Layout("id question answer !paragraphs", from_musique),
    "verl": Layout("data_source prompt !reward_model", from_verl),
    "medqa": Layout("question answer !options !answer_idx", from_medqa),
    "mmlu_pro": Layout("question answer !options !answer_index|question_id", from_mmlu_pro),
    "math": Layout("problem !solution", from_math, lambda record: "answers" not in record),
    "gsm8k": Layout("question !answer", from_math, lambda record: "####" in str(record["answer"])),
    "r1_searcher": Layout("!idx !question|answer", from_r1_searcher),
    "plain": Layout("!question !answer", from_plain, lambda record: set(record) <= PLAIN_FIELDS),
    "own": Layout("id question answers", from_own, is_own),
}
ATTEMPT_LAYOUTS = {"rollouts": Layout("idx question answer !pred_anses", from_rollouts)}
CORPUS_LAYOUTS = {  # a tab-separated line arrives as {"id", "passage"}
    "contents": Layout("!contents", from_contents),
    "title_text": Layout("title !text", from_title_text),
    "tsv_abstract": Layout(
        "id<TAB>Title: ... Text: ...", from_abstract, lambda r: begins(r).startswith("Title:")
    ),
    "tsv_chunk": Layout("id<TAB>title   text", from_chunk, lambda r: "   " in begins(r)),
    "tsv": Layout("id<TAB>text", from_passage, lambda r: "passage" in r),
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
    known = ", ".join(f"{name} ({row.fields.replace('!', '')})" for name, row in table.items())
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
