"""The residual sum with dropout and the LayerNorm of it, which stand between two sublayers of a
pre-norm transformer, in one pass forward and one backward.

Forward, a token is read twice (residual, branch) and written twice (sum, normed); backward it is
read three times and written twice, gradients of the norm's weights included, whose sums over tokens
take the same pass. The dropout mask is made again in the backward, not stored.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gradients import once, with_gradients
from ..operators import LIBRARY
from ..portable.dropout import dropout_column_keys, dropout_row_keys
from .launch import check_device, num_programs, on_device

_MAX_DIM = 8192  # a row is held in registers

LIBRARY.define(
    "residual_norm(Tensor residual, Tensor branch, Tensor weight, Tensor? bias, "
    "Tensor? dropout_seed, float dropout_p, float eps, ScalarType dtype) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "residual_norm_backward(Tensor? dtotal, Tensor? dnormed, Tensor total, Tensor mean, "
    "Tensor rstd, Tensor weight, bool has_bias, Tensor? dropout_seed, float dropout_p, "
    "ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor)"
)


@triton.jit
def _is_kept(seed_ptr, rows, column_keys, threshold):
    """Mask of flash_kernels.reference.dropout_keep_mask for one head: rows by columns."""
    keys, multipliers = dropout_row_keys(seed_ptr, None, 0, rows, 0, 0)
    return column_keys[None, :] * multipliers[:, None] + keys[:, None] > threshold


@triton.jit
def residual_norm_kernel(
    residual_ptr, branch_ptr, weight_ptr, bias_ptr, seed_ptr, total_ptr, normed_ptr, mean_ptr,
    rstd_ptr, num_rows, dim, eps, keep_scale, threshold, HAS_BIAS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows a program. Grid: (ceil(num_rows / ROWS),)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    in_row = columns < dim
    mask = (rows < num_rows)[:, None] & in_row[None, :]
    offsets = rows.to(tl.int64)[:, None] * dim + columns[None, :]
    branch = tl.load(branch_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_DROPOUT:
        column_keys = dropout_column_keys(tl.load(seed_ptr), columns, 0)
        is_kept = _is_kept(seed_ptr, rows, column_keys, threshold)
        branch = tl.where(is_kept, branch * keep_scale, 0.0)
    total = (residual + branch).to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + offsets, total, mask=mask)
    total = total.to(tl.float32)
    mean = tl.sum(total, 1) / dim
    centered = tl.where(in_row[None, :], total - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centered * centered, 1) / dim + eps)
    tl.store(mean_ptr + rows, mean, mask=rows < num_rows)
    tl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)
    weight = tl.load(weight_ptr + columns, mask=in_row, other=0.0).to(tl.float32)
    normed = centered * rstd[:, None] * weight[None, :]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=in_row, other=0.0).to(tl.float32)
        normed += bias[None, :]
    tl.store(normed_ptr + offsets, normed.to(normed_ptr.dtype.element_ty), mask=mask)


@triton.jit
def residual_norm_backward_kernel(
    dtotal_ptr, dnormed_ptr, total_ptr, mean_ptr, rstd_ptr, weight_ptr, seed_ptr, dresidual_ptr,
    dbranch_ptr, dweight_ptr, dbias_ptr, num_rows, dim, keep_scale, threshold,
    HAS_DTOTAL: tl.constexpr, HAS_DROPOUT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every num_programs-th tile of ROWS rows, and their part of the weights' gradients, which a
    program writes to its row of dweight and dbias (num_programs, dim), float32."""
    columns = tl.arange(0, BLOCK)
    in_row = columns < dim
    weight = tl.load(weight_ptr + columns, mask=in_row, other=0.0).to(tl.float32)
    if HAS_DROPOUT:
        column_keys = dropout_column_keys(tl.load(seed_ptr), columns, 0)
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)
    dbias = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        rows = tile * ROWS + tl.arange(0, ROWS)
        mask = (rows < num_rows)[:, None] & in_row[None, :]
        offsets = rows.to(tl.int64)[:, None] * dim + columns[None, :]
        dnormed = tl.load(dnormed_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        total = tl.load(total_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + rows, mask=rows < num_rows, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)
        scaled = tl.where(mask, (total - mean[:, None]) * rstd[:, None], 0.0)
        dweight += dnormed * scaled
        dbias += dnormed
        dscaled = dnormed * weight[None, :]
        along = tl.sum(dscaled * scaled, 1) / dim
        level = tl.sum(dscaled, 1) / dim
        gradient = (dscaled - scaled * along[:, None] - level[:, None]) * rstd[:, None]
        if HAS_DTOTAL:
            gradient += tl.load(dtotal_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(dresidual_ptr + offsets, gradient.to(dresidual_ptr.dtype.element_ty), mask=mask)
        if HAS_DROPOUT:
            is_kept = _is_kept(seed_ptr, rows, column_keys, threshold)
            gradient = tl.where(is_kept, gradient * keep_scale, 0.0)
        tl.store(dbranch_ptr + offsets, gradient.to(dbranch_ptr.dtype.element_ty), mask=mask)
    part = tl.program_id(0) * dim + columns
    tl.store(dweight_ptr + part, tl.sum(dweight, 0), mask=in_row)
    tl.store(dbias_ptr + part, tl.sum(dbias, 0), mask=in_row)


def residual_norm(
    residual: Tensor,
    branch: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """total = residual + dropout(branch), and LayerNorm(total) * weight + bias.

    Args:
        residual: (..., dim), any floating dtype, on a GPU; that of total.
        branch: the same shape, any floating dtype.
        weight, bias: (dim,), any floating dtype.
        eps: added to the variance.
        dropout_p: probability of dropping an element of branch, in [0, 1); the others are divided
            by 1 - dropout_p. The mask is that of flash_kernels.reference.dropout_keep_mask for one
            head, its seed drawn from torch's generator of the device.

    Returns:
        total, dtype of residual, and normed, autocast's dtype under autocast, else residual's.
        Sums are in float32.

    Raises:
        ValueError: shapes do not fit, dim is over 8192, dropout_p is outside [0, 1), no GPU has the
            tensors.
    """
    dim = residual.shape[-1]
    shapes = {weight.shape, weight.shape if bias is None else bias.shape}
    if branch.shape != residual.shape or shapes != {(dim,)}:
        raise ValueError(
            "branch must have residual's shape, weight and bias its last dimension, got "
            f"{tuple(residual.shape)}, {tuple(branch.shape)} and "
            f"{', '.join(str(tuple(shape)) for shape in shapes)}"
        )
    if dim > _MAX_DIM or not 0.0 <= dropout_p < 1.0:
        raise ValueError(
            f"dim must be at most {_MAX_DIM} and dropout_p in [0, 1), got {dim} and {dropout_p}"
        )
    check_device(residual, branch, weight, bias)
    device, dtype = residual.device, residual.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    seed = None
    if dropout_p > 0.0:
        seed = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)
    total, normed, _, _ = _residual_norm(
        residual, branch, weight, bias, seed, dropout_p, eps, dtype
    )
    return total, normed


def _tile(dim: int, num_elements: int, per_thread: int) -> dict[str, int]:
    """Whole rows, at least `num_elements`."""
    block = triton.next_power_of_2(dim)
    rows = max(1, num_elements // block)
    num_warps = min(max(rows * block // (32 * per_thread), 1), 16)
    return {"ROWS": rows, "BLOCK": block, "num_warps": num_warps}


def _dropout(dropout_p: float) -> tuple[float, int]:
    """(factor on what is kept, threshold of the mask's words)."""
    return 1.0 / (1.0 - dropout_p), max(round(dropout_p * 2**32) - 2**31 - 1, -(2**31))


def _forward(
    residual: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, seed: Tensor | None,
    dropout_p: float, eps: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    residual, branch, weight = residual.contiguous(), branch.contiguous(), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    dim = residual.shape[-1]
    num_rows = residual.numel() // dim
    total, normed = torch.empty_like(residual), torch.empty_like(residual, dtype=dtype)
    mean = residual.new_empty(residual.shape[:-1], dtype=torch.float32)
    rstd = torch.empty_like(mean)
    tile = _tile(dim, 2048, per_thread=16)
    if num_rows:
        with on_device(residual):
            residual_norm_kernel[(triton.cdiv(num_rows, tile["ROWS"]),)](
                residual, branch, weight, bias, seed, total, normed, mean, rstd, num_rows, dim, eps,
                *_dropout(dropout_p), HAS_BIAS=bias is not None, HAS_DROPOUT=seed is not None,
                **tile,
            )  # fmt: skip
    return total, normed, mean, rstd


def _backward(
    dtotal: Tensor | None, dnormed: Tensor | None, total: Tensor, mean: Tensor, rstd: Tensor,
    weight: Tensor, has_bias: bool, seed: Tensor | None, dropout_p: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of residual, branch (of `dtype`), weight and bias (empty if it has none)."""
    dim = total.shape[-1]
    num_rows = total.numel() // dim
    weight = weight.contiguous()
    dtotal = None if dtotal is None else dtotal.contiguous()
    dnormed = torch.zeros_like(total) if dnormed is None else dnormed.contiguous()
    dresidual, dbranch = torch.empty_like(total), torch.empty_like(total, dtype=dtype)
    tile = _tile(dim, 1024, per_thread=8)
    most = num_programs(total.device, tile["num_warps"])
    programs = min(triton.cdiv(num_rows, tile["ROWS"]), most)
    parts = total.new_empty((2, programs, dim), dtype=torch.float32)
    if programs:
        with on_device(total):
            residual_norm_backward_kernel[(programs,)](
                dtotal, dnormed, total, mean, rstd, weight, seed, dresidual, dbranch, *parts,
                num_rows, dim, *_dropout(dropout_p), HAS_DTOTAL=dtotal is not None,
                HAS_DROPOUT=seed is not None, **tile,
            )  # fmt: skip
    # Two sums: outputs of an operator must not share memory.
    dweight = parts[0].sum(0).to(weight.dtype)
    dbias = parts[1].sum(0).to(weight.dtype) if has_bias else weight.new_empty(0)
    return dresidual, dbranch, dweight, dbias


for _key in ("CUDA", "CPU"):  # CPU: under Triton's interpreter
    LIBRARY.impl("residual_norm", _forward, _key)
    LIBRARY.impl("residual_norm_backward", _backward, _key)


@torch.library.register_fake("flash_kernels::residual_norm")
def _forward_fake(
    residual: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, seed: Tensor | None,
    dropout_p: float, eps: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    mean = residual.new_empty(residual.shape[:-1], dtype=torch.float32)
    total = residual.new_empty(residual.shape)
    return total, residual.new_empty(residual.shape, dtype=dtype), mean, torch.empty_like(mean)


@torch.library.register_fake("flash_kernels::residual_norm_backward")
def _backward_fake(
    dtotal: Tensor | None, dnormed: Tensor | None, total: Tensor, mean: Tensor, rstd: Tensor,
    weight: Tensor, has_bias: bool, seed: Tensor | None, dropout_p: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dweight = weight.new_empty(weight.shape)
    dbias = torch.empty_like(dweight) if has_bias else weight.new_empty(0)
    dbranch = total.new_empty(total.shape, dtype=dtype)
    return total.new_empty(total.shape), dbranch, dweight, dbias


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    _, branch, weight, bias, seed, ctx.dropout_p, _, _ = inputs
    total, _, mean, rstd = output
    ctx.save_for_backward(total, mean, rstd, weight, seed)
    ctx.has_bias, ctx.branch_dtype = bias is not None, branch.dtype
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, dtotal: Tensor | None, dnormed: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    total, mean, rstd, weight, seed = ctx.saved_tensors
    dresidual, dbranch, dweight, dbias = _residual_norm_backward(
        dtotal, dnormed, total, mean, rstd, weight, ctx.has_bias, seed, ctx.dropout_p,
        ctx.branch_dtype,
    )  # fmt: skip
    return dresidual, dbranch, dweight, dbias if ctx.has_bias else None, None, None, None, None


_residual_norm_backward = once("residual_norm_backward")
_residual_norm = with_gradients("residual_norm", _save_for_backward, _differentiate)
