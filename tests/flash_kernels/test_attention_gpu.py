"""On a GPU (`pytest -m gpu tests/flash_kernels`): compiled kernels, bf16, races, long rows."""

import pytest
import torch

from flash_kernels import flash_attention, reference, testing

pytestmark = pytest.mark.gpu
SHAPES = [(1, 1), (113, 203), (203, 113), (512, 512), (1, 777), (1023, 1024)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("headdim", [8, 32, 59, 64, 80, 128, 160, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.17])
def test_matches_reference(headdim, causal, dropout_p, dtype):
    for seqlen_q, seqlen_k in SHAPES:
        qkv = testing.make_qkv(2, seqlen_q, seqlen_k, 3, headdim, dtype=dtype, device="cuda")
        testing.assert_matches_reference(
            "flash_attention", qkv, causal=causal, dropout_p=dropout_p, dropout_seed=2**50 + 1
        )


@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_repeated_runs_are_bit_equal(headdim, causal, dropout_p):
    q, k, v = testing.make_qkv(4, 2048, 2048, 8, headdim, dtype=torch.bfloat16, device="cuda")
    dout = torch.randn_like(q)

    def run():
        out = flash_attention(q, k, v, causal=causal, dropout_p=dropout_p, dropout_seed=9)
        return (out, *torch.autograd.grad(out, (q, k, v), dout))

    first = run()
    for _ in range(50):
        for a, b in zip(first, run(), strict=True):
            assert torch.equal(a, b)


def test_views_of_a_fused_projection_are_not_copied():
    qkv = torch.randn(2, 300, 3, 4, 64, dtype=torch.bfloat16, device="cuda")
    q, k, v = qkv.unbind(2)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    out = flash_attention(q, k, v, causal=True)
    used = torch.cuda.max_memory_allocated() - before
    assert used <= out.numel() * 2 + 2 * 4 * 300 * 4 + 1024
    assert torch.equal(
        out, flash_attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
    )


def test_compile_takes_the_graph_whole():
    def step(q, k, v):
        return flash_attention(q * 1.0, k, v, causal=True, dropout_p=0.1).float().square().mean()

    q, k, v = testing.make_qkv(2, 128, 128, 4, 64, dtype=torch.bfloat16, device="cuda")
    loss = torch.compile(step, fullgraph=True)(q, k, v)
    loss.backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))


def test_more_programs_than_a_second_grid_axis_holds():
    q = torch.randn(70_000, 16, 1, 16, dtype=torch.bfloat16, device="cuda")
    out = flash_attention(q, q, q)
    torch.testing.assert_close(
        out[-2:], reference.flash_attention(q[-2:], q[-2:], q[-2:]), rtol=2e-2, atol=2e-2
    )


def test_more_than_2_to_the_31_elements():
    # Rows 2**24 elements apart: the last one starts behind 2**31.
    storage = torch.zeros(160, 2**24, dtype=torch.bfloat16, device="cuda")
    storage[:, :192].normal_()
    q, k, v = (
        storage[None, :, i * 64 : (i + 1) * 64].unsqueeze(2).requires_grad_() for i in range(3)
    )
    dense = [
        t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for t in (q, k, v)
    ]
    out, expected = flash_attention(q, k, v), flash_attention(*dense)
    assert torch.equal(out, expected)
    dout = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad(out, (q, k, v), dout),
        torch.autograd.grad(expected, dense, dout),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_dropout_mask_of_a_long_row_equals_the_reference():
    # v = identity columns would need seqlen = headdim; sum v = 1 instead counts the kept keys of
    # each row.
    q = torch.zeros(1, 256, 2, 64, dtype=torch.float16, device="cuda")
    k = torch.zeros(1, 65536, 2, 64, dtype=torch.float16, device="cuda")
    v = torch.ones_like(k)
    out = flash_attention(q, k, v, dropout_p=0.5, dropout_seed=1)
    keep = reference.dropout_keep_mask(1, 1, 2, 256, 65536, 0.5, "cuda")
    kept = keep.float().mean(-1).transpose(1, 2) * 2  # [1, 256, 2]
    torch.testing.assert_close(out[..., 0].float(), kept, rtol=2e-3, atol=0)
