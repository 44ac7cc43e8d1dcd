"""On a Hopper GPU (`pytest -m gpu tests/flash_kernels/test_hopper_gpu.py`): kernel="hopper" against
the reference and against the portable kernels."""

import multiprocessing
import time

import pytest
import torch

from flash_kernels import (
    BlockMask,
    block_sparse_attention,
    block_sparse_attention_varlen,
    flash_attention,
    flash_attention_varlen,
    reference,
    testing,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]
SHAPES = [(1, 1), (113, 203), (203, 113), (512, 512), (1, 777), (1023, 1024), (2100, 2150)]


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
    """1,000 bit for bit, but dq, whose sums come in any order."""
    q, k, v = testing.make_qkv(4, 2048, 2048, 8, headdim, dtype=torch.bfloat16, device="cuda")
    dout = torch.randn_like(q)

    def run():
        out = flash_attention(
            q, k, v, causal=causal, dropout_p=dropout_p, dropout_seed=9, kernel="hopper"
        )
        return (out, *torch.autograd.grad(out, (q, k, v), dout))

    first = run()
    num_unequal = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        out, dq, dk, dv = run()
        for a, b in zip((first[0], *first[2:]), (out, dk, dv), strict=True):
            num_unequal += (a != b).sum()
    assert num_unequal == 0
    torch.testing.assert_close(dq, first[1], rtol=2e-2, atol=2e-3)


def _train_for_a_while(headdim: int, causal: bool, seconds: float) -> None:
    """Forward and backward without a pause; another order of warps must not change their bits."""
    q, k, v = testing.make_qkv(4, 4096, 4096, 12, headdim, dtype=torch.bfloat16, device="cuda")
    first = None
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        out = flash_attention(q, k, v, causal=causal, kernel="hopper")
        _, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        first = first or (out, dk, dv)
        assert all(map(torch.equal, first, (out, dk, dv)))


def test_processes_that_share_the_gpu():
    """The GPU takes a kernel off its multiprocessors in the middle and brings it back."""
    spawn = multiprocessing.get_context("spawn")
    cases = [(headdim, causal, 20.0) for headdim in (64, 128) for causal in (False, True)]
    processes = [spawn.Process(target=_train_for_a_while, args=case) for case in cases]
    for process in processes:
        process.start()
    end = time.monotonic() + 120
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    hung = [case for case, process in zip(cases, processes, strict=True) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    assert not hung, f"(headdim, causal, seconds) that did not end: {hung}"
    assert [process.exitcode for process in processes] == [0] * len(processes)


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


WINDOWS = [dict(window=(100, 7)), dict(window=(130, 0), causal=True), dict(window=(None, 40))]


@pytest.mark.parametrize("headdim", [40, 64, 128])
@pytest.mark.parametrize("dropout_p", [0.0, 0.17])
@pytest.mark.parametrize("options", WINDOWS)
def test_windows(options, dropout_p, headdim):
    for seqlen_q, seqlen_k in [(1, 1), (300, 300), (777, 700), (513, 520), (1025, 1025)]:
        qkv = testing.make_qkv(1, seqlen_q, seqlen_k, 2, headdim, device="cuda")
        testing.assert_matches_reference(
            "flash_attention", qkv, **options, dropout_p=dropout_p, dropout_seed=5, kernel="hopper"
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("headdim", [40, 64, 128])
@pytest.mark.parametrize("dropout_p", [0.0, 0.17])
@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window=(100, 7))])
def test_packed_sequences(options, dropout_p, headdim, dtype):
    lengths_q = [1, 300, 0, 129, 640, 0, 5]
    lengths_k = lengths_q if "window" in options else [200, 300, 7, 0, 513, 0, 129]
    q, k, v = (
        t.detach()[0]
        for t in testing.make_qkv(
            1, sum(lengths_q), sum(lengths_k), 4, headdim, nheads_k=2, dtype=dtype, device="cuda"
        )
    )
    cu_seqlens = [testing.make_cu_seqlens(lengths, "cuda") for lengths in (lengths_q, lengths_k)]
    if lengths_k is lengths_q:
        cu_seqlens[1] = cu_seqlens[0]
    testing.assert_matches_reference(
        "flash_attention_varlen", (q, k, v), cu_seqlens_q=cu_seqlens[0],
        cu_seqlens_k=cu_seqlens[1], max_seqlen_q=max(lengths_q), max_seqlen_k=max(lengths_k),
        **options, dropout_p=dropout_p, dropout_seed=2**50 + 1, lse_gradient=True, kernel="hopper",
    )  # fmt: skip


@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(dropout_p=0.1, dropout_seed=3)])
def test_many_sequences_of_unequal_length(options, headdim):
    """Each block takes many row tiles, some of which are empty; two runs take others."""
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.randint(0, 700, (60,), generator=generator) - 60).clamp(min=0)
    ends = lengths.cumsum(0).int().cuda()
    steps = torch.cat([ends.new_zeros(1), ends])
    q, k, v = torch.randn(3, int(ends[-1]), 6, headdim, dtype=torch.bfloat16, device="cuda").unbind(
        0
    )
    found = {
        kernel: flash_attention_varlen(
            q, k, v, cu_seqlens_q=steps, cu_seqlens_k=steps, max_seqlen_q=700, max_seqlen_k=700,
            return_lse=True, kernel=kernel.split()[0], **options,
        )
        for kernel in ("portable", "hopper", "hopper again")
    }  # fmt: skip
    for ours, again in zip(found["hopper"], found["hopper again"], strict=True):
        assert torch.equal(ours, again)
    torch.testing.assert_close(*(found[k][1] for k in ("hopper", "portable")))
    torch.testing.assert_close(*(found[k][0] for k in ("hopper", "portable")), rtol=2e-2, atol=4e-3)


@pytest.mark.parametrize("headdim", [64, 128])
def test_nothing_leaks_from_the_next_sequence(headdim):
    qkv = torch.randn(520, 3, 2, headdim, dtype=torch.bfloat16, device="cuda")
    qkv[300:] = float("nan")
    q, k, v = (t.requires_grad_() for t in qkv.unbind(1))
    cu_seqlens = torch.tensor([0, 300, 520], dtype=torch.int32, device="cuda")
    options = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    out = flash_attention_varlen(
        q, k, v, **options, max_seqlen_q=300, max_seqlen_k=300, kernel="hopper"
    )
    grads = torch.autograd.grad(out[:300].sum(), (q, k, v))
    assert out[:300].isfinite().all() and all(g[:300].isfinite().all() for g in grads)


@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window=(300, 7))])
def test_padded_keys(options, headdim):
    q, k, v = testing.make_qkv(4, 300, 333, 4, headdim, nheads_k=2, device="cuda")
    if "window" in options:
        k, v = (t.detach()[:, :300].contiguous().requires_grad_() for t in (k, v))
    lengths = torch.tensor([k.shape[1], 0, 1, 130], device="cuda")
    testing.assert_matches_reference(
        "flash_attention", (q, k, v), lengths_k=lengths, **options, dropout_p=0.1, dropout_seed=3,
        lse_gradient=True, kernel="hopper",
    )  # fmt: skip
    is_padding = torch.arange(k.shape[1], device="cuda")[None, :] >= lengths[:, None]
    k, v = (t.detach().masked_fill(is_padding[:, :, None, None], float("nan")) for t in (k, v))
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = flash_attention(*leaves, lengths_k=lengths, **options, kernel="hopper")
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("block_m,block_n", [(128, 128), (256, 128), (128, 256), (256, 256)])
@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, dict(causal=True), dict(window=(700, 60)), dict(dropout_p=0.17, dropout_seed=5)],
)
def test_block_masks(options, has_tokens, headdim, block_m, block_n):
    """With an empty block row and column, and a mask for each head."""
    seqlen_q, seqlen_k = 900, 1000
    generator = torch.Generator().manual_seed(0)
    blocks = torch.rand(1, 4, -(-seqlen_q // block_m), -(-seqlen_k // block_n), generator=generator)
    blocks = (blocks < 0.5).cuda()
    blocks[:, :2, 1] = False
    blocks[..., 2] = False
    tokens = None
    if has_tokens:
        tokens = (torch.rand(seqlen_q, seqlen_k, generator=generator) < 0.3).cuda()
    mask = BlockMask.from_dense(
        blocks, block_m, block_n, seqlen_q=seqlen_q, seqlen_k=seqlen_k, token_mask=tokens
    )
    qkv = testing.make_qkv(
        2, seqlen_q, seqlen_k, 4, headdim, nheads_k=2, dtype=torch.bfloat16, device="cuda"
    )
    testing.assert_matches_reference(
        "block_sparse_attention", qkv, block_mask=mask, **options, kernel="hopper"
    )


@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("lengths", [[130, 0, 400, 511], [511, 20], [200, 0]])
def test_block_masks_over_packed_sequences(lengths, has_tokens, headdim):
    qkv = torch.randn(sum(lengths), 3, 4, headdim, dtype=torch.bfloat16, device="cuda")
    leaves = [t.requires_grad_() for t in qkv.unbind(1)]
    blocks = torch.ones(4, 4).tril(1).bool().cuda()
    blocks[2, 0] = False
    tokens = (torch.rand(512, 512) < 0.4).cuda() if has_tokens else None
    mask = BlockMask.from_dense(blocks, seqlen_q=512, seqlen_k=512, token_mask=tokens)
    cu_seqlens = testing.make_cu_seqlens(lengths, "cuda")
    options = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=512)
    options.update(max_seqlen_k=512, causal=True, dropout_p=0.1, dropout_seed=2)
    dout, found = torch.randn_like(qkv[:, 0]), []
    for kernel in ("hopper", "portable"):
        out = block_sparse_attention_varlen(*leaves, mask, **options, kernel=kernel)
        found.append((out, *torch.autograd.grad(out, leaves, dout)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-2)


def test_rows_without_blocks_are_zero_whatever_the_values_hold():
    q, k, v = (t.detach() for t in testing.make_qkv(1, 256, 256, 2, 64, device="cuda"))
    v[:] = float("inf")
    blocks = torch.tensor([[True, True], [False, False]]).cuda()
    out = block_sparse_attention(q, k, v, BlockMask.from_dense(blocks), kernel="hopper")
    assert not out[:, 128:].any()


@pytest.mark.parametrize(
    "options,words",
    [
        (dict(softcap=1.0), "does not serve softcap"),
        (dict(softmax_scale=0.0), "positive softmax_scale"),
        (dict(alibi_slopes=torch.ones(2)), "or alibi_slopes"),
    ],
)
def test_what_is_not_served_says_so(options, words):
    q, k, v = testing.make_qkv(1, 16, 16, 2, 64, device="cuda")
    if "alibi_slopes" in options:
        options = dict(alibi_slopes=options["alibi_slopes"].cuda())
    with pytest.raises(NotImplementedError, match=words):
        flash_attention(q, k, v, kernel="hopper", **options)
    flash_attention(q, k, v, **options)


def test_strides_that_tma_cannot_read():
    q = torch.randn(1, 16, 2, 68, dtype=torch.float16, device="cuda")[..., :64]
    with pytest.raises(NotImplementedError, match="q 16-byte aligned with strides"):
        flash_attention(q, q, q, kernel="hopper")
    assert torch.equal(flash_attention(q, q, q), flash_attention(*[q.contiguous()] * 3))
