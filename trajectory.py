"""A trajectory records who wrote which token, which searches were run, and why it ended.

    prompt_ids     p p p p
    response_ids           m m m m  e e e e e e  m m m      m: sampled by the policy
    response_mask          1 1 1 1  0 0 0 0 0 0  1 1 1      e: written by the environment
    logprobs               · · · ·  0 0 0 0 0 0  · · ·      recorded while sampling

Each token gets its mask when it is appended, so training never searches a text for tags to find out
who wrote it. A transcript that is given as text is divided by its tags (`trajectory_from_text`); it
has no tokens, so it can be scored but not trained on. This file does not need torch. Left out: how
a trajectory is sampled (rollout.py).
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from data import Document, Question, harmless
from errors import run_main
from papers import as_protocol
from prompts import Protocol, find_answers, last_block, parse_query


@dataclass(frozen=True)
class Segment:
    """A part of the response with one writer: "model", or "documents" or "notice" for texts of the
    environment. In baselines, and in evaluations with --thinking, the <think> text of a model has
    the writer "thought" and is not scored.
    """

    writer: str
    text: str


@dataclass
class Search:
    """One search that was run. `text` is what the policy read: documents, a summary, the fallback
    text, or a text that says that nothing was found or that the search failed. `cut` is True if
    this text was truncated to the token budget. If the search failed, `error` gives the reason,
    such as a timeout.
    """

    query: str
    documents: list[Document]
    text: str
    fallback: bool = False
    error: str | None = None
    seconds: float = 0.0  # one call runs many trajectories' queries: its duration / their number
    cut: bool = False


@dataclass(frozen=True)
class RejectedQuery:
    """A query that was not run. The reason is "malformed", "empty", "direct" (the question must be
    answered without searching), "limit" (no searches left) or "server" (the retriever or summariser
    rejected it).
    """

    reason: str
    query: str


@dataclass
class Trajectory:
    """One response. If it was sampled in a rollout, `response_ids`, `response_mask` and `logprobs`
    have one entry per token of it.

    stop_reason   "" while sampling continues; "eos"; "answer" (the answer's end tag); "length" (the
                  turn or the context is full); "rejected" (too many rejected queries); "written" (a
                  transcript that was not sampled)
    """

    question: Question
    protocol: Protocol
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    searches: list[Search] = field(default_factory=list)
    stop_reason: str = ""
    logprobs: list[float] = field(default_factory=list)
    rejected_queries: list[RejectedQuery] = field(default_factory=list)
    opened: str = ""  # "<think>" if the prompt ends in this tag

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.response_ids

    @property
    def text(self) -> str:
        """The whole response."""
        return "".join(segment.text for segment in self.segments)

    @property
    def model_text(self) -> str:
        """What the policy itself wrote, except "thought" segments. Rewards score no other text of
        the response.
        """
        return "".join(segment.text for segment in self.segments if segment.writer == "model")

    @property
    def executed(self) -> list:
        """The searches that did not fail. Rewards neither pay nor charge for the failed ones, but
        where UR² penalises a response without a search, a failed search counts too.
        """
        return [search for search in self.searches if not search.error]

    @property
    def failed(self) -> bool:
        """Whether a search failed. If so, training skips the trajectory, because the policy is not
        at fault.
        """
        return self.executed != self.searches

    @property
    def answers(self) -> list[str]:
        """All answers that the policy wrote; `find_answers` caches them by the text."""
        spans = find_answers(self.protocol, self.model_text, self.question.task)
        return [span.content for span in spans]

    @property
    def answer(self) -> str | None:
        return (self.answers or [None])[-1]

    @property
    def evidence(self) -> str | None:
        """The last evidence box that is not empty (R-Search), or None."""
        tags = self.protocol.evidence_tags
        return last_block(self.model_text, tags) if tags else None

    def append_model(self, ids: list[int], logprobs: list[float], text: str) -> None:
        """Appends tokens that the policy sampled, including end tags and EOS, with mask 1."""
        self.response_ids += ids
        self.response_mask += [1] * len(ids)
        self.logprobs += logprobs
        self.segments.append(Segment("model", text))

    def append_environment(self, ids: list[int], text: str, writer: str) -> None:
        """Appends tokens of the environment, its tags and blank lines included, with mask 0."""
        self.response_ids += ids
        self.response_mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.segments.append(Segment(writer, text))


def trajectory_from_text(
    question: Question, text: str, protocol: Protocol | str, fallbacks: Collection[int] = ()
) -> Trajectory:
    """Parses a transcript into a trajectory without ids and log-probs. A document block directly
    after a query that is well-formed and not empty counts as the environment's text, any other as
    the model's.

    fallbacks   indices (from 0) of the searches that returned the fallback
    """
    protocol = as_protocol(protocol)
    trajectory = Trajectory(question, protocol, stop_reason="written")
    start = position = 0
    while block := _next_block(protocol, text, position):
        position = block.start(1)
        model = text[start:position]
        if query := parse_query(protocol, model):
            fallback = len(trajectory.searches) in fallbacks
            trajectory.searches.append(Search(query, [], block[2].strip(), fallback))
            trajectory.segments += [Segment("model", model), Segment("documents", block[1])]
            start = position = block.end()
    trajectory.segments.append(Segment("model", text[start:]))
    return trajectory


def _next_block(protocol: Protocol, text: str, position: int) -> re.Match | None:
    """Finds the next document block after `position` that directly follows a query's end tag. Group
    1 is the block with the blanks around it, and group 2 is the text between its tags.
    """
    if not protocol.query_tags:
        return None
    query_end, begin, end = map(re.escape, (protocol.query_tags[1], *protocol.documents_tags))
    return re.compile(rf"{query_end}(\s*{begin}(.*?){end}\s*)", re.DOTALL).search(text, position)


def show(trajectory: Trajectory, reward_terms: dict[str, float] | None = None) -> str:
    """Formats a trajectory for a terminal. Between ⟦ and ⟧ are texts that are not scored: those of
    the environment, and thoughts.
    """
    text = ""
    for segment in trajectory.segments:
        written = harmless(segment.text.strip())
        text += harmless(segment.text) if segment.writer == "model" else f"⟦{written}⟧ "
    golds = " | ".join(trajectory.question.answers)
    asked = f"question: {trajectory.question.question}{golds and '   gold: '}{golds}"
    end = f"answer {trajectory.answer!r}; ended by {trajectory.stop_reason}"
    shown = f"{harmless(asked)}\n{text.strip()}\n[{len(trajectory.searches)} searches; {end}]"
    if reward_terms:
        terms = ", ".join(f"{name} {value:+.2f}" for name, value in reward_terms.items())
        shown += f"\n[{terms}; reward {sum(reward_terms.values()):+.2f}]"
    return shown


def main() -> None:
    text = (
        "I look it up: <search> Ana Bell birthplace </search>\n"
        "<observation> She was born in Norland. </observation>\n<answer> Norland </answer>"
    )
    question = Question("demo", "In which country was Ana Bell born?", ["Norland"])
    print(show(trajectory_from_text(question, text, "r_search")))


if __name__ == "__main__":
    run_main(main)
