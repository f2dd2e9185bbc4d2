"""The papers, each in a file of its own: tags and instruction, stages and numbers, variants.

To add a paper, write such a file, name it here, and add its rewards to rewards.py; every command
then knows it. `python -m papers` prints the settings of all.
"""

from papers.arena import ARENA
from papers.paper import Paper
from papers.r1_searcher import R1_SEARCHER
from papers.r_search import R_SEARCH
from papers.search_r1 import SEARCH_R1
from papers.ur2 import UR2, UR2_CHOICE, VANILLA_RL
from papers.when_to_search import WHEN_TO_SEARCH
from prompts import Protocol
from settings import check_value

PAPERS: dict[str, Paper] = {
    "ur2": UR2,
    "ur2_choice": UR2_CHOICE,
    "vanilla_rl": VANILLA_RL,
    "r1_searcher": R1_SEARCHER,
    "r_search": R_SEARCH,
    "search_r1": SEARCH_R1,
    "when_to_search": WHEN_TO_SEARCH,
    "arena": ARENA,
}
PROTOCOLS: dict[str, Protocol] = {}  # name -> protocol
for _paper in PAPERS.values():
    PROTOCOLS |= _paper.protocols


def as_protocol(protocol: Protocol | str) -> Protocol:
    """Returns a protocol, looked up by its name if a name is given."""
    return PROTOCOLS[protocol] if isinstance(protocol, str) else protocol


def paper_of(protocol: str) -> Paper:
    """Returns the first paper that uses this protocol. A protocol of lab/baselines.py begins with
    "baseline_", before the paper's own.
    """
    name = protocol.removeprefix("baseline_")
    return next(paper for paper in PAPERS.values() if name in paper.protocols)


def record_of(recipe: str, variant: str = "", stage: int | None = None) -> Paper:
    """Returns the record of a recipe or of its variant. Raises an InputError if the recipe, the
    variant or the stage does not exist.
    """
    check_value("recipe", recipe, {"one_of": PAPERS})
    paper = PAPERS[recipe]
    if variant:
        check_value("variant", variant, {"one_of": paper.variants})
        paper = paper.variant(variant)
    if stage is not None:
        check_value("stage", str(stage), {"one_of": [*map(str, paper.stages)]})
    return paper
