"""Chooses the questions of each step, and which of them may search (UR² section 3.3, app. C.2).

A stream gives the steps fixed shares of questions per kind or per kind and difficulty (`mix`), or
per difficulty (`buckets`). The questions of one share (a pool) come in a shuffled order, epoch
after epoch. The questions of step s depend only on s and the seed, so a resumed run sees the same
questions as an uninterrupted one.

Difficulty is measured once, before training, as the mean score of K rollouts of the model (UR²: K =
20; `python -m lab.difficulty`; in R1-Searcher as the number of rollouts until the first that is
right), or is given by the data. In a step of UR², hard : medium : easy is then 1 : 1 : 1 in math
(C.5) and 7 : 2 : 1 in the other tasks. In `buckets`, the name of a task or kind with its own shares
comes before a colon:
{"math:hard": 1, "math:medium": 1, "math:easy": 1, "hard": 7, "medium": 2, "easy": 1}.

By UR²'s rule, the hardest questions, with a score below 0.2, are in the bucket "dropped". They are
asked only if a share names them, because a question whose rollouts all fail teaches nothing.
UR²'s stage 1 trains on the dropped math questions ("math:dropped=1", C.7).
Left out: measuring difficulty again while training.
"""

import functools
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from data import Question, load_difficulty
from errors import InputError, run_main, say_once

Questions = list[Question]
# A pool is a list of questions. Its name is a kind, a bucket or both: "one_hop", "hard" or
# "math:hard". Pools, their weights and the counts of a draw are dicts with these names.
Pools = dict[str, Questions]


# -------------------------------------------------------------------------------------- difficulty
EDGES = {"easy": 0.8, "medium": 0.5, "hard": 0.2, "dropped": 0.0}  # lowest mean score
HARDEST_FIRST = {"medium": 1, "easy": 2}  # ranks; hard, dropped or not measured: 0


def bucket_of_mean(scores: Sequence[float]) -> str:
    """Returns the bucket of the scores' mean (UR² section 3.3).

    >>> [bucket_of_mean([score, 0]) for score in (1, 0.99, 0.4, 0.39)]
    ['medium', 'hard', 'hard', 'dropped']
    """
    mean = round(sum(scores) / len(scores), 9)  # 0.1 added eight times is 0.7999999999999999
    return next(name for name, edge in EDGES.items() if mean >= edge)


def with_buckets(questions: Questions, path: str, dropped: bool) -> Questions:
    """Returns copies of the questions whose `level` is their bucket in the file `path`; if `path`
    is "level", their `level` in UR²'s data. Questions in the bucket "dropped" are left out unless
    `dropped` is True.
    """
    if path == "level":
        buckets = {q.id: q.level.replace("very_hard", "dropped") for q in questions}
    else:
        records = load_difficulty(path)
        buckets = {r["id"]: r.get("bucket") or bucket_of_mean(r["scores"]) for r in records}
    missing = [question.id for question in questions if buckets.get(question.id) not in EDGES]
    if missing:
        raise InputError(
            f"--difficulty {path}: {len(missing)} questions have no difficulty, the first is "
            f"{missing[0]}: measure all questions with lab.difficulty"
        )
    measured = [replace(question, level=buckets[question.id]) for question in questions]
    remaining = [question for question in measured if dropped or question.level != "dropped"]
    if left_out := len(measured) - len(remaining):
        say_once(
            f'curriculum: {left_out} of {len(measured)} questions are in the bucket "dropped" and '
            "are left out"
        )
    return remaining


# ------------------------------------------------------------------------------------------ shares
def exact_counts(total: int, weights: dict) -> dict:
    """Returns integers that add up to `total` in the ratio of the weights. Questions are dealt one
    by one, each to the name with the lowest (count + ½) / weight. So a larger total changes no
    earlier deal: what is rounded down in one step is made up for in a later one.

    >>> exact_counts(16, {"a": 3, "b": 4, "c": 1})
    {'a': 6, 'b': 8, 'c': 2}
    >>> exact_counts(2, {"a": 2, "b": 1}), exact_counts(4, {"a": 2, "b": 1})
    ({'a': 1, 'b': 1}, {'a': 3, 'b': 1})
    """
    # When the next question is dealt at (count + ½) / weight = t, every count is within ½ of
    # weight · t. So at least these were dealt before, in whatever order, and few remain.
    share = (total - len(weights) / 2) / (sum(weights.values()) or 1)
    counts = {name: max(0, int(weight * share - 0.5)) for name, weight in weights.items()}
    for _ in range(total - sum(counts.values()) if weights else 0):
        counts[min(counts, key=lambda name: (counts[name] + 0.5) / max(weights[name], 1e-99))] += 1
    return counts


def share_out(questions: Questions, mix: dict, buckets: dict) -> tuple[Pools, dict]:
    """Returns the pools and the weights of those that are asked.

    With `mix`, its names are the pools: a kind, "hotpotqa", or a bucket of it, "hotpotqa:medium".
    Otherwise each task or kind that has its own shares of buckets is a group, all other questions
    are one more group, and a group weighs as much as it has questions, split in the ratio of its
    shares. Worked: 30 questions of math, 60 others, and the shares of buckets at the top of this
    file. Math weighs 30, split 1 : 1 : 1, so math:hard, math:medium and math:easy weigh 10 each.
    The others weigh 60, split 7 : 2 : 1: hard 42, medium 12, easy 6.
    "hotpotqa" in `mix` or `buckets` means hotpotqa_bridge and hotpotqa_comparison together.
    """
    shares = defaultdict(dict)  # kind, family, task or "" (all others) -> pool -> share
    for name, share in (mix or buckets or {"": 1.0}).items():
        group = name.partition(":")[0] if mix else name.rpartition(":")[0]
        shares[group][name] = share
    pools, sizes = defaultdict(list), Counter()
    for question in questions:
        names = (question.kind, question.kind.partition("_")[0], question.task, "")
        group = next((name for name in names if name in shares), question.kind)
        sizes[group] += 1
        name = f"{group}:{question.level}".strip(":")
        pools[name if name in shares.get(group, ()) else group].append(question)
    weights = dict(mix)
    for group in () if mix else sizes:
        split = shares.get(group, {})
        for name, share in split.items():
            weights[name] = sizes[group] * (share / sum(split.values()))
    return pools, {name: weight for name, weight in weights.items() if weight}


def check_pools(pools: Pools, counts: dict, mix: dict) -> None:
    """Raises an InputError if no share names a part of the data, or if a pool that has a share is
    empty. For a bucket it also raises one if a step would take no question of it, or more questions
    than it has.
    """
    for name, count in (counts or {"the recipe's shares": 0}).items():
        size = len(pools.get(name, ()))
        is_bucket = ":" in name or (name and not mix)
        fits = 0 < count <= size if is_bucket else size
        if not fits:
            raise InputError(
                f"a step takes {count} questions of {name}, and the data has {size} (there are "
                f"{', '.join(pools)}): correct --mix or --difficulty, or leave them out; if the "
                "data has some, another --questions_per_step may help too"
            )


# ------------------------------------------------------------------------------------- task mixing
def mix_tasks(pools: Pools, counts: dict, settings) -> None:
    """Sets `may_search` of the questions in the pools to False for part of two tasks. Which part
    depends on a lot, a random number in [0, 1) of the question's id and the seed.

    Math: in each bucket the share `math_searches` may search: {"hard": 1} means all hard ones and
    no others. For Llama, UR² replaced hard math questions by easy ones (appendix C.5), so two
    thirds of the math questions are easy. There {"easy": 0.5} lets half of the easy questions
    search: as many as the hard questions that were replaced.

    Multiple choice: half of the questions that a step asks may search, on average. Harder questions
    are chosen first, among equally hard ones those with the lowest lots. Worked: a step asks 8 of
    20 hard and 2 of 10 easy questions, 10 together, so 5 may search. A hard question is asked 8/20
    times per step. So 5 / (8/20) = 12.5, rounded to 13, of the 20 hard questions may search, and no
    easy one.
    """
    choices = []  # rank of the difficulty, lot, how often a step asks the question, pool, place
    for name, pool in pools.items():
        for place, q in enumerate(pool):
            lot = random.Random(f"{settings.seed} search {q.id}").random()
            if q.task == "choice":
                rank, rate = HARDEST_FIRST.get(q.level, 0), counts[name] / len(pool)
                choices.append((rank, lot, rate, name, place))
            elif q.task == "math" and lot >= settings.math_searches.get(q.level, 0):
                pool[place] = replace(q, may_search=False)
    left = sum(choice[2] for choice in choices) / 2
    for _, _, rate, name, place in sorted(choices):
        if left + 1e-9 < rate / 2:
            pools[name][place] = replace(pools[name][place], may_search=False)
        left -= rate


# -------------------------------------------------------------------------------------- the stream
class QuestionStream:
    """Holds the pools; `take` returns the questions of one draw, mixed by kind, bucket or both.

    attempts   largest number of draws in a step. Only DAPO makes more than one: it draws more
               questions in place of groups that teach nothing. Draw number a of step s is the
               draw n = s · attempts + a, which does not depend on how many draws earlier steps made

    A draw rarely has a whole number of questions of each pool. The remainders are spread over the
    draws: if the shares are in the ratio of the sizes of the pools, each question of the data is
    asked once before any is asked again. In R1-Searcher's stage 2 a step has 20, 16, 8, 20 of the
    four pools or one more or less, and the first 8,148 questions are the 8,148 of Table 1.
    """

    def __init__(self, questions: Questions, settings, attempts: int = 1):
        self.size, self.seed, self.attempts = settings.questions_per_step, settings.seed, attempts
        if settings.difficulty:
            dropped = any(name.endswith("dropped") for name in settings.mix or settings.buckets)
            questions = with_buckets(questions, settings.difficulty, dropped)
        elif settings.task_mixing and any(question.task == "math" for question in questions):
            raise InputError(
                "--task_mixing of math questions goes by difficulty: give --difficulty FILE, or "
                "--task_mixing false, which restricts no question"
            )
        if not questions:
            raise InputError(
                "there are no questions to train on, or all of them are in the bucket "
                '"dropped": ask easier ones'
            )
        pools, self.weights = share_out(questions, settings.mix, settings.buckets)
        counts = exact_counts(self.size, self.weights)  # of the first draw
        check_pools(pools, counts, settings.mix)
        self.pools = {name: pools[name] for name in counts}
        if settings.task_mixing:
            mix_tasks(self.pools, counts, settings)

    def take(self, step: int, attempt: int = 0) -> Questions:
        """Returns the questions of one draw of a step. In the endless list of a pool's epochs they
        have the numbers from first[name] to end[name] − 1.
        """
        turn = step * self.attempts + attempt
        first = exact_counts(turn * self.size, self.weights)
        end = exact_counts((turn + 1) * self.size, self.weights)
        questions = []
        for name, pool in self.pools.items():
            for number in range(first[name], end[name]):
                epoch, place = divmod(number, len(pool))
                order = shuffled(len(pool), f"{self.seed} {name} {epoch}")
                questions.append(pool[order[place]])
        return questions


@functools.lru_cache(maxsize=64)
def shuffled(size: int, lot: str) -> list[int]:
    return random.Random(lot).sample(range(size), size)


def main() -> None:
    """Prints the buckets of a few mean scores, and how a step's 64 questions split into buckets."""
    print("mean score of 20 rollouts -> bucket")
    for score in (0.95, 0.8, 0.75, 0.5, 0.45, 0.35, 0.1):
        print(f"  {score:.2f}   {bucket_of_mean([score])}")
    print("\n64 questions at 7 : 2 : 1  ", exact_counts(64, {"hard": 7, "medium": 2, "easy": 1}))


if __name__ == "__main__":
    run_main(main)
