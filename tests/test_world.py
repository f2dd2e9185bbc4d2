"""Tests the built-in world: names and splits, both layouts, and the references of questions."""

import re

import pytest

from papers import PROTOCOLS
from prompts import build_prompt
from world.world import (
    KINDS,
    LOOK_UPS,
    REFERENCES,
    SPLITS,
    World,
)


@pytest.fixture(scope="module")
def world():
    return World(0)


@pytest.fixture(scope="module")
def facts():
    """Returns a world with the same names and facts, but with one passage per fact."""
    return World(0, layout="facts")


def names_in(world: World, split: str) -> set[str]:
    return {name for names in world.entities[split].values() for name in names}


# ---------------------------------------------------------------------------------- names and facts


def test_no_name_is_in_two_splits_or_in_a_split_and_the_warm_up(world):
    names = [name for split in world.entities.values() for kind in split.values() for name in kind]
    assert len(names) == len(set(names))
    assert set(world.entities) == {*SPLITS, "warmup"}


def test_the_same_seed_gives_the_same_world_and_another_seed_a_different_one(world, facts):
    rebuilt = World(0, layout="facts")
    assert rebuilt.documents == facts.documents and rebuilt.entities == world.entities
    assert rebuilt.questions("test", "two_hop", 20) == facts.questions("test", "two_hop", 20)
    assert World(1).entities["test"] != world.entities["test"]
    # There are 12 + 200 + 60 + 60 = 332 people, half as many cities, as many companies as cities
    # (166 each), and 8 + 2 + 2 = 12 units: 664 pages, each with two facts, and 12 units.
    assert len({document.title for document in world.documents}) == 664 + 12
    assert len({document.text for document in facts.documents}) == 2 * 664 + 12


def test_both_hops_of_a_held_out_question_stay_in_the_split(world):
    for question in world.questions("test", "two_hop"):
        titles = {document.title for document in question.references}
        assert len(question.references) == 2 and titles <= names_in(world, "test")


# ----------------------------------------------------------------------------------- layout "pages"


def test_a_question_s_pages_state_its_hops_and_all_of_them_support_it(world, facts):
    for kind in LOOK_UPS:
        answers = {
            question.question: question.answers for question in facts.questions("test", kind)
        }
        for question in world.questions("test", kind, 50):
            assert question.answers == answers[question.question]
            pages = question.references
            names = [*(page.title for page in pages), *question.answers]
            assert names[0] in question.question and question.supporting == (1, 2)[: len(pages)]
            for page, found in zip(pages, names[1:], strict=True):
                assert f" {found} " in page.text
    for question in world.questions("test", "unit"):
        n, factor = re.findall(r"\d+", f"{question.question} {question.references[0].text}")
        assert question.answers == [str(int(n) * int(factor))] and question.supporting == (1,)
    for question in world.questions("test", "arithmetic"):
        a, b = re.findall(r"\d+", question.question)
        assert question.answers == [str(int(a) + int(b))] and question.task == "math"
        assert question.references == question.supporting == ()


# ----------------------------------------------------------------------------------- layout "facts"


@pytest.mark.parametrize("kind", LOOK_UPS)
def test_supporting_numbers_name_the_hops_and_no_other_relation_occurs_twice(facts, kind):
    for question in facts.questions("test", kind, 300):
        texts = [document.text for document in question.references]
        stated = [re.fullmatch(r"(\w+) (.+) of (.+) \.", text).groups() for text in texts]
        assert len(stated) == REFERENCES == 4 == len({relation for relation, _, _ in stated})
        hops = {}  # those that the numbers name, which count from 1, as in the prompt
        for number in question.supporting:
            relation, value, name = stated[number - 1]
            hops[name] = relation, value
        name = start = next(name for name in hops if name in question.question)
        path = []
        for _ in hops:
            relation, name = hops[name]
            path.append(relation)
        assert LOOK_UPS[kind][tuple(path)].format(start) == question.question
        assert question.answers == [name] and question.supporting == tuple(
            sorted(question.supporting)
        )


# --------------------------------------------------------------------------- the words of the world


@pytest.mark.parametrize("layout", ["pages", "facts"])
def test_every_text_of_the_world_has_known_tokens_and_decodes_to_itself(layout, toy_tokenizer):
    world = World(0, layout=layout)
    for split in ("train", "test"):
        for kind in KINDS:
            for question in world.questions(split, kind, 40):
                ids = build_prompt(PROTOCOLS["ur2"], question, toy_tokenizer)
                assert toy_tokenizer.decode(ids) == f" {question.question} answer :<may_search>"
    for document in world.documents:
        ids = toy_tokenizer(f" {document.text}")["input_ids"]
        assert toy_tokenizer.decode(ids) == f" {document.text}"
