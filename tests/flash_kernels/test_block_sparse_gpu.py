"""Block sparsity on a GPU (`pytest -m gpu tests/flash_kernels`): compiled kernels, 16-bit dtypes,
agreement with FlexAttention, memory at 64K."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from flash_kernels import (
    BlockMask,
    block_patterns,
    block_sparse_attention,
    flash_attention,
    testing,
)

pytestmark = pytest.mark.gpu


def random_blocks(*shape, density=0.4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) < density).cuda()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("headdim", [32, 64, 128, 256])
@pytest.mark.parametrize("block_m,block_n", [(128, 128), (64, 64), (16, 256), (48, 32)])
@pytest.mark.parametrize("causal", [False, True])
def test_matches_reference(block_m, block_n, causal, headdim, dtype):
    seqlen_q, seqlen_k = 500, 611
    blocks = random_blocks(1, 4, -(-seqlen_q // block_m), -(-seqlen_k // block_n))
    mask = BlockMask.from_dense(blocks, block_m, block_n, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    qkv = testing.make_qkv(
        2, seqlen_q, seqlen_k, 4, headdim, nheads_k=2, dtype=dtype, device="cuda"
    )
    testing.assert_matches_reference(
        "block_sparse_attention", qkv, block_mask=mask, causal=causal, dropout_p=0.1, dropout_seed=3
    )


@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window=(100, 7), softcap=4.0)])
def test_token_masks_match_reference(options):
    token = random_blocks(500, 611, density=0.3, seed=1)
    mask = BlockMask.from_dense(
        random_blocks(4, 5, density=0.7), seqlen_q=500, seqlen_k=611, token_mask=token
    )
    qkv = testing.make_qkv(2, 500, 611, 2, 64, dtype=torch.bfloat16, device="cuda")
    testing.assert_matches_reference("block_sparse_attention", qkv, block_mask=mask, **options)


@pytest.mark.parametrize(
    "mask",
    [
        lambda: block_patterns.butterfly(2048, num_global=1, device="cuda"),
        lambda: block_patterns.bigbird(2048, nheads=4, device="cuda"),
        lambda: block_patterns.local_global(2048, window=300, num_global=70, device="cuda"),
        lambda: block_patterns.strided(2048, stride=4, device="cuda"),
        lambda: block_patterns.fixed(2048, stride=4, device="cuda"),
    ],
)
def test_agrees_with_flex_attention(mask):
    mask = mask()
    q, k, v = testing.make_qkv(1, 2048, 2048, 4, 64, dtype=torch.bfloat16, device="cuda")
    dout = torch.randn_like(q)
    flex = torch.compile(flex_attention, dynamic=False)
    out = block_sparse_attention(q, k, v, mask)
    theirs = flex(*(t.transpose(1, 2) for t in (q, k, v)), block_mask=mask.to_flex())
    theirs = theirs.transpose(1, 2)
    torch.testing.assert_close(out, theirs, rtol=2e-2, atol=1e-2)
    ours = torch.autograd.grad(out, (q, k, v), dout)
    for a, b in zip(ours, torch.autograd.grad(theirs, (q, k, v), dout), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_repeated_runs_are_bit_equal():
    mask = block_patterns.butterfly(4096, device="cuda")
    q, k, v = testing.make_qkv(2, 4096, 4096, 8, 64, dtype=torch.bfloat16, device="cuda")
    dout = torch.randn_like(q)

    def run():
        out = block_sparse_attention(q, k, v, mask, causal=True, dropout_p=0.1, dropout_seed=9)
        return (out, *torch.autograd.grad(out, (q, k, v), dout))

    first = run()
    for _ in range(30):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def test_the_causal_mask_is_causal_attention():
    mask = block_patterns.causal(1000, device="cuda")
    q, k, v = testing.make_qkv(2, 1000, 1000, 4, 64, dtype=torch.bfloat16, device="cuda")
    expected = flash_attention(q, k, v, causal=True, kernel="portable")
    torch.testing.assert_close(block_sparse_attention(q, k, v, mask), expected, rtol=0, atol=4e-3)


def test_64k_tokens_take_memory_in_proportion_to_the_tokens():
    mask = block_patterns.butterfly(65536, device="cuda")
    q, k, v = testing.make_qkv(1, 65536, 65536, 4, 64, dtype=torch.bfloat16, device="cuda")
    block_sparse_attention(q, k, v, mask).sum().backward()  # the lists of the call are made
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    block_sparse_attention(q, k, v, mask).sum().backward()
    used = torch.cuda.max_memory_allocated() - before
    assert used < 8 * q.numel() * q.element_size(), f"{used / 2**20:.0f} MiB"


def test_autotune_finds_right_tiles():
    q, k, v = testing.make_qkv(2, 1024, 1024, 4, 64, dtype=torch.bfloat16, device="cuda")
    dout = torch.randn_like(q)
    results = []
    for autotune in (False, True):
        out = flash_attention(q, k, v, causal=True, kernel="portable", autotune=autotune)
        results.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-2)
