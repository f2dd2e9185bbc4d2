"""Chooses the questions of each step, and which of them may search (UR² section 3.3, app. C.2).

A stream gives the steps fixed shares of questions per kind (`mix`), per difficulty (`buckets`) or
per both. The questions of one share (a pool) come in a shuffled order, epoch after epoch. The
questions of step s depend only on s and the seed, so a resumed run sees the same questions as an
uninterrupted one.

Difficulty is measured once, before training, as the mean score of K rollouts of the model (UR²: K =
20; `python -m lab.difficulty`), or is given by the data. In a step of UR², hard : medium : easy is
then 1 : 1 : 1 in math (C.5) and 7 : 2 : 1 in the other tasks. In `buckets`, the name of a task or
kind with its own shares comes before a colon:
{"math:hard": 1, "math:medium": 1, "math:easy": 1, "hard": 7, "medium": 2, "easy": 1}.

By UR²'s rule, the hardest questions, with a score below 0.2, are in the bucket "dropped". They are
asked only if `buckets` names them, because a question whose rollouts all fail teaches nothing.
UR²'s stage 1 trains on the dropped math questions ("math:dropped=1", C.7).
Left out: measuring difficulty again while training.
"""

import functools
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from data import Question, load_difficulty
from errors import InputError, run_main, say_once

Questions = list[Question]
Weights = dict[str, float]  # name of a kind, bucket or pool -> weight
Counts = dict[str, int]


# -------------------------------------------------------------------------------------- difficulty
EDGES = {"easy": 0.8, "medium": 0.5, "hard": 0.2}  # lowest mean score of each bucket
# `level` in UR²'s data files -> bucket
LEVELS = {"easy": "easy", "medium": "medium", "hard": "hard", "very_hard": "dropped"}
HARDEST_FIRST = {"medium": 1, "easy": 2}  # ranks; hard, dropped or not measured: 0


def bucket(score: float) -> str:
    """Returns the bucket of a mean score (UR² section 3.3).

    >>> bucket(0.8), bucket(0.79), bucket(0.5), bucket(0.2), bucket(0.19)
    ('easy', 'medium', 'medium', 'hard', 'dropped')
    """
    score = round(score, 9)  # 0.1 added eight times is 0.7999999999999999: counts as 0.8
    for name, edge in EDGES.items():
        if score >= edge:
            return name
    return "dropped"


def bucket_of_mean(scores: Sequence[float]) -> str:
    return bucket(sum(scores) / len(scores))


def read_difficulty(path: str | Path, questions: Questions) -> dict[str, str]:
    """Returns {id: bucket} from the file `path`; if `path` is "level", from `level` in the data."""
    if str(path) == "level":
        buckets = {q.id: LEVELS[q.level] for q in questions if q.level in LEVELS}
    else:
        buckets = {
            record["id"]: record.get("bucket") or bucket_of_mean(record["scores"])
            for record in load_difficulty(path)
        }
    missing = [question.id for question in questions if question.id not in buckets]
    if missing:
        raise InputError(
            f"--difficulty {path}: {len(missing)} questions have no difficulty, the first is "
            f"{missing[0]}: measure all questions with lab.difficulty"
        )
    return buckets


def with_buckets(questions: Questions, path: str, dropped: bool) -> Questions:
    """Returns copies of the questions, each with its bucket as `level`. Questions in the bucket
    "dropped" are left out unless `dropped` is True.
    """
    buckets = read_difficulty(path, questions)
    measured = [replace(question, level=buckets[question.id]) for question in questions]
    remaining = [question for question in measured if dropped or question.level != "dropped"]
    if not remaining:
        raise InputError(
            '--difficulty: every question is in the bucket "dropped": ask easier questions'
        )
    if left_out := len(measured) - len(remaining):
        say_once(
            f'curriculum: {left_out} of {len(measured)} questions are in the bucket "dropped" and '
            "are left out"
        )
    return remaining


# ------------------------------------------------------------------------------------------ shares
def exact_counts(total: int, weights: Weights, dealt: Counts | None = None) -> Counts:
    """Returns integers that add up to `total` in the ratio of the weights. Questions are dealt one
    by one, each to the name with the lowest (count + ½) / weight.
    With `dealt`, `total` more are dealt after these counts: what one call rounds down, a later one
    makes up for.

    >>> exact_counts(16, {"a": 3, "b": 4, "c": 1})
    {'a': 6, 'b': 8, 'c': 2}
    >>> exact_counts(2, {"a": 2, "b": 1}), exact_counts(2, {"a": 2, "b": 1}, {"a": 1, "b": 1})
    ({'a': 1, 'b': 1}, {'a': 3, 'b': 1})
    """
    counts = dict(dealt or dict.fromkeys(weights, 0))
    for _ in range(total if weights else 0):
        counts[min(counts, key=lambda name: (counts[name] + 0.5) / max(weights[name], 1e-99))] += 1
    return counts


def share_out(questions: Questions, mix: Weights, buckets: Weights) -> tuple[dict, Weights]:
    """Returns the questions and the weight of each pool, such as "one_hop", "hard" or "math:hard".

    Questions are put into groups, and a group's weight is split in the ratio of its shares of
    buckets. With `mix`, the kinds that it names are the groups, and it gives their weights. Without
    `mix`, each task or kind that has its own shares of buckets is a group, all other questions are
    one more group, and a group's weight is its number of questions. Worked, without `mix`: 30
    questions of math, 60 others, and the shares of buckets at the top of this file. Math weighs 30,
    split 1 : 1 : 1, so math:hard, math:medium and math:easy weigh 10 each. The others weigh 60,
    split 7 : 2 : 1: hard 42, medium 12, easy 6.
    "hotpotqa" in `mix` or `buckets` means hotpotqa_bridge and hotpotqa_comparison together.
    """
    scopes = defaultdict(dict)  # kind, family, task or "" (all others) -> bucket -> share
    for name, share in (buckets or {"": 1.0}).items():
        scope, _, level = name.rpartition(":")
        scopes[scope][level] = share
    pools = defaultdict(list)
    sizes = Counter()  # group (kind, family, task or "") -> number of its questions
    splits = {kind: {"": 1.0} for kind in mix}  # group -> bucket -> share
    for question in questions:
        kind = question.kind
        group = scope = first_in(scopes, [kind, family(kind), question.task, ""])
        if mix:
            group = first_in(mix, [kind, family(kind), kind])
        sizes[group] += 1
        splits[group] = scopes.get(scope) or splits.get(group, {})
        level = question.level if buckets else ""
        pools[f"{group}:{level}".strip(":")].append(question)
    weights = {}
    for group, split in splits.items():
        group_weight = (mix or sizes).get(group, 0.0)
        for level, share in split.items():
            part = share / max(sum(split.values()), 1e-9)
            weights[f"{group}:{level}".strip(":")] = group_weight * part
    return pools, weights


def first_in(known: dict, names: list[str]) -> str:
    """Returns the first of the names that is known, or the last one."""
    return next((name for name in names if name in known), names[-1])


def family(kind: str) -> str:
    """Returns the part of a kind before "_": "hotpotqa_bridge" is of the family "hotpotqa". A share
    of a family holds for all of its kinds together.
    """
    return kind.partition("_")[0]


def check_pools(pools: dict[str, Questions], shares: Weights, counts: Counts, flag: str) -> None:
    """Raises an InputError if no share above 0 names a part of the data, or if a pool with a share
    above 0 is empty. With buckets, it also raises one if a step would take no question of such a
    pool, or more questions than the pool has.
    """
    available = ", ".join(pools)
    if not any(shares.values()):
        raise InputError(
            f"{flag}: none of the recipe's shares above 0 names a part of the data (there are "
            f"{available})"
        )
    for name, weight in shares.items():
        count = counts[name]
        size = len(pools.get(name, ()))
        fits = size if flag == "--mix" else 0 < count <= size
        if weight and not fits:
            raise InputError(
                f"{flag}: a step takes {count} questions of {name}, and the data has {size} (there "
                f"are {available}): correct {flag} or leave it out; if the data has some, another "
                "--questions_per_step may help too"
            )


# ------------------------------------------------------------------------------------- task mixing
def may_search(question: Question, drawn: frozenset[str], of_math: Weights, seed: int = 0) -> bool:
    """Returns whether task mixing lets a question search. A multiple-choice question may search if
    its id is in `drawn`. Of the math questions, a share of each bucket may, chosen at random;
    `of_math` gives the shares: {"hard": 1} means all hard ones and no others. Questions of other
    tasks always may.

    For Llama, UR² replaced hard math questions by easy ones (appendix C.5), so two thirds of the
    math questions are easy. There {"easy": 0.5} lets half of the easy questions search: as many as
    the hard questions that were replaced.
    """
    if question.task == "math":
        return lot_of(question, seed) < of_math.get(question.level, 0)
    return question.task != "choice" or question.id in drawn


def lot_of(question: Question, seed: int) -> float:
    """Returns a random number in [0, 1), which depends only on the question's id and the seed."""
    return random.Random(f"{seed} search {question.id}").random()


def draw_choices(pools: dict[str, Questions], counts: Counts, seed: int) -> frozenset[str]:
    """Returns the ids of the multiple-choice questions that may search. On average, about half of
    the multiple-choice questions that a step asks are among them. Harder questions are chosen
    first; among equally hard ones `lot_of` decides.

    Worked: a step asks 8 of 20 hard and 2 of 10 easy questions, 10 together, so 5 may search. A
    hard question is asked 8/20 times per step. So 5 / (8/20) = 12.5, rounded to 13, of the 20 hard
    questions may search, and no easy one.
    """
    # For each multiple-choice question: rank of its difficulty, lot, how often a step asks it, id.
    dealt = []
    for name, pool in pools.items():
        rate = counts.get(name, 0) / len(pool)
        for question in pool:
            if question.task == "choice":
                hard = HARDEST_FIRST.get(question.level, 0)
                dealt.append((hard, lot_of(question, seed), rate, question.id))
    drawn = set()
    left = sum(rate for _, _, rate, _ in dealt) / 2
    for _, _, rate, name in sorted(dealt):
        if left + 1e-9 >= rate / 2:
            drawn.add(name)
        left -= rate
    return frozenset(drawn)


def mix_tasks(pools: dict[str, Questions], counts: Counts, settings) -> None:
    """Decides by --task_mixing which questions in the pools may search; sets `may_search`."""
    drawn = draw_choices(pools, counts, settings.seed)
    for pool in pools.values():
        for place, q in enumerate(pool):
            allowed = may_search(q, drawn, settings.math_searches, settings.seed)
            pool[place] = replace(q, may_search=q.may_search and allowed)


# -------------------------------------------------------------------------------------- the stream
class QuestionStream:
    """Holds the pools; `take` returns the questions of one draw, mixed by kind, bucket or both.

    attempts   largest number of draws in a step. Only DAPO makes more than one: it draws more
               questions in place of groups that teach nothing. Draw number a of step s is the
               draw n = s · attempts + a, which does not depend on how many draws earlier steps made
    totals     totals[n]: how many questions of each pool the draws before draw n take. Draw n takes
               the questions with the numbers totals[n] ... totals[n + 1] − 1 in the endless list of
               the pool's epochs

    A draw rarely has a whole number of questions of each pool. The remainders are spread over the
    draws: if the shares are in the ratio of the sizes of the pools, each question of the data is
    asked once before any is asked again. In R1-Searcher's stage 2 a step has 20, 16, 8, 20 of the
    four pools or one more or less, and the first 8,148 questions are the 8,148 of Table 1.
    """

    def __init__(self, questions: Questions, settings, attempts: int = 1):
        mix, buckets = settings.mix, settings.buckets
        if not questions:
            raise InputError("there are no questions to train on")
        math_mixed = settings.task_mixing and any(q.task == "math" for q in questions)
        if math_mixed and not settings.difficulty:
            raise InputError(
                "--task_mixing of math questions goes by difficulty: give --difficulty FILE, or "
                "--task_mixing false, which restricts no question"
            )
        if settings.difficulty:
            dropped = any(name.endswith("dropped") for name in buckets)
            questions = with_buckets(questions, settings.difficulty, dropped)
        self.pools, self.shares = share_out(questions, mix, buckets)
        self.size = settings.questions_per_step
        self.counts = exact_counts(self.size, self.shares)  # of the first draw
        check_pools(self.pools, self.shares, self.counts, "--difficulty" if buckets else "--mix")
        self.totals = [dict.fromkeys(self.shares, 0), self.counts]
        if settings.task_mixing:
            mix_tasks(self.pools, self.counts, settings)
        self.seed = settings.seed
        self.attempts = attempts

    def take(self, step: int, attempt: int = 0) -> Questions:
        """Returns the questions of one draw of a step."""
        turn = step * self.attempts + attempt
        while len(self.totals) < turn + 2:
            self.totals.append(exact_counts(self.size, self.shares, self.totals[-1]))
        dealt = []
        for name, start in self.totals[turn].items():
            for number in range(start, self.totals[turn + 1][name]):
                pool = self.pools[name]
                epoch, place = divmod(number, len(pool))
                order = shuffled(len(pool), f"{self.seed} {name} {epoch}")
                dealt.append(pool[order[place]])
        return dealt


@functools.lru_cache(maxsize=64)
def shuffled(size: int, lot: str) -> list[int]:
    return random.Random(lot).sample(range(size), size)


def main() -> None:
    """Prints the buckets of a few mean scores, and how a step's 64 questions split into buckets."""
    print("mean score of 20 rollouts -> bucket; may a math question in this bucket search?")
    for score in (0.95, 0.8, 0.75, 0.5, 0.45, 0.35, 0.1):
        question = Question("q", "?", ["!"], "math", level=bucket(score))
        allowed = may_search(question, frozenset(), {"hard": 1, "dropped": 1})
        print(f"  {score:.2f}   {question.level:10} {'yes' if allowed else 'no: asked directly'}")
    print("\n64 questions at 7 : 2 : 1  ", exact_counts(64, {"hard": 7, "medium": 2, "easy": 1}))


if __name__ == "__main__":
    run_main(main)
