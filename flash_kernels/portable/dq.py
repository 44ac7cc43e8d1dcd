"""Backward of attention, the kernel for dq: a program owns BLOCK_M query rows and walks the keys.

The formulas are those of attention_backward.py.
"""

import triton
import triton.language as tl
from torch import Tensor

from . import dropout, sparse, tiles
from .kernel_launch import Launch
from .launch import Problem, cdiv, heads_per_group
from .tile_choice import Tile


@triton.jit
def load_row_words(ptrs, rows, seqlen_q, BLOCK_M: tl.constexpr, CHECK: tl.constexpr):
    """(lse_log2, delta, row_keys, row_multipliers) of delta_kernel's words at `ptrs`, [BLOCK_M].

    One load of all four: four loads, each of fewer elements than threads, the compiler would repeat
    in every thread for all the rows of its part of the score matrix. Rows from seqlen_q on get
    lse +inf and zeros.
    """
    word_ptrs = ptrs[:, None] + tl.arange(0, 4)[None, :]
    if CHECK:
        words = tl.load(word_ptrs, mask=(rows < seqlen_q)[:, None], other=0.0)
    else:
        words = tl.load(word_ptrs)
    first, second = tl.split(tl.reshape(words, [BLOCK_M, 2, 2]))
    lse_log2, row_keys = tl.split(first)
    delta, row_multipliers = tl.split(second)
    if CHECK:  # exp2(score - inf) = 0
        lse_log2 = tl.where(rows < seqlen_q, lse_log2, float("inf"))
    row_keys = row_keys.to(tl.int32, bitcast=True)
    return lse_log2, delta, row_keys, row_multipliers.to(tl.int32, bitcast=True)


@triton.jit
def _accumulate_dq(
    dq, q, dout, lse_log2, delta, k_ptrs, v_ptrs, k_stride, v_stride, column_keys_ptr, row_keys,
    row_multipliers, rows, dims, tile, lists, index, token_offsets, begin, end, shift, keys_end,
    window, scale_log2, softcap, slope_log2, dropout_threshold, HEADDIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    KEY_REPEAT: tl.constexpr,
    PRECISE: tl.constexpr, PTX: tl.constexpr, MASK_M: tl.constexpr, MASK_N: tl.constexpr,
    HAS_TOKENS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys for a tile of query rows: the body of both loops."""
    col_begin = tile * BLOCK_N
    cols = col_begin + tl.arange(0, BLOCK_N)
    if HAS_DROPOUT:
        column_keys = dropout.load_column_keys(
            column_keys_ptr, cols, keys_end, BLOCK_N, MASKED, KEY_REPEAT
        )
    k = tiles.load_tile(
        k_ptrs + col_begin.to(tl.int64) * k_stride, cols, begin, end, dims, HEADDIM, BLOCK_D, MASKED
    )  # [BLOCK_N, BLOCK_D]
    dots = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
    scores, factor = tiles.transform_scores(
        dots, rows[:, None], cols[None, :], shift, scale_log2, softcap, slope_log2,
        HAS_SOFTCAP, HAS_ALIBI, PRECISE,
    )  # fmt: skip
    probs = tl.exp2(scores - lse_log2[:, None])
    if MASKED:
        probs = tiles.mask_tile(
            probs, rows[:, None], cols[None, :], shift, keys_end, window, 0.0,
            HAS_LEFT, HAS_RIGHT, PTX,
        )  # fmt: skip
        if HAS_TOKENS:
            probs = sparse.mask_tokens(
                probs, lists, index, token_offsets, 0.0, MASK_N // BLOCK_N, BLOCK_N,
                MASK_M * MASK_N, PTX,
            )  # fmt: skip
    v = tiles.load_tile(
        v_ptrs + col_begin.to(tl.int64) * v_stride, cols, begin, end, dims, HEADDIM, BLOCK_D, MASKED
    )  # [BLOCK_N, BLOCK_D]
    dprobs = tl.dot(dout, tl.trans(v), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
    if HAS_DROPOUT:
        dprobs = dropout.drop(
            dprobs, row_keys[:, None], row_multipliers[:, None], column_keys[None, :],
            dropout_threshold, PTX,
        )  # fmt: skip
    dscores = probs * (dprobs - delta[:, None])
    if HAS_SOFTCAP:
        dscores = dscores * factor
    return tiles.add_product(dscores.to(k.dtype), k, dq, PRECISE)


_LENGTHS = [
    "lse_strides", "column_strides", "alibi_stride_batch", "num_heads", "seqlen_q", "seqlen_k",
    "num_tiles", "heads_per_group", "window",
]  # fmt: skip


@triton.jit(do_not_specialize=_LENGTHS)
def dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, row_words_ptr, dq_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, lengths_k_ptr, alibi_ptr, column_keys_ptr, lists,
    q_strides, k_strides, v_strides, dout_strides, dq_strides, lse_strides, column_strides,
    alibi_stride_batch, nheads, group_size, num_heads, seqlen_q, seqlen_k, num_tiles,
    heads_per_group, window, scale_log2, softmax_scale, softcap, dropout_threshold, keep_scale,
    HEADDIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_VARLEN: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, KEY_REPEAT: tl.constexpr, PRECISE: tl.constexpr, PTX: tl.constexpr,
    MASK_M: tl.constexpr, MASK_N: tl.constexpr, HAS_TOKENS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M query rows of one head.

    Grid: (num_heads * num_tiles,) with num_heads = batch * nheads.
    """
    batch_head, row_tile = tiles.program_order(
        tl.program_id(0), num_tiles, num_heads, heads_per_group, HAS_RIGHT
    )
    batch_index = batch_head // nheads
    head = batch_head % nheads
    batch_64 = batch_index.to(tl.int64)
    head_64 = head.to(tl.int64)
    head_k = (head // group_size).to(tl.int64)
    first_q, seqlen_q = tiles.sequence_range(cu_seqlens_q_ptr, batch_index, seqlen_q, IS_VARLEN)
    first_k, seqlen_k = tiles.sequence_range(cu_seqlens_k_ptr, batch_index, seqlen_k, IS_VARLEN)
    row_begin = row_tile * BLOCK_M
    if row_begin >= seqlen_q:
        return
    keys_end = tiles.num_visible_keys(lengths_k_ptr, batch_index, seqlen_k, HAS_LENGTHS)
    shift = seqlen_k - seqlen_q

    rows = row_begin + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    packed_rows = first_q + rows
    in_tile = tl.arange(0, BLOCK_N).to(tl.int64)
    q_ptr += batch_64 * q_strides[0] + head_64 * q_strides[2]
    dout_ptr += batch_64 * dout_strides[0] + head_64 * dout_strides[2]
    dq_ptr += batch_64 * dq_strides[0] + head_64 * dq_strides[2]
    k_ptr += batch_64 * k_strides[0] + head_k * k_strides[2] + first_k * k_strides[1]
    v_ptr += batch_64 * v_strides[0] + head_k * v_strides[2] + first_k * v_strides[1]
    k_ptrs = k_ptr + in_tile[:, None] * k_strides[1] + dims[None, :]
    v_ptrs = v_ptr + in_tile[:, None] * v_strides[1] + dims[None, :]
    q = tiles.load_tile(
        q_ptr + packed_rows[:, None] * q_strides[1] + dims[None, :],
        rows, 0, seqlen_q, dims, HEADDIM, BLOCK_D, True,
    )  # fmt: skip
    dout = tiles.load_tile(
        dout_ptr + packed_rows[:, None] * dout_strides[1] + dims[None, :],
        rows, 0, seqlen_q, dims, HEADDIM, BLOCK_D, True,
    )  # fmt: skip
    row_offsets = batch_64 * lse_strides[0] + head_64 * lse_strides[1] + packed_rows
    lse_log2, delta, row_keys, row_multipliers = load_row_words(
        row_words_ptr + row_offsets * 4, rows, seqlen_q, BLOCK_M, True
    )
    slope_log2 = tiles.load_alibi_slope(alibi_ptr, alibi_stride_batch, batch_index, head, HAS_ALIBI)
    if HAS_DROPOUT:
        column_keys_ptr += batch_64 * column_strides[0] + head_64 * column_strides[1] + first_k

    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    begin, end, first, full_first, full_last, last = tiles.keys_of_rows(
        row_begin, tl.minimum(row_begin + BLOCK_M, seqlen_q), shift, keys_end, window,
        BLOCK_N, HAS_LEFT, HAS_RIGHT,
    )  # fmt: skip
    masked_begin = 0
    masked_end = full_first - first + last - full_last
    token_offsets = rows
    if MASK_M > 0:
        masked_begin, masked_end, full_last = sparse.listed_range(
            lists, batch_index, head, row_begin // MASK_M, MASK_N // BLOCK_N
        )
        full_first, begin, end = masked_end, 0, keys_end
        token_offsets = (row_begin % MASK_M + tl.arange(0, BLOCK_M))[:, None] * MASK_N
        token_offsets = token_offsets + tl.arange(0, BLOCK_N)[None, :]
    for index in tl.range(masked_begin, masked_end):
        if MASK_M > 0:
            tile = sparse.listed_tile(lists, index, MASK_N // BLOCK_N)
        else:
            tile = tiles.edge_tile(index, first, full_first, full_last)
        dq = _accumulate_dq(
            dq, q, dout, lse_log2, delta, k_ptrs, v_ptrs, k_strides[1], v_strides[1],
            column_keys_ptr, row_keys, row_multipliers, rows, dims,
            tile, lists, index, token_offsets, begin, end, shift, keys_end, window, scale_log2,
            softcap, slope_log2, dropout_threshold, HEADDIM, BLOCK_D, BLOCK_N,
            HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, HAS_DROPOUT, KEY_REPEAT, PRECISE, PTX,
            MASK_M, MASK_N, HAS_TOKENS, MASKED=True,
        )  # fmt: skip
    for index in tl.range(full_first, full_last):
        tile = index
        if MASK_M > 0:
            tile = sparse.listed_tile(lists, index, MASK_N // BLOCK_N)
        dq = _accumulate_dq(
            dq, q, dout, lse_log2, delta, k_ptrs, v_ptrs, k_strides[1], v_strides[1],
            column_keys_ptr, row_keys, row_multipliers, rows, dims,
            tile, lists, index, token_offsets, begin, end, shift, keys_end, window,
            scale_log2, softcap, slope_log2, dropout_threshold, HEADDIM, BLOCK_D, BLOCK_N,
            HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, HAS_DROPOUT, KEY_REPEAT, PRECISE, PTX,
            MASK_M, MASK_N, False, MASKED=False,
        )  # fmt: skip
    dq = dq * (softmax_scale * keep_scale)
    tiles.store_tile(
        dq_ptr + packed_rows[:, None] * dq_strides[1] + dims[None, :],
        dq, rows, seqlen_q, dims, HEADDIM, BLOCK_D,
    )  # fmt: skip


def launch_dq(
    problem: Problem,
    dout: Tensor,
    row_words: Tensor,
    keys: Tensor | None,
    dq: Tensor,
    tile: Tile | None = None,
) -> None:
    """Fill dq. `tile` overrides the table of tile_choice.py."""
    p = problem
    if tile is None:

        def run(candidate: Tile) -> tuple[Tensor]:
            launch_dq(p, dout, row_words, keys, dq, candidate)
            return (dq,)

        tile = p.choose_tile("dq", run)
    tile = p.fit(tile)
    launch = p.launch(_dq_launch, tile, dout.stride(), dq.stride())
    launch(p.q, p.k, p.v, dout, row_words, dq, *p.index_tensors(), keys, p.row_lists)


def _dq_launch(problem: Problem, tile: Tile, *strides: tuple[int, ...]) -> Launch:
    p = problem
    num_tiles = cdiv(p.seqlen_q, tile.block_m)
    num_heads = p.batch * p.nheads
    numbers = (
        *p.qkv_strides(), *map(p.strides, strides), p.lse_strides, p.column_strides,
        p.alibi_stride_batch, p.nheads, p.group_size, num_heads, p.seqlen_q, p.seqlen_k, num_tiles,
        heads_per_group(p), p.window, p.scale_log2, p.softmax_scale, p.softcap,
        p.dropout_threshold, p.keep_scale,
    )  # fmt: skip
    constants = dict(
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, KEY_REPEAT=dropout.key_repeat(tile),
        **p.flags(), num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return Launch(dq_kernel, num_heads * num_tiles, numbers, constants)
