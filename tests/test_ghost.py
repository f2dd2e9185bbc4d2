"""Runs steps with the shapes of 0.5B to 7B on a simulated GPU (tests/ghost), and compares their
bytes with those of lab.plan.
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
    pytest.mark.skipif(sys.platform != "linux", reason="the library is compiled as on Linux"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this build of torch has CUDA"),
]
SHORT = "--max_context 2048 --tokens_per_micro_batch 4096 --group_size 2 --questions_per_step 8"
AGAIN = "--gradient_checkpointing"


@pytest.fixture(scope="module")
def shim(tmp_path_factory) -> Path:
    """Compiles a library that makes a CPU build of torch believe that there is a GPU."""
    path, torch_folder = tmp_path_factory.mktemp("shim") / "shim.so", Path(torch.__file__).parent
    sources = [ROOT / "tests/ghost/shim.cpp", "-o", path, "-I", torch_folder / "include"]
    links = [
        "-L",
        torch_folder / "lib",
        "-ltorch_cpu",
        "-lc10",
        f"-Wl,-rpath,{torch_folder / 'lib'}",
    ]
    subprocess.run(["g++", "-shared", "-fPIC", "-std=c++20", *sources, *links], check=True)
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> str:
    """Returns flags for a 0.5B model with only two layers."""
    config = config_of("0.5B")
    config.num_hidden_layers, config.layer_types = 2, ["full_attention"] * 2
    config.save_pretrained(folder := tmp_path_factory.mktemp("small"))
    return f"--model {folder} {SHORT}"


def check(shim: Path, cases: list[str], tolerance: float, parts: list[str]) -> list[dict]:
    """Checks that the plan's bytes equal the simulated ones within `tolerance`, and that the step
    leaves nothing on the GPU; returns the simulated bytes.
    """
    command = [sys.executable, ROOT / "tests/ghost/step.py", shim, *cases]
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    for record in records:
        ghost, plan = ([record[source][part] for part in parts] for source in ("ghost", "plan"))
        assert plan == pytest.approx(ghost, rel=tolerance) and record["left"] < 2**20, record
    return [record["ghost"] for record in records]


@pytest.mark.slow
def test_a_step_has_no_fault_of_device_or_type(shim, small):
    weights = 151_936 * 896 + 2 * 14_912_384 + 896
    # LoRA: for two layers, rank · (in + out) of their seven matrices.
    lora_weights = 2 * 16 * (2 * 1792 + 2 * (896 + 128) + 3 * (896 + 4864))
    # Weights and moments, and DDP's buckets: 12, 16, or 12 / 8 bytes per trained weight.
    expected = {"ddp --gpus 8": 16 * weights, "fsdp2 --gpus 8": 1.5 * weights}
    if importlib.util.find_spec("peft"):
        expected["one --lora_rank 16"] = 2 * weights + 12 * lora_weights
    else:
        expected["one"] = 12 * weights
    # With only two layers, memory that the plan leaves out is a larger share.
    ghosts = check(shim, [f"{sharding} {small}" for sharding in expected], 0.3, ["update"])
    actual = [ghost["always"] for ghost in ghosts]
    assert actual == pytest.approx([*expected.values()], rel=0.01)


CASES = [
    f"one --model 3B {AGAIN}",
    f"one --model 3B --optimizer adamw8bit {AGAIN}",
    f"ddp --gpus 8 --model 3B {AGAIN}",
    "fsdp2 --gpus 8 --model 3B",
    "one --model 7B",
    f"fsdp2 --gpus 8 --model 7B {AGAIN}",
    f"fsdp2 --gpus 16 --model 7B {AGAIN}",
    *(
        pytest.param(f"{case} --model 7B --lora_rank 16", marks=needs_peft)
        for case in (f"one {AGAIN}", "one", f"ddp --gpus 8 {AGAIN}")
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_plan_of_a_whole_model_is_within_8_percent_of_the_simulated_step(shim, case):
    check(shim, [case], 0.08, ["update", "rollout"])


FAULTS = {  # fault -> (file, correct code, code that fails on a GPU)
    "log-probs that stay on the GPU": ("update.py", "micro.logprobs.cpu()", "micro.logprobs"),
    "a mask in fp32": (
        "engines/slots.py",
        "(hidden.shape, dtype=self.model.dtype, ",
        "(hidden.shape, ",
    ),
    "a query that is not cast": ("scale/packing.py", "x[0].to(value.dtype).split", "x[0].split"),
}
