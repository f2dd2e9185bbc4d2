"""lab.gpu: all that a GPU is to be asked, part by part, whatever becomes of the others."""

import shlex
from pathlib import Path

import pytest
import torch
from conftest import message
from test_metrics import ended

from lab import bench, gpu
from lab.gpu import PARTS, Part, main, run_part
from settings import parse

PAGE = (Path(__file__).parent.parent / "docs" / "gpu.md").read_text(encoding="utf-8")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")


def python(code: str, seconds: int = 60, lines: int = 1) -> Part:
    return Part("a part", f"python -c {shlex.quote(code)}", seconds, "", lines)


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("name", PARTS)
def test_every_part_is_a_command_that_its_file_takes_and_stands_on_the_page(name, tiny):
    part = PARTS[name]
    _, _, file, *words = shlex.split(f"{part.command} {part.tiny if tiny else ''}")
    if file == "lab.bench":
        works = bench.variants(*bench.parse(words))
        assert len(works) == part.lines
    elif name == "train":
        assert parse(words[words.index("train.py") + 1 :]).stage == 1
    else:
        assert (file, *words[:2]) == ("pytest", "-q", "tests/test_engine.py")
    assert f"| {part.what} | `{part.command}` |" in PAGE


def test_the_parts_fit_into_their_time_and_the_first_half_is_worth_most():
    assert [*PARTS][:3] == ["engine", "decode", "decode256"]
    assert max(part.seconds for part in PARTS.values()) < 600


def test_a_part_that_fails_leaves_the_figures_of_the_others(monkeypatch, tmp_path, capsys):
    parts = {
        "good": python("print('warm'); print('a  1'); print('b | 2')", lines=2),
        "bad": python("raise MemoryError('CUDA out of memory')"),
        "last": python("print(7)"),
    }
    monkeypatch.setattr(gpu, "PARTS", parts)
    main(["--tiny", "--out", str(tmp_path / "t.md")])
    head, _, _, _, *rows = (tmp_path / "t.md").read_text().splitlines()
    assert head.startswith("a CPU, tiny sizes")
    assert [row.split(" | ")[1] for row in rows] == [
        "a 1<br>b \\| 2",
        "**failed**: MemoryError: CUDA out of memory status 1",
        "7",
    ]
    assert "written:" in capsys.readouterr().out


def test_a_part_that_hangs_is_ended_with_its_workers(tmp_path):
    note = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])\n"
        f"open({str(note)!r}, 'w').write(str(worker.pid))\n"
        "time.sleep(99)"
    )
    assert run_part(python(code, seconds=5), 99.0, False) == "**ended after 5 s**"
    assert ended(note.read_text())


def test_what_no_time_is_left_for_is_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "PARTS", {"late": python("print(1)")})
    main(["--tiny", "--minutes", "0", "--out", str(tmp_path / "t.md")])
    assert "no time was left" in (tmp_path / "t.md").read_text()


@without_gpu
def test_bad_flags_are_one_line(tmp_path):
    assert "--tiny tries every command on a CPU" in message(main, [])
    assert "--only flight" in message(main, ["--tiny", "--only", "flight"])
    assert "that is a folder" in message(main, ["--tiny", "--out", str(tmp_path)])
