"""On a GPU (`pytest -m gpu tests/flash_kernels`): compiled kernels, bf16, races, long rows."""

import contextlib
import itertools
import random
import subprocess
import sys
import time
from collections.abc import Iterable

import pytest
import torch

from flash_kernels import (
    flash_attention,
    flash_attention_with_kv_cache,
    reference,
    testing,
)

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
            "flash_attention", qkv, causal=causal, dropout_p=dropout_p, dropout_seed=2**50 + 1,
            kernel="portable",
        )  # fmt: skip


@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_repeated_runs_are_bit_equal(headdim, causal, dropout_p):
    q, k, v = testing.make_qkv(4, 2048, 2048, 8, headdim, dtype=torch.bfloat16, device="cuda")
    dout = torch.randn_like(q)

    def run():
        options = dict(causal=causal, dropout_p=dropout_p, dropout_seed=9, deterministic=True)
        out = flash_attention(q, k, v, **options)
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
    out, expected = (flash_attention(*t, deterministic=True) for t in ((q, k, v), dense))
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


def test_cuda_graph_draws_a_new_mask_at_each_replay():
    q, k, v = (t.detach() for t in testing.make_qkv(1, 64, 256, 2, 64, device="cuda"))
    flash_attention(q, k, v, dropout_p=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attention(q, k, v, dropout_p=0.5)
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out) and out.isfinite().all()


def test_two_streams():
    inputs = [testing.make_qkv(2, 1024, 1024, 8, 64, device="cuda", seed=i) for i in range(8)]
    expected = [flash_attention(*qkv, causal=True) for qkv in inputs]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    outs = []
    for i, qkv in enumerate(inputs):
        with torch.cuda.stream(streams[i % 2]):
            outs.append(flash_attention(*qkv, causal=True))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kernel", ["portable", None])
def test_repeated_calls_of_one_shape_are_told_apart(kernel):
    """The second call of a kind launches the compiled kernel of the first directly."""
    memory = torch.randn(3, 2 * 600 * 4 * 64 + 8, dtype=torch.bfloat16, device="cuda")
    for _ in range(3):
        for begin in (0, 8, 1):  # the last is not aligned to 16 bytes
            q, k, v = memory[:, begin : begin + 2 * 600 * 4 * 64].view(3, 2, 600, 4, 64).unbind()
            for heads_first in (False, True):
                if heads_first:
                    q = q.transpose(1, 2).contiguous().transpose(1, 2)
                for options in ({}, {"causal": True}, {"dropout_p": 0.2, "dropout_seed": 3}):
                    qkv = [t.detach().requires_grad_() for t in (q, k, v)]
                    testing.assert_matches_reference(
                        "flash_attention", qkv, kernel=kernel, **options
                    )


def test_any_device_index():
    q, k, v = testing.make_qkv(1, 64, 64, 2, 64, device="cuda:1")
    testing.assert_matches_reference("flash_attention", (q, k, v), causal=True)


def test_memory_is_linear():
    """Table 21 of arXiv 2205.14135 counts 209 MiB at 1K (batch 16, 8 heads, D64)."""
    for seqlen in (1024, 8192):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        q, k, v = (
            torch.randn(16, seqlen, 8, 64, dtype=torch.float16, device="cuda").requires_grad_()
            for _ in range(3)
        )
        out = flash_attention(q, k, v)
        torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
        used = (torch.cuda.max_memory_allocated() - before) / 2**20
        assert used <= 209 * seqlen / 1024
        del q, k, v, out


def test_kv_cache():
    for dtype in (torch.float16, torch.bfloat16):
        q, k, v = (
            t.detach()
            for t in testing.make_qkv(3, 1, 1, 8, 64, nheads_k=2, dtype=dtype, device="cuda")
        )
        _, k_cache, v_cache = (
            t.detach()
            for t in testing.make_qkv(3, 1, 5000, 2, 64, dtype=dtype, device="cuda", seed=1)
        )
        lengths = torch.tensor([4999, 700, 0], device="cuda")
        out = flash_attention_with_kv_cache(q, k_cache, v_cache, cache_lengths=lengths, k=k, v=v)
        expected, plain = (
            reference.flash_attention_with_kv_cache(
                *(t.to(d) for t in (q, k_cache, v_cache)), cache_lengths=lengths + 1
            )
            for d in (torch.float64, dtype)
        )
        testing.check_budget("out", out, plain, expected, 2 * torch.finfo(dtype).eps)


def random_case(rng: random.Random) -> tuple[str, tuple, dict]:
    """(function, qkv, options) of a random call."""
    dtype = rng.choice([torch.float16, torch.bfloat16, torch.bfloat16, torch.float32])
    nheads_k = rng.choice([1, 2, 3])
    nheads = nheads_k * rng.choice([1, 1, 2, 4])
    headdim = rng.choice([8, 16, 32, 40, 64, 64, 80, 96, 128, 128, 192, 256])
    lengths = [(rng.randint(0, 700), rng.randint(0, 700)) for _ in range(rng.randint(1, 4))]
    options = dict(causal=rng.random() < 0.5)
    if rng.random() < 0.3:
        options["window"] = (rng.choice([None, 0, 33, 200]), rng.choice([None, 0, 17, 300]))
    if rng.random() < 0.2:
        options["softcap"] = rng.choice([1.0, 20.0])
    if rng.random() < 0.2:
        options["softmax_scale"] = rng.choice([0.0, 0.05, -0.1])
    if rng.random() < 0.3:
        options.update(dropout_p=rng.choice([0.1, 0.5]), dropout_seed=rng.getrandbits(60))
    if rng.random() < 0.2:
        slopes = [rng.random() for _ in range(nheads)]
        options["alibi_slopes"] = torch.tensor(slopes, device="cuda")
    kind = dict(dtype=dtype, device="cuda", nheads_k=nheads_k, seed=rng.getrandbits(30))
    if rng.random() < 0.5:
        batch, (seqlen_q, seqlen_k) = len(lengths), lengths[0]
        options["deterministic"] = rng.random() < 0.5
        if rng.random() < 0.3:
            keys = [rng.randint(0, seqlen_k) for _ in range(batch)]
            options["lengths_k"] = torch.tensor(keys, device="cuda")
        return (
            "flash_attention",
            testing.make_qkv(batch, seqlen_q, seqlen_k, nheads, headdim, **kind),
            options,
        )
    rows, cols = zip(*lengths, strict=True)
    q, k, v = (
        t.detach()[0] for t in testing.make_qkv(1, sum(rows), sum(cols), nheads, headdim, **kind)
    )
    options.update(
        cu_seqlens_q=testing.make_cu_seqlens(list(rows), "cuda"), max_seqlen_q=max(rows),
        cu_seqlens_k=testing.make_cu_seqlens(list(cols), "cuda"), max_seqlen_k=max(cols),
    )  # fmt: skip
    return "flash_attention_varlen", (q, k, v), options


def assert_random_calls_match(seeds: Iterable[int], seconds: float) -> None:
    """Every seed's call, by either family of kernels, until the time is up."""
    end = time.monotonic() + seconds
    for seed in seeds:
        if time.monotonic() > end:
            return
        rng = random.Random(seed)
        name, qkv, options = random_case(rng)
        try:
            if rng.random() < 0.5:
                with contextlib.suppress(NotImplementedError):
                    testing.assert_matches_reference(name, qkv, kernel="hopper", **options)
                    continue
            testing.assert_matches_reference(name, qkv, kernel="portable", **options)
        except AssertionError as error:
            raise AssertionError(
                f"seed {seed}: {name} {[tuple(t.shape) for t in qkv]} {options}: {error}"
            ) from error


def test_random_calls():
    assert_random_calls_match(itertools.count(), 30)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_ten_minutes_of_random_calls(part):
    """Two and a half in each part, for several processes; -m "gpu and not slow" leaves them out."""
    assert_random_calls_match(itertools.count(1000 + part, 4), 150)


def test_packed_sequence_longer_than_promised_stops_on_the_device():
    """In a process of its own: the assertion spoils the CUDA context."""
    program = (
        "import torch\nfrom flash_kernels import flash_attention_varlen\n"
        "q = torch.randn(20, 2, 64, device='cuda', dtype=torch.float16)\n"
        "c = torch.tensor([0, 5, 20], dtype=torch.int32, device='cuda')\n"
        "flash_attention_varlen(q, q, q, cu_seqlens_q=c, cu_seqlens_k=c, "
        "max_seqlen_q=14, max_seqlen_k=15)\n"
        "torch.cuda.synchronize()\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode != 0 and "assert" in run.stderr.lower()
