"""Launchers of the Hopper kernels: tiles, TMA descriptors, grids. Calls come checked by rule.py."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..portable.attention_backward import compute_row_words
from ..portable.dropout import column_keys, row_keys
from ..portable.launch import Problem, cdiv, heads_per_group
from .backward import BLOCK_KEYS, KEYS, attention_backward_kernel
from .forward import ROWS, attention_forward_kernel
from .gluon_api import TensorDescriptor, gl
from .rounding import round_scaled
from .rule import is_readable_by_tma

_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


class ForwardTile(NamedTuple):
    num_consumers: int  # warpgroups of 64 query rows
    block_n: int  # keys
    num_stages: int  # K and V tiles in flight
    registers: int  # of a consumer's thread


class BackwardTile(NamedTuple):
    block_m: int  # query rows
    num_stages: int  # Q and dO tiles in flight
    registers: int  # of a consumer's thread


def padded_headdim(headdim: int) -> int:
    """Width of the tiles: TMA fills the columns beyond headdim with zeros and never writes them."""
    return 64 if headdim <= 64 else 128


def forward_tile(headdim: int, has_dropout: bool) -> ForwardTile:
    """The tile sizes of a call. Three consumers leave 160 registers, too few for the dropout."""
    if headdim > 64:
        return ForwardTile(2, 128, 2, 240)
    return ForwardTile(2, 128, 3, 240) if has_dropout else ForwardTile(3, 128, 3, 160)


def backward_tile(headdim: int, has_dropout: bool) -> BackwardTile:
    block_m = 128 if headdim <= 64 else 64
    return BackwardTile(block_m, 2, 240)


def _stride(column_keys: Tensor | None) -> int:
    """From one head's column keys to the next one's."""
    return 0 if column_keys is None else column_keys.shape[-1]


@functools.cache
def _layout(rows: int, columns: int, dtype: torch.dtype):
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], _DTYPES[dtype])


def descriptor(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """TMA descriptor of a (batch, seqlen, nheads, headdim) tensor as (batch, nheads, seqlen,
    headdim), in boxes of [1, 1, rows, columns]."""
    batch, seqlen, nheads, headdim = tensor.shape
    sizes = [batch, nheads, seqlen, headdim]
    strides = [tensor.stride(0), tensor.stride(2), tensor.stride(1), 1]
    # The stride of a dimension of size 1 is never used, but has to be a multiple of 16 bytes.
    strides = [s if n > 1 else 8 for n, s in zip(sizes[:3], strides[:3], strict=True)] + [1]
    layout = _layout(rows, columns, tensor.dtype)
    return TensorDescriptor(tensor, sizes, strides, [1, 1, rows, columns], layout)


def attention_forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """The counterpart of the portable attention_forward, for calls that rule.py admits.

    Returns:
        out: (batch, seqlen_q, nheads, headdim), dtype of q, contiguous. lse: float32, (batch,
            nheads, seqlen_q).
    """
    p = problem
    out = torch.empty(p.q.shape, dtype=p.q.dtype, device=p.q.device)
    lse = torch.empty(p.lse_shape, dtype=torch.float32, device=p.q.device)
    if out.numel() == 0:
        return out, lse
    has_dropout = p.dropout_p > 0.0
    tile = forward_tile(p.headdim, has_dropout)
    columns = padded_headdim(p.headdim)
    num_heads = p.batch * p.nheads
    num_row_tiles = cdiv(p.seqlen_q, tile.num_consumers * ROWS.value)
    with p.device_guard():
        keys = column_keys(p, tile.block_n)
        attention_forward_kernel[(num_heads * num_row_tiles,)](
            descriptor(p.q, ROWS.value, columns), descriptor(p.k, tile.block_n, columns),
            descriptor(p.v, tile.block_n, columns), descriptor(out, ROWS.value, columns), lse,
            *row_keys(p), keys, _stride(keys), p.nheads, p.group_size, num_heads,
            p.seqlen_q, p.seqlen_k, num_row_tiles, heads_per_group(p), p.scale_log2,
            p.dropout_threshold, p.keep_scale,
            NUM_CONSUMERS=tile.num_consumers, HEADDIM=columns, BLOCK_N=tile.block_n,
            STAGES=tile.num_stages, REGISTERS=tile.registers, IS_CAUSAL=p.has_right,
            HAS_TAIL=not p.has_right and p.seqlen_k % tile.block_n != 0, HAS_DROPOUT=has_dropout,
            num_warps=4,
        )  # fmt: skip
    return out, lse


def attention_backward(
    problem: Problem, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The counterpart of the portable attention_backward, for calls that rule.py admits.

    dq is added up in a float32 tensor of q's size, in any order.
    """
    p = problem
    if not is_readable_by_tma(dout) or dout.stride(-1) != 1:
        dout = dout.contiguous()
    dq = torch.empty(p.q.shape, dtype=p.q.dtype, device=p.q.device)
    dk = torch.empty(p.k.shape, dtype=p.k.dtype, device=p.q.device)
    dv = torch.empty(p.v.shape, dtype=p.v.dtype, device=p.q.device)
    if dq.numel() == 0:
        return dq, dk.zero_(), dv.zero_()
    tile = backward_tile(p.headdim, p.dropout_p > 0.0)
    columns = padded_headdim(p.headdim)
    num_heads = p.batch * p.nheads_k
    num_col_tiles = cdiv(p.seqlen_k, BLOCK_KEYS.value)
    grad_scale = p.softmax_scale * p.keep_scale
    with p.device_guard():
        keys = column_keys(p, BLOCK_KEYS.value)
        row_words = compute_row_words(p, dout, dlse, out, lse)
        dq_sum = torch.zeros(p.q.shape, dtype=torch.float32, device=p.q.device)
        attention_backward_kernel[(num_heads * num_col_tiles,)](
            descriptor(p.q, tile.block_m, columns), descriptor(dout, tile.block_m, columns),
            descriptor(p.k, KEYS.value, columns), descriptor(p.v, KEYS.value, columns),
            descriptor(dk, KEYS.value, columns), descriptor(dv, KEYS.value, columns),
            descriptor(dq_sum, 64, columns * tile.block_m // 128), row_words,
            row_words.view(torch.int32), keys, _stride(keys), p.nheads, p.group_size, num_heads,
            p.seqlen_q, p.seqlen_k, num_col_tiles, max(1, heads_per_group(p) // p.group_size),
            p.scale_log2, grad_scale,
            p.keep_scale, p.dropout_threshold, HEADDIM=columns, BLOCK_M=tile.block_m,
            STAGES=tile.num_stages, REGISTERS=tile.registers, IS_CAUSAL=p.has_right,
            HAS_TAIL=not p.has_right and p.seqlen_k % BLOCK_KEYS.value != 0,
            HAS_DROPOUT=p.dropout_p > 0.0, num_warps=4,
        )  # fmt: skip
        round_scaled(dq_sum, grad_scale, dq)
    return dq, dk, dv
