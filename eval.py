"""What a checkpoint is worth: exact match, F1 and cover-EM, and how it searches, by kind of question.

    python eval.py                                  the last checkpoint of the default run, on held-out entities
    python eval.py --model DIR --data FILE --corpus from-data
    python eval.py --stage 0                        before RL
    python eval.py --retriever empty                does it read, or recall?
    python eval.py --fact_seed 1                    the same names with every fact redrawn: a model that reads stays as good

Greedy unless --temperature says otherwise, with the very protocol, documents and limits of training. Every mean comes
with a bootstrap interval: questions are drawn with replacement 1,000 times, 2.5 % are cut off at either end.
Predictions are written as they come, so an interrupt loses nothing that was finished.
Left out: judges, comparison of two runs, scoring a predictions file without a model.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from data import InputError, Question, load_questions, run_main
from policy import check_model_path, load_policy
from prompts import build_prompt
from recipes import (
    RECIPES,
    FlagParser,
    Recipe,
    add_flags,
    answer_scores,
    build_protocol,
    build_search,
    check_recipe,
    checkpoints,
    passages,
    resolve,
    rollout_settings,
    stage_folder,
)
from rewards import r1_searcher_format, ur2_violations
from rollout import Trajectory, check_prompts, rollout, show
from toy import KINDS, World, load_toy

COLUMNS = ("em", "f1", "cem", "searched", "searches", "fallbacks", "format")
QUESTIONS_AT_ONCE = 64


# ------------------------------------------------------------------------------------------------ one trajectory

def grade(trajectory: Trajectory) -> dict[str, float]:
    """The numbers of one trajectory, by the names of COLUMNS."""
    faults = ur2_violations if trajectory.protocol.answer_tags is None else r1_searcher_format
    searches = trajectory.searches
    return {
        **answer_scores(trajectory), "searched": float(bool(searches)), "searches": float(len(searches)),
        "fallbacks": float(sum(s.fallback for s in searches)), "format": float(not faults(trajectory)),
    }  # fmt: skip


def prediction_record(trajectory: Trajectory, sample: int) -> dict:
    return {
        "id": trajectory.question.id, "sample": sample, "kind": trajectory.question.kind,
        "question": trajectory.question.question, "golds": trajectory.question.answers, "prediction": trajectory.answer,
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
                with open(out, "a", encoding="utf-8") as file:
                    file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in fresh)
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
        columns = {c: np.array([np.mean([m[c] for m in metrics]) for metrics in questions]) for c in COLUMNS}
        summary[kind] = {"questions": len(questions), **{c: bootstrap(values) for c, values in columns.items()}}
    return summary


def table(summary: dict[str, dict]) -> str:
    lines = [f"{'kind':16}{'n':>5}  " + "".join(f"{c:>18}" for c in COLUMNS)]
    for kind, row in summary.items():
        cells = "".join(f"{'{:.2f} [{:.2f}, {:.2f}]'.format(*row[c]):>18}" for c in COLUMNS)
        lines.append(f"{kind:16}{row['questions']:>5}  {cells}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------ the command line

SHARED = [
    "recipe", "stage", "model", "data", "corpus", "skip_bad", "prompt_file", "runs", "name", "seed", "world_seed", "protocol",
    "retrieval", "temperature", "top_p", "max_searches", "max_turn_tokens", "max_context", "rollout_batch_size", "notices",
    "retriever", "title_boost", "documents_per_search", "document_tokens", "summarizer", "search_timeout", "search_retries",
]  # fmt: skip


def parse(arguments: list[str] | None = None) -> tuple[Recipe, dict]:
    parser = FlagParser("eval.py", description="Score a checkpoint.", allow_abbrev=False)
    add_flags(parser, SHARED)
    parser.add_argument("--split", default="test", choices=["train", "dev", "test"], help="of the built-in world")
    parser.add_argument("--questions", type=int, default=100, help="per kind in the built-in world; of a file, 0 = all")
    parser.add_argument("--samples", type=int, default=1, help="trajectories per question")
    parser.add_argument("--fact_seed", type=int, default=None, help="redraw every fact of the built-in world")
    parser.add_argument("--out", default="", help="predictions file; default: under runs/predictions")
    parser.add_argument("--json", default="", help="write the table to this file too")
    given = vars(parser.parse_args(arguments))
    options = {k: given.pop(k) for k in ("split", "questions", "samples", "fact_seed", "out", "json")}
    if options["samples"] < 1 or options["questions"] < 0:
        raise InputError("--samples must be at least 1, and --questions at least 0 (all)")
    return recipe_of(given), options


def recipe_of(given: dict) -> Recipe:
    """The settings the checkpoint was trained with, made greedy; what the command line says comes last. Stage 0 is the
    model before RL."""
    before_rl = given.get("stage") == 0
    given = {k: v for k, v in given.items() if not (before_rl and k == "stage")}
    model = given.get("model", "") if before_rl else given.get("model") or last_checkpoint(given)
    if model:
        check_model_path(model)
    recipe = saved_settings(model)
    if recipe is None or given.get("recipe", recipe.recipe) != recipe.recipe:
        recipe = resolve(given.get("recipe", "ur2"), given.get("stage", 2), not model)
    if "data" in given and recipe.corpus != "from-data":
        recipe = dataclasses.replace(recipe, corpus="")  # another question file: not the old corpus
    recipe = dataclasses.replace(recipe, **{"temperature": 0.0, "top_p": 1.0, **given, "model": model})
    return check_recipe(recipe, training=False)


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
    world = World(recipe.world_seed, options["fact_seed"])
    kinds = [q for kind in KINDS for q in world.questions(options["split"], kind, options["questions"] or None)]
    return kinds, passages(recipe, kinds) if recipe.corpus else world.documents


def main(arguments: list[str] | None = None) -> None:
    recipe, options = parse(arguments)
    questions, documents = material(recipe, options)
    search = build_search(recipe, documents)
    policy, tokenizer = load(recipe)
    out = Path(options["out"] or default_out(recipe, options))
    print(f"{recipe.model or 'the built-in model, before RL'}: {len(questions)} questions of "
          f"{recipe.data or 'the built-in world'}, {options['samples']} sample(s) each, "
          f"temperature {recipe.temperature:g}, retriever {recipe.retriever}")  # fmt: skip
    try:
        records = evaluate(policy, tokenizer, questions, search, recipe, options["samples"], out)
    except KeyboardInterrupt:
        print(f"\ninterrupted; the predictions that were finished are in {out}")
        sys.exit(130)
    summary = summarise(records)
    print(table(summary))
    print(f"predictions: {out}")
    if options["json"]:
        Path(options["json"]).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


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
    search = build_search(recipe, documents)
    policy, tokenizer = load(recipe)
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


def load(recipe: Recipe):
    """(policy, tokenizer) on the GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if recipe.model:
        return load_policy(recipe.model, device)
    policy, tokenizer, _ = load_toy(recipe.world_seed, recipe.protocol, recipe.runs)
    return policy.to(device), tokenizer


def default_out(recipe: Recipe, options: dict) -> Path:
    """Never into the model's own folder: it may be a hub name, or read-only."""
    of = Path(recipe.data).stem if recipe.data else f"world{recipe.world_seed}-{options['split']}"
    who = "-".join(Path(recipe.model).parts[-3:]) if recipe.model else f"warm-{recipe.protocol}"
    name = f"{who}-{of}-t{recipe.temperature:g}-{recipe.retriever}.jsonl"
    return Path(recipe.runs) / "predictions" / re.sub(r"[^\w.-]+", "", name).lstrip("-.")


if __name__ == "__main__":
    run_main(main)
