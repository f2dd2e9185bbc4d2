"""The loop: the model reasons, asks, reads what was found, and answers. It yields a `Trajectory`.

    sample a turn -> does it end in a query? -> search (the queries of all rows in one call)
                  -> append the documents with mask 0 -> sample the next turn
                  -> ... -> an answer, EOS or a limit

Two rules keep the training signal true:
  * token ids in, token ids out. Sampled ids are never decoded and encoded again; what the
    environment writes is encoded once and appended. A text that is encoded again can split into
    other tokens, and the log-probs would be of a text that nobody sampled;
  * the mask is born with the token: 1 for a token the policy sampled (end tags and EOS too), 0 for
    everything the environment wrote (documents, their tags, the blank lines around them, notices).

The loop knows neither retriever nor summariser: it gets `search(requests) -> results`. Sampling is
plain HF `generate` on the rows that are still alive (`play_by_turns`), so this file is the page to
read. There the keys and values of a row are computed again at each of its turns. scale/engine.py
has another `play`: the same trajectories when greedy, several times faster.
Left out: several tools, and searching in the middle of a turn.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from data import Document, Question, SearchRequest, SearchResult
from errors import InputError, run_main, setting
from prompts import (
    PROTOCOLS,
    Protocol,
    build_prompt,
    forbidden_texts,
    frame_documents,
    number_documents,
    parse_query,
    strip_tags,
)
from trajectory import Refusal, Search, Segment, Trajectory, show, trajectory_from_text

__all__ = ["Search", "Segment", "Trajectory", "rollout", "show", "trajectory_from_text"]

SearchFunction = Callable[[list[SearchRequest]], list[SearchResult]]
MIN_DOCUMENT_TOKENS = 16  # a search whose documents would be cut below this is not worth running
ANSWER_TOKENS = 32  # room kept free behind documents
MAX_REFUSALS = 2  # after so many refused queries the trajectory ends
SEARCH_RETRIES = 2  # a search that failed is tried twice more: most faults of a server are short


@dataclass(frozen=True)
class RolloutSettings:
    group_size: int = setting(16, "trajectories per question, G", least=1, only="train")
    temperature: float = setting(1.0, "of sampling, and of scoring; 0 is greedy", least=0)
    top_p: float = setting(
        1.0, "below 1 the samples are not what is scored", above=0, most=1, only="eval"
    )
    max_searches: int = setting(4, "per trajectory", least=0)
    max_turn_tokens: int = setting(512, "new tokens per turn", least=1)
    max_context: int = setting(0, "prompt and response in tokens; 0 = the model's limit", least=0)
    document_tokens: int = setting(1024, "tokens of documents per search at most", least=1)
    rollout_batch_size: int = setting(0, "trajectories sampled at once; 0 = all", least=0)
    timeout: float = setting(60.0, "seconds until a search or a request has failed", above=0)


# ----------------------------------------------------------------------------------- sample a turn


class StopRule:
    """When a turn is over: EOS, a stop tag, or no room left.

    A tag may span tokens, or end inside one that goes on behind it (">\\n\\n"). So it is looked for
    in the decoded tail of the turn, and the turn is cut behind that whole token: it was sampled.
    Only a token in `watched` can end a turn, so that most tokens cost no decoding.
    """

    def __init__(self, tokenizer, stop_tags: Sequence[str], eos_ids: set[int]):
        self.tokenizer, self.stop_tags, self.eos_ids = tokenizer, stop_tags, eos_ids
        last = "".join(tag[-1] for tag in stop_tags)
        self.watched = eos_ids | closing_ids(tokenizer, len(tokenizer), last)

    def reason(self, turn: list[int], room: int) -> str | None:
        """Why `turn` is over with its last token: "eos", the tag, "length"; None if it is not."""
        if turn[-1] in self.eos_ids:
            return "eos"
        if turn[-1] in self.watched:
            for tag in self.stop_tags:
                # Each token of a tag holds a character of it: so many tokens hold the whole tag.
                if tag in decode(self.tokenizer, turn[-len(tag) :]):
                    return tag
        return "length" if len(turn) >= room else None


@functools.lru_cache(maxsize=8)
def closing_ids(tokenizer, size: int, last: str) -> set[int]:
    """Ids of the tokens that hold one of the characters `last`: only they can complete a tag."""
    pieces = tokenizer.batch_decode([[i] for i in range(size)], skip_special_tokens=False)
    wanted = set(last)
    return {i for i, piece in enumerate(pieces) if wanted.intersection(piece)}


class TurnWatcher:
    """Watches `generate` from inside.

    As logits processor it sees the distribution, as stopping criterion the token. It ends each row
    by the rule, with the row's own room, and notes each sampled token's log-prob.
    """

    def __init__(self, rule: StopRule, room: list[int], temperature: float):
        self.rule, self.room, self.temperature = rule, room, temperature
        self.reasons: list[str | None] = [None] * len(room)
        self.ids: list[list[int]] = [[] for _ in room]
        self.logprobs: list[list[float]] = [[] for _ in room]

    def process_logits(self, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """[B, V] -> the logits that are sampled from; kept to score the token that comes next."""
        self.scores = logits / self.temperature
        return self.scores

    def check_stop(self, input_ids: torch.Tensor, _scores) -> torch.Tensor:
        tokens = input_ids[:, -1]  # [B]
        logprobs = self.scores.log_softmax(-1)  # [B, V]
        logprobs = logprobs.gather(1, tokens[:, None])[:, 0]  # [B]
        for row, (token, logprob) in enumerate(
            zip(tokens.tolist(), logprobs.tolist(), strict=True)
        ):
            if self.reasons[row] is None:
                turn = self.ids[row]
                turn.append(token)
                self.logprobs[row].append(logprob)
                self.reasons[row] = self.rule.reason(turn, self.room[row])
        over = [reason is not None for reason in self.reasons]
        return torch.tensor(over, device=input_ids.device)  # [B]


def decode(tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def encode(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@contextlib.contextmanager
def plain_generation(policy, eos_ids: set[int], pad_id: int):
    """`generate` without the checkpoint's own defaults while inside.

    Trap: a hub model's generation_config (top_k=20, repetition_penalty=1.05, ...) fills every
    setting that is left open. Samples then come from another distribution than the one trained on.
    """
    model = getattr(policy, "language_model", policy)
    kept = model.generation_config
    ends = sorted(eos_ids) or None
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=pad_id)
    try:
        yield
    finally:
        model.generation_config = kept


def end_ids(policy, tokenizer) -> set[int]:
    """Every id that ends a text: the tokenizer's EOS, the checkpoint's (chat models have two)."""
    model = getattr(policy, "language_model", policy)
    listed = getattr(model.generation_config, "eos_token_id", None)
    listed = listed if isinstance(listed, list) else [listed]
    return {i for i in [tokenizer.eos_token_id, *listed] if i is not None}


def left_padded(texts: list[list[int]], pad_id: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token lists -> (tokens, attention mask), [B, L] each: all end at the same place."""
    width, tokens, attention = max(map(len, texts)), [], []
    for text in texts:
        padding = width - len(text)
        tokens.append([pad_id] * padding + text)
        # Not `tokens != pad`: where pad is EOS, that would hide real EOS tokens.
        attention.append([0] * padding + [1] * len(text))
    return torch.tensor(tokens, device=device), torch.tensor(attention, device=device)


def sample_turns(policy, environment: Environment, rows: list[Trajectory]) -> TurnWatcher:
    """One turn for every row: left-padded, so that all sample their next token at one place."""
    tokenizer, settings = environment.tokenizer, environment.settings
    eos_ids = end_ids(policy, tokenizer)
    pad_id = tokenizer.pad_token_id
    pad_id = min(eos_ids, default=0) if pad_id is None else pad_id
    tokens, attention = left_padded([row.ids for row in rows], pad_id, policy.device)
    room = [environment.turn_room(row) for row in rows]
    rule = StopRule(tokenizer, environment.protocol.stop_tags, eos_ids)
    watcher = TurnWatcher(rule, room, settings.temperature or 1.0)
    if settings.temperature:
        # top_k: generate's default of 50 would be off-policy. temperature 1: the watcher divides.
        how = {"do_sample": True, "top_k": 0, "top_p": settings.top_p, "temperature": 1.0}
    else:
        how = {"do_sample": False}
    with plain_generation(policy, eos_ids, pad_id):
        policy.generate(
            input_ids=tokens,
            attention_mask=attention,
            max_new_tokens=max(room),
            **how,
            logits_processor=LogitsProcessorList([watcher.process_logits]),
            stopping_criteria=StoppingCriteriaList([watcher.check_stop]),
        )
    return watcher


# ------------------------------------------------------------------------------ answer the queries


def call_search(
    search: SearchFunction, requests: list[SearchRequest], timeout: float
) -> list[SearchResult]:
    """`search` under a time limit, tried again with backoff; at last an error for every request.

    A training step must survive a retriever that is down, and must not wait for ever on one that
    hangs.
    """
    if bound := getattr(search, "seconds", None):  # asked over the network: more queries, longer
        timeout += bound(len({request.query for request in requests}))
    for attempt in range(SEARCH_RETRIES + 1):
        if attempt:
            time.sleep(min(0.1 * 2**attempt, 5.0))
        box: list = []
        thread = threading.Thread(target=_call_into, args=(search, requests, box), daemon=True)
        thread.start()
        thread.join(timeout)
        found = box[0] if box else f"no answer within {timeout:g} s"
        if isinstance(found, InputError):  # the user's to mend, and no fault of one search
            raise found
        if isinstance(found, list):
            return found
    return [SearchResult(error=found) for _ in requests]


def _call_into(search: SearchFunction, requests: list[SearchRequest], box: list) -> None:
    try:
        results = list(search(requests))
        if len(results) != len(requests):
            raise ValueError(f"{len(results)} results for {len(requests)} queries")
        if not all(isinstance(result, SearchResult) for result in results):
            raise TypeError("a result is no SearchResult")
        box.append(results)
    except InputError as error:
        box.append(error)
    except Exception as error:  # any fault of a retriever is logged in the trajectory, not raised
        box.append(f"{type(error).__name__}: {error}")


def fit_block(
    tokenizer, protocol: Protocol, pieces: list[str], budget: int
) -> tuple[list[int], str]:
    """(ids of the framed documents, their text), at most `budget` tokens.

    It is cut at a document's end; only a first document that is too long by itself is cut inside.
    The block is encoded as one text: behind a newline a word is often another token than at the
    beginning, and supervised traces have the block whole.
    """

    def block(body: str) -> list[int]:
        return encode(tokenizer, frame_documents(protocol, body))

    for count in range(len(pieces), 0, -1):
        body = "\n".join(pieces[:count])
        if len(ids := block(body)) <= budget:
            return ids, body

    def tokens(length: int) -> int:
        return len(block(body[:length]))

    fits = bisect.bisect_right(range(len(body)), budget, key=tokens)
    body = body[: max(fits - 1, 0)]
    return block(body), body


class Environment:
    """What stands around the policy: it takes the rows that asked and searches once for all.

    max_context   0 until `rollout` knows the policy, whose limit it then is
    """

    def __init__(
        self, tokenizer, protocol: Protocol, search: SearchFunction, settings: RolloutSettings
    ):
        self.tokenizer, self.protocol = tokenizer, protocol
        self.search, self.settings, self.max_context = search, settings, settings.max_context
        # Without tags nobody will ask.
        frame = frame_documents(protocol, "\x00") if protocol.documents_tags else ""
        self.frame_tokens = sum(len(encode(tokenizer, half)) for half in frame.split("\x00"))
        self.overhead = self.frame_tokens + len(encode(tokenizer, protocol.fallback_notice))
        self.forbidden = forbidden_texts(protocol, tokenizer)

    def room(self, trajectory: Trajectory) -> int:
        """Tokens that are left of the context."""
        return self.max_context - len(trajectory.prompt_ids) - len(trajectory.response_ids)

    def turn_room(self, trajectory: Trajectory) -> int:
        """Tokens that the next turn may sample."""
        return min(self.settings.max_turn_tokens, self.room(trajectory))

    def budget(self, trajectory: Trajectory) -> int:
        """Tokens of documents that the next search may add."""
        room = self.room(trajectory) - self.overhead - ANSWER_TOKENS
        return min(self.settings.document_tokens, room)

    def longest(self, prompt: int) -> int:
        """Tokens that a trajectory with a prompt of so many may have at most."""
        settings, protocol = self.settings, self.protocol
        notices = (protocol.malformed_notice, protocol.limit_notice)
        notice = max(len(encode(self.tokenizer, text)) for text in notices)
        searches = settings.max_searches if protocol.query_tags else 0
        # A turn ends in a search, in a refusal (the last of which ends all), or for good.
        sampled = (searches + MAX_REFUSALS) * settings.max_turn_tokens
        inserted = searches * (settings.document_tokens + self.overhead)
        inserted += (MAX_REFUSALS - 1) * notice
        return min(prompt + sampled + inserted, self.max_context)

    def end_turn(
        self, trajectory: Trajectory, ids: list[int], logprobs: list[float], reason: str
    ) -> None:
        """Append a sampled turn. One that ended in a query keeps an empty stop_reason: it asks."""
        trajectory.append_model(ids, logprobs, decode(self.tokenizer, ids))
        if not (self.protocol.query_tags and reason == self.protocol.query_tags[1]):
            trajectory.stop_reason = "answer" if reason in self.protocol.stop_tags else reason

    def answer(self, asking: list[Trajectory]) -> None:
        """Each row ends in a query tag. Run what is well-formed in one call, refuse the rest."""
        accepted, protocol = [], self.protocol
        least = min(self.settings.document_tokens, MIN_DOCUMENT_TOKENS)
        for trajectory in asking:
            query = parse_query(protocol, trajectory.segments[-1].text)
            if not query:
                reason = "malformed" if query is None else "empty"
                self.refuse(trajectory, Refusal(reason, query or ""), protocol.malformed_notice)
            elif len(trajectory.searches) >= self.settings.max_searches:
                self.refuse(trajectory, Refusal("limit", query), protocol.limit_notice)
            elif self.budget(trajectory) < least:
                trajectory.stop_reason = "length"  # its documents would leave no room to answer
            else:
                accepted.append((trajectory, query))
        if accepted:
            self.execute(accepted)

    def refuse(self, trajectory: Trajectory, refusal: Refusal, notice: str) -> None:
        """Say why the query was not run, and let the row go on; or end it."""
        trajectory.refusals.append(refusal)
        ids = encode(self.tokenizer, notice)
        if len(trajectory.refusals) >= MAX_REFUSALS:
            trajectory.stop_reason = "refused"
        elif self.room(trajectory) < len(ids) + ANSWER_TOKENS:
            trajectory.stop_reason = "length"
        else:
            trajectory.append_environment(ids, notice, "notice")

    def execute(self, accepted: list[tuple[Trajectory, str]]) -> None:
        start = time.perf_counter()
        requests = [SearchRequest(trajectory.question, query) for trajectory, query in accepted]
        results = call_search(self.search, requests, self.settings.timeout)
        seconds = (time.perf_counter() - start) / len(accepted)
        for (trajectory, query), result in zip(accepted, results, strict=True):
            body = self.write(trajectory, result)
            found, fallback, error = list(result.documents), result.fallback, result.error
            trajectory.searches.append(Search(query, found, body, fallback, error, seconds))

    def write(self, trajectory: Trajectory, result: SearchResult) -> str:
        """Append what was found, cut to the row's room; returns it as the policy reads it."""
        protocol = self.protocol
        if result.error:
            pieces = [protocol.error_text]
        else:
            pieces = [result.text] if result.text else number_documents(result.documents)
        pieces = [strip_tags(piece, self.forbidden) for piece in pieces] or [protocol.empty_text]
        budget = self.frame_tokens + self.budget(trajectory)
        ids, body = fit_block(self.tokenizer, protocol, pieces, budget)
        trajectory.append_environment(ids, frame_documents(protocol, body), "documents")
        if result.fallback:
            notice = protocol.fallback_notice
            trajectory.append_environment(encode(self.tokenizer, notice), notice, "notice")
        return body


# ---------------------------------------------------------------------------------------- the loop


def play_by_turns(
    policy,
    environment: Environment,
    trajectories: list[Trajectory],
    progress: Callable[[int], None] | None = None,
) -> None:
    """All live rows sample a turn, those that asked are answered, until no row is left."""
    live = trajectories
    while live:
        size = environment.settings.rollout_batch_size or len(live)
        for start in range(0, len(live), size):
            rows = live[start : start + size]
            turns = sample_turns(policy, environment, rows)
            for row, *turn in zip(rows, turns.ids, turns.logprobs, turns.reasons, strict=True):
                environment.end_turn(row, *turn)
        environment.answer([t for t in live if not t.stop_reason])
        ended = sum(bool(t.stop_reason) for t in live)
        if progress:
            progress(ended)
        live = [t for t in live if not t.stop_reason]


@torch.no_grad()
def rollout(
    policy,
    environment: Environment,
    questions: list[Question],
    seed: int | None = None,
    play: Callable = play_by_turns,
    progress: Callable[[int], None] | None = None,
) -> list[Trajectory]:
    """`group_size` trajectories per question: row b belongs to question b // group_size.

    seed       makes the rollout reproducible on the same machine, and leaves the global random
               state as it was
    play       how the rows are sampled: plain `generate` here, or scale.engine.play_in_slots
    progress   called with the number of trajectories that ended since the last call
    Whether a question may search is `Question.may_search`.
    """
    # 0 is the model's limit, which is known once there is a model.
    environment.max_context = environment.max_context or context_of(policy)
    trajectories = []
    for question in questions:
        prompt = build_prompt(environment.protocol, question, environment.tokenizer)
        check_prompt(question, prompt, environment.max_context)
        for _ in range(environment.settings.group_size):
            trajectories.append(Trajectory(question, environment.protocol, prompt))
    with seeded(seed, policy.device):
        play(policy, environment, trajectories, progress)
    return trajectories


def context_of(policy) -> int:
    """The model's own limit in tokens."""
    return getattr(policy.config, "max_position_embeddings", None) or 4096


def check_prompt(question: Question, prompt: list[int], max_context: int) -> None:
    if len(prompt) + ANSWER_TOKENS > max_context:
        raise InputError(
            f"question {question.id}: its prompt has {len(prompt)} tokens and the context is "
            f"{max_context}, of which {ANSWER_TOKENS} are kept for the answer: shorten it, or "
            "raise --max_context"
        )


def check_prompts(questions: list[Question], environment: Environment, policy) -> None:
    """Every prompt must leave room to answer: better known before a run than at its step 300."""
    context, positions = environment.max_context or context_of(policy), context_of(policy)
    if context > positions:
        raise InputError(
            f"--max_context {context}: the model has {positions} positions; give at most that"
        )
    for question in questions:
        prompt = build_prompt(environment.protocol, question, environment.tokenizer)
        check_prompt(question, prompt, context)


@contextlib.contextmanager
def seeded(seed: int | None, device: torch.device):
    """Seed sampling inside, and put the global random state back after; None changes nothing."""
    if seed is None:
        yield
        return
    on_gpu = torch.device(device).type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        torch.manual_seed(seed)
        yield


# ---------------------------------------------------------------------------------- on one screen


class _Words:
    """Stands in for a tokenizer: every word, tag or line end is a token."""

    chat_template, bos_token = None, ""

    def __init__(self):
        self.words: list[str] = []

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict:
        words = [word for word in text.replace("\n", " \n ").split(" ") if word]
        self.words += [word for word in dict.fromkeys(words) if word not in self.words]
        return {"input_ids": [self.words.index(word) for word in words]}

    def decode(self, ids: Sequence[int], **_) -> str:
        return " ".join(self.words[i] for i in ids) + " "


_SCRIPT = (
    "Her birthplace decides. <search> Ana Bell birthplace </search>",
    "So it is Norland. <answer> Norland </answer>",
)


def _play_script(policy, environment: Environment, trajectories: list[Trajectory], _) -> None:
    """A `play` without a model: each turn is the next line of the script."""
    for row in trajectories:
        for line, reason in zip(_SCRIPT, environment.protocol.stop_tags, strict=True):
            ids = encode(environment.tokenizer, line)
            environment.end_turn(row, ids, [-0.1] * len(ids), reason)
            environment.answer([row] if not row.stop_reason else [])


def main() -> None:
    """A scripted trajectory, token by token: who wrote it, its id and its mask."""
    if len(sys.argv) > 1:
        raise InputError('rollout.py shows a scripted trajectory; to ask: python ask.py "question"')

    class Nobody:
        device, config = torch.device("cpu"), None

    def search(requests: list[SearchRequest]) -> list[SearchResult]:
        page = Document("1", "Ana Bell", "born in Kelmouth, Norland")
        return [SearchResult([page]) for _ in requests]

    settings = RolloutSettings(group_size=1)
    environment = Environment(_Words(), PROTOCOLS["when_to_search"], search, settings)
    question = Question("demo", "In which country was Ana Bell born?", ["Norland"])
    (row,) = rollout(Nobody(), environment, [question], play=_play_script)
    print(f"{show(row)}\n\nmask  id  token   (the prompt has {len(row.prompt_ids)} tokens)")
    for token, mask in zip(row.response_ids, row.response_mask, strict=True):
        print(f"{mask:4} {token:3}  {environment.tokenizer.words[token]!r}")


if __name__ == "__main__":
    run_main(main)
