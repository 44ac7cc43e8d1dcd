"""Attention of a few new queries over a key-value cache: append in place, split the keys, combine.

One query cannot fill a GPU by itself, so the keys of a sequence are cut into num_splits ranges,
each with a program of its own (Flash-Decoding); the query heads that share a key head form the rows
of one tile. Partial outputs are combined by their log-sum-exp. Forward only.
"""

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tiles
from .attention_forward import attend_keys
from .launch import MAX_WINDOW, block_d, cdiv, uses_ptx
from .tile_choice import gpu_family

_BLOCK_M = 16  # the smallest row count of a matrix product
_MAX_SPLITS = 64


@triton.jit(do_not_specialize=["seqlen_new"])
def append_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, cache_lengths_ptr,
    k_strides, v_strides, k_cache_strides, v_cache_strides, nheads_k, seqlen_new,
    HEADDIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copy one new row of one head behind the rows that the cache holds.

    Grid: (batch * seqlen_new * nheads_k,).
    """
    pid = tl.program_id(0)
    head = (pid % nheads_k).to(tl.int64)
    row = pid // nheads_k % seqlen_new
    batch_index = (pid // nheads_k // seqlen_new).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    inside = dims < HEADDIM
    target = tl.load(cache_lengths_ptr + batch_index).to(tl.int64) + row
    source = batch_index * k_strides[0] + row.to(tl.int64) * k_strides[1] + head * k_strides[2]
    k = tl.load(k_ptr + source + dims, mask=inside)
    source = batch_index * v_strides[0] + row.to(tl.int64) * v_strides[1] + head * v_strides[2]
    v = tl.load(v_ptr + source + dims, mask=inside)
    place = (
        batch_index * k_cache_strides[0] + target * k_cache_strides[1] + head * k_cache_strides[2]
    )
    tl.store(k_cache_ptr + place + dims, k, mask=inside)
    place = (
        batch_index * v_cache_strides[0] + target * v_cache_strides[1] + head * v_cache_strides[2]
    )
    tl.store(v_cache_ptr + place + dims, v, mask=inside)


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_new", "num_row_tiles", "num_splits", "window"])
def decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, cache_lengths_ptr, alibi_ptr,
    q_strides, k_strides, v_strides, out_strides, lse_strides, alibi_stride_batch,
    nheads, group_size, seqlen_q, seqlen_new, num_row_tiles, num_splits, window, scale_log2,
    softcap, HEADDIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, SCALE_IN_EXP: tl.constexpr,
    PRECISE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows (query, head of the group) of one key head, over one range of its
    keys.

    out and lse have strides (split, batch, row, head) and (split, batch, head); lse is in base 2.
    Grid: (batch * nheads_k * num_row_tiles * num_splits,).
    """
    pid = tl.program_id(0)
    split = pid % num_splits
    row_tile = pid // num_splits % num_row_tiles
    nheads_k = nheads // group_size
    head_k = pid // num_splits // num_row_tiles % nheads_k
    batch_index = pid // num_splits // num_row_tiles // nheads_k
    batch_64 = batch_index.to(tl.int64)
    split_64 = split.to(tl.int64)
    seqlen_k = tl.load(cache_lengths_ptr + batch_index).to(tl.int32) + seqlen_new
    shift = seqlen_k - seqlen_q

    # Row r of the tile is query r // group_size in head r % group_size of the group.
    packed = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = packed // group_size
    heads = head_k * group_size + packed % group_size
    is_row = rows < seqlen_q
    row_begin = row_tile * BLOCK_M // group_size
    row_end = tl.minimum((row_tile * BLOCK_M + BLOCK_M - 1) // group_size + 1, seqlen_q)
    dims = tl.arange(0, BLOCK_D)
    in_tile = tl.arange(0, BLOCK_N).to(tl.int64)
    q_offsets = (
        batch_64 * q_strides[0]
        + rows.to(tl.int64) * q_strides[1]
        + heads.to(tl.int64) * q_strides[2]
    )
    q = tl.load(
        q_ptr + q_offsets[:, None] + dims[None, :],
        mask=is_row[:, None] & (dims < HEADDIM)[None, :], other=0.0,
    )  # fmt: skip
    k_ptr += batch_64 * k_strides[0] + head_k.to(tl.int64) * k_strides[2]
    v_ptr += batch_64 * v_strides[0] + head_k.to(tl.int64) * v_strides[2]
    k_ptrs = k_ptr + in_tile[:, None] * k_strides[1] + dims[None, :]
    v_ptrs = v_ptr + in_tile[:, None] * v_strides[1] + dims[None, :]
    slopes_log2 = scale_log2
    if HAS_ALIBI:
        slopes_log2 = tl.load(
            alibi_ptr + batch_index * alibi_stride_batch + heads, mask=is_row, other=0.0
        )
        slopes_log2 = (slopes_log2 * tiles.LOG2E)[:, None]

    begin, end, first, full_first, full_last, last = tiles.keys_of_rows(
        row_begin, row_end, shift, seqlen_k, window, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    tiles_per_split = tl.cdiv(last - first, num_splits)
    first = tl.minimum(first + split * tiles_per_split, last)
    last = tl.minimum(first + tiles_per_split, last)
    full_first = tl.minimum(tl.maximum(full_first, first), last)
    full_last = tl.minimum(tl.maximum(full_last, full_first), last)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    for index in tl.range(0, full_first - first + last - full_last):
        acc, row_max, row_sum = attend_keys(
            acc, row_max, row_sum, q, k_ptrs, v_ptrs, k_strides[1], v_strides[1], None, None, None,
            rows, dims, tiles.edge_tile(index, first, full_first, full_last), None, index, rows,
            begin, end, shift, seqlen_k, window, scale_log2, softcap, slopes_log2, 0, HEADDIM,
            BLOCK_D, BLOCK_N, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, False, 1, SCALE_IN_EXP,
            PRECISE, PTX, 0, 0, False, MASKED=True,
        )  # fmt: skip
    for tile in tl.range(full_first, full_last):
        acc, row_max, row_sum = attend_keys(
            acc, row_max, row_sum, q, k_ptrs, v_ptrs, k_strides[1], v_strides[1], None, None, None,
            rows, dims, tile, None, tile, rows, begin, end, shift, seqlen_k, window,
            scale_log2, softcap, slopes_log2, 0, HEADDIM, BLOCK_D, BLOCK_N, HAS_LEFT, HAS_RIGHT,
            HAS_SOFTCAP, HAS_ALIBI, False, 1, SCALE_IN_EXP, PRECISE, PTX, 0, 0, False, MASKED=False,
        )  # fmt: skip
    normaliser = tl.where(row_sum == 0.0, 1.0, row_sum)
    out_offsets = split_64 * out_strides[0] + batch_64 * out_strides[1]
    out_offsets += rows.to(tl.int64) * out_strides[2] + heads.to(tl.int64) * out_strides[3]
    tl.store(
        out_ptr + out_offsets[:, None] + dims[None, :], (acc / normaliser[:,
        None]).to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (dims < HEADDIM)[None, :],
    )  # fmt: skip
    lse_offsets = (
        split_64 * lse_strides[0] + batch_64 * lse_strides[1] + heads.to(tl.int64) * lse_strides[2]
    )
    tl.store(lse_ptr + lse_offsets + rows, row_max + tl.log2(normaliser), mask=is_row)


@triton.jit(do_not_specialize=["seqlen_q", "num_splits"])
def combine_kernel(
    partial_ptr, partial_lse_ptr, out_ptr, lse_ptr, partial_strides, partial_lse_strides,
    out_strides, nheads, seqlen_q, num_splits,
    HEADDIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """out = sum of the partial outputs, weighted by exp2(lse - max); lse to natural log.

    Grid: (batch * nheads * seqlen_q,).
    """
    pid = tl.program_id(0)
    row = (pid % seqlen_q).to(tl.int64)
    head = (pid // seqlen_q % nheads).to(tl.int64)
    batch_index = (pid // seqlen_q // nheads).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    splits = tl.arange(0, BLOCK_SPLITS).to(tl.int64)
    lse_offset = batch_index * partial_lse_strides[1] + head * partial_lse_strides[2] + row
    lse = tl.load(
        partial_lse_ptr + lse_offset + splits * partial_lse_strides[0],
        mask=splits < num_splits, other=float("-inf"),
    )  # fmt: skip
    largest = tl.max(lse, 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2(lse - largest)
    total = tl.sum(weights, 0)
    normaliser = tl.where(total == 0.0, 1.0, total)
    offset = batch_index * partial_strides[1] + row * partial_strides[2] + head * partial_strides[3]
    partial = tl.load(
        partial_ptr + offset + splits[:, None] * partial_strides[0] + dims[None, :],
        mask=(splits < num_splits)[:, None] & (dims < HEADDIM)[None, :], other=0.0,
    )  # [BLOCK_SPLITS, BLOCK_D]  # fmt: skip
    out = tl.sum(partial * weights[:, None], 0) / normaliser
    out_offset = batch_index * out_strides[0] + row * out_strides[1] + head * out_strides[2]
    tl.store(out_ptr + out_offset + dims, out.to(out_ptr.dtype.element_ty), mask=dims < HEADDIM)
    # The log of 0 says -inf by itself.
    tl.store(lse_ptr + pid, (largest + tl.log2(total)) * tiles.LN2)


def choose_num_splits(programs: int, capacity: int, block_n: int, device: torch.device) -> int:
    """Ranges that the keys are cut into.

    Enough for two programs on each multiprocessor, but no range below four tiles.
    """
    if device.type == "cpu":
        return 3
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = -(-2 * multiprocessors // programs)
    return max(1, min(wanted, -(-capacity // (4 * block_n)), _MAX_SPLITS))


def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_lengths: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    alibi_slopes: Tensor | None,
    *,
    softmax_scale: float,
    softcap: float,
    window_left: int | None,
    window_right: int | None,
    num_splits: int | None,
) -> tuple[Tensor, Tensor]:
    """Append k and v to the caches, attend: (out in q's shape, lse (batch, nheads, seqlen_q))."""
    batch, seqlen_q, nheads, headdim = q.shape
    nheads_k = k_cache.shape[2]
    group_size = nheads // nheads_k
    seqlen_new = 0 if k is None else k.shape[1]
    padded = block_d(headdim)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, nheads, seqlen_q, dtype=torch.float32, device=q.device)
    guard = torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext()
    with guard:
        if k is not None and v is not None and k.numel() > 0:
            append_kernel[(batch * seqlen_new * nheads_k,)](
                k, v, k_cache, v_cache, cache_lengths, k.stride()[:3], v.stride()[:3],
                k_cache.stride()[:3], v_cache.stride()[:3], nheads_k, seqlen_new, HEADDIM=headdim,
                BLOCK_D=padded, num_warps=1,
            )  # fmt: skip
        if out.numel() == 0:
            return out, lse
        block_n = 32 if gpu_family(q.device) == "interpreter" or padded > 128 else 64
        if q.dtype == torch.float32:
            block_n = 16
        num_row_tiles = cdiv(seqlen_q * group_size, _BLOCK_M)
        programs = batch * nheads_k * num_row_tiles
        num_splits = num_splits or choose_num_splits(programs, k_cache.shape[1], block_n, q.device)
        partial = torch.empty(num_splits, *q.shape, dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(num_splits, *lse.shape, dtype=torch.float32, device=q.device)
        decode_kernel[(programs * num_splits,)](
            q, k_cache, v_cache, partial, partial_lse, cache_lengths, alibi_slopes,
            q.stride()[:3], k_cache.stride()[:3], v_cache.stride()[:3], partial.stride()[:4],
            partial_lse.stride()[:3],
            alibi_slopes.stride(0) if alibi_slopes is not None and alibi_slopes.dim() == 2 else 0,
            nheads, group_size, seqlen_q, seqlen_new, num_row_tiles, num_splits,
            (min(window_left or 0, MAX_WINDOW), min(window_right or 0, MAX_WINDOW)),
            softmax_scale * tiles.LOG2E.value, softcap, HEADDIM=headdim, BLOCK_D=padded,
            BLOCK_M=_BLOCK_M, BLOCK_N=block_n, HAS_LEFT=window_left is not None,
            HAS_RIGHT=window_right is not None, HAS_SOFTCAP=softcap > 0.0,
            HAS_ALIBI=alibi_slopes is not None,
            SCALE_IN_EXP=softmax_scale > 0 and not softcap and alibi_slopes is None,
            PRECISE=q.dtype == torch.float32, PTX=uses_ptx(q.device), num_warps=4, num_stages=2,
        )  # fmt: skip
        combine_kernel[(batch * nheads * seqlen_q,)](
            partial, partial_lse, out, lse, partial.stride()[:4], partial_lse.stride()[:3],
            out.stride()[:3], nheads, seqlen_q, num_splits, HEADDIM=headdim, BLOCK_D=padded,
            BLOCK_SPLITS=triton.next_power_of_2(num_splits), num_warps=2,
        )  # fmt: skip
    return out, lse
