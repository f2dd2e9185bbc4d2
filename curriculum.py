"""Which questions come next, and which of them may search (UR² section 3.3, appendix C.2).

A stream deals questions in fixed shares per kind (`mix`) or per difficulty (`buckets`), each in its
own shuffled order, epoch after epoch. Step s of seed S always deals the same questions, whatever
happened before: a resumed run sees what the unbroken one would have seen.

    counts_k = largest remainder of n · weight_k / Σ weights     16 at 3 : 4 : 1 -> 6, 8, 2

Difficulty is measured once, with the model as it is before training: s = mean score of K rollouts
(UR²: K = 20; `python -m lab.difficulty`).

    easy 0.8 ≤ s ≤ 1    medium 0.5 ≤ s < 0.8    hard 0.2 ≤ s < 0.5    dropped below

A step then holds hard : medium : easy = 7 : 2 : 1. Of dropped questions all rollouts of a group
fail, so they teach nothing for long. They are dealt only where `buckets` names them: UR²'s stage 1
for math trains on exactly those ("dropped=1").
Task mixing: open questions may always search, math only if hard, of multiple choice as many hard
ones as make half of what is dealt. Which ones depends on the seed and the question's id alone.
Left out: buckets that are measured again while training.
"""

from __future__ import annotations

import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data import BUCKETS, Question, load_difficulty
from errors import InputError, run_main, setting

Questions = list[Question]
Difficulty = dict[str, str]  # question id -> bucket
Weights = dict[str, float]  # name -> share; or question id -> how often a step deals it
Counts = dict[str, int]


@dataclass(frozen=True)
class CurriculumSettings:
    questions_per_step: int = setting(64, "questions per rollout", least=1)
    mix: str = setting(
        "", 'shares of the kinds in every step, "kind=weight,..."; "" = as they come'
    )
    difficulty: str = setting("", 'JSONL of lab.difficulty, or "level": the records\' own levels')
    buckets: str = setting("", 'with --difficulty: shares, as "hard=7,medium=2,easy=1"')
    task_mixing: bool = setting(False, "math searches only if hard, choice by half (--difficulty)")


# -------------------------------------------------------------------------------------- difficulty

EDGES = {"easy": 0.8, "medium": 0.5, "hard": 0.2}  # a bucket begins at this mean score
LEVELS = {"easy": "easy", "medium": "medium", "hard": "hard", "very_hard": "dropped"}  # UR²'s files
HARD = ("hard", "dropped")


def bucket(score: float) -> str:
    """The bucket of a mean score (UR² appendix C.2).

    >>> bucket(0.8), bucket(0.79), bucket(0.5), bucket(0.2), bucket(0.19)
    ('easy', 'medium', 'medium', 'hard', 'dropped')
    """
    score = round(score, 9)  # eight times 0.1 add up to 0.7999999999999999, and that is 0.8
    if not 0 <= score <= 1:
        raise InputError(f"a mean score of {score}: scores must be from 0 to 1")
    return next((name for name, edge in EDGES.items() if score >= edge), "dropped")


def bucket_of_mean(scores: Sequence[float]) -> str:
    return bucket(sum(scores) / len(scores))


def read_difficulty(path: str | Path, questions: Questions) -> Difficulty:
    """id -> bucket, from a difficulty file; "level" takes the level that the records bring."""
    if str(path) == "level":
        known = {q.id: LEVELS[q.level] for q in questions if q.level in LEVELS}
    elif not Path(path).exists():
        raise InputError(
            f"--difficulty {path}: no such file: `python -m lab.difficulty --out {path}` makes it"
        )
    else:
        known = {}
        for record in load_difficulty(path):
            name = record.get("bucket")
            known[record["id"]] = name or bucket_of_mean(record["scores"])
    missing = [question.id for question in questions if question.id not in known]
    if missing:
        count = f"{len(missing)} of {len(questions)} questions"
        raise InputError(
            f"--difficulty {path}: {count} have none, the first is {missing[0]}: measure the same "
            "--data to its end"
        )
    return {question.id: known[question.id] for question in questions}


# ------------------------------------------------------------------------------------------ shares


def exact_counts(total: int, weights: Weights) -> Counts:
    """Integers that add up to `total` in the ratio of the weights (largest remainder first).

    >>> exact_counts(16, {"a": 3, "b": 4, "c": 1})
    {'a': 6, 'b': 8, 'c': 2}
    """
    whole = sum(weights.values())
    shares = {name: total * weight / whole for name, weight in weights.items()}
    counts = {name: int(share) for name, share in shares.items()}
    by_remainder = sorted(shares, key=lambda name: counts[name] - shares[name])
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


def counts_within(total: int, weights: Weights, available: Counts) -> Counts:
    """`exact_counts`, but of no bucket more than it has: it would deal a question twice in a step.
    What a short bucket leaves open goes to the others in their ratio.

    >>> plenty = {"hard": 4, "medium": 90, "easy": 90}
    >>> counts_within(10, {"hard": 7, "medium": 2, "easy": 1}, plenty)  # the other 6 at 2 : 1
    {'hard': 4, 'medium': 4, 'easy': 2}
    """
    counts = dict.fromkeys(weights, 0)
    rest = {name: weight for name, weight in weights.items() if weight}
    while rest:
        asked = exact_counts(total - sum(counts.values()), rest)
        short = [name for name in rest if asked[name] > available.get(name, 0)]
        if not short:
            return counts | asked
        for name in short:
            counts[name] = available.get(name, 0)
            del rest[name]
    named = ", ".join(name for name in weights if weights[name])
    raise InputError(
        f"--buckets: {sum(counts.values())} questions are in {named}, fewer than the {total} of a "
        "step: lower --questions_per_step, or name more buckets"
    )


def parse_shares(text: str, flag: str, known: Sequence[str] = ()) -> Weights:
    """ "one_hop=3,two_hop=4" -> {"one_hop": 3.0, "two_hop": 4.0}"""
    weights = {}
    for part in text.split(","):
        name, _, weight = part.partition("=")
        if part.strip():
            weights[name.strip()] = _weight(weight, f"{flag} {text!r}")
    if weights and not sum(weights.values()):
        raise InputError(f"{flag} {text!r}: one weight must be above 0")
    unknown = [name for name in weights if known and name not in known]
    if unknown:
        names = ", ".join(known)
        raise InputError(f"{flag} {text!r}: nothing is called {unknown[0]}; there are {names}")
    return weights


def _weight(text: str, place: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        raise InputError(f"{place}: write it as name=weight,name=weight") from None
    if not (math.isfinite(weight) and weight >= 0):
        raise InputError(f"{place}: weights must be numbers from 0 on")
    return weight


# ------------------------------------------------------------------------------------- task mixing


def may_search(question: Question, name: str, drawn: frozenset[str]) -> bool:
    """Open questions always; math in the bucket hard (or harder); multiple choice if drawn."""
    if question.task == "math":
        return name in HARD
    return question.task != "choice" or question.id in drawn


def dealt_per_step(questions: Questions, difficulty: Difficulty, counts: Counts) -> Weights:
    """id -> how often a step deals it on average: counts_b / n_b. Without counts all are alike."""
    if not counts:
        return {question.id: 1.0 for question in questions}
    names = [difficulty[question.id] for question in questions]
    sizes = Counter(names)
    shares = [counts.get(name, 0) / sizes[name] for name in names]
    return dict(zip((question.id for question in questions), shares, strict=True))


def share_of_hard_choices(questions: Questions, difficulty: Difficulty, dealt: Weights) -> float:
    """The share of the hard multiple-choice questions that must search for half of all to do so.

    With D multiple-choice questions dealt a step, H of them hard: D / 2H. Above 1 too few are hard.
    """
    d = h = 0.0
    for question in questions:
        if question.task == "choice":
            d += dealt[question.id]
            h += dealt[question.id] * (difficulty[question.id] in HARD)
    return d / 2 / h if h else math.inf


def draw_choices(
    questions: Questions, difficulty: Difficulty, share: float, seed: int
) -> frozenset[str]:
    """Ids of the hard multiple-choice questions that may search: exactly this share, by lot.

    Worked: 20 hard and 10 easy ones, dealt at 8 : 2, so D = 10 and H = 8: the share is 5/8, and
    12.5 of 20, so 13, may search. The lot depends on seed and id, not on the order of reading.
    """
    hard = [q for q in questions if q.task == "choice" and difficulty[q.id] in HARD]

    def lot(question: Question) -> float:
        return random.Random(f"{seed} search {question.id}").random()

    by_lot = sorted(hard, key=lot)
    count = int(min(1.0, share) * len(hard) + 0.5 + 1e-9)
    return frozenset(question.id for question in by_lot[:count])


# -------------------------------------------------------------------------------------- the stream


class QuestionStream:
    """`take(step)` deals the questions of one step, mixed by kind or by bucket.

    attempts   how often a step may draw: DAPO draws again for groups that teach nothing. Attempt a
               of step s has the numbers (s · attempts + a) · count + i, its own in every epoch,
               whether or not those before it were made
    What could not be had as asked is said in `notes`, a line each, and on stderr.
    """

    def __init__(self, questions: Questions, settings, attempts: int = 1):
        if not questions:
            raise InputError("there are no questions to train on")
        buckets, mix = settings.buckets, settings.mix
        if not settings.difficulty and (buckets or settings.task_mixing):
            flag = "buckets" if buckets else "task_mixing"
            raise InputError(f"--{flag} needs --difficulty FILE")
        if mix and buckets:
            raise InputError("--mix and --buckets both share out a step: give one of them")
        self.seed, self.attempts, self.notes = settings.seed, attempts, []
        self.orders: dict[str, tuple[int, list[int]]] = {}  # kind -> (epoch, its order)
        self.pools: dict[str, Questions] = defaultdict(list)
        self.searching: frozenset[str] | None = None  # ids; None: all
        self.shares = parse_shares(mix, "--mix")
        if buckets:
            self.shares = parse_shares(buckets, "--buckets", BUCKETS)
        count, difficulty = settings.questions_per_step, {}
        if settings.difficulty:
            difficulty = read_difficulty(settings.difficulty, questions)
            questions = self._without_dropped(questions, difficulty)
        if buckets:
            self._share_by_bucket(questions, difficulty, count)
        else:
            self._share_by_kind(questions, count)
        if settings.task_mixing:
            self._mix_tasks(questions, difficulty, self.counts if buckets else {})
        for note in self.notes:
            print(f"curriculum: {note}", file=sys.stderr)

    def _share_by_kind(self, questions: Questions, count: int) -> None:
        for question in questions:
            self.pools[question.kind if self.shares else ""].append(question)
        self.counts = exact_counts(count, self.shares or {"": 1.0})
        for kind, weight in self.shares.items():
            if weight and kind not in self.pools:
                kinds = ", ".join(self.pools)
                raise InputError(f"--mix: the data has no question of kind {kind}; it has {kinds}")

    def _without_dropped(self, questions: Questions, difficulty: Difficulty) -> Questions:
        if self.shares.get("dropped"):
            return questions
        kept = [question for question in questions if difficulty[question.id] != "dropped"]
        if len(kept) < len(questions):
            count = f"{len(questions) - len(kept)} of {len(questions)} questions"
            self.notes.append(f"{count} score below {EDGES['hard']} and are left out")
        if not kept:
            raise InputError(
                "--difficulty: every question is in the bucket dropped: train on them with "
                "--buckets dropped=1"
            )
        return kept

    def _share_by_bucket(self, questions: Questions, difficulty: Difficulty, count: int) -> None:
        for question in questions:
            self.pools[difficulty[question.id]].append(question)
        available = {name: len(self.pools.get(name, [])) for name in self.shares}
        self.counts = counts_within(count, self.shares, available)
        for name, asked in exact_counts(count, self.shares).items():
            if available[name] < asked:
                self.notes.append(
                    f"bucket {name} runs short: {available[name]} of the {asked} questions that "
                    "its share of a step asks for; the others fill up in their ratio"
                )
            elif self.shares[name] and not self.counts[name]:
                self.notes.append(
                    f"bucket {name}: its share of {count} questions a step is less than one, so "
                    "none is dealt; raise --questions_per_step"
                )

    def _mix_tasks(self, questions: Questions, difficulty: Difficulty, counts: Counts) -> None:
        dealt = dealt_per_step(questions, difficulty, counts)
        share = share_of_hard_choices(questions, difficulty, dealt)
        drawn = draw_choices(questions, difficulty, share, self.seed)
        allowed = [q.id for q in questions if may_search(q, difficulty[q.id], drawn)]
        self.searching = frozenset(allowed)
        dealt_choices = [q for q in questions if q.task == "choice" and dealt[q.id]]
        if share > 1 and dealt_choices:
            self.notes.append(
                "multiple choice: too few are hard for half of them to search; all hard ones may"
            )

    def take(self, step: int, attempt: int = 0) -> Questions:
        """The questions of one attempt of a step; `may_search` is as task mixing has it."""
        if not 0 <= attempt < self.attempts:  # it would deal another step's questions
            raise InputError(f"attempt {attempt} of a step, but the stream has {self.attempts}")
        turn, dealt = step * self.attempts + attempt, []
        for kind, count in self.counts.items():
            first = turn * count
            dealt += [self._deal(kind, first + i) for i in range(count)]
        if self.searching is None:
            return dealt
        return [replace(q, may_search=q.may_search and q.id in self.searching) for q in dealt]

    def _deal(self, kind: str, number: int) -> Question:
        """The question with this number in the endless list of its kind, shuffled every epoch."""
        pool = self.pools[kind]
        epoch, place = divmod(number, len(pool))
        if self.orders.get(kind, (None,))[0] != epoch:
            lot, size = random.Random(f"{self.seed} {kind} {epoch}"), len(pool)
            self.orders[kind] = epoch, lot.sample(range(size), size)
        return pool[self.orders[kind][1][place]]


def main(arguments: list[str] | None = None) -> None:
    """Buckets of a few questions, and how a step is shared out."""
    if sys.argv[1:] if arguments is None else arguments:
        raise InputError("curriculum.py shows an example; to measure: python -m lab.difficulty")
    print("mean score of 20 rollouts -> bucket; may a math question of it search?")
    scores = [0.95, 0.8, 0.75, 0.5, 0.45, 0.35, 0.1]
    for score in scores:
        name, question = bucket(score), Question("q", "?", ["!"], "math")
        allowed = "yes" if may_search(question, name, frozenset()) else "no: asked directly"
        print(f"  {score:.2f}   {name:10} {allowed}")
    weights = {"hard": 7, "medium": 2, "easy": 1}
    print("\nten questions at 7 : 2 : 1  ", exact_counts(10, weights))
    short = Counter(map(bucket, scores))
    print("five, from those above      ", counts_within(5, weights, short))


if __name__ == "__main__":
    run_main(main)
