"""Masked supervised training: imitate the model's part of a text, and only that.

    L = − Σ_t m_t log π_θ(y_t | y_<t) / Σ_t m_t      m_t = 1 on tokens to imitate,
                                                     0 on the prompt and on inserted text

RL masks the same tokens, because a model trained to write documents learns to invent them. Tokens
that would teach an unwanted habit can be masked too. For example, in most traces with a search the
built-in world masks the token that decides to search: the model practises reading, while searching
stays rare.

`example_of` ends a text in EOS (if the tokenizer has one), so that the model learns to stop.
Examples are packed, as in RL (scale/packing.py): in the supervised warm-up for UR² (world/toy.py),
a batch of 64 has about 4,600 positions with padding, but only about 1,850 are computed. On one
machine's CPU, the same examples in the same order give the same weights. Left out: several
processes.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from tqdm import tqdm

from data import Question
from errors import InputError
from policy import Policy, last_column, lr_factor, padded
from prompts import Protocol, number_documents, without_control
from rollout import encode
from scale.packing import micro_batches


@dataclass(frozen=True)
class SFTSettings:
    steps: int
    lr: float
    warmup_steps: int = 0
    decay_from: float = 0.0  # share of the run after which the learning rate decays towards 0
    betas: tuple[float, float] = (0.9, 0.98)
    muon_lr: float = 0.0  # above 0: Muon trains the layers' matrices, AdamW the rest
    tokens_per_micro_batch: int = 16384  # padding included


@dataclass(frozen=True)
class Example:
    """Token ids, and a mask, 1 for each token to imitate. The first token's mask is not read, since
    nothing predicts that token.
    """

    ids: list[int]
    mask: list[int]


def example_of(prompt: list[int], pieces: Sequence[tuple[str, bool]], tokenizer) -> Example:
    """Returns an example: the prompt, then the pieces (text, imitate), then EOS. Each piece is
    encoded alone, as in the rollout; otherwise a token could span a turn and the next documents.
    """
    ids = list(prompt)
    mask = [0] * len(prompt)
    for text, imitate in pieces:
        piece = encode(tokenizer, text)
        ids += piece
        mask += [int(imitate)] * len(piece)
    end = tokenizer.eos_token_id
    if end not in (None, *ids[len(prompt) :][-1:]):  # a transcript may already end in EOS
        ids.append(end)
        mask.append(1)
    return Example(ids, mask)


def citing(question: Question, protocol: Protocol, tokenizer) -> str:
    """Returns ARENA's response: <relevance>[1, 3]</relevance> <analysis>...</analysis>, then the
    first gold answer in the protocol's tags. Naive-GRPO's has <think>...</think> in their place.
    """
    begin, end = protocol.answer_tags
    answer = f"{begin} {question.answers[0]} {end}"
    analysis = without_control(analysis_of(question, protocol), tokenizer, protocol.tags).strip()
    if protocol.name == "arena_naive":
        return f"<think> {analysis} </think>\n{answer}"
    protocol.section_tags("relevance")  # raises an error if the protocol has no such section
    numbers = list(question.supporting)
    return f"<relevance>{numbers}</relevance>\n<analysis> {analysis} </analysis>\n{answer}"


def analysis_of(question: Question, protocol: Protocol) -> str:
    """Quotes one sentence of each gold reference (the first that contains an answer, else the first
    with the answer of a hop, else its first), then states the first gold answer.
    """
    facts = [question.answers, [hop.answer for hop in question.hops if hop.answer]]

    def shown(sentence: str) -> list[bool]:
        return [any(fact.lower() in sentence.lower() for fact in answers) for answers in facts]

    quotes = [replace(r, text=max(sentences(r.text), key=shown)) for r in question.references]
    lines = number_documents(quotes, protocol.document_layouts)
    quoted = [lines[number - 1] for number in question.supporting]
    return " ".join([*quoted, f"So the answer is {question.answers[0]}."])


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text.strip())


def collate_examples(examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Returns tokens [B, L] and mask [B, T]; column t of the mask belongs to tokens[:, t + 1]."""
    mask = padded([example.mask for example in examples], "float32")  # [B, L]
    return padded([example.ids for example in examples], "int64"), mask[:, 1:]


def sft_loss(policy: Policy, tokens: Tensor, mask: Tensor) -> Tensor:
    """Returns the mean −log π of the tokens to imitate. Worked: log-probs −1, −3, mask 1, 1: 2."""
    logprobs = policy(tokens, mask=mask)  # [B, T]
    return -(logprobs * mask).sum() / mask.sum().clamp(min=1)


class Muon(torch.optim.Optimizer):
    """Muon (Jordan 2024): all singular values of a matrix's momentum are made about equal.

        M ← 0.95 M + 0.05 g;   W ← W − lr · √max(1, rows / columns) · O,
        O = orthogonalize(0.95 M + 0.05 g)
    Equals torch.optim.Muon without weight decay, except that torch's computes O in bf16. On a CPU
    without instructions for bf16, that takes eight times as long as fp32.
    """

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 1 - 0.95)
                by_shape[weight.shape].append(weight)
            # Multiplying all matrices of one shape as a batch takes half as long as one by one.
            for (rows, columns), weights in by_shape.items():
                nesterov = [w.grad.lerp(self.state[w]["momentum"], 0.95) for w in weights]
                updates = orthogonalize(torch.stack(nesterov))
                for weight, update in zip(weights, updates, strict=True):
                    weight.add_(update, alpha=-group["lr"] * math.sqrt(max(1, rows / columns)))


def orthogonalize(matrices: Tensor) -> Tensor:
    """Returns U diag(s) Vᵀ for each matrix U diag(σ) Vᵀ in [n, rows, columns]. Five Newton-Schulz
    steps x ← 3.4445 x − 4.775 x³ + 2.0315 x⁵ act on all singular values at once. Each starts as
    x = σ / (norm of the matrix) and ends as s. If it starts at 0.02 or more, s is between 0.68 and
    1.14.
    Worked: σ = 0.01, 0.6, 0.8 → s = 0.70, 0.72, 1.12.
    """
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if wide else matrices.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(
            x, torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445
        )
    return x if wide else x.mT


def optimizers_of(policy: Policy, settings: SFTSettings) -> dict[torch.optim.Optimizer, float]:
    """Returns {optimizer: learning rate}."""
    matrices = {}
    if settings.muon_lr:
        layers = policy.language_model.base_model.layers
        # The keys are an ordered set.
        matrices = {p: None for p in layers.parameters() if p.ndim == 2}
    rest = [p for p in policy.parameters() if p.requires_grad and p not in matrices]
    # fused=True, because AdamW's default on a GPU needs as much memory again as all weights.
    adamw = torch.optim.AdamW(rest, betas=settings.betas, weight_decay=0.0, fused=True)
    optimizers = {adamw: settings.lr}
    if matrices:
        optimizers[Muon(matrices, {"lr": 0.0})] = settings.muon_lr
    return optimizers


def train_sft(
    policy: Policy,
    next_examples: Callable[[int], Sequence[Example]],
    settings: SFTSettings,
    description: str = "supervised",
) -> list[float]:
    """Makes `settings.steps` updates, each on `next_examples(step)`, and returns the losses. Raises
    an InputError if one of them is not finite: such a model must not be saved.
    """
    optimizers = optimizers_of(policy, settings)
    losses = []
    bar = tqdm(range(settings.steps), description, dynamic_ncols=True)
    for step in bar:
        warmup = settings.warmup_steps / settings.steps
        factor = lr_factor(step, settings.steps, warmup, "linear", settings.decay_from)
        for optimizer, lr in optimizers.items():
            optimizer.param_groups[0]["lr"] = lr * factor
        losses.append(backward(policy, next_examples(step), settings.tokens_per_micro_batch))
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        # With refresh=True a log file would get a line for every step.
        bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    if not math.isfinite(sum(losses)):
        raise InputError(f"the loss was not finite: nothing was saved; lower --lr {settings.lr:g}")
    return losses


def backward(policy: Policy, examples: Sequence[Example], tokens_per_micro_batch: int) -> float:
    """Computes the gradient of the whole batch's loss in micro-batches and returns the loss. Each
    micro-batch is weighted by its share of the tokens to imitate, because the plain mean of the
    micro-batches' losses would not be the batch's mean over tokens.
    """
    tokens, mask = collate_examples(examples)
    tokens, mask = tokens.to(policy.device), mask.to(policy.device)  # [B, L], [B, T]
    loss = 0.0
    for rows in micro_batches(tokens, mask, tokens_per_micro_batch):
        width = last_column(mask[rows])  # nothing after the last imitated token is read
        share = mask[rows].sum() / mask.sum().clamp(min=1)
        part = share * sft_loss(policy, tokens[rows, : width + 1], mask[rows, :width])
        part.backward()
        loss += part.item()
    return loss
