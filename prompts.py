"""The text protocol of each paper: which tags frame a query, its documents and the answer, and how to read them back.

One `Protocol` object serves training, evaluation and the demo, because a prompt or a document frame that differs
between them is the commonest silent fault of public code.

    UR²           <|begin_of_query|> q <|end_of_query|>  <|begin_of_documents|> ... <|end_of_documents|>  \\boxed{answer}
    R1-Searcher   the same tags; the prompt ends inside <think>; </think> <answer> answer </answer>

An answer is found by position with balanced braces, so \\boxed{\\frac{1}{2}} is read whole; the last answer is the one
that is scored. The wording of the instructions is ours; `--prompt_file` puts another in their place.
Left out: system prompts per model family (the tokenizer's chat template does that), few-shot examples.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from data import Document, InputError, Question, run_main


@dataclass(frozen=True)
class Protocol:
    """Tags and texts of one paper. `answer_tags=None` means the answer is \\boxed{...} (UR²)."""

    name: str
    query_tags: tuple[str, str]
    documents_tags: tuple[str, str]
    answer_tags: tuple[str, str] | None
    instruction: str  # searching allowed
    direct_instruction: str  # UR²'s prompt without retrieval
    prompt_suffix: str = ""  # the first text of the model's turn, given to it by the prompt
    # What the environment may say. The blank lines around a block are its own tokens too: mask 0.
    fallback_notice: str = "This query asks for no fact. Ask for a fact or reason on.\n\n"
    malformed_notice: str = "\n\nNo search was run: write the query between its two tags.\n\n"
    limit_notice: str = "\n\nNo searches are left. Answer with what you know.\n\n"
    error_text: str = "Search is unavailable."
    empty_text: str = "None"

    @property
    def tags(self) -> tuple[str, ...]:
        """Every tag of the protocol."""
        return (*self.query_tags, *self.documents_tags, *(self.answer_tags or ()))

    @property
    def stop_tags(self) -> tuple[str, ...]:
        """Where a turn stops. \\boxed{...} is no stop: reasoning may go on after it, and EOS ends the trajectory."""
        return (self.query_tags[1], *((self.answer_tags[1],) if self.answer_tags else ()))


_UR2_TAGS = (("<|begin_of_query|>", "<|end_of_query|>"), ("<|begin_of_documents|>", "<|end_of_documents|>"))

_UR2_INSTRUCTION = (
    "Solve the problem step by step. Whenever a fact is missing, look it up: write a short search query as "
    "{query_begin} your query {query_end} and stop. What is found is given back between {documents_begin} and "
    "{documents_end}; read it and go on. Ask for one plain fact at a time, in at most 20 words, and search at most 4 "
    "times. Never ask the search engine to calculate or to reason. Finish with one short final answer inside "
    "\\boxed{{}}; for a multiple-choice question finish with: the correct answer is: LETTER."
)
_UR2_DIRECT = (
    "Solve the problem step by step. Finish with one short final answer inside \\boxed{}; for a multiple-choice "
    "question finish with: the correct answer is: LETTER."
)
_R1_INSTRUCTION = (
    "Answer the question. First think between <think> and </think>. While thinking, whenever a fact is missing or "
    "uncertain, write one simple query as {query_begin} your query {query_end} and stop; what is found is given back "
    "between {documents_begin} and {documents_end}. Split a question with several steps into one query per step. After "
    "</think> give the final answer, a few words at most, as <answer> your answer </answer>."
)
_R1_DIRECT = (
    "Answer the question. First think between <think> and </think>, then give the final answer, a few words at most, "
    "as <answer> your answer </answer>."
)


def _fill(instruction: str, query_tags: tuple[str, str], documents_tags: tuple[str, str]) -> str:
    return instruction.format(
        query_begin=query_tags[0], query_end=query_tags[1], documents_begin=documents_tags[0], documents_end=documents_tags[1]
    )


def _ur2(name: str, query_tags: tuple[str, str], documents_tags: tuple[str, str]) -> Protocol:
    return Protocol(name, query_tags, documents_tags, None, _fill(_UR2_INSTRUCTION, query_tags, documents_tags), _UR2_DIRECT)


PROTOCOLS: dict[str, Protocol] = {
    "ur2": _ur2("ur2", *_UR2_TAGS),
    # UR²'s ablation of the tags: the same protocol under another pair.
    "ur2_search": _ur2("ur2_search", ("<search>", "</search>"), ("<information>", "</information>")),
    "r1_searcher": Protocol(
        "r1_searcher", *_UR2_TAGS, ("<answer>", "</answer>"), _fill(_R1_INSTRUCTION, *_UR2_TAGS), _R1_DIRECT, "<think>"
    ),
}


def as_protocol(protocol: Protocol | str) -> Protocol:
    """A protocol, or the one of that name."""
    if isinstance(protocol, Protocol):
        return protocol
    if protocol not in PROTOCOLS:
        raise InputError(f"unknown protocol {protocol!r}: one of {', '.join(PROTOCOLS)}")
    return PROTOCOLS[protocol]


# ---------------------------------------------------------------------------------------------------- prompt

def question_text(question: Question) -> str:
    """The user's message: the question, and lettered options where it has them."""
    if not question.options:
        return question.question
    options = "\n".join(f"{chr(65 + i)}. {option}" for i, option in enumerate(question.options))
    return f"{question.question}\n{options}"


def prompt_text(protocol: Protocol | str, question: Question, tokenizer, retrieval: bool = True) -> str:
    """The prompt as text: through the tokenizer's chat template where it has one, else a plain layout for base models."""
    protocol = as_protocol(protocol)
    instruction = protocol.instruction if retrieval else protocol.direct_instruction
    user = question_text(question)
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "system", "content": instruction}, {"role": "user", "content": user}]
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception:  # templates without a system role raise their own error: the instruction goes to the user's turn
            messages = [{"role": "user", "content": f"{instruction}\n\n{user}"}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    else:
        text = f"{tokenizer.bos_token or ''}{instruction}\n\nQuestion: {user}\nAnswer:"
    # Some templates open the turn with "<think>\n" themselves: not twice.
    return text if text.rstrip().endswith(protocol.prompt_suffix) else text + protocol.prompt_suffix


def build_prompt(protocol: Protocol | str, question: Question, tokenizer, retrieval: bool = True) -> list[int]:
    """Prompt token ids of one question. The template has written the special tokens: none is added here."""
    return tokenizer(prompt_text(protocol, question, tokenizer, retrieval), add_special_tokens=False)["input_ids"]


# --------------------------------------------------------------------------------------- what the model wrote

@dataclass(frozen=True)
class Span:
    """A piece of text with its place: text[start:end] includes the tags, `content` is what stands between them."""

    start: int
    end: int
    content: str


def find_blocks(text: str, begin: str, end: str) -> list[Span]:
    """Every `begin ... end` pair, left to right; a second `begin` before `end` starts the block anew."""
    spans, start = [], None
    for match in re.finditer(f"{re.escape(begin)}|{re.escape(end)}", text):
        if match.group() == begin:
            start = match
        elif start is not None:
            spans.append(Span(start.start(), match.end(), text[start.end() : match.start()].strip()))
            start = None
    return spans


# "\{" and "\}" are characters of an answer, not braces; "\\boxed{" (escaped once too often) is a \boxed{ all the same.
_BRACES = re.compile(r"(?P<box>\\boxed\s*\{)|\\(?!\\boxed).|[{}]", re.DOTALL)


def find_boxed(text: str) -> list[Span]:
    r"""Every \boxed{...} with balanced braces. find_boxed(r"\boxed{\frac{1}{2}}")[0].content == r"\frac{1}{2}".

    One that is never closed is no answer and hides no other; of boxes inside each other the outermost counts.
    """
    spans: list[Span] = []
    open_braces: list[re.Match] = []
    for brace in _BRACES.finditer(text):
        if brace.group() == "}":
            begin = open_braces.pop() if open_braces else None
            if begin and begin["box"]:
                while spans and spans[-1].start > begin.start():  # a box inside this one
                    spans.pop()
                spans.append(Span(begin.start(), brace.end(), text[begin.end() : brace.start()].strip()))
        elif brace["box"] or brace.group() == "{":
            open_braces.append(brace)
    return spans


# Possessive `\s*+`: a model that writes blanks without end after "is" must not cost the square of their number.
_CHOICE = re.compile(r"correct answer is\s*+:?\s*+([^\n]*\w[^\n]*)", re.IGNORECASE)


def find_answers(protocol: Protocol, text: str, task: str = "qa") -> list[Span]:
    """Every answer the model gave, by position. Give it the model's own text only (`Trajectory.model_text`).

    A choice question under UR² may also be answered by "the correct answer is: X"; "... is \\boxed{B}" is one answer.
    """
    if protocol.answer_tags:
        return find_blocks(text, *protocol.answer_tags)
    boxed = find_boxed(text)
    if task != "choice":
        return boxed
    said = [Span(m.start(), m.end(), m.group(1).strip()) for m in _CHOICE.finditer(text)]
    return sorted(said + [b for b in boxed if not any(s.start <= b.start < s.end for s in said)], key=lambda span: span.start)


def parse_query(protocol: Protocol, turn: str) -> str | None:
    """The query that a model turn ends in; "" if it is empty, None if a tag of it is missing.

    Only this turn counts: a begin tag in an earlier turn, or in a document, cannot open this query.
    """
    begin, end = protocol.query_tags
    head = turn.rpartition(end)[0]
    opened, closed = head.rfind(begin), head.rfind(end)
    return head[opened + len(begin) :].strip() if opened > closed else None


# ---------------------------------------------------------------------------------- what the environment writes

def number_documents(documents: list[Document]) -> list[str]:
    """Documents as the policy reads them when nobody summarises: "(1) Title: text"."""
    return [f"({i}) {d.title}: {d.text}" if d.title else f"({i}) {d.text}" for i, d in enumerate(documents, 1)]


def frame_documents(protocol: Protocol, body: str) -> str:
    """The whole inserted block, blank lines included. All of it has mask 0."""
    return f"\n\n{protocol.documents_tags[0]}\n{body}\n{protocol.documents_tags[1]}\n\n"


def strip_tags(text: str, tags) -> str:
    """Retrieved text without the protocol's tags and the tokenizer's special tokens: a page must not close its own frame."""
    for tag in tags:
        text = text.replace(tag, " ") if tag else text
    return text


def main() -> None:
    question = Question("demo", "In which country was Ana Bell born?", ["Norland"])

    class NoTemplate:
        chat_template, bos_token = None, ""

    for name, protocol in PROTOCOLS.items():
        print(f"== {name}: stops at {' '.join(protocol.stop_tags)} or the end of the text")
        print(prompt_text(protocol, question, NoTemplate()))
        print(frame_documents(protocol, "Ana Bell was born in Kelmouth.").strip(), "\n")


if __name__ == "__main__":
    run_main(main)
