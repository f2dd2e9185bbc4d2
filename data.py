"""Questions and documents, and how they are loaded.

    Question                         a question with the accepted answers and, if the record has
                                     them, options and numbered references
    Document                         one document of a corpus
    SearchRequest -> SearchResult    argument and result of the rollout's search function

A file has a JSON object on each line. Questions have our fields, or FlashRAG's and Search-R1's:

    {"id": "1", "question": "Where was Ana Bell born?", "answers": ["Kelmouth", "Port Kelmouth"]}
    {"id": "2", "question": "Where was Ana Bell born?", "golden_answers": ["Kelmouth"]}

and so have documents; `contents` holds the title, a line break, and the text, or the text alone if
there is a `title`:

    {"id": "a", "title": "Ana Bell", "text": "Ana Bell was born in Kelmouth."}
    {"id": "b", "contents": "\"Kelmouth\"\nKelmouth is a town in Norland."}

In a file that merges several data sets, as Search-R1's, `data_source` is the kind of a question and
the beginning of its id.

convert.py makes such files of other data sets. An error in a file becomes a one-line message that
names the file, the line and the field. Left out: corpora larger than memory.
"""

import random
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain, count
from pathlib import Path

from errors import InputError
from formats.records import read_records, short
from formats.text_folder import is_text, read_texts


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


Documents = list[Document]


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

    @property
    def record(self) -> dict:
        """The fields that a predictions file has."""
        return {
            "id": self.id,
            "kind": self.kind,
            "task": self.task,
            "question": self.question,
            "options": self.options,
            "golds": self.answers,
        }


Questions = list[Question]
Datasets = dict[str, Questions]  # name of the data set -> its questions


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

    documents: Documents = field(default_factory=list)
    text: str = ""
    fallback: bool = False
    error: str | None = None
    rejected: bool = False
    __post_init__ = clean_fields


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


# ------------------------------------------------------------------------------------- records
TASKS = ("qa", "math", "choice", "summary")


TYPES = {
    "question task source data_source title text content contents": str,
    "answers golden_answers options references supporting decomposition scores": list,
    "may_search": bool,
}


def checked(record: dict) -> dict:
    """Returns the fields that are neither null nor blank. Those that we read have their types."""
    given = {
        name: value
        for name, value in record.items()
        if value is not None and not (isinstance(value, str) and not value.strip())
    }
    for names, kind in TYPES.items():
        for name in names.split():
            if not isinstance(given.get(name, kind()), kind):
                raise InputError(
                    f"field {name!r}: expected {kind.__name__}, found {short(given[name])}"
                )
    return given


def id_of(record: dict, number: int | None = None) -> str:
    """Returns the id; `number`, the record's place in the file, is the id of one without. Each data
    set in a merged file may have its own "test_0", so `data_source` comes before it: "nq:test_0".
    """
    value = record.get("id", number)
    source = record.get("data_source")
    if type(value) not in (int, str) or value == "":
        raise InputError(f"field 'id': expected a text or a whole number, found {short(value)}")
    return f"{source}:{value}" if source else str(value)


def answers_of(values: list) -> list[str]:
    """Returns the answers as texts, each once. Blank ones are dropped: cover-EM finds "" in every
    prediction.

    >>> answers_of(["Ana", 42, " ", None, "Ana"])
    ['Ana', '42']
    """
    if {*map(type, values)} - {str, int, float, type(None)}:
        raise InputError(f"expected answers that are texts or numbers, found {short(values)}")
    texts = (clean(str(value)) for value in values if value is not None)
    return [*dict.fromkeys(filter(str.strip, texts))]


def named_after(path: str | Path) -> str:
    """Returns the data set of R1-Searcher's Table 1 that a file or its folder is named after, or ""
    if there is none or both. FlashRAG's and R1-Searcher's own files do not name it in their
    records.

    >>> named_after("2wikimultihopqa/train.jsonl"), named_after("hotpotqa_500.jsonl")
    ('2wiki', 'hotpotqa')
    """
    names = {*re.findall("hotpotqa|2wiki", "/".join(Path(path).parts[-2:]).lower())}
    return names.pop() if len(names) == 1 else ""


def question_of(record: dict, number: int, dataset: str = "") -> Question:
    """Reads our fields, which are those of Question, except that `hops` is `decomposition`; or
    FlashRAG's. A record without an id gets its number in the file, and one without `source` is of
    the kind `dataset`.
    """
    given = checked(record)
    answers = "golden_answers" if "golden_answers" in given else "answers"
    golds = answers_of(given.get(answers, []))
    if not golds:
        raise InputError(
            f"field {answers!r} is missing or empty: convert.py makes our layout of other data "
            "sets' files"
        )
    steps = given.get("decomposition", [])
    question = Question(
        id=id_of(record, number),
        question=given["question"],
        answers=golds,
        task=given.get("task", "qa"),
        options=tuple(map(clean, map(str, given.get("options", [])))),
        references=tuple(map(document_of, given.get("references", []), count(1))),
        supporting=tuple(given.get("supporting", [])),
        source=given.get("source", given.get("data_source", dataset)),
        level=str(given.get("level", "")),  # a number in MATH, a word in UR²'s files
        may_search=given.get("may_search", True),
        hops=tuple(Hop(step["query"], step.get("answer", "")) for step in steps),
    )
    check(question)
    return question


def check(question: Question) -> None:
    """Checks what the types of the fields do not say."""
    if question.task not in TASKS:
        raise InputError(f"field 'task': {short(question.task)} is none of {', '.join(TASKS)}")
    last = len(question.references)
    if not {*question.supporting} <= {*range(1, last + 1)}:
        raise InputError(f"field 'supporting': expected numbers from 1 to {last}, the references")
    letters = string.ascii_uppercase[: len(question.options)]
    if question.task == "choice" and not {*question.answers} <= {*letters}:
        raise InputError(f"field 'answers': expected letters of the {len(letters)} options")


def passage_of(record: dict) -> tuple[str, str]:
    """Returns (title, text): of our fields, or of `contents` (FlashRAG, Search-R1) or `content`,
    whose first line is the title if there is another. A record's own title is removed from it.

    >>> passage_of({"title": "Ana", "contents": "Born in Varen."})
    ('Ana', 'Born in Varen.')
    >>> passage_of({"title": "Ana", "content": "Ana\\nBorn."})
    ('Ana', 'Born.')
    """
    given = checked(record)
    names = ("title", "text", "content", "contents")
    own, own_text, content, contents = (given.get(name, "").strip() for name in names)
    passage = contents or content
    *title, text = passage.split("\n", 1)
    # Only outer quotes are removed, because the title itself may contain some.
    title = re.sub(r'^"(.*)"$', r"\1", "".join(title).strip())
    if passage and own.strip('"') in ("", title.strip('"')):
        return title, text.strip()
    return own, passage or own_text


def document_of(record: dict, number: int) -> Document:
    title, text = passage_of(record)
    if not record.keys() & {"text", "content", "contents"} or not (title or text):
        raise InputError("field 'text' is missing (or 'contents'), or it and 'title' are empty")
    return Document(id_of(record, number), title, text)


def distinct(documents: Iterable[Document]) -> Documents:
    """Returns the documents without those whose title and text an earlier one has."""
    firsts = {}
    for document in documents:
        firsts.setdefault((document.title, document.text), document)
    return [*firsts.values()]


# ----------------------------------------------------------------------------------------- loading
def load_all(path: str, make: Callable, skip_bad: bool = False) -> list:
    """Returns make(record, number) of each record of a file, whose ids must differ: difficulties
    and predictions are found by the id.
    """
    seen = set()

    def made(record: dict, number: int):
        item = make(record, number)
        name = id_of(record, number)
        if name in seen:
            raise InputError(f"field 'id': an earlier record has the id {short(name)} too")
        seen.add(name)
        return item

    return read_records(path, made, skip_bad)


def load_questions(path: str | Path, skip_bad: bool = False, seed=0) -> Questions:
    """Loads the questions of one or several files (comma-separated), with unique ids."""
    return [*chain.from_iterable(load_datasets(path, skip_bad, seed).values())]


def load_datasets(path, skip_bad: bool = False, seed: int = 0) -> Datasets:
    """Loads questions as {name of the file: questions}, in the order given. An id that occurs in
    several files gets the file's name as a prefix. "FILE:N" draws N questions with the seed: ARENA
    (appendix C), for example, has 10,000 of HotpotQA, 10,000 of 2Wiki and 5,000 of MuSiQue.
    """
    datasets, counts = {}, {}
    for name, file in named_files(path).items():
        place, counts[name] = re.fullmatch(r"(.*?)(?::(\d+))?", str(file)).groups()
        make = partial(question_of, dataset=named_after(place))
        datasets[name] = load_all(place, make, skip_bad)
    # Counted before the draw, so that a question has the same id whatever is drawn
    uses = Counter(question.id for question in chain.from_iterable(datasets.values()))
    for name, questions in datasets.items():
        place = re.sub(r":\d+$", "", name)
        own = [replace(q, id=f"{place}:{q.id}") if uses[q.id] > 1 else q for q in questions]
        datasets[name] = draw_some(own, int(counts[name] or 0), f"{seed} {name}")
    return datasets


def named_files(path: str | Path) -> dict[str, Path]:
    """Splits comma-separated files. Each is named by its stem ("test"), or all by their paths if
    two have the same stem.
    """
    files = [Path(name.strip()) for name in str(path).split(",")]
    by_stem = {file.name.partition(".")[0]: file for file in files}
    return by_stem if len(by_stem) == len(files) else {str(file): file for file in files}


def draw_some(questions: Questions, count: int, seed: str) -> Questions:
    """Draws `count` questions and keeps their order; returns all if count is 0 or too large."""
    if not 0 < count < len(questions):
        return questions
    rows = random.Random(seed).sample(range(len(questions)), count)
    return [questions[row] for row in sorted(rows)]


BUCKETS = ("hard", "medium", "easy", "dropped")


def load_difficulty(path: str) -> list[dict]:
    """Loads the lines {"id", "scores", "score", "bucket"} that lab.difficulty has written. Only the
    id and the scores are required.
    """

    def difficulty_of(record: dict, number: int) -> dict:
        scores = checked(record)["scores"]
        if not scores or not all(0 <= score <= 1 for score in scores):
            raise InputError("field 'scores': expected numbers from 0 to 1: run lab.difficulty")
        if record.get("bucket", "hard") not in BUCKETS:
            raise InputError(f"field 'bucket': expected one of {', '.join(BUCKETS)}")
        return record | {"id": id_of(record)}

    return load_all(path, difficulty_of)


def load_corpus(path: str | Path, skip_bad: bool = False) -> Documents:
    """Loads documents from a file of records, a text or a folder of texts. A passage that the
    corpus has under several ids is kept once, because its copies would fill a search result.
    """
    path = Path(path)
    if is_text(path):
        documents = distinct(Document(*passage) for passage in read_texts(path))
        if not documents:
            raise InputError(f"--corpus {path}: no text in .txt or .md files")
        return documents
    return distinct(read_records(path, document_of, skip_bad))


def corpus_from_questions(questions: Questions) -> Documents:
    """Returns the references of all questions as a corpus, each once, numbered from 1. References
    without a text are left out.
    """
    references = chain.from_iterable(question.references for question in questions)
    corpus = distinct(document for document in references if document.text)
    return [replace(document, id=str(number)) for number, document in enumerate(corpus, 1)]


if __name__ == "__main__":
    print(__doc__.strip())
