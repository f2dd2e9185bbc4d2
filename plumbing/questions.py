"""Decides which questions are asked and which documents are searched.

Questions come from --data or from the built-in world; training, evaluation and ask.py all load them
here. Documents come from --corpus (a file, a folder, or the questions' own references) or from the
built-in world. Left out: the order in which training asks (curriculum.py), and the layouts of files
(data.py).
"""

import functools
import random
from dataclasses import replace
from itertools import chain

from data import (
    Datasets,
    Document,
    Documents,
    Questions,
    SearchRequest,
    corpus_from_questions,
    draw_some,
    load_corpus,
    load_datasets,
    load_questions,
)
from errors import InputError
from flags import in_built_in_world
from papers import PROTOCOLS, paper_of
from prompts import check_references
from retriever import make_retriever, retrieve
from settings import Settings
from world.world import LOOK_UPS, World


# -------------------------------------------------------------------------------- questions
def training_questions(settings: Settings) -> Questions:
    if settings.data:
        questions = load_questions(settings.data, settings.skip_bad, settings.seed)
    else:
        questions = reworded(built_in_questions(settings), settings)
    return as_asked(questions, settings)


def reworded(questions: Questions, settings: Settings) -> Questions:
    """Adds a word to the gold answers of a share of the look-up questions. The answers then differ
    from the documents' words, as they often do in real data.
    """
    rng = random.Random(f"reworded {settings.seed}")
    reworded_questions = []
    for question in questions:
        if question.kind in LOOK_UPS and rng.random() < settings.reworded:
            answers = [f"{answer} proper" for answer in question.answers]
            question = replace(question, answers=answers)
        reworded_questions.append(question)
    return reworded_questions


def hold_out(questions: Questions, settings: Settings) -> tuple[list, list]:
    """Returns (training questions, held-out questions for --eval_every). Held-out questions are
    drawn from --data, or come from the built-in world's split dev; without --eval_every there are
    none.
    """
    if not settings.eval_every:
        return questions, []
    count = settings.eval_questions
    if count < 1:  # a share, as When to Search's 0.2 (B.3)
        count = max(1, round(count * len(questions)))
    if not settings.data:
        return questions, as_asked(world_questions(settings, "dev", count), settings)
    if count >= len(questions):
        raise InputError(
            f"--eval_every: {count} questions are held out, and --data has {len(questions)}: "
            "leave --eval_every out"
        )
    held_out = draw_some(questions, count, f"{count} questions {settings.seed}")
    ids = {question.id for question in held_out}
    return [question for question in questions if question.id not in ids], held_out


def with_retrieved(questions: list, retriever, settings: Settings) -> list:
    """Replaces the references of each question by the documents that a search for the question
    finds (ARENA Figure 2). None of these counts as a gold reference.
    """
    protocol = PROTOCOLS[settings.protocol]
    if not protocol.references_in_prompt:
        raise InputError(f"--references retrieved: the prompt of {protocol.name} has no references")
    requests = [SearchRequest(question, question.question) for question in questions]
    found = retrieve(retriever, requests, settings.documents_per_search)
    if None in found or False in found:
        raise InputError("--references retrieved: a search failed: repeat the command")
    nothing = (Document("", "", protocol.empty_text),)
    return [
        replace(question, references=tuple(documents) or nothing, supporting=())
        for question, documents in zip(questions, found, strict=True)
    ]


def as_asked(questions: Questions, settings: Settings) -> Questions:
    """Checks the references of the questions, and marks the questions that may not search: with
    --retrieval false all of them, otherwise those whose task is one of `direct_tasks` (UR²).
    """
    direct_tasks = settings.direct_tasks.split(",")
    marked = []
    for question in questions:
        check_references(PROTOCOLS[settings.protocol], question)
        if not settings.retrieval or question.task in direct_tasks:
            question = replace(question, may_search=False)
        marked.append(question)
    return marked


# Cached, because the stages and the evaluation of one command use the same world.
cached_world = functools.lru_cache(2)(World)
cached_questions = functools.lru_cache(32)(World.questions)


def built_in_world(settings: Settings) -> World:
    return cached_world(settings.world_seed, layout=paper_of(settings.protocol).world.layout)


def built_in_questions(settings: Settings) -> Questions:
    """Returns the built-in world's training questions. With "direct" in --mix, it adds copies of
    each kind's questions, 240 per kind: the copies have the kind "direct" and may not search.
    """
    questions = world_questions(settings, "train")
    if "direct" in settings.mix:
        for kind in sorted({question.kind for question in questions}):
            direct = [
                replace(question, source="direct", may_search=False)
                for question in questions
                if question.kind == kind
            ]
            questions += (direct * 240)[:240]  # repeats the questions of a kind with fewer than 240
    return questions


def world_questions(settings: Settings, split: str, count=None) -> Questions:
    """Returns `count` questions (None: all) of each kind that is in the supervised warm-up of this
    protocol's tiny model.
    """
    world = built_in_world(settings)
    kinds = paper_of(settings.protocol).world.kinds
    return [q for kind in kinds for q in cached_questions(world, split, kind, count)]


def load_documents(settings: Settings, questions: Questions) -> Documents:
    """Returns the documents to search: the questions' own references (--corpus from-data), those of
    the file or folder that --corpus names, or those of the built-in world. With --data but no
    --corpus there are none.
    """
    if settings.corpus == "from-data":
        return corpus_from_questions(questions)
    if settings.corpus:
        return load_corpus(settings.corpus, settings.skip_bad)
    return [] if settings.data else built_in_world(settings).documents


def of_kinds(questions: Questions, kinds: str) -> list[Questions]:
    """Returns the questions of each of these kinds, whatever the case of their names."""
    names = [name.strip() for name in kinds.casefold().split(",")]
    parts = [[q for q in questions if q.kind.casefold() == name] for name in names]
    if not all(parts):
        known = ", ".join(sorted({question.kind for question in questions}))
        raise InputError(f"--kinds {kinds}: the kinds of these questions are {known}")
    return parts


def evaluation_questions(settings: Settings, options) -> tuple[Datasets, Documents]:
    """Returns (questions by data set, documents). It reads these fields of eval.Options:

    questions    number of questions per kind of the built-in world, or per file; 0 = all
    split        split of the built-in world
    kinds        only questions of these kinds, and `questions` of each
    references   "retrieved": replace a question's own references by the documents of a search
    """
    count = options.questions
    if settings.data:
        datasets = load_datasets(settings.data, settings.skip_bad, settings.seed)
    else:
        datasets = {"the built-in world": world_questions(settings, options.split, count or None)}
        count = 0  # there are no more than that
    documents = load_documents(settings, [*chain.from_iterable(datasets.values())])
    retrieved = options.references == "retrieved"
    retriever = make_retriever(documents, settings) if retrieved else None
    for name, questions in datasets.items():
        parts = of_kinds(questions, options.kinds) if options.kinds else [questions]
        seed = f"{count} questions {settings.seed}"
        questions = [q for part in parts for q in draw_some(part, count, seed)]
        if retrieved:
            questions = with_retrieved(questions, retriever, settings)
        datasets[name] = as_asked(questions, settings)
    return datasets, documents


def known_questions(settings: Settings) -> Questions:
    """Returns questions with known answers, from --data or from the built-in world (its splits test
    and dev come first). Without --data, a model that was not trained in the built-in world gets
    none.
    """
    if settings.data:
        return load_questions(settings.data, settings.skip_bad, settings.seed)
    splits = ("test", "dev", "train") if in_built_in_world(settings) else ()
    return [q for split in splits for q in world_questions(settings, split)]
