"""Damaged checkpoints are passed over and named; a full disk is a one-line error."""

import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from conftest import command_line, flags, message, of_fault, rows_of, same_end, settings_for
from processes import command, exit_code, exit_codes, start_process
from safetensors.torch import load_file, save_file

import policy
import train
from formats import manifest
from formats.manifest import NAME, seal
from formats.records import append_jsonl
from plumbing import checkpoint, files
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


def rewritten(change):
    """Returns a damage, which replaces the bytes of a file by change(bytes, half their number)."""

    def damage(path):
        data = path.read_bytes()
        path.write_bytes(change(data, len(data) // 2))

    return damage


flipped = rewritten(lambda b, n: b[:n] + bytes(x ^ 0x7F for x in b[n : n + 40]) + b[n + 40 :])
zeroed = rewritten(lambda b, n: b[:n].ljust(len(b), b"\0"))
headless = rewritten(lambda b, n: bytes(n) + b[n:])


def nan_weight(path):
    weights = load_file(path)
    next(iter(weights.values()))[0] = float("nan")
    save_file(weights, path, {"format": "pt"})


def nan_moments(path):
    state = torch.load(path)
    state["optimizer"]["state"][0]["exp_avg"][:] = float("nan")
    torch.save(state, path)


RUN_BY_A_PICKLE = "a-pickle-was-run"


class Pickled:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder / RUN_BY_A_PICKLE),)


def pickled(path):
    torch.save(Pickled(path.parents[2]), path)


def of_step_2(path):
    shutil.copy(path.parent.parent / "checkpoint-000002" / path.name, path)


def emptied(path):
    for file in path.iterdir():
        file.unlink()


def stray_file(path):
    path.touch()


def stray_folder(path):
    path.mkdir()


def renamed(path):
    shutil.copytree(path.parent / "checkpoint-000002", path)


WEIGHTS, STATE = "checkpoint-000004/model.safetensors", "checkpoint-000004/trainer.pt"
FOUR = "checkpoint-000004"
# (fault, damage, damaged path, fragment of the message or "", step of the newest whole checkpoint)
MATRIX = [
    (22, cut, WEIGHTS, "model.safetensors has", 2),
    (23, empty, WEIGHTS, "model.safetensors has 0 bytes", 2),
    (24, flipped, WEIGHTS, "model.safetensors is not what was written", 2),
    (25, zeroed, WEIGHTS, "model.safetensors is not what was written", 2),
    (26, nan_weight, WEIGHTS, "model.safetensors is not what was written", 2),
    (27, cut, STATE, "trainer.pt has", 2),
    (28, empty, STATE, "trainer.pt has 0 bytes", 2),
    (29, os.unlink, STATE, "trainer.pt is missing", 2),
    (30, flipped, STATE, "trainer.pt is not what was written", 2),
    (31, of_step_2, STATE, "trainer.pt is not what was written", 2),
    (32, nan_moments, STATE, "trainer.pt is not what was written", 2),
    (33, pickled, STATE, "trainer.pt has", 2),
    (34, cut, f"{FOUR}/settings.json", "settings.json has", 2),
    (35, os.unlink, f"{FOUR}/settings.json", "settings.json is missing", 2),
    (36, cut, f"{FOUR}/config.json", "config.json has", 2),
    (37, os.unlink, f"{FOUR}/config.json", "config.json is missing", 2),
    (38, cut, f"{FOUR}/tokenizer.json", "tokenizer.json has", 2),
    (39, emptied, FOUR, "it has no manifest.json", 2),
    (39, cut, f"{FOUR}/{NAME}", "its manifest.json cannot be read", 2),
    (39, renamed, "checkpoint-000006", "it is of step 2", 4),
    (40, stray_file, "checkpoint-000009", "", 4),
    (40, stray_folder, "checkpoint-000009", "it has no manifest.json", 4),
    (44, shutil.rmtree, FOUR, "", 2),
]
CASES = [of_fault(*row) for row in MATRIX]


@pytest.mark.parametrize("damage, damaged, fragment, step", CASES)
def test_damaged_checkpoints_are_passed_over_and_named(
    damage, damaged, fragment, step, run, capsys
):
    damage(run / damaged)
    assert newest_whole(run) == run / f"checkpoint-00000{step}"
    err = capsys.readouterr().err
    assert err.count("\n") == bool(fragment) and fragment in err
    assert not fragment or f"{run / damaged.split('/')[0]} is passed over: " in err


@pytest.fixture
def large(run, monkeypatch):
    """Returns the same folder; its weights and trainer.pt count as large and have no sha256."""
    monkeypatch.setattr(manifest, "LARGE", 50_000)
    seal(run / FOUR, 4)
    sealed = json.loads((run / FOUR / NAME).read_text())["files"]
    without_sha256 = {name for name, (_, sha256) in sealed.items() if not sha256}
    assert without_sha256 == {"model.safetensors", "trainer.pt"}
    return run


@pytest.mark.parametrize(
    "damage, damaged, fragment, step",
    [
        of_fault(22, cut, WEIGHTS, "model.safetensors has", 2),
        pytest.param(headless, WEIGHTS, "model.safetensors is not what was written", 2),
        of_fault(32, nan_moments, STATE, "", 4),
    ],
)
def test_a_large_file_is_checked_by_size_and_header_alone(
    damage, damaged, fragment, step, large, capsys
):
    damage(large / damaged)
    assert newest_whole(large) == large / f"checkpoint-00000{step}"
    assert fragment in capsys.readouterr().err


@fault(31)
def test_a_large_state_of_another_step_is_a_one_line_error(large, model, tmp_path):
    of_step_2(large / STATE)
    error = message(train.train, settings_for(model, tmp_path, f"{RUN} 6 --resume"))
    assert f"{STATE} cannot be read (it lacks the optimizer's moments, or is of another" in error


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
    assert "no whole checkpoint is there" in error_line and not error_line.startswith("--model")
    assert len(checkpoints(run)) == 2 and len(rows_of(run)) == 6


@fault(33)
def test_a_pickled_command_in_the_state_is_not_run_under_a_new_manifest_either(run):
    pickled(run / STATE)
    seal(run / FOUR, 4)
    assert f"{run / STATE} cannot be read" in message(checkpoint.read_state, str(run / FOUR))
    assert not [*run.parents[1].rglob(RUN_BY_A_PICKLE)]
    # Loaded as a pickle, the file does run the command.
    torch.load(run / STATE, weights_only=False)
    assert [*run.parents[1].rglob(RUN_BY_A_PICKLE)]


def test_a_run_from_a_damaged_checkpoint_is_a_one_line_error(run, model, tmp_path, capsys):
    flipped(run / WEIGHTS)
    error = command_line(train.main, flags(run / FOUR, tmp_path, "--run_name other"), capsys)
    assert (
        "model.safetensors is not what was written: use another model, or remove manifest.json "
        "from this folder" in error
    )


def test_a_stage_starts_from_a_whole_checkpoint(run, model, tmp_path):
    cut(run / STATE)
    start, _ = files.starting_model(settings_for("", tmp_path, "--stage 2"))
    assert start == f"{run}/checkpoint-000002"


@fault(10)
def test_a_half_deleted_checkpoint_does_not_count(run, model, tmp_path, monkeypatch):
    monkeypatch.setattr(files.shutil, "rmtree", lambda path: os.unlink(path / "config.json"))
    files.prune(run, 1)
    assert [path.name for path in checkpoints(run)] == [FOUR]
    monkeypatch.undo()
    train.train(settings_for(model, tmp_path, f"{RUN} 5 --resume"))
    assert not [*run.glob("*.partial")]  # it would fill the disk


# --------------------------------------------------------------------------------------- full disks
@fault(45)
def test_a_disk_that_fills_up_keeps_the_older_checkpoints(model, tmp_path, monkeypatch):
    write = policy.save_merged

    def write_until_full(model, folder, weights):
        if "000004" in folder.name:
            raise OSError("No space left on device")
        write(model, folder, weights)

    monkeypatch.setattr(policy, "save_merged", write_until_full)
    error_line = message(train.train, settings_for(model, tmp_path, f"{RUN} 6"))
    folder = tmp_path / "t" / "stage1"
    assert "make room" in error_line and len(rows_of(folder)) == 4
    assert [newest_whole(folder)] == checkpoints(folder)


def limited(size: int, arguments: list[str]) -> None:
    """Trains while no file may become larger than `size` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    train.main(arguments)


def last_line(log: Path) -> str:
    text = log.read_text()
    assert "Traceback" not in text
    return text.strip().splitlines()[-1]


@fault(48)
@pytest.mark.parametrize("size", [1500, 3000, 20_000, 150_000])
def test_a_file_size_limit_is_a_one_line_error_and_a_resume_goes_on(
    size, run, model, whole, tmp_path
):
    arguments, log = flags(model, tmp_path, f"{RUN} 6 --resume"), tmp_path / "log"
    assert exit_code(command(log, limited, size, arguments)) == 2
    assert "cannot be " in last_line(log) and "make room" in last_line(log)
    assert sorted(run.glob("checkpoint*")) == [run / "checkpoint-000002", run / FOUR]
    train.train(settings_for(model, tmp_path, f"{RUN} 6 --resume"))
    assert same_end(run, whole / "t" / "stage1")


# -------------------------------------------------------------------------------------- JSONL files
def append_twenty(path: Path, child: int) -> None:
    for number in range(20):
        append_jsonl(path, [{"child": child, "number": number, "text": "x" * 20_000}])


@fault(50)
def test_eight_processes_append_to_one_file(tmp_path):
    path, log = tmp_path / "a.jsonl", tmp_path / "log"
    children = [start_process(append_twenty, path, child, log=log) for child in range(8)]
    assert exit_codes(children) == [0] * 8, log.read_text()
    records = [json.loads(line) for line in path.read_text().splitlines() if line]
    assert {(record["child"], record["number"]) for record in records} == {
        (child, number) for child in range(8) for number in range(20)
    }
