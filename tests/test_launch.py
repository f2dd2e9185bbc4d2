"""Tests of configs/*.yaml with the real `accelerate launch`: on a CPU two processes take the same
steps as one.
"""

import os
import sys
from pathlib import Path

import pytest
from accelerate.commands import accelerate_cli
from conftest import ROOT, flags, rows_of, save_searching_model, settings_for
from processes import exit_code, start_process
from safetensors.torch import load_file

import train
from errors import InputError, run_main
from plumbing.files import checkpoints

# At this temperature only the most likely token is sampled, so one process and two processes sample
# the same texts. Of the 5 questions the two processes get 2 and 3.
SAME_TEXTS = "--temperature 0.005 --algorithm reinforce_pp --questions_per_step 5 --kl_coef 0.05"


def launch(config: str, logs: Path, arguments: list[str], more: str = "") -> None:
    """Does the work of the command `accelerate`; `more` has further flags of that command."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    os.chdir(ROOT)
    launch = f"--config_file configs/{config}.yaml --num_processes 2 --main_process_port 0"
    launch += f" {more} --log_dir {logs} --tee 3 train.py"
    sys.argv = f"accelerate launch {launch}".split() + arguments
    accelerate_cli.main()


def start(config: str, logs: Path, *arguments):
    """Calls `launch` in a new process."""
    logs.mkdir(parents=True, exist_ok=True)
    return start_process(launch, config, logs, *arguments, log=logs / "launcher")


def outputs(logs: Path) -> list[str]:
    """Returns the output, stderr and stdout, of each of the two processes."""
    files = [sorted(logs.glob(f"*/attempt_0/{rank}/std*.log")) for rank in (0, 1)]
    assert all(files)
    return ["".join(file.read_text(errors="replace") for file in one) for one in files]


@pytest.fixture(scope="module")
def certain(tmp_path_factory):
    """Returns (a model, the folder of its run in one process). The model has a gradient and is
    always nearly certain of the next token; otherwise two processes might sample other tokens.
    """
    for seed in range(10, 40):
        folder = tmp_path_factory.mktemp("one")
        model = save_searching_model(folder / "model", seed)
        alone = train.train(settings_for(model, folder, SAME_TEXTS))
        rows = rows_of(alone)
        if max(row["entropy_mc"] for row in rows) < 1e-3 < max(row["grad_norm"] for row in rows):
            return model, alone
    pytest.fail("every model wavers")


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp", "zero2", "fsdp2"])
def test_each_file_with_accelerate_launch_takes_the_steps_of_one_process(config, certain, tmp_path):
    model, alone = certain
    assert exit_code(start(config, tmp_path / "logs", flags(model, tmp_path, SAME_TEXTS))) == 0
    main, other = outputs(tmp_path / "logs")
    # Both processes trained, but only the main process prints.
    assert "settings:" in main and "done:" in main and not other.strip()
    folder = tmp_path / "t" / "stage1"
    for expected, actual in zip(rows_of(alone), rows_of(folder), strict=True):
        assert actual == pytest.approx(expected, abs=1e-4, rel=1e-4)
    assert [path.name for path in folder.glob("checkpoint*")] == ["checkpoint-000002"]
    paths = [Path(model), checkpoints(alone)[-1], checkpoints(folder)[-1]]
    begin, one, two = (load_file(path / "model.safetensors") for path in paths)
    assert max((one[name] - begin[name]).abs().max() for name in one) > 1e-3
    # Adam divides by the gradient's size, which amplifies rounding errors.
    assert max((one[name] - two[name]).abs().max() for name in one) < 2e-4


@pytest.mark.parametrize("rank, seconds", [("0", []), ("1", [5])])
def test_only_the_first_process_prints_an_error_at_once(rank, seconds, monkeypatch, capsys):
    def fail():
        raise InputError("no such file")

    slept = []
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr("errors.time.sleep", slept.append)
    with pytest.raises(SystemExit) as ended:
        run_main(fail)
    assert ended.value.code == 2 and slept == seconds
    assert capsys.readouterr().err == "error: no such file\n"
