"""Loading models and questions: no code from a model's folder is run, and a model or question that
cannot be used is a one-line error.
"""

import builtins
import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import message, of_fault

from data import load_questions
from other_models.llm import load_llm
from papers import PROTOCOLS
from policy import load_policy
from rollout import Environment, fitting_prompt
from settings import Settings

CODE = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
WORDS = {"auto_map": {"AutoTokenizer": [None, "own.Words"]}}


@pytest.fixture
def changed(model, tmp_path, monkeypatch):
    """Returns a function: changed(file, fields) copies the model, adds the fields to this JSON file
    and puts a code file beside it, and returns the path. Fails if that code ran.
    """
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("it asks on the terminal"))

    def change(file: str, fields: dict) -> Path:
        path = shutil.copytree(model, tmp_path / "model")
        (path / "own.py").write_text(f"open('{tmp_path}/ran', 'w')\nConfig = Model = Words = int")
        (path / file).write_text(json.dumps(json.loads((path / file).read_text()) | fields))
        return path

    yield change
    assert not (tmp_path / "ran").exists()


def load_other(path: Path):
    """Loads the model for another role than the policy's, such as the judge's."""
    return load_llm(str(path), Settings(), max_tokens=8)


def loading_error(path: Path) -> str:
    """Returns the error line of loading the policy; it is the same for any other model."""
    error_line = message(load_policy, str(path))
    assert error_line.startswith(f"--model {path}: ")
    assert f"--model {message(load_other, path)}" == error_line
    return error_line


@pytest.mark.parametrize(
    "file, fields",
    [
        of_fault(201, "config.json", {"auto_map": CODE}),
        of_fault(203, "tokenizer_config.json", WORDS),
    ],
)
def test_code_beside_a_model_of_a_known_kind_is_not_run(file, fields, changed):
    path = changed(file, fields)
    policy, tokenizer = load_policy(str(path))
    assert tokenizer and load_other(path) and policy(torch.tensor([[1, 2, 3]])).shape == (1, 2)


@pytest.mark.fault(202)
def test_a_model_that_needs_code_of_its_own_is_a_one_line_error(changed):
    path = changed("config.json", {"auto_map": CODE, "model_type": "own"})
    assert "no causal LM could be loaded from there: " in loading_error(path)


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
    assert "no file named model.safetensors" in loading_error(path)


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "template, reason",
    [
        of_fault(205, "{{ ''.__class__.__mro__[1].__subclasses__() }}", "access to attribute"),
        of_fault(206, "{% for m in messages %}{{ m['content'] }", "unexpected '}'"),
        of_fault(207, "{{ raise_exception('no chat') }}", "no chat"),
    ],
)
def test_a_chat_template_that_fails_is_a_one_line_error_at_loading(file, template, reason, changed):
    path = changed("tokenizer_config.json", {"chat_template": template})
    template_file = path / "chat_template.jinja"
    template_file.write_text(template) if file == template_file.name else template_file.unlink()
    error = loading_error(path)
    assert "no chat template that works" in error and file in error and f"there: {reason}" in error


@pytest.mark.fault(233)
def test_a_question_of_ten_megabytes_is_read_and_reported_as_too_long(bpe, tmp_path):
    path, text = tmp_path / "q.jsonl", "who was it " * 10_000
    path.write_text(json.dumps({"id": "long", "question": text, "answers": ["Ana"]}) + "\n")
    (question,) = load_questions(path)
    assert question.question == text
    environment = Environment(bpe, PROTOCOLS["ur2"], None, Settings(max_context=4096))
    error = message(fitting_prompt, question, environment)
    assert error.startswith("question long: its prompt has ") and len(error) < 300
