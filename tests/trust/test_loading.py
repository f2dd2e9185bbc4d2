"""Models, files of difficulties and of questions: nothing that is loaded runs code of its own, and
what is damaged is told before the work.
"""

import builtins
import gzip
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import message, model_of, small

from curriculum import read_difficulty
from data import Question, load_questions
from other_models.llm import ModelSettings, load_llm
from policy import load_policy
from prompts import PROTOCOLS, build_prompt
from retrievers.dense import Encoder
from rollout import check_prompt

OPENED = "opened"  # the file that code of a model would leave behind


def fault(number: int, *values):
    return pytest.param(*values, marks=pytest.mark.fault(number))


# ------------------------------------------------------------------------------------------- models


@pytest.fixture(scope="module")
def whole(bpe, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "model"
    model_of("qwen2", vocab_size=len(bpe) + 8, **small()).save_pretrained(path)
    bpe.save_pretrained(path)
    return path


@pytest.fixture
def changed(whole, tmp_path, monkeypatch):
    """changed({file: fields}) -> a copy with these fields in its JSON files, and code beside."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("it asks on the terminal"))

    def change(files: dict) -> str:
        path = shutil.copytree(whole, tmp_path / "model")
        (path / "own.py").write_text(
            f"open({str(tmp_path / OPENED)!r}, 'w')\nModel = Config = Words = int"
        )
        for name, fields in files.items():
            record = json.loads((path / name).read_text())
            (path / name).write_text(json.dumps(record | fields))
        return str(path)

    yield change
    assert not (tmp_path / OPENED).exists()


OWN_CODE = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
OWN_WORDS = {"AutoTokenizer": [None, "own.Words"]}


@pytest.mark.parametrize(
    "files",
    [
        fault(201, {"config.json": {"auto_map": OWN_CODE}}),
        fault(203, {"tokenizer_config.json": {"auto_map": OWN_WORDS}}),
        fault(203, {"tokenizer_config.json": {"auto_map": OWN_WORDS, "tokenizer_class": "Own"}}),
        fault(
            203,
            {"tokenizer_config.json": {"auto_map": OWN_WORDS, "tokenizer_class": "Qwen2Tokenizer"}},
        ),
    ],
)
def test_code_beside_a_model_of_a_known_kind_is_not_run(files, changed):
    path = changed(files)
    policy, tokenizer = load_policy(path)
    load_llm(path, ModelSettings(), cache="")
    assert tokenizer("Ana")["input_ids"] and policy(torch.tensor([[1, 2, 3]])).shape == (1, 2)


@pytest.mark.fault(202)
def test_a_model_that_is_code_of_its_own_is_one_line(changed):
    path = changed({"config.json": {"auto_map": OWN_CODE, "model_type": "own"}})
    for said in (message(load_policy, path), message(load_llm, path, ModelSettings(), cache="")):
        assert path in said and "could be loaded from there" in said


class Opens:
    def __reduce__(self):
        return open, (OPENED, "w")


@pytest.mark.fault(204)
@pytest.mark.parametrize("loads_else", [False, True])
def test_pickled_weights_are_not_loaded(loads_else, changed):
    path = Path(changed({}))
    weights = load_policy(str(path))[0].language_model.state_dict()
    (path / "model.safetensors").unlink()
    torch.save(weights if loads_else else weights | {"more": Opens()}, path / "pytorch_model.bin")
    assert "no file named model.safetensors" in message(load_policy, str(path))
    assert "model.safetensors" in message(load_llm, str(path), ModelSettings(), cache="")


TEMPLATES = [
    fault(205, "{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError: access to"),
    fault(206, "{% for m in messages %}{{ m['content'] }", "TemplateSyntaxError: "),
    fault(207, "{{ raise_exception('no chat') }}", "TemplateError: no chat"),
]


@pytest.mark.parametrize("template, why", TEMPLATES)
@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_chat_template_that_fails_is_one_line_when_it_is_loaded(file, template, why, changed):
    path = changed({"tokenizer_config.json": {"chat_template": template}})
    own = Path(path, "chat_template.jinja")
    own.write_text(template) if file == own.name else own.unlink()
    said = message(load_policy, path)
    assert f"--model {path}: its chat template fails ({why}" in said and file in said
    assert message(load_llm, path, ModelSettings(), cache="") == said.removeprefix("--model ")


def test_a_template_without_a_system_role_is_none_that_fails(changed):
    path = changed({})
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}hello"
    Path(path, "chat_template.jinja").write_text(template)
    assert load_policy(path)


def test_an_encoder_that_brings_code_is_refused_before_it_is_loaded(tmp_path):
    types = ["sentence_transformers.models.Transformer", "own.Pooling"]
    (tmp_path / "modules.json").write_text(json.dumps([{"type": its} for its in types]))
    assert "code of its own, own.Pooling): give a" in message(Encoder, str(tmp_path))


# -------------------------------------------------------------------------------- difficulty files

GOOD = {"id": "q0", "scores": [1.0, 0.0], "score": 0.5, "bucket": "medium"}
DIFFICULTIES = [
    fault(215, json.dumps(GOOD | {"bucket": "hardest"})),
    fault(216, json.dumps(GOOD | {"bucket": ["hard"]})),
    fault(217, json.dumps({"id": "q0", "score": 0.5, "bucket": "medium"})),
    fault(217, json.dumps(GOOD | {"scores": []})),
    fault(218, json.dumps(GOOD | {"scores": ["1", "0"]})),
    fault(219, json.dumps(GOOD | {"scores": [float("nan")]})),
    fault(219, '{"id": "q0", "scores": [NaN, 1.0]}'),
    fault(220, json.dumps(GOOD | {"scores": [1e9]})),
    fault(220, '{"id": "q0", "scores": [1e9]}'),
    fault(221, '{"scores": [1.0], "bucket": "hard"}'),
    fault(222, '{"id": "q0", "sco\n' + json.dumps(GOOD)),
    fault(222, '{"id": "q0", "scores": [1.'),
    fault(223, bytes(range(128, 256)) + b"\n\x00\x01"),
]


@pytest.mark.parametrize("content", DIFFICULTIES)
def test_a_difficulty_file_that_is_none_is_one_line(content, tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    said = message(read_difficulty, path, [Question("q0", "Who?", ["Ana"])])
    assert "d.jsonl" in said and ("measure" in said or "correct the file" in said)


# ---------------------------------------------------------------------------------- question files

ASKED = {"id": "q1", "question": "Who?", "answers": ["Ana"]}
QUESTIONS = [
    fault(
        224, r'{"id": "q1", "question": "a \ud83d?", "answers": ["a"]}', "line 1: not valid JSON"
    ),
    fault(
        225, '{"id": "q1", "question": "café?", "answers": ["a"]}'.encode("latin-1"), "not UTF-8"
    ),
    fault(226, json.dumps(ASKED | {"answers": [5]}), "line 1: field 'answers', item 1"),
    fault(226, json.dumps(ASKED | {"answers": 5}), "line 1: field 'answers'"),
    fault(227, "[" * 100_000 + "]" * 100_000, "not valid JSON"),
    fault(227, '{"id": "q1", "question": ' + "[" * 100_000, "line 1: not valid JSON"),
    fault(228, "", "the file is empty"),
    fault(228, " \n\n", "the file is empty"),
    fault(230, '{"id": NaN, "question": "Who?", "answers": ["a"]}', "line 1: field 'id'"),
    fault(231, b"\xef\xbb\xbf", "the file is empty"),
]


@pytest.mark.parametrize("content, why", QUESTIONS)
def test_a_question_file_that_is_none_is_one_line(content, why, tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    said = message(load_questions, path)
    assert said.startswith(f"{path}") and why in said and len(said) < 500


@pytest.mark.fault(229)
def test_a_gzip_of_blanks_is_an_empty_file(tmp_path):
    with gzip.open(tmp_path / "q.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(200):
            file.write(b" " * 2**20)
    assert "q.jsonl.gz: the file is empty" in message(load_questions, tmp_path / "q.jsonl.gz")


@pytest.mark.fault(232)
@pytest.mark.parametrize("reader", ["as it is", "without pyarrow"])
def test_parquet_that_is_none_is_one_line(reader, tmp_path, monkeypatch):
    (tmp_path / "q.parquet").write_bytes(b"PAR1" + bytes(range(256)) * 40 + b"PAR1")
    if reader == "as it is":
        pytest.importorskip("pyarrow", reason="needs the extra `data`")
    else:
        monkeypatch.setitem(sys.modules, "pyarrow", None)
    said = message(load_questions, tmp_path / "q.parquet")
    assert "q.parquet: " in said and ("not a readable parquet" in said or "pip install" in said)


@pytest.mark.fault(233)
@pytest.mark.parametrize("size", [100_000, pytest.param(10**7, marks=pytest.mark.trust)])
def test_a_question_of_ten_megabytes_is_read_and_too_long_in_one_line(size, bpe, tmp_path):
    path, words = tmp_path / "q.jsonl", "who was it " * (size // 11)
    path.write_text(json.dumps({"id": "long", "question": words, "answers": ["Ana"]}) + "\n")
    (question,) = load_questions(path)
    assert question.question == words
    prompt = build_prompt(PROTOCOLS["ur2"], question, bpe)
    said = message(check_prompt, question, prompt, 4096)
    assert said.startswith("question long: its prompt has ") and len(said) < 300
