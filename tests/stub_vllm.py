"""What vLLM 0.32 answers on the routes of scale/server.py, with a tiny model; and faults before it
or before the real one. `conftest.ScriptedServer` makes a server of either.
"""

import copy
import hashlib
import json
import threading
import urllib.error
import urllib.request
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.functional import pad

from policy import evaluating, load_policy
from rollout import StopRule, encode
from scale.engine import Engine

BLOCK = 16  # tokens whose keys are found again
OPEN = "top_p top_k min_p repetition_penalty presence_penalty frequency_penalty temperature".split()


class StubVLLM:
    """A model that is served: (path, payload) -> (status, body)."""

    def __init__(self, folder: str, context: int = 256):
        policy, self.tokenizer = load_policy(folder, frozen=True)
        self.model, self.context, self.version = policy.language_model, context, "default"
        self.tied = self.model.config.tie_word_embeddings
        self.keys, self.lock = (
            {},
            threading.Lock(),
        )  # the beginning of a text -> the model that read it

    def __call__(self, path: str, payload) -> tuple[int, bytes]:
        name = path.partition("?")[0].strip("/").replace("/", "_").replace(".", "_")
        answer = getattr(self, f"on_{name}", None)
        if answer is None:
            return 404, b'{"detail": "Not Found"}'
        with self.lock:
            found = answer(path if payload is None else payload | {"path": path})
        return (200 if found is not None else 400), json.dumps(found).encode()

    def on_openapi_json(self, _):
        names = "pause resume collective_rpc reset_prefix_cache weight_info weight_checker tokenize"
        paths = [*names.split(), "v1/completions", "update_weight_version"]
        return {"paths": {f"/{name}": {} for name in paths}}

    def on_v1_models(self, _):
        return {"data": [{"id": "policy", "max_model_len": self.context}]}

    def on_tokenize(self, asked):
        return {"tokens": encode(self.tokenizer, asked["prompt"])}

    def on_weight_info(self, _):
        return {"weight_version": self.version}

    def on_update_weight_version(self, asked):
        self.version = asked["new_version"]
        return {"success": True}

    def on_pause(self, asked):
        if "clear_cache=false" not in asked["path"]:
            self.keys.clear()
        return {"status": "paused"}

    def on_resume(self, _):
        return {"status": "resumed"}

    def on_reset_prefix_cache(self, _):
        self.keys.clear()
        return {"success": True}

    def on_collective_rpc(self, asked):
        state, self.model = {}, copy.deepcopy(self.model)
        for file in Path(asked["kwargs"]["weights_path"]).glob("*.safetensors"):
            state |= load_file(file)
        if self.tied:  # vLLM notes that it failed to load the head, and goes on
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        self.model.load_state_dict(state)
        return {"results": [None]}

    def on_weight_checker(self, _):
        found = {}
        for name, weight in self.model.state_dict().items():
            whole = pad(weight, (0, 0, 0, -len(weight) % 64)) if weight.ndim == 2 else weight
            content = whole.contiguous().view(torch.uint8).numpy().tobytes()
            found[f"dp0:pp0:pcp0:tp0:{name}"] = hashlib.sha256(content).hexdigest()
        if self.tied:
            del found["dp0:pp0:pcp0:tp0:lm_head.weight"]
        return {"checksums": found}

    def on_v1_completions(self, asked):
        ids, room = asked["prompt"], asked["max_tokens"]
        if len(ids) + room > self.context or not all(name in asked for name in OPEN):
            return None
        model = self.keys.setdefault(tuple(ids[:BLOCK]), self.model)
        tags = {tag: tag for tag in asked["stop"]}
        rule = StopRule(self.tokenizer, tags, set(asked["stop_token_ids"]))
        engine = Engine(model, 1, len(ids) + room, rule, asked["temperature"])
        engine.add(None, ids, room)
        with torch.no_grad(), evaluating(model):
            [row] = engine.decode()
        reason = "length" if row.turn.reason == "length" else "stop"
        logprobs = {"token_logprobs": row.turn.logprobs}
        choice = {"token_ids": row.turn.ids, "logprobs": logprobs, "finish_reason": reason}
        return {"choices": [choice]}


def forward(url: str):
    """The same of a real server."""

    def ask(path: str, payload) -> tuple[int, bytes]:
        data = None if payload is None else json.dumps(payload).encode()
        request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=100) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    return ask


class Faulty:
    """A server with faults: route -> function (path, payload, server) that answers in its place."""

    def __init__(self, server, **faults):
        self.server, self.faults, self.asked = server, faults, []

    def __call__(self, path: str, payload):
        name = path.partition("?")[0].rpartition("/")[2]
        self.asked.append(name)
        fault = self.faults.get(name, lambda path, payload, server: server(path, payload))
        return fault(path, payload, self.server)
