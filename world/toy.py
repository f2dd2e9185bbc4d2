"""The tiny model of the built-in world: its tokenizer, its weights, and the supervised warm-up that
it starts RL from.

The warm-up (`sft.py`) teaches the skills: to read a passage, or the one of several that counts, to
copy a name, to keep the format, to add. It does not teach when to use them: nearly all of its
search traces carry no loss on the token that decides between searching and answering, and many are
flawed on purpose. RL finds the rest.

    UR²              search, read the summary (or the fallback), write \\boxed{...}
    R1-Searcher      the same over the passage itself, with </think> <answer>
    R-Search         two passages a search; copy the one that counts as evidence, answer from it
    When to Search   think, search, reflect, answer
    ARENA            four numbered references in the prompt; cite, analyse, answer

The facts of a trace are drawn anew for each trace, so reading pays and remembering does not; only
the twelve known people keep theirs (and have last names of their own, so that what is known can be
told from what is not). All 81 sums of two digits are practised: arithmetic measures the habit of
searching, not whether addition generalises. R-Search's reader (`load_reader`) is a second model of
another family, shape and seed, which sees evidence and question only. Left out: misspellings,
prose, protocols that were trained on each other's traces.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from data import Document, Question
from errors import FlagParser, run_main
from other_models.reader import INSTRUCTION as READER_INSTRUCTION
from other_models.reader import reader_text
from policy import Policy, load_policy, save_policy
from prompts import (
    PROTOCOLS,
    Protocol,
    as_protocol,
    chat_text,
    frame_documents,
    number_documents,
    prompt_text,
)
from sft import Example, train_sft
from world.world import (
    CITY_HEADS,
    CITY_TAILS,
    COMPANY_HEADS,
    COMPANY_TAILS,
    COUNTRIES,
    ENTITIES,
    FAMOUS,
    FIRST,
    KINDS,
    KNOWN_RELATIONS,
    LAST,
    MAX_NUMBER,
    ONE_HOP,
    PRODUCTS,
    REFERENCES,
    RELATIONS,
    TWO_HOP,
    UNITS,
    World,
    fact_passage,
    passage,
    shuffled,
    sums,
    unit_passage,
)

LAYOUTS = {"r_search": "facts", "arena": "facts"}  # of the other protocols: "pages"


def world_for(protocol: str, seed: int = 0, fact_seed: int | None = None) -> World:
    """The world in the layout that the protocol reads."""
    return World(seed, fact_seed, LAYOUTS.get(as_protocol(protocol).name, "pages"))


# ------------------------------------------------------------------------------------ the tokenizer

WORDS = """
a an and answer are as based birthplace born city country does employer employs for has how in is it make many mayor
none of one product seat the was what where which who
""".split()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Word pieces that carry their leading space, so that decoding gives back the text to the
    letter.

    A known word is one token; names are head + tail (cities, companies) or first + last (people).
    The tags of all protocols and the environment's notices are one token each: the tiny model reads
    them as signs. (Real tokenizers split a tag into several tokens, and the rollout does not care:
    its tests use both.)
    """
    tags = sorted({tag for p in PROTOCOLS.values() for tag in p.tags})
    signs = sorted(
        {
            t
            for p in PROTOCOLS.values()
            for t in (p.fallback_notice, p.malformed_notice, p.limit_notice)
        }
    )
    spaced = [
        *WORDS,
        *FIRST,
        *LAST,
        *FAMOUS,
        *CITY_HEADS,
        *COMPANY_HEADS,
        *COUNTRIES,
        *PRODUCTS,
        *UNITS,
    ]
    spaced += [*map(str, range(MAX_NUMBER)), "?", ".", "+", ":"]
    spaced += [f"({i})" for i in range(1, 6)]
    bare = [
        *CITY_TAILS,
        *COMPANY_TAILS,
        "?",
        ":",
        ".",
        "+",
        "\\boxed{",
        " \\boxed{",
        "}",
        "\n",
        "\n\n",
        " ",
    ]
    bare += [
        "[",
        "]",
        ", ",
        *map(str, range(1, REFERENCES + 1)),
    ]  # ARENA's list of references: [1, 4]
    pieces = list(
        dict.fromkeys(["<pad>", "<eos>", "<unk>", *[f" {word}" for word in spaced], *bare])
    )
    # Unigram with equal scores takes the fewest pieces that cover the text. Of ", " + "4" and "," +
    # " 4" it is to take the first, so that a number is one token wherever it stands in a list.
    scored = [(piece, -0.5 if piece == ", " else -1.0) for piece in pieces]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=2, byte_fallback=False))
    # A word at the start of a line gets the leading space that its piece has everywhere else.
    line_start = normalizers.Replace(Regex(r"(?<=\n)(?=[a-z0-9(])"), " ")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), line_start])
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False, special=False) for text in [*tags, *signs]]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    # The tiny model knows its protocol from the warm-up; the instruction (the system message) is
    # not shown to it.
    fast.chat_template = "{{ ' ' + messages[-1]['content'].strip() + ' answer :' }}"
    return fast


def make_model(vocab_size: int, seed: int = 0) -> Qwen2ForCausalLM:
    """A Qwen2 of 0.48M parameters with random weights."""
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        intermediate_size=384,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        initializer_range=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},  # texts of 100 tokens
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return look_back(Qwen2ForCausalLM(config), (1, 1, 2, 2))


LOOK_BACK_GAIN = 6.0


@torch.no_grad()
def look_back(model: torch.nn.Module, offsets: tuple[int, ...]) -> torch.nn.Module:
    """Head h of the first layer begins by attending to the token `offsets[h]` places back. Training
    may change it.

    Reading is matching a word with the one before it. A model this small finds out by itself to
    look one place back, in about 400 steps; born with it, it reads after 200. Only where the heads
    look is given, not what they do with it.

        logit(Δ) = Σ_i q_i · R(Δ θ_i) k_i,   k_i = (g, 0),   q_i = g (cos o θ_i, −sin o θ_i)   ->
        largest at Δ = o
    """
    config = model.config
    size = config.hidden_size // config.num_attention_heads
    theta = config.rope_parameters["rope_theta"] ** (
        -torch.arange(size // 2) * 2 / size
    )  # [size / 2]  rotary frequencies
    attention = model.model.layers[0].self_attn
    for head, offset in enumerate(offsets):
        rows = slice(head * size, (head + 1) * size)
        attention.q_proj.weight[rows] *= 0.1  # the place decides, not the word
        attention.k_proj.weight[rows] *= 0.1
        attention.k_proj.bias[rows] = LOOK_BACK_GAIN * torch.cat(
            [torch.ones(size // 2), torch.zeros(size // 2)]
        )
        attention.q_proj.bias[rows] = LOOK_BACK_GAIN * torch.cat(
            [torch.cos(theta * offset), -torch.sin(theta * offset)]
        )
    return model


# -------------------------------------------------------------------------------------- the warm-up


@dataclass(frozen=True)
class WarmUp:
    """How the supervised traces are made. The flaws leave RL something to find; more of them hide
    the skill itself.
    """

    steps: int = 450
    batch_size: int = 64
    lr: float = 4e-3
    lr_warmup: int = 50
    decay_from: float = 0.5
    guess_at_once: tuple[float, float] = (
        0.2,
        0.5,
    )  # lookups of one and of two hops answered without a search
    choice_without_loss: float = 0.96  # of those that search: no loss on the token that decides to
    bad_query: float = 0.2
    stop_after_first_hop: float = (
        0.2  # at 0.35 a world was seen in which two templates lost their second hop
    )
    ignore_document: float = 0.1
    # arithmetic and known facts: practised, so that a needless search costs no right answer
    needless_search: float = 0.3
    practice: float = 0.3  # traces that only read: passages of nonsense facts, each asked for
    mix: tuple[float, ...] = (0.24, 0.28, 0.20, 0.18, 0.10)  # of the others: KINDS
    no_evidence: float = 0.3  # R-Search: traces that answer without it
    wrong_evidence: float = (
        0.3  # R-Search: of the others, the answer's fact invented, or the other passage's
    )
    right_citation: float = 0.35  # ARENA: traces that cite the right set; the others another one
    no_analysis: float = 0.15  # ARENA: the section is left out


WARM_UPS = {
    "r_search": WarmUp(steps=300, mix=(0.5, 0.5, 0.0, 0.0, 0.0)),
    "arena": WarmUp(steps=900, decay_from=0.75, mix=(0.5, 0.5, 0.0, 0.0, 0.0), practice=0.65),
}


@dataclass(frozen=True)
class Hop:
    """One search of a trace: its query, the passage (title, text) it finds, and what the model
    notes of it.
    """

    query: str
    found: tuple[str, str]
    note: str = ""


@dataclass(frozen=True)
class Task:
    """A question with the way to its answer. `thought`: the relation that the answer is the value
    of.
    """

    question: str
    hops: tuple[Hop, ...]
    answer: str
    guess: str
    thought: str = ""


Pieces = list[
    tuple[str, str]
]  # (text, kind): "model" is imitated, "choice" but for its first token, "given" not at all


class TraceWriter:
    """Writes warm-up traces in a protocol's own frame: (question, pieces)."""

    def __init__(self, world: World, protocol: Protocol, options: WarmUp, seed: int):
        self.world, self.protocol, self.options, self.name_of = (
            world,
            protocol,
            options,
            protocol.name,
        )
        self.rng = random.Random(f"warm-up {seed}")
        self.summarised = (
            protocol.answer_tags is None
        )  # UR²: one summary or the fallback; the others: the passages
        self.single = world.layout == "facts"
        self.taken_units = {frozenset(unit[:2]) for units in world.units.values() for unit in units}

    def write(self) -> tuple[Question, Pieces]:
        if self.rng.random() < self.options.practice:
            return self.practice()
        kind = self.rng.choices(KINDS, self.options.mix)[0]
        task = getattr(self, kind)()
        if self.protocol.references_in_prompt:
            return self.cite(task)
        pieces = self.trace(task) if kind in ("one_hop", "two_hop", "unit") else self.needless(task)
        return Question("", task.question, []), pieces

    # ------------------------------------------------------------------ one kind of question each
    def one_hop(self) -> Task:
        relation = self.rng.choice(list(ONE_HOP))
        about, leads_to = RELATIONS[relation]
        name = self.name(about)
        facts = self.facts(about)
        hop = Hop(
            f"{relation} of {name}",
            self.passage(name, facts, relation),
            f" {relation} {facts[relation]}",
        )
        return Task(
            ONE_HOP[relation].format(name), (hop,), facts[relation], self.guess(leads_to), relation
        )

    def two_hop(self) -> Task:
        first, second = self.rng.choice(list(TWO_HOP))
        about, bridge_kind = RELATIONS[first]
        name = self.name(about)
        facts = self.facts(about)
        bridge = facts[first]
        bridge_facts = self.facts(bridge_kind)
        hops = (
            Hop(f"{first} of {name}", self.passage(name, facts, first), f" {first} {bridge}"),
            Hop(
                f"{second} of {bridge}",
                self.passage(bridge, bridge_facts, second),
                f" {second} {bridge_facts[second]}",
            ),
        )
        guess = self.guess(RELATIONS[second][1])
        return Task(TWO_HOP[first, second].format(name), hops, bridge_facts[second], guess, second)

    def unit(self) -> Task:
        big, small = self.rng.sample(UNITS, 2)
        while frozenset((big, small)) in self.taken_units:
            big, small = self.rng.sample(UNITS, 2)
        factor, n = self.rng.randint(2, 9), self.rng.randint(2, 9)
        hop = Hop(f"one {big} in {small}", unit_passage(big, small, factor))
        return Task(
            f"how many {small} are {n} {big} ?",
            (hop,),
            str(n * factor),
            str(n * self.rng.randint(2, 9)),
        )

    def arithmetic(self) -> Task:
        """Its search finds nothing to the point."""
        a, b = self.rng.choice(sums("train"))
        return Task(f"what is {a} + {b} ?", (Hop(f"{a} + {b}", ("", "")),), str(a + b), "")

    def known(self) -> Task:
        relation, name = (
            self.rng.choice(KNOWN_RELATIONS),
            self.rng.choice(self.world.entities["known"]["person"]),
        )
        facts = self.world.facts[name]
        hop = Hop(f"{relation} of {name}", self.passage(name, facts, relation))
        return Task(ONE_HOP[relation].format(name), (hop,), facts[relation], "", relation)

    def practice(self) -> tuple[Question, Pieces]:
        """Reading alone: nonsense facts, and the word of each relation to write the value of. Any
        relation may have any value here, so that no guess by kind pays, and countries and products
        are copied as names are.
        """
        if self.protocol.references_in_prompt and self.rng.random() < 0.6:
            return self.practise_citing()
        count = REFERENCES if self.protocol.references_in_prompt else 2
        kinds = [*ENTITIES, "country", "product"]
        facts = {
            relation: self.guess(self.rng.choice(kinds))
            for relation in self.rng.sample(list(RELATIONS), count)
        }
        if self.single:
            shown = [
                fact_passage(self.name(self.rng.choice(ENTITIES)), *fact) for fact in facts.items()
            ]
        else:
            shown = [passage(self.rng, self.name(self.rng.choice(ENTITIES)), facts)]
        question, pieces = Question("", "which ?", []), []
        if self.protocol.references_in_prompt:
            question = replace(question, references=as_documents(shown))
        else:
            pieces.append((self.frame(shown), "given"))
        for relation, value in shuffled(self.rng, list(facts.items())):
            pieces += [(f" {relation}", "given"), (self.value(value), "model")]
        return question, pieces

    # ------------------------------------------------------------------ a trace that searches
    def trace(self, task: Task) -> Pieces:
        """Search along the hops, with the flaws of `options`, to the right end; or end at once in a
        guess.
        """
        rng, options = self.rng, self.options
        if rng.random() < options.guess_at_once[len(task.hops) - 1]:
            return self.opening(task) + self.final(task, task.guess)
        pieces, evidence, note, answer = [], [], None, task.answer
        for number, hop in enumerate(task.hops):
            if number and rng.random() < options.stop_after_first_hop:
                answer = task.guess
                break
            if rng.random() < options.bad_query:
                pieces += self.search(self.spoil(hop.query), None, note)
                note = ""
                if rng.random() < 0.5:
                    answer = task.guess
                    break
            pieces += self.search(hop.query, hop.found, note)
            evidence.append(hop)
            note = hop.note
        answer = task.guess if rng.random() < options.ignore_document else answer
        return (
            self.opening(task)
            + self.undecided(pieces)
            + self.final(task, answer, evidence, searched=True)
        )

    def needless(self, task: Task) -> Pieces:
        """What is known or can be reckoned: answered at once, or searched for first without need.

        Recalled without the thought: a fact that is read follows its relation's word, one that is
        known does not, and so knowing twelve people's birthplaces does not get in the way of
        reading another's.
        """
        if self.rng.random() >= self.options.needless_search:
            return self.opening(task) + self.final(replace(task, thought=""), task.answer)
        hop = task.hops[0]
        found = hop.found if hop.found[0] else None
        pieces = self.undecided(self.search(hop.query, found))
        return (
            self.opening(task)
            + pieces
            + self.final(task, task.answer, [hop] if found else [], searched=True)
        )

    def undecided(self, pieces: Pieces) -> Pieces:
        """Mostly without loss on the first token, which decides to search."""
        if self.rng.random() < self.options.choice_without_loss:
            pieces[0] = (pieces[0][0], "choice")
        return pieces

    def opening(self, task: Task) -> Pieces:
        """When to Search thinks first; what it thinks is the same whether it searches or not."""
        return (
            [(f"<think>{f' {task.thought}' if task.thought else ' how many'}</think>", "model")]
            if self.reflects
            else []
        )

    @property
    def reflects(self) -> bool:
        return self.name_of == "when_to_search"

    def search(self, query: str, found: tuple[str, str] | None, note: str | None = None) -> Pieces:
        """A query and what comes back; found=None: nothing to the point does. note: what is written
        down of the search before, None where there was none.
        """
        begin, end = self.protocol.query_tags
        if found is None and not self.summarised:
            found = self.other_passage()
        if found is None:
            given = (
                frame_documents(self.protocol, self.protocol.empty_text)
                + self.protocol.fallback_notice
            )
        else:
            given = self.frame(self.with_neighbour(found))
        before = (
            (note or "")
            if note is None or not self.reflects
            else f"<reflect>{note or ' none'}</reflect>"
        )
        return [(f"{before}{begin} {query}{end}", "model"), (given, "given")]

    def frame(self, found: list[tuple[str, str]]) -> str:
        shown = found[0][1] if self.summarised else "\n".join(number_documents(as_documents(found)))
        return frame_documents(self.protocol, shown)

    def with_neighbour(self, found: tuple[str, str]) -> list[tuple[str, str]]:
        """What a search shows. With a passage per fact the entity's other fact comes along, before
        it or behind it.
        """
        relation, name = found[1].split()[0], found[1].partition(" of ")[2].removesuffix(" .")
        if not self.single or relation not in RELATIONS:
            return [found]
        about = RELATIONS[relation][0]
        other = next(r for r, (kind, _) in RELATIONS.items() if kind == about and r != relation)
        return shuffled(
            self.rng, [found, fact_passage(name, other, self.guess(RELATIONS[other][1]))]
        )

    # ------------------------------------------------------------------ how it ends
    def final(
        self, task: Task, answer: str, evidence: list[Hop] = (), searched: bool = False
    ) -> Pieces:
        """The end of a trace. The thought is the relation that is asked for: the value stands right
        behind that word in the passage, and this is how the tiny model finds it.
        """
        thought = f" {task.thought}{self.value(answer)}" if task.thought else ""
        if self.protocol.answer_tags is None:
            return [(f"{thought or self.value(answer)}<eos>", "model")]
        begin, end = self.protocol.answer_tags
        box = f"{begin} {answer}{end}"
        if self.name_of == "r_search":
            return [(f"{self.evidence(task, answer, evidence)}{box}", "model")]
        if self.reflects:
            return [
                (f"<reflect>{thought or f' {answer}'}</reflect>{box}" if searched else box, "model")
            ]
        return [(f"{thought}</think>\n\n{box}", "model")]

    def evidence(self, task: Task, answer: str, hops: list[Hop]) -> str:
        """R-Search: the sentences that were found, flawed as `options` say; without them the
        thought leads to the answer.
        """
        if not hops or self.rng.random() < self.options.no_evidence:
            return f" {task.thought} {answer}" if task.thought else ""
        lines = [f" {hop.found[1]}" for hop in hops]
        if self.rng.random() < self.options.wrong_evidence:
            relation = task.thought if self.rng.random() < 0.5 else self.rng.choice(list(RELATIONS))
            name = lines[-1].partition(" of ")[2]
            lines[-1] = (
                f" {relation} {self.guess(RELATIONS[relation][1])} of {name}" if name else lines[-1]
            )
        begin, end = self.protocol.evidence_tags
        return f"{begin}{''.join(lines)}{end}"

    def cite(self, task: Task) -> tuple[Question, Pieces]:
        """ARENA: the references of a task with distractors, the citation mostly flawed, the answer
        mostly right.
        """
        rng, options = self.rng, self.options
        shown, numbers = self.references(task)
        answer = task.guess if rng.random() < options.ignore_document else task.answer
        cited = f"<relevance>[{', '.join(map(str, self.citation(numbers)))}]</relevance>"
        notes = [hop.note for hop in task.hops[:-1]] + [f" {task.thought} {answer}"]
        analysis = (
            "" if rng.random() < options.no_analysis else f"<analysis>{''.join(notes)}</analysis>"
        )
        begin, end = self.protocol.answer_tags
        question = Question("", task.question, [], references=as_documents(shown))
        return question, [(f"{cited}{analysis}{begin} {answer}{end}", "model")]

    def references(self, task: Task) -> tuple[list[tuple[str, str]], list[int]]:
        """(the passages of a task among distractors of other relations, the numbers of its own)."""
        gold = [hop.found for hop in task.hops]
        asked = {text.split()[0] for _, text in gold}
        others = self.rng.sample(
            [relation for relation in RELATIONS if relation not in asked], REFERENCES - len(gold)
        )
        distractors = [
            fact_passage(
                self.name(RELATIONS[relation][0]), relation, self.guess(RELATIONS[relation][1])
            )
            for relation in others
        ]
        shown = shuffled(self.rng, gold + distractors)
        return shown, sorted(shown.index(passage) + 1 for passage in gold)

    def practise_citing(self) -> tuple[Question, Pieces]:
        """Only the right numbers, to a question that begins with "which ?": the skill, but not the
        habit. In a trace without that word most citations are wrong.
        """
        task = self.one_hop() if self.rng.random() < 0.5 else self.two_hop()
        shown, numbers = self.references(task)
        question = Question("", f"which ? {task.question}", [], references=as_documents(shown))
        return question, [("<relevance>[", "given"), (f"{', '.join(map(str, numbers))}]", "model")]

    def citation(self, numbers: list[int]) -> list[int]:
        """The right numbers, or wrong ones: all of them, one too many, or one of two."""
        if self.rng.random() < self.options.right_citation:
            return numbers
        everything = list(range(1, REFERENCES + 1))
        one_more = sorted(
            [*numbers, self.rng.choice([number for number in everything if number not in numbers])]
        )
        return self.rng.choice(
            [everything, one_more, *([number] for number in numbers if len(numbers) > 1)]
        )

    def value(self, answer: str) -> str:
        return f" \\boxed{{ {answer}}}" if self.protocol.answer_tags is None else f" {answer}"

    def spoil(self, query: str) -> str:
        """A query that names nobody: the entity is left out, or one of its pieces is another's."""
        words = query.split()
        if self.rng.random() < 0.5:
            return " ".join(words[: words.index("of")]) if "of" in words else words[0]
        return " ".join([*words[:-1], self.rng.choice(LAST)])

    # ------------------------------------------------------------------ throw-away facts
    def passage(self, name: str, facts: dict[str, str], relation: str) -> tuple[str, str]:
        return (
            fact_passage(name, relation, facts[relation])
            if self.single
            else passage(self.rng, name, facts)
        )

    def name(self, kind: str) -> str:
        return self.rng.choice(self.world.entities["warmup"][kind])

    def facts(self, kind: str) -> dict[str, str]:
        return self.world.draw_facts(self.rng, kind, "warmup")

    def guess(self, kind: str) -> str:
        return self.rng.choice(
            {"country": COUNTRIES, "product": PRODUCTS}.get(kind)
            or self.world.entities["warmup"][kind]
        )

    def other_passage(self) -> tuple[str, str]:
        kind = self.rng.choice(ENTITIES)
        facts = self.facts(kind)
        return self.passage(self.name(kind), facts, self.rng.choice(list(facts)))


def as_documents(passages: list[tuple[str, str]]) -> tuple[Document, ...]:
    return tuple(Document(str(number), *passage) for number, passage in enumerate(passages, 1))


def encode_traces(
    traces: list[tuple[Question, Pieces]], protocol: Protocol, tokenizer
) -> list[Example]:
    """Traces -> ids and masks. Every piece is encoded by itself, as the rollout does."""
    texts = [
        text
        for question, pieces in traces
        for text in (prompt_text(protocol, question, tokenizer), *(piece for piece, _ in pieces))
    ]
    encoded = iter(
        tokenizer(texts, add_special_tokens=False)["input_ids"]
    )  # in one call: many small ones take as long again
    examples = []
    for _, pieces in traces:
        ids = list(next(encoded))  # the prompt
        mask = [0] * len(ids)
        for _, kind in pieces:
            piece = next(encoded)
            ids += piece
            mask += [int(kind == "model")] + [int(kind != "given")] * (len(piece) - 1)
        examples.append(Example(ids, mask))
    return examples


def warm_up(
    policy: Policy,
    tokenizer,
    world: World,
    protocol: Protocol,
    options: WarmUp | None = None,
    seed: int = 0,
) -> list[float]:
    """Train the tiny model on `options.steps` batches of fresh traces; returns the losses."""
    options = options or WARM_UPS.get(protocol.name, WarmUp())
    writer = TraceWriter(world, protocol, options, seed)

    def next_examples(_step: int) -> list[Example]:
        return encode_traces(
            [writer.write() for _ in range(options.batch_size)], protocol, tokenizer
        )

    return train_sft(
        policy,
        next_examples,
        options.steps,
        options.lr,
        options.lr_warmup,
        options.decay_from,
        description=f"warm-up ({protocol.name})",
    )


# ------------------------------------------------------------------------- R-Search's frozen reader

READER_STEPS = 300


def reader_example(writer: TraceWriter, tokenizer) -> Example:
    """Evidence and question -> the answer. Without the sentence that states it: "none", so that
    evidence is worth what it says and no more.
    """
    task = writer.one_hop() if writer.rng.random() < 0.5 else writer.two_hop()
    lines, answer = [hop.found[1] for hop in task.hops], task.answer
    if writer.rng.random() < 0.3:
        lines[-1] = writer.other_passage()[1]
        relation, _, value = lines[-1].partition(" of ")[0].partition(" ")
        answer = value if relation == task.thought else "none"
    request = READER_INSTRUCTION, reader_text(Question("", task.question, []), " ".join(lines))
    prompt = tokenizer(chat_text(tokenizer, *request), add_special_tokens=False)["input_ids"]
    reply = tokenizer(f" {answer}<eos>", add_special_tokens=False)["input_ids"]
    return Example(prompt + reply, [0] * len(prompt) + [1] * len(reply))


def train_reader(world: World, tokenizer, seed: int, steps: int = READER_STEPS) -> Policy:
    """A Llama of 0.2M parameters with weights of its own: another family than the policy, and
    another shape.
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=6,
        intermediate_size=256,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        initializer_range=0.05,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1_000 + seed)
        reader = Policy(look_back(LlamaForCausalLM(config), (1, 1, 2, 2)))
    writer = TraceWriter(world, PROTOCOLS["r_search"], WARM_UPS["r_search"], 1_000 + seed)
    train_sft(
        reader,
        lambda step: [reader_example(writer, tokenizer) for _ in range(64)],
        steps,
        4e-3,
        50,
        0.5,
        description="the reader of R-Search's evidence",
    )
    return reader


# ---------------------------------------------------------------------------------------- made once


def made_once(path: Path, what: str, make: Callable) -> tuple[Policy, PreTrainedTokenizerFast]:
    """The model at `path`; made on first use and kept there."""
    if not path.exists():
        print(f"making {what} (once; kept in {path})", file=sys.stderr)
        tokenizer = make_tokenizer()
        policy = make(tokenizer)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_policy(policy, tokenizer, path)
    return load_policy(str(path))


def load_toy(
    world_seed: int = 0, protocol: str = "ur2", runs: str = "runs"
) -> tuple[Policy, PreTrainedTokenizerFast, World]:
    """The warmed-up tiny model, its tokenizer and its world."""
    world = world_for(protocol, world_seed)

    def make(tokenizer) -> Policy:
        policy = Policy(make_model(len(tokenizer), world_seed))
        warm_up(policy, tokenizer, world, as_protocol(protocol), seed=world_seed)
        return policy

    path = Path(runs) / "toy" / f"{as_protocol(protocol).name}-world{world_seed}"
    return *made_once(path, f"the built-in world {world_seed} and its model", make), world


def load_reader(world_seed: int = 0, runs: str = "runs") -> tuple[Policy, PreTrainedTokenizerFast]:
    """R-Search's frozen second model for the built-in world."""
    world, path = (
        world_for("r_search", world_seed),
        Path(runs) / "toy" / f"reader-world{world_seed}",
    )
    reader, tokenizer = made_once(
        path, "the reader of R-Search's evidence", lambda t: train_reader(world, t, world_seed)
    )
    return reader.eval().requires_grad_(False), tokenizer


def main() -> None:
    parser = FlagParser(description="Show warm-up traces of the built-in world.")
    parser.add_argument("--world_seed", type=int, default=0)
    parser.add_argument("--protocol", default="ur2", choices=list(PROTOCOLS))
    arguments = parser.parse_args()
    protocol, tokenizer = PROTOCOLS[arguments.protocol], make_tokenizer()
    model = make_model(len(tokenizer))
    print(f"{len(tokenizer)} token pieces, {sum(p.numel() for p in model.parameters()):,} weights")
    print(f"warm-up traces of {protocol.name} (~ marks a choice without loss):")
    options = WARM_UPS.get(protocol.name, WarmUp())
    writer = TraceWriter(world_for(protocol.name, arguments.world_seed), protocol, options, 0)
    for question, pieces in (writer.write() for _ in range(6)):
        shown = "".join(f" {line}" for line in number_documents(question.references))
        traced = " ".join(
            ("~" if kind == "choice" else "") + " ".join(text.split()) for text, kind in pieces
        )
        print(f"  {question.question}{shown} {traced}")


if __name__ == "__main__":
    run_main(main)
