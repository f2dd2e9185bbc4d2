"""What was made here, for the tools of others.

    python -m lab.export unipo runs/NAME       its trajectories, for the viewer poloclub/unipo
    python -m lab.export trl ur2_stage2        a reward, for TRL's GRPOTrainer(reward_funcs=...)
    python -m lab.export verl search_r1        the same for verl, custom_reward_function.path

unipo's build script reads the file: an entry is a step, all its updates together, with the groups
that were kept (--groups_kept) and trained on. What the environment wrote has 0 everywhere.
A reward's file imports this repository; math and answers are compared, as in a training without
--judge. Left out: rewards of the step, of a reader's answer, of an embedder's vectors; fallbacks,
which no text tells.
"""

import itertools
import json
from collections import defaultdict
from dataclasses import fields
from operator import itemgetter
from pathlib import Path
from string import Template

from errors import FlagParser, InputError, check_output, nearest, run_main
from formats.records import finished_records, free_name
from formats.trajectories import read_trajectories
from papers import PAPERS
from plumbing.page import stages_of
from rewards import REWARDS, RewardSettings, needs
from view import loss_of, value_of

BY_THE_STEP = {"ur2_choice", "ur2_weak"}  # neither trainer says which step of sampling it is
FILE = '''"""The reward $name for $trainer, from `python -m lab.export $trainer $name`.

A completion is the whole transcript, with what was found; its prompt: prompts.prompt_text.
"""

import sys

sys.path.insert(0, $root)  # the repository that this needs

from data import question_of
from rewards import REWARDS, Extras, RewardSettings
from trajectory import trajectory_from_text

SETTINGS = RewardSettings($settings)
FIELDS = ("question", "task", "options", "references", "supporting", "may_search")  # if there


def terms_of(text, answers, fields):
    """The named terms of one transcript; the reward is their sum."""
    known = {name: fields[name] for name in FIELDS if fields.get(name) is not None}
    question = question_of({"id": "", "question": "", "answers": list(answers)} | known)
    trajectory = trajectory_from_text(question, text, "$protocol")
    return REWARDS["$name"](trajectory, SETTINGS, 0, Extras())

'''
FUNCTIONS = {
    "trl": '''
def $name(prompts, completions, answers, **columns):
    """A number for each completion. `answers`, a list each, and FIELDS are the data set's."""
    rewards = []
    for n, text in enumerate(completions):
        if not isinstance(text, str):  # chat messages
            text = "".join(message["content"] or "" for message in text)
        fields = {name: columns[name][n] for name in FIELDS if name in columns}
        rewards.append(float(sum(terms_of(text, answers[n], fields).values())))
    return rewards
''',
    "verl": '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    """The sum as "score", and its terms. ground_truth: an answer, several, or {"target": those}."""
    golds = ground_truth["target"] if isinstance(ground_truth, dict) else ground_truth
    golds = [golds] if isinstance(golds, str) else golds
    terms = terms_of(solution_str, golds, extra_info or {})
    return {"score": float(sum(terms.values()))} | terms
''',
}


def reward_file(trainer: str, name: str) -> str:
    """Set as the first paper sets it that pays this reward, or whose protocol it begins with."""
    if name not in REWARDS:
        raise InputError(f"{name}: no reward; {', '.join(REWARDS)}{nearest(name, REWARDS)}")
    stages = [stage for paper in PAPERS.values() for stage in paper.stages.values()]
    found = [s for s in stages if s["reward"] == name or name.startswith(s["protocol"])]
    if not found:
        raise InputError(f"{name}: no stage of papers.py pays it: its protocol is not known")
    own = {f.name: found[0][f.name] for f in fields(RewardSettings) if f.name in found[0]}
    own |= {"reward": name}
    if asked := needs(RewardSettings(**own)) & {"reader", "embedder"}:
        raise InputError(f"{name} asks another model ({', '.join(asked)}): train with it here")
    if name in BY_THE_STEP:
        raise InputError(f"{name} pays by the step, which {trainer} does not tell: train here")
    words = {"name": name, "trainer": trainer, "protocol": found[0]["protocol"]}
    words["root"] = repr(str(Path(__file__).resolve().parent.parent))
    words["settings"] = ", ".join(f"{key}={value!r}" for key, value in own.items())
    return Template(FILE + FUNCTIONS[trainer]).substitute(words)


def unipo(folder: Path) -> dict:
    """A stage: header, and an entry for each step that had an update; every step samples anew."""
    s = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    prompts, entries = defaultdict(list), []
    by_group = itertools.groupby(read_trajectories(folder), key=itemgetter("step", "group"))
    for (step, _), some in by_group:
        if trained := [record for record in some if "advantages" in record]:
            prompt = {"prompt": "".join(trained[0]["prompt"])}
            prompts[step].append(prompt | {"responses": [response_of(r, s) for r in trained]})
    for row in finished_records(folder / "metrics.jsonl", cut=False, needs="step"):
        if "loss" in row:
            entry = {"step": row["step"], "is_first_step_after_rollout_phase": True}
            metrics = {name: its for name, its in row.items() if isinstance(its, int | float)}
            metrics |= {"policy_objective": -row["loss"], "policy_loss": row["loss"]}
            metrics |= {"learning_rate": row["lr"], "response_length": row["model_tokens"]}
            entries.append(entry | {"metrics": metrics, "prompts": prompts[row["step"]]})
    world = f"built-in world {s['world_seed']}"
    model, began = s["model"] or world, s["start_from"] or f"the beginning of stage {s['stage']}"
    header = {"task": "questions to search for", "dataset": s["data"] or world}
    header |= {"algorithm": s["algorithm"], "reward_strategy": s["reward"]}
    header |= {"model_name": model, "reference_model_name": began, "totalSteps": s["steps"]}
    hparams = s | {"clip_eps": [s["clip_low"], s["clip_high"]], "learning_rate": s["lr"]}
    return {"header": header | {"hparams": hparams}, "entries": entries}


def response_of(r: dict, settings: dict) -> dict:
    places, tokens = range(len(r["ids"])), {"ids": r["ids"], "strings": r["tokens"]}
    names = {"new": "log_probs", "old": "old_log_probs", "ref": "ref_log_probs"}
    for ours, name in (names | {"advantages": "advantages"}).items():
        if ours in r:
            tokens[name] = [value_of(r, ours, n) if r["mask"][n] else 0.0 for n in places]
    learned = [loss_of(r, n, settings) or {"loss": 0.0} for n in places]
    tokens |= {"token_objective": [-its["loss"] for its in learned], "response_mask": r["mask"]}
    told = {"id": f"step{r['step']}_p{r['group']}_sample{r['row']}", "tokens": tokens}
    told |= {"response_text": "".join(r["tokens"]), "response_length": len(places)}
    mean = sum(tokens["advantages"]) / max(1, sum(r["mask"]))
    return told | {"reward": sum(r["rewards"].values()), "advantage": mean}


def main(arguments: list[str] | None = None) -> None:
    parser = FlagParser("lab.export", description="A run or a reward for other tools.")
    parser.add_argument("tool", choices=["unipo", *FUNCTIONS])
    parser.add_argument("what", help="unipo: runs/NAME, or a stage of it; trl, verl: a reward")
    parser.add_argument("--out", type=Path, help="by itself RUN/unipo.json, or TOOL_REWARD.py")
    asked = parser.parse_args(arguments)
    tool, what = asked.tool, asked.what
    stages = stages_of(Path(what)) if tool == "unipo" else []
    out = asked.out or Path(f"{what}/unipo.json" if stages else f"{tool}_{what}.py")
    check_output(out, "--out")
    text = json.dumps(unipo(stages[-1])) if stages else reward_file(tool, what)
    if out.exists():
        print(f"what was in {out} is kept as {out.rename(free_name(out)).name}")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    print(f"written: {out}")


if __name__ == "__main__":
    run_main(main)
