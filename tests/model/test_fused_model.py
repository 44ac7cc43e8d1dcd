"""A GPT on the fused kernels is the plain one: in the interpreter, where tensors of the CPU take
the ways of a GPU's."""

import pytest
import torch

from flash_kernels.fused import mlp
from model import transformer
from model.attention import sdpa_attention
from model.gpt import GPT
from model.recompute import set_recompute
from model.self_attention import KVCache
from tests.training import randomize

SEQLEN = 12


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setattr(transformer, "has_kernels", lambda x: True)


def make(fused=True, dropout=0.0, **options):
    kinds = ("embd_dropout", "resid_dropout", "attn_dropout")
    model = GPT(
        vocab_size=50, max_seqlen=SEQLEN, depth=2, dim=24, nheads=2, attention=sdpa_attention,
        fused=fused, **dict.fromkeys(kinds, dropout), **options,
    )  # fmt: skip
    return randomize(model).train()


def ids():
    return torch.arange(2 * SEQLEN).view(2, SEQLEN) * 7 % 50


def gradients(model, compiled=False, **options):
    """(hidden, gradients of a function of it), dropout from a fixed seed."""
    forward = torch.compile(model.hidden, backend="aot_eager") if compiled else model.hidden
    torch.manual_seed(3)
    hidden = forward(ids(), **options)
    return hidden.detach(), torch.autograd.grad(hidden.float().sin().sum(), [*model.parameters()])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("packed", [False, True])
def test_it_is_the_plain_model(bias, packed):
    model = make(bias=bias)
    plain = make(fused=False, bias=bias)
    plain.load_state_dict(model.state_dict())
    starts = [[0, 5, SEQLEN], [0, SEQLEN, SEQLEN]]
    options = {"cu_seqlens": torch.tensor(starts, dtype=torch.int32)} if packed else {}
    found, wanted = gradients(model, **options), gradients(plain, **options)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert not torch.equal(found[0], wanted[0])  # else the kernels did not run


@pytest.mark.parametrize("how", ["selective", "full"])
@pytest.mark.parametrize("compiled", [False, True])
def test_recomputing_drops_the_same(how, compiled):
    model = make(dropout=0.2)
    wanted = gradients(model, compiled)
    torch.compiler.reset()
    set_recompute(model, how)
    torch.testing.assert_close(gradients(model, compiled), wanted, atol=0.0, rtol=0.0)


@pytest.mark.parametrize("how", ["none", "selective", "full"])
def test_what_is_computed_again_is_an_mlp_in_steps(how, monkeypatch):
    calls = []
    compute = mlp.gelu_mlp
    monkeypatch.setattr(
        mlp, "gelu_mlp", lambda *inputs, **how: calls.append(how) or compute(*inputs, **how)
    )
    model = make()
    set_recompute(model, how)
    gradients(model)
    assert len(calls) == (2 if how == "none" else 4)
    assert all(c == {"approximate": "tanh", "in_steps": how != "none"} for c in calls)


def test_dropout_acts_in_training_only():
    model = make(dropout=0.2)
    assert not torch.equal(model(ids()), model(ids()))
    model.eval()
    assert torch.equal(model(ids()), model(ids()))


@torch.no_grad()
def test_a_cache_gives_the_same_and_what_is_scored_is_not_rounded():
    model = make().eval()
    cache = KVCache(SEQLEN)
    parts = [model.hidden(part, kv_cache=cache) for part in ids().split([5, 1, 6], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model.hidden(ids()), atol=1e-5, rtol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.hidden(ids()).dtype == torch.float32
        with torch.enable_grad():
            assert model.hidden(ids()).dtype == torch.bfloat16


def test_gradients_of_samples_by_torch_func():
    model, plain = make(), make(fused=False)
    plain.load_state_dict(model.state_dict())

    def loss(parameters, model, row):
        return torch.func.functional_call(model, parameters, (row[None],)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, None, 0))
    found, wanted = (per_sample(dict(m.named_parameters()), m, ids()) for m in (model, plain))
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("fused", [True, False])
def test_a_stream_in_low_precision(fused):
    """Its sums take autocast's dtype, at the distance of its rounding; without, nothing changes."""
    model, wide = make(fused, residual_in_fp32=False), make(fused)
    wide.load_state_dict(model.state_dict())
    assert torch.equal(model.hidden(ids()), wide.hidden(ids()))
    dtypes = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, output: dtypes.append(output[0].dtype))
    exact = wide.hidden(ids())
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = gradients(model), gradients(wide)
    assert dtypes == [torch.bfloat16] * len(model.blocks)
    assert not torch.equal(found[0], wanted[0])
    error, usual = ((hidden.float() - exact).norm() / exact.norm() for hidden, _ in (found, wanted))
    assert error < 3 * usual, (error, usual)
    for mine, its in zip(found[1], wanted[1], strict=True):
        assert mine.dtype == torch.float32 and (mine - its).norm() <= 0.05 * its.norm() + 1e-6


class Doubled(torch.nn.Module):
    """What an adapter does: more than its weight says."""

    def __init__(self, wrapped):
        super().__init__()
        self.wrapped = wrapped
        self.weight, self.bias = wrapped.weight, wrapped.bias
        self.eps = getattr(wrapped, "eps", None)

    def forward(self, x):
        return 2 * self.wrapped(x)


def test_what_replaces_or_hooks_a_layer_is_called():
    model, plain = make(), make(fused=False)
    plain.load_state_dict(model.state_dict())
    seen = []
    for each in (model, plain):
        first, second = each.blocks
        first.mlp.up, first.mlp.down = Doubled(first.mlp.up), Doubled(first.mlp.down)
        first.norm2 = Doubled(first.norm2)
        first.dropout = torch.nn.Identity()
        for layer in (second.mlp.down, second.norm2, second.dropout):
            layer.register_forward_hook(lambda *_: seen.append(1))
        second.norm1.register_full_backward_hook(lambda *_: seen.append(1))
        up = second.mlp.up
        up.forward = lambda x, up=up: 3 * torch.nn.functional.linear(x, up.weight, up.bias)
    found, wanted = gradients(model), gradients(plain)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert len(seen) == 2 * 5, "the second dropout acts twice"
