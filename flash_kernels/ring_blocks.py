"""Block masks on a ring: of a mask over the whole sequence, what each step of a process needs."""

import math

import torch

from .block_lists import list_blocks, sort_blocks
from .block_mask import BlockMask
from .block_mask_checks import check_covered
from .ring_shares import held_chunks, parts


def check_chunks(block_mask: BlockMask, seqlen: int, size: int) -> None:
    """Raise ValueError unless a ring of `size` can split a sequence of `seqlen` under the mask."""
    block = math.lcm(block_mask.block_m, block_mask.block_n)
    if seqlen % (2 * size * block):
        raise ValueError(
            f"a block mask on a ring of {size} must have its sequence in {2 * size} chunks of "
            f"whole blocks, a multiple of {2 * size * block} tokens, got {seqlen} and blocks of "
            f"{block_mask.block_m} x {block_mask.block_n}: take smaller blocks, another length or "
            "fewer processes"
        )
    check_covered("seqlen_q", seqlen, block_mask.num_rows * block_mask.block_m)
    check_covered("seqlen_k", seqlen, block_mask.num_cols * block_mask.block_n)


def step_masks(
    block_mask: BlockMask, rank: int, size: int, seqlen: int, causal: bool
) -> list[BlockMask]:
    """What process `rank` walks in the step with the keys of each process; kept with the mask.

    Together they have 1 / size of the mask's blocks, and its token masks.

    Raises:
        ValueError: see check_chunks.
    """
    check_chunks(block_mask, seqlen, size)
    return block_mask.kept(
        ("ring", rank, size, seqlen, causal),
        lambda: [
            _step_mask(block_mask, rank, source, size, seqlen // size, causal)
            for source in range(size)
        ],
    )


def _step_mask(
    mask: BlockMask, rank: int, source: int, size: int, rows: int, causal: bool
) -> BlockMask:
    row_part, col_part, is_causal = parts(rank, source, rows, causal)
    blocks = list_blocks(mask.rows)
    places, lengths, counts = [], [], []
    for place, process, part, block, count in (
        (blocks.rows, rank, row_part, mask.block_m, mask.num_rows),
        (blocks.cols, source, col_part, mask.block_n, mask.num_cols),
    ):
        num_blocks = rows // 2 // block  # of a chunk
        new = torch.full((count,), -1, dtype=torch.int64, device=mask.device)
        held = held_chunks(process, size, rows, part)
        for index, chunk in enumerate(held):
            first = chunk * num_blocks
            new[first : first + num_blocks] = index * num_blocks + torch.arange(
                num_blocks, device=mask.device
            )
        places.append(new[place])
        counts.append(len(held) * num_blocks)
        lengths.append(len(held) * num_blocks * block)
    blocks = blocks._replace(rows=places[0], cols=places[1])
    blocks = blocks.select((blocks.rows >= 0) & (blocks.cols >= 0))
    by_row, by_col = sort_blocks(blocks, mask.mask_batch, mask.mask_heads, counts[0], counts[1])
    sizes = (lengths[0], lengths[1], mask.block_m, mask.block_n)
    step = BlockMask(*sizes, by_row, by_col, mask.token_masks)
    return step.restricted(causal=is_causal)
