"""What the file of a paper holds, and the tiny model's settings that several papers share.

protocols    {name: Protocol}: the paper's own first, then those of its variants
stages       {stage: the paper's settings, and ours where it gives none (docs/papers.md says
             which)}; all other settings have their defaults
tiny         {stage: settings that replace these for the tiny model on the built-in world}
world        the tiny model's supervised warm-up: the form and flaws of its traces, its steps
warm_ups     weaker warm-ups, on which the paper's claims can be tested: name (the setting
             `toy_init`) -> what it changes in `world`
punctuation  how the paper's scorer treats punctuation in answers, a key of metrics.PUNCTUATION
best_by      the metric by which the best checkpoint is chosen, of those in eval/...
decoding     settings of the paper's evaluations (--decoding paper); {} means greedy
variants     other backbones, data and ablations: name (--variant) -> what it changes: settings of
             all stages, {stage: settings} of one stage, or fields of this record
"""

from dataclasses import dataclass, field, replace

from prompts import Protocol
from world.tiny import Tiny


@dataclass(frozen=True)
class Paper:
    source: str
    protocols: dict[str, Protocol]
    stages: dict[int, dict]
    tiny: dict[int, dict]
    world: Tiny
    punctuation: str = "space"
    best_by: str = "em"
    decoding: dict = field(default_factory=dict)
    warm_ups: dict[str, dict] = field(default_factory=dict)
    variants: dict[str, dict] = field(default_factory=dict)

    def warmed_up(self, name: str) -> Tiny:
        return replace(self.world, **self.warm_ups[name]) if name else self.world

    def variant(self, name: str) -> "Paper":
        """Returns the record of a variant."""
        changes = dict(self.variants[name])
        fields = {key: changes.pop(key) for key in [*changes] if key in vars(self)}
        stages = fields.get("stages", self.stages)
        own = {n: changes.pop(n, {}) for n in stages}
        fields["stages"] = {n: stage | changes | own[n] for n, stage in stages.items()}
        return replace(self, **fields)


# The tiny model has only 0.48M weights (0.20M in `make train`) and no training but its warm-up, so
# its learning rate is at least 150 times UR²'s 2e-6. Its texts are short, hence the low limits.
TINY = {
    "lr": 3e-4,
    "group_size": 8,
    "questions_per_step": 16,
    "trajectories_per_update": 64,
    "max_turn_tokens": 24,
    "turn_tokens": {},
    "max_searches": 4,
    "save_every": 10,
    "keep_checkpoints": 2,
    "documents_per_search": 1,
    "document_tokens": 48,
    "title_boost": 4,
    "groups_kept": -1,
}
LOOK_UPS = TINY | {"steps": 12, "mix": {"one_hop": 3, "two_hop": 4, "unit": 1}}
EVERYTHING = TINY | {
    "steps": 60,
    "trajectories_per_update": 32,
    "lr": 5e-4,
    "lr_schedule": "linear",
    "mix": {"one_hop": 4, "two_hop": 4, "unit": 1, "arithmetic": 2, "known": 2},
}
TWO_FACTS = {
    "mix": {"one_hop": 1, "two_hop": 1},
    "max_turn_tokens": 40,
    "documents_per_search": 2,
    "document_tokens": 64,
}
HALVES = {"one_hop": 0.5, "two_hop": 0.5}
