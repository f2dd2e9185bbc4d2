"""Alarms: signs in the last steps' metrics that a run may not be learning.

    alarms(records, settings)          name -> its likely cause, and what to do
    python train.py --dry_run ...      a single step of a run: what it saw, and all its alarms

Most must hold for three steps on end. A run raises each once: it is printed and stands in the
step's record, so a resumed run knows it. Left out: what may be wanted, such as a low entropy;
whether a tag is one token or several, since a turn is cut by its text.
"""

from collections import defaultdict
from collections.abc import Iterator
from statistics import fmean, median, variance

import torch

from rollout import Environment
from settings import Settings

PATIENCE = 3  # steps in a row
WINDOW = 10  # steps: an older and a newer half
MOST_FAILED = 0.5  # of a step's trajectories; if more have a failed search the run stops
SAID = {
    "equal_groups": "no group had rewards that differ: too hard or too easy? Raise --group_size",
    "no_search": "no trajectory searched: does the model know the query tags? Stage 1 teaches them",
    "rejected": "queries were written but none was run: empty, unopened, or rejected by a server",
    "repeated": "a search in four is in the words of an earlier one: is what it finds of any use?",
    "seen": "a third of what was found was known already: a small corpus, or queries all alike?",
    "gold_recall": "what was found holds the answers of few questions: does the corpus have them?",
    "retriever_down": "a tenth of the searches failed: is the retriever down, or over --timeout?",
    "retriever_slow": "searching takes a third of a step: give the retriever its own machine",
    "judge_slow": "scoring takes a third of a step: give the judge a machine, or ask a metric",
    "truncated": "most trajectories were cut off: raise --max_turn_tokens or --max_context",
    "length": "thinking grew by half, and no answer is better for it: lower --max_turn_tokens",
    "repetition": "a tenth of the trajectories go in circles: lower --lr, or hold it by --kl_coef",
    "malformed_tags": "in half of the texts a tag is unclosed, or was not opened: warm it up",
    "reward_hacked": "the reward rises and exact match falls: which of its terms pays for what?",
    "reward_size": "a reward is in the thousands and drowns all others: which term pays so much?",
    "logprob_gap": "log-probs differ from the sampled ones: try --engine hf, --mismatch sequence",
    "mismatch_cut": "most tokens are beyond --mismatch's bounds: the sampler is another policy",
    "likelihood": "right answers do not become likelier: lower --lr, before the rewards fall too",
    "kl_spike": "the KL is ten times what it was: lower --lr, or give it an --warmup_ratio",
    "grad_spike": "the gradient is ten times what it was: look at the step, or lower --lr",
}
# Alarms that are raised when the figure of the same name is above a limit.
ABOVE = {"truncated": 0.5, "repetition": 0.1, "malformed_tags": 0.5, "mismatch_cut": 0.5}
# In one step: those that look at the steps before it themselves, or need not.
AT_ONCE = ("kl_spike", "grad_spike", "length", "reward_hacked", "reward_size", "likelihood")


def alarms(records: list[dict], settings: Settings, patience: int = PATIENCE) -> dict[str, str]:
    """Returns the alarms that the newest record raises and no earlier record raised."""
    told = {name for record in records for name in record.get("alarms", ())}
    ends = range(max(1, len(records) - patience + 1), len(records) + 1)
    found = [{*holding(records[:end], settings)} for end in ends]
    lasting = set.intersection(*found) if len(found) >= patience else set()
    due = (lasting | found[-1].intersection(AT_ONCE)) - told
    return {name: said for name, said in SAID.items() if name in due}


def holding(records: list[dict], s: Settings) -> Iterator[str]:
    """Yields the alarms that the newest record raises. A figure that it lacks counts as 0, except
    the recall of gold answers. Stage 1 need not reward answers, so `reward_hacked` asks for it.

    The limit of logprob_gap: where the sampler is corrected for, because its precision or engine is
    another, it is three times the gap of step 0, but from 1e-3 to 0.1: 0.03 after 0.01. Elsewhere
    both compute in fp32, and it is 1e-3. A gap shows another arithmetic, not how old the weights
    are that sampled: a few updates move it as little as bf16 does.
    """
    r = defaultdict(float, records[-1])
    third = (r["rollout_seconds"] + r["reward_seconds"] + r["update_seconds"]) / 3
    grouped = s.algorithm not in ("reinforce_pp", "ppo")
    may_search = s.retrieval and not s.direct_tasks and s.max_searches > 0
    (longer, sure), (_, better) = shift(records, "thinking_words"), shift(records, "em")
    yield from (name for name, limit in ABOVE.items() if r[name] > limit)
    bf16 = median([1e-3, 3 * records[0].get("logprob_gap", 1.0), 0.1])
    if r["logprob_gap"] > (bf16 if "mismatch_ess" in r else 1e-3):
        yield "logprob_gap"
    # A step whose rewards are all equal has no figure: it stands still.
    still = sum(row.get("likelihood_later", 0) <= 0 for row in records[-WINDOW:])
    if still == WINDOW and "likelihood_later" in r:
        yield "likelihood"
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
    if longer > 1.5 and sure > 3 and better <= 0:
        yield "length"
    if "reward/answer" in r and shift(records, "reward")[1] > 3 and better < -3:
        yield "reward_hacked"
    if any(abs(r[n]) > 1000 for n in records[-1] if n.startswith("reward")):
        yield "reward_size"
    if spikes(records, "k3", 0.1) or spikes(records, "approx_kl", 0.1):
        yield "kl_spike"
    if spikes(records, "grad_norm"):
        yield "grad_spike"


def shift(records: list[dict], name: str) -> tuple[float, float]:
    """Returns (mean of the newer half / mean of the older, their difference in standard errors)."""
    values = [record[name] for record in records[-WINDOW:] if name in record]
    old, new = values[: WINDOW // 2], values[WINDOW // 2 :]
    if len(values) < WINDOW:
        return 1.0, 0.0
    error = ((variance(old) + variance(new)) / len(old)) ** 0.5
    return fmean(new) / (fmean(old) or 1e-9), (fmean(new) - fmean(old)) / (error or 1e-9)


def spikes(rows: list[dict], name: str, least: float = 0.0) -> bool:
    """Returns whether a metric spikes. Zeros do not count: equal rewards have no gradient."""
    old, now = [r[name] for r in rows[-WINDOW - 1 : -1] if r.get(name)], rows[-1].get(name, 0.0)
    return len(old) >= WINDOW // 2 and now > max(least, 10 * median(old))


def report(r: dict, sampled, environment: Environment) -> Iterator[str]:
    """Prints what one step's metrics predict about a run (--dry_run)."""
    prompts, s = [len(t.prompt_ids) for t in sampled.trajectories], environment.settings
    longest = max(map(environment.max_trajectory_tokens, sampled.trajectories))
    most = f"{longest} of {environment.max_context} tokens of context"
    yield f"prompts: {min(prompts)} to {max(prompts)} tokens; trajectories at most {most}"
    count = len(prompts)
    wrote, ran, good = (round(count * r[name]) for name in ("queries", "searches", "successful"))
    yield f"queries: {wrote} in {count} trajectories, of which {r['searched']:.0%} searched"
    if ran:
        each = f"in {r['search_seconds']:.2g} s, at most {r['slowest_search_seconds']:.2g} s each"
        held = f"; a gold answer for {r['gold_recall']:.0%}" if "gold_recall" in r else ""
        yield f"searches: {good} of {ran} found something, {each}{held}"
    equal = round(count // s.group_size * r["frac_reward_zero_std"])
    yield f"groups: {equal} of {count // s.group_size} have equal rewards; mean {r['reward']:.2f}"
    if "logprob_gap" in r:
        yield f"log-probs: sampled and scored ones differ by {r['logprob_gap']:.1e}"
    seconds = r["rollout_seconds"] + r["reward_seconds"] + r["update_seconds"]
    seconds *= s.questions_per_step * s.group_size * sampled.draws / count
    hours = f"{s.steps} steps {seconds * s.steps / 3600:.1f} hours"
    yield f"time: about {seconds:.1f} s a step of {s.questions_per_step} questions, {hours}"
    if torch.cuda.is_available():
        yield f"GPU memory: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at its peak"
    found = [f"alarm: {said}" for said in alarms([r], s, patience=1).values()]
    yield from found or ["nothing found that would keep it from learning"]
