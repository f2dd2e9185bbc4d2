"""The loop: the model reasons, asks, reads what was found, and answers. It yields a `Trajectory`.

    sample a turn -> does it end in a query? -> search (the queries of all rows in one call)
                  -> append the documents with mask 0 -> sample the next turn
                  -> ... -> an answer, EOS or a limit

Two rules keep the training signal true:
  * token ids in, token ids out. Sampled ids are never decoded and encoded again: the text could
    split into tokens that nobody sampled. What the environment writes is encoded once;
  * the mask is born with the token (trajectory.py): 1 if the policy sampled it, 0 for documents,
    their tags, the blank lines around them, notices.

Retriever and summariser are one function here, `search(requests) -> results`. Sampling is plain HF
`generate`, which computes a row anew at each turn; scale/engine.py has another `generate`: the same
rows when greedy, several times faster. Left out: several tools, searching in the middle of a turn.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import ByT5Tokenizer, GenerationConfig

from data import Question, SearchRequest, SearchResult, within
from errors import InputError, run_main
from flags import RolloutSettings
from prompts import (
    PROTOCOLS,
    Protocol,
    build_prompt,
    frame_documents,
    number_documents,
    parse_query,
    without_control,
)
from trajectory import RejectedQuery, Search, Trajectory, show

SearchFunction = Callable[[list[SearchRequest]], list[SearchResult]]
Progress = Callable[[int], None] | None
MIN_DOCUMENT_TOKENS = 16  # a search with less room for documents is not run
ANSWER_TOKENS = 32  # room kept free behind documents
TOKEN_LENGTH = 16  # characters per token, if many: megabytes are cut before
MAX_REJECTED_QUERIES = 2  # after so many refused queries the trajectory ends
MAX_STUCK = 8  # while so many searches of an environment hang, no other is begun


# ---------------------------------------------------------------------------------------- the loop
def generate_by_turns(
    policy, environment: Environment, live: list[Trajectory], progress: Progress = None
) -> None:
    """All live rows sample a turn, and those that asked are answered, until no row is left."""
    while live:
        size = environment.settings.max_num_seqs or len(live)
        for start in range(0, len(live), size):
            some = live[start : start + size]
            turns = sample_turns(policy, environment, some)
            for row, turn in zip(some, turns, strict=True):
                environment.end_turn(row, turn.ids, turn.logprobs, turn.reason)
        environment.run_searches([row for row in live if not row.stop_reason])
        before, live = len(live), [row for row in live if not row.stop_reason]
        if progress:
            progress(before - len(live))


@torch.no_grad()
def rollout(
    policy,
    environment: Environment,
    questions: list[Question],
    seed: int | None = None,
    generate: Callable = generate_by_turns,
    progress: Progress = None,
) -> list[Trajectory]:
    """`group_size` trajectories per question: row b belongs to question b // group_size.

    seed       reproducible on the same machine; the global random state stays as it was
    generate   how the rows are sampled: plain `generate` here, or scale.engine.generate_in_slots
    progress   called with the number of trajectories that ended since the last call
    """
    rows = []
    for question in questions:
        prompt = build_prompt(environment.protocol, question, environment.tokenizer)
        check_prompt(question, prompt, environment.max_context)
        end = decode(environment.tokenizer, prompt[-16:]).rstrip()
        opened = "<think>" if end.endswith("<think>") else ""  # as thinking models' templates do
        for _ in range(environment.settings.group_size):
            rows.append(Trajectory(question, environment.protocol, prompt, opened=opened))
    with seeded(seed, policy.device):
        generate(policy, environment, rows, progress)
    return rows


@contextlib.contextmanager
def seeded(seed: int | None, device: torch.device):
    """Sampling inside is seeded, and the global random state put back; None changes nothing."""
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(gpus, enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        yield


def context_of(policy) -> int:
    """The model's own limit in tokens."""
    return getattr(policy.config, "max_position_embeddings", None) or 4096


def check_prompt(question: Question, prompt: list[int], max_context: int) -> None:
    if len(prompt) + ANSWER_TOKENS > max_context:
        raise InputError(
            f"question {question.id}: its prompt has {len(prompt)} tokens and the context is "
            f"{max_context}, {ANSWER_TOKENS} of it for an answer: shorten it or raise --max_context"
        )


def check_prompts(questions: list[Question], environment: Environment, policy) -> None:
    """Better known before a run than at its step 300."""
    context, positions = environment.max_context, context_of(policy)
    if context > positions:
        raise InputError(
            f"--max_context {context}: the model has only {positions} positions, 0 is all"
        )
    for question in questions:
        prompt = build_prompt(environment.protocol, question, environment.tokenizer)
        check_prompt(question, prompt, context)


# ----------------------------------------------------------------------------------- sample a turn
@dataclass
class Turn:
    """What a row samples: at most `max_new_tokens` tokens, until there is a `reason` to stop."""

    max_new_tokens: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str | None = None


def sample_turns(policy, environment: Environment, rows: list[Trajectory]) -> list[Turn]:
    """One turn for every row, left-padded: all sample their next token at one place."""
    settings, eos_ids = environment.settings, end_ids(policy, environment.tokenizer)
    turns = [Turn(environment.turn_tokens_left(row)) for row in rows]
    rule = StopRule(environment.tokenizer, environment.protocol.stop_tags, eos_ids)
    watcher = TurnWatcher(rule, turns, settings.temperature or 1.0)
    how = {"do_sample": False}
    if settings.temperature:
        # top_k: generate's default of 50 would be off-policy. temperature 1: the watcher divides.
        how = {"do_sample": True, "top_k": 0, "top_p": settings.top_p, "temperature": 1.0}
    # Any id pads: it is not attended to, and what follows a row's last token is not read.
    tokens, attention = left_padded([row.ids for row in rows], 0, policy.device)  # [B, L] each
    with plain_generation(policy, eos_ids, 0):
        policy.generate(
            input_ids=tokens,
            attention_mask=attention,
            max_new_tokens=max(turn.max_new_tokens for turn in turns),
            logits_processor=[watcher.process_logits],
            stopping_criteria=[watcher.check_stop],
            **how,
        )
    return turns


class TurnWatcher:
    """Both hooks of `generate`: its logits processor sees distributions, its stopping criterion the
    tokens. It notes each with its log-prob, and ends each row by the rule.
    """

    def __init__(self, rule: StopRule, turns: list[Turn], temperature: float):
        self.rule, self.turns, self.temperature = rule, turns, temperature

    def process_logits(self, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """[B, V] -> the logits that are sampled from; kept to score the token that comes next."""
        self.scores = logits / self.temperature
        return self.scores

    def check_stop(self, input_ids: torch.Tensor, _) -> torch.Tensor:
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
    """When a turn is over: EOS, a stop tag (each with its reason), or no room left.

    A tag may span tokens, or end inside one that goes on behind it (">\\n\\n"). So it is looked for
    in the decoded tail of the turn, and the turn is cut behind that whole token: it was sampled.
    Only a token in `watched` can end a turn, so that most tokens cost no decoding.
    """

    def __init__(self, tokenizer, stop_tags: dict[str, str], eos_ids: set[int]):
        self.tokenizer, self.stop_tags, self.eos_ids = tokenizer, stop_tags, eos_ids
        last = "".join(tag[-1] for tag in stop_tags)
        self.watched = eos_ids | closing_ids(tokenizer, len(tokenizer), last)

    def reason(self, turn: list[int], max_new_tokens: int) -> str | None:
        """Why `turn` is over with its last token: "eos", "query", "answer", "length"; or None."""
        if turn[-1] in self.eos_ids:
            return "eos"
        if turn[-1] in self.watched:
            for tag, reason in self.stop_tags.items():
                # Each token of a tag holds a character of it: so many tokens hold the whole tag.
                if tag in decode(self.tokenizer, turn[-len(tag) :]):
                    return reason
        return "length" if len(turn) >= max_new_tokens else None


@functools.lru_cache(maxsize=8)
def closing_ids(tokenizer, size: int, last: str) -> set[int]:
    """Ids of the tokens that hold one of the characters `last`: only they can complete a tag."""
    pieces = tokenizer.batch_decode([[i] for i in range(size)], skip_special_tokens=False)
    wanted = set(last)
    return {i for i, piece in enumerate(pieces) if wanted.intersection(piece)}


def end_ids(policy, tokenizer) -> set[int]:
    """Every id that ends a text: the tokenizer's EOS, the checkpoint's (chat models have two)."""
    model = getattr(policy, "language_model", policy)
    listed = model.generation_config.eos_token_id
    listed = listed if isinstance(listed, list) else [listed]
    return {tokenizer.eos_token_id, *listed} - {None}


@contextlib.contextmanager
def plain_generation(policy, eos_ids: set[int], pad_id: int):
    """`generate` without the checkpoint's own defaults. Trap: they fill what is left open (top_k=20
    ...), and the samples come from another distribution than the one trained on.
    """
    model = getattr(policy, "language_model", policy)
    kept = model.generation_config
    ends = sorted(eos_ids) or None
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=pad_id)
    try:
        yield
    finally:
        model.generation_config = kept


def left_padded(texts: Sequence[list[int]], pad_id: int, device) -> tuple[torch.Tensor, ...]:
    """Token lists -> (tokens, attention mask), [B, L] each: all end at the same place."""
    rows = [torch.tensor(text, dtype=torch.long) for text in texts]
    # Not `tokens != pad`: where pad is EOS, that would hide real EOS tokens.
    attention = [torch.ones_like(row) for row in rows]
    tokens = pad_sequence(rows, True, pad_id, padding_side="left")
    return tokens.to(device), pad_sequence(attention, True, padding_side="left").to(device)


def decode(tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def encode(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


# ------------------------------------------------------------------------------ answer the queries
def by_task(numbers: str) -> dict[str, int]:
    """ "math=3072,choice=1536" -> {"math": 3072, "choice": 1536}"""
    return {task: int(number) for task, number in re.findall(r"(\w+)=(\d+)", numbers)}


class Environment:
    """What stands around the policy: it ends turns, searches, and writes what was found."""

    def __init__(self, tokenizer, protocol: Protocol, search, settings: RolloutSettings, context=0):
        """context: in tokens, if it is not that of --max_context."""
        limits = {"": settings.max_searches} | by_task(settings.task_searches)
        self.protocol = dataclasses.replace(protocol, search_limits=limits)
        self.tokenizer, self.search = tokenizer, search
        self.settings, self.max_context = settings, context or settings.max_context
        self.hanging = []  # threads of searches that may still run
        self.held_out = False  # does it ask questions that are held out of training?
        self.turn_tokens = by_task(settings.turn_tokens)
        self.forbidden = protocol.tags
        # Tokens around documents; without tags nobody will ask.
        halves = frame_documents(protocol, "\x00").split("\x00") if protocol.documents_tags else []
        self.frame = sum(self.tokens_of(half) for half in halves)
        self.notice = self.tokens_of(protocol.fallback_notice)
        self.told = max(map(self.tokens_of, protocol.rejection_notices))

    def tokens_of(self, text: str) -> int:
        return len(encode(self.tokenizer, text))

    def context_tokens_left(self, row: Trajectory) -> int:
        """Tokens that are left of the context."""
        return self.max_context - len(row.ids)

    def turn_tokens_left(self, row: Trajectory) -> int:
        """Tokens that the next turn may sample."""
        task = row.question.task
        return min(
            self.turn_tokens.get(task, self.settings.max_turn_tokens), self.context_tokens_left(row)
        )

    def document_token_budget(self, row: Trajectory) -> int:
        """Tokens of documents that the next search may add; a fallback has a notice behind them."""
        room = self.context_tokens_left(row) - self.frame - self.notice - ANSWER_TOKENS
        return min(self.settings.document_tokens, room)

    def longest(self, row: Trajectory) -> int:
        """The most tokens that this trajectory can reach, by the limits of its question's task."""
        settings, question = self.settings, row.question
        searching = self.protocol.query_tags and question.may_search
        searches = self.protocol.search_limit(question.task) if searching else 0
        # A turn ends in a search, in a refusal (the last of which ends all), or for good.
        per_turn = self.turn_tokens.get(question.task, settings.max_turn_tokens)
        sampled = (searches + MAX_REJECTED_QUERIES) * per_turn
        found = searches * (settings.document_tokens + self.frame + self.notice)
        told = (MAX_REJECTED_QUERIES - 1) * self.told
        return min(len(row.prompt_ids) + sampled + found + told, self.max_context)

    def end_turn(self, row: Trajectory, ids: list[int], logprobs: list[float], reason: str) -> None:
        """Append a sampled turn. Unless it ended in a query, it was the row's last."""
        row.append_model(ids, logprobs, decode(self.tokenizer, ids))
        row.stop_reason = "" if reason == "query" else reason

    def run_searches(self, asking: list[Trajectory]) -> None:
        """Each row ends in a query tag: run those that may be run."""
        accepted = [(row, query) for row in asking if (query := self.accepted_query(row))]
        if accepted:
            self.execute(accepted)

    def execute(self, accepted: list[tuple[Trajectory, str]]) -> None:
        """The queries of all rows in one call."""
        start = time.perf_counter()
        requests = []
        for row, query in accepted:
            reasoning = row.text.rpartition(self.protocol.query_tags[0])[0]
            requests.append(SearchRequest(row.question, query, reasoning, self.held_out))
        results = call_search(self.search, requests, self.settings.timeout, self.hanging)
        seconds = (time.perf_counter() - start) / len(accepted)
        for (row, query), result in zip(accepted, results, strict=True):
            if result.rejected:
                self.reject(row, RejectedQuery("server", query), self.protocol.malformed_notice)
            else:
                self.write(row, query, result)
                row.searches[-1].seconds = seconds

    def accepted_query(self, row: Trajectory) -> str | None:
        """None where it may not be run: then the row has been told why, or is ended."""
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
            row.stop_reason = "length"  # its documents would leave no room to answer
        else:
            return query
        return None

    def reject(self, row: Trajectory, rejected: RejectedQuery, notice: str) -> None:
        """Say why the query is not run, and let the row go on; or end it."""
        row.rejected_queries.append(rejected)
        ids = encode(self.tokenizer, notice)
        if len(row.rejected_queries) >= MAX_REJECTED_QUERIES:
            row.stop_reason = "rejected"
        elif self.context_tokens_left(row) < len(ids) + ANSWER_TOKENS:
            row.stop_reason = "length"
        else:
            row.append_environment(ids, notice, "notice")

    def write(self, row: Trajectory, query: str, result: SearchResult) -> None:
        """Append what was found, cut to the row's room, and note the search."""
        protocol, budget = self.protocol, self.frame + self.document_token_budget(row)
        shown = protocol.error_text if result.error else result.text
        found = [shown] if shown else number_documents(result.documents) or [protocol.empty_text]
        kept = within(found, budget * TOKEN_LENGTH)
        pieces = [without_control(text, self.tokenizer, self.forbidden) for text in kept]
        body = self.fit(pieces, budget)
        cut = kept != found or body != "\n".join(pieces)
        row.searches.append(
            Search(query, result.documents, body, result.fallback, result.error, cut=cut)
        )
        row.append_environment(self.block(body), frame_documents(protocol, body), "documents")
        if result.fallback:
            notice = protocol.fallback_notice
            row.append_environment(encode(self.tokenizer, notice), notice, "notice")

    def fit(self, pieces: list[str], budget: int) -> str:
        """As many documents as fit with their frame. Only a first one too long by itself is cut."""
        for count in range(len(pieces), 0, -1):
            body = "\n".join(pieces[:count])
            if len(self.block(body)) <= budget:
                return body
        lengths = range(len(body))
        fits = bisect.bisect_right(lengths, budget, key=lambda n: len(self.block(body[:n])))
        return body[: max(fits - 1, 0)]

    def block(self, body: str) -> list[int]:
        """Encoded as one text: behind a newline a word is often another token than in front."""
        return encode(self.tokenizer, frame_documents(self.protocol, body))


def call_search(
    search: SearchFunction, requests: list, timeout: float, hanging: list
) -> list[SearchResult]:
    """The results, or an error for each: a step must survive a retriever that is down or hangs.
    `hanging` keeps the threads of earlier searches, as far as they still run.
    """
    hanging[:] = filter(threading.Thread.is_alive, hanging)
    if len(hanging) >= MAX_STUCK:
        return [SearchResult(error="earlier searches still hang")] * len(requests)
    if bound := getattr(search, "seconds", None):  # over the network: more queries, longer
        timeout += bound(requests)
    box = []

    def work() -> list[SearchResult]:
        found = list(search(requests))
        if len(found) != len(requests):
            raise ValueError(f"{len(found)} results for {len(requests)} queries")
        return found

    thread = begun(work, box.append)
    thread.join(timeout)
    hanging.append(thread)
    found = box[0] if box else TimeoutError(f"no answer within {timeout:g} s")
    if isinstance(found, InputError):  # the user's to mend, and no fault of one search
        raise found
    if isinstance(found, list):
        return found
    failed = SearchResult(error=f"{type(found).__name__}: {found}")
    return [failed] * len(requests)


def begun(work: Callable, tell: Callable) -> threading.Thread:
    """Starts `work()` in a thread; `tell` gets what it returns, or the error that it raises. The
    thread keeps no process alive: a run may end while a search or a server hangs.
    """

    def run() -> None:
        try:
            tell(work())
        except Exception as error:
            tell(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


# ---------------------------------------------------------------------------------- on one screen
def main() -> None:
    """A scripted trajectory: each stretch's text, ids and mask."""
    letters, protocol = ByT5Tokenizer(), PROTOCOLS["when_to_search"]  # a token is a letter
    question = Question("demo", "In which country was Ana Bell born?", ["Norland"])
    found = SearchResult(text="Ana Bell was born in Kelmouth, Norland.")
    settings = RolloutSettings(max_context=4096)
    environment = Environment(letters, protocol, lambda _: [found], settings)
    row = Trajectory(question, protocol, build_prompt(protocol, question, letters))
    script = {
        "query": "Her birthplace decides. <search> Ana Bell birthplace </search>",
        "answer": "So it is Norland. <answer> Norland </answer>",
    }
    for reason, text in script.items():
        ids = encode(letters, text)
        environment.end_turn(row, ids, [-0.1] * len(ids), reason)
        if not row.stop_reason:
            environment.run_searches([row])
    print(show(row))
    begin = 0
    for segment in row.segments:
        end = begin + len(encode(letters, segment.text))
        print(f"\n{segment.writer}: {segment.text!r}")
        print("  ids:", row.response_ids[begin:end])
        print("  mask:", set(row.response_mask[begin:end]))
        begin = end


if __name__ == "__main__":
    run_main(main)
