"""Tests the built-in world: names and splits, both layouts, and the references of questions."""

import re
from itertools import chain, product

import pytest

from world.world import (
    KINDS,
    ONE_HOP,
    REFERENCES,
    RELATIONS,
    SPLITS,
    TWO_HOP,
    World,
)

LOOKUPS = ("one_hop", "two_hop", "known")


@pytest.fixture(scope="module")
def world():
    return World(0)


@pytest.fixture(scope="module")
def facts():
    """Returns a world with the same names and facts, but with one passage per fact."""
    return World(0, layout="facts")


def asked_in(world) -> dict[str, tuple]:
    """Returns {question: (name, relations)} for every question that the templates allow."""
    templates = [*ONE_HOP.items(), *TWO_HOP.items()]
    return {
        template.format(name): (name, relations)
        for (relations, template), name in product(templates, world.facts)
        if relations[0] in world.facts[name]
    }


def hops_of(world, name, relations) -> list[tuple[str, str, str]]:
    """Returns (name, relation, value) for each hop; the values come from the world's facts."""
    hops = []
    for relation in relations:
        hops.append((name, relation, world.facts[name][relation]))
        name = world.facts[name][relation]
    return hops


# ---------------------------------------------------------------------------------- names and facts


def test_no_name_is_in_two_splits_or_in_a_split_and_the_warm_up(world):
    names = [name for split in world.entities.values() for kind in split.values() for name in kind]
    assert len(names) == len(set(names))
    assert set(world.entities) == {*SPLITS, "warmup"}


def test_the_same_seed_gives_the_same_world_and_another_seed_a_different_one(world, facts):
    rebuilt = World(0, layout="facts")
    assert rebuilt.documents == facts.documents and rebuilt.entities == world.entities
    assert World(1).entities["test"] != world.entities["test"]


# ----------------------------------------------------------------------------------- layout "pages"


def test_a_question_s_pages_state_its_hops_and_all_of_them_support_it(world):
    asked = asked_in(world)
    for kind in LOOKUPS:
        for question in world.questions("test", kind, 50):
            hops = hops_of(world, *asked[question.question])
            assert question.answers == [hops[-1][2]]
            assert question.supporting == tuple(range(1, len(hops) + 1))
            for document, (name, relation, value) in zip(question.references, hops, strict=True):
                assert document.title == name and f" {relation} {value} " in document.text
            # Both hops of a held-out question are held out.
            split = "known" if kind == "known" else "test"
            assert {name for name, *_ in hops} <= {*chain(*world.entities[split].values())}
    for question in world.questions("test", "unit"):
        n, factor = re.findall(r"\d+", f"{question.question} {question.references[0].text}")
        assert question.answers == [str(int(n) * int(factor))] and question.supporting == (1,)
    for question in world.questions("test", "arithmetic"):
        a, b = re.findall(r"\d+", question.question)
        assert question.answers == [str(int(a) + int(b))] and question.task == "math"
        assert question.references == question.supporting == ()


# ----------------------------------------------------------------------------------- layout "facts"


@pytest.mark.parametrize("kind", LOOKUPS)
def test_supporting_numbers_name_the_hops_and_no_other_relation_occurs_twice(facts, kind):
    asked = asked_in(facts)
    for question in facts.questions("test", kind, 300):
        hops = hops_of(facts, *asked[question.question])
        references = question.references
        numbers = list(question.supporting)  # from 1 as in the prompt, in order, without repeats
        assert len(references) == REFERENCES == 4 and numbers == sorted(set(numbers))
        stated = {f"{relation} {value} of {name} ." for name, relation, value in hops}
        assert {references[number - 1].text for number in numbers} == stated
        # The relations of the other references differ from each other and from those of the hops.
        of_hops = {relation for _, relation, _ in hops}
        others = [d.text.split()[0] for d in references if d.text not in stated]
        assert {*others, *of_hops} <= {*RELATIONS}
        assert len({*others, *of_hops}) == len(others) + len(of_hops)


# --------------------------------------------------------------------------- the words of the world


@pytest.mark.parametrize("layout", ["pages", "facts"])
def test_every_text_of_the_world_has_known_tokens_and_decodes_to_itself(layout, toy_tokenizer):
    world = World(0, layout=layout)
    texts = [document.text for document in world.documents]
    for split, kind in product(("train", "test"), KINDS):
        texts += [question.question for question in world.questions(split, kind, 40)]
    for text in texts:
        assert toy_tokenizer.decode(toy_tokenizer(f" {text}")["input_ids"]) == f" {text}"
