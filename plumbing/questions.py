"""Decides which questions are asked and which documents are searched.

Questions come from --data or from the built-in world; training, evaluation and a session at the
terminal each take theirs here. Documents come with the records, from --corpus or from that world.
Left out: in which order training asks (curriculum.py), and the layouts of files (data.py).
"""

import dataclasses
import random

from curriculum import parse_shares
from data import (
    Document,
    Question,
    corpus_from_questions,
    draw_some,
    load_corpus,
    load_datasets,
    load_questions,
)
from errors import InputError
from papers import paper_of
from prompts import PROTOCOLS, check_references
from retriever import make_retriever
from settings import Settings, in_built_in_world
from world.world import LOOK_UPS, World


# -------------------------------------------------------------------------------- questions
def training_questions(settings: Settings) -> list[Question]:
    if settings.data:
        questions = load_questions(settings.data, settings.skip_bad, settings.seed)
    else:
        questions = reworded(built_in_questions(settings, "train"), settings)
    return as_asked(questions, settings)


def reworded(questions: list[Question], settings: Settings) -> list[Question]:
    """Adds a word to a share of the gold answers that are looked up, as in real data."""
    rng, told = random.Random(f"reworded {settings.seed}"), []
    for question in questions:
        if question.kind in LOOK_UPS and rng.random() < settings.reworded:
            answers = [f"{answer} proper" for answer in question.answers]
            question = dataclasses.replace(question, answers=answers)
        told.append(question)
    return told


def hold_out(questions: list[Question], settings: Settings) -> tuple[list, list]:
    """Returns (training questions, questions of --eval_every) of --data or of two splits."""
    if not settings.eval_every:
        return questions, []
    count = settings.eval_questions
    if not settings.data:
        return questions, as_asked(world_questions(settings, "dev", count), settings)
    if count >= len(questions):
        held = f"{count} questions are held out, and --data has {len(questions)}"
        raise InputError(f"--eval_every: {held}: leave it out")
    held_out = draw_some(questions, count, f"{count} questions {settings.seed}")
    ids = {question.id for question in held_out}
    return [question for question in questions if question.id not in ids], held_out


def with_retrieved(questions: list, documents: list[Document], settings: Settings) -> list:
    """Replaces each question's references by documents of a search, none gold (ARENA Figure 2)."""
    protocol, told = PROTOCOLS[settings.protocol], []
    if not protocol.references_in_prompt:
        raise InputError(f"--references retrieved: the prompt of {protocol.name} has no references")
    retriever = make_retriever(
        documents, settings, settings.seed, settings.timeout, runs=settings.output_dir
    )
    given = [questions] if getattr(retriever, "needs_questions", False) else []  # the oracle
    asked, k = [question.question for question in questions], settings.documents_per_search
    for question, found in zip(questions, retriever.search(asked, k, *given), strict=True):
        if found in (None, False):
            raise InputError("--references retrieved: a search failed: try the same command again")
        own = tuple(found) or (Document("", "", protocol.empty_text),)
        told.append(dataclasses.replace(question, references=own, supporting=()))
    return told


def as_asked(questions: list[Question], settings: Settings) -> list[Question]:
    """Marks questions of --retrieval false and of UR²'s `direct_tasks` as not allowed to search."""
    protocol, direct, asked = PROTOCOLS[settings.protocol], settings.direct_tasks.split(","), []
    for question in questions:
        check_references(protocol, question)
        may = question.may_search and settings.retrieval and question.task not in direct
        asked.append(dataclasses.replace(question, may_search=may))
    return asked


def built_in_world(settings: Settings, fact_seed: int | None = None) -> World:
    return World(settings.world_seed, fact_seed, paper_of(settings.protocol).world.layout)


def built_in_questions(settings: Settings, split: str) -> list[Question]:
    """Returns all questions of a split; with "direct" in --mix also as many without retrieval."""
    questions = world_questions(settings, split)
    if "direct" in parse_shares(settings.mix, "--mix"):
        for kind in sorted({question.kind for question in questions}):
            some = [question for question in questions if question.kind == kind]
            for question in (some * 240)[:240]:  # a kind of which there are few comes anew
                questions.append(dataclasses.replace(question, source="direct", may_search=False))
    return questions


def world_questions(settings: Settings, split: str, count=None, fact_seed=None) -> list[Question]:
    """Returns `count` questions (None: all) of each kind that this protocol's tiny model knows."""
    world, kinds = built_in_world(settings, fact_seed), paper_of(settings.protocol).world.kinds
    return [q for kind in kinds for q in world.questions(split, kind, count)]


def load_documents(settings: Settings, questions: list[Question]) -> list[Document]:
    """Returns the documents to search: the records' own paragraphs, --corpus, or the built-in
    world.
    """
    if settings.corpus == "from-data":
        return corpus_from_questions(questions)
    if settings.corpus:
        return load_corpus(settings.corpus, settings.skip_bad)
    return [] if settings.data else built_in_world(settings).documents


def evaluation_questions(
    settings: Settings, options
) -> tuple[dict[str, list[Question]], list[Document]]:
    """Returns (questions by data set, the documents). Of `options`, which are eval.Options:

    questions   of each kind of the built-in world, or of each file by lot; 0: all
    references  "retrieved": what a search finds takes the place of a question's own references
    """
    count, fact_seed = options.questions, options.fact_seed
    if settings.data:
        datasets = load_datasets(settings.data, settings.skip_bad, settings.seed)
        documents = load_documents(settings, [q for some in datasets.values() for q in some])
        for name, some in datasets.items():
            datasets[name] = draw_some(some, count, f"{count} questions {settings.seed}")
    else:
        some = world_questions(settings, options.split, count or None, fact_seed)
        world = built_in_world(settings, fact_seed)
        documents = load_documents(settings, some) if settings.corpus else world.documents
        datasets = {"the built-in world": some}
    for name, some in datasets.items():
        if options.references == "retrieved":
            some = with_retrieved(some, documents, settings)
        datasets[name] = as_asked(some, settings)
    return datasets, documents


def known_questions(settings: Settings) -> list[Question]:
    """Returns questions with known answers: of --data, or of the built-in world, whose held-out
    ones come first.
    """
    if settings.data:
        return load_questions(settings.data, settings.skip_bad, settings.seed)
    splits = ("test", "dev", "train") if in_built_in_world(settings) else ()
    return [q for split in splits for q in world_questions(settings, split)]
