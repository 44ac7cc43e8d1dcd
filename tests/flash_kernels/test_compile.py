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
ALL_OPTIONS = [
    *("causal", "window", "softcap", "alibi", "lengths", "varlen", "dropout", "positions"),
]


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


def test_hopper_main_cases():
    """No spills; comparisons that are not packed into bits; and loads that threads share: at most 9
    a thread (8 for two tiles of 64 x 64 and one for the words of the rows or keys) in each of two
    stages before and one inside each of the two loops."""
    found = compile_cases(
        [
            dict(kernel=kernel, arch="sm_90", headdim=64, dtype="bf16", options=options)
            for kernel in ("forward", "dk_dv", "dq")
            for options in (["causal"], ["causal", "dropout"])
        ]
    )
    check_limits(found)
    for case in found:
        assert case["bit_packing"] == 0, case
        assert case["async_copies"] <= 2 * 3 * 9, case


@pytest.mark.slow
def test_every_gpu():
    """The largest kernel at the largest head dims, and every option at once."""
    kinds = [
        dict(kernel="dk_dv", headdim=128, dtype="bf16", options=["causal", "dropout"]),
        dict(kernel="dk_dv", headdim=256, dtype="fp16", options=["causal"]),
        dict(kernel="forward", headdim=80, dtype="bf16", options=ALL_OPTIONS),
        dict(kernel="dq", headdim=64, dtype="fp32", options=["causal"]),
    ]
    cases = [dict(kind, arch=arch) for arch in sorted(SHARED_KIB) for kind in kinds]
    check_limits(compile_cases(cases), allowed_spills=512)
