"""Faults in a user's reward file, question files, flags and addresses, and a full disk."""

import copy
import gzip
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT, command_line, message, of_fault, rows_of, settings_for
from test_own_reward import own

import data
import eval as evaluation
import retriever
import train
from data import Question, load_questions, named_files
from errors import InputError, Terminated, raise_terminated, rank_of
from plumbing.checkpoint import checkpoints
from rewards import example, own_reward

fault = pytest.mark.fault


def pay(name: str, trajectory=None) -> dict:
    """Returns the reward terms that the named function of a reward file gives."""
    return own_reward(name)(trajectory or example("r_search"))


# ----------------------------------------------------------------------------------- a reward file
@pytest.mark.parametrize(
    "failure, error_type, pattern",
    [
        ("1 / 0", ZeroDivisionError, "division by zero"),
    ],
)
def test_an_error_in_a_reward_at_a_later_step_saves_the_steps_before_it(
    failure, error_type, pattern, own, model, tmp_path
):
    # The check calls the reward twice, and each step 4 times (2 samples of 2 questions), so call 11
    # is the first of the third step.
    text = "import itertools, sys\nCOUNT = itertools.count(1)\ndef mine(t):\n"
    text += f"    next(COUNT) < 11 or {failure}\n    return {{'one': 1.0}}\n"
    more = f"--steps 5 --save_every 5 --reward {own(text)}"
    with pytest.raises(error_type, match=pattern):
        train.train(settings_for(model, tmp_path, more))
    (checkpoint,) = checkpoints(tmp_path / "t" / "stage1")
    assert checkpoint.name == "checkpoint-000002"


CHANGES = """
def mine(t):
    t.response_mask[:] = [1] * len(t.response_mask)
    t.response_ids[:] = t.response_ids[::-1]
    t.prompt_ids.clear()
    t.logprobs.append(0.0)
    t.question.answers[:] = ["Sudria"]
    t.searches[0].query = t.searches[0].documents = None
    t.segments, t.stop_reason = [], "eos"
    return {"one": 1.0}
"""


@fault(282)
def test_a_reward_that_changes_its_trajectory_does_not_change_the_training_data(own):
    row = replace(example("r_search"), question=Question("q", "Where?", ["Norland"]))
    row.prompt_ids, row.response_ids, row.response_mask = [1, 2], [3, 4, 5], [1, 0, 1]
    row.logprobs = [-0.5, 0.0, -0.25]
    before = copy.deepcopy(row)
    assert pay(own(CHANGES), row) == {"one": 1.0} and row == before


def test_sigterm_ends_a_reward_that_does_not_return(own):
    text = "import signal, time\n\ndef mine(t):\n    signal.raise_signal(signal.SIGTERM)\n"
    before = signal.signal(signal.SIGTERM, raise_terminated)
    try:
        with pytest.raises(Terminated):
            pay(own(text + "    for _ in range(3000):\n        time.sleep(0.01)\n"))
    finally:
        signal.signal(signal.SIGTERM, before)


@fault(286)
@pytest.mark.parametrize("inside", [True, False])
def test_a_reward_file_that_switches_gradients_off_does_not_affect_the_update(
    inside, own, model, tmp_path
):
    off = "torch.set_grad_enabled(False)\n"
    reward = "def mine(t):\n    return {'one': len(t.ids)}\n"
    text = reward.replace("    return", f"    {off}    return") if inside else off + reward
    name = own(f"import torch\n{text}")
    try:
        folder = train.train(settings_for(model, tmp_path, f"--steps 1 --reward {name}"))
    finally:
        torch.set_grad_enabled(True)
    assert rows_of(folder)[0]["grad_norm"] > 0


# ----------------------------------------------------------------------------------- question files
def data_error(path, capsys, monkeypatch) -> str:
    """Returns the error line of `python data.py PATH`."""
    monkeypatch.setattr(sys, "argv", ["data.py", str(path)])
    return command_line(lambda _: data.main(), [], capsys)


def fail_on_open(*_):
    pytest.fail("it was opened, and would be waited for")


@fault(287)
def test_pipes_and_devices_are_a_one_line_error_and_never_opened(tmp_path, capsys, monkeypatch):
    os.mkfifo(tmp_path / "f.jsonl")
    reading, writing = os.pipe()
    monkeypatch.setattr("formats.records.open", fail_on_open, raising=False)
    try:
        for path in (tmp_path / "f.jsonl", f"/dev/fd/{reading}", "/dev/zero"):
            error = data_error(path, capsys, monkeypatch)
            assert error == f"error: {path}: a pipe or a device: save its content to a file first"
    finally:
        os.close(reading)
        os.close(writing)


@fault(289)
@pytest.mark.parametrize("packed", [False, True])
def test_a_line_that_does_not_end_is_rejected_with_the_line_number(packed, tmp_path):
    path, first = (
        tmp_path / ("q.gz" if packed else "q.jsonl"),
        b'{"question": "a?", "answers": "b"}\n{"question": "',
    )
    if packed:
        path.write_bytes(gzip.compress(first) + gzip.compress(bytes(2**20), 1) * 65)
    else:
        path.write_bytes(first)
        os.truncate(path, 65 * 2**20)  # a hole of zeros, which takes no room on the disk
    assert ", line 2: longer than 64 MB: end each record" in message(load_questions, path)


def test_a_json_list_on_one_line_may_be_longer_than_a_record(tmp_path):
    record = '{"question": "a?", "answers": "b"}'
    (tmp_path / "q.json").write_text(f"[{record},{' ' * 65_000_000}{record}]")
    assert len(load_questions(tmp_path / "q.json")) == 2


@fault(291)
def test_a_file_name_of_thousands_of_characters_is_a_one_line_error(capsys, monkeypatch):
    assert ": file name too long" in data_error("a" * 5000, capsys, monkeypatch)
    names = [f"{number}.jsonl" for number in range(100)]  # a list of files may be this long
    assert named_files(",".join(names)) == [Path(name) for name in names]


# ------------------------------------------------------------------------------------------- flags
@fault(296)
def test_a_name_that_no_folder_can_have_is_a_one_line_error(capsys):
    assert "File name too long" in command_line(train.main, ["--output_dir", "a" * 300], capsys)


@fault(298)
@pytest.mark.parametrize("text", ["one_hop=1,one_hop=2", "hard=7, easy=1,hard =2"])
def test_a_share_that_is_named_twice_is_a_one_line_error(text, capsys):
    assert "--mix" in command_line(train.main, ["--mix", text], capsys)


@fault(299)
@pytest.mark.parametrize(
    "name, value, least",
    [("LOCAL_WORLD_SIZE", "0", 1), ("RANK", "x", 0), ("WORLD_SIZE", "-2", 1), ("RANK", "", 0)],
)
def test_a_rank_that_is_not_a_number_is_a_one_line_error(name, value, least, monkeypatch):
    monkeypatch.setenv(name, value)
    assert f"{name}={value} in the environment" in message(rank_of, name, least)


@fault(300)
def test_every_command_rejects_a_local_rank_that_is_not_a_number(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "x")
    monkeypatch.setattr("errors.time.sleep", lambda _: None)
    error_line = command_line(lambda _: pytest.fail("it began"), [], capsys)
    assert "LOCAL_RANK=x in the environment: unset it" in error_line


# --------------------------------------------------------------------------------------- addresses
SECRET = "http://user:secretpw@h"
WEB = ["serve", "--retriever", "web", "--retriever_url", f"{SECRET}/?q={{query}}"]


@fault(302)
@pytest.mark.parametrize(
    "main, arguments",
    [
        (train.main, ["--retriever", "http", "--retriever_url", SECRET]),
        (train.main, ["--judge", "user:secretpw@h/v1#m"]),
        (train.main, [f"--retriever-url={SECRET}"]),
        (evaluation.main, ["--retriever", "http", "--retriever_url", SECRET]),
        (retriever.main, WEB),
    ],
)
def test_a_password_in_an_address_is_refused_and_not_repeated(
    main, arguments, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert "secretpw" not in command_line(main, arguments, capsys)
    assert not [*tmp_path.iterdir()]


# --------------------------------------------------------------------------------------- full disk
@fault(305)
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_command_that_cannot_write_its_output_ends_with_code_2():
    with open("/dev/full", "w") as full:
        options = {"stdout": full, "stderr": subprocess.PIPE, "text": True, "timeout": 100}
        command_words = [sys.executable, "data.py", "docs/harbour/questions.jsonl"]
        ended = subprocess.run(command_words, cwd=ROOT, **options)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1, ended.stderr
