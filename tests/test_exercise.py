"""Tests lab.exercise: each hole as opened, with our code and with three wrong bodies; and the
experiments of docs/class.md.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, ROOT, message
from processes import exit_code, start_process
from referee import judge

from lab.exercise import holes, main, originals, stub

HOLES = holes()
IDF = "exercises/03_bm25_idf.py"
# Three wrong bodies for each hole: a piece of our code -> the code that replaces it.
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
ur2_eq_1_and_2: n = may_search * count_valid -> n = count_valid
r_search_format: form += GAMMA -> form -= GAMMA
r_search_format: (e if searched else 1) -> (e if searched else 0)
r_search_format: GAMMA_ANSWER * has_one_box(trajectory, "answer") -> GAMMA_ANSWER
when_to_search_answer: -1.0 + price -> -1.0 - price
when_to_search_answer: beta * len(queries) -> beta * (len(queries) - 1)
when_to_search_answer: price * priced if right -> price if right
arena_relevance: if not numbers & gold -> if numbers & gold
arena_relevance: numbers == gold -> len(numbers) <= len(gold)
arena_relevance: 1.0 if numbers == gold else 0.5 -> 1.0
k3: torch.expm1(-d) + d -> torch.expm1(d) - d
k3: expm1(-d) -> exp(-d)
k3: torch.expm1(-d) + d -> torch.exp(-d) - 1 + d
clipped_surrogate: -torch.minimum -> torch.minimum
clipped_surrogate: clamp(1 - clip_low, 1 + clip_high) -> clamp(1 - clip_high, 1 + clip_low)
clipped_surrogate: torch.minimum(unclipped, clamped) -> clamped
sequence_weights: return question -> return -question
sequence_weights: rows) -> rows // 2)
sequence_weights: question_weights(response_mask -> question_weights(torch.ones_like(response_mask)
gae: - values[:, t] -> + values[:, t]
gae: reversed(range(values.shape[1])) -> reversed(range(values.shape[1] - 1))
gae: torch.where(mask[:, t], values[:, t], next_value) -> values[:, t]
group_normalisation: (centered / -> (-centered /
group_normalisation: group_size - 1 - unknown -> group_size - unknown
group_normalisation: group_size - 1 - unknown -> group_size - 1 - 0 * unknown
ur2_eq_5: return advantages -> return -advantages
ur2_eq_5: (known - 1) -> known
ur2_eq_5: (~rewards.isnan()).sum() -> torch.tensor(len(rewards))
dapo_filter: return ~equal -> return equal
dapo_filter: repeat_interleave(group_size) -> repeat_interleave(group_size).roll(1)
dapo_filter: equal_rewards(correct, -> equal_rewards(correct.nan_to_num(),
sum_over_micro_batches: loss * accelerator -> -loss * accelerator
sum_over_micro_batches: bar(cuts, -> bar(cuts[1:],
sum_over_micro_batches: (loss * accelerator.num_processes) -> (loss / len(cuts))
"""


def body_of(hole, old: str = "", new: str = "") -> str:
    """Returns the text of an exercise's file with our functions; a piece of them is replaced."""
    ours = [source for _, source in originals(hole)]
    assert old in "\n".join(ours)
    return "\n\n\n".join([stub(hole).split("\n\n\n")[0], *ours]).replace(old, new) + "\n"


def wrong_bodies(hole) -> list[str]:
    lines = [line.partition(": ") for line in WRONG.strip().splitlines()]
    changes = [change.split(" -> ") for name, _, change in lines if name == hole.name]
    return [body_of(hole, *change) for change in changes]


def result(hole, path: Path, text: str) -> tuple[int, str]:
    """Returns the exit code and the output of `check`, run in a forked process to save time."""
    path.write_text(text, encoding="utf-8")
    arguments = hole.module, hole.functions, hole.tests, hole.chosen, hole.unused
    log = path.with_suffix(".log")
    return exit_code(start_process(judge, str(path), *arguments, log=log)), log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("hole", HOLES, ids=lambda hole: hole.name)
def test_the_stub_fails_our_code_passes_and_each_wrong_body_has_a_wrong_number(hole, tmp_path):
    code, line = result(hole, tmp_path / "opened.py", stub(hole))
    assert code == 1 and "fails: NotImplementedError" in line
    code, line = result(hole, tmp_path / "ours.py", body_of(hole))
    assert code == 0 and re.fullmatch(r"all \d+ tests pass\n", line)
    bodies = wrong_bodies(hole)
    assert len(bodies) == 3
    sentence = (
        r"test_\w+(\[.*\])? \(test_\w+\.py, line \d+\) fails: AssertionError: .+; \d+ of .+\n"
    )
    for number, text in enumerate(bodies):
        code, line = result(hole, tmp_path / f"wrong_{number}.py", text)
        assert code == 1 and re.fullmatch(sentence, line), line


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_exercise_can_be_listed_opened_checked_shown_and_solved(folder, capfd):
    main(["list"])
    assert len(capfd.readouterr().out.splitlines()) == 15
    main(["open", "3"])
    opened = (folder / IDF).read_text()
    assert "Worked: N = 3" in opened and "from retriever import *\n" in opened
    with pytest.raises(FileExistsError):
        main(["open", "3"])
    (folder / IDF).write_text(opened.replace("def inverse", "def reverse"))
    error = message(main, ["check", "3"])
    assert "the function inverse_document_frequencies is missing" in error
    capfd.readouterr()
    main(["show", "3"])
    original = capfd.readouterr().out
    first_lines = "from retriever import *\nHALF = 0.5\n"
    (folder / IDF).write_text(first_lines + original.replace("0.5", "HALF"))
    with pytest.raises(SystemExit, match="0"):
        main(["check", "3"])
    assert capfd.readouterr().out == "all 2 tests pass\n"


# ------------------------------------------------------------------------------------ docs/class.md
BLOCKS = re.findall("```bash\n(.*?)```", (ROOT / "docs" / "class.md").read_text("utf-8"), re.DOTALL)
# For each experiment, the number that is changed, and a new number that makes it pass.
CHANGES = [
    ("title_boost=1", "title_boost=0"),
    ("beta=0.3", "beta=1.1"),
    ("2.4, 0.0]", "-9.0, 0.0]"),
    ("categorical(0.5)", "categorical(4.0)"),
    ("0.2, 0.28)", "0.2, 0.4)"),
    ("fallback_penalty=0.5", "fallback_penalty=8"),
]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(6))
def test_an_experiment_of_the_class_fails_as_printed_and_passes_after_one_change(number, folder):
    block, change = BLOCKS[number], CHANGES[number]
    (folder / "train.py").symlink_to(ROOT / "train.py")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    results = []
    assert block.count(change[0]) == 1
    for text in (block, block.replace(*change)):
        command = ["bash", "-ec", text]
        results.append(subprocess.run(command, env=ENVIRONMENT | {"PATH": path}, stderr=-1))
    assert results[0].returncode == 1 and b"AssertionError" in results[0].stderr
    assert results[1].returncode == 0
