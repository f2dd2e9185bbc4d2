"""What vLLM 0.32 answers on the routes of engines/server.py, with a tiny model."""

import copy
import hashlib
import json
import threading
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.functional import pad

from engines.server import BODY, ROUTES
from engines.slots import Engine
from policy import evaluating, load_policy
from rollout import StopRule, encode

BLOCK = 16  # tokens whose keys are found again


class StubVLLM:
    """(path, payload) -> (status, body), as `conftest.ScriptedServer` takes it."""

    def __init__(self, folder: str):
        policy, self.tokenizer = load_policy(folder, frozen=True)
        self.model, self.version = policy.language_model, "default"
        self.keys, self.lock = {}, threading.Lock()  # how a text begins -> the model that read it

    def __call__(self, path: str, asked) -> tuple[int, bytes]:
        with self.lock:
            name = path.partition("?")[0].rpartition("/")[2].removesuffix(".json")
            found = getattr(self, name)(asked)
        if name == "pause" and "clear_cache=false" not in path:
            self.keys.clear()
        return 200, json.dumps(found).encode()

    def openapi(self, _):
        return {"paths": {f"/{name}": {} for name in ROUTES.split()}}

    def models(self, _):
        return {"data": [{"id": "policy", "max_model_len": 256}]}

    def tokenize(self, asked):
        return {"tokens": encode(self.tokenizer, asked["prompt"])}

    def weight_info(self, _):
        return {"weight_version": self.version}

    def update_weight_version(self, asked):
        self.version = asked["new_version"]
        return {"success": True}

    def pause(self, _):
        return {"status": "paused or resumed"}

    resume = pause

    def reset_prefix_cache(self, _):
        self.keys.clear()
        return {"success": True}

    def collective_rpc(self, asked):
        state, self.model = {}, copy.deepcopy(self.model)
        for file in Path(asked["kwargs"]["weights_path"]).glob("*.safetensors"):
            state |= load_file(file)
        self.model.load_state_dict(state)
        return {"results": [None]}

    def weight_checker(self, _):
        """Embeddings and head have a number of rows that 64 divides; a tied head is not listed."""
        found = {}
        for name, weight in self.model.named_parameters():
            whole = pad(weight, (0, 0, 0, -len(weight) % 64)) if weight.ndim == 2 else weight
            content = whole.detach().contiguous().view(torch.uint8).numpy().tobytes()
            found[f"dp0:pp0:pcp0:tp0:{name}"] = hashlib.sha256(content).hexdigest()
        return {"checksums": found}

    @torch.no_grad()
    def completions(self, asked):
        """What a request leaves open would come from generation_config.json."""
        ids, room = asked["prompt"], asked["max_tokens"]
        assert BODY.items() <= asked.items() and len(ids) + room <= 256
        model = self.keys.setdefault(tuple(ids[:BLOCK]), self.model)
        tags = dict.fromkeys(asked.get("stop", []), "stop")
        rule = StopRule(self.tokenizer, tags, set(asked.get("stop_token_ids", [])))
        engine = Engine(model, 1, len(ids) + room, rule, asked["temperature"])
        engine.add(None, ids, room)
        with evaluating(model):
            [row] = engine.decode()
        logprobs, reason = {"token_logprobs": row.turn.logprobs}, row.turn.reason
        reason = "length" if reason == "length" else "stop"
        choice = {"token_ids": row.turn.ids, "logprobs": logprobs, "finish_reason": reason}
        return {"choices": [choice]}
