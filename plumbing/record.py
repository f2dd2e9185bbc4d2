"""Converts a step's trajectories to the records of formats/trajectories.py, which writes them.

Left out: gradients and optimizer steps.
"""

import functools
from collections.abc import Iterator
from dataclasses import astuple

import torch

from policy import Batch
from rewards import good_format
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
    if batch.logprobs is None:  # rows that are in no update keep these
        batch.logprobs = batch.old_logprobs.clone()  # [B, T]
        batch.token_weights = torch.zeros_like(batch.response_mask)  # [B, T]
    for name in ("logprobs", "old_logprobs", "token_weights"):
        put(rows, getattr(part, name), into=getattr(batch, name))


def kept_groups(count: int, keep: int, step: int) -> list[int]:
    """Returns the numbers of the groups of a step that are saved: `keep` of the `count` groups, or
    all with keep = −1. They are evenly spread, and from step to step each moves on by one group.

    Worked: with count = 6 and keep = 2, groups 0 and 3 in step 0, groups 1 and 4 in step 1.
    """
    keep = count if keep < 0 else min(keep, count)
    return sorted((step + i * count // keep) % count for i in range(keep))


def step_records(
    step: int, rollouts, batch: Batch | None, tokenizer, settings: Settings
) -> Iterator[dict]:
    """Yields the records of the saved groups. Row i of `batch` is trajectory rollouts.kept[i]."""
    size = settings.group_size
    rows = {n: row for row, n in enumerate(rollouts.kept)}
    for group in kept_groups(len(rollouts.trajectories) // size, settings.groups_kept, step):
        for n in range(group * size, (group + 1) * size):
            t = rollouts.trajectories[n]
            record = {"step": step, "group": group, "row": n % size} | to_record(t, tokenizer)
            record["rewards"] = rollouts.reward_terms[n]
            record["correct"] = bool(rollouts.correct[n])
            record["format"] = good_format(t)
            if n in rows:
                record |= token_numbers(batch, rows[n], t)
            yield record


def to_record(t: Trajectory, tokenizer) -> dict:
    """Returns the record of a trajectory: its question, tokens, searches and stop reason."""
    question = t.question
    return {
        "id": question.id,
        "question": question.question,
        "kind": question.kind,
        "may_search": question.may_search,
        "golds": question.answers,
        "prompt": "".join(text_of(tokenizer, number) for number in t.prompt_ids),
        "ids": t.response_ids,
        "tokens": [text_of(tokenizer, number) for number in t.response_ids],
        "mask": t.response_mask,
        "writers": [segment.writer for segment in t.segments if segment.writer != "model"],
        "answer": t.answer,
        "stop_reason": t.stop_reason,
        "searches": list(map(search_to_record, t.searches)),
        "rejected_queries": list(map(astuple, t.rejected_queries)),
    }


def search_to_record(search: Search) -> dict:
    documents = [(document.title, document.text) for document in search.documents]
    return vars(search) | {"documents": documents, "seconds": round(search.seconds, 4)}


def token_numbers(batch: Batch, row: int, t: Trajectory) -> dict:
    """Returns {name in the file: values of the trajectory}. The values are a list with one number
    per response token, or a single number if all sampled tokens have the same. They are rounded to
    6 decimals, token weights to 12, because the weight of a token may be a millionth.
    """
    numbers = {}
    first = len(t.prompt_ids) - 1  # the column of the first response token
    for name, field in NUMBERS.items():
        if (values := getattr(batch, field)) is None:
            continue
        values = values[row, first : first + len(t.response_ids)].double()
        rounded = values.round(decimals=12 if name == "weights" else 6).tolist()
        sampled = {value for value, mask in zip(rounded, t.response_mask, strict=True) if mask}
        numbers[name] = sampled.pop() if len(sampled) == 1 else rounded
    return numbers


@functools.lru_cache(maxsize=200_000)
def text_of(tokenizer, number: int) -> str:
    """Returns the text of one token, with its leading blank."""
    piece = tokenizer.convert_ids_to_tokens(number) or ""
    if piece.startswith("▁"):  # SentencePiece's blank, which `decode` would strip
        return " " + piece[1:].replace("▁", " ")
    return tokenizer.decode([number])
