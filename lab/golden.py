"""Writes the rewards of its transcripts into docs/index.html.

    python -m lab.golden

The page does not compute rewards: for each position of its controls it looks up the reward that
this file has written. It does compute the formulas, under the names of our functions. It has 306
cases of them, drawn and computed by this file at commit 8eab853; tests/test_course.py compares
them with our functions and with those of the page. Its trajectories were sampled at commit c6d8de4.
"""

import json
import re
from itertools import product
from pathlib import Path

from errors import run_main
from rewards import REWARDS, example, reward_terms
from trajectory import trajectory_from_text

PAGE = Path("docs/index.html")
MARK = "/* JSON that lab.golden reads or writes */"  # around the transcripts, then around the data


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
    """Returns the page with new rewards."""
    parts = page.split(MARK)
    transcripts, data = map(json.loads, parts[1:4:2])
    data["rewards"] = {
        name: reward_table(name, protocol, **transcript)
        for name, (protocol, transcript) in product(REWARDS, transcripts.items())
        if name.startswith(protocol)
    }
    parts[3] = json.dumps(data, separators=(",", ":"))
    return MARK.join(parts)


def main() -> None:
    PAGE.write_text(with_new_data(PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    run_main(main)
