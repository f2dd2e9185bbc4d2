"""Steps at the shapes of 0.5B to 7B on a GPU made of nothing (tests/ghost): without and with
planted faults, their bytes beside those of lab.plan.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ENVIRONMENT, ROOT
from test_lora import needs_peft

from lab.plan import config_of

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ compiles tests/ghost/shim.cpp"),
    pytest.mark.skipif(sys.platform != "linux", reason="its library is made as on Linux"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this build of torch has CUDA"),
]
SHORT = "--max_context 2048 --tokens_per_micro_batch 4096 --group_size 2 --questions_per_step 8"
AGAIN = "--gradient_checkpointing"


@pytest.fixture(scope="module")
def shim(tmp_path_factory) -> Path:
    """A library that makes a CPU build of torch believe in CUDA."""
    path, of_torch = tmp_path_factory.mktemp("shim") / "shim.so", Path(torch.__file__).parent
    given = [ROOT / "tests/ghost/shim.cpp", "-o", path, "-I", of_torch / "include"]
    links = ["-L", of_torch / "lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{of_torch / 'lib'}"]
    subprocess.run(["g++", "-shared", "-fPIC", "-std=c++20", *given, *links], check=True)
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> str:
    """The config of a 0.5B of two layers."""
    config = config_of("0.5B")
    config.num_hidden_layers, config.layer_types = 2, ["full_attention"] * 2
    config.save_pretrained(folder := tmp_path_factory.mktemp("small"))
    return f"--model {folder} {SHORT}"


def simulate(shim: Path, *cases: str, root=ROOT) -> subprocess.CompletedProcess:
    """Runs tests/ghost/step.py of the copy `root` in a process of its own."""
    command = [sys.executable, root / "tests/ghost/step.py", shim, *cases]
    environment = ENVIRONMENT | {"PYTHONPATH": str(root)}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def check(shim: Path, cases: list[str], near: float, parts: list[str]) -> list[dict]:
    """The plan's bytes are the ghost's within `near`, and none is left on the GPU."""
    done = simulate(shim, *cases)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for record in records:
        ghost, plan = ([record[by][part] for part in parts] for by in ("ghost", "plan"))
        assert plan == pytest.approx(ghost, rel=near) and record["left"] < 2**20, record
    return [record["ghost"] for record in records]


def test_a_step_has_no_fault_of_device_or_type(shim, small):
    weights = 151_936 * 896 + 2 * 14_912_384 + 896
    # Of two layers: rank · (in + out) of their seven matrices.
    thin = 2 * 16 * (2 * 1792 + 2 * (896 + 128) + 3 * (896 + 4864))
    # Weights and moments, and DDP's buckets: 12, 16, or 12 / 8 bytes per trained weight.
    held = {"ddp --gpus 8": 16 * weights, "fsdp2 --gpus 8": 1.5 * weights}
    if importlib.util.find_spec("peft"):
        held["one --lora_rank 16"] = 2 * weights + 12 * thin
    else:
        held["one"] = 12 * weights
    # Of two layers what the plan leaves out is a larger share.
    ghosts = check(shim, [f"{sharding} {small}" for sharding in held], 0.3, ["update"])
    standing = [ghost["standing"] for ghost in ghosts]
    assert standing == pytest.approx([*held.values()], rel=0.01)


CASES = [
    f"one --model 3B {AGAIN}",
    f"one --model 3B --optimizer adamw8bit {AGAIN}",
    f"ddp --gpus 8 --model 3B {AGAIN}",
    "fsdp2 --gpus 8 --model 3B --gpu_memory 141",
    "one --model 7B --gpu_memory 400",
    f"fsdp2 --gpus 8 --model 7B {AGAIN}",
    f"fsdp2 --gpus 16 --model 7B {AGAIN}",
    *(
        pytest.param(f"{case} --model 7B --lora_rank 16", marks=needs_peft)
        for case in (f"one {AGAIN}", "one --gpu_memory 200", f"ddp --gpus 8 {AGAIN}")
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_plan_of_a_whole_model_is_within_a_twentieth_of_its_simulated_step(shim, case):
    check(shim, [case], 0.05, ["update", "rollout", "slots"])


FAULTS = {  # what -> (file, as it is, as it fails on a GPU)
    "log-probs that stay on the GPU": ("update.py", "micro.logprobs.cpu()", "micro.logprobs"),
    "a result on the CPU": (
        "policy.py",
        "(targets.shape, device=tokens.device)",
        "(targets.shape)",
    ),
    "tokens on the CPU": (
        "engines/slots.py",
        "torch.tensor([[row.ids[-1]] for row in rows], device=self.device)",
        "torch.tensor([[row.ids[-1]] for row in rows])",
    ),
    "a table on the CPU": ("engines/slots.py", "(alarm, device=self.device)", "(alarm)"),
    "a mask in fp32": (
        "engines/slots.py",
        "(hidden.shape, dtype=self.model.dtype, ",
        "(hidden.shape, ",
    ),
    "an index on the CPU": (
        "scale/packing.py",
        "torch.arange(wanted.shape[1], device=tokens.device)",
        "torch.arange(wanted.shape[1])",
    ),
    "a query that is not cast": ("scale/packing.py", "x[0].to(value.dtype).split", "x[0].split"),
    "scores on the CPU": (
        "update.py",
        "(batch.response_mask, device=state.accelerator.device)",
        "(batch.response_mask)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["none", *FAULTS])
def test_a_planted_fault_fails_and_the_copy_without_one_does_not(shim, small, tmp_path, fault):
    skipped = shutil.ignore_patterns(".*", "test_*", "trust", "runs")
    shutil.copytree(ROOT, tmp_path / "copy", ignore=skipped)
    if fault in FAULTS:
        file, before, after = FAULTS[fault]
        path = tmp_path / "copy" / file
        text = path.read_text(encoding="utf-8")
        assert text.count(before) == 1
        path.write_text(text.replace(before, after), encoding="utf-8")
    done = simulate(shim, f"one {small} {AGAIN}", root=tmp_path / "copy")
    assert (done.returncode == 0) == (fault == "none"), done.stderr
    assert fault == "none" or "Error: " in done.stderr.splitlines()[-1], done.stderr
