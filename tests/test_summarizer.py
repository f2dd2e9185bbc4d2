"""Tests summarizer.py: lookups and fallbacks, the notes of a model, its log, and make_search."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from conftest import ScriptedModel, message

from data import Document, Question, SearchRequest, SearchResult
from papers import PAPERS, PROTOCOLS
from retriever import make_search, show_all
from settings import Settings, by_task
from summarizer import (
    FALLBACK_TEXT,
    GREEDY,
    NO_FACT,
    LLMSummarizer,
    extract,
    instruction_for,
    is_lookup,
    make_summarizer,
    models_in,
)

ANA = Document("3", "ana bell", "ana bell was born in kelmouth .")
KELMOUTH = Document("4", "kelmouth", "kelmouth lies in norland .")
QUESTION = Question("q", "in which country was ana bell born ?", ["norland"])


UR2, R1 = PROTOCOLS["ur2"], PROTOCOLS["r1_searcher"]


def requests(*queries, question=QUESTION):
    return [SearchRequest(question, query) for query in queries]


def summarize(query, *documents):
    return extract(requests(query), [list(documents)])[0]


# ---------------------------------------------------------------------------- lookups and fallbacks


@pytest.mark.parametrize(
    "query, title, lookup",
    [
        ("where was ana bell born", "ana bell", True),
        ("where was diana bell born", "ana bell", False),  # only whole words match
        ("was ana born a bell", "ana bell", False),
        ("ana bell", " ", False),
        ("ana bell" + " word" * 10, "ana bell", True),  # twelve words
        ("ana bell" + " word" * 11, "ana bell", False),
        ("who wrote c-c.d (film)", "C-C.D (film)", True),  # "." and "(" are literal
    ],
)
def test_a_query_that_names_the_top_title_is_a_lookup(query, title, lookup):
    assert is_lookup(query, title) == lookup
    result = summarize(query, Document("3", title, "None"), KELMOUTH)
    # The flag marks the fallback, not the text: this document has the same text.
    assert (result.text, result.fallback) == (FALLBACK_TEXT, not lookup)


def test_a_query_that_names_another_thing_is_not_a_fallback_one_without_a_name_is():
    for query in ("country of alma lind", "one borg in fip", "director of The Quitter"):
        for documents in ([ANA], []):
            result = summarize(query, *documents)
            assert (result.text, result.fallback) == ("None", False)
    for query in ("in which country was she born", "birthplace", "country of", "mayor of the city"):
        assert summarize(query, ANA).fallback


# --------------------------------------------------------------------------------- a language model


def scripted(**replies):
    """Returns a model that replies by the query."""
    return ScriptedModel(lambda text: replies.get(text.split("Query: ")[1].split("\n")[0]))


def notes(llm, *queries, documents=(ANA, KELMOUTH), log="", request=None, protocol=UR2, **options):
    """Returns the results of LLMSummarizer; by default, without `fallback`, as in an evaluation."""
    request = request or SearchRequest(QUESTION, "", "She is a painter.\n")
    requests = [replace(request, query=query) for query in queries]
    summarize = LLMSummarizer(llm, Settings(**options), protocol, log)
    return summarize(requests, [list(documents) for _ in queries])


def of_task(task):
    return SearchRequest(Question("q", "?", ["5"], task), "")


def test_the_model_reads_the_reasoning_the_query_and_the_numbered_documents(monkeypatch):
    monkeypatch.setattr("summarizer.MAX_REASONING", 7)
    llm = scripted(who="notes")
    notes(llm, "who")
    text = (
        "Reasoning so far: ainter.\nQuery: who\nPassages:\n(1) ana bell: ana bell was"
        " born in kelmouth .\n(2) kelmouth: kelmouth lies in norland ."
    )
    assert llm.batches == [[(instruction_for("other", False), text, *GREEDY)]]


@pytest.mark.parametrize("task, kind", [("math", "math"), ("choice", "other")])
def test_math_or_other_tasks_in_training_or_evaluation_have_four_prompts(task, kind):
    """UR² D.3 has four prompts; only the two for training may reject a query."""
    for fallback in (False, True):
        llm = scripted(who="notes")
        notes(llm, "who", request=of_task(task), fallback=fallback)
        instruction = llm.batches[0][0][0]
        assert instruction == instruction_for(kind, fallback) and "{" not in instruction
        assert (NO_FACT in instruction) == fallback
        assert ("mathematical" in instruction) == (task == "math")


PAGE = Document("https://host/ana", "Ana", "Ana Bell was born in Kelmouth.")


@pytest.mark.parametrize(
    "options, rejects",
    [
        ({}, False),
        ({"fallback": True}, True),  # training
        ({"fallback": True, "request": SearchRequest(QUESTION, "", held_out=True)}, False),
        ({"documents": [PAGE]}, True),  # a web page: C.4
        ({"documents": [PAGE], "request": SearchRequest(QUESTION, "", held_out=True)}, True),
        ({"documents": [PAGE], "protocol": R1}, False),  # R1 has no fallback
    ],
)
def test_queries_are_rejected_in_training_and_on_the_web_if_there_is_a_fallback(options, rejects):
    llm = scripted(sum=NO_FACT)
    (result,) = notes(llm, "sum", **options)
    assert result.fallback == rejects and (NO_FACT in llm.batches[0][0][0]) == rejects
    # If the instruction does not offer NO_FACT, the reply counts as notes.
    assert result.text == (UR2.fallback_text if rejects else NO_FACT)


def test_the_sampling_of_notes_depends_on_the_task_and_on_training_or_evaluation():
    """UR² C.4: 0.3, 0.7 and 8192 tokens for math; in evaluation 0.3, 0.5 and 2048 for the rest."""
    for task, settings, sampling in (
        ("math", PAPERS["ur2"].stages[2], (0.3, 0.7, 8192)),
        ("qa", PAPERS["ur2"].stages[2], (0.0, 1.0, 8192)),  # not in the paper
        ("choice", PAPERS["ur2"].decoding, (0.3, 0.5, 2048)),
    ):
        llm = scripted(who="notes")
        notes(llm, "who", request=of_task(task), summary_sampling=settings["summary_sampling"])
        assert llm.batches[0][0][2:] == sampling


@pytest.mark.parametrize("text", ["math=A", "extractive,math=A,other=B", "maths=A,other=B"])
def test_summarizers_by_task_need_one_for_all_other_tasks(text):
    assert "give MODEL, or math=MODEL,other=MODEL" in message(by_task, text)


def test_a_prompt_file_has_its_own_instruction_or_layout_by_task_and_mode():
    layout = "{query} of {question} with {options}|{reasoning}|{documents}"
    own = {"summarizer": "Be brief.", "summarizer:choice": layout}
    own |= {"summarizer:fallback": "Or NO FACT.", "summarizer:fallback:math": "Sum? NO FACT."}
    protocol = replace(UR2, prompts=own)
    choice = Question("q", "Which {query}?", ["A"], "choice", ("elm", "oak"))
    filled = "who of Which {query}? with A. elm\nB. oak|a painter|(1) ana bell: " + ANA.text
    for request, fallback, expected in (
        (of_task("qa"), False, "Be brief."),
        (of_task("qa"), True, "Or NO FACT."),
        (of_task("math"), True, "Sum? NO FACT."),
        (SearchRequest(choice, "who", "a painter"), False, ""),
    ):
        settings = Settings(fallback=fallback)
        instruction, text, *_ = LLMSummarizer(scripted(), settings, protocol).prompt(request, [ANA])
        assert instruction == expected
    assert text == filled


@pytest.mark.parametrize(
    "reply, text",
    [
        ("\n**`'No fact!'`** \n", UR2.fallback_text),
        (f"{NO_FACT} was found", f"{NO_FACT} was found"),  # only mentioned
        ("NO FACTS", "NO FACTS"),
        ("**Final Information**\nNorland", "Norland"),
        ("It helps. ** final information: **Norland", "Norland"),
    ],
)
def test_a_reply_is_the_sentinel_or_notes_without_the_heading_of_the_papers_prompts(reply, text):
    result = notes(scripted(who=reply), "who", fallback=True)[0]
    assert result == SearchResult([ANA, KELMOUTH], text, text == UR2.fallback_text)


@pytest.mark.parametrize("reply", [None, "**Final Information**\n"])
def test_no_reply_or_an_empty_reply_is_an_error_of_that_search_only(reply):
    results = notes(scripted(a=reply, b="on b"), "a", "b")
    assert results[0] == SearchResult([ANA, KELMOUTH], error="summariser gave no answer")
    assert results[1].error is None and results[1].text == "on b"


def test_without_documents_the_model_is_not_asked_and_it_is_not_a_fallback():
    llm = scripted(who="made up")
    assert notes(llm, "who", documents=[]) == [SearchResult()] and llm.batches == []


# ----------------------------------------------- log of requests and replies, used for distillation


def test_the_log_has_each_request_and_its_reply_once(tmp_path):
    path = tmp_path / "folder" / "pairs.jsonl"
    llm = scripted(who="on who\nü", sum=NO_FACT, none=None)
    notes(llm, "who", "who", "sum", "none", log=path, fallback=True)
    held_out = SearchRequest(QUESTION, "", held_out=True)
    notes(llm, "who", log=path, request=held_out)  # an evaluation within training
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    logged_requests = [(line["instruction"], line["text"], *GREEDY) for line in lines]
    assert logged_requests == llm.batches[0][1:3]
    logged = [(line["summary"], line["fallback"]) for line in lines]
    assert logged == [("on who\nü", False), (NO_FACT, True)]


# -------------------------------------------------------------------------------------- make_search


def test_a_retriever_that_drops_a_query_is_an_error_and_shifts_no_result():
    dropping = SimpleNamespace(search=lambda queries, k: [[ANA]])
    with pytest.raises(ValueError):
        make_search(dropping)(requests("a", "b"))


def test_the_summariser_is_not_asked_about_a_failed_search():
    asked = []

    def summarize(requests, documents):
        asked.append([request.query for request in requests])
        return show_all(requests, documents)

    found = {"a": [ANA], "bad": None, "b": [KELMOUTH]}
    retriever = SimpleNamespace(search=lambda queries, k: [found[query] for query in queries])
    search = make_search(retriever, summarize)
    results = [(r.error, r.documents) for r in search(requests(*found))]
    assert results == [(None, [ANA]), ("search failed", []), (None, [KELMOUTH])]
    search(requests("bad"))
    assert asked == [["a", "b"]] and search([]) == []


def test_each_task_may_have_its_own_summariser_and_results_keep_their_order():
    """UR² 4.4 uses another summariser for mathematics."""
    names = "math=http://a/v1#m, choice=extractive,other=http://b/v1#m"
    llms = {
        "http://a/v1#m": scripted(x="of math"),
        "http://b/v1#m": scripted(x="of qa", y="on y"),
    }
    assert models_in(names) == llms.keys()
    summarize = make_summarizer(Settings(summarizer=names), UR2, llms)
    batch = [replace(of_task(task), query="x") for task in ("qa", "math", "choice", "summary")]
    batch.append(replace(of_task("qa"), query="y"))
    texts = [result.text for result in summarize(batch, [[ANA]] * 5)]
    assert texts == ["of qa", "of math", UR2.fallback_text, "of qa", "on y"]
    assert [len(llm.batches) for llm in llms.values()] == [1, 1]


SENTENCE = UR2.fallback_text


@pytest.mark.parametrize(
    "reply, rejected",
    [
        (f"Step 1: it is reasoning.\n\n**Final Information:**\n\n[{SENTENCE}]", True),
        (f"Reasoning-based query\n{NO_FACT}", True),
        (f"{SENTENCE} **Final Information** None", True),
        (f"{'Ana Bell was born in Kelmouth. ' * 9}{SENTENCE}", False),  # 54 + 26 words: notes
        ("It requires design, computation, or complex reasoning.", False),
    ],
)
def test_the_fallbacks_sentence_anywhere_in_a_short_reply_is_a_fallback(reply, rejected):
    """The sentence is from UR² D.3. The policy reads it (C.6) for every form of fallback."""
    (result,) = notes(scripted(sum=reply), "sum", fallback=True)
    assert result.fallback == rejected and (result.text == SENTENCE) == rejected
    (result,) = notes(scripted(sum=reply), "sum")  # in an evaluation it counts as notes
    assert not result.fallback
