"""Raises alarms if the last steps suggest that a run learns nothing or the wrong thing, or is slow.

    alarms(records, settings)          {name: the likely cause, and what to do}
    hint_at_cold_start(...)            the same advice for ask.py and eval.py

The condition of most alarms must hold for three steps in a row. A run raises each alarm once: it is
printed and written into the step's record, so a resumed run does not repeat it. Left out: alarms
for values that a user may want, such as a low entropy.
"""

from collections import defaultdict
from collections.abc import Iterator
from statistics import fmean, median, variance

from flags import in_built_in_world
from settings import Settings

PATIENCE = 3  # the condition of most alarms must hold for this many steps in a row
WINDOW = 10  # steps that `shift` and `spikes` look back on
MOST_FAILED = 0.5  # a run stops if a search failed in more than this share of a step's trajectories
COLD_START = (
    "a model that does not know this protocol needs a cold start: python coldstart.py --recipe NAME"
    " --model DIR --data FILE --corpus FILE --out DIR"
)
BASE_MODEL = (
    " (its tokenizer has no chat template: a base model, which got the prompt in a plain layout)"
)
ADVICE = {
    "equal_groups": "in every group the rewards (under DAPO: the compared scores) are equal, so"
    " nothing was learned: the questions are too hard or too easy for this model, or --group_size"
    " is too small",
    "no_search": f"no trajectory searched: {COLD_START}",
    "rejected": "queries were written but none was run: they were empty, lacked the opening tag,"
    " came where no search was allowed, or were refused by a server",
    "repeated": "over a quarter of the searches repeat an earlier query of the same trajectory: do"
    " the documents help the model at all?",
    "seen": "over a third of the documents were already found in the same trajectory: the corpus is"
    " small, or the queries are nearly the same",
    "gold_recall": "for most questions no document contains an answer: is the corpus the right one"
    " for these questions?",
    "retriever_down": "at least a tenth of the searches failed: is the retriever running, and is"
    " --timeout long enough?",
    "retriever_slow": "searching takes over a third of the step: run the retriever on its own"
    " machine",
    "judge_slow": "computing rewards takes over a third of the step: run the judge or the reader on"
    " its own machine, or choose a reward that asks no model",
    "truncated": "most trajectories were cut off: raise --max_turn_tokens or --max_context; if the"
    " metric `rejected` is high, the cause is rejected queries",
    "length": "the model's thoughts are over 1.5 times as long as before, and its answers are"
    " not better: lower --max_turn_tokens",
    "repetition": "over a tenth of the trajectories repeat themselves: lower --lr or raise"
    " --kl_coef",
    "malformed_tags": "over half of the texts have a tag that is not closed, or was not opened: "
    + COLD_START,
    "reward_hacked": "the reward rises while exact match falls: which term of the reward grows?",
    "reward_size": "the mean reward or one of its terms is beyond 1000, so smaller terms no longer"
    " matter: which term is it?",
    "logprob_gap": "the sampler's log-probs differ from the trainer's: try --engine hf or"
    " --mismatch sequence_mask",
    "mismatch_cut": "most tokens are above the bound of --mismatch: the sampler's policy is not"
    " the trainer's",
    "kl_spike": "the KL is over ten times its median: lower --lr, or set --warmup_ratio",
    "grad_spike": "the gradient norm is over ten times its median: look at this step, or lower"
    " --lr",
}
# The condition of these alarms is that the metric of the same name is above the limit.
LIMITS = {"truncated": 0.5, "repetition": 0.1, "malformed_tags": 0.5, "mismatch_cut": 0.5}
# These alarms are raised as soon as their condition holds in one step. The conditions of all others
# must hold for PATIENCE steps in a row.
AT_ONCE = ("kl_spike", "grad_spike", "length", "reward_hacked", "reward_size")


def alarms(records: list[dict], settings: Settings, patience: int = PATIENCE) -> dict[str, str]:
    """Returns the alarms that the newest record raises and no earlier record raised."""
    raised = {name for record in records for name in record.get("alarms", ())}
    ends = range(max(1, len(records) - patience + 1), len(records) + 1)
    steps = [{*signs(records[:end], settings)} for end in ends]
    lasting = set.intersection(*steps) if len(steps) >= patience else set()
    due = (lasting | steps[-1].intersection(AT_ONCE)) - raised
    return {name: sentence for name, sentence in ADVICE.items() if name in due}


def signs(records: list[dict], s: Settings) -> Iterator[str]:
    """Yields the alarms whose condition holds in the newest record; the functions `shift` and
    `spikes` also use earlier records. A metric that the newest record lacks counts as 0, but
    `gold_recall` as 1, because a low value of it raises an alarm. `shift` needs its metric in each
    of the last WINDOW records. `reward_hacked` needs a reward term `answer`, which the reward of a
    stage 1 may lack.

    The limit of `logprob_gap` is 1e-3. With a --mismatch correction (the default on a GPU, and on a
    CPU with servers or a bf16 copy) it is three times the gap of step 0, but at least 1e-3 and at
    most 0.1 (also 0.1 if step 0 has no gap). The gap reveals that sampler and trainer compute
    differently; it would hardly grow if a server sampled with outdated weights.
    """
    r = defaultdict(float, records[-1])
    third = (r["rollout_seconds"] + r["reward_seconds"] + r["update_seconds"]) / 3
    grouped = s.algorithm not in ("reinforce_pp", "ppo")
    may_search = s.retrieval and not s.direct_tasks and s.max_searches > 0
    (growth, significance), (_, em_change) = shift(records, "thinking_words"), shift(records, "em")
    yield from (name for name, limit in LIMITS.items() if r[name] > limit)
    corrected = median([1e-3, 3 * records[0].get("logprob_gap", 1.0), 0.1])
    if r["logprob_gap"] > (corrected if "mismatch_ess" in r else 1e-3):
        yield "logprob_gap"
    if r["skipped"] == 1 or (grouped and r["frac_reward_zero_std"] == 1):
        yield "equal_groups"
    if may_search and r["searched"] + r["rejected"] == 0:
        yield "no_search"
    if r["rejected"] > 0 and r["searched"] == 0:
        yield "rejected"
    if r["repeated"] > r["searches"] / 4:
        yield "repeated"
    if r["documents_seen"] > 1 / 3:
        yield "seen"
    if r.get("gold_recall", 1.0) < 0.2:
        yield "gold_recall"
    if r["search_errors"] >= 0.1:
        yield "retriever_down"
    if r["search_seconds"] > third:
        yield "retriever_slow"
    if r["reward_seconds"] > third:
        yield "judge_slow"
    if growth > 1.5 and significance > 3 and em_change <= 0:
        yield "length"
    if "reward/answer" in r and shift(records, "reward")[1] > 3 and em_change < -3:
        yield "reward_hacked"
    if any(abs(r[name]) > 1000 for name in records[-1] if name.split("/")[0] == "reward"):
        yield "reward_size"
    if spikes(records, "k3", 0.1) or spikes(records, "approx_kl", 0.1):
        yield "kl_spike"
    if spikes(records, "grad_norm"):
        yield "grad_spike"


def shift(records: list[dict], name: str) -> tuple[float, float]:
    """Compares the older and the newer half of a metric's values in the last WINDOW steps. Returns
    (newer mean / older mean, newer mean − older mean in standard errors); (1, 0) if a value is
    missing.
    """
    values = [record[name] for record in records[-WINDOW:] if name in record]
    old, new = values[: WINDOW // 2], values[WINDOW // 2 :]
    if len(values) < WINDOW:
        return 1.0, 0.0
    error = ((variance(old) + variance(new)) / len(old)) ** 0.5
    return fmean(new) / (fmean(old) or 1e-9), (fmean(new) - fmean(old)) / (error or 1e-9)


def spikes(records: list[dict], name: str, least: float = 0.0) -> bool:
    """Returns whether a metric's newest value is above `least` and above ten times the median of
    the WINDOW steps before. The median leaves out zeros: a gradient, for example, is 0 in a step
    whose rewards are all equal. With fewer than five values in the median it returns False.
    """
    earlier = [record[name] for record in records[-WINDOW - 1 : -1] if record.get(name)]
    newest = records[-1].get(name, 0.0)
    return len(earlier) >= WINDOW // 2 and newest > max(least, 10 * median(earlier))


def hint_at_cold_start(predictions: list[dict], asked) -> None:
    """Prints a sentence if no prediction (a record of eval.py) has both an answer and a search. In
    a protocol without searches the answer suffices. The built-in models know their protocols.

    asked   the session of ask.py or the evaluation of eval.py
    """
    knows = any(p["metrics"].get("searched", 1) and p["prediction"] for p in predictions)
    if not (knows or in_built_in_world(asked.settings) or not asked.settings.retrieval):
        print(
            "the model never searched, or never answered in the form of its protocol: "
            + COLD_START
            + BASE_MODEL * (not getattr(asked.tokenizer, "chat_template", True))
        )
