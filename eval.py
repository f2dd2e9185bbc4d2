"""What a checkpoint is worth: exact match, F1 and cover-EM, how it searches, and what its evidence
is good for.

    python eval.py                                  the last checkpoint of the default run, on
                                                    held-out entities
    python eval.py --model DIR --data FILE --corpus from-data
    python eval.py --stage 0                        before RL
    python eval.py --retriever empty                does it read, or recall?
    python eval.py --fact_seed 1                    the same names with every fact redrawn: a model
    that reads stays as good
    python eval.py --judge URL#MODEL                is the answer right in other words? A share of
    the verdicts that can be read
    python eval.py --recipe r_search --reader SPEC  R-Search as a search tool: another model answers
    from the evidence python eval.py --predictions FILE --reader SPEC the same of predictions that
    are there already: nothing is rolled out
    python eval.py --data A,B,C --model DIR         several data sets, one table
    python eval.py ... --against OTHER              paired with another run's predictions, question
    by question

Greedy unless --temperature or --decoding says otherwise, with the very protocol, documents and
limits of training. A mean is over those that have the number: support over trajectories with
evidence, ROUGE over summaries, verdicts over readable ones; report.py adds the intervals.
Predictions are written as they come, before anybody else is asked, and the same command goes on
where it was interrupted. (Scoring a file alone needs no torch: `python predictions.py` starts
faster.)
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import re
import sys
from pathlib import Path

from tqdm import tqdm

from data import Question, load_datasets, named_files
from errors import FlagParser, InputError, check_output, run_main
from formats.records import append_jsonl, finished_records
from metrics import summary_scores
from other_models.judge import Judge
from other_models.llm import weights_version
from other_models.reader import answer_from_evidence
from plumbing.predictions import add_report_flags, report, score_files, scored
from policy import best_device, check_model_path
from prompts import build_prompt
from recipes import (
    PAPER_DECODING,
    RECIPES,
    Recipe,
    add_flags,
    answer_scores,
    build_cross_model,
    build_llm,
    build_protocol,
    build_search,
    built_in_kinds,
    check_recipe,
    checkpoints,
    load_model,
    passages,
    punctuation_of,
    resolve,
    rollout_settings,
    stage_folder,
)
from rewards import (
    arena_format,
    arena_scores,
    evidence_support,
    has_one_box,
    r1_searcher_format,
    ur2_violations,
    when_to_search_format,
)
from rollout import check_prompts, rollout
from summarizer import SEARCH_FAILED
from trajectory import Trajectory, show
from world.toy import world_for

COLUMNS = (
    "em",
    "f1",
    "cem",
    "searched",
    "searches",
    "fallbacks",
    "format",
)  # of every protocol that searches
QUESTIONS_AT_ONCE = 64


# ----------------------------------------------------------------------------------- one trajectory


def r_search_format(trajectory: Trajectory) -> bool:
    """One answer box and, if it searched, one evidence box: all that R-Search's r_f pays for."""
    text, protocol = trajectory.model_text, trajectory.protocol
    return has_one_box(text, protocol.answer_tags) and (
        not trajectory.searches or has_one_box(text, protocol.evidence_tags)
    )


FORMATS = {  # protocol -> is the format right?
    "ur2": lambda t: not ur2_violations(t),
    "ur2_search": lambda t: not ur2_violations(t),
    "r1_searcher": lambda t: not r1_searcher_format(t),
    "r_search": r_search_format,
    "when_to_search": when_to_search_format,
    "arena": arena_format,
    "baseline": lambda t: t.answer is not None,  # baselines.py
}


def grade(trajectory: Trajectory) -> dict[str, float]:
    """The numbers of one trajectory, by the names of ALL_COLUMNS. What does not apply to it has no
    entry, and not a 0.
    """
    protocol, question, searches = trajectory.protocol, trajectory.question, trajectory.searches
    summary = question.task == "summary"
    numbers = (
        summary_scores(trajectory.answer, question.answers)
        if summary
        else answer_scores(trajectory)
    )
    if protocol.query_tags:
        fallbacks = sum(s.fallback for s in searches)
        numbers |= {
            "searched": float(bool(searches)),
            "searches": float(len(searches)),
            "fallbacks": float(fallbacks),
        }
    numbers["format"] = float(FORMATS[protocol.name](trajectory))
    if protocol.evidence_tags:
        numbers["evidence"] = float(bool(trajectory.evidence))
        numbers |= {"support": evidence_support(trajectory)} if trajectory.evidence else {}
    if (
        protocol.references_in_prompt and question.supporting
    ):  # without gold numbers a relevance of 0 would say nothing
        numbers |= arena_scores(trajectory)
    return numbers


def prediction_record(trajectory: Trajectory, sample: int) -> dict:
    question = trajectory.question
    return {
        "id": question.id,
        "sample": sample,
        "kind": question.kind,
        "task": question.task,
        "question": question.question,
        **({"options": list(question.options)} if question.options else {}),
        "golds": question.answers,
        "prediction": trajectory.answer,
        "punctuation": punctuation_of(trajectory.protocol.name),
        **({"evidence": trajectory.evidence} if trajectory.protocol.evidence_tags else {}),
        "transcript": trajectory.text,
        "stop_reason": trajectory.stop_reason,
        "searches": [
            {"query": s.query, "fallback": s.fallback, "error": s.error}
            for s in trajectory.searches
        ],
        "metrics": grade(trajectory),
    }


# ------------------------------------------------------------------------------------- many of them


def evaluate(
    policy,
    tokenizer,
    questions: list[Question],
    search,
    recipe: Recipe,
    samples: int = 1,
    out: Path | None = None,
    quiet: bool = False,
    done: list[dict] | None = None,
    dataset_of: dict[str, str] | None = None,
) -> list[dict]:
    """Prediction records, question by question; each batch is appended to `out` as soon as it is
    finished.

    done        the first records of this very evaluation, in whole batches (`finished_before`):
                they are not made again
    dataset_of  question id -> data set, where there are several
    """
    protocol, records = build_protocol(recipe), list(done or [])
    check_prompts(questions, protocol, tokenizer, policy, **rollout_settings(recipe))
    if out:
        write_records(out, records)
    begin, total = len(records), len(questions) * samples
    with tqdm(
        total=total, initial=begin, desc="evaluation", dynamic_ncols=True, disable=quiet
    ) as bar:
        for start in range(begin // samples, len(questions), QUESTIONS_AT_ONCE):
            some = questions[start : start + QUESTIONS_AT_ONCE]
            trajectories = rollout(
                policy,
                tokenizer,
                some,
                search,
                protocol,
                samples,
                seed=recipe.seed + start,
                progress=bar.update,
                **rollout_settings(recipe),
            )
            fresh = [prediction_record(t, i % samples) for i, t in enumerate(trajectories)]
            if dataset_of:
                fresh = [{**record, "dataset": dataset_of[record["id"]]} for record in fresh]
            if out:
                append_jsonl(out, fresh)
            records += fresh
    return records


# Settings that change no prediction: who is asked about them, and where files lie.
NOT_OF_A_PREDICTION = {
    "name",
    "runs",
    "resume",
    "judge",
    "llm_timeout",
    "llm_retries",
    "llm_cache",
    "summary_log",
    "vectors",
    "web_rate",
    "search_timeout",
    "search_retries",
    "threads",
}


def signature(
    recipe: Recipe, samples: int, version: str, questions: list[Question], documents: list
) -> dict:
    """What a predictions file was made with: settings, weights, questions and passages."""
    settings = {
        name: value
        for name, value in dataclasses.asdict(recipe).items()
        if name not in NOT_OF_A_PREDICTION
    }
    content = hashlib.sha256(
        build_protocol(recipe).instruction.encode()
    )  # --prompt_file names a file, not its words
    for item in [*questions, *documents]:
        content.update(repr(item).encode())
    return {
        **settings,
        "samples": samples,
        "weights": version,
        "material": content.hexdigest()[:16],
    }


def finished_before(
    out: Path, made_with: dict, questions: list[Question], samples: int, fresh: bool
) -> list[dict]:
    """The records of an interrupted evaluation with these very settings, as many whole batches as
    there are: a batch has one seed, so that going on gives the numbers of an unbroken run. It ends
    before the first batch in which the retriever was out (a query that it does not take, while it
    takes others, would fail again). What is not gone on with is put aside.
    """
    settings_file = out.with_name(out.name + ".settings.json")
    same = settings_file.is_file() and settings_file.read_text(encoding="utf-8") == json.dumps(
        made_with, indent=1
    )
    records = finished_records(out) if out.is_file() and same and not fresh else []
    expected = [(question.id, sample) for question in questions for sample in range(samples)]
    whole = good_start(records, expected)
    if whole < len(expected):
        whole -= whole % (QUESTIONS_AT_ONCE * samples)
    if out.is_file() and out.stat().st_size and (whole < len(records) or not same or fresh):
        put_aside(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    settings_file.write_text(json.dumps(made_with, indent=1), encoding="utf-8")
    return records[:whole]


def good_start(records: list[dict], expected: list[tuple[str, int]]) -> int:
    """How many records, from the first on, are those of `expected` (question id, sample) and saw no
    outage of the retriever.
    """
    for number, (record, wanted) in enumerate(zip(records, expected, strict=False)):
        outage = any(fault != SEARCH_FAILED for fault in search_faults([record]))
        if (record.get("id"), record.get("sample")) != wanted or outage:
            return number
    return min(len(records), len(expected))


def put_aside(out: Path) -> None:
    """What was computed once is kept, under the first free of .old, .old2, ..."""
    names = (f"{out.name}.old{number if number > 1 else ''}" for number in itertools.count(1))
    name = next(name for name in names if not out.with_name(name).exists())
    os.replace(out, out.with_name(name))
    print(f"the predictions that were in {out} are kept as {name}")


def search_faults(records: list[dict]) -> list[str]:
    """What failed searches said. Scores of trajectories that could not search are not the
    model's.
    """
    return [
        search["error"]
        for record in records
        for search in record.get("searches", [])
        if search["error"]
    ]


# ---------------------------------------------------------------------------- what others say of it


def add_reader(records: list[dict], llm) -> list[dict]:
    """R-Search as a search tool: `llm` answers from the evidence alone; its scores stand beside the
    policy's own.
    """
    answered = answer_from_evidence(llm, records)
    return [
        {
            **record,
            "reader_prediction": other["prediction"],
            "metrics": {
                **record["metrics"],
                **{f"reader_{name}": score for name, score in other["metrics"].items()},
            },
        }
        for record, other in zip(records, answered, strict=True)
    ]


def add_verdicts(records: list[dict], judge: Judge) -> list[dict]:
    """The column `judged`: 1 or 0; None where the verdict could not be read, which is neither."""
    verdicts = judge.verdicts([(question_of(record), record["prediction"]) for record in records])
    if judge.silent:  # what the file says already is kept
        verdicts = [
            record["metrics"].get("judged") if said is None else said
            for record, said in zip(records, verdicts, strict=True)
        ]
    return [
        {
            **record,
            "metrics": {**record["metrics"], "judged": None if said is None else float(said)},
        }
        for record, said in zip(records, verdicts, strict=True)
    ]


def question_of(record: dict) -> Question:
    options = tuple(record.get("options", ()))
    return Question(
        record["id"], record["question"], record["golds"], record.get("task", "qa"), options
    )


def ask_others(records: list[dict], reader, judge: Judge | None, out: Path | None) -> list[dict]:
    """The records with the reader's answers and the judge's verdicts, also in `out`; says how many
    did not come.
    """
    if reader:
        before = getattr(reader, "failures", 0)
        records = add_reader(records, reader)
        if failed := getattr(reader, "failures", 0) - before:
            print(
                f"reader: no answer to {failed} of its requests; they count as wrong in reader_em"
                " and reader_f1"
            )
    if judge:
        records = add_verdicts(records, judge)
        print(
            f"judge: {judge.unreadable} of {judge.asked} verdicts unreadable "
            f"({judge.unreadable / max(1, judge.asked):.1%}); the column `judged` is without them"
        )
        if judge.silent:
            print(
                f"judge: {judge.silent} of them got no reply at all: the same command asks again"
                " for those"
            )
    if out and (reader or judge):
        write_records(out, records)
    return records


def write_records(path: Path, records: list[dict]) -> None:
    """All at once: an interrupt leaves the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(
        "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records),
        encoding="utf-8",
    )
    os.replace(partial, path)


# --------------------------------------------------------------------------------- the command line

SHARED = [
    "recipe",
    "stage",
    "model",
    "data",
    "corpus",
    "skip_bad",
    "prompt_file",
    "runs",
    "name",
    "seed",
    "world_seed",
    "protocol",
    "retrieval",
    "temperature",
    "top_p",
    "max_searches",
    "max_turn_tokens",
    "max_context",
    "rollout_batch_size",
    "engine",
    "notices",
    "retriever",
    "retriever_url",
    "encoder",
    "pooling",
    "vectors",
    "index_file",
    "allow_private",
    "web_rate",
    "title_boost",
    "documents_per_search",
    "document_tokens",
    "summarizer",
    "summarizer_model",
    "search_timeout",
    "search_retries",
    "load_in_8bit",
    "llm_timeout",
    "llm_retries",
    "llm_cache",
]
WITHOUT_MODEL = [  # with --predictions: settings of the others that are asked, and which run it is
    "judge",
    "load_in_8bit",
    "llm_timeout",
    "llm_retries",
    "llm_cache",
    "recipe",
    "stage",
    "runs",
    "name",
    "seed",
    "world_seed",
    "data",
    "skip_bad",
]
OPTIONS = (
    "split",
    "questions",
    "samples",
    "fact_seed",
    "decoding",
    "fresh",
    "reader",
    "predictions",
    "out",
)
REPORT = ("against", "punctuation", "count_missing", "markdown", "json")


def parse(arguments: list[str] | None = None) -> tuple[Recipe, dict]:
    parser = FlagParser("eval.py", description="Score a checkpoint.")
    add_flags(parser, [*SHARED, "judge"])
    parser.add_argument(
        "--split", default="test", choices=["train", "dev", "test"], help="of the built-in world"
    )
    parser.add_argument(
        "--questions",
        type=int,
        default=100,
        help="per kind in the built-in world; of a file, 0 = all",
    )
    parser.add_argument("--samples", type=int, default=1, help="trajectories per question")
    parser.add_argument(
        "--fact_seed", type=int, default=None, help="redraw every fact of the built-in world"
    )
    parser.add_argument(
        "--reader",
        default="",
        metavar="SPEC",
        help="answers from the evidence: URL#model, a HF model, or built-in (its second model)",
    )
    parser.add_argument(
        "--decoding",
        default="greedy",
        choices=["greedy", "paper", "both"],
        help="paper: as the paper evaluates; both: at temperature 1, and greedily",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="do not go on with predictions that are there already"
    )
    parser.add_argument(
        "--predictions",
        default="",
        metavar="FILE,FILE",
        help="score these, in any layout; no model is run",
    )
    parser.add_argument(
        "--out",
        default="",
        help="predictions file; default: under runs/predictions; none with --predictions",
    )
    add_report_flags(parser)
    given = vars(parser.parse_args(arguments))
    options = {k: given.pop(k) for k in OPTIONS + REPORT}
    for name in ("out", "json"):
        if options[name]:
            check_output(options[name], f"--{name}")
    if options["decoding"] == "both" and (
        bad := next((n for n in ("predictions", "out", "json") if options[n]), "")
    ):
        raise InputError(
            f"--decoding both evaluates twice, and --{bad} is for one: leave one of them out"
        )
    if options["decoding"] == "both" and "temperature" in given:
        raise InputError("--decoding both has temperatures of its own: leave --temperature out")
    if options["samples"] < 1 or options["questions"] < 0:
        raise InputError("--samples must be at least 1, and --questions at least 0 (all)")
    if not options["predictions"]:
        recipe = recipe_of(given)
        if options["decoding"] == "paper":  # of the recipe that the checkpoint was trained with
            recipe = recipe_of({**PAPER_DECODING.get(recipe.recipe, {}), **given})
    else:
        recipe = recipe_without_model(given)
    check_reader(options, recipe)
    return recipe, options


def recipe_without_model(given: dict) -> Recipe:
    """Settings to ask others about stored predictions: no model is run, and a flag about one is a
    misunderstanding.
    """
    if unused := [name for name in given if name not in WITHOUT_MODEL]:
        raise InputError(
            f"--{unused[0]} has no meaning with --predictions, as nothing is rolled out: leave one"
            " of them out"
        )
    stage = given.get("stage") or last_stage(given.get("recipe", "ur2"))
    asked = {k: v for k, v in given.items() if k != "data"}
    recipe = check_recipe(
        resolve(given.get("recipe", "ur2"), stage, True, {**asked, "stage": stage}), training=False
    )
    return dataclasses.replace(recipe, data=given.get("data", ""))


def check_reader(options: dict, recipe: Recipe) -> None:
    if (
        options["reader"]
        and not options["predictions"]
        and not build_protocol(recipe).evidence_tags
    ):
        raise InputError(
            f"--reader answers from evidence boxes, which protocol {recipe.protocol} does not have:"
            " evaluate a model of r_search, or leave it out"
        )
    if options["reader"] == "built-in" and recipe.data:
        raise InputError(
            "--reader built-in knows only the built-in world's words: with --data give URL#model or"
            " a HF model"
        )


def recipe_of(given: dict) -> Recipe:
    """The settings the checkpoint was trained with, made greedy, without the judge of its reward
    and its log of summaries; what the command line says comes last. Stage 0 is the model before
    RL.
    """
    before_rl = given.get("stage") == 0
    given = {k: v for k, v in given.items() if not (before_rl and k == "stage")}
    model = given.get("model", "") if before_rl else given.get("model") or last_checkpoint(given)
    if model:
        check_model_path(model)
    recipe = saved_settings(model)
    if recipe is None or given.get("recipe", recipe.recipe) != recipe.recipe:
        name = given.get("recipe", "ur2")
        recipe = resolve(name, given.get("stage", last_stage(name)), not model)
    if "data" in given and recipe.corpus != "from-data":
        recipe = dataclasses.replace(recipe, corpus="")  # another question file: not the old corpus
    evaluation = {
        "temperature": 0.0,
        "top_p": 1.0,
        "judge": "",
        "summary_log": "",
        "cuda_graphs": False,
    }
    recipe = dataclasses.replace(recipe, **{**evaluation, **given, "model": model})
    return check_recipe(recipe, training=False)


def last_stage(recipe: str) -> int:
    """2, or 1 of a paper that has one stage only."""
    return max(RECIPES.get(recipe, {1: {}}))


def saved_settings(model: str) -> Recipe | None:
    """The settings beside a checkpoint of ours; None for any other model."""
    path = Path(model, "settings.json")
    if not model or not path.exists():
        return None
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        known = {f.name for f in dataclasses.fields(Recipe)}
        return Recipe(**{k: v for k, v in saved.items() if k in known})
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: not a settings file of train.py ({error})") from None


def last_checkpoint(given: dict) -> str:
    """Of the run that the flags name, the last one of its latest stage; "" (the built-in model)
    where nothing was trained.
    """
    name = given.get("recipe", "ur2")
    stages = [given["stage"]] if "stage" in given else sorted(RECIPES.get(name, {}), reverse=True)
    run = resolve(
        name,
        given.get("stage", 1),
        True,
        {k: v for k, v in given.items() if k not in ("recipe", "stage")},
    )
    for stage in stages:
        if found := checkpoints(stage_folder(run, stage)):
            return str(found[-1])
    if "name" in given or "stage" in given:
        raise InputError(
            f"no checkpoint of that run in {stage_folder(run, stages[0]).parent}: train first, or"
            " give --model"
        )
    return ""


def material(recipe: Recipe, options: dict) -> tuple[dict[str, list[Question]], list]:
    """(questions by data set, passages): a file's, or the built-in world's held-out entities."""
    if recipe.data:
        datasets = load_datasets(recipe.data, skip_bad=recipe.skip_bad)
        documents = passages(recipe, flat(datasets))
        return {
            name: questions[: options["questions"] or None] for name, questions in datasets.items()
        }, documents
    world = world_for(recipe.protocol, recipe.world_seed, options["fact_seed"])
    count, split = options["questions"] or None, options["split"]
    kinds = [q for kind in built_in_kinds(recipe) for q in world.questions(split, kind, count)]
    return {"the built-in world": kinds}, (
        passages(recipe, kinds) if recipe.corpus else world.documents
    )


def flat(datasets: dict[str, list[Question]]) -> list[Question]:
    return [question for questions in datasets.values() for question in questions]


def main(arguments: list[str] | None = None) -> None:
    recipe, options = parse(arguments)
    if options["decoding"] != "both":
        run(recipe, options)
        return
    for temperature in (1.0, 0.0):
        run(dataclasses.replace(recipe, temperature=temperature), options)


def run(recipe: Recipe, options: dict) -> None:
    scoring = {"data": recipe.data, "skip_bad": recipe.skip_bad} | {
        k: options[k] for k in ("punctuation", "count_missing")
    }
    stored = (
        score_files(named_files(options["predictions"]), **scoring)
        if options["predictions"]
        else []
    )
    others = score_files(options["against"], **scoring) if options["against"] else []
    datasets, documents = ({}, []) if stored else material(recipe, options)
    reader, judge = (
        load_reader(recipe, options["reader"]),
        load_judge(recipe),
    )  # before the work: are they there at all?
    out = (
        Path(options["out"] or default_out(recipe, options))
        if options["out"] or not stored
        else None
    )
    try:
        records = stored or roll_out(recipe, options, datasets, documents, out)
        if not stored and options["punctuation"]:
            records = [
                scored({**record, "metrics": dict(record["metrics"])}, options["punctuation"])
                for record in records
            ]
        if not stored and (reader or judge):
            print(
                f"all predictions are in {out}: should asking about them fail, --predictions {out}"
                " asks again"
            )
        records = ask_others(records, reader, judge, out)
    except KeyboardInterrupt:
        kept = f"the predictions that were finished are in {options['predictions'] or out}"
        goes_on = "" if stored else "; the same command goes on behind them"
        print(
            "\ninterrupted;"
            f" {kept + goes_on if stored or out.is_file() else 'nothing was finished yet'}"
        )
        sys.exit(130)
    report(records, others, options["markdown"], options["json"])
    if out:
        print(f"predictions: {out}")


def roll_out(
    recipe: Recipe, options: dict, datasets: dict[str, list[Question]], documents: list, out: Path
) -> list[dict]:
    search = build_search(recipe, documents, best_device())
    policy, tokenizer = load_model(recipe, recipe.model, best_device(), frozen=True)
    questions, samples = flat(datasets), options["samples"]
    searching = f", retriever {recipe.retriever}" if build_protocol(recipe).query_tags else ""
    cut = recipe.data and options["questions"]
    first = f" (the first {options['questions']} of each: --questions 0 takes all)" if cut else ""
    print(
        f"{recipe.model or 'the built-in model, before RL'}: {len(questions)} questions of"
        f" {', '.join(datasets)}{first}, {samples} sample(s) each, temperature"
        f" {recipe.temperature:g}{searching}"
    )
    version = weights_version(recipe.model, policy) if recipe.model else "built-in"
    done = finished_before(
        out,
        signature(recipe, samples, version, questions, documents),
        questions,
        samples,
        options["fresh"],
    )
    if done:
        print(
            f"{len(done)} of {len(questions) * samples} predictions are there already (--fresh"
            " makes them anew)"
        )
    dataset_of = (
        {q.id: name for name, some in datasets.items() for q in some} if len(datasets) > 1 else None
    )
    records = evaluate(
        policy, tokenizer, questions, search, recipe, samples, out, done=done, dataset_of=dataset_of
    )
    if counted := getattr(search, "report", None):
        print(counted())
    if faults := search_faults(records):
        print(
            f"warning: {len(faults)} searches failed (the first: {faults[0]}): these scores are not"
            " the model's; mend the retriever, and the same command makes the batches anew in"
            " which that happened",
            file=sys.stderr,
        )
    return records


def demo(arguments: list[str] | None = None) -> None:
    """`python rollout.py "a question"`: one trajectory, search by search, of the last checkpoint or
    of --model.
    """
    parser = FlagParser("rollout.py", description="Show one live trajectory.")
    parser.add_argument(
        "question",
        nargs="?",
        default="",
        help="without one: a held-out two-hop question, or the file's first",
    )
    add_flags(parser, SHARED)
    given = vars(parser.parse_args(arguments))
    text = given.pop("question")
    recipe = recipe_of(given)
    datasets, documents = material(recipe, {"questions": 0, "split": "test", "fact_seed": None})
    questions = flat(datasets)
    question = pick(questions, text)
    search = build_search(recipe, documents, best_device())
    policy, tokenizer = load_model(recipe, recipe.model, best_device(), frozen=True)
    protocol = build_protocol(recipe)
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in build_prompt(
        protocol, question, tokenizer
    ):
        raise InputError(
            "the model has no tokens for this question, as it knows only its own world's words; "
            f"try: {questions[0].question}"
        )
    trajectory = rollout(
        policy, tokenizer, question, search, protocol, seed=recipe.seed, **rollout_settings(recipe)
    )[0]
    print(f"model: {recipe.model or 'the built-in one, before RL'}")
    for number, search in enumerate(trajectory.searches, 1):
        found = search.error or (
            "(no fact asked for: fallback)" if search.fallback else search.text
        )
        print(f"search {number}: {search.query}\n    -> {found}")
    print(show(trajectory))


def pick(questions: list[Question], text: str) -> Question:
    """The question with this text (its answers are then known), or a new one; "" picks a two-hop
    one, or the first.
    """
    if not text:
        return next((q for q in questions if q.kind == "two_hop"), questions[0])
    return next((q for q in questions if q.question == text), Question("asked", text, []))


def load_judge(recipe: Recipe) -> Judge | None:
    return Judge(build_llm(recipe, recipe.judge, best_device())) if recipe.judge else None


def load_reader(recipe: Recipe, spec: str):
    """What answers from the evidence: the model `spec` names, the built-in world's second one, or
    None.
    """
    if spec == "built-in":
        return build_cross_model(dataclasses.replace(recipe, cross_model=""), best_device())
    return build_llm(recipe, spec, best_device()) if spec else None


def questions_name(recipe: Recipe, split: str) -> str:
    """What is asked, as a part of a file's name."""
    return (
        "+".join(Path(name).stem for name in recipe.data.split(","))[:100]
        or f"world{recipe.world_seed}-{split}"
    )


def default_out(recipe: Recipe, options: dict) -> Path:
    """Never into the model's own folder: it may be a hub name, or read-only."""
    who = "-".join(Path(recipe.model).parts[-3:]) if recipe.model else f"warm-{recipe.protocol}"
    name = f"{who}-{questions_name(recipe, options['split'])}-t{recipe.temperature:g}-{recipe.retriever}.jsonl"
    return Path(recipe.runs) / "predictions" / re.sub(r"[^\w.+-]+", "", name).lstrip("-.")


if __name__ == "__main__":
    run_main(main)
