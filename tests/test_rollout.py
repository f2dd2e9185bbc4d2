"""Tests of rollout.py: tokens are kept as sampled, masks are right, and no failure ends the run.

Most tests script what the policy samples: `Script` takes the place of `sample_turns`. Sampling
itself is tested at the end, with random models.
"""

import copy
import dataclasses
import math
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import message, model_of, roll, small
from transformers import ByT5Tokenizer, GenerationConfig

from data import Document, Question, SearchResult
from engines.slots import generate_in_slots, obstacle
from papers import PROTOCOLS
from policy import Policy, collate
from prompts import build_prompt, frame_documents
from rewards import good_format, ur2_violations
from rollout import (
    MIN_DOCUMENT_TOKENS,
    Environment,
    StopRule,
    Turn,
    check_prompts,
    decode,
    encode,
    end_ids,
    generate_by_turns,
)
from settings import Settings
from trajectory import Segment, Trajectory, show, trajectory_from_text

UR2 = PROTOCOLS["ur2"]
BEGIN, END = UR2.query_tags
QA = Question("1", "In which country was Ana Bell born?", ["Norland"])
ASK = f"I look it up. {BEGIN} Ana Bell {END}"
NORLAND = "<answer> Norland </answer>"
ANSWER = "So it is \\boxed{Norland}."
P_SCRIPT = 0.9  # the probability of a scripted token


MODEL = SimpleNamespace(device=torch.device("cpu"), generation_config=GenerationConfig())
MODEL.config = SimpleNamespace(max_position_embeddings=2048)


class Script:
    """Samples scripts[r] for row r, turn by turn, and EOS after each turn. A turn is a text or a
    list of ids; each token has the probability 0.9.
    """

    def __init__(self, tokenizer, scripts):
        self.turns = [
            [turn if isinstance(turn, list) else encode(tokenizer, turn) for turn in row]
            for row in scripts
        ]
        self.numbers = {}  # id of a trajectory -> r
        self.batches: list[int] = []  # rows per call

    def __call__(self, policy, environment, rows):
        eos_ids = end_ids(policy, environment.tokenizer)
        rule = StopRule(environment.tokenizer, environment.protocol.stop_tags, eos_ids)
        self.batches.append(len(rows))
        return [self.sample(row, environment, rule) for row in rows]

    def sample(self, row, environment, rule):
        number = self.numbers.setdefault(id(row), len(self.numbers))
        turn = Turn(environment.turn_tokens_left(row))
        tokens = iter([*self.turns[number].pop(0), environment.tokenizer.eos_token_id])
        while not turn.reason:
            turn.ids.append(next(tokens))
            turn.logprobs.append(math.log(P_SCRIPT))
            turn.reason = rule.reason(turn.ids, turn.max_new_tokens)
        return turn


class Searcher:
    """A search function that finds "about QUERY" and records the queries of each call."""

    def __init__(self, answer=None):
        self.answer = answer
        self.calls = []

    def __call__(self, requests):
        self.calls.append([request.query for request in requests])
        if self.answer is not None:
            return self.answer(requests)
        return [SearchResult([Document("d", "", f"about {request.query}")]) for request in requests]


def fixed_search(*results):
    """Returns a searcher that answers every request with the same documents, texts or result."""
    if isinstance(results[0], str):
        results = [SearchResult([Document("d", "", text) for text in results])]
    return Searcher(lambda requests: [results[0] for _ in requests])


def play(tokenizer, *scripts, search=None, **settings):
    """Returns (trajectories, script, searcher) of scripted rows. Row r answers question r."""
    script = Script(tokenizer, scripts)
    search = search or Searcher()
    questions = [dataclasses.replace(QA, id=str(row)) for row in range(len(scripts))]
    with mock.patch("rollout.sample_turns", script):
        trajectories = roll(MODEL, tokenizer, questions, search, **settings)
    for trajectory in trajectories:
        check_bookkeeping(trajectory, tokenizer)
    return trajectories, script, search


def play_one(tokenizer, script, **settings):
    """Returns (the trajectory, the queries of each call of the searcher)."""
    (trajectory,), _, search = play(tokenizer, script, **settings)
    return trajectory, search.calls


def check_bookkeeping(t, tokenizer):
    """Checks what holds for every trajectory: each id has one mask and one log-prob, and the
    segments have the text of the ids.
    """
    assert len(t.response_ids) == len(t.response_mask)
    assert [int(logprob != 0.0) for logprob in t.logprobs] == t.response_mask
    others = [segment.text for segment in t.segments if segment.writer != "model"]
    assert decode(tokenizer, masked(t, 0)) == "".join(others)
    # A turn's last token may hold a few characters more than the tag that ends the turn.
    texts = [*map(re.escape, (segment.text for segment in t.segments)), ""]
    assert re.fullmatch(".{0,3}".join(texts), decode(tokenizer, t.response_ids), re.DOTALL)
    assert t.stop_reason in {"eos", "answer", "length", "rejected"}


def masked(t, wanted):
    return [i for i, mask in zip(t.response_ids, t.response_mask, strict=True) if mask == wanted]


def block(text, protocol=UR2):
    return frame_documents(protocol, text)


def block_ids(tokenizer, body, protocol=UR2):
    return encode(tokenizer, block(body, protocol))


def writers(trajectory):
    return [segment.writer for segment in trajectory.segments]


def rejections(trajectory):
    return [(rejected.reason, rejected.query) for rejected in trajectory.rejected_queries]


# -------------------------------------------------------------- sampled ids are not encoded again


def spelled(tokenizer, text):
    """Encodes each character alone: the tokenizer itself would split the text differently."""
    return [i for character in text for i in encode(tokenizer, character)]


def test_sampled_ids_are_kept_although_their_text_would_encode_differently(bpe):
    turn = spelled(bpe, ASK)
    assert encode(bpe, decode(bpe, turn)) != turn  # so decoding and encoding again would show
    t, _ = play_one(bpe, [turn, ANSWER])
    # in its second turn the model read exactly these ids
    read = build_prompt(UR2, QA, bpe) + turn + block_ids(bpe, "(1) about Ana Bell")
    assert t.ids[: len(read)] == read


def test_r_search_reads_documents_with_titles_and_without_numbers(bpe):
    found = [Document("1", "Ana Bell", "a painter"), Document("2", "", "untitled")]
    search = fixed_search(SearchResult(found))
    t, _ = play_one(
        bpe, ["<search> Ana Bell </search>", NORLAND], search=search, protocol="r_search"
    )
    shown = '(Title: "Ana Bell") a painter\nuntitled'
    assert t.segments[1].text == f"\n\n<observation>\n{shown}\n</observation>\n\n"


# ------------------------------------------------ the mask, think tags of a template, and fallbacks


def test_the_mask_is_one_on_sampled_tokens_and_zero_on_the_block_around_the_documents(bpe):
    t, _ = play_one(bpe, [ASK, ANSWER])
    query_tokens = len(encode(bpe, ASK))
    document_tokens = len(block_ids(bpe, "(1) about Ana Bell"))
    answer_tokens = len(encode(bpe, ANSWER)) + 1  # EOS is sampled too
    assert t.response_mask == [1] * query_tokens + [0] * document_tokens + [1] * answer_tokens
    assert t.stop_reason == "eos"
    framed = "\n\n<|begin_of_documents|>\n(1) about Ana Bell\n<|end_of_documents|>\n\n"
    assert t.segments[1] == Segment("documents", framed) and t.answer == "Norland"
    # the scripted token has probability 0.9; inserted tokens have log-prob 0
    expected = [math.log(P_SCRIPT) if mask else 0.0 for mask in t.response_mask]
    assert t.logprobs == pytest.approx(expected, abs=1e-5)


def test_a_template_that_opens_the_think_tag_keeps_the_format_valid(bpe):
    thinks = copy.deepcopy(bpe)
    thinks.chat_template = bpe.chat_template.replace(
        "assistant\n{% endif", "assistant\n<think>\n{% endif"
    )
    reflected = ["Who? </think>\n\n<reflect> I know it. </reflect>" + NORLAND]
    for tokenizer, opened in ((thinks, "<think>"), (bpe, "")):
        t, _ = play_one(tokenizer, reflected, protocol="when_to_search")
        assert (t.opened, good_format(t)) == (opened, bool(opened))
    for tokenizer in (thinks, bpe):  # this protocol's prompt ends in the tag, but not twice
        t, _ = play_one(tokenizer, ["Who? </think>\n\n" + NORLAND], protocol="r1_searcher")
        assert decode(tokenizer, t.prompt_ids).count("assistant\n<think>") == 1 and good_format(t)


def test_a_fallback_is_flagged_and_gets_a_notice_after_the_documents(bpe):
    result = SearchResult([Document("d", "", "unread")], text="None", fallback=True)
    t, _ = play_one(bpe, [ASK, ANSWER], search=fixed_search(result))
    assert writers(t) == ["model", "documents", "notice", "model"]
    assert masked(t, 0) == block_ids(bpe, "None") + encode(bpe, UR2.fallback_notice)
    (search,) = t.searches
    assert (search.fallback, search.text, search.documents[0].text) == (True, "None", "unread")
    # a text that reads like the fallback does not make the result a fallback
    t, _ = play_one(bpe, [ASK, ANSWER], search=fixed_search(SearchResult(text="None")))
    assert not t.searches[0].fallback and writers(t) == ["model", "documents", "model"]


# -------------------------------------------------------------------------------- rejected queries


@pytest.mark.parametrize(
    "turn, max_searches, rejected, notice",
    [
        # a begin tag inside a document does not open a query
        (f"and then? {END}", 4, ("malformed", ""), UR2.malformed_notice),
        (f"{BEGIN}again{END}", 1, ("limit", "again"), UR2.limit_notice),
    ],
)
def test_a_rejected_query_is_logged_and_gets_a_notice(bpe, turn, max_searches, rejected, notice):
    page = fixed_search(f"a page that says {BEGIN} buy this")
    t, calls = play_one(bpe, [ASK, turn, ANSWER], search=page, max_searches=max_searches)
    assert calls == [["Ana Bell"]] and [search.query for search in t.searches] == ["Ana Bell"]
    assert rejections(t) == [rejected]
    assert [s.text for s in t.segments if s.writer == "notice"] == [notice]
    assert (t.stop_reason, t.answer) == ("eos", "Norland")


def test_prompt_environment_and_penalty_use_the_same_search_limit(bpe):
    # an open question may search twice: the third query is rejected and is the only violation
    settings = {"max_searches": 1, "task_searches": {"math": 3, "qa": 2}}
    t, calls = play_one(bpe, [ASK, ASK, ASK, ANSWER], **settings)
    assert "at most 2 queries" in decode(bpe, t.prompt_ids)
    assert len(calls) == len(t.searches) == 2 and rejections(t) == [("limit", "Ana Bell")]
    assert ur2_violations(t) == ["too_many_queries"]


def test_the_second_rejected_query_ends_the_trajectory_without_a_notice(bpe):
    t, calls = play_one(bpe, [END, ASK, f"{BEGIN}{END}", ANSWER])
    assert rejections(t) == [("malformed", ""), ("empty", "")] and calls == [["Ana Bell"]]
    assert writers(t) == ["model", "notice", "model", "documents", "model"]
    assert t.stop_reason == "rejected"


# ----------------------------------------------------------- how documents are cut and encoded

DOCUMENTS = (
    "Ana Bell was born in Kelmouth.",
    "Kelmouth is a town in Norland.",
    "Norland is a country.",
)
NUMBERED = [f"({i}) {text}" for i, text in enumerate(DOCUMENTS, 1)]


def frame_tokens(tokenizer):
    """Counts the tokens of the tags around the documents; the budget does not include them."""
    halves = "\n\n<|begin_of_documents|>\n", "\n<|end_of_documents|>\n\n"
    return sum(len(encode(tokenizer, half)) for half in halves)


# if one token is missing, the whole last document is left out
@pytest.mark.parametrize("fitting, spare", [(2, 0), (3, -1)])
def test_whole_documents_are_left_out_and_the_closing_tag_stays(bpe, fitting, spare):
    tokens = len(block_ids(bpe, "\n".join(NUMBERED[:fitting]))) - frame_tokens(bpe) + spare
    t, _ = play_one(bpe, [ASK, ANSWER], search=fixed_search(*DOCUMENTS), document_tokens=tokens)
    body, (search,) = "\n".join(NUMBERED[:2]), t.searches
    assert masked(t, 0) == block_ids(bpe, body)
    # the log keeps all documents
    assert (search.text, search.cut, len(search.documents)) == (body, True, 3)


def test_a_first_document_that_is_too_long_is_truncated_and_still_framed(bpe):
    long = "Kelmouth is a town. " * 50
    t, _ = play_one(bpe, [ASK, ANSWER], search=fixed_search(long, "never read"), document_tokens=20)
    (search,) = t.searches
    inserted = block_ids(bpe, search.text)
    assert search.cut and search.text and masked(t, 0) == inserted
    # not even one more character would have fitted
    one_more = f"(1) {long}"[: len(search.text) + 1]
    assert one_more.startswith(search.text)
    assert len(inserted) <= frame_tokens(bpe) + 20 < len(block_ids(bpe, one_more))


def test_a_document_block_is_encoded_in_one_piece_as_in_supervised_traces(toy_tokenizer):
    # Word pieces include the space before the word. Documents encoded separately from the newline
    # before them would begin with <unk>.
    environment = Environment(toy_tokenizer, UR2, None, Settings(max_context=2048))
    ids = environment.encode_documents("ana bell has birthplace kelmouth .")
    pieces = ["\n\n", "<|begin_of_documents|>", "\n", " ana", " bell", " has", " birthplace"]
    pieces += [" kel", "mouth", " .", "\n", "<|end_of_documents|>", "\n\n"]
    assert toy_tokenizer.convert_ids_to_tokens(ids) == pieces


# ----------------------------------------------------------- limits of the context and of a turn


# a search needs room for 16 tokens of documents, or for document_tokens if that is less
@pytest.mark.parametrize("limit, least", [(512, MIN_DOCUMENT_TOKENS), (5, 5)])
def test_a_search_that_would_leave_no_room_for_an_answer_is_not_run(bpe, limit, least):
    # the turn with the query, and the notice that a fallback would add
    added = sum(len(encode(bpe, text)) for text in (ASK, UR2.fallback_notice))
    framed = len(build_prompt(UR2, QA, bpe)) + added + frame_tokens(bpe)
    needed = framed + least + 32  # 32 are kept for the answer
    options = {"search": fixed_search("Kelmouth " * 99), "document_tokens": limit}
    t, _ = play_one(bpe, [ASK, ANSWER], max_context=needed, **options)
    assert len(masked(t, 0)) == frame_tokens(bpe) + least and t.answer == "Norland"
    t, calls = play_one(bpe, [ASK, ANSWER], max_context=needed - 1, **options)
    assert t.rejected_queries == [] and t.stop_reason == "length"
    assert calls == [["Ana Bell"]]  # only the first run searched: both share the searcher


def test_no_trajectory_exceeds_the_context(bpe):
    prompt = len(build_prompt(UR2, QA, bpe))
    turns = [ASK, END, f"{BEGIN}again{END}", "word " * 300]
    pages = fixed_search(SearchResult(text="Kelmouth " * 400, fallback=True))
    seen = set()
    for context in [*range(prompt + 32, prompt + 160, 12), prompt + 400]:
        options = {"max_context": context, "document_tokens": 60}
        t, _ = play_one(bpe, turns, search=pages, **options)
        assert len(t.ids) <= context and t.stop_reason == "length"
        seen.add(len(t.searches))
    assert seen == {0, 1, 2}


def surroundings(tokenizer, max_context):
    return Environment(tokenizer, UR2, Searcher(), Settings(max_context=max_context))


def test_a_prompt_longer_than_the_context_is_an_error_or_with_skip_bad_left_out(bpe, capsys):
    long = dataclasses.replace(QA, id="q-17", question="Who? " * 100)
    length = len(build_prompt(UR2, long, bpe))
    questions = [long, QA, long]
    assert check_prompts(questions, surroundings(bpe, length + 32), MODEL) == questions
    less = surroundings(bpe, length + 31), MODEL  # 32 tokens are kept for the answer
    error = message(check_prompts, questions, *less)
    assert error.startswith(f"question q-17: its prompt has {length} tokens and the context is ")
    counted = "2 of 3 prompts do not fit: --skip_bad leaves them out"
    assert error.endswith(f"; {counted}")
    assert check_prompts(questions, *less, skip_bad=True) == [QA]
    assert capsys.readouterr().err == f"{counted}\n"
    error = message(check_prompts, [], surroundings(bpe, 2049), MODEL)
    assert error.startswith("--max_context 2049: the model has only 2048 positions")


def test_a_prompt_is_checked_where_the_bound_on_its_tokens_is_exact():
    """With a byte tokenizer the upper bound of a question's tokens, its bytes, is exact."""
    tokenizer = ByT5Tokenizer()
    longer = dataclasses.replace(QA, id="long", question="é" * 300)
    environment = surroundings(tokenizer, len(build_prompt(UR2, longer, tokenizer)) + 31)
    assert "question long: its" in message(check_prompts, [QA, longer], environment, MODEL)


# -------------------------------------------------------------------------------- where a turn ends


@pytest.mark.parametrize("name", ["ur2", "r_search"])
def test_a_turn_ends_with_the_whole_token_in_which_the_tag_ends(bpe, name):
    begin, end = PROTOCOLS[name].query_tags
    turn = encode(bpe, f"{begin} Ana Bell {end}\n\n")
    assert bpe.decode(turn[-1:]) in (">\n\n", "|>\n\n")  # the tag ends inside this token
    script = [turn + encode(bpe, "more"), ANSWER]
    t, calls = play_one(bpe, script, protocol=name)
    assert calls == [["Ana Bell"]]
    expected = turn + block_ids(bpe, "", PROTOCOLS[name])[:2]
    assert t.response_ids[: len(expected)] == expected


def test_a_token_that_the_tokenizer_does_not_know_does_not_stop_the_run(bpe, qwen2):
    policy = biased(qwen2, {len(bpe) + 3: 100.0})  # the tokenizer has no token with this id
    (t,) = roll(policy, bpe, QA, Searcher(), "ur2", temperature=0.0, max_turn_tokens=5)
    assert t.response_ids == [len(bpe) + 3] * 5 and t.stop_reason == "length"


def test_every_eos_token_of_the_checkpoint_ends_the_trajectory(bpe, monkeypatch):
    eot = bpe.convert_tokens_to_ids("<|eot_id|>")
    both = GenerationConfig(eos_token_id=[eot, bpe.eos_token_id])
    monkeypatch.setattr(MODEL, "generation_config", both)
    t, _ = play_one(bpe, [[*encode(bpe, "no"), eot, eot]])
    assert t.response_ids == [*encode(bpe, "no"), eot] and t.stop_reason == "eos"


# ---------------------------------------------------------------------------- batches of many rows


def test_the_queries_of_all_live_rows_go_to_the_searcher_in_one_call_in_order(bpe):
    def turns_of(*queries):
        return [f"{BEGIN}{query}{END}" for query in queries]

    rows = [["a1", "a2"], [], ["c2"], ["d1", "d2", "d3"]]
    scripts = [[*turns_of(*queries), "no"] for queries in rows]
    scripts[2].insert(0, END)
    found = [[f"{row} {query}" for query in queries] for row, queries in enumerate(rows)]

    def find(requests):
        return [SearchResult(text=f"{r.question.id} {r.query}") for r in requests]

    for size, batches in ((0, [4, 3, 3, 1]), (3, [3, 1, 3, 3, 1])):
        search = Searcher(find)
        trajectories, script, _ = play(bpe, *scripts, search=search, max_num_seqs=size)
        assert search.calls == [["a1", "d1"], ["a2", "c2", "d2"], ["d3"]]
        assert [[search.text for search in t.searches] for t in trajectories] == found
        assert script.batches == batches  # sampled together: 4 live rows, then 3, 3 and 1


def biased(policy, bias):
    """Returns a copy of the model with a bias on its logits: it samples some tokens often."""
    policy = copy.deepcopy(policy)
    old = policy.language_model.get_output_embeddings()
    head = torch.nn.Linear(old.in_features, old.out_features)
    with torch.no_grad():
        head.weight.copy_(old.weight)
        head.bias.zero_()
        for token, value in bias.items():
            head.bias[token] = value
    policy.language_model.set_output_embeddings(head)
    return policy


# Tags of one character, so that a random model samples them.
SHORT_TAGS = dataclasses.replace(UR2, query_tags=("<", ">"), documents_tags=("[", "]"))
MIXED = [dataclasses.replace(QA, id=str(i), question="Who? " * i) for i in range(1, 7)]


def by_length(requests):
    """Returns documents whose length depends on the query, so that the rows differ in length."""
    return [SearchResult(text=" kelmouth" * (1 + len(request.query) % 7)) for request in requests]


# ----------------------------------------------------------------------------------------- sampling


def test_recorded_log_probs_equal_those_of_a_forward_pass_over_the_same_ids(bpe, qwen2):
    tokenizer = copy.deepcopy(bpe)
    tokenizer.pad_token = tokenizer.eos_token  # the prompt has EOS too
    # A random model that searches, answers and ends without a script.
    likely = tokenizer.convert_tokens_to_ids([*SHORT_TAGS.query_tags, tokenizer.eos_token])
    policy = biased(qwen2, dict(zip(likely, (7.0, 7.0, 4.0), strict=True)))
    options = {"temperature": 0.7, "seed": 1, "max_turn_tokens": 24}
    rows = roll(policy, tokenizer, MIXED, Searcher(by_length), SHORT_TAGS, 2, **options)
    batch = collate(rows, [0.0] * len(rows), 2)
    with torch.no_grad():
        logits = policy.language_model(batch.tokens).logits[:, :-1] / 0.7  # [B, T, V]
    recomputed = logits.log_softmax(-1).gather(2, batch.tokens[:, 1:, None])[..., 0]  # [B, T]
    gap = (recomputed - batch.old_logprobs) * batch.response_mask
    assert gap.abs().max() < 1e-4
    assert any(t.searches for t in rows) and any(t.stop_reason == "eos" for t in rows)


def test_a_seed_determines_the_rollout_and_the_global_random_state_is_restored(qwen2, bpe):
    def sampled(seed):
        rows = roll(qwen2, bpe, QA, Searcher(), "ur2", 3, seed=seed, max_turn_tokens=12)
        return [(t.response_ids, t.logprobs) for t in rows]

    state = torch.get_rng_state()
    first = sampled(1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert first == sampled(1) != sampled(2)
    assert first[0] != first[1]  # rows of one question differ


# Five tokens have all the probability, so the expected shares are known. With 4096 draws the
# standard deviation of a share is sqrt(p (1 − p) / 4096) < 0.008.
MASS = (0.4, 0.3, 0.15, 0.1, 0.05)
HUB_DEFAULTS = {"do_sample": True, "top_k": 2, "top_p": 0.5, "min_p": 0.2, "temperature": 0.3}
HUB_DEFAULTS |= {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "suppress_tokens": [10, 11]}
HUB_DEFAULTS |= {"max_new_tokens": 1, "min_new_tokens": 3, "num_beams": 3}


@pytest.fixture(scope="module")
def dice(toy_tokenizer):
    """A model that samples token 10 + i with probability MASS[i] in every context."""
    sizes = small(hidden_size=8, num_hidden_layers=1, eos_token_id=1, pad_token_id=0)
    policy = biased(Policy(model_of("qwen2", vocab_size=len(toy_tokenizer), **sizes)), {})
    head = policy.language_model.get_output_embeddings()
    with torch.no_grad():
        head.weight.zero_()
        head.bias.fill_(-100.0)
        head.bias[10:15] = torch.tensor(MASS).log()
    assert obstacle(policy.language_model) == ""  # so that slots do not fall back to `generate`
    return policy


def sample_dice(dice, tokenizer, **settings):
    """Samples 512 rows of 8 tokens and returns (ids, log-probs), [512, 8] each."""
    options = {"seed": 3, "max_turn_tokens": 8, **settings}
    rows = roll(dice, tokenizer, QA, Searcher(), "ur2", 512, **options)
    return torch.tensor([t.response_ids for t in rows]), torch.tensor([t.logprobs for t in rows])


def check_shares(sampled, shares, recorded):
    """Checks each token's share, within five standard deviations, and its recorded log-prob."""
    ids, logprobs = sampled
    assert ids.shape == (512, 8) and bool(((ids >= 10) & (ids < 15)).all())
    for token, (share, p) in enumerate(zip(shares, recorded, strict=True), 10):
        here = ids == token
        assert here.float().mean().item() == pytest.approx(share, abs=0.04)
        assert torch.allclose(logprobs[here], torch.tensor(math.log(p)), atol=1e-4)


each_generate = pytest.mark.parametrize("generate", [generate_by_turns, generate_in_slots])


@each_generate
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("defaults", [{}, HUB_DEFAULTS], ids=["plain", "hub defaults"])
def test_tokens_come_from_the_full_distribution_despite_checkpoint_defaults(
    dice, toy_tokenizer, temperature, defaults, generate
):
    policy = copy.deepcopy(dice)
    policy.language_model.generation_config = checkpoint_defaults = GenerationConfig(**defaults)
    # p^(1/τ), normalised: at τ = 0.5 (0.16, 0.09, 0.0225, 0.01, 0.0025) / 0.285
    powers = [p ** (1 / temperature) for p in MASS]
    expected = [power / sum(powers) for power in powers]
    sampled = sample_dice(policy, toy_tokenizer, temperature=temperature, generate=generate)
    check_shares(sampled, expected, expected)
    assert policy.language_model.generation_config is checkpoint_defaults


@each_generate
def test_top_p_truncates_sampling_but_not_the_recorded_log_probs(dice, toy_tokenizer, generate):
    # 0.4 < 0.5 ≤ 0.4 + 0.3: two tokens remain, drawn 4 : 3, and recorded with ln 0.4 and ln 0.3
    sampled = sample_dice(dice, toy_tokenizer, top_p=0.5, generate=generate)
    check_shares(sampled, [4 / 7, 3 / 7, 0, 0, 0], MASS)


def test_unlikely_tokens_are_sampled_as_often_as_they_should_be(dice, toy_tokenizer):
    # The logits of 100 tokens fall evenly from 1 to 0, so the lower 50 tokens have (e^0.5 − 1) /
    # (e − 1) = 0.378 of the probability. generate's own default, top_k = 50, never samples them.
    rest = dict.fromkeys([*range(10), *range(110, len(toy_tokenizer))], -100.0)
    policy = biased(dice, {10 + i: 1 - i / 99 for i in range(100)} | rest)
    ids, _ = sample_dice(policy, toy_tokenizer)
    assert (ids >= 60).float().mean().item() == pytest.approx(0.378, abs=0.04)


# ------------------------------------------------------------ trajectories parsed from transcripts


def written(text, protocol="ur2"):
    return trajectory_from_text(QA, text, protocol)


def searched(query, text, protocol=UR2):
    return f"{protocol.query_tags[0]} {query} {protocol.query_tags[1]}{block(text, protocol)}"


def queries_and_texts(trajectory):
    return [(search.query, search.text) for search in trajectory.searches]


def test_only_the_block_directly_after_a_query_is_the_environments():
    t = written(searched("Ana Bell", "true") + block("invented") + ANSWER)
    assert queries_and_texts(t) == [("Ana Bell", "true")] and "invented" in t.model_text


def test_what_a_rollout_wrote_is_parsed_into_the_same_searches_and_answer(bpe):
    script = [ASK, f"then {BEGIN}Kelmouth{END}\n\n", ANSWER]
    t, _ = play_one(bpe, script, search=fixed_search(*DOCUMENTS))
    parsed = written(t.text)
    assert queries_and_texts(parsed) == queries_and_texts(t) and parsed.answer == "Norland"
    assert (parsed.text, writers(parsed)) == (t.text, writers(t))


def test_evidence_is_the_last_non_empty_box_that_the_model_wrote():
    box = "<original_evidence>{}</original_evidence>"
    search = searched("q", box.format(" page "), PROTOCOLS["r_search"])
    boxes = box.format(" one ") + box.format("two") + box.format(" ")
    assert written(search + boxes, "r_search").evidence == "two"
    assert written(search + "<answer> x </answer>", "r_search").evidence is None
    assert written(boxes, "ur2").evidence is None


def test_a_shown_trajectory_marks_what_the_environment_wrote(bpe):
    t, _ = play_one(bpe, [ASK, ANSWER])
    shown = show(t, {"answer": 1.0, "format": -0.25})
    assert "⟦<|begin_of_documents|>\n| (1) about Ana Bell\n| <|end_of_documents|>⟧" in shown
    assert "[1 searches; answer 'Norland'; ended by eos]" in shown and "reward +0.75" in shown


@pytest.mark.parametrize(
    "text, cut", [("Kelmouth " * 99, True), ("", True), ("notes " * 99, False)]
)
def test_document_tokens_cuts_raw_documents_but_no_notes(bpe, text, cut):
    """UR² C.4: a summariser's notes have up to 2,048 tokens, for math 8,192."""
    result = SearchResult([Document("d", "", "Kelmouth " * 99)], text)
    t, _ = play_one(bpe, [ASK, ANSWER], search=fixed_search(result), document_tokens=20)
    assert t.searches[0].cut == cut and (len(masked(t, 0)) > 99) != cut
    sampling = {"other": [0.3, 0.5, 30]}  # notes have a limit too: what the summariser may write
    options = {"document_tokens": 20, "summary_sampling": sampling}
    t, _ = play_one(bpe, [ASK, ANSWER], search=fixed_search(result), **options)
    assert t.searches[0].cut


def test_the_notice_after_a_fallback_is_for_training_only(bpe):
    """UR² C.6. The summariser is told of an evaluation within training: it is held out."""
    seen = []

    def search(requests):
        seen.extend(requests)
        return [SearchResult(text="None", fallback=True)]

    for held_out, training in ((False, True), (True, True), (False, False)):
        environment = Environment(bpe, UR2, search, Settings(max_context=4096))
        environment.held_out, environment.training = held_out, training
        row = Trajectory(QA, UR2, [1])
        environment.execute([(row, "q")])
        assert seen[-1].held_out == held_out
        noticed = training and not held_out
        assert writers(row) == ["documents", "notice"][: 1 + noticed]
