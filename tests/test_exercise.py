"""lab.exercise: each hole as it is opened, as ours, and with three wrong bodies."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, ROOT, command_line
from processes import exit_code, start_process
from referee import judge

from lab import exercise
from lab.exercise import holes, main, originals, stub

HOLES = holes()
# Of each hole three wrong bodies: a piece of ours -> what takes its place.
WRONG = """
mask_of_a_turn: [1] * len(ids) -> [1] * (len(ids) - 1) + [0]
mask_of_a_turn: [0] * len(ids) -> [1] * len(ids)
mask_of_a_turn: += logprobs -> += [-x for x in logprobs]
stop_rule: turn[-len(tag) :] -> turn[1 - len(tag) :]
stop_rule: >= max_new_tokens -> > max_new_tokens
stop_rule: if turn[-1] in self.eos_ids -> if turn[-1] not in self.watched
bm25_idf: - np.log(document_counts -> + np.log(document_counts
bm25_idf: n - document_counts -> n + 1 - document_counts
bm25_idf: np.where(idf < 0, floor, idf) -> idf
ur2_eq_1_and_2: -float(v) if v -> float(v) if v
ur2_eq_1_and_2: min(n, 2) -> min(n + 1, 2)
ur2_eq_1_and_2: (trajectory) if may_search else 0 -> (trajectory)
r_search_format: form += GAMMA -> form -= GAMMA
r_search_format: (e if searched else 1) -> (e if searched else 0)
r_search_format: GAMMA_ANSWER * has_one_box(trajectory, "answer") -> GAMMA_ANSWER
when_to_search_answer: -1.0 + beta -> -1.0 - beta
when_to_search_answer: len(trajectory.executed) -> (len(trajectory.executed) - 1)
when_to_search_answer: 1.0 if is_right(trajectory, correct) else softened -> softened
arena_relevance: if not numbers & gold -> if numbers & gold
arena_relevance: numbers == gold -> len(numbers) <= len(gold)
arena_relevance: 1.0 if numbers == gold else 0.5 -> 1.0
k3: torch.expm1(-d) + d -> torch.expm1(d) - d
k3: expm1(-d) -> exp(-d)
k3: torch.expm1(-d) + d -> torch.exp(-d) - 1 + d
clipped_surrogate: -torch.minimum -> torch.minimum
clipped_surrogate: clamp(1 - clip_low, 1 + clip_high) -> clamp(1 - clip_high, 1 + clip_low)
clipped_surrogate: torch.minimum(free, held) -> held
sequence_weights: return question -> return -question
sequence_weights: rows) -> rows // 2)
sequence_weights: question_weights(response_mask -> question_weights(torch.ones_like(response_mask)
gae: - values[:, t] -> + values[:, t]
gae: reversed(range(values.shape[1])) -> reversed(range(values.shape[1] - 1))
gae: torch.where(mask[:, t], values[:, t], next_value) -> values[:, t]
group_normalisation: (centered / -> (-centered /
group_normalisation: group_size - 1 - unknown -> group_size - unknown
group_normalisation: group_size - 1 - unknown -> group_size - 1
ur2_eq_5: return advantages -> return -advantages
ur2_eq_5: (known - 1) -> known
ur2_eq_5: (~rewards.isnan()).sum() -> torch.tensor(len(rewards))
dapo_filter: return ~equal -> return equal
dapo_filter: repeat_interleave(group_size) -> repeat_interleave(group_size).roll(1)
dapo_filter: as_groups(correct, -> as_groups(correct.nan_to_num(),
sum_over_micro_batches: loss * accelerator -> -loss * accelerator
sum_over_micro_batches: in enumerate(cuts, 1) -> in enumerate(cuts[1:], 2)
sum_over_micro_batches: (loss * accelerator.num_processes) -> (loss / len(cuts))
"""
BODIES = {hole.name: [("", "")] for hole in HOLES}
for line in WRONG.strip().splitlines():
    name, _, change = line.partition(": ")
    BODIES[name].append(tuple(change.split(" -> ")))


def write(hole, path: Path, old: str = "", new: str = "") -> Path:
    """Writes our functions into the file of an exercise, with a piece replaced."""
    ours = ["\n".join(lines) for _, lines in originals(hole)]
    text = "\n\n\n".join([stub(hole).split("\n\n\n")[0], *ours])
    assert old in text
    path.write_text(text.replace(old, new) + "\n", encoding="utf-8")
    return path


def result(hole, path: Path) -> tuple[int, str]:
    """What `check` exits with and prints, in a process that is forked from one with torch."""
    log = path.with_suffix(".log")
    what = hole.module, hole.functions, hole.tests, hole.chosen, hole.unused
    code = exit_code(start_process(judge, str(path), *what, log=log))
    return code, log.read_text()


@pytest.mark.parametrize("hole", HOLES, ids=lambda hole: hole.name)
def test_all(hole, tmp_path):
    opened = tmp_path / "opened.py"
    opened.write_text(stub(hole), encoding="utf-8")
    code, line = result(hole, opened)
    print("OPEN", code, line)
    for n, body in enumerate(BODIES[hole.name]):
        print(body, *result(hole, write(hole, tmp_path / f"body_{n}.py", *body)))
