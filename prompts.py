"""The protocol of each paper: the tags of queries, documents and answers, and the instruction.

Training, evaluation and ask.py share one `Protocol`: if their prompts differed, no error would show
it. If a response has several answers, the last one is scored. Braces are matched, so
\\boxed{\\frac{1}{2}} is read whole.

The wording of the prompts is ours. --prompt_file replaces it, section by section (`SECTIONS`). In
that file, a text without placeholders is an instruction and becomes the system message. A text with
placeholders such as {question} is a layout: it is filled in and becomes the user message, and there
is no system message. Left out: system prompts per model family (the chat template has them),
few-shot examples.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

from data import TASKS, Document, Question, clean, control_tokens, strip_tags
from errors import InputError, run_main, say_once
from metrics import Span, choice_letter, find_boxed, last_boxed
from templates import chat_text, encode

Tags = tuple[str, str]  # begin, end
# The sections of --prompt_file. "policy:direct" is for questions that may not search, and
# "summarizer:fallback" is used where the summariser may reject a query (only under UR²): in
# training rollouts, for web pages, or with --fallback.
BY_TASK = ("policy", "policy:direct", "summarizer", "summarizer:fallback")
SECTIONS = ["judge", "reader", *BY_TASK]
SECTIONS += [f"{name}:{task}" for name in ("judge", *BY_TASK) for task in TASKS]
SECTIONS += ["notice"]  # it follows a fallback in training (UR² C.6)
# How a document is printed, if it has a title and if it has none. The numbers begin with 1.
NUMBERED = ("({number}) {title}: {text}", "({number}) {text}")
# The placeholders of layouts. {max_searches} is none: `fill_instruction` replaces it.
JUDGE_GAP = re.compile(r"\{(question|gold|answer)\}")  # of a judge's layout
_GAP = re.compile(r"\{(question|options|references|query|documents|reasoning|evidence)\}")


@dataclass(frozen=True)
class Protocol:
    """Tags and texts of one paper. Tags are None if the paper has no such section."""

    name: str
    query_tags: Tags | None  # None: the model does not search (ARENA)
    documents_tags: Tags | None
    answer_tags: Tags | None  # None: the answer is \boxed{...} (UR²)
    instruction: str  # for questions that may search
    direct_instruction: str  # for questions that may not search
    prompt_suffix: str = ""  # begins the model's turn, such as "<think>"
    evidence_tags: Tags | None = None  # R-Search: another model answers from this section
    other_tags: tuple[Tags, ...] = ()  # thinking, reflection, relevance, analysis
    layout: str = "{question}"  # of the user message
    # How the policy reads a document of a search result or of the prompt: see NUMBERED. With a
    # summariser, it reads the summariser's notes instead.
    document_layouts: tuple[str, str] = NUMBERED
    # task -> the sentence that replaces finish[""], the end of both instructions (UR² D.2)
    finish: dict[str, str] = field(default_factory=dict, hash=False)
    stop_at_answer: bool = True  # False: a turn goes on after the answer's end tag, until EOS
    thinking_apart: bool = False  # ARENA: True lets <think> precede <relevance>
    # task -> how many searches a question may run; "" is for all other tasks. Set by Environment.
    search_limits: dict[str, int] = field(default_factory=lambda: {"": 4}, hash=False)
    # What the judge reads about an open question (task "qa"): with "question", the question, the
    # accepted answers and the model's answer; with "answers", the same without the question; with
    # "normalized", the same as with "answers", but normalized. For the other tasks it is always the
    # same as with "question".
    judge_sees: str = "question"
    # Texts that the environment inserts; their blank lines have mask 0 too.
    fallback_notice: str = "This query asks for no fact. Ask for a fact or reason on.\n\n"
    malformed_notice: str = "\n\nNo search was run: write the query between its two tags.\n\n"
    limit_notice: str = "\n\nNo searches are left. Answer with what you know.\n\n"
    direct_notice: str = "\n\nThere is no searching here. Answer with what you know.\n\n"
    error_text: str = "Search is unavailable."
    empty_text: str = "None"
    # If the summariser finds that a query asks for no fact, the policy reads this text instead of
    # documents, and then fallback_notice. With "" the protocol has no fallback.
    fallback_text: str = ""
    # Name of a section of --prompt_file -> its text.
    prompts: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def references_in_prompt(self) -> bool:
        return "{references}" in self.layout

    @property
    def tags(self) -> tuple[str, ...]:
        pairs = [self.query_tags, self.documents_tags, self.evidence_tags, self.answer_tags]
        return tuple(tag for pair in [*pairs, *self.other_tags] if pair for tag in pair)

    @property
    def rejection_notices(self) -> tuple[str, str, str]:
        return self.malformed_notice, self.limit_notice, self.direct_notice

    @property
    def stop_tags(self) -> dict[str, str]:
        """Maps each tag that ends a turn to the reason for the end. \\boxed{...} does not end a
        turn, because the model may go on reasoning until EOS.
        """
        reasons = {}
        if self.query_tags:
            reasons[self.query_tags[1]] = "query"
        if self.answer_tags and self.stop_at_answer:
            reasons[self.answer_tags[1]] = "answer"
        return reasons

    def search_limit(self, task: str) -> int:
        """Returns how many searches a question of this task may run. The prompt, the environment
        and UR²'s format reward all use this number.
        """
        return self.search_limits.get(task, self.search_limits[""])

    def custom_prompt(self, name: str, task: str) -> str:
        """Returns section `name` of --prompt_file for this task, else for all tasks, else ""."""
        return self.prompts.get(f"{name}:{task}") or self.prompts.get(name, "")

    def fill_instruction(self, question: Question, custom: str = "") -> str:
        """Returns `custom`, or if it is "" the built-in instruction with the task's finish, with
        the question's limit on searches filled in.
        """
        built_in = self.instruction if question.may_search else self.direct_instruction
        if question.task in self.finish:
            built_in = built_in.replace(self.finish[""], self.finish[question.task])
        limit = str(self.search_limit(question.task))
        return (custom or built_in).replace("{max_searches}", limit)

    def section_tags(self, name: str) -> Tags:
        """Returns the tags of a section, such as "query", "evidence", "answer" or "think"."""
        pair = getattr(self, f"{name}_tags", None) or tag_pair(name)
        if pair[0] not in self.tags:
            raise InputError(
                f"protocol {self.name} has no <{name}> section, which --reward, or the method of"
                " lab.distil, needs"
            )
        return pair


def tag_pair(name: str) -> Tags:
    return f"<{name}>", f"</{name}>"


# --------------------------------------------------------------------------------------- the prompt
def question_text(question: Question) -> str:
    """Returns the question, followed by its lettered options if it has any."""
    return "\n".join([question.question, *lettered(question)])


def lettered(question: Question) -> list[str]:
    return [f"{chr(65 + i)}. {option}" for i, option in enumerate(question.options)]


def is_layout(text: str) -> bool:
    return bool(_GAP.search(text))


def fill(layout: str, values: dict[str, str], clean: Callable = str) -> str:
    """Fills a layout in one pass, so a value that looks like a placeholder stays as it is."""
    return _GAP.sub(lambda gap: clean(values.get(gap[1], gap[0])), layout)


def question_values(question: Question, layout: str) -> dict[str, str]:
    """Returns the values of {question} and {options}. Options follow the question if the layout has
    no {options}.
    """
    return {
        "question": question.question if "{options}" in layout else question_text(question),
        "options": "\n".join(lettered(question)),
    }


def message_parts(custom: str, instruction: str, layout: str) -> tuple[str, str]:
    """Returns (system message, layout of the user message). `custom`, from --prompt_file, is "", a
    layout that is the whole message, or an instruction that replaces `instruction`.
    """
    return ("", custom) if is_layout(custom) else (custom or instruction, layout)


def check_references(protocol: Protocol, question: Question) -> None:
    """Checks a question for a protocol that puts references into the prompt. Raises an InputError
    if it has no references, or if its task does not fit the answer tags: <summary> is for the task
    "summary", and <answer> for all other tasks.
    """
    if not protocol.references_in_prompt:
        return
    if not question.references:
        raise InputError(
            f"question {question.id} has no references, and protocol {protocol.name} answers from"
            " them: give the record a `references` list, or choose a protocol that searches"
        )
    if (protocol.answer_tags == tag_pair("summary")) != (question.task == "summary"):
        raise InputError(
            f"question {question.id} is of task {question.task}: --recipe arena needs --variant "
            "summaries for questions of task summary, and only for these"
        )


def prompt_text(protocol: Protocol, question: Question, tokenizer) -> str:
    check_references(protocol, question)
    custom = protocol.custom_prompt("policy", question.task)
    if not question.may_search:
        if protocol.query_tags and protocol.query_tags[0] in custom:  # `custom` explains searching
            custom = ""
        custom = protocol.custom_prompt("policy:direct", question.task) or custom
    instruction = protocol.fill_instruction(question, custom)
    instruction, layout = message_parts(instruction, "", protocol.layout)
    references = number_documents(question.references, protocol.document_layouts)
    values = question_values(question, layout) | {"references": "\n".join(references)}
    tags = (*protocol.tags, *re.findall(r"</?\w+>", protocol.layout))
    user = fill(layout, values, partial(without_control, tokenizer=tokenizer, tags=tags))
    text = chat_text(tokenizer, instruction, user, "Question: {}\nResponse:")
    # Some templates open the turn with "<think>\n" already.
    if not text.rstrip().endswith(protocol.prompt_suffix):
        text += protocol.prompt_suffix
    return text


def build_prompt(protocol: Protocol, question: Question, tokenizer) -> list[int]:
    """Returns the prompt's token ids. The tokenizer adds no special tokens: the text has them."""
    return encode(tokenizer, prompt_text(protocol, question, tokenizer))


# ----------------------------------------------------------------------------- what the model wrote
def to_span(match: re.Match) -> Span:
    return Span(match.start(), match.end(), match[1].strip())


def find_blocks(text: str, begin: str, end: str) -> list[Span]:
    """Finds every `begin ... end` pair, left to right. If `begin` occurs several times before
    `end`, the block starts at the last of them.
    """
    begin, end = re.escape(begin), re.escape(end)
    return [*map(to_span, re.finditer(f"{begin}((?:(?!{begin}).)*?){end}", text, re.DOTALL))]


def last_block(text: str, tags: Tags) -> str | None:
    """Returns the content of the last block that is not empty."""
    contents = [span.content for span in find_blocks(text, *tags) if span.content]
    return contents[-1] if contents else None


def section_letters(text: str, tags: dict[str, Tags]) -> str:
    """Returns one letter per section, in order. Tags are read two by two: two that are not a pair
    become "x", and so does an empty section. Text outside of all sections, or an odd number of
    tags, makes the whole result "x".

    >>> section_letters("<a> 1 < 2 </a> <b></b>", {"A": ("<a>", "</a>"), "B": ("<b>", "</b>")})
    'Ax'
    """
    letters = {pair: letter for letter, pair in tags.items()}
    any_tag = "|".join(re.escape(tag) for pair in tags.values() for tag in pair)
    block = re.compile(f"({any_tag})((?:(?!{any_tag}).)*)({any_tag})", re.DOTALL)
    if block.sub("", text).strip():
        return "x"
    blocks = block.findall(text)
    return "".join(letters.get((a, b), "x") if content.strip() else "x" for a, content, b in blocks)


# Matches "correct answer is", a colon, and then a letter that is not part of a word. A box,
# brackets, quotes or stars may surround the letter. `*+` is possessive: with `*`, "\boxed{12}"
# would match, with the d of \boxed as the letter.
_CHOICE = re.compile(
    r"correct answer is[\s*]*+:((?:\\[a-z]+|[\s*_$\"'(\[{])*+[a-z](?![-'’]?[^\W_])[^\n]*)",
    re.IGNORECASE,
)


@lru_cache(maxsize=1024)  # rewards and metrics need a trajectory's answers a dozen times
def find_answers(protocol: Protocol, text: str, task: str = "qa") -> tuple[Span, ...]:
    """Finds every answer in the model's own text, in order. Under UR² an answer is a box, except
    for multiple choice: there it has the form "the correct answer is: X" (D.2). So "... is not A"
    and "... is: neither" are no answers there, nor is a box on its own, which may belong to a
    calculation.
    """
    if protocol.answer_tags:
        return tuple(find_blocks(text, *protocol.answer_tags))
    if task != "choice":
        return tuple(find_boxed(text))
    return tuple(map(to_span, _CHOICE.finditer(text)))


# `\s*+` is possessive: with `\s*`, n blanks after "is" and no word behind them would take a time
# that grows with n³.
STATED = re.compile(r"(?i)answer is\s*+:?\s*+([^\n]*\w[^\n]*)")


def stated_choice(reply: str, options: Sequence[str] = ()) -> str:
    """Returns what a reply to a multiple-choice question chooses, as evaluations and lab/baselines
    read it: the last "the correct answer is: X", else the last <answer> box, else the last
    \\boxed{X}, else the last "answer is X"; each only if it names an option. Else "".

    >>> stated_choice("So \\\\boxed{12} apples. I think the answer is **B**.")
    '**B**.'
    """
    texts = [*map(str.strip, _CHOICE.findall(reply)[-1:])]
    texts += [last_block(reply, tag_pair("answer")), last_boxed(reply)]
    for stated in STATED.findall(reply)[-1:]:
        texts += [stated, stated.partition(". ")[0]]  # "oak. It grows tall." means oak
    return next((text for text in texts if text and choice_letter(text, options)), "")


def parse_query(protocol: Protocol, turn: str) -> str | None:
    """Returns the query at the end of a model's turn, "" if it is empty, None if a tag is missing
    or the protocol has no searches. `turn` must be the text of this turn only, so that a begin tag
    in an earlier turn or in a document cannot open a query.
    """
    if not protocol.query_tags:
        return None
    begin, end = protocol.query_tags
    before = ["", *turn.split(end)][-2]  # what is between the last two end tags
    _, opened, query = before.rpartition(begin)
    return query.strip() if opened else None


def without_thinking(reply: str) -> str:
    """Returns the part of a reply after the last </think>, or the whole reply if there is none. A
    <think> in this part has no end tag: it is cut off, with all text after it. An opening <think>
    may be missing, because some chat templates write it into the prompt.

    >>> without_thinking("<think>Kelmouth? No.</think>\\nNorland")
    'Norland'
    """
    return reply.rpartition("</think>")[2].partition("<think>")[0].strip()


# ---------------------------------------------------------------------- what the environment writes
def number_documents(documents: Sequence[Document], layouts=NUMBERED) -> list[str]:
    """Formats documents: as a protocol's policy reads them, with its `document_layouts`; by
    default, as all other models read them.

    >>> number_documents([Document("d", "Ana Bell", "a painter"), Document("e", "", "untitled")])
    ['(1) Ana Bell: a painter', '(2) untitled']
    """
    return [
        layouts[not document.title].format(number=number, **vars(document))
        for number, document in enumerate(documents, 1)
    ]


def frame_documents(protocol: Protocol, body: str) -> str:
    """Returns the text to insert: `body` with tags and blank lines. All of it has mask 0."""
    begin, end = protocol.documents_tags
    return f"\n\n{begin}\n{body}\n{end}\n\n"


def words_of(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


def quotes(text: str, fallback: str) -> bool:
    """Returns whether a text has the first sentence of a fallback in it, case and punctuation
    aside; never for a fallback that is no sentence, such as the built-in world's "None".
    """
    sentence = " ".join(words_of(fallback.partition(".")[0]))
    return "." in fallback and f" {sentence} " in f" {' '.join(words_of(text))} "


@lru_cache(maxsize=1024)
def without_control(text: str, tokenizer, tags: tuple[str, ...] = ()) -> str:
    """Removes tags and control tokens from a text that the policy did not write: otherwise a web
    page, for example, could contain the tag that ends the documents. If they cannot be removed, ""
    is returned.
    """
    control = control_tokens(tokenizer)
    stripped = strip_tags(clean(text), [*tags, *control.values()])
    if stripped != text:
        say_once("tags or special tokens inside questions, documents or replies become blanks")
    # Trap: a tokenizer that normalises text may read "＜EOS＞", with full-width brackets, as a
    # special token. In that case all punctuation is removed.
    for candidate in (stripped, re.sub(r"[^\w\s]|_", " ", stripped)):
        ids = encode(tokenizer, candidate)
        special = control.keys() & set(ids) - {tokenizer.unk_token_id}  # <unk> is harmless
        if not special and not any(map(tokenizer.decode(ids).count, tags)):
            return candidate
    return ""


def main() -> None:
    """Shows an invented protocol: what the model is told, where it stops, what is read."""
    tags = map(tag_pair, ("ask", "found", "answer"))
    told = "If a fact is missing, write <ask> your query </ask>. End with <answer> it </answer>."
    protocol = Protocol("invented", *tags, told, "")
    turn = "Who was she? <ask> Ana Bell birthplace </ask>"
    text = "<answer> Kelmouth </answer> No: <answer> Norland </answer>"
    print("the model is told:", told)
    print("its turn ends at:", *protocol.stop_tags)
    print(f"the query in {turn!r}:", parse_query(protocol, turn))
    print(f"the answers in {text!r}:", *(answer.content for answer in find_answers(protocol, text)))


if __name__ == "__main__":
    run_main(main)
