"""How an instruction and a text become a prompt: the tokenizer's chat template, or a plain layout.

Five things that templates and tokenizers do would go unnoticed, because none raises an error:
  * a template that has no system role may leave the instruction out: then it goes into the user's
    message;
  * a template may write a system message of its own if it gets none, above a layout that is to be
    the whole message: then it gets an empty one, if this makes the prompt shorter;
  * a template may render only contents that are lists of parts;
  * a template may write no BOS although the tokenizer alone would put one before every text;
  * a base model may have a chat template that it was never trained with: --chat_template none.

Left out: templates of servers, which render their own prompts.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial

from errors import InputError

PROBE = "⟦8417⟧"  # stands for the text while the layout is chosen


def encode(tokenizer, text: str) -> list[int]:
    """Returns the ids of a text, to which the tokenizer adds no special tokens."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def messages_of(system: str | None, content: str | list) -> list[dict]:
    """Returns the messages of a request; with None it has no system message."""
    user = {"role": "user", "content": content}
    return [user] if system is None else [{"role": "system", "content": system}, user]


def chat_text(tokenizer, instruction: str, text: str, plain: str = "{}\n\nAnswer:") -> str:
    """Renders system and user message by the chat template. Without a template, the prompt is the
    instruction and the text in the format `plain`, or the text alone if there is no instruction.
    """
    if template := getattr(tokenizer, "chat_template", None):
        prompt = choose_layout(tokenizer, instruction, str(template))(text)
    else:
        prompt = f"{instruction}\n\n{plain.format(text)}" if instruction else text
    bos = tokenizer.bos_token if tokenizer.bos_token_id in tokenizer("")["input_ids"] else ""
    return bos + prompt.removeprefix(bos)


@lru_cache(maxsize=64)
def choose_layout(tokenizer, instruction: str, template: str) -> Callable[[str], str]:
    """Returns a function that renders the prompt for a text: by the first layout whose prompt has
    the instruction and the text in it. Without an instruction it is the layout with the shortest
    prompt, so an empty system message replaces one that the template writes by itself.
    """

    def render(system: str | None, in_parts: bool, text: str) -> str:
        if system is None:  # the instruction is in the user's message
            text = "\n\n".join(filter(None, [instruction, text]))
        messages = messages_of(system, [{"type": "text", "text": text}] if in_parts else text)
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    # The built-in models know their protocol. To them most words of an instruction are <unk>, and
    # their template leaves it out.
    ids = encode(tokenizer, instruction)
    needed = "" if tokenizer.unk_token_id in ids else instruction.strip()
    lengths = {}  # layout -> length of its prompt
    for system, in_parts in ((instruction, False), (None, False), (None, True)):
        layout = partial(render, system, in_parts)
        with suppress(Exception):  # some templates without a system role raise their own error
            prompt = layout(PROBE)
            if PROBE in prompt and needed in prompt:
                lengths[layout] = len(prompt)
    if lengths:
        return next(iter(lengths)) if instruction else min(lengths, key=lengths.get)
    render(None, False, PROBE)  # raises the template's own error, if it has one
    raise InputError("it leaves out the instruction or the question: give --chat_template none")


def variables_of(chat_template: str) -> dict:
    """Parses --chat_template: '{"enable_thinking": false}' -> {"enable_thinking": False}; "" and
    "none" set no variables.
    """
    with suppress(ValueError, TypeError):
        return {**json.loads(chat_template.removeprefix("none") or "{}")}
    raise InputError(
        f"--chat_template {chat_template}: give none, or a JSON object of variables, such as "
        "'{\"enable_thinking\": false}'"
    )
