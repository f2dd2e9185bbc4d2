"""Masked supervised training: imitate the model's part of a transcript, and only that.

    L = − Σ_t m_t log π_θ(y_t | y_<t) / Σ_t m_t        m_t = 1 on tokens to imitate, 0 on the prompt and on inserted text

The same mask as in RL: a model trained to write documents learns to invent them. A token may also be left out of the
loss because imitating it would teach a habit: the built-in world masks the choice between searching and answering, so
that reading is practised while the habit of searching stays rare.
Left out here: the papers' SFT baselines (direct, reasoning, rejection-sampled traces), which build on `train_sft`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm

from data import run_main
from policy import Policy, last_column, lr_factor, make_optimizer, micro_batches


@dataclass(frozen=True)
class Example:
    """Token ids and, per token, 1 if it is to be imitated. Same length; mask[0] is never used (nothing predicts it)."""

    ids: list[int]
    mask: list[int]


def collate_examples(examples: Sequence[Example], pad_id: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens [B, L], mask [B, T]: column t of the mask is about tokens[:, t + 1]."""
    width = max(len(e.ids) for e in examples)
    tokens = torch.full((len(examples), width), pad_id, dtype=torch.long)  # [B, L]
    mask = torch.zeros(len(examples), width)  # [B, L]
    for row, example in enumerate(examples):
        tokens[row, : len(example.ids)] = torch.tensor(example.ids)
        mask[row, : len(example.mask)] = torch.tensor(example.mask, dtype=torch.float)
    return tokens, mask[:, 1:]


def sft_loss(policy: Policy, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean negative log-prob over the tokens to imitate. Worked number: log-probs −1, −3 with mask 1, 1 -> 2."""
    logprobs = policy(tokens, mask=mask)  # [B, T]
    return -(logprobs * mask).sum() / mask.sum().clamp(min=1)


def sft_lr_factor(step: int, steps: int, warmup: int, decay_start: int) -> float:
    """Linear warm-up, flat, and from `decay_start` on linear to 0.

    Worked: 10 steps, warm-up 2, decay from 6: 1/2 1 1 1 1 1, then 1 3/4 1/2 1/4.
    """
    if step < decay_start:
        return lr_factor(step, decay_start, warmup, "constant")
    return lr_factor(step - decay_start, steps - decay_start, 0, "linear")


def train_sft(
    policy: Policy,
    next_examples: Callable[[int], Sequence[Example]],
    steps: int,
    lr: float,
    warmup: int = 0,
    decay_from: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.98),
    tokens_per_micro_batch: int = 16384,  # small for a tiny model on a CPU: padding then costs more than the extra passes
    description: str = "supervised",
) -> list[float]:
    """`steps` updates; `next_examples(step)` gives each step's batch. Returns the loss of every step.

    decay_from: the share of the run after which the learning rate falls linearly to 0. Micro-batches add up to the
    gradient of the whole batch: each is weighted by its share of the tokens.
    """
    optimizer = make_optimizer(policy, "adamw", lr, betas)
    start = max(warmup, int(decay_from * steps))  # the decay begins behind the warm-up
    losses = []
    with tqdm(total=steps, desc=description, dynamic_ncols=True) as bar:
        for step in range(steps):
            factor = sft_lr_factor(step, steps, warmup, start)
            for group in optimizer.param_groups:
                group["lr"] = lr * factor
            tokens, mask = collate_examples(next_examples(step))
            tokens, mask = tokens.to(policy.device), mask.to(policy.device)
            loss = 0.0
            for rows in micro_batches(mask, tokens_per_micro_batch):
                width = last_column(mask[rows])  # what stands behind the last token to imitate cannot influence it
                share = mask[rows].sum() / mask.sum().clamp(min=1)
                part = share * sft_loss(policy, tokens[rows, : width + 1], mask[rows, :width])
                part.backward()
                loss += part.item()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}")
    return losses


def main() -> None:
    print(collate_examples([Example([5, 6, 7, 8], [0, 0, 1, 1]), Example([5, 9], [0, 1])]))


if __name__ == "__main__":
    run_main(main)
