"""A run survives a second run in its folder and a kill."""

import pytest
from conftest import command_line, flags, settings_for
from processes import command, kill, wait_for

import train

fault = pytest.mark.fault


@fault(49)
def test_a_second_run_in_a_folder_names_the_first_and_leaves_it_alone(model, tmp_path, capsys):
    first = command(tmp_path / "log", train.main, flags(model, tmp_path, "--steps 500"))
    wait_for(tmp_path / "t" / "stage1" / "metrics.jsonl", "\n", first)
    error_line = command_line(train.main, flags(model, tmp_path, "--steps 1"), capsys)
    assert f"{tmp_path}/t: another process trains there: give a --run_name" in error_line
    assert not (tmp_path / "t" / "stage1.old1").exists()
    kill(first)
    train.train(settings_for(model, tmp_path, "--steps 1"))  # a killed run holds no lock
    assert (tmp_path / "t" / "stage1.old1").exists()
