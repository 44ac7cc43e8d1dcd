"""Activation checkpointing: the same numbers from less memory."""

import collections

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flash_kernels import flash_attention
from model.attention import sdpa_attention
from model.bert import BERT
from model.gpt import GPT
from model.recompute import set_recompute

TOKENS = 24


def gpt(attention=sdpa_attention, dropout=0.2):
    dropouts = dict(embd_dropout=dropout, resid_dropout=dropout, attn_dropout=dropout)
    return GPT(
        vocab_size=50, max_seqlen=TOKENS, depth=2, dim=32, nheads=2, attention=attention, **dropouts
    )  # fmt: skip


def bert():
    return BERT(
        vocab_size=50, max_seqlen=TOKENS, depth=2, dim=32, nheads=2, mlp_dim=64,
        attention=sdpa_attention,
    )  # fmt: skip


def gradients(model, how, compiled=False):
    """(loss, gradients) with dropout from a fixed seed."""
    set_recompute(model, how)
    model.train()

    def loss_of(ids):
        return model.hidden(ids).float().square().sum()

    if compiled:
        loss_of = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    loss = loss_of(torch.arange(2 * TOKENS).view(2, TOKENS) % 50)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return loss.detach(), torch.autograd.grad(loss, parameters, allow_unused=True)


class Counter(TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function.name().split(".")[0]] += 1
        return function(*args, **(kwargs or {}))


def count_calls(how):
    """Of a forward and a backward without dropout: norms, products, attention."""
    torch.manual_seed(0)
    model = gpt(dropout=0.0)
    with Counter() as counter:
        gradients(model, how)
    names = ("aten::native_layer_norm", "aten::addmm", "aten::mm")
    attention = [n for n in counter.calls if "scaled_dot_product" in n and "backward" not in n]
    return [*(counter.calls[name] for name in names), sum(counter.calls[n] for n in attention)]


def kept_bytes(model, how):
    """Of the tensors that autograd saves, each storage once, parameters left out."""
    set_recompute(model, how)
    model.train()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # alive, so that none is reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.hidden(torch.zeros(2, TOKENS, dtype=torch.long)).sum()
    assert loss.requires_grad
    return sum(nbytes for nbytes, _ in kept.values())


@pytest.mark.parametrize("how", ["selective", "full"])
@pytest.mark.parametrize("make", [gpt, bert])
def test_loss_and_gradients_are_the_same_bits(make, how):
    torch.manual_seed(0)
    model = make()
    expected = gradients(model, "none")
    for got, want in zip(gradients(model, how), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_compiles_whole_with_our_attention_and_its_dropout():
    torch.manual_seed(0)
    model = gpt(attention=flash_attention)
    expected = gradients(model, "none", compiled=True)
    for how in ("selective", "full"):
        torch.compiler.reset()
        for got, want in zip(gradients(model, how, compiled=True), expected, strict=True):
            torch.testing.assert_close(got, want)


def test_what_runs_twice():
    """Two blocks of two norms, and one norm behind them; four products a block."""
    none, selective, full = map(count_calls, ("none", "selective", "full"))
    assert none[0] == 5 and none[1] == 8 and none[3] == 2
    assert selective[0] == 9 and selective[1:] == none[1:]
    # The last product's result is what no gradient needs: early stopping leaves it out.
    assert full[0] == 9 and 14 <= full[1] <= 16 and full[3] == 4


def test_full_keeps_the_inputs_of_blocks():
    """float32: the stream at two blocks, what the second has to add to it, and the input of the
    norm at the end, with its mean and deviation."""
    rows = 2 * TOKENS
    least = rows * 4 * (4 * 32 + 2)
    assert least <= kept_bytes(gpt(dropout=0.0), "full") <= least + rows * 8 + 64
    assert kept_bytes(gpt(dropout=0.0), "none") > 4 * least


def test_keeps_nothing_without_gradients():
    model = gpt()
    set_recompute(model, "full")
    with torch.no_grad():
        assert not model.hidden(torch.zeros(1, TOKENS, dtype=torch.long)).requires_grad


def test_how_is_checked():
    with pytest.raises(ValueError, match="one of none, selective, full, got 'some'"):
        set_recompute(gpt(), "some")
