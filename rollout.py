"""The loop: the model reasons, asks, reads what was found, and answers. It yields a `Trajectory`.

    sample a turn -> does it end in a query? -> search (all rows' queries of this moment in one
    call)
                  -> append the documents with mask 0 -> sample the next turn -> ... -> answer, EOS
                  or a limit

Two rules keep the training signal true:
  * token ids in, token ids out: sampled ids are never decoded and encoded again; what the
    environment writes is encoded once and appended (a re-encoded text can split into other tokens,
    and the log-probs would be of a text nobody sampled);
  * the mask is born with the token: 1 for a token the policy sampled (closing tags and EOS too), 0
    for everything the environment wrote: the documents with their tags, the blank lines around
    them, the notices.

The loop knows neither retriever nor summariser: it gets `search(list[SearchRequest]) ->
list[SearchResult]`. Sampling is plain HF `generate` on the rows that are still alive, so this file
is the page to read; there the keys and values of a row are computed again at each of its turns.
`engine="slots"` samples with engine.py instead: the same trajectories when greedy and the same
distribution otherwise, several times faster and in less memory.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from data import Question, SearchRequest, SearchResult
from errors import InputError, run_main
from policy import evaluating
from prompts import (
    Protocol,
    as_protocol,
    build_prompt,
    forbidden_texts,
    frame_documents,
    number_documents,
    parse_query,
    strip_tags,
)
from scale.engine import Engine, affordable, obstacle
from trajectory import Refusal, Search, Trajectory

SearchFunction = Callable[[list[SearchRequest]], list[SearchResult]]
MIN_DOCUMENT_TOKENS = 16  # a search whose documents would be cut below this is not worth running


# ------------------------------------------------------------------------------------ sample a turn


class StopRule:
    """When a turn is over: EOS, a stop tag, or no room left. Only a token in `watched` can be one
    of the first two.

    A tag is looked for in the decoded tail of the turn, because it may span tokens or end inside
    one that goes on behind it (">\\n\\n"): the turn is cut after that token, whole, since that is
    what was sampled.
    """

    def __init__(self, tokenizer, stop_tags: Sequence[str], eos_ids: set[int]):
        self.tokenizer, self.stop_tags, self.eos_ids = tokenizer, stop_tags, eos_ids
        self.watched = eos_ids | closing_ids(
            tokenizer, len(tokenizer), "".join(tag[-1] for tag in stop_tags)
        )

    def reason(self, turn: list[int], room: int) -> str | None:
        """Why `turn` is over with its last token: "eos", the tag, "length"; None if it is not."""
        if turn[-1] in self.eos_ids:
            return "eos"
        if turn[-1] in self.watched:
            for tag in self.stop_tags:
                # Every token of the tag holds at least one of its characters, so this many tokens
                # hold the whole tag.
                if tag in decode(self.tokenizer, turn[-len(tag) :]):
                    return tag
        return "length" if len(turn) >= room else None


class TurnWatcher:
    """Watches `generate` from inside: as logits processor it sees the distribution, as stopping
    criterion the token.

    It ends each row by the rule, with the row's own room, and notes each sampled token's log-prob.
    """

    def __init__(self, rule: StopRule, room: list[int], temperature: float):
        self.rule, self.room, self.temperature = rule, room, temperature
        self.reasons: list[str | None] = [None] * len(room)
        self.ids: list[list[int]] = [[] for _ in room]
        self.logprobs: list[list[float]] = [[] for _ in room]

    def process_logits(self, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """[B, V] -> the logits that are sampled from, at our temperature; kept to score the token
        that comes next.
        """
        self.scores = logits / self.temperature
        return self.scores

    def check_stop(self, input_ids: torch.Tensor, _scores) -> torch.Tensor:
        tokens = input_ids[:, -1]  # [B]
        logprobs = self.scores.log_softmax(-1).gather(1, tokens[:, None])[:, 0].tolist()
        for row, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs, strict=True)):
            if self.reasons[row] is None:
                self.ids[row].append(token)
                self.logprobs[row].append(logprob)
                self.reasons[row] = self.rule.reason(self.ids[row], self.room[row])
        return torch.tensor(
            [reason is not None for reason in self.reasons], device=input_ids.device
        )


@functools.lru_cache(maxsize=8)
def closing_ids(tokenizer, size: int, last: str) -> set[int]:
    """Token ids that hold one of the characters `last`, so that they can complete a tag: only they
    cost a look at the tail.
    """
    pieces = tokenizer.batch_decode([[i] for i in range(size)], skip_special_tokens=False)
    return {i for i, piece in enumerate(pieces) if any(character in piece for character in last)}


def decode(tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@contextlib.contextmanager
def plain_generation(policy, eos_ids: set[int], pad_id: int):
    """`generate` without the checkpoint's own defaults while inside.

    Trap: a hub model's generation_config (top_k=20, repetition_penalty=1.05, ...) fills every
    setting that the caller leaves open; samples then come from another distribution than the one
    whose log-probs are trained.
    """
    model = getattr(policy, "language_model", policy)
    kept = model.generation_config
    model.generation_config = GenerationConfig(
        eos_token_id=sorted(eos_ids) or None, pad_token_id=pad_id
    )
    try:
        yield
    finally:
        model.generation_config = kept


def end_ids(policy, tokenizer) -> set[int]:
    """Every id that ends a text: the tokenizer's EOS and the checkpoint's (chat models have
    two).
    """
    model = getattr(policy, "language_model", policy)
    listed = getattr(model.generation_config, "eos_token_id", None)
    listed = listed if isinstance(listed, list) else [listed]
    return {i for i in [tokenizer.eos_token_id, *listed] if i is not None}


def left_padded(texts: list[list[int]], pad_id: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token lists -> (tokens, attention mask), [B, L] each: all end at the same place."""
    width = max(map(len, texts))
    tokens = torch.tensor([[pad_id] * (width - len(text)) + text for text in texts], device=device)
    # Not `tokens != pad`: where pad is EOS that would hide real EOS tokens.
    return tokens, torch.tensor(
        [[0] * (width - len(text)) + [1] * len(text) for text in texts], device=device
    )


def sample_turns(
    policy,
    tokenizer,
    contexts: list[list[int]],
    room: list[int],
    stop_tags: Sequence[str],
    temperature: float,
    top_p: float,
) -> TurnWatcher:
    """One turn for every context: left-padded, so that all rows sample their next token at the same
    place.
    """
    eos_ids = end_ids(policy, tokenizer)
    pad_id = (
        tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(eos_ids, default=0)
    )
    tokens, attention = left_padded(contexts, pad_id, policy.device)
    watcher = TurnWatcher(StopRule(tokenizer, stop_tags, eos_ids), room, temperature or 1.0)
    # top_k: generate's default of 50 is off-policy. temperature 1: the watcher divides, generate
    # would divide once more.
    sampling = (
        {"do_sample": True, "top_k": 0, "top_p": top_p, "temperature": 1.0}
        if temperature
        else {"do_sample": False}
    )
    with plain_generation(policy, eos_ids, pad_id):
        policy.generate(
            input_ids=tokens,
            attention_mask=attention,
            max_new_tokens=max(room),
            **sampling,
            logits_processor=LogitsProcessorList([watcher.process_logits]),
            stopping_criteria=StoppingCriteriaList([watcher.check_stop]),
        )
    return watcher


# ------------------------------------------------------------------------------- answer the queries


def call_search(
    search: SearchFunction, requests: list[SearchRequest], retries: int, timeout: float
) -> list[SearchResult]:
    """`search`, retried with backoff under a time limit; at last an explicit "unavailable" for
    every request.

    A training step must survive a retriever that is down, and must not wait for ever on one that
    hangs.
    """
    error = ""
    if bound := getattr(
        search, "seconds", None
    ):  # one that asks over the network: the more queries, the longer
        timeout += bound(len({request.query for request in requests}))
    for attempt in range(retries + 1):
        if attempt:
            time.sleep(min(0.1 * 2**attempt, 5.0))
        box: list = []
        thread = threading.Thread(target=_call_into, args=(search, requests, box), daemon=True)
        thread.start()
        thread.join(timeout)
        if not box:
            error = f"no answer within {timeout:g} s"
        elif isinstance(
            box[0], InputError
        ):  # such as a summariser that has been down for batches: no fault of one search
            raise box[0]
        elif isinstance(box[0], Exception):
            error = f"{type(box[0]).__name__}: {box[0]}"
        else:
            return box[0]
    return [SearchResult(error=error) for _ in requests]


def _call_into(search: SearchFunction, requests: list[SearchRequest], box: list) -> None:
    try:
        results = list(search(requests))
        if len(results) != len(requests):
            raise ValueError(f"{len(results)} results for {len(requests)} queries")
        if not all(isinstance(result, SearchResult) for result in results):
            raise TypeError("a result is no SearchResult")
        box.append(results)
    except Exception as error:  # any fault of a retriever is logged in the trajectory, not raised
        box.append(error)


def fit_block(
    tokenizer, protocol: Protocol, pieces: list[str], budget: int
) -> tuple[list[int], str]:
    """(ids of the framed documents, their text), cut at a document's end so that the whole block
    has at most `budget` tokens; only a first document that is too long by itself is cut inside.

    The block is encoded as one text: a body encoded apart from its frame begins otherwise (in many
    tokenizers a word behind a newline is another token than a word that nothing stands before), and
    supervised traces have it whole.
    """

    def block(body: str) -> list[int]:
        return encode(tokenizer, frame_documents(protocol, body))

    for count in range(len(pieces), 0, -1):
        body = "\n".join(pieces[:count])
        if len(ids := block(body)) <= budget:
            return ids, body
    fits = (
        bisect.bisect_right(range(len(body)), budget, key=lambda length: len(block(body[:length])))
        - 1
    )
    return block(body[: max(fits, 0)]), body[: max(fits, 0)]


def encode(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@dataclass(frozen=True)
class Limits:
    """The bounds of one rollout; all lengths in tokens."""

    max_searches: int = 4
    max_turn_tokens: int = 512
    max_context: int = 4096
    document_tokens: int = 1024  # per search, the frame not counted
    answer_tokens: int = 32  # room kept free behind documents
    notices: bool = True  # tell the model why a query was not run, and let it go on
    max_refusals: int = 2  # after so many refused queries the trajectory ends

    def room(self, trajectory: Trajectory) -> int:
        return self.max_context - len(trajectory.prompt_ids) - len(trajectory.response_ids)

    def turn_room(self, trajectory: Trajectory) -> int:
        """Tokens that the next turn may sample."""
        return min(self.max_turn_tokens, self.room(trajectory))


class Environment:
    """What stands around the policy: it takes the rows that asked, searches once for all, and
    writes the answers.
    """

    def __init__(
        self,
        tokenizer,
        protocol: Protocol,
        search: SearchFunction,
        limits: Limits,
        retries: int,
        timeout: float,
    ):
        self.tokenizer, self.protocol, self.search, self.limits = (
            tokenizer,
            protocol,
            search,
            limits,
        )
        self.retries, self.timeout = retries, timeout
        frame = (
            frame_documents(protocol, "\x00") if protocol.documents_tags else ""
        )  # without tags nobody will ask
        self.frame_tokens = sum(len(encode(tokenizer, half)) for half in frame.split("\x00"))
        self.overhead = self.frame_tokens + len(encode(tokenizer, protocol.fallback_notice))
        self.forbidden = forbidden_texts(protocol, tokenizer)

    def answer(self, asking: list[Trajectory]) -> None:
        """Each trajectory ends in a query tag. Execute what is well-formed, in one call; refuse the
        rest.
        """
        accepted = []
        for trajectory in asking:
            query = parse_query(self.protocol, trajectory.segments[-1].text)
            if not query:
                self.refuse(
                    trajectory,
                    "malformed" if query is None else "empty",
                    query or "",
                    self.protocol.malformed_notice,
                )
            elif len(trajectory.searches) >= self.limits.max_searches:
                self.refuse(trajectory, "limit", query, self.protocol.limit_notice)
            elif self.budget(trajectory) < min(self.limits.document_tokens, MIN_DOCUMENT_TOKENS):
                trajectory.stop_reason = (  # known before the search: its documents would leave no room to answer
                    "length"
                )
            else:
                accepted.append((trajectory, query))
        if accepted:
            self.execute(accepted)

    def longest(self, prompt: int) -> int:
        """Tokens that a trajectory with a prompt of so many may have at most."""
        notice = max(
            len(encode(self.tokenizer, text))
            for text in (self.protocol.malformed_notice, self.protocol.limit_notice)
        )
        refusals, searches = (
            max(self.limits.max_refusals, 1),
            self.limits.max_searches if self.protocol.query_tags else 0,
        )
        # a turn ends in a search, in a refusal (the last of which ends all), or for good
        sampled = (searches + refusals) * self.limits.max_turn_tokens
        inserted = (
            searches * (self.limits.document_tokens + self.overhead) + (refusals - 1) * notice
        )
        return min(prompt + sampled + inserted, self.limits.max_context)

    def budget(self, trajectory: Trajectory) -> int:
        room = self.limits.room(trajectory) - self.overhead - self.limits.answer_tokens
        return min(self.limits.document_tokens, room)

    def refuse(self, trajectory: Trajectory, reason: str, query: str, notice: str) -> None:
        trajectory.refusals.append(Refusal(reason, query))
        ids = encode(self.tokenizer, notice)
        if not self.limits.notices or len(trajectory.refusals) >= self.limits.max_refusals:
            trajectory.stop_reason = "refused"
        elif self.limits.room(trajectory) < len(ids) + self.limits.answer_tokens:
            trajectory.stop_reason = "length"
        else:
            trajectory.append_environment(ids, notice, "notice")

    def end_turn(
        self, trajectory: Trajectory, ids: list[int], logprobs: list[float], reason: str
    ) -> None:
        """Append a sampled turn. A trajectory that ended it in a query keeps an empty stop_reason:
        it asks.
        """
        trajectory.append_model(ids, logprobs, decode(self.tokenizer, ids))
        if not (self.protocol.query_tags and reason == self.protocol.query_tags[1]):
            trajectory.stop_reason = "answer" if reason in self.protocol.stop_tags else reason

    def execute(self, accepted: list[tuple[Trajectory, str]]) -> None:
        start = time.perf_counter()
        requests = [SearchRequest(trajectory.question, query) for trajectory, query in accepted]
        results = call_search(self.search, requests, self.retries, self.timeout)
        seconds = (time.perf_counter() - start) / len(accepted)
        for (trajectory, query), result in zip(accepted, results, strict=True):
            self.write(trajectory, query, result, seconds)

    def write(
        self, trajectory: Trajectory, query: str, result: SearchResult, seconds: float
    ) -> None:
        if result.error:
            pieces = [self.protocol.error_text]
        else:
            pieces = [result.text] if result.text else number_documents(result.documents)
        pieces = [strip_tags(piece, self.forbidden) for piece in pieces] or [
            self.protocol.empty_text
        ]
        ids, body = fit_block(
            self.tokenizer, self.protocol, pieces, self.frame_tokens + self.budget(trajectory)
        )
        trajectory.append_environment(ids, frame_documents(self.protocol, body), "documents")
        if result.fallback:
            notice = self.protocol.fallback_notice
            trajectory.append_environment(encode(self.tokenizer, notice), notice, "notice")
        trajectory.searches.append(
            Search(query, list(result.documents), body, result.fallback, result.error, seconds)
        )


# ----------------------------------------------------------------------------------------- the loop


@torch.no_grad()
def rollout(
    policy,
    tokenizer,
    questions: Question | list[Question],
    search: SearchFunction,
    protocol: Protocol | str,
    group_size: int = 1,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    max_searches: int = 4,
    max_turn_tokens: int = 512,
    max_context: int | None = None,
    document_tokens: int = 1024,
    notices: bool = True,
    retrieval: bool | Sequence[bool] = True,
    seed: int | None = None,
    batch_size: int = 0,
    retries: int = 2,
    timeout: float = 60.0,
    progress: Callable[[int], None] | None = None,
    engine: str = "hf",
    cuda_graphs: bool = False,
) -> list[Trajectory]:
    """`group_size` trajectories for each question, question by question: row b belongs to question
    b // group_size.

    temperature  0 is greedy. `seed` makes the whole rollout reproducible on the same machine and
                 leaves the global random state as it was.
    top_p        below 1 samples from a truncated distribution while log-probs are of the full one:
                 off-policy.
    max_context  prompt and response together; default: the model's own limit.
    retrieval    one for all, or one per question: may it search? (It chooses the prompt; UR²
                 section 3.3.)
    batch_size   rows sampled at once; 0 = all. (In slots: how many there are; less if memory is
                 short.)
    progress     called with the number of trajectories that ended since the last call.
    engine       "hf" is plain `generate`; "slots" is engine.py, which falls back to "hf" for models
                 it cannot drive.
    cuda_graphs  record the slots' decoding step; nothing on a CPU, nor where autocast computes.
    """
    if engine not in ("hf", "slots"):
        raise InputError(f'engine {engine!r}: "hf" (plain generate) or "slots" (engine.py)')
    protocol = as_protocol(protocol)
    questions = [questions] if isinstance(questions, Question) else list(questions)
    allowed = [retrieval] * len(questions) if isinstance(retrieval, bool) else list(retrieval)
    limits = Limits(
        max_searches,
        max_turn_tokens,
        context_of(policy, max_context),
        document_tokens,
        notices=notices,
    )
    environment = Environment(tokenizer, protocol, search, limits, retries, timeout)

    trajectories = []
    for question, may_search in zip(questions, allowed, strict=True):
        prompt = build_prompt(protocol, question, tokenizer, may_search)
        check_prompt(question, prompt, limits)
        trajectories += [
            Trajectory(question, protocol, prompt, retrieval=may_search) for _ in range(group_size)
        ]

    with seeded(seed, policy.device):
        if engine == "hf" or not play_in_slots(
            policy, environment, trajectories, batch_size, temperature, top_p, progress, cuda_graphs
        ):
            play_by_turns(
                policy, environment, trajectories, batch_size, temperature, top_p, progress
            )
    return trajectories


def play_by_turns(
    policy,
    environment: Environment,
    live: list[Trajectory],
    batch_size: int,
    temperature: float,
    top_p: float,
    progress: Callable[[int], None] | None,
) -> None:
    """All live rows sample a turn, then all that asked are answered, and so on until no row is
    left.
    """
    while live:
        size = batch_size or len(live)
        for start in range(0, len(live), size):
            take_turn(policy, environment, live[start : start + size], temperature, top_p)
        environment.answer([t for t in live if not t.stop_reason])
        ended = sum(bool(t.stop_reason) for t in live)
        if progress:
            progress(ended)
        live = [t for t in live if not t.stop_reason]


def take_turn(
    policy, environment: Environment, rows: list[Trajectory], temperature: float, top_p: float
) -> None:
    """Sample each row's next turn and append it."""
    room, stop_tags = (
        [environment.limits.turn_room(row) for row in rows],
        environment.protocol.stop_tags,
    )
    turns = sample_turns(
        policy,
        environment.tokenizer,
        [row.ids for row in rows],
        room,
        stop_tags,
        temperature,
        top_p,
    )
    for row, ids, logprobs, reason in zip(
        rows, turns.ids, turns.logprobs, turns.reasons, strict=True
    ):
        environment.end_turn(row, ids, logprobs, reason)


def play_in_slots(
    policy,
    environment: Environment,
    trajectories: list[Trajectory],
    batch_size: int,
    temperature: float,
    top_p: float,
    progress: Callable[[int], None] | None,
    cuda_graphs: bool = False,
) -> bool:
    """The same in engine.py's slots, where no row waits for the slowest. False, with a warning, if
    that cannot be done.
    """
    model = getattr(policy, "language_model", policy)
    # One autocast around all of it: on a GPU the weights' bf16 copy is made once and not at every
    # step.
    with evaluating(model), getattr(policy, "autocast", contextlib.nullcontext)():
        size = max((environment.longest(len(t.prompt_ids)) for t in trajectories), default=0)
        slots = min(batch_size or len(trajectories), len(trajectories), affordable(model, size))
        if problem := obstacle(model) or (
            "" if slots or not trajectories else f"no memory for one row of {size} tokens"
        ):
            warn_once(f'engine "slots": {problem}; plain generate takes its place')
            return False
        rule = StopRule(
            environment.tokenizer,
            environment.protocol.stop_tags,
            end_ids(policy, environment.tokenizer),
        )
        # Not under autocast: its copies of the weights are dropped with it, and a recording would
        # go on reading them.
        graphs = (
            cuda_graphs and model.device.type == "cuda" and not torch.is_autocast_enabled("cuda")
        )
        if cuda_graphs and not graphs:
            warn_once(
                "--cuda_graphs: nothing is recorded on a CPU, nor where autocast computes (no bf16"
                " copy)"
            )
        engine = Engine(model, slots, size, rule.watched, rule.reason, temperature, top_p, graphs)
        play_queue(engine, environment, deque(trajectories), progress)
    return True


def play_queue(
    engine: Engine,
    environment: Environment,
    queue: deque[Trajectory],
    progress: Callable[[int], None] | None,
) -> None:
    """Each row that ends gives its slot to the next of the queue. Rows that ask wait until no fewer
    wait than decode: so one search serves at least half of those in the slots, and all that are
    left when none can go on without.
    """
    limits = environment.limits
    while queue or engine.taken:
        while queue and engine.vacant:
            trajectory = queue.popleft()
            engine.add(trajectory, trajectory.ids, limits.turn_room(trajectory))
        before = engine.taken
        for row in engine.decode():
            environment.end_turn(row.owner, row.turn, row.logprobs, row.reason)
            if row.owner.stop_reason:
                engine.release(row)
        asking = engine.in_state("waiting")
        if len(asking) >= len(engine.in_state("live")):
            environment.answer([row.owner for row in asking])
            for row in asking:
                if row.owner.stop_reason:
                    engine.release(row)
                else:
                    engine.resume(row, row.owner.ids, limits.turn_room(row.owner))
        if progress and before > engine.taken:
            progress(before - engine.taken)


@functools.cache
def warn_once(message: str) -> None:
    """A training run says it at its first step, not at every one."""
    print(f"warning: {message}", file=sys.stderr)


def context_of(policy, max_context: int | None) -> int:
    return max_context or getattr(policy.config, "max_position_embeddings", None) or 4096


def check_prompt(question: Question, prompt: list[int], limits: Limits) -> None:
    if len(prompt) + limits.answer_tokens > limits.max_context:
        raise InputError(
            f"question {question.id}: its prompt has {len(prompt)} tokens and the context is"
            f" {limits.max_context}, of which {limits.answer_tokens} are kept for the answer:"
            " shorten it, or raise --max_context"
        )


def check_prompts(
    questions: list[Question],
    protocol: Protocol,
    tokenizer,
    policy,
    max_context: int | None = None,
    retrieval: bool = True,
    **_settings,
) -> None:
    """Every prompt must leave room to answer: found out before a long run begins, not at its step
    300.
    """
    limits, positions = (
        Limits(max_context=context_of(policy, max_context)),
        context_of(policy, None),
    )
    if limits.max_context > positions:
        raise InputError(
            f"--max_context {limits.max_context}: the model has {positions} positions; give at most"
            " that"
        )
    for question in questions:
        check_prompt(question, build_prompt(protocol, question, tokenizer, retrieval), limits)


@contextlib.contextmanager
def seeded(seed: int | None, device: torch.device):
    """Seed sampling inside and put the global random state back after; None changes nothing."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if torch.device(device).type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def main() -> None:
    """One live trajectory. The model and the world come from files above this one, so they are
    imported here only.
    """
    from eval import demo

    demo()


if __name__ == "__main__":
    run_main(main)
