"""Lists the papers' claims, each as a comparison of two training runs.

    arm      a training run: its recipe, stage, changed settings, and the arm that it starts from
    claim    compares a number of two arms, paired by world (the built-in world of one seed), after
             the same number of steps
    effect   mean over n worlds of (better − worse arm), and its interval, ± t(n − 1) · s / √n
    verdict  "shows": the 95 % interval lies beyond 0 on the claimed side, and the mean reaches the
             smallest effect that counts; "reversed": the same on the other side; otherwise "does
             not show", which is reported too
    equal    "equal within m": the 90 % interval lies within ±m (two one-sided tests at 5 %)

If a paper's setting is impossible in a world this small, the sentence of the claim names the
substitute. Settings, thresholds and margins were chosen on the dev split of worlds 40 to 47, but
those of `f1_cem` and `reinforce_...` were chosen before any run. Left out: six more claims, whose
results are in docs/results.md; multiple choice (the tiny model did not learn to find an option's
letter, so the arms of `choice...` are asked open questions); corrections for testing many claims;
repeating an arm in one world with other sampling seeds.
"""

import math
import re
from typing import NamedTuple

import numpy as np

from papers.paper import EVERYTHING

# Student's t, two-sided, for n − 1 = 1, 2, ... degrees of freedom.
T = {
    95: (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262),
    90: (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833),
}


class Arm(NamedTuple):
    """A training run. `start` is the arm whose last checkpoint it continues from; "" means the
    warmed-up model.
    """

    recipe: str
    stage: int
    changes: dict
    start: str = ""


SHORT = {"steps": 30}
# Three passages are retrieved. The extractive summariser shows at most the best one; with RAW the
# policy reads all three.
WEAK = {"toy_init": "weak", "documents_per_search": 3, "document_tokens": 64}
PACE = {  # the learning rate and batch size of papers.EVERYTHING
    "lr": EVERYTHING["lr"],
    "trajectories_per_update": EVERYTHING["trajectories_per_update"],
}
WEAK_1 = WEAK | PACE | {"steps": 25}
WEAK_2 = WEAK | PACE | {"questions_per_step": 16, "mix": EVERYTHING["mix"]}
WEAK_30, WEAK_55 = WEAK_2 | SHORT, WEAK_2 | {"steps": 55}
# UR² C.7: in the first steps, the 7B model earns stage 2's reward and a bonus for searching. So
# does the 3B model, and its format term is −1 if it does not search. FINED has the −1 but no bonus.
CHOICE = WEAK | {"steps": 40, "reward": "ur2_weak"}
FINED = {"reward_args": {"variant": "qwen_3b"}, "left_out": "retrieval"}
RAW = {"summarizer": "none"}
WORDY = {"toy_init": "verbose"}
WORDED = WORDY | SHORT | {"reworded": 0.7}
RARE_1 = PACE | {"toy_init": "rare", "steps": 16}
RARE_46 = RARE_1 | {"steps": 46}
# When to Search. The tiny stage 1 has lr / trajectories_per_update = 3e-4 / 64, about a third of
# stage 2's 5e-4 / 32. At a higher ratio stage 1 teaches the model to search for every known fact
# too. RARE_1 may have stage 2's ratio, because no claim about its arms counts such searches.
WHEN_1 = {"toy_init": "weak", "steps": 8}
WHEN_30 = WHEN_1 | SHORT
NO_R_S, NO_R_A = {"variant": "without_r_s"}, {"variant": "without_r_a"}
# recipe -> arm -> its stage, changed settings, the arm whose last checkpoint it starts from
_ARMS = {
    "ur2": {
        "ur2_stage1": (1, WEAK_1),
        "ur2_loose_stage1": (1, WEAK_1 | {"reward_args": {"format_check": "loose"}}),
        "ur2_raw_stage1": (1, WEAK_1 | RAW),
        "ur2": (2, WEAK_30, "ur2_stage1"),
        "ur2_no_stage1": (2, WEAK_55),
        "ur2_no_mask": (2, WEAK_30 | {"mask_documents": False}, "ur2_stage1"),
        "ur2_no_penalty": (2, WEAK_30 | {"reward_args": {"fallback_penalty": 0.0}}, "ur2_stage1"),
        "ur2_mixing": (2, WEAK_30 | {"direct_tasks": "math"}, "ur2_stage1"),
        "ur2_raw": (2, WEAK_30 | RAW, "ur2_raw_stage1"),
    },
    "vanilla_rl": {
        "vanilla_rl": (1, WEAK_55),
    },
    "ur2_choice": {
        "ur2_choice": (1, CHOICE),
        "ur2_choice_fined": (1, CHOICE | FINED),
        "ur2_choice_plain": (1, CHOICE | {"reward": "ur2_stage2"}),
    },
    "r1_searcher": {
        "r1_stage1": (1, WORDY),
        "r1": (2, WORDY | SHORT, "r1_stage1"),
        "r1_cem": (2, WORDY | SHORT | {"reward_args": {"answer_metric": "cem"}}, "r1_stage1"),
        "r1_grpo": (2, WORDY | SHORT | {"algorithm": "grpo"}, "r1_stage1"),
        "r1_worded": (2, WORDED, "r1_stage1"),
        "r1_worded_em": (2, WORDED | {"reward_args": {"answer_metric": "em"}}, "r1_stage1"),
    },
    "when_to_search": {
        "when_stage1": (1, WHEN_1),
        "when_stage2": (2, WHEN_30, "when_stage1"),
        "when_stage1_on": (2, WHEN_30 | {"reward": "when_to_search_stage1"}, "when_stage1"),
        "when_no_r_s_stage1": (1, WHEN_1 | NO_R_S),
        "when_no_r_s": (2, WHEN_30 | NO_R_S, "when_no_r_s_stage1"),
        "when_no_r_a_stage1": (1, WHEN_1 | NO_R_A),
        "when_no_r_a": (2, WHEN_30 | NO_R_A, "when_no_r_a_stage1"),
        "when_rare_stage1": (1, RARE_1),
        "when_rare": (2, RARE_1 | SHORT, "when_rare_stage1"),
        "when_rare_no_stage1": (1, RARE_46 | {"variant": "without_stage_one"}),
        "when_rare_unified": (1, RARE_46 | {"variant": "unified"}),
    },
    "r_search": {
        "r_search": (1, {}),
        "r_search_without": (1, {"variant": "without_evidence"}),
        "r_search_ppo": (1, {"algorithm": "ppo", "critic_lr": 1e-3}),
    },
    "arena": {
        "arena": (1, {}),
        "arena_no_bonus": (1, {"variant": "no_bonus"}),
        "arena_no_relevance": (1, {"variant": "no_relevance"}),
        "arena_naive": (1, {"variant": "naive_grpo"}),
        "arena_f1": (1, {"variant": "f1"}),
    },
}
ARMS = {name: Arm(recipe, *arm) for recipe in _ARMS for name, arm in _ARMS[recipe].items()}


class Number(NamedTuple):
    """A number by which two arms are compared: the mean of these metrics in the evaluation, or if
    `steps` is given over these steps of training. `counts` is the smallest effect that counts, less
    is noise; it is negative if the number is claimed to be smaller in the better arm.
    """

    name: str
    metrics: str
    counts: float = 0.03
    steps: slice | None = None


SEARCHES, LAST = "searches/one_hop searches/two_hop", slice(-SHORT["steps"], None)
SUMS = "searches/arithmetic"
NUMBERS = {
    "EM": Number("look-up EM", "em/one_hop em/two_hop"),
    "CEM": Number("look-up cover-EM", "cem/one_hop cem/two_hop"),
    "WORDS": Number("words per answer", "words/one_hop words/two_hop", 0.3),
    "CITED": Number("exact set", "exact_set/one_hop exact_set/two_hop", 0.05),
    "FORMAT": Number("strict format rate", "format", 0.05),
    "FALLBACKS": Number("fallbacks per search, stage 2", "fallbacks", -0.03, LAST),
    "NEEDLESS": Number("arithmetic searches, stage 2", SUMS, -0.1, LAST),
    "MORE": Number("look-up searches", SEARCHES, 0.1),
    "FEWER": Number("look-up searches", SEARCHES, -0.1),
    "KNOWN": Number("searches, known facts", "searches/known", -0.1),
    # Of 46 steps, of which an arm in two stages makes the first 16 in its stage 1.
    "EARLY": Number("look-up searches, steps 16 to 29", SEARCHES, 0.1, slice(-30, -16)),
    "SUMS": Number("EM of look-ups and sums", "em/one_hop em/two_hop em/arithmetic"),
    "REWARD": Number("reward, stage 2", "reward", 0.03, LAST),
    "LENGTH": Number("tokens per response, stage 2", "model_tokens", 1.0, LAST),
    "OFTEN": Number("look-up searches, stage 2", SEARCHES, 0.1, LAST),
}


def measure(number: Number, result: dict) -> float:
    """Reads a number from an arm's result. A step that asked no question of a kind lacks its
    metrics.
    """
    rows = result["curve"][number.steps] if number.steps else [result["eval"]]
    return np.mean([row[name] for row in rows for name in number.metrics.split() if name in row])


class Claim(NamedTuple):
    """A claim of a paper that compares two arms by a number. With a `margin` above 0 it claims that
    the arms are equal within the margin.
    """

    place: str  # where the paper makes the claim
    better: str
    worse: str
    number: Number
    margin: float
    says: str


# name; place; better arm; worse arm; number; margin (0: the numbers are claimed to differ)
#   what the paper says, or what we claim ("ours to show"); "and ..." continues the claim above
_CLAIMS = """
stage1; UR² 6.1, R1-Searcher 4.2; ur2; ur2_no_stage1; EM; 0
    a first stage that rewards searching helps
stage1_searches; R1-Searcher 4.2; ur2; ur2_no_stage1; MORE; 0
    without it the model bypasses retrieval
choice; UR² Table 3; ur2_choice; ur2_choice_plain; EM; 0
    a bonus for the first steps' searches helps (for multiple choice; here open questions)
choice_searches; UR² C.7, C.9; ur2_choice; ur2_choice_plain; MORE; 0
    and keeps it searching
choice_fine; UR² C.7; ur2_choice_fined; ur2_choice_plain; MORE; 0
    a −1 for not searching in the first steps keeps it searching (3B's, here without its bonus)
mask; UR², R1-Searcher, R-Search, not ablated; ur2; ur2_no_mask; EM; 0
    documents must be masked in the loss (ours to show)
penalty; UR² Table 3, 6.1; ur2; ur2_no_penalty; FALLBACKS; 0
    without the fallback penalty queries become ill-posed
penalty_needless; UR² 3.4; ur2; ur2_no_penalty; NEEDLESS; 0
    the penalty ends searches for arithmetic (ours to show)
penalty_equal; UR² Table 3; ur2; ur2_no_penalty; EM; 0.05
    scores without the penalty are about equal
mixing; UR² 6.1, B.1; ur2_mixing; ur2; NEEDLESS; 0
    task mixing saves searches (by construction: in arithmetic none is allowed)
mixing_equal; UR² 6.1, B.1; ur2_mixing; ur2; SUMS; 0.05
    and costs no accuracy
summary; UR² Table 3, 6.1; ur2; ur2_raw; EM; 0
    without summaries training fails
summary_searches; UR² Table 3, 6.1; ur2; ur2_raw; MORE; 0
    and the model searches less (there it abandons retrieval)
vanilla; UR² Table 1, 2; ur2; vanilla_rl; EM; 0
    UR² beats RL without its stage 1 (there by −1.1 to 9.1)
f1; R1-Searcher Table 5; r1_worded; r1_worded_em; CEM; 0
    an F1 reward beats an exact-match reward (golds worded otherwise than passages)
f1_cem; R1-Searcher Table 5; r1; r1_cem; CEM; 0
    and, by little, a cover-EM reward (there by 1.1)
cem; R1-Searcher 4.2; r1_cem; r1; WORDS; 0
    a cover-EM reward makes answers long
reinforce; R1-Searcher Table 3; r1; r1_grpo; CEM; 0.05
    REINFORCE++ and GRPO are about equal
reinforce_reward; R1-Searcher Figure 2; r1_grpo; r1; REWARD; 0.1
    their rewards in training do not differ much
reinforce_length; R1-Searcher Figure 2; r1_grpo; r1; LENGTH; 0
    with GRPO responses are longer
reinforce_searches; R1-Searcher Figure 2; r1_grpo; r1; OFTEN; 0
    and it searches more often
hacked; R1-Searcher 4.2; ur2_stage1; ur2_loose_stage1; FORMAT; 0
    a loose format check is exploited (UR²'s, after stage 1)
ppo; R-Search Table 4, 7; r_search; r_search_ppo; EM; 0
    GRPO is ahead of PPO
evidence_answer; R-Search Table 3; r_search; r_search_without; EM; 0
    evidence on the way to the answer improves it
stage2; When to Search Table 1; when_stage2; when_stage1_on; KNOWN; 0
    stage 2 stops needless searches
stage2_equal; When to Search Table 1; when_stage2; when_stage1_on; EM; 0.05
    at no cost in accuracy (4B; at 8B it had one)
two_stages; When to Search Table 4; when_rare; when_rare_no_stage1; EM; 0
    two stages beat stage 2 alone
unified; When to Search Table 2; when_rare; when_rare_unified; EARLY; 0
    a unified reward learns to search too little
r_s; When to Search Table 4; when_stage2; when_no_r_s; FEWER; 0
    the query reward r_s saves searches
r_a; When to Search Table 4; when_stage2; when_no_r_a; EM; 0
    without the answer reward r_a answers are worse
bonus; ARENA I; arena; arena_no_bonus; CITED; 0
    without the bonus citations degrade
bonus_equal; ARENA I; arena; arena_no_bonus; EM; 0.05
    while answers do not
relevance; ARENA, not ablated; arena; arena_no_relevance; CITED; 0
    rewarding relevance brings exact citations (ours to show)
naive; ARENA 4.3, Table 2; arena; arena_naive; EM; 0
    its reward beats format and accuracy alone
naive_cited; ARENA 5.3, Figure 3; arena; arena_naive; CITED; 0
    and it cites what it read
em; ARENA 5.3; arena; arena_f1; EM; 0
    an exact-match reward beats an F1 reward
"""
CLAIMS: dict[str, Claim] = {}
for _head, _says in re.findall(r"(.+)\n    (.+)", _CLAIMS):
    _name, *_pair, _number, _margin = _head.split("; ")
    CLAIMS[_name] = Claim(*_pair, NUMBERS[_number], float(_margin), _says)


def interval(differences: list[float], sure: int = 95) -> tuple:
    """Returns (mean, low, high) of the t interval at `sure` %; one number d gives (d, −inf, inf).

    Worked: 1, 2, 3 have mean 2 and s = 1. At 95 %, t(2) = 4.303, so the interval is 2 ± 4.303 / √3
    = 2 ± 2.484. At 90 % it is 2 ± 1.686.
    """
    n, mean = len(differences), np.mean(differences)
    if n < 2:
        return mean, -math.inf, math.inf
    t = T[sure][: n - 1][-1]  # beyond the table: its last value
    half = t * np.std(differences, ddof=1) / math.sqrt(n)
    return mean, mean - half, mean + half


def verdict(claim: Claim, differences: list[float]) -> str:
    """Returns "shows", "does not show" or "reversed"; with a margin m "equal within m" or "does not
    show".

    Worked (mean ± half the interval) for counts 0.03: 0.10 ± 0.05 shows; 0.02 ± 0.01 does not show;
    0.10 ± 0.20 does not show; −0.10 ± 0.05 is reversed. With margin 0.05, 0.01 ± 0.03 is equal
    within 0.05, and 0.01 ± 0.05 does not show.
    """
    mean, low, high = interval(differences, 90 if claim.margin else 95)
    if claim.margin:
        return f"equal within {claim.margin}" if max(-low, high) < claim.margin else "does not show"
    counts = claim.number.counts
    if not (low * high > 0 and abs(mean) >= abs(counts)):  # so too if a number is NaN
        return "does not show"
    return "shows" if mean * counts > 0 else "reversed"
