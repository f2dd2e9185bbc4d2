"""Reads question and corpus files in many layouts; each layout is one entry of a table.

    file -> records -> the first record's layout -> the fields of a Question or a Document

An entry holds the names of a layout's fields and a function that converts a record: (record, its
number in the file) -> our fields. A layout is recognised by its field names, a few layouts also by
a value; the first match in the table wins.
"""

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from errors import InputError
from formats.records import convert_records, read_records, short
from metrics import last_boxed

TASKS = ("qa", "math", "choice", "summary")
ID_FIELDS = ("id", "_id", "idx", "question_id", "unique_id")


def wrong(name: str, what: str) -> InputError:
    return InputError(f"field {name!r}: {what}")


def field(record: dict, name: str, kind: type = str, default=None):
    """Returns record[name], which must be of type `kind`. If it is missing or blank, returns
    `default`, or raises an InputError if there is no default.
    """
    value = record.get(name)
    if value is None or (isinstance(value, str) and not value.strip()):
        if default is None:
            raise InputError(f"field {name!r} is missing or empty")
        return default
    return of_kind(value, kind, f"field {name!r}")


def of_kind(value, kind: type, place: str):
    if not isinstance(value, kind):
        raise InputError(f"{place}: expected {kind.__name__}, found {short(value)}")
    return value


def items(record: dict, name: str, kind: type = str, default=None) -> list:
    """Returns the list record[name]. Each of its items must be of type `kind`."""
    values = enumerate(field(record, name, list, default), 1)
    return [of_kind(value, kind, f"field {name!r}, item {i}") for i, value in values]


def paragraphs_of(record: dict, name: str, default=None, question_id: str = "") -> list[dict]:
    paragraphs = []
    for number, item in enumerate(items(record, name, dict, default), 1):
        paragraph = {
            "id": f"{question_id}:{number}" if question_id else id_of(item, number),
            "title": field(item, "title", str, ""),
            "text": field(item, "paragraph_text" if "paragraph_text" in item else "text"),
        }
        paragraphs.append(paragraph)
    return paragraphs


def id_of(record: dict, number: int | None = None) -> str:
    """Returns a record's id. A record without one gets `number`, its place in the file or list, as
    its id; layouts whose records must have an id do not pass `number`.
    """
    name = id_field(record)
    value = record.get(name, number)
    return str(value) if type(value) is int else field({name: value}, name)


def id_field(record: dict) -> str:
    return next((name for name in ID_FIELDS if name in record), "id")


def asked(record: dict, answer="answer", options=None, number=None, question="question") -> dict:
    """Returns the fields of a Question that all layouts of questions give. With `options`, it adds
    them and the task "choice", and each answer becomes the letter of an option. `number` is
    explained in id_of.
    """
    fields = {
        "id": id_of(record, number),
        "question": field(record, question),
        "answers": gold_answers(record, answer, options),
        "source": field(record, "source", str, ""),
        "level": str(record.get("level") or ""),  # MATH-500: a number; UR²: a word such as "hard"
    }
    return fields if options is None else fields | {"task": "choice", "options": options}


def gold_answers(record: dict, name: str, options: list[str] | None = None) -> list[str]:
    """Returns the answers as a list, even if there is only one. It is an error if there is none, or
    if one is blank, because cover-EM finds "" in every prediction.
    """
    value = record.get(name)
    answers = value if isinstance(value, list) else [field(record, name, str, "")]
    if options is not None:
        answers = [letter_of(answer, options, name) for answer in answers]
    if not answers or not all(answer.strip() for answer in items({name: answers}, name)):
        raise InputError(f"field {name!r} has no answer, or a blank one")
    return answers


def option_texts(record: dict) -> list[str]:
    """Returns the options in order; the record has them as a list or as {"A": text, "B": text}."""
    options = record.get("options")
    if isinstance(options, dict):
        options = [options.get(chr(65 + i)) for i in range(len(options))]
    return items({"options": options}, "options")


def letter_of(gold: object, options: Sequence[str], name: str) -> str:
    """Returns the letter of the gold answer, which is given as a letter or as an option's text. "B"
    is taken as a letter even if the text of an option is "B".
    """
    letters = [chr(65 + i) for i in range(len(options))]
    if gold in letters:
        return gold
    if gold not in options:
        raise wrong(name, f"{short(gold)} is none of the {len(options)} options")
    return letters[options.index(gold)]


def task_of(record: dict) -> str:
    task = field(record, "task", str, "qa")
    if task not in TASKS:
        raise wrong("task", f"{short(task)} is none of {', '.join(TASKS)}")
    return task


# ------------------------------------------------------------------------ layouts of question files
def from_own(record: dict, number: int) -> dict:
    """Reads the fields of `data.Question`. Required are question and answers, and for the task
    "choice" also options.
    """
    task = task_of(record)
    chosen = task == "choice"
    options = items(record, "options") if chosen or record.get("options") else []
    references = paragraphs_of(record, "references", [])
    supporting = field(record, "supporting", list, [])
    if not all(number in range(1, len(references) + 1) for number in supporting):
        raise wrong("supporting", f"expected numbers from 1 to {len(references)}, the references")
    return asked(record, "answers", options if chosen else None, number) | {
        "task": task,
        "may_search": field(record, "may_search", bool, True),
        "options": options,
        "references": references,
        "supporting": supporting,
        "hops": hops_of(record, "decomposition"),
    }


def hops_of(record: dict, name: str, query: str = "query") -> list[dict]:
    """Returns the searches in the list record[name], if there is one. "#1" in a query means the
    answer of the first search (MuSiQue).
    """
    hops = []
    for item in items(record, name, dict, []):
        text = field(item, query, str, "")
        for number, hop in enumerate(hops, 1):
            text = re.sub(rf"#{number}\b", lambda _, found=hop["answer"]: found, text)
        hops.append({"query": text, "answer": field(item, "answer", str, "")})
    return [hop for hop in hops if hop["query"]]


def from_flashrag(record: dict, number: int) -> dict:
    return asked(record, "golden_answers", number=number)


def from_rollouts(record: dict, number: int) -> dict:
    """Reads R1-Searcher's published rollouts; a prediction is "" if the model gave no answer."""
    predictions = items(record, "pred_anses")
    if not predictions:
        raise wrong("pred_anses", "it is empty: there is no rollout to score")
    return from_plain(record, number) | {"predictions": predictions}


def from_plain(record: dict, number: int) -> dict:
    """Reads records of R1-Searcher and UR², and other plain ones, such as rows of a tab-separated
    file. `answer` may be a printed list of answers (`answer_list`).
    """
    fields = asked(record, number=number)
    if fields["question"].strip().isdigit():
        raise wrong(
            "question",
            f"{short(fields['question'])} is a number: is this a file of passages? Give it with"
            " --corpus",
        )
    if len(fields["answers"]) == 1:
        fields["answers"] = answer_list(fields["answers"][0])
    return fields | {"task": "math" if fields["source"] == "math" else "qa"}


def answer_list(text: str) -> list[str]:
    """Returns the answers in a printed list of texts: '["Ana", "Ana Bell"]' has two. Any other text
    is one answer, such as the interval "[1, 2)".
    """
    with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
        answers = ast.literal_eval(text) if text.startswith("[") else []
        if answers and all(isinstance(answer, str) and answer.strip() for answer in answers):
            return answers
    return [text]


def from_hotpotqa(record: dict, number: int) -> dict:
    """Reads 2WikiMultihopQA, and HotpotQA as published or as on the HF hub. Paragraph n of
    `context` becomes reference n.
    """
    fields = asked(record)
    references = []
    for i, (title, sentences) in enumerate(titled_pairs(record, "context", "sentences"), 1):
        # Sentences of HotpotQA may begin with a blank, those of 2Wiki do not.
        stripped = map(str.strip, items({"context": sentences}, "context"))
        text = " ".join(filter(None, stripped))
        references.append({"id": f"{fields['id']}:{i}", "title": title, "text": text})
    titles = [reference["title"] for reference in references]
    gold = {title for title, _ in titled_pairs(record, "supporting_facts", "sent_id")}
    # In HotpotQA's fullwiki files some gold titles have no paragraph. Then no reference counts as
    # gold, because an incomplete gold set would be taken for the complete one.
    gold = gold if gold <= {*titles} else ()
    kind = field(record, "type", str, "")
    source = "2wiki" if "evidences" in record else "hotpotqa"
    return fields | {
        "references": references,
        "supporting": sorted(titles.index(title) + 1 for title in gold),
        "source": f"{source}_{kind}" if kind else source,
        "hops": triples_of(record),
    }


def triples_of(record: dict) -> list[dict]:
    """Returns the searches for 2Wiki's `evidences`, which are lists [subject, relation, object]."""
    triples = [items({"evidences": t}, "evidences") for t in items(record, "evidences", list, [])]
    named = [t for t in triples if len(t) == 3]
    return [{"query": f"{relation} of {subject}", "answer": o} for subject, relation, o in named]


def titled_pairs(record: dict, name: str, second: str) -> list[Sequence]:
    """Returns pairs from [[title, x], ...] (published) or {"title": [...], second: [...]} (hub)."""
    pairs = record.get(name)
    if isinstance(pairs, dict):
        titles = items(pairs, "title")
        others = field(pairs, second, list)
        pairs = list(map(list, zip_longest(titles, others)))
    for pair in items({name: pairs}, name, list):
        if len(pair) != 2 or not isinstance(pair[0], str) or pair[1] is None:
            raise wrong(name, f"expected a title and its {second}, found {short(pair)}")
    return pairs


def from_musique(
    record: dict, number: int, question="question", paragraphs="paragraphs", source="musique"
) -> dict:
    """Reads MuSiQue. Gold paragraphs are numbered from 1 (`idx` in the file: from 0). Aliases of
    the answer become accepted answers.
    """
    fields = asked(record, question=question)
    if not field(record, "answerable", bool, True):
        raise InputError("the question has no answer: field 'answerable' is false")
    answers = fields["answers"]
    if record.get("answer_aliases") is not None:
        answers += filter(str.strip, items(record, "answer_aliases"))
    references = paragraphs_of(record, paragraphs, None, fields["id"])
    numbered = enumerate(record[paragraphs], 1)
    gold = [number for number, item in numbered if field(item, "is_supporting", bool, False)]
    hops = re.match(r"\d+hop", fields["id"])
    return fields | {
        "answers": list(dict.fromkeys(answers)),
        "references": references,
        "supporting": gold,
        "source": f"musique_{hops.group()}" if hops else source if gold else "",
        "hops": hops_of(record, "question_decomposition", "question"),
    }


def from_ircot(record: dict, number: int) -> dict:
    """Reads IRCoT's processed files, whose splits R-Search uses (appendix A.1). MuSiQue, HotpotQA
    and 2Wiki all have one layout there: it is like MuSiQue's own, but with other field names, and
    with the answers in `answers_objects`. Only HotpotQA's records name their data set.
    """
    spans = [s for one in items(record, "answers_objects", dict) for s in items(one, "spans")]
    source = field(record, "dataset", str, "")
    return from_musique(record | {"answer": spans}, number, "question_text", "contexts", source)


def from_choice(record: dict, number: int) -> dict:
    """Reads MMLU-Pro, with the gold letter in `answer`, and MedQA, with it in `answer_idx`."""
    name = "answer_idx" if "answer_idx" in record else "answer"
    fields = asked(record, name, option_texts(record), number)
    return fields | {"source": field(record, "category", str, "") or fields["source"]}


def from_math(record: dict, number: int) -> dict:
    """Reads MATH-500, Minerva and GSM8K. The answer is the field `answer` (only the text after
    "####", if it has this mark), else the last \\boxed of `solution`.
    """
    question = "problem" if "problem" in record else "question"
    name = "answer"
    answer = field(record, "answer", str, "").rpartition("####")[2].strip()
    if not answer and "solution" in record:
        name = "solution"
        answer = last_boxed(field(record, "solution", str, ""))
    record = record | {name: answer}
    return asked(record, name, number=number, question=question) | {"task": "math"}


def from_verl(record: dict, number: int) -> dict:
    """Reads verl's records. `ground_truth`, or its "target", is a list of answers or a text that
    joins them by <|answer_split|>.
    """
    index = field(record, "extra_info", dict, {}).get("index", number)
    messages = items(record, "prompt", dict)
    users = [message.get("content") for message in messages if message.get("role") == "user"]
    question = field({"prompt": users[-1] if users else ""}, "prompt").rpartition("Question:")[2]
    golds = field(record, "reward_model", dict).get("ground_truth")
    golds = golds.get("target") if isinstance(golds, dict) else golds
    golds = golds.split("<|answer_split|>") if isinstance(golds, str) else golds
    name = "reward_model.ground_truth"
    source = field(record, "data_source", str, "")
    fields = {"id": f"{source}:{index}".lstrip(":"), "prompt": question.strip(), "source": source}
    return asked(fields | {name: golds}, name, question="prompt")


# -------------------------------------------------------------------------- layouts of corpus files
def from_title_text(record: dict, number: int) -> dict:
    title, text = (field(record, name, str, "").strip() for name in ("title", "text"))
    if not title and not text:
        raise InputError("the title and the text are empty")
    return {"id": id_of(record, number), "title": title, "text": text}


def from_passage(record: dict, number: int, name: str = "passage", mark: str = "\t") -> dict:
    """Reads a string whose title ends at `mark`: a tab, a line break, " Text:" or three blanks."""
    title, text = titled(field(record, name), mark)
    return from_title_text(record | {"title": title.removeprefix("Title:"), "text": text}, number)


def titled(passage: str, mark: str = "\n") -> tuple[str, str]:
    """Returns (title, text): '"Ana"\\nborn' -> ("Ana", "born"); without a mark all is text."""
    title, separator, text = passage.partition(mark)
    if not separator:
        return "", passage
    return re.sub(r'^"(.*)"$', r"\1", title.strip()), text  # the title itself may contain quotes


# --------------------------------------------------------------------------------------- the tables
class Layout(NamedTuple):
    """A layout. It fits a record that has every field marked "!" ("!a|b": a or b) and for which
    `also` is True. The names in `fields` without "!" are not checked; they are only shown to the
    user, by `python data.py` and in errors.
    """

    fields: str
    convert: Callable[[dict, int], dict]
    also: Callable[[dict], bool] = lambda record: True

    def recognise(self, record: dict) -> bool:
        signs = [name[1:].split("|") for name in self.fields.split() if name.startswith("!")]
        return all(any(name in record for name in sign) for sign in signs) and self.also(record)


PLAIN_FIELDS = set("id _id question_id question answer source level type category subject".split())
LAYOUTS = {
    "own": Layout("id question !answers", from_own),
    "flashrag": Layout("id question !golden_answers", from_flashrag),
    "hotpotqa": Layout("question answer !supporting_facts|_id !context", from_hotpotqa),
    "musique": Layout("id question answer !paragraphs", from_musique),
    "ircot": Layout("question_id question_text !answers_objects !contexts", from_ircot),
    "verl": Layout("data_source prompt !reward_model", from_verl),
    "choice": Layout("question answer !options !answer_idx|answer_index|question_id", from_choice),
    "math": Layout("problem !solution", from_math),
    "gsm8k": Layout("question !answer", from_math, lambda record: "####" in str(record["answer"])),
    "ur2": Layout("!idx question answer !source !level subject", from_plain),
    "r1_searcher": Layout("!idx !question|answer", from_plain),
    "plain": Layout("!question !answer", from_plain, lambda record: set(record) <= PLAIN_FIELDS),
}
ATTEMPT_LAYOUTS = {"rollouts": Layout("idx question answer !pred_anses", from_rollouts)}
ABSTRACT = partial(from_passage, mark=" Text:")
CHUNK = partial(from_passage, mark="   ")
CORPUS_LAYOUTS = {  # without a header, a tab-separated line is read as {"id", "passage"}
    "contents": Layout("!contents", partial(from_passage, name="contents", mark="\n")),
    "title_text": Layout("title !text", from_title_text),
    "tsv_abstract": Layout(
        "id<TAB>Title: ... Text: ...", ABSTRACT, lambda r: str(r.get("passage"))[:6] == "Title:"
    ),
    "tsv_chunk": Layout("id<TAB>title   text", CHUNK, lambda r: "   " in str(r.get("passage"))),
    "tsv": Layout("id<TAB>text", from_passage, lambda r: "passage" in r),
}


def detect(record: dict, table: dict[str, Layout]) -> str:
    for name, layout in table.items():
        if layout.recognise(record):
            return name
    known = ", ".join(f"{name} ({row.fields.replace('!', '')})" for name, row in table.items())
    fields = ", ".join(map(repr, record))[:300]
    raise InputError(f"unknown layout: the record has the fields {fields}; known are {known}")


def read_fields(path: Path, table: dict[str, Layout], columns=(), skip_bad=False) -> Iterator[dict]:
    """Yields the fields of each record of a file. All records are read by one layout, and a
    duplicate id is an error.
    """
    layout = None
    places = {}

    def convert(record: dict, number: int, place: str) -> dict:
        nonlocal layout
        layout = layout or table[detect(record, table)]
        fields = layout.convert(record, number)
        first = places.setdefault(fields["id"], place)
        if first != place:
            raise wrong(id_field(record), f"duplicate id {short(fields['id'])}, first in {first}")
        return fields

    return convert_records(path, read_records(path, columns), convert, skip_bad)
