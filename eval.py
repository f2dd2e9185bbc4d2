"""What a checkpoint is worth: exact match, F1 and cover-EM, and how it searches, by kind of question.

    python eval.py                                  the last checkpoint of the default run, on held-out entities
    python eval.py --model DIR --data FILE --corpus from-data
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
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from data import InputError, Question, load_questions, run_main
from metrics import choice_letter, cover_exact_match, exact_match, f1_score, math_equal
from policy import load_policy
from recipes import FlagParser, Recipe, add_flags, build_protocol, build_search, passages, resolve, rollout_settings
from rewards import r1_searcher_format, ur2_violations
from rollout import Trajectory, check_prompts, rollout, show
from toy import KINDS, World, load_toy

COLUMNS = ("em", "f1", "cem", "searched", "searches", "fallbacks", "format")
QUESTIONS_AT_ONCE = 64


# ------------------------------------------------------------------------------------------------ one trajectory

def grade(trajectory: Trajectory) -> dict[str, float]:
    """The numbers of one trajectory. A math or choice answer that is right counts 1 under every answer metric."""
    question, answer = trajectory.question, trajectory.answer or ""
    if question.task == "math":
        em = f1 = cem = float(any(math_equal(answer, gold) for gold in question.answers))
    elif question.task == "choice":
        em = f1 = cem = float(choice_letter(answer, question.options) in question.answers)
    else:
        em, f1, cem = (metric(answer, question.answers) for metric in (exact_match, f1_score, cover_exact_match))
    faults = ur2_violations if trajectory.protocol.answer_tags is None else r1_searcher_format
    searches = trajectory.searches
    return {
        "em": em, "f1": f1, "cem": cem, "searched": float(bool(searches)), "searches": float(len(searches)),
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


def parse(arguments: list[str] | None = None) -> tuple[Recipe, object]:
    parser = FlagParser("eval.py", description="Score a checkpoint.", allow_abbrev=False)
    add_flags(parser, SHARED)
    parser.add_argument("--split", default="test", choices=["train", "dev", "test"], help="of the built-in world")
    parser.add_argument("--questions", type=int, default=100, help="per kind in the built-in world; of a file, 0 = all")
    parser.add_argument("--samples", type=int, default=1, help="trajectories per question")
    parser.add_argument("--fact_seed", type=int, default=None, help="redraw every fact of the built-in world")
    parser.add_argument("--out", default="", help="predictions file; default: beside the checkpoint")
    parser.add_argument("--json", default="", help="write the table to this file too")
    given = vars(parser.parse_args(arguments))
    options = {k: given.pop(k) for k in ("split", "questions", "samples", "fact_seed", "out", "json")}
    return recipe_of(given), options


def recipe_of(given: dict) -> Recipe:
    """The settings the checkpoint was trained with, greedy, and what the command line says otherwise."""
    model = given.get("model") or last_checkpoint(given)
    saved = Path(model, "settings.json")
    if model and saved.exists():
        recipe = Recipe(**json.loads(saved.read_text(encoding="utf-8")))
        if "data" in given or given.get("recipe", recipe.recipe) != recipe.recipe:
            recipe = dataclasses.replace(recipe, corpus="")  # another question file: not the old corpus
    else:
        recipe = resolve(given.get("recipe", "ur2"), given.get("stage", 2), not model)
    return dataclasses.replace(recipe, **{"temperature": 0.0, "top_p": 1.0, **given, "model": model})


def last_checkpoint(given: dict) -> str:
    """Of the run the flags name, its latest stage; "" (the built-in warm model) where nothing was trained."""
    name = given.get("name") or f"{given.get('recipe', 'ur2')}-world{given.get('world_seed', 0)}-seed{given.get('seed', 0)}"
    stages = [f"stage{given['stage']}"] if "stage" in given else ["stage2", "stage1"]
    for stage in stages:
        found = sorted(Path(given.get("runs", "runs"), name, stage).glob("checkpoint-*[0-9]"))
        if found:
            return str(found[-1])
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


def main() -> None:
    recipe, options = parse()
    questions, documents = material(recipe, options)
    if not questions:
        raise InputError("no question to evaluate")
    policy, tokenizer = load(recipe)
    out = Path(options["out"] or default_out(recipe, options))
    print(f"{recipe.model or 'the built-in model, before RL'}: {len(questions)} questions, {options['samples']} sample(s) each, "
          f"temperature {recipe.temperature}, retriever {recipe.retriever}")  # fmt: skip
    records = evaluate(policy, tokenizer, questions, build_search(recipe, documents), recipe, options["samples"], out)
    summary = summarise(records)
    print(table(summary))
    print(f"predictions: {out}")
    if options["json"]:
        Path(options["json"]).write_text(json.dumps(summary, indent=1) + "\n")


def demo(arguments: list[str] | None = None) -> None:
    """`python rollout.py "a question"`: one trajectory, search by search, of the last checkpoint or of --model."""
    parser = FlagParser("rollout.py", description="Show one live trajectory.", allow_abbrev=False)
    parser.add_argument("question", nargs="?", default="", help="without one: a held-out two-hop question of the built-in world")
    add_flags(parser, SHARED)
    given = vars(parser.parse_args(arguments))
    text = given.pop("question")
    recipe = recipe_of(given)
    questions, documents = material(recipe, {"questions": 0, "split": "test", "fact_seed": None})
    asked = next((q for q in questions if text in ("", q.question) and (text or q.kind in ("two_hop", questions[0].kind))), None)
    question = asked or Question("asked", text, [])
    policy, tokenizer = load(recipe)
    unknown = tokenizer.unk_token_id is not None and tokenizer.unk_token_id in tokenizer(text)["input_ids"]
    if unknown and not recipe.data:
        raise InputError(f"the tiny model knows only the words of its world; try: {questions[0].question}")
    trajectory = rollout(policy, tokenizer, question, build_search(recipe, documents), build_protocol(recipe),
                         seed=recipe.seed, **rollout_settings(recipe))[0]  # fmt: skip
    print(f"model: {recipe.model or 'the built-in one, before RL'}")
    for number, search in enumerate(trajectory.searches, 1):
        found = search.error or ("(no fact asked for: fallback)" if search.fallback else search.text)
        print(f"search {number}: {search.query}\n    -> {found}")
    print(show(trajectory))


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
    who = "-".join(Path(recipe.model).parts[-3:]).replace(":", "") if recipe.model else f"warm-{recipe.protocol}"
    return Path(recipe.runs) / "predictions" / f"{who}-{of}-t{recipe.temperature:g}-{recipe.retriever}.jsonl"


if __name__ == "__main__":
    run_main(main)
