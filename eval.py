"""What a checkpoint is worth: exact match, F1 and cover-EM, how it searches, and what its evidence is good for.

    python eval.py                                  the last checkpoint of the default run, on held-out entities
    python eval.py --model DIR --data FILE --corpus from-data
    python eval.py --stage 0                        before RL
    python eval.py --retriever empty                does it read, or recall?
    python eval.py --fact_seed 1                    the same names with every fact redrawn: a model that reads stays as good
    python eval.py --judge URL#MODEL                is the answer right in other words? A share of the verdicts that can be read
    python eval.py --recipe r_search --reader SPEC  R-Search as a search tool: another model answers from the evidence
    python eval.py --predictions FILE --reader SPEC the same of predictions that are there already: nothing is rolled out

Greedy unless --temperature says otherwise, with the very protocol, documents and limits of training. Every mean comes
with a bootstrap interval: questions are drawn with replacement 1,000 times, 2.5 % are cut off at either end. A mean is over
those that have the number: support over trajectories with evidence, ROUGE over summaries, verdicts over readable ones.
Predictions are written as they come, before anybody else is asked, so an interrupt loses nothing that was finished.
Left out: going on with an interrupted evaluation, comparison of two runs, predictions in other people's layouts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tqdm import tqdm

from cross_model import answer_from_evidence
from data import InputError, Question, append_jsonl, finished_records, load_questions, run_main
from judge import Judge
from metrics import rouge
from policy import best_device, check_model_path
from prompts import build_prompt
from recipes import (
    RECIPES,
    FlagParser,
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
from rollout import Trajectory, check_prompts, rollout, show
from toy import world_for
from world import KINDS

COLUMNS = ("em", "f1", "cem", "searched", "searches", "fallbacks", "format")  # of every protocol that searches
ALL_COLUMNS = (
    "em", "f1", "cem", "rouge1", "rouge2", "rougeL", "rouge", "judged", "reader_em", "reader_f1",
    "searched", "searches", "fallbacks", "format", "evidence", "support", "relevance", "exact_set", "set_f1",
)  # fmt: skip
QUESTIONS_AT_ONCE = 64


# ------------------------------------------------------------------------------------------------ one trajectory

def r_search_format(trajectory: Trajectory) -> bool:
    """One answer box and, if it searched, one evidence box: all that R-Search's r_f pays for."""
    text, protocol = trajectory.model_text, trajectory.protocol
    return has_one_box(text, protocol.answer_tags) and (not trajectory.searches or has_one_box(text, protocol.evidence_tags))


FORMATS = {  # protocol -> is the format right?
    "ur2": lambda t: not ur2_violations(t),
    "ur2_search": lambda t: not ur2_violations(t),
    "r1_searcher": lambda t: not r1_searcher_format(t),
    "r_search": r_search_format,
    "when_to_search": when_to_search_format,
    "arena": arena_format,
}


def grade(trajectory: Trajectory) -> dict[str, float]:
    """The numbers of one trajectory, by the names of ALL_COLUMNS. What does not apply to it has no entry, and not a 0."""
    protocol, question, searches = trajectory.protocol, trajectory.question, trajectory.searches
    numbers = summary_scores(trajectory) if question.task == "summary" else answer_scores(trajectory)
    if protocol.query_tags:
        fallbacks = sum(s.fallback for s in searches)
        numbers |= {"searched": float(bool(searches)), "searches": float(len(searches)), "fallbacks": float(fallbacks)}
    numbers["format"] = float(FORMATS[protocol.name](trajectory))
    if protocol.evidence_tags:
        numbers["evidence"] = float(bool(trajectory.evidence))
        numbers |= {"support": evidence_support(trajectory)} if trajectory.evidence else {}
    if protocol.references_in_prompt and question.supporting:  # without gold numbers a relevance of 0 would say nothing
        numbers |= arena_scores(trajectory)
    return numbers


def summary_scores(trajectory: Trajectory) -> dict[str, float]:
    """ROUGE and its mean in place of em, f1 and cem: no summary is equal to its reference."""
    scores = rouge(trajectory.answer, trajectory.question.answers)
    return {**scores, "rouge": sum(scores.values()) / len(scores)}


def prediction_record(trajectory: Trajectory, sample: int) -> dict:
    question = trajectory.question
    return {
        "id": question.id, "sample": sample, "kind": question.kind, "task": question.task,
        "question": question.question, **({"options": list(question.options)} if question.options else {}),
        "golds": question.answers, "prediction": trajectory.answer,
        **({"evidence": trajectory.evidence} if trajectory.protocol.evidence_tags else {}),
        "transcript": trajectory.text, "stop_reason": trajectory.stop_reason,
        "searches": [{"query": s.query, "fallback": s.fallback, "error": s.error} for s in trajectory.searches],
        "metrics": grade(trajectory),
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------- many of them

def evaluate(policy, tokenizer, questions: list[Question], search, recipe: Recipe, samples: int = 1, out: Path | None = None,
             quiet: bool = False) -> list[dict]:  # fmt: skip
    """Prediction records, question by question; each batch is appended to `out` as soon as it is finished."""
    protocol, records = build_protocol(recipe), []
    check_prompts(questions, protocol, tokenizer, policy, **rollout_settings(recipe))
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("")
    with tqdm(total=len(questions) * samples, desc="evaluation", dynamic_ncols=True, disable=quiet) as bar:
        for start in range(0, len(questions), QUESTIONS_AT_ONCE):
            some = questions[start : start + QUESTIONS_AT_ONCE]
            trajectories = rollout(policy, tokenizer, some, search, protocol, samples, seed=recipe.seed + start,
                                   progress=bar.update, **rollout_settings(recipe))  # fmt: skip
            fresh = [prediction_record(t, i % samples) for i, t in enumerate(trajectories)]
            if out:
                append_jsonl(out, fresh)
            records += fresh
    return records


def bootstrap(values: np.ndarray, draws: int = 1000, seed: int = 0) -> tuple[float, float, float]:
    """(mean, low, high) with a 95 % percentile interval over the values (one per question).

    >>> bootstrap(np.ones(5))
    (1.0, 1.0, 1.0)
    """
    rng = np.random.default_rng(seed)
    means = values[rng.integers(0, len(values), (draws, len(values)))].mean(1)  # [draws]
    low, high = np.quantile(means, [0.025, 0.975])
    return float(values.mean()), float(low), float(high)


def summarise(records: list[dict]) -> dict[str, dict]:
    """kind -> column -> (mean, low, high); several samples of a question count as their mean: they are not independent."""
    by_kind: dict[str, dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        for kind in (record["kind"], "all"):
            by_kind[kind][record["id"]].append(record["metrics"])
    order = sorted(by_kind, key=lambda kind: (kind == "all", KINDS.index(kind) if kind in KINDS else 99, kind))
    summary = {}
    for kind in order:
        questions = by_kind[kind].values()
        columns = {c: question_means(questions, c) for c in ALL_COLUMNS}
        summary[kind] = {"questions": len(questions), **{c: bootstrap(v) for c, v in columns.items() if len(v)}}
    return summary


def question_means(questions: Iterable[list[dict]], column: str) -> np.ndarray:
    """Each question's mean over its samples that have the number; a question without one is left out: None is not 0.

    >>> question_means([[{"judged": 1.0}, {"judged": None}], [{"em": 1.0}]], "judged")
    array([1.])
    """
    values = [[m[column] for m in metrics if m.get(column) is not None] for metrics in questions]
    return np.array([np.mean(v) for v in values if v])


NAME_WIDTH, CELL_WIDTH = 23, 18


def table(summary: dict[str, dict], width: int = 0) -> str:
    """A line per kind, in blocks of as many columns as fit `width` characters; 0 = the terminal's."""
    columns = [c for c in ALL_COLUMNS if any(c in row for row in summary.values())]
    width = width or shutil.get_terminal_size((150, 24)).columns
    blocks = math.ceil(len(columns) / max(1, (width - NAME_WIDTH) // CELL_WIDTH))
    size = math.ceil(len(columns) / blocks)
    return "\n\n".join(table_block(summary, columns[i : i + size]) for i in range(0, len(columns), size))


def table_block(summary: dict[str, dict], columns: list[str]) -> str:
    lines = [f"{'kind':16}{'n':>5}  " + "".join(f"{c:>{CELL_WIDTH}}" for c in columns)]
    for kind, row in summary.items():
        cells = ["{:.2f} [{:.2f}, {:.2f}]".format(*row[c]) if c in row else "-" for c in columns]
        lines.append(f"{kind:16}{row['questions']:>5}  " + "".join(f"{cell:>{CELL_WIDTH}}" for cell in cells))
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------- what others say of it

def add_reader(records: list[dict], llm) -> list[dict]:
    """R-Search as a search tool: `llm` answers from the evidence alone; its scores stand beside the policy's own."""
    answered = answer_from_evidence(llm, records)
    return [
        {**record, "reader_prediction": other["prediction"],
         "metrics": {**record["metrics"], **{f"reader_{name}": score for name, score in other["metrics"].items()}}}
        for record, other in zip(records, answered, strict=True)
    ]  # fmt: skip


def add_verdicts(records: list[dict], judge: Judge) -> list[dict]:
    """The column `judged`: 1 or 0; None where the verdict could not be read, which is neither."""
    verdicts = judge.verdicts([(question_of(record), record["prediction"]) for record in records])
    return [
        {**record, "metrics": {**record["metrics"], "judged": None if said is None else float(said)}}
        for record, said in zip(records, verdicts, strict=True)
    ]


def question_of(record: dict) -> Question:
    options = tuple(record.get("options", ()))
    return Question(record["id"], record["question"], record["golds"], record.get("task", "qa"), options)


def ask_others(records: list[dict], reader, judge: Judge | None, out: Path | None) -> list[dict]:
    """The records with the reader's answers and the judge's verdicts, also in `out`; says how many did not come."""
    if reader:
        before = getattr(reader, "failures", 0)
        records = add_reader(records, reader)
        if failed := getattr(reader, "failures", 0) - before:
            print(f"reader: no answer to {failed} of its requests; they count as wrong in reader_em and reader_f1")
    if judge:
        records = add_verdicts(records, judge)
        print(f"judge: {judge.unreadable} of {judge.asked} verdicts unreadable "
              f"({judge.unreadable / max(1, judge.asked):.1%}); the column `judged` is without them")  # fmt: skip
    if out and (reader or judge):
        write_records(out, records)
    return records


def write_records(path: Path, records: list[dict]) -> None:
    """All at once: an interrupt leaves the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    os.replace(partial, path)


RECORD_FIELDS = {"id": str, "kind": str, "question": str, "golds": list, "prediction": (str, type(None)), "metrics": dict}


def read_predictions(path: str) -> list[dict]:
    """The records that an evaluation has written; of an interrupted one those that were finished."""
    if not Path(path).is_file():
        raise InputError(f"--predictions {path}: no such file")
    records = finished_records(path, cut=False)
    if not records:
        raise InputError(f"--predictions {path}: no predictions in it")
    for number, record in enumerate(records, 1):
        if wrong := [f for f, kind in RECORD_FIELDS.items() if f not in record or not isinstance(record[f], kind)]:
            raise InputError(f"{path}, line {number}: field {wrong[0]!r} is missing or of the wrong type: "
                             "give a predictions file of eval.py")  # fmt: skip
    return records


# ------------------------------------------------------------------------------------------------ the command line

SHARED = [
    "recipe", "stage", "model", "data", "corpus", "skip_bad", "prompt_file", "runs", "name", "seed", "world_seed", "protocol",
    "retrieval", "temperature", "top_p", "max_searches", "max_turn_tokens", "max_context", "rollout_batch_size", "notices",
    "retriever", "title_boost", "documents_per_search", "document_tokens", "summarizer", "summarizer_model", "search_timeout",
    "search_retries", "load_in_8bit", "llm_timeout", "llm_retries", "llm_cache",
]  # fmt: skip
WITHOUT_MODEL = [  # with --predictions: settings of the others that are asked, and which run it is
    "judge", "load_in_8bit", "llm_timeout", "llm_retries", "llm_cache", "recipe", "stage", "runs", "name", "seed", "world_seed",
]  # fmt: skip
OPTIONS = ("split", "questions", "samples", "fact_seed", "reader", "predictions", "out", "json")


def parse(arguments: list[str] | None = None) -> tuple[Recipe, dict]:
    parser = FlagParser("eval.py", description="Score a checkpoint.", allow_abbrev=False)
    add_flags(parser, [*SHARED, "judge"])
    parser.add_argument("--split", default="test", choices=["train", "dev", "test"], help="of the built-in world")
    parser.add_argument("--questions", type=int, default=100, help="per kind in the built-in world; of a file, 0 = all")
    parser.add_argument("--samples", type=int, default=1, help="trajectories per question")
    parser.add_argument("--fact_seed", type=int, default=None, help="redraw every fact of the built-in world")
    parser.add_argument("--reader", default="", metavar="SPEC",
                        help="answers from the evidence: URL#model, a HF model, or built-in (its second model)")
    parser.add_argument("--predictions", default="", metavar="FILE", help="of an earlier evaluation: ask others about these")
    parser.add_argument("--out", default="", help="predictions file; default: under runs/predictions; none with --predictions")
    parser.add_argument("--json", default="", help="write the table to this file too")
    given = vars(parser.parse_args(arguments))
    options = {k: given.pop(k) for k in OPTIONS}
    if options["samples"] < 1 or options["questions"] < 0:
        raise InputError("--samples must be at least 1, and --questions at least 0 (all)")
    recipe = recipe_without_model(given) if options["predictions"] else recipe_of(given)
    check_reader(options, recipe)
    return recipe, options


def recipe_without_model(given: dict) -> Recipe:
    """Settings to ask others about stored predictions: no model is run, and a flag about one is a misunderstanding."""
    if unused := [name for name in given if name not in WITHOUT_MODEL]:
        raise InputError(f"--{unused[0]} has no meaning with --predictions, as nothing is rolled out: leave one of them out")
    stage = given.get("stage") or last_stage(given.get("recipe", "ur2"))
    return check_recipe(resolve(given.get("recipe", "ur2"), stage, True, {**given, "stage": stage}), training=False)


def check_reader(options: dict, recipe: Recipe) -> None:
    if options["reader"] and not options["predictions"] and not build_protocol(recipe).evidence_tags:
        raise InputError(f"--reader answers from evidence boxes, which protocol {recipe.protocol} does not have: "
                         "evaluate a model of r_search, or leave it out")  # fmt: skip
    if options["reader"] == "built-in" and recipe.data:
        raise InputError("--reader built-in knows only the built-in world's words: with --data give URL#model or a HF model")


def recipe_of(given: dict) -> Recipe:
    """The settings the checkpoint was trained with, made greedy, without the judge of its reward and its log of summaries;
    what the command line says comes last. Stage 0 is the model before RL."""
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
    evaluation = {"temperature": 0.0, "top_p": 1.0, "judge": "", "summary_log": ""}
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
    """Of the run that the flags name, the last one of its latest stage; "" (the built-in model) where nothing was trained."""
    name = given.get("recipe", "ur2")
    stages = [given["stage"]] if "stage" in given else sorted(RECIPES.get(name, {}), reverse=True)
    run = resolve(name, given.get("stage", 1), True, {k: v for k, v in given.items() if k not in ("recipe", "stage")})
    for stage in stages:
        if found := checkpoints(stage_folder(run, stage)):
            return str(found[-1])
    if "name" in given or "stage" in given:
        raise InputError(f"no checkpoint of that run in {stage_folder(run, stages[0]).parent}: train first, or give --model")
    return ""


def material(recipe: Recipe, options: dict) -> tuple[list[Question], list]:
    """(questions, passages): a file's, or the built-in world's held-out entities."""
    if recipe.data:
        questions = load_questions(recipe.data, skip_bad=recipe.skip_bad)
        count = options["questions"]
        return questions[: count or None], passages(recipe, questions)
    world = world_for(recipe.protocol, recipe.world_seed, options["fact_seed"])
    count, split = options["questions"] or None, options["split"]
    kinds = [q for kind in built_in_kinds(recipe) for q in world.questions(split, kind, count)]
    return kinds, passages(recipe, kinds) if recipe.corpus else world.documents


def main(arguments: list[str] | None = None) -> None:
    recipe, options = parse(arguments)
    stored = read_predictions(options["predictions"]) if options["predictions"] else []
    questions, documents = ([], []) if stored else material(recipe, options)
    reader, judge = load_reader(recipe, options["reader"]), load_judge(recipe)  # before the work: are they there at all?
    out = Path(options["out"] or default_out(recipe, options)) if options["out"] or not stored else None
    try:
        records = stored or roll_out(recipe, options, questions, documents, out)
        if not stored and (reader or judge):
            print(f"all predictions are in {out}: should asking about them fail, --predictions {out} asks again")
        records = ask_others(records, reader, judge, out)
    except KeyboardInterrupt:
        print(f"\ninterrupted; the predictions that were finished are in {options['predictions'] or out}")
        sys.exit(130)
    summary = summarise(records)
    print(table(summary))
    if out:
        print(f"predictions: {out}")
    if options["json"]:
        Path(options["json"]).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def roll_out(recipe: Recipe, options: dict, questions: list[Question], documents: list, out: Path) -> list[dict]:
    search = build_search(recipe, documents, best_device())
    policy, tokenizer = load_model(recipe, recipe.model, best_device())
    searching = f", retriever {recipe.retriever}" if build_protocol(recipe).query_tags else ""
    print(f"{recipe.model or 'the built-in model, before RL'}: {len(questions)} questions of "
          f"{recipe.data or 'the built-in world'}, {options['samples']} sample(s) each, "
          f"temperature {recipe.temperature:g}{searching}")  # fmt: skip
    return evaluate(policy, tokenizer, questions, search, recipe, options["samples"], out)


def demo(arguments: list[str] | None = None) -> None:
    """`python rollout.py "a question"`: one trajectory, search by search, of the last checkpoint or of --model."""
    parser = FlagParser("rollout.py", description="Show one live trajectory.", allow_abbrev=False)
    parser.add_argument("question", nargs="?", default="", help="without one: a held-out two-hop question, or the file's first")
    add_flags(parser, SHARED)
    given = vars(parser.parse_args(arguments))
    text = given.pop("question")
    recipe = recipe_of(given)
    questions, documents = material(recipe, {"questions": 0, "split": "test", "fact_seed": None})
    question = pick(questions, text)
    search = build_search(recipe, documents, best_device())
    policy, tokenizer = load_model(recipe, recipe.model, best_device())
    protocol = build_protocol(recipe)
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in build_prompt(protocol, question, tokenizer):
        raise InputError(f"the model has no tokens for this question, as it knows only its own world's words; "
                         f"try: {questions[0].question}")  # fmt: skip
    trajectory = rollout(policy, tokenizer, question, search, protocol, seed=recipe.seed, **rollout_settings(recipe))[0]
    print(f"model: {recipe.model or 'the built-in one, before RL'}")
    for number, search in enumerate(trajectory.searches, 1):
        found = search.error or ("(no fact asked for: fallback)" if search.fallback else search.text)
        print(f"search {number}: {search.query}\n    -> {found}")
    print(show(trajectory))


def pick(questions: list[Question], text: str) -> Question:
    """The question with this text (its answers are then known), or a new one; "" picks a two-hop one, or the first."""
    if not text:
        return next((q for q in questions if q.kind == "two_hop"), questions[0])
    return next((q for q in questions if q.question == text), Question("asked", text, []))


def load_judge(recipe: Recipe) -> Judge | None:
    return Judge(build_llm(recipe, recipe.judge, best_device())) if recipe.judge else None


def load_reader(recipe: Recipe, spec: str):
    """What answers from the evidence: the model `spec` names, the built-in world's second one, or None."""
    if spec == "built-in":
        return build_cross_model(dataclasses.replace(recipe, cross_model=""), best_device())
    return build_llm(recipe, spec, best_device()) if spec else None


def default_out(recipe: Recipe, options: dict) -> Path:
    """Never into the model's own folder: it may be a hub name, or read-only."""
    of = Path(recipe.data).stem if recipe.data else f"world{recipe.world_seed}-{options['split']}"
    who = "-".join(Path(recipe.model).parts[-3:]) if recipe.model else f"warm-{recipe.protocol}"
    name = f"{who}-{of}-t{recipe.temperature:g}-{recipe.retriever}.jsonl"
    return Path(recipe.runs) / "predictions" / re.sub(r"[^\w.-]+", "", name).lstrip("-.")


if __name__ == "__main__":
    run_main(main)
