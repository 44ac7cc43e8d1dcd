"""Forward of attention for Hopper (sm_90), in Gluon: the contract of portable/attention_forward.py.

One block owns NUM_CONSUMERS * 64 query rows of one head. Its first warpgroup is the producer: it
fills rings of K and V tiles by TMA. Each other warpgroup, a consumer, owns 64 rows and walks the
keys from the right, so that the tiles cut by a mask come first and hidden ones never load.

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

from ..portable import tiles
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
from .masking import hide

# Query rows of a warpgroup: one matrix instruction high.
ROWS: gl.constexpr = gl.constexpr(64)


@jit
def _produce(
    descs, buffers, barriers, position, NUM_CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Load Q once, then the K and V tiles num_tiles - 1 ... 0."""
    q_desc, k_desc, v_desc = descs
    q_smem, k_smem, v_smem = buffers
    q_full, k_full, k_empty, v_full, v_empty = barriers
    batch_index, head, head_k, row_begin, num_tiles = position
    for consumer in gl.static_range(NUM_CONSUMERS):
        mbarrier.expect(q_full.index(consumer), q_desc.block_type.nbytes)
        coords = [batch_index, head, row_begin + consumer * ROWS, 0]
        tma_load(q_desc, coords, q_full.index(consumer), q_smem.index(consumer))
    for index in range(num_tiles):
        stage, phase = ring(index, STAGES)
        coords = [batch_index, head_k, (num_tiles - 1 - index) * BLOCK_N, 0]
        # The wait for the phase before the first passes at once: the ring starts empty.
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
        tma_load(k_desc, coords, k_full.index(stage), k_smem.index(stage))
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
        tma_load(v_desc, coords, v_full.index(stage), v_smem.index(stage))


@jit
def _softmax(
    scores, row_max, row_sum, limits, tile, is_cut, scale_log2, BLOCK_N: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Online softmax in base 2: (probabilities, row_max, row_sum, decay of what came before).

    limits: keys that each row sees, from the first. is_cut: whether that hides any key of this
    tile; without MASKED it never does.
    """
    if MASKED:
        if is_cut:
            scores = hide(scores, limits - tile * BLOCK_N, BEFORE=False)
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
    column_keys_ptr, tile, LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr, HAS_DROPOUT: gl.constexpr
):
    """Dropout keys of a tile's columns [BLOCK_N]; without dropout anything, which nothing uses."""
    cols = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
    if HAS_DROPOUT:
        return gl.load(column_keys_ptr + cols)
    else:
        return cols


@jit
def _attend_tile(
    acc, probs, row_max, row_sum, q, buffers, barriers, limits, dropout_rows, column_keys_ptr,
    index, full, num_tiles, scale_log2, threshold, SCORES: gl.constexpr, PROBS: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HAS_DROPOUT: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of ring position `index`, beside probs @ v of the position before.

    On entry the K tile has arrived; on exit so has the next one, if there is one.
    """
    q_smem, k_smem, v_smem = buffers
    q_full, k_full, k_empty, v_full, v_empty = barriers
    row_keys, row_multipliers = dropout_rows
    stage, _ = ring(index, STAGES)
    stage_before, phase_before = ring(index - 1, STAGES)
    stage_after, phase_after = ring(index + 1, STAGES)
    tile = num_tiles - 1 - index
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    k = k_smem.index(stage).reshape([BLOCK_N, q.shape[1]])
    v = v_smem.index(stage_before).reshape([BLOCK_N, q.shape[1]])

    scores_token = warpgroup_mma(q, k.permute([1, 0]), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(stage_before), phase_before)
    acc_token = warpgroup_mma(probs, v, acc, is_async=True)
    column_keys = _load_column_keys(column_keys_ptr, tile, SCORES, BLOCK_N, HAS_DROPOUT)
    scores, acc_token = warpgroup_mma_wait(1, deps=[scores_token, acc_token])
    arrive_threads(k_empty.index(stage))
    values, row_max, row_sum, decay = _softmax(
        scores, row_max, row_sum, limits, tile, index < full, scale_log2, BLOCK_N, MASKED
    )
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
    out_desc, lse_ptr, dropout_ptrs, buffers, barriers, position, lengths, scale_log2, threshold,
    keep_scale, CONSUMER: gl.constexpr, HEADDIM: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, IS_CAUSAL: gl.constexpr, HAS_TAIL: gl.constexpr,
    HAS_DROPOUT: gl.constexpr,
):  # fmt: skip
    """64 query rows: out and lse. lse_ptr and dropout_ptrs point at this head's vectors."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADDIM, 16])
    PROBS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    q_smem, k_smem, v_smem = buffers
    q_full, k_full, k_empty, v_full, v_empty = barriers
    row_keys_ptr, row_multipliers_ptr, column_keys_ptr = dropout_ptrs
    batch_index, head, head_k, row_begin, num_tiles = position
    seqlen_q, seqlen_k = lengths
    q = q_smem.index(CONSUMER).reshape([ROWS, HEADDIM])
    row_begin += CONSUMER * ROWS
    rows = row_begin + gl.arange(0, ROWS, ROW)
    inside = rows < seqlen_q

    # Ring positions: [0, first) hold keys that no row here sees, [first, full) need the mask.
    first = num_tiles * 0
    full = first + 1
    limits = gl.full([ROWS], 0, gl.int32, ROW) + seqlen_k
    if IS_CAUSAL:
        shift = seqlen_k - seqlen_q
        limits = gl.minimum(limits, rows + (shift + 1))
        row_end = gl.minimum(row_begin + ROWS, seqlen_q)
        end = gl.minimum(seqlen_k, row_end + shift)
        full_end = gl.minimum(seqlen_k, gl.maximum(row_begin + shift + 1, 0))
        first = num_tiles - gl.maximum(gl.cdiv(end, BLOCK_N), 1)
        full = gl.maximum(first + 1, num_tiles - full_end // BLOCK_N)
        # 192 rows see at most one tile more than their first 64: position 0 in the first round of
        # the ring, where no earlier use of the buffer is open, so it is freed without a look.
        if first > 0:
            arrive_threads(k_empty.index(0))
            arrive_threads(v_empty.index(0))
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
    column_keys = _load_column_keys(
        column_keys_ptr, num_tiles - 1 - first, SCORES, BLOCK_N, HAS_DROPOUT
    )
    scores = warpgroup_mma_wait(0, deps=[scores_token])
    arrive_threads(k_empty.index(stage))
    values, row_max, row_sum, _ = _softmax(
        scores, row_max, row_sum, limits, num_tiles - 1 - first, True, scale_log2, BLOCK_N,
        IS_CAUSAL or HAS_TAIL,
    )  # fmt: skip
    if HAS_DROPOUT:
        values = zero_dropped(
            values, row_keys[:, None], row_multipliers[:, None], column_keys[None, :], threshold
        )
    probs = gl.convert_layout(values.to(q.dtype), PROBS, assert_trivial=True)
    mbarrier.wait(k_full.index(stage_after), phase_after, pred=first + 1 < num_tiles)
    for index in range(first + 1, num_tiles):
        acc, probs, row_max, row_sum = _attend_tile(
            acc, probs, row_max, row_sum, q, buffers, barriers, limits,
            (row_keys, row_multipliers), column_keys_ptr, index, full, num_tiles, scale_log2,
            threshold, SCORES, PROBS, BLOCK_N, STAGES, HAS_DROPOUT, IS_CAUSAL,
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
    tma_store(out_desc, [batch_index, head, row_begin, 0], q_smem.index(CONSUMER))
    store_wait(0)


_LENGTHS = [
    "nheads", "group_size", "num_heads", "seqlen_q", "seqlen_k", "num_row_tiles",
    "heads_per_group", "threshold",
]  # fmt: skip


@jit(do_not_specialize=_LENGTHS)
def attention_forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, row_keys_ptr, row_multipliers_ptr, column_keys_ptr,
    column_stride, nheads, group_size, num_heads, seqlen_q, seqlen_k, num_row_tiles,
    heads_per_group, scale_log2, threshold, keep_scale,
    NUM_CONSUMERS: gl.constexpr, HEADDIM: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, IS_CAUSAL: gl.constexpr, HAS_TAIL: gl.constexpr,
    HAS_DROPOUT: gl.constexpr,
):  # fmt: skip
    """Grid: (num_heads * num_row_tiles,) with num_heads = batch * nheads; 4 warps.

    Descriptors: (batch, heads, seqlen, headdim) in boxes of [1, 1, rows, HEADDIM]; zeros outside.
    HAS_TAIL: seqlen_k is not a multiple of BLOCK_N. At least one key. column_stride: a multiple of
    BLOCK_N, so that the loads of column keys need no mask.
    """
    q_smem = gl.allocate_shared_memory(
        q_desc.dtype, [NUM_CONSUMERS, 1, 1, ROWS, HEADDIM], q_desc.layout
    )
    k_smem = gl.allocate_shared_memory(
        k_desc.dtype, [STAGES, 1, 1, BLOCK_N, HEADDIM], k_desc.layout
    )
    v_smem = gl.allocate_shared_memory(
        v_desc.dtype, [STAGES, 1, 1, BLOCK_N, HEADDIM], v_desc.layout
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

    batch_head, row_tile = tiles.program_order(num_row_tiles, num_heads, heads_per_group, IS_CAUSAL)
    batch_index = batch_head // nheads
    head = batch_head % nheads
    head_k = head // group_size
    row_begin = row_tile * (NUM_CONSUMERS * ROWS)
    end = seqlen_k
    if IS_CAUSAL:
        row_end = gl.minimum(row_begin + NUM_CONSUMERS * ROWS, seqlen_q)
        end = gl.minimum(seqlen_k, row_end + seqlen_k - seqlen_q)
    # One tile at least: all its scores are masked where no key is visible.
    num_tiles = gl.maximum(gl.cdiv(end, BLOCK_N), 1)
    head_64 = batch_head.to(gl.int64)
    lse_ptr += head_64 * seqlen_q
    if HAS_DROPOUT:
        row_keys_ptr += head_64 * seqlen_q
        row_multipliers_ptr += head_64 * seqlen_q
        column_keys_ptr += head_64 * column_stride

    buffers = (q_smem, k_smem, v_smem)
    barriers = (q_full, k_full, k_empty, v_full, v_empty)
    dropout_ptrs = (row_keys_ptr, row_multipliers_ptr, column_keys_ptr)
    position = (batch_index, head, head_k, row_begin, num_tiles)
    lengths = (seqlen_q, seqlen_k)
    if NUM_CONSUMERS == 2:
        gl.warp_specialize([
            (_produce, (
                (q_desc, k_desc, v_desc), buffers, barriers, position, NUM_CONSUMERS, BLOCK_N,
                STAGES,
            )),
            (_consume, (
                out_desc, lse_ptr, dropout_ptrs, buffers, barriers, position, lengths, scale_log2,
                threshold, keep_scale, 0, HEADDIM, BLOCK_N, STAGES, IS_CAUSAL, HAS_TAIL,
                HAS_DROPOUT,
            )),
            (_consume, (
                out_desc, lse_ptr, dropout_ptrs, buffers, barriers, position, lengths, scale_log2,
                threshold, keep_scale, 1, HEADDIM, BLOCK_N, STAGES, IS_CAUSAL, HAS_TAIL,
                HAS_DROPOUT,
            )),
        ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_produce, (
                (q_desc, k_desc, v_desc), buffers, barriers, position, NUM_CONSUMERS, BLOCK_N,
                STAGES,
            )),
            (_consume, (
                out_desc, lse_ptr, dropout_ptrs, buffers, barriers, position, lengths, scale_log2,
                threshold, keep_scale, 0, HEADDIM, BLOCK_N, STAGES, IS_CAUSAL, HAS_TAIL,
                HAS_DROPOUT,
            )),
            (_consume, (
                out_desc, lse_ptr, dropout_ptrs, buffers, barriers, position, lengths, scale_log2,
                threshold, keep_scale, 1, HEADDIM, BLOCK_N, STAGES, IS_CAUSAL, HAS_TAIL,
                HAS_DROPOUT,
            )),
            (_consume, (
                out_desc, lse_ptr, dropout_ptrs, buffers, barriers, position, lengths, scale_log2,
                threshold, keep_scale, 2, HEADDIM, BLOCK_N, STAGES, IS_CAUSAL, HAS_TAIL,
                HAS_DROPOUT,
            )),
        ], [4, 4, 4], [REGISTERS, REGISTERS, REGISTERS])  # fmt: skip
