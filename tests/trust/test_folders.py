"""A run's folder: other starts, signals, and files that are not what the run wrote."""

import contextlib
import errno
import fcntl
import gzip
import json
import os
import shutil
import signal
import sys
import termios
import threading

import pytest
import torch
from conftest import command, command_line, flags, message, rows_of, settings_for
from safetensors.torch import load_file, save_file

import train
from formats import manifest, records
from formats.manifest import seal, wrong_with
from formats.trajectories import NAME, append_trajectories, cut_trajectories, read_trajectories
from plumbing import build, checkpoint, files
from plumbing.files import checkpoints, locked
from policy import load_policy
from world import toy

fault = pytest.mark.fault
RUN = "--save_every 1 --keep_checkpoints 0 --groups_kept -1 --steps"
LONG = "--steps 4 --save_every 1000"
TWO = "checkpoint-000002"


@pytest.fixture(autouse=True)
def threads_as_they_are(monkeypatch):
    monkeypatch.setattr(build, "set_threads", lambda: None)
    records.tell.cache_clear()


@pytest.fixture(scope="module")
def done(model, tmp_path_factory):
    """The runs folder of a run of 2 steps."""
    runs = tmp_path_factory.mktemp("done")
    train.train(settings_for(model, runs, f"{RUN} 2"))
    return runs


@pytest.fixture
def run(done, tmp_path):
    """The folder of that run's stage, to be harmed."""
    shutil.copytree(done, tmp_path, dirs_exist_ok=True)
    return tmp_path / "t" / "stage1"


# ------------------------------------------------------------------------------------- two starts
@contextlib.contextmanager
def other_run(folder):
    """Locks a folder as process 77 would."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f".{folder.name}.lock"), "w") as file:
        print(77, file=file, flush=True)
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def is_held(folder) -> bool:
    with open(folder.with_name(f".{folder.name}.lock"), "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@fault(236)
@pytest.mark.parametrize("stages", ["1", "1,2"])
def test_a_start_puts_no_stage_aside_into_which_another_run_writes(
    stages, run, model, tmp_path, capsys
):
    second = run.with_name("stage2")
    with other_run(second):
        arguments = flags(model, tmp_path, f"--steps 1 --stage {stages}")
        said = command_line(train.main, arguments, capsys)
    assert f"process 77 trains in {second}: wait for it" in said
    folders = [path.name for path in run.parent.iterdir() if path.is_dir()]
    assert sorted(folders) == ["stage1", "stage2"] and len(rows_of(run)) == 2


@fault(237)
def test_a_command_of_two_stages_holds_both_until_it_ends(model, tmp_path, monkeypatch):
    seen, folders = [], [tmp_path / "t" / "stage1", tmp_path / "t" / "stage2"]
    monkeypatch.setattr(train, "train", lambda _: seen.append([*map(is_held, folders)]))
    train.main(flags(model, tmp_path, "--stage 1,2"))
    assert seen == [[True, True], [True, True]]
    assert not any(map(is_held, folders))


def test_two_processes_of_one_number_in_two_containers_are_two_runs(tmp_path):
    folder = tmp_path / "t" / "stage1"
    with other_run(folder):
        folder.with_name(".stage1.lock").write_text(str(os.getpid()))
        assert f"process {os.getpid()} trains in" in message(locked, folder)


@fault(260)
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told_once_and_trained_on(
    number, model, tmp_path, monkeypatch, capsys
):
    def none_there(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", none_there)
    train.main(flags(model, tmp_path, "--steps 1"))
    said = f"cannot be locked ({os.strerror(number)}): two runs in one folder would not be noticed"
    assert capsys.readouterr().err.count(said) == 1
    made = toy.made_once(tmp_path / "toy" / "a", "how", lambda: load_policy(str(model)))
    assert made and capsys.readouterr().err.count(said) == 1  # another file, which is named


@fault(255)
def test_a_folder_in_the_place_of_the_lock_is_one_line(model, tmp_path, capsys):
    (tmp_path / "t" / ".stage1.lock").mkdir(parents=True)
    said = command_line(train.main, flags(model, tmp_path), capsys)
    assert ".stage1.lock: cannot be written (Is a directory): " in said


# ---------------------------------------------------------------------------------------- signals
def signalled(monkeypatch, name: str, step: int, *numbers: int) -> None:
    """These signals come in the training loop's function of that name, in its call for `step`."""
    real, calls = getattr(train, name), []

    def called(*arguments):
        calls.append(name)
        if len(calls) == step + 1:
            for number in numbers:
                signal.raise_signal(number)
        return real(*arguments)

    monkeypatch.setattr(train, name, called)


def ends_with(code: int, arguments: list[str]) -> None:
    before = [signal.getsignal(number) for number in checkpoint.SIGNALS]
    with pytest.raises(SystemExit) as end:
        train.main(arguments)
    assert end.value.code == code
    assert [signal.getsignal(number) for number in checkpoint.SIGNALS] == before


CASES = [
    pytest.param(*case, marks=fault(number))
    for number, *case in (
        (240, signal.SIGHUP, "ended by SIGHUP"),
        (241, signal.SIGUSR1, "ended by SIGUSR1"),
        (243, signal.SIGINT, "interrupted"),
        (21, signal.SIGTERM, "ended by SIGTERM"),
    )
]


@pytest.mark.parametrize("where, saved", [("collect", TWO), ("prepare", "checkpoint-000003")])
@pytest.mark.parametrize("number, said", CASES)
def test_each_signal_saves_what_was_learned(
    number, said, where, saved, model, tmp_path, monkeypatch, capfd
):
    signalled(monkeypatch, where, 2, number)
    ends_with(128 + number, flags(model, tmp_path, LONG))
    folder, (out, err) = tmp_path / "t" / "stage1", capfd.readouterr()
    assert [path.name for path in checkpoints(folder)] == [saved] and not wrong_with(folder / saved)
    assert out.splitlines()[-1].startswith(f"{said}; last checkpoint: {folder / saved} ")
    assert err.count("Ctrl-C again ends at once") == (number == signal.SIGINT)


@fault(242)
def test_what_nohup_ignores_stays_ignored(model, tmp_path, monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signalled(monkeypatch, "collect", 2, signal.SIGHUP)
        train.main(flags(model, tmp_path, LONG))
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert len(rows_of(tmp_path / "t" / "stage1")) == 4


@fault(243)
def test_ctrl_c_in_the_first_step_has_nothing_to_save(model, tmp_path, monkeypatch, capsys):
    signalled(monkeypatch, "collect", 0, signal.SIGINT)
    ends_with(130, flags(model, tmp_path, LONG))
    assert capsys.readouterr().out.splitlines()[-1] == "interrupted; no checkpoint"


@fault(243)
def test_a_tee_that_had_the_same_ctrl_c_loses_no_step(model, tmp_path, monkeypatch):
    def closed(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr(files.tqdm, "write", closed)
    monkeypatch.setattr(files.tqdm, "update", closed)
    signalled(monkeypatch, "prepare", 2, signal.SIGINT)
    ends_with(130, flags(model, tmp_path, LONG))
    assert [path.name for path in checkpoints(tmp_path / "t" / "stage1")] == ["checkpoint-000003"]


@pytest.mark.parametrize(
    "first, more, code, saved",
    [
        pytest.param(signal.SIGTERM, [signal.SIGINT], 143, [TWO], marks=fault(244)),
        pytest.param(signal.SIGINT, [signal.SIGTERM, signal.SIGHUP], 130, [TWO], marks=fault(244)),
        pytest.param(signal.SIGINT, [signal.SIGINT], 130, [], marks=fault(245)),
    ],
)
def test_only_a_second_ctrl_c_ends_the_saving(
    first, more, code, saved, model, tmp_path, monkeypatch
):
    def sealed(*arguments):
        for number in more:
            signal.raise_signal(number)
        seal(*arguments)

    monkeypatch.setattr(manifest, "seal", sealed)
    signalled(monkeypatch, "collect", 2, first)
    ends_with(code, flags(model, tmp_path, LONG))
    assert [p.name for p in (tmp_path / "t" / "stage1").glob("checkpoint*")] == saved


@fault(261)
@pytest.mark.parametrize("where", ["collect", "prepare"])
def test_a_doctor_that_is_ended_leaves_nothing(where, model, tmp_path, monkeypatch, capsys):
    signalled(monkeypatch, where, 0, signal.SIGTERM)
    ends_with(143, flags(model, tmp_path, "--doctor"))
    assert capsys.readouterr().out.splitlines()[-1] == "ended by SIGTERM; no checkpoint"
    assert not (tmp_path / "t").exists()


def at_terminal(arguments: list[str]) -> None:
    """A run at a terminal of its own, which is closed when it has told of its second step."""
    os.setsid()
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    def watch():
        seen = b""
        while b"step    1" not in seen:
            seen += os.read(ours, 2**16)
        os.close(ours)

    threading.Thread(target=watch, daemon=True).start()
    log, sys.stdout = sys.stdout, os.fdopen(theirs, "w", buffering=1)
    sys.stderr = sys.stdout
    try:
        train.main(arguments)
    finally:  # what is closed cannot be flushed when the process ends
        sys.stdout = sys.stderr = log


@fault(240)
def test_a_terminal_that_is_closed_loses_no_step(model, tmp_path):
    arguments = flags(model, tmp_path, "--steps 5000 --save_every 5000")
    process = command(tmp_path / "log", at_terminal, arguments)
    try:
        process.join(60)
    finally:
        process.kill()
        process.join()
    folder = tmp_path / "t" / "stage1"
    (saved,) = checkpoints(folder)
    assert files.step_of(saved) in (len(rows_of(folder)), len(rows_of(folder)) - 1)
    assert process.exitcode == 129


# ----------------------------------------------------------------------------------- trajectories
def steps_of(folder) -> tuple[list[int], list[str]]:
    lost = []
    return [record["step"] for record in read_trajectories(folder, lost.append)], lost


@pytest.fixture
def three(tmp_path):
    """A folder with the trajectories of three steps, two each."""
    for step in range(3):
        append_trajectories(
            tmp_path, [{"step": step, "row": row, "x": "ab" * row} for row in (8, 9)]
        )
    return tmp_path


@fault(238)
def test_a_flipped_byte_anywhere_costs_one_step_and_is_told(three):
    data = (three / NAME).read_bytes()
    for at in range(len(data)):
        (three / NAME).write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        steps, lost = steps_of(three)
        assert len(set(steps)) >= 2 and (lost or set(steps) >= {0, 1})
        assert set(steps) == {0, 1, 2} or not lost or lost[0].endswith("are left out: 1")


@fault(238)
def test_a_beginning_that_is_chance_is_no_damage(three):
    its = int.from_bytes(b"\x1f\x8b\x08\x00", "little")  # as a time in the head of a step
    member = gzip.compress(b'{"step": 3}\n', mtime=its)
    assert member.count(b"\x1f\x8b\x08") == 2
    with open(three / NAME, "ab") as file:
        file.write(member + gzip.compress(b'{"step": 4}\n'))
    assert steps_of(three) == ([0, 0, 1, 1, 2, 2, 3, 4], [])


@fault(238)
def test_a_resume_keeps_the_steps_behind_a_damaged_one(run, model, tmp_path, capsys):
    path = run / NAME
    data = bytearray(path.read_bytes())
    data[len(data) // 4] ^= 0xFF  # in the first of two steps
    path.write_bytes(data)
    train.train(settings_for(model, tmp_path, f"{RUN} 3 --resume"))
    line = (
        f"{path}: damaged steps or lines that are left out: 1; as it was it is kept as {NAME}.old1"
    )
    assert capsys.readouterr().err.count(line) == 1
    assert set(steps_of(run)[0]) == {1, 2} and (run / f"{NAME}.old1").read_bytes() == data


@fault(239)
def test_garbage_is_kept_and_told(three, capsys):
    (three / NAME).write_bytes(b"garbage")
    cut_trajectories(three, 2)
    assert steps_of(three) == ([], []) and "left out: 1; as it was" in capsys.readouterr().err
    assert (three / f"{NAME}.old1").read_bytes() == b"garbage"


def test_what_is_whole_is_cut_without_a_word(three, capsys):
    with open(three / NAME, "ab") as file:
        file.write(gzip.compress(b'{"step": 3}\n')[:-9])  # a kill came while it was written
    cut_trajectories(three, 2)
    assert steps_of(three) == ([0, 0, 1, 1], []) and not capsys.readouterr().err
    assert [path.name for path in three.iterdir()] == [NAME]


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("5", marks=fault(251)),
        pytest.param('{"row": 1}', marks=fault(252)),
        pytest.param('{"step": "../../x"}', marks=fault(252)),
        pytest.param('{"step": true}', marks=fault(252)),
    ],
)
def test_a_line_without_a_step_is_left_out_and_counted(line, three, capsys):
    with open(three / NAME, "ab") as file:
        file.write(gzip.compress(f'{line}\n{{"step": 3}}\n'.encode()))
    cut_trajectories(three, 9)
    assert steps_of(three)[0] == [0, 0, 1, 1, 2, 2, 3]
    assert "left out: 1; as it was it is kept" in capsys.readouterr().err


@fault(262)
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_is_put_aside_and_stops_no_training(make, run, model, tmp_path):
    (run / NAME).unlink()
    make(run / NAME)
    train.train(settings_for(model, tmp_path, f"{RUN} 3 --resume"))
    assert set(steps_of(run)[0]) == {2} and (run / f"{NAME}.old1").exists()


# ----------------------------------------------------------------------------- the files of a run
@fault(250)
def test_steps_that_are_no_numbers_are_odd_lines(run, model, tmp_path, capsys):
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": "x"}\n{"step": null}\n{"step": true}\n')
    train.train(settings_for(model, tmp_path, f"{RUN} 3 --resume"))
    assert "metrics.jsonl: 3 odd lines are left out" in capsys.readouterr().err
    assert [row["step"] for row in rows_of(run)] == [0, 1, 2]


@fault(253)
def test_a_half_written_checkpoint_that_is_a_file_is_removed(run, model, tmp_path):
    (run / "checkpoint-000006.partial").touch()
    train.train(settings_for(model, tmp_path, f"{RUN} 3 --resume"))
    assert not [*run.glob("*.partial")]


@fault(254)
def test_a_folder_in_the_place_of_the_metrics_is_one_line(run, model, tmp_path, capsys):
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    said = command_line(train.main, flags(model, tmp_path, f"{RUN} 3 --resume"), capsys)
    assert "metrics.jsonl: cannot be written (Is a directory): " in said


STATES = [{"step": 2}, [1], {"step": "four", "optimizer": {}}, {"step": -4, "optimizer": {}}]


@fault(256)
@pytest.mark.parametrize("state", STATES)
def test_a_state_that_is_none_is_one_line_under_a_manifest_of_its_own(state, run):
    torch.save(state, run / TWO / "trainer.pt")
    seal(run / TWO, 2)
    said = message(checkpoint.read_state, str(run / TWO))
    assert f"--resume: {run / TWO}/trainer.pt cannot be read (" in said
    assert said.endswith(f": remove {run / TWO}")


@fault(249)
@pytest.mark.parametrize("was", ["adamw8bit", "paged_adamw8bit"])
def test_another_optimizer_at_resume_is_one_line(was, run, model, tmp_path):
    settings = json.loads((run / TWO / "settings.json").read_text())
    (run / TWO / "settings.json").write_text(json.dumps(settings | {"optimizer": was}))
    seal(run / TWO, 2)
    said = message(train.train, settings_for(model, tmp_path, f"{RUN} 3 --resume"))
    assert f"was made with --optimizer {was.removeprefix('paged_')}: do the same, or leave" in said


@fault(257)
def test_a_start_that_is_not_there_is_named_by_its_own_flag(model, tmp_path):
    said = message(train.train, settings_for(model, tmp_path, "--start_from /none"))
    assert said.startswith("--start_from /none: no such directory")


@fault(258)
def test_a_folder_that_is_removed_in_a_save_is_no_full_disk(model, tmp_path, monkeypatch):
    def removed(*arguments):
        shutil.rmtree(tmp_path / "t")
        seal(*arguments)

    monkeypatch.setattr(manifest, "seal", removed)
    said = message(train.train, settings_for(model, tmp_path, "--steps 1"))
    assert said.endswith("its folder was removed meanwhile") and "make room" not in said


@fault(259)
def test_a_manifest_that_names_no_file_proves_nothing(run):
    (run / TWO / manifest.NAME).write_text('{"step": 2, "files": {}}')
    assert wrong_with(run / TWO, 2) == "its manifest.json names no file"


# ---------------------------------------------------------------------------- weights in the files
def changed(path, change) -> None:
    """Weights that `change` has altered, in a folder without a manifest."""
    (path / manifest.NAME).unlink(missing_ok=True)
    weights = change(load_file(path / "model.safetensors"))
    save_file(weights, path / "model.safetensors", {"format": "pt"})


def without(part: str):
    return lambda weights: {name: its for name, its in weights.items() if part not in name}


def as_integers(part: str):
    return lambda weights: {n: w.int() if part in n else w for n, w in weights.items()}


@pytest.mark.parametrize(
    "change, count, first",
    [
        pytest.param(without("layers.1."), 12, "model.layers.1.input_layernorm", marks=fault(246)),
        pytest.param(as_integers(""), 26, "model.embed_tokens.weight", marks=fault(248)),
        pytest.param(as_integers("1.mlp.up"), 1, "model.layers.1.mlp.up_proj", marks=fault(248)),
    ],
)
def test_a_model_that_lacks_weights_or_has_integers_is_not_loaded(
    change, count, first, model, tmp_path
):
    path = shutil.copytree(model, tmp_path / "model")
    changed(path, change)
    said = message(load_policy, str(path))
    assert f"{count} weights are missing, or not floating point: {first}" in said


def test_weights_of_another_precision_and_a_tied_head_are_whole(model, tmp_path):
    path = shutil.copytree(model, tmp_path / "model")
    changed(path, lambda weights: {name: its.bfloat16() for name, its in weights.items()})
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    assert load_policy(str(path))


@fault(247)
def test_a_checkpoint_that_lacks_a_norm_is_not_gone_on_from(run, model, tmp_path):
    changed(run / TWO, without("model.norm"))
    seal(run / TWO, 2)
    said = message(train.train, settings_for(model, tmp_path, f"{RUN} 3 --resume"))
    assert f"{run / TWO}: " in said and "1 weights are missing" in said
    assert len(rows_of(run)) == 2
