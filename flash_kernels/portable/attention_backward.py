"""Backward of attention in three kernels: delta, then dk and dv by key tile, then dq by query tile.

FlashAttention (arXiv 2205.14135, algorithm 4), split so that each gradient has one owner: no
atomics, so the result is the same in every run, at the price of computing the scores twice. With P
= exp(S - lse), Z the dropout mask over (1 - dropout_p) and delta = rowsum(out * dout) - dlse:

    dv = (P * Z)^T dout      dS = P * (Z * dout v^T - delta)      dq = scale * dS k      dk = scale
    * dS^T q

dlse enters through delta because d lse / dS = P. The dk/dv kernel works on S^T, whose tiles go from
registers into the next product as they are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import dropout, sparse, tiles
from .dq import launch_dq, load_row_words
from .kernel_launch import Launch
from .launch import Problem, cdiv, heads_per_group
from .tile_choice import Tile

_DELTA_ROWS = 64


@triton.jit(do_not_specialize=["lse_strides", "num_heads", "seqlen_q", "num_tiles"])
def delta_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, row_words_ptr, seed_ptr, positions_ptr,
    cu_seqlens_q_ptr, out_strides, dout_strides, lse_strides, dlse_strides, nheads, seqlen_q,
    num_tiles, inverse_keep_scale, HEADDIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, IS_VARLEN: tl.constexpr, HAS_DLSE: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """What the other kernels need of a query row, four float32 words side by side, one load each.

    lse in base 2; delta = (rowsum(out * dout) - dlse) * (1 - dropout_p); the bits of the dropout
    key and of its multiplier. A row that sees no key gets lse +inf and delta 0.
    """
    pid = tl.program_id(0)
    batch_head = pid // num_tiles
    batch_index = batch_head // nheads
    batch_64 = batch_index.to(tl.int64)
    head = (batch_head % nheads).to(tl.int64)
    first_q, seqlen_q = tiles.sequence_range(cu_seqlens_q_ptr, batch_index, seqlen_q, IS_VARLEN)
    rows = (pid % num_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    packed_rows = first_q + rows
    out_ptr += batch_64 * out_strides[0] + head * out_strides[2]
    dout_ptr += batch_64 * dout_strides[0] + head * dout_strides[2]
    out = tiles.load_tile(
        out_ptr + packed_rows[:, None] * out_strides[1] + dims[None, :],
        rows, 0, seqlen_q, dims, HEADDIM, BLOCK_D, True,
    ).to(tl.float32)  # fmt: skip
    dout = tiles.load_tile(
        dout_ptr + packed_rows[:, None] * dout_strides[1] + dims[None, :],
        rows, 0, seqlen_q, dims, HEADDIM, BLOCK_D, True,
    ).to(tl.float32)  # fmt: skip
    delta = tl.sum(out * dout, 1)
    inside = rows < seqlen_q
    offsets = batch_64 * lse_strides[0] + head * lse_strides[1] + packed_rows
    lse = tl.load(lse_ptr + offsets, mask=inside, other=float("-inf"))
    sees_nothing = lse == float("-inf")
    if HAS_DLSE:
        dlse_offsets = (
            batch_64 * dlse_strides[0] + head * dlse_strides[1] + packed_rows * dlse_strides[2]
        )
        delta -= tl.load(dlse_ptr + dlse_offsets, mask=inside, other=0.0)
    delta = tl.where(sees_nothing, 0.0, delta * inverse_keep_scale)
    # exp2(score - inf) = 0 keeps such rows out of every gradient.
    lse_log2 = tl.where(sees_nothing, float("inf"), lse * tiles.LOG2E)
    row_keys = rows
    row_multipliers = rows
    if HAS_DROPOUT:
        row_keys, row_multipliers = dropout.dropout_row_keys(
            seed_ptr, positions_ptr, first_q, rows, seqlen_q, batch_head
        )
    words = tl.join(
        tl.join(lse_log2, row_keys.to(tl.float32, bitcast=True)),
        tl.join(delta, row_multipliers.to(tl.float32, bitcast=True)),
    )  # [BLOCK_M, 2, 2]
    words = tl.reshape(words, [BLOCK_M, 4])
    word_ptrs = row_words_ptr + offsets[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(word_ptrs, words, mask=inside[:, None])


@triton.jit
def _accumulate_dk_dv(
    dk, dv, k, v, q_ptrs, dout_ptrs, q_stride, dout_stride, row_words_ptr, column_keys,
    cols, dims, tile, lists, index, token_offsets, shift, seqlen_q, keys_end, window, scale_log2,
    softcap, slope_log2, dropout_threshold,
    HEADDIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, PRECISE: tl.constexpr, PTX: tl.constexpr, MASK_M: tl.constexpr,
    MASK_N: tl.constexpr, BLOCK_N: tl.constexpr, HAS_TOKENS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of query rows for a tile of keys: the body of both loops."""
    row_begin = tile * BLOCK_M
    rows = row_begin + tl.arange(0, BLOCK_M)
    q_ptrs += row_begin.to(tl.int64) * q_stride
    q = tiles.load_tile(
        q_ptrs, rows, 0, seqlen_q, dims, HEADDIM, BLOCK_D, MASKED
    )  # [BLOCK_M, BLOCK_D]
    lse_log2, delta, row_keys, row_multipliers = load_row_words(
        row_words_ptr + rows.to(tl.int64) * 4, rows, seqlen_q, BLOCK_M, MASKED
    )
    dots = tl.dot(k, tl.trans(q), input_precision="ieee")  # [BLOCK_N, BLOCK_M]
    scores, factor = tiles.transform_scores(
        dots, rows[None, :], cols[:, None], shift, scale_log2, softcap, slope_log2,
        HAS_SOFTCAP, HAS_ALIBI, PRECISE,
    )  # fmt: skip
    probs = tl.exp2(scores - lse_log2[None, :])
    if MASKED:
        probs = tiles.mask_tile(
            probs, rows[None, :], cols[:, None], shift, keys_end, window, 0.0,
            HAS_LEFT, HAS_RIGHT, PTX,
        )  # fmt: skip
        if HAS_TOKENS:
            probs = sparse.mask_tokens(
                probs, lists, index, token_offsets, 0.0, MASK_M // BLOCK_M, BLOCK_M * MASK_N,
                MASK_M * MASK_N, PTX,
            )  # fmt: skip
    dout_ptrs += row_begin.to(tl.int64) * dout_stride
    dout = tiles.load_tile(
        dout_ptrs, rows, 0, seqlen_q, dims, HEADDIM, BLOCK_D, MASKED
    )  # [BLOCK_M, BLOCK_D]
    dprobs = tl.dot(v, tl.trans(dout), input_precision="ieee")  # [BLOCK_N, BLOCK_M]
    kept_probs = probs
    if HAS_DROPOUT:
        kept_probs = dropout.drop(
            probs, row_keys[None, :], row_multipliers[None, :], column_keys[:, None],
            dropout_threshold, PTX,
        )  # fmt: skip
    dv = tiles.add_product(kept_probs.to(dout.dtype), dout, dv, PRECISE)
    dscores = kept_probs * dprobs - probs * delta[None, :]
    if HAS_SOFTCAP:
        dscores = dscores * factor
    dk = tiles.add_product(dscores.to(q.dtype), q, dk, PRECISE)
    return dk, dv


_LENGTHS = [
    "lse_strides", "column_strides", "alibi_stride_batch", "num_heads", "seqlen_q", "seqlen_k",
    "num_tiles", "heads_per_group", "window",
]  # fmt: skip


@triton.jit(do_not_specialize=_LENGTHS)
def dk_dv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, row_words_ptr, dk_ptr, dv_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, lengths_k_ptr, alibi_ptr, column_keys_ptr, lists,
    q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides,
    lse_strides, column_strides, alibi_stride_batch,
    nheads, num_heads, seqlen_q, seqlen_k, num_tiles, heads_per_group,
    window, scale_log2, softmax_scale, softcap, dropout_threshold, keep_scale,
    HEADDIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    IS_VARLEN: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, PRECISE: tl.constexpr, PTX: tl.constexpr,
    MASK_M: tl.constexpr, MASK_N: tl.constexpr, HAS_TOKENS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N keys of one key head, summed over its GROUP_SIZE query heads.

    Grid: (num_heads * num_tiles,) with num_heads = batch * nheads_k here. The first key tile is the
    longest.
    """
    batch_head, col_tile = tiles.program_order(
        tl.program_id(0), num_tiles, num_heads, heads_per_group, False
    )
    nheads_k = nheads // GROUP_SIZE
    batch_index = batch_head // nheads_k
    head_k = batch_head % nheads_k
    batch_64 = batch_index.to(tl.int64)
    head_k_64 = head_k.to(tl.int64)
    first_q, seqlen_q = tiles.sequence_range(cu_seqlens_q_ptr, batch_index, seqlen_q, IS_VARLEN)
    first_k, seqlen_k = tiles.sequence_range(cu_seqlens_k_ptr, batch_index, seqlen_k, IS_VARLEN)
    col_begin = col_tile * BLOCK_N
    if col_begin >= seqlen_k:
        return
    keys_end = tiles.num_visible_keys(lengths_k_ptr, batch_index, seqlen_k, HAS_LENGTHS)
    shift = seqlen_k - seqlen_q

    cols = col_begin + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    packed_cols = first_k + cols
    in_tile = tl.arange(0, BLOCK_M).to(tl.int64)
    k_ptr += batch_64 * k_strides[0] + head_k_64 * k_strides[2]
    v_ptr += batch_64 * v_strides[0] + head_k_64 * v_strides[2]
    # Keys that no query sees are not even loaded, whatever they hold.
    begin, end, _, _, _, _ = tiles.keys_of_rows(
        0, seqlen_q, shift, keys_end, window, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    k = tiles.load_tile(
        k_ptr + packed_cols[:, None] * k_strides[1] + dims[None, :],
        cols, begin, end, dims, HEADDIM, BLOCK_D, True,
    )  # fmt: skip
    v = tiles.load_tile(
        v_ptr + packed_cols[:, None] * v_strides[1] + dims[None, :],
        cols, begin, end, dims, HEADDIM, BLOCK_D, True,
    )  # fmt: skip
    first, full_first, full_last, last = tiles.rows_of_keys(
        col_begin, tl.minimum(col_begin + BLOCK_N, keys_end), shift, seqlen_q, window, BLOCK_M,
        HAS_LEFT, HAS_RIGHT,
    )  # fmt: skip
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    for member in tl.range(0, GROUP_SIZE):
        head = head_k * GROUP_SIZE + member
        head_64 = head.to(tl.int64)
        q_ptrs = (
            q_ptr + batch_64 * q_strides[0] + head_64 * q_strides[2] + first_q * q_strides[1]
            + in_tile[:, None] * q_strides[1] + dims[None, :]
        )  # fmt: skip
        dout_ptrs = (
            dout_ptr + batch_64 * dout_strides[0] + head_64 * dout_strides[2]
            + first_q * dout_strides[1] + in_tile[:, None] * dout_strides[1] + dims[None, :]
        )  # fmt: skip
        row_offset = batch_64 * lse_strides[0] + head_64 * lse_strides[1] + first_q
        slope_log2 = tiles.load_alibi_slope(
            alibi_ptr, alibi_stride_batch, batch_index, head, HAS_ALIBI
        )
        column_keys = cols
        if HAS_DROPOUT:
            column_offset = batch_64 * column_strides[0] + head_64 * column_strides[1]
            column_keys = tl.load(
                column_keys_ptr + column_offset + packed_cols, mask=cols < keys_end, other=0
            )
        masked_begin = 0
        masked_end = full_first - first + last - full_last
        token_offsets = cols
        if MASK_M > 0:
            masked_begin, masked_end, full_last = sparse.listed_range(
                lists, batch_index, head, col_begin // MASK_N, MASK_M // BLOCK_M
            )
            full_first = masked_end
            token_offsets = (col_begin % MASK_N + tl.arange(0, BLOCK_N))[:, None]
            token_offsets = token_offsets + tl.arange(0, BLOCK_M)[None, :] * MASK_N
        for index in tl.range(masked_begin, masked_end):
            if MASK_M > 0:
                tile = sparse.listed_tile(lists, index, MASK_M // BLOCK_M)
            else:
                tile = tiles.edge_tile(index, first, full_first, full_last)
            dk, dv = _accumulate_dk_dv(
                dk, dv, k, v, q_ptrs, dout_ptrs, q_strides[1], dout_strides[1],
                row_words_ptr + row_offset * 4, column_keys, cols, dims,
                tile, lists, index, token_offsets, shift, seqlen_q, keys_end,
                window, scale_log2, softcap, slope_log2, dropout_threshold, HEADDIM,
                BLOCK_D, BLOCK_M, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, HAS_DROPOUT,
                PRECISE, PTX, MASK_M, MASK_N, BLOCK_N, HAS_TOKENS, MASKED=True,
            )  # fmt: skip
        for index in tl.range(full_first, full_last):
            tile = index
            if MASK_M > 0:
                tile = sparse.listed_tile(lists, index, MASK_M // BLOCK_M)
            dk, dv = _accumulate_dk_dv(
                dk, dv, k, v, q_ptrs, dout_ptrs, q_strides[1], dout_strides[1],
                row_words_ptr + row_offset * 4, column_keys, cols, dims,
                tile, lists, index, token_offsets, shift, seqlen_q, keys_end,
                window, scale_log2, softcap, slope_log2, dropout_threshold, HEADDIM,
                BLOCK_D, BLOCK_M, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, HAS_DROPOUT,
                PRECISE, PTX, MASK_M, MASK_N, BLOCK_N, False, MASKED=False,
            )  # fmt: skip

    # The rows of the accumulators that belong to unseen keys hold anything; their gradient is zero.
    is_key = ((cols >= begin) & (cols < end))[:, None]
    dk = tl.where(is_key, dk * (softmax_scale * keep_scale), 0.0)
    dv = tl.where(is_key, dv * keep_scale, 0.0)
    dk_ptr += batch_64 * dk_strides[0] + head_k_64 * dk_strides[2]
    dv_ptr += batch_64 * dv_strides[0] + head_k_64 * dv_strides[2]
    tiles.store_tile(
        dk_ptr + packed_cols[:, None] * dk_strides[1] + dims[None, :],
        dk, cols, seqlen_k, dims, HEADDIM, BLOCK_D,
    )  # fmt: skip
    tiles.store_tile(
        dv_ptr + packed_cols[:, None] * dv_strides[1] + dims[None, :],
        dv, cols, seqlen_k, dims, HEADDIM, BLOCK_D,
    )  # fmt: skip


def compute_row_words(
    problem: Problem, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
) -> Tensor:
    """The words of delta_kernel, float32 (*lse.shape, 4)."""
    p = problem
    row_words = torch.empty((*lse.shape, 4), dtype=torch.float32, device=lse.device)
    dlse_strides = None if dlse is None else dlse.stride()
    launch = p.launch(_row_words_launch, out.stride(), dout.stride(), dlse_strides)
    launch(out, dout, lse, dlse, row_words, p.dropout_seed, p.positions_q, p.cu_seqlens_q)
    return row_words


def _row_words_launch(
    problem: Problem, out_strides: tuple, dout_strides: tuple, dlse_strides: tuple | None
) -> Launch:  # fmt: skip
    p = problem
    num_tiles = cdiv(p.seqlen_q, _DELTA_ROWS)
    flags = p.flags()
    numbers = (
        p.strides(out_strides), p.strides(dout_strides), p.lse_strides,
        p.strides(dlse_strides or (0, 0, 0)), p.nheads, p.seqlen_q, num_tiles, 1.0 / p.keep_scale,
    )  # fmt: skip
    constants = dict(
        HEADDIM=flags["HEADDIM"], BLOCK_D=flags["BLOCK_D"], BLOCK_M=_DELTA_ROWS,
        IS_VARLEN=p.is_varlen, HAS_DLSE=dlse_strides is not None, HAS_DROPOUT=flags["HAS_DROPOUT"],
    )  # fmt: skip
    return Launch(delta_kernel, p.batch * p.nheads * num_tiles, numbers, constants)


def launch_dk_dv(
    problem: Problem,
    dout: Tensor,
    row_words: Tensor,
    keys: Tensor | None,
    dk: Tensor,
    dv: Tensor,
    tile: Tile | None = None,
) -> None:
    """Fill dk and dv. `tile` overrides the table of tile_choice.py."""
    p = problem
    if tile is None:

        def run(candidate: Tile) -> tuple[Tensor, Tensor]:
            launch_dk_dv(p, dout, row_words, keys, dk, dv, candidate)
            return dk, dv

        tile = p.choose_tile("dk_dv", run)
    tile = p.fit(tile)
    launch = p.launch(_dk_dv_launch, tile, dout.stride(), dk.stride(), dv.stride())
    launch(p.q, p.k, p.v, dout, row_words, dk, dv, *p.index_tensors(), keys, p.col_lists)


def _dk_dv_launch(problem: Problem, tile: Tile, *strides: tuple[int, ...]) -> Launch:
    p = problem
    num_tiles = cdiv(p.seqlen_k, tile.block_n)
    num_heads = p.batch * p.nheads_k
    numbers = (
        *p.qkv_strides(), *map(p.strides, strides), p.lse_strides, p.column_strides,
        p.alibi_stride_batch, p.nheads, num_heads, p.seqlen_q, p.seqlen_k, num_tiles,
        max(1, heads_per_group(p) // p.group_size), p.window, p.scale_log2, p.softmax_scale,
        p.softcap, p.dropout_threshold, p.keep_scale,
    )  # fmt: skip
    constants = dict(
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, GROUP_SIZE=p.group_size, **p.flags(),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return Launch(dk_dv_kernel, num_heads * num_tiles, numbers, constants)


def attention_backward(
    problem: Problem,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dk_dv_tile: Tile | None = None,
    dq_tile: Tile | None = None,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the shapes and dtype of q, k, v: contiguous, or those of `into`.

    dout may have any strides (a copy is made only where its last one is not 1), dlse any strides or
    None.
    """
    p = problem
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    dq, dk, dv = into or (
        torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (p.q, p.k, p.v)
    )
    if dq.numel() == 0:
        return dq, dk.zero_(), dv.zero_()
    with p.device_guard():
        keys = dropout.column_keys(p)
        row_words = compute_row_words(p, dout, dlse, out, lse)
        if dk.numel() > 0:
            launch_dk_dv(p, dout, row_words, keys, dk, dv, dk_dv_tile)
        launch_dq(p, dout, row_words, keys, dq, dq_tile)
    return dq, dk, dv
