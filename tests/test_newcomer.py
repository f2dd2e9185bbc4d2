"""What a new user tried first and was led astray by: each case of these is now a line or works."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import ENVIRONMENT, flags, settings_for
from test_dense import Hashed

import retriever
import train
from plumbing import build
from plumbing.files import Run
from retrievers import dense

BAR = """
import errors; errors.prepare_command()
import torch, sft
sft.backward, sft.optimizers_of = lambda *_: 1.0, lambda *_: {}
sft.slow_step = lambda _: None
sft.train_sft(torch.nn.Linear(1, 1), lambda step: [], sft.SFTSettings(200, 0.1))
"""


def test_a_log_file_gets_a_line_in_thirty_seconds_from_the_warm_up_too(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", BAR], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    shown = done.stderr.replace("\r", "\n").split("\n")
    assert "loss=1.000" in done.stderr and len(list(filter(None, shown))) <= 3


def test_a_dense_retriever_is_tried_like_bm25(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dense, "Encoder", lambda *_: Hashed())
    words = ["retriever.py", "who?", "--retriever", "dense", "--encoder", "some/hashed", "-k", "2"]
    monkeypatch.setattr(sys, "argv", words)
    retriever.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line[:2] for line in lines[-2:]] == ["1.", "2."] and ": " in lines[-1]
    monkeypatch.setattr(sys, "argv", words[:4])
    with pytest.raises(retriever.InputError, match="a --corpus with a document and an --encoder"):
        retriever.main()


def test_a_step_that_asks_each_question_several_times_is_announced(model, tmp_path, capsys):
    file = tmp_path / "q.jsonl"
    file.write_text('{"question": "who?", "answers": ["Ana"]}\n' * 2)
    more = f"--data {file} --retriever empty --questions_per_step"
    for count, expected in ((5, "a step asks each of the 2 questions 2.5 times: "), (2, "")):
        settings = settings_for(model, tmp_path, f"{more} {count}")
        build.check_before_models(settings, build.make_accelerator(settings))
        shown = capsys.readouterr().out
        assert expected in shown and ("a step asks" in shown) == bool(expected)


def test_a_dry_run_tries_four_groups_of_all_kinds(model, tmp_path, capsys):
    train.main(flags(model, tmp_path, "--dry_run --questions_per_step 16 --group_size 2"))
    shown = capsys.readouterr().out
    assert "of 4 have equal rewards" in shown and "a step of 16 questions" in shown


def test_tensorboard_is_told_where_to_look(model, tmp_path, capsys):
    settings = settings_for(model, tmp_path, "--report_to tensorboard")
    run = Run(settings, SimpleNamespace(is_main_process=True, init_trackers=lambda *_: None))
    run.make_folder(0)
    assert f"tensorboard --logdir {tmp_path}" in capsys.readouterr().out
