"""summarizer.py: when a query is a lookup, what the policy reads, and the search of the rollout."""

import json

import pytest

import summarizer
from data import Document, Question, SearchRequest, SearchResult
from errors import InputError
from papers import PAPERS
from retrievers.controls import OracleRetriever
from summarizer import (
    FALLBACK_TEXT,
    GREEDY,
    MAX_REASONING,
    NO_FACT,
    LLMSummarizer,
    SummarizerSettings,
    extract,
    instruction_for,
    is_lookup,
    make_search,
    make_summarizer,
    show_all,
    summary_text,
)

ANA = Document("3", "ana bell", "ana bell was born in kelmouth .")
KELMOUTH = Document("4", "kelmouth", "kelmouth lies in norland .")
QUESTION = Question("q", "in which country was ana bell born ?", ["norland"])


def requests(*queries, question=QUESTION):
    return [SearchRequest(question, query) for query in queries]


def summarize(query, *documents):
    return extract(requests(query), [list(documents)])[0]


class Recorder:
    """Finds the query itself, and keeps what it was asked."""

    def __init__(self):
        self.calls = []

    def search(self, queries, k):
        self.calls.append((list(queries), k))
        return [[Document(query, query, f"about {query}")] for query in queries]


# ------------------------------------------------------------------------ a lookup, or the fallback


@pytest.mark.parametrize(
    "query, title, lookup",
    [
        ("where was ana bell born", "ana bell", True),
        ("Ana Bell", "ana bell", True),
        ("born : ana  bell ?", "ana bell", True),
        ("ana bell's city", "ana bell", True),
        ("where was she born", "ana bell", False),
        ("bell ana", "ana bell", False),
        ("where was diana bell born", "ana bell", False),  # whole words
        ("ana bellow", "ana bell", False),
        ("was ana born a bell", "ana bell", False),
        ("", "ana bell", False),
        ("mayor of the city where she was born", "ana bell", False),
        ("mayor of her city", "ana bell", False),
        ("sum of 17 and 25", "ana bell", False),
        ("ana bell", " ", False),
        ("ana bell" + " word" * 10, "ana bell", True),  # twelve words
        ("ana bell" + " word" * 11, "ana bell", False),
        ("who wrote c.d (film)", "C.D (film)", True),  # signs are taken literally
        ("who wrote cxd (film)", "c.d (film)", False),
    ],
)
def test_a_query_that_names_the_top_title_is_a_lookup(query, title, lookup):
    assert is_lookup(query, title) == lookup
    result = summarize(query, Document("3", title, "None"), KELMOUTH)
    # the flag decides, and not the text: this passage reads like the fallback
    assert (result.text, result.fallback) == (FALLBACK_TEXT, not lookup)


def test_a_query_for_nobody_is_no_fallback_and_a_query_for_nothing_is():
    for query in ("country of alma lind", "one borg in fip", "Mayor of Halgate"):
        for documents in ([ANA], []):
            result = summarize(query, *documents)
            assert (result.text, result.fallback) == ("None", False)
    for query in ("17 + 25", "in which country was she born", "birthplace", "country of"):
        assert summarize(query, ANA).fallback


@pytest.mark.parametrize("operator", ["+", "-", "*", "/", "×", "÷", "="])
def test_a_query_with_an_arithmetic_operator_is_a_fallback_even_if_it_names_the_title(operator):
    assert not summarize("ana bell 3 4", ANA).fallback
    assert summarize(f"ana bell 3 {operator} 4", ANA).fallback


def test_a_fallback_keeps_the_documents_for_the_log_but_the_policy_does_not_read_them():
    assert summarize("where was ana bell born").fallback  # nothing was found
    result = summarize("17 + 25", ANA, KELMOUTH)
    assert result.documents == [ANA, KELMOUTH]
    assert result.text and ANA.text not in result.text  # an empty text would show the documents


# --------------------------------------------------------------------------------- a language model


class Says:
    """Replies by the query; keeps the batches."""

    instruction = ""

    def __init__(self, **replies):
        self.replies, self.batches, self.rejected = replies, [], set()

    def ask(self, requests):
        self.batches.append(requests)
        queries = [text.split("Query: ")[1].split("\n")[0] for _, text, *_ in requests]
        return [self.replies.get(query) for query in queries]


def notes(llm, *queries, documents=(ANA, KELMOUTH), log="", question=QUESTION, **given):
    """Without a log: of an evaluation."""
    asked = [SearchRequest(question, query, "She is a painter.") for query in queries]
    summarize = LLMSummarizer(llm, SummarizerSettings(**given), log)
    return summarize(asked, [list(documents) for _ in queries])


def test_the_model_reads_the_reasoning_the_query_and_the_numbered_documents():
    llm = Says(who="notes")
    notes(llm, "who")
    text = (
        "Reasoning so far: She is a painter.\nQuery: who\nPassages:\n(1) ana bell: ana bell was"
        " born in kelmouth .\n(2) kelmouth: kelmouth lies in norland ."
    )
    assert llm.batches == [[(instruction_for("other", False), text, *GREEDY)]]


def test_of_a_long_reasoning_the_end_is_read_and_another_reasoning_is_another_request():
    text = summary_text(SearchRequest(QUESTION, "who", "x" * 9999 + "the end\n"), [ANA])
    shown = text.split("\n")[0].removeprefix("Reasoning so far: ")
    assert len(shown) == MAX_REASONING == 4000 and shown.endswith("xthe end")
    assert summary_text(SearchRequest(QUESTION, "who"), [ANA]) != text


@pytest.mark.parametrize("task, kind", [("math", "math"), ("qa", "other"), ("choice", "other")])
def test_mathematics_and_other_tasks_training_and_evaluation_are_four_prompts(task, kind, tmp_path):
    """UR² D.3; only the two of training (a log is kept) may turn a query away."""
    question = Question("q", "?", ["5"], task)
    for log in ("", tmp_path / "log.jsonl"):
        llm = Says(who="notes")
        notes(llm, "who", log=log, question=question)
        instruction = llm.batches[0][0][0]
        assert instruction == instruction_for(kind, bool(log))
        assert (NO_FACT in instruction) == bool(log)
        assert ("mathematical" in instruction) == (task == "math")
    four = {instruction_for(kind, away) for kind in ("math", "other") for away in (False, True)}
    assert len(four) == 4 and not any("{" in text for text in four)


def test_an_evaluation_turns_no_query_away_but_of_web_pages_or_when_it_is_asked_to():
    page = Document("https://host/ana", "Ana", "Ana Bell was born in Kelmouth.")
    found = [
        notes(Says(sum=NO_FACT), "sum")[0],
        notes(Says(sum=NO_FACT), "sum", documents=[page])[0],
        notes(Says(sum=NO_FACT), "sum", fallback=True)[0],
    ]
    assert [result.fallback for result in found] == [False, True, True]
    assert found[0].text == NO_FACT  # whatever it means by that, these are its notes


def test_notes_are_greedy_in_training_and_sampled_in_an_evaluation_by_the_task(tmp_path):
    """UR² C.4: mathematics 0.3, 0.7 and 8192 tokens, all else 0.3, 0.5 and 2048."""
    papers = PAPERS["ur2"].decoding["summary_sampling"]
    for task, log, sampling in (
        ("math", "", (0.3, 0.7, 8192)),
        ("qa", "", (0.3, 0.5, 2048)),
        ("qa", tmp_path / "log.jsonl", (0.0, 1.0, 1024)),  # the paper is silent
    ):
        llm = Says(who="notes")
        question = Question("q", "?", ["5"], task)
        notes(llm, "who", log=log, question=question, summary_sampling=papers)
        assert llm.batches[0][0][2:] == sampling


def test_an_instruction_of_the_users_own_stands_in_place_of_all_four(tmp_path):
    llm = Says(who=NO_FACT)
    llm.instruction = "Be brief."
    assert not notes(llm, "who", log=tmp_path / "log.jsonl")[
        0
    ].fallback  # which it does not ask for
    assert llm.batches[0][0][0] == "Be brief."


def test_all_queries_are_one_batch_and_the_documents_stay_beside_the_notes():
    llm = Says(a="on a", b="on b")
    results = notes(llm, "a", "b")
    assert len(llm.batches) == 1
    assert results == [SearchResult([ANA, KELMOUTH], "on a"), SearchResult([ANA, KELMOUTH], "on b")]


@pytest.mark.parametrize(
    "reply",
    [
        NO_FACT,
        f"  {NO_FACT}\n",
        f"<think>a sum</think>\n{NO_FACT}",
        "NO FACT.",
        "**no fact**",
        "“No fact.”",
        "\n`'NO FACT!'` \n",
        "__NO FACT__",
    ],
)
def test_the_sentinel_in_any_dress_is_a_fallback(reply):
    result = notes(Says(sum=reply), "sum", fallback=True)[0]
    assert result == SearchResult([ANA, KELMOUTH], FALLBACK_TEXT, fallback=True)


@pytest.mark.parametrize(
    "reply",
    [f"{NO_FACT} was found", f"He said: {NO_FACT}", f"{NO_FACT}\nbut Norland", "NO FACTS", "fact"],
)
def test_notes_that_only_mention_the_sentinel_are_notes(reply):
    result = notes(Says(who=reply), "who", fallback=True)[0]
    assert result.text == reply and not result.fallback


@pytest.mark.parametrize("reply", [None, "", " \n", "<think>and so on"])
def test_no_reply_and_an_empty_one_are_an_error_of_that_search_alone(reply):
    results = notes(Says(a=reply, b="on b"), "a", "b")
    assert results[0] == SearchResult([ANA, KELMOUTH], error="summariser gave no answer")
    assert results[1].error is None and results[1].text == "on b"


def test_where_nothing_was_found_nobody_is_asked_and_it_is_no_fallback():
    llm = Says(who="made up")
    assert notes(llm, "who", documents=[]) == [SearchResult()] and llm.batches == []


# -------------------------------------------------------------------- the log: pairs to distil from


def test_the_log_has_each_new_pair_once_as_it_was_asked(tmp_path):
    path = tmp_path / "folder" / "pairs.jsonl"
    llm = Says(who="on who\nü", sum=NO_FACT, none=None)
    notes(llm, "who", "who", "sum", "none", log=path)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    asked = [(line["instruction"], line["text"], *GREEDY) for line in lines]
    assert asked == llm.batches[0][1:3] and len(lines) == 2
    assert [line["summary"] for line in lines] == ["on who\nü", NO_FACT]
    assert [line["fallback"] for line in lines] == [False, True]


def test_a_log_that_cannot_be_written_is_one_line_before_the_first_search(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"pairs\.jsonl: cannot be written"):
        LLMSummarizer(Says(), SummarizerSettings(), tmp_path / "file" / "pairs.jsonl")


# -------------------------------------------------------------------------------------- make_search


def test_search_retrieves_for_all_requests_in_one_call_and_each_query_once():
    recorder = Recorder()
    results = make_search(recorder, k=3)(requests("a", "b", "a"))
    assert recorder.calls == [(["a", "b"], 3)]
    assert [r.documents[0].id for r in results] == ["a", "b", "a"]
    results[0].documents.clear()  # which no other result shares
    assert results[2].documents


def test_a_second_call_searches_again_and_no_request_is_no_call():
    recorder, llm = Recorder(), Says()
    search = make_search(recorder)
    search(requests("a")), search(requests("a"))
    assert search([]) == notes(llm) == [] and llm.batches == []
    assert recorder.calls == [(["a"], 5), (["a"], 5)]


def test_the_oracle_gets_the_questions_and_equal_queries_of_two_questions_stay_apart():
    other = Question("r", "?", ["x"], references=(KELMOUTH,), supporting=(1,))
    gold = Question("q", "?", ["x"], references=(KELMOUTH, ANA), supporting=(2,))
    asked = requests("who", "who", question=gold) + requests("who", question=other)
    found = [result.documents for result in make_search(OracleRetriever())(asked)]
    assert found == [[ANA], [ANA], [KELMOUTH]]


def test_a_retriever_that_drops_a_query_is_an_error_and_shifts_no_result():
    class Drops(Recorder):
        def search(self, queries, k):
            return super().search(queries, k)[1:]

    with pytest.raises(ValueError):
        make_search(Drops())(requests("a", "b"))


def test_a_retriever_that_finds_nothing_has_not_failed_also_if_it_says_so_by_a_tuple():
    class Nothing(Recorder):
        def search(self, queries, k):
            return [() for _ in queries]

    (result,) = make_search(Nothing())(requests("a"))
    assert result.error is None and not result.rejected and result.documents == []


class Fails(Recorder):
    """Has no answer for "bad"."""

    def search(self, queries, k):
        return [
            None if query == "bad" else found
            for query, found in zip(queries, super().search(queries, k), strict=True)
        ]

    def seconds(self, queries, k):
        return queries + k / 10


def test_a_query_without_an_answer_is_an_error_of_its_own_rows_and_the_summariser_is_not_asked():
    asked = []

    def summarize(requests, documents):
        asked.append([request.query for request in requests])
        return show_all(requests, documents)

    results = make_search(Fails(), summarize)(requests("a", "bad", "b", "bad", "a"))
    assert [r.error for r in results] == [None, "search failed", None, "search failed", None]
    assert [[d.id for d in r.documents] for r in results] == [["a"], [], ["b"], [], ["a"]]
    make_search(Fails(), summarize)(requests("bad"))
    assert asked == [["a", "b", "a"]]


def test_the_search_says_how_long_it_may_take_if_its_retriever_does():
    assert make_search(Fails(), k=3).seconds(requests("a", "b", "a")) == 2.3  # of two queries
    assert not hasattr(make_search(Recorder()), "seconds")


def test_a_summariser_is_none_extractive_or_the_model_that_the_caller_has_loaded():
    assert make_summarizer(SummarizerSettings()) is show_all
    assert show_all(requests("1 + 1"), [[ANA]]) == [SearchResult([ANA])]
    assert make_summarizer(SummarizerSettings("extractive")) is extract
    llm = Says(a="on a", b=NO_FACT)
    settings = SummarizerSettings("http://x/v1#m", fallback=True)
    search = make_search(Recorder(), make_summarizer(settings, llm), 2)
    found = [(result.text, result.fallback) for result in search(requests("a", "b"))]
    assert found == [("on a", False), (FALLBACK_TEXT, True)]
    with pytest.raises(InputError, match=r"unknown; none, extractive, .*did you mean extractive"):
        make_summarizer(SummarizerSettings("extractiv"))


def test_the_file_shows_a_fact_an_unknown_name_an_ill_posed_query_and_arithmetic(capsys):
    summarizer.main()
    lines = capsys.readouterr().out.splitlines()
    assert "ana bell was born in kelmouth ." in lines[1]
    assert [line.split()[-1] for line in lines[1:]] == ["False", "False", "True", "True"]
