"""Packed sequences: the reference sequence by sequence, empty ones, and the checks."""

import pytest
import torch

from flash_kernels import flash_attention, flash_attention_varlen, testing
from flash_kernels.portable.tile_choice import Tile, use_tiles

SMALL = Tile(16, 32, 4, 1)


@pytest.fixture(autouse=True)
def small_tiles():
    with use_tiles(forward=SMALL, dk_dv=SMALL, dq=SMALL):
        yield


def make(lengths_q, lengths_k, nheads=2, nheads_k=2, headdim=16, dtype=torch.float16):
    q, _, _ = testing.make_qkv(1, sum(lengths_q), 1, nheads, headdim, dtype=dtype)
    _, k, v = testing.make_qkv(1, 1, sum(lengths_k), nheads_k, headdim, dtype=dtype, seed=1)
    options = dict(
        cu_seqlens_q=testing.make_cu_seqlens(lengths_q),
        cu_seqlens_k=testing.make_cu_seqlens(lengths_k),
        max_seqlen_q=max(lengths_q),
        max_seqlen_k=max(lengths_k),
    )
    return tuple(t.detach()[0].requires_grad_() for t in (q, k, v)), options


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(causal=True),
        dict(window=(10, 5), softcap=5.0),
        dict(causal=True, dropout_p=0.3, dropout_seed=5),
        dict(alibi_slopes=torch.tensor([[0.2, 0.1]] * 4), lengths_k=torch.tensor([30, 7, 0, 1])),
    ],
)
def test_matches_reference(options, dtype):
    qkv, lengths = make([20, 0, 5, 33], [37, 9, 4, 1], dtype=dtype)
    testing.assert_matches_reference("flash_attention_varlen", qkv, **lengths, **options)


def test_grouped_heads_and_lse_gradient():
    qkv, lengths = make([20, 33], [37, 21], nheads=4, nheads_k=2)
    testing.assert_matches_reference(
        "flash_attention_varlen", qkv, **lengths, causal=True, lse_gradient=True
    )


def test_equals_dense_for_equal_lengths():
    q, k, v = testing.make_qkv(2, 20, 20, 2, 16)
    lengths = testing.make_cu_seqlens([20, 20])
    dropout = dict(dropout_p=0.2, dropout_seed=3, causal=True, return_lse=True)
    dense, dense_lse = flash_attention(q, k, v, **dropout)
    packed, packed_lse = flash_attention_varlen(
        *(t.flatten(0, 1) for t in (q, k, v)), cu_seqlens_q=lengths, cu_seqlens_k=lengths,
        max_seqlen_q=20, max_seqlen_k=20, **dropout,
    )  # fmt: skip
    assert torch.equal(packed, dense.flatten(0, 1))
    assert torch.equal(packed_lse, dense_lse.transpose(0, 1).flatten(1))


def test_sequence_without_keys_is_zero():
    qkv, lengths = make([7, 20], [0, 30])
    out, lse = flash_attention_varlen(*qkv, **lengths, return_lse=True)
    (out.sum() + lse[:, 7:].sum()).backward()
    assert not out[:7].any() and bool((lse[:, :7] == -torch.inf).all())
    assert not qkv[0].grad[:7].any() and all(t.grad.isfinite().all() for t in qkv)


@pytest.mark.parametrize(
    "change,words",
    [
        (dict(max_seqlen_q=11), "no sequence may be longer than max_seqlen_q = 11"),
        (dict(max_seqlen_k=8), "or max_seqlen_k = 8"),
        (dict(cu_seqlens_q=torch.tensor([0, 21, 20], dtype=torch.int32)), "never fall"),
        (dict(cu_seqlens_q=torch.tensor([1, 5, 20], dtype=torch.int32)), "start at 0"),
        (dict(cu_seqlens_k=torch.tensor([0, 5, 9], dtype=torch.int32)), "end at .* total_k = 30"),
        (dict(cu_seqlens_k=torch.tensor([0, 5, 30])), "cu_seqlens_k must be int32"),
        (dict(cu_seqlens_q=torch.tensor([0, 20], dtype=torch.int32)), "the same length"),
        (dict(cu_seqlens_q=torch.tensor(20, dtype=torch.int32)), "shape .batch . 1,."),
        (dict(cu_seqlens_k=testing.make_cu_seqlens([0, 9, 0, 21, 0])[::2]), "contiguous"),
        (dict(lengths_k=torch.tensor([3])), "lengths_k must be int32 or int64 of shape .2,."),
    ],
)  # fmt: skip
def test_errors_say_what_must_hold(change, words):
    qkv, lengths = make([12, 8], [9, 21])
    options = {**lengths, "max_seqlen_q": 20, **change}
    with pytest.raises(ValueError, match=words):
        flash_attention_varlen(*qkv, **options)


def test_dense_tensors_are_refused():
    qkv, lengths = make([12, 8], [9, 21])
    with pytest.raises(ValueError, match=r"must be \(total, nheads, headdim\)"):
        flash_attention_varlen(*(t[None] for t in qkv), **lengths)
