"""Forward of attention for Hopper (sm_90), in Gluon: the contract of portable/attention_forward.py.

A block works through tiles of NUM_CONSUMERS * 64 query rows of one head. Its first warpgroup is
the producer (forward_producer.py): it takes row tiles, fills rings of K and V tiles by TMA, and
begins the next row tile while the consumers end the last one. Each other warpgroup, a consumer,
owns 64 rows and walks the keys from the right, so that the tiles cut by a causal mask come first
and hidden ones never load. With a block mask the walk is the mask's list of the rows, partial
blocks first. A position of the walk means the same tile to the producer and to the consumers.

FlashAttention-3 (arXiv 2407.08608), algorithm 2: the scores of a tile are issued before the product
of probabilities and values of the tile before, whose matrix instructions then run beside the
softmax. What differs: consumers are not synchronised with each other.

Barriers and their arrival counts, one phase for each use of the buffer:
    q_full[t, c]      1: the producer's expect, completed by the bytes of the TMA load, or its
                      arrival when no row tile is left. It publishes the number of the row tile,
                      too. Row tiles take the two sets t of Q buffers in turn.
    q_empty[t, c]     1: consumer c, once TMA has read the output that it left in the buffer.
    k_full, v_full    1: like q_full.
    k_empty, v_empty  NUM_CONSUMERS: every consumer, once each tile, after its warpgroup waited for
                      the matrix instructions that read the buffer.
"""

from ..portable import tiles
from .addressing import coordinates
from .forward_producer import ROWS, locate, produce, receive
from .forward_softmax import load_column_keys, online_softmax
from .gluon_api import (
    arrive_warpgroup,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    ring,
    store_wait,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
    zero_dropped,
)


@jit
def _attend_tile(
    acc, probs, row_max, row_sum, q, buffers, barriers, seen, lists, start, dropout_rows,
    column_keys_ptr, index, base, num_tiles, keys_end, scale_log2, threshold, SCORES: gl.constexpr,
    PROBS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HAS_DROPOUT: gl.constexpr,
    SUB: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_TOKENS: gl.constexpr, MASK_M: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of position `index`, beside probs @ v of the position before.

    base: uses of the ring before this walk.

    On entry the K tile has arrived; on exit so has the next one, if there is one.
    """
    q_smem, k_smem, v_smem = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    row_keys, row_multipliers = dropout_rows
    stage, _ = ring(base + index, STAGES)
    stage_before, phase_before = ring(base + index - 1, STAGES)
    stage_after, phase_after = ring(base + index + 1, STAGES)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    k = k_smem.index(stage).reshape([BLOCK_N, q.shape[1]])
    v = v_smem.index(stage_before).reshape([BLOCK_N, q.shape[1]])

    scores_token = warpgroup_mma(q, k.permute([1, 0]), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(stage_before), phase_before)
    acc_token = warpgroup_mma(probs, v, acc, is_async=True)
    column_keys = load_column_keys(
        column_keys_ptr, lists, start, index, keys_end, SCORES, BLOCK_N, SUB, HAS_DROPOUT
    )
    scores, acc_token = warpgroup_mma_wait(1, deps=[scores_token, acc_token])
    values, row_max, row_sum, decay = online_softmax(
        scores, row_max, row_sum, seen, lists, start, index, scale_log2, BLOCK_N, SUB, HAS_LEFT,
        HAS_TOKENS, MASK_M, MASKED,
    )  # fmt: skip
    # This wait ends the basic block. Without it ptxas moves the next one, which nothing ties to the
    # softmax, ahead of every exponential, and the products no longer run beside them.
    mbarrier.wait(k_full.index(stage_after), phase_after, pred=index + 1 < num_tiles)
    acc, values, row_sum = warpgroup_mma_wait(0, deps=[acc_token, values, row_sum])
    arrive_warpgroup(k_empty.index(stage))
    mbarrier.arrive(v_empty.index(stage_before), count=1)
    # Behind that wait, where ptxas cannot compare early and then store 64 predicates.
    if HAS_DROPOUT:
        values = zero_dropped(
            values, row_keys[:, None], row_multipliers[:, None], column_keys[None, :], threshold
        )
    probs = gl.convert_layout(values.to(q.dtype), PROBS, assert_trivial=True)
    decay = gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)
    return acc * decay[:, None], probs, row_max, row_sum


@jit
def _attend_rows(
    out_desc, row_ptrs, buffers, barriers, lists, place_q, keys_end, head, row_begin, walk, window,
    slot, turn, base, scale_log2, threshold, keep_scale, CONSUMER: gl.constexpr,
    NUM_CONSUMERS: gl.constexpr, HEADDIM: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, IS_RAGGED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_TAIL: gl.constexpr, HAS_DROPOUT: gl.constexpr, SUB: gl.constexpr, MASK_M: gl.constexpr,
    HAS_TOKENS: gl.constexpr,
):  # fmt: skip
    """64 query rows: out and lse. row_ptrs: lse and the dropout keys of this sequence and head.

    slot: of the Q buffer. turn: row tiles before this one, base: key tiles before its first.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADDIM, 16])
    PROBS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    MASKED: gl.constexpr = HAS_LEFT or HAS_RIGHT or SUB > 0
    q_smem, k_smem, v_smem = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    lse_ptr, row_keys_ptr, row_multipliers_ptr, column_keys_ptr = row_ptrs
    num_tiles, start, num_partial, seqlen_k = walk
    seqlen_q = place_q[2]
    window_left, window_right = window
    q = q_smem.index(slot).reshape([ROWS, HEADDIM])
    row_begin += CONSUMER * ROWS
    rows = row_begin + gl.arange(0, ROWS, ROW)
    inside = rows < seqlen_q

    # Positions [0, first) hold keys that no row here sees, [first, full) and those from `left` on
    # need the mask.
    first = num_tiles * 0
    full = first + 1
    left = num_tiles
    mask_line = row_begin
    shift = seqlen_k - seqlen_q
    starts = rows
    limits = rows * 0 + keys_end
    if HAS_LEFT:
        starts = rows + (shift - window_left)
    if HAS_RIGHT:
        limits = gl.minimum(limits, rows + (shift + window_right + 1))
    if SUB > 0:
        full = num_partial
        mask_line = row_begin % MASK_M
    else:
        row_end = gl.minimum(row_begin + ROWS, seqlen_q)
        if HAS_LEFT:
            # The tiles before the first one that all rows see whole.
            full_begin = gl.maximum(row_end - 1 + shift - window_left, 0)
            left = start + 1 - gl.cdiv(full_begin, BLOCK_N)
        if HAS_RIGHT:
            end = gl.minimum(keys_end, row_end + shift + window_right)
            full_end = gl.minimum(keys_end, gl.maximum(row_begin + shift + window_right + 1, 0))
            first = start + 1 - gl.maximum(gl.cdiv(end, BLOCK_N), 1)
            full = gl.maximum(first + 1, start + 1 - full_end // BLOCK_N)
            # 192 rows see at most one tile more than their first 64. It has to be there: the other
            # consumers may still be at the use of the buffer before.
            if first > 0:
                stage, phase = ring(base, STAGES)
                mbarrier.wait(k_full.index(stage), phase)
                arrive_warpgroup(k_empty.index(stage))
                mbarrier.wait(v_full.index(stage), phase)
                arrive_warpgroup(v_empty.index(stage))
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
    stage, phase = ring(base + first, STAGES)
    stage_after, phase_after = ring(base + first + 1, STAGES)
    mbarrier.wait(k_full.index(stage), phase)
    k = k_smem.index(stage).reshape([BLOCK_N, HEADDIM])
    scores_token = warpgroup_mma(q, k.permute([1, 0]), zeros, use_acc=False, is_async=True)
    column_keys = load_column_keys(
        column_keys_ptr, lists, start, first, keys_end, SCORES, BLOCK_N, SUB, HAS_DROPOUT
    )
    if turn > 0:
        # By now TMA has read the output of the row tile before.
        store_wait(0)
        arrive_warpgroup(q_empty.index(NUM_CONSUMERS + 2 * CONSUMER - slot))
    scores = warpgroup_mma_wait(0, deps=[scores_token])
    arrive_warpgroup(k_empty.index(stage))
    values, row_max, row_sum, _ = online_softmax(
        scores, row_max, row_sum, seen, lists, start, first, scale_log2, BLOCK_N, SUB, HAS_LEFT,
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
            acc, probs, row_max, row_sum, q, buffers, barriers, seen, lists, start,
            (row_keys, row_multipliers), column_keys_ptr, index, base, num_tiles, keys_end,
            scale_log2, threshold, SCORES, PROBS, BLOCK_N, STAGES, HAS_DROPOUT, SUB, HAS_LEFT,
            HAS_TOKENS, MASK_M, MASKED,
        )  # fmt: skip
    stage, phase = ring(base + num_tiles - 1, STAGES)
    mbarrier.wait(v_full.index(stage), phase)
    v = v_smem.index(stage).reshape([BLOCK_N, HEADDIM])
    acc_token = warpgroup_mma(probs, v, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc_token])
    arrive_warpgroup(v_empty.index(stage))

    # A row that saw no key keeps row_max = -inf and row_sum = 0: out = 0 and lse = -inf.
    normaliser = gl.where(row_sum == 0.0, 1.0, row_sum)
    gl.store(lse_ptr + rows, (row_max + gl.log2(normaliser)) * tiles.LN2, mask=inside)
    factor = gl.convert_layout(keep_scale / normaliser, gl.SliceLayout(1, OUT), assert_trivial=True)
    # Every matrix instruction that reads this consumer's Q has been waited for.
    q.store((acc * factor[:, None]).to(q.dtype))
    fence_async_shared()
    tma_store(out_desc, coordinates(place_q, head, row_begin, 0, IS_RAGGED), q_smem.index(slot))


@jit
def _consume(
    out_desc, row_ptrs, row_strides, buffers, barriers, index_ptrs, sizes, window, scale_log2,
    threshold, keep_scale, CONSUMER: gl.constexpr, NUM_CONSUMERS: gl.constexpr,
    HEADDIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, IS_VARLEN: gl.constexpr,
    HAS_LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_TAIL: gl.constexpr, HAS_DROPOUT: gl.constexpr, MASK_M: gl.constexpr, MASK_N: gl.constexpr,
    HAS_TOKENS: gl.constexpr,
):  # fmt: skip
    """The rows of one consumer in every row tile."""
    lse_ptr, row_keys_ptr, row_multipliers_ptr, column_keys_ptr = row_ptrs
    lse_strides, column_strides = row_strides
    items, q_smem, k_smem, v_smem = buffers
    turn = sizes[0] * 0
    base = turn
    item, slot = receive(items, barriers[0], turn, CONSUMER, NUM_CONSUMERS)
    while item >= 0:
        place_q, place_k, head, row_begin, walk = locate(
            item, index_ptrs, sizes, window, NUM_CONSUMERS * ROWS, BLOCK_N, IS_VARLEN, HAS_LENGTHS,
            HAS_LEFT, HAS_RIGHT, MASK_M, MASK_N,
        )  # fmt: skip
        batch_64, head_64 = place_q[0].to(gl.int64), head.to(gl.int64)
        offset = batch_64 * lse_strides[0] + head_64 * lse_strides[1]
        column_offset = batch_64 * column_strides[0] + head_64 * column_strides[1]
        if IS_VARLEN:
            offset += place_q[1]
            column_offset += place_k[1]
        if HAS_DROPOUT:
            own_ptrs = (
                lse_ptr + offset, row_keys_ptr + offset, row_multipliers_ptr + offset,
                column_keys_ptr + column_offset,
            )  # fmt: skip
        else:
            own_ptrs = (lse_ptr + offset, None, None, None)
        _attend_rows(
            out_desc, own_ptrs, (q_smem, k_smem, v_smem), barriers, index_ptrs[3], place_q,
            place_k[2], head, row_begin, walk, window, slot, turn, base, scale_log2, threshold,
            keep_scale, CONSUMER, NUM_CONSUMERS, HEADDIM, BLOCK_N, STAGES,
            IS_VARLEN or HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, HAS_TAIL, HAS_DROPOUT,
            MASK_N // BLOCK_N, MASK_M, HAS_TOKENS,
        )  # fmt: skip
        turn += 1
        base += walk[0]
        item, slot = receive(items, barriers[0], turn, CONSUMER, NUM_CONSUMERS)
    store_wait(0)


_LENGTHS = ["row_strides", "sizes", "group_size", "num_items", "window", "threshold"]


@jit(do_not_specialize=_LENGTHS)
def attention_forward_kernel(
    q_desc, k_desc, v_desc, out_desc, row_ptrs, row_strides, counter_ptr, index_ptrs, sizes,
    group_size, num_items, window, scale_log2, threshold, keep_scale,
    NUM_CONSUMERS: gl.constexpr, HEADDIM: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, IS_VARLEN: gl.constexpr,
    HAS_LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_TAIL: gl.constexpr, HAS_DROPOUT: gl.constexpr, MASK_M: gl.constexpr, MASK_N: gl.constexpr,
    HAS_TOKENS: gl.constexpr,
):  # fmt: skip
    """Grid: at most num_items = num_row_tiles * batch * nheads, best one for each multiprocessor;
    4 warps.

    counter_ptr: an int32 zero for row tiles that take different times, else None.

    Descriptors: of launch.py, in boxes of one head, `rows` rows and HEADDIM columns; zeros outside.
    row_ptrs: lse, the dropout keys of rows, their multipliers, the dropout keys of columns, which
    can be read a tile beyond the last one, so that no load needs a mask. row_strides: (batch, head)
    strides of the first three and of the last. index_ptrs, sizes: of forward_producer.locate, the
    token masks packed by rows. HAS_TAIL: the last tile may hold keys that are none. MASK_M is a
    multiple of the rows of a tile, MASK_N of BLOCK_N.
    """
    q_smem = gl.allocate_shared_memory(
        q_desc.dtype, [2 * NUM_CONSUMERS] + q_desc.block_type.shape, q_desc.layout
    )
    k_smem = gl.allocate_shared_memory(
        k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout
    )
    v_smem = gl.allocate_shared_memory(
        v_desc.dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout
    )
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2 * NUM_CONSUMERS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [2 * NUM_CONSUMERS, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for slot in gl.static_range(2 * NUM_CONSUMERS):
        mbarrier.init(q_full.index(slot), count=1)
        mbarrier.init(q_empty.index(slot), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=NUM_CONSUMERS)
        mbarrier.init(v_empty.index(stage), count=NUM_CONSUMERS)
    fence_async_shared()

    items = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    buffers = (items, q_smem, k_smem, v_smem)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    if NUM_CONSUMERS == 2:
        gl.warp_specialize([
            (produce, (
                (q_desc, k_desc, v_desc), buffers, barriers, counter_ptr, index_ptrs, sizes,
                group_size, num_items, window, NUM_CONSUMERS, BLOCK_N, STAGES, IS_VARLEN,
                HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, MASK_M, MASK_N,
            )),
            (_consume, (
                out_desc, row_ptrs, row_strides, buffers, barriers, index_ptrs, sizes, window,
                scale_log2, threshold, keep_scale, 0, NUM_CONSUMERS, HEADDIM, BLOCK_N,
                STAGES, IS_VARLEN, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, HAS_TAIL, HAS_DROPOUT, MASK_M,
                MASK_N, HAS_TOKENS,
            )),
            (_consume, (
                out_desc, row_ptrs, row_strides, buffers, barriers, index_ptrs, sizes, window,
                scale_log2, threshold, keep_scale, 1, NUM_CONSUMERS, HEADDIM, BLOCK_N,
                STAGES, IS_VARLEN, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, HAS_TAIL, HAS_DROPOUT, MASK_M,
                MASK_N, HAS_TOKENS,
            )),
        ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (produce, (
                (q_desc, k_desc, v_desc), buffers, barriers, counter_ptr, index_ptrs, sizes,
                group_size, num_items, window, NUM_CONSUMERS, BLOCK_N, STAGES, IS_VARLEN,
                HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, MASK_M, MASK_N,
            )),
            (_consume, (
                out_desc, row_ptrs, row_strides, buffers, barriers, index_ptrs, sizes, window,
                scale_log2, threshold, keep_scale, 0, NUM_CONSUMERS, HEADDIM, BLOCK_N,
                STAGES, IS_VARLEN, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, HAS_TAIL, HAS_DROPOUT, MASK_M,
                MASK_N, HAS_TOKENS,
            )),
            (_consume, (
                out_desc, row_ptrs, row_strides, buffers, barriers, index_ptrs, sizes, window,
                scale_log2, threshold, keep_scale, 1, NUM_CONSUMERS, HEADDIM, BLOCK_N,
                STAGES, IS_VARLEN, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, HAS_TAIL, HAS_DROPOUT, MASK_M,
                MASK_N, HAS_TOKENS,
            )),
            (_consume, (
                out_desc, row_ptrs, row_strides, buffers, barriers, index_ptrs, sizes, window,
                scale_log2, threshold, keep_scale, 2, NUM_CONSUMERS, HEADDIM, BLOCK_N,
                STAGES, IS_VARLEN, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, HAS_TAIL, HAS_DROPOUT, MASK_M,
                MASK_N, HAS_TOKENS,
            )),
        ], [4, 4, 4], [REGISTERS, REGISTERS, REGISTERS])  # fmt: skip
