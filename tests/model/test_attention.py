import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from model.attention import (
    Packing,
    auto_attention,
    packed_attention,
    reference_attention,
    sdpa_attention,
)


def naive_attention(q, k, v, *, causal, softmax_scale=None):
    """The formula in float64, one row of keys per query."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = scale * q @ k.mT
    if causal:
        rows, cols = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        scores = scores.masked_fill(cols > rows + k.shape[2] - q.shape[2], -math.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2)


@pytest.mark.parametrize("seqlen_q,seqlen_k", [(1, 1), (7, 7), (1, 9), (4, 9), (9, 4)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("nheads_k,softmax_scale", [(4, None), (2, 0.3), (4, 0.0), (1, -0.7)])
def test_sdpa_attention_matches_the_formula(seqlen_q, seqlen_k, causal, nheads_k, softmax_scale):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, seqlen_q, 4, 5, generator=generator, requires_grad=True)
    k, v = (
        torch.randn(2, seqlen_k, nheads_k, 5, generator=generator, requires_grad=True)
        for _ in range(2)
    )
    dout = torch.randn(2, seqlen_q, 4, 5, generator=generator)
    out = sdpa_attention(q, k, v, causal=causal, softmax_scale=softmax_scale)
    expected = naive_attention(q, k, v, causal=causal, softmax_scale=softmax_scale)
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-6)
    if causal and seqlen_q > seqlen_k:
        assert out[:, : seqlen_q - seqlen_k].eq(0).all()
        return  # the formula's gradient is NaN where a row is empty
    grads = torch.autograd.grad(out, (q, k, v), dout)
    expected_grads = torch.autograd.grad(expected, (q, k, v), dout.double())
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-5)


def test_sdpa_attention_gradient_is_finite_where_rows_see_no_key():
    q = torch.randn(1, 9, 2, 4, requires_grad=True)
    k, v = torch.randn(2, 1, 4, 2, 4).unbind(0)
    sdpa_attention(q, k, v, causal=True).sum().backward()
    assert q.grad[:, :5].eq(0).all() and q.grad[:, 6:].abs().sum() > 0


@pytest.mark.parametrize("seqlen_q,seqlen_k", [(7, 7), (4, 9), (9, 4), (1, 9)])
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_attention_hides_keys_beyond_their_length(seqlen_q, seqlen_k, causal):
    lengths = torch.tensor([seqlen_k, 3, 0])
    q = torch.randn(3, seqlen_q, 4, 5, requires_grad=True)
    k, v = (torch.randn(3, seqlen_k, 2, 5, requires_grad=True) for _ in range(2))
    dout = torch.randn(3, seqlen_q, 4, 5)
    out = sdpa_attention(q, k, v, causal=causal, lengths_k=lengths)
    expected = reference_attention(q, k, v, causal=causal, lengths_k=lengths)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    assert out[2].eq(0).all()
    ours = torch.autograd.grad(out, (q, k, v), dout)
    for a, b in zip(ours, torch.autograd.grad(expected, (q, k, v), dout), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", [sdpa_attention, reference_attention, auto_attention])
def test_packed_attention_is_attention_within_each_sequence(attention):
    packing = Packing(torch.tensor([0, 3, 3, 10, 12], dtype=torch.int32), 9)
    q, k, v = torch.randn(3, 12, 2, 4).unbind(0)
    out = packed_attention(attention, q, k, v, packing, softmax_scale=0.3)
    for start, stop in ((0, 3), (3, 10), (10, 12)):
        piece = (x[None, start:stop] for x in (q, k, v))
        expected = attention(*piece, softmax_scale=0.3)[0]
        torch.testing.assert_close(out[start:stop], expected)
    assert packing.sequence_ids(12).tolist() == [0] * 3 + [2] * 7 + [3] * 2


@pytest.mark.parametrize(
    "options",
    [
        {"window": (4, None)},
        {"window": (None, 0)},
        {"softcap": 1.0},
        {"alibi_slopes": torch.ones(2)},
        {"dropout_seed": 0},
        {"return_lse": True},
        {"kernel": "portable"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_sdpa_attention_refuses_what_it_does_not_serve(options):
    q = torch.randn(1, 3, 2, 4)
    with pytest.raises(NotImplementedError, match=f"{next(iter(options))}.*reference_attention"):
        sdpa_attention(q, q, q, **options)


def test_sdpa_attention_refuses_uneven_heads():
    q, k = torch.randn(1, 3, 4, 4), torch.randn(1, 3, 3, 4)
    with pytest.raises(ValueError, match=r"nheads \(4\) must be a multiple of nheads_k \(3\)"):
        sdpa_attention(q, k, k)


def test_auto_attention_is_sdpa_on_cpu():
    q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    assert torch.equal(auto_attention(q, k, v, causal=True), sdpa_attention(q, k, v, causal=True))


def test_auto_attention_is_flash_on_cuda(monkeypatch):
    flash_kernels = pytest.importorskip("flash_kernels")
    monkeypatch.setattr(flash_kernels, "flash_attention", lambda *qkv, **options: (qkv, options))
    q = SimpleNamespace(is_cuda=True)
    assert auto_attention(q, 1, 2, causal=True) == ((q, 1, 2), {"causal": True})


def test_models_import_where_triton_is_absent():
    code = "import sys; sys.modules['triton'] = None; import model.hf, model.generation"
    code += ", model.long_range"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_reference_attention_draws_a_seed_where_none_is_given():
    q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    plain = reference_attention(q, k, v, causal=True)
    torch.testing.assert_close(plain, sdpa_attention(q, k, v, causal=True))
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(reference_attention(q, k, v, dropout_p=0.5))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    fixed = [reference_attention(q, k, v, dropout_p=0.5, dropout_seed=3) for _ in range(2)]
    assert torch.equal(*fixed)
