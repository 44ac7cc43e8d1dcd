"""Token masks packed into bits."""

import pytest
import torch

from flash_kernels.hopper.token_words import pack_tokens


@pytest.mark.parametrize("block_m,block_n", [(128, 128), (256, 128), (128, 256)])
@pytest.mark.parametrize("by_column", [False, True])
def test_every_token_is_its_bit(block_m, block_n, by_column):
    masks = torch.rand(3, block_m, block_n, generator=torch.Generator().manual_seed(0)) < 0.5
    lines = masks.transpose(1, 2) if by_column else masks
    words = pack_tokens(masks, by_column)
    assert words.shape == (*lines.shape[:2], lines.shape[2] // 32)
    for token in range(lines.shape[2]):
        bits = (words[:, :, token // 32] >> (token % 32)) & 1
        assert torch.equal(bits.bool(), lines[:, :, token])


def test_no_mask():
    assert pack_tokens(torch.zeros(0, 128, 128, dtype=torch.bool), False).shape == (0, 128, 4)
