"""Which rows of a sequence a process of a ring holds, and which of them a step takes."""

from typing import Any

import torch
from torch import Tensor


def parts(rank: int, source: int, rows: int, causal: bool) -> tuple[slice, slice, bool]:
    """(query rows, keys, whether causal) of the step that holds the keys of process `source`."""
    everything = slice(0, rows)
    if not causal or source == rank:
        return everything, everything, causal
    if source < rank:  # its first chunk is before both of ours, its second one behind
        return everything, slice(0, rows // 2), False
    return slice(rows // 2, rows), everything, False


def held_chunks(source: int, size: int, rows: int, part: slice) -> tuple[int, ...]:
    """Which of 2 * size chunks lie in `part` of a process's rows: all, or one half of them."""
    half = rows // 2
    return (source, 2 * size - 1 - source)[part.start // half : part.stop // half]


def held_cu_seqlens(cu_seqlens: Tensor, source: int, size: int, rows: int, part: slice) -> Tensor:
    """Where sequences start in a part of a process's share: int32, as cu_seqlens, never falling.

    Args:
        cu_seqlens: of the whole.
        source, size: the process, of how many.
        rows: of its share of a line.
        part: of these rows: all, or the first or second half, which are its two chunks.
    """
    half, length = rows // 2, rows * size
    line = cu_seqlens.div(length, rounding_mode="floor")
    place = cu_seqlens - line * length
    held = [(place - c * half).clamp(0, half) for c in held_chunks(source, size, rows, part)]
    return (line * (part.stop - part.start) + sum(held)).int()


def held_positions(
    cu_seqlens: Tensor | None, source: int, size: int, rows: int, part: slice, like: Tensor
) -> Tensor:
    """Where the rows of a part of a process's share lie in their sequences: int32 (rows of the
    part,), of packed sequences line after line.

    Args:
        cu_seqlens, source, size, rows, part: as in held_cu_seqlens.
        like: (lines, rows, ...), the share.
    """
    half = rows // 2
    options: dict[str, Any] = {"dtype": torch.int32, "device": like.device}
    chunks = held_chunks(source, size, rows, part)
    places = torch.cat([torch.arange(c * half, (c + 1) * half, **options) for c in chunks])
    if cu_seqlens is None:
        return places
    places = (torch.arange(len(like), **options)[:, None] * (rows * size) + places).flatten()
    return places - cu_seqlens[torch.searchsorted(cu_seqlens, places, right=True) - 1]
