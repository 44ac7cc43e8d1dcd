"""Sorted lists of the blocks of a mask, along rows and along columns, and their token patterns."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# fn(b, h, q_idx, k_idx) -> bool, True = visible: see BlockMask.from_function.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# Tokens of a mask function looked at at once: its intermediate results are int64 or larger.
_CHUNK_TOKENS = 2**23
_BITS = (1, 2, 4, 8, 16, 32, 64, 128)


class BlockLists(NamedTuple):
    """One direction of a BlockMask: for each line its blocks, partial ones before full ones.

    A line is a block row (BlockMask.rows) or a block column (BlockMask.cols).

    bounds: int32 (mask_batch, mask_heads, num_lines, 3): begin, full_begin, end of the line in
        indices. [begin, full_begin) are partial blocks, [full_begin, end) full ones, each ascending
    indices: int32 (num_blocks,): block column of each block (rows) or block row (cols)
    patterns: int32 (num_blocks,): its index in BlockMask.token_masks; -1 has no token mask: a full
        block, or one that only an option or the end of the sequence cuts
    """

    bounds: Tensor
    indices: Tensor
    patterns: Tensor


class Blocks(NamedTuple):
    """Blocks of a mask in any order, all (num_blocks,).

    heads: int64, batch index * mask_heads + head index
    rows, cols: int64, block row and block column
    patterns: int32, index of its token mask or -1
    is_full: bool, nothing in it is masked
    """

    heads: Tensor
    rows: Tensor
    cols: Tensor
    patterns: Tensor
    is_full: Tensor

    def select(self, chosen: Tensor | slice) -> "Blocks":
        return Blocks(*(column[chosen] for column in self))


def sort_blocks(
    blocks: Blocks, mask_batch: int, mask_heads: int, num_rows: int, num_cols: int
) -> tuple[BlockLists, BlockLists]:
    """The lists along rows and along columns."""
    lists = []
    for lines, num_lines, others, num_others in (
        (blocks.rows, num_rows, blocks.cols, num_cols),
        (blocks.cols, num_cols, blocks.rows, num_rows),
    ):
        parts = (blocks.heads * num_lines + lines) * 2 + blocks.is_full
        order = torch.argsort(parts * num_others + others)
        num_parts = mask_batch * mask_heads * num_lines * 2
        starts = torch.searchsorted(
            parts[order], torch.arange(num_parts + 1, device=parts.device), out_int32=True
        )
        bounds = torch.stack([starts[:-1:2], starts[1::2], starts[2::2]], -1)
        bounds = bounds.view(mask_batch, mask_heads, num_lines, 3)
        lists.append(BlockLists(bounds, others[order].int(), blocks.patterns[order]))
    return lists[0], lists[1]


def list_visible(visible: Tensor, is_full: Tensor) -> Blocks:
    """The blocks where `visible` is True, none with a token mask yet.

    visible, is_full: bool (mask_batch, mask_heads, rows, cols).
    """
    b, h, rows, cols = visible.nonzero().unbind(-1)
    patterns = torch.full_like(rows, -1, dtype=torch.int32)
    return Blocks(b * visible.shape[1] + h, rows, cols, patterns, is_full[b, h, rows, cols])


def list_blocks(rows: BlockLists) -> Blocks:
    """The inverse of sort_blocks, from the lists along rows."""
    num_rows, num_blocks = rows.bounds.shape[2], rows.indices.shape[0]
    begin, full_begin, end = rows.bounds.view(-1, 3).long().unbind(-1)
    lines = torch.arange(begin.shape[0], device=begin.device)
    # output_size spares a wait for the device.
    lines = lines.repeat_interleave(end - begin, output_size=num_blocks)
    is_full = torch.arange(num_blocks, device=begin.device) >= full_begin[lines]
    row_count = max(num_rows, 1)
    return Blocks(
        lines // row_count, lines % row_count, rows.indices.long(), rows.patterns, is_full
    )


def restrict_blocks(
    blocks: Blocks,
    block_sizes: tuple[int, int],
    lengths: tuple[int, int],
    window: tuple[int | None, int | None],
    per_row_tails: bool,
) -> Blocks:
    """Without the blocks that window or the lengths hide altogether; is_full of those they cut is
    False.
    """
    (block_m, block_n), (seqlen_q, seqlen_k), (left, right) = block_sizes, lengths, window
    first_q, first_k = blocks.rows * block_m, blocks.cols * block_n
    last_q = (first_q + block_m).clamp(max=seqlen_q) - 1
    last_k = (first_k + block_n).clamp(max=seqlen_k) - 1
    keep = (first_q < seqlen_q) & (first_k < seqlen_k)
    is_whole = last_k - first_k == block_n - 1
    if per_row_tails:
        is_whole &= last_q - first_q == block_m - 1
    # Distances of keys from their query's diagonal: a block has all those between these two.
    lowest = first_k - last_q - (seqlen_k - seqlen_q)
    highest = last_k - first_q - (seqlen_k - seqlen_q)
    if right is not None:
        keep &= lowest <= right
        is_whole &= highest <= right
    if left is not None:
        keep &= highest >= -left
        is_whole &= lowest >= -left
    return blocks._replace(is_full=blocks.is_full & is_whole).select(keep)


def evaluate_blocks(
    fn: MaskFunction | None,
    blocks: Blocks,
    mask_heads: int,
    lengths: tuple[int, int],
    block_sizes: tuple[int, int],
) -> tuple[Blocks, Tensor]:
    """Reduce blocks to those in which fn(b, h, q_idx, k_idx) shows a token.

    Returns them with patterns and is_full set, and the distinct token masks, bool (num_patterns,
    block_m, block_n). Positions past the lengths never count and are False in the masks. Blocks
    that are full already are not looked at; where all are, fn may be None.
    """
    is_known = blocks.is_full
    known, unknown = blocks.select(is_known), blocks.select(~is_known)
    block_m, block_n = block_sizes
    step = max(_CHUNK_TOKENS // (block_m * block_n), 1)
    found, tables, num_words = [known], [], 0
    for start in range(0, unknown.rows.shape[0], step):
        chunk = unknown.select(slice(start, start + step))
        assert fn is not None
        visible, is_inside = _tokens(fn, chunk, mask_heads, lengths, block_sizes)
        is_full = visible.flatten(1).all(1)
        is_partial = visible.flatten(1).any(1) & ~is_full
        masks = (visible & is_inside)[is_partial]
        words, patterns = _pack(masks).unique(dim=0, return_inverse=True)
        chunk = chunk._replace(is_full=is_full)
        chunk.patterns[is_partial] = patterns.int() + num_words
        found.append(chunk.select(is_full | is_partial))
        tables.append(words)
        num_words += words.shape[0]
    blocks = Blocks(*(torch.cat(column) for column in zip(*found, strict=True)))
    if num_words == 0:
        return blocks, torch.zeros(0, block_m, block_n, dtype=torch.bool, device=blocks.rows.device)
    words, merged = torch.cat(tables).unique(dim=0, return_inverse=True)
    has_mask = blocks.patterns >= 0
    patterns = torch.where(has_mask, merged.int()[blocks.patterns.clamp(min=0)], -1)
    return blocks._replace(patterns=patterns), _unpack(words, block_m, block_n)


def _tokens(
    fn: MaskFunction,
    blocks: Blocks,
    mask_heads: int,
    lengths: tuple[int, int],
    block_sizes: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """fn over the tokens of each block, and which of them lie inside the lengths.

    Those outside repeat the last token inside, so that any and all over a block hold as they are.
    bool (num_blocks, block_m, block_n), and a bool that broadcasts to it.
    """
    (seqlen_q, seqlen_k), (block_m, block_n) = lengths, block_sizes
    device = blocks.rows.device
    q_idx = blocks.rows[:, None, None] * block_m + torch.arange(block_m, device=device)[:, None]
    k_idx = blocks.cols[:, None, None] * block_n + torch.arange(block_n, device=device)
    heads = blocks.heads[:, None, None]
    # fn may read tables as long as the sequence.
    visible = fn(
        heads // mask_heads,
        heads % mask_heads,
        q_idx.clamp(max=seqlen_q - 1),
        k_idx.clamp(max=seqlen_k - 1),
    )
    shape = (blocks.rows.shape[0], block_m, block_n)
    if not isinstance(visible, Tensor) or visible.dtype != torch.bool:
        got = visible.dtype if isinstance(visible, Tensor) else type(visible).__name__
        raise ValueError(f"the mask function must return a bool tensor, got {got}: compare in it")
    try:
        visible = visible.expand(shape)
    except RuntimeError:
        raise ValueError(
            "the mask function must work element by element on index tensors that broadcast to "
            f"{shape}, got shape {tuple(visible.shape)}: index tables as table[q_idx, k_idx]"
        ) from None
    return visible, (q_idx < seqlen_q) & (k_idx < seqlen_k)


def _pack(masks: Tensor) -> Tensor:
    """bool (n, block_m, block_n), whose area is a multiple of 64, as bits: int64 (n, words)."""
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=masks.device)
    octets = masks.reshape(masks.shape[0], masks.shape[1] * masks.shape[2] // 8, 8)
    return (octets * weights).sum(-1, dtype=torch.uint8).view(torch.int64)


def _unpack(words: Tensor, block_m: int, block_n: int) -> Tensor:
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=words.device)
    octets = words.view(torch.uint8)[:, :, None] & weights
    return (octets != 0).view(words.shape[0], block_m, block_n)
