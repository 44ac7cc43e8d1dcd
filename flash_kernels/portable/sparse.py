"""Jitted pieces of block sparsity (arXiv 2205.14135, section 3.3): the tiles of a row or of a
column that a block mask lists.

`lists` is the tuple that launch.py makes of one direction of a BlockMask: (bounds, indices,
patterns, token_masks, batch stride and head stride of bounds). A block of the mask holds SUB tiles
in the direction of the walk; positions in a list count tiles, not blocks.
"""

import triton
import triton.language as tl

from . import tiles


@triton.jit
def listed_range(lists, batch_index, head, line, SUB: tl.constexpr):
    """(begin, full_begin, end) of a line's tiles: the ones to mask, then the full ones."""
    bounds_ptr = lists[0] + batch_index * lists[4] + head * lists[5] + line * 3
    begin = tl.load(bounds_ptr) * SUB
    full_begin = tl.load(bounds_ptr + 1) * SUB
    return begin, full_begin, tl.load(bounds_ptr + 2) * SUB


@triton.jit
def listed_tile(lists, index, SUB: tl.constexpr):
    """Tile at position `index` of the list."""
    return tl.load(lists[1] + index // SUB) * SUB + index % SUB


@triton.jit
def mask_tokens(
    values, lists, index, offsets, other: tl.constexpr, SUB: tl.constexpr, STEP: tl.constexpr,
    AREA: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """`values` where the token mask of the tile at `index` is true, or where it has none.

    offsets: int32, of `values` in the block's first tile of the walk; the next tile is STEP further
    on, the next mask AREA.
    """
    pattern = tl.load(lists[2] + index // SUB)
    ptrs = lists[3] + pattern.to(tl.int64) * AREA + (index % SUB) * STEP + offsets
    seen = tl.load(ptrs, mask=(offsets >= 0) & (pattern >= 0), other=1)
    return tiles.where_greater(seen.to(tl.int32), 0, values, other, PTX)
