"""Writes the data of docs/index.html: all rewards of its transcripts, and cases for its formulas.

    python -m lab.golden                       everything except the recorded run
    python -m lab.golden --output_dir runs     also that: asks the checkpoints of `make train`, with
                                               the flags of lab.moments

The page computes no reward: it looks up what `REWARDS` pays at each position of its controls. Its
formulas have the names of ours, and tests/test_course.py lets it compute all cases again.
"""

import json
import re
import sys
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
from lab.moments import moments
from rewards import REWARDS, Extras, RewardSettings, example
from trajectory import trajectory_from_text
from trajectory_metrics import trajectory_metrics

PAGE = Path("docs/index.html")
MARK = "/* JSON that lab.golden reads or writes */"  # around the transcripts, then around the data
# Parameter of a formula -> pools of its numbers (see `drawn`). Some pools hold edges only: equal
# or unknown rewards, a group of one, log-ratios a hair inside and outside of a clip's border.
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
    """Returns one element of the list; in place of a list, four that are drawn from it."""
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
    """Returns the distinct rewards, and the index of one for each setting of the controls."""
    question, values, index = example("arena").question, {}, []
    for position in map("".join, product(*controls.values())):
        text = " ".join(piece for piece, where in pieces if re.match(where, position))
        # The last control of UR² is the fallback, which no other reward reads.
        t = trajectory_from_text(question, text, protocol, [0] * int(position[-1]))
        # The reader of R-Search answers with the whole evidence.
        terms = REWARDS[name](t, RewardSettings(), 0, Extras(reader_answer=t.evidence))
        index.append(values.setdefault(tuple(terms.items()), len(values)))
    return {"protocol": protocol, "index": index, "values": list(values)}


def recorded(arguments: list) -> dict:
    """Returns questions that are answered right after stage 2, with their trajectories before RL,
    after stage 1 and after stage 2.
    """
    rows = zip(*moments([*arguments, "--questions", "2"]), strict=True)
    return {
        three[2].question.question: [[*map(vars, t.segments)] for t in three]
        for three in rows
        if trajectory_metrics(three[2])["em"]
    }


def written(page: str, arguments: list) -> str:
    """Returns the page with the data that is computed now."""
    parts = page.split(MARK)
    transcripts, data = map(json.loads, parts[1:4:2])
    if arguments:
        data["moments"] = recorded(arguments)
    data |= {
        "cases": [*cases()],
        "rewards": {
            name: reward_table(name, protocol, **transcript)
            for name, (protocol, transcript) in product(REWARDS, transcripts.items())
            if name.startswith(protocol)
        },
    }
    parts[3] = json.dumps(
        data, separators=(",", ":"), default=lambda x: x.double().round(decimals=10).tolist()
    )
    return MARK.join(parts)


def main() -> None:
    PAGE.write_text(written(PAGE.read_text("utf-8"), sys.argv[1:]), "utf-8")


if __name__ == "__main__":
    run_main(main)
