"""Tests the built-in world: names and splits, both layouts, and the references of questions."""

import re

import pytest

from papers import PROTOCOLS
from prompts import build_prompt
from world.toy import make_tokenizer
from world.world import (
    CITY_HEADS,
    CITY_TAILS,
    COMPANY_HEADS,
    COMPANY_TAILS,
    COUNTRIES,
    FAMOUS,
    FIRST,
    KINDS,
    KNOWN_RELATIONS,
    LAST,
    ONE_HOP,
    PRODUCTS,
    REFERENCES,
    RELATIONS,
    SPLITS,
    TWO_HOP,
    UNITS,
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


def names_in(world: World, split: str) -> set[str]:
    return {name for names in world.entities[split].values() for name in names}


def hops_of(question, facts: dict) -> list[tuple[str, str, str]]:
    """Returns (name, relation, value) for each hop: name and relation come from the question's
    words, values from the world's facts.
    """
    for relations, template in [*ONE_HOP.items(), *TWO_HOP.items()]:
        match = re.fullmatch(template.replace("{}", "(.*)").replace("?", "[?]"), question.question)
        if match and match[1] in facts and relations[0] in facts[match[1]]:
            name = match[1]
            hops = []
            for relation in relations:
                hops.append((name, relation, facts[name][relation]))
                name = facts[name][relation]
            return hops
    raise AssertionError(f"no template fits {question.question}")


# ---------------------------------------------------------------------------------- names and facts


def test_no_name_is_in_two_splits_or_in_a_split_and_the_warm_up(world):
    names = [name for split in world.entities.values() for kind in split.values() for name in kind]
    assert len(names) == len(set(names))
    assert set(world.entities) == {*SPLITS, "warmup"}


def test_no_word_of_one_class_is_a_name_of_another():
    people = {f"{first} {last}" for first in FIRST for last in [*LAST, *FAMOUS]}
    cities = {head + tail for head in CITY_HEADS for tail in CITY_TAILS}
    companies = {head + tail for head in COMPANY_HEADS for tail in COMPANY_TAILS}
    words = map(set, (COUNTRIES, PRODUCTS, UNITS, FIRST, LAST, FAMOUS))
    classes = [people, cities, companies, *words]
    assert sum(map(len, classes)) == len(set().union(*classes))


def test_the_same_seed_gives_the_same_world_and_another_seed_a_different_one(world, facts):
    rebuilt = World(0, layout="facts")
    assert rebuilt.documents == facts.documents and rebuilt.entities == world.entities
    assert rebuilt.questions("test", "two_hop", 20) == facts.questions("test", "two_hop", 20)
    assert World(1).entities["test"] != world.entities["test"]


def test_redrawing_the_facts_keeps_the_names_and_changes_most_answers(world):
    redrawn = World(0, fact_seed=1)
    assert redrawn.entities == world.entities
    before = {q.question: q.answers for q in world.questions("test", "one_hop")}
    after = {q.question: q.answers for q in redrawn.questions("test", "one_hop")}
    assert before.keys() == after.keys()
    # Each value is one of at least 12, so by chance at most 1 in 12 answers stays the same; the
    # bound allows for the noise of 240 questions.
    assert sum(before[q] == after[q] for q in before) < 0.15 * len(before)


def test_the_layout_changes_the_passages_but_neither_facts_nor_questions(world, facts):
    assert (facts.entities, facts.facts, facts.units) == (world.entities, world.facts, world.units)
    for kind in KINDS:
        pairs = zip(world.questions("dev", kind), facts.questions("dev", kind), strict=True)
        assert all((a.id, a.question, a.answers) == (b.id, b.question, b.answers) for a, b in pairs)


def test_both_hops_of_a_held_out_question_stay_in_the_split(world):
    for question in world.questions("test", "two_hop"):
        titles = {document.title for document in question.references}
        assert len(question.references) == 2 and titles <= names_in(world, "test")


# ----------------------------------------------------------------------------------- layout "pages"


def test_the_world_has_676_pages_with_different_titles(world):
    # There are 12 + 200 + 60 + 60 = 332 people, half as many cities, as many companies as cities
    # (166 each), and 8 + 2 + 2 = 12 units.
    assert len(world.documents) == 676
    assert len({d.title for d in world.documents}) == 676


def test_a_question_s_pages_state_its_hops_and_all_of_them_support_it(world):
    for kind in LOOKUPS:
        for question in world.questions("test", kind, 50):
            hops = hops_of(question, world.facts)
            assert question.answers == [hops[-1][2]]
            assert question.supporting == tuple(range(1, len(hops) + 1))
            for document, (name, relation, value) in zip(question.references, hops, strict=True):
                assert document.title == name and f" {relation} {value} " in document.text
    for question in world.questions("test", "unit"):
        n, factor = re.findall(r"\d+", f"{question.question} {question.references[0].text}")
        assert question.answers == [str(int(n) * int(factor))] and question.supporting == (1,)
    for question in world.questions("test", "arithmetic"):
        a, b = re.findall(r"\d+", question.question)
        assert question.answers == [str(int(a) + int(b))] and question.task == "math"
        assert question.references == question.supporting == ()


def test_the_position_of_a_fact_on_a_page_does_not_depend_on_its_relation(world):
    # Two facts are in a random order: half of 664 pages begin with the relation that RELATIONS
    # lists first.
    pages = [d for d in world.documents if " has " in d.text]
    begins = [d.text.removeprefix(f"{d.title} has ").split()[0] for d in pages]
    share = sum(relation in ("birthplace", "country", "product") for relation in begins) / 664
    assert len(pages) == 664 and share == pytest.approx(0.5, abs=4 * 0.5 / 664**0.5)


# ----------------------------------------------------------------------------------- layout "facts"


def test_with_one_passage_per_fact_the_world_has_1340_passages(facts):
    # Each of the 664 entities has two facts; there are 12 units.
    assert len(facts.documents) == 1340
    assert len({document.text for document in facts.documents}) == 1340
    assert len({document.id for document in facts.documents}) == 1340


@pytest.mark.parametrize("kind", LOOKUPS)
def test_supporting_numbers_name_the_hops_and_no_other_relation_occurs_twice(facts, kind):
    for question in facts.questions("test", kind, 300):
        hops = hops_of(question, facts.facts)
        references = question.references
        numbers = list(question.supporting)  # from 1 as in the prompt, in order, without repeats
        assert len(references) == REFERENCES == 4 and numbers == sorted(set(numbers))
        stated = {f"{relation} {value} of {name} ." for name, relation, value in hops}
        assert {references[number - 1].text for number in numbers} == stated
        hop_relations = {relation for _, relation, _ in hops}
        other_relations = [
            d.text.split()[0] for i, d in enumerate(references, 1) if i not in numbers
        ]
        assert len(other_relations) == len(set(other_relations)) == 4 - len(hop_relations)
        assert set(other_relations) <= set(RELATIONS) - hop_relations


def test_distractors_are_true_facts_of_the_question_s_own_split(facts):
    own = names_in(facts, "test")
    for question in facts.questions("test", "two_hop", 200):
        assert {*question.references} <= {*facts.documents}
        assert {d.text.partition(" of ")[2].removesuffix(" .") for d in question.references} <= own


def test_the_right_passage_is_equally_often_at_each_of_the_four_positions(facts):
    # 300 questions with one right passage each: about 75 at each position, ± 5 standard errors of
    # 7.5.
    places = [question.supporting[0] for question in facts.questions("train", "one_hop", 300)]
    assert all(abs(places.count(number) - 75) < 38 for number in (1, 2, 3, 4))


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


@pytest.mark.parametrize("kind", ["one_hop", "two_hop"])
def test_arena_s_prompt_is_the_question_and_four_numbered_lines_in_known_tokens(facts, kind):
    toy_tokenizer = make_tokenizer(PROTOCOLS["arena"])
    for question in facts.questions("test", kind, 40):
        ids = build_prompt(PROTOCOLS["arena"], question, toy_tokenizer)
        lines = "".join(f"\n ({i}) {d.text}" for i, d in enumerate(question.references, 1))
        assert toy_tokenizer.decode(ids) == f" {question.question}\n{lines} answer :"


def test_questions_about_known_people_ask_only_for_facts_that_the_warm_up_teaches(world):
    people = world.entities["known"]["person"]
    taught = {world.facts[name][relation] for name in people for relation in KNOWN_RELATIONS}
    questions = world.questions("test", "known")
    assert len(questions) == 12 * len(KNOWN_RELATIONS)
    assert {question.answers[0] for question in questions} <= taught
