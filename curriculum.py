"""Which questions come next.

A stream deals out questions in fixed shares per kind (`mix`), each kind in its own shuffled order, epoch after epoch.
Step s of seed S always deals the same questions, whatever happened before: a resumed run sees what the unbroken one
would have seen.

    counts_k = largest remainder of n · weight_k / Σ weights      16 questions at 3 : 4 : 1 -> 6, 8, 2
Left out: difficulty buckets and task mixing (UR² section 3.3).
"""

from __future__ import annotations

import math
import random
from collections import defaultdict

from data import InputError, Question, run_main


def exact_counts(total: int, weights: dict[str, float]) -> dict[str, int]:
    """Integers that add up to `total` in the ratio of the weights (largest remainder; ties to the first).

    >>> exact_counts(16, {"a": 3, "b": 4, "c": 1})
    {'a': 6, 'b': 8, 'c': 2}
    """
    shares = {name: total * weight / sum(weights.values()) for name, weight in weights.items()}
    counts = {name: int(share) for name, share in shares.items()}
    by_remainder = sorted(shares, key=lambda name: counts[name] - shares[name])
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


def parse_mix(mix: str) -> dict[str, float]:
    """ "one_hop=3,two_hop=4" -> {"one_hop": 3.0, "two_hop": 4.0}"""
    try:
        weights = {name.strip(): float(weight) for name, weight in (part.split("=") for part in mix.split(",") if part.strip())}
    except ValueError:
        raise InputError(f"--mix {mix!r}: write it as kind=weight,kind=weight") from None
    wrong = any(weight < 0 or not math.isfinite(weight) for weight in weights.values())
    if wrong or (weights and not sum(weights.values())):
        raise InputError(f"--mix {mix!r}: weights must be numbers that are not negative, and one must be above 0")
    return weights


class QuestionStream:
    """`take(step)` deals the questions of one step: `count` of them, mixed by kind. mix="" deals all kinds as they come.

    attempts: how often a step may draw (DAPO draws again for groups that teach nothing). Attempt a of step s has the
    numbers (s · attempts + a) · count + i, its own in every epoch whether or not the attempts before it were made.
    """

    def __init__(self, questions: list[Question], count: int, mix: str = "", seed: int = 0, attempts: int = 1):
        if not questions:
            raise InputError("there are no questions to train on")
        self.seed, self.attempts = seed, attempts
        self.orders: dict[str, tuple[int, list[int]]] = {}  # kind -> (epoch, its order)
        weights = parse_mix(mix)
        self.pools: dict[str, list[Question]] = defaultdict(list)
        for question in questions:
            self.pools[question.kind if weights else ""].append(question)
        missing = [kind for kind, weight in weights.items() if weight and kind not in self.pools]
        if missing:
            raise InputError(f"--mix: the data has no question of kind {', '.join(missing)}; it has {', '.join(self.pools)}")
        self.counts = exact_counts(count, weights or {"": 1.0})

    def take(self, step: int, attempt: int = 0) -> list[Question]:
        if not 0 <= attempt < self.attempts:  # it would deal another step's questions
            raise InputError(f"attempt {attempt} of a step, but the stream was made for {self.attempts} per step")
        turn = step * self.attempts + attempt
        return [self._deal(kind, turn * count + i) for kind, count in self.counts.items() for i in range(count)]

    def _deal(self, kind: str, number: int) -> Question:
        """The question with this number in the endless, epoch by epoch reshuffled list of its kind."""
        pool = self.pools[kind]
        epoch, place = divmod(number, len(pool))
        if self.orders.get(kind, (None,))[0] != epoch:
            self.orders[kind] = epoch, random.Random(f"{self.seed} {kind} {epoch}").sample(range(len(pool)), len(pool))
        return pool[self.orders[kind][1][place]]


def main() -> None:
    pool = [Question(f"{kind}{i}", "?", ["!"], source=kind) for kind in ("hard", "medium", "easy") for i in range(4)]
    stream = QuestionStream(pool, 10, "hard=7,medium=2,easy=1")
    print("counts at 7 : 2 : 1 of ten questions:", stream.counts)
    for step in range(2):
        print(f"step {step}:", *[question.id for question in stream.take(step)])


if __name__ == "__main__":
    run_main(main)
