"""Tests the tiny model: its tokenizer, its initial attention heads, the traces of every protocol,
and the reader of evidence.
"""

import re
from collections import Counter
from dataclasses import replace
from itertools import compress

import pytest
import torch

from data import Question, SearchRequest
from papers import PROTOCOLS, paper_of
from policy import Policy
from prompts import build_prompt
from retriever import BM25, make_search
from rewards import arena, good_format
from summarizer import extract
from trajectory import trajectory_from_text
from world import toy
from world.toy import TraceWriter, encode_traces, make_model, make_tokenizer, word_pieces
from world.world import REFERENCES, SUMS, World

ALL = ("ur2", "r1_searcher", "r_search", "when_to_search", "arena")


FLAWLESS = {
    "practice": 0.0,
    "direct": 0.0,
    "guess_at_once": (0.0, 0.0),
    "bad_query": 0.0,
    "stop_after_first_hop": 0.0,
    "ignore_document": 0.0,
    "no_evidence": 0.0,
    "wrong_evidence": 0.0,
    "right_citation": 1.0,
    "no_analysis": 0.0,
}
LOOKUPS = {"one_hop": 0.5, "two_hop": 0.5}


def writer_of(name: str, warm_up: str = "", **changes) -> TraceWriter:
    return TraceWriter(PROTOCOLS[name], replace(paper_of(name).warmed_up(warm_up), **changes), 0)


def traces_of(count: int, name: str, warm_up: str = "", **changes) -> list:
    writer = writer_of(name, warm_up, **changes)
    return [writer.write() for _ in range(count)]


def near(share: float, count: int):
    """Returns a share that holds within four standard errors of `count` draws."""
    return pytest.approx(share, abs=4 * (share * (1 - share) / count) ** 0.5)


# ------------------------------------------------------------------------------------ the tokenizer


def test_a_tokenizer_has_only_the_tags_of_its_own_protocol():
    ids = make_tokenizer(PROTOCOLS["ur2"]).get_vocab()
    assert "<search>" not in ids and len(make_tokenizer()) == len(word_pieces())
    assert "<may_search>" not in make_tokenizer(PROTOCOLS["arena"]).get_vocab()


@pytest.mark.parametrize("name", ALL)
def test_one_token_at_the_end_of_the_prompt_says_whether_searching_is_allowed(name):
    protocol = PROTOCOLS[name]
    tokenizer = make_tokenizer(protocol)
    question = World(0, layout="facts").questions("test", "one_hop", 1)[0]
    searching = build_prompt(protocol, question, tokenizer)
    direct = build_prompt(protocol, replace(question, may_search=False), tokenizer)
    position = -2 if protocol.prompt_suffix else -1
    ends = [tokenizer.convert_ids_to_tokens(ids[position]) for ids in (searching, direct)]
    assert ends == (["<may_search>", "<direct>"] if protocol.query_tags else [" :", " :"])
    assert searching[:position] == direct[:position]


# ---------------------------------------------------------------------------------------- the model


def test_the_first_heads_initially_attend_one_and_two_tokens_back():
    model = make_model(500, seed=1)
    model.set_attn_implementation("eager")
    ids = torch.randint(3, 500, (1, 40))
    with torch.no_grad():
        attention = model(input_ids=ids, output_attentions=True).attentions[0][0]  # [heads, 40, 40]
    for head, offset in enumerate((1, 1, 2, 2)):  # the weight on the token `offset` positions back
        assert attention[head].diagonal(-offset)[5:].min() > 0.9
    assert attention[4].diagonal(-1)[5:].mean() < 0.3  # a head with the usual random weights


def test_in_most_search_traces_of_lookups_the_choice_to_search_has_no_loss():
    traces = traces_of(2000, "ur2", practice=0.0, direct=0.0, kinds={"one_hop": 1.0})
    first = [pieces[1] for _, pieces in traces]  # after the opening, which is empty
    taught = [learned for text, learned in first if text == "<|begin_of_query|>"]
    # 80 % of one-hop traces search (guess_at_once is 0.2); in 96 % of them the choice has no loss.
    assert len(taught) / 2000 == near(0.8, 2000)
    assert taught.count(False) / len(taught) == near(0.96, len(taught))


# --------------------------------------------------------------------------------------- the traces


@pytest.mark.parametrize("name", [*ALL, "arena_naive"])
def test_a_trace_without_flaws_has_the_format_of_its_paper(name):
    for question, pieces in traces_of(30, name, kinds=LOOKUPS, **FLAWLESS):
        t = trajectory_from_text(question, "".join(text for text, _ in pieces), name)
        assert good_format(t) and bool(t.searches) == bool(t.protocol.query_tags)
        assert len(question.references) == (0 if t.searches else REFERENCES)
        if name == "arena":  # the analysis names the cited relations
            words = pieces[0][0].split()
            references = enumerate(question.references, 1)
            gold = tuple(i for i, document in references if document.text.split()[0] in words)
            assert arena(replace(t, question=replace(question, supporting=gold)))["relevance"] == 1


def test_when_to_search_has_the_same_thought_before_a_search_and_before_an_answer():
    kinds = {"arithmetic": 0.5, "known": 0.5}
    plain = {"practice": 0.0, "direct": 0.0, "needless_search": 0.5}
    thoughts = {True: set(), False: set()}
    for question, pieces in traces_of(300, "when_to_search", kinds=kinds, **plain):
        kind = "arithmetic" if "+" in question.question else "known"
        thoughts[any("<search>" in text for text, _ in pieces)].add((kind, pieces[0][0]))
    # " how many", " birthplace", " employer"
    assert thoughts[True] == thoughts[False] and len(thoughts[True]) == 3


@pytest.mark.parametrize("name", ALL)
def test_a_trace_with_the_token_for_a_direct_answer_never_searches(name):
    traces = traces_of(300, name, practice=0.0)
    direct = [pieces for question, pieces in traces if not question.may_search]
    assert bool(direct) == bool(PROTOCOLS[name].query_tags)
    learned = [text for pieces in direct for text, learned in pieces if learned]
    assert not direct or PROTOCOLS[name].query_tags[0] not in "".join(learned)


def test_known_people_and_sums_are_answered_correctly_without_a_search():
    right = {q.question: q.answers[0] for q in World(0).questions("train", "known")}
    right |= {f"what is {a} + {b} ?": str(a + b) for a, b in SUMS}
    kinds = {"known": 0.5, "arithmetic": 0.5}
    for question, pieces in traces_of(100, "ur2", practice=0.0, direct=1.0, kinds=kinds):
        assert f" {right[question.question]}" in pieces[-1][0]


def test_a_trace_with_a_spoiled_query_shows_the_environment_s_reply():
    search = make_search(BM25(World(0).documents, title_boost=4), extract, 1)
    writer, question = writer_of("ur2"), Question("", "?", [])
    # A sum, a single word, and a name that the world does not have, which is not a faulty query.
    for query, fallback in (("3 + 4", True), ("birthplace", True), ("mayor of oslo", False)):
        *_, (inserted, _) = writer.search(query, None)
        (result,) = search([SearchRequest(question, query)])
        assert (result.text, result.fallback) == ("None", fallback)
        assert "\nNone\n" in inserted
        assert inserted.endswith(PROTOCOLS["ur2"].fallback_notice) == fallback


def test_citations_are_right_with_the_probability_in_the_options():
    writer = writer_of("arena", practice=0.0)
    for numbers in ([2], [1, 4]):
        draws = [writer.cited(numbers) for _ in range(2000)]
        assert draws.count(numbers) / 2000 == near(0.35, 2000)  # the option right_citation
        assert all(draw == sorted(set(draw)) for draw in draws)
        assert set().union(*draws) == set(range(1, REFERENCES + 1))


def test_a_short_warm_up_lowers_the_loss_and_is_reproducible(toy_tokenizer):
    tiny = replace(paper_of("ur2").world, steps=6, batch_size=16, warmup_steps=2)
    policies = [Policy(make_model(len(toy_tokenizer))) for _ in range(2)]
    one, other = (toy.warm_up(p, toy_tokenizer, PROTOCOLS["ur2"], tiny) for p in policies)
    assert one == other and one[-1] < one[0]


# ------------------------------------------------------------------------------ the weaker warm-ups
WARM_UPS = [(name, warm_up) for name in ALL for warm_up in ("", *paper_of(name).warm_ups)]


@pytest.mark.parametrize("name, warm_up", WARM_UPS)
def test_traces_have_known_tokens_fit_the_context_and_have_no_loss_on_documents(
    toy_tokenizer, name, warm_up
):
    protocol = PROTOCOLS[name]
    tags = [*(protocol.documents_tags or ()), protocol.fallback_notice]
    inserted = {*toy_tokenizer.convert_tokens_to_ids(tags)}
    traces = traces_of(300, name, warm_up)
    examples = encode_traces(traces, protocol, toy_tokenizer)
    for example, (question, _) in zip(examples, traces, strict=True):
        prompt = build_prompt(protocol, question, toy_tokenizer)  # as in a rollout
        assert example.ids[: len(prompt)] == prompt
        assert toy_tokenizer.unk_token_id not in example.ids
        assert len(example.ids) < paper_of(name).warmed_up(warm_up).context
        learned = {*compress(example.ids, example.mask)}
        assert learned and (warm_up or not learned & inserted)  # a weak model may write such tags


def test_a_weak_warm_up_has_bad_habits_with_the_probabilities_in_its_options():
    protocol, plain = PROTOCOLS["ur2"], {"practice": 0.0, "direct": 0.0, "bad_query": 0.0}
    sums = plain | {"kinds": {"arithmetic": 1.0}, "stray": 1.0, "raw": 0.0}
    counts = Counter()
    for _, pieces in traces_of(1000, "ur2", "weak", **sums):
        choices = [learned for text, learned in pieces if protocol.query_tags[0] in text]
        assert not any(choices[1:])  # no choice after the first search is taught
        counts[len(choices)] += 1
    # No search 0.4; one 0.6 · 0.7; two 0.6 · 0.3 · 0.7; at most four.
    for searches, share in enumerate((0.4, 0.42, 0.126)):
        assert counts[searches] / 1000 == near(share, 1000)
    assert max(counts) == 4

    lookups = plain | {"kinds": {"one_hop": 1.0}, "guess_at_once": (0.0, 0.0)}
    traces = [pieces for _, pieces in traces_of(1000, "ur2", "weak", **lookups)]
    ends = [pieces[-1][0] for pieces in traces]
    # Each of the two kinds of sloppy end has half of 0.25.
    for seen, share in (
        (["\n(2) " in pieces[3][0] for pieces in traces], 0.3),
        ([text.count("boxed") == 2 for text in ends], 0.125),
        ([protocol.documents_tags[0] in text for text in ends], 0.125),
    ):
        assert sum(seen) / 1000 == near(share, 1000)


# --------------------------------------------------------------------------------------- the reader


def test_the_reader_chooses_among_facts_and_says_none_if_the_fact_is_not_stated():
    tokenizer, tasks, seen = make_tokenizer(), toy.Tasks(World(0, layout="facts"), 5), Counter()
    for example in (toy.reader_example(tasks, tokenizer) for _ in range(1000)):
        text = tokenizer.decode(example.ids)
        if "where was" not in text or " born ?" not in text:
            continue
        facts = dict(re.findall(r"(\w+) ([^.]+?) of [^.]+ \.", text))
        answer = text.partition("answer : ")[2].removesuffix("<eos>")
        assert answer == facts.get("birthplace", "none")
        seen[len(facts), answer == "none"] += 1
    assert min(seen[1, False], seen[2, False], seen[1, True]) > 3
