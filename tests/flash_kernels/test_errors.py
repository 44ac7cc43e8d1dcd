"""Each refusal says what must hold, what came, and what to do."""

import subprocess
import sys

import pytest
import torch

from flash_kernels import flash_attention


def tensors(shape_q=(1, 4, 2, 16), shape_k=(1, 5, 2, 16), dtype=torch.float16):
    return torch.zeros(shape_q, dtype=dtype), torch.zeros(shape_k, dtype=dtype)


@pytest.mark.parametrize(
    "shapes,words",
    [
        (dict(shape_q=(4, 2, 16)), r"must be \(batch, seqlen, nheads, headdim\)"),
        (dict(shape_k=(2, 5, 2, 16)), "same batch size, got 1 and 2"),
        (dict(shape_k=(1, 5, 2, 32)), "same headdim, got 16 and 32"),
        (dict(shape_q=(1, 4, 3, 16)), "multiple of nheads of k, got 3 and 2"),
        (dict(shape_q=(1, 4, 2, 257), shape_k=(1, 5, 2, 257)), "at most 256, got 257"),
        (dict(dtype=torch.float64), "float16, bfloat16 or float32, got torch.float64"),
    ],
)
def test_shapes_and_dtypes(shapes, words):
    q, k = tensors(**shapes)
    with pytest.raises(ValueError, match=words):
        flash_attention(q, k, k)


def test_k_and_v_disagree():
    q, k = tensors()
    with pytest.raises(ValueError, match="k and v must have the same shape"):
        flash_attention(q, k, k[:, :4])
    with pytest.raises(ValueError, match="same dtype, got torch.float16, torch.float16 and"):
        flash_attention(q, k, k.float())
    with pytest.raises(ValueError, match="same device, got cpu, cpu and meta"):
        flash_attention(q, k, k.to("meta"))


def test_last_stride():
    q, k = tensors()
    with pytest.raises(ValueError, match=r"q must have stride 1 in its last dimension.*contiguous"):
        flash_attention(q.transpose(2, 3).contiguous().transpose(2, 3), k, k)


@pytest.mark.parametrize(
    "option,words",
    [
        (dict(dropout_p=1.5), "dropout_p must be between 0 and 1, got 1.5"),
        (dict(softcap=-1.0), "softcap must be finite and not negative"),
        (dict(window=(-1, 0)), "pass None instead of -1"),
        (dict(kernel="fast"), 'must be None, "portable" or "hopper", got \'fast\''),
        (dict(alibi_slopes=torch.zeros(3)), r"alibi_slopes must be float32 of shape \(2,\)"),
        (dict(alibi_slopes=torch.zeros(2).double()), "alibi_slopes must be float32"),
        (dict(lengths_k=torch.zeros(2, dtype=torch.int32)), r"lengths_k must be int32 or int64 of"),
        (dict(lengths_k=torch.zeros(1)), "lengths_k must be int32 or int64"),
        (dict(dropout_p=0.5, dropout_seed=-3), "dropout_seed must be between 0"),
        (dict(dropout_p=0.5, dropout_seed=torch.zeros(2)), "int64 tensor of one element"),
    ],
)
def test_options(option, words):
    q, k = tensors()
    with pytest.raises(ValueError, match=words):
        flash_attention(q, k, k, **option)


def test_kernel_that_does_not_serve_the_call():
    q, k = tensors()
    words = 'needs a GPU of compute capability 9.0, got a tensor on cpu: pass kernel="portable"'
    with pytest.raises(NotImplementedError, match=words):
        flash_attention(q, k, k, kernel="hopper")
    with pytest.raises(NotImplementedError, match="has no deterministic backward"):
        flash_attention(q, k, k, kernel="hopper", deterministic=True)


def test_bfloat16_in_the_interpreter():
    q, k = tensors(dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="use float16 or float32"):
        flash_attention(q, k, k)


def test_cpu_tensors_without_the_interpreter():
    program = (
        "import torch, flash_kernels\n"
        "q = torch.zeros(1, 4, 2, 16)\n"
        "try: flash_kernels.flash_attention(q, q, q)\n"
        "except NotImplementedError as error: print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PATH": ""}
    )
    assert "needs tensors on a GPU, got cpu" in run.stdout and "attention=sdpa" in run.stdout
