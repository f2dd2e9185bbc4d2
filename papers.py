"""What each paper chose: one record per paper, every number with its source.

    protocols    the tags it writes (prompts.py); the first is its own
    stages       stage -> the settings it sets; what is not named has its record's default
    tiny         stage -> what the tiny model on the built-in world needs in their place
    world        how the tiny model is warmed up: sizes, and the grammar of the traces it reads
    good_format  is a trajectory in the paper's format? (evaluations report the share)
    punctuation  in answers it becomes a blank ("space") or nothing ("delete"), as its scorer has it
    decoding     how it samples when it evaluates; {} is greedy
    variants     its other backbones and ablations, by name: each is a record of its own (--variant)

A paper is three files: what it writes (prompts.py), what it is paid (rewards.py) and what it chose
(here). Whoever adds one writes these three, and every command knows it.
Left out: what the papers chose for backbones that are no causal LM, and their hardware.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from errors import FlagParser, InputError, nearest, run_main
from rewards import (
    arena_format,
    r1_searcher_format,
    r_search_format,
    ur2_violations,
    when_to_search_format,
)
from trajectory import Trajectory
from world.toy import Tiny


@dataclass(frozen=True)
class Paper:
    source: str
    protocols: tuple[str, ...]
    stages: dict[int, dict]
    tiny: dict[int, dict]
    good_format: Callable[[Trajectory], bool]
    world: Tiny
    punctuation: str = "space"
    decoding: dict = field(default_factory=dict)
    variants: dict[str, "Paper"] = field(default_factory=dict)


def varied(paper: Paper, **changes) -> Paper:
    """The paper with these settings in each of its stages."""
    return replace(paper, stages={n: stage | changes for n, stage in paper.stages.items()})


# The tiny model has 0.48M weights, born at random: a learning rate 150 times larger, short texts.
TINY = {
    "lr": 3e-4,
    "group_size": 8,
    "questions_per_step": 16,
    "trajectories_per_update": 64,
    "max_turn_tokens": 24,
    "turn_tokens": "",
    "max_searches": 4,
    "documents_per_search": 1,
    "document_tokens": 48,
    "title_boost": 4,
    "save_every": 10,
}
LOOK_UPS = TINY | {"steps": 12, "mix": "one_hop=3,two_hop=4,unit=1"}
EVERYTHING = TINY | {
    "steps": 60,
    "mix": "one_hop=4,two_hop=4,unit=1,arithmetic=2,known=2",
    "trajectories_per_update": 32,
    "lr": 5e-4,
    "lr_schedule": "linear",
}
KNOWN_TOO = {"mix": "one_hop=4,two_hop=4,unit=1,arithmetic=2,known=3"}
TWO_FACTS = {
    "mix": "one_hop=1,two_hop=1",
    "documents_per_search": 2,
    "document_tokens": 64,
    "max_turn_tokens": 40,
}
HALVES = {"one_hop": 0.5, "two_hop": 0.5}

_ur2 = (  # appendix C.2 and C.3
    {"protocol": "ur2", "algorithm": "reinforce_pp_baseline"}
    | {"group_size": 16, "questions_per_step": 64, "trajectories_per_update": 256}
    | {"lr": 2e-6, "clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0}
    | {"temperature": 1.0, "max_searches": 4, "max_turn_tokens": 512, "documents_per_search": 10}
)
UR2 = Paper(
    source="UR² app. C.2, C.3, C.7",
    protocols=("ur2", "ur2_search"),
    stages={
        1: _ur2 | {"reward": "ur2_stage1", "steps": 10},  # 15 for the 3B model
        2: _ur2 | {"reward": "ur2_stage2", "steps": 100},  # at most two epochs
    },
    tiny={
        1: LOOK_UPS | {"summarizer": "extractive"},
        # Eight of 24 are asked without retrieval: where all may search, the sign is unlearned.
        2: EVERYTHING
        | {"summarizer": "extractive", "questions_per_step": 24}
        | {"mix": "one_hop=5,two_hop=5,unit=1,arithmetic=3,known=2,direct=8"},
    },
    good_format=lambda trajectory: not ur2_violations(trajectory),
    # search, read the summary (or the fallback), write \\boxed{...}
    world=Tiny("{asked} \\boxed{{ {answer}}}<eos>", read=" \\boxed{{ {answer}}}", summarised=True),
    decoding={"temperature": 0.3, "top_p": 0.5},  # appendix C.3
)

# UR²'s baseline: the answer reward from the start, the passages as they are, 5 of them.
VANILLA_RL = replace(
    UR2,
    source="UR² section 4, baselines",
    stages={1: _ur2 | {"reward": "ur2_stage2", "steps": 110, "documents_per_search": 5}},
    tiny={1: EVERYTHING | {"steps": 72}},
)

_r1_searcher = (  # section 4.1 and its training script
    {"protocol": "r1_searcher", "algorithm": "reinforce_pp"}
    | {"group_size": 16, "questions_per_step": 64, "trajectories_per_update": 256}
    | {"lr": 2e-6, "kl_coef": 0.0, "kl_estimator": "k1"}  # in the reward; Llama: 1e-4
    | {"temperature": 1.0, "max_searches": 8, "max_turn_tokens": 512}
    | {"documents_per_search": 5}  # 3 in its code
)
R1_SEARCHER = Paper(
    source="R1-Searcher section 4.1, script",
    protocols=("r1_searcher",),
    stages={
        1: _r1_searcher | {"reward": "r1_searcher_stage1", "steps": 6},  # one epoch of 350
        2: _r1_searcher | {"reward": "r1_searcher_stage2", "steps": 128},  # one epoch of 8,148
    },
    tiny={1: LOOK_UPS, 2: EVERYTHING},
    good_format=lambda trajectory: not r1_searcher_format(trajectory),
    world=Tiny(end="{thought}</think>\n\n<answer> {answer}</answer>"),
)

_r_search = (  # section 4.1
    {"protocol": "r_search", "algorithm": "grpo", "reward": "r_search", "steps": 195}
    | {"group_size": 5, "questions_per_step": 256, "trajectories_per_update": 1280}
    | {"lr": 1e-6, "lr_warmup": 185}  # 0.95 of 195 updates, as printed
    | {"kl_coef": 1e-3, "kl_estimator": "k3", "temperature": 1.0}
    | {"max_searches": 4, "max_turn_tokens": 500}
    | {"documents_per_search": 3}  # 5 in evaluation
)
R_SEARCH = Paper(
    source="R-Search section 4.1, table",
    protocols=("r_search",),
    stages={1: _r_search},
    tiny={1: EVERYTHING | TWO_FACTS | {"lr_warmup": 0, "kl_coef": 0.0, "steps": 40}},
    good_format=r_search_format,
    # two passages a search; copy the one that counts as evidence, answer from it
    world=Tiny("{evidence}<answer> {answer}</answer>", layout="facts", kinds=HALVES, steps=350),
    punctuation="delete",
    decoding={"temperature": 0.1, "documents_per_search": 5},  # section 4.1
)

_when_to_search = (  # section 4 and its table; 500 steps in all, halved between the stages by us
    {"protocol": "when_to_search", "algorithm": "dapo", "beta": 0.3, "steps": 250}
    | {"group_size": 32, "questions_per_step": 32, "trajectories_per_update": 1024}
    | {"lr": 1e-6, "clip_low": 0.2, "clip_high": 0.28, "loss_aggregation": "token"}
    | {"kl_coef": 0.0}  # its text; its table: 1e-4
    | {"temperature": 1.0, "max_searches": 5, "max_turn_tokens": 8192, "documents_per_search": 5}
)
# Stage 2 is about groups that are all right, with and without a search: "correct" would drop them.
_when_stage2 = _when_to_search | {"reward": "when_to_search_stage2", "filter_by": "answer"}
WHEN_TO_SEARCH = Paper(
    source="When to Search section 4, table",
    protocols=("when_to_search",),
    stages={1: _when_to_search | {"reward": "when_to_search_stage1"}, 2: _when_stage2},
    tiny={
        1: TINY | KNOWN_TOO | {"max_resample": 1, "steps": 5},
        2: EVERYTHING | KNOWN_TOO | {"max_resample": 1, "steps": 40},
    },
    good_format=when_to_search_format,
    # think, search, reflect, answer
    world=Tiny(
        opening="<think>{asked}</think>",
        between="<reflect>{note}</reflect>",
        no_note=" none",
        end="<reflect>{asked} {answer}</reflect><answer> {answer}</answer>",
        end_at_once="<answer> {answer}</answer>",
    ),
    punctuation="delete",
)

# Its ablation (Table 4): stage 2's reward alone, from the start.
_when_without_stage_one = replace(
    WHEN_TO_SEARCH,
    stages={1: _when_stage2 | {"steps": 500}},
    tiny={1: EVERYTHING | KNOWN_TOO | {"max_resample": 1, "steps": 45}},
)
WHEN_TO_SEARCH.variants.update({"without_stage_one": _when_without_stage_one})

_arena = (  # section 4.1
    {"protocol": "arena", "algorithm": "grpo", "reward": "arena", "steps": 95}
    | {"group_size": 7, "questions_per_step": 256, "trajectories_per_update": 1792}
    | {"lr": 3e-6, "kl_estimator": "k2"}
    | {"kl_coef": 0.04}  # its library's default: the paper's number is lost in our copy
    | {"temperature": 0.9, "max_searches": 0, "max_turn_tokens": 256}
)
ARENA = Paper(
    source="ARENA section 4.1",
    protocols=("arena",),
    stages={1: _arena},
    tiny={1: EVERYTHING | TWO_FACTS | {"max_searches": 0, "steps": 40}},
    good_format=arena_format,
    # four numbered references in the prompt; cite, analyse, answer
    world=Tiny(
        citation="<relevance>[{numbers}]",
        analysis="<analysis>{note}{thought}</analysis>",
        end="{citation}</relevance>{analysis}<answer> {answer}</answer>",
        layout="facts",
        kinds=HALVES,
        practice=0.65,
        steps=900,
        decay_from=0.75,
    ),
)

PAPERS: dict[str, Paper] = {
    "ur2": UR2,
    "vanilla_rl": VANILLA_RL,
    "r1_searcher": R1_SEARCHER,
    "r_search": R_SEARCH,
    "when_to_search": WHEN_TO_SEARCH,
    "arena": ARENA,
}
RECIPES: dict[str, dict[int, dict]] = {name: paper.stages for name, paper in PAPERS.items()}


# What lab/baselines.py writes has no paper's format: an answer will do.
BASELINES = replace(
    UR2,
    source="lab/baselines.py",
    protocols=("baseline",),
    good_format=lambda trajectory: trajectory.answer is not None,
)


def paper_of(protocol: str) -> Paper:
    """The first paper that writes this protocol."""
    papers = [*PAPERS.values(), BASELINES]
    paper = next((paper for paper in papers if protocol in paper.protocols), None)
    if paper is None:
        raise InputError(f"protocol {protocol}: no record of papers.py names it: add it there")
    return paper


def record_of(recipe: str, variant: str = "", stage: int | None = None) -> Paper:
    """The record of a recipe or of its variant, which must have the stage."""
    if recipe not in PAPERS:
        known = f"{', '.join(PAPERS)}{nearest(recipe, PAPERS)}"
        raise InputError(f"--recipe {recipe}: unknown; one of {known}")
    paper, known = PAPERS[recipe], PAPERS[recipe].variants
    if variant and variant not in known:
        names = f"one of {', '.join(known)}{nearest(variant, known)}" if known else "it has none"
        raise InputError(f"--variant {variant}: not of --recipe {recipe}: {names}")
    paper = known[variant] if variant else paper
    if stage is not None and stage not in paper.stages:
        stages, named = ", ".join(map(str, paper.stages)), " ".join([recipe, variant]).strip()
        raise InputError(f"--stage {stage}: {named} has stages {stages}")
    return paper


def table() -> list[list[str]]:
    """A header, a row per paper and stage, a column per setting that any of them names."""
    all_stages = [(name, stage) for name, stages in RECIPES.items() for stage in stages]
    columns = dict.fromkeys(key for name, stage in all_stages for key in RECIPES[name][stage])
    rows = [["paper", "stage", *columns, "source"]]
    for name, stage in all_stages:
        cells = [str(RECIPES[name][stage].get(column, "·")) for column in columns]
        rows.append([name, str(stage), *cells, PAPERS[name].source])
    return rows


def main() -> None:
    """Print the table of docs/papers.md: a line per setting."""
    parser = FlagParser("papers.py", description="What each paper chose, as Markdown.")
    parser.renamed = {"markdown": "leave it out, it is Markdown always"}
    parser.parse_args()
    lines = [" | ".join(column) for column in zip(*table(), strict=True)]
    lines.insert(1, " | ".join(["---"] * len(table())))
    print(*(f"| {line} |" for line in lines), sep="\n")


if __name__ == "__main__":
    run_main(main)
