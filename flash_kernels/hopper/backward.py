"""Backward of attention for Hopper (sm_90), in Gluon: dk, dv and the sum of dq.

The formulas are those of portable/attention_backward.py, which also makes delta and the LSE in base
2. One block owns 128 keys of one key head and walks the query tiles that see them, of every query
head of its group: a range of tiles, or with a block mask its list of the column, partial blocks
first. The first warpgroup is the producer, the other two, the consumers, own 64 keys
each and keep dk and dv in registers. Scores are transposed, keys along the rows, so that P^T and
dS^T feed the products for dv and dk from registers. dS^T also goes to shared memory, where both
consumers read all 128 keys for their half of dq, which TMA adds to a float32 tensor: the order of
those additions varies, so the last bits of dq do too.

A consumer's iteration, with what runs on the tensor cores beside it:
    issue S^T, dP^T                wait for S^T    P^T = exp2(S^T - lse)                    (dP^T)
    wait for dP^T                  dS^T = P^T (dP^T - delta)
    issue dv += P^T dO             dS^T to shared memory                                    (dv)
    issue dk += dS^T Q             wait for the other consumer's dS^T                   (dv, dk)
    issue dq = dS K                wait for dv, dk, dq in turn; hand dq to TMA
Issuing dv ahead of dS^T would keep two more operands in registers, which then spill. Nothing is in
flight where the loop jumps back: ptxas then makes every product wait (C7514).

Barriers and their arrival counts, one phase for each use of the buffer:
    k_full, v_full    1: the producer's expect, completed by the bytes of two TMA loads. Used once.
    q_full            1: the expect, completed by the bytes of Q.
    do_full           2: the expect, completed by the bytes of dO, and the producer once its threads
                      have stored the words of the rows: lse, delta, dropout keys.
    ds_full           2: each consumer after its half of dS^T is stored and fenced.
    done              2: each consumer after its last product. Used once: dk is stored where the
                      other consumer read K.
And barriers of the hardware, by number, at which a warp arrives without waiting for the other warps
of its partition:
    empty[stage]      each consumer arrives when it has waited for the products that read Q and dO
                      and holds the words in registers; the producer waits from the second use on.
    ds_full[half, c]  instead of the one above, where NAMES_DS: consumer c arrives, the other waits.
The two buffers of dS^T need no empty barriers: a consumer that writes buffer b again in iteration
i + 2 has passed ds_full of i + 1, at which the other arrived after it waited for its dq of i.
"""

from ..portable import tiles
from .addressing import coordinates, sequence_place
from .backward_producer import BLOCK_KEYS, EMPTY_THREADS, KEYS, produce, tile_at, walk_of_head
from .gluon_api import (
    FIRST_NAMED,
    arrive_warpgroup,
    dscores_of_signed,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    named_arrive,
    named_sync,
    negate_dropped,
    partition_barrier,
    ring,
    round_positive,
    store_wait,
    tma_reduce_add,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .masking import hide, hide_tokens


@jit
def _await_dq():
    """TMA has read this consumer's last dq, and every warp knows."""
    store_wait(0)
    partition_barrier()


@jit
def _add_dq(
    dq, dq_desc, dq_smem, place_q, head, tile, CONSUMER: gl.constexpr, BLOCK_M: gl.constexpr,
    IS_RAGGED: gl.constexpr,
):  # fmt: skip
    """Hand this consumer's part of dq to TMA, which adds it in global memory. TMA must have read
    what the buffer held."""
    COLUMNS: gl.constexpr = dq.shape[1]
    own = dq_smem.index(CONSUMER)
    own.reshape([KEYS, COLUMNS]).store(dq)
    fence_async_shared()
    row = tile * BLOCK_M
    column = 0
    if BLOCK_M == 64:
        column = CONSUMER * COLUMNS
    else:
        row += CONSUMER * 64
    tma_reduce_add(dq_desc, coordinates(place_q, head, row, column, IS_RAGGED), own)


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
    HEADDIM: gl.constexpr = keys.shape[len(keys.shape) - 1]
    keys = keys.reshape([KEYS, HEADDIM])
    if BLOCK_M == 64:
        return keys.slice(CONSUMER * (HEADDIM // 2), HEADDIM // 2, dim=1)
    else:
        return keys


@jit
def _hide_unseen(
    scores, tile, seen, walk, position, is_partial, BLOCK_M: gl.constexpr, HAS_LEFT: gl.constexpr,
    IS_CUT: gl.constexpr, SUB: gl.constexpr, HAS_TOKENS: gl.constexpr, MASK_N: gl.constexpr,
):  # fmt: skip
    """-inf in S^T [KEYS, BLOCK_M] where a query does not see a key.

    seen: (first query row that sees each key, and the one after the last; the tiles that begin
    before `cut` or end behind `cut_left` need the mask; the first key in its block of the mask).
    With a block mask those before its full blocks do. Without IS_CUT every key is seen.
    """
    starts, ends, cut, cut_left, mask_line = seen
    row_begin = tile * BLOCK_M
    if SUB > 0:
        if is_partial:
            scores = hide(scores, starts - row_begin, BEFORE=True)
            if HAS_LEFT:
                scores = hide(scores, ends - row_begin, BEFORE=False)
            if HAS_TOKENS:
                scores = hide_tokens(scores, walk[0], position, mask_line, SUB, MASK_N)
    elif IS_CUT:
        if row_begin < cut:
            scores = hide(scores, starts - row_begin, BEFORE=True)
        if HAS_LEFT:
            if row_begin + BLOCK_M > cut_left:
                scores = hide(scores, ends - row_begin, BEFORE=False)
    return scores


@jit
def _consume(
    descs, column_keys_ptr, buffers, row_buffers, ds_smem, dq_smem, barriers, ds_full, done,
    position, walk, keys_end, seqlen_k, window, column_strides, scale_log2, dk_scale, dv_scale,
    threshold, CONSUMER: gl.constexpr, HEADDIM: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, IS_RAGGED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_TAIL: gl.constexpr, HAS_DROPOUT: gl.constexpr, SUB: gl.constexpr, HAS_TOKENS: gl.constexpr,
    MASK_N: gl.constexpr,
):  # fmt: skip
    """64 keys: dk, dv, and half of every dq tile. column_keys_ptr points at this sequence."""
    dk_desc, dv_desc, dq_desc = descs
    place_q, place_k, head_k, group_size, col_begin = position
    batch_index, first_q, seqlen_q = place_q
    window_left, window_right = window
    DQ_COLUMNS: gl.constexpr = HEADDIM * BLOCK_M // 128
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADDIM, 16])
    QUERIES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_COLUMNS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=GRADS, k_width=2)
    KEY: gl.constexpr = gl.SliceLayout(1, SCORES)
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    IS_CUT: gl.constexpr = HAS_LEFT or HAS_RIGHT or HAS_TAIL
    # Faster at headdim 128, where a query tile has 64 rows; slower at 64, where ptxas then puts a
    # part of dS^T behind the product for dv (both measured on an H200).
    NAMES_DS: gl.constexpr = BLOCK_M == 64
    DS_NUMBER: gl.constexpr = FIRST_NAMED + STAGES
    DS_THREADS: gl.constexpr = 256
    gl.static_assert(DS_NUMBER + 4 <= 16, "a block has 16 barriers")
    q_smem, dout_smem, k_smem, v_smem = buffers
    lse_smem, delta_smem, row_keys_smem, row_multipliers_smem = row_buffers
    k_full, v_full, q_full, do_full = barriers
    dtype: gl.constexpr = q_smem.dtype
    k = k_smem.index(CONSUMER).reshape([KEYS, HEADDIM])
    v = v_smem.index(CONSUMER).reshape([KEYS, HEADDIM])

    col_begin += CONSUMER * KEYS
    cols = col_begin + gl.arange(0, KEYS, KEY)
    shift = seqlen_k - seqlen_q
    starts = cols * 0
    ends = starts
    cut = col_begin * 0
    cut_left = cut
    mask_line = cut
    if HAS_RIGHT:
        starts = cols - (shift + window_right)
        cut = col_begin + KEYS - 1 - (shift + window_right)
    if HAS_LEFT:
        ends = cols - (shift - window_left - 1)
        cut_left = col_begin - (shift - window_left - 1)
    if IS_CUT or SUB > 0:
        # Rows of K behind the last key are zero, but exp2(0 - lse) may be infinite.
        starts = gl.where(cols < keys_end, starts, 2**30)
        cut = gl.where(col_begin + KEYS > keys_end, 2**30, cut)
    if SUB > 0:
        mask_line = col_begin % MASK_N
    seen = (starts, ends, cut, cut_left, mask_line)

    dk = gl.zeros([KEYS, HEADDIM], gl.float32, GRADS)
    dv = gl.zeros([KEYS, HEADDIM], gl.float32, GRADS)
    zero_scores = gl.zeros([KEYS, BLOCK_M], gl.float32, SCORES)
    zero_dq = gl.zeros([KEYS, DQ_COLUMNS], gl.float32, QUERIES)
    mbarrier.wait(k_full.index(0), 0)
    mbarrier.wait(v_full.index(0), 0)
    column_keys = cols
    index = col_begin * 0
    for member in range(group_size):
        head = head_k * group_size + member
        begin, num_partial, num_tiles = walk_of_head(
            walk, batch_index, head, col_begin, SUB, MASK_N
        )
        if HAS_DROPOUT:
            column_keys = gl.load(column_keys_ptr + head.to(gl.int64) * column_strides[1] + cols)
        for step in range(num_tiles):
            tile = tile_at(walk, begin + step, SUB)
            stage, phase = ring(index, STAGES)
            half, half_phase = ring(index, 2)
            q = q_smem.index(stage).reshape([BLOCK_M, HEADDIM])
            dout = dout_smem.index(stage).reshape([BLOCK_M, HEADDIM])

            mbarrier.wait(q_full.index(stage), phase)
            scores_token = warpgroup_mma(
                k, q.permute([1, 0]), zero_scores, use_acc=False, is_async=True
            )
            mbarrier.wait(do_full.index(stage), phase)
            dprobs_token = warpgroup_mma(
                v, dout.permute([1, 0]), zero_scores, use_acc=False, is_async=True
            )
            scores, dprobs_token = warpgroup_mma_wait(1, deps=[scores_token, dprobs_token])
            scores = _hide_unseen(
                scores, tile, seen, walk, begin + step, step < num_partial, BLOCK_M, HAS_LEFT,
                IS_CUT, SUB, HAS_TOKENS, MASK_N,
            )  # fmt: skip
            lse = lse_smem.index(stage).load(ROW)
            probs = gl.exp2(scores * scale_log2 - lse[None, :])
            if HAS_DROPOUT:
                # This wait ends the basic block, so that no key takes a register before the
                # exponentials are done.
                mbarrier.wait(do_full.index(stage), phase)
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
            dprobs = warpgroup_mma_wait(0, deps=[dprobs_token])
            delta = delta_smem.index(stage).load(ROW)
            if HAS_DROPOUT:
                dscores = dscores_of_signed(probs, dprobs, delta[None, :])
            else:
                dscores = probs * (dprobs - delta[None, :])
            dscores = dscores.to(dtype)
            dv_token = warpgroup_mma(operand, dout, dv, is_async=True)
            ds_smem.index(half * 2 + CONSUMER).store(dscores)
            fence_async_shared()
            if NAMES_DS:
                named_arrive(DS_NUMBER + 2 * half + CONSUMER, DS_THREADS)
            else:
                arrive_warpgroup(ds_full.index(half))
            operand = gl.convert_layout(dscores, OPERAND, assert_trivial=True)
            dk_token = warpgroup_mma(operand, q, dk, is_async=True)
            if NAMES_DS:
                named_sync(DS_NUMBER + 2 * half + 1 - CONSUMER, DS_THREADS)
                _await_dq()  # where Triton wants a barrier of the partition anyway
            else:
                mbarrier.wait(ds_full.index(half), half_phase)
            dq_token = warpgroup_mma(
                _queries(ds_smem.index(half * 2), CONSUMER, BLOCK_M).permute([1, 0]),
                _dq_columns(k_smem.index(0), CONSUMER, BLOCK_M), zero_dq, use_acc=False,
                is_async=True,
            )  # fmt: skip
            dq_token = warpgroup_mma(
                _queries(ds_smem.index(half * 2 + 1), CONSUMER, BLOCK_M).permute([1, 0]),
                _dq_columns(k_smem.index(1), CONSUMER, BLOCK_M), dq_token, is_async=True,
            )  # fmt: skip
            dv, dk, dq = warpgroup_mma_wait(0, deps=[dv_token, dk_token, dq_token])
            named_arrive(FIRST_NAMED + stage, EMPTY_THREADS)
            if not NAMES_DS:
                _await_dq()
            _add_dq(dq, dq_desc, dq_smem, place_q, head, tile, CONSUMER, BLOCK_M, IS_RAGGED)
            index += 1

    arrive_warpgroup(done.index(0))
    mbarrier.wait(done.index(0), 0)
    k.store((dk * dk_scale).to(dtype))
    v.store((dv * dv_scale).to(dtype))
    fence_async_shared()
    coords = coordinates(place_k, head_k, col_begin, 0, IS_RAGGED)
    tma_store(dk_desc, coords, k_smem.index(CONSUMER))
    tma_store(dv_desc, coords, v_smem.index(CONSUMER))
    store_wait(0)


_LENGTHS = [
    "lse_strides", "column_strides", "nheads", "group_size", "num_heads", "seqlen_q", "seqlen_k",
    "num_col_tiles", "heads_per_group", "window", "threshold",
]  # fmt: skip


@jit(do_not_specialize=_LENGTHS)
def attention_backward_kernel(
    q_desc, dout_desc, k_desc, v_desc, dk_desc, dv_desc, dq_desc, words_ptr, int_words_ptr,
    column_keys_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, lengths_k_ptr, lists, lse_strides,
    column_strides, nheads, group_size, num_heads, seqlen_q, seqlen_k, num_col_tiles,
    heads_per_group, window, scale_log2, dk_scale, dv_scale, threshold,
    HEADDIM: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    IS_VARLEN: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HAS_TAIL: gl.constexpr, HAS_DROPOUT: gl.constexpr,
    MASK_M: gl.constexpr, MASK_N: gl.constexpr, HAS_TOKENS: gl.constexpr,
):  # fmt: skip
    """Grid: (num_heads * num_col_tiles,) with num_heads = batch * nheads_k; 4 warps.

    Descriptors: of launch.py, in boxes of one head; zeros outside. words_ptr: what delta_kernel of
    portable/attention_backward.py writes, four words for each entry of the LSE; int_words_ptr: the
    same as int32. HAS_TAIL: the last block may hold keys that are none. column_keys_ptr: readable
    to the end of every block. lists: of portable/sparse.py, the token masks packed by columns;
    MASK_M is a multiple of BLOCK_M, MASK_N of BLOCK_KEYS. With HAS_LENGTHS, dk and dv come as zeros
    and those behind the last key are not written.
    """
    IS_RAGGED: gl.constexpr = IS_VARLEN or HAS_LENGTHS
    SUB: gl.constexpr = MASK_M // BLOCK_M
    batch_head, col_tile = tiles.program_order(
        gl.program_id(0), num_col_tiles, num_heads, heads_per_group, False
    )
    nheads_k = nheads // group_size
    batch_index = batch_head // nheads_k
    head_k = batch_head % nheads_k
    place_q = sequence_place(cu_seqlens_q_ptr, batch_index, seqlen_q, IS_VARLEN, IS_RAGGED)
    batch_index, first_k, seqlen_k = sequence_place(
        cu_seqlens_k_ptr, batch_index, seqlen_k, IS_VARLEN, IS_RAGGED
    )
    keys_end = tiles.num_visible_keys(lengths_k_ptr, batch_index, seqlen_k, HAS_LENGTHS)
    col_begin = col_tile * BLOCK_KEYS
    if IS_RAGGED:
        if col_begin >= keys_end:
            return
    first_tile, _, _, last_tile = tiles.rows_of_keys(
        col_begin, gl.minimum(col_begin + BLOCK_KEYS, keys_end), seqlen_k - place_q[2], place_q[2],
        window, BLOCK_M, HAS_LEFT, HAS_RIGHT,
    )  # fmt: skip
    walk = (lists, first_tile, last_tile - first_tile)
    if HAS_DROPOUT:
        column_keys_ptr += batch_index.to(gl.int64) * column_strides[0]
    if IS_VARLEN:
        words_ptr += place_q[1].to(gl.int64) * 4
        int_words_ptr += place_q[1].to(gl.int64) * 4
        if HAS_DROPOUT:
            column_keys_ptr += first_k

    dtype: gl.constexpr = q_desc.dtype
    k_smem = gl.allocate_shared_memory(dtype, [2] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [2] + v_desc.block_type.shape, v_desc.layout)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES] + q_desc.block_type.shape, q_desc.layout)
    dout_smem = gl.allocate_shared_memory(
        dtype, [STAGES] + dout_desc.block_type.shape, dout_desc.layout
    )
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, BLOCK_M], dtype)
    ds_smem = gl.allocate_shared_memory(dtype, [4, KEYS, BLOCK_M], DS)
    dq_smem = gl.allocate_shared_memory(gl.float32, [2] + dq_desc.block_type.shape, dq_desc.layout)
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
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    done = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    mbarrier.init(k_full.index(0), count=1)
    mbarrier.init(v_full.index(0), count=1)
    mbarrier.init(done.index(0), count=2)
    for half in gl.static_range(2):
        mbarrier.init(ds_full.index(half), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(q_full.index(stage), count=1)
        mbarrier.init(do_full.index(stage), count=2)
    fence_async_shared()

    buffers = (q_smem, dout_smem, k_smem, v_smem)
    row_buffers = (lse_smem, delta_smem, row_keys_smem, row_multipliers_smem)
    barriers = (k_full, v_full, q_full, do_full)
    place_k = (batch_index, first_k, keys_end)
    position = (place_q, place_k, head_k, group_size, col_begin)
    gl.warp_specialize([
        (produce, (
            (q_desc, dout_desc, k_desc, v_desc), (words_ptr, int_words_ptr), buffers, row_buffers,
            barriers, position, walk, lse_strides, BLOCK_M, STAGES, IS_RAGGED, HAS_DROPOUT, SUB,
            MASK_N,
        )),
        (_consume, (
            (dk_desc, dv_desc, dq_desc), column_keys_ptr, buffers, row_buffers, ds_smem, dq_smem,
            barriers, ds_full, done, position, walk, keys_end, seqlen_k, window, column_strides,
            scale_log2, dk_scale, dv_scale, threshold, 0, HEADDIM, BLOCK_M, STAGES, IS_RAGGED,
            HAS_LEFT, HAS_RIGHT, HAS_TAIL, HAS_DROPOUT, SUB, HAS_TOKENS, MASK_N,
        )),
        (_consume, (
            (dk_desc, dv_desc, dq_desc), column_keys_ptr, buffers, row_buffers, ds_smem, dq_smem,
            barriers, ds_full, done, position, walk, keys_end, seqlen_k, window, column_strides,
            scale_log2, dk_scale, dv_scale, threshold, 1, HEADDIM, BLOCK_M, STAGES, IS_RAGGED,
            HAS_LEFT, HAS_RIGHT, HAS_TAIL, HAS_DROPOUT, SUB, HAS_TOKENS, MASK_N,
        )),
    ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip
