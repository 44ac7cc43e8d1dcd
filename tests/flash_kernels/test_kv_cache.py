"""Decoding over a key-value cache: the reference, appending in place, any splits."""

import pytest
import torch

from flash_kernels import flash_attention_with_kv_cache, reference, testing


def make(
    batch=2,
    seqlen_q=1,
    capacity=90,
    nheads=2,
    nheads_k=2,
    headdim=16,
    seqlen_new=1,
    dtype=torch.float16,
):
    q, k, v = (
        t.detach()
        for t in testing.make_qkv(
            batch, seqlen_q, seqlen_new, nheads, headdim, nheads_k=nheads_k, dtype=dtype
        )
    )
    _, k_cache, v_cache = (
        t.detach()
        for t in testing.make_qkv(batch, 1, capacity, nheads_k, headdim, dtype=dtype, seed=1)
    )
    return q, k_cache, v_cache, k, v


def check(tensors, cache_lengths, append=True, **options):
    q, k_cache, v_cache, k, v = tensors

    def run(function, dtype):
        caches = [t.to(dtype).clone() for t in (k_cache, v_cache)]
        new = dict(k=k.to(dtype), v=v.to(dtype)) if append else {}
        out, lse = function(
            q.to(dtype), *caches, cache_lengths=cache_lengths, return_lse=True, **new, **options
        )
        return out, lse, *caches

    with testing.nan_memory():
        ours = run(flash_attention_with_kv_cache, q.dtype)
    plain = run(reference.flash_attention_with_kv_cache, q.dtype)
    truth = run(reference.flash_attention_with_kv_cache, torch.float64)
    for i, label in enumerate(("out", "lse")):
        slack = 2 * torch.finfo(ours[i].dtype).eps * 2
        testing.check_budget(label, ours[i], plain[i], truth[i], slack)
    assert torch.equal(ours[2], plain[2]) and torch.equal(ours[3], plain[3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("num_splits", [None, 1, 2, 7])
def test_matches_reference(num_splits, dtype):
    check(make(dtype=dtype), torch.tensor([80, 3]), num_splits=num_splits)


@pytest.mark.parametrize(
    "options",
    [
        dict(causal=False),
        dict(window=(20, None)),
        dict(softcap=2.0),
        dict(softmax_scale=-0.3),
        dict(alibi_slopes=torch.tensor([0.3, 0.1, 0.2, 0.05])),
        dict(alibi_slopes=torch.tensor([[0.3, 0.1, 0.2, 0.05], [0.1, 0.2, 0.3, 0.4]])),
    ],
)
def test_options_and_grouped_heads(options):
    tensors = make(seqlen_q=5, seqlen_new=5, nheads=4, nheads_k=2)
    check(tensors, torch.tensor([70, 0]), **options)


def test_odd_group_and_many_queries():
    check(make(seqlen_q=20, seqlen_new=20, nheads=3, nheads_k=1, headdim=40), torch.tensor([50, 9]))


def test_empty_cache_is_zero():
    q, k_cache, v_cache, _, _ = make()
    lengths = torch.tensor([0, 4], dtype=torch.int32)
    out, lse = flash_attention_with_kv_cache(
        q, k_cache, v_cache, cache_lengths=lengths, return_lse=True
    )
    assert not out[0].any() and bool((lse[0] == -torch.inf).all())
    assert out[1].isfinite().all() and lse[1].isfinite().all()


def test_rows_behind_the_length_do_not_leak():
    q, k_cache, v_cache, k, v = make()
    k_cache[:, 40:] = float("nan")
    v_cache[:, 40:] = float("inf")
    lengths = torch.tensor([39, 20])
    k_cache[1, 21:], v_cache[1, 21:] = float("nan"), float("nan")
    out = flash_attention_with_kv_cache(q, k_cache, v_cache, cache_lengths=lengths, k=k, v=v)
    assert out.isfinite().all()


def test_opcheck():
    q, k_cache, v_cache, k, v = make(capacity=40)
    arguments = (q, k_cache, v_cache, torch.tensor([3, 30]), k, v, None, 0.25, 0.0, None, 0, 2)
    torch.library.opcheck(torch.ops.flash_kernels.attention_decode, arguments)


def test_compile_takes_the_graph_whole():
    q, k_cache, v_cache, k, v = make(capacity=40)
    lengths = torch.tensor([3, 30])
    compiled = torch.compile(flash_attention_with_kv_cache, fullgraph=True, backend="aot_eager")
    other_k, other_v = k_cache.clone(), v_cache.clone()
    out = compiled(q, k_cache, v_cache, cache_lengths=lengths, k=k, v=v)
    expected = flash_attention_with_kv_cache(q, other_k, other_v, cache_lengths=lengths, k=k, v=v)
    assert torch.equal(out, expected) and torch.equal(k_cache, other_k)


@pytest.mark.parametrize(
    "change,words",
    [
        (dict(cache_lengths=torch.tensor([90, 3])), "between 0 and capacity - seqlen_new = 89"),
        (dict(cache_lengths=torch.tensor([-1, 3])), "between 0 and capacity"),
        (dict(cache_lengths=torch.tensor([1.0, 3.0])), "cache_lengths must be int32 or int64"),
        (dict(v=None), "given together"),
        (dict(num_splits=65), "num_splits must be between 1 and 64"),
        (dict(window=(-1, 0)), "pass None instead of -1"),
        (dict(k=torch.zeros(2, 1, 1, 16).half(), v=torch.zeros(2, 1, 1, 16).half()),
        "nheads_k of k_cache"),
    ],
)  # fmt: skip
def test_errors(change, words):
    q, k_cache, v_cache, k, v = make()
    options = dict(cache_lengths=torch.tensor([80, 3]), k=k, v=v) | change
    with pytest.raises(ValueError, match=words):
        flash_attention_with_kv_cache(q, k_cache, v_cache, **options)


def test_gradients_are_refused():
    q, k_cache, v_cache, k, v = make()
    with pytest.raises(ValueError, match="has no backward"):
        flash_attention_with_kv_cache(
            q.requires_grad_(), k_cache, v_cache, cache_lengths=torch.tensor([80, 3])
        )
