"""Describes the tiny model's warm-up for one paper; papers.py has the values. Needs no torch."""

from dataclasses import dataclass, field

# kind of question -> its share of the traces that answer one
MIX = {"one_hop": 0.24, "two_hop": 0.28, "unit": 0.20, "arithmetic": 0.18, "known": 0.10}


@dataclass(frozen=True)
class Tiny:
    """The tiny model's warm-up for one paper: the templates of a trace, the questions and passages,
    the shares of flawed traces, and the training. Flaws leave RL something to improve; with many
    more of them the model would not learn the skills.

    The templates have these gaps:
    {answer}    the answer, right or wrong
    {asked}     the relation that is looked up, for example " birthplace"; "" if there is none
    {thought}   {asked} and then the answer. A passage also has the value directly after the
                relation, so the model can find the value by matching the relation's word.
    """

    # The last part of a trace, with the answer. {evidence}: the passages that were found, or the
    # thought; {citation} and {analysis}: the two templates below.
    end: str
    opening: str = ""  # before the first search; {asked} is " how many" without a relation
    between: str = "{note}"  # before each later search: {note} on the previous result
    no_note: str = ""  # replaces {note} if the previous search did not find the fact
    read: str = " {answer}"  # the answer in traces that only practise reading
    citation: str = ""  # cites references in the prompt by their {numbers}
    analysis: str = ""  # follows a citation; has the gaps {note} and {thought}

    layout: str = "pages"  # of the world's passages: "pages" or "facts" (world.py)
    summarised: bool = False  # searches show one text or the fallback, not numbered passages
    kinds: dict[str, float] = field(default_factory=MIX.copy)
    # Down to `prior`, each number is a share; it is a share of all traces if nothing else is said.
    practice: float = 0.3  # traces that only read: nonsense facts, each of which is asked for
    direct: float = 0.2  # share of the other traces whose prompt forbids searching
    rejected: float = 0.2  # share of `direct` traces that begin with a rejected query, without loss
    guess_at_once: tuple[float, float] = (0.2, 0.5)  # one-hop, two-hop look-ups without a search
    choice_without_loss: float = 0.96  # searching traces without loss on the decision to search
    bad_query: float = 0.2  # share of hops that begin with a query that finds nothing
    # Share of two-hop traces. At 0.35, in one world, some question templates lost their second hop.
    stop_after_first_hop: float = 0.2
    ignore_document: float = 0.1  # traces that read documents but answer with a guess
    needless_search: float = 0.3  # share of known facts and sums: searched, then answered correctly
    no_evidence: float = 0.3  # traces that answer without evidence
    wrong_evidence: float = 0.3  # share of traces with evidence: it states another fact
    right_citation: float = 0.35  # traces with the right citation; the others have a wrong one
    no_analysis: float = 0.15  # traces that cite without an analysis
    # Flaws of the weaker warm-ups in papers.py. A flaw with share 0 draws no random number.
    raw: float = 0.0  # searches that show three numbered passages instead of the summary
    stray: float = 0.0  # searches that show a random passage although nothing relevant was found
    twice: float = 0.0  # needless searches that are followed by another one
    sloppy: float = 0.0  # answers that are given twice or preceded by an invented passage
    verbose: float = 0.0  # answers that contain the relation as well as the value
    prior: float = 1.0  # most searches per look-up before RL; lab.ablate checks this
    context: int = 256  # tokens; raw passages take more
    steps: int = 550
    batch_size: int = 64
    lr: float = 4e-3
    warmup_steps: int = 50
    decay_from: float = 0.5
    muon_lr: float = 0.0  # as in sft.SFTSettings
