"""Tests view.py: the curves of a run as a picture, and the folders of its pages."""

import json
import os
from pathlib import Path

import pytest

import view
from errors import InputError


def write_run(folder, stages):
    for name, records in stages.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def test_the_stages_of_a_run_are_drawn_one_after_the_other_or_a_single_one(tmp_path):
    first = [{"step": 0, "reward": 1.0}, {"step": 1, "reward": 2.0}]
    write_run(tmp_path, {"stage1": first, "stage2": [{"step": 0, "reward": 3.0}]})
    records, stages = view.read_run(tmp_path)
    assert [r["x"] for r in records] == [0, 1, 2]
    assert stages == [(0, "stage1"), (2, "stage2")]
    records, stages = view.read_run(tmp_path / "stage2")
    assert len(records) == 1 and stages == [(0, "stage2")]


def test_a_kind_of_question_that_a_step_lacks_leaves_a_gap_instead_of_a_zero():
    records = [
        {"x": 0, "em/a": 0.5},
        {"x": 1, "em/a": 0.6, "em/b": 0.1},
        {"x": 2, "em": 0.9, "emission": 1},
    ]
    assert view.series(records, ("em/",)) == {"a": ([0, 1], [0.5, 0.6]), "b": ([1], [0.1])}


def test_an_unfinished_last_line_is_left_out_and_other_broken_lines_are_counted(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "rew')
    assert view.read_run(tmp_path)[0] == [{"step": 0, "x": 0}]
    path.write_text('{"step": 0}\n{"step": \n{"step": 2}\n')
    assert [record["step"] for record in view.read_run(tmp_path)[0]] == [0, 2]
    assert "1 bad lines are left out" in capsys.readouterr().err


def test_the_running_mean_uses_only_the_last_values():
    assert view.smooth([0, 1, 2], 2) == [0, 0.5, 1.5]  # 0; (0 + 1) / 2; (1 + 2) / 2


def test_a_run_with_a_reference_has_a_panel_of_the_kl_by_each_estimator():
    (kl,) = view.filled_panels([{"x": 0, "k2": 0.2, "k3": 0.3}]).values()
    assert kl == {"k2": ([0], [0.2]), "k3": ([0], [0.3])}


def test_a_panel_without_numbers_is_not_drawn():
    plain = {"x": 0, "reward": 1.0, "grad_norm": 0.5}
    assert list(view.filled_panels([plain])) == ["reward", "can it learn?"]
    panels = view.filled_panels([plain | {"value_loss": 3.0, "informative": 0.75}])
    assert list(panels) == ["reward", "can it learn?", "does the critic foresee the reward?"]
    assert panels["can it learn?"] == {"grad_norm": ([0], [0.5]), "informative": ([0], [0.75])}


@pytest.mark.parametrize("panels", [1, 3, 7])
def test_any_number_of_panels_makes_a_picture(tmp_path, panels):
    pytest.importorskip("matplotlib")
    names = "reward em/a searched/a searches model_tokens grad_norm value_loss".split()[:panels]
    write_run(tmp_path, {"stage1": [dict.fromkeys([*names, "step"], 1)] * 2})
    view.draw(tmp_path, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_newest_run_is_shown_by_default_and_two_runs_get_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="runs: there is no run"):
        view.main([])
    for age, name in ((2, "a"), (1, "b")):
        write_run(tmp_path / "runs" / name, {"stage1": [{"step": 0, "reward": 1.0}]})
        os.utime(tmp_path / "runs" / name / "stage1" / "metrics.jsonl", (1e9 - age, 1e9 - age))
    view.main([])
    view.main(["runs/a", "runs/b"])
    pages = {str(page.parent.relative_to("runs")) for page in Path("runs").rglob("index.html")}
    assert pages == {"b/view", "a-b"}
