"""A trajectory: who wrote which token, what was searched, why it ended.

    prompt_ids     p p p p
    response_ids           m m m m  e e e e e e  m m m      m: sampled by the policy
    response_mask          1 1 1 1  0 0 0 0 0 0  1 1 1      e: written by the environment
    logprobs               · · · ·  0 0 0 0 0 0  · · ·      as they were sampled

The mask is born with the token: nobody looks for tags in a text later to find out who wrote it.
A written transcript (`trajectory_from_text`) can be scored, not trained on. No torch here.
Left out: how a trajectory comes about (rollout.py).
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from data import Document, Question, harmless
from errors import run_main
from prompts import Protocol, as_protocol, find_answers, last_block, parse_query


@dataclass(frozen=True)
class Segment:
    """A stretch of the response by one writer: "model", "documents" or "notice"; of a baseline also
    "thought", which is not scored.
    """

    writer: str
    text: str


@dataclass
class Search:
    """One search that was run: `text` is what the policy read, `cut` if its budget held no more. It
    has failed if there is an `error`: no connection, a timeout, a reply that nobody can read.
    """

    query: str
    documents: list[Document]
    text: str
    fallback: bool = False
    error: str | None = None
    seconds: float = 0.0
    cut: bool = False


@dataclass(frozen=True)
class RejectedQuery:
    """A query that was not run: reason "malformed", "empty", "direct", "limit"; or "server", where
    that of the retriever or the summariser refused it for what it is.
    """

    reason: str
    query: str


@dataclass
class Trajectory:
    """One response; `response_ids`, `response_mask` and `logprobs` have an entry per token of it.

    stop_reason   "" while it goes on; "eos", "answer" (the answer's end tag), "length" (turn limit
                  or context end), "rejected" (a query that was not run), "written" (a transcript)
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
    opened: str = ""  # the tag that the prompt ends in: some chat templates open <think>

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.response_ids

    @property
    def text(self) -> str:
        """The whole response."""
        return "".join(segment.text for segment in self.segments)

    @property
    def model_text(self) -> str:
        """What the policy itself wrote: the only text that rewards may look at."""
        return "".join(segment.text for segment in self.segments if segment.writer == "model")

    @property
    def executed(self) -> list:
        """The searches that did not fail: rewards neither pay nor charge for one that did."""
        return [search for search in self.searches if not search.error]

    @property
    def failed(self) -> bool:
        """Did a search of it fail? Then training leaves it out: it is not the policy's fault."""
        return self.executed != self.searches

    @property
    def answers(self) -> list[str]:
        found = find_answers(self.protocol, self.model_text, self.question.task)
        return [answer.content for answer in found]

    @property
    def answer(self) -> str | None:
        return (self.answers or [None])[-1]

    @property
    def evidence(self) -> str | None:
        """The last evidence box with something in it (R-Search); None without one."""
        tags = self.protocol.evidence_tags
        return last_block(self.model_text, tags) if tags else None

    def append_model(self, ids: list[int], logprobs: list[float], text: str) -> None:
        """What the policy sampled has mask 1, end tags and EOS too."""
        self.response_ids += ids
        self.response_mask += [1] * len(ids)
        self.logprobs += logprobs
        self.segments.append(Segment("model", text))

    def append_environment(self, ids: list[int], text: str, writer: str) -> None:
        """What the environment wrote has mask 0, the blank lines around it too."""
        self.response_ids += ids
        self.response_mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.segments.append(Segment(writer, text))


def trajectory_from_text(
    question: Question, text: str, protocol: Protocol | str, fallbacks: Collection[int] = ()
) -> Trajectory:
    """A transcript as a trajectory, without ids and log-probs. A document block right behind a
    well-formed query is the environment's; any other was written by the model.

    fallbacks   the numbers, from 0, of the searches that came back as the fallback
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
    """The next block behind a query's end tag: [1] with the blanks around it, [2] its body."""
    if not protocol.query_tags:
        return None
    asked, begin, end = map(re.escape, (protocol.query_tags[1], *protocol.documents_tags))
    return re.compile(rf"{asked}(\s*{begin}(.*?){end}\s*)", re.DOTALL).search(text, position)


def show(trajectory: Trajectory, reward_terms: dict[str, float] | None = None) -> str:
    """One trajectory on a screen: what the environment wrote stands between ⟦ and ⟧."""
    text = ""
    for segment in trajectory.segments:
        own, its = segment.writer == "model", segment.text
        text += harmless(its) if own else f"⟦{harmless(its.strip())}⟧ "
    shown = f"{heading(trajectory.question)}\n{text.strip()}\n{ending(trajectory)}"
    if reward_terms:
        terms = ", ".join(f"{name} {value:+.2f}" for name, value in reward_terms.items())
        shown += f"\n[{terms}; reward {sum(reward_terms.values()):+.2f}]"
    return shown


def heading(question: Question) -> str:
    golds = " | ".join(question.answers) or "unknown"
    return harmless(f"question: {question.question}   gold: {golds}")


def ending(trajectory: Trajectory) -> str:
    searches, answer = len(trajectory.searches), trajectory.answer
    return f"[{searches} searches; answer {answer!r}; ended by {trajectory.stop_reason}]"


def main() -> None:
    text = (
        "I look it up: <search> Ana Bell birthplace </search>\n"
        "<observation> She was born in Norland. </observation>\n<answer> Norland </answer>"
    )
    question = Question("demo", "In which country was Ana Bell born?", ["Norland"])
    print(show(trajectory_from_text(question, text, "r_search")))


if __name__ == "__main__":
    run_main(main)
