"""Tests coldstart.py: traces by hand for each protocol, what is dropped, the command."""

import re
from dataclasses import replace

import pytest
import torch
from conftest import message, model_of, small

import coldstart
from coldstart import (
    GUESS,
    NEXT,
    ColdStart,
    draw_traces,
    evenly,
    hops_of,
    script,
    visible,
    write_traces,
)
from data import Document, Hop, Question
from flags import saved_settings
from formats.records import write_records
from papers import PAPERS, PROTOCOLS
from policy import Policy, save_policy
from retriever import BM25, make_search
from rewards import good_format
from rollout import Environment, encode
from settings import Settings

DOCUMENTS = [
    Document("a", "Storm", "Storm is a film. It was directed by Ana Bell in 1934."),
    Document("b", "Ana Bell", "Ana Bell was a painter. She died in Kelmouth, Norland."),
    Document("c", "Ivo Marr", "Ivo Marr founded Tidewerk."),
    *(Document(str(n), f"River {n}", f"River {n} is a short river.") for n in range(5)),
]
HOPS = (Hop("director of Storm", "Ana Bell"), Hop("place of death of Ana Bell", "Kelmouth"))
TWO = Question("2", "Where did the director of Storm die?", ["Kelmouth"], hops=HOPS)
OWN = Question("o", "Who founded Tidewerk?", ["Marr", "Ivo Marr"])
CITED = Question("c", "Who?", ["Norland"], references=tuple(DOCUMENTS[:3]), supporting=(2,))
SEARCHING = [name for paper in PAPERS.values() for name in paper.protocols]
SEARCHING = sorted({name for name in SEARCHING if PROTOCOLS[name].query_tags})


def environment(tokenizer, protocol="ur2", **named):
    settings = Settings(**{"max_context": 4096, "document_tokens": 200} | named)
    search = make_search(BM25(DOCUMENTS, title_boost=4), k=1)
    return Environment(tokenizer, PROTOCOLS[protocol], search, settings)


class First:
    """Draws the first wording of each thought."""

    def choice(self, wordings):
        return wordings[0]


def trace_of(question, tokenizer, protocol="ur2", guess="", **named):
    place = environment(tokenizer, protocol, **named)
    kept, dropped = write_traces([(question, script(question, place, First(), guess))], place)
    return kept[0] if kept else dropped[question.id]


def spoken(row) -> list[str]:
    return [segment.text for segment in row.segments if segment.writer == "model"]


HEAT = "director of Storm"
DEATH = "place of death of Ana Bell"
LEARNED = f"The {HEAT} is Ana Bell. {NEXT[0]}"
ENDED = f"The {DEATH} is Kelmouth."


@pytest.mark.parametrize(
    "protocol, turns",
    [
        (
            "ur2",
            [
                f"I need to look this up. <|begin_of_query|> {HEAT} <|end_of_query|>",
                f"{LEARNED} <|begin_of_query|> {DEATH} <|end_of_query|>",
                f"{ENDED}\n\\boxed{{ Kelmouth }}<|im_end|>",
            ],
        ),
        (
            "r_search",
            [
                f"I need to look this up. <search> {HEAT} </search>",
                f"{LEARNED} <search> {DEATH} </search>",
                f"{ENDED}\n<original_evidence> It was directed by Ana Bell in 1934. (Title: "
                '"Ana Bell") Ana Bell was a painter. She died in Kelmouth, Norland.'
                " </original_evidence>\n"
                "<answer> Kelmouth </answer>",
            ],
        ),
        (
            "search_r1",
            [
                f"<think> I need to look this up. </think>\n<search> {HEAT} </search>",
                f"<think> {LEARNED} </think>\n<search> {DEATH} </search>",
                f"<think> {ENDED} </think>\n<answer> Kelmouth </answer>",
            ],
        ),
        (
            "when_to_search",
            [
                f"<think> I need to look this up. </think>\n<search> {HEAT} </search>",
                f"<reflect> {LEARNED} </reflect>\n<search> {DEATH} </search>",
                f"<reflect> {ENDED} </reflect>\n<answer> Kelmouth </answer>",
            ],
        ),
    ],
)
def test_a_trace_of_two_hops_by_hand(bpe, protocol, turns):
    row = trace_of(TWO, bpe, protocol)
    assert spoken(row) == turns
    # The documents are what the retriever found, and only they have mask 0.
    assert [search.documents for search in row.searches] == [[DOCUMENTS[0]], [DOCUMENTS[1]]]
    sampled = sum(len(encode(bpe, text)) for text in spoken(row))
    assert sum(row.response_mask) == sampled < len(row.response_mask)


@pytest.mark.parametrize("protocol", SEARCHING)
@pytest.mark.parametrize("question", [TWO, OWN, replace(TWO, may_search=False)])
@pytest.mark.parametrize("guess", ["", "Varen"])
def test_every_trace_passes_the_format_check_of_its_paper(bpe, protocol, question, guess):
    row = trace_of(question, bpe, protocol, guess)
    assert good_format(row) and row.answer in (guess, *question.answers)
    assert len(row.searches) == len(hops_of(question)) * (not guess and question.may_search)


@pytest.mark.parametrize("protocol", ["arena", "arena_thinking"])
def test_arenas_trace_cites_the_gold_references(bpe, protocol):
    row = trace_of(CITED, bpe, protocol)
    assert row.text.startswith("<relevance>[2]</relevance>") and row.answer == "Norland"
    assert "names no gold reference" in trace_of(replace(CITED, supporting=()), bpe, protocol)
    assert "do not show the answer" in trace_of(replace(CITED, supporting=(1,)), bpe, protocol)
    assert trace_of(replace(CITED, answers=["yes"]), bpe, protocol).answer == "yes"
    # Of each gold reference the sentence with the fact of its hop is quoted.
    two = replace(TWO, references=CITED.references, supporting=(1, 2))
    text = trace_of(two, bpe, protocol).text
    assert "It was directed by Ana Bell in 1934. (2)" in text and "Norland. So the answer" in text
    unshown = replace(two, hops=(Hop("director of Storm", "Zed"), HOPS[1]))
    assert "do not show the answer" in trace_of(unshown, bpe, protocol)


def test_a_question_without_hops_searches_its_key_words_or_its_gold_titles():
    assert hops_of(OWN) == (Hop("founded Tidewerk"),)
    titled = replace(CITED, question="Is Ivo Marr like Ana Bell?", supporting=(1, 3))
    # The title that the question names comes first.
    assert hops_of(titled) == (Hop("Ivo Marr"), Hop("Storm"))
    assert hops_of(replace(OWN, question="Who is it?")) == (Hop("Who is it?"),)  # only stop words


def test_a_question_without_hops_is_answered_with_the_alias_that_was_found(bpe):
    question = replace(OWN, answers=["Ivan Marr", "Ivo Marr"])
    row = trace_of(question, bpe)
    assert row.answer == "Ivo Marr" and row.searches[0].query == "founded Tidewerk"
    # The same with hops whose answers are not known
    unknown = replace(TWO, hops=tuple(Hop(hop.query) for hop in HOPS))
    assert len(trace_of(unknown, bpe).searches) == 2


def test_an_answer_is_visible_as_whole_words_only():
    assert visible("Born in Kelmouth, Norland.", ["Norl", "kelmouth NORLAND"]) == "kelmouth NORLAND"
    assert visible("Born in 1934.", ["193"]) == ""


@pytest.mark.parametrize(
    "question, named, reason",
    [
        (replace(TWO, hops=(HOPS[0], Hop("Ivo Marr", "1999"))), {}, "answer of a hop is not in"),
        (replace(OWN, answers=["Zed"]), {}, "no document with an answer"),
        (TWO, {"max_searches": 1}, "the limits allow no more"),
        (TWO, {"max_turn_tokens": 5}, "longer than --max_turn_tokens"),
    ],
)
def test_a_trace_that_cannot_be_kept_is_dropped_with_its_reason(bpe, question, named, reason):
    assert reason in trace_of(question, bpe, **named)


def test_a_failed_search_drops_the_trace(bpe, monkeypatch):
    monkeypatch.setattr(BM25, "search", lambda *_: 1 / 0)
    assert "a search failed" in trace_of(OWN, bpe)


def test_a_guess_and_a_sum_without_hops_are_answered_at_once(bpe):
    assert trace_of(TWO, bpe, guess="Varen").text == f"{GUESS[0]} \\boxed{{ Varen }}<|im_end|>"
    question = Question("s", "What is 3 plus 4?", ["7"], "math")
    assert trace_of(question, bpe).text == f"{GUESS[0]} \\boxed{{ 7 }}<|im_end|>"
    assert hops_of(question) == () and hops_of(replace(question, hops=HOPS)) == HOPS
    others = {*coldstart.FIRST, *coldstart.RELATION, *coldstart.FOUND, *NEXT}
    assert not others & {*GUESS}


def test_questions_are_drawn_evenly_from_their_kinds():
    kinds = [replace(OWN, id=str(n), source=kind) for n, kind in enumerate("aaab")]
    order = "".join(question.kind for question in evenly(kinds, 0))
    assert order in ("abaa", "baaa")
    order = "".join(question.kind for question in evenly(kinds, 0, {"a": 2, "b": 1}))
    assert order in ("aaba", "abaa")


def test_shares_of_hops_and_a_shortage_are_told(bpe, capsys):
    questions = [replace(q, id=f"{q.id}{n}") for q in (TWO, OWN) for n in range(6)]
    questions.append(replace(OWN, id="lost", answers=["Zed"]))
    options = ColdStart(traces=8, hops={"1": 0.75, "2": 0.25})
    rows = draw_traces(questions, environment(bpe), options, 0)
    assert sorted(len(row.searches) for row in rows) == [1] * 6 + [2, 2]
    rows = draw_traces(questions, environment(bpe), replace(options, traces=400), 0)
    total, reason = capsys.readouterr().out.splitlines()[-2:]
    assert total == "48 traces of 12 of 13 questions; --traces asks for 400"
    assert reason.startswith("1 questions gave none, because no document with")
    assert reason.endswith("(the first: lost)")
    nothing = message(draw_traces, questions[-1:], environment(bpe), options, 0)
    assert "for these reasons; is --corpus right?" in nothing


def test_the_same_seed_gives_the_same_traces(bpe):
    def texts(seed):
        rows = draw_traces([TWO, OWN], environment(bpe), ColdStart(traces=4, guesses=0.5), seed)
        return [row.text for row in rows]

    assert texts(0) == texts(0) != texts(1)


# -------------------------------------------------------------------------------------- the command


@pytest.fixture
def files(tmp_path, bpe):
    """Returns the flags of a cold start of a small model on four questions."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = small(vocab_size=len(bpe), max_position_embeddings=1024)
        policy = Policy(model_of("llama", **sizes | {"initializer_range": 0.02}))
    save_policy(policy, bpe, tmp_path / "model")
    corpus, data = tmp_path / "corpus.jsonl", tmp_path / "questions.jsonl"
    write_records(corpus, [vars(document) for document in DOCUMENTS])
    fields = {"question": TWO.question, "answers": TWO.answers, "decomposition": [*map(vars, HOPS)]}
    write_records(data, [fields | {"id": str(number)} for number in range(4)])
    flags = f"--model {tmp_path / 'model'} --data {data} --corpus {corpus}"
    return f"{flags} --document_tokens 60 --documents_per_search 1 --title_boost 4".split()


def test_a_cold_start_lowers_the_loss_and_remembers_its_recipe(files, tmp_path, capsys):
    out = str(tmp_path / "cold")
    flags = [*files, *f"--out {out} --recipe r_search --lr 2e-2 --max_turn_tokens 200".split()]
    flags += ["--output_dir", "my runs", "--fallback", "false"]
    coldstart.main(flags)
    told = capsys.readouterr().out
    first, last = map(float, re.search(r"loss (\S+) -> (\S+)", told).groups())
    assert last < first / 3
    saved = saved_settings(out)
    assert (saved.recipe, saved.protocol) == ("r_search", "r_search")
    assert saved.documents_per_search == 1 and saved.corpus == files[5]
    assert f'ask.py "..." --model {out}\n' in told and "python view.py 'my runs/rl-cold'" in told
    assert "--fallback" not in told  # train.py has no such flag
    # R-Search's reward needs a reader.
    for flag in (f"--data {files[3]}", f"--reader {files[1]}", "--stage 1", f"--model {out}"):
        assert f"{flag} --" in told
    assert "already exists" in message(coldstart.main, flags)


def test_show_prints_traces_and_trains_nothing(files, capsys):
    coldstart.main([*files, "--show", "2"])
    told = capsys.readouterr().out
    assert told.count("gold: ") == 2 and "boxed{ Kelmouth }" in told and "loss" not in told


@pytest.mark.parametrize(
    "flags, told",
    [
        ("--data x --out y", "--model is missing"),
        ("--model x --data y --out z --guesses 2", "--guesses 2.0: must be at most 1"),
        ("--model x --data y --out z", "--data needs --corpus"),
        ("--model nowhere/at/all --data y --out z --corpus c", "no such directory"),
    ],
)
def test_wrong_flags_are_refused_in_one_line(flags, told):
    assert told in message(coldstart.main, flags.split())
