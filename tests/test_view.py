"""Tests view.py: which run it shows, where, and which steps."""

import os
from pathlib import Path

import pytest
from conftest import message

import view


def write_run(folder: Path) -> Path:
    (folder / "stage1").mkdir(parents=True)
    (folder / "stage1" / "settings.json").write_text("{}")
    (folder / "stage1" / "metrics.jsonl").write_text('{"step": 0}\n')
    return folder


def test_the_newest_run_is_shown_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message(view.main, []).startswith("there is no run in runs/: name one")
    for age, name in ((2, "a"), (1, "b")):
        metrics = write_run(tmp_path / "runs" / name) / "stage1" / "metrics.jsonl"
        os.utime(metrics, (1e9 - age, 1e9 - age))
    view.main([])
    assert [*Path("runs").rglob("index.html")] == [Path("runs/b/view/index.html")]


@pytest.mark.parametrize("folder", [".", "nowhere"])
def test_a_folder_without_a_run_is_an_error_of_one_line(folder, tmp_path):
    assert "no metrics.jsonl in it or in a stage" in message(view.main, [str(tmp_path / folder)])
