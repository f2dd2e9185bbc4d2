"""Tests the tiny model: its tokenizer, its initial attention heads, the traces of every protocol,
and the reader of evidence.
"""

import re
from collections import Counter
from dataclasses import replace
from itertools import chain, compress, pairwise

import pytest
import torch

from data import Question, SearchRequest
from other_models.llm import prompt_ids
from other_models.reader import INSTRUCTION, reader_text
from papers import PROTOCOLS, paper_of
from policy import Policy
from prompts import build_prompt
from retriever import BM25, make_search
from rewards import arena, r1_searcher_stage1, r_search, ur2_stage1, when_to_search_stage1
from rollout import encode
from summarizer import extract
from trajectory import trajectory_from_text
from world import toy
from world.toy import TraceWriter, encode_traces, make_model, make_tokenizer, word_pieces
from world.world import REFERENCES, RELATIONS, SUMS, World

ALL = ("ur2", "r1_searcher", "r_search", "when_to_search", "arena")


@pytest.fixture(scope="module")
def world():
    return World(0)


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


def test_a_new_name_is_two_tokens_that_also_occur_in_training_names(world, toy_tokenizer):
    trained, unseen = (
        toy_tokenizer([f" {name}" for name in world.entities[split]["city"]])["input_ids"]
        for split in ("train", "test")
    )
    for ids in unseen:
        assert len(ids) == 2 and {*ids} <= {*chain(*trained)}


@pytest.mark.parametrize("name", ALL)
def test_tags_and_notices_are_one_token_each(name):
    p = PROTOCOLS[name]
    for text in (*p.tags, p.fallback_notice, *p.rejection_notices):
        assert len(encode(make_tokenizer(p), text)) == 1


def test_a_tokenizer_has_only_the_tags_of_its_own_protocol():
    ids = make_tokenizer(PROTOCOLS["ur2"]).get_vocab()
    assert "<search>" not in ids and len(make_tokenizer()) == len(word_pieces())
    assert "<may_search>" not in make_tokenizer(PROTOCOLS["arena"]).get_vocab()
    renamed = PROTOCOLS["ur2_search"]  # this ablation renames the tags: the token ids are the same
    same_ids = [ids[tag] for tag in PROTOCOLS["ur2"].tags]
    assert make_tokenizer(renamed).convert_tokens_to_ids(renamed.tags) == same_ids


@pytest.mark.parametrize("name", ALL)
def test_one_token_at_the_end_of_the_prompt_says_whether_searching_is_allowed(name):
    protocol = PROTOCOLS[name]
    tokenizer = make_tokenizer(protocol)
    question = World(0, layout="facts").questions("test", "one_hop", 1)[0]
    searching = build_prompt(protocol, question, tokenizer)
    direct = build_prompt(protocol, replace(question, may_search=False), tokenizer)
    # An instruction of --prompt_file changes nothing here.
    own = build_prompt(replace(protocol, instruction="mine"), question, tokenizer)
    position = -2 if protocol.prompt_suffix else -1
    ends = [tokenizer.convert_ids_to_tokens(ids[position]) for ids in (searching, direct)]
    assert ends == (["<may_search>", "<direct>"] if protocol.query_tags else [" :", " :"])
    assert own == searching and searching[:position] == direct[:position]


def test_a_number_in_a_citation_is_the_same_token_at_every_position(toy_tokenizer):
    first, second = (encode(toy_tokenizer, text) for text in ("[4]", "[1, 4]"))
    assert toy_tokenizer.decode(second) == "[1, 4]" and len(second) == 5  # [ 1 , 4 ]
    assert first[1] == second[3]


# ---------------------------------------------------------------------------------------- the model


def test_the_model_has_about_half_a_million_parameters():
    # A layer has attention 4 · 128² with 3 biases of 128, an MLP 3 · 128 · 384, and two norms; the
    # embeddings are tied.
    layer = 4 * 128**2 + 3 * 128 + 3 * 128 * 384 + 2 * 128
    assert sum(p.numel() for p in make_model(500).parameters()) == 500 * 128 + 2 * layer + 128


def test_the_first_heads_initially_attend_one_and_two_tokens_back():
    model = make_model(500, seed=1)
    model.set_attn_implementation("eager")
    ids = torch.randint(3, 500, (1, 40))
    with torch.no_grad():
        attention = model(input_ids=ids, output_attentions=True).attentions[0][0]  # [heads, 40, 40]
    for head, offset in enumerate((1, 1, 2, 2)):  # the weight on the token `offset` positions back
        assert attention[head].diagonal(-offset)[5:].min() > 0.9
    assert attention[4].diagonal(-1)[5:].mean() < 0.3  # a head with the usual random weights


# --------------------------------------------------------------------------------------- the traces


@pytest.mark.parametrize("name", ALL)
def test_a_trace_without_flaws_earns_the_full_format_reward_of_its_paper(name):
    for question, pieces in traces_of(30, name, kinds=LOOKUPS, **FLAWLESS):
        text = "".join(text for text, _ in pieces)
        t = trajectory_from_text(question, text, name)
        if name == "ur2":
            assert ur2_stage1(t)["format"] == 1.0
        elif name == "r1_searcher":
            assert r1_searcher_stage1(t) == {"retrieval": 0.5, "format": 0.5}
        elif name == "r_search":
            assert r_search(t)["format"] == 0.4  # 0.2 for the evidence, 0.2 for the answer
        elif name == "when_to_search":
            reward = when_to_search_stage1(t, correct=True)
            assert reward["format"] == 1.0
            assert len(t.searches) > 1 or reward["retrieval"] == 0.0
        else:  # the analysis names the cited relations
            words = pieces[0][0].split()
            references = enumerate(question.references, 1)
            gold = tuple(i for i, document in references if document.text.split()[0] in words)
            with_support = replace(t.question, supporting=gold, answers=[t.answer])
            full_reward = {"format": 1, "answer": 1, "relevance": 1, "bonus": 10}
            assert arena(replace(t, question=with_support)) == full_reward


def test_in_most_search_traces_of_lookups_the_choice_to_search_has_no_loss():
    traces = traces_of(2000, "ur2", practice=0.0, direct=0.0, kinds={"one_hop": 1.0})
    first = [pieces[0] for _, pieces in traces]
    searched = [kind for text, kind in first if "<|begin_of_query|>" in text]
    # 80 % of one-hop traces search (guess_at_once is 0.2); in 96 % of them the choice has no loss.
    assert len(searched) / 2000 == near(0.8, 2000)
    assert searched.count("choice") / len(searched) == near(0.96, len(searched))


def test_when_to_search_has_the_same_thought_before_a_search_and_before_an_answer():
    kinds = {"arithmetic": 0.5, "known": 0.5}
    plain = {"practice": 0.0, "direct": 0.0, "needless_search": 0.5}
    thoughts = {True: set(), False: set()}
    for question, pieces in traces_of(300, "when_to_search", kinds=kinds, **plain):
        kind = "arithmetic" if "+" in question.question else "known"
        thoughts[any("<search>" in text for text, _ in pieces)].add((kind, pieces[0][0]))
    # " how many", " birthplace", " employer"
    assert thoughts[True] == thoughts[False] and len(thoughts[True]) == 3


def test_facts_change_from_trace_to_trace_except_those_of_known_people(world):
    writer = writer_of("ur2")
    assert len({tuple(writer.tasks.facts("person").items()) for _ in range(20)}) > 15
    answers = {q.question: q.answers[0] for q in world.questions("train", "known")}
    for question, pieces in traces_of(50, "ur2", practice=0.0, kinds={"known": 1.0}):
        assert f"{{ {answers[question.question]}}}" in pieces[-1][0]


@pytest.mark.parametrize("name", ALL)
def test_a_trace_with_the_token_for_a_direct_answer_never_searches(world, name):
    traces = traces_of(2000, name, practice=0.0)
    direct = [(q.question, pieces) for q, pieces in traces if not q.may_search]
    assert len(direct) / 2000 == near(0.2 if PROTOCOLS[name].query_tags else 0.0, 2000)
    right = {q.question: q.answers[0] for q in world.questions("train", "known")}
    right |= {f"what is {a} + {b} ?": str(a + b) for a, b in SUMS}
    for question, pieces in direct:
        learned = "".join(text for text, kind in pieces if kind != "given")
        assert PROTOCOLS[name].query_tags[0] not in learned
        assert question not in right or f" {right[question]}" in pieces[-1][0]


def test_a_trace_with_a_spoiled_query_shows_the_environment_s_reply(world):
    search = make_search(BM25(world.documents, title_boost=4), extract, 1)
    cases = Counter()
    protocol = PROTOCOLS["ur2"]
    for question, pieces in traces_of(900, "ur2", practice=0.0, bad_query=0.5):
        for (text, _), (inserted, kind) in pairwise(pieces):
            if kind == "given" and f"\n{protocol.empty_text}\n" in inserted:
                query = text.partition(protocol.query_tags[0])[2].partition("<|end")[0].strip()
                if query.partition(" of ")[2] in world.facts:  # by chance a real name
                    continue
                (result,) = search([SearchRequest(question, query)])
                assert result.text == "None"
                assert inserted.endswith(protocol.fallback_notice) == result.fallback
                cases[result.fallback, "+" in query] += 1
    # The cases: a sum, a single word, and an unknown name, which is not a faulty query.
    assert len(cases) == 3 and min(cases.values()) > 20


def test_citations_are_right_with_the_probability_in_the_options():
    writer = writer_of("arena", practice=0.0)
    for numbers in ([2], [1, 4]):
        draws = [writer.cited(numbers) for _ in range(2000)]
        assert draws.count(numbers) / 2000 == near(0.35, 2000)  # the option right_citation
        assert all(draw == sorted(set(draw)) for draw in draws)
        assert set().union(*draws) == set(range(1, REFERENCES + 1))


def test_the_right_queries_find_the_right_passages_and_arithmetic_falls_back(world):
    search = make_search(BM25(world.documents, title_boost=4), extract, 1)
    question = world.questions("test", "one_hop")[0]
    name = question.references[0].title
    relation = next(r for r in RELATIONS if r in question.references[0].text)
    queries = (f"{relation} of {name}", "3 + 4", f"{relation} of", f"{relation} of alma vogel")
    lookup, *faults, unknown_name = search([SearchRequest(question, q) for q in queries])
    assert lookup.text == question.references[0].text and not lookup.fallback
    assert all(fault.fallback for fault in faults)
    assert "alma vogel" not in world.facts and (unknown_name.text, unknown_name.fallback) == (
        "None",
        False,
    )


def test_with_one_passage_per_fact_the_first_two_results_include_the_right_fact():
    world = World(0, layout="facts")
    retriever = BM25(world.documents, title_boost=4)
    for question in world.questions("test", "one_hop", 40):
        gold = question.references[question.supporting[0] - 1]
        relation = gold.text.split()[0]
        name = gold.text.partition(" of ")[2].removesuffix(" .")
        assert gold in retriever.search([f"{relation} of {name}"], 2)[0]


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
    plain = {"practice": 0.0, "direct": 0.0, "bad_query": 0.0}
    protocol = PROTOCOLS["ur2"]
    query_tag = protocol.query_tags[0]
    sums = {"kinds": {"arithmetic": 1.0}, "stray": 1.0, "raw": 0.0}
    counts = Counter()
    for _, pieces in traces_of(1000, "ur2", "weak", **sums, **plain):
        assert not any(protocol.fallback_notice in text for text, _ in pieces)
        choices = [kind for text, kind in pieces if query_tag in text]
        assert set(choices[1:]) <= {"choice"}  # nothing after the first search is taught
        counts[len(choices)] += 1
    # No search 0.4; one 0.6 · 0.7; two 0.6 · 0.3 · 0.7; at most four.
    assert counts[0] / 1000 == near(0.4, 1000) and counts[1] / 1000 == near(0.42, 1000)
    assert counts[2] / 1000 == near(0.126, 1000) and max(counts) == 4

    lookups = {"kinds": {"one_hop": 1.0}, "guess_at_once": (0.0, 0.0)}
    traces = [pieces for _, pieces in traces_of(1000, "ur2", "weak", **lookups, **plain)]
    assert sum("\n(2) " in pieces[1][0] for pieces in traces) / 1000 == near(0.3, 1000)
    ends = [pieces[-1][0] for pieces in traces]
    # Each of the two kinds of sloppy end has half of 0.25.
    assert sum(text.count("boxed") == 2 for text in ends) / 1000 == near(0.125, 1000)
    assert sum(protocol.documents_tags[0] in text for text in ends) / 1000 == near(0.125, 1000)
    assert {text.count("<eos>") for text in ends} == {1}


def test_a_verbose_warm_up_repeats_the_relation_in_most_answers():
    traces = traces_of(600, "r1_searcher", "verbose", kinds={"one_hop": 1.0}, practice=0.0)
    boxes = [pieces[-1][0].rpartition("<answer>")[2] for _, pieces in traces]
    wordy = sum(any(relation in box for relation in RELATIONS) for box in boxes)
    assert wordy / 600 == near(0.9, 600)


# --------------------------------------------------------------------------------------- the reader


def test_the_reader_is_trained_on_the_same_prompt_that_it_later_gets():
    tokenizer = make_tokenizer()  # it has no tags and no tokens that allow searching
    example = toy.reader_example(toy.Tasks(World(0, layout="facts"), 5), tokenizer)
    prompt = [i for i, mask in zip(example.ids, example.mask, strict=True) if not mask]
    text = tokenizer.decode(prompt).strip().removesuffix("answer :").strip()
    evidence, question = text.split("\n")
    text = reader_text(Question("", question.strip(), []), evidence.strip())
    assert prompt_ids(tokenizer, (INSTRUCTION, text)) == prompt


def test_the_reader_chooses_among_facts_and_says_none_if_the_fact_is_not_stated():
    tokenizer = make_tokenizer()
    tasks = toy.Tasks(World(0, layout="facts"), 5)
    seen = Counter()
    for example in (toy.reader_example(tasks, tokenizer) for _ in range(1000)):
        text = tokenizer.decode(example.ids)
        if "where was" not in text or " born ?" not in text:
            continue
        facts = dict(re.findall(r"(\w+) ([^.]+?) of [^.]+ \.", text))
        answer = text.partition("answer : ")[2].removesuffix("<eos>")
        assert answer == facts.get("birthplace", "none")
        seen[len(facts), answer == "none"] += 1
    assert min(seen[1, False], seen[2, False], seen[1, True]) > 3


def test_the_reader_has_another_architecture_and_size():
    reader, _ = toy.train_reader(0, replace(toy.READER, steps=1))
    policy = make_model(500)
    assert reader.config.model_type == "llama" != policy.config.model_type
    assert reader.config.hidden_size != policy.config.hidden_size
