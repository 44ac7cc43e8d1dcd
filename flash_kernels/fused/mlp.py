"""A transformer's MLP whose GELU takes no pass over memory of its own.

At four times the width its hidden units are the largest tensors of a block. cuBLASLt writes them
before and after GELU from the registers of the first product, and multiplies the gradient by
GELU's derivative in those of the second's backward.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from ..gradients import once, refuse_second, with_gradients
from ..operators import LIBRARY
from . import cublaslt
from .gelu import bias_gelu
from .launch import check_device, num_programs, on_device

_DTYPES = (torch.float16, torch.bfloat16)  # of cuBLASLt's epilogues
_ROWS, _COLUMNS, _NUM_WARPS = 16, 256, 4  # of a tile of sums

LIBRARY.define(
    "gelu_mlp(Tensor x, Tensor up_weight, Tensor up_bias, Tensor down_weight, Tensor? down_bias) "
    "-> (Tensor, Tensor, Tensor)"
)
LIBRARY.define("matmul_dgelu(Tensor dout, Tensor weight, Tensor pre) -> Tensor")
LIBRARY.define("column_sums(Tensor x, ScalarType dtype) -> Tensor")


@triton.jit
def column_sums_kernel(
    x_ptr, sums_ptr, num_rows, dim, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Every num_programs(0)-th tile of a strip of columns, to a row of sums (num_programs(0), dim),
    float32. Grid: (programs, strips)."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        rows = tile * ROWS + tl.arange(0, ROWS)
        mask = (rows < num_rows)[:, None] & (columns < dim)[None, :]
        offsets = rows.to(tl.int64)[:, None] * dim + columns[None, :]
        sums += tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    part = tl.program_id(0) * dim + columns
    tl.store(sums_ptr + part, tl.sum(sums, 0), mask=columns < dim)


def gelu_mlp(
    x: Tensor,
    up_weight: Tensor,
    up_bias: Tensor,
    down_weight: Tensor,
    down_bias: Tensor | None = None,
    *,
    approximate: str = "tanh",
    in_steps: bool = False,
) -> Tensor:
    """gelu(x @ up_weight.T + up_bias) @ down_weight.T + down_bias.

    Of tanh, in float16 or bfloat16, with dim and hidden multiples of 8, cuBLASLt makes GELU and its
    derivative within the matrix products, on NVIDIA GPUs from sm_80 on with a torch whose cuBLASLt
    can be loaded: up_bias is rounded to the products' dtype, and GELU is of float32. All else, and
    all with in_steps, is F.linear, bias_gelu, F.linear: GELU is of a rounded product. A call of
    the same shapes repeats bit for bit.

    Args:
        x: (..., dim), any floating dtype, on a GPU.
        up_weight, up_bias: (hidden, dim) and (hidden,), any floating dtypes.
        down_weight, down_bias: (dim, hidden) and (dim,), likewise.
        approximate: "tanh" or "none" (by the error function), as torch.nn.functional.gelu.
        in_steps: always the three steps, each of which activation checkpointing can keep or run
            again by itself.

    Returns:
        x's shape. Under autocast the products and the result are in its dtype, else in x's.

    Raises:
        ValueError: shapes do not fit, approximate is neither, no GPU has the tensors.
        RuntimeError: cuBLASLt refuses a product; no other way is tried.
    """
    hidden, dim = up_weight.shape
    shapes = {"x": x.shape[-1:], "up_bias": up_bias.shape, "down_weight": down_weight.shape}
    needed = {"x": (dim,), "up_bias": (hidden,), "down_weight": (dim, hidden)}
    if down_bias is not None:
        shapes["down_bias"], needed["down_bias"] = down_bias.shape, (dim,)
    for name, shape in needed.items():
        if shapes[name] != shape:
            raise ValueError(
                f"{name} must {'end in' if name == 'x' else 'be'} {shape} where up_weight is "
                f"{(hidden, dim)}, got {tuple(shapes[name])}"
            )
    check_device(x, up_weight, up_bias, down_weight, down_bias)
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    # Here, not in the operator: a weight's gradient is rounded as autocast's is.
    x, up_weight, down_weight = x.to(dtype), up_weight.to(dtype), down_weight.to(dtype)
    fits = dtype in _DTYPES and approximate == "tanh" and dim * hidden > 0
    if in_steps or not (fits and dim % 8 == hidden % 8 == 0 and cublaslt.is_available(x.device)):
        activated = bias_gelu(F.linear(x, up_weight), up_bias, approximate=approximate)
        return F.linear(activated, down_weight, None if down_bias is None else down_bias.to(dtype))
    out, _, _ = _gelu_mlp(x.reshape(-1, dim), up_weight, up_bias, down_weight, down_bias)
    return out.view(x.shape)


def _forward(
    x: Tensor, up_weight: Tensor, up_bias: Tensor, down_weight: Tensor, down_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(result, hidden units after GELU and before it)."""
    with torch.autocast(x.device.type, enabled=False):  # the dtypes are chosen
        activated, pre = cublaslt.linear_gelu(x, up_weight, up_bias.to(x.dtype))
        bias = None if down_bias is None else down_bias.to(x.dtype)
        return F.linear(activated, down_weight, bias), activated, pre


def _matmul_dgelu_forward(dout: Tensor, weight: Tensor, pre: Tensor) -> Tensor:
    return cublaslt.matmul_dgelu(dout, weight, pre)


def _column_sums_forward(x: Tensor, dtype: torch.dtype) -> Tensor:
    x = x.contiguous()
    num_rows, dim = x.shape
    strips = triton.cdiv(dim, _COLUMNS)
    most = triton.cdiv(num_programs(x.device, _NUM_WARPS), max(strips, 1))
    programs = min(triton.cdiv(num_rows, _ROWS), most)
    parts = x.new_empty((programs, dim), dtype=torch.float32)
    if x.numel():
        with on_device(x):
            column_sums_kernel[(programs, strips)](
                x, parts, num_rows, dim, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=_NUM_WARPS
            )
    return parts.sum(0).to(dtype)


for _key in ("CUDA", "CPU"):  # CPU: under Triton's interpreter, with a stand-in for cuBLASLt
    LIBRARY.impl("gelu_mlp", _forward, _key)
    LIBRARY.impl("matmul_dgelu", _matmul_dgelu_forward, _key)
    LIBRARY.impl("column_sums", _column_sums_forward, _key)


@torch.library.register_fake("flash_kernels::gelu_mlp")
def _fake(
    x: Tensor, up_weight: Tensor, up_bias: Tensor, down_weight: Tensor, down_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    hidden_shape = (x.shape[0], up_weight.shape[0])  # len() would fix a dynamic number of rows
    return x.new_empty(x.shape), x.new_empty(hidden_shape), x.new_empty(hidden_shape)


@torch.library.register_fake("flash_kernels::matmul_dgelu")
def _matmul_dgelu_fake(dout: Tensor, weight: Tensor, pre: Tensor) -> Tensor:
    return pre.new_empty(pre.shape)


@torch.library.register_fake("flash_kernels::column_sums")
def _column_sums_fake(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape[1:], dtype=dtype)


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, up_weight, up_bias, down_weight, down_bias = inputs
    ctx.save_for_backward(x, up_weight, down_weight, *output[1:])
    ctx.bias_dtypes = up_bias.dtype, None if down_bias is None else down_bias.dtype
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, dout: Tensor | None, *of_hidden: Tensor | None
) -> tuple[Tensor | None, ...]:
    if any(gradient is not None for gradient in of_hidden):
        refuse_second(ctx)
    if dout is None:
        return (None,) * 5
    x, up_weight, down_weight, activated, pre = ctx.saved_tensors
    up_dtype, down_dtype = ctx.bias_dtypes
    needs = ctx.needs_input_grad
    dx = dup_weight = dup_bias = ddown_weight = ddown_bias = None
    with torch.autocast(dout.device.type, enabled=False):
        if needs[3]:
            ddown_weight = dout.T @ activated
        if needs[4]:
            ddown_bias = _column_sums(dout, down_dtype)
        if any(needs[:3]):
            dpre = _matmul_dgelu(dout, down_weight, pre)
            dx = dpre @ up_weight if needs[0] else None
            dup_weight = dpre.T @ x if needs[1] else None
            dup_bias = _column_sums(dpre, up_dtype) if needs[2] else None
    return dx, dup_weight, dup_bias, ddown_weight, ddown_bias


_matmul_dgelu = once("matmul_dgelu")
_column_sums = once("column_sums")
_gelu_mlp = with_gradients("gelu_mlp", _save_for_backward, _differentiate)


@register_flop_formula(torch.ops.flash_kernels.gelu_mlp)
def _flops(x_shape: Any, up_shape: Any, *_: Any, out_shape: Any = None) -> int:
    return 4 * x_shape[0] * up_shape[0] * up_shape[1]


@register_flop_formula(torch.ops.flash_kernels.matmul_dgelu)
def _matmul_dgelu_flops(dout_shape: Any, weight_shape: Any, *_: Any, out_shape: Any = None) -> int:
    return 2 * dout_shape[0] * weight_shape[0] * weight_shape[1]
