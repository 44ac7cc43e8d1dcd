"""Repeated calls: what is kept of them, what tells them apart, and how a launch is repeated."""

import gc
import types
import weakref

import pytest
import torch
from triton import knobs

from flash_kernels import attention, flash_attention, flash_attention_varlen, operators, testing
from flash_kernels.portable import kernel_launch
from flash_kernels.portable.kernel_launch import Bounded, Launch
from flash_kernels.portable.tile_choice import Tile, use_tiles


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """One tile a call, and nothing kept from other tests."""
    monkeypatch.setattr(attention, "_known", Bounded(8))
    monkeypatch.setattr(operators, "_problems", Bounded(8))
    with use_tiles(forward=Tile(16, 16, 4, 1), dk_dv=Tile(16, 16, 4, 1), dq=Tile(16, 16, 4, 1)):
        yield


class Kernel:
    """Stands for a compiled triton.jit function; notes which way each launch took."""

    arg_names = ["x", "pair", "number", "FLAG"]

    def __init__(self):
        self.calls = []
        self.function, self.packed_metadata = 7, "metadata"

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.calls.append(("searched", grid, arguments, constants))
            return self

        return launch

    def run(self, *arguments):
        self.calls.append(("direct", *arguments))


@pytest.fixture
def kernel(monkeypatch):
    active = types.SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 5
    )
    monkeypatch.setattr(kernel_launch, "driver", types.SimpleNamespace(active=active))
    monkeypatch.setattr(kernel_launch, "_is_repeatable", lambda compiled: True)
    return Kernel()


def ways(kernel: Kernel) -> list[str]:
    return [call[0] for call in kernel.calls]


def test_a_repeated_launch_passes_the_new_addresses(kernel):
    launch = Launch(kernel, 3, (4,), {"FLAG": True, "num_warps": 2})
    x, y = torch.zeros(4), torch.ones(4)
    launch(x, (y, None, 8))
    launch(y, (x, None, 8))
    assert kernel.calls == [
        ("searched", (3,), (x, (y, None, 8), 4), {"FLAG": True, "num_warps": 2}),
        (
            "direct", 3, 1, 1, 5, 7, "metadata", None, None, None,
            y.data_ptr(), (x.data_ptr(), None, 8), 4, True,
        ),
    ]  # fmt: skip


def test_each_pattern_of_alignment_has_its_own_kernel(kernel):
    launch = Launch(kernel, 1, (4,), {"FLAG": True})
    memory = torch.zeros(64)
    aligned, shifted = memory[:8], memory[1:9]
    for pair in ((aligned, aligned), (shifted, aligned), (aligned, shifted), (shifted, shifted)):
        launch(pair[0], (pair[1],))
        launch(pair[0], (pair[1],))
    assert ways(kernel) == ["searched", "direct"] * 4


def test_profilers_see_every_launch_and_debugging_compiles_anew(kernel, monkeypatch):
    launch = Launch(kernel, 1, (4,), {"FLAG": True})
    x = torch.zeros(8)
    launch(x, ())
    with monkeypatch.context() as patch:
        patch.setattr(knobs.runtime, "debug", not knobs.runtime.debug)
        launch(x, ())
    with monkeypatch.context() as patch:
        patch.setattr(knobs.runtime, "launch_enter_hook", print)
        launch(x, ())
    launch(x, ())
    assert ways(kernel) == ["searched", "searched", "searched", "direct"]


def test_descriptors_are_made_once_and_hold_no_tensor(kernel):
    class Descriptor:
        def __init__(self, tensor):
            self.base, self.made_for = tensor, tensor.data_ptr()

    launch = Launch(kernel, 1, (4,), {"FLAG": True}, (Descriptor,))
    x, y = torch.zeros(8), torch.zeros(8)
    launch(x, ())
    launch(y, ())
    *_, described, nothing, number, flag = kernel.calls[1]
    assert (described.base is y, described.made_for) == (True, x.data_ptr())
    assert (nothing, number, flag) == ((), 4, True)
    assert launch._descriptors[0].base is None


def test_a_full_cache_starts_again():
    cache = Bounded(2)
    for number in range(3):
        assert cache.keep(number, str(number)) == str(number)
    assert cache == {2: "2"}


def test_what_is_kept_of_calls_holds_no_tensor():
    q, k, v = testing.make_qkv(1, 5, 5, 1, 16)
    options = dict(dropout_p=0.3, lengths_k=torch.tensor([4]), alibi_slopes=torch.tensor([0.1]))
    for _ in range(2):
        out = flash_attention(q, k, v, **options)
        torch.autograd.grad(out.sum(), (q, k, v))
    assert len(attention._known) == 1
    left = [weakref.ref(t) for t in (q, k, v, out, *list(options.values())[1:])]
    del q, k, v, out, options
    gc.collect()
    assert not any(ref() is not None for ref in left)


def results(qkv, **options):
    qkv = [t.detach().requires_grad_() for t in qkv]
    out, lse = flash_attention(*qkv, return_lse=True, **options)
    return (out, lse, *torch.autograd.grad(out.sum(), qkv))


def layouts(q, k, v):
    """The same values with other strides, alignment and dtype."""
    yield q, k, v
    yield tuple(torch.cat([t, t], 3)[..., 16:] for t in (q, k, v))
    yield torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view_as(q).copy_(q), k, v
    yield q.float(), k.float(), v.float()


def test_calls_of_one_shape_are_told_apart():
    qkv = [t.detach() for t in testing.make_qkv(1, 5, 5, 1, 16)]
    expected = results(qkv)
    for other in (*layouts(*qkv), qkv):
        for a, b in zip(results(other), expected, strict=True):
            torch.testing.assert_close(a.to(b.dtype), b, rtol=2e-3, atol=2e-3)
    for options in ({"causal": True}, {"window": (2, 1)}, {"softmax_scale": 0.5}, {"softcap": 0.5}):
        assert not torch.allclose(flash_attention(*qkv, **options), expected[0], atol=0.01)


def test_errors_come_after_a_call_that_was_right():
    q, k, v = (t.detach() for t in testing.make_qkv(1, 9, 9, 2, 16))
    flash_attention(q, k, v, lengths_k=torch.tensor([3]))
    for wrong, words in (
        (dict(v=v.float()), "same dtype"),
        (dict(k=k[:, :8]), "same shape"),
        (dict(dropout_p=2.0), "dropout_p"),
        (dict(window=(-1, None)), "window"),
        (dict(kernel="cuda"), "kernel"),
        (dict(lengths_k=torch.tensor([3.0])), "lengths_k"),
        (dict(v=v.transpose(1, 3)), "same shape"),
    ):
        arguments = dict(q=q, k=k, v=v, lengths_k=torch.tensor([3])) | wrong
        with pytest.raises(ValueError, match=words):
            flash_attention(**arguments)


def test_values_of_cu_seqlens_are_checked_at_every_call():
    q, k, v = (t.detach()[0] for t in testing.make_qkv(1, 9, 9, 1, 16))
    steps = testing.make_cu_seqlens([4, 5])

    def call():
        return flash_attention_varlen(
            q, k, v, cu_seqlens_q=steps, cu_seqlens_k=steps, max_seqlen_q=5, max_seqlen_k=5
        )

    call()
    steps[1] = 3  # the second sequence is longer than 5
    with pytest.raises(ValueError, match="longer than max_seqlen_q"):
        call()


def test_a_leftover_of_a_torch_func_transform_is_served():
    q, k, v = (t.detach() for t in testing.make_qkv(1, 9, 9, 2, 16))
    expected = flash_attention(q, k, v)
    leaked = []

    def loss(q):
        leaked.append(q)
        return flash_attention(q, k, v).sum()

    torch.func.grad(loss)(q)
    assert torch.equal(flash_attention(leaked[0], k, v), expected)


def test_gradients_of_another_dtype_are_refused():
    q, k, v = testing.make_qkv(1, 9, 9, 2, 16)
    out, lse = flash_attention(q, k, v, return_lse=True)
    options = operators.dense_options(q.shape[1], k.shape[1], None, 0.25, None, 0.0, None)
    with pytest.raises(ValueError, match="dout must be torch.float16"):
        operators.backward(out.float(), None, q, k, v, out, lse, *options)
