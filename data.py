"""A question, a document, and where they come from.

    file -> records -> the fields of a layout (formats/) -> Question or Document

    Question                         what is asked, the answers that count, and, where the record
                                     has them, options and numbered references
    Document                         one passage of a corpus
    SearchRequest -> SearchResult    what the rollout hands to a search function, and gets back

A file's layout is found by its first record. Whatever is wrong with a file is one line that names
the file, the line, the field and what to do. Left out: corpora beyond memory.
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
from pathlib import Path

from errors import FlagParser, InputError, run_main, setting
from formats.layouts import ATTEMPT_LAYOUTS, CORPUS_LAYOUTS, LAYOUTS, detect, read_fields
from formats.records import (
    PASSAGE_COLUMNS,
    QUESTION_COLUMNS,
    finished_records,
    is_tsv,
    read_records,
)
from formats.text_folder import is_text, read_texts, stem


@dataclass(frozen=True)
class DataSettings:
    data: str = setting("", 'question files, comma-separated, FILE:N draws N; "" = built-in world')
    corpus: str = setting("", 'file or folder of passages, or "from-data": the records\' own')
    skip_bad: bool = setting(False, "count malformed records and go on")
    reworded: float = setting(0.0, "built-in golds with a word more", least=0, only="papers")


def clean(text: str) -> str:
    """Half characters become "?": JSON may hold them, neither a file nor a tokenizer takes them."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def clean_fields(self) -> None:
    texts = {name: clean(its) for name, its in vars(self).items() if isinstance(its, str)}
    vars(self).update(texts)


@dataclass(frozen=True)
class Document:
    """One passage. `id` is a string even where the file has a number."""

    id: str
    title: str
    text: str
    __post_init__ = clean_fields


@dataclass(frozen=True)
class Question:
    """One question with every answer that counts as right.

    task         "qa" (open answer), "math" (graded by math equality), "choice" (a letter into
                 `options`) or "summary" (`answers` are reference summaries of the references)
    references   passages that come with the record
    supporting   the numbers of the gold references, from 1, as a prompt shows them
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
    __post_init__ = clean_fields

    @property
    def kind(self) -> str:
        return self.source or self.task


@dataclass(frozen=True)
class SearchRequest:
    """One query of one row. The question rides along for the oracle control, and for summarisers
    what the row holds before the query.
    """

    question: Question
    query: str
    reasoning: str = ""
    held_out: bool = False  # asked by an evaluation within training


@dataclass(frozen=True)
class SearchResult:
    """What a search function gives back for one request.

    text       the one passage that the policy reads (a summary); "" shows `documents`, numbered
    fallback   the summariser found that the query asks for no fact (UR²)
    error      why the search failed, which is nobody's fault
    rejected   a server refuses the query for what it is: the search has not failed
    """

    documents: list[Document] = field(default_factory=list)
    text: str = ""
    fallback: bool = False
    error: str | None = None
    rejected: bool = False
    __post_init__ = clean_fields


@dataclass(frozen=True)
class Attempts:
    """A question and what a model answered in several rollouts; "" where it gave no answer."""

    question: Question
    predictions: list[str]


# ------------------------------------------------------------------------- what others have written
def harmless(text: str) -> str:
    """For a terminal: controls, and our marks ⟦ ⟧, as their numbers; "| " begins a further line."""
    numbers = {c: ascii(c)[1:-1] for c in {*text} if not c.isprintable() or c in "⟦⟧"}
    return text.translate(str.maketrans(numbers | {"\n": "\n| "}))


def truncate_texts(texts: list[str], limit: int) -> list[str]:
    """Keeps the first `limit` characters of all texts together."""
    # The separator is half a character (a lone surrogate), which `clean` texts do not contain.
    return "\ud800".join(texts)[:limit].split("\ud800")


def strip_tags(text: str, tags) -> str:
    """With a blank in place of each of these tags."""
    for tag in tags:
        text = text.replace(tag, " ") if tag else text
    return text


@lru_cache(maxsize=8)
def control_tokens(tokenizer) -> dict[int, str]:
    """id -> text of what is special, also without a role, or was added and is no word."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    return {i: t.content for i, t in added if t.special or re.search(r"[^\w\s]", t.content)}


def question_of(fields: dict) -> Question:
    """The Question that a layout's fields make; references are {id, title, text}."""
    fields = fields | {name: tuple(fields.get(name, ())) for name in ("options", "supporting")}
    references = [Document(**reference) for reference in fields.get("references", ())]
    return Question(**fields | {"references": tuple(references)})


def load_questions(path: str | Path | list, skip_bad: bool = False, seed=0) -> list[Question]:
    """Of one file or of several (a list, or names with commas between them), with unique ids."""
    datasets = load_datasets(path, skip_bad, seed).values()
    return [question for questions in datasets for question in questions]


def load_datasets(path, skip_bad: bool = False, seed: int = 0) -> dict[str, list[Question]]:
    """`load_questions` by file: {name: its questions}, in the order given. An id that several
    files use gets the file's name in front: two data sets may both count from 1, and questions that
    share an id would share a group. "FILE:N" draws N of its questions by the seed, as ARENA
    (appendix C) takes 10,000 of HotpotQA, 10,000 of 2Wiki and 5,000 of MuSiQue.
    """
    files, counts = zip(*map(with_count, named_files(path)), strict=True)
    loaded = [load_file(file, skip_bad) for file in files]
    uses = Counter(question.id for questions in loaded for question in questions)
    named, seen = {}, set()
    for name, questions, count in zip(dataset_names(files), loaded, counts, strict=True):
        named[name] = []
        for question in questions:
            if uses[question.id] > 1:
                question = replace(question, id=f"{name}:{question.id}")
            if question.id in seen:
                advice = "rename one of the files, or leave one out"
                raise InputError(f"question id {question.id!r} comes from two files: {advice}")
            seen.add(question.id)
            named[name].append(question)
        if count is not None and not 0 < count <= len(questions):
            known = f"it has {len(questions)} questions to draw from"
            raise InputError(f"--data {name}:{count}: {known}")
        named[name] = draw_some(named[name], count or 0, f"{seed} {name}")
    return named


def with_count(file: Path) -> tuple[Path, int | None]:
    """ "a.json:500" is 500 of a.json, unless there is a file of just that name."""
    name, _, count = str(file).rpartition(":")
    drawn = name and count.isdecimal() and not os.path.exists(file)
    return (Path(name), int(count)) if drawn else (file, None)


def draw_some(questions: list[Question], count: int, lot: str) -> list[Question]:
    """`count` of them by `lot`, in their order; 0, or more than there are: all."""
    if not 0 < count < len(questions):
        return questions
    places = random.Random(lot).sample(range(len(questions)), count)
    return [questions[place] for place in sorted(places)]


def load_file(path: Path, skip_bad: bool) -> list[Question]:
    questions = [question_of(f) for f in read_fields(path, LAYOUTS, QUESTION_COLUMNS, skip_bad)]
    gold = [bool(question.supporting) for question in questions if question.references]
    if any(gold) and not all(gold):  # seldom meant
        count = f"of {len(gold)} questions with paragraphs, {gold.count(False)} have no gold"
        print(f"{path}: {count} paragraph", file=sys.stderr)
    return questions


def named_files(path: str | Path | list) -> list[Path]:
    if isinstance(path, list | tuple):
        return [file for item in path for file in named_files(item)]
    # A name may hold a comma, "" is this folder, and a list may be longer than a name can be.
    if path and os.path.exists(with_count(Path(path))[0]):
        return [Path(path)]
    names = [name.strip() for name in str(path).split(",") if name.strip()]
    if not names:
        raise InputError("no question file was named")
    return [Path(name) for name in names]


def dataset_names(files: list[Path]) -> list[str]:
    """For each the shortest of stem, folder/stem and whole path that no other shares: "nq/test"."""
    choices = []
    for file in files:
        folder = file.absolute().parent.name
        choices.append((stem(file), f"{folder}/{stem(file)}", str(file.resolve())))
    uses = Counter(name for names in choices for name in names)
    for file, names in zip(files, choices, strict=True):
        if uses[names[-1]] > 1:
            why = "its questions would share their ids: once will do"
            raise InputError(f"{file}: named twice, {why}")
    return [next(name for name in names if uses[name] == 1) for names in choices]


def load_attempts(path: str | Path, skip_bad: bool = False) -> list[Attempts]:
    """Published rollout answers: R1-Searcher's stage 1 file has ten for each question."""
    found = []
    for fields in read_fields(Path(path), ATTEMPT_LAYOUTS, skip_bad=skip_bad):
        predictions = fields.pop("predictions")
        found.append(Attempts(question_of(fields), predictions))
    return found


BUCKETS = ("hard", "medium", "easy", "dropped")


def load_difficulty(path: str | Path) -> list[dict]:
    """Lines {"id", "scores", "score"[, "bucket", "by"]} as lab.difficulty writes them."""
    records = finished_records(Path(path), cut=False)
    for number, record in enumerate(records, 1):
        scores = record.get("scores")
        good = isinstance(record.get("id"), str) and isinstance(scores, list) and scores
        good = good and all(isinstance(its, int | float) and 0 <= its <= 1 for its in scores)
        if not good or (record.get("bucket") or "hard") not in BUCKETS:
            fields = 'expected {"id", "scores" from 0 to 1, "score"} as lab.difficulty writes them'
            how = f"{fields}: measure again, or name another file"
            raise InputError(f"{path}, record {number}: {how}")
    return records


def load_corpus(path: str | Path, skip_bad: bool = False) -> list[Document]:
    """Passages of a file of records, or of a text or a folder of texts (formats/text_folder.py)."""
    path = Path(path)
    if is_text(path):
        return [Document(**fields) for fields in read_texts(path, skip_bad)]
    found = read_fields(path, CORPUS_LAYOUTS, PASSAGE_COLUMNS, skip_bad)
    return [Document(**fields) for fields in found]


def corpus_from_questions(questions: list[Question]) -> list[Document]:
    """The questions' own paragraphs as a corpus, each once however many questions bring it."""
    documents: dict[tuple[str, str], Document] = {}
    ids: set[str] = set()
    for document in (reference for question in questions for reference in question.references):
        key = (document.title, document.text)
        if key not in documents and document.text:
            if document.id in ids:
                document = replace(document, id=f"{document.id}#{len(documents)}")
            documents[key] = document
            ids.add(document.id)
    if not documents:
        raise InputError("these questions bring no paragraphs: name a corpus file, not from-data")
    return list(documents.values())


def first_layout(path: Path) -> tuple[bool, str]:
    """(is it a corpus, the layout's name), from the first record that can be read."""
    if is_text(path):
        return True, "text"
    tsv = is_tsv(path)
    for _, place, record in read_records(path, ("first", "second") if tsv else ()):
        if not isinstance(record, dict):
            continue
        if set(record) == {"first", "second"}:  # no header: ids have no blanks, questions do
            names = QUESTION_COLUMNS if " " in record["first"].strip() else PASSAGE_COLUMNS
            record = dict(zip(names, record.values(), strict=True))
        known = any(layout.recognise(record) for layout in CORPUS_LAYOUTS.values())
        corpus = known and "question" not in record
        try:
            return corpus, detect(record, CORPUS_LAYOUTS if corpus else LAYOUTS)
        except InputError as error:
            raise InputError(f"{path}, {place}: {error}") from None
    return tsv, "unreadable"  # loading it says why


def show(path: Path, skip_bad: bool) -> None:
    corpus, layout = first_layout(path)
    items = load_corpus(path, skip_bad) if corpus else load_questions(path, skip_bad)
    print(f"{path}\nlayout     {layout}\n{'documents ' if corpus else 'questions '} {len(items):,}")
    if corpus:
        print(f"words      {sum(len(d.text.split()) for d in items) / len(items):.0f} per document")
    for name in () if corpus else ("source", "task"):
        counts = Counter(getattr(question, name) or "-" for question in items)
        told = ", ".join(f"{kind} {count:,}" for kind, count in counts.most_common())
        print(harmless(f"{name:10} {told}"))
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
"""  # our own layout: three questions and two passages


def main() -> None:
    parser = FlagParser(description="Say what a file holds; without one, the layouts.")
    names = "questions, passages or a folder of texts; several files with commas between them"
    parser.add_argument("file", nargs="?", help=names)
    parser.add_argument("--skip_bad", action="store_true", help="count malformed records and go on")
    parser.add_argument("--example", action="store_true", help="print our own layout, filled in")
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
