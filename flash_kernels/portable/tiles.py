"""Jitted pieces that the forward and the backward share: program order, visible keys, score
transform.

Conventions. `rows` are query positions and `cols` key positions within their sequence, int32,
shaped for broadcasting ([M, 1] against [1, N] or the transpose), so that every piece works on S and
on S^T. Scores are kept in base 2: exp2(score * log2(e)) = exp(score). Strides come as tuples
(batch, row, head); the head dimension has stride 1.

Arguments that the kernels have in common. Of packed sequences (total, ...) stands for (batch,
seqlen, ...), and per head (nheads, total) for (batch, nheads, seqlen); their batch stride is 0.

    q_ptr, out_ptr, dout_ptr, dq_ptr    (batch, seqlen_q, nheads, headdim), dtype of q
    k_ptr, v_ptr, dk_ptr, dv_ptr        (batch, seqlen_k, nheads_k, headdim), dtype of q
    lse_ptr                             (batch, nheads, seqlen_q) float32, natural log
    row_words_ptr                       (batch, nheads, seqlen_q, 4) float32: dq.load_row_words
    column_keys_ptr                     (batch, nheads, seqlen_k or more) int32: dropout.py
    cu_seqlens_q_ptr, cu_seqlens_k_ptr  (batch + 1,) int32; None if dense
    lengths_k_ptr                       (batch,) integers, with HAS_LENGTHS
    alibi_ptr                           (nheads,) or (batch, nheads) float32, with HAS_ALIBI
    lists                               of a block mask, where MASK_M > 0: sparse.py
    window                              (left, right), with HAS_LEFT and HAS_RIGHT
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def program_order(pid, num_tiles, num_heads, heads_per_group, REVERSED: tl.constexpr):
    """(head, tile) of program `pid` on a one-dimensional grid (axis 0 alone may exceed 65,535).

    Heads come in groups whose keys and values fit the L2 cache; within a group the tile is the slow
    index, so with REVERSED the longest rows of a causal mask start first and the short ones fill
    the tail.
    """
    group_programs = heads_per_group * num_tiles
    first_head = (pid // group_programs) * heads_per_group
    heads_here = tl.minimum(heads_per_group, num_heads - first_head)
    within = pid % group_programs
    tile = within // heads_here
    if REVERSED:
        tile = num_tiles - 1 - tile
    return first_head + within % heads_here, tile


@triton.jit
def sequence_range(cu_seqlens_ptr, batch_index, seqlen, IS_VARLEN: tl.constexpr):
    """(first packed row as int64, length): from cu_seqlens, or (0, seqlen) if dense."""
    if IS_VARLEN:
        first = tl.load(cu_seqlens_ptr + batch_index)
        return first.to(tl.int64), tl.load(cu_seqlens_ptr + batch_index + 1) - first
    else:
        return batch_index.to(tl.int64) * 0, seqlen


@triton.jit
def num_visible_keys(lengths_k_ptr, batch_index, seqlen_k, HAS_LENGTHS: tl.constexpr):
    """Keys before the padding: min(seqlen_k, lengths_k[batch_index])."""
    if HAS_LENGTHS:
        return tl.minimum(seqlen_k, tl.load(lengths_k_ptr + batch_index).to(tl.int32))
    else:
        return seqlen_k


@triton.jit
def tile_span(begin, end, full_begin, full_end, BLOCK: tl.constexpr):
    """Tiles of BLOCK positions: (first, full_first, full_last, last).

    [first, last) covers positions [begin, end); tiles [full_first, full_last) lie inside
    [full_begin, full_end).
    """
    first = begin // BLOCK
    last = tl.maximum(first, tl.where(end > begin, tl.cdiv(end, BLOCK), first))
    full_first = tl.minimum(tl.maximum(tl.cdiv(full_begin, BLOCK), first), last)
    full_last = tl.minimum(tl.maximum(full_end // BLOCK, full_first), last)
    return first, full_first, full_last, last


@triton.jit
def keys_of_rows(
    row_begin,
    row_end,
    shift,
    keys_end,
    window,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Keys that query rows [row_begin, row_end) see: (begin, end, then the four tile bounds of
    tile_span).

    Row i sees keys i + shift - left ... i + shift + right, shift = seqlen_k - seqlen_q
    (bottom-right alignment).
    """
    window_left, window_right = window
    begin = keys_end * 0
    full_begin = begin
    end = keys_end
    full_end = keys_end
    if HAS_LEFT:
        begin = tl.maximum(row_begin + shift - window_left, 0)
        full_begin = tl.maximum(row_end - 1 + shift - window_left, 0)
    if HAS_RIGHT:
        end = tl.minimum(end, row_end + shift + window_right)
        full_end = tl.minimum(full_end, row_begin + shift + window_right + 1)
    end = tl.maximum(end, 0)
    full_end = tl.maximum(full_end, 0)
    first, full_first, full_last, last = tile_span(begin, end, full_begin, full_end, BLOCK_N)
    return begin, end, first, full_first, full_last, last


@triton.jit
def rows_of_keys(
    col_begin,
    col_end,
    shift,
    seqlen_q,
    window,
    BLOCK_M: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Query rows that see keys [col_begin, col_end): the four tile bounds of tile_span."""
    window_left, window_right = window
    begin = seqlen_q * 0
    full_begin = begin
    end = seqlen_q
    full_end = seqlen_q
    if HAS_RIGHT:
        begin = tl.maximum(col_begin - shift - window_right, 0)
        full_begin = tl.maximum(col_end - 1 - shift - window_right, 0)
    if HAS_LEFT:
        end = tl.minimum(end, col_end - shift + window_left)
        full_end = tl.minimum(full_end, col_begin - shift + window_left + 1)
    end = tl.where(col_end > col_begin, tl.maximum(end, 0), 0)
    full_end = tl.maximum(full_end, 0)
    return tile_span(begin, end, full_begin, full_end, BLOCK_M)


@triton.jit
def edge_tile(index, first, full_first, full_last):
    """The index-th tile that needs a mask: those before the full ones, then those after."""
    before = full_first - first
    return tl.where(index < before, first + index, full_last + index - before)


@triton.jit
def where_greater(a, b, values, other: tl.constexpr, PTX: tl.constexpr):
    """tl.where(a > b, values, other) for int32 a and b, float32 values and constant other.

    On NVIDIA GPUs in their own words: LLVM vectorizes the comparisons of a thread, and its PTX
    backend packs the resulting bits into words and takes them apart again. It also moves the
    selection behind a conversion of its result to 16 bits, where it is no longer one instruction.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.gt.s32 p, $2, $3; selp.f32 $0, $1, $4, p; }",
            "=f,f,r,r,f", [values, a, b, other], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.where(a > b, values, other)


@triton.jit
def mask_tile(
    values, rows, cols, shift, keys_end, window, other: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """`values` where query `rows` may attend key `cols`, else `other`."""
    window_left, window_right = window
    row_end = rows * 0 + keys_end
    if HAS_RIGHT:
        row_end = tl.minimum(row_end, rows + shift + window_right + 1)
    values = where_greater(row_end, cols, values, other, PTX)
    if HAS_LEFT:
        values = where_greater(cols, rows + shift - window_left - 1, values, other, PTX)
    return values


@triton.jit
def load_tile(
    ptrs,
    positions,
    begin,
    end,
    dims,
    HEADDIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
):
    """[BLOCK, BLOCK_D] of a matrix with HEADDIM columns; zero outside [begin, end) and columns."""
    if CHECK_ROWS:
        inside = (positions >= begin) & (positions < end)
        if HEADDIM == BLOCK_D:
            return tl.load(ptrs, mask=inside[:, None], other=0.0)
        else:
            return tl.load(ptrs, mask=inside[:, None] & (dims < HEADDIM)[None, :], other=0.0)
    else:
        if HEADDIM == BLOCK_D:
            return tl.load(ptrs)
        else:
            return tl.load(ptrs, mask=(dims < HEADDIM)[None, :], other=0.0)


@triton.jit
def store_tile(ptrs, values, positions, end, dims, HEADDIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write the rows before `end` and the first HEADDIM columns in the pointer's dtype."""
    inside = (positions < end)[:, None]
    if HEADDIM != BLOCK_D:
        inside = inside & (dims < HEADDIM)[None, :]
    tl.store(ptrs, values.to(ptrs.dtype.element_ty), mask=inside)


@triton.jit
def add_product(a, b, acc, PRECISE: tl.constexpr):
    """acc + a @ b, float32.

    PRECISE (float32 operands) keeps a tile's sum apart until it is complete: one chain of additions
    through all tiles rounds once an element, an error that grows with the sequence. Triton folds
    acc + dot into such a chain, but not a difference.
    """
    if PRECISE:
        return acc - tl.dot(-a, b, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """tanh by exp2, which the interpreter has; PRECISE adds a series near 0."""
    decay = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    value = (1.0 - decay) / (1.0 + decay)
    value = tl.where(x < 0, -value, value)
    if PRECISE:
        # Taylor to x^13; the next term is below 4e-9 relative at |x| = 0.4.
        y = x * x
        series = -1382.0 / 155925.0 + y * (21844.0 / 6081075.0)
        series = 62.0 / 2835.0 + y * series
        series = -17.0 / 315.0 + y * series
        series = 2.0 / 15.0 + y * series
        series = -1.0 / 3.0 + y * series
        value = tl.where(tl.abs(x) < 0.4, x + x * y * series, value)
    return value


@triton.jit
def transform_scores(
    dots, rows, cols, shift, scale_log2, softcap, slope_log2,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """q @ k to base-2 scores, and the derivative factor of the softcap (1 without it).

    softcap * tanh(scale * dots / softcap) - slope * |row + shift - col|, all times log2(e).
    """
    factor = 1.0
    if HAS_SOFTCAP:
        capped = tanh(dots * (scale_log2 / (softcap * LOG2E)), PRECISE)
        factor = 1.0 - capped * capped
        scores = capped * (softcap * LOG2E)
    else:
        scores = dots * scale_log2
    if HAS_ALIBI:
        scores = scores - slope_log2 * tl.abs(rows + shift - cols).to(tl.float32)
    return scores, factor


@triton.jit
def load_alibi_slope(alibi_ptr, alibi_stride_batch, batch_index, head, HAS_ALIBI: tl.constexpr):
    """Slope of this head times log2(e)."""
    if HAS_ALIBI:
        return tl.load(alibi_ptr + batch_index * alibi_stride_batch + head) * LOG2E
    else:
        return 0.0
