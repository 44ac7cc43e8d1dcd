"""The Hopper kernels compile with no GPU, and their machine code overlaps products and softmax."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flash_kernels.portable.versions import is_served

ROOT = Path(__file__).parents[2]
SHARED_BYTES = 227 * 1024


def compile_cases(cases: list[tuple]) -> list[dict]:
    """Figures of each kernel, by compile_hopper.py in a process without the interpreter."""
    names = ("direction", "headdim", "dtype", "options")
    cases = [dict(zip(names, case, strict=True)) for case in cases]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, ROOT / "tests/flash_kernels/compile_hopper.py", json.dumps(cases)],
        capture_output=True, text=True, env={**environment, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(found) >= len(cases)
    return found


def check(kernel: dict, most_spills: int) -> None:
    assert kernel["shared"] <= SHARED_BYTES, kernel
    assert kernel["spills"] <= most_spills, kernel
    # Among them C7510 to C7512: matrix instructions that wait for each other.
    assert not kernel["warnings"], kernel["warnings"]
    # They get lost when the GPU is shared: gluon_api.arrive_warpgroup.
    assert kernel["asynchronous_arrivals"] == 0, kernel


def check_forward(kernel: dict) -> None:
    # Triton 3.6 spills nothing; 3.8 a little where a consumer has 160 registers.
    check(kernel, most_spills=256)
    num_consumers = kernel["num_warps"] // 4 - 1
    products = 12 if kernel["headdim"] <= 64 else 16  # of 16 columns: q k^T and probs v
    assert len(kernel["loops"]) == num_consumers, kernel
    for loop in kernel["loops"]:
        assert loop["products"] == products, kernel
        # One exponential a score and thread; ptxas otherwise moves all of them behind the wait.
        assert loop["exponentials_between_waits"] >= 64, kernel
        assert loop["spills"] <= 16, kernel


def check_backward(kernel: dict) -> None:
    if kernel["kernel"] != "attention_backward_kernel":
        return check(kernel, most_spills=0)
    # dk, dv, S^T and dP^T of a 128 x 128 tile leave few of the 240 registers; dropout takes more.
    # Outside the loops, and most with Triton 3.8.
    has_dropout = "dropout" in kernel["options"]
    check(kernel, most_spills=512 if has_dropout else 384)
    assert len(kernel["loops"]) == 2, kernel
    for loop in kernel["loops"]:
        assert loop["products"] == 32, kernel  # of 16 columns: S^T, dP^T, dv, dq and dk
        assert loop["products_at_end"] == (24 if kernel["headdim"] <= 64 else 16), kernel
        assert loop["spills"] <= (40 if has_dropout else 24), kernel
        # At which warps wait for each other: two for dS^T, three with Triton 3.8, and two for dq,
        # or three for both; dropout has one more behind its second wait.
        names_ds = kernel["headdim"] > 64
        assert loop["barriers"] <= (3 if names_ds else 5) + has_dropout, kernel
        assert loop["named_arrivals"] == (2 if names_ds else 1), kernel


def check_each(kernels: list[dict]) -> None:
    for kernel in kernels:
        (check_forward if kernel["direction"] == "forward" else check_backward)(kernel)


# Every tile of launch.py, with the options that take the most registers.
CASES = [
    (64, "bf16", ["causal"]),
    (64, "fp16", ["causal", "dropout"]),
    (64, "bf16", ["varlen", "window", "dropout"]),
    (64, "bf16", ["tokens", "causal"]),
    (128, "bf16", ["causal"]),
    (128, "fp16", ["varlen", "dropout", "positions"]),
    (128, "bf16", ["tokens", "causal", "dropout"]),
]
OF_FORWARD = [(64, "bf16", ["long"]), (40, "bf16", ["long", "lengths", "causal"])]
OF_BACKWARD = [(128, "bf16", ["lengths", "window"])]


@pytest.mark.slow
def test_every_tile():
    forward = [("forward", *case) for case in CASES + OF_FORWARD]
    check_each(compile_cases(forward + [("backward", *case) for case in CASES + OF_BACKWARD]))


@pytest.mark.parametrize(
    "version,served",
    [("3.5.1", False), ("3.6.0", True), ("3.7.1", True), ("3.9.0", True), ("3.10.0", False)],
)
def test_releases_of_triton(version, served):
    assert is_served(version) == served
