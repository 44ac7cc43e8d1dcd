"""Token masks of a block mask as bits, for hide_tokens of masking.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def pack_tokens_kernel(
    tokens_ptr, words_ptr, line_stride, column_stride, num_lines, num_words, area,
    LINES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Grid: (num_patterns, num_lines / LINES)."""
    lines = tl.program_id(1) * LINES + tl.arange(0, LINES)
    columns = tl.arange(0, WORDS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    pattern = tl.program_id(0).to(tl.int64)
    offsets = lines[:, None, None] * line_stride + columns[None, :, :] * column_stride
    tokens = tl.load(tokens_ptr + pattern * area + offsets).to(tl.int32)  # [LINES, WORDS, 32]
    words = tl.sum(tokens << tl.arange(0, 32)[None, None, :], 2)
    offsets = (pattern * num_lines + lines[:, None]) * num_words + tl.arange(0, WORDS)[None, :]
    tl.store(words_ptr + offsets, words)


def pack_tokens(token_masks: Tensor, by_column: bool) -> Tensor:
    """int32 words of bool (num_patterns, block_m, block_n), whose sides are multiples of 64.

    Bit t % 32 of word t // 32 of a line is its token t; lines are rows, or columns if by_column:
    (num_patterns, block_m, block_n / 32) or (num_patterns, block_n, block_m / 32).
    """
    num_patterns, block_m, block_n = token_masks.shape
    strides = token_masks.stride()[1:]
    num_lines, length = (block_n, block_m) if by_column else (block_m, block_n)
    line_stride, column_stride = reversed(strides) if by_column else strides
    num_words = length // 32
    words = torch.empty(
        (num_patterns, num_lines, num_words), dtype=torch.int32, device=token_masks.device
    )
    if num_patterns > 0:
        pack_tokens_kernel[(num_patterns, num_lines // 16)](
            token_masks.view(torch.int8), words, line_stride, column_stride, num_lines, num_words,
            token_masks.stride(0), LINES=16, WORDS=num_words,
        )  # fmt: skip
    return words
