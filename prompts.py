"""The text protocol of each paper: which tags frame a query, its documents and the answer, and how
to read them back.

One `Protocol` object serves training, evaluation and the demo, because a prompt or a document frame
that differs between them is the commonest silent fault of public code.

    UR²             <|begin_of_query|> q <|end_of_query|>  <|begin_of_documents|> ...
                    <|end_of_documents|>  \\boxed{answer}
    R1-Searcher     the same tags; the prompt ends inside <think>; </think> <answer> answer
                    </answer>
    R-Search        <search> q </search>  <observation> ... </observation>  <original_evidence> ...
                    <answer>
    When to Search  <think> ... </think>  <search>  <information>  <reflect> ... </reflect>
    <answer>
    ARENA           no searching, numbered references in the prompt; <relevance>[ids]</relevance>
                    <analysis>  <answer>

An answer is found by position with balanced braces, so \\boxed{\\frac{1}{2}} is read whole; the
last answer is the one that is scored. The wording of the instructions is ours; `--prompt_file` puts
another in their place. Left out: system prompts per model family (the tokenizer's chat template
does that), few-shot examples.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from data import Document, Question
from errors import InputError, run_main
from metrics import Span, find_boxed


@dataclass(frozen=True)
class Protocol:
    """Tags and texts of one paper.

    query_tags and documents_tags are None where nothing is searched (ARENA); answer_tags=None means
    the answer is \\boxed{...} (UR²). other_tags frame what is neither: thinking, reflection,
    relevance, analysis.
    """

    name: str
    query_tags: tuple[str, str] | None
    documents_tags: tuple[str, str] | None
    answer_tags: tuple[str, str] | None
    instruction: str  # searching allowed
    direct_instruction: str  # UR²'s prompt without retrieval
    prompt_suffix: str = ""  # the first text of the model's turn, given to it by the prompt
    evidence_tags: tuple[str, str] | None = None  # R-Search: what another model is to answer from
    other_tags: tuple[tuple[str, str], ...] = ()
    references_in_prompt: bool = (
        False  # the question's own references stand, numbered, in the user's message
    )
    # What the environment may say. The blank lines around a block are its own tokens too: mask 0.
    fallback_notice: str = "This query asks for no fact. Ask for a fact or reason on.\n\n"
    malformed_notice: str = "\n\nNo search was run: write the query between its two tags.\n\n"
    limit_notice: str = "\n\nNo searches are left. Answer with what you know.\n\n"
    error_text: str = "Search is unavailable."
    empty_text: str = "None"

    @property
    def tags(self) -> tuple[str, ...]:
        """Every tag of the protocol."""
        pairs = (
            self.query_tags,
            self.documents_tags,
            self.evidence_tags,
            self.answer_tags,
            *self.other_tags,
        )
        return tuple(tag for pair in pairs if pair for tag in pair)

    @property
    def stop_tags(self) -> tuple[str, ...]:
        """Where a turn stops. \\boxed{...} is no stop: reasoning may go on after it, and EOS ends
        the trajectory.
        """
        return tuple(pair[1] for pair in (self.query_tags, self.answer_tags) if pair)

    def section_tags(self, name: str) -> tuple[str, str]:
        """The pair of `other_tags` that opens with <name>."""
        for pair in self.other_tags:
            if pair[0] == f"<{name}>":
                return pair
        raise InputError(
            f"protocol {self.name} has no <{name}> section: choose the protocol that the reward is"
            " made for"
        )


_UR2_TAGS = (
    ("<|begin_of_query|>", "<|end_of_query|>"),
    ("<|begin_of_documents|>", "<|end_of_documents|>"),
)
_SEARCH_TAGS = (("<search>", "</search>"), ("<information>", "</information>"))
_R_SEARCH_TAGS = (("<search>", "</search>"), ("<observation>", "</observation>"))
_ANSWER_TAGS = ("<answer>", "</answer>")

_UR2_INSTRUCTION = (
    "Solve the problem step by step. Whenever a fact is missing, look it up: write a short search"
    " query as {query_begin} your query {query_end} and stop. What is found is given back between"
    " {documents_begin} and {documents_end}; read it and go on. Ask for one plain fact at a time,"
    " in at most 20 words, and search at most 4 times. Never ask the search engine to calculate or"
    " to reason. Finish with one short final answer inside \\boxed{{}}; for a multiple-choice"
    " question finish with: the correct answer is: LETTER."
)
_UR2_DIRECT = (
    "Solve the problem step by step. Finish with one short final answer inside \\boxed{}; for a"
    " multiple-choice question finish with: the correct answer is: LETTER."
)
_R1_INSTRUCTION = (
    "Answer the question. First think between <think> and </think>. While thinking, whenever a fact"
    " is missing or uncertain, write one simple query as {query_begin} your query {query_end} and"
    " stop; what is found is given back between {documents_begin} and {documents_end}. Split a"
    " question with several steps into one query per step. After </think> give the final answer, a"
    " few words at most, as <answer> your answer </answer>."
)
_R1_DIRECT = (
    "Answer the question. First think between <think> and </think>, then give the final answer, a"
    " few words at most, as <answer> your answer </answer>."
)

_R_SEARCH_INSTRUCTION = (
    "Answer the question, reasoning step by step. Whenever a fact is missing, write a search query"
    " as {query_begin} your query {query_end} and stop; what is found is given back between"
    " {documents_begin} and {documents_end}. Search again for as long as facts are missing. If you"
    " searched, then copy the sentences that decide the question from what was found, once, as"
    " <original_evidence> the sentences </original_evidence>: a reader who sees only these must be"
    " able to answer. End with the answer in a few words as <answer> your answer </answer>."
)
_R_SEARCH_DIRECT = (
    "Answer the question, reasoning step by step. End with the answer in a few words as <answer>"
    " your answer </answer>."
)
_WHEN_INSTRUCTION = (
    "Answer the question in sections. Begin with <think> what is asked and what you know of it"
    " </think>. If a fact is missing, write a query of a few key words as {query_begin} your query"
    " {query_end} and stop; what is found is given back between {documents_begin} and"
    " {documents_end}, and after it you write <reflect> what it says and what is still missing"
    " </reflect>, then search again or answer. Search only for what you do not know, and never for"
    " the same thing twice. If you know everything, check it in <reflect> your check </reflect>"
    " instead. End with the answer in a few words as <answer> your answer </answer>. Write nothing"
    " outside the sections."
)
_WHEN_DIRECT = (
    "Answer the question in sections: <think> what is asked and what you know of it </think>, then"
    " <reflect> your check </reflect>, then the answer in a few words as <answer> your answer"
    " </answer>. Write nothing outside the sections."
)
_ARENA_INSTRUCTION = (
    "Answer the question from the numbered references that follow it. Only some of them matter."
    " Write three sections and nothing else: <relevance>[the numbers of the references that the"
    " answer needs, such as 2, 5]</relevance>, then <analysis> how the answer follows from these"
    " references </analysis>, then <answer> the answer, as short as the question allows </answer>."
)


def _fill(instruction: str, query_tags: tuple[str, str], documents_tags: tuple[str, str]) -> str:
    return instruction.format(
        query_begin=query_tags[0],
        query_end=query_tags[1],
        documents_begin=documents_tags[0],
        documents_end=documents_tags[1],
    )


def _ur2(name: str, query_tags: tuple[str, str], documents_tags: tuple[str, str]) -> Protocol:
    return Protocol(
        name,
        query_tags,
        documents_tags,
        None,
        _fill(_UR2_INSTRUCTION, query_tags, documents_tags),
        _UR2_DIRECT,
    )


PROTOCOLS: dict[str, Protocol] = {
    "ur2": _ur2("ur2", *_UR2_TAGS),
    # UR²'s ablation of the tags: the same protocol under another pair.
    "ur2_search": _ur2("ur2_search", *_SEARCH_TAGS),
    "r1_searcher": Protocol(
        "r1_searcher",
        *_UR2_TAGS,
        _ANSWER_TAGS,
        _fill(_R1_INSTRUCTION, *_UR2_TAGS),
        _R1_DIRECT,
        "<think>",
        other_tags=(("<think>", "</think>"),),
    ),
    "r_search": Protocol(
        "r_search",
        *_R_SEARCH_TAGS,
        _ANSWER_TAGS,
        _fill(_R_SEARCH_INSTRUCTION, *_R_SEARCH_TAGS),
        _R_SEARCH_DIRECT,
        evidence_tags=("<original_evidence>", "</original_evidence>"),
    ),
    "when_to_search": Protocol(
        "when_to_search",
        *_SEARCH_TAGS,
        _ANSWER_TAGS,
        _fill(_WHEN_INSTRUCTION, *_SEARCH_TAGS),
        _WHEN_DIRECT,
        other_tags=(("<think>", "</think>"), ("<reflect>", "</reflect>")),
    ),
    "arena": Protocol(
        "arena",
        None,
        None,
        _ANSWER_TAGS,
        _ARENA_INSTRUCTION,
        _ARENA_INSTRUCTION,
        other_tags=(("<relevance>", "</relevance>"), ("<analysis>", "</analysis>")),
        references_in_prompt=True,
    ),
}


def as_protocol(protocol: Protocol | str) -> Protocol:
    """A protocol, or the one of that name."""
    if isinstance(protocol, Protocol):
        return protocol
    if protocol not in PROTOCOLS:
        raise InputError(f"unknown protocol {protocol!r}: one of {', '.join(PROTOCOLS)}")
    return PROTOCOLS[protocol]


# ------------------------------------------------------------------------------------------- prompt


def question_text(question: Question) -> str:
    """The user's message: the question, and lettered options where it has them."""
    if not question.options:
        return question.question
    options = "\n".join(f"{chr(65 + i)}. {option}" for i, option in enumerate(question.options))
    return f"{question.question}\n{options}"


def user_text(protocol: Protocol, question: Question, tokenizer) -> str:
    """The user's message under a protocol: ARENA's has the references below the question, (1) to
    (n), a line each.
    """
    if not protocol.references_in_prompt:
        return question_text(question)
    if not question.references:
        raise InputError(
            f"question {question.id} has no references: protocol {protocol.name} answers from"
            " numbered references; give the record a `references` list, or choose a protocol that"
            " searches"
        )
    forbidden = forbidden_texts(protocol, tokenizer)
    lines = [strip_tags(line, forbidden) for line in number_documents(question.references)]
    return "\n".join([question_text(question), "", *lines])


def prompt_text(protocol: Protocol | str, question: Question, tokenizer) -> str:
    """The prompt as text: through the tokenizer's chat template where it has one, else a plain
    layout for base models.
    """
    protocol = as_protocol(protocol)
    instruction = protocol.instruction if question.may_search else protocol.direct_instruction
    user = user_text(protocol, question, tokenizer)
    if getattr(tokenizer, "chat_template", None):
        text = chat_text(tokenizer, instruction, user)
    else:
        text = f"{tokenizer.bos_token or ''}{instruction}\n\nQuestion: {user}\nAnswer:"
    # Some templates open the turn with "<think>\n" themselves: not twice.
    return text if text.rstrip().endswith(protocol.prompt_suffix) else text + protocol.prompt_suffix


def chat_text(tokenizer, instruction: str, text: str) -> str:
    """The prompt: system and user message through the chat template where there is one, else a
    plain layout.
    """
    if not getattr(tokenizer, "chat_template", None):
        return f"{tokenizer.bos_token or ''}{instruction}\n\n{text}\n\nAnswer:"
    messages = [{"role": "system", "content": instruction}, {"role": "user", "content": text}]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception:  # templates without a system role raise their own error
        messages = [{"role": "user", "content": f"{instruction}\n\n{text}"}]
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def build_prompt(protocol: Protocol | str, question: Question, tokenizer) -> list[int]:
    """Prompt token ids of one question. The template has written the special tokens: none is added
    here.
    """
    text = prompt_text(protocol, question, tokenizer)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


# ----------------------------------------------------------------------------- what the model wrote


def find_blocks(text: str, begin: str, end: str) -> list[Span]:
    """Every `begin ... end` pair, left to right; a second `begin` before `end` starts the block
    anew.
    """
    spans, start = [], None
    for match in re.finditer(f"{re.escape(begin)}|{re.escape(end)}", text):
        if match.group() == begin:
            start = match
        elif start is not None:
            spans.append(
                Span(start.start(), match.end(), text[start.end() : match.start()].strip())
            )
            start = None
    return spans


def last_block(text: str, tags: tuple[str, str]) -> str | None:
    """The content of the last block that is not empty; None if there is none."""
    return next((span.content for span in reversed(find_blocks(text, *tags)) if span.content), None)


# Possessive `\s*+`: a model that writes blanks without end after "is" must not cost the square of
# their number.
_CHOICE = re.compile(r"correct answer is\s*+:?\s*+([^\n]*\w[^\n]*)", re.IGNORECASE)


def find_answers(protocol: Protocol, text: str, task: str = "qa") -> list[Span]:
    """Every answer the model gave, by position. Give it the model's own text only
    (`Trajectory.model_text`).

    A choice question under UR² may also be answered by "the correct answer is: X"; "... is
    \\boxed{B}" is one answer.
    """
    if protocol.answer_tags:
        return find_blocks(text, *protocol.answer_tags)
    boxed = find_boxed(text)
    if task != "choice":
        return boxed
    said = [Span(m.start(), m.end(), m.group(1).strip()) for m in _CHOICE.finditer(text)]
    return sorted(
        said + [b for b in boxed if not any(s.start <= b.start < s.end for s in said)],
        key=lambda span: span.start,
    )


def without_thinking(reply: str) -> str:
    """The reply behind the thinking; "" if the thinking never ended. (Some templates open <think>
    in the prompt.)

    >>> without_thinking("<think>Kelmouth? No.</think>\\nNorland"), without_thinking("<think>Kelmouth? No")
    ('Norland', '')
    """
    return reply.rpartition("</think>")[2].partition("<think>")[0].strip()


def parse_query(protocol: Protocol, turn: str) -> str | None:
    """The query that a model turn ends in; "" if it is empty, None if a tag of it is missing.

    Only this turn counts: a begin tag in an earlier turn, or in a document, cannot open this query.
    """
    if not protocol.query_tags:
        return None
    begin, end = protocol.query_tags
    head = turn.rpartition(end)[0]
    opened, closed = head.rfind(begin), head.rfind(end)
    return head[opened + len(begin) :].strip() if opened > closed else None


# ---------------------------------------------------------------------- what the environment writes


def number_documents(documents: Sequence[Document]) -> list[str]:
    """Documents as the policy reads them when nobody summarises: "(1) Title: text"."""
    return [
        f"({i}) {d.title}: {d.text}" if d.title else f"({i}) {d.text}"
        for i, d in enumerate(documents, 1)
    ]


def frame_documents(protocol: Protocol, body: str) -> str:
    """The whole inserted block, blank lines included. All of it has mask 0."""
    return f"\n\n{protocol.documents_tags[0]}\n{body}\n{protocol.documents_tags[1]}\n\n"


def special_texts(tokenizer) -> list[str]:
    """Every special token of the tokenizer as text: what a page, or a policy that is judged, must
    not be able to write.
    """
    # all_special_tokens leaves out those without a role, such as Llama 3's <|eot_id|>: a page could
    # open a turn with them
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return [
        *getattr(tokenizer, "all_special_tokens", []),
        *(token.content for token in added if token.special),
    ]


def forbidden_texts(protocol: Protocol, tokenizer) -> list[str]:
    """What no page may bring into a context: the protocol's tags and the tokenizer's special
    tokens.
    """
    return [*protocol.tags, *special_texts(tokenizer)]


def strip_tags(text: str, tags) -> str:
    """Retrieved text without the protocol's tags and the tokenizer's special tokens: a page must
    not close its own frame.
    """
    for tag in tags:
        text = text.replace(tag, " ") if tag else text
    return text


def main() -> None:
    references = (
        Document("a", "Ana Bell", "born in Kelmouth"),
        Document("b", "Kelmouth", "a town in Norland"),
    )
    question = Question(
        "demo", "In which country was Ana Bell born?", ["Norland"], references=references
    )

    class NoTemplate:
        chat_template, bos_token = None, ""

    for name, protocol in PROTOCOLS.items():
        print(f"== {name}: stops at {' '.join(protocol.stop_tags)} or the end of the text")
        print(
            textwrap.fill(protocol.instruction, 128, initial_indent="   ", subsequent_indent="   ")
        )
    shown = (
        prompt_text("arena", question, NoTemplate())
        .removeprefix(PROTOCOLS["arena"].instruction)
        .strip()
    )
    print(f"\nwhat follows the instruction under arena, without a chat template:\n{shown}")
    block = frame_documents(PROTOCOLS["r_search"], number_documents(references)[0])
    print(f"\nwhat a search gives back under r_search:{block.rstrip()}")


if __name__ == "__main__":
    run_main(main)
