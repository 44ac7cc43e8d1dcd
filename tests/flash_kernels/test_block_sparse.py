"""Block-sparse attention against the reference with the mask applied as -inf."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_kernels import (
    BlockMask,
    block_sparse_attention,
    block_sparse_attention_varlen,
    flash_attention,
    reference,
    testing,
)
from flash_kernels.portable.tile_choice import Tile, use_tiles

SMALL = Tile(16, 16, 4, 1)


@pytest.fixture(autouse=True)
def small_tiles():
    """A block of 32 x 48 holds 2 x 3 tiles."""
    with use_tiles(forward=SMALL, dk_dv=SMALL, dq=SMALL):
        yield


def random_blocks(*shape, seed=0, density=0.5):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density


def check(blocks, seqlen_q=70, seqlen_k=130, nheads=1, batch=1, headdim=16, token=None, **options):
    dtype, nheads_k = options.pop("dtype", torch.float16), options.pop("nheads_k", None)
    mask = BlockMask.from_dense(
        blocks, 32, 48, seqlen_q=seqlen_q, seqlen_k=seqlen_k, token_mask=token
    )
    qkv = testing.make_qkv(
        batch, seqlen_q, seqlen_k, nheads, headdim, nheads_k=nheads_k, dtype=dtype
    )
    testing.assert_matches_reference("block_sparse_attention", qkv, block_mask=mask, **options)


BLOCKS = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 1]], dtype=torch.bool)  # row 1 sees nothing


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(causal=True),
        dict(window=(40, 10)),
        dict(causal=True, window=(50, None), softcap=3.0),
        dict(dropout_p=0.3, dropout_seed=5, lse_gradient=True),
        dict(alibi_slopes=torch.tensor([0.1])),
        dict(lengths_k=torch.tensor([101])),
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_matches_reference(options, dtype):
    check(BLOCKS, dtype=dtype, **options)


def test_rows_without_blocks_are_zero_and_get_no_gradient():
    mask = BlockMask.from_dense(BLOCKS, 32, 48, seqlen_q=70, seqlen_k=130)
    q, k, v = testing.make_qkv(1, 70, 130, 1, 16)
    out, lse = block_sparse_attention(q, k, v, mask, return_lse=True)
    out.sum().backward()
    assert not out[:, 32:64].any() and (lse[:, :, 32:64] == -torch.inf).all()
    assert not q.grad[:, 32:64].any() and q.grad[:, :32].any()
    assert not k.grad[:, 144:].any() and all(t.grad.isfinite().all() for t in (q, k, v))


def test_keys_of_unlisted_blocks_are_never_read():
    blocks = torch.tensor([[1, 0, 1], [1, 0, 1], [1, 0, 1]], dtype=torch.bool)
    mask = BlockMask.from_dense(blocks, 32, 48, seqlen_q=70, seqlen_k=130)
    q, k, v = (t.detach() for t in testing.make_qkv(1, 70, 130, 1, 16))
    expected = block_sparse_attention(q, k, v, mask)
    k[:, 48:96], v[:, 48:96] = torch.nan, torch.nan
    assert torch.equal(block_sparse_attention(q, k, v, mask), expected)


@pytest.mark.parametrize("mask_batch,mask_heads", [(1, 2), (2, 1), (2, 2)])
def test_one_mask_per_sequence_and_head_with_grouped_keys(mask_batch, mask_heads):
    blocks = random_blocks(mask_batch, mask_heads, 3, 3)
    check(blocks, nheads=2, nheads_k=1, batch=2, causal=True, dropout_p=0.2, dropout_seed=1)


@pytest.mark.parametrize("causal", [False, True])
def test_token_masks(causal):
    token = random_blocks(70, 130, seed=3, density=0.4)
    check(torch.ones(3, 3, dtype=torch.bool), token=token, causal=causal)
    check(BLOCKS, token=token, causal=causal, lengths_k=torch.tensor([90]))


def test_all_blocks_are_dense_attention():
    q, k, v = testing.make_qkv(2, 70, 130, 2, 16)
    mask = BlockMask.from_dense(torch.ones(3, 3, dtype=torch.bool), 32, 48)
    for options in (dict(), dict(causal=True), dict(dropout_p=0.5, dropout_seed=3)):
        with use_tiles(forward=Tile(16, 16, 4, 1)):
            dense = flash_attention(q, k, v, **options)
            sparse = block_sparse_attention(q, k, v, mask, **options)
        torch.testing.assert_close(sparse, dense, rtol=2e-3, atol=2e-3)


@pytest.mark.slow
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    block_m=st.sampled_from([16, 48, 64]), block_n=st.sampled_from([16, 32, 80]),
    seqlen_q=st.integers(1, 100), seqlen_k=st.integers(1, 130), seed=st.integers(0, 99),
    density=st.floats(0.0, 1.0), causal=st.booleans(), with_tokens=st.booleans(),
    window=st.sampled_from([(None, None), (20, 5)]),
)  # fmt: skip
def test_random_masks(
    block_m, block_n, seqlen_q, seqlen_k, seed, density, causal, with_tokens, window
):
    rows, cols = -(-seqlen_q // block_m), -(-seqlen_k // block_n)
    mask = BlockMask.from_dense(
        random_blocks(rows, cols, seed=seed, density=density), block_m, block_n,
        seqlen_q=seqlen_q, seqlen_k=seqlen_k,
        token_mask=random_blocks(seqlen_q, seqlen_k, seed=seed) if with_tokens else None,
    )  # fmt: skip
    with use_tiles(forward=SMALL, dk_dv=SMALL, dq=SMALL):
        testing.assert_matches_reference(
            "block_sparse_attention", testing.make_qkv(1, seqlen_q, seqlen_k, 1, 16),
            block_mask=mask, causal=causal, window=window,
        )  # fmt: skip


def test_packed_sequences_equal_each_alone():
    lengths_q, lengths_k = [50, 0, 70], [130, 20, 96]
    mask = BlockMask.from_dense(BLOCKS, 32, 48, seqlen_q=70, seqlen_k=130)
    q = testing.make_qkv(1, sum(lengths_q), 1, 2, 16)[0][0]
    _, k, v = (t[0] for t in testing.make_qkv(1, 1, sum(lengths_k), 2, 16))
    out, lse = block_sparse_attention_varlen(
        q, k, v, mask, cu_seqlens_q=testing.make_cu_seqlens(lengths_q),
        cu_seqlens_k=testing.make_cu_seqlens(lengths_k), max_seqlen_q=70, max_seqlen_k=130,
        causal=True, return_lse=True,
    )  # fmt: skip
    starts_q, starts_k = [0, 50, 50], [0, 130, 150]
    for begin, n, begin_k, n_k in zip(starts_q, lengths_q, starts_k, lengths_k, strict=True):
        if n == 0:
            continue
        one = [q[None, begin : begin + n], *(t[None, begin_k : begin_k + n_k] for t in (k, v))]
        expected, expected_lse = reference.block_sparse_attention(
            *(t.detach().double() for t in one), mask, causal=True, return_lse=True
        )
        torch.testing.assert_close(out[begin : begin + n], expected[0].half(), rtol=5e-3, atol=5e-3)
        torch.testing.assert_close(
            lse[:, begin : begin + n], expected_lse[0].float(), rtol=1e-3, atol=1e-3
        )


def test_errors_say_what_must_hold():
    q, k, v = testing.make_qkv(2, 70, 130, 2, 16)
    with pytest.raises(ValueError, match="block_mask must be a BlockMask, got Tensor"):
        block_sparse_attention(q, k, v, BLOCKS)
    three = BlockMask.from_dense(random_blocks(1, 3, 3, 3), 32, 48)
    with pytest.raises(ValueError, match="1 or 2 sequences and 1 or 2 query heads, got 1 and 3"):
        block_sparse_attention(q, k, v, three)
    small = BlockMask.from_dense(random_blocks(2, 3), 32, 48)
    with pytest.raises(ValueError, match="70"):
        block_sparse_attention(q, k, v, small)


def test_compile_takes_the_graph_whole():
    q, k, v = testing.make_qkv(1, 70, 130, 1, 16, dtype=torch.float32)
    mask = BlockMask.from_dense(BLOCKS, 32, 48, seqlen_q=70, seqlen_k=130)

    def step(q, k, v):
        return block_sparse_attention(q * 2, k, v, mask, causal=True).square().sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    ours = torch.autograd.grad(compiled(q, k, v), (q, k, v))
    eager = torch.autograd.grad(step(q, k, v), (q, k, v))
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b)
