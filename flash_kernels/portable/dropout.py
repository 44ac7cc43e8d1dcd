"""Dropout of attention probabilities: a mask that is a function of (seed, batch, head, row,
column), so that the backward makes it again instead of reading it. Rows and columns count from the
start of their sequence; of a call that holds some of them, positions say which.

A row has a key and an odd multiplier, a column a key; one multiply-add of the three and one
comparison decide an element. Rows make their words where they are used; the keys of the columns are
made once a call, because every row tile reads them all. reference.dropout_keep_mask is the same in
plain PyTorch.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tiles
from .kernel_launch import Launch
from .launch import Problem, cdiv
from .tile_choice import Tile

# Domains of the Philox counter, so that row keys and head keys never share a block.
ROW_DOMAIN = tl.constexpr(0)
HEAD_DOMAIN = tl.constexpr(1)
_KEYS_BLOCK = 256


@triton.jit
def drop(values, row_keys, row_multipliers, column_keys, threshold, PTX: tl.constexpr):
    """`values` where the dropout mask keeps them, else 0.

    Kept where column_key * row_multiplier + row_key > threshold (int32, wrapping): one multiply-add
    and one comparison an element. Column keys are distinct and multipliers odd, so the words of a
    row, and those of a column, are uniform and independent; threshold is round(dropout_p * 2^32) -
    2^31 - 1.
    """
    words = column_keys * row_multipliers + row_keys
    return tiles.where_greater(words, threshold, values, 0.0, PTX)


@triton.jit
def load_positions(positions_ptr, first, rows, end):
    """Where rows [BLOCK] of a call lie in their sequence: as they are, if positions_ptr is None.

    positions_ptr: int32, of all rows of the call; first: the place of the sequence's row 0 in it.
    """
    if positions_ptr is not None:
        rows = tl.load(positions_ptr + first + rows, mask=rows < end, other=0)
    return rows


@triton.jit
def dropout_row_keys(seed_ptr, positions_ptr, first_q, rows, seqlen_q, batch_head):
    """(key, odd multiplier) of query rows, int32: Philox words of (row, batch * nheads + head)."""
    rows = load_positions(positions_ptr, first_q, rows, seqlen_q)
    zeros = rows * 0
    key, multiplier, _, _ = tl.philox(
        tl.load(seed_ptr), rows, zeros + batch_head, zeros + ROW_DOMAIN, zeros
    )
    return key.to(tl.int32, bitcast=True), (multiplier | 1).to(tl.int32, bitcast=True)


@triton.jit
def dropout_column_keys(seed, columns, batch_head):
    """Keys of columns, int32: a bijection of the column, keyed by Philox words of the head, so that
    no two columns of a head ever share one."""
    zeros = columns * 0
    key_0, key_1, key_2, key_3 = tl.philox(
        seed, zeros, zeros + batch_head, zeros + HEAD_DOMAIN, zeros
    )
    mixed = columns.to(tl.uint32, bitcast=True) ^ key_0
    mixed = (mixed ^ (mixed >> 16)) * 0x7FEB352D + key_1
    mixed = (mixed ^ (mixed >> 15)) * 0x846CA68B + key_2
    mixed = (mixed ^ (mixed >> 16)) * 0x9E3779B1 + key_3
    return (mixed ^ (mixed >> 15)).to(tl.int32, bitcast=True)


@triton.jit
def load_column_keys(
    column_keys_ptr, cols, end, BLOCK: tl.constexpr, CHECK: tl.constexpr, REPEAT: tl.constexpr
):
    """Keys of BLOCK columns, int32; 0 from `end` on if CHECK.

    The load is REPEAT wide at the same address: with fewer elements than threads the compiler would
    let every thread load all the columns of its part of the score matrix by itself.
    """
    copies = tl.arange(0, REPEAT)[None, :] * 0
    ptrs = column_keys_ptr + cols[:, None] + copies
    if CHECK:
        keys = tl.load(ptrs, mask=cols[:, None] + copies < end, other=0)
    else:
        keys = tl.load(ptrs)
    if REPEAT >= 8:
        keys, _ = tl.split(tl.reshape(keys, [BLOCK, REPEAT // 2, 2]))
    if REPEAT >= 4:
        keys, _ = tl.split(tl.reshape(keys, [BLOCK, 2, 2]))
    if REPEAT >= 2:
        keys, _ = tl.split(keys)
    else:
        keys = tl.reshape(keys, [BLOCK])
    return keys


@triton.jit
def row_keys_kernel(
    seed_ptr, positions_ptr, keys_ptr, multipliers_ptr, cu_seqlens_q_ptr, lse_strides, nheads,
    seqlen_q, num_tiles, IS_VARLEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dropout_row_keys of every row, laid out like the LSE. Grid: (heads * num_tiles,)."""
    batch_head = tl.program_id(0) // num_tiles
    batch_index = batch_head // nheads
    rows = (tl.program_id(0) % num_tiles) * BLOCK + tl.arange(0, BLOCK)
    first_q, seqlen_q = tiles.sequence_range(cu_seqlens_q_ptr, batch_index, seqlen_q, IS_VARLEN)
    keys, multipliers = dropout_row_keys(
        seed_ptr, positions_ptr, first_q, rows, seqlen_q, batch_head
    )
    offsets = (
        batch_index.to(tl.int64) * lse_strides[0]
        + (batch_head % nheads).to(tl.int64) * lse_strides[1]
        + first_q
        + rows
    )
    tl.store(keys_ptr + offsets, keys, mask=rows < seqlen_q)
    tl.store(multipliers_ptr + offsets, multipliers, mask=rows < seqlen_q)


@triton.jit
def column_keys_kernel(
    seed_ptr, positions_ptr, column_keys_ptr, cu_seqlens_k_ptr, column_strides, nheads, seqlen_k,
    num_tiles, IS_VARLEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dropout_column_keys of every column of every head. Grid: (heads * num_tiles,)."""
    pid = tl.program_id(0)
    batch_head = pid // num_tiles
    batch_index = batch_head // nheads
    head = (batch_head % nheads).to(tl.int64)
    cols = (pid % num_tiles) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seed_ptr)
    first_k, length_k = tiles.sequence_range(cu_seqlens_k_ptr, batch_index, seqlen_k, IS_VARLEN)
    positions = load_positions(positions_ptr, first_k, cols, length_k)

    keys = dropout_column_keys(seed, positions, batch_head)
    column_offset = (
        batch_index.to(tl.int64) * column_strides[0] + head * column_strides[1] + first_k
    )
    tl.store(column_keys_ptr + column_offset + cols, keys, mask=cols < length_k)


def column_keys(problem: Problem, block: int = 0) -> Tensor | None:
    """int32 keys of the dropout mask, one a key and head (drop): None without dropout.

    (batch, nheads, seqlen_k) or (nheads, total_k), the last dimension longer by `block` with
    anything in the rest, so that a block can be read wherever it begins. O(batch * nheads *
    seqlen_k) memory, made again in the backward. The keys of the rows are made where they are used.
    """
    p = problem
    if p.dropout_p == 0.0:
        return None
    *heads, length = p.column_shape
    columns = length + block
    keys = torch.empty((*heads, columns), dtype=torch.int32, device=p.q.device)
    strides = (0, columns) if p.is_varlen else (p.nheads * columns, columns)
    if keys.numel() > 0:
        p.launch(_column_keys_launch, strides)(
            p.dropout_seed, p.positions_k, keys, p.cu_seqlens_k
        )  # fmt: skip
    return keys


def _column_keys_launch(problem: Problem, strides: tuple[int, int]) -> Launch:
    return _keys_launch(problem, column_keys_kernel, strides, problem.seqlen_k)


def _row_keys_launch(problem: Problem) -> Launch:
    return _keys_launch(problem, row_keys_kernel, problem.lse_strides, problem.seqlen_q)


def _keys_launch(problem: Problem, kernel: Any, strides: tuple[int, int], seqlen: int) -> Launch:
    p = problem
    num_tiles = cdiv(seqlen, _KEYS_BLOCK)
    constants = {"IS_VARLEN": p.is_varlen, "BLOCK": _KEYS_BLOCK}
    grid = p.batch * p.nheads * num_tiles
    return Launch(kernel, grid, (strides, p.nheads, seqlen, num_tiles), constants)


def row_keys(problem: Problem) -> tuple[Tensor | None, Tensor | None]:
    """(keys, multipliers) of the rows, int32 in the shape of the LSE each, for kernels that cannot
    make them themselves; None without dropout."""
    p = problem
    if p.dropout_p == 0.0:
        return None, None
    keys = torch.empty(p.lse_shape, dtype=torch.int32, device=p.q.device)
    multipliers = torch.empty_like(keys)
    p.launch(_row_keys_launch)(
        p.dropout_seed, p.positions_q, keys, multipliers, p.cu_seqlens_q
    )  # fmt: skip
    return keys, multipliers


def key_repeat(tile: Tile) -> int:
    """Width at which a kernel loads BLOCK_N column keys (load_column_keys)."""
    return min(8, max(1, 32 * tile.num_warps // tile.block_n))
