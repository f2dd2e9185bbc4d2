"""Everything of docs/gpu.md that fits into 25 minutes of a GPU, in order of worth.

    python -m lab.gpu                        writes gpu.md: a row per part, as soon as it has ended
    python -m lab.gpu --only decode,step     some of the parts
    python -m lab.gpu --tiny                 the same commands at tiny sizes, on a CPU

Each part is a process of its own with a time limit, so one that fails, hangs or runs out of memory
leaves the others' figures. Left out: several GPUs; what needs a hub model's weights.
"""

import contextlib
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch

from errors import FlagParser, InputError, check_output, run_main
from formats.records import write_text
from lab import names_in

BENCH = "python -m lab.bench"
STEP = f"{BENCH} step --group_size 16 --trajectories_per_update 256 --gradient_checkpointing"
ON_GPU = "--device cuda --only ours --repeats 1"
ON_CPU = """--device cpu --dtype float32 --engine slots --model 4M --vocab 512 --shorter 20
    --batch 2 --context 8 --questions_per_step 2 --group_size 2 --trajectories_per_update 2
    --repeats 1"""
FEW = "--stage 1 --steps 1 --questions_per_step 2 --group_size 2 --trajectories_per_update 2"


class Part(NamedTuple):
    what: str
    command: str
    seconds: int  # at most
    tiny: str = ON_CPU  # what stands behind the command under --tiny
    lines: int = 1  # of its output that are its figures, counted from the end


def decode(batch: int, engine: str) -> str:
    sizes = f"--model 7B --batch {batch} --context 1024 --dtype bfloat16 --repeats 2"
    return f"{BENCH} decode {sizes} --engine {engine} --device cuda"


def step(model: str, questions: int) -> str:
    return f"{STEP} --model {model} --questions_per_step {questions} --engine graphs {ON_GPU}"


PARTS = {
    "engine": Part(
        "a recorded step against the plain one",
        "python -m pytest -q tests/test_engine.py -k gpu",
        120,
        tiny="",
    ),
    "decode": Part("decoding at 7B, 64 rows", decode(64, "graphs"), 180),
    "decode256": Part("the same, 256 rows", decode(256, "graphs"), 180),
    "plain": Part("64 rows, nothing recorded", decode(64, "slots"), 180),
    "step": Part("a UR² step at 7B with LoRA, 16 questions", step("7B --lora_rank 16", 16), 300),
    "step64": Part("the same, 64 questions", step("7B --lora_rank 16", 64), 540),
    "full": Part("a full step at 3B", step("3B --optimizer adamw8bit", 64), 540),
    "train": Part(
        "stage 1 on the built-in world",
        "accelerate launch --num_processes 1 train.py --stage 1 --evaluate --runs runs/gpu",
        300,
        FEW,
        lines=17,
    ),
    "prompts": Part(
        "an update of rows that share prompts, and of whole rows",
        f"{BENCH} prompts --model 0.5B --group_size 16 --prompt 300 --device cuda --repeats 3",
        240,
        lines=2,
    ),
}


def run_part(part: Part, seconds: float, tiny: bool) -> str:
    """Its figures, or why there are none."""
    command = shlex.split(f"{part.command} {part.tiny}" if tiny else part.command)
    if command[0] == "accelerate":
        command[:1] = ["python", "-m", "accelerate.commands.accelerate_cli"]
    command[0] = sys.executable
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, start_new_session=True, **pipes)
    try:
        said, wrong = process.communicate(timeout=min(seconds, part.seconds))
    except subprocess.TimeoutExpired:
        return f"**ended after {min(seconds, part.seconds):.0f} s**"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # a worker would keep the GPU's memory
        process.wait()
    if process.returncode:
        last = [*(wrong or said).strip().splitlines(), f"status {process.returncode}"][-2:]
        return f"**failed**: {' '.join(last)[-300:]}"
    return "<br>".join(" ".join(line.split()) for line in said.splitlines()[-part.lines :])


def table(tiny: bool, rows: list[tuple]) -> str:
    where = f"a CPU, tiny sizes; {os.cpu_count()} cores"
    if not tiny:
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        where = f"{torch.cuda.get_device_name(0)}, {memory:.0f} GiB"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    lines = [f"{where}; {versions}; {date.today()}\n", "| what | figures | seconds | command |"]
    lines.append("|---|---|---|---|")
    for part, found, seconds in rows:
        cells = part.what, found.replace("|", "\\|"), f"{seconds:.0f}", f"`{part.command}`"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main(arguments: list[str] | None = None) -> None:
    parser = FlagParser("python -m lab.gpu", description="What a GPU does, in one table.")
    parser.add_argument("--only", default="", help=f"of {', '.join(PARTS)}, comma-separated")
    parser.add_argument("--minutes", type=float, default=25, help="of all parts together")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on a CPU")
    parser.add_argument("--out", default="gpu.md", help="the table")
    args = parser.parse_args(arguments)
    if not (args.tiny or torch.cuda.is_available()):
        raise InputError("torch sees no GPU here: --tiny tries every command on a CPU")
    chosen = names_in("only", args.only, PARTS)
    check_output(args.out, "--out")
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    end, rows = time.monotonic() + 60 * args.minutes, []
    for name in chosen:
        start = time.monotonic()
        print(f"{name}: {PARTS[name].what} ...", flush=True)
        left = end - start
        found = run_part(PARTS[name], left, args.tiny) if left > 0 else "no time was left"
        rows.append((PARTS[name], found, time.monotonic() - start))
        print(f"  {found}", flush=True)
        write_text(Path(args.out), table(args.tiny, rows))
    print(f"written: {args.out}")


if __name__ == "__main__":
    run_main(main)
