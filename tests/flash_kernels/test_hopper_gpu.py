"""On a Hopper GPU (`pytest -m gpu tests/flash_kernels/test_hopper_gpu.py`): kernel="hopper" against
the reference and against the portable kernels."""

import pytest
import torch

from flash_kernels import flash_attention, reference, testing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]
SHAPES = [(1, 1), (113, 203), (203, 113), (512, 512), (1, 777), (1023, 1024)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("headdim", [8, 40, 64, 72, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.17])
def test_matches_reference(headdim, causal, dropout_p, dtype):
    for seqlen_q, seqlen_k in SHAPES:
        qkv = testing.make_qkv(
            2, seqlen_q, seqlen_k, 4, headdim, nheads_k=2, dtype=dtype, device="cuda"
        )
        testing.assert_matches_reference(
            "flash_attention", qkv, causal=causal, dropout_p=dropout_p, dropout_seed=2**50 + 1,
            lse_gradient=True, kernel="hopper",
        )  # fmt: skip


@pytest.mark.parametrize("shift", range(-130, 131, 26))
@pytest.mark.parametrize("headdim", [64, 128])
def test_every_alignment_of_the_diagonal(headdim, shift):
    qkv = testing.make_qkv(1, 400, 400 + shift, 2, headdim, device="cuda")
    testing.assert_matches_reference("flash_attention", qkv, causal=True, kernel="hopper")


@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_repeated_runs(headdim, causal, dropout_p):
    """Bit for bit, but dq, whose sums come in any order."""
    q, k, v = testing.make_qkv(4, 2048, 2048, 8, headdim, dtype=torch.bfloat16, device="cuda")
    dout = torch.randn_like(q)

    def run():
        out = flash_attention(
            q, k, v, causal=causal, dropout_p=dropout_p, dropout_seed=9, kernel="hopper"
        )
        return (out, *torch.autograd.grad(out, (q, k, v), dout))

    first = run()
    for _ in range(50):
        out, dq, dk, dv = run()
        for a, b in zip((first[0], *first[2:]), (out, dk, dv), strict=True):
            assert torch.equal(a, b)
        torch.testing.assert_close(dq, first[1], rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_agrees_with_the_portable_kernels_at_length(headdim, causal, dropout_p):
    q, k, v = testing.make_qkv(1, 8192, 8192, 2, headdim, dtype=torch.bfloat16, device="cuda")
    options = dict(causal=causal, dropout_p=dropout_p, dropout_seed=5, return_lse=True)
    dout = torch.randn_like(q)
    found = []
    for kernel in ("hopper", "portable"):
        out, lse = flash_attention(q, k, v, kernel=kernel, **options)
        found.append((out, lse, *torch.autograd.grad(out, (q, k, v), dout)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=4e-3)


def test_views_of_a_fused_projection_are_not_copied():
    qkv = torch.randn(2, 300, 3, 4, 64, dtype=torch.bfloat16, device="cuda")
    q, k, v = qkv.unbind(2)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    out = flash_attention(q, k, v, causal=True, kernel="hopper")
    used = torch.cuda.max_memory_allocated() - before
    assert used <= out.numel() * 2 + 2 * 4 * 300 * 4 + 1024
    dense = (q.contiguous(), k.contiguous(), v.contiguous())
    assert torch.equal(out, flash_attention(*dense, causal=True, kernel="hopper"))


def test_dropout_mask_of_a_long_row_equals_the_reference():
    q = torch.zeros(1, 256, 2, 64, dtype=torch.float16, device="cuda")
    k = torch.zeros(1, 65536, 2, 64, dtype=torch.float16, device="cuda")
    v = torch.ones_like(k)
    out = flash_attention(q, k, v, dropout_p=0.5, dropout_seed=1, kernel="hopper")
    keep = reference.dropout_keep_mask(1, 1, 2, 256, 65536, 0.5, "cuda")
    kept = keep.float().mean(-1).transpose(1, 2) * 2  # [1, 256, 2]
    torch.testing.assert_close(out[..., 0].float(), kept, rtol=2e-3, atol=0)


@pytest.mark.parametrize(
    "options,words",
    [
        (dict(softcap=1.0), "does not serve softcap"),
        (dict(window=(3, 3)), "does not serve windows"),
        (dict(softmax_scale=0.0), "positive softmax_scale"),
        (dict(lengths_k=torch.tensor([3])), "packed sequences or lengths_k"),
    ],
)
def test_what_is_not_served_says_so(options, words):
    q, k, v = testing.make_qkv(1, 16, 16, 2, 64, device="cuda")
    if "lengths_k" in options:
        options = dict(lengths_k=options["lengths_k"].cuda())
    with pytest.raises(NotImplementedError, match=words):
        flash_attention(q, k, v, kernel="hopper", **options)
    flash_attention(q, k, v, **options)


def test_strides_that_tma_cannot_read():
    q = torch.randn(1, 16, 2, 68, dtype=torch.float16, device="cuda")[..., :64]
    with pytest.raises(NotImplementedError, match="q 16-byte aligned with strides"):
        flash_attention(q, q, q, kernel="hopper")
    assert torch.equal(flash_attention(q, q, q), flash_attention(*[q.contiguous()] * 3))
