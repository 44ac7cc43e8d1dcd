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
for headdim, seqlen, causal, dropout_p in (
    (64, 600, True, 0.0), (64, 200, False, 0.1), (128, 200, True, 0.0),
):
    q, k, v = torch.randn(3, 1, seqlen, 2, headdim, device="cuda", dtype=torch.bfloat16).unbind()
    leaves = [t.requires_grad_() for t in (q, k, v)]
    options = dict(causal=causal, dropout_p=dropout_p, kernel="{kernel}")
    flash_attention(*leaves, **options).sum().backward()
    packed = [t.detach()[0].requires_grad_() for t in leaves]
    starts = torch.tensor([0, 70, 70, seqlen], dtype=torch.int32, device="cuda")
    longest = dict(max_seqlen_q=seqlen, max_seqlen_k=seqlen)
    flash_attention_varlen(
        *packed, cu_seqlens_q=starts, cu_seqlens_k=starts, **longest, **options
    ).sum().backward()
torch.cuda.synchronize()
"""
STRAY = """
import torch, triton, triton.language as tl
@triton.jit
def stray_kernel(pointer):
    tl.store(pointer + 2**40, 1.0)
stray_kernel[(1,)](torch.zeros(1, device="cuda"))
torch.cuda.synchronize()
"""


def find_sanitizer() -> str | None:
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    return shutil.which("compute-sanitizer") or shutil.which(toolkit / "bin/compute-sanitizer")


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(find_sanitizer() is None, reason="needs compute-sanitizer (CUDA toolkit)"),
]


def sanitize(tool: str, code: str, folder: Path) -> subprocess.CompletedProcess:
    """A script under a tool, its kernels by Triton alone: torch's take minutes."""
    (folder / "calls.py").write_text(code)  # Triton reads the source of a kernel
    ours = ["--kernel-name", "kns=_kernel", "--error-exitcode", "9"]
    return subprocess.run(
        [find_sanitizer(), "--tool", tool, *ours, sys.executable, folder / "calls.py"],
        capture_output=True, text=True, timeout=900, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.parametrize("kernel", ["portable", "hopper"])
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_no_stray_access_and_no_race(tool, kernel, tmp_path):
    if kernel == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    run = sanitize(tool, CALLS.format(kernel=kernel), tmp_path)
    assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]


def test_a_stray_access_is_seen(tmp_path):
    assert sanitize("memcheck", STRAY, tmp_path).returncode == 9
