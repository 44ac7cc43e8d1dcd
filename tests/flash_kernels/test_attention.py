"""Dense attention against the float64 reference: every option, odd sizes, rows that see nothing."""

import pytest
import torch

from flash_kernels import flash_attention, testing
from flash_kernels.portable.tile_choice import Tile, use_tiles

SMALL = Tile(16, 32, 4, 1)
DTYPES = [torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def small_tiles():
    """Several tiles in each direction from short sequences; block_m != block_n."""
    with use_tiles(forward=SMALL, dk_dv=SMALL, dq=SMALL):
        yield


def check(
    seqlen_q=37,
    seqlen_k=70,
    nheads=1,
    headdim=20,
    dtype=torch.float16,
    batch=1,
    nheads_k=None,
    **options,
):
    qkv = testing.make_qkv(
        batch, seqlen_q, seqlen_k, nheads, headdim, nheads_k=nheads_k, dtype=dtype
    )
    testing.assert_matches_reference("flash_attention", qkv, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(1, 1), (33, 33), (1, 65), (70, 37), (32, 64)])
def test_matches_reference(seqlen_q, seqlen_k, causal, dtype):
    check(seqlen_q, seqlen_k, dtype=dtype, causal=causal)


@pytest.mark.parametrize("headdim", [8, 16, 40, 64, 80, 128, 200, 256])
def test_any_head_dim(headdim):
    check(17, 33, headdim=headdim, causal=True)


def test_batch_and_heads():
    check(17, 33, nheads=3, batch=2, causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_dropout_replays_reference_mask(causal, dtype):
    check(nheads=2, batch=2, dtype=dtype, causal=causal, dropout_p=0.3, dropout_seed=2**40 + 7)


@pytest.mark.parametrize("scale", [0.0, 0.3, -0.5])
def test_softmax_scale(scale):
    check(softmax_scale=scale)


def test_gradient_of_the_lse():
    check(causal=True, lse_gradient=True)
    check(dropout_p=0.5, dropout_seed=3, lse_gradient=True)


def test_everything_dropped_is_zero_and_keeps_the_lse():
    q, k, v = testing.make_qkv(1, 20, 40, 1, 16)
    out, lse = flash_attention(q, k, v, dropout_p=1.0, return_lse=True)
    _, lse_without = flash_attention(q, k, v, return_lse=True)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, lse_without)
    check(dropout_p=1.0, dropout_seed=3, lse_gradient=True)


def test_fully_masked_row_is_zero():
    q, k, v = testing.make_qkv(1, 40, 8, 1, 16)
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    (out.sum() + lse[:, :, 32:].sum()).backward()
    assert torch.equal(out[:, :32], torch.zeros_like(out[:, :32]))
    assert torch.equal(lse[:, :, :32], torch.full_like(lse[:, :, :32], -torch.inf))
    assert torch.equal(q.grad[:, :32], torch.zeros_like(q.grad[:, :32]))
    assert all(t.grad.isfinite().all() for t in (q, k, v))


def test_result_does_not_depend_on_the_tiles():
    q, k, v = testing.make_qkv(1, 50, 70, 1, 16, dtype=torch.float32)
    options = dict(causal=True, dropout_p=0.4, dropout_seed=11)
    results = []
    for shape in ((16, 32), (32, 16), (64, 64)):
        tile = Tile(*shape, 4, 1)
        with use_tiles(forward=tile, dk_dv=tile, dq=tile):
            out = flash_attention(q, k, v, **options)
            results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
