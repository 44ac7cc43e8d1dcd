"""Forward of attention: out = softmax(q k^T) v and the log-sum-exp, without the score matrix.

FlashAttention (arXiv 2205.14135, algorithm 2) with the loop order of its second version: a program
owns BLOCK_M query rows and walks the keys with an online softmax. Keys that no row of the tile sees
are skipped, and only tiles cut by a mask or by the end of the keys run the masked copy of the loop.
Dropout multiplies the probabilities after the normaliser, as in the paper.
"""

import torch
import triton
import triton.language as tl

from . import dropout, sparse, tiles
from .kernel_launch import Launch
from .launch import Problem, cdiv, heads_per_group
from .tile_choice import Tile


@triton.jit
def attend_keys(
    acc, row_max, row_sum, q, k_ptrs, v_ptrs, k_stride, v_stride, column_keys_ptr, row_keys,
    row_multipliers, rows, dims, tile, lists, index, token_offsets, begin, end, shift, keys_end,
    window, scale_log2, softcap, slope_log2, dropout_threshold, HEADDIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    KEY_REPEAT: tl.constexpr, SCALE_IN_EXP: tl.constexpr, PRECISE: tl.constexpr, PTX: tl.constexpr,
    MASK_M: tl.constexpr, MASK_N: tl.constexpr, HAS_TOKENS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys, [BLOCK_N, BLOCK_D]: the body of both loops (and of those in decode.py)."""
    col_begin = tile * BLOCK_N
    cols = col_begin + tl.arange(0, BLOCK_N)
    if HAS_DROPOUT:
        column_keys = dropout.load_column_keys(
            column_keys_ptr, cols, keys_end, BLOCK_N, MASKED, KEY_REPEAT
        )
    k = tiles.load_tile(
        k_ptrs + col_begin.to(tl.int64) * k_stride, cols, begin, end, dims, HEADDIM, BLOCK_D, MASKED
    )  # [BLOCK_N, BLOCK_D]
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
    if not SCALE_IN_EXP:
        scores, _ = tiles.transform_scores(
            scores, rows[:, None], cols[None, :], shift, scale_log2, softcap, slope_log2,
            HAS_SOFTCAP, HAS_ALIBI, PRECISE,
        )  # fmt: skip
    if MASKED:
        scores = tiles.mask_tile(
            scores, rows[:, None], cols[None, :], shift, keys_end, window, float("-inf"),
            HAS_LEFT, HAS_RIGHT, PTX,
        )  # fmt: skip
        if HAS_TOKENS:
            scores = sparse.mask_tokens(
                scores, lists, index, token_offsets, float("-inf"), MASK_N // BLOCK_N, BLOCK_N,
                MASK_M * MASK_N, PTX,
            )  # fmt: skip
    # A positive scale commutes with the maximum, so scaling and subtraction become one fused
    # multiply-add.
    if SCALE_IN_EXP:
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    else:
        new_max = tl.maximum(row_max, tl.max(scores, 1))
    if MASKED:
        # A row that has seen nothing yet: any finite number keeps -inf - max from being NaN.
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    else:
        finite_max = new_max
    if SCALE_IN_EXP:
        probs = tl.exp2(scores * scale_log2 - finite_max[:, None])
    else:
        probs = tl.exp2(scores - finite_max[:, None])
    decay = tl.exp2(row_max - finite_max)
    row_sum = row_sum * decay + tl.sum(probs, 1)
    acc = acc * decay[:, None]
    if HAS_DROPOUT:
        probs = dropout.drop(
            probs, row_keys[:, None], row_multipliers[:, None], column_keys[None, :],
            dropout_threshold, PTX,
        )  # fmt: skip
    v = tiles.load_tile(
        v_ptrs + col_begin.to(tl.int64) * v_stride, cols, begin, end, dims, HEADDIM, BLOCK_D, MASKED
    )  # [BLOCK_N, BLOCK_D]
    acc = tiles.add_product(probs.to(v.dtype), v, acc, PRECISE)
    return acc, new_max, row_sum


_LENGTHS = [
    "lse_strides", "column_strides", "alibi_stride_batch", "num_heads", "seqlen_q", "seqlen_k",
    "num_tiles", "heads_per_group", "window",
]  # fmt: skip


@triton.jit(do_not_specialize=_LENGTHS)
def attention_forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, lengths_k_ptr, alibi_ptr, seed_ptr, positions_ptr,
    column_keys_ptr, lists,
    q_strides, k_strides, v_strides, out_strides, lse_strides, column_strides, alibi_stride_batch,
    nheads, group_size, num_heads, seqlen_q, seqlen_k, num_tiles, heads_per_group,
    window, scale_log2, softcap, dropout_threshold, keep_scale,
    HEADDIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_VARLEN: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, KEY_REPEAT: tl.constexpr, SCALE_IN_EXP: tl.constexpr,
    PRECISE: tl.constexpr, PTX: tl.constexpr,
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
    in_tile = tl.arange(0, BLOCK_N).to(tl.int64)
    q_ptr += batch_64 * q_strides[0] + head_64 * q_strides[2] + (first_q + row_begin) * q_strides[1]
    k_ptr += batch_64 * k_strides[0] + head_k * k_strides[2] + first_k * k_strides[1]
    v_ptr += batch_64 * v_strides[0] + head_k * v_strides[2] + first_k * v_strides[1]
    out_ptr += (
        batch_64 * out_strides[0]
        + head_64 * out_strides[2]
        + (first_q + row_begin) * out_strides[1]
    )
    row_offset = batch_64 * lse_strides[0] + head_64 * lse_strides[1] + first_q
    in_rows = tl.arange(0, BLOCK_M).to(tl.int64)
    q = tiles.load_tile(
        q_ptr + in_rows[:, None] * q_strides[1] + dims[None, :],
        rows, 0, seqlen_q, dims, HEADDIM, BLOCK_D, True,
    )  # fmt: skip
    k_ptrs = k_ptr + in_tile[:, None] * k_strides[1] + dims[None, :]
    v_ptrs = v_ptr + in_tile[:, None] * v_strides[1] + dims[None, :]
    slope_log2 = tiles.load_alibi_slope(alibi_ptr, alibi_stride_batch, batch_index, head, HAS_ALIBI)
    row_keys = rows
    row_multipliers = rows
    if HAS_DROPOUT:
        row_keys, row_multipliers = dropout.dropout_row_keys(
            seed_ptr, positions_ptr, first_q, rows, seqlen_q, batch_head
        )
        column_keys_ptr += batch_64 * column_strides[0] + head_64 * column_strides[1] + first_k

    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
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
        acc, row_max, row_sum = attend_keys(
            acc, row_max, row_sum, q, k_ptrs, v_ptrs, k_strides[1], v_strides[1],
            column_keys_ptr, row_keys, row_multipliers, rows, dims,
            tile, lists, index, token_offsets, begin, end, shift, keys_end, window, scale_log2,
            softcap, slope_log2, dropout_threshold, HEADDIM, BLOCK_D, BLOCK_N,
            HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, HAS_DROPOUT, KEY_REPEAT,
            SCALE_IN_EXP, PRECISE, PTX, MASK_M, MASK_N, HAS_TOKENS, MASKED=True,
        )  # fmt: skip
    for index in tl.range(full_first, full_last):
        tile = index
        if MASK_M > 0:
            tile = sparse.listed_tile(lists, index, MASK_N // BLOCK_N)
        acc, row_max, row_sum = attend_keys(
            acc, row_max, row_sum, q, k_ptrs, v_ptrs, k_strides[1], v_strides[1],
            column_keys_ptr, row_keys, row_multipliers, rows, dims,
            tile, lists, index, token_offsets, begin, end, shift, keys_end, window,
            scale_log2, softcap, slope_log2, dropout_threshold, HEADDIM, BLOCK_D, BLOCK_N,
            HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, HAS_DROPOUT, KEY_REPEAT,
            SCALE_IN_EXP, PRECISE, PTX, MASK_M, MASK_N, False, MASKED=False,
        )  # fmt: skip

    # A row that saw no key keeps row_max = -inf and row_sum = 0: out = 0 and lse = -inf.
    normaliser = tl.where(row_sum == 0.0, 1.0, row_sum)
    out = acc * (keep_scale / normaliser)[:, None]
    tiles.store_tile(
        out_ptr + in_rows[:, None] * out_strides[1] + dims[None, :],
        out, rows, seqlen_q, dims, HEADDIM, BLOCK_D,
    )  # fmt: skip
    lse = (row_max + tl.log2(normaliser)) * tiles.LN2
    tl.store(lse_ptr + row_offset + rows, lse, mask=rows < seqlen_q)


def attention_forward(
    problem: Problem, tile: Tile | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch. `tile` overrides the table of tile_choice.py.

    Returns:
        out: shape and dtype of q, contiguous. lse: float32, (batch, nheads, seqlen_q) or (nheads,
            total_q).
    """
    p = problem
    out = torch.empty(p.q.shape, dtype=p.q.dtype, device=p.q.device)
    lse = torch.empty(p.lse_shape, dtype=torch.float32, device=p.q.device)
    if out.numel() == 0:
        return out, lse
    tile = p.fit(tile or p.choose_tile("forward", lambda t: attention_forward(p, t)))
    launch = p.launch(_forward_launch, tile)
    with p.device_guard():
        keys = dropout.column_keys(p)
        launch(
            p.q, p.k, p.v, out, lse, *p.index_tensors(), p.dropout_seed, p.positions_q, keys,
            p.row_lists,
        )  # fmt: skip
    return out, lse


def _forward_launch(problem: Problem, tile: Tile) -> Launch:
    p = problem
    num_heads = p.batch * p.nheads
    num_tiles = cdiv(p.seqlen_q, tile.block_m)
    numbers = (
        *p.qkv_strides(), p.out_strides, p.lse_strides,
        p.column_strides, p.alibi_stride_batch, p.nheads, p.group_size, num_heads,
        p.seqlen_q, p.seqlen_k, num_tiles, heads_per_group(p), p.window, p.scale_log2,
        p.softcap, p.dropout_threshold, p.keep_scale,
    )  # fmt: skip
    constants = dict(
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, KEY_REPEAT=dropout.key_repeat(tile),
        **p.flags(),
        SCALE_IN_EXP=p.softmax_scale > 0 and not p.softcap and p.alibi_slopes is None,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return Launch(attention_forward_kernel, num_heads * num_tiles, numbers, constants)
