"""The built-in world, so small that a laptop can train search in it. Its tiny model is in toy.py.

A world, drawn from a seed, has people, cities and companies with invented names, the passages that
state their facts, and twelve unit conversions. All splits build names from the same pieces, except
the last names of the known people. So the model can copy the name of an entity that it has never
seen, but cannot know the entity's facts.

    one_hop      where was ana bell born ?                                one search
    two_hop      who is the mayor of the city where ana bell was born ?   two searches
    unit         how many fip are 3 borg ?                                one search, then multiply
    arithmetic   what is 2 + 7 ?  (its task is "math")                    no search helps
    known        a one-hop question about one of twelve people whose facts the model has by heart

    layout "pages"   one passage per entity, with both its facts in a random order
    layout "facts"   one passage per fact; every question that needs facts has four numbered
                     references. For papers whose model copies evidence (R-Search) or cites (ARENA)

The distractors among the four references state relations that no hop of the question needs. The
relation alone, without the name, identifies the right passage; the tiny model learns this in a
minute.
Left out: misspellings, facts that change, facts whose value is a year or a number.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from data import Document, Question

FIRST = """
ada alma ana arno bela bruno cara celia dario dora edda elio emil enna falk fina gero hanna ida ivo
jana jaro kira lena levi luca mara milo nela nico orla otto
""".split()
LAST = """
abel barth bell brandt coll dorn ebner falke finch grau hahn hill ives jung kane kern lang lind
marsh moll nord ober penn quint reed roth sand stein thorn ulm vogel wolf
""".split()
# Last names of the people whose facts the model knows by heart; nobody else has these names.
FAMOUS = "amsel bogner cramer daimler eiche fuchs gross huber imhof jasper kaiser luther".split()
CITY_HEADS = """
al bar bel cor dar dun el fen gar hol in jas kel kor lor lun mar mel nor os pel rav ros sal sol tal
tor ur vas ver wal zan
""".split()
CITY_TAILS = """
berg bridge dale field ford gate grove ham haven hurst land mouth port shire stad stone ton ville
wick wood
""".split()
COMPANY_HEADS = """
axi bri cy delo evo fer gil hexa ilo juno kapa lumi mega novo opti pria quad ris syn tera ulti vexo
vita volt xeno yara zeta arca beno cora dexa enzo
""".split()
COMPANY_TAILS = """
com core corp dyne flow fix graph lab line link loop mex nova path soft tec ware wave works zon
""".split()
COUNTRIES = """
arvenia belmark corsia dravia ellenia fioria gradia hestia istria jorvia kaldor lumeria
""".split()
PRODUCTS = """
boats bricks clocks drums engines forks glass hats kites lamps maps pens pumps ropes shoes tiles
""".split()
UNITS = """
bim bolt borg cran dram ell fip gan hep jot kip lok mim nab oka pim quo rin sep tun ull vim wex zib
""".split()
NAME_STARTS = [*FIRST, *LAST, *FAMOUS, *CITY_HEADS, *COMPANY_HEADS, *COUNTRIES, *PRODUCTS, *UNITS]
NAME_ENDS = [*CITY_TAILS, *COMPANY_TAILS]
# The number of people in each split; there are half as many cities, and half as many companies.
SPLITS = {"known": len(FAMOUS), "train": 200, "dev": 60, "test": 60}
UNIT_SPLITS = {"train": 8, "dev": 2, "test": 2}
ENTITIES = ("person", "city", "company")
KINDS = ("one_hop", "two_hop", "unit", "arithmetic", "known")
MAX_NUMBER = 100
REFERENCES = 4  # passages that come with a question in the layout "facts", except with a sum

# relation -> (kind of its subject, kind of its value). Passages and queries contain the relation.
RELATIONS = {
    "birthplace": ("person", "city"),
    "employer": ("person", "company"),
    "country": ("city", "country"),
    "mayor": ("city", "person"),
    "product": ("company", "product"),
    "seat": ("company", "city"),
}
# relations that lead from the name to the answer -> template of the question
ONE_HOP = {
    ("birthplace",): "where was {} born ?",
    ("employer",): "who employs {} ?",
    ("country",): "which country is {} in ?",
    ("mayor",): "who is the mayor of {} ?",
    ("product",): "what does {} make ?",
    ("seat",): "where is {} based ?",
}
TWO_HOP = {
    ("birthplace", "country"): "which country was {} born in ?",
    ("birthplace", "mayor"): "who is the mayor of the city where {} was born ?",
    ("employer", "product"): "what does the employer of {} make ?",
    ("employer", "seat"): "where is the employer of {} based ?",
    ("seat", "country"): "which country is {} based in ?",
    ("seat", "mayor"): "who is the mayor of the city where {} is based ?",
}
KNOWN = {(relation,): ONE_HOP[relation,] for relation in ("birthplace", "employer")}
LOOK_UPS = {"one_hop": ONE_HOP, "two_hop": TWO_HOP, "known": KNOWN}
SUMS = [(a, b) for a in range(1, 10) for b in range(1, 10)]  # the same in every split


Facts = dict[str, str]  # of one entity: relation -> value


class World:
    """Entities by split and kind, their facts, units, and the passages that state facts and units.

    seed     draws the names, the splits, the facts and the units
    layout   of the passages: "pages" or "facts"
    """

    def __init__(self, seed: int = 0, layout: str = "pages"):
        self.seed = seed
        self.layout = layout
        self.entities = {}  # split -> kind -> names
        self.facts = {}  # name -> relation -> value
        self.units = {}  # split -> [(big, small, factor)]
        self.passages = {}  # (name, relation) -> Document
        self.name_entities(random.Random(f"names {seed}"))
        rng = random.Random(f"facts {seed}")
        for split in SPLITS:
            for kind, names in self.entities[split].items():
                self.facts |= {name: draw_facts(rng, kind, self.values(split)) for name in names}
        words = iter(shuffled(random.Random(f"units {seed}"), UNITS))
        for split, count in UNIT_SPLITS.items():
            self.units[split] = [(*islice(words, 2), rng.randint(2, 9)) for _ in range(count)]
        for key, document in self.write_passages(random.Random(f"passages {seed}")):
            self.passages[key] = replace(document, id=str(len(self.passages)))
        self.documents = list(self.passages.values())  # 676 pages or 1340 facts, units included

    def name_entities(self, rng: random.Random) -> None:
        people = shuffled(rng, [f"{first} {last}" for first in FIRST for last in LAST])
        cities = shuffled(rng, [head + tail for head in CITY_HEADS for tail in CITY_TAILS])
        companies = shuffled(rng, [head + tail for head in COMPANY_HEADS for tail in COMPANY_TAILS])
        famous = [f"{rng.choice(FIRST)} {last}" for last in FAMOUS]
        # Each split takes the next names of these iterators, so no name belongs to two splits. The
        # first split, "known", gets the famous people; the warm-up gets all that are left
        # (there are fewer than 10,000).
        rest = {"person": iter(famous + people), "city": iter(cities), "company": iter(companies)}
        for split, count in {**SPLITS, "warmup": 10_000}.items():
            self.entities[split] = {
                kind: list(islice(names, count if kind == "person" else count // 2))
                for kind, names in rest.items()
            }

    def values(self, split: str) -> dict[str, list[str]]:
        """Returns, for each kind of value, the values that a fact of the split may have. The names
        are of the same split, so both hops of a held-out question are held out; countries and
        products are in all splits.
        """
        return {**self.entities[split], "country": COUNTRIES, "product": PRODUCTS}

    def write_passages(self, rng: random.Random) -> Iterator[tuple]:
        """Yields ((name, relation), document); for a page and for a unit the relation is ""."""
        for name, facts in self.facts.items():
            if self.layout == "pages":
                yield (name, ""), page(rng, name, facts)
            else:
                for relation, value in shuffled(rng, list(facts.items())):
                    yield (name, relation), fact_passage(name, relation, value)
        for units in self.units.values():
            for big, small, factor in units:
                yield (big, ""), unit_passage(big, small, factor)

    def questions(self, split: str, kind: str, count: int | None = None) -> list[Question]:
        """Returns `count` questions (None: all) of one kind about one split, in random order. The
        kind "known" always asks about the known people; "arithmetic" has the same sums everywhere.
        """
        split_asked = "known" if kind == "known" else split
        task = "math" if kind == "arithmetic" else "qa"  # task mixing can forbid searches in math
        questions = []
        for text, answer, *hops in self.plain_questions(split_asked, kind):
            name = f"{split}/{kind}/{text}"
            shown, numbers = self.references(name, hops, split_asked)
            questions.append(Question(name, text, [answer], task, (), shown, numbers, source=kind))
        return shuffled(random.Random(f"questions {self.seed} 0"), questions)[:count]

    def plain_questions(self, split: str, kind: str) -> Iterator[tuple]:
        """Yields (question, answer, hop, ...). A hop is (name, relation), which in the layout
        "facts" is the key of its passage; the key of a page is (name, "").
        """
        if kind == "unit":
            for big, small, factor in self.units[split]:
                for n in range(2, 10):
                    yield f"how many {small} are {n} {big} ?", str(n * factor), (big, "")
        elif kind == "arithmetic":
            for a, b in SUMS:
                yield f"what is {a} + {b} ?", str(a + b)
        else:
            for relations, template in LOOK_UPS[kind].items():
                for name in self.entities[split][RELATIONS[relations[0]][0]]:
                    hops = []
                    value = name
                    for relation in relations:
                        hops.append((value, relation))
                        value = self.facts[value][relation]
                    yield template.format(name), value, *hops

    def references(self, identity: str, hops: list[tuple], split: str) -> tuple[tuple, tuple]:
        """Returns (the passages that come with a question, the numbers of those its hops need)."""
        if self.layout == "pages" or not hops:
            pages = tuple(self.passages[name, ""] for name, _ in hops)
            return pages, tuple(range(1, len(pages) + 1))
        rng = random.Random(f"references {self.seed} {identity}")

        def other(relation: str) -> Document:
            return self.passages[rng.choice(self.entities[split][RELATIONS[relation][0]]), relation]

        return with_distractors(rng, [self.passages[hop] for hop in hops], other)


def draw_facts(rng: random.Random, kind: str, values: dict[str, list[str]]) -> Facts:
    """Draws the facts of one entity."""
    return {
        relation: rng.choice(values[leads_to])
        for relation, (about, leads_to) in RELATIONS.items()
        if about == kind
    }


def with_distractors(rng: random.Random, gold: list[Document], other: Callable) -> tuple:
    """Returns (`gold` mixed with distractors from `other(relation)`, the numbers of `gold`)."""
    asked = {document.text.split()[0] for document in gold}
    relations = [relation for relation in RELATIONS if relation not in asked]
    others = [other(relation) for relation in rng.sample(relations, REFERENCES - len(asked))]
    shown = tuple(shuffled(rng, gold + others))
    return shown, tuple(sorted(shown.index(document) + 1 for document in gold))


def page(rng: random.Random, name: str, facts: Facts) -> Document:
    """Returns the page of an entity; the order of its facts carries no information."""
    stated = [f"{relation} {value}" for relation, value in shuffled(rng, list(facts.items()))]
    return Document("", name, f"{name} has {' and '.join(stated)} .")


def fact_passage(name: str, relation: str, value: str) -> Document:
    """Returns a passage without a title. The value directly follows the relation, so a two-layer
    model can find the value by matching the relation's word.
    """
    return Document("", "", f"{relation} {value} of {name} .")


def unit_passage(big: str, small: str, factor: int) -> Document:
    return Document("", big, f"one {big} is {factor} {small} .")


def shuffled(rng: random.Random, items: list) -> list:
    return rng.sample(items, len(items))
