"""Which questions come next, and which of them may search (UR² section 3.3, appendix C.2).

A stream deals out questions in fixed shares per kind (`mix`) or per difficulty (`buckets`), each in
its own shuffled order, epoch after epoch. Step s of seed S always deals the same questions,
whatever happened before: a resumed run sees what the unbroken one would have seen.

    counts_k = largest remainder of n · weight_k / Σ weights      16 questions at 3 : 4 : 1 -> 6, 8,
    2

Difficulty is measured once, with a model as it is before training: s = mean score of K rollouts
(UR²: K = 20).

    UR²           easy 0.8 ≤ s ≤ 1    medium 0.5 ≤ s < 0.8    hard 0.2 ≤ s < 0.5    dropped below
    R1-Searcher   rollouts until the first success: easy under 10, medium 10 to 20, hard more (its
                  table 1)

A step then holds hard : medium : easy = 7 : 2 : 1. Dropped questions teach nothing for long, as all
rollouts of a group fail; they are dealt only where `buckets` names them (UR²'s stage 1 for math
trains on exactly those: "dropped=1"). Task mixing: open questions may always search, math only if
hard, of multiple choice so many hard ones that half of what is dealt may search. Which ones is
drawn from the seed and the question's id, not from the order of reading. Left out: buckets that are
measured again while training.
"""

from __future__ import annotations

import math
import random
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm import tqdm

from data import Question, load_attempts
from errors import InputError, run_main
from formats.records import append_jsonl, finished_records
from metrics import score_answer

# --------------------------------------------------------------------------------------- difficulty

EDGES = {"easy": 0.8, "medium": 0.5, "hard": 0.2}  # a bucket begins at this mean score
BUCKETS = ("hard", "medium", "easy", "dropped")
LEVELS = {
    "easy": "easy",
    "medium": "medium",
    "hard": "hard",
    "very_hard": "dropped",
}  # as UR²'s files call them


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


def bucket_of_first_success(scores: Sequence[float]) -> str:
    """R1-Searcher's counting. A success is a full score; no success at all is the hardest bucket,
    whatever K was.

    Its published stage 1 file is medium by the paper, but holds about ten rollouts a question; in
    the 80 records that were looked at the first success is at 6 to 10, so this count calls most of
    them easy.

    >>> bucket_of_first_success([0, 0, 1, 0]), bucket_of_first_success([0] * 9 + [1]), bucket_of_first_success([0] * 20)
    ('easy', 'medium', 'hard')
    """
    needed = next((number for number, score in enumerate(scores, 1) if score >= 1), None)
    if needed is None or needed > 20:
        return "hard"
    return "easy" if needed < 10 else "medium"


# name -> (bucket of a question's scores, its usual metric)
SCHEMES: dict[str, tuple[Callable[[Sequence[float]], str], str]] = {
    "ur2": (bucket_of_mean, "f1"),
    "r1_searcher": (bucket_of_first_success, "cem"),
}


def measure_difficulty(
    questions: list[Question],
    answer: Callable[[list[Question], int], list[list[float]]],
    k: int,
    path: str | Path,
    scheme: str = "ur2",
    at_once: int = 16,
    by: str = "",
    quiet: bool = False,
) -> dict[str, str]:
    """K scores per question from `answer(questions, k)`, a line of JSONL each as soon as it is
    known; id -> bucket.

    An interrupted run goes on behind the last finished line. `by` says how it was measured: a file
    that somebody else measured is refused, or two models' scores would stand in one file. k=0 takes
    as many scores as come.
    """
    path = Path(path)
    found = {record["id"]: record for record in difficulty_records(path)}
    wrong = next(
        (r for r in found.values() if r.get("by", "") != by or (k and len(r["scores"]) != k)), None
    )
    if wrong:
        was = f"{len(wrong['scores'])} rollouts by {wrong.get('by') or 'an unnamed model'}"
        raise InputError(
            f"{path} holds another measurement ({was}; now {k or 'some'} by"
            f" {by or 'an unnamed model'}): name another file"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    done = sum(question.id in found for question in questions)
    with tqdm(
        total=len(questions), initial=done, desc="difficulty", dynamic_ncols=True, disable=quiet
    ) as bar:
        # The batches are those of the unbroken run, so that what is drawn does not depend on where
        # it was interrupted.
        for start in range(0, len(questions), at_once):
            missing = [
                question
                for question in questions[start : start + at_once]
                if question.id not in found
            ]
            for question, scores in zip(
                missing, answer(missing, k) if missing else [], strict=True
            ):
                found[question.id] = difficulty_record(question.id, scores, k, scheme, by)
                append_jsonl(path, [found[question.id]])
                bar.update()
    return {question.id: found[question.id]["bucket"] for question in questions}


def difficulty_record(
    question_id: str, scores: Sequence[float], k: int, scheme: str, by: str = ""
) -> dict:
    scores = [float(score) for score in scores]
    if not scores or (k and len(scores) != k):
        raise InputError(
            f"question {question_id}: {len(scores)} scores came back, {k or 'at least one'} were"
            " asked for"
        )
    record = {
        "id": question_id,
        "scores": scores,
        "score": sum(scores) / len(scores),
        "bucket": SCHEMES[scheme][0](scores),
    }
    return record | ({"by": by} if by else {})


def difficulty_records(path: Path, cut: bool = True) -> list[dict]:
    """Lines {"id", "scores", "score"[, "bucket", "by"]}, each field checked."""
    records = finished_records(path, cut)
    for number, record in enumerate(records, 1):
        scores, name = record.get("scores"), record.get("bucket")
        numbers = (
            isinstance(scores, list)
            and scores
            and all(isinstance(score, int | float) for score in scores)
        )
        if (
            not isinstance(record.get("id"), str)
            or not numbers
            or (name is not None and name not in BUCKETS)
        ):
            raise InputError(
                f'{path}, record {number}: expected {{"id", "scores", "score"}} as `curriculum.py'
                " difficulty` writes them: measure again, or name another file"
            )
    return records


def read_difficulty(path: str | Path, questions: list[Question]) -> dict[str, str]:
    """id -> bucket, from a difficulty file; "level" takes the level that the records themselves
    bring (UR²'s files do).
    """
    if str(path) == "level":
        known = {
            question.id: LEVELS[question.level]
            for question in questions
            if question.level in LEVELS
        }
    elif not Path(path).exists():
        raise InputError(
            f"--difficulty {path}: no such file: measure with `python curriculum.py difficulty"
            f" --out {path}`"
        )
    else:
        known = {
            r["id"]: r.get("bucket") or bucket_of_mean(r["scores"])
            for r in difficulty_records(Path(path), cut=False)
        }
    missing = [question.id for question in questions if question.id not in known]
    if missing:
        raise InputError(
            f"--difficulty {path}: {len(missing)} of {len(questions)} questions have none, the"
            f" first is {missing[0]}: measure the same --data to its end"
        )
    return {question.id: known[question.id] for question in questions}


# ------------------------------------------------------------------------------------------- shares


def exact_counts(total: int, weights: dict[str, float]) -> dict[str, int]:
    """Integers that add up to `total` in the ratio of the weights (largest remainder; ties to the
    first).

    >>> exact_counts(16, {"a": 3, "b": 4, "c": 1})
    {'a': 6, 'b': 8, 'c': 2}
    """
    shares = {name: total * weight / sum(weights.values()) for name, weight in weights.items()}
    counts = {name: int(share) for name, share in shares.items()}
    by_remainder = sorted(shares, key=lambda name: counts[name] - shares[name])
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


def counts_within(
    total: int, weights: dict[str, float], available: dict[str, int]
) -> dict[str, int]:
    """`exact_counts`, but of no bucket more than it has (it would deal some question twice in every
    step); what a short bucket leaves open goes to the others in their ratio.

    >>> counts_within(10, {"hard": 7, "medium": 2, "easy": 1}, {"hard": 4, "medium": 90, "easy": 90})    # 6 at 2 : 1
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
    raise InputError(
        f"--buckets: {sum(counts.values())} questions are in"
        f" {', '.join(n for n in weights if weights[n])}, fewer than the {total} of a step: lower"
        " --questions_per_step, or name more buckets"
    )


def parse_mix(mix: str, flag: str = "--mix") -> dict[str, float]:
    """ "one_hop=3,two_hop=4" -> {"one_hop": 3.0, "two_hop": 4.0}"""
    try:
        weights = {
            name.strip(): float(weight)
            for name, weight in (part.split("=") for part in mix.split(",") if part.strip())
        }
    except ValueError:
        raise InputError(f"{flag} {mix!r}: write it as kind=weight,kind=weight") from None
    wrong = any(weight < 0 or not math.isfinite(weight) for weight in weights.values())
    if wrong or (weights and not sum(weights.values())):
        raise InputError(
            f"{flag} {mix!r}: weights must be numbers that are not negative, and one must be"
            " above 0"
        )
    return weights


def parse_buckets(buckets: str) -> dict[str, float]:
    weights = parse_mix(buckets, "--buckets")
    unknown = [name for name in weights if name not in BUCKETS]
    if unknown:
        raise InputError(
            f"--buckets {buckets!r}: no bucket is called {', '.join(unknown)}; they are"
            f" {', '.join(BUCKETS)}"
        )
    return weights


# -------------------------------------------------------------------------------------- task mixing

HARD = ("hard", "dropped")


def may_search(question: Question, name: str, drawn: frozenset[str]) -> bool:
    """Open questions always; math in the bucket hard (or harder); multiple choice if its id was
    drawn.
    """
    if question.task == "math":
        return name in HARD
    return question.task != "choice" or question.id in drawn


def dealt_per_step(
    questions: list[Question], difficulty: dict[str, str], counts: dict[str, int]
) -> dict[str, float]:
    """id -> how often a step deals it on average: counts_b / n_b. Without counts all questions are
    dealt alike.
    """
    sizes = Counter(difficulty[question.id] for question in questions)
    return {
        q.id: counts.get(difficulty[q.id], 0) / sizes[difficulty[q.id]] if counts else 1.0
        for q in questions
    }


def share_of_hard_choices(
    questions: list[Question], difficulty: dict[str, str], dealt: dict[str, float]
) -> float:
    """The share of the hard multiple-choice questions that must search for half of all that are
    dealt to do so.

    With D multiple-choice questions dealt a step, H of them hard: D / 2H. Above 1 there are too few
    hard ones.
    """
    choices = [question for question in questions if question.task == "choice"]
    of_hard = sum(dealt[question.id] for question in choices if difficulty[question.id] in HARD)
    return sum(dealt[question.id] for question in choices) / 2 / of_hard if of_hard else math.inf


def draw_choices(
    questions: list[Question], difficulty: dict[str, str], share: float, seed: int
) -> frozenset[str]:
    """Ids of the hard multiple-choice questions that may search: exactly this share of them, by
    lot.

    Worked: 20 hard and 10 easy ones, dealt at 8 : 2, so D = 10 and H = 8: the share is 5/8; 12.5 of
    20, so 13, may search. The lot is drawn from the seed and the id: the same questions in whatever
    order they were read.
    """
    hard = [
        question
        for question in questions
        if question.task == "choice" and difficulty[question.id] in HARD
    ]
    by_lot = sorted(
        hard, key=lambda question: random.Random(f"{seed} search {question.id}").random()
    )
    return frozenset(
        question.id for question in by_lot[: int(min(1.0, share) * len(hard) + 0.5 + 1e-9)]
    )


# --------------------------------------------------------------------------------------- the stream


class QuestionStream:
    """`take(step)` deals the questions of one step: `count` of them, mixed by kind. mix="" deals
    all kinds as they come.

    attempts     how often a step may draw (DAPO draws again for groups that teach nothing). Attempt
                 a of step s has the numbers (s · attempts + a) · count + i, its own in every epoch
                 whether or not those before it were made.
    difficulty   id -> bucket; dropped questions are then left out. `buckets`: shares,
                 "hard=7,medium=2,easy=1". A bucket with fewer questions than its share of one step
                 gives all it has, and the others fill up.
    task_mixing  `may_search(questions)` then says which may search; without it all may.
    What could not be had as asked is said in `notes`, one line each, and on stderr.
    """

    def __init__(
        self,
        questions: list[Question],
        count: int,
        mix: str = "",
        seed: int = 0,
        attempts: int = 1,
        difficulty: dict[str, str] | None = None,
        buckets: str = "",
        task_mixing: bool = False,
    ):
        if not questions:
            raise InputError("there are no questions to train on")
        if difficulty is None and (buckets or task_mixing):
            raise InputError(f"--{'buckets' if buckets else 'task_mixing'} needs --difficulty FILE")
        if mix and buckets:
            raise InputError("--mix and --buckets both share out a step: give one of them")
        self.seed, self.attempts, self.notes = seed, attempts, []
        self.orders: dict[str, tuple[int, list[int]]] = {}  # kind -> (epoch, its order)
        self.pools: dict[str, list[Question]] = defaultdict(list)
        if difficulty is not None:
            questions = self._without_dropped(questions, difficulty, buckets)
        if buckets:
            self._share_by_bucket(questions, difficulty, count, parse_buckets(buckets))
        else:
            self._share_by_kind(questions, count, parse_mix(mix))
        self.searching: frozenset[str] | None = None  # None: all
        if task_mixing:
            self._mix_tasks(questions, difficulty, self.counts if buckets else {})
        for note in self.notes:
            print(f"curriculum: {note}", file=sys.stderr)

    def _share_by_kind(
        self, questions: list[Question], count: int, weights: dict[str, float]
    ) -> None:
        for question in questions:
            self.pools[question.kind if weights else ""].append(question)
        missing = [kind for kind, weight in weights.items() if weight and kind not in self.pools]
        if missing:
            raise InputError(
                f"--mix: the data has no question of kind {', '.join(missing)}; it has"
                f" {', '.join(self.pools)}"
            )
        self.counts = exact_counts(count, weights or {"": 1.0})

    def _without_dropped(
        self, questions: list[Question], difficulty: dict[str, str], buckets: str
    ) -> list[Question]:
        wanted = parse_buckets(buckets).get("dropped")
        kept = (
            questions
            if wanted
            else [question for question in questions if difficulty[question.id] != "dropped"]
        )
        if len(kept) < len(questions):
            self.notes.append(
                f"{len(questions) - len(kept)} of {len(questions)} questions score below"
                f" {EDGES['hard']} and are left out"
            )
        if not kept:
            raise InputError(
                "--difficulty: every question is in the bucket dropped: train on them with"
                " --buckets dropped=1"
            )
        return kept

    def _share_by_bucket(
        self,
        questions: list[Question],
        difficulty: dict[str, str],
        count: int,
        weights: dict[str, float],
    ) -> None:
        for question in questions:
            self.pools[difficulty[question.id]].append(question)
        available = {name: len(self.pools.get(name, [])) for name in weights}
        self.counts, plain = counts_within(count, weights, available), exact_counts(count, weights)
        for name, weight in weights.items():
            if available[name] < plain[name]:
                self.notes.append(
                    f"bucket {name} runs short: {available[name]} of the {plain[name]} questions"
                    " that its share of a step asks for; the others fill up in their ratio"
                )
            elif weight and not self.counts[name]:
                self.notes.append(
                    f"bucket {name}: its share of {count} questions a step is less than one, so"
                    " none is dealt; raise --questions_per_step"
                )

    def _mix_tasks(
        self, questions: list[Question], difficulty: dict[str, str], counts: dict[str, int]
    ) -> None:
        dealt = dealt_per_step(questions, difficulty, counts)
        share = share_of_hard_choices(questions, difficulty, dealt)
        drawn = draw_choices(questions, difficulty, share, self.seed)
        self.searching = frozenset(
            q.id for q in questions if may_search(q, difficulty[q.id], drawn)
        )
        if share > 1 and any(
            question.task == "choice" and dealt[question.id] for question in questions
        ):
            self.notes.append(
                "multiple choice: too few are hard for half of them to search; all the hard"
                " ones may"
            )

    def take(self, step: int, attempt: int = 0) -> list[Question]:
        if not 0 <= attempt < self.attempts:  # it would deal another step's questions
            raise InputError(
                f"attempt {attempt} of a step, but the stream was made for {self.attempts} per step"
            )
        turn = step * self.attempts + attempt
        return [
            self._deal(kind, turn * count + i)
            for kind, count in self.counts.items()
            for i in range(count)
        ]

    def may_search(self, questions: list[Question]) -> list[bool]:
        """For each question: may it search? What `rollout` takes as `retrieval`."""
        return [self.searching is None or question.id in self.searching for question in questions]

    def _deal(self, kind: str, number: int) -> Question:
        """The question with this number in the endless, epoch by epoch reshuffled list of its
        kind.
        """
        pool = self.pools[kind]
        epoch, place = divmod(number, len(pool))
        if self.orders.get(kind, (None,))[0] != epoch:
            self.orders[kind] = (
                epoch,
                random.Random(f"{self.seed} {kind} {epoch}").sample(range(len(pool)), len(pool)),
            )
        return pool[self.orders[kind][1][place]]


# --------------------------------------------------------------------------------- the command line


def measure(arguments: list[str]) -> None:
    """`python curriculum.py difficulty`: K rollouts per question of a model, or published rollout
    answers.
    """
    from eval import (
        SHARED,
    )  # the model comes from files below this one, so they are imported here only
    from recipes import FlagParser, add_flags

    parser = FlagParser(
        "curriculum.py difficulty", description="Measure how hard each question is."
    )
    add_flags(parser, SHARED)
    parser.add_argument(
        "--out", default="", help="JSONL to write; the same command goes on with it"
    )
    parser.add_argument(
        "--k", type=int, default=20, help="rollouts per question (default 20, as UR²)"
    )
    parser.add_argument(
        "--scheme", default="ur2", help=f"one of {', '.join(SCHEMES)} (default ur2)"
    )
    parser.add_argument(
        "--metric", default="", help="em, f1 or cem of open answers (default: f1; r1_searcher: cem)"
    )
    parser.add_argument(
        "--from_rollouts",
        default="",
        help="take the answers (pred_anses) of this file instead of a model",
    )
    parser.add_argument(
        "--questions",
        type=int,
        default=0,
        help="the first so many; of the built-in world, per kind; 0 = all",
    )
    given = vars(parser.parse_args(arguments))
    options = {
        name: given.pop(name)
        for name in ("out", "k", "scheme", "metric", "from_rollouts", "questions")
    }
    check_options(options)
    metric = options["metric"] or SCHEMES[options["scheme"]][1]
    try:
        found = (measure_published if options["from_rollouts"] else measure_model)(
            given, options, metric
        )
    except KeyboardInterrupt:
        print(f"\ninterrupted; what was measured is in {options['out']}: the same command goes on")
        sys.exit(130)
    counts = Counter(found.values())
    print(f"{len(found)} questions: " + ", ".join(f"{name} {counts[name]}" for name in BUCKETS))
    print(f"use: python train.py --difficulty {options['out']} --buckets hard=7,medium=2,easy=1")


def check_options(options: dict) -> None:
    if not options["out"]:
        raise InputError("--out FILE is missing: where shall the scores go?")
    if options["scheme"] not in SCHEMES:
        raise InputError(f"--scheme {options['scheme']}: unknown; one of {', '.join(SCHEMES)}")
    if options["metric"] not in ("", "em", "f1", "cem"):
        raise InputError(f"--metric {options['metric']}: unknown; one of em, f1, cem")
    if options["k"] < 1 or options["questions"] < 0:
        raise InputError("--k must be at least 1, and --questions at least 0 (all)")
    if options["scheme"] == "r1_searcher" and options["k"] < 20 and not options["from_rollouts"]:
        raise InputError(
            f"--k {options['k']}: r1_searcher tells medium from hard at 20 rollouts; give at least"
            " --k 20"
        )


def measure_published(given: dict, options: dict, metric: str) -> dict[str, str]:
    attempts = load_attempts(options["from_rollouts"], given.get("skip_bad", False))[
        : options["questions"] or None
    ]
    few = min(len(a.predictions) for a in attempts)
    if options["scheme"] == "r1_searcher" and few < 20:
        print(
            f"note: some questions have only {few} rollouts; without a success among them they"
            " count as hard"
        )

    def score(question: Question, text: str) -> float:
        return score_answer(text, question.answers, question.task, question.options)[metric]

    scores = {a.id: [score(a.question, text) for text in a.predictions] for a in attempts}
    return measure_difficulty(
        [a.question for a in attempts],
        lambda some, _k: [scores[q.id] for q in some],
        0,
        options["out"],
        options["scheme"],
        by=f"{options['from_rollouts']}, {metric}, {options['scheme']}",
    )


def measure_model(given: dict, options: dict, metric: str) -> dict[str, str]:
    import eval as evaluation
    from policy import best_device
    from recipes import answer_scores, build_protocol, build_search, load_model, rollout_settings
    from rollout import check_prompts, rollout

    recipe = evaluation.recipe_of(
        {"temperature": 1.0, **given}
    )  # evaluation's own default is greedy: K times the same
    if recipe.temperature == 0 and options["k"] > 1:
        raise InputError(
            "--temperature 0 is greedy: all rollouts of a question would be the same; leave it at 1"
        )
    datasets, documents = evaluation.material(
        recipe, {"questions": options["questions"], "split": "train", "fact_seed": None}
    )
    questions = evaluation.flat(datasets)
    device = best_device()
    search, protocol, settings = (
        build_search(recipe, documents, device),
        build_protocol(recipe),
        rollout_settings(recipe),
    )
    policy, tokenizer = load_model(recipe, recipe.model, device)
    check_prompts(questions, protocol, tokenizer, policy, **settings)

    def answer(some: list[Question], k: int) -> list[list[float]]:
        seed = zlib.crc32(f"{recipe.seed} {some[0].id}".encode())
        trajectories = rollout(policy, tokenizer, some, search, protocol, k, seed=seed, **settings)
        scores = [answer_scores(trajectory)[metric] for trajectory in trajectories]
        return [scores[row * k : (row + 1) * k] for row in range(len(some))]

    by = (
        f"{recipe.model or 'the built-in model'}, {metric}, {options['scheme']}, temperature"
        f" {recipe.temperature:g}, retriever {recipe.retriever}, seed {recipe.seed}"
    )
    return measure_difficulty(
        questions, answer, options["k"], options["out"], options["scheme"], by=by
    )


def demo() -> None:
    """Buckets of a few questions, and two steps of them."""
    successes = {
        "q1": 19,
        "q2": 16,
        "q3": 15,
        "q4": 10,
        "q5": 9,
        "q6": 7,
        "q7": 6,
        "q8": 5,
        "q9": 4,
        "q10": 2,
    }
    print("right of 20 rollouts -> mean score -> bucket")
    difficulty = {}
    for name, right in successes.items():
        difficulty[name] = bucket(right / 20)
        print(f"  {name:4} {right:2}   {right / 20:.2f}   {difficulty[name]}")
    tasks = ["qa", "choice", "math", "qa", "math", "choice", "qa", "choice", "math", "qa"]
    pool = [Question(name, "?", ["!"], task) for name, task in zip(successes, tasks, strict=True)]
    print(
        "\ncounts at 7 : 2 : 1 of ten questions:",
        exact_counts(10, {"hard": 7, "medium": 2, "easy": 1}),
    )
    stream = QuestionStream(
        pool, 5, difficulty=difficulty, buckets="hard=7,medium=2,easy=1", task_mixing=True
    )
    print("counts of five of those above:       ", stream.counts)
    for step in range(2):
        dealt = stream.take(step)
        allowed = ["may search" if may else "direct" for may in stream.may_search(dealt)]
        print(
            f"step {step}:",
            "  ".join(f"{q.id} ({q.task}, {how})" for q, how in zip(dealt, allowed, strict=True)),
        )


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        demo()
    elif arguments[0] == "difficulty":
        measure(arguments[1:])
    else:
        raise InputError(
            f"curriculum.py {arguments[0]}: unknown; `difficulty` measures questions (--help lists"
            " its flags), and without a word it shows an example"
        )


if __name__ == "__main__":
    run_main(main)
