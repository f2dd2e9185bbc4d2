"""llm.py: over real sockets, with every way in which a server can fail; and a local model beside
its slow twin.
"""

import importlib.util
import json
import shutil
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import ScriptedServer, message, said, threads_since
from processes import wait_until
from transformers import GenerationConfig

from other_models import llm
from other_models.llm import LLM, LocalLLM, Request, ServerLLM, load_llm
from policy import save_policy
from prompts import chat_text
from rollout import encode


class Server(ScriptedServer):
    """`script(text)` -> a reply, or what a ScriptedServer sends. The probe, the first request, gets
    `probe`. `models`: what it lists.
    """

    def __init__(self, script=str.upper, models=None, probe="yes"):
        super().__init__(self.chat)
        self.say, self.models, self.probe = script, models, probe
        self.base += "/v1"

    def chat(self, path, payload):
        if payload is None:
            return 200 if path == "/v1/models" else 404, json.dumps(self.models).encode()
        text = payload["messages"][-1]["content"]
        reply = self.probe if text == llm.PROBE[1] else self.say(text)
        return (200, said(reply)) if isinstance(reply, str) else reply

    def texts(self):
        """What was asked behind the probe."""
        return [payload["messages"][-1]["content"] for _, payload in self.posts[1:]]


@pytest.fixture
def serve(started):
    return lambda *given, **options: started(Server(*given, **options))


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    monkeypatch.setattr(llm, "BACKOFF", 0.01)


@pytest.fixture
def one_try(monkeypatch):
    monkeypatch.setattr(llm, "RETRIES", 0)


def asker(server, timeout=60.0, **options) -> ServerLLM:
    return ServerLLM(f"{server.base}#m", timeout=timeout, **options)


def given(**settings):
    return SimpleNamespace(**{"timeout": 60.0, "in_8bit": "", "output_dir": "runs", **settings})


def requests(*texts):
    return [("do it", text) for text in texts]


def refused(fragment, call, *arguments, **options):
    assert fragment in message(call, *arguments, **options)


# ------------------------------------------------------------------------------------- it goes well


def test_replies_come_in_the_order_of_the_requests_without_what_was_thought_aloud(serve):
    def slow_first(text):
        time.sleep(0.1 if text == "a" else 0)
        return f"<think>b? no</think>\n\n{text.upper()}"

    assert asker(serve(slow_first)).ask(requests("a", "b", "c")) == ["A", "B", "C"]


def test_what_is_sent_is_greedy_with_the_environment_s_key_if_there_is_one(serve, monkeypatch):
    server = serve()
    for key in ("", "abc"):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        asker(server, max_tokens=7).ask([("Judge.", "who?")])
    messages = [{"role": "system", "content": "Judge."}, {"role": "user", "content": "who?"}]
    options = {"model": "m", "temperature": 0, "top_p": 1.0, "max_tokens": 7}
    assert server.posts[1][1] == options | {"messages": messages}
    sent = [headers["Authorization"] for headers in server.headers]
    assert sent == [None, None, "Bearer abc", "Bearer abc"]


def test_a_request_says_how_its_reply_is_sampled_and_that_is_another_request(serve, tmp_path):
    server = serve()
    asked = [("i", "a"), ("i", "a", 0.3, 0.7, 8192), ("i", "a", 0.3, 0.5, 8192), ("i", "a")]
    for _ in range(2):  # a sampled reply is kept too: the same command reads it again
        assert asker(server, max_tokens=7, cache=tmp_path).ask(asked) == ["A"] * 4
    sent = [(p["temperature"], p["top_p"], p["max_tokens"]) for _, p in server.posts]
    assert sorted(sent[1:-1]) == [(0, 1, 7), (0.3, 0.5, 8192), (0.3, 0.7, 8192)]  # and two probes


def test_of_a_text_a_model_gets_the_end_that_its_context_holds(serve):
    """Two bytes are a token; of 1,000 tokens 8 are for the reply, 128 spare, 20 for the rest. A
    reply that asks for more is promised a quarter of the context.
    """
    model = asker(serve(models={"data": [{"id": "n"}, {"id": "m", "max_model_len": 1000}]}))
    assert model.tail("é" * 2000, "é" * 20, 8) == "é" * 844
    assert model.tail("é" * 2000, "é" * 20, 400) == "é" * (1000 - 20 - 128 - 250)
    assert model.tail("short", "", 8) == "short" and model.tail("text", "é" * 999, 8) == ""
    assert asker(serve(models={"data": [{"id": "m"}]})).positions == llm.CONTEXT


def test_equal_requests_of_a_batch_are_asked_once_and_another_instruction_is_another_request(serve):
    server = serve()
    model = asker(server)
    assert model.ask([*requests("a", "b", "a", "a"), ("else", "a")]) == ["A", "B", "A", "A", "A"]
    assert model.ask([]) == []
    assert sorted(server.texts()) == ["a", "a", "b"] and model.failures == 0


def test_sixteen_requests_are_under_way_at_once(serve, one_try):
    together = threading.Barrier(16)

    def wait_for_the_others(text):
        together.wait(30)  # with fewer at once this breaks, and the reply never comes
        return "ok"

    assert asker(serve(wait_for_the_others)).ask(requests(*map(str, range(16)))) == ["ok"] * 16


# -------------------------------------------------------------------------- the server is not there


def test_an_address_without_a_model_means_the_first_one_that_the_server_lists(serve):
    server = serve(models={"data": [{"id": "first"}, {"id": "second"}]})
    model = load_llm(server.base, given(), cache="")
    assert model.ask(requests("a")) == ["A"] and model.name == f"{server.base}#first"
    assert [payload["model"] for _, payload in server.posts] == ["first", "first"]
    for models in (None, [], {"data": []}):
        refused(
            "no answer (it lists no model): start", load_llm, serve(models=models).base, given()
        )


@pytest.mark.parametrize(
    ("probe", "match"),
    [
        (None, "nothing within 0.5 s"),
        ((404, b'{"error": {"message": "There is no `m`."}}'), "There is no `m`."),
        ((400, b"max_tokens too large"), "HTTP 400 max_tokens too large"),
    ],
)
def test_a_server_that_hangs_or_rejects_the_first_request_is_one_line(serve, probe, match):
    timeout = 60.0 if probe else 0.5
    refused(match, load_llm, serve(probe=probe).base + "#m", given(timeout=timeout), cache="")


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("http://", "not an address"),
        ("http://host:port/v1#m", "not an address"),
        ("http://#m", "not an address"),
        ("", "names no language model: give http://host"),
        ("localhost:8000/v1#m", "names no language model: give http://host"),
    ],
)
def test_an_address_or_a_name_that_is_none_is_one_line(spec, match):
    refused(match, load_llm, spec, given())


# -------------------------------------------------------------------------------- one request fails


def once(fault):
    """The first try of every text fails in this way, the second goes well."""
    seen = set()

    def script(text):
        if text in seen:
            return text.upper()
        seen.add(text)
        return fault

    return script


@pytest.mark.parametrize(
    ("fault", "shown"),
    [
        ((503, b"oh no"), "HTTP 503 oh no"),
        (None, "nothing within 1 s"),
        (b"", "closed connection"),
        ((200, b"<html>hello</html>"), "not JSON, or half of one: <html>"),
        ((200, b"[]"), "without choices"),
        ((200, b'{"choices": []}'), 'without choices: {"choices": []}'),
    ],
    ids=["503", "slow", "closed", "not-json", "list", "no-choice"],
)
def test_a_try_that_fails_is_followed_by_another_and_after_the_last_one_by_none(
    serve, fault, shown, monkeypatch
):
    server = serve(once(fault))
    model = asker(server)
    model.timeout = 1.0 if fault is None else 60.0  # a good reply may take a while
    assert model.ask(requests("a", "b")) == ["A", "B"] and model.failures == 0
    assert sorted(server.texts()) == ["a", "a", "b", "b"]
    monkeypatch.setattr(llm, "RETRIES", 0)
    assert model.ask(requests("c")) == [None]
    assert model.failures == 1 and shown in model.fault


@pytest.mark.parametrize("reply", [(400, b"too long"), (200, said(None))])
def test_a_rejected_request_or_a_reply_without_text_is_not_tried_again(serve, reply):
    """It does not mean either that the server is down, however often it happens."""
    server = serve(lambda text: reply)
    model = asker(server)
    for text in "abcd":
        assert model.ask(requests(text)) == [None]
    assert len(server.texts()) == model.failures == 4
    assert model.rejected == {Request("do it", text) for text in "abcd" if reply[0] == 400}


# ---------------------------------------------------------------------------------- the server dies


def test_a_server_that_dies_costs_a_batch_one_round_of_tries_and_no_thread_asks_on(serve, one_try):
    server, before = serve(lambda text: None), threading.enumerate()
    model = asker(server)
    model.timeout = 0.2
    assert model.ask(requests(*map(str, range(2000)))) == [None] * 2000 and model.failures == 2000
    wait_until(lambda: not any("(worker)" in thread.name for thread in threads_since(before)))
    assert len(server.texts()) <= 16 * 4  # a thread may have begun its next request


def test_only_three_failed_batches_in_a_row_end_a_run(serve):
    server = serve(lambda text: "ok" if text in "ad" else (500, b""))
    model = asker(server)
    replies = [model.ask(requests(*texts)) for texts in ("a", "b", "c", "db", "e", "f")]
    assert replies == [["ok"], [None], [None], ["ok", None], [None], [None]]
    assert server.texts().count("c") == 1 + llm.RETRIES
    assert model.failures == 5
    refused(f"{model.name}: 3 batches in a row without an answer", model.ask, requests("g"))


def test_a_fault_of_our_own_in_a_thread_ends_the_batch_and_is_not_an_endless_wait(
    serve, monkeypatch
):
    model = asker(serve())
    monkeypatch.setattr(model, "complete", lambda request: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.ask(requests("a"))


def test_an_interrupt_keeps_what_has_come_and_waits_for_nobody(serve, tmp_path, monkeypatch):
    released, late = threading.Event(), []

    def script(text):
        if text == "slow":
            released.wait(30)
            late.append(text)
        return "ok"

    model = asker(serve(script), cache=tmp_path)
    keep = model.keep

    def interrupted(*reply):
        keep(*reply)
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "keep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.ask(requests("slow", "a"))
    assert not late and list(LLM(model.name, 256, tmp_path).cached.values()) == ["ok"]
    released.set()


# ------------------------------------------------------------------------------------- kept on disk


FIRST = Request("i", "t")


def test_name_length_and_each_field_of_a_request_make_another_entry(tmp_path):
    LLM("a/b", 8, tmp_path).keep(FIRST, "r")
    keys = [LLM("a/b", 8).key(FIRST), LLM("a:b", 8).key(FIRST), LLM("a/b", 9).key(FIRST)]
    keys += [LLM("a/b", 8).key(Request(*other)) for other in (("j", "t"), ("i", "u"), ("it", ""))]
    kept = LLM("a:b", 8, tmp_path)  # one file, two names
    assert [kept.cached.get(key) for key in keys] == ["r", None, None, None, None, None]


@pytest.mark.fault(108)
def test_lines_that_are_no_entries_are_skipped_and_two_runs_may_append(tmp_path):
    first, second = LLM("m", 8, tmp_path), LLM("m", 8, tmp_path)
    first.keep(FIRST, "A")
    second.keep(Request("i", "b"), "line\nbreak")
    whole = first.cache.read_bytes()
    junk = [b"\xff\xfe", b"[]", b"3", b"{}", b'{"key": [], "reply": "x"}', whole[: len(whole) // 4]]
    first.cache.write_bytes(b"\n".join([*junk, whole]) + whole[:-9])  # a torn line at the end
    LLM("m", 8, tmp_path).keep(Request("i", "c"), "C")  # is not glued to it
    replies = {"A", "line\nbreak", "C"}
    assert {*LLM("m", 8, tmp_path).cached.values()} == replies


@pytest.mark.fault(109)
def test_a_folder_that_cannot_be_written_is_one_line_before_anything_is_asked(tmp_path):
    (tmp_path / "folder").write_text("")
    refused("m.jsonl: cannot be written", LLM, "m", 8, tmp_path / "folder")


# ------------------------------------------------------------------------------------ a local model


def alone(policy, tokenizer, request, count) -> str:
    """The slow twin: no batch, no padding, no `generate`: the likeliest token, one after the
    other.
    """
    ids = tokenizer(chat_text(tokenizer, *request), add_special_tokens=False)["input_ids"]
    new = []
    with torch.no_grad():
        while len(new) < count and tokenizer.eos_token_id not in new:
            new.append(int(policy.language_model(torch.tensor([ids + new])).logits[0, -1].argmax()))
    new = [i for i in new if i != tokenizer.eos_token_id]
    return tokenizer.decode(new, skip_special_tokens=True).strip()


TEXTS = ["who?", "Ana Bell was born in Kelmouth. In which country was she born?"]
TEXTS += ["Norland Norland", "a", "b c d e f g h"]


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_a_left_padded_batch_says_what_each_request_says_alone(family, batch_size, bpe, request):
    policy = request.getfixturevalue(family)
    model = LocalLLM(policy, bpe, max_tokens=12, batch_size=batch_size)
    slow = [alone(policy, bpe, r, 12) for r in requests(*TEXTS)]
    assert model.ask(requests(*TEXTS)) == slow
    assert len(set(slow)) > 2  # what is said depends on what was read


def test_a_reply_ends_at_the_end_token_and_the_padding_behind_it_is_no_text(
    qwen2, bpe, monkeypatch
):
    def generate(input_ids, **_):
        pad = qwen2.language_model.generation_config.pad_token_id
        said = torch.tensor([[*encode(bpe, " Norland"), bpe.eos_token_id, pad, pad]])
        return torch.cat([input_ids, said], 1)

    monkeypatch.setattr(qwen2, "generate", generate)
    assert LocalLLM(qwen2, bpe, max_tokens=8).ask(requests("who?")) == ["Norland"]


def test_the_checkpoint_s_own_sampling_changes_nothing_and_asking_changes_no_state(
    llama, bpe, monkeypatch
):
    plain = LocalLLM(llama, bpe, max_tokens=12).ask(requests(*TEXTS))
    own = GenerationConfig(
        do_sample=True, temperature=3.0, repetition_penalty=5.0, max_new_tokens=1
    )
    monkeypatch.setattr(llama.language_model, "generation_config", own)
    state = torch.get_rng_state()
    llama.train()
    assert LocalLLM(llama, bpe, max_tokens=12).ask(requests(*TEXTS)) == plain
    assert torch.equal(torch.get_rng_state(), state) and llama.training
    assert llama.eval().language_model.generation_config is own


def test_a_local_model_samples_what_asks_for_it_and_the_rest_of_the_batch_stays_greedy(qwen2, bpe):
    model = LocalLLM(qwen2, bpe, max_tokens=12, batch_size=2)
    greedy = model.ask(requests(*TEXTS))
    mixed = [(*request, 2.0, 0.9, 99) for request in requests(*TEXTS)] + requests(*TEXTS)
    state = torch.get_rng_state()
    found = model.ask(mixed)
    assert found[5:] == greedy and found[:5] != greedy
    assert model.ask(mixed) == found  # seeded, and what the policy samples next is as it was
    assert torch.equal(torch.get_rng_state(), state)
    long = "word " * 200  # of 512 positions: a reply takes what is left
    assert len(encode(bpe, model.ask([("do it", long, 2.0, 1.0, 8192)])[0])) <= 512


def test_the_largest_of_the_noisy_logits_is_a_sample_of_the_nucleus():
    """p = 0.5, 0.25, 0.15, 0.1 at temperature 1: the nucleus of 0.8 is the first three."""
    count, p = 40_000, torch.tensor([0.5, 0.25, 0.15, 0.1])
    for temperature, top_p, expected in (
        (1.0, 1.0, [0.5, 0.25, 0.15, 0.1]),
        (0.5, 1.0, [0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345, 0.01 / 0.345]),
        (1.0, 0.8, [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0.0]),
    ):
        process = llm.drawn_ahead(temperature, top_p, "cpu")
        found = process(None, p.log().expand(count, -1)).argmax(-1)
        shares = found.bincount(minlength=4) / count
        for share, chance in zip(shares.tolist(), expected, strict=True):
            assert abs(share - chance) <= 4 * (chance * (1 - chance) / count) ** 0.5


def test_a_prompt_beyond_the_context_is_none_and_is_not_cut(qwen2, bpe):
    model = LocalLLM(qwen2, bpe, max_tokens=8)  # 512 positions
    assert model.ask(requests("word " * 600, "who?"))[0] is None
    assert model.failures == 1
    for _ in range(3):  # and a model in memory is never "down"
        assert model.ask(requests("word " * 600)) == [None]
    refused("512 new tokens do not fit its 512 positions", LocalLLM, qwen2, bpe, 512)


@pytest.fixture
def saved(qwen2, bpe, tmp_path):
    save_policy(qwen2, bpe, tmp_path / "model")
    return tmp_path / "model"


def test_a_saved_model_keeps_its_replies_until_the_folder_has_other_weights(
    saved, qwen2, llama, bpe, tmp_path
):
    for policy in (qwen2, llama):
        shutil.rmtree(saved)
        save_policy(policy, bpe, saved)
        replies = LocalLLM(policy, bpe, max_tokens=6).ask(requests(*TEXTS))
        for kept in (False, True):
            model = load_llm(str(saved), given(), max_tokens=6, cache=tmp_path / "cache")
            assert (model.key(("do it", TEXTS[0], 0.0, 1.0, 0)) in model.cached) == kept
            assert model.ask(requests(*TEXTS)) == replies


def test_a_folder_without_a_model_is_one_line_that_names_no_other_flag(saved, tmp_path):
    assert message(load_llm, str(tmp_path), given()).startswith(f"{tmp_path}: there is no config")
    assert message(load_llm, "/no/model", given()).startswith("/no/model: no such directory")
    next(saved.glob("*.safetensors")).write_bytes(b"junk")
    (saved / "manifest.json").unlink()  # as of a model of others
    refused("no causal LM could be loaded from there", load_llm, str(saved), given())


def test_a_frozen_model_in_8_bits_answers_and_without_the_library_it_is_one_line(
    saved, monkeypatch
):
    local = load_llm(str(saved), given(in_8bit="others"), max_tokens=4, cache="")
    assert local.policy.model.layers[0].mlp.up_proj.weight.dtype == torch.int8
    assert len(local.ask([("", "where ?")])) == 1
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    match = "8-bit weights need bitsandbytes: pip install bitsandbytes"
    refused(match, load_llm, str(saved), given(in_8bit="others"))
