"""NVIDIA's compute-sanitizer over small calls, where the CUDA toolkit is installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
CALLS = """
import torch
from flash_kernels import flash_attention, flash_attention_varlen
for headdim, causal, dropout_p in ((64, True, 0.0), (64, False, 0.1), (128, True, 0.0)):
    q, k, v = torch.randn(3, 1, 200, 2, headdim, device="cuda", dtype=torch.bfloat16).unbind()
    leaves = [t.requires_grad_() for t in (q, k, v)]
    options = dict(causal=causal, dropout_p=dropout_p, kernel="{kernel}")
    flash_attention(*leaves, **options).sum().backward()
    packed = [t.detach()[0].requires_grad_() for t in leaves]
    starts = torch.tensor([0, 70, 70, 200], dtype=torch.int32, device="cuda")
    flash_attention_varlen(
        *packed, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=130, max_seqlen_k=130,
        **options,
    ).sum().backward()
torch.cuda.synchronize()
"""


def find_sanitizer() -> str | None:
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    return shutil.which("compute-sanitizer") or shutil.which(toolkit / "bin/compute-sanitizer")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(find_sanitizer() is None, reason="needs compute-sanitizer of the CUDA toolkit")
@pytest.mark.parametrize("kernel", ["portable", "hopper"])
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_no_stray_access_and_no_race(tool, kernel):
    if kernel == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    code = CALLS.format(kernel=kernel)
    # Kernels of ours alone: torch's take minutes.
    ours = ["--kernel-name", "kns=attention", "--error-exitcode", "9"]
    run = subprocess.run(
        [find_sanitizer(), "--tool", tool, *ours, sys.executable, "-c", code],
        capture_output=True, text=True, timeout=900, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]
    assert "ERROR SUMMARY: 0 errors" in run.stdout or "0 hazards displayed" in run.stdout
