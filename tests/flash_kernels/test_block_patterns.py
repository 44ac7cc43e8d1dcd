"""The builders against definitions written per element, and the reference on a block mask."""

import math

import pytest
import torch

from flash_kernels import block_patterns, reference
from flash_kernels.block_mask import BlockMask


def tokens_where(seqlen_q: int, seqlen_k: int, is_visible) -> torch.Tensor:
    rows = [[is_visible(i, j) for j in range(seqlen_k)] for i in range(seqlen_q)]
    return torch.tensor(rows, dtype=torch.bool)


def assert_tokens(mask: BlockMask, is_visible) -> None:
    expected = tokens_where(mask.seqlen_q, mask.seqlen_k, is_visible)
    assert torch.equal(mask.to_token_mask()[0, 0], expected)
    # Blocks are stored as what they are.
    for row, strip in enumerate(expected.split(mask.block_m, 0)):
        for col, block in enumerate(strip.split(mask.block_n, 1)):
            kind = 2 if block.all() else 1 if block.any() else 0
            assert mask.kinds()[0, 0, row, col] == kind


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1, 1), (200, 200), (70, 150), (150, 70)])
@pytest.mark.parametrize("block_m, block_n", [(16, 32), (64, 16)])
def test_causal_and_window(seqlen_q, seqlen_k, block_m, block_n):
    sizes = dict(block_m=block_m, block_n=block_n)
    offset = seqlen_k - seqlen_q
    mask = block_patterns.causal(seqlen_q, seqlen_k, **sizes)
    assert_tokens(mask, lambda i, j: j <= i + offset)
    for left, right in ((20, 40), (0, 0), (None, 7), (33, None), (500, 500)):
        mask = block_patterns.sliding_window(seqlen_q, seqlen_k, left=left, right=right, **sizes)
        low, high = (math.inf if n is None else n for n in (left, right))
        assert_tokens(mask, lambda i, j, a=low, b=high: -a <= j - i - offset <= b)


@pytest.mark.parametrize("window, num_global", [(0, 0), (20, 1), (3, 40), (300, 300)])
def test_local_global(window, num_global):
    mask = block_patterns.local_global(
        150, window=window, num_global=num_global, block_m=32, block_n=16
    )
    assert_tokens(mask, lambda i, j: abs(i - j) <= window or i < num_global or j < num_global)


def test_bigbird():
    mask = block_patterns.bigbird(
        1600, num_window=5, num_global=1, num_random=4, seed=3, nheads=3, block_size=16
    )
    blocks = mask.to_dense()[0]
    assert blocks.shape == (3, 100, 100) and mask.token_masks.shape[0] == 0
    sure = tokens_where(100, 100, lambda i, j: abs(i - j) <= 2 or i < 1 or j < 1)
    assert blocks[:, sure].all()
    assert ((blocks & ~sure).sum(-1)[:, 1:] == 4).all()
    assert not torch.equal(blocks[0], blocks[1])
    again = block_patterns.bigbird(
        1600, num_window=5, num_global=1, num_random=4, seed=3, nheads=3, block_size=16
    )
    assert torch.equal(again.to_dense()[0], blocks)
    other = block_patterns.bigbird(1600, seed=4, block_size=16)
    assert other.mask_heads == 1
    # More draws than hidden blocks: everything is visible, nothing fails.
    assert block_patterns.bigbird(64, num_random=9, block_size=16).density == 1


@pytest.mark.parametrize("stride", [1, 3, 20])
def test_strided(stride):
    def sees(i, j):
        return abs(i - j) <= stride or (i - j) % stride == 0

    mask = block_patterns.strided(200, stride=stride, block_size=16)
    assert_tokens(mask, lambda i, j: j <= i and sees(i // 16, j // 16))
    mask = block_patterns.strided(200, stride=stride, block_size=16, causal=False)
    assert_tokens(mask, lambda i, j: sees(i // 16, j // 16))


@pytest.mark.parametrize("stride, num_summary", [(1, 1), (4, 1), (5, 2), (20, 3)])
def test_fixed(stride, num_summary):
    def sees(i, j):
        return i // stride == j // stride or j % stride in range(stride - num_summary, stride)

    options = dict(stride=stride, num_summary=num_summary, block_size=16)
    mask = block_patterns.fixed(200, **options)
    assert_tokens(mask, lambda i, j: j <= i and sees(i // 16, j // 16))
    mask = block_patterns.fixed(200, causal=False, **options)
    assert_tokens(mask, lambda i, j: sees(i // 16, j // 16))


@pytest.mark.parametrize("num_blocks", [1, 2, 8, 11, 16])
@pytest.mark.parametrize("num_global", [0, 2])
def test_butterfly(num_blocks, num_global):
    all_factors = math.ceil(math.log2(num_blocks))
    for num_factors in (None, *range(all_factors + 1)):
        mask = block_patterns.butterfly(
            16 * num_blocks - 3, num_factors=num_factors, num_global=num_global, block_size=16
        )
        count = all_factors if num_factors is None else num_factors
        partners = [{i} | {i ^ 2**k for k in range(count)} for i in range(num_blocks)]
        expected = tokens_where(
            num_blocks,
            num_blocks,
            lambda i, j, p=partners: j in p[i] or i < num_global or j < num_global,
        )
        assert torch.equal(mask.to_dense()[0, 0], expected)
        assert torch.equal(expected, expected.T)
        if num_global == 0 and num_blocks == 2**all_factors:
            assert mask.density == (count + 1) / num_blocks


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: block_patterns.causal(0), "seqlen_q must be at least 1, got 0"),
        (lambda: block_patterns.causal(9, block_m=8), "block_m must be.*got 8"),
        (lambda: block_patterns.sliding_window(9, left=-1, right=0), r"window.*\(-1, 0\)"),
        (lambda: block_patterns.local_global(9, window=-1, num_global=0), "window and num_global"),
        (lambda: block_patterns.bigbird(9, num_window=2), "num_window must be odd.*got 2"),
        (lambda: block_patterns.bigbird(9, num_random=-1), "num_random must not be negative"),
        (lambda: block_patterns.strided(9, stride=0), "stride must be at least 1 block, got 0"),
        (lambda: block_patterns.fixed(9, stride=2, num_summary=3), "from 1 to the stride of 2"),
        (lambda: block_patterns.butterfly(512, num_factors=3), "from 0 to 2 for 4 blocks.*got 3"),
    ],
)
def test_errors(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def naive_attention(q, k, v, visible):
    """One query at a time; visible (batch, nheads, seqlen_q, seqlen_k)."""
    batch, seqlen_q, nheads, headdim = q.shape
    out = torch.zeros_like(q)
    lse = torch.full((batch, nheads, seqlen_q), -math.inf, dtype=q.dtype)
    for b in range(batch):
        for h in range(nheads):
            for i in range(seqlen_q):
                keys = visible[b, h, i].nonzero()[:, 0]
                if len(keys):
                    kv_head = h // (nheads // k.shape[2])
                    scores = k[b, keys, kv_head] @ q[b, i, h] / math.sqrt(headdim)
                    out[b, i, h] = torch.softmax(scores, 0) @ v[b, keys, kv_head]
                    lse[b, h, i] = torch.logsumexp(scores, 0)
    return out, lse


@pytest.mark.parametrize("mask_batch", [1, 2])
@pytest.mark.parametrize("mask_heads", [1, 4])
@pytest.mark.parametrize("causal, window", [(False, (None, None)), (True, (30, None))])
def test_reference(mask_batch, mask_heads, causal, window):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.rand(mask_batch, mask_heads, 50, 70, generator=generator) < 0.3
    tokens[:, :, 4] = False
    tokens[:, 0, :, 60] = False  # a key that only some heads see
    # The mask is longer than the call.
    mask = BlockMask.from_dense(
        torch.ones(5, 6, dtype=torch.bool), 16, 16,
        token_mask=torch.nn.functional.pad(tokens, (0, 26, 0, 30), value=True),
    )  # fmt: skip
    q, k, v = (
        torch.randn(2, *size, 8, dtype=torch.float64, generator=generator).requires_grad_()
        for size in ((50, 4), (70, 2), (70, 2))
    )
    out, lse = reference.block_sparse_attention(
        q, k, v, mask, causal=causal, window=window, return_lse=True
    )
    visible = tokens & reference.visible_keys(50, 70, causal=causal, window=window)
    expected_out, expected_lse = naive_attention(q, k, v, visible.expand(2, 4, -1, -1))
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)
    assert (out[:, 4] == 0).all() and (lse[:, :, 4] == -math.inf).all()
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
    expected = torch.autograd.grad(expected_out.square().sum(), (q, k, v))
    torch.testing.assert_close(gradients, expected)


def test_reference_with_a_full_mask_is_flash_attention():
    mask = BlockMask.from_dense(torch.ones(2, 2, dtype=torch.bool))
    q, k, v = (torch.randn(2, 130, 2, 8) for _ in range(3))
    options = dict(
        causal=True, softcap=3.0, alibi_slopes=torch.tensor([0.1, 0.2]), softmax_scale=0.3,
        lengths_k=torch.tensor([100, 0]), dropout_p=0.2, dropout_seed=7, return_lse=True,
    )  # fmt: skip
    ours = reference.block_sparse_attention(q, k, v, mask, **options)
    torch.testing.assert_close(ours, reference.flash_attention(q, k, v, **options), rtol=0, atol=0)


def test_reference_ignores_keys_that_no_query_of_a_head_sees():
    blocks = torch.ones(1, 2, 1, 2, dtype=torch.bool)
    blocks[0, 1, 0, 1] = False
    mask = BlockMask.from_dense(blocks, 16, 16)
    q, k, v = torch.randn(1, 16, 2, 4), torch.randn(1, 32, 2, 4), torch.randn(1, 32, 2, 4)
    k[:, 16:, 1] = v[:, 16:, 1] = math.nan
    out = reference.block_sparse_attention(q, k, v, mask)
    assert out.isfinite().all()


def test_reference_refuses_a_mask_of_another_shape():
    q = torch.randn(2, 300, 4, 8)
    mask = BlockMask.from_dense(torch.ones(3, 1, 3, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="mask_batch of block_mask must be 1 or 2, got 3"):
        reference.block_sparse_attention(q, q, q, mask)
    mask = BlockMask.from_dense(torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="seqlen_q must be at most 256.*got 300"):
        reference.block_sparse_attention(q, q, q, mask)
