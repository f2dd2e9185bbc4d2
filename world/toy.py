"""The tiny model of the built-in world: tokenizer, weights, the supervised warm-up before RL.

The warm-up (sft.py) teaches skills: reading a passage or the relevant one of several, copying a
name, keeping the format, adding. RL has to teach when to use them: nearly all traces with a search
have no loss on the token that decides between searching and answering, and many traces are flawed
on purpose. A trace's format depends on the paper: its `Protocol` has the tags, its `Tiny` the rest.

Each trace has newly drawn facts, so the model learns to read and cannot memorise. Only the twelve
known people have the same facts in all traces, and last names that nobody else has, so the model
can recognise them. All 81 sums of two digits are practised, so the model never needs to search for
a sum. If the prompt ends in the token <direct>, no search is run, and the trace guesses an unknown
fact.
The reader of evidence (`load_reader`) is a second model, which sees only evidence and question.
Left out: misspellings, prose, training the model of one protocol on traces of another.
"""

import fcntl
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

from data import Document, Question
from other_models.llm import prompt_ids
from other_models.reader import INSTRUCTION as READER_INSTRUCTION
from other_models.reader import reader_text
from policy import Policy, load_policy, save_policy
from prompts import Protocol, frame_documents, number_documents, prompt_text, tag_pair
from sft import Example, SFTSettings, example_of, train_sft
from summarizer import is_lookup
from world import world as built_in
from world.tiny import Tiny
from world.world import REFERENCES, RELATIONS, Facts, World, fact_passage, page, shuffled

# ------------------------------------------------------------------------------------ the tokenizer
WORDS = """
a an and answer are as based birthplace born city country does employer employs for has how in is it
make many mayor none of one product seat the was what where which who
""".split()


def word_pieces() -> list[str]:
    """Returns the tokens that every protocol has: known words with a leading space, and pieces
    mostly without one, such as the ends of names.
    """
    words = [*WORDS, *built_in.NAME_STARTS, *map(str, range(built_in.MAX_NUMBER))]
    words += "? . + : (1) (2) (3) (4) (5)".split()
    bare = [*built_in.NAME_ENDS, *"?:.+", "\\boxed{", " \\boxed{", "}", "\n", "\n\n", " "]
    bare += ["[", "]", ", ", *"1234"]  # a list of the four references: [1, 4]
    return list(dict.fromkeys(["<pad>", "<eos>", "<unk>", *[f" {word}" for word in words], *bare]))


# In a protocol with searches, the chat template puts one of these after the user message, to say
# whether the model may search.
MAY_SEARCH = "<may_search>"
DIRECT = "<direct>"


def make_tokenizer(*protocols: Protocol) -> PreTrainedTokenizerFast:
    """Makes a tokenizer of lower-case word pieces. They include their leading space, so decoding
    only joins them.

    A known word is one token; names are head + tail (cities, companies) or first + last (people).
    Each tag or notice of `protocols` is one token. Real tokenizers split tags; the rollout works
    with both. A tokenizer made for one protocol has no tags of others, so a tag that is added to
    one protocol changes neither the token ids nor the results of the others.
    """
    # Unigram splits a text into the pieces with the highest total score. All pieces but ", " have
    # the same negative score, so a split into fewer pieces wins. ", " scores higher, so that a list
    # would be split as ", " + "4", not as "," + " 4", if "," were added as a piece.
    scored = [(piece, -0.5 if piece == ", " else -1.0) for piece in word_pieces()]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=2))
    # A word at the start of a line gets the leading space that its piece has everywhere else.
    line_start = normalizers.Replace(Regex(r"(?<=\n)(?=[a-z0-9(])"), " ")
    # It reads the titles of all layouts of documents alike: (Title: "Ana Bell") as Ana Bell:
    title = normalizers.Replace(Regex(r'(doc \d+ )?\(title: "'), " ")
    steps = [normalizers.Lowercase(), title, normalizers.Replace('")', ":"), line_start]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Fuse()
    signs = [x for p in protocols for x in (*p.tags, p.fallback_notice, *p.rejection_notices)]
    direct = [p.direct_instruction for p in protocols if p.query_tags]
    # The tiny model knows its protocol from the warm-up, so the template leaves the system message
    # out. It appends DIRECT if the system message is the protocol's direct instruction; otherwise,
    # also for a text of --prompt_file, it appends MAY_SEARCH. It removes ARENA's tags around the
    # question and the references.
    # `| replace(...)` takes a third of the time of `.replace(...)`, because jinja's sandbox checks
    # each call of a method.
    template = (
        "{{ ' ' + messages[-1]['content'] | replace('<question>', '') | replace('</question>', '')"
        " | replace('<references>', '') | replace('</references>', '') | trim + ' answer :'"
    )
    if direct:
        signs += [MAY_SEARCH, DIRECT]
        template += f" + ('{DIRECT}' if messages[0]['content'] in {direct} else '{MAY_SEARCH}')"
    tokenizer.add_tokens([AddedToken(x, normalized=False) for x in dict.fromkeys(signs)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template + " }}",
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
    )


# ---------------------------------------------------------------------------------------- the model
HEAD = 16  # width of an attention head, of every model but those of some tests
BASE = 1000.0  # of the rotary frequencies


def shape(vocab_size: int, width: int, heads: int, inner: int, context: int = 256) -> dict:
    """Returns the fields of a model config. Most texts of the world have about 100 tokens, so they
    fit into the default `context`; the warm-up with raw passages has a larger one.
    """
    return {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "rope_parameters": {"rope_type": "default", "rope_theta": BASE},
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        "max_position_embeddings": context,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
    }


def born(config, seed: int) -> torch.nn.Module:
    """Returns a model with random weights, except for four heads that look back (`look_back`)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return look_back(AutoModelForCausalLM.from_config(config))


def make_model(
    vocab_size: int, seed: int = 0, width: int = 128, context: int = 256
) -> torch.nn.Module:
    """Returns a Qwen2 that is not trained yet: 0.48M parameters at width 128, 0.20M at 80."""
    return born(Qwen2Config(**shape(vocab_size, width, width // HEAD, 3 * width, context)), seed)


OFFSETS = (1, 1, 2, 2)  # how many tokens each of the four heads looks back
GAIN = 6.0  # g in the formula below


@torch.no_grad()
def look_back(model: torch.nn.Module) -> torch.nn.Module:
    """Makes head h of the first layer attend to the token `OFFSETS[h]` places back; training may
    change this. To read a passage, the model must link each word to the word before it. A model
    this small needs about 400 steps to learn to attend one place back; with this start it can read
    after 200 steps.

        logit(Δ) = Σ_i q_i · R(−Δ θ_i) k_i,   k_i = (g, 0),   q_i = g (cos o θ_i, −sin o θ_i)
        is largest at Δ = o,   o = OFFSETS[h];   Δ: places back,   θ_i: the rotary frequencies
    """
    theta = BASE ** (-torch.arange(HEAD // 2) * 2 / HEAD)  # [HEAD / 2]  rotary frequencies
    angles = torch.tensor(OFFSETS)[:, None] * theta  # [heads that look back, HEAD / 2]
    query = torch.cat([angles.cos(), -angles.sin()], dim=1).flatten()
    key = torch.cat([torch.ones_like(angles), torch.zeros_like(angles)], dim=1).flatten()
    attention = model.model.layers[0].self_attn
    for projection, bias in ((attention.q_proj, query), (attention.k_proj, key)):
        # Small weights, so that attention depends on the position and hardly on the token.
        projection.weight[: len(bias)] *= 0.1
        projection.bias[: len(bias)] = GAIN * bias
    return model


# ------------------------------------------------------------------------------------ what is asked
class Hop(NamedTuple):
    """One search: its query, the passage that it finds (None if there is none), the note that the
    model writes about the passage, and the name of the entity that the query is about.
    """

    query: str
    found: Document | None
    note: str = ""
    name: str = ""


class Task(NamedTuple):
    """A question, the hops to its answer, and the answer. `relation` is the relation whose value is
    the answer; it is "" for units and sums. `guess` is a random value of the answer's kind; it is
    "" for known facts and sums, because the model does not have to guess these.
    """

    question: str
    hops: list[Hop]
    answer: str
    guess: str
    relation: str = ""


class Tasks:
    """Draws questions about new facts and about the known people, and sums."""

    def __init__(self, world: World, seed: int):
        self.world = world
        self.values = world.values("warmup")
        self.rng = random.Random(f"warm-up {seed}")
        self.taken_units = [{*unit[:2]} for units in world.units.values() for unit in units]

    def draw(self, kind: str) -> Task:
        return self.chain(kind) if kind in built_in.LOOK_UPS else getattr(self, kind)()

    def look_up(self) -> Task:
        return self.chain("one_hop" if self.rng.random() < 0.5 else "two_hop")

    def chain(self, kind: str) -> Task:
        """Draws a look-up. The value of each relation is the subject of the next one."""
        relations, template = self.rng.choice(list(built_in.LOOK_UPS[kind].items()))
        known = kind == "known"
        entities = self.world.entities["known" if known else "warmup"]
        name = self.rng.choice(entities[RELATIONS[relations[0]][0]])
        question = template.format(name)
        steps = []
        for relation in relations:
            facts = self.world.facts[name] if known else self.facts(RELATIONS[relation][0])
            steps.append((name, facts, relation))
            name = facts[relation]
        # Not in the loop above: another order of random draws would give other traces.
        hops = [self.hop(*step) for step in steps]
        guess = "" if known else self.value(RELATIONS[relation][1])
        return Task(question, hops, name, guess, relation)

    def hop(self, name: str, facts: Facts, relation: str) -> Hop:
        note = f" {relation} {facts[relation]}"
        return Hop(f"{relation} of {name}", self.passage(name, facts, relation), note, name)

    def unit(self) -> Task:
        while {*(pair := self.rng.sample(built_in.UNITS, 2))} in self.taken_units:
            pass
        big, small = pair
        factor = self.rng.randint(2, 9)
        n = self.rng.randint(2, 9)
        hop = Hop(f"one {big} in {small}", built_in.unit_passage(big, small, factor))
        guess = str(n * self.rng.randint(2, 9))
        return Task(f"how many {small} are {n} {big} ?", [hop], str(n * factor), guess)

    def arithmetic(self) -> Task:
        a, b = self.rng.choice(built_in.SUMS)
        return Task(f"what is {a} + {b} ?", [Hop(f"{a} + {b}", None)], str(a + b), "")

    def passage(self, name: str, facts: Facts, relation: str) -> Document:
        if self.world.layout == "facts":
            return fact_passage(name, relation, facts[relation])
        return page(self.rng, name, facts)

    def other_passage(self) -> Document:
        kind = self.rng.choice(built_in.ENTITIES)
        facts = self.facts(kind)
        return self.passage(self.value(kind), facts, self.rng.choice(list(facts)))

    def nonsense(self, count: int) -> tuple[Facts, list[Document]]:
        """Returns facts whose values are of any kind, so that the kind is no hint, and passages
        that state them.
        """
        facts = {
            relation: self.value(self.rng.choice(list(self.values)))
            for relation in self.rng.sample(list(RELATIONS), count)
        }
        # In the layout "pages" there is one passage, with all facts.
        return facts, [
            self.passage(self.value(self.rng.choice(built_in.ENTITIES)), facts, relation)
            for relation in (facts if self.world.layout == "facts" else [""])
        ]

    def with_distractors(self, task: Task) -> tuple:
        """Returns (the hops' passages mixed with distractors, numbers of the hops' passages)."""

        def other(relation: str) -> Document:
            return self.new_fact(self.value(RELATIONS[relation][0]), relation)

        return built_in.with_distractors(self.rng, [hop.found for hop in task.hops], other)

    def new_fact(self, name: str, relation: str) -> Document:
        return fact_passage(name, relation, self.value(RELATIONS[relation][1]))

    def with_neighbour(self, found: Document) -> list[Document]:
        """Returns the passages that a search shows: a page or a unit alone, or, in random order, a
        fact and the other fact of its entity.
        """
        if found.title:
            return [found]
        stated, _, name = found.text.removesuffix(" .").partition(" of ")
        relation = stated.split()[0]
        about = RELATIONS[relation][0]
        other = next(r for r, (kind, _) in RELATIONS.items() if kind == about and r != relation)
        return shuffled(self.rng, [found, self.new_fact(name, other)])

    def facts(self, kind: str) -> Facts:
        return built_in.draw_facts(self.rng, kind, self.values)

    def value(self, kind: str) -> str:
        return self.rng.choice(self.values[kind])


# --------------------------------------------------------------------------------------- the traces
Pieces = list[tuple[str, bool]]  # (text, whether its tokens have a loss)
Trace = tuple[Question, Pieces]
Loaded = tuple[Policy, PreTrainedTokenizerFast]


class TraceWriter:
    """Writes warm-up traces in a paper's format."""

    def __init__(self, protocol: Protocol, tiny: Tiny, world_seed: int):
        self.protocol = protocol
        self.tiny = tiny
        self.cites = tag_pair("relevance") in protocol.other_tags
        self.tasks = Tasks(World(world_seed, layout=tiny.layout), world_seed)
        self.rng = self.tasks.rng  # shared, so that there is one sequence of random draws

    def write(self) -> Trace:
        if self.happens(self.tiny.practice):
            return self.practice()
        kinds = self.tiny.kinds
        (kind,) = self.rng.choices(list(kinds), list(kinds.values()))
        task = self.tasks.draw(kind)
        if self.protocol.references_in_prompt:
            return self.cite(task)
        direct = self.happens(self.tiny.direct)
        if direct:
            pieces = self.rejection(task) + self.at_once(task)
        else:
            pieces = self.look_up(task) if task.guess else self.needless(task)
        # The opening is independent of whether the trace then searches, so it is no hint.
        opening = self.tiny.opening.format(asked=f" {task.relation or 'how many'}")
        return Question("", task.question, [], may_search=not direct), [(opening, True), *pieces]

    def practice(self) -> Trace:
        """Writes a trace of reading: nonsense facts, then each relation and the value to copy. If
        the protocol cites, 60% of these traces practise citing instead.
        """
        shows = self.protocol.references_in_prompt
        if self.cites and self.happens(0.6):
            return self.practise_citing()
        facts, shown = self.tasks.nonsense(REFERENCES if shows else 2)
        pieces = [] if shows else [(self.frame(shown), False)]
        for relation, value in shuffled(self.rng, list(facts.items())):
            pieces += [(f" {relation}", False), (self.tiny.read.format(answer=value), True)]
        return Question("", "which ?", [], references=tuple(shown) if shows else ()), pieces

    def look_up(self, task: Task) -> Pieces:
        """Searches along the hops, with the flaws of `tiny`, or guesses immediately."""
        tiny = self.tiny
        if self.happens(tiny.guess_at_once[len(task.hops) - 1]):
            return self.at_once(task)
        pieces = []
        found = []
        note = None
        answer = task.guess
        for number, hop in enumerate(task.hops):
            if number and self.happens(tiny.stop_after_first_hop):
                break
            if self.happens(tiny.bad_query):
                pieces += self.search(self.spoil(hop.query), None, note)
                note = ""
                if self.happens(0.5):
                    break
            pieces += self.search(hop.query, hop.found, note)
            found.append(hop)
            note = hop.note
        else:  # all hops were made
            answer = task.answer
        if self.happens(tiny.ignore_document):
            answer = task.guess
        return self.undecided(pieces) + self.end(task, answer, found)

    def needless(self, task: Task) -> Pieces:
        """Answers known facts and sums immediately, or after one or more needless searches."""
        if not self.happens(self.tiny.needless_search):
            return self.at_once(task)
        hop = task.hops[0]
        found = [hop] if hop.found else []
        pieces = self.search(hop.query, hop.found)
        while len(pieces) < 12 and self.happens(self.tiny.twice):  # at most four searches
            (tag, _), *rest = self.search(hop.query, hop.found, "")
            pieces += [(tag, False), *rest]
        return self.undecided(pieces) + self.end(task, task.answer, found)

    def happens(self, share: float) -> bool:
        """Decides whether a flaw or another choice occurs. With share 0 no random number is drawn,
        so all other draws are the same as if the flaw did not exist.
        """
        return share > 0 and self.rng.random() < share

    def at_once(self, task: Task) -> Pieces:
        """Ends the trace without a search: by a guess, or by a known answer."""
        return self.end(task, task.guess or task.answer)

    def rejection(self, task: Task) -> Pieces:
        """Writes a query that the environment rejects, and the notice; in most traces nothing."""
        if not self.happens(self.tiny.rejected):
            return []
        begin, end = self.protocol.query_tags
        return [(f"{begin} {task.hops[0].query}{end}{self.protocol.direct_notice}", False)]

    def undecided(self, pieces: Pieces) -> Pieces:
        """In most traces, removes the loss on the first tag, which decides to search."""
        if self.happens(self.tiny.choice_without_loss):
            pieces[0] = (pieces[0][0], False)
        return pieces

    def search(self, query: str, found: Document | None, note: str | None = None) -> Pieces:
        """Writes a query and its result. The result shows `found`, perhaps among other passages. If
        `found` is None, a random passage takes its place, or the result is the protocol's
        `empty_text` (followed by the fallback notice if the query is no look-up). `note` goes
        before the query and tells what the previous search found: None if this search is the first,
        "" if the previous one found nothing relevant or had the same query.
        """
        before = "" if note is None else self.tiny.between.format(note=note or self.tiny.no_note)
        raw = self.happens(self.tiny.raw)
        if found is None and (raw or not self.tiny.summarised or self.happens(self.tiny.stray)):
            found = self.tasks.other_passage()
        if raw:
            shown = [self.tasks.other_passage() for _ in range(2)]
            # `found` is usually the first of the three passages.
            shown.insert(0 if self.happens(0.7) else self.rng.randint(0, 2), found)
            given = self.frame(shown, raw)
        elif found:
            given = self.frame(self.tasks.with_neighbour(found))
        else:
            given = frame_documents(self.protocol, self.protocol.empty_text)
            given += "" if is_lookup(query) else self.protocol.fallback_notice
        begin, end = self.protocol.query_tags
        return [(before + begin, True), (f" {query}{end}", True), (given, False)]

    def frame(self, shown: list[Document], raw: bool = False) -> str:
        """Returns the text that a search shows: numbered passages, or the first as the summary."""
        if self.tiny.summarised and not raw:
            return frame_documents(self.protocol, shown[0].text)
        lines = number_documents(shown, self.protocol.document_layouts)
        return frame_documents(self.protocol, "\n".join(lines))

    def spoil(self, query: str) -> str:
        """Returns a bad query: only the first word of `query`, or `query` with a random last name
        as its last word.
        """
        words = query.split()
        if "of" not in words or self.happens(0.5):
            return words[0]
        return " ".join([*words[:-1], self.rng.choice(built_in.LAST)])

    def end(self, task: Task, answer: str, found: Sequence[Hop] = ()) -> Pieces:
        """Writes the end of a trace. The passages of the hops in `found` were read before. The
        relation of a known fact is named only after a search.
        """
        asked = f" {task.relation}" if task.relation and (task.guess or found) else ""
        thought = f"{asked} {answer}" if asked else ""
        evidence = self.evidence(task, found) or thought
        if asked and self.happens(self.tiny.verbose):
            answer = self.rng.choice([f"{task.relation} {answer}", f"{answer} is{asked}"])
        text = self.tiny.end.format(answer=answer, asked=asked, thought=thought, evidence=evidence)
        if self.happens(self.tiny.sloppy):  # UR²'s format check forbids both forms
            if not asked or self.happens(0.5):
                text = text.removesuffix("<eos>") + text  # it answers twice
            else:  # an invented passage precedes the answer
                begin, end = self.protocol.documents_tags
                text = f"{begin} {task.hops[-1].name} has{asked} {task.answer} .{end}{text}"
        return [(text, True)]

    def evidence(self, task: Task, found: Sequence[Hop]) -> str:
        """Writes the passages of `found` as evidence; in some traces the last fact is replaced.
        Returns "" if there is no evidence.
        """
        tags = self.protocol.evidence_tags
        if not tags or not found or self.happens(self.tiny.no_evidence):
            return ""
        passages = [hop.found for hop in found]
        if task.relation and self.happens(self.tiny.wrong_evidence):
            relation = task.relation if self.happens(0.5) else self.rng.choice(list(RELATIONS))
            passages[-1] = self.tasks.new_fact(found[-1].name, relation)
        return f"{tags[0]} {' '.join(passage.text for passage in passages)}{tags[1]}"

    def cite(self, task: Task) -> Trace:
        """Writes a trace that cites references of its prompt, which also holds distractors. Most
        traces cite a wrong list of references (`cited`) but answer correctly. Under arena_naive
        the trace has the same content without the citation.
        """
        tiny = self.tiny
        shown, numbers = self.tasks.with_distractors(task)
        answer = task.guess if self.happens(tiny.ignore_document) else task.answer
        cited = ", ".join(map(str, self.cited(numbers)))
        analysis = "" if self.happens(tiny.no_analysis) else tiny.analysis
        template = tiny.end if self.cites else tiny.uncited
        # The templates of citation and analysis have gaps too.
        template = template.replace("{citation}", tiny.citation).replace("{analysis}", analysis)
        note = "".join(hop.note for hop in task.hops[:-1])
        thought = f" {task.relation} {answer}"
        text = template.format(numbers=cited, note=note, thought=thought, answer=answer)
        return Question("", task.question, [], references=shown), [(text, True)]

    def practise_citing(self) -> Trace:
        """Writes a trace that only cites, and correctly. Its question begins with "which ?", so
        the model learns to find the right references but not to do it in answer to usual questions.
        The text before the numbers has no loss.
        """
        task = self.tasks.look_up()
        shown, numbers = self.tasks.with_distractors(task)
        before, _, after = self.tiny.citation.partition("{numbers}")
        pieces = [(before, False), (", ".join(map(str, numbers)) + after, True)]
        return Question("", f"which ? {task.question}", [], references=shown), pieces

    def cited(self, numbers: Sequence[int]) -> Sequence[int]:
        """Returns the numbers of the right references, with probability `right_citation`. Else the
        list is wrong: all references, the right ones and a wrong one, or one of two right ones.
        """
        if self.happens(self.tiny.right_citation):
            return numbers
        everything = list(range(1, REFERENCES + 1))
        another = self.rng.choice([number for number in everything if number not in numbers])
        wrong = [everything, sorted([*numbers, another])]
        if len(numbers) > 1:
            wrong += [[number] for number in numbers]
        return self.rng.choice(wrong)


def encode_traces(traces: list[Trace], protocol: Protocol, tokenizer) -> list[Example]:
    """Returns the traces as token ids and masks. As in a rollout, no token spans two pieces. The
    backend is used because it encodes a short text faster than the tokenizer itself. A chat
    template takes long to render, so, unless the prompt has references, it is rendered only for
    "@", and "@" is then replaced.
    """
    backend = tokenizer.backend_tokenizer

    @cache
    def frame(may_search: bool) -> str:
        return prompt_text(protocol, Question("", "@", [], may_search=may_search), tokenizer)

    examples = []
    for question, pieces in traces:
        if question.references:
            prompt = prompt_text(protocol, question, tokenizer)
        else:
            prompt = frame(question.may_search).replace("@", question.question)
        ids, mask = [], []
        for text, learned in [(prompt, False), *pieces]:
            piece = backend.encode(text, add_special_tokens=False).ids
            ids += piece
            mask += [int(learned)] * len(piece)
        examples.append(Example(ids, mask))
    return examples


def warm_up(policy, tokenizer, protocol: Protocol, tiny: Tiny, world_seed: int = 0) -> list[float]:
    """Trains the tiny model on `tiny.steps` batches of new traces; returns the losses."""
    writer = TraceWriter(protocol, tiny, world_seed)

    def next_examples(_step: int) -> list[Example]:
        return encode_traces([writer.write() for _ in range(tiny.batch_size)], protocol, tokenizer)

    settings = SFTSettings(
        tiny.steps, tiny.lr, tiny.warmup_steps, tiny.decay_from, muon_lr=tiny.muon_lr
    )
    return train_sft(policy, next_examples, settings, f"warm-up ({protocol.name})")


# ------------------------------------------------------------------- the frozen reader of evidence
NOTE = "warm_up.txt"  # this file in a model's folder holds the recipe of its training
READER = SFTSettings(steps=300, lr=4e-3, warmup_steps=50, decay_from=0.5)


def reader_example(tasks: Tasks, tokenizer) -> Example:
    """Returns an example: evidence and question, then the value that the evidence states for the
    relation asked for, whatever the entity ("none" if it states no value).
    """
    task = tasks.look_up()
    shown = [hop.found for hop in task.hops]
    if tasks.rng.random() < 0.3:
        shown[-1] = tasks.other_passage()
    if tasks.rng.random() < 0.5:  # as a search shows it: with the entity's other fact
        shown[-1:] = tasks.with_neighbour(shown[-1])
    lines = [passage.text for passage in shown]
    stated = dict(line.partition(" of ")[0].split(" ", 1) for line in lines)
    asked = reader_text(Question("", task.question, []), " ".join(lines))
    prompt = prompt_ids(tokenizer, (READER_INSTRUCTION, asked))
    return example_of(prompt, [(f" {stated.get(task.relation, 'none')}", True)], tokenizer)


def load_toy(
    world_seed: int, protocol: Protocol, tiny: Tiny, runs: str = "runs", which: str = ""
) -> Loaded:
    """Returns the warmed-up tiny model and its tokenizer; the first use trains and saves them.
    `which` names the warm-up ("": the usual one).
    """

    def make() -> Loaded:
        tokenizer = make_tokenizer(protocol)
        policy = Policy(make_model(len(tokenizer), world_seed, tiny.width, tiny.context))
        warm_up(policy, tokenizer, protocol, tiny, world_seed)
        return policy, tokenizer

    name = "-".join(filter(None, (protocol.name, which, f"world{world_seed}")))
    return made_once(Path(runs, "toy", name), tiny, make)


def load_reader(world_seed: int = 0, runs: str = "runs") -> Loaded:
    """Returns the frozen second model, a Llama of 0.26M parameters that answers from evidence, and
    its tokenizer; the first use trains and saves them, in a world with one passage per fact.
    """
    seed = 1_000 + world_seed

    def make() -> Loaded:
        tokenizer = make_tokenizer()
        config = LlamaConfig(**shape(len(tokenizer), 96, 6, 256), attention_bias=True)
        reader = Policy(born(config, seed))
        tasks = Tasks(World(world_seed, layout="facts"), seed)
        train_sft(
            reader,
            lambda _step: [reader_example(tasks, tokenizer) for _ in range(64)],
            READER,
            "the reader of evidence",
        )
        return reader, tokenizer

    path = Path(runs, "toy", f"reader-world{world_seed}")
    reader, tokenizer = made_once(path, READER, make)
    return reader.eval().requires_grad_(False), tokenizer


def made_once(path: Path, recipe: object, make: Callable[[], Loaded]) -> Loaded:
    """Returns the model in the folder `path`. If it is missing, or made by another `recipe`, it is
    made first, while other processes that need it wait.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    note = path / NOTE
    with open(path.with_name(f".{path.name}.lock"), "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not note.is_file() or note.read_text(encoding="utf-8") != f"{recipe}\n":
            print(f"making the built-in model {path.name} (kept in {path})", file=sys.stderr)
            shutil.rmtree(path, ignore_errors=True)
            save_policy(*make(), path)
            note.write_text(f"{recipe}\n", encoding="utf-8")
    return load_policy(str(path))
