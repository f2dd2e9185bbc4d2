"""What the tiny world must know about a paper, without torch; `papers.py` has one per paper."""

from dataclasses import dataclass, field

# kind of question -> its share of the traces that answer one
MIX = {"one_hop": 0.24, "two_hop": 0.28, "unit": 0.20, "arithmetic": 0.18, "known": 0.10}


@dataclass(frozen=True)
class Tiny:
    """What the tiny world must know about a paper: the grammar of a trace, what is read and asked,
    the flaws (they leave RL something to find; more of them hide the skill itself), the training.

    A template has gaps: {answer}; {asked}, the relation, as " birthplace", or "" if none is read;
    {thought}, both. In a passage the value follows that word directly, so it can be found there.
    """

    end: str  # how a trace comes to its answer; {evidence} found, or the thought; {citation}
    opening: str = ""  # before the first search; {asked} is " how many" where no relation is
    between: str = "{note}"  # before each later search: the thought about the last result
    no_note: str = ""  # replaces {note} if no passage found has the fact
    read: str = " {answer}"  # the answer in traces that only read
    citation: str = ""  # the {numbers} of the references in the prompt that count
    analysis: str = ""  # what follows a citation: {note} and {thought}

    layout: str = "pages"  # of the world's passages, or "facts"
    summarised: bool = False  # a search shows one text, or the fallback; else numbered passages
    kinds: dict[str, float] = field(default_factory=MIX.copy)
    # The numbers are shares of the traces.
    practice: float = 0.3  # traces that only read nonsense facts and are asked for each
    direct: float = 0.2  # share of the others whose prompt forbids searching
    rejected: float = 0.2  # share of these in which a query, without loss, was rejected before
    guess_at_once: tuple[float, float] = (0.2, 0.5)  # look-ups of one and two hops: no search
    choice_without_loss: float = 0.96  # share of searches decided by a token without loss
    bad_query: float = 0.2
    stop_after_first_hop: float = 0.2  # at 0.35 a world was seen whose templates lost a hop
    ignore_document: float = 0.1
    needless_search: float = 0.3  # known facts and sums that are searched for, with right answers
    no_evidence: float = 0.3  # traces that answer without evidence
    wrong_evidence: float = 0.3  # share of the others whose evidence states another fact
    right_citation: float = 0.35  # traces that cite the right references; the others do not
    no_analysis: float = 0.15
    # Flaws of the weaker warm-ups alone (papers.py); at 0 no number is drawn for them.
    raw: float = 0.0  # searches that show three numbered passages in place of the summary
    stray: float = 0.0  # searches that show some passage where the fallback would be right
    twice: float = 0.0  # needless searches that follow a needless one
    sloppy: float = 0.0  # answers given twice, or after documents that the model invents
    verbose: float = 0.0  # answers that say the relation beside the value
    prior: float = 1.0  # what it may search at most before RL, per look-up: lab.ablate measures it
    context: int = 256  # tokens; raw passages take more
    steps: int = 550
    batch_size: int = 64
    lr: float = 4e-3
    warmup_steps: int = 50
    decay_from: float = 0.5
    muon_lr: float = 0.0  # sft.SFTSettings
