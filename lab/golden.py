"""Writes data into docs/index.html: rewards of its transcripts and test cases of its formulas.

    python -m lab.golden

The page does not compute rewards: for each position of its controls it looks up the reward that
this file has written. It does compute the formulas, under the names of our functions, and
tests/test_course.py checks that its results equal those of the cases. The trajectories in the page
were sampled at commit c6d8de4; they are kept.
"""

import json
import re
from inspect import signature
from itertools import product
from pathlib import Path
from random import Random

import torch

import dapo
import grpo
import ppo
import reinforce_pp
from errors import run_main
from rewards import REWARDS, example, reward_terms
from trajectory import trajectory_from_text

PAGE = Path("docs/index.html")
MARK = "/* JSON that lab.golden reads or writes */"  # around the transcripts, then around the data
# Parameter of a formula -> pools from which `drawn` takes its value. Many of the values are edge
# cases: equal or unknown (NaN) rewards, a group of one, log-ratios just inside and just outside the
# clip range.
POOLS = """{
    "rewards": [[0.7], [NaN], [0, 1, NaN], [-2.5, 1, 4, NaN], [2, 2.0000005], [2, 2.000002],
        [-1, 0.3, 1.25, 4.5, 5]],
    "correct": [[0], [1, NaN], [0, 1, NaN]], "group_size": [1, 2, 4], "group_std": [true, false],
    "advantages": [[[1.5]], [[-1.25, -0.4, 0, 0.9, 2]]],
    "response_mask": [[[0, 1]], [[0, 1, 1, 1], [0], [1]]], "gamma": [1, 0.5],
    "logprobs": [[[-0.2231436, -0.2231435, 0, 0.1823215, 0.1823216, 0.2468600, 0.2468601, 2]]],
    "old_logprobs": [[[0]], [[0, -1]]],
    "token_rewards": [[[-0.1, 0, 2.5]]], "clip_low": [0, 0.2], "clip_high": [0.2, 0.28]
}"""
FORMULAS = [
    grpo.group_center,
    grpo.group_normalize,
    dapo.informative_groups,
    ppo.whiten,
    reinforce_pp.baseline_advantages,
    reinforce_pp.returns_to_go,
    ppo.clipped_surrogate,
    ppo.sequence_weights,
    ppo.token_weights,
]


def drawn(draw, pools):
    """Draws an element of `pools`; if it is a list, draws four elements from it in the same way."""
    pool = draw.choice(pools)
    return [drawn(draw, pool) for _ in range(4)] if isinstance(pool, list) else pool


def cases():
    """Yields the name of a formula, its arguments, and what it returns."""
    draw, pools = Random(0), json.loads(POOLS)
    for formula in FORMULAS * 34:
        arguments = [drawn(draw, pools[name]) for name in signature(formula).parameters]
        given = [torch.DoubleTensor(x) if isinstance(x, list) else x for x in arguments]
        yield formula.__name__, arguments, formula(*given)


def reward_table(name: str, protocol: str, controls: dict, pieces: list) -> dict:
    """Returns the protocol, the distinct rewards (lists of terms), and for each position of the
    controls the index of its reward.
    """
    question, values, index = example("arena").question, {}, []
    for position in map("".join, product(*controls.values())):
        text = " ".join(piece for piece, where in pieces if re.match(where, position))
        # `position` has a digit for each control. The last digit of UR² says whether the first
        # search got the fallback. For other protocols it says something else, and would mark a
        # fallback by mistake, but their rewards do not read fallbacks.
        t = trajectory_from_text(question, text, protocol, [0] * int(position[-1]))
        # Assume that R-Search's reader answers with the whole evidence.
        terms = reward_terms(name, t, {"step": 0, "reader_answer": t.evidence})
        index.append(values.setdefault(tuple(terms.items()), len(values)))
    return {"protocol": protocol, "index": index, "values": list(values)}


def with_new_data(page: str) -> str:
    """Returns the page with new rewards and cases."""
    parts = page.split(MARK)
    transcripts, data = map(json.loads, parts[1:4:2])
    data["cases"] = [*cases()]
    data["rewards"] = {
        name: reward_table(name, protocol, **transcript)
        for name, (protocol, transcript) in product(REWARDS, transcripts.items())
        if name.startswith(protocol)
    }
    parts[3] = json.dumps(
        data, separators=(",", ":"), default=lambda x: x.double().round(decimals=10).tolist()
    )
    return MARK.join(parts)


def main() -> None:
    PAGE.write_text(with_new_data(PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    run_main(main)
