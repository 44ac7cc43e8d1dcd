"""Backward of attention for Hopper (sm_90), in Gluon: dk, dv and the sum of dq.

The formulas are those of portable/attention_backward.py, which also makes delta and the LSE in base
2. One block owns 128 keys of one key head and walks the query tiles that see them, of every query
head of its group. The first warpgroup is the producer, the other two, the consumers, own 64 keys
each and keep dk and dv in registers. Scores are transposed, keys along the rows, so that P^T and
dS^T feed the products for dv and dk from registers. dS^T also goes to shared memory, where both
consumers read all 128 keys for their half of dq, which TMA adds to a float32 tensor: the order of
those additions varies, so the last bits of dq do too.

A consumer's iteration, with what runs on the tensor cores beside it:
    issue S^T, dP^T           wait for S^T     P^T = exp2(S^T - lse)                        (dP^T)
    issue dv += P^T dO        wait for dP^T    dS^T = P^T (dP^T - delta), to shared memory    (dv)
    wait for the other consumer's dS^T
    issue dq = dS K, dk += dS^T Q              wait for dq, hand it to TMA                    (dk)
Nothing is in flight where the loop jumps back: ptxas then makes every product wait (C7514).

Barriers and their arrival counts, one phase for each use of the buffer:
    k_full, v_full    1: the producer's expect, completed by the bytes of two TMA loads. Used once.
    q_full, do_full   129: the expect, and the cp.async copies of each of the producer's 128
                      threads: lse beside Q, delta beside dO.
    keys_full         128: the cp.async copies of the rows' dropout keys. Freed by q_empty.
    q_empty, do_empty 256: every thread of both consumers, after its warpgroup waited for the
                      products that read the buffer; what was copied beside it is in registers.
    ds_full           2: each consumer after its half of dS^T is stored and fenced.
    done              2: each consumer after its last product. Used once: dk is stored where the
                      other consumer read K.
The two buffers of dS^T need no empty barriers: a consumer that writes buffer b again in iteration
i + 2 has passed ds_full of i + 1, at which the other arrived after it waited for its dq of i.
"""

from ..portable import tiles
from .gluon_api import (
    arrive_threads,
    async_arrive_after_copies,
    cp_async,
    dscores_of_signed,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    negate_dropped,
    partition_barrier,
    ring,
    round_positive,
    store_wait,
    tma_load,
    tma_reduce_add,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .masking import hide

# Keys of a consumer, and of a block.
KEYS: gl.constexpr = gl.constexpr(64)
BLOCK_KEYS: gl.constexpr = gl.constexpr(128)


@jit
def _next_tile(tile, head, first_tile, num_tiles):
    """The query tile after `tile`: of the same head, or the first of the next one."""
    is_last = tile + 1 == num_tiles
    return gl.where(is_last, first_tile, tile + 1), gl.where(is_last, head + 1, head)


@jit
def _copy_rows(smem, words_ptr, rows, seqlen_q):
    """cp.async of one of the four words of query rows; zeros from seqlen_q on."""
    cp_async(smem, words_ptr + rows * 4, mask=rows < seqlen_q)


@jit
def _produce(
    descs, row_ptrs, buffers, row_buffers, barriers, position, lengths, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, HAS_DROPOUT: gl.constexpr,
):  # fmt: skip
    """Load K and V once, then Q and dO with their row vectors."""
    q_desc, dout_desc, k_desc, v_desc = descs
    words_ptr, int_words_ptr = row_ptrs
    q_smem, dout_smem, k_smem, v_smem = buffers
    lse_smem, delta_smem, row_keys_smem, row_multipliers_smem = row_buffers
    k_full, v_full, q_full, q_empty, do_full, do_empty, keys_full = barriers
    batch_index, head, head_k, col_begin, first_tile, num_tiles, num_steps = position
    seqlen_q, seqlen_k, nheads, column_stride = lengths
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.expect(k_full.index(0), k_desc.block_type.nbytes * 2)
    mbarrier.expect(v_full.index(0), v_desc.block_type.nbytes * 2)
    for half in gl.static_range(2):
        coords = [batch_index, head_k, col_begin + half * KEYS, 0]
        tma_load(k_desc, coords, k_full.index(0), k_smem.index(half))
    for half in gl.static_range(2):
        coords = [batch_index, head_k, col_begin + half * KEYS, 0]
        tma_load(v_desc, coords, v_full.index(0), v_smem.index(half))
    tile = first_tile
    for index in range(num_steps):
        stage, phase = ring(index, STAGES)
        rows = tile * BLOCK_M + gl.arange(0, BLOCK_M, THREADS)
        offset = (batch_index * nheads + head).to(gl.int64) * seqlen_q * 4
        coords = [batch_index, head, tile * BLOCK_M, 0]
        # The wait for the phase before the first passes at once: the ring starts empty.
        mbarrier.wait(q_empty.index(stage), phase ^ 1)
        mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes)
        tma_load(q_desc, coords, q_full.index(stage), q_smem.index(stage))
        _copy_rows(lse_smem.index(stage), words_ptr + offset, rows, seqlen_q)
        async_arrive_after_copies(q_full.index(stage))
        if HAS_DROPOUT:
            _copy_rows(row_keys_smem.index(stage), int_words_ptr + offset + 2, rows, seqlen_q)
            _copy_rows(
                row_multipliers_smem.index(stage), int_words_ptr + offset + 3, rows, seqlen_q
            )
            async_arrive_after_copies(keys_full.index(stage))
        mbarrier.wait(do_empty.index(stage), phase ^ 1)
        mbarrier.expect(do_full.index(stage), dout_desc.block_type.nbytes)
        tma_load(dout_desc, coords, do_full.index(stage), dout_smem.index(stage))
        _copy_rows(delta_smem.index(stage), words_ptr + offset + 1, rows, seqlen_q)
        async_arrive_after_copies(do_full.index(stage))
        tile, head = _next_tile(tile, head, first_tile, num_tiles)


@jit
def _add_dq(
    dq, dq_desc, dq_smem, batch_index, head, tile, CONSUMER: gl.constexpr, BLOCK_M: gl.constexpr
):
    """Hand this consumer's part of dq to TMA, which adds it in global memory."""
    COLUMNS: gl.constexpr = dq.shape[1]
    own = dq_smem.index(CONSUMER)
    # TMA has read what was here before, and every warp knows.
    store_wait(0)
    partition_barrier()
    own.reshape([KEYS, COLUMNS]).store(dq)
    fence_async_shared()
    if BLOCK_M == 64:
        tma_reduce_add(dq_desc, [batch_index, head, tile * BLOCK_M, CONSUMER * COLUMNS], own)
    else:
        tma_reduce_add(dq_desc, [batch_index, head, tile * BLOCK_M + CONSUMER * 64, 0], own)


@jit
def _queries(ds, CONSUMER: gl.constexpr, BLOCK_M: gl.constexpr):
    """The columns of dS^T [KEYS, BLOCK_M] whose dq this consumer computes: 64 of 128, or all 64."""
    if BLOCK_M == 64:
        return ds
    else:
        return ds.slice(CONSUMER * 64, 64, dim=1)


@jit
def _dq_columns(keys, CONSUMER: gl.constexpr, BLOCK_M: gl.constexpr):
    """The columns of a K buffer [KEYS, HEADDIM] whose dq this consumer computes: a half, or all."""
    HEADDIM: gl.constexpr = keys.shape[3]
    keys = keys.reshape([KEYS, HEADDIM])
    if BLOCK_M == 64:
        return keys.slice(CONSUMER * (HEADDIM // 2), HEADDIM // 2, dim=1)
    else:
        return keys


@jit
def _consume(
    descs, column_keys_ptr, buffers, row_buffers, ds_smem, dq_smem, barriers, ds_full, done,
    position, lengths, scale_log2, dk_scale, dv_scale, threshold,
    CONSUMER: gl.constexpr, HEADDIM: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    IS_CAUSAL: gl.constexpr, HAS_TAIL: gl.constexpr, HAS_DROPOUT: gl.constexpr,
):  # fmt: skip
    """64 keys: dk, dv, and half of every dq tile."""
    dk_desc, dv_desc, dq_desc = descs
    batch_index, head, head_k, col_begin, first_tile, num_tiles, num_steps = position
    seqlen_q, seqlen_k, nheads, column_stride = lengths
    DQ_COLUMNS: gl.constexpr = HEADDIM * BLOCK_M // 128
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADDIM, 16])
    QUERIES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_COLUMNS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=GRADS, k_width=2)
    KEY: gl.constexpr = gl.SliceLayout(1, SCORES)
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    q_smem, dout_smem, k_smem, v_smem = buffers
    lse_smem, delta_smem, row_keys_smem, row_multipliers_smem = row_buffers
    k_full, v_full, q_full, q_empty, do_full, do_empty, keys_full = barriers
    dtype: gl.constexpr = q_smem.dtype
    k = k_smem.index(CONSUMER).reshape([KEYS, HEADDIM])
    v = v_smem.index(CONSUMER).reshape([KEYS, HEADDIM])

    # bounds: the first query row that sees each key. Tiles that begin before `cut` need the mask.
    col_begin += CONSUMER * KEYS
    cols = col_begin + gl.arange(0, KEYS, KEY)
    bounds = cols * 0
    cut = col_begin * 0
    if IS_CAUSAL:
        bounds = cols - (seqlen_k - seqlen_q)
        cut = col_begin + KEYS - 1 - (seqlen_k - seqlen_q)
    if IS_CAUSAL or HAS_TAIL:
        # Rows of K behind the last key are zero, but exp2(0 - lse) may be infinite.
        bounds = gl.where(cols < seqlen_k, bounds, 2**30)
        cut = gl.where(col_begin + KEYS > seqlen_k, 2**30, cut)

    dk = gl.zeros([KEYS, HEADDIM], gl.float32, GRADS)
    dv = gl.zeros([KEYS, HEADDIM], gl.float32, GRADS)
    zero_scores = gl.zeros([KEYS, BLOCK_M], gl.float32, SCORES)
    zero_dq = gl.zeros([KEYS, DQ_COLUMNS], gl.float32, QUERIES)
    mbarrier.wait(k_full.index(0), 0)
    mbarrier.wait(v_full.index(0), 0)
    tile = first_tile
    column_keys = cols
    for index in range(num_steps):
        stage, phase = ring(index, STAGES)
        half, half_phase = ring(index, 2)
        q = q_smem.index(stage).reshape([BLOCK_M, HEADDIM])
        dout = dout_smem.index(stage).reshape([BLOCK_M, HEADDIM])
        if HAS_DROPOUT:
            offset = (batch_index * nheads + head).to(gl.int64) * column_stride
            column_keys = gl.load(column_keys_ptr + offset + cols)

        mbarrier.wait(q_full.index(stage), phase)
        scores_token = warpgroup_mma(
            k, q.permute([1, 0]), zero_scores, use_acc=False, is_async=True
        )
        mbarrier.wait(do_full.index(stage), phase)
        dprobs_token = warpgroup_mma(
            v, dout.permute([1, 0]), zero_scores, use_acc=False, is_async=True
        )
        scores, dprobs_token = warpgroup_mma_wait(1, deps=[scores_token, dprobs_token])
        if IS_CAUSAL or HAS_TAIL:
            if tile * BLOCK_M < cut:
                scores = hide(scores, bounds - tile * BLOCK_M, BEFORE=True)
        lse = lse_smem.index(stage).load(ROW)
        probs = gl.exp2(scores * scale_log2 - lse[None, :])
        if HAS_DROPOUT:
            # This wait ends the basic block, so that no key takes a register before the
            # exponentials are done.
            mbarrier.wait(keys_full.index(stage), phase)
            # The sign keeps what is dropped: negative there.
            probs = negate_dropped(
                probs,
                row_keys_smem.index(stage).load(ROW)[None, :],
                row_multipliers_smem.index(stage).load(ROW)[None, :],
                column_keys[:, None],
                threshold,
            )
            kept = round_positive(probs, dtype)
        else:
            kept = probs.to(dtype)
        operand = gl.convert_layout(kept, OPERAND, assert_trivial=True)
        dv_token = warpgroup_mma(operand, dout, dv, is_async=True)
        dprobs, dv_token = warpgroup_mma_wait(1, deps=[dprobs_token, dv_token])
        delta = delta_smem.index(stage).load(ROW)
        if HAS_DROPOUT:
            dscores = dscores_of_signed(probs, dprobs, delta[None, :])
        else:
            dscores = probs * (dprobs - delta[None, :])
        dscores = dscores.to(dtype)
        ds_smem.index(half * 2 + CONSUMER).store(dscores)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(half))
        mbarrier.wait(ds_full.index(half), half_phase)
        dq_token = warpgroup_mma(
            _queries(ds_smem.index(half * 2), CONSUMER, BLOCK_M).permute([1, 0]),
            _dq_columns(k_smem.index(0), CONSUMER, BLOCK_M), zero_dq, use_acc=False, is_async=True,
        )  # fmt: skip
        dq_token = warpgroup_mma(
            _queries(ds_smem.index(half * 2 + 1), CONSUMER, BLOCK_M).permute([1, 0]),
            _dq_columns(k_smem.index(1), CONSUMER, BLOCK_M), dq_token, is_async=True,
        )  # fmt: skip
        operand = gl.convert_layout(dscores, OPERAND, assert_trivial=True)
        dk_token = warpgroup_mma(operand, q, dk, is_async=True)
        dv, dq, dk_token = warpgroup_mma_wait(1, deps=[dv_token, dq_token, dk_token])
        arrive_threads(do_empty.index(stage))
        _add_dq(dq, dq_desc, dq_smem, batch_index, head, tile, CONSUMER, BLOCK_M)
        dk = warpgroup_mma_wait(0, deps=[dk_token])
        arrive_threads(q_empty.index(stage))
        tile, head = _next_tile(tile, head, first_tile, num_tiles)

    mbarrier.arrive(done.index(0))
    mbarrier.wait(done.index(0), 0)
    k.store((dk * dk_scale).to(dtype))
    v.store((dv * dv_scale).to(dtype))
    fence_async_shared()
    tma_store(dk_desc, [batch_index, head_k, col_begin, 0], k_smem.index(CONSUMER))
    tma_store(dv_desc, [batch_index, head_k, col_begin, 0], v_smem.index(CONSUMER))
    store_wait(0)


_LENGTHS = [
    "nheads", "group_size", "num_heads", "seqlen_q", "seqlen_k", "num_col_tiles",
    "heads_per_group", "threshold",
]  # fmt: skip


@jit(do_not_specialize=_LENGTHS)
def attention_backward_kernel(
    q_desc, dout_desc, k_desc, v_desc, dk_desc, dv_desc, dq_desc, words_ptr, int_words_ptr,
    column_keys_ptr, column_stride, nheads, group_size, num_heads, seqlen_q,
    seqlen_k, num_col_tiles, heads_per_group, scale_log2, dk_scale, dv_scale, threshold,
    HEADDIM: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    IS_CAUSAL: gl.constexpr, HAS_TAIL: gl.constexpr, HAS_DROPOUT: gl.constexpr,
):  # fmt: skip
    """Grid: (num_heads * num_col_tiles,) with num_heads = batch * nheads_k; 4 warps.

    Descriptors: (batch, heads, seqlen, headdim) in boxes of [1, 1, rows, columns]; zeros outside.
    words_ptr: what delta_kernel of portable/attention_backward.py writes, (batch, nheads, seqlen_q,
    4); int_words_ptr: the same as int32.
    HAS_TAIL: seqlen_k is not a multiple of BLOCK_KEYS. At least one key. column_stride: a multiple
    of BLOCK_KEYS.
    """
    dtype: gl.constexpr = q_desc.dtype
    k_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, KEYS, HEADDIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, KEYS, HEADDIM], v_desc.layout)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, HEADDIM], q_desc.layout)
    dout_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, HEADDIM], dout_desc.layout)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, BLOCK_M], dtype)
    ds_smem = gl.allocate_shared_memory(dtype, [4, KEYS, BLOCK_M], DS)
    dq_smem = gl.allocate_shared_memory(
        gl.float32, [2, 1, 1, KEYS, HEADDIM * BLOCK_M // 128], dq_desc.layout
    )
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], VECTOR)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], VECTOR)
    row_keys_smem = lse_smem
    row_multipliers_smem = lse_smem
    if HAS_DROPOUT:
        row_keys_smem = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_M], VECTOR)
        row_multipliers_smem = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_M], VECTOR)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    keys_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    done = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    mbarrier.init(k_full.index(0), count=1)
    mbarrier.init(v_full.index(0), count=1)
    mbarrier.init(done.index(0), count=2)
    for half in gl.static_range(2):
        mbarrier.init(ds_full.index(half), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(q_full.index(stage), count=129)
        mbarrier.init(do_full.index(stage), count=129)
        mbarrier.init(keys_full.index(stage), count=128)
        mbarrier.init(q_empty.index(stage), count=256)
        mbarrier.init(do_empty.index(stage), count=256)
    fence_async_shared()

    batch_head, col_tile = tiles.program_order(num_col_tiles, num_heads, heads_per_group, False)
    nheads_k = nheads // group_size
    batch_index = batch_head // nheads_k
    head_k = batch_head % nheads_k
    head = head_k * group_size
    col_begin = col_tile * BLOCK_KEYS
    num_tiles = gl.cdiv(seqlen_q, BLOCK_M)
    first_tile = num_tiles * 0
    if IS_CAUSAL:
        # Some query sees the first key of the block: the last one sees every key.
        first_tile = gl.maximum(col_begin - (seqlen_k - seqlen_q), 0) // BLOCK_M
    num_steps = (num_tiles - first_tile) * group_size

    buffers = (q_smem, dout_smem, k_smem, v_smem)
    row_buffers = (lse_smem, delta_smem, row_keys_smem, row_multipliers_smem)
    barriers = (k_full, v_full, q_full, q_empty, do_full, do_empty, keys_full)
    position = (batch_index, head, head_k, col_begin, first_tile, num_tiles, num_steps)
    lengths = (seqlen_q, seqlen_k, nheads, column_stride)
    gl.warp_specialize([
        (_produce, (
            (q_desc, dout_desc, k_desc, v_desc),
            (words_ptr, int_words_ptr), buffers, row_buffers, barriers,
            position, lengths, BLOCK_M, STAGES, HAS_DROPOUT,
        )),
        (_consume, (
            (dk_desc, dv_desc, dq_desc), column_keys_ptr, buffers, row_buffers, ds_smem, dq_smem,
            barriers, ds_full, done, position, lengths, scale_log2, dk_scale, dv_scale, threshold,
            0, HEADDIM, BLOCK_M, STAGES, IS_CAUSAL, HAS_TAIL, HAS_DROPOUT,
        )),
        (_consume, (
            (dk_desc, dv_desc, dq_desc), column_keys_ptr, buffers, row_buffers, ds_smem, dq_smem,
            barriers, ds_full, done, position, lengths, scale_log2, dk_scale, dv_scale, threshold,
            1, HEADDIM, BLOCK_M, STAGES, IS_CAUSAL, HAS_TAIL, HAS_DROPOUT,
        )),
    ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip
