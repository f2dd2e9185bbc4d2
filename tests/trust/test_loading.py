"""Models: nothing that is loaded runs code of its own, and what cannot be used is told at once."""

import builtins
import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import message, of_fault

from data import load_questions
from flags import ModelSettings
from other_models.llm import load_llm
from policy import load_policy
from prompts import PROTOCOLS, build_prompt
from rollout import check_prompt

CODE = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
WORDS = {"auto_map": {"AutoTokenizer": [None, "own.Words"]}}


@pytest.fixture
def changed(model, tmp_path, monkeypatch):
    """changed(file, fields) -> a copy with these in a JSON file, and with code, which never ran."""
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("it asks on the terminal"))

    def change(file: str, fields: dict) -> Path:
        path = shutil.copytree(model, tmp_path / "model")
        (path / "manifest.json").unlink()  # as of a model of others
        (path / "own.py").write_text(f"open('{tmp_path}/ran', 'w')\nConfig = Model = Words = int")
        (path / file).write_text(json.dumps(json.loads((path / file).read_text()) | fields))
        return path

    yield change
    assert not (tmp_path / "ran").exists()


def other(path: Path):
    return load_llm(str(path), ModelSettings(), max_tokens=8, cache="")


def refused(path: Path) -> str:
    """What is said of a policy, and of another model too."""
    said = message(load_policy, str(path))
    assert said.startswith(f"--model {path}: ")
    assert f"--model {message(other, path)}" == said
    return said


@pytest.mark.parametrize(
    "file, fields",
    [
        of_fault(201, "config.json", {"auto_map": CODE}),
        of_fault(203, "tokenizer_config.json", WORDS),
        of_fault(203, "tokenizer_config.json", WORDS | {"tokenizer_class": "Own"}),
        of_fault(203, "tokenizer_config.json", WORDS | {"tokenizer_class": "Qwen2Tokenizer"}),
    ],
)
def test_code_beside_a_model_of_a_known_kind_is_not_run(file, fields, changed):
    path = changed(file, fields)
    policy, tokenizer = load_policy(str(path))
    assert tokenizer and other(path) and policy(torch.tensor([[1, 2, 3]])).shape == (1, 2)


@pytest.mark.fault(202)
def test_a_model_that_is_code_of_its_own_is_one_line(changed):
    path = changed("config.json", {"auto_map": CODE, "model_type": "own"})
    assert "no causal LM could be loaded from there: " in refused(path)


class Runs:
    def __reduce__(self):
        return open, (f"{Path.cwd()}/ran", "w")


@pytest.mark.fault(204)
@pytest.mark.parametrize("more", [{}, {"more": Runs()}])
def test_pickled_weights_are_not_loaded(more, changed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = changed("config.json", {})
    weights = load_policy(str(path))[0].language_model.state_dict()
    (path / "model.safetensors").unlink()
    torch.save(weights | more, path / "pytorch_model.bin")
    assert "no file named model.safetensors" in refused(path)


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "template, why",
    [
        of_fault(205, "{{ ''.__class__.__mro__[1].__subclasses__() }}", "access to attribute"),
        of_fault(206, "{% for m in messages %}{{ m['content'] }", "unexpected '}'"),
        of_fault(207, "{{ raise_exception('no chat') }}", "no chat"),
    ],
)
def test_a_chat_template_that_fails_is_one_line_when_it_is_loaded(file, template, why, changed):
    path = changed("tokenizer_config.json", {"chat_template": template})
    own = path / "chat_template.jinja"
    own.write_text(template) if file == own.name else own.unlink()
    said = refused(path)
    assert "no chat template that works" in said and file in said and f"there: {why}" in said


@pytest.mark.fault(233)
@pytest.mark.parametrize("size", [100_000, pytest.param(10**7, marks=pytest.mark.trust)])
def test_a_question_of_ten_megabytes_is_read_and_too_long_in_one_line(size, bpe, tmp_path):
    path, words = tmp_path / "q.jsonl", "who was it " * (size // 11)
    path.write_text(json.dumps({"id": "long", "question": words, "answers": ["Ana"]}) + "\n")
    (question,) = load_questions(path)
    assert question.question == words
    said = message(check_prompt, question, build_prompt(PROTOCOLS["ur2"], question, bpe), 4096)
    assert said.startswith("question long: its prompt has ") and len(said) < 300
