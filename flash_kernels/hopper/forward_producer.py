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
from .tile_lists import get, load_blocks, next_tile, put

# Query rows of a warpgroup: one matrix instruction high.
ROWS: gl.constexpr = gl.constexpr(64)


@jit
def locate(
    item, listed, index_ptrs, sizes, window, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    IS_VARLEN: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, MASK_M: gl.constexpr, MASK_N: gl.constexpr,
):  # fmt: skip
    """(place_q, place_k, head, row_begin, walk) of a row tile of BLOCK_M query rows.

    listed: (begin, full_begin, end) of the row's list of a block mask, None to read them.
    index_ptrs: (cu_seqlens_q, cu_seqlens_k, lengths_k, lists); sizes: (nheads, num_heads, seqlen_q,
    seqlen_k, num_row_tiles, heads_per_group).
    place_q: of addressing.sequence_place. place_k: likewise, but its length ends with the padding.
    walk: (num_tiles, start, num_partial, seqlen_k, end). num_tiles is 0 behind the last query of a
    sequence, else at least 1: where a row sees no key all its scores are masked. start: position of
    the first tile in the lists, which end before `end`, or the last key tile, from which the walk
    goes to the left. num_partial: tiles of a block mask that need masking.
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
        if listed is None:
            start, full_begin, end = sparse.listed_range(
                lists, batch_index, head, row_begin // MASK_M, MASK_N // BLOCK_N
            )
        else:
            start, full_begin, end = listed
        # An empty list is walked as one partial tile behind every key.
        num_tiles = gl.maximum(end - start, 1)
        num_partial = gl.where(start == end, 1, full_begin - start)
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
    if IS_VARLEN:
        num_tiles = gl.where(row_begin < place_q[2], num_tiles, 0)
    place_k = (batch_index, first_k, keys_end)
    return place_q, place_k, head, row_begin, (num_tiles, start, num_partial, seqlen_k, end)


@jit
def _post(numbers, barriers, turn, item, walk, NUM_CONSUMERS: gl.constexpr, SUB: gl.constexpr):
    """Pass on the row tile of this turn, and the size of its list, once its Q buffers are free; the
    next phases of q_full publish them."""
    items, list_sizes = numbers[0], numbers[1]
    q_empty = barriers[1]
    half, half_phase = ring(turn, 2)
    # The wait for the phase before the first passes at once: every buffer starts empty.
    for consumer in gl.static_range(NUM_CONSUMERS):
        mbarrier.wait(q_empty.index(half * NUM_CONSUMERS + consumer), half_phase ^ 1)
    put(items, half, item)
    if SUB > 0:
        _, start, num_partial, _, end = walk
        put(list_sizes, half * 2, num_partial)
        put(list_sizes, half * 2 + 1, end - start)
    return half * NUM_CONSUMERS


@jit
def receive(
    numbers, q_full, turn, CONSUMER: gl.constexpr, NUM_CONSUMERS: gl.constexpr, SUB: gl.constexpr
):  # fmt: skip
    """(row tile, or -1 behind the last one; `listed` for locate, its positions counted from the
    row's first; slot of its Q buffer, which has arrived)."""
    items, list_sizes = numbers[0], numbers[1]
    half, half_phase = ring(turn, 2)
    slot = half * NUM_CONSUMERS + CONSUMER
    mbarrier.wait(q_full.index(slot), half_phase)
    none = half * 0
    listed = (none, none, none)
    if SUB > 0:
        listed = (none, get(list_sizes, half * 2), get(list_sizes, half * 2 + 1))
    return get(items, half), listed, slot


@jit
def receive_tile(numbers, stage, start, index, SUB: gl.constexpr, HAS_TOKENS: gl.constexpr):
    """(key tile at position `index` of a walk, its pattern) once its K has arrived in `stage`. SUB:
    tiles in a block of the mask, 0 without a mask."""
    listed_tiles, listed_patterns = numbers[2], numbers[3]
    if SUB > 0:
        tile = get(listed_tiles, stage)
        pattern = tile
        if HAS_TOKENS:
            pattern = get(listed_patterns, stage)
        return tile, pattern
    else:
        return start - index, start


@jit
def produce(
    descs, buffers, barriers, counter_ptr, index_ptrs, sizes, group_size, num_items, window,
    NUM_CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    IS_VARLEN: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, MASK_M: gl.constexpr, MASK_N: gl.constexpr,
    HAS_TOKENS: gl.constexpr,
):  # fmt: skip
    """For each row tile load Q, then the K and V tiles of the walk.

    counter_ptr: int32, the row tiles taken beside the first ones; None for equal shares.
    """
    q_desc, k_desc, v_desc = descs
    numbers, q_smem, k_smem, v_smem = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    IS_RAGGED: gl.constexpr = IS_VARLEN or HAS_LENGTHS
    SUB: gl.constexpr = MASK_N // BLOCK_N
    lists = index_ptrs[3]
    listed_tiles, listed_patterns = numbers[2], numbers[3]
    turn = num_items * 0
    base = num_items * 0
    item = gl.program_id(0)
    while item < num_items:
        place_q, place_k, head, row_begin, walk = locate(
            item, None, index_ptrs, sizes, window, NUM_CONSUMERS * ROWS, BLOCK_N, IS_VARLEN,
            HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, MASK_M, MASK_N,
        )  # fmt: skip
        num_tiles, start, _, _, end = walk
        if num_tiles > 0:
            if SUB > 0:
                blocks = load_blocks(lists, start, end, MASK_N, SUB, HAS_TOKENS)
            slot = _post(numbers, barriers, turn, item, walk, NUM_CONSUMERS, SUB)
            for consumer in gl.static_range(NUM_CONSUMERS):
                mbarrier.expect(q_full.index(slot + consumer), q_desc.block_type.nbytes)
                coords = coordinates(place_q, head, row_begin + consumer * ROWS, 0, IS_RAGGED)
                tma_load(
                    q_desc, coords, q_full.index(slot + consumer), q_smem.index(slot + consumer)
                )
            for index in range(num_tiles):
                stage, phase = ring(base + index, STAGES)
                if SUB > 0:
                    tile, pattern, blocks = next_tile(
                        lists, blocks, start, index, end, MASK_N, SUB, HAS_TOKENS
                    )
                else:
                    tile = start - index
                coords = coordinates(place_k, head // group_size, tile * BLOCK_N, 0, IS_RAGGED)
                mbarrier.wait(k_empty.index(stage), phase ^ 1)
                if SUB > 0:
                    put(listed_tiles, stage, tile)
                    if HAS_TOKENS:
                        put(listed_patterns, stage, pattern)
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
    none = item * 0
    slot = _post(
        numbers, barriers, turn, none - 1, (none, none, none, none, none), NUM_CONSUMERS, SUB
    )
    for consumer in gl.static_range(NUM_CONSUMERS):
        arrive_warpgroup(q_full.index(slot + consumer))
