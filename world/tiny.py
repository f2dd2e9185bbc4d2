"""What the tiny world must know about a paper, without torch; `papers.py` has one per paper."""

from dataclasses import dataclass, field

# kind of question -> its share of the traces that answer one
MIX = {"one_hop": 0.24, "two_hop": 0.28, "unit": 0.20, "arithmetic": 0.18, "known": 0.10}


@dataclass(frozen=True)
class Tiny:
    """What the tiny world must know about a paper: the grammar of a trace, what is read and asked,
    the flaws (they leave RL something to find; more of them hide the skill itself), the training.

    A template has gaps: {answer}; {asked}, the relation, " birthplace", or "" where none is read;
    {thought}, both. In a passage the value stands right behind that word, and is found there.
    """

    end: str  # how a trace comes to its answer; {evidence} found, or the thought; {citation}
    opening: str = ""  # before the first search; {asked} is " how many" where no relation is
    between: str = "{note}"  # before every other search: the thought about the one before
    no_note: str = ""  # {note} where nothing to the point was found
    read: str = " {answer}"  # what mere practice of reading writes
    citation: str = ""  # the {numbers} of the references in the prompt that count
    analysis: str = ""  # what follows a citation: {note} and {thought}

    layout: str = "pages"  # of the world's passages, or "facts"
    summarised: bool = False  # a search shows one text, or the fallback; else numbered passages
    kinds: dict[str, float] = field(default_factory=MIX.copy)
    practice: float = 0.3  # traces that only read: nonsense facts, each asked for
    direct: float = 0.2  # of the others: with the sign of the prompt without retrieval
    rejected: float = 0.2  # of these: after a query that was rejected, which is not trained on
    guess_at_once: tuple[float, float] = (0.2, 0.5)  # look-ups of one and of two hops, unsearched
    choice_without_loss: float = 0.96  # of those that search: no loss on the token that decides to
    bad_query: float = 0.2
    stop_after_first_hop: float = 0.2  # at 0.35 a world was seen whose templates lost a hop
    ignore_document: float = 0.1
    needless_search: float = 0.3  # for what is known or reckoned: it must cost no right answer
    no_evidence: float = 0.3  # traces that answer without it
    wrong_evidence: float = 0.3  # of the others: the answer's fact is another
    right_citation: float = 0.35  # traces that cite the right set; the others another one
    no_analysis: float = 0.15
    # Flaws of the weaker warm-ups alone (papers.py); at 0 no number is drawn for them.
    raw: float = 0.0  # searches that show three numbered passages in place of the summary
    stray: float = 0.0  # that find nothing to the point, and show some passage and no fallback
    twice: float = 0.0  # needless searches after a needless one
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
