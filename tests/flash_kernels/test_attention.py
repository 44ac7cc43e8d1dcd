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


def test_budget_of_float32_knows_of_the_rounding_of_a_large_lse():
    """Of 57 here, by ALiBi: the backward makes probabilities of it that are 1 in plain PyTorch."""
    options = dict(alibi_slopes=torch.tensor([0.53, 0.43]), lengths_k=torch.tensor([1]))
    options.update(softmax_scale=0.05, dropout_p=0.5, dropout_seed=5)
    check(49, 110, nheads=2, headdim=128, dtype=torch.float32, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(1, 1), (33, 33), (1, 65), (70, 37), (32, 64)])
def test_matches_reference(seqlen_q, seqlen_k, causal, dtype):
    check(seqlen_q, seqlen_k, dtype=dtype, causal=causal)


@pytest.mark.parametrize("headdim", [8, 16, 40, 64, 80, 128, 200, 256])
def test_any_head_dim(headdim):
    check(17, 33, headdim=headdim, causal=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(None, 0), (0, 0), (5, None), (None, 40), (20, 3), (90, 90)])
def test_window(window, causal):
    check(window=window, causal=causal)


@pytest.mark.parametrize("seqlen_q,seqlen_k", [(70, 37), (3, 70)])
def test_window_when_lengths_differ(seqlen_q, seqlen_k):
    check(seqlen_q, seqlen_k, window=(10, 10))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.5, 15.0])
def test_softcap(softcap, dtype):
    check(softcap=softcap, dtype=dtype, causal=True)


@pytest.mark.parametrize("per_batch", [False, True])
def test_alibi(per_batch):
    slopes = torch.tensor([[0.5, 0.1], [0.3, 0.02]]) if per_batch else torch.tensor([0.5, 0.1])
    check(20, 35, nheads=2, batch=2, alibi_slopes=slopes, causal=True)
    check(35, 20, nheads=2, batch=2, alibi_slopes=slopes)


@pytest.mark.parametrize("causal", [False, True])
def test_key_padding(causal):
    check(20, 40, batch=4, lengths_k=torch.tensor([40, 33, 1, 0]), causal=causal)


@pytest.mark.parametrize("nheads_k", [1, 2])
def test_grouped_heads(nheads_k):
    check(20, 35, nheads=4, nheads_k=nheads_k, causal=True, dropout_p=0.2, dropout_seed=1)


def test_all_options_together():
    check(
        33, 50, nheads=2, nheads_k=1, batch=2, causal=True, window=(25, None), softmax_scale=0.2,
        softcap=3.0, alibi_slopes=torch.tensor([0.2, 0.05]), lengths_k=torch.tensor([50, 41]),
        dropout_p=0.25, dropout_seed=77, lse_gradient=True,
    )  # fmt: skip


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_hidden_keys_do_not_leak(bad):
    """Padding, and keys outside of every window: in the middle of a tile, in tiles of their own."""
    for options, hidden in (
        (dict(lengths_k=torch.tensor([35])), slice(35, 70)),
        (dict(window=(5, 0)), slice(0, 25)),  # the first query, of 40, stands at key 30
        (dict(causal=True, lengths_k=torch.tensor([33])), slice(33, 70)),
    ):
        q, k, v = testing.make_qkv(1, 40, 70, 1, 16)
        with torch.no_grad():
            k[:, hidden] = bad
            v[:, hidden] = bad
        testing.assert_matches_reference("flash_attention", (q, k, v), **options)


@pytest.mark.parametrize("seqlen_q,seqlen_k,batch", [(0, 5, 1), (5, 0, 1), (0, 0, 1), (3, 3, 0)])
def test_empty_sequences(seqlen_q, seqlen_k, batch):
    q, k, v = testing.make_qkv(batch, seqlen_q, seqlen_k, 2, 16)
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    out.sum().backward()
    assert out.shape == q.shape and not out.any()
    assert lse.shape == (batch, 2, seqlen_q) and bool((lse == -torch.inf).all())
    assert all(not t.grad.any() for t in (q, k, v))


class TestStrides:
    def test_views_of_a_fused_projection(self):
        torch.manual_seed(0)
        qkv = torch.randn(2, 20, 3, 2, 16, dtype=torch.float16)
        testing.assert_matches_reference("flash_attention", tuple(qkv.unbind(2)), causal=True)

    def test_heads_before_rows(self):
        qkv = [t.detach().transpose(1, 2).contiguous() for t in testing.make_qkv(1, 20, 35, 2, 16)]
        testing.assert_matches_reference("flash_attention", tuple(t.transpose(1, 2) for t in qkv))

    @pytest.mark.parametrize("make", ["expanded", "transposed", "sliced"])
    def test_gradients_of_any_strides(self, make):
        q, k, v = testing.make_qkv(1, 20, 35, 2, 16, dtype=torch.float32)
        torch.manual_seed(0)
        dout = {
            "expanded": torch.randn(()).expand(q.shape),
            "transposed": torch.randn(1, 16, 2, 20).permute(0, 3, 2, 1),
            "sliced": torch.randn(1, 40, 4, 32)[:, ::2, ::2, ::2],
        }[make]
        strided = torch.autograd.grad(flash_attention(q, k, v), (q, k, v), dout)
        dense = torch.autograd.grad(flash_attention(q, k, v), (q, k, v), dout.contiguous())
        assert all(torch.equal(a, b) for a, b in zip(strided, dense, strict=True))

    def test_expanded_keys(self):
        q, k, v = testing.make_qkv(2, 20, 35, 2, 16)
        k, v = (t.detach()[:1].expand(2, -1, -1, -1) for t in (k, v))
        expected = flash_attention(q, k.contiguous(), v.contiguous())
        assert torch.equal(flash_attention(q, k, v), expected)


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
