"""Measures how hard each question is for a model before training (UR² appendix C.2).

    score of a question     mean score of K rollouts (--samples), or of published rollouts
    line of the output      {"id", "scores", "score", "bucket"}, JSON, one per question

    python -m lab.difficulty --model DIR --data FILE --corpus FILE --out difficulty.jsonl
    python -m lab.difficulty --from_rollouts FILE --out difficulty.jsonl     published rollouts

--scheme chooses the rule for buckets: curriculum.py defines that of UR², `bucket_of_first_success`
that of R1-Searcher. The flags for settings of a run are those of eval.py, with the same defaults,
except that --temperature is 1. An interrupted command leaves the batches that were finished.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from curriculum import bucket_of_mean
from data import BUCKETS, Question, load_attempts
from errors import InputError, check_output, run_main
from eval import Evaluation, Options, settings_of
from flags import check_settings
from formats.records import append_jsonl, keep_old
from lab import interruptible, parse_flags
from metrics import score_answer
from settings import setting
from trajectory_metrics import trajectory_metrics

AT_ONCE = 16  # questions per batch; a batch has one seed


def bucket_of_first_success(scores: Sequence[float]) -> str:
    """Returns the bucket by R1-Searcher's rule: "easy" if one of the first 9 rollouts has the full
    score, else "medium" if one of the first 20 has it, else "hard".

    >>> bucket_of_first_success([0, 0, 1, 0]), bucket_of_first_success([0] * 9 + [1])
    ('easy', 'medium')
    """
    if max(scores[:9]) >= 1:
        return "easy"
    return "medium" if max(scores[:20]) >= 1 else "hard"


# scheme -> (function from a question's scores to its bucket, default metric of open answers)
SCHEMES = {"ur2": (bucket_of_mean, "f1"), "r1_searcher": (bucket_of_first_success, "cem")}


@dataclass(frozen=True)
class DifficultySettings:
    """Measure how hard each question is."""

    out: str = setting("", "JSONL file to write", needed=True)
    samples: int = setting(20, "rollouts per question, K", least=1)
    scheme: str = setting("ur2", "how scores become a bucket", one_of=SCHEMES)
    metric: str = setting(
        "", "score of open answers (default: the scheme's)", one_of=("", "em", "f1", "cem")
    )
    from_rollouts: str = setting("", "score all `predictions` of this file, without a model")
    questions: int = setting(
        0,
        "number of questions: per kind of the built-in world, or per file of --data; 0 = all",
        least=0,
    )


def measure(questions: list, answer: Callable, options: DifficultySettings) -> dict:
    """Returns {question id: bucket}, and appends each finished batch to --out. answer(batch) gives
    a list of scores for each question.
    """
    out, bucket_of = Path(options.out), SCHEMES[options.scheme][0]
    keep_old(out)
    records = []
    for start in tqdm(range(0, len(questions), AT_ONCE), f"batches of {AT_ONCE}"):
        batch = questions[start : start + AT_ONCE]
        for question, scores in zip(batch, answer(batch), strict=True):
            record = {"id": question.id, "scores": scores, "score": sum(scores) / len(scores)}
            records.append(record | {"bucket": bucket_of(scores)})
        append_jsonl(out, records[start:])
    return {record["id"]: record["bucket"] for record in records}


def measure_published(given: dict, options: DifficultySettings) -> dict:
    attempts = load_attempts(options.from_rollouts, given.get("skip_bad", False))
    predictions = {question.id: texts for question, texts in attempts}

    def answer(batch: list[Question]) -> Iterator[list]:
        for q in batch:
            texts = predictions[q.id]
            scores = (score_answer(text, q.answers, q.task, q.options) for text in texts)
            yield [score[options.metric] for score in scores]

    return measure([question for question, _ in attempts], answer, options)


def measure_model(given: dict, options: DifficultySettings) -> dict:
    settings = check_settings(settings_of({"temperature": 1.0} | given), False, given)
    if settings.temperature == 0 and options.samples > 1:
        raise InputError("--temperature 0 is greedy: all rollouts would be the same; leave it at 1")
    evaluation = Evaluation(
        settings, Options("train", options.questions, options.samples, out=options.out)
    )
    generate = evaluation.load()

    def answer(batch: list[Question]) -> list:
        rows = generate(batch, zlib.crc32(f"{settings.seed} {batch[0].id}".encode()))
        scores = [trajectory_metrics(row)[options.metric] for row in rows]
        return np.reshape(scores, (-1, options.samples)).tolist()

    return measure(evaluation.questions, answer, options)


def main(arguments: list[str] | None = None) -> None:
    options, given = parse_flags("lab.difficulty", DifficultySettings, arguments, True)
    check_output(options.out, "--out")
    if options.scheme == "r1_searcher" and options.samples < 20 and not options.from_rollouts:
        raise InputError(
            f"--samples {options.samples}: r1_searcher needs 20 rollouts to tell medium from hard:"
            " give at least --samples 20"
        )
    options = replace(options, metric=options.metric or SCHEMES[options.scheme][1])
    source = measure_published if options.from_rollouts else measure_model
    with interruptible(f"finished batches are in {options.out}"):
        counts = Counter(source(given, options).values())
    print(f"{counts.total()} questions:", ", ".join(f"{name} {counts[name]}" for name in BUCKETS))
    print(f"use: python train.py --difficulty {options.out}")


if __name__ == "__main__":
    run_main(main)
