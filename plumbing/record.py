"""Converts a step's trajectories to the records of formats/trajectories.py, which writes them.

Left out: gradients and optimizer steps.
"""

import functools
from collections.abc import Iterator

import numpy as np
import torch

from policy import Batch
from settings import Settings
from trajectory import Search, Trajectory
from update import put

NUMBERS = {  # name in the file -> field of the batch
    "sampled": "sampled_logprobs",
    "old": "old_logprobs",
    "new": "logprobs",
    "ref": "ref_logprobs",
    "advantages": "advantages",
    "weights": "token_weights",
}


def keep_numbers(batch: Batch, rows: torch.Tensor, part: Batch) -> None:
    """Copies the token weights and log-probs of an update's rows [n] into the batch [B, T]."""
    for name in ("logprobs", "token_weights"):
        if getattr(batch, name) is None:
            setattr(batch, name, torch.zeros_like(batch.response_mask))
        put(rows, getattr(part, name), into=getattr(batch, name))


def kept_groups(count: int, keep: int, step: int) -> list[int]:
    """Returns the numbers of the groups of a step that are saved: `keep` of the `count` groups, or
    all with keep = −1. They are evenly spread, and from step to step each moves on by one group.

    Worked: with count = 6 and keep = 2, groups 0 and 3 in step 0, groups 1 and 4 in step 1.
    """
    if keep < 0 or keep >= count:
        return list(range(count))
    return sorted({(step + i * count // keep) % count for i in range(keep)})


def step_records(
    step: int, rollouts, batch: Batch | None, tokenizer, settings: Settings
) -> Iterator[dict]:
    """Yields the records of the saved groups. Row i of `batch` is trajectory rollouts.kept[i]."""
    size = settings.group_size
    rows = {n: row for row, n in enumerate(rollouts.kept)}
    numbers = {} if batch is None else token_numbers(batch)
    for group in kept_groups(len(rollouts.trajectories) // size, settings.groups_kept, step):
        for n in range(group * size, (group + 1) * size):
            t = rollouts.trajectories[n]
            row = rows.get(n)
            record = {"step": step, "group": group, "row": n % size} | to_record(t, tokenizer)
            record["rewards"] = {k: round(v, 4) for k, v in rollouts.reward_terms[n].items()}
            record["correct"] = bool(rollouts.correct[n])
            yield record | ({} if row is None else row_numbers(numbers, row, t))


def to_record(t: Trajectory, tokenizer) -> dict:
    """Returns the record of a trajectory: its question, tokens, searches and stop reason."""
    question = t.question
    record = {
        "id": question.id,
        "question": question.question,
        "golds": question.answers,
        "kind": question.kind,
        "may_search": question.may_search,
    }
    record |= {
        "prompt_ids": t.prompt_ids,
        "prompt": texts_of(tokenizer, t.prompt_ids),
        "ids": t.response_ids,
        "tokens": texts_of(tokenizer, t.response_ids),
        "mask": t.response_mask,
        "answer": t.answer,
        "stop_reason": t.stop_reason,
    }
    return record | {
        "writers": [segment.writer for segment in t.segments if segment.writer != "model"],
        "searches": [search_to_record(search) for search in t.searches],
        "rejected_queries": [[rejected.reason, rejected.query] for rejected in t.rejected_queries],
    }


def search_to_record(search: Search) -> dict:
    documents = [[document.title, document.text] for document in search.documents]
    fields = {name: getattr(search, name) for name in "query text fallback error cut".split()}
    return fields | {"documents": documents, "seconds": round(search.seconds, 4)}


def token_numbers(batch: Batch) -> dict[str, np.ndarray]:
    """Returns the batch's numbers as {name in the file: array [B, T]}, rounded to 6 decimals. Token
    weights are rounded to 12, because the weight of a token may be a millionth.
    """
    numbers = {}
    for name, batch_name in NUMBERS.items():
        tensor = getattr(batch, batch_name)
        digits = 12 if name == "weights" else 6
        if tensor is not None:
            numbers[name] = tensor.double().numpy().round(digits)  # [B, T]
    return numbers


def row_numbers(numbers: dict[str, np.ndarray], row: int, t: Trajectory) -> dict:
    """Returns {name in the file: values of the trajectory}. The values are a list with one number
    per response token, or a single number if all sampled tokens have the same.
    """
    first = len(t.prompt_ids) - 1
    lists = {}
    columns = slice(first, first + len(t.response_ids))
    mask = np.array(t.response_mask, bool)
    for name, batch_values in numbers.items():
        values = batch_values[row, columns]
        sampled = values[mask[: len(values)]]
        alike = len(sampled) and sampled.min() == sampled.max()
        lists[name] = sampled[0].item() if alike else values.tolist()
    return lists


def texts_of(tokenizer, ids: list[int]) -> list[str]:
    return [text_of(tokenizer, number) for number in ids]


@functools.lru_cache(maxsize=200_000)
def text_of(tokenizer, number: int) -> str:
    """Returns the text of one token, with its leading blank."""
    piece = tokenizer.convert_ids_to_tokens(number) or ""
    if piece.startswith("▁"):  # SentencePiece's blank, which `decode` would strip
        return " " + piece[1:].replace("▁", " ")
    return tokenizer.decode([number])
