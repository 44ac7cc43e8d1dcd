"""Query tiles that a block of the Hopper backward walks, and the warpgroup that loads them."""

from ..portable import sparse
from .addressing import coordinates
from .gluon_api import FIRST_NAMED, arrive_warpgroup, gl, jit, mbarrier, named_sync, ring, tma_load

# Keys of a consumer, and of a block.
KEYS: gl.constexpr = gl.constexpr(64)
BLOCK_KEYS: gl.constexpr = gl.constexpr(128)
# Threads of the producer and both consumers, who meet where a stage is free again.
EMPTY_THREADS: gl.constexpr = gl.constexpr(384)


@jit
def walk_of_head(walk, batch_index, head, col_begin, SUB: gl.constexpr, MASK_N: gl.constexpr):
    """(begin, num_partial, number of tiles) of the walk of one query head: positions of the lists
    of a block mask, or query tiles. SUB: tiles in a block of the mask, 0 without a mask."""
    lists, first_tile, num_tiles = walk
    if SUB > 0:
        begin, full_begin, end = sparse.listed_range(
            lists, batch_index, head, col_begin // MASK_N, SUB
        )
        return begin, full_begin - begin, end - begin
    else:
        return first_tile, first_tile * 0, num_tiles


@jit
def tile_at(walk, position, SUB: gl.constexpr):
    """The query tile at a position of the walk."""
    if SUB > 0:
        return sparse.listed_tile(walk[0], position, SUB)
    else:
        return position


@jit
def produce(
    descs, row_ptrs, buffers, row_buffers, barriers, position, walk, lse_strides,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, IS_RAGGED: gl.constexpr,
    HAS_DROPOUT: gl.constexpr, SUB: gl.constexpr, MASK_N: gl.constexpr,
):  # fmt: skip
    """Load K and V once, then Q and dO with their row vectors. row_ptrs point at this sequence of
    the packed ones."""
    q_desc, dout_desc, k_desc, v_desc = descs
    words_ptr, int_words_ptr = row_ptrs
    q_smem, dout_smem, k_smem, v_smem = buffers
    lse_smem, delta_smem, row_keys_smem, row_multipliers_smem = row_buffers
    k_full, v_full, q_full, do_full = barriers
    place_q, place_k, head_k, group_size, col_begin = position
    batch_index, first_q, seqlen_q = place_q
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.expect(k_full.index(0), k_desc.block_type.nbytes * 2)
    mbarrier.expect(v_full.index(0), v_desc.block_type.nbytes * 2)
    for half in gl.static_range(2):
        coords = coordinates(place_k, head_k, col_begin + half * KEYS, 0, IS_RAGGED)
        tma_load(k_desc, coords, k_full.index(0), k_smem.index(half))
    for half in gl.static_range(2):
        coords = coordinates(place_k, head_k, col_begin + half * KEYS, 0, IS_RAGGED)
        tma_load(v_desc, coords, v_full.index(0), v_smem.index(half))
    index = col_begin * 0
    for member in range(group_size):
        head = head_k * group_size + member
        offset = batch_index.to(gl.int64) * lse_strides[0] + head.to(gl.int64) * lse_strides[1]
        offset *= 4
        begin, _, num_tiles = walk_of_head(walk, batch_index, head, col_begin, SUB, MASK_N)
        for step in range(num_tiles):
            tile = tile_at(walk, begin + step, SUB)
            stage, _ = ring(index, STAGES)
            rows = tile * BLOCK_M + gl.arange(0, BLOCK_M, THREADS)
            coords = coordinates(place_q, head, tile * BLOCK_M, 0, IS_RAGGED)
            # The words of the rows are under way while the buffers are still in use.
            inside = rows < seqlen_q
            row_words = words_ptr + offset + rows * 4
            lse = gl.load(row_words, mask=inside, other=0.0)
            delta = gl.load(row_words + 1, mask=inside, other=0.0)
            if HAS_DROPOUT:
                row_words = int_words_ptr + offset + rows * 4
                row_keys = gl.load(row_words + 2, mask=inside, other=0)
                row_multipliers = gl.load(row_words + 3, mask=inside, other=0)
            if index >= STAGES:
                named_sync(FIRST_NAMED + stage, EMPTY_THREADS)
            mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes)
            tma_load(q_desc, coords, q_full.index(stage), q_smem.index(stage))
            mbarrier.expect(do_full.index(stage), dout_desc.block_type.nbytes)
            tma_load(dout_desc, coords, do_full.index(stage), dout_smem.index(stage))
            lse_smem.index(stage).store(lse)
            delta_smem.index(stage).store(delta)
            if HAS_DROPOUT:
                row_keys_smem.index(stage).store(row_keys)
                row_multipliers_smem.index(stage).store(row_multipliers)
            arrive_warpgroup(do_full.index(stage))
            index += 1
    # Of the last uses: no arrival is left behind.
    for last in range(gl.maximum(index - STAGES, 0), index):
        named_sync(FIRST_NAMED + last % STAGES, EMPTY_THREADS)
