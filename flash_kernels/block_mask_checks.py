"""Checks of what BlockMask is built from and restricted to."""

import torch
from torch import Tensor


def check_block_sizes(block_m: int, block_n: int) -> None:
    for name, size in (("block_m", block_m), ("block_n", block_n)):
        if not 16 <= size <= 256 or size % 16 != 0:
            raise ValueError(
                f"{name} must be a multiple of 16 from 16 to 256, got {size}: "
                "choose another block size"
            )


def check_lengths(seqlen_q: int, seqlen_k: int) -> None:
    for name, length in (("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)):
        if length < 1:
            raise ValueError(f"{name} must be at least 1, got {length}")


def check_shared(batch: int | None, nheads: int | None) -> None:
    for name, size in (("batch", batch), ("nheads", nheads)):
        if size is not None and size < 1:
            raise ValueError(f"{name} must be at least 1, None for one mask, got {size}")


def check_window(left: int | None, right: int | None) -> None:
    if min(left or 0, right or 0) < 0:
        raise ValueError(f"window must hold numbers of keys or None, got {(left, right)}")


def checked_matrix(name: str, matrix: Tensor, dims: str) -> Tensor:
    """bool, with batch and heads in front."""
    if matrix.dtype != torch.bool:
        raise ValueError(f"{name} must be bool, got {matrix.dtype}: compare, as in {name} != 0")
    if matrix.dim() not in (2, 4) or matrix.numel() == 0:
        raise ValueError(
            f"{name} must be ({dims}) or (1 or batch, 1 or nheads, {dims}) and not empty, "
            f"got shape {tuple(matrix.shape)}"
        )
    return matrix if matrix.dim() == 4 else matrix[None, None]


def check_covered(name: str, length: int, covered: int) -> None:
    if not 0 <= length <= covered:
        raise ValueError(
            f"{name} must be at most {covered}, which the blocks of the mask cover, got {length}: "
            "build the mask for the longest sequence"
        )


def checked_token_mask(token_mask: Tensor, blocks: Tensor, lengths: tuple[int, int]) -> Tensor:
    """bool, with batch and heads in front, which broadcast with those of blocks."""
    token_mask = checked_matrix("token_mask", token_mask, "seqlen_q, seqlen_k")
    if token_mask.shape[2:] != lengths:
        raise ValueError(
            f"token_mask must end in (seqlen_q, seqlen_k) = {lengths}, "
            f"got shape {tuple(token_mask.shape)}"
        )
    if token_mask.device != blocks.device:
        raise ValueError(
            f"token_mask must be on {blocks.device} like blocks, got {token_mask.device}"
        )
    for name, a, b in zip(("batch", "nheads"), blocks.shape, token_mask.shape, strict=False):
        if a != b and 1 not in (a, b):
            raise ValueError(
                f"blocks and token_mask must have the same {name} or 1, got {a} and {b}"
            )
    return token_mask


def checked_lengths(
    blocks: Tensor, lengths: tuple[int | None, int | None], block_sizes: tuple[int, int]
) -> tuple[int, int]:
    """Lengths that the blocks cover without a row or column to spare; None is all they cover."""
    checked = []
    for name, line, count, length, size in zip(
        ("seqlen_q", "seqlen_k"), ("rows", "columns"), blocks.shape[2:], lengths, block_sizes,
        strict=True,
    ):  # fmt: skip
        length = count * size if length is None else length
        if not (count - 1) * size < length <= count * size:
            raise ValueError(
                f"{name} must be from {(count - 1) * size + 1} to {count * size} for {count} block "
                f"{line} of {size} tokens, got {length}: change it or the number of blocks"
            )
        checked.append(length)
    return checked[0], checked[1]


def checked_ones_and_zeros(blocks: Tensor) -> Tensor:
    """As bool."""
    if blocks.is_floating_point() or not bool(((blocks == 0) | (blocks == 1)).all()):
        raise ValueError(
            f"blocks must be bool or integers of 0 and 1, got {blocks.dtype}: compare, as in "
            "blocks != 0"
        )
    return blocks != 0
