"""What torch's machinery needs: opcheck, compile in one graph, autocast, FLOPs, checkpointing."""

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from flash_kernels import flash_attention, flash_attention_varlen, testing
from flash_kernels.portable.tile_choice import Tile, use_tiles

SMALL = Tile(16, 16, 4, 1)


@pytest.fixture(autouse=True)
def small_tiles():
    with use_tiles(forward=SMALL, dk_dv=SMALL, dq=SMALL):
        yield


def forward_arguments(packed: bool):
    q, k, v = testing.make_qkv(1, 9, 9, 1, 16)
    if packed:
        q, k, v = (t.detach()[0].requires_grad_() for t in (q, k, v))
        lengths = testing.make_cu_seqlens([4, 5])
        index = (lengths, lengths, None, torch.tensor([0.1]), torch.tensor([3]))
        seqlens = (5, 5)
    else:
        index = (None, None, torch.tensor([7]), None, None)
        seqlens = (9, 9)
    no_blocks = (*(None,) * 7, 0, 0)
    options = (0.25, 0.0, 4, None, 0.2 if packed else 0.0, "portable", False)
    return (q, k, v, *index, *no_blocks, *seqlens, *options)


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed):
    arguments = forward_arguments(packed)
    torch.library.opcheck(torch.ops.flash_kernels.attention_forward, arguments)
    with torch.no_grad():
        q, *_ = arguments
        out, lse = torch.ops.flash_kernels.attention_forward(*arguments)
        inputs = [t.detach() for t in arguments[:3]]
        backward = (torch.ones_like(out), torch.ones_like(lse), *inputs, out, lse, *arguments[3:])
        torch.library.opcheck(torch.ops.flash_kernels.attention_backward, backward)


def test_compile_takes_the_graph_whole():
    q, k, v = testing.make_qkv(1, 9, 9, 1, 16, dtype=torch.float32)

    def step(q, k, v):
        out, lse = flash_attention(q * 2, k, v, causal=True, return_lse=True)
        return out.square().sum() + lse.sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    ours = torch.autograd.grad(compiled(q, k, v), (q, k, v))
    eager = torch.autograd.grad(step(q, k, v), (q, k, v))
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b)


def test_compile_draws_a_new_dropout_mask_at_each_call():
    q, k, v = testing.make_qkv(1, 9, 40, 1, 16)
    compiled = torch.compile(
        lambda: flash_attention(q, k, v, dropout_p=0.5), fullgraph=True, backend="aot_eager"
    )
    torch.manual_seed(0)
    first, second = compiled(), compiled()
    torch.manual_seed(0)
    again = compiled()
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


def test_compile_with_other_lengths_does_not_break():
    torch._dynamo.reset()
    compiled = torch.compile(flash_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for seqlen in (5, 9, 17):
        q, k, v = testing.make_qkv(1, seqlen, seqlen + 2, 1, 16)
        assert torch.equal(compiled(q, k, v, causal=True), flash_attention(q, k, v, causal=True))


def test_compile_packed():
    lengths = testing.make_cu_seqlens([4, 0, 5])
    q, k, v = (t.detach()[0] for t in testing.make_qkv(1, 9, 9, 1, 16))
    options = dict(cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=5, max_seqlen_k=5)
    compiled = torch.compile(flash_attention_varlen, fullgraph=True, backend="aot_eager")
    expected = flash_attention_varlen(q, k, v, **options)
    assert torch.equal(compiled(q, k, v, **options), expected)


def test_autocast_casts_first():
    q, k, v = testing.make_qkv(1, 9, 9, 1, 16, dtype=torch.float32)
    with torch.autocast("cpu", torch.float16):
        out = flash_attention(q, k, v)
    assert out.dtype == torch.float16
    assert torch.equal(out, flash_attention(q.half(), k.half(), v.half()))
    out.sum().backward()
    assert q.grad.dtype == torch.float32


@pytest.mark.parametrize(
    "options,pairs",
    [({}, 8 * 8), (dict(causal=True), 8 * 8 / 2), (dict(window=(1, 0)), 1 + 7 * 2)],
)
def test_flops(options, pairs):
    q, k, v = testing.make_qkv(2, 8, 8, 3, 16)
    with FlopCounterMode(display=False) as counter:
        out = flash_attention(q, k, v, **options)
    assert counter.get_total_flops() == 4 * 2 * 3 * 16 * pairs
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 10 * 2 * 3 * 16 * pairs


def test_flops_of_packed_sequences_count_real_pairs():
    lengths = testing.make_cu_seqlens([2, 6])
    q, k, v = (t.detach()[0] for t in testing.make_qkv(1, 8, 8, 3, 16))
    with FlopCounterMode(display=False) as counter:
        flash_attention_varlen(
            q, k, v, cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=6, max_seqlen_k=6
        )
    assert counter.get_total_flops() == 4 * 3 * 16 * (2 * 2 + 6 * 6)


def test_checkpointing_replays_the_dropout_mask():
    q, k, v = testing.make_qkv(1, 9, 40, 1, 16)

    def step(q, k, v):
        return flash_attention(q, k, v, dropout_p=0.5)

    torch.manual_seed(0)
    plain = torch.autograd.grad(step(q, k, v).sum(), (q, k, v))
    torch.manual_seed(0)
    again = torch.autograd.grad(checkpoint(step, q, k, v, use_reentrant=False).sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_selective_checkpointing_can_keep_attention():
    calls = []

    def policy(context, op, *args, **kwargs):
        kept = op is torch.ops.flash_kernels.attention_forward.default
        if kept:
            calls.append(context.is_recompute)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    q, k, v = testing.make_qkv(1, 9, 9, 1, 16)
    out = checkpoint(
        lambda q: flash_attention(q * 2, k, v).sin(),
        q,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    kept = torch.autograd.grad(out.sum(), q)[0]
    expected = torch.autograd.grad(flash_attention(q * 2, k, v).sin().sum(), q)[0]
    assert torch.equal(kept, expected) and False in calls


def test_torch_func_grad():
    q, k, v = testing.make_qkv(1, 9, 9, 1, 16, dtype=torch.float32)
    expected = torch.autograd.grad(flash_attention(q, k, v).square().sum(), q)[0]
    functional = torch.func.grad(lambda q: flash_attention(q, k, v).square().sum())(q.detach())
    torch.testing.assert_close(functional, expected)


def test_torch_func_vmap_and_gradients_per_sample():
    q, k, v = (
        torch.randn(3, 2, 9, 2, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)
    )
    slopes, lengths = torch.tensor([0.1, 0.3]), torch.tensor([[9, 4], [3, 9], [5, 6]])

    def attend(q, k, v, lengths):
        return flash_attention(q, k, v, causal=True, alibi_slopes=slopes, lengths_k=lengths)

    expected = torch.stack([attend(*one) for one in zip(q, k, v, lengths, strict=True)])
    torch.testing.assert_close(torch.func.vmap(attend)(q, k, v, lengths), expected)
    shared = torch.func.vmap(attend, in_dims=(1, None, None, None), out_dims=1)
    torch.testing.assert_close(
        shared(q.movedim(0, 1), k[0], v[0], lengths[0])[:, 2], attend(q[2], k[0], v[0], lengths[0])
    )
    per_sample = torch.func.vmap(torch.func.grad(lambda *one: attend(*one).square().sum()))
    leaf = q[1].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(attend(leaf, k[1], v[1], lengths[1]).square().sum(), leaf)
    torch.testing.assert_close(per_sample(q, k, v, lengths)[1], gradient)
    with pytest.raises(NotImplementedError, match="without dropout"):
        torch.func.vmap(lambda q: flash_attention(q, k[0], v[0], dropout_p=0.1, dropout_seed=1))(q)


def test_a_second_derivative_is_refused():
    """There is none: a silent zero would be worse."""
    q, k, v = testing.make_qkv(1, 9, 9, 1, 16, dtype=torch.float32)
    out = flash_attention(q, k, v)
    (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()

    def loss(q):
        return flash_attention(q, k.detach(), v.detach()).square().sum()

    with pytest.raises(RuntimeError, match="no second derivatives: differentiate once"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(q.detach())
