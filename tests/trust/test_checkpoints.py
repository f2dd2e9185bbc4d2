"""Damaged checkpoints are passed over and named; a full disk is a one-line error."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import message, of_fault, rows_of, same_end, settings_for

import policy
import train
from plumbing.files import checkpoints, newest_whole

fault = pytest.mark.fault
RUN = "--save_every 2 --keep_checkpoints 0 --steps"


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """Returns the output folder of an unbroken run of 6 steps."""
    runs = tmp_path_factory.mktemp("whole")
    train.train(settings_for(model, runs, f"{RUN} 6"))
    return runs


@pytest.fixture
def run(whole, tmp_path):
    """Returns the folder of a stage after 4 of the 6 steps."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "t" / "stage1"
    shutil.rmtree(folder / "checkpoint-000006")
    return folder


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def empty(path):
    os.truncate(path, 0)


RUN_BY_A_PICKLE = "a-pickle-was-run"


class Pickled:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder / RUN_BY_A_PICKLE),)


def pickled(path):
    torch.save(Pickled(path.parents[2]), path)


def stray_folder(path):
    path.mkdir()


FOUR = "checkpoint-000004"
WEIGHTS, STATE = f"{FOUR}/model.safetensors", f"{FOUR}/trainer.pt"
# (fault, damage, damaged path, step of the newest whole checkpoint)
MATRIX = [
    (22, cut, WEIGHTS, 2),
    (27, cut, STATE, 2),
    (33, pickled, STATE, 2),
    (34, cut, f"{FOUR}/settings.json", 2),
    (37, os.unlink, f"{FOUR}/config.json", 2),
    (40, stray_folder, "checkpoint-000009", 4),
    (44, shutil.rmtree, FOUR, 2),
]


@pytest.mark.parametrize("damage, damaged, step", [of_fault(*row) for row in MATRIX])
def test_damaged_checkpoints_are_passed_over_and_named(damage, damaged, step, run, capsys):
    damage(run / damaged)
    assert newest_whole(run) == run / f"checkpoint-00000{step}"
    err, silent = capsys.readouterr().err, damage is shutil.rmtree
    assert silent or f"{run / damaged.split('/')[0]} is passed over: " in err
    assert err.count("\n") == (not silent)
    assert not [*run.parents[1].rglob(RUN_BY_A_PICKLE)]


def test_a_resume_passes_over_a_damaged_checkpoint_and_ends_as_the_unbroken_run(
    run, whole, model, tmp_path, capsys
):
    cut(run / STATE)
    train.train(settings_for(model, tmp_path, f"{RUN} 6 --resume"))
    assert f"going on from {run}/checkpoint-000002" in capsys.readouterr().out
    assert same_end(run, whole / "t" / "stage1")
    assert [path.name for path in run.glob("*.old1")] == [f"{FOUR}.old1"]


def test_a_resume_without_a_whole_checkpoint_is_an_error_and_deletes_nothing(
    run, model, tmp_path, capsys
):
    for path in checkpoints(run):
        empty(path / "trainer.pt")
    error_line = message(train.train, settings_for(model, tmp_path, f"{RUN} 6 --resume"))
    assert "none of its checkpoints can be read" in error_line and not error_line.startswith(
        "--model"
    )
    assert len(checkpoints(run)) == 2 and len(rows_of(run)) == 6


# --------------------------------------------------------------------------------------- full disks
@fault(45)
def test_a_disk_that_fills_up_keeps_the_older_checkpoints(model, tmp_path, monkeypatch):
    write = policy.save_merged

    def write_until_full(model, folder, weights):
        if "000004" in folder.name:
            raise OSError("No space left on device")
        write(model, folder, weights)

    monkeypatch.setattr(policy, "save_merged", write_until_full)
    with pytest.raises(OSError, match="No space left"):
        train.train(settings_for(model, tmp_path, f"{RUN} 6"))
    folder = tmp_path / "t" / "stage1"
    assert len(rows_of(folder)) == 4 and not [*folder.glob("*.partial")]
    assert [newest_whole(folder)] == checkpoints(folder)
