"""Where the tiles of a sequence lie in the TMA descriptors of launch.py.

A dense call addresses (batch, heads, seqlen, headdim). A ragged one, packed sequences or padded
keys, addresses (heads, total, headdim), where a tile may reach over the end of its sequence into
the next one. To TMA such a tile must end where the sequence does, so that the rest reads as zeros
and is never written. Its bounds are the descriptor's, the same for every sequence, so the row is
counted from END instead, the descriptor's size in rows: row - length + END is out of bounds from
row = length on. Two more dimensions take the address back to the sequence: (first + length) steps
of one row, and END steps of -1 row, written as 2^34 - row stride since addresses wrap at 2^64.
Triton's own ragged descriptors (triton.tools.ragged_tma) rest on the same wrap.
"""

from ..portable import tiles
from .gluon_api import gl, jit

END: gl.constexpr = gl.constexpr(2**30)


@jit
def coordinates(place, head, row, column, IS_RAGGED: gl.constexpr):
    """TMA coordinates of a tile that starts at `row` of a sequence. place: of sequence_place."""
    batch_index, first, length = place
    if IS_RAGGED:
        return [END, first + length, head, END - length + row, column]
    else:
        return [batch_index, head, row, column]


@jit
def sequence_place(
    cu_seqlens_ptr, batch_index, seqlen, IS_VARLEN: gl.constexpr, IS_RAGGED: gl.constexpr
):  # fmt: skip
    """(batch index, first row among all sequences, length), int32."""
    first, length = tiles.sequence_range(cu_seqlens_ptr, batch_index, seqlen, IS_VARLEN)
    first = first.to(gl.int32)
    if IS_RAGGED and not IS_VARLEN:
        first = batch_index * seqlen
    return batch_index, first, length
