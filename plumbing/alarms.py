"""Raises eight alarms: signs in the last steps that a run goes wrong although no error occurs.

    alarms(records, settings)          {name: the likely cause, and what to do}
    hint_at_cold_start(...)            the same advice for ask.py and eval.py

A run raises each alarm once: it is printed and written into the step's record, so a resumed run
does not repeat it. Left out: alarms for what the curves show as well, such as a slow retriever or a
jump of the KL, and for values that a user may want, such as long texts or a low entropy.
"""

from collections import defaultdict
from statistics import median

from flags import in_built_in_world
from formats.records import Records
from settings import Settings

PATIENCE = 3  # the condition of an alarm must hold for this many steps in a row
MOST_FAILED = 0.5  # a run stops if a search failed in more than this share of a step's trajectories
COLD_START = (
    "a model that does not know this protocol needs a cold start: python coldstart.py --recipe NAME"
    " --model DIR --data FILE --corpus FILE --out DIR"
)
ADVICE = {
    "equal_groups": "in every group the rewards (under DAPO: the compared scores) are equal, so"
    " nothing was learned: the questions are too hard or too easy for this model, or --group_size"
    " is too small",
    "no_search": "no trajectory searched. If the metric `rejected` is above 0, queries were written"
    " and none was run: they were empty, lacked the opening tag, came where no search was allowed,"
    f" or were refused by a server. If it is 0, {COLD_START}",
    "malformed_tags": "over half of the texts have a tag that is not closed, or was not opened: "
    + COLD_START,
    "truncated": "most trajectories were cut off: raise --max_turn_tokens or --max_context; if the"
    " metric `rejected` is high, the cause is rejected queries",
    "retriever_down": "at least a tenth of the searches failed: is the retriever running, and is"
    " --timeout long enough?",
    "gold_recall": "for most questions no document contains an answer: is the corpus the right one"
    " for these questions?",
    "logprob_gap": "the sampler's log-probs differ from the trainer's: try --engine hf or"
    " --mismatch sequence_mask",
    "reward_hacked": "the reward rises while exact match falls: which term of the reward grows?",
}


def alarms(records: Records, settings: Settings, patience: int = PATIENCE) -> dict[str, str]:
    """Returns the alarms that the newest record raises and no earlier record raised."""
    raised = {name for record in records for name in record.get("alarms", ())}
    if len(records) < patience:
        return {}
    due = set.intersection(*(signs(r, records, settings) for r in records[-patience:]))
    return {name: sentence for name, sentence in ADVICE.items() if name in due - raised}


def signs(record: dict, records: Records, s: Settings) -> set[str]:
    """Returns the alarms whose condition holds in `record`, for `reward_hacked` in all `records`. A
    metric that the record lacks counts as 0.
    """
    r = defaultdict(float, record)
    grouped = s.algorithm not in ("reinforce_pp", "ppo")
    may_search = s.retrieval and not s.direct_tasks and s.max_searches > 0
    holds = {
        "equal_groups": r["skipped"] == 1 or (grouped and r["frac_reward_zero_std"] == 1),
        "no_search": may_search and r["searched"] == 0,
        "malformed_tags": r["malformed_tags"] > 0.5,
        "truncated": r["truncated"] > 0.5,
        "retriever_down": r["search_errors"] >= 0.1,
        "gold_recall": r.get("gold_recall", 1.0) < 0.2,
        "reward_hacked": reward_hacked(records),
        "logprob_gap": r["logprob_gap"] > largest_gap(records, "mismatch_ess" in record),
    }
    return {name for name in holds if holds[name]}


def largest_gap(records: Records, corrected: bool) -> float:
    """Returns the limit of `logprob_gap`: 1e-3. With a --mismatch correction (the default on a GPU
    and with servers) it is three times the gap of step 0, but at least 1e-3 and at most 0.1. The
    gap reveals that sampler and trainer compute differently; it would hardly grow if a server
    sampled with outdated weights.
    """
    return median([1e-3, 3 * records[0].get("logprob_gap", 1.0), 0.1]) if corrected else 1e-3


def reward_hacked(records: Records) -> bool:
    """Returns whether the reward rises while exact match falls. The reward needs a term `answer`,
    which that of a stage 1 may lack.
    """
    if "reward/answer" not in records[-1]:
        return False
    return rises([r["reward"] for r in records]) and rises([-r["em"] for r in records])


def rises(values: list[float]) -> bool:
    """Returns whether the newest five values are all above the five before. Where nothing changes,
    chance puts five values above five others once in 252 times.

    >>> rises([4, 2, 3, 2, 4, 6, 5, 5, 6, 8])
    True
    """
    return len(values) >= 10 and min(values[-5:]) > max(values[-10:-5])


def hint_at_cold_start(predictions: Records, settings: Settings) -> None:
    """Prints a sentence if no prediction (a record of eval.py) has both an answer and a search. In
    a protocol without searches the answer suffices. The built-in models know their protocols.
    ask.py gives no prediction if there was no answer.
    """
    knows = any(p["metrics"].get("searched", 1) and p["prediction"] for p in predictions)
    if not (knows or in_built_in_world(settings) or not settings.retrieval):
        print(
            "the model never searched, or never answered in the form of its protocol: " + COLD_START
        )
