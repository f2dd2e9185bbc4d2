"""The built-in world: small enough to learn to search in on a laptop, and a tiny model to learn it.

A world has people, cities and companies with invented names, one passage each, and twelve unit conversions. It is
drawn from a seed: the names, the facts, and who belongs to which split. Names are combinations of pieces that all
splits share, so an entity the model has never seen can be copied token by token, but its facts cannot be known.

    one_hop      where was ana bell born ?                                one search
    two_hop      who is the mayor of the city where ana bell was born ?   two searches
    unit         how many fip are 3 borg ?                                one search, then 3 times what it says
    arithmetic   what is 2 + 7 ?                                          no search helps
    known        a one-hop question about one of twelve people whose facts the model has by heart

The warm-up (supervised, `sft.py`) teaches the tiny model the skills: to read a passage, to copy a name, to keep the
format, to add. It does not teach when to use them: nearly all of its search traces carry no loss on the token that
decides between searching and answering, and many are flawed on purpose. RL finds the rest.
The facts of a warm-up trace are drawn anew for each trace, so reading pays and remembering does not; only the twelve
known people keep theirs (and have last names of their own, so that what is known can be told from what is not). All 81
sums of two digits are practised: arithmetic measures the habit of searching, not whether addition generalises.
Left out: misspellings, several passages per search, facts that change.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from data import Document, Question, run_main
from policy import Policy, load_policy, save_policy
from prompts import PROTOCOLS, Protocol, as_protocol, build_prompt, frame_documents
from sft import Example, train_sft

# ------------------------------------------------------------------------------------------- the pieces of names

FIRST = """
ada alma ana arno bela bruno cara celia dario dora edda elio emil enna falk fina gero hanna ida ivo jana jaro kira
lena levi luca mara milo nela nico orla otto
""".split()
LAST = """
abel barth bell brandt coll dorn ebner falke finch grau hahn hill ives jung kane kern lang lind marsh moll nord ober
penn quint reed roth sand stein thorn ulm vogel wolf
""".split()
FAMOUS = """
amsel bogner cramer daimler eiche fuchs gross huber imhof jasper kaiser luther
""".split()  # last names of the people the model knows by heart, and of nobody else
CITY_HEADS = """
al bar bel cor dar dun el fen gar hol in jas kel kor lor lun mar mel nor os pel rav ros sal sol tal tor ur vas ver wal
zan
""".split()
CITY_TAILS = """
berg bridge dale field ford gate grove ham haven hurst land mouth port shire stad stone ton ville wick wood
""".split()
COMPANY_HEADS = """
axi bri cy delo evo fer gil hexa ilo juno kapa lumi mega novo opti pria quad ris syn tera ulti vexo vita volt xeno
yara zeta arca beno cora dexa enzo
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
SPLITS = {"known": len(FAMOUS), "train": 200, "dev": 60, "test": 60}  # people; half as many cities and companies
UNIT_SPLITS = {"train": 8, "dev": 2, "test": 2}
ENTITIES = ("person", "city", "company")
KINDS = ("one_hop", "two_hop", "unit", "arithmetic", "known")
MAX_NUMBER = 100

# relation -> (what it is about, what it leads to). Passages and queries name it by this word, questions do not.
RELATIONS = {
    "birthplace": ("person", "city"),
    "employer": ("person", "company"),
    "country": ("city", "country"),
    "mayor": ("city", "person"),
    "product": ("company", "product"),
    "seat": ("company", "city"),
}
ONE_HOP = {
    "birthplace": "where was {} born ?",
    "employer": "who employs {} ?",
    "country": "which country is {} in ?",
    "mayor": "who is the mayor of {} ?",
    "product": "what does {} make ?",
    "seat": "where is {} based ?",
}
TWO_HOP = {
    ("birthplace", "country"): "which country was {} born in ?",
    ("birthplace", "mayor"): "who is the mayor of the city where {} was born ?",
    ("employer", "product"): "what does the employer of {} make ?",
    ("employer", "seat"): "where is the employer of {} based ?",
    ("seat", "country"): "which country is {} based in ?",
    ("seat", "mayor"): "who is the mayor of the city where {} is based ?",
}
KNOWN_RELATIONS = ("birthplace", "employer")


# ------------------------------------------------------------------------------------------------------ the world

@dataclass
class World:
    """Entities by split and kind, their facts, and the passages that state them.

    seed        draws the names and the splits, and the facts too unless fact_seed is given
    fact_seed   other facts for the same names: a model that reads answers as well as before, one that recalls fails
    """

    seed: int = 0
    fact_seed: int | None = None
    entities: dict[str, dict[str, list[str]]] = field(default_factory=dict)  # split -> kind -> names
    facts: dict[str, dict[str, str]] = field(default_factory=dict)  # name -> relation -> value
    units: dict[str, list[tuple[str, str, int]]] = field(default_factory=dict)  # split -> (big, small, factor)

    def __post_init__(self):
        rng = random.Random(f"names {self.seed}")
        people = shuffled(rng, [f"{f} {s}" for f in FIRST for s in LAST])
        cities = shuffled(rng, [h + t for h in CITY_HEADS for t in CITY_TAILS])
        companies = shuffled(rng, [h + t for h in COMPANY_HEADS for t in COMPANY_TAILS])
        famous = [f"{rng.choice(FIRST)} {last}" for last in FAMOUS]
        for split, count in SPLITS.items():
            half = count // 2
            names = famous if split == "known" else take(people, count)
            self.entities[split] = {"person": names, "city": take(cities, half), "company": take(companies, half)}
        self.entities["warmup"] = {"person": people, "city": cities, "company": companies}  # names of no other split
        rng = random.Random(f"facts {self.seed if self.fact_seed is None else self.fact_seed}")
        for split in SPLITS:
            for kind, names in self.entities[split].items():
                self.facts |= {name: self.draw_facts(rng, kind, split) for name in names}
        words = shuffled(random.Random(f"units {self.seed}"), UNITS)
        for split, count in UNIT_SPLITS.items():
            self.units[split] = [(take(words, 1)[0], take(words, 1)[0], rng.randint(2, 9)) for _ in range(count)]

    def draw_facts(self, rng: random.Random, kind: str, split: str) -> dict[str, str]:
        """Facts of one entity. They stay inside the split, so that both hops of a held-out question are held out."""
        pools = {**self.entities[split], "country": COUNTRIES, "product": PRODUCTS}
        return {relation: rng.choice(pools[to]) for relation, (about, to) in RELATIONS.items() if about == kind}

    @property
    def documents(self) -> list[Document]:
        """One passage per entity and unit: 676 in all. The title is the entity's name."""
        rng = random.Random(f"passages {self.seed}")
        passages = [passage(rng, name, self.facts[name]) for split in SPLITS
                    for names in self.entities[split].values() for name in names]  # fmt: skip
        passages += [unit_passage(*unit) for units in self.units.values() for unit in units]
        return [Document(str(i), title, text) for i, (title, text) in enumerate(passages)]

    def questions(self, split: str, kind: str, count: int | None = None, seed: int = 0) -> list[Question]:
        """Questions of one kind over one split's entities, in an order drawn from `seed`; `count=None` gives all."""
        questions = shuffled(random.Random(f"questions {self.seed} {seed}"), list(self._questions(split, kind)))
        return questions[:count]

    def _questions(self, split: str, kind: str) -> Iterator[Question]:
        documents = {d.title: d for d in self._split_documents("known" if kind == "known" else split)}

        def ask(text: str, answer: str, *titles: str) -> Question:
            references = tuple(documents[title] for title in titles)
            identity = f"{split}/{kind}/{text}"
            return Question(identity, text, [answer], references=references,
                            supporting=tuple(range(1, len(titles) + 1)), source=kind)  # fmt: skip

        if kind in ("one_hop", "known"):
            for relation in ONE_HOP if kind == "one_hop" else KNOWN_RELATIONS:
                for name in self.entities["known" if kind == "known" else split][RELATIONS[relation][0]]:
                    yield ask(ONE_HOP[relation].format(name), self.facts[name][relation], name)
        elif kind == "two_hop":
            for (first, second), template in TWO_HOP.items():
                for name in self.entities[split][RELATIONS[first][0]]:
                    bridge = self.facts[name][first]
                    yield ask(template.format(name), self.facts[bridge][second], name, bridge)
        elif kind == "unit":
            for big, small, factor in self.units[split]:
                for n in range(2, 10):
                    yield ask(f"how many {small} are {n} {big} ?", str(n * factor), big)
        else:
            for a, b in sums(split):
                yield ask(f"what is {a} + {b} ?", str(a + b))

    def _split_documents(self, split: str) -> list[Document]:
        names = {name for names in self.entities[split].values() for name in names} | {u[0] for u in self.units.get(split, [])}
        return [d for d in self.documents if d.title in names]


def sums(split: str) -> list[tuple[int, int]]:
    return [(a, b) for a in range(1, 10) for b in range(1, 10)]


def passage(rng: random.Random, name: str, facts: dict[str, str]) -> tuple[str, str]:
    """(title, text) of an entity: its facts in a random order, so that where a fact stands says nothing about which it is."""
    stated = [f"{relation} {value}" for relation, value in shuffled(rng, list(facts.items()))]
    return name, f"{name} has {' and '.join(stated)} ."


def unit_passage(big: str, small: str, factor: int) -> tuple[str, str]:
    return big, f"one {big} is {factor} {small} ."


def shuffled(rng: random.Random, items: list) -> list:
    return rng.sample(items, len(items))


def take(items: list, count: int) -> list:
    """The first `count` items, removed from the list: no name belongs to two splits."""
    taken = items[:count]
    del items[:count]
    return taken


# --------------------------------------------------------------------------------------------------- the tokenizer

WORDS = """
a an and answer are as based birthplace born city country does employer employs for has how in is it make many mayor
none of one product seat the was what where which who
""".split()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Word pieces that carry their leading space, so that decoding gives back the text to the letter.

    A known word is one token; names are head + tail (cities, companies) or first + last (people). The tags of all
    protocols and the environment's notices are one token each: the tiny model reads them as signs. (Real tokenizers
    split a tag into several tokens, and the rollout does not care: its tests use both.)
    """
    tags = sorted({tag for p in PROTOCOLS.values() for tag in p.tags} | {"<think>", "</think>"})
    signs = sorted({t for p in PROTOCOLS.values() for t in (p.fallback_notice, p.malformed_notice, p.limit_notice)})
    spaced = [*WORDS, *FIRST, *LAST, *FAMOUS, *CITY_HEADS, *COMPANY_HEADS, *COUNTRIES, *PRODUCTS, *UNITS]
    spaced += [*map(str, range(MAX_NUMBER)), "?", ".", "+", ":"]
    spaced += [f"({i})" for i in range(1, 6)]
    bare = [*CITY_TAILS, *COMPANY_TAILS, "?", ":", ".", "+", "\\boxed{", " \\boxed{", "}", "\n", "\n\n", " "]
    pieces = list(dict.fromkeys(["<pad>", "<eos>", "<unk>", *[f" {word}" for word in spaced], *bare]))
    # Unigram with equal scores takes the fewest pieces that cover the text.
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=2, byte_fallback=False))
    # A word at the start of a line gets the leading space that its piece has everywhere else.
    line_start = normalizers.Replace(Regex(r"(?<=\n)(?=[a-z0-9(])"), " ")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), line_start])
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in [*tags, *signs]])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    # The tiny model knows its protocol from the warm-up; the instruction (the system message) is not shown to it.
    fast.chat_template = "{{ ' ' + messages[-1]['content'].strip() + ' answer :' }}"
    return fast


def make_model(vocab_size: int, seed: int = 0) -> Qwen2ForCausalLM:
    """A Qwen2 of 0.48M parameters with random weights."""
    config = Qwen2Config(
        vocab_size=vocab_size, hidden_size=128, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8,
        intermediate_size=384, max_position_embeddings=256, tie_word_embeddings=True,
        pad_token_id=0, eos_token_id=1, bos_token_id=None, initializer_range=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},  # texts of 100 tokens
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


# ------------------------------------------------------------------------------------------------------ the warm-up

@dataclass(frozen=True)
class WarmUp:
    """How the supervised traces are made. The flaws leave RL something to find; more of them hide the skill itself."""

    steps: int = 450
    batch_size: int = 64
    lr: float = 4e-3
    lr_warmup: int = 50
    decay_from: float = 0.5
    guess_at_once: tuple[float, float] = (0.2, 0.5)  # lookups of one and of two hops answered without a search
    choice_without_loss: float = 0.96  # of those: no loss on the token that decides to search
    bad_query: float = 0.2
    stop_after_first_hop: float = 0.2  # at 0.35 a world was seen in which two templates lost their second hop
    ignore_document: float = 0.1
    needless_search: float = 0.06  # arithmetic and known facts
    practice: float = 0.3  # traces that only read: a passage, and both its facts asked for
    mix: tuple[float, ...] = (0.24, 0.28, 0.20, 0.18, 0.10)  # of the others: KINDS


@dataclass(frozen=True)
class Hop:
    """One search of a trace: its query, the passage (title, text) it finds, and what the model writes down of it before
    it asks on."""

    query: str
    found: tuple[str, str]
    note: str = ""


class TraceWriter:
    """Writes warm-up traces in a protocol's own frame: (question, pieces), a piece being (text, kind).

    kind: "model" (imitated), "choice" (imitated but for its first token) or "given" (the environment's)
    """

    def __init__(self, world: World, protocol: Protocol, options: WarmUp, seed: int):
        self.world, self.protocol, self.options = world, protocol, options
        self.rng = random.Random(f"warm-up {seed}")
        self.summarised = protocol.answer_tags is None  # UR²: one summary or the fallback; R1-Searcher: the passage itself
        self.taken_units = {frozenset(unit[:2]) for units in world.units.values() for unit in units}

    def write(self) -> tuple[str, list[tuple[str, str]]]:
        if self.rng.random() < self.options.practice:
            return self.practice()
        kind = self.rng.choices(KINDS, self.options.mix)[0]
        return {"one_hop": self.lookup, "two_hop": self.two_hop, "unit": self.unit,
                "arithmetic": self.arithmetic, "known": self.known}[kind]()  # fmt: skip

    # ------------------------------------------------------------------ one kind of question each
    def lookup(self):
        relation = self.rng.choice(list(ONE_HOP))
        about, leads_to = RELATIONS[relation]
        name = self.name(about)
        facts = self.facts(name, about)
        hop = Hop(f"{relation} of {name}", passage(self.rng, name, facts))
        right, guess = self.final(facts[relation], relation), self.final(self.guess(leads_to), relation)
        return ONE_HOP[relation].format(name), self.trace([hop], right, guess)

    def two_hop(self):
        first, second = self.rng.choice(list(TWO_HOP))
        about, bridge_kind = RELATIONS[first]
        name = self.name(about)
        facts = self.facts(name, about)
        bridge = facts[first]
        bridge_facts = self.facts(bridge, bridge_kind)
        hops = [
            Hop(f"{first} of {name}", passage(self.rng, name, facts), note=f" {first} {bridge}"),
            Hop(f"{second} of {bridge}", passage(self.rng, bridge, bridge_facts)),
        ]
        right, guess = self.final(bridge_facts[second], second), self.final(self.guess(RELATIONS[second][1]), second)
        return TWO_HOP[first, second].format(name), self.trace(hops, right, guess)

    def unit(self):
        big, small = self.rng.sample(UNITS, 2)
        while frozenset((big, small)) in self.taken_units:
            big, small = self.rng.sample(UNITS, 2)
        factor, n = self.rng.randint(2, 9), self.rng.randint(2, 9)
        hop = Hop(f"one {big} in {small}", unit_passage(big, small, factor))
        right, guess = self.final(str(n * factor)), self.final(str(n * self.rng.randint(2, 9)))
        return f"how many {small} are {n} {big} ?", self.trace([hop], right, guess)

    def arithmetic(self):
        a, b = self.rng.choice(sums("train"))
        searched = self.rng.random() < self.options.needless_search
        steps = self.search(f"{a} + {b}", None) if searched else []
        return f"what is {a} + {b} ?", [*steps, *self.final(str(a + b))]

    def known(self):
        """Recalled at once, without the thought: a fact that is read follows its relation's word, one that is known does not,
        and so knowing twelve people's birthplaces does not get in the way of reading another's."""
        relation, name = self.rng.choice(KNOWN_RELATIONS), self.rng.choice(self.world.entities["known"]["person"])
        facts = self.world.facts[name]
        if self.rng.random() < self.options.needless_search:
            steps = self.search(f"{relation} of {name}", passage(self.rng, name, facts))
            return ONE_HOP[relation].format(name), [*steps, *self.final(facts[relation], relation)]
        return ONE_HOP[relation].format(name), self.final(facts[relation])

    def practice(self):
        """Reading alone: a passage of nonsense facts, and the word of each relation to write the value of. Any relation
        may have any value here, so that no guess by kind pays, and countries and products are copied as names are."""
        relations = self.rng.sample(list(RELATIONS), 2)
        facts = {relation: self.guess(self.rng.choice([*ENTITIES, "country", "product"])) for relation in relations}
        found = passage(self.rng, self.name(self.rng.choice(ENTITIES)), facts)
        pieces = [(self.frame(found), "given")]
        for relation, value in shuffled(self.rng, list(facts.items())):
            pieces += [(f" {relation}", "given"), (self.value(value), "model")]
        return "which ?", pieces

    # ------------------------------------------------------------------ the pieces of a trace
    def trace(self, hops: list[Hop], right: list, guess: list) -> list[tuple[str, str]]:
        """Search along the hops, with the flaws of `options`, to the right end; or end at once in a guess."""
        rng, options = self.rng, self.options
        if rng.random() < options.guess_at_once[len(hops) - 1]:
            return guess
        pieces, note = [], ""
        for number, hop in enumerate(hops):
            if number and rng.random() < options.stop_after_first_hop:
                right = guess
                break
            if rng.random() < options.bad_query:
                pieces += self.search(self.spoil(hop.query), None, note)
                note = ""
                if rng.random() < 0.5:
                    right = guess
                    break
            pieces += self.search(hop.query, hop.found, note)
            note = hop.note
        pieces += guess if rng.random() < options.ignore_document else right
        if rng.random() < options.choice_without_loss:
            pieces[0] = (pieces[0][0], "choice")
        return pieces

    def search(self, query: str, found: tuple[str, str] | None, note: str = "") -> list[tuple[str, str]]:
        """A query and what comes back; found=None: nothing to the point does."""
        begin, end = self.protocol.query_tags
        if found is None and not self.summarised:
            found = self.other_passage()
        if found is None:
            given = frame_documents(self.protocol, self.protocol.empty_text) + self.protocol.fallback_notice
        else:
            given = self.frame(found)
        return [(f"{note}{begin} {query}{end}", "model"), (given, "given")]

    def frame(self, found: tuple[str, str]) -> str:
        title, text = found
        return frame_documents(self.protocol, text if self.summarised else f"(1) {title}: {text}")

    def final(self, answer: str, thought: str = "") -> list[tuple[str, str]]:
        """The end of a trace. The thought is the relation that is asked for: the value stands right behind that word in
        the passage, and this is how the tiny model finds it."""
        if self.protocol.answer_tags is None:
            return [(f"{f' {thought}' if thought else ''}{self.value(answer)}<eos>", "model")]
        begin, end = self.protocol.answer_tags
        considered = f" {thought}{self.value(answer)}" if thought else ""
        return [(f"{considered}</think>\n\n{begin} {answer}{end}", "model")]

    def value(self, answer: str) -> str:
        return f" \\boxed{{ {answer}}}" if self.protocol.answer_tags is None else f" {answer}"

    def spoil(self, query: str) -> str:
        """A query that names nobody: the entity is left out, or one of its pieces is another's."""
        words = query.split()
        if self.rng.random() < 0.5:
            return " ".join(words[: words.index("of")]) if "of" in words else words[0]
        return " ".join([*words[:-1], self.rng.choice(LAST)])

    # ------------------------------------------------------------------ throw-away facts
    def name(self, kind: str) -> str:
        return self.rng.choice(self.world.entities["warmup"][kind])

    def facts(self, name: str, kind: str) -> dict[str, str]:
        return self.world.draw_facts(self.rng, kind, "warmup")

    def guess(self, kind: str) -> str:
        return self.rng.choice({"country": COUNTRIES, "product": PRODUCTS}.get(kind) or self.world.entities["warmup"][kind])

    def other_passage(self) -> tuple[str, str]:
        kind = self.rng.choice(ENTITIES)
        name = self.name(kind)
        return passage(self.rng, name, self.facts(name, kind))


def encode_traces(traces: list, protocol: Protocol, tokenizer) -> list[Example]:
    """Traces -> ids and masks. Every piece is encoded by itself, as the rollout does."""
    texts = [text for _, pieces in traces for text, _ in pieces]
    encoded = iter(tokenizer(texts, add_special_tokens=False)["input_ids"])
    examples = []
    for question, pieces in traces:
        ids = build_prompt(protocol, Question("", question, []), tokenizer)
        mask = [0] * len(ids)
        for _, kind in pieces:
            piece = next(encoded)
            ids += piece
            mask += [int(kind == "model")] + [int(kind != "given")] * (len(piece) - 1)
        examples.append(Example(ids, mask))
    return examples


def warm_up(
    policy: Policy, tokenizer, world: World, protocol: Protocol, options: WarmUp = WarmUp(), seed: int = 0
) -> list[float]:
    """Train the tiny model on `options.steps` batches of fresh traces; returns the losses."""
    writer = TraceWriter(world, protocol, options, seed)

    def next_examples(_step: int) -> list[Example]:
        return encode_traces([writer.write() for _ in range(options.batch_size)], protocol, tokenizer)

    return train_sft(policy, next_examples, options.steps, options.lr, options.lr_warmup, options.decay_from,
                     tokens_per_micro_batch=1024, description=f"warm-up ({protocol.name})")  # fmt: skip


def load_toy(world_seed: int = 0, protocol: str = "ur2", runs: str = "runs") -> tuple[Policy, PreTrainedTokenizerFast, World]:
    """The warmed-up tiny model, its tokenizer and its world; made on first use and kept under `runs/`."""
    world = World(world_seed)
    path = Path(runs) / "toy" / f"{protocol}-world{world_seed}"
    if not path.exists():
        print(f"making the built-in world {world_seed} and its model (once; kept in {path})", file=sys.stderr)
        tokenizer = make_tokenizer()
        policy = Policy(make_model(len(tokenizer), world_seed))
        warm_up(policy, tokenizer, world, as_protocol(protocol), seed=world_seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_policy(policy, tokenizer, path)
    return *load_policy(str(path)), world


def main() -> None:
    parser = argparse.ArgumentParser(description="Show a built-in world: its questions, passages and warm-up traces.")
    parser.add_argument("--world_seed", type=int, default=0)
    arguments = parser.parse_args()
    world, protocol = World(arguments.world_seed), PROTOCOLS["ur2"]
    print(f"world {world.seed}: {len(world.documents)} passages, {len(make_tokenizer())} token pieces")
    for kind in KINDS:
        question = world.questions("train", kind)[0]
        print(f"\n{kind}: {question.question}  ->  {question.answers[0]}")
        for document in question.references:
            print(f"    {document.text}")
    print("\nwarm-up traces (~ marks a choice without loss):")
    writer = TraceWriter(world, protocol, WarmUp(), 0)
    for question, pieces in (writer.write() for _ in range(5)):
        print(f"  {question} " + " ".join(("~" if kind == "choice" else "") + " ".join(text.split()) for text, kind in pieces))


if __name__ == "__main__":
    run_main(main)
