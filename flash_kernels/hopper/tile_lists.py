"""How the tiles that a block mask lists reach the warpgroups: the producer alone reads the lists,
and passes the numbers of each tile to the consumers in shared memory, beside the tile.

A global load takes longer than the mathematics of a tile of 64 columns, so the producer loads the
next 32 blocks of a list at once, one a lane, and picks each by a sum over the warp.
"""

from .gluon_api import gl, jit

LANES: gl.constexpr = gl.constexpr(32)
# Each warp of a warpgroup holds all of 32 numbers, and each thread a single one.
EACH_WARP: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
VECTOR: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# Behind the last row of every sequence: TMA reads zeros there, and no query sees such a key.
BEHIND: gl.constexpr = gl.constexpr(2**29)


@jit
def allocate_tiles(STAGES: gl.constexpr, HAS_TOKENS: gl.constexpr):
    """The listed tile in each stage of a ring, and the number of its token mask: int32."""
    tiles = gl.allocate_shared_memory(gl.int32, [STAGES, 1], VECTOR)
    patterns = tiles
    if HAS_TOKENS:
        patterns = gl.allocate_shared_memory(gl.int32, [STAGES, 1], VECTOR)
    return tiles, patterns


@jit
def put(numbers, slot, value):
    """Store an int32 in numbers [slots, 1], for who waits for the next arrival of this warpgroup's
    first thread. All threads store: a slot is free again once they have met, too."""
    numbers.index(slot).store(gl.full([1], value, gl.int32, EACH_WARP))


@jit
def get(numbers, slot):
    return gl.max(numbers.index(slot).load(EACH_WARP), 0)


@jit
def load_blocks(
    lists, position, end, BLOCK: gl.constexpr, SUB: gl.constexpr, HAS_TOKENS: gl.constexpr
):  # fmt: skip
    """(numbers, patterns) of 32 blocks of a list, int32 [32], from the one whose first tile is at
    `position`; tiles from position `end` on are not the list's.

    Lanes without a block get one behind every sequence, BLOCK being its rows or columns, with no
    token mask. Without HAS_TOKENS the patterns are anything.
    """
    blocks = position // SUB + gl.arange(0, LANES, EACH_WARP)
    inside = blocks < end // SUB
    numbers = gl.load(lists[1] + blocks, mask=inside, other=BEHIND // BLOCK)
    patterns = numbers
    if HAS_TOKENS:
        patterns = gl.load(lists[2] + blocks, mask=inside, other=-1)
    return numbers, patterns


@jit
def _pick(values, lane):
    return gl.sum(gl.where(gl.arange(0, LANES, EACH_WARP) == lane, values, 0), 0)


@jit
def next_tile(
    lists, blocks, start, index, end, BLOCK: gl.constexpr, SUB: gl.constexpr,
    HAS_TOKENS: gl.constexpr,
):  # fmt: skip
    """(tile, pattern, blocks from then on) at position start + index of a list.

    blocks: of load_blocks, from `start` at index 0.
    """
    numbers, patterns = blocks
    lane = index // SUB % LANES
    tile = _pick(numbers, lane) * SUB + index % SUB
    pattern = tile
    if HAS_TOKENS:
        pattern = _pick(patterns, lane)
    following = index + 1
    if following % (LANES * SUB) == 0:
        # On its way while the producer waits for free buffers.
        blocks = load_blocks(lists, start + following, end, BLOCK, SUB, HAS_TOKENS)
    return tile, pattern, blocks
