"""How hard each question is for a model as it is before training (UR² appendix C.2).

    s = mean score of K rollouts      a line of JSONL each: {"id", "scores", "score", "bucket"}

    python -m lab.difficulty --model DIR --data FILE --corpus FILE --out difficulty.jsonl
    python -m lab.difficulty --from_rollouts FILE --out difficulty.jsonl     published answers

curriculum.py has the buckets, eval.py the flags (temperature 1). The same command goes on.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from curriculum import bucket_of_mean
from data import BUCKETS, Question, load_attempts
from errors import InputError, check_output, run_main, setting
from eval import Evaluation, Options, settings_of
from formats.records import append_jsonl
from lab import interruptible, parse_flags
from metrics import score_answer
from plumbing.files import go_on
from settings import ASKING, check_settings
from trajectory_metrics import trajectory_metrics

AT_ONCE = 16  # questions that share a seed


def bucket_of_first_success(scores: Sequence[float]) -> str:
    """R1-Searcher's counting, of 20 rollouts: a success is a full score, none at all is hard.

    >>> bucket_of_first_success([0, 0, 1, 0]), bucket_of_first_success([0] * 9 + [1])
    ('easy', 'medium')
    """
    successes = [score >= 1 for score in scores[:20]]
    if not any(successes):
        return "hard"
    return "easy" if successes.index(True) + 1 < 10 else "medium"


# (bucket of a question's scores, its usual metric)
SCHEMES = {"ur2": (bucket_of_mean, "f1"), "r1_searcher": (bucket_of_first_success, "cem")}


@dataclass(frozen=True)
class DifficultySettings:
    """How hard each question is."""

    out: str = setting("", "JSONL to write", needed=True)
    samples: int = setting(20, "rollouts per question, K", least=1)
    scheme: str = setting("ur2", "how scores become a bucket", one_of=SCHEMES)
    metric: str = setting("", 'of open answers; "": the scheme\'s', one_of=("", "em", "f1", "cem"))
    from_rollouts: str = setting("", "take the answers (pred_anses) of this file, not a model's")
    questions: int = setting(0, "of each kind in the built-in world, or in all; 0 = all", least=0)


def measure(
    questions: list, answer: Callable, made_with: dict, options: DifficultySettings
) -> dict:
    """id -> bucket. Each batch is written as it comes; answer(batch) has each question's scores."""
    out, found = Path(options.out), SCHEMES[options.scheme][0]
    made_with = made_with | {"metric": options.metric, "scheme": options.scheme}
    ids = [question.id for question in questions]
    records = go_on(out, made_with, ids, lambda record: record.get("id"), AT_ONCE, False)
    for start in tqdm(range(len(records), len(questions), AT_ONCE), f"batches of {AT_ONCE}"):
        some = questions[start : start + AT_ONCE]
        for question, scores in zip(some, answer(some), strict=True):
            record = {"id": question.id, "scores": scores, "score": sum(scores) / len(scores)}
            records.append(record | {"bucket": found(scores)})
        append_jsonl(out, records[start:])
    return {record["id"]: record["bucket"] for record in records}


def measure_published(given: dict, options: DifficultySettings) -> dict[str, str]:
    attempts = load_attempts(options.from_rollouts, given.get("skip_bad", False))
    attempts = attempts[: options.questions or None]
    predictions = {attempt.question.id: attempt.predictions for attempt in attempts}
    few = min(map(len, predictions.values()))
    if options.scheme == "r1_searcher" and few < 20:
        print(f"note: some questions have only {few} rollouts; without a success they are hard")

    def scores(q: Question) -> list[float]:
        how = (q.answers, q.task, q.options)
        return [score_answer(text, *how)[options.metric] for text in predictions[q.id]]

    made_with = {"answers": zlib.crc32(repr(attempts).encode())}
    questions = [attempt.question for attempt in attempts]
    return measure(questions, lambda some: list(map(scores, some)), made_with, options)


def measure_model(given: dict, options: DifficultySettings) -> dict[str, str]:
    settings = check_settings(settings_of({"temperature": 1.0} | given), False, given)
    if settings.temperature == 0 and options.samples > 1:
        raise InputError("--temperature 0 is greedy: all rollouts would be the same; leave it at 1")
    asked = Options("train", options.questions, options.samples, out=options.out)
    whole = Evaluation(settings, asked)
    generate, version = whole.load()

    def answer(some: list[Question]) -> list[list[float]]:
        seed, k = zlib.crc32(f"{settings.seed} {some[0].id}".encode()), options.samples
        rows = generate(some, seed)
        scores = [trajectory_metrics(row)[options.metric] for row in rows]
        return [scores[start : start + k] for start in range(0, len(rows), k)]

    return measure(whole.questions, answer, whole.made_with(version), options)


def main(arguments: list[str] | None = None) -> None:
    options, given = parse_flags("lab.difficulty", DifficultySettings, arguments, ASKING)
    check_output(options.out, "--out")
    if options.scheme == "r1_searcher" and options.samples < 20 and not options.from_rollouts:
        why = "r1_searcher tells medium from hard at 20 rollouts: give at least --samples 20"
        raise InputError(f"--samples {options.samples}: {why}")
    options = replace(options, metric=options.metric or SCHEMES[options.scheme][1])
    how = measure_published if options.from_rollouts else measure_model
    with interruptible(f"what was measured is in {options.out}: the same command goes on"):
        counts = Counter(how(given, options).values())
    shares = ", ".join(f"{name} {counts[name]}" for name in BUCKETS)
    print(f"{sum(counts.values())} questions: {shares}")
    print(f"use: python train.py --difficulty {options.out}")


if __name__ == "__main__":
    run_main(main)
