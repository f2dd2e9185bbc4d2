"""summarizer.py: when a query is a lookup, what the policy reads, and the search function of the rollout."""

import subprocess
import sys
from pathlib import Path

import pytest

from data import Document, InputError, Question, SearchRequest, SearchResult
from retriever import OracleRetriever
from summarizer import ExtractiveSummarizer, PassThrough, is_lookup, make_search, make_summarizer

ROOT = Path(__file__).resolve().parents[1]
ANA = Document("3", "ana bell", "ana bell was born in kelmouth .")
KELMOUTH = Document("4", "kelmouth", "kelmouth lies in norland .")
QUESTION = Question("q", "in which country was ana bell born ?", ["norland"])


def requests(*queries, question=QUESTION):
    return [SearchRequest(question, query) for query in queries]


def summarize(query, *documents):
    return ExtractiveSummarizer()(requests(query), [list(documents)])[0]


class Recorder:
    """Finds the query itself, and keeps what it was asked."""

    def __init__(self):
        self.calls = []

    def search(self, queries, k):
        self.calls.append((list(queries), k))
        return [[Document(query, query, f"about {query}")] for query in queries]


# ---------------------------------------------------------------------------------- a lookup, or the fallback

@pytest.mark.parametrize("query", ["where was ana bell born", "Ana Bell", "born : ana  bell ?", "ana bell's city"])
def test_a_query_that_names_the_top_title_reads_the_top_passage(query):
    result = summarize(query, ANA, KELMOUTH)
    assert result.text == ANA.text and not result.fallback


@pytest.mark.parametrize(
    "query",
    ["where was she born", "ana", "bell ana", "where was diana bell born", "ana bellow", "was ana born a bell", "kelmouth", ""],
)
def test_a_query_without_the_top_title_as_whole_words_is_a_fallback(query):
    assert summarize(query, ANA, KELMOUTH).fallback


@pytest.mark.parametrize("operator", ["+", "-", "*", "/", "×", "÷", "="])
def test_a_query_with_an_arithmetic_operator_is_a_fallback_even_if_it_names_the_title(operator):
    assert not summarize("ana bell 3 4", ANA).fallback
    assert summarize(f"ana bell 3 {operator} 4", ANA).fallback


def test_twelve_words_are_a_lookup_and_thirteen_are_not():
    assert is_lookup("ana bell" + " word" * 10, "ana bell")
    assert not is_lookup("ana bell" + " word" * 11, "ana bell")


def test_a_title_of_regular_expression_signs_is_taken_literally():
    assert is_lookup("who wrote c.d (film)", "C.D (film)") and not is_lookup("who wrote cxd (film)", "c.d (film)")


def test_no_document_and_a_document_without_title_are_fallbacks():
    assert summarize("where was ana bell born").fallback
    assert summarize("where was ana bell born", Document("1", " ", "ana bell")).fallback


def test_a_fallback_keeps_the_documents_for_the_log_but_the_policy_does_not_read_them():
    result = summarize("17 + 25", ANA, KELMOUTH)
    assert result.documents == [ANA, KELMOUTH]
    assert result.text and ANA.text not in result.text  # an empty text would show the documents


def test_the_flag_decides_and_not_the_text():
    sentinel = ExtractiveSummarizer().fallback_text
    result = summarize("who is none", Document("1", "none", sentinel))
    assert result.text == sentinel and result.fallback is False


def test_a_batch_gets_one_result_per_request_in_order():
    results = ExtractiveSummarizer()(requests("ana bell", "1 + 1", "kelmouth"), [[ANA], [ANA], [KELMOUTH]])
    assert [r.fallback for r in results] == [False, True, False] and results[2].text == KELMOUTH.text


# ------------------------------------------------------------------------------------------ without a summary

def test_without_a_summariser_the_documents_themselves_are_the_result():
    assert PassThrough()(requests("1 + 1"), [[ANA]]) == [SearchResult(documents=[ANA])]


# ------------------------------------------------------------------------------------------------ make_search

def test_search_retrieves_for_all_requests_in_one_call_and_each_query_once():
    recorder = Recorder()
    results = make_search(recorder, k=3)(requests("a", "b", "a"))
    assert recorder.calls == [(["a", "b"], 3)]
    assert [r.documents[0].id for r in results] == ["a", "b", "a"]


def test_a_second_call_searches_again():
    recorder = Recorder()
    search = make_search(recorder)
    search(requests("a")), search(requests("a"))
    assert recorder.calls == [(["a"], 5), (["a"], 5)]


def test_no_request_is_no_call():
    recorder = Recorder()
    assert make_search(recorder)([]) == [] and recorder.calls == []


def test_results_of_equal_queries_do_not_share_one_list():
    first, second = make_search(Recorder())(requests("a", "a"))
    first.documents.clear()
    assert second.documents


def test_search_hands_the_found_documents_to_the_summariser():
    results = make_search(Recorder(), ExtractiveSummarizer())(requests("ana", "2 * 3"))
    assert [(r.text, r.fallback) for r in results] == [("about ana", False), ("None", True)]


def test_the_oracle_gets_the_questions_and_equal_queries_of_two_questions_stay_apart():
    other = Question("r", "?", ["x"], references=(KELMOUTH,), supporting=(1,))
    gold = Question("q", "?", ["x"], references=(KELMOUTH, ANA), supporting=(2,))
    asked = requests("who", "who", question=gold) + requests("who", question=other)
    assert [r.documents for r in make_search(OracleRetriever())(asked)] == [[ANA], [ANA], [KELMOUTH]]


def test_a_retriever_that_drops_a_query_is_an_error_and_shifts_no_result():
    class Drops(Recorder):
        def search(self, queries, k):
            return super().search(queries, k)[1:]

    with pytest.raises(ValueError):
        make_search(Drops())(requests("a", "b"))


def test_summarisers_are_made_by_name_and_an_unknown_name_lists_them():
    assert isinstance(make_summarizer("none"), PassThrough)
    assert isinstance(make_summarizer("extractive"), ExtractiveSummarizer)
    with pytest.raises(InputError, match="unknown summarizer 'gpt': one of none, extractive"):
        make_summarizer("gpt")


def test_the_file_shows_a_fact_an_arithmetic_query_and_an_ill_posed_one():
    output = subprocess.run([sys.executable, "summarizer.py"], cwd=ROOT, capture_output=True, text=True).stdout
    assert "ana bell was born in kelmouth ." in output
    assert [line.split()[-1] for line in output.splitlines() if "fallback" in line] == ["False", "True", "True"]
