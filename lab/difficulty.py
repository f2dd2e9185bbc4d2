"""Measures how hard each question is for a model before training (UR² section 3.3).

    score of a question     mean score of K rollouts (--samples)
    line of the output      {"id", "scores", "score", "bucket"}, JSON, one per question

    python -m lab.difficulty --model DIR --data FILE --corpus FILE --out difficulty.jsonl

The recipe chooses the rule for buckets and the score of open answers: R1-Searcher's are
`bucket_of_first_success` and cover-EM, all others have UR²'s, the mean (curriculum.py) and F1. The
flags for settings of a run are those of eval.py, with the same defaults, except that --temperature
is 1. The rollouts themselves are a predictions file, as of eval.py.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from curriculum import bucket_of_mean
from data import BUCKETS
from errors import InputError, check_output, run_main
from eval import Options, predict, settings_of
from flags import check_settings
from formats.records import append_jsonl, keep_old
from lab import parse_flags
from settings import Settings, setting
from trajectory_metrics import mean


def bucket_of_first_success(scores: Sequence[float]) -> str:
    """Returns the bucket by R1-Searcher's rule: "easy" if one of the first 9 rollouts has the full
    score, else "medium" if one of the first 20 has it, else "hard".

    >>> bucket_of_first_success([0, 0, 1, 0]), bucket_of_first_success([0] * 9 + [1])
    ('easy', 'medium')
    """
    if max(scores[:9]) >= 1:
        return "easy"
    return "medium" if max(scores[:20]) >= 1 else "hard"


# recipe -> (function from a question's scores to its bucket, metric of open answers)
SCHEMES = {"ur2": (bucket_of_mean, "f1"), "r1_searcher": (bucket_of_first_success, "cem")}


@dataclass(frozen=True)
class DifficultySettings:
    """Measure how hard each question is."""

    out: str = setting("", "JSONL file to write", needed=True)
    samples: int = setting(20, "rollouts per question, K", least=1)
    questions: int = setting(
        0,
        "number of questions: per kind of the built-in world, or per file of --data; 0 = all",
        least=0,
    )


def scores_of_model(settings: Settings, options: DifficultySettings, metric: str) -> dict:
    """Returns {id of a question: scores of the model's rollouts}."""
    check_settings(settings, training=False)
    if settings.temperature == 0:
        raise InputError("--temperature 0 is greedy: all rollouts would be the same; leave it at 1")
    scores = defaultdict(list)
    for record in predict(settings, Options("train", options.questions, options.samples)):
        numbers = record["metrics"]
        scores[record["id"]].append(numbers[metric] if metric in numbers else numbers["rouge"])
    return scores


def main(arguments: list[str] | None = None) -> None:
    options, given = parse_flags("lab.difficulty", DifficultySettings, arguments, True)
    check_output(options.out, "--out")
    settings = settings_of({"temperature": 1.0} | given)
    rule = settings.recipe if settings.recipe in SCHEMES else "ur2"
    if rule == "r1_searcher" and options.samples < 20:
        raise InputError(f"--samples {options.samples}: r1_searcher tells medium from hard by 20")
    bucket_of, metric = SCHEMES[rule]
    lines = [
        {"id": name, "scores": scores, "score": mean(scores), "bucket": bucket_of(scores)}
        for name, scores in scores_of_model(settings, options, metric).items()
    ]
    keep_old(Path(options.out))
    append_jsonl(options.out, lines)
    counts = Counter(line["bucket"] for line in lines)
    print(f"{len(lines)} questions:", ", ".join(f"{name} {counts[name]}" for name in BUCKETS))
    if any(line["score"] and line["bucket"] != "dropped" for line in lines):
        print(f"use: python train.py --difficulty {options.out}  (buckets by the rule of {rule})")
    else:
        print(
            f"{options.out} trains nothing: no question was right in enough rollouts, and equal "
            "rewards teach nothing. Look at the predictions: do searches find the answers? If so, "
            "ask easier questions, or give a better --model (coldstart.py)"
        )


if __name__ == "__main__":
    run_main(main)
