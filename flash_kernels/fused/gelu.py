"""Bias and GELU in one pass, forward and backward, the bias's gradient included.

The sum over tokens that is the gradient of a linear layer's bias takes the same pass as the
gradient of GELU, where an operator of its own would read the largest tensor of an MLP again.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gradients import once, with_gradients
from ..operators import LIBRARY
from .launch import check_device, num_programs, on_device

_ROWS, _COLUMNS, _NUM_WARPS = 4, 512, 4  # of a tile

LIBRARY.define("bias_gelu(Tensor x, Tensor bias, bool tanh) -> Tensor")
LIBRARY.define(
    "bias_gelu_backward(Tensor dout, Tensor x, Tensor bias, bool tanh) -> (Tensor, Tensor)"
)


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.885390081777927))  # 2 log2(e)


@triton.jit
def _gelu(x, TANH: tl.constexpr):
    """GELU and its derivative, float32."""
    if TANH:
        inner = 0.7978845608028654 * x * (1.0 + 0.044715 * x * x)  # sqrt(2 / pi)
        tanh = _tanh(inner)
        slope = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
        share = 0.5 * (1.0 + tanh)
        return x * share, share + 0.5 * x * (1.0 - tanh * tanh) * slope
    else:
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        density = 0.3989422804014327 * tl.exp2(x * x * -0.7213475204444817)
        return x * share, share + x * density


@triton.jit
def bias_gelu_kernel(
    x_ptr, bias_ptr, out_ptr, num_rows, dim, TANH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile a program. Grid: (tiles of rows, tiles of columns)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < num_rows)[:, None] & (columns < dim)[None, :]
    offsets = rows.to(tl.int64)[:, None] * dim + columns[None, :]
    bias = tl.load(bias_ptr + columns, mask=columns < dim, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32) + bias[None, :]
    out, _ = _gelu(x, TANH)
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def bias_gelu_backward_kernel(
    dout_ptr, x_ptr, bias_ptr, dx_ptr, dbias_ptr, num_rows, dim, TANH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Every num_programs(0)-th tile of a strip of columns, whose part of the bias's gradient goes
    to a row of dbias (num_programs(0), dim), float32. Grid: (programs, strips)."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    bias = tl.load(bias_ptr + columns, mask=columns < dim, other=0.0).to(tl.float32)
    dbias = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        rows = tile * ROWS + tl.arange(0, ROWS)
        mask = (rows < num_rows)[:, None] & (columns < dim)[None, :]
        offsets = rows.to(tl.int64)[:, None] * dim + columns[None, :]
        dout = tl.load(dout_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32) + bias[None, :]
        _, slope = _gelu(x, TANH)
        dx = dout * slope
        dbias += dx
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    part = tl.program_id(0) * dim + columns
    tl.store(dbias_ptr + part, tl.sum(dbias, 0), mask=columns < dim)


def bias_gelu(x: Tensor, bias: Tensor, *, approximate: str = "none") -> Tensor:
    """gelu(x + bias), sum and function in float32.

    Args:
        x: (..., dim), any floating dtype, on a GPU.
        bias: (dim,), any floating dtype.
        approximate: "none" (by the error function) or "tanh", as torch.nn.functional.gelu.

    Returns:
        The shape and dtype of x.

    Raises:
        ValueError: shapes do not fit, approximate is neither, no GPU has the tensors.
    """
    if bias.shape != x.shape[-1:]:
        raise ValueError(
            f"bias must have the last dimension of x, got {tuple(bias.shape)} and {tuple(x.shape)}"
        )
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate must be none or tanh, got {approximate!r}")
    check_device(x, bias)
    return _bias_gelu(x, bias, approximate == "tanh")


def _sizes(x: Tensor) -> tuple[int, int]:
    dim = x.shape[-1]
    return x.numel() // max(dim, 1), dim


def _forward(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    x, bias = x.contiguous(), bias.contiguous()
    out = torch.empty_like(x)
    num_rows, dim = _sizes(x)
    if x.numel():
        with on_device(x):
            bias_gelu_kernel[(triton.cdiv(num_rows, _ROWS), triton.cdiv(dim, _COLUMNS))](
                x, bias, out, num_rows, dim, TANH=tanh, ROWS=_ROWS, COLUMNS=_COLUMNS,
                num_warps=_NUM_WARPS,
            )  # fmt: skip
    return out


def _backward(dout: Tensor, x: Tensor, bias: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    dout, x, bias = dout.contiguous(), x.contiguous(), bias.contiguous()
    dx = torch.empty_like(x)
    num_rows, dim = _sizes(x)
    strips = triton.cdiv(dim, _COLUMNS)
    most = triton.cdiv(num_programs(x.device, _NUM_WARPS), max(strips, 1))
    programs = min(triton.cdiv(num_rows, _ROWS), most)
    parts = x.new_empty((programs, dim), dtype=torch.float32)
    if x.numel():
        with on_device(x):
            bias_gelu_backward_kernel[(programs, strips)](
                dout, x, bias, dx, parts, num_rows, dim, TANH=tanh, ROWS=_ROWS, COLUMNS=_COLUMNS,
                num_warps=_NUM_WARPS,
            )  # fmt: skip
    return dx, parts.sum(0).to(bias.dtype)


for _key in ("CUDA", "CPU"):  # CPU: under Triton's interpreter
    LIBRARY.impl("bias_gelu", _forward, _key)
    LIBRARY.impl("bias_gelu_backward", _backward, _key)


@torch.library.register_fake("flash_kernels::bias_gelu")
def _forward_fake(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("flash_kernels::bias_gelu_backward")
def _backward_fake(dout: Tensor, x: Tensor, bias: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), bias.new_empty(bias.shape)


def _save_for_backward(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, bias, ctx.tanh = inputs
    ctx.save_for_backward(x, bias)


def _differentiate(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_bias_gelu_backward(dout, *ctx.saved_tensors, ctx.tanh), None


_bias_gelu_backward = once("bias_gelu_backward")
_bias_gelu = with_gradients("bias_gelu", _save_for_backward, _differentiate)
