"""The built-in world: what it promises about names, facts, splits, tokens and warm-up traces."""

import pytest

from data import SearchRequest
from policy import Policy
from prompts import PROTOCOLS, build_prompt
from retriever import make_retriever
from summarizer import make_search, make_summarizer
from toy import (
    CITY_HEADS,
    CITY_TAILS,
    COMPANY_HEADS,
    COMPANY_TAILS,
    COUNTRIES,
    FAMOUS,
    FIRST,
    KINDS,
    LAST,
    PRODUCTS,
    RELATIONS,
    SPLITS,
    UNIT_SPLITS,
    UNITS,
    TraceWriter,
    WarmUp,
    World,
    encode_traces,
    make_model,
    make_tokenizer,
    warm_up,
)


@pytest.fixture(scope="module")
def world():
    return World(0)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def test_the_world_has_676_passages_with_titles_of_their_own(world):
    # people 12 + 200 + 60 + 60 = 332; cities and companies half of it each, 166 and 166; units 8 + 2 + 2 = 12
    assert sum(SPLITS.values()) == 332 and sum(UNIT_SPLITS.values()) == 12
    assert len(world.documents) == 332 + 166 + 166 + 12 == 676
    assert len({d.title for d in world.documents}) == 676


def test_no_name_belongs_to_two_splits_nor_to_the_warm_up(world):
    names = [name for split in world.entities.values() for kind in split.values() for name in kind]
    assert len(names) == len(set(names))
    assert set(world.entities) == {*SPLITS, "warmup"}


def test_no_word_of_one_class_is_a_name_of_another():
    people = {f"{first} {last}" for first in FIRST for last in [*LAST, *FAMOUS]}
    cities, companies = ({h + t for h in heads for t in tails} for heads, tails in (
        (CITY_HEADS, CITY_TAILS), (COMPANY_HEADS, COMPANY_TAILS)))  # fmt: skip
    classes = [people, cities, companies, *map(set, (COUNTRIES, PRODUCTS, UNITS, FIRST, LAST, FAMOUS))]
    assert sum(map(len, classes)) == len(set().union(*classes))


def test_both_hops_of_a_held_out_question_stay_in_the_split(world):
    test_names = {name for kind in world.entities["test"].values() for name in kind}
    for question in world.questions("test", "two_hop"):
        assert len(question.references) == 2 and {d.title for d in question.references} <= test_names


def test_a_question_s_references_state_its_answer(world):
    for kind in ("one_hop", "two_hop", "known"):
        for question in world.questions("test", kind, 50):
            assert question.answers[0] in question.references[-1].text
    for question in world.questions("test", "unit"):
        n, factor = int(question.question.split()[4]), int(question.references[0].text.split()[3])
        assert question.answers == [str(n * factor)]


def test_the_same_seed_gives_the_same_world_and_another_seed_another(world):
    assert World(0).facts == world.facts and World(0).entities == world.entities
    assert World(1).entities["test"] != world.entities["test"]


def test_redrawing_the_facts_keeps_the_names_and_changes_most_answers(world):
    redrawn = World(0, fact_seed=1)
    assert redrawn.entities == world.entities
    before = {q.question: q.answers for q in world.questions("test", "one_hop")}
    after = {q.question: q.answers for q in redrawn.questions("test", "one_hop")}
    assert before.keys() == after.keys()
    # values are drawn from at least 12: at most 1 in 12 stays by chance, plus noise over 240 questions
    assert sum(before[q] == after[q] for q in before) < 0.15 * len(before)


def test_every_text_of_the_world_is_made_of_known_pieces_and_decodes_back(world, tokenizer):
    for split in ("train", "test"):
        for kind in KINDS:
            for question in world.questions(split, kind, 40):
                ids = build_prompt("ur2", question, tokenizer)
                assert tokenizer.unk_token_id not in ids
                assert tokenizer.decode(ids) == f" {question.question} answer :"
    for document in world.documents:
        assert tokenizer.unk_token_id not in tokenizer(f" {document.text}")["input_ids"]


def test_a_name_never_seen_is_at_most_two_tokens_that_other_names_share(world, tokenizer):
    trained = {i for name in world.entities["train"]["city"] for i in tokenizer(f" {name}")["input_ids"]}
    for name in world.entities["test"]["city"]:
        ids = tokenizer(f" {name}")["input_ids"]
        assert len(ids) == 2 and set(ids) <= trained


def test_tags_and_notices_are_one_token_each(tokenizer):
    protocol = PROTOCOLS["ur2"]
    for text in (*protocol.tags, protocol.fallback_notice, protocol.limit_notice, protocol.malformed_notice):
        assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) == 1


def test_the_tokenizer_survives_saving_with_the_model(tmp_path, tokenizer):
    # the family's own tokenizer class would split the same text differently: policy.load_tokenizer must not take it
    from policy import load_policy, save_policy

    save_policy(Policy(make_model(len(tokenizer))), tokenizer, tmp_path / "model")
    _, loaded = load_policy(str(tmp_path / "model"))
    text = " where was ana bell born ? answer :<|begin_of_query|> birthplace of ana bell<|end_of_query|>"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_the_model_has_about_half_a_million_parameters(tokenizer):
    # embeddings 390 · 128 (tied), two layers of attention 4 · 128² + 3 biases of 128 and MLP 3 · 128 · 384, norms
    embeddings = len(tokenizer) * 128
    layer = 4 * 128**2 + 3 * 128 + 3 * 128 * 384 + 2 * 128
    assert sum(p.numel() for p in make_model(len(tokenizer)).parameters()) == embeddings + 2 * layer + 128


@pytest.mark.parametrize("name", ["ur2", "r1_searcher"])
def test_warm_up_traces_carry_no_loss_on_what_the_environment_writes(world, tokenizer, name):
    protocol = PROTOCOLS[name]
    writer = TraceWriter(world, protocol, WarmUp(), 0)
    traces = [writer.write() for _ in range(200)]
    inserted = {tokenizer.convert_tokens_to_ids(tag) for tag in protocol.documents_tags}
    inserted.add(tokenizer.convert_tokens_to_ids(protocol.fallback_notice))
    for example in encode_traces(traces, protocol, tokenizer):
        assert tokenizer.unk_token_id not in example.ids
        assert all(not mask for i, mask in zip(example.ids, example.mask, strict=True) if i in inserted)
        assert any(example.mask)


def test_nearly_all_search_traces_of_lookups_leave_the_choice_to_search_out_of_the_loss(world):
    writer = TraceWriter(world, PROTOCOLS["ur2"], WarmUp(practice=0.0, mix=(1, 0, 0, 0, 0)), 0)
    first = [pieces[0] for _, pieces in (writer.write() for _ in range(2000))]
    searched = [kind for text, kind in first if "<|begin_of_query|>" in text]
    # 80 % of one-hop traces search (guess_at_once 0.2), 96 % of them without loss on the choice: ±4 standard errors
    assert abs(len(searched) / 2000 - 0.8) < 4 * (0.8 * 0.2 / 2000) ** 0.5
    assert abs(searched.count("choice") / len(searched) - 0.96) < 4 * (0.96 * 0.04 / len(searched)) ** 0.5


def test_facts_of_warm_up_traces_are_thrown_away_but_known_people_keep_theirs(world):
    writer = TraceWriter(world, PROTOCOLS["ur2"], WarmUp(), 0)
    assert len({tuple(writer.facts("ana bell", "person").items()) for _ in range(20)}) > 15
    writer = TraceWriter(world, PROTOCOLS["ur2"], WarmUp(practice=0.0, mix=(0, 0, 0, 0, 1)), 0)
    answers = {q.question: q.answers[0] for q in world.questions("train", "known")}
    for question, pieces in (writer.write() for _ in range(50)):
        assert f"{{ {answers[question]}}}" in pieces[-1][0]


def test_the_right_queries_find_the_right_passages_and_arithmetic_falls_back(world):
    search = make_search(make_retriever("bm25", world.documents, title_boost=4), make_summarizer("extractive"), 1)
    question = world.questions("test", "one_hop")[0]
    name = question.references[0].title
    relation = next(r for r in RELATIONS if r in question.references[0].text)
    found, fallback, nobody = search([SearchRequest(question, q) for q in (f"{relation} of {name}", "3 + 4", f"{relation} of")])
    assert found.text == question.references[0].text and not found.fallback
    assert fallback.fallback and nobody.fallback


def test_a_short_warm_up_lowers_the_loss_and_is_repeatable(world, tokenizer):
    options = WarmUp(steps=6, batch_size=16, lr_warmup=2)
    runs = [warm_up(Policy(make_model(len(tokenizer))), tokenizer, world, PROTOCOLS["ur2"], options) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0][-1] < runs[0][0]
