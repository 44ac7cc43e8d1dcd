"""Bytes between HBM and the chip, counted from formulas: what attention must move, as the paper
counts it (section 3.2): every load of a block is a load from HBM, no cache in between.

All counts are of one head; bytes, not elements. N is seqlen, d headdim, `size` bytes an element.
"""

from collections.abc import Iterator
from typing import NamedTuple

_LSE, _KEY, _WORDS = 4, 4, 16  # bytes: of a row's log-sum-exp, a dropout key, delta_kernel's words


class Traffic(NamedTuple):
    """Bytes read and written."""

    read: float
    written: float

    def __add__(self, other: "Traffic") -> "Traffic":  # type: ignore[override]  # not a tuple's
        return Traffic(self.read + other.read, self.written + other.written)

    def times(self, number: float) -> "Traffic":
        return Traffic(self.read * number, self.written * number)

    @property
    def total(self) -> float:
        return self.read + self.written


def _tiles(seqlen: int, block: int) -> Iterator[tuple[int, int]]:
    """(first, end) of each tile."""
    return ((first, min(first + block, seqlen)) for first in range(0, seqlen, block))


def keys_of_row_tiles(seqlen: int, block_m: int, block_n: int, causal: bool) -> int:
    """Key rows loaded by all tiles of block_m queries, which take whole tiles of block_n."""
    if not causal:
        return -(-seqlen // block_m) * seqlen
    return sum(min(-(-end // block_n) * block_n, seqlen) for _, end in _tiles(seqlen, block_m))


def rows_of_key_tiles(seqlen: int, block_m: int, block_n: int, causal: bool) -> int:
    """Query rows loaded by all tiles of block_n keys, which take whole tiles of block_m."""
    if not causal:
        return -(-seqlen // block_n) * seqlen
    return sum(seqlen - first // block_m * block_m for first, _ in _tiles(seqlen, block_n))


def flash_forward(
    seqlen: int, headdim: int, size: int, tile: tuple[int, int], *, causal: bool, has_dropout: bool
) -> Traffic:
    """flash_kernels/portable/attention_forward.py: q once, k and v once a tile of queries."""
    keys = keys_of_row_tiles(seqlen, *tile, causal)
    row = headdim * size
    drop = _KEY * has_dropout
    return Traffic(seqlen * row + keys * (2 * row + drop), seqlen * (row + _LSE) + seqlen * drop)


def flash_backward(
    seqlen: int,
    headdim: int,
    size: int,
    dk_dv_tile: tuple[int, int],
    dq_tile: tuple[int, int],
    *,
    causal: bool,
    has_dropout: bool,
) -> Traffic:
    """attention_backward.py and dq.py: delta, dk and dv by tiles of keys, dq of queries."""
    row, drop = headdim * size, _KEY * has_dropout
    rows = rows_of_key_tiles(seqlen, *dk_dv_tile, causal)
    keys = keys_of_row_tiles(seqlen, *dq_tile, causal)
    delta = Traffic(seqlen * (2 * row + _LSE), seqlen * (_WORDS + drop))
    dk_dv = Traffic(seqlen * (2 * row + drop) + rows * (2 * row + _WORDS), seqlen * 2 * row)
    dq = Traffic(seqlen * (2 * row + _WORDS) + keys * (2 * row + drop), seqlen * row)
    return delta + dk_dv + dq


def once_forward(seqlen: int, headdim: int, size: int) -> Traffic:
    """q, k and v read once, out and lse written once: the least of any kernel."""
    row = headdim * size
    return Traffic(seqlen * 3 * row, seqlen * (row + _LSE))


def once_backward(seqlen: int, headdim: int, size: int) -> Traffic:
    """q, k, v, out, dout and lse read once, dq, dk and dv written once."""
    row = headdim * size
    return Traffic(seqlen * (5 * row + _LSE), seqlen * 3 * row)


def standard_forward(seqlen: int, headdim: int, size: int) -> Traffic:
    """Algorithm 0: S = q k^T, P = softmax(S), out = P v, each read and written in full.

    A mask and dropout, which the paper's algorithm leaves out, are passes of their own.
    """
    matrix, rows = seqlen * seqlen * size, seqlen * headdim * size
    return Traffic(2 * matrix + 3 * rows, 2 * matrix + rows)


def standard_backward(seqlen: int, headdim: int, size: int) -> Traffic:
    """Algorithm 3: dv from P, dP = dout v^T, dS from P and dP, dq and dk from dS."""
    matrix, rows = seqlen * seqlen * size, seqlen * headdim * size
    return Traffic(5 * matrix + 5 * rows, 2 * matrix + 3 * rows)


def paper_block(headdim: int, size: int, sram_bytes: int) -> int:
    """Keys of a block of algorithms 1 and 4: four blocks of them fill the SRAM."""
    return max(1, -(-sram_bytes // size // (4 * headdim)))


def paper_forward(
    seqlen: int, headdim: int, size: int, sram_bytes: int, *, causal: bool
) -> Traffic:
    """Algorithm 1: k and v once; q, out, and the sums and maxima (float32) once a block of keys."""
    rows = rows_of_key_tiles(seqlen, 1, paper_block(headdim, size, sram_bytes), causal)
    row, statistics = headdim * size, 2 * 4
    return Traffic(seqlen * 2 * row + rows * (2 * row + statistics), rows * (row + statistics))


def paper_backward(
    seqlen: int, headdim: int, size: int, sram_bytes: int, *, causal: bool
) -> Traffic:
    """Algorithm 4: k and v once, dk and dv once; q, out, dout and dq once a block of keys."""
    rows = rows_of_key_tiles(seqlen, 1, paper_block(headdim, size, sram_bytes), causal)
    row, statistics = headdim * size, 2 * 4
    return Traffic(seqlen * 2 * row + rows * (4 * row + statistics), seqlen * 2 * row + rows * row)


def theorem_2(seqlen: int, headdim: int, size: int, sram_bytes: int) -> float | None:
    """N^2 d^2 / M, theorem 2's order of the accesses without its constant, in bytes.

    M is the elements that the SRAM holds. None outside the theorem's range d <= M <= N d: an SRAM
    that holds all keys needs every input once.
    """
    elements = sram_bytes / size
    if not headdim <= elements <= seqlen * headdim:
        return None
    return seqlen**2 * headdim**2 / elements * size
