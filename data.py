"""Questions and documents, and how they are loaded.

    file -> records -> fields, by the file's layout (formats/) -> Question or Document

    Question                         a question with the accepted answers and, if the record has
                                     them, options and numbered references
    Document                         one document of a corpus
    SearchRequest -> SearchResult    argument and result of the rollout's search function

The first record of a file decides its layout. An error in a file becomes a one-line message that
names the file, the line and the field, as far as they are known, and what to do. Left out: corpora
larger than memory.
"""

import json
import os
import random
import re
import sys
import textwrap
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path

from errors import FlagParser, InputError, run_main
from formats.layouts import ATTEMPT_LAYOUTS, CORPUS_LAYOUTS, LAYOUTS, detect, read_fields
from formats.records import (
    PASSAGE_COLUMNS,
    QUESTION_COLUMNS,
    finished_records,
    is_tsv,
    read_records,
)
from formats.text_folder import is_text, read_texts, stem


def clean(text: str) -> str:
    """Replaces lone surrogates by "?": an escape in JSON may produce one, but UTF-8 cannot encode
    it and tokenizers reject it.
    """
    return text if text.isascii() else text.encode(errors="replace").decode()


def clean_fields(self) -> None:
    values = vars(self)
    for name, value in values.items():
        if isinstance(value, str):
            values[name] = clean(value)


@dataclass(frozen=True)
class Document:
    """One document of a corpus. `id` is a string even if the file has a number."""

    id: str
    title: str
    text: str
    __post_init__ = clean_fields


@dataclass(frozen=True)
class Hop:
    """One step towards an answer: a query, and the fact that it should find ("" if not known)."""

    query: str
    answer: str = ""
    __post_init__ = clean_fields


@dataclass(frozen=True)
class Question:
    """One question with all accepted answers.

    task         "qa" (open answer), "math" (graded by math equality), "choice" (a letter that
                 names one of `options`) or "summary" (`answers` are reference summaries)
    references   documents that come with the record
    supporting   the numbers of the gold references, counted from 1 as in a prompt
    source       the kind by which evaluation tables are grouped ("one_hop", "hotpotqa_bridge",
                 ...); if "", the task is the kind
    may_search   False: the prompt without retrieval is used (UR² section 3.3)
    hops         the searches that lead to the answer, for coldstart.py (`decomposition` in files)
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
    hops: tuple[Hop, ...] = ()
    __post_init__ = clean_fields

    @property
    def kind(self) -> str:
        return self.source or self.task


@dataclass(frozen=True)
class SearchRequest:
    """One query of one trajectory. The retrievers `oracle` and `given` need the question. A model
    that summarises needs the question and the reasoning: the response before the query, with the
    documents of earlier searches.
    """

    question: Question
    query: str
    reasoning: str = ""
    held_out: bool = False  # True in an evaluation during training


@dataclass(frozen=True)
class SearchResult:
    """The result of one request.

    text       the summary, or the protocol's fallback text if `fallback` is True; if "", the policy
               reads the numbered `documents`, or a fixed sentence if there are none or the search
               failed
    fallback   True if the summariser decided that the query asks for no fact (UR²)
    error      the technical reason why the search failed, or None if it did not; ignored if
               `rejected` is True
    rejected   True if a server rejected the request, for example for its length. This is not a
               failed search: the policy reads a notice instead of a result, or the trajectory ends
    """

    documents: list[Document] = field(default_factory=list)
    text: str = ""
    fallback: bool = False
    error: str | None = None
    rejected: bool = False
    __post_init__ = clean_fields


@dataclass(frozen=True)
class Attempts:
    """A question with a model's answers in several rollouts; "" means no answer."""

    question: Question
    predictions: list[str]


# -------------------------------------------------------------------------------- untrusted texts
def harmless(text: str) -> str:
    """Makes a text safe for a terminal. Characters that are not printable become escapes, and so do
    ⟦ and ⟧, which `trajectory.show` puts around texts that are not scored. Each line after the
    first begins with "| ", and empty lines are left out.
    """
    text = re.sub(r"\n[ \n]*\n", "\n", text)
    numbers = {c: ascii(c)[1:-1] for c in {*text} if not c.isprintable() or c in "⟦⟧"}
    return text.translate(str.maketrans(numbers | {"\n": "\n| "}))


def truncate_texts(texts: list[str], limit: int) -> list[str]:
    """Truncates a list of texts to `limit` characters in total, separators included. Texts after
    the cut are dropped.
    """
    # The separator is a lone surrogate, which does not occur in texts after `clean`.
    return "\ud800".join(texts)[:limit].split("\ud800")


def strip_tags(text: str, tags) -> str:
    """Replaces each of these tags by a blank."""
    for tag in tags:
        text = text.replace(tag, " ") if tag else text
    return text


@lru_cache(maxsize=8)
def control_tokens(tokenizer) -> dict[int, str]:
    """Returns id -> text of the special tokens, and of those added tokens with a symbol, such as
    "</think>", that the chat template writes. Other added tokens are ordinary text: one tokenizer
    has all HTML tags.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    template = str(getattr(tokenizer, "chat_template", ""))
    return {
        i: t.content
        for i, t in added
        if t.special or (t.content in template and re.search(r"[^\w\s]", t.content))
    }


# ----------------------------------------------------------------------------------------- loading


def question_of(fields: dict) -> Question:
    """Makes a Question from the fields in a dict, where references are dicts {id, title, text}."""
    fields = fields | {name: tuple(fields.get(name, ())) for name in ("options", "supporting")}
    references = tuple(Document(**reference) for reference in fields.get("references", ()))
    hops = tuple(Hop(**hop) for hop in fields.get("hops", ()))
    return Question(**fields | {"references": references, "hops": hops})


def load_questions(path: str | Path | list, skip_bad: bool = False, seed=0) -> list[Question]:
    """Loads the questions of one or several files (a list, or comma-separated), with unique ids."""
    return [*chain.from_iterable(load_datasets(path, skip_bad, seed).values())]


def load_datasets(path, skip_bad: bool = False, seed: int = 0) -> dict[str, list[Question]]:
    """Loads questions as {name of the file: questions}, in the order given. An id that occurs in
    several files gets the file's name as a prefix: difficulties and predictions are found by the
    id, and two data sets may both count from 1. "FILE:N" draws N questions with the seed: ARENA
    (appendix C), for example, has 10,000 of HotpotQA, 10,000 of 2Wiki and 5,000 of MuSiQue.
    """
    files, counts = zip(*map(with_count, named_files(path)), strict=True)
    loaded = [load_file(file, skip_bad) for file in files]
    uses = Counter(question.id for questions in loaded for question in questions)
    datasets = {}
    for name, questions, count in zip(dataset_names(files), loaded, counts, strict=True):
        for row, question in enumerate(questions):
            if uses[question.id] > 1:
                questions[row] = replace(question, id=f"{name}:{question.id}")
        if count is not None and not 0 < count <= len(questions):
            raise InputError(f"--data {name}:{count}: give a number from 1 to {len(questions)}")
        datasets[name] = draw_some(questions, count or 0, f"{seed} {name}")
    return datasets


def with_count(file: Path) -> tuple[Path, int | None]:
    """Splits "a.json:500" into file and count. The count is None if there is none, or if a file of
    exactly that name exists.
    """
    name, _, count = str(file).rpartition(":")
    counted = name and count.isdecimal() and not os.path.exists(file)
    return (Path(name), int(count)) if counted else (file, None)


def draw_some(questions: list[Question], count: int, seed: str) -> list[Question]:
    """Draws `count` questions and keeps their order; returns all if count is 0 or too large."""
    if not 0 < count < len(questions):
        return questions
    rows = random.Random(seed).sample(range(len(questions)), count)
    return [questions[row] for row in sorted(rows)]


def load_file(path: Path, skip_bad: bool) -> list[Question]:
    questions = [question_of(f) for f in read_fields(path, LAYOUTS, QUESTION_COLUMNS, skip_bad)]
    gold = [bool(question.supporting) for question in questions if question.references]
    if any(gold) and not all(gold):  # probably a mistake in the file
        print(
            f"{path}: of {len(gold)} questions with references, {gold.count(False)} have no gold "
            "reference",
            file=sys.stderr,
        )
    return questions


def named_files(path: str | Path | list) -> list[Path]:
    if isinstance(path, list | tuple):
        return [file for item in path for file in named_files(item)]
    # A file name may contain a comma, so a name that exists is not split. The text "" is excluded,
    # because Path("") is the current folder, which exists.
    if path and os.path.exists(with_count(Path(path))[0]):
        return [Path(path)]
    names = [name.strip() for name in str(path).split(",") if name.strip()]
    if not names:
        raise InputError("no question file was named")
    return [Path(name) for name in names]


def dataset_names(files: list[Path]) -> list[str]:
    """Names each file by its stem ("test") if that is unique, else by folder and stem ("nq/test")
    if these are unique, else by its path.
    """
    choices = []
    for file in files:
        folder = file.absolute().parent.name
        choices.append((stem(file), f"{folder}/{stem(file)}", str(file.resolve())))
    uses = Counter(chain.from_iterable(choices))
    for file, names in zip(files, choices, strict=True):
        if uses[names[-1]] > 1:
            raise InputError(f"{file}: named twice, so that its ids would not be unique")
    return [next(name for name in names if uses[name] == 1) for names in choices]


def load_attempts(path: str | Path, skip_bad: bool = False) -> list[Attempts]:
    """Loads published answers of rollouts: R1-Searcher's stage 1 file, for example, has ten answers
    per question.
    """
    records = read_fields(Path(path), ATTEMPT_LAYOUTS, skip_bad=skip_bad)
    return [Attempts(predictions=r.pop("predictions"), question=question_of(r)) for r in records]


BUCKETS = ("hard", "medium", "easy", "dropped")


def load_difficulty(path: str | Path) -> list[dict]:
    """Loads the lines {"id", "scores", "score", "bucket"} that lab.difficulty has written. Only the
    id and the scores are required.
    """
    records = finished_records(Path(path), cut=False)
    for number, record in enumerate(records, 1):
        scores = record.get("scores")
        good = isinstance(record.get("id"), str) and isinstance(scores, list) and scores
        good = good and all(isinstance(x, int | float) and 0 <= x <= 1 for x in scores)
        if not good or (record.get("bucket") or "hard") not in BUCKETS:
            raise InputError(
                f'{path}, record {number}: expected {{"id", "scores" from 0 to 1}}, with a known '
                '"bucket" or none: run lab.difficulty again, or name another file'
            )
    return records


def load_corpus(path: str | Path, skip_bad: bool = False) -> list[Document]:
    """Loads documents from a file of records, a text or a folder of texts."""
    path = Path(path)
    if is_text(path):
        return [Document(**fields) for fields in read_texts(path, skip_bad)]
    records = read_fields(path, CORPUS_LAYOUTS, PASSAGE_COLUMNS, skip_bad)
    return [Document(**fields) for fields in records]


def corpus_from_questions(questions: list[Question]) -> list[Document]:
    """Returns the references of all questions as a corpus, each once, with unique ids. References
    without a text are left out.
    """
    documents: dict[tuple[str, str], Document] = {}
    ids: set[str] = set()
    for document in (reference for question in questions for reference in question.references):
        key = (document.title, document.text)
        if key not in documents and document.text:
            while document.id in ids:  # another record may have the new id too
                document = replace(document, id=f"{document.id}#{len(documents)}")
            documents[key] = document
            ids.add(document.id)
    if not documents:
        raise InputError("these questions have no references: name a corpus file, not from-data")
    return list(documents.values())


# ------------------------------------------------------------------------------ python data.py FILE
def first_layout(path: Path) -> tuple[bool, str]:
    """Returns (whether the file is a corpus, the name of its layout). The first record that can be
    read decides.
    """
    if is_text(path):
        return True, "text"
    tsv = is_tsv(path)
    for _, place, record in read_records(path, ("first", "second") if tsv else ()):
        if not isinstance(record, dict):
            continue
        # Without a header, the first column has questions if there is a blank in it, else ids.
        if set(record) == {"first", "second"}:
            names = QUESTION_COLUMNS if " " in record["first"].strip() else PASSAGE_COLUMNS
            record = dict(zip(names, record.values(), strict=True))
        known = any(layout.recognise(record) for layout in CORPUS_LAYOUTS.values())
        corpus = known and "question" not in record
        try:
            return corpus, detect(record, CORPUS_LAYOUTS if corpus else LAYOUTS)
        except InputError as error:
            raise InputError(f"{path}, {place}: {error}") from None
    return tsv, "unreadable"  # loading the file then reports the error


def show(path: Path, skip_bad: bool) -> None:
    corpus, layout = first_layout(path)
    items = load_corpus(path, skip_bad) if corpus else load_questions(path, skip_bad)
    print(f"{path}\nlayout     {layout}\n{'documents ' if corpus else 'questions '} {len(items):,}")
    for name in () if corpus else ("source", "task"):
        counts = Counter(getattr(question, name) or "-" for question in items)
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in counts.most_common())
        print(harmless(f"{name:10} {kinds}"))
    print("first record")
    for name, value in asdict(items[0]).items():
        if value:
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            print(harmless(f"  {name:10} {textwrap.shorten(shown, 300, placeholder=' ...')}"))


EXAMPLE = """\
{"id": "1", "question": "Where was Ana Bell born?", "answers": ["Kelmouth", "Port Kelmouth"]}
{"id": "2", "question": "What does she draw?", "task": "choice", "answers": ["A"], \
"options": ["maps", "ships", "birds"]}
{"id": "3", "question": "In which country was she born?", "answers": ["Norland"], \
"references": [{"id": "a", "title": "Ana Bell", "text": "Ana Bell was born in Kelmouth."}, \
{"id": "b", "title": "Varen", "text": "Varen is known for its bells."}, \
{"id": "c", "title": "Kelmouth", "text": "Kelmouth is a town in Norland."}], "supporting": [1, 3]}
{"id": "a", "title": "Ana Bell", "text": "Ana Bell was born in Kelmouth."}
{"id": "c", "title": "Kelmouth", "text": "Kelmouth is a town in Norland."}
"""  # our own layout: three questions and two documents


def main() -> None:
    parser = FlagParser(description="Show what a file contains; without a file, list the layouts.")
    names = "questions, documents or a folder of texts; separate several files by commas"
    parser.add_argument("file", nargs="?", help=names)
    parser.add_argument("--skip_bad", action="store_true", help="skip malformed records")
    parser.add_argument("--example", action="store_true", help="print an example of our layout")
    args = parser.parse_args()
    if args.example:
        print("--data: the first three lines; --corpus: the last two", file=sys.stderr)
        return print(EXAMPLE, end="")
    if args.file is None:
        for name, layout in (LAYOUTS | CORPUS_LAYOUTS).items():
            print(f"{name:13} {layout.fields.replace('!', '')}")
        return
    for path in named_files(args.file):
        show(path, args.skip_bad)


if __name__ == "__main__":
    run_main(main)
