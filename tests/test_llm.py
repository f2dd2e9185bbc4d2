"""Tests llm.py: a server that fails in every way, over real sockets, and a local model."""

import time

import pytest
import torch
from conftest import ScriptedServer, message, said

from other_models import llm
from other_models.llm import LocalLLM, ServerLLM, load_llm
from policy import save_policy
from rollout import encode
from settings import Settings


class Server(ScriptedServer):
    """Serves an OpenAI-compatible model.

    `script(text)` returns a reply, or what ScriptedServer takes: (status, body), bytes or None. The
    client's first request, the probe, gets `probe`.
    """

    def __init__(self, script=str.upper, probe="yes"):
        super().__init__(self.chat)
        self.say, self.probe = script, probe
        self.base += "/v1"

    def chat(self, path, payload):
        text = payload["messages"][-1]["content"]
        reply = self.probe if text == llm.PROBE[1] else self.say(text)
        return (200, said(reply)) if isinstance(reply, str) else reply

    def texts(self):
        """Returns the text of each request after the probe."""
        return [payload["messages"][-1]["content"] for _, payload in self.posts[1:]]


@pytest.fixture
def serve(started):
    return lambda *arguments, **options: started(Server(*arguments, **options))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    """Makes the waits between retries short."""
    monkeypatch.setattr(llm, "BACKOFF", 0.01)


def asker(server, timeout=60.0, **options) -> ServerLLM:
    return ServerLLM(f"{server.base}#m", timeout=timeout, **options)


def requests(*texts):
    """Returns requests with the same instruction and these texts."""
    return [("do it", text) for text in texts]


# -------------------------------------------------------------------------- requests that succeed


def test_replies_come_in_the_order_of_the_requests_and_without_thoughts(serve):
    def slow_first(text):
        time.sleep(0.1 if text == "a" else 0)
        return f"<think>b? no</think>\n\n{text.upper()}"

    assert asker(serve(slow_first)).ask(requests("a", "b", "c")) == ["A", "B", "C"]


@pytest.mark.parametrize("key, sent", [("", None), ("abc", "Bearer abc")])
def test_a_request_is_greedy_and_has_the_key_of_the_environment_if_there_is_one(
    key, sent, serve, monkeypatch
):
    server = serve()
    monkeypatch.setenv("OPENAI_API_KEY", key)
    asker(server, max_tokens=7).ask([("Judge.", "who?"), ("", "")])
    options = {"model": "m", "temperature": 0, "top_p": 1.0, "max_tokens": 7}
    judge, who = {"role": "system", "content": "Judge."}, {"role": "user", "content": "who?"}
    # An empty instruction is left out, an empty text is sent.
    first, second = sorted((post for _, post in server.posts[1:]), key=str)
    assert first == options | {"messages": [judge, who]}
    assert second == options | {"messages": [who | {"content": ""}]}
    assert [headers["Authorization"] for headers in server.headers] == [sent] * 3


def test_equal_requests_are_sent_once_and_others_with_their_own_sampling(serve):
    server = serve()
    model = asker(server, max_tokens=7)
    batch = [*requests("a", "b", "a"), ("else", "a"), ("do it", "a", 0.3, 0.7, 8192)]
    assert model.ask(batch) == ["A", "B", "A", "A", "A"] and model.ask([]) == []
    assert sorted(server.texts()) == ["a", "a", "a", "b"] and model.failures == 0
    sent = {(p["temperature"], p["top_p"], p["max_tokens"]) for _, p in server.posts[1:]}
    assert sent == {(0, 1, 7), (0.3, 0.7, 8192)}


# --------------------------------------------------------------- servers that cannot be used at all


@pytest.mark.parametrize(
    ("probe", "match"),
    [
        (None, "nothing within 0.5 s"),
        ((404, b'{"error": {"message": "There is no `m`."}}'), "There is no `m`."),
    ],
)
def test_a_server_that_hangs_or_rejects_the_first_request_is_a_one_line_error(serve, probe, match):
    timeout = 60.0 if probe else 0.5
    spec = serve(probe=probe).base + "#m"
    assert match in message(load_llm, spec, Settings(timeout=timeout))


# ------------------------------------------------------------------------------ requests that fail


def once(fault):
    """Returns a script: the first try of each text fails in this way, the second succeeds."""
    tried = set()

    def script(text):
        if text in tried:
            return text.upper()
        tried.add(text)
        return fault

    return script


@pytest.mark.parametrize("fault", [(503, b"oh no"), None, b"", (200, b'{"choices": []}')])
def test_a_failed_request_is_sent_once_more_and_then_the_reply_is_none(serve, fault, monkeypatch):
    server = serve(once(fault))
    model = asker(server)
    # Only the test of a slow server needs a short limit.
    model.timeout = 1.0 if fault is None else 60.0
    assert model.ask(requests("a", "b")) == ["A", "B"] and model.failures == 0
    assert sorted(server.texts()) == ["a", "a", "b", "b"]
    monkeypatch.setattr(llm, "RETRIES", 0)
    assert model.ask(requests("c")) == [None] and model.failures == 1


@pytest.mark.parametrize("reply", [(400, b"too long"), (200, said(None))])
def test_a_rejected_request_and_a_reply_without_text_are_not_retried(serve, reply):
    """Such replies do not mean that the server is down, however many there are."""
    server = serve(lambda text: reply)
    model = asker(server)
    model.in_a_row = llm.GIVE_UP - 1
    assert model.ask(requests(*"abcd")) == [None] * 4
    assert len(server.texts()) == model.failures == 4
    assert len(model.rejected) == (4 if reply[0] == 400 else 0)


# ------------------------------------------------------------------------------------ a local model


TEXTS = ["who?", "Ana Bell was born in Kelmouth. In which country was she born?"]
TEXTS += ["Norland Norland", "a", "b c d e f g h"]


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("batch_size", [2, 16])
def test_a_left_padded_batch_gives_the_same_replies_as_single_requests(
    family, batch_size, bpe, request
):
    policy = request.getfixturevalue(family)
    expected, replies = (
        LocalLLM(policy, bpe, max_tokens=12, batch_size=size).ask(requests(*TEXTS))
        for size in (1, batch_size)
    )
    assert replies == expected
    assert len(set(expected)) > 2  # the reply depends on the prompt


def test_a_local_model_samples_some_requests_and_answers_the_others_greedily(qwen2, bpe):
    model = LocalLLM(qwen2, bpe, max_tokens=12, batch_size=2)
    greedy = model.ask(requests(*TEXTS))
    mixed = [(*request, 2.0, 0.9, 99) for request in requests(*TEXTS)] + requests(*TEXTS)
    state = torch.get_rng_state()
    replies = model.ask(mixed)
    assert replies[5:] == greedy and replies[:5] != greedy
    # Nearly uniform samples of two batches: with the same noise they would be equal.
    assert len(set(model.ask([("", text, 1e9) for text in "abcd"]))) == 4
    assert model.ask(mixed) == replies  # the sampling is seeded, apart from the global generator
    assert torch.equal(torch.get_rng_state(), state)
    # The reply gets the rest of the 512 positions.
    assert len(encode(bpe, model.ask([("do it", "word " * 200, 2.0, 1.0, 8192)])[0])) <= 512


def test_the_reply_to_a_prompt_longer_than_the_context_is_none(qwen2, bpe):
    model = LocalLLM(qwen2, bpe, max_tokens=8)  # 512 positions
    assert model.ask(requests("word " * 600, "who?"))[0] is None
    assert model.failures == 1


@pytest.mark.parametrize("precision, dtype", [("no", torch.float32), ("bf16", torch.bfloat16)])
def test_a_cpu_asks_other_models_in_the_policys_precision(
    precision, dtype, qwen2, bpe, tmp_path, monkeypatch
):
    save_policy(qwen2, bpe, tmp_path)
    monkeypatch.setattr("policy.PRECISION", precision)
    local = load_llm(str(tmp_path), Settings(), max_tokens=4)
    assert local.policy.dtype == dtype and len(local.ask([("", "where ?")])) == 1


def test_an_8_bit_model_is_loaded_and_answers(qwen2, bpe, tmp_path):
    save_policy(qwen2, bpe, tmp_path)
    local = load_llm(str(tmp_path), Settings(load_in_8bit=True), max_tokens=4)
    assert local.policy.model.layers[0].mlp.up_proj.weight.dtype == torch.int8
    assert len(local.ask([("", "where ?")])) == 1
