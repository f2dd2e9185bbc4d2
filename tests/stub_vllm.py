"""What vLLM 0.32 answers on the routes of scale/server.py, with a tiny model."""

import copy
import hashlib
import json
import threading
from pathlib import Path

import torch
from safetensors.torch import load_file

from policy import evaluating, load_policy
from rollout import StopRule
from scale.engine import Engine
from scale.server import BODY

BLOCK = 16  # tokens whose keys are cached


class StubVLLM:
    """(path, payload) -> (status, body), as `conftest.ScriptedServer` takes it."""

    def __init__(self, folder: str):
        policy, self.tokenizer = load_policy(folder, frozen=True)
        self.model, self.version = policy.language_model, "default"
        head = self.model.lm_head  # untied, as in what `python -m scale.server` serves
        head.weight = torch.nn.Parameter(head.weight.clone())
        self.keys, self.lock = {}, threading.Lock()  # how a text begins -> the model that read it

    def __call__(self, path: str, asked) -> tuple[int, bytes]:
        with self.lock:
            reply = getattr(self, path.rpartition("/")[2])(asked)
        return 200, json.dumps(reply).encode()

    def weight_info(self, _):
        return {"weight_version": self.version}

    def update_weight_version(self, asked):
        self.version = asked["new_version"]
        return {"success": True}

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
        """A tied head is not listed. (Those of matrices are of padded or split ones.)"""
        checksums = {}
        for name, weight in self.model.named_parameters():
            data = weight.detach().view(torch.uint8).numpy().data
            checksums[f"dp0:pp0:pcp0:tp0:{name}"] = hashlib.sha256(data).hexdigest()
        return {"checksums": checksums}

    @torch.no_grad()
    def completions(self, asked):
        """A request must leave nothing to generation_config.json."""
        ids, max_tokens = asked["prompt"], asked["max_tokens"]
        assert BODY.items() <= asked.items() and len(ids) + max_tokens <= 256
        model = self.keys.setdefault(tuple(ids[:BLOCK]), self.model)
        tags = dict.fromkeys(asked.get("stop", []), "stop")
        rule = StopRule(self.tokenizer, tags, set(asked.get("stop_token_ids", [])))
        engine = Engine(model, 1, len(ids) + max_tokens, rule, asked["temperature"])
        engine.add(None, ids, max_tokens)
        with evaluating(model):
            [row] = engine.decode()
        logprobs, reason = {"token_logprobs": row.turn.logprobs}, row.turn.reason
        reason = "length" if reason == "length" else "stop"
        choice = {"token_ids": row.turn.ids, "logprobs": logprobs, "finish_reason": reason}
        return {"choices": [choice]}
