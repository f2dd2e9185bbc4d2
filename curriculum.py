"""Which questions come next, and which of them may search (UR² section 3.3, appendix C.2).

A stream deals questions in fixed shares per kind (`mix`) or per difficulty (`buckets`), each in its
own shuffled order, epoch after epoch. What step s of seed S deals depends on nothing else, so a
resumed run sees what the unbroken one would have seen.

    counts_k = largest remainder of n · weight_k / Σ weights     16 at 3 : 4 : 1 -> 6, 8, 2

Difficulty is measured once, with the model as it is before training: s = mean score of K rollouts
(UR²: K = 20; `python -m lab.difficulty`).

    easy 0.8 ≤ s ≤ 1    medium 0.5 ≤ s < 0.8    hard 0.2 ≤ s < 0.5    dropped below

A step then holds hard : medium : easy = 7 : 2 : 1. Dropped questions are dealt only where `buckets`
names them, since groups that fail as a whole teach nothing; UR²'s stage 1 for math trains on
exactly those ("dropped=1").
Task mixing: open questions may always search, math only if hard, of multiple choice as many hard
ones as make half of what is dealt, drawn by seed and question id.
Left out: buckets that are measured again while training.
"""

import math
import os
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data import Question, load_difficulty
from errors import InputError, run_main, setting

Questions = list[Question]
Weights = dict[str, float]  # of kinds or buckets, by name
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
    for name, edge in EDGES.items():
        if score >= edge:
            return name
    return "dropped"


def bucket_of_mean(scores: Sequence[float]) -> str:
    return bucket(sum(scores) / len(scores))


def read_difficulty(path: str | Path, questions: Questions) -> dict[str, str]:
    """id -> bucket, from a difficulty file; "level" takes the level that the records bring."""
    known = {}
    if str(path) == "level":
        for question in questions:
            if question.level in LEVELS:
                known[question.id] = LEVELS[question.level]
    elif not Path(path).exists():
        raise InputError(
            f"--difficulty {path}: no such file: `python -m lab.difficulty --out {path}` makes it"
        )
    else:
        for record in load_difficulty(path):
            name = record.get("bucket")
            known[record["id"]] = name or bucket_of_mean(record["scores"])
    missing = [question.id for question in questions if question.id not in known]
    if missing:
        raise InputError(
            f"--difficulty {path}: {len(missing)} questions have none, the first is {missing[0]}: "
            "measure the same --data to its end"
        )
    return known


def with_buckets(questions: Questions, path: str, dropped: bool) -> Questions:
    """Each with its bucket as `level`; without those in the bucket dropped, unless `dropped`."""
    difficulty = read_difficulty(path, questions)
    found = [replace(question, level=difficulty[question.id]) for question in questions]
    kept = [question for question in found if dropped or question.level != "dropped"]
    if not kept:
        raise InputError(
            "--difficulty: every question is in the bucket dropped: train on them with "
            "--buckets dropped=1"
        )
    if left := len(found) - len(kept):
        say(f"{left} of {len(found)} questions are in the bucket dropped and left out")
    return kept


def say(note: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # one process speaks for all
        print(f"curriculum: {note}", file=sys.stderr)


# ------------------------------------------------------------------------------------------ shares
def exact_counts(total: int, weights: Weights) -> Counts:
    """Integers that add up to `total` in the ratio of the weights (largest remainder first).

    >>> exact_counts(16, {"a": 3, "b": 4, "c": 1})
    {'a': 6, 'b': 8, 'c': 2}
    """
    shares, counts, whole = {}, {}, sum(weights.values())
    for name, weight in weights.items():
        shares[name] = total * weight / whole
        counts[name] = int(shares[name])
    by_remainder = sorted(shares, key=lambda name: counts[name] - shares[name])
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


def parse_shares(text: str, flag: str) -> Weights:
    """ "one_hop=3,two_hop=4" -> {"one_hop": 3.0, "two_hop": 4.0}"""
    weights = {}
    for part in filter(str.strip, text.split(",")):
        name, _, weight = part.partition("=")
        try:
            weights[name.strip()] = float(weight)
        except ValueError:
            raise InputError(f"{flag} {text!r}: write it as name=weight,name=weight") from None
    values = weights.values()
    if weights and not (min(values) >= 0 and 0 < sum(values) < math.inf):
        raise InputError(f"{flag} {text!r}: weights are numbers from 0 on, one of them above 0")
    return weights


def check_pools(pools: dict[str, Questions], shares: Weights, counts: Counts, flag: str) -> None:
    """Each kind must be there; of a bucket a step takes one question or more, and none twice."""
    known = ", ".join(pools)
    for name, weight in shares.items():
        count = counts[name]
        size = len(pools.get(name, ()))
        fits = size if flag == "--mix" else 0 < count <= size
        if weight and not fits:
            raise InputError(
                f"{flag}: a step takes {count} questions of {name}, and the data has {size} (there "
                f"are {known}): change the shares or --questions_per_step"
            )


# ------------------------------------------------------------------------------------- task mixing
def may_search(question: Question, drawn: frozenset[str]) -> bool:
    """Open questions always; math in the bucket hard (or harder); multiple choice if drawn. The
    question's bucket is its `level`.
    """
    if question.task == "math":
        return question.level in HARD
    return question.task != "choice" or question.id in drawn


def share_of_hard_choices(questions: Questions, counts: Counts) -> float:
    """The share of the hard multiple-choice questions that must search for half of all to do so.

    counts: of each bucket in a step; {}: all questions are dealt alike. With D multiple-choice
    questions a step, H of them hard, the share is D / 2H; above 1 too few are hard.
    """
    sizes, choices = Counter(), Counter()
    for question in questions:
        sizes[question.level] += 1
        choices[question.level] += question.task == "choice"
    d = h = 0.0
    for name, size in sizes.items():
        per_step = counts.get(name, 0) if counts else size
        dealt = per_step * choices[name] / size
        d += dealt
        h += dealt * (name in HARD)
    return d / 2 / max(h, 1e-9)


def draw_choices(questions: Questions, share: float, seed: int) -> frozenset[str]:
    """Ids of the hard multiple-choice questions that may search: exactly this share, by lot.

    Worked: 20 hard and 10 easy ones, dealt at 8 : 2, so D = 10 and H = 8: the share is 5/8, and
    12.5 of 20, so 13, may search. The lot depends on seed and id, not on the order of reading.
    """

    def lot(name: str) -> float:
        return random.Random(f"{seed} search {name}").random()

    hard = [q.id for q in questions if q.task == "choice" and q.level in HARD]
    count = int(min(1.0, share) * len(hard) + 0.5 + 1e-9)
    return frozenset(sorted(hard, key=lot)[:count])


def mix_tasks(questions: Questions, counts: Counts, seed: int) -> Questions:
    """The same questions, with `may_search` as task mixing has it."""
    share = share_of_hard_choices(questions, counts)
    if share > 1:
        say("multiple choice: too few are hard for half of them to search; all hard ones may")
    drawn = draw_choices(questions, share, seed)
    return [replace(q, may_search=q.may_search and may_search(q, drawn)) for q in questions]


# -------------------------------------------------------------------------------------- the stream
class QuestionStream:
    """`take(step)` deals the questions of one step, mixed by kind or by bucket.

    attempts   how often a step may draw: DAPO draws again for groups that teach nothing. Attempt a
               of step s has the numbers (s · attempts + a) · count + i, whether or not those before
               it were made
    """

    def __init__(self, questions: Questions, settings, attempts: int = 1):
        buckets, mix = settings.buckets, settings.mix
        if not questions:
            raise InputError("there are no questions to train on")
        if mix and buckets:
            raise InputError("--mix and --buckets both share out a step: give one of them")
        if (buckets or settings.task_mixing) and not settings.difficulty:
            raise InputError("--buckets and --task_mixing need --difficulty FILE")
        flag = "--buckets" if buckets else "--mix"
        shares = parse_shares(buckets or mix, flag)
        self.counts = exact_counts(settings.questions_per_step, shares or {"": 1.0})
        if settings.difficulty:
            questions = with_buckets(questions, settings.difficulty, "dropped" in shares)
        if settings.task_mixing:
            questions = mix_tasks(questions, self.counts if buckets else {}, settings.seed)
        self.pools = defaultdict(list)
        for question in questions:
            name = question.level if buckets else question.kind
            self.pools[name if shares else ""].append(question)
        check_pools(self.pools, shares, self.counts, flag)
        self.seed = settings.seed
        self.attempts = attempts
        self.orders = {}  # pool -> (epoch, the order of its questions)

    def take(self, step: int, attempt: int = 0) -> Questions:
        """The questions of one attempt of a step."""
        turn, dealt = step * self.attempts + attempt, []
        for name, count in self.counts.items():
            first = turn * count
            dealt += [self._deal(name, first + i) for i in range(count)]
        return dealt

    def _deal(self, name: str, number: int) -> Question:
        """The question with this number in the endless list of its pool, shuffled every epoch."""
        pool = self.pools[name]
        epoch, place = divmod(number, len(pool))
        if self.orders.get(name, (None,))[0] != epoch:
            size = len(pool)
            lot = random.Random(f"{self.seed} {name} {epoch}")
            self.orders[name] = epoch, lot.sample(range(size), size)
        return pool[self.orders[name][1][place]]


def main() -> None:
    """Buckets of a few questions, and how a step is shared out."""
    print("mean score of 20 rollouts -> bucket; may a math question of it search?")
    scores = [0.95, 0.8, 0.75, 0.5, 0.45, 0.35, 0.1]
    for score in scores:
        question = Question("q", "?", ["!"], "math", level=bucket(score))
        allowed = "yes" if may_search(question, frozenset()) else "no: asked directly"
        print(f"  {score:.2f}   {question.level:10} {allowed}")
    weights = {"hard": 7, "medium": 2, "easy": 1}
    print("\n64 questions at 7 : 2 : 1  ", exact_counts(64, weights))


if __name__ == "__main__":
    run_main(main)
