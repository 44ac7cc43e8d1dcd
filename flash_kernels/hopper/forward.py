"""Forward of attention for Hopper (sm_90), in Gluon: the contract of portable/attention_forward.py.

One block owns NUM_CONSUMERS * 64 query rows of one head. Its first warpgroup is the producer: it
fills rings of K and V tiles by TMA. Each other warpgroup, a consumer, owns 64 rows and walks the
keys from the right, so that the tiles cut by a causal mask come first and hidden ones never load.
With a block mask the walk is the mask's list of the rows, partial blocks first. A position of the
walk means the same tile to the producer and to the consumers.

FlashAttention-3 (arXiv 2407.08608), algorithm 2: the scores of a tile are issued before the product
of probabilities and values of the tile before, whose matrix instructions then run beside the
softmax. What differs: consumers are not synchronised with each other, and each thread arrives by
itself at the barriers that free a buffer.

Barriers and their arrival counts, one phase for each use of the buffer:
    q_full[c]         1: the producer's expect, completed by the bytes of the TMA load. Used once.
    k_full, v_full    1: likewise.
    k_empty, v_empty  128 * NUM_CONSUMERS: every thread of every consumer, once each tile, after its
                      warpgroup waited for the matrix instructions that read the buffer.
"""

from ..portable import sparse, tiles
from .addressing import coordinates, sequence_place
from .gluon_api import (
    arrive_threads,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    ring,
    store_wait,
    tma_load,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
    zero_dropped,
)
from .masking import hide, hide_tokens

# Query rows of a warpgroup: one matrix instruction high.
ROWS: gl.constexpr = gl.constexpr(64)


@jit
def _tile_at(walk, index, SUB: gl.constexpr):
    """The key tile at position `index`. SUB: tiles in a block of the mask, 0 without a mask.

    walk: (lists, first position in them), or (None, the last tile of a walk to the left).
    """
    lists, start = walk
    if SUB > 0:
        return sparse.listed_tile(lists, start + index, SUB)
    else:
        return start - index


@jit
def _produce(
    descs, buffers, barriers, position, walk, NUM_CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, IS_RAGGED: gl.constexpr, SUB: gl.constexpr,
):  # fmt: skip
    """Load Q once, then the K and V tiles of the walk."""
    q_desc, k_desc, v_desc = descs
    q_smem, k_smem, v_smem = buffers
    q_full, k_full, k_empty, v_full, v_empty = barriers
    place_q, place_k, head, head_k, row_begin, num_tiles = position
    for consumer in gl.static_range(NUM_CONSUMERS):
        mbarrier.expect(q_full.index(consumer), q_desc.block_type.nbytes)
        coords = coordinates(place_q, head, row_begin + consumer * ROWS, 0, IS_RAGGED)
        tma_load(q_desc, coords, q_full.index(consumer), q_smem.index(consumer))
    tile = _tile_at(walk, 0, SUB)
    for index in range(num_tiles):
        stage, phase = ring(index, STAGES)
        coords = coordinates(place_k, head_k, tile * BLOCK_N, 0, IS_RAGGED)
        # Read a position ahead, so that the waits hide the latency of the list.
        tile = _tile_at(walk, gl.minimum(index + 1, num_tiles - 1), SUB)
        # The wait for the phase before the first passes at once: the ring starts empty.
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
        tma_load(k_desc, coords, k_full.index(stage), k_smem.index(stage))
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
        tma_load(v_desc, coords, v_full.index(stage), v_smem.index(stage))


@jit
def _softmax(
    scores, row_max, row_sum, seen, walk, index, scale_log2, BLOCK_N: gl.constexpr,
    SUB: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_TOKENS: gl.constexpr, MASK_M: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Online softmax in base 2: (probabilities, row_max, row_sum, decay of what came before).

    seen: (begin and end of the keys that each row sees; positions before `full` and from `left` on
    hold tiles that they cut; the first row in its block of the mask). Without MASKED none is cut.
    """
    starts, limits, full, left, mask_line = seen
    if MASKED:
        if index < full:
            tile = _tile_at(walk, index, SUB)
            scores = hide(scores, limits - tile * BLOCK_N, BEFORE=False)
            if HAS_LEFT and SUB > 0:
                scores = hide(scores, starts - tile * BLOCK_N, BEFORE=True)
            if HAS_TOKENS:
                scores = hide_tokens(scores, walk[0], walk[1] + index, mask_line, SUB, MASK_M)
        if HAS_LEFT and SUB == 0:
            if index >= left:
                scores = hide(scores, starts - (walk[1] - index) * BLOCK_N, BEFORE=True)
    # The scale is positive, so it commutes with the maximum and folds into one multiply-add.
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
    if MASKED:
        # A row that has seen nothing yet: any finite number keeps -inf - max from being NaN.
        finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    else:
        finite_max = new_max
    probs = gl.exp2(scores * scale_log2 - finite_max[:, None])
    decay = gl.exp2(row_max - finite_max)
    row_sum = row_sum * decay + gl.sum(probs, 1)
    return probs, new_max, row_sum, decay


@jit
def _load_column_keys(
    column_keys_ptr, walk, index, LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr, SUB: gl.constexpr,
    HAS_DROPOUT: gl.constexpr,
):  # fmt: skip
    """Dropout keys of a tile's columns [BLOCK_N]; without dropout anything, which nothing uses."""
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
    if HAS_DROPOUT:
        return gl.load(column_keys_ptr + _tile_at(walk, index, SUB) * BLOCK_N + cols)
    else:
        return cols


@jit
def _attend_tile(
    acc, probs, row_max, row_sum, q, buffers, barriers, seen, walk, dropout_rows, column_keys_ptr,
    index, num_tiles, scale_log2, threshold, SCORES: gl.constexpr, PROBS: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HAS_DROPOUT: gl.constexpr, SUB: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_TOKENS: gl.constexpr, MASK_M: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of position `index`, beside probs @ v of the position before.

    On entry the K tile has arrived; on exit so has the next one, if there is one.
    """
    q_smem, k_smem, v_smem = buffers
    q_full, k_full, k_empty, v_full, v_empty = barriers
    row_keys, row_multipliers = dropout_rows
    stage, _ = ring(index, STAGES)
    stage_before, phase_before = ring(index - 1, STAGES)
    stage_after, phase_after = ring(index + 1, STAGES)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    k = k_smem.index(stage).reshape([BLOCK_N, q.shape[1]])
    v = v_smem.index(stage_before).reshape([BLOCK_N, q.shape[1]])

    scores_token = warpgroup_mma(q, k.permute([1, 0]), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(stage_before), phase_before)
    acc_token = warpgroup_mma(probs, v, acc, is_async=True)
    column_keys = _load_column_keys(column_keys_ptr, walk, index, SCORES, BLOCK_N, SUB, HAS_DROPOUT)
    scores, acc_token = warpgroup_mma_wait(1, deps=[scores_token, acc_token])
    arrive_threads(k_empty.index(stage))
    values, row_max, row_sum, decay = _softmax(
        scores, row_max, row_sum, seen, walk, index, scale_log2, BLOCK_N, SUB, HAS_LEFT,
        HAS_TOKENS, MASK_M, MASKED,
    )  # fmt: skip
    # This wait ends the basic block. Without it ptxas moves the next one, which nothing ties to the
    # softmax, ahead of every exponential, and the products no longer run beside them.
    mbarrier.wait(k_full.index(stage_after), phase_after, pred=index + 1 < num_tiles)
    acc, values, row_sum = warpgroup_mma_wait(0, deps=[acc_token, values, row_sum])
    arrive_threads(v_empty.index(stage_before))
    # Behind that wait, where ptxas cannot compare early and then store 64 predicates.
    if HAS_DROPOUT:
        values = zero_dropped(
            values, row_keys[:, None], row_multipliers[:, None], column_keys[None, :], threshold
        )
    probs = gl.convert_layout(values.to(q.dtype), PROBS, assert_trivial=True)
    decay = gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)
    return acc * decay[:, None], probs, row_max, row_sum


@jit
def _consume(
    out_desc, lse_ptr, dropout_ptrs, buffers, barriers, position, walk, num_partial, keys_end,
    seqlen_k, window, scale_log2, threshold, keep_scale, CONSUMER: gl.constexpr,
    HEADDIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, IS_RAGGED: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_TAIL: gl.constexpr,
    HAS_DROPOUT: gl.constexpr, SUB: gl.constexpr, HAS_TOKENS: gl.constexpr, MASK_M: gl.constexpr,
):  # fmt: skip
    """64 query rows: out and lse. lse_ptr and dropout_ptrs point at this sequence and head.

    num_partial: positions of a block mask that need masking. keys_end: keys before the padding.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADDIM, 16])
    PROBS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    MASKED: gl.constexpr = HAS_LEFT or HAS_RIGHT or SUB > 0
    q_smem, k_smem, v_smem = buffers
    q_full, k_full, k_empty, v_full, v_empty = barriers
    row_keys_ptr, row_multipliers_ptr, column_keys_ptr = dropout_ptrs
    place_q, place_k, head, head_k, row_begin, num_tiles = position
    seqlen_q = place_q[2]
    window_left, window_right = window
    q = q_smem.index(CONSUMER).reshape([ROWS, HEADDIM])
    row_begin += CONSUMER * ROWS
    rows = row_begin + gl.arange(0, ROWS, ROW)
    inside = rows < seqlen_q

    # Positions [0, first) hold keys that no row here sees, [first, full) and those from `left` on
    # need the mask.
    first = num_tiles * 0
    full = first + 1
    left = num_tiles
    shift = seqlen_k - seqlen_q
    starts = rows
    limits = rows * 0 + keys_end
    if HAS_LEFT:
        starts = rows + (shift - window_left)
    if HAS_RIGHT:
        limits = gl.minimum(limits, rows + (shift + window_right + 1))
    if SUB > 0:
        full = num_partial
    else:
        last_tile = walk[1]
        row_end = gl.minimum(row_begin + ROWS, seqlen_q)
        if HAS_LEFT:
            # The tiles before the first one that all rows see whole.
            full_begin = gl.maximum(row_end - 1 + shift - window_left, 0)
            left = last_tile + 1 - gl.cdiv(full_begin, BLOCK_N)
        if HAS_RIGHT:
            end = gl.minimum(keys_end, row_end + shift + window_right)
            full_end = gl.minimum(keys_end, gl.maximum(row_begin + shift + window_right + 1, 0))
            first = last_tile + 1 - gl.maximum(gl.cdiv(end, BLOCK_N), 1)
            full = gl.maximum(first + 1, last_tile + 1 - full_end // BLOCK_N)
            # 192 rows see at most one tile more than their first 64: position 0 in the first round
            # of the ring, where no earlier use of the buffer is open, so it is freed without a look
            if first > 0:
                arrive_threads(k_empty.index(0))
                arrive_threads(v_empty.index(0))
    mask_line = row_begin
    if MASK_M > 0:
        mask_line = row_begin % MASK_M
    seen = (starts, limits, full, left, mask_line)
    row_keys = rows
    row_multipliers = rows
    if HAS_DROPOUT:
        row_keys = gl.load(row_keys_ptr + rows, mask=inside, other=0)
        row_multipliers = gl.load(row_multipliers_ptr + rows, mask=inside, other=0)

    row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    row_sum = gl.full([ROWS], 0.0, gl.float32, ROW)
    acc = gl.zeros([ROWS, HEADDIM], gl.float32, OUT)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    stage, phase = ring(first, STAGES)
    stage_after, phase_after = ring(first + 1, STAGES)
    mbarrier.wait(q_full.index(CONSUMER), 0)
    mbarrier.wait(k_full.index(stage), phase)
    k = k_smem.index(stage).reshape([BLOCK_N, HEADDIM])
    scores_token = warpgroup_mma(q, k.permute([1, 0]), zeros, use_acc=False, is_async=True)
    column_keys = _load_column_keys(column_keys_ptr, walk, first, SCORES, BLOCK_N, SUB, HAS_DROPOUT)
    scores = warpgroup_mma_wait(0, deps=[scores_token])
    arrive_threads(k_empty.index(stage))
    values, row_max, row_sum, _ = _softmax(
        scores, row_max, row_sum, seen, walk, first, scale_log2, BLOCK_N, SUB, HAS_LEFT,
        HAS_TOKENS, MASK_M, MASKED or HAS_TAIL,
    )  # fmt: skip
    if HAS_DROPOUT:
        values = zero_dropped(
            values, row_keys[:, None], row_multipliers[:, None], column_keys[None, :], threshold
        )
    probs = gl.convert_layout(values.to(q.dtype), PROBS, assert_trivial=True)
    mbarrier.wait(k_full.index(stage_after), phase_after, pred=first + 1 < num_tiles)
    for index in range(first + 1, num_tiles):
        acc, probs, row_max, row_sum = _attend_tile(
            acc, probs, row_max, row_sum, q, buffers, barriers, seen, walk,
            (row_keys, row_multipliers), column_keys_ptr, index, num_tiles, scale_log2, threshold,
            SCORES, PROBS, BLOCK_N, STAGES, HAS_DROPOUT, SUB, HAS_LEFT, HAS_TOKENS, MASK_M, MASKED,
        )  # fmt: skip
    stage, phase = ring(num_tiles - 1, STAGES)
    mbarrier.wait(v_full.index(stage), phase)
    v = v_smem.index(stage).reshape([BLOCK_N, HEADDIM])
    acc_token = warpgroup_mma(probs, v, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc_token])

    # A row that saw no key keeps row_max = -inf and row_sum = 0: out = 0 and lse = -inf.
    normaliser = gl.where(row_sum == 0.0, 1.0, row_sum)
    gl.store(lse_ptr + rows, (row_max + gl.log2(normaliser)) * tiles.LN2, mask=inside)
    factor = gl.convert_layout(keep_scale / normaliser, gl.SliceLayout(1, OUT), assert_trivial=True)
    # Every matrix instruction that reads this consumer's Q has been waited for.
    q.store((acc * factor[:, None]).to(q.dtype))
    fence_async_shared()
    coords = coordinates(place_q, head, row_begin, 0, IS_RAGGED)
    tma_store(out_desc, coords, q_smem.index(CONSUMER))
    store_wait(0)


_LENGTHS = [
    "lse_strides", "column_strides", "nheads", "group_size", "num_heads", "seqlen_q", "seqlen_k",
    "num_row_tiles", "heads_per_group", "window", "threshold",
]  # fmt: skip


@jit(do_not_specialize=_LENGTHS)
def attention_forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, row_keys_ptr, row_multipliers_ptr, column_keys_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, lengths_k_ptr, lists, lse_strides, column_strides, nheads,
    group_size, num_heads, seqlen_q, seqlen_k, num_row_tiles, heads_per_group, window, scale_log2,
    threshold, keep_scale,
    NUM_CONSUMERS: gl.constexpr, HEADDIM: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, IS_VARLEN: gl.constexpr,
    HAS_LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_TAIL: gl.constexpr, HAS_DROPOUT: gl.constexpr, MASK_M: gl.constexpr, MASK_N: gl.constexpr,
    HAS_TOKENS: gl.constexpr,
):  # fmt: skip
    """Grid: (num_heads * num_row_tiles,) with num_heads = batch * nheads; 4 warps.

    Descriptors: of launch.py, in boxes of one head, `rows` rows and HEADDIM columns; zeros outside.
    HAS_TAIL: the last tile may hold keys that are none. column_keys_ptr: readable to the end of
    every tile, so that its loads need no mask. lists: of portable/sparse.py, the token masks packed
    by rows; MASK_M is a multiple of the rows of a block, MASK_N of BLOCK_N.
    """
    IS_RAGGED: gl.constexpr = IS_VARLEN or HAS_LENGTHS
    SUB: gl.constexpr = MASK_N // BLOCK_N
    batch_head, row_tile = tiles.program_order(num_row_tiles, num_heads, heads_per_group, HAS_RIGHT)
    batch_index = batch_head // nheads
    head = batch_head % nheads
    head_k = head // group_size
    place_q = sequence_place(cu_seqlens_q_ptr, batch_index, seqlen_q, IS_VARLEN, IS_RAGGED)
    batch_index, first_k, seqlen_k = sequence_place(
        cu_seqlens_k_ptr, batch_index, seqlen_k, IS_VARLEN, IS_RAGGED
    )
    row_begin = row_tile * (NUM_CONSUMERS * ROWS)
    if row_begin >= place_q[2]:
        return
    keys_end = tiles.num_visible_keys(lengths_k_ptr, batch_index, seqlen_k, HAS_LENGTHS)
    keys_end = gl.maximum(keys_end, 0)
    shift = seqlen_k - place_q[2]
    window_left, window_right = window
    num_partial = keys_end * 0
    if MASK_N > 0:
        begin, full_begin, end = sparse.listed_range(
            lists, batch_index, head, row_begin // MASK_M, SUB
        )
        num_tiles = end - begin
        num_partial = full_begin - begin
        if num_tiles == 0:
            # Any block of the list, no key of which is seen.
            begin = begin * 0
            num_tiles = begin + 1
            num_partial = begin + 1
            keys_end = begin
        walk = (lists, begin)
    else:
        end = keys_end
        begin = keys_end * 0
        if HAS_RIGHT:
            row_end = gl.minimum(row_begin + NUM_CONSUMERS * ROWS, place_q[2])
            end = gl.minimum(end, row_end + shift + window_right)
        # One tile at least: all its scores are masked where no key is visible.
        last_tile = gl.maximum(gl.cdiv(end, BLOCK_N), 1) - 1
        if HAS_LEFT:
            begin = gl.maximum(row_begin + shift - window_left, 0) // BLOCK_N
        num_tiles = last_tile + 1 - gl.minimum(begin, last_tile)
        walk = (lists, last_tile)
    row_offset = batch_index.to(gl.int64) * lse_strides[0] + head.to(gl.int64) * lse_strides[1]
    column_offset = (
        batch_index.to(gl.int64) * column_strides[0] + head.to(gl.int64) * column_strides[1]
    )
    if IS_VARLEN:
        row_offset += place_q[1]
        column_offset += first_k
    lse_ptr += row_offset
    if HAS_DROPOUT:
        row_keys_ptr += row_offset
        row_multipliers_ptr += row_offset
        column_keys_ptr += column_offset

    q_smem = gl.allocate_shared_memory(
        q_desc.dtype, [NUM_CONSUMERS] + q_desc.block_type.shape, q_desc.layout
    )
    k_smem = gl.allocate_shared_memory(
        k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout
    )
    v_smem = gl.allocate_shared_memory(
        v_desc.dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout
    )
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [NUM_CONSUMERS, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for consumer in gl.static_range(NUM_CONSUMERS):
        mbarrier.init(q_full.index(consumer), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=128 * NUM_CONSUMERS)
        mbarrier.init(v_empty.index(stage), count=128 * NUM_CONSUMERS)
    fence_async_shared()

    buffers = (q_smem, k_smem, v_smem)
    barriers = (q_full, k_full, k_empty, v_full, v_empty)
    dropout_ptrs = (row_keys_ptr, row_multipliers_ptr, column_keys_ptr)
    place_k = (batch_index, first_k, keys_end)
    position = (place_q, place_k, head, head_k, row_begin, num_tiles)
    if NUM_CONSUMERS == 2:
        gl.warp_specialize([
            (_produce, (
                (q_desc, k_desc, v_desc), buffers, barriers, position, walk, NUM_CONSUMERS,
                BLOCK_N, STAGES, IS_RAGGED, SUB,
            )),
            (_consume, (
                out_desc, lse_ptr, dropout_ptrs, buffers, barriers, position, walk, num_partial,
                keys_end, seqlen_k, window, scale_log2, threshold, keep_scale, 0, HEADDIM,
                BLOCK_N, STAGES, IS_RAGGED, HAS_LEFT, HAS_RIGHT, HAS_TAIL, HAS_DROPOUT, SUB,
                HAS_TOKENS, MASK_M,
            )),
            (_consume, (
                out_desc, lse_ptr, dropout_ptrs, buffers, barriers, position, walk, num_partial,
                keys_end, seqlen_k, window, scale_log2, threshold, keep_scale, 1, HEADDIM,
                BLOCK_N, STAGES, IS_RAGGED, HAS_LEFT, HAS_RIGHT, HAS_TAIL, HAS_DROPOUT, SUB,
                HAS_TOKENS, MASK_M,
            )),
        ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_produce, (
                (q_desc, k_desc, v_desc), buffers, barriers, position, walk, NUM_CONSUMERS,
                BLOCK_N, STAGES, IS_RAGGED, SUB,
            )),
            (_consume, (
                out_desc, lse_ptr, dropout_ptrs, buffers, barriers, position, walk, num_partial,
                keys_end, seqlen_k, window, scale_log2, threshold, keep_scale, 0, HEADDIM,
                BLOCK_N, STAGES, IS_RAGGED, HAS_LEFT, HAS_RIGHT, HAS_TAIL, HAS_DROPOUT, SUB,
                HAS_TOKENS, MASK_M,
            )),
            (_consume, (
                out_desc, lse_ptr, dropout_ptrs, buffers, barriers, position, walk, num_partial,
                keys_end, seqlen_k, window, scale_log2, threshold, keep_scale, 1, HEADDIM,
                BLOCK_N, STAGES, IS_RAGGED, HAS_LEFT, HAS_RIGHT, HAS_TAIL, HAS_DROPOUT, SUB,
                HAS_TOKENS, MASK_M,
            )),
            (_consume, (
                out_desc, lse_ptr, dropout_ptrs, buffers, barriers, position, walk, num_partial,
                keys_end, seqlen_k, window, scale_log2, threshold, keep_scale, 2, HEADDIM,
                BLOCK_N, STAGES, IS_RAGGED, HAS_LEFT, HAS_RIGHT, HAS_TAIL, HAS_DROPOUT, SUB,
                HAS_TOKENS, MASK_M,
            )),
        ], [4, 4, 4], [REGISTERS, REGISTERS, REGISTERS])  # fmt: skip
