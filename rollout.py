"""The rollout loop: the model reasons, searches, reads the documents and answers.

    sample a turn -> does it end in a query? -> search (one call for all trajectories' queries)
                  -> append the documents with mask 0 -> sample the next turn
                  -> ... -> an answer, EOS or a limit

Each response becomes a `Trajectory`; a batch of them is `rows` in the code. Two rules keep the
training signal correct:
  * token ids in, token ids out. Sampled ids are never decoded and encoded again, because the
    tokenizer could split the text into other tokens. The environment's texts are encoded alone,
    without the sampled text before them;
  * each token gets its mask when it is appended (trajectory.py): 1 if the policy sampled it, 0 for
    documents, their tags, the blank lines around them, and notices.

For this file, retriever and summariser are one function, `search(requests) -> results`. This file
samples with plain HF `generate`, which processes the whole context of a trajectory again at each
turn. By default engines/slots.py samples instead: it is several times faster, and in fp32 its
greedy samples are the same. Left out: tools other than search, and searches in the middle of a
turn.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import ByT5Tokenizer, GenerationConfig

from data import Question, SearchRequest, SearchResult, truncate_texts
from errors import InputError, bar, run_main, say_once
from papers import PROTOCOLS
from prompts import (
    Protocol,
    build_prompt,
    frame_documents,
    number_documents,
    parse_query,
    question_text,
    without_control,
)
from settings import WITHOUT_MODEL, Settings, by_task
from templates import encode
from trajectory import RejectedQuery, Search, Trajectory, show

SearchFunction = Callable[[list[SearchRequest]], list[SearchResult]]
Progress = Callable[[int], None]  # is called with the number of trajectories that have just ended
# A search is not run if the context has room for fewer document tokens than this, or than
# --document_tokens if that is less.
MIN_DOCUMENT_TOKENS = 16
NOTE_TOKENS = 2048  # of a summariser's notes, as in UR² C.4 for all tasks but math
ANSWER_TOKENS = 32  # tokens of the context that prompt, documents and notices leave for the answer
# Documents with more than 16 characters per token of their budget are cut before tokenization.
TOKEN_LENGTH = 16
MAX_REJECTED_QUERIES = 2  # this many rejected queries end a trajectory


# ---------------------------------------------------------------------------------------- the loop
def generate_by_turns(
    policy, environment: Environment, live: list[Trajectory], progress: Progress, sample=None
) -> None:
    """Samples a turn of every live trajectory, then runs their searches, until all have ended.
    `sample` samples the turns in place of `sample_turns`.
    """
    sample = sample or sample_turns
    while live:
        size = environment.settings.max_num_seqs or len(live)
        for start in range(0, len(live), size):
            rows = live[start : start + size]
            for row, turn in zip(rows, sample(policy, environment, rows), strict=True):
                environment.end_turn(row, turn.ids, turn.logprobs, turn.reason)
        environment.run_searches(live)
        before = len(live)
        live = [row for row in live if not row.stop_reason]
        progress(before - len(live))


@torch.no_grad()
def rollout(
    policy,
    environment: Environment,
    questions: list[Question],
    seed: int = 0,
    generate: Callable = generate_by_turns,
    progress: Progress | None = None,
) -> list[Trajectory]:
    """Returns `group_size` trajectories per question: item b belongs to question b // group_size.

    seed       makes sampling reproducible on one machine (but not on vLLM servers); the global
               random state is restored
    generate   samples the trajectories: `generate_by_turns`, or a function of engines/
    progress   by default a bar shows the progress if sampling takes long
    """
    rows = []
    for question in questions:
        prompt = fitting_prompt(question, environment)
        opened = opened_by(prompt, environment.tokenizer)
        for _ in range(environment.settings.group_size):
            rows.append(Trajectory(question, environment.protocol, prompt, opened=opened))
    with seeded(seed, policy.device), bar(rows, "trajectories") as ended:
        generate(policy, environment, rows, progress or ended.update)
    return rows


@contextlib.contextmanager
def seeded(seed: int, device: torch.device):
    """Seeds the random state for the `with` block and then restores it."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def context_of(policy) -> int:
    """Returns the model's own limit on the context, in tokens (4096 if its config has none)."""
    return getattr(policy.config, "max_position_embeddings", None) or 4096


def fitting_prompt(question: Question, environment: Environment) -> list[int]:
    """Returns the prompt; raises an InputError if it leaves no room for ANSWER_TOKENS tokens."""
    prompt = build_prompt(environment.protocol, question, environment.tokenizer)
    if len(prompt) + ANSWER_TOKENS > environment.max_context:
        raise InputError(
            f"question {question.id}: its prompt has {len(prompt)} tokens and the context is "
            f"{environment.max_context}, of which {ANSWER_TOKENS} are for an answer: shorten the "
            "question, or raise --max_context if the model allows more"
        )
    return prompt


def opened_by(prompt: list[int], tokenizer) -> str:
    """Returns "<think>" if the chat template or the protocol's `prompt_suffix` has opened it."""
    return "<think>" * decode(tokenizer, prompt[-16:]).rstrip().endswith("<think>")


def check_prompts(
    questions: list[Question], environment: Environment, policy, skip_bad: bool = False
) -> list[Question]:
    """Returns the questions; with `skip_bad` only those whose prompt and ANSWER_TOKENS more fit
    into the context. Raises an InputError if none fits or, without `skip_bad`, if one does not fit,
    and if the context is larger than the model's. It is called before the run, so that the run does
    not fail at step 300.
    """
    context, positions = environment.max_context, context_of(policy)
    if context > positions:
        raise InputError(
            f"--max_context {context}: the model has only {positions} positions: give 0 to use all "
            "of them"
        )
    shows_more = environment.protocol.references_in_prompt or environment.protocol.prompts
    first = {}  # (task, may_search) -> tokens of the first prompt of this kind
    fitting, errors = [], []
    for question in questions:
        # Building every prompt would take minutes. If it shows no more than the question, it has at
        # most the tokens of the first of its kind and one for each byte of the question.
        kind = question.task, question.may_search
        most = first.get(kind, context) + len(question_text(question).encode(errors="replace"))
        try:
            if shows_more or most + ANSWER_TOKENS > context:
                first.setdefault(kind, len(fitting_prompt(question, environment)))
            fitting.append(question)
        except InputError as error:
            errors.append(error)
    if errors:
        count = f"{len(errors)} of {len(questions)} prompts do not fit: --skip_bad leaves them out"
        if not (skip_bad and fitting):
            raise InputError(f"{errors[0]}; {count}")
        say_once(count)
    return fitting


# ----------------------------------------------------------------------------------- sample a turn
@dataclass
class Turn:
    """Holds the sampled tokens of one turn, and the `reason` why it ended (None: it goes on)."""

    max_new_tokens: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str | None = None


def sample_turns(policy, environment: Environment, rows: list[Trajectory]) -> list[Turn]:
    """Samples one turn of every trajectory. Contexts are left-padded to end in the same column."""
    settings = environment.settings
    turns = [Turn(environment.turn_tokens_left(row)) for row in rows]
    rule = environment.stop_rule(policy)
    watcher = TurnWatcher(rule, turns, settings.temperature or 1.0)
    plain_generate(
        policy,
        # Any id can pad: the mask hides the padding on the left, and the tokens that `generate`
        # appends after the end of a turn are never read.
        *left_padded([row.ids for row in rows], 0, policy.device),
        rule.eos_ids,
        0,
        1.0 if settings.temperature else 0.0,  # the watcher has already divided by the temperature
        settings.top_p,
        max_new_tokens=max(turn.max_new_tokens for turn in turns),
        logits_processor=[watcher.process_logits],
        stopping_criteria=[watcher.check_stop],
    )
    return turns


@dataclass
class TurnWatcher:
    """Implements two hooks of `generate`. `process_logits` keeps the logits of a step. `check_stop`
    then sees the sampled tokens, records each with its log-prob, and applies the stop rule.
    """

    rule: StopRule
    turns: list[Turn]
    temperature: float

    def process_logits(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        """Returns logits / temperature [B, V], and keeps them to compute the tokens' log-probs."""
        self.scores = logits / self.temperature
        return self.scores

    def check_stop(self, input_ids: Tensor, _) -> Tensor:
        tokens = input_ids[:, -1:]  # [B, 1]
        logprobs = self.scores.log_softmax(-1).gather(1, tokens)  # [B, 1]
        sampled = zip(self.turns, tokens.tolist(), logprobs.tolist(), strict=True)
        for turn, token, logprob in sampled:
            if not turn.reason:
                turn.ids += token
                turn.logprobs += logprob
                turn.reason = self.rule.reason(turn.ids, turn.max_new_tokens)
        over = [bool(turn.reason) for turn in self.turns]
        return torch.tensor(over, device=input_ids.device)  # [B]


class StopRule:
    """Decides when a turn is over: at EOS, at a stop tag or at the turn's limit of tokens.

    `stop_tags` maps each tag to its reason. A tag may span several tokens, and its last token may
    contain more characters (">\\n\\n"). So the rule decodes the last tokens of the turn and looks
    for tags in this text. The turn keeps its last token whole, as it was sampled. Below the limit
    only tokens in `watched` can end a turn, so most tokens need no decoding.
    """

    def __init__(self, tokenizer, stop_tags: dict[str, str], eos_ids: set[int]):
        self.tokenizer = tokenizer
        self.stop_tags = stop_tags
        self.eos_ids = eos_ids
        last = "".join(tag[-1] for tag in stop_tags)
        self.watched = eos_ids | closing_ids(tokenizer, len(tokenizer), last)

    def reason(self, turn: list[int], max_new_tokens: int) -> str | None:
        """Returns why the turn ends here ("eos", "query", "answer", "length"), or None."""
        if turn[-1] in self.eos_ids:
            return "eos"
        if turn[-1] in self.watched:
            for tag, reason in self.stop_tags.items():
                # A tag has at most one token per character: the last len(tag) tokens suffice.
                if tag in decode(self.tokenizer, turn[-len(tag) :]):
                    return reason
        return "length" if len(turn) >= max_new_tokens else None


@functools.lru_cache(maxsize=8)
def closing_ids(tokenizer, size: int, last: str) -> set[int]:
    """Returns the ids of the tokens that contain a character of `last`, the last characters of all
    tags. No other token can complete a tag.
    """
    pieces = tokenizer.batch_decode([[i] for i in range(size)], skip_special_tokens=False)
    return {i for i, piece in enumerate(pieces) if set(last) & set(piece)}


def end_ids(policy, tokenizer) -> set[int]:
    """Returns every id that ends a text: the EOS of the tokenizer, and those in the checkpoint's
    generation config. A chat model may have two.
    """
    listed = getattr(policy, "language_model", policy).generation_config.eos_token_id
    listed = listed if isinstance(listed, list) else [listed]
    return {tokenizer.eos_token_id, *listed} - {None}


def plain_generate(
    policy, tokens, attention, eos_ids: set[int], pad_id: int, temperature, top_p, **options
) -> Tensor:
    """Calls `generate` without the checkpoint's generation defaults. Trap: it would use them for
    every argument that is not given (such as repetition_penalty=1.05), and would then sample from
    another distribution than the one that is trained.
    """
    sampling = {"do_sample": False}
    if temperature:  # top_k is 0, because generate's default of 50 would sample off-policy
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    model = getattr(policy, "language_model", policy)
    defaults, ends = model.generation_config, sorted(eos_ids) or None
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=pad_id, **sampling)
    try:
        return policy.generate(input_ids=tokens, attention_mask=attention, **options)
    finally:
        model.generation_config = defaults


def left_padded(texts: Sequence[list[int]], pad_id: int, device) -> tuple[Tensor, ...]:
    """Returns (tokens, attention mask), [B, L] each; all rows end in the last column."""
    rows = [torch.tensor(text, dtype=torch.long) for text in texts]
    # The mask is not `tokens != pad_id`: if EOS is the pad token, this would mask real EOS tokens.
    attention = [torch.ones_like(row) for row in rows]
    tokens = pad_sequence(rows, True, pad_id, padding_side="left")
    return tokens.to(device), pad_sequence(attention, True, padding_side="left").to(device)


def decode(tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


# ------------------------------------------------------------------------------- run the searches
class Environment:
    """Does what follows the sampling of a turn: appends the turn, then runs its query and appends
    documents or a notice, or ends the trajectory.
    """

    def __init__(self, tokenizer, protocol: Protocol, search, settings: Settings, context=0):
        """context: the limit on prompt and response, in tokens; 0 takes settings.max_context."""
        limits = {"": settings.max_searches} | settings.task_searches
        self.protocol = dataclasses.replace(protocol, search_limits=limits)
        self.tokenizer = tokenizer
        self.search = search
        self.settings = settings
        self.max_context = context or settings.max_context
        self.held_out = False  # True during an evaluation within training
        self.training = True  # False: evaluations, which insert no notice after a fallback
        self.forbidden = protocol.tags  # tags to remove from documents
        # A search inserts documents, the tags around them (the frame) and perhaps a fallback
        # notice. All of these tokens need room in the context.
        frame = frame_documents(protocol, "\x00").split("\x00") if protocol.documents_tags else []
        self.frame_tokens = sum(map(self.count_tokens, frame))
        self.search_overhead = self.frame_tokens + self.count_tokens(protocol.fallback_notice)
        self.rejection_tokens = max(map(self.count_tokens, protocol.rejection_notices))

    def stop_rule(self, policy) -> StopRule:
        ends = end_ids(policy, self.tokenizer)
        return StopRule(self.tokenizer, self.protocol.stop_tags, ends)

    def count_tokens(self, text: str) -> int:
        return len(encode(self.tokenizer, text))

    def context_tokens_left(self, row: Trajectory) -> int:
        return self.max_context - len(row.ids)

    def turn_limit(self, row: Trajectory) -> int:
        """Returns the limit on the tokens of a turn in this task, apart from the context limit."""
        tokens = self.settings.turn_tokens
        return tokens.get(row.question.task, self.settings.max_turn_tokens)

    def turn_tokens_left(self, row: Trajectory) -> int:
        """Returns how many tokens the next turn may sample."""
        return min(self.turn_limit(row), self.context_tokens_left(row))

    def document_token_budget(self, row: Trajectory, notes: bool = False) -> int:
        """Returns how many tokens the documents, or the `notes`, of the next search may have."""
        room = self.context_tokens_left(row) - self.search_overhead - ANSWER_TOKENS
        return min(self.document_limit(row, notes), room)

    def document_limit(self, row: Trajectory, notes: bool) -> int:
        """Returns --document_tokens. A summariser's notes may have more: as many tokens as
        `summary_sampling` lets it write, else NOTE_TOKENS.
        """
        s, task = self.settings, row.question.task
        if not notes:
            return s.document_tokens
        *_, most = s.summary_sampling.get(task, s.summary_sampling.get("other", [NOTE_TOKENS]))
        return max(s.document_tokens, most)

    def max_trajectory_tokens(self, row: Trajectory) -> int:
        """Returns an upper bound on the final length in tokens, from the limits of the task."""
        searching = self.protocol.query_tags and row.question.may_search
        searches = self.protocol.search_limit(row.question.task) if searching else 0
        # Every turn except the last ends in a search or a rejected query, and the second rejected
        # query ends the trajectory. So there are at most searches + MAX_REJECTED_QUERIES turns.
        sampled = (searches + MAX_REJECTED_QUERIES) * self.turn_limit(row)
        names = by_task(self.settings.summarizer)
        writes = names.get(row.question.task, names["other"]) not in WITHOUT_MODEL
        retrieved = searches * (self.document_limit(row, writes) + self.search_overhead)
        notices = (MAX_REJECTED_QUERIES - 1) * self.rejection_tokens
        return min(len(row.prompt_ids) + sampled + retrieved + notices, self.max_context)

    def end_turn(self, row: Trajectory, ids: list[int], logprobs: list[float], reason: str) -> None:
        """Appends a sampled turn. If it did not end in a query, the trajectory is over. The last
        token may hold more than the stop tag, such as "><": its id stays, but what follows the tag
        is not text of the model.
        """
        text = decode(self.tokenizer, ids)
        for tag, end in self.protocol.stop_tags.items():
            if end == reason and tag in text:
                text = text[: text.rindex(tag) + len(tag)]
        row.append_model(ids, logprobs, text)
        row.stop_reason = "" if reason == "query" else reason

    def run_searches(self, rows: list[Trajectory]) -> None:
        """Runs the query at the end of each trajectory that goes on, if `accepted_query` allows."""
        accepted = [(row, query) for row in rows if (query := self.accepted_query(row))]
        if accepted:
            self.execute(accepted)

    def execute(self, accepted: list[tuple[Trajectory, str]]) -> None:
        """Runs the queries of all trajectories in one call and appends the results."""
        start = time.perf_counter()
        requests = []
        for row, query in accepted:
            reasoning = row.text.rpartition(self.protocol.query_tags[0])[0]
            requests.append(SearchRequest(row.question, query, reasoning, self.held_out))
        try:  # a failed search does not end the training step
            results = self.search(requests)
        except InputError:  # only the user can repair its cause, such as a wrong address
            raise
        except Exception as error:
            failed = SearchResult(error=f"{type(error).__name__}: {error}")
            results = [failed] * len(requests)
        seconds = (time.perf_counter() - start) / len(accepted)
        for (row, query), result in zip(accepted, results, strict=True):
            if result.rejected:
                self.reject(row, RejectedQuery("server", query), self.protocol.malformed_notice)
            else:
                self.append_result(row, query, result, seconds)

    def accepted_query(self, row: Trajectory) -> str | None:
        """Returns the query, or None if `row` has ended or if the query may not run; then a notice
        is appended, or `row` ends.
        """
        if row.stop_reason:
            return None
        protocol = self.protocol
        query = parse_query(protocol, row.segments[-1].text)
        if not query:
            reason = "malformed" if query is None else "empty"
            self.reject(row, RejectedQuery(reason, ""), protocol.malformed_notice)
        elif not row.question.may_search:
            self.reject(row, RejectedQuery("direct", query), protocol.direct_notice)
        elif len(row.searches) >= protocol.search_limit(row.question.task):
            self.reject(row, RejectedQuery("limit", query), protocol.limit_notice)
        elif self.document_token_budget(row) < min(
            self.settings.document_tokens, MIN_DOCUMENT_TOKENS
        ):
            row.stop_reason = "length"  # too little room for documents and an answer
        else:
            return query
        return None

    def reject(self, row: Trajectory, rejected: RejectedQuery, notice: str) -> None:
        """Records a query that was not run and appends the notice. The trajectory ends instead at
        the second such query (MAX_REJECTED_QUERIES), or if the notice does not fit.
        """
        row.rejected_queries.append(rejected)
        ids = encode(self.tokenizer, notice)
        if len(row.rejected_queries) >= MAX_REJECTED_QUERIES:
            row.stop_reason = "rejected"
        elif self.context_tokens_left(row) < len(ids) + ANSWER_TOKENS:
            row.stop_reason = "length"
        else:
            row.append_environment(ids, notice, "notice")

    def append_result(
        self, row: Trajectory, query: str, result: SearchResult, seconds: float = 0.0
    ) -> None:
        """Records a search and appends its result, cut to its token budget: documents, a summary,
        the fallback text, or a text that says that nothing was found or that the search failed.
        In training it also appends a notice after the fallback text (UR² C.6).
        """
        protocol = self.protocol
        # `extractive` shows a document as it is.
        raw = result.fallback or result.text in ["", *(page.text for page in result.documents)]
        budget = self.frame_tokens + self.document_token_budget(row, notes=not raw)
        shown = protocol.error_text if result.error else result.text
        found = number_documents(result.documents, protocol.document_layouts)
        texts = [shown] if shown else found or [protocol.empty_text]
        short = truncate_texts(texts, budget * TOKEN_LENGTH)
        pieces = [without_control(text, self.tokenizer, self.forbidden) for text in short]
        body, ids = self.fit_documents(pieces, budget)
        cut = short != texts or body != "\n".join(pieces)
        row.searches.append(
            Search(query, result.documents, body, result.fallback, result.error, seconds, cut)
        )
        row.append_environment(ids, frame_documents(protocol, body), "documents")
        if result.fallback and self.training and not self.held_out:
            notice = protocol.fallback_notice
            row.append_environment(encode(self.tokenizer, notice), notice, "notice")

    def fit_documents(self, pieces: list[str], budget: int) -> tuple[str, list[int]]:
        """Joins the first documents, as many as fit into `budget` tokens with their frame. Returns
        their text without the frame, and the token ids with the frame. If not even the first
        document fits, it is cut.
        """
        for count in range(len(pieces), 0, -1):
            body = "\n".join(pieces[:count])
            ids = self.encode_documents(body)
            if len(ids) <= budget:
                return body, ids
        lengths = range(len(body))
        fits = bisect.bisect_right(
            lengths, budget, key=lambda n: len(self.encode_documents(body[:n]))
        )
        body = body[: max(fits - 1, 0)]
        return body, self.encode_documents(body)

    def encode_documents(self, body: str) -> list[int]:
        """Encodes frame and documents as one text, because a tokenizer often encodes a word after
        a newline differently than at the beginning of a text.
        """
        return encode(self.tokenizer, frame_documents(self.protocol, body))


# ------------------------------------------------------------------------------------------- demo
def main() -> None:
    """Prints a scripted trajectory, and below each character its mask."""
    letters, protocol = ByT5Tokenizer(), PROTOCOLS["when_to_search"]  # each byte is a token
    result = SearchResult(text="Ana Bell was born in Kelmouth, Norland.")
    environment = Environment(letters, protocol, lambda _: [result], Settings(max_context=4096))
    question = Question("demo", "In which country was Ana Bell born?", ["Norland"])
    row = Trajectory(question, protocol)
    query = "Her birthplace decides. <search> Ana Bell birthplace </search>"
    answer = "So it is Norland. <answer> Norland </answer>"
    for text, reason in ((query, "query"), (answer, "answer")):
        ids = encode(letters, text)
        environment.end_turn(row, ids, [-0.1] * len(ids), reason)
        environment.run_searches([row])
    print(show(row), row.text.replace("\n", " "), sep="\n\n")
    print(*row.response_mask, sep="")


if __name__ == "__main__":
    run_main(main)
