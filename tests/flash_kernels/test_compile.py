"""The kernels compile for GPUs that are not there, within their shared memory and registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flash_kernels.portable.tile_choice import SHARED_MEMORY_KIB

ROOT = Path(__file__).parents[2]
SHARED_KIB = {
    "sm_80": 163,
    "sm_86": 99,
    "sm_89": 99,
    "sm_90": 227,
    "sm_100": 227,
    "sm_120": 99,
    "gfx942": 64,
}
KERNELS = ("forward", "dk_dv", "dq")
ALL_OPTIONS = ["causal", "window", "softcap", "alibi", "lengths", "varlen", "dropout"]


def compile_cases(cases):
    """Figures of each case, by compile_kernels.py in a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, ROOT / "tests/flash_kernels/compile_kernels.py", json.dumps(cases)],
        capture_output=True, text=True, env={**environment, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(found) == len(cases)
    return found


def check_limits(found, allowed_spills=0):
    for case in found:
        assert case["shared"] <= 1024 * SHARED_KIB[case["arch"]], case
        assert case["spills"] <= allowed_spills, case


def test_families_have_the_shared_memory_of_their_smallest_gpu():
    assert SHARED_MEMORY_KIB == {
        "hopper": 227,
        "blackwell": 227,
        "ampere": 163,
        "small": 99,
        "amd": 64,
    }


@pytest.mark.parametrize("kernel", KERNELS)
def test_hopper_main_case(kernel):
    cases = [
        dict(kernel=kernel, arch="sm_90", headdim=64, dtype="bf16", options=["causal", "dropout"])
    ]
    check_limits(compile_cases(cases), allowed_spills=64)


def test_smallest_shared_memory():
    cases = [dict(kernel="dk_dv", arch="sm_86", headdim=256, dtype="fp16", options=["causal"])]
    check_limits(compile_cases(cases), allowed_spills=10**6)


@pytest.mark.slow
@pytest.mark.parametrize("arch", sorted(SHARED_KIB))
@pytest.mark.parametrize("kernel", [*KERNELS, "delta"])
def test_every_gpu(kernel, arch):
    cases = [
        dict(kernel=kernel, arch=arch, headdim=headdim, dtype=dtype, options=options)
        for headdim in (64, 80, 128, 256)
        for dtype, options in (("bf16", ["causal"]), ("fp16", ALL_OPTIONS), ("fp32", ["causal"]))
    ]
    check_limits(compile_cases(cases), allowed_spills=10**6)
