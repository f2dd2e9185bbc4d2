"""Lets you write functions of this code again; the tests of the originals check them.

    python -m lab.exercise list        the fifteen exercises, in reading order
    python -m lab.exercise open 3      writes exercises/03_bm25_idf.py: a signature, a docstring
    python -m lab.exercise check 3     runs the tests of the original with your function
    python -m lab.exercise show 3      prints the original

`check` runs tests/referee.py in a separate process and changes no file. It exits with 0 if all
tests pass. If one fails, it prints the error of the first such test, of an assertion with the
values of both sides, and exits with 1. After 20 seconds it gives up.
"""

import inspect
import re
import subprocess
import sys
import textwrap
from collections import namedtuple
from pathlib import Path
from pkgutil import resolve_name

from errors import FlagParser, InputError, run_main

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 20  # time limit of the tests of one exercise
# A hole is one exercise: functions whose bodies are removed. `tests` names the file of their tests,
# and `chosen` selects tests in it (pytest -k). `unused` are modules that only other tests of that
# file need. `worked` is an example or a formula that the function's docstring does not have.
Hole = namedtuple("Hole", "name module functions tests chosen unused worked")
TABLE = """
mask_of_a_turn | trajectory | Trajectory.append_model Trajectory.append_environment
    | turns | the_mask or appended_in | | A sampled token has mask 1 and its log-prob; a token of
    the environment has mask 0 and log-prob 0.0. Worked: a turn of 3 tokens, a document of 2 and a
    turn of 1 have the mask [1, 1, 1, 0, 0, 1].
stop_rule | rollout | StopRule.reason
    | turns | why_a_turn or eos_ends | | Worked, with one token per character: "</search" gives
    None, "</search>" gives "query", three characters with max_new_tokens 3 give "length", and the
    token that ends the text gives "eos".
bm25_idf | retriever | inverse_document_frequencies
    | retriever | scores_worked or quarter_of or shares_more | conftest | The result is an
    array [terms]: idf = ln((N − n_t + 0.5) / (n_t + 0.5)), or epsilon · mean idf where it is < 0.
    If that mean is not above 0, each value is at least SMALL_IDF instead. Worked: N = 3, n_t = [2,
    1, 1, 1, 1] and epsilon = 0.25 give one idf of −0.5108 and four of 0.5108, whose mean is 0.3065;
    the result is [0.0766, 0.5108, 0.5108, 0.5108, 0.5108].
ur2_eq_1_and_2 | rewards | ur2_stage1 ur2_stage2
    | rewards | ur2_stage or without_retrieval or math_judge | |
r_search_format | rewards | r_search
    | rewards | r_searchs_format or r_search_without | |
when_to_search_answer | rewards | when_to_search
    | rewards | softens_a_wrong or eq_12 or judges_verdict or rejected_search | |
arena_relevance | rewards | relevance_of
    | rewards | cited_numbers or arena_scores | | `numbers` are the cited references.
    They earn 1 if they equal the gold set, 0.5 if they share some numbers with it, and 0 if none.
    Worked for gold {1, 4}: {1, 4} earns 1.0, {1} earns 0.5, {2, 3} and the empty set earn 0.0.
k3 | kl | k3 | kl | half_against or keeps_its or other_direction | |
clipped_surrogate | ppo | clipped_surrogate
    | ppo | clipped_surrogate | |
sequence_weights | ppo | sequence_weights | ppo | sequence_weights or weight_zero | |
gae | ppo | gae | ppo | gae_by_hand or recursion | |
group_normalisation | grpo | group_normalize
    | grpo | worked_group or itself_only or exactly_zero or group_of_one or unknown | |
ur2_eq_5 | reinforce_pp | baseline_advantages
    | reinforce_pp | form_by_hand or larger_spread or nothing_to or unknown | |
dapo_filter | dapo | informative_groups | dapo | informative | policy |
sum_over_micro_batches | update | accumulate_and_step
    | micro_batches | micro_batch or before_clipping | transformers
    transformers.integrations.sdpa_attention transformers.masking_utils
    transformers.models.auto.tokenization_auto
    transformers.utils.logging | `loss_of(micro, rows)` returns Σ weight · loss of a
    micro-batch and its record. Worked: one micro-batch has three tokens with loss 0.1 each, another
    has one token with loss 0.5; with weight 1/4 per token the loss is 0.2, whereas the mean of the
    two micro-batches' means is 0.3.
"""


def holes() -> list[Hole]:
    rows = [" ".join(row.split()).split("|") for row in re.split(r"\n(?=\S)", TABLE.strip())]
    return [Hole(*map(str.strip, row)) for row in rows]


def originals(hole: Hole) -> list[tuple[str, str]]:
    """Returns (signature with docstring, whole source) of each function of a hole."""
    pairs = []
    for path in hole.functions.split():
        function = resolve_name(f"{hole.module}:{path}")
        text = textwrap.dedent(inspect.getsource(function)).rstrip()
        # A signature ends in the first colon at the end of a line.
        opening = re.match(r'(?s).*?:\n(\s+""".*?""")?', text).group().rstrip()
        pairs.append((opening, text))
    return pairs


def stub(hole: Hole) -> str:
    """Returns the text of a new exercise file: `worked`, an import of the originals' module, and
    each original's signature and docstring.
    """
    head = textwrap.fill(f"{hole.name}. {hole.worked}", 96)
    blocks = [f"{opening}\n    raise NotImplementedError" for opening, _ in originals(hole)]
    return "\n\n\n".join([f'"""{head}"""\n\nfrom {hole.module} import *', *blocks]) + "\n"


def check(hole: Hole, path: Path) -> int:
    """Runs the tests of a hole with the functions of the file. Returns the referee's exit code."""
    for name in hole.functions.split():  # else the star would import the original
        if f"def {name.rpartition('.')[2]}(" not in path.read_text(encoding="utf-8"):
            raise InputError(f"{path}: the function {name} is missing")
    command = [sys.executable, ROOT / "tests" / "referee.py", path, hole.module, hole.functions]
    return subprocess.call(command + [hole.tests, hole.chosen, hole.unused], timeout=SECONDS)


def main(arguments: list[str] | None = None) -> None:
    every = dict(enumerate(holes(), 1))
    parser = FlagParser("python -m lab.exercise", description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("list", "open", "check", "show"))
    parser.add_argument("number", nargs="?", type=int, choices=every, default=1)
    given = parser.parse_args(arguments)
    hole = every[given.number]
    path = Path("exercises", f"{given.number:02}_{hole.name}.py")
    if given.command == "list":
        for number, one in every.items():
            print(f"{number:2} {one.name:24} {one.module}: {one.functions}")
    elif given.command == "show":
        print(*(source for _, source in originals(hole)), sep="\n\n\n")
    elif given.command == "open":
        path.parent.mkdir(exist_ok=True)
        with path.open("x", encoding="utf-8") as file:  # an older solution is not overwritten
            file.write(stub(hole))
        print("written:", path)
    else:
        sys.exit(check(hole, path))


if __name__ == "__main__":
    run_main(main)
