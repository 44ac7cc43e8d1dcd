"""FlexAttention's BlockMask (torch.nn.attention.flex_attention) to and from ours."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .block_lists import MaskFunction

if TYPE_CHECKING:  # its import takes seconds: the compiler's
    from torch.nn.attention import flex_attention


def read_flex(
    flex_mask: "flex_attention.BlockMask",
) -> tuple[Tensor, Tensor, MaskFunction, tuple[int, int], tuple[int, int]]:
    """visible and is_full, bool (batch, nheads, rows, cols); mask_mod; lengths; block sizes."""
    (seqlen_q, seqlen_k), (block_m, block_n) = flex_mask.seq_lengths, flex_mask.BLOCK_SIZE
    num_rows, num_cols = -(-seqlen_q // block_m), -(-seqlen_k // block_n)
    if flex_mask.kv_num_blocks.shape[-1] != num_rows:
        raise ValueError(
            f"the FlexAttention mask must have {num_rows} block rows for {seqlen_q} queries, got "
            f"{flex_mask.kv_num_blocks.shape[-1]}: make it with create_block_mask"
        )
    partial = _to_dense(flex_mask.kv_num_blocks, flex_mask.kv_indices, num_cols)
    full = torch.zeros_like(partial)
    if flex_mask.full_kv_num_blocks is not None and flex_mask.full_kv_indices is not None:
        full = _to_dense(flex_mask.full_kv_num_blocks, flex_mask.full_kv_indices, num_cols)
    lengths, block_sizes = (seqlen_q, seqlen_k), (block_m, block_n)
    return partial | full, full, flex_mask.mask_mod, lengths, block_sizes


def _to_dense(counts: Tensor, indices: Tensor, num_cols: int) -> Tensor:
    """bool (batch, nheads, rows, cols) of the first counts[..., r] indices of each row r."""
    missing = (None,) * (3 - counts.dim())
    counts, indices = counts[missing], indices[missing]
    is_listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    dense = torch.zeros(*counts.shape, num_cols + 1, dtype=torch.bool, device=indices.device)
    # Unlisted entries fall into a column that is cut off.
    dense.scatter_(-1, torch.where(is_listed, indices, num_cols).long(), True)
    return dense[..., :num_cols]


def write_flex(
    partial: Tensor,
    full: Tensor,
    patterns: Tensor,
    pattern_masks: Tensor,
    lengths: tuple[int, int],
) -> "flex_attention.BlockMask":
    """FlexAttention's BlockMask.

    Args:
        partial, full: bool (mask_batch, mask_heads, rows, cols), the blocks of each kind.
        patterns: integers of that shape, the row of pattern_masks which holds for a block.
        pattern_masks: bool (num, block_m, block_n).
        lengths: (seqlen_q, seqlen_k).
    """
    from torch.nn.attention.flex_attention import BlockMask

    mask_batch, mask_heads = patterns.shape[:2]
    block_m, block_n = pattern_masks.shape[1:]

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        # A shared mask is asked for every batch entry and head.
        b = b if mask_batch > 1 else torch.zeros_like(b)
        h = h if mask_heads > 1 else torch.zeros_like(h)
        pattern = patterns[b, h, q_idx // block_m, k_idx // block_n]
        return pattern_masks[pattern, q_idx % block_m, k_idx % block_n]

    def ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.argsort(blocks.byte(), dim=-1, descending=True, stable=True)
        return blocks.sum(-1, dtype=torch.int32), order.int()

    return BlockMask.from_kv_blocks(
        *ordered(partial),
        *ordered(full),
        BLOCK_SIZE=(block_m, block_n),
        mask_mod=mask_mod,
        seq_lengths=lengths,
    )
