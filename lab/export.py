"""Exports our rewards as reward functions of two other trainers, TRL and verl.

    TRL     from lab.export import trl_reward
            GRPOTrainer(reward_funcs=[trl_reward("search_r1")], ...)
    verl    custom_reward_function.path=.../lab/export.py custom_reward_function.name=verl_score
            +custom_reward_function.reward_kwargs.reward=search_r1

Both need this repository on PYTHONPATH. A completion must be the whole transcript, with the
retrieved documents, and its prompt must be that of prompts.prompt_text. Answers are compared by
rules, as in training without --judge. Left out: rewards that depend on the step, on a reader's
answer or on an embedder's vectors. UR²'s rewards lack the fallback penalty, and the violations by
well-formed queries that were rejected, because `trajectory_from_text` recognises neither fallbacks
nor rejected queries.
"""

from functools import lru_cache

from data import question_of
from errors import InputError, nearest
from papers import PAPERS
from rewards import REWARDS, Extras, RewardSettings, needs
from trajectory import trajectory_from_text

BY_THE_STEP = {"ur2_choice", "ur2_weak"}  # left out, because they depend on the step
# Columns of the data set (verl: keys of extra_info) that are read if they exist.
FIELDS = ("question", "task", "options", "references", "supporting", "may_search")


@lru_cache
def settings_of(name: str) -> tuple[RewardSettings, str]:
    """Returns the settings (with this reward) and the protocol of a stage in papers.py. It is the
    first stage that has this reward or whose protocol's name is a prefix of the reward's, as
    "arena" of "arena_code". Raises an InputError if the reward is unknown or needs more than a
    transcript.
    """
    stages = [
        stage
        for paper in PAPERS.values()
        for stage in paper.stages.values()
        if stage["reward"] == name or name.startswith(stage["protocol"])
    ]
    if not stages or name not in REWARDS:
        raise InputError(
            f"{name}: unknown reward; one of {', '.join(REWARDS)}{nearest(name, REWARDS)}"
        )
    names = stages[0].keys() & RewardSettings.__dataclass_fields__
    settings = RewardSettings(**{field: stages[0][field] for field in names} | {"reward": name})
    if needs(settings) & {"reader", "embedder"} or name in BY_THE_STEP:
        raise InputError(
            f"{name} depends on the step, on a reader's answer or on an embedder's vectors: use"
            " train.py"
        )
    return settings, stages[0]["protocol"]


def reward_terms(name: str, text: str, answers, columns: dict) -> dict[str, float]:
    """Returns the named terms of one transcript; the reward is their sum."""
    settings, protocol = settings_of(name)
    known = {field: columns[field] for field in FIELDS if columns.get(field) is not None}
    question = question_of({"id": "", "question": "", "answers": list(answers)} | known)
    return REWARDS[name](trajectory_from_text(question, text, protocol), settings, 0, Extras())


def trl_reward(name: str):
    """Returns a reward function for GRPOTrainer: it returns one number per completion. The data set
    must have the column `answers` (a list of answers per row) and may have the columns in FIELDS.
    """
    settings_of(name)

    def reward(prompts, completions, answers, **columns) -> list[float]:
        rewards = []
        for n, text in enumerate(completions):
            if not isinstance(text, str):  # chat messages
                text = "".join(message["content"] or "" for message in text)
            row = {field: values[n] for field, values in columns.items() if field in FIELDS}
            rewards.append(float(sum(reward_terms(name, text, answers[n], row).values())))
        return rewards

    reward.__name__ = name
    return reward


def verl_score(data_source, solution_str, ground_truth, extra_info=None, *, reward, **_) -> dict:
    """Returns the reward as "score", and its terms. ground_truth is {"target": list of answers};
    extra_info may have the keys in FIELDS.
    """
    terms = reward_terms(reward, solution_str, ground_truth["target"], extra_info or {})
    return {"score": float(sum(terms.values()))} | terms
