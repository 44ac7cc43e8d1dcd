"""The fused steps around attention, against plain PyTorch: interpreted, and on a GPU in bf16."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from flash_kernels.fused.cross_entropy import linear_cross_entropy
from flash_kernels.fused.gelu import bias_gelu
from flash_kernels.fused.residual_norm import residual_norm
from flash_kernels.reference import dropout_keep_mask

ROOT = Path(__file__).parents[2]

PLACES = [
    ("cpu", torch.float32),
    pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]


def tensor(*shape, device, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, device=device) * scale).to(dtype).requires_grad_()


def assert_close(got, want, dtype):
    """In float32 to rounding; else no further from float64 than a few roundings of the output."""
    tolerance = 2e-5 if dtype == torch.float32 else 2.0**-7
    scale = max(want.abs().max().item(), 1.0)
    error = (got.double() - want).abs().max().item()
    assert error <= tolerance * scale, f"{error} of {scale}"


def gradients(outputs, inputs):
    """Of a sum with weights that depend on the outputs' shapes alone and are exact in bfloat16, as
    whose sums over tokens are compared."""
    torch.manual_seed(7)
    total = 0.0
    for output in outputs:
        weights = torch.randn(output.shape).bfloat16().double()
        total = total + (output.double() * weights.to(output.device)).sum()
    return torch.autograd.grad(total, inputs)


def doubled(*tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


@pytest.mark.parametrize("device, dtype", PLACES)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize(
    "shape, has_bias", [((2, 37, 48), True), ((530, 5), True), ((3, 300), False)]
)
def test_residual_norm(device, dtype, dropout_p, shape, has_bias):
    torch.manual_seed(0)
    dim = shape[-1]
    residual = tensor(*shape, device=device)
    branch = tensor(*shape, device=device, dtype=dtype)
    weight = tensor(dim, device=device)
    bias = tensor(dim, device=device) if has_bias else None
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        torch.manual_seed(3)
        total, normed = residual_norm(residual, branch, weight, bias, dropout_p=dropout_p)
    assert total.dtype == torch.float32 and normed.dtype == dtype
    inputs = [t for t in (residual, branch, weight, bias) if t is not None]
    exact = doubled(*inputs)
    added = exact[1]
    if dropout_p:
        torch.manual_seed(3)
        seed = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)
        num_rows = residual.numel() // dim
        keep = dropout_keep_mask(seed.cpu(), 1, 1, num_rows, dim, dropout_p)[0, 0]
        added = added * keep.view(shape).to(device) / (1.0 - dropout_p)
    want_total = exact[0] + added
    want = want_total, F.layer_norm(want_total, (dim,), *exact[2:])
    for got, wanted in zip((total, normed), want, strict=True):
        assert_close(got, wanted, dtype)
    found = gradients((total, normed), inputs)
    assert [g.dtype for g in found] == [t.dtype for t in inputs]
    for got, wanted in zip(found, gradients(want, exact), strict=True):
        assert_close(got, wanted, dtype)


@pytest.mark.parametrize("used", [0, 1])
def test_residual_norm_with_one_result_unused(used):
    inputs = [tensor(5, 16, device="cpu"), tensor(5, 16, device="cpu"), tensor(16, device="cpu")]
    exact = doubled(*inputs)
    total = exact[0] + exact[1]
    want = (total, F.layer_norm(total, (16,), exact[2]))[used]
    got = residual_norm(*inputs)[used]
    for mine, wanted in zip(
        torch.autograd.grad(got.sum(), inputs, allow_unused=True),
        torch.autograd.grad(want.sum(), exact, allow_unused=True),
        strict=True,
    ):
        if wanted is None:  # a sum has no gradient of the norm's weight
            assert mine is None or not mine.any()
        else:
            torch.testing.assert_close(mine.double(), wanted, atol=2e-5, rtol=0)


@pytest.mark.parametrize("device, dtype", PLACES)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shape", [(2, 19, 40), (700, 3), (0, 8)])
def test_bias_gelu(device, dtype, approximate, shape):
    torch.manual_seed(0)
    x = tensor(*shape, device=device, dtype=dtype, scale=3.0)
    bias = tensor(shape[-1], device=device)
    out = bias_gelu(x, bias, approximate=approximate)
    assert out.dtype == dtype
    exact = doubled(x, bias)
    want = F.gelu(exact[0] + exact[1], approximate=approximate)
    if x.numel():
        assert_close(out, want, dtype)
    found = gradients([out], [x, bias])
    assert [g.dtype for g in found] == [dtype, torch.float32]
    for got, wanted in zip(found, gradients([want], exact), strict=True):
        if got.numel():
            assert_close(got, wanted, dtype)


def test_gelu_far_from_zero_is_finite():
    x = torch.tensor([[-1e4, -30.0, 30.0, 1e4]], requires_grad=True)
    for approximate in ("none", "tanh"):
        out = bias_gelu(x, torch.zeros(4), approximate=approximate)
        assert out.tolist() == [[0.0, 0.0, 30.0, 1e4]]
        assert torch.autograd.grad(out.sum(), x)[0].tolist() == [[0.0, 0.0, 1.0, 1.0]]


@pytest.mark.parametrize("device, dtype", PLACES)
@pytest.mark.parametrize("num_tokens, chunk_tokens", [(9, 4), (8, 8), (3, 100)])
def test_linear_cross_entropy(device, dtype, num_tokens, chunk_tokens):
    """10,000 classes take two steps of the kernel; those behind them are padding."""
    torch.manual_seed(0)
    num_classes, num_rows = 10000, 10240
    hidden = tensor(1, num_tokens, 64, device=device)
    weight = tensor(num_rows, 64, device=device, scale=0.3)
    labels = torch.randint(0, num_classes, (1, num_tokens), device=device)
    labels[0, 0], labels[0, 1] = num_classes - 1, -100
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        loss = linear_cross_entropy(
            hidden, weight, labels, vocab_size=num_classes, chunk_tokens=chunk_tokens
        )
    assert loss.dtype == torch.float32
    exact = doubled(hidden.to(dtype), weight.to(dtype))
    logits = exact[0] @ exact[1][:num_classes].T
    want = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert_close(loss, want, dtype)
    found = torch.autograd.grad(loss * 0.5, (hidden, weight))
    assert [g.dtype for g in found] == [torch.float32] * 2
    assert not found[0][0, 1].any() and not found[1][num_classes:].any()
    for got, wanted in zip(found, torch.autograd.grad(want * 0.5, exact), strict=True):
        assert_close(got, wanted, dtype)


def test_large_logits_do_not_overflow():
    """Logits of 0 and 1e4: the loss of the second class is 0, of the first 1e4."""
    hidden, weight = torch.tensor([[1e2], [1e2]]), torch.tensor([[0.0], [1e2]])
    hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, torch.tensor([1, 0]))
    assert loss.item() == 1e4
    assert torch.autograd.grad(loss, hidden)[0].tolist() == [[0.0], [1e2]]


def test_opcheck():
    torch.manual_seed(0)
    args = {"device": "cpu"}
    check, operators = torch.library.opcheck, torch.ops.flash_kernels
    seed = torch.tensor([5])
    rows = [tensor(6, 16, **args), tensor(6, 16, **args)]
    norm = [tensor(16, **args), tensor(16, **args)]
    for options in ((*norm, None, 0.0), (norm[0], None, seed, 0.2)):
        check(operators.residual_norm, (*rows, *options, 1e-5, torch.float32))
    check(operators.bias_gelu, (tensor(6, 16, **args), tensor(16, **args), True))
    labels = torch.randint(0, 40, (6,))
    check(  # without gradients: it would differentiate those that are results
        operators.linear_cross_entropy,
        (rows[0].detach(), torch.randn(64, 16), labels, 40, -100, 4, torch.float32),
    )

    total, normed, mean, rstd = operators.residual_norm(
        *rows, *norm, None, 0.0, 1e-5, torch.float32
    )
    given = [t.detach() for t in (normed, normed, total, mean, rstd, norm[0])]
    for has_bias in (True, False):
        check(operators.residual_norm_backward, (*given, has_bias, None, 0.0, torch.float32))
    check(operators.bias_gelu_backward, (given[0], given[2], given[5], True))


def fused_steps():
    """(fused, plain) functions of x (..., 16), by name."""
    torch.manual_seed(1)
    other, weight, table = torch.randn(5, 16), torch.randn(16), torch.randn(9, 16)
    labels = torch.tensor([3, 0, 8, -100, 2])
    return {
        "norm": (
            lambda x: residual_norm(x, other, weight)[1].square().sum(),
            lambda x: F.layer_norm(x + other, (16,), weight).square().sum(),
        ),
        "gelu": (lambda x: bias_gelu(x, weight).sum(), lambda x: F.gelu(x + weight).sum()),
        "cross-entropy": (
            lambda x: linear_cross_entropy(x, table, labels),
            lambda x: F.cross_entropy(x @ table.T, labels, reduction="sum"),
        ),
    }


@pytest.mark.parametrize("name", ["norm", "gelu", "cross-entropy"])
def test_torch_func(name):
    """Gradients, of samples too; forward mode is an error and no 0."""
    step, plain = fused_steps()[name]
    x = torch.randn(5, 16)
    torch.testing.assert_close(torch.func.grad(step)(x), torch.func.grad(plain)(x))
    samples = torch.randn(3, 5, 16)
    found, wanted = (torch.func.vmap(torch.func.grad(f))(samples) for f in (step, plain))
    torch.testing.assert_close(found, wanted)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(step, (x,), (x,))


@pytest.mark.parametrize("name", ["norm", "gelu", "cross-entropy"])
def test_second_derivatives_are_an_error(name):
    step, _ = fused_steps()[name]
    x = torch.randn(5, 16, requires_grad=True)
    (gradient,) = torch.autograd.grad(step(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives: differentiate once"):
        gradient.square().sum().backward()
    with pytest.raises(RuntimeError, match="no second derivatives: differentiate once"):
        torch.func.grad(lambda x: torch.func.grad(step)(x).square().sum())(x.detach())


def test_weights_of_any_strides():
    x, branch = torch.randn(5, 16, requires_grad=True), torch.randn(5, 16)
    for weight, bias in (
        (torch.randn(32)[::2], torch.randn(2, 16).T[:, 0]),
        (torch.randn(1).expand(16), torch.randn(1).expand(16)),
    ):
        inputs = [x, weight.requires_grad_(), bias.requires_grad_()]
        got = residual_norm(x, branch, *inputs[1:])[1] + bias_gelu(x, inputs[2])
        want = F.layer_norm(x + branch, (16,), *inputs[1:]) + F.gelu(x + inputs[2])
        torch.testing.assert_close(got, want)
        pairs = (torch.autograd.grad(y.square().sum(), inputs) for y in (got, want))
        for mine, wanted in zip(*pairs, strict=True):
            torch.testing.assert_close(mine, wanted, atol=1e-4, rtol=1e-4)


def test_one_token():
    hidden, weight = torch.randn(16), torch.randn(9, 16)
    loss = linear_cross_entropy(hidden, weight, torch.tensor(3))
    torch.testing.assert_close(loss, F.cross_entropy(weight @ hidden, torch.tensor(3)))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_gpu_that_is_not_the_current_one():
    x, weight = torch.randn(5, 16, device="cuda:1"), torch.randn(16, device="cuda:1")
    labels = torch.zeros(5, dtype=torch.int64, device="cuda:1")
    inputs = [x.requires_grad_(), weight.requires_grad_()]
    out = bias_gelu(residual_norm(x, x, weight)[1], weight)
    loss = linear_cross_entropy(out, torch.ones(9, 16, device="cuda:1"), labels) + out.sum()
    exact = doubled(*inputs)
    normed = F.layer_norm(2 * exact[0], (16,), exact[1])
    want = F.gelu(normed + exact[1])
    want = 5 * torch.tensor(9.0).log() + want.sum()  # logits of one value
    for got, wanted in zip(
        torch.autograd.grad(loss, inputs), torch.autograd.grad(want, exact), strict=True
    ):
        assert_close(got, wanted, torch.float32)


def test_compiles_whole():
    """In one graph, to the eager results."""

    def step(x, branch, weight, bias, table, labels):
        x, normed = residual_norm(x, branch, weight, bias)
        return linear_cross_entropy(bias_gelu(normed, bias) + x, table, labels, vocab_size=30)

    inputs = [tensor(6, 16, device="cpu") for _ in range(2)]
    inputs += [tensor(16, device="cpu") for _ in range(2)] + [tensor(32, 16, device="cpu")]
    labels = torch.randint(0, 30, (6,))
    want = torch.autograd.grad(step(*inputs, labels), inputs)
    compiled = torch.compile(step, fullgraph=True)
    for got, wanted in zip(
        torch.autograd.grad(compiled(*inputs, labels), inputs), want, strict=True
    ):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda t: residual_norm(t(2, 4), t(2, 3), t(4)), "residual's shape"),
        (lambda t: residual_norm(t(2, 4), t(2, 4), t(3)), "last dimension"),
        (lambda t: residual_norm(t(2, 4), t(2, 4), t(4), t(1)), r"got .*\(1,\)"),
        (lambda t: residual_norm(t(2, 4), t(2, 4), t(4), dropout_p=1.0), "dropout_p in"),
        (lambda t: residual_norm(t(1, 8193), t(1, 8193), t(8193)), "at most 8192"),
        (lambda t: bias_gelu(t(2, 4), t(3)), "last dimension of x"),
        (lambda t: bias_gelu(t(2, 4), t(4), approximate="erf"), "none or tanh, got 'erf'"),
        (lambda t: linear_cross_entropy(t(2, 4), t(9, 4), t(3).long()), r"\(num_rows, dim\)"),
        (lambda t: bias_gelu(t(2, 4), t(4, device="meta")), "on one GPU, got cpu, meta"),
        (
            lambda t: linear_cross_entropy(t(2, 4).double(), t(9, 4), t(2).long()),
            "got torch.float64",
        ),
        (
            lambda t: linear_cross_entropy(t(2, 4), t(9, 4), t(2).long(), vocab_size=10),
            r"vocab_size must be in \[1, 9\]",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros)


def test_compiled_for_gpus_that_are_not_there():
    """At GPT-2's widths nothing spills, and memory is read and written 16 bytes at a time."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, ROOT / "tests/flash_kernels/compile_fused.py", "sm_90", "gfx942"],
        capture_output=True, text=True, env={**environment, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(found) == 2 * 12
    for case in found:
        assert case["shared"] <= 48 * 1024, case
        assert case["spills"] <= (64 if "8192" in case["kernel"] else 0), case
        assert case.get("wide", 1) > 0, case
