"""What a block of the Hopper forward works through, row tiles and for each the key tiles that it
walks, and the warpgroup that loads them.

The grid is persistent. A block begins with the row tile of its number, in the order of
tiles.program_order. Where all take the same time it goes on with every num_programs-th; shares of
unequal ones (causal, packed, sparse) would not end together, so there a block goes on with the next
that no block has taken. The producer passes the numbers to the consumers beside the Q buffers.
"""

from ..portable import sparse, tiles
from .addressing import coordinates, sequence_place
from .gluon_api import arrive_warpgroup, gl, jit, mbarrier, ring, tma_load

# Query rows of a warpgroup: one matrix instruction high.
ROWS: gl.constexpr = gl.constexpr(64)
# Of the number of a row tile in shared memory: every thread holds it.
ITEM: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@jit
def locate(
    item, index_ptrs, sizes, window, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    IS_VARLEN: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, MASK_M: gl.constexpr, MASK_N: gl.constexpr,
):  # fmt: skip
    """(place_q, place_k, head, row_begin, walk) of a row tile of BLOCK_M query rows.

    index_ptrs: (cu_seqlens_q, cu_seqlens_k, lengths_k, lists); sizes: (nheads, num_heads, seqlen_q,
    seqlen_k, num_row_tiles, heads_per_group).
    place_q: of addressing.sequence_place. place_k: likewise, but its length ends with the padding.
    walk: (num_tiles, start, num_partial, seqlen_k). num_tiles is 0 behind the last query of a
    sequence, else at least 1: where a row sees no key all its scores are masked. start: position of
    the first tile in the lists, or the last key tile, from which the walk goes to the left.
    num_partial: tiles of a block mask that need masking.
    """
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, lengths_k_ptr, lists = index_ptrs
    nheads, num_heads, seqlen_q, seqlen_k, num_row_tiles, heads_per_group = sizes
    window_left, window_right = window
    IS_RAGGED: gl.constexpr = IS_VARLEN or HAS_LENGTHS
    batch_head, row_tile = tiles.program_order(
        item, num_row_tiles, num_heads, heads_per_group, HAS_RIGHT
    )
    batch_index = batch_head // nheads
    head = batch_head % nheads
    place_q = sequence_place(cu_seqlens_q_ptr, batch_index, seqlen_q, IS_VARLEN, IS_RAGGED)
    _, first_k, seqlen_k = sequence_place(
        cu_seqlens_k_ptr, batch_index, seqlen_k, IS_VARLEN, IS_RAGGED
    )
    keys_end = tiles.num_visible_keys(lengths_k_ptr, batch_index, seqlen_k, HAS_LENGTHS)
    keys_end = gl.maximum(keys_end, 0)
    row_begin = row_tile * BLOCK_M
    if HAS_RIGHT and MASK_N == 0 and not IS_RAGGED:
        # Row tiles that end with the sequence: the one that would reach over its end reaches over
        # its beginning, where rows see few keys. There it moves up, as TMA writes to no negative
        # row, and computes some rows that the next one computes too, to the same bits.
        row_begin = gl.maximum(row_begin - (num_row_tiles * BLOCK_M - seqlen_q), 0)
    shift = seqlen_k - place_q[2]
    if MASK_N > 0:
        begin, full_begin, end = sparse.listed_range(
            lists, batch_index, head, row_begin // MASK_M, MASK_N // BLOCK_N
        )
        is_empty = begin == end
        # Then any block of the list, from behind the tensor: zeros, no key of which is seen.
        start = gl.where(is_empty, 0, begin)
        num_tiles = gl.where(is_empty, 1, end - begin)
        num_partial = gl.where(is_empty, 1, full_begin - begin)
        keys_end = gl.where(is_empty, 0, keys_end)
        batch_k = gl.where(is_empty, -1, batch_index)
    else:
        end = keys_end
        begin = keys_end * 0
        if HAS_RIGHT:
            row_end = gl.minimum(row_begin + BLOCK_M, place_q[2])
            end = gl.minimum(end, row_end + shift + window_right)
        start = gl.maximum(gl.cdiv(end, BLOCK_N), 1) - 1
        if HAS_LEFT:
            begin = gl.maximum(row_begin + shift - window_left, 0) // BLOCK_N
        num_tiles = start + 1 - gl.minimum(begin, start)
        num_partial = keys_end * 0
        batch_k = batch_index
    if IS_VARLEN:
        num_tiles = gl.where(row_begin < place_q[2], num_tiles, 0)
    place_k = (batch_k, first_k, keys_end)
    return place_q, place_k, head, row_begin, (num_tiles, start, num_partial, seqlen_k)


@jit
def tile_at(lists, start, index, SUB: gl.constexpr):
    """The key tile at position `index` of a walk. SUB: tiles in a block of the mask, 0 without."""
    if SUB > 0:
        return sparse.listed_tile(lists, start + index, SUB)
    else:
        return start - index


@jit
def _post(items, barriers, turn, item, NUM_CONSUMERS: gl.constexpr):
    """Pass on the row tile of this turn once its Q buffers are free; the next phases of q_full
    publish it."""
    q_empty = barriers[1]
    half, half_phase = ring(turn, 2)
    # The wait for the phase before the first passes at once: every buffer starts empty.
    for consumer in gl.static_range(NUM_CONSUMERS):
        mbarrier.wait(q_empty.index(half * NUM_CONSUMERS + consumer), half_phase ^ 1)
    items.index(half).store(gl.full([1], item, gl.int32, ITEM))
    return half * NUM_CONSUMERS


@jit
def receive(items, q_full, turn, CONSUMER: gl.constexpr, NUM_CONSUMERS: gl.constexpr):
    """(row tile, or -1 behind the last one; slot of its Q buffer, which has arrived)."""
    half, half_phase = ring(turn, 2)
    slot = half * NUM_CONSUMERS + CONSUMER
    mbarrier.wait(q_full.index(slot), half_phase)
    return gl.max(items.index(half).load(ITEM), 0), slot


@jit
def produce(
    descs, buffers, barriers, counter_ptr, index_ptrs, sizes, group_size, num_items, window,
    NUM_CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    IS_VARLEN: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, MASK_M: gl.constexpr, MASK_N: gl.constexpr,
):  # fmt: skip
    """For each row tile load Q, then the K and V tiles of the walk.

    counter_ptr: int32, the row tiles taken beside the first ones; None for equal shares.
    """
    q_desc, k_desc, v_desc = descs
    items, q_smem, k_smem, v_smem = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    IS_RAGGED: gl.constexpr = IS_VARLEN or HAS_LENGTHS
    SUB: gl.constexpr = MASK_N // BLOCK_N
    lists = index_ptrs[3]
    turn = num_items * 0
    base = num_items * 0
    item = gl.program_id(0)
    while item < num_items:
        place_q, place_k, head, row_begin, walk = locate(
            item, index_ptrs, sizes, window, NUM_CONSUMERS * ROWS, BLOCK_N, IS_VARLEN, HAS_LENGTHS,
            HAS_LEFT, HAS_RIGHT, MASK_M, MASK_N,
        )  # fmt: skip
        num_tiles, start, _, _ = walk
        if num_tiles > 0:
            slot = _post(items, barriers, turn, item, NUM_CONSUMERS)
            for consumer in gl.static_range(NUM_CONSUMERS):
                mbarrier.expect(q_full.index(slot + consumer), q_desc.block_type.nbytes)
                coords = coordinates(place_q, head, row_begin + consumer * ROWS, 0, IS_RAGGED)
                tma_load(
                    q_desc, coords, q_full.index(slot + consumer), q_smem.index(slot + consumer)
                )
            tile = tile_at(lists, start, 0, SUB)
            for index in range(num_tiles):
                stage, phase = ring(base + index, STAGES)
                coords = coordinates(place_k, head // group_size, tile * BLOCK_N, 0, IS_RAGGED)
                # Read a position ahead, so that the waits hide the latency of the list.
                tile = tile_at(lists, start, gl.minimum(index + 1, num_tiles - 1), SUB)
                mbarrier.wait(k_empty.index(stage), phase ^ 1)
                mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
                tma_load(k_desc, coords, k_full.index(stage), k_smem.index(stage))
                mbarrier.wait(v_empty.index(stage), phase ^ 1)
                mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
                tma_load(v_desc, coords, v_full.index(stage), v_smem.index(stage))
            turn += 1
            base += num_tiles
        if counter_ptr is None:
            item += gl.num_programs(0)
        else:
            # While the consumers work through what the rings hold.
            item = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed")
    slot = _post(items, barriers, turn, item * 0 - 1, NUM_CONSUMERS)
    for consumer in gl.static_range(NUM_CONSUMERS):
        arrive_warpgroup(q_full.index(slot + consumer))
