"""Describes the tiny model's warm-up for one paper; papers/ has the values. Needs no torch."""

from dataclasses import dataclass, field

# kind of question -> its share of the warm-up's traces, without those that are for practice
# (`Tiny.practice`)
MIX = {"one_hop": 0.24, "two_hop": 0.28, "unit": 0.20, "arithmetic": 0.18, "known": 0.10}


@dataclass(frozen=True)
class Tiny:
    """The tiny model's warm-up for one paper: the templates of a trace, the questions and passages,
    the shares of flawed traces, and the training. Flaws leave RL something to improve; with many
    more of them the model would not learn the skills.

    Several templates have these gaps; any other gap is explained at its template:
    {answer}    the answer, right or wrong
    {asked}     the relation that is asked for, such as " birthplace"; "" if there is none. In `end`
                it is also "" if a known fact is answered without a search.
    {thought}   {asked} and then the answer; "" if {asked} is "". A passage also has the value
                directly after the relation, so the model can find the value by matching the
                relation's word.
    {note}      the fact of the previous hop, such as " birthplace bargate"; "" if there is none
    """

    # The last part of a trace, with the answer. {evidence}: the passages that were found, in the
    # evidence tags, or {thought} if the trace has no evidence; {citation} and {analysis}: the
    # templates below.
    end: str
    # Begins all traces but those of `practice` and those that cite. Only here, {asked} is
    # " how many", not "", if the question has no relation.
    opening: str = ""
    between: str = "{note}"  # before each search but the first
    # {note} in `between`, if the previous search found nothing relevant or equals the next one.
    no_note: str = ""
    read: str = " {answer}"  # the answer in traces that only practise reading
    citation: str = ""  # cites references in the prompt by their {numbers}
    analysis: str = ""  # follows a citation
    uncited: str = ""  # a whole trace that answers from references and does not cite them

    layout: str = "pages"  # of the world's passages: "pages" or "facts" (world.py)
    summarised: bool = False  # searches show one text as a summary, not numbered passages
    kinds: dict[str, float] = field(default_factory=MIX.copy)
    # Down to `verbose`, each number is a share; its comment says of what. A trace may search
    # unless it practises, is direct, or cites.
    practice: float = 0.3  # of all traces: they only read (nonsense facts) or only cite
    direct: float = 0.2  # of the other traces, except those that cite: the prompt forbids searching
    rejected: float = 0.2  # of direct traces: a rejected query, without loss, precedes the answer
    # Of one-hop (or unit) and of two-hop traces that may search: they guess without a search.
    guess_at_once: tuple[float, float] = (0.2, 0.5)
    choice_without_loss: float = 0.96  # of searching traces: no loss on the decision to search
    bad_query: float = 0.2  # of hops: a query that finds nothing relevant comes first
    # Of two-hop traces that made the first hop: they guess instead of making the second. At 0.35,
    # in one world, the model no longer made the second hop for some templates of questions.
    stop_after_first_hop: float = 0.2
    ignore_document: float = 0.1  # of traces that read documents: they answer with a guess
    needless_search: float = 0.3  # of known facts and sums: searched, then answered correctly
    no_evidence: float = 0.3  # of traces that found passages: they answer without evidence
    # Of traces with evidence for a relation: another fact replaces the last one in the evidence.
    wrong_evidence: float = 0.3
    right_citation: float = 0.35  # of traces that cite and answer; the others cite wrongly
    no_analysis: float = 0.15  # of traces that cite and answer: there is no analysis
    # Flaws of the weaker warm-ups in papers/. A flaw with share 0 draws no random number.
    raw: float = 0.0  # of searches: they show three numbered passages instead of the summary
    stray: float = 0.0  # of summaries when nothing relevant was found: they are a random passage
    twice: float = 0.0  # of needless searches: the same search follows again
    sloppy: float = 0.0  # of answers: given twice or preceded by an invented passage
    verbose: float = 0.0  # of answers with a relation: they contain it as well as the value
    # Highest mean number of searches per look-up question that lab.ablate allows before RL.
    prior: float = 1.0
    width: int = 128  # size of the model's hidden states; each attention head has size 16
    context: int = 256  # tokens; a warm-up with `raw` needs more
    steps: int = 550
    batch_size: int = 64
    lr: float = 4e-3
    warmup_steps: int = 50
    decay_from: float = 0.5
    muon_lr: float = 0.0  # as in sft.SFTSettings
