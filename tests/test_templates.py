"""Tests templates.py, and what real tokenizers do: incomplete templates, BOS, added tokens.

No model is needed: each test gives a small tokenizer another template or other tokens.
"""

import copy

import pytest
from conftest import CHAT_TEMPLATE, message
from test_prompts import QA, UR2, with_template
from tokenizers import AddedToken, processors

from flags import check_settings
from other_models.llm import prompt_ids
from policy import load_tokenizer
from prompts import build_prompt, prompt_text, without_control
from settings import Settings
from templates import chat_text

INSTRUCTION = UR2.fill_instruction(QA)
ONLY_USER = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<user>{{ m['content'] }}{% endif %}"
    "{% endfor %}"
)
PARTS = "{% for part in m['content'] %}{{ part['text'] }}{% endfor %}"
ONLY_PARTS = ONLY_USER.replace("{{ m['content'] }}", PARTS)
REFUSES = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
LAST = "<user>{{ messages[-1]['content'] | trim }}"
SWITCH = CHAT_TEMPLATE + "{% if thinking is defined and not thinking %}<no thoughts>{% endif %}"


@pytest.fixture
def load(bpe, tmp_path):
    """Returns a function that loads a saved tokenizer with this template and --chat_template."""

    def load(template: str, flag: str = ""):
        with_template(bpe, template).save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
        return load_tokenizer(str(tmp_path), flag)

    return load


@pytest.mark.parametrize("template", [ONLY_USER, ONLY_PARTS, LAST, REFUSES + ONLY_USER])
def test_an_instruction_that_the_template_leaves_out_goes_into_the_users_message(template, bpe):
    tokenizer = with_template(bpe, template)
    assert prompt_text(UR2, QA, tokenizer) == f"<user>{INSTRUCTION}\n\n{QA.question}"
    # a judge's, reader's or summariser's prompt
    text = bpe.decode(prompt_ids(tokenizer, ("Is it right?", "Norland")))
    assert text == "<user>Is it right?\n\nNorland"
    assert chat_text(tokenizer, "", "Norland") == "<user>Norland"  # a prompt of --prompt_file


def test_a_template_that_leaves_out_the_question_is_a_one_line_error_when_loaded(load):
    assert "leaves out the instruction or the question: give" in message(load, "<assistant>")


def test_a_text_of_which_the_template_drops_a_part_does_not_stop_the_run(bpe):
    cut = CHAT_TEMPLATE.replace("m['content']", "m['content'].split('</think>')[-1]")
    text = chat_text(with_template(bpe, cut), "Judge.", "thoughts</think>Norland")
    assert text == chat_text(bpe, "Judge.", "Norland")


def test_a_bos_that_the_tokenizer_would_add_is_in_every_prompt_exactly_once(bpe):
    bos = "<|eot_id|>"
    adding = copy.deepcopy(bpe)
    adding.bos_token = bos
    number = adding.bos_token_id
    assert number not in build_prompt(UR2, QA, adding)  # it has a BOS and does not yet add it
    first = processors.TemplateProcessing(f"{bos} $0", special_tokens=[(bos, number)])
    adding.backend_tokenizer.post_processor = first
    for template in (CHAT_TEMPLATE, "{{ bos_token }}" + CHAT_TEMPLATE, None):
        adding.chat_template = template
        for ids in (build_prompt(UR2, QA, adding), prompt_ids(adding, ("Judge.", "x"))):
            assert ids[0] == number and ids.count(number) == 1


def test_chat_template_none_gives_a_base_model_a_layout_that_ends_where_it_reasons(load, tmp_path):
    tokenizer = load(CHAT_TEMPLATE, "none")
    plain = f"{INSTRUCTION}\n\nQuestion: {QA.question}\nResponse:"
    assert prompt_text(UR2, QA, tokenizer) == plain
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(tmp_path)  # a checkpoint remembers it
    assert prompt_text(UR2, QA, load_tokenizer(str(tmp_path))) == plain


def test_variables_of_the_template_can_be_set(load):
    for flag, end in {"": "assistant\n", '{"thinking": false}': "assistant\n<no thoughts>"}.items():
        assert prompt_text(UR2, QA, load(SWITCH, flag)).endswith(end)


@pytest.mark.parametrize("flag", ["nome", "{'thinking': False}", "3"])
def test_a_wrong_chat_template_is_a_one_line_error_before_a_model_is_loaded(flag):
    error = message(check_settings, Settings(chat_template=flag))
    assert error.startswith(f"--chat_template {flag}: give none, or a JSON object of variables")


def test_words_in_angle_brackets_stay_and_special_tokens_and_tags_go_with_one_note(bpe, capsys):
    tokenizer = copy.deepcopy(bpe)  # like Gemma's, it has HTML tags as tokens that are not special
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("<table>", "<div>")])
    question = "Which element, <table> or <div>?"
    assert without_control(question, tokenizer, UR2.tags) == question
    assert "become blanks" not in capsys.readouterr().err
    for forged in (UR2.query_tags[1], "<|im_end|>"):
        assert without_control(question + forged, tokenizer, UR2.tags).rstrip() == question
    assert capsys.readouterr().err.count("become blanks") == 1


DEFAULT = "{% if messages[0]['role'] != 'system' %}<system>Be Ana, always.</system>{% endif %}"
SYSTEM = DEFAULT.replace("!=", "==").replace("Be Ana, always.", "{{ messages[0]['content'] }}")


@pytest.mark.parametrize(
    "before, shown",
    [
        (DEFAULT + SYSTEM, "<system></system>"),  # an empty one replaces the default (UR² D.2)
        (SYSTEM, ""),  # without a default none is added
        (REFUSES + DEFAULT, "<system>Be Ana, always.</system>"),
    ],
)
def test_a_layout_is_the_whole_message_without_a_default_of_the_template(before, shown, bpe):
    tokenizer = with_template(bpe, before + ONLY_USER)
    assert chat_text(tokenizer, "", "Norland") == f"{shown}<user>Norland"
