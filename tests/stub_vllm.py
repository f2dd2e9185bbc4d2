"""A stub of vLLM 0.32: it answers the routes that engines/server.py uses, with a tiny model."""

import copy
import json
import threading
from pathlib import Path

import torch
from safetensors.torch import load_file

from engines.server import BODY
from engines.slots import Engine
from policy import evaluating, load_policy
from rollout import StopRule

BLOCK = 16  # tokens of a cached prefix


class StubVLLM:
    """Maps (path, payload) to (status, body); it is a script of `conftest.ScriptedServer`."""

    def __init__(self, folder: str):
        policy, self.tokenizer = load_policy(folder, frozen=True)
        self.folder = folder
        self.model = policy.language_model
        # keys: the first tokens of a prompt -> the model whose keys are cached for them
        self.keys, self.lock = {}, threading.Lock()

    def __call__(self, path: str, payload) -> tuple[int, bytes]:
        with self.lock:
            name = path.partition("?")[0].rpartition("/")[2].removesuffix(".json")
            reply = getattr(self, name)(payload)
        if name == "pause" and "clear_cache=false" not in path:
            self.keys.clear()
        return 200, json.dumps(reply).encode()

    def models(self, _):
        return {"data": [{"id": "policy", "max_model_len": 256, "root": self.folder}]}

    def pause(self, _):
        return {"status": "paused or resumed"}

    resume = pause

    def reset_prefix_cache(self, _):
        self.keys.clear()
        return {"success": True}

    def collective_rpc(self, payload):
        state, self.model = {}, copy.deepcopy(self.model)
        for file in Path(payload["kwargs"]["weights_path"]).glob("*.safetensors"):
            state |= load_file(file)
        self.model.load_state_dict(state)
        return {"results": [None]}

    @torch.no_grad()
    def completions(self, payload):
        """Samples a turn. A request must set all of BODY: vLLM would read missing settings from
        generation_config.json.
        """
        ids, max_new_tokens = payload["prompt"], payload["max_tokens"]
        assert BODY.items() <= payload.items() and len(ids) + max_new_tokens <= 256
        model = self.keys.setdefault(tuple(ids[:BLOCK]), self.model)
        tags = dict.fromkeys(payload.get("stop", []), "stop")
        rule = StopRule(self.tokenizer, tags, set(payload.get("stop_token_ids", [])))
        engine = Engine(model, 1, len(ids) + max_new_tokens, rule, payload["temperature"])
        engine.add(None, ids, max_new_tokens)
        with evaluating(model):
            [row] = engine.decode()
        logprobs, reason = {"token_logprobs": row.turn.logprobs}, row.turn.reason
        reason = "length" if reason == "length" else "stop"
        choice = {"token_ids": row.turn.ids, "logprobs": logprobs, "finish_reason": reason}
        return {"choices": [choice]}
