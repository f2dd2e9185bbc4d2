"""Rewards of all of a step's trajectories at once, and the scores of an answer.

Another model is asked in one batch; it is loaded, or its server probed, before the first rollout.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import compress

from data import Document, Question
from errors import InputError
from metrics import normalize_answer, score_answer, tokenize
from other_models.judge import Judge, math_grader, verdicts_on
from other_models.llm import LLM, LocalLLM, load_llm
from other_models.reader import add_reader, reader_answers
from papers import paper_of
from plumbing.files import prompt_sections
from prompts import PROTOCOLS, find_answers, find_blocks, number_documents
from retrievers.dense import Encoder
from rewards import REWARDS, Extras, is_right, needs, tfidf_embedder
from rollout import encode
from settings import Settings, asked_of_others
from trajectory import Search, Segment, Trajectory
from world.toy import load_reader


def mean(values: Iterable[float]) -> float:
    """0 of nothing."""
    values = list(values)
    return sum(values) / max(1, len(values))


def numbers_of(t: Trajectory) -> dict[str, float]:
    """How one trajectory searched, wrote and ended. It repeats itself (`repetition`) if most of its
    own 4-grams stood in it before.
    """
    text, own = t.model_text, list(compress(t.response_ids, t.response_mask))
    blocks = find_answers(t.protocol, text, t.question.task)
    blocks += find_blocks(text, *t.protocol.query_tags) if t.protocol.query_tags else []
    words = len(text.split()) - sum(len(text[b.start : b.end].split()) for b in blocks)
    grams = list(zip(own, own[1:], own[2:], own[3:], strict=False))
    counts = [(t.opened + text).count(tag) for tag in t.protocol.tags]  # begin, end, begin, ...
    written = {
        "model_tokens": len(own),
        "tokens": len(t.response_mask),
        "thinking_words": max(0, words),
        "repetition": 2 * len(set(grams)) < len(grams),
        "malformed_tags": counts[::2] != counts[1::2],
    }
    return {
        **answer_scores(t),
        **search_numbers(t),
        "answered": t.answer is not None,
        "cut_off": t.stop_reason in ("length", "refused"),
        **written,
    }


def answer_scores(trajectory: Trajectory) -> dict[str, float]:
    """em, f1 and cem of the final answer, punctuation as the paper's own scorer has it."""
    answer, q = trajectory.answer, trajectory.question
    punctuation = paper_of(trajectory.protocol.name).punctuation
    return score_answer(answer, q.answers, q.task, q.options, punctuation)


def search_numbers(t: Trajectory) -> dict[str, float]:
    """`queries` that it wrote, also `refused` ones; `searches` that were run (UR² Table 10);
    `failed_rows`: did one of them fail?
    """
    tags, asked = t.protocol.query_tags, [tokenize(search.query) for search in t.searches]
    repeated = sum(words in asked[:number] for number, words in enumerate(asked))
    numbers = {
        "searched": bool(asked),
        "searches": len(asked),
        "successful": len(successful(t)),
        "repeated": repeated,
        "queries": t.model_text.count(tags[1]) if tags else 0,
        "refused": len(t.refusals),
        "failed_rows": t.failed,
    }
    return {name: float(number) for name, number in numbers.items()}


def successful(t: Trajectory) -> list[Search]:
    nothing = ("", t.protocol.empty_text)
    return [s for s in t.searches if not (s.error or s.fallback or s.text in nothing)]


def step_searches(trajectories: Sequence[Trajectory], processes: int) -> dict[str, float]:
    """Of all searches of a step, which so many processes made at once."""
    searches = [search for t in trajectories for search in t.searches]
    known, seconds = [len(documents_of(t)) for t in trajectories], [s.seconds for s in searches]
    found = sum(len(search.documents) for search in searches)
    shares = {
        "fallbacks": mean(search.fallback for search in searches),
        "search_errors": mean(search.error is not None for search in searches),
        "documents_cut": mean(search.cut for search in searches),
    }
    return {
        **shares,
        "documents_seen": (found - sum(known)) / max(1, found),
        "slowest_search_seconds": max(seconds, default=0.0),
        "search_seconds": sum(seconds) / processes,
        **gold_recall(trajectories),
    }


def documents_of(t: Trajectory) -> set[Document]:
    return {document for search in t.searches for document in search.documents}


def gold_recall(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Of open questions that were searched for: to which share does a passage hold an answer?"""
    found: dict[tuple[str, ...], set[Document]] = defaultdict(set)  # (id, gold, ...) -> passages
    for t in trajectories:
        golds = {f" {normalize_answer(gold)} " for gold in t.question.answers} - {" yes ", " no "}
        if golds and t.searches and t.question.task == "qa":
            found[t.question.id, *sorted(golds)] |= documents_of(t)
    held = []
    for (_, *golds), documents in found.items():
        texts = [f" {normalize_answer(f'{d.title} {d.text}')} " for d in documents]
        held.append(any(gold in text for text in texts for gold in golds))
    return {"gold_recall": mean(held)} if held else {}


def token_numbers(t: Trajectory, tokenizer) -> dict[str, float]:
    """Tokens that it wrote; of its successful searches those of the documents, those that it read
    in their place, and the mean of the ratios: of 10 to 5 and 90 to 10 (2 + 9) / 2 = 5.5. The ratio
    of their means is 100 / 15 = 6.67 (UR² appendix B.6: 11,346 / 761 = 14.91).

    Where its thinking was cut off: `thinking` counts its tokens, which are among those written, and
    `unfinished` the thoughts without an end. <think>a b</think> <think>c: one of two.
    """
    numbers, ratios = {"written": float(sum(t.response_mask))}, []
    if thoughts := "".join(s.text for s in t.segments if s.writer == "thought"):
        unfinished = ["</think>" not in thought for thought in thoughts.split("<think>")[1:]]
        numbers["thinking"] = float(len(encode(tokenizer, thoughts)))
        numbers["unfinished"] = float(sum(unfinished))
    if t.protocol.query_tags:
        numbers |= {"retrieved": 0.0, "shown": 0.0}
    for search in successful(t):
        found = len(encode(tokenizer, "\n".join(number_documents(search.documents))))
        shown = len(encode(tokenizer, search.text))
        numbers["retrieved"] += found
        numbers["shown"] += shown
        ratios.append(found / shown)
    return numbers | ({"compression": sum(ratios) / len(ratios)} if ratios else {})


def split_thought(text: str, inside: bool = False) -> tuple[str, str, bool]:
    """Splits the thinking off a turn: (thoughts, the rest, does a thought go on behind it?).

    inside   whether the turn begins in a thought: before it, the thought had no end
    >>> split_thought("<think>Kelmouth?</think> Norland")
    ('<think>Kelmouth?</think>', ' Norland', False)
    """
    thought, end, text = text.rpartition("</think>")
    if inside and not end:
        return text, "", True
    text, begin, unfinished = text.partition("<think>")
    return thought + end + begin + unfinished, text, bool(begin)


def without_thinking(t: Trajectory) -> Trajectory:
    """Marks what the model thought in <think> ... </think> as no text of its own, so that neither
    format nor answer is looked for in it (ARENA 4.3, note 2: thinking is implicit).
    """
    inside, before = False, [Segment("model", t.opened), *t.segments]
    t.segments, t.opened = [], ""
    for segment in before:
        if segment.writer == "model":
            thought, text, inside = split_thought(segment.text, inside)
            t.segments += [Segment("thought", thought), Segment("model", text)]
        else:
            t.segments.append(segment)
    return t


class Scorer:
    def __init__(self, settings: Settings, documents: list[Document], device):
        self.settings, needed = settings, asked_of_others(settings)
        self.judge: Judge | None = build_judge(settings, device)
        self.asks = "verdict" in needed
        self.reader = build_reader(settings, device) if "reader" in needed else None
        self.embed, self.learns = None, False  # queries -> vectors, for When to Search's similarity
        if "embedder" in needed:
            tfidf, where = settings.embedder == "tfidf", str(device)
            self.embed = tfidf_embedder(documents) if tfidf else Encoder(settings.embedder, where)
            self.learns = tfidf and not documents  # over http: from the words of each step

    def __call__(self, trajectories: list[Trajectory], step: int) -> tuple[list[dict], list[bool]]:
        """(components of each reward, whether each answer is right)."""
        verdicts = verdicts_on(trajectories, self.judge if self.asks else None)
        correct = [is_right(t, said) for t, said in zip(trajectories, verdicts, strict=True)]
        read = [""] * len(trajectories)
        if self.reader:  # evidence without a search was made up: nobody is asked about it
            pairs = [(t.question, t.evidence if t.executed else None) for t in trajectories]
            read = reader_answers(self.reader, pairs, self.settings.whole_reply)
        graded = self.judge and "grade" in needs(self.settings)
        grade = math_grader(trajectories, self.judge) if graded else None
        reward, components = REWARDS[self.settings.reward], []
        if self.learns:  # a word that stands in none of these was invented
            texts = {t.question.question for t in trajectories}
            texts |= {search.text for t in trajectories for search in t.searches}
            self.embed = tfidf_embedder([Document("", "", text) for text in texts])
        for t, said, answer in zip(trajectories, verdicts, read, strict=True):
            extras = Extras(said, answer, self.embed, grade)
            components.append(reward(t, self.settings, step, extras))
        return components, correct

    def stats(self) -> dict[str, float]:
        stats = {}
        if self.judge:
            stats["judge_unreadable"] = self.judge.unreadable / max(1, self.judge.asked)
        if self.reader:
            stats["reader_failures"] = self.reader.failures
        return stats


def load_other(settings: Settings, name: str, device="cpu") -> LLM:
    """The model of --judge or --reader, told what --prompt_file has for it."""
    instruction = prompt_sections(settings).get(name, "")  # before a model is loaded
    llm = load_llm(getattr(settings, name), settings, device=device)
    llm.instruction = instruction
    return llm


def build_judge(settings: Settings, device="cpu", sees: str = "") -> Judge | None:
    """sees: what the judge sees of a question, one of JUDGE_SEES; "" is the protocol's choice."""
    sees = sees or PROTOCOLS[settings.protocol].judge_sees
    return Judge(load_other(settings, "judge", device), sees) if settings.judge else None


def build_reader(settings: Settings, device="cpu") -> LLM:
    """R-Search's frozen reader: --reader, or the built-in world's second tiny model."""
    if settings.reader and settings.reader != "built-in":
        return load_other(settings, "reader", device)
    if settings.data:
        how = "give --reader http://host:port/v1#model or a HF model, or --variant without_evidence"
        raise InputError(f"--data: the built-in reader of evidence knows only its own world: {how}")
    policy, tokenizer = load_reader(settings.world_seed, settings.output_dir)
    name = f"reader-world{settings.world_seed}"
    return LocalLLM(policy.to(device), tokenizer, max_tokens=8, batch_size=256, name=name)


def ask_others(records: list[dict], reader: LLM | None, judge: Judge | None, how=()) -> list[dict]:
    """Adds what the reader, sampling by `how`, and the judge say."""
    if reader:
        records = add_reader(records, reader, how)
        if reader.failures:
            print(f"reader: no answer to {reader.failures} of its requests; they count as wrong")
    if judge:
        records = add_verdicts(records, judge)
        if judge.silent:
            print(f"judge: {judge.silent} got no reply at all: the same command asks again")
    return records


PARTLY = 0.5  # UR² does not say: its Table 1 has odd tenths of per cents, of 500 questions


def add_verdicts(records: list[dict], judge: Judge) -> list[dict]:
    """The column `judged`: 1 or 0, of mathematics also ½ (UR² appendix D.1); None: unreadable."""
    pairs, told, said = [], [], {}
    for r in records:
        options = tuple(r.get("options", ()))
        question = Question(r["id"], r["question"], r["golds"], r.get("task", "qa"), options)
        pairs.append((question, r["prediction"]))
    for math, ask in ((True, judge.grades), (False, judge.verdicts)):
        own = [i for i, (question, _) in enumerate(pairs) if (question.task == "math") == math]
        said |= zip(own, ask([pairs[i] for i in own]), strict=True)
    for i, record in enumerate(records):
        judged = said[i]
        if judged is None and judge.silent:  # what the record says already is kept
            judged = record["metrics"].get("judged")
        elif judged is not None:  # `grades` says 1 for partly, and 2 for right
            judged = PARTLY if judged == 1 and pairs[i][0].task == "math" else float(judged > 0)
        numbers = record["metrics"] | {"judged": judged}
        told.append(record | {"metrics": numbers, "judge_sees": judge.sees})
    return told
