"""configs/*.yaml through the real `accelerate launch`: two processes on the CPU take the steps of
one.
"""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from accelerate.commands import accelerate_cli
from conftest import ROOT, flags, rows_of, save_searching_model, settings_for
from processes import exit_code, start_process, wait_until
from safetensors.torch import load_file

import train
from errors import InputError, run_main
from plumbing.files import checkpoints

# Cold: only the likeliest token is left, so one process and two sample the same texts. 5
# questions: 2 and 3 of them.
SAME_TEXTS = "--temperature 0.005 --algorithm reinforce_pp --questions_per_step 5 --kl_coef 0.05"


def launch(config: str, logs: Path, arguments: list[str], more: str = "") -> None:
    """What the script `accelerate` does; `more` of its own flags."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    os.chdir(ROOT)
    launch = f"--config_file configs/{config}.yaml --num_processes 2 --main_process_port 0"
    launch += f" {more} --log_dir {logs} --tee 3 train.py"
    sys.argv = f"accelerate launch {launch}".split() + arguments
    accelerate_cli.main()


def start(config: str, logs: Path, *arguments):
    """`launch` in a process of its own."""
    logs.mkdir(parents=True, exist_ok=True)
    return start_process(launch, config, logs, *arguments, log=logs / "launcher")


def said(logs: Path) -> list[str]:
    """What each of the two processes wrote, stdout and stderr."""
    files = [sorted(logs.glob(f"*/attempt_0/{rank}/std*.log")) for rank in (0, 1)]
    assert all(files)
    return ["".join(file.read_text(errors="replace") for file in one) for one in files]


@pytest.fixture(scope="module")
def sure(tmp_path_factory):
    """(a model, its run in one process): the first that never wavers between two tokens, which two
    processes may draw differently, and has a gradient all the same.
    """
    for seed in range(10, 40):
        folder = tmp_path_factory.mktemp("one")
        model = save_searching_model(folder / "model", seed)
        alone = train.train(settings_for(model, folder, SAME_TEXTS))
        rows = rows_of(alone)
        if max(row["entropy_mc"] for row in rows) < 1e-3 < max(row["grad_norm"] for row in rows):
            return model, alone
    pytest.fail("every model wavers")


@pytest.mark.parametrize(
    "config", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "zero2")), "fsdp2"]
)
def test_accelerate_launch_with_each_file_takes_the_steps_of_one_process(config, sure, tmp_path):
    model, alone = sure
    assert exit_code(start(config, tmp_path / "logs", flags(model, tmp_path, SAME_TEXTS))) == 0
    main, other = said(tmp_path / "logs")
    # Two took part, and one speaks.
    assert "settings:" in main and "done:" in main and not other.strip()
    folder = tmp_path / "t" / "stage1"
    for ours, theirs in zip(rows_of(alone), rows_of(folder), strict=True):
        assert theirs == pytest.approx(ours, abs=1e-4, rel=1e-4)
    assert [path.name for path in folder.glob("checkpoint*")] == ["checkpoint-000002"]
    paths = [Path(model), checkpoints(alone)[-1], checkpoints(folder)[-1]]
    begin, one, two = (load_file(path / "model.safetensors") for path in paths)
    assert max((one[name] - begin[name]).abs().max() for name in one) > 1e-3
    # Adam's division blows rounding errors up.
    assert max((one[name] - two[name]).abs().max() for name in one) < 2e-4
    moments = torch.load(paths[2] / "trainer.pt")["optimizer"]["state"]
    kind = int if config == "ddp" else str  # in parts they have names
    assert all(isinstance(name, kind) for name in moments)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp", "zero2", "fsdp2"])
def test_ctrl_c_ends_both_processes_and_resume_goes_on(config, model, tmp_path):
    folder, more = tmp_path / "t" / "stage1", "--save_every 2 --steps"
    process = start(config, tmp_path / "logs", flags(model, tmp_path, f"{more} 5000"))
    wait_until(lambda: checkpoints(folder), process)
    os.kill(process.pid, signal.SIGINT)
    assert exit_code(process) == 1  # the launcher's own; ours is 130
    main, other = said(tmp_path / "logs")
    assert "interrupted; last checkpoint:" in main
    assert "Error" not in main and "Traceback" not in main + other
    done = int(checkpoints(folder)[-1].name[-6:])
    again = flags(model, tmp_path, f"{more} {done + 1} --resume")
    assert exit_code(start(config, tmp_path / "more", again)) == 0
    assert "going on from" in said(tmp_path / "more")[0]
    assert [row["step"] for row in rows_of(folder)] == list(range(done + 1))
    assert checkpoints(folder)[-1].name == f"checkpoint-{done + 1:06d}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong, line",
    [
        (
            "--lrr 1",
            "error: train.py: unknown flag --lrr (did you mean --lr?); --help all lists every flag",
        ),
        ("--recipe r_search --reader /nowhere", "error: /nowhere: no such directory; give a saved"),
    ],
)
def test_what_is_wrong_is_one_line_of_one_process(wrong, line, model, tmp_path):
    # Both processes find a wrong flag; only one looks for the reader.
    assert exit_code(start("ddp", tmp_path / "logs", flags(model, tmp_path, wrong))) == 1
    main, other = said(tmp_path / "logs")
    assert line in main and "Traceback" not in main and not other.strip()


@pytest.mark.parametrize("rank, waited", [("0", []), ("1", [5])])
def test_the_other_processes_wait_before_they_say_what_is_wrong(rank, waited, monkeypatch, capsys):
    def wrong():
        raise InputError("no such file")

    slept = []
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr("errors.time.sleep", slept.append)
    with pytest.raises(SystemExit) as ended:
        run_main(wrong)
    assert ended.value.code == 2 and slept == waited
    assert capsys.readouterr().err == "error: no such file\n"
