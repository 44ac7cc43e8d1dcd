"""Builders of the block masks in the literature.

causal, sliding_window and local_global are exact to the token and take any lengths. bigbird,
strided, fixed and butterfly are defined on square blocks: their arguments count blocks, and a call
that must not see later keys inside a block adds causal=True (strided and fixed do so themselves).
"""

import torch
from torch import Tensor

from .block_mask import BlockMask
from .block_mask_checks import check_block_sizes, check_lengths

Device = torch.device | str


def causal(
    seqlen_q: int,
    seqlen_k: int | None = None,
    *,
    block_m: int = 128,
    block_n: int = 128,
    device: Device = "cpu",
) -> BlockMask:
    """Query i sees keys up to i + seqlen_k - seqlen_q, as flash_attention(causal=True) has it.

    seqlen_q, seqlen_k: tokens; seqlen_k defaults to seqlen_q. Density for n x n blocks: (n + 1) /
    (2 n).
    """
    return sliding_window(
        seqlen_q, seqlen_k, left=None, right=0, block_m=block_m, block_n=block_n, device=device
    )


def sliding_window(
    seqlen_q: int,
    seqlen_k: int | None = None,
    *,
    left: int | None,
    right: int | None,
    block_m: int = 128,
    block_n: int = 128,
    device: Device = "cpu",
) -> BlockMask:
    """Query i sees keys from i - left to i + right, shifted by seqlen_k - seqlen_q.

    seqlen_q, seqlen_k, left, right: tokens; None is unbounded, as in flash_attention(window=...).
    Density about (left + right + block_m + block_n) / seqlen_k.
    """
    return _banded(seqlen_q, seqlen_k, left, right, 0, block_m, block_n, device)


def local_global(
    seqlen: int,
    *,
    window: int,
    num_global: int,
    block_m: int = 128,
    block_n: int = 128,
    device: Device = "cpu",
) -> BlockMask:
    """Longformer (Beltagy et al. 2020, arXiv 2004.05150, section 3.1), its sliding window and
    global attention.

    Args:
        seqlen: tokens.
        window: tokens seen on each side; the paper's w is 2 * window.
        num_global: the first tokens, which see every token and are seen by every token.

    Density about (2 * window + 2 * num_global + block_m + block_n) / seqlen.
    """
    if window < 0 or num_global < 0:
        raise ValueError(
            f"window and num_global must not be negative, got {window} and {num_global}"
        )
    return _banded(seqlen, None, window, window, num_global, block_m, block_n, device)


def bigbird(
    seqlen: int,
    *,
    num_window: int = 3,
    num_global: int = 2,
    num_random: int = 3,
    seed: int = 0,
    nheads: int | None = None,
    block_size: int = 128,
    device: Device = "cpu",
) -> BlockMask:
    """BigBird (Zaheer et al. 2020, arXiv 2007.14062, section 2 and appendix D): a window, global
    blocks and random blocks.

    Args:
        seqlen: tokens; the rest counts blocks of block_size tokens.
        num_window: blocks around the diagonal, odd: (num_window - 1) / 2 on each side.
        num_global: first blocks that see all blocks and are seen by all.
        num_random: further blocks of each row, drawn without replacement among the hidden ones.
        seed: of the draws; the same blocks on every device.
        nheads: draws for each of so many query heads; None draws once for all.

    Density about (num_window + 2 * num_global + num_random) / (blocks of a row) when that is small.
    """
    if num_window < 1 or num_window % 2 == 0:
        raise ValueError(f"num_window must be odd and positive, got {num_window}")
    if num_global < 0 or num_random < 0:
        raise ValueError(
            f"num_global and num_random must not be negative, got {num_global} and {num_random}"
        )
    row, col = _grid(seqlen, block_size, "cpu")
    blocks = ((row - col).abs() <= num_window // 2) | (row < num_global) | (col < num_global)
    draws = torch.rand(
        nheads or 1, *blocks.shape, generator=torch.Generator().manual_seed(seed)
    ).masked_fill(blocks, -1.0)
    # A row with fewer hidden blocks than draws also gets visible ones, which changes nothing.
    chosen = draws.topk(min(num_random, blocks.shape[1]), dim=-1).indices
    is_random = torch.zeros(draws.shape, dtype=torch.bool).scatter_(-1, chosen, True)
    return _from_blocks((blocks | is_random)[None], seqlen, block_size, device)


def strided(
    seqlen: int,
    *,
    stride: int,
    causal: bool = True,
    block_size: int = 128,
    device: Device = "cpu",
) -> BlockMask:
    """Sparse Transformer, strided (Child et al. 2019, arXiv 1904.10509, section 4.3), on blocks.

    Block i sees the stride blocks before it and itself, and every stride-th block before it: i - j
    <= stride or (i - j) mod stride = 0, both sets of the paper's two heads in one mask.

    Args:
        seqlen: tokens.
        stride: blocks of block_size tokens, the paper's l.
        causal: later tokens are hidden, also within the blocks of the diagonal. Without, the
            pattern is mirrored above the diagonal.

    Density for n blocks, causal, n much larger than stride: about (stride + n / (2 stride)) / n.
    """
    _check_stride(stride)
    row, col = _grid(seqlen, block_size, device)
    distance = (row - col).abs()
    blocks = (distance <= stride) | (distance % stride == 0)
    return _autoregressive(blocks, causal, seqlen, block_size, device)


def fixed(
    seqlen: int,
    *,
    stride: int,
    num_summary: int = 1,
    causal: bool = True,
    block_size: int = 128,
    device: Device = "cpu",
) -> BlockMask:
    """Sparse Transformer, fixed (Child et al. 2019, arXiv 1904.10509, section 4.3), on blocks.

    Block i sees the blocks of its own group of stride blocks, and the last num_summary blocks of
    every group: j // stride = i // stride or j mod stride >= stride - num_summary.

    Args:
        seqlen: tokens.
        stride: blocks of block_size tokens in a group, the paper's l.
        num_summary: blocks of a group that all later ones see, the paper's c.
        causal: later tokens are hidden, also within the blocks of the diagonal. Without, summary
            blocks are seen from everywhere.

    Density for n blocks, a multiple of stride, not causal: (stride + (n / stride - 1) num_summary)
    / n; causal about half of it.
    """
    _check_stride(stride)
    if not 1 <= num_summary <= stride:
        raise ValueError(f"num_summary must be from 1 to the stride of {stride}, got {num_summary}")
    row, col = _grid(seqlen, block_size, device)
    blocks = (row // stride == col // stride) | (col % stride >= stride - num_summary)
    return _autoregressive(blocks, causal, seqlen, block_size, device)


def butterfly(
    seqlen: int,
    *,
    num_factors: int | None = None,
    num_global: int = 0,
    block_size: int = 128,
    device: Device = "cpu",
) -> BlockMask:
    """Pixelated Butterfly (Dao et al. 2022, arXiv 2112.00029, section 3): the pattern of
    block-sparse FlashAttention.

    Flat block butterfly: block i sees itself and i XOR 2^k for each k < num_factors, the sum of
    that many butterfly factors; plus global rows and columns. A number of blocks that is not a
    power of two gets the pattern of the next one, cut.

    Args:
        seqlen: tokens.
        num_factors: butterfly factors; None is all of them, log2 of the number of blocks, rounded
            up.
        num_global: first blocks that see all blocks and are seen by all.

    Density for n blocks, a power of two, without global ones: (num_factors + 1) / n.
    """
    row, col = _grid(seqlen, block_size, device)
    all_factors = (row.shape[0] - 1).bit_length()
    num_factors = all_factors if num_factors is None else num_factors
    if not 0 <= num_factors <= all_factors or num_global < 0:
        raise ValueError(
            f"num_factors must be from 0 to {all_factors} for {row.shape[0]} blocks and num_global "
            f"not negative, got {num_factors} and {num_global}"
        )
    difference = row ^ col
    # Zero or a single bit, below the number of factors.
    blocks = (difference & (difference - 1) == 0) & (difference < 2**num_factors)
    blocks |= (row < num_global) | (col < num_global)
    return _from_blocks(blocks, seqlen, block_size, device)


def _grid(seqlen: int, block_size: int, device: Device) -> tuple[Tensor, Tensor]:
    """Block row (n, 1) and block column (1, n)."""
    check_block_sizes(block_size, block_size)
    check_lengths(seqlen, seqlen)
    index = torch.arange(-(-seqlen // block_size), dtype=torch.int32, device=device)
    return index[:, None], index[None, :]


def _check_stride(stride: int) -> None:
    if stride < 1:
        raise ValueError(f"stride must be at least 1 block, got {stride}")


def _from_blocks(blocks: Tensor, seqlen: int, block_size: int, device: Device) -> BlockMask:
    blocks = blocks.to(device)
    return BlockMask.from_dense(blocks, block_size, block_size, seqlen_q=seqlen, seqlen_k=seqlen)


def _autoregressive(
    blocks: Tensor, causal: bool, seqlen: int, block_size: int, device: Device
) -> BlockMask:
    """Blocks above the diagonal hidden, those on it lower triangles."""
    if not causal:
        return _from_blocks(blocks, seqlen, block_size, device)
    visible = blocks.tril()[None, None]
    return BlockMask.from_candidates(
        visible,
        lambda b, h, q_idx, k_idx: q_idx >= k_idx,
        visible.tril(-1),
        (seqlen, seqlen),
        (block_size, block_size),
    )


def _banded(
    seqlen_q: int,
    seqlen_k: int | None,
    left: int | None,
    right: int | None,
    num_global: int,
    block_m: int,
    block_n: int,
    device: Device,
) -> BlockMask:
    """A window, aligned bottom-right, and the first num_global tokens seen by and seeing all."""
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    check_block_sizes(block_m, block_n)
    check_lengths(seqlen_q, seqlen_k)
    num_rows, num_cols = -(-seqlen_q // block_m), -(-seqlen_k // block_n)
    # Only blocks that an edge of the window cuts need a look at their tokens.
    everything = BlockMask.from_dense(
        torch.ones(num_rows, num_cols, dtype=torch.bool, device=device),
        block_m,
        block_n,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
    )
    kinds = everything.restricted(window=(left, right), per_row_tails=False).kinds()
    first_q = torch.arange(num_rows, device=device)[:, None] * block_m
    first_k = torch.arange(num_cols, device=device) * block_n
    visible = (kinds != 0) | (first_q < num_global) | (first_k < num_global)

    def is_visible(b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        distance = k_idx - q_idx - (seqlen_k - seqlen_q)
        is_inside = torch.ones_like(distance, dtype=torch.bool)
        if right is not None:
            is_inside &= distance <= right
        if left is not None:
            is_inside &= distance >= -left
        return is_inside | (q_idx < num_global) | (k_idx < num_global)

    return BlockMask.from_candidates(
        visible, is_visible, kinds == 2, (seqlen_q, seqlen_k), (block_m, block_n)
    )
