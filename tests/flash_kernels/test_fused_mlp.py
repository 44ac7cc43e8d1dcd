"""The fused MLP against plain PyTorch: in steps, and with torch in the place of cuBLASLt, which
test_fused_mlp_gpu.py has."""

import types

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from flash_kernels.fused import cublaslt, gelu_mlp, mlp
from flash_kernels.testing import check_budget
from tests.flash_kernels.test_fused import assert_close, doubled, gradients, tensor

HALF = [torch.float16, torch.bfloat16]


@pytest.fixture
def epilogues(monkeypatch):
    """Plain PyTorch in the place of cuBLASLt, float32 too."""

    def linear_gelu(x, weight, bias):
        pre = F.linear(x, weight, bias)
        return F.gelu(pre, approximate="tanh"), pre

    def matmul_dgelu(dout, weight, pre):
        return torch.ops.aten.gelu_backward(dout @ weight, pre, approximate="tanh")

    monkeypatch.setattr(cublaslt, "linear_gelu", linear_gelu)
    monkeypatch.setattr(cublaslt, "matmul_dgelu", matmul_dgelu)
    monkeypatch.setattr(cublaslt, "is_available", lambda device: True)
    monkeypatch.setattr(mlp, "_DTYPES", (torch.float16, torch.bfloat16, torch.float32))


def make(*shape, hidden, dtype=torch.float32, device="cpu", bias=True):
    """x and the weights and biases, whose results have the size of x."""
    torch.manual_seed(0)
    dim = shape[-1]
    options = {"dtype": dtype, "device": device}
    inputs = [
        tensor(*shape, **options),
        tensor(hidden, dim, scale=dim**-0.5, **options),
        tensor(hidden, **options),
        tensor(dim, hidden, scale=hidden**-0.5, **options),
    ]
    return [*inputs, tensor(dim, **options)] if bias else inputs


def plain(x, up_weight, up_bias, down_weight, down_bias=None, approximate="tanh"):
    hidden = F.gelu(F.linear(x, up_weight, up_bias), approximate=approximate)
    return F.linear(hidden, down_weight, down_bias)


def compare(found, inputs, dtype, approximate="tanh"):
    """(out, gradients of inputs) with plain PyTorch: in float32 to rounding, else under the error
    budget of attention."""
    exact = doubled(*(t.to(dtype) for t in inputs))
    low = [t.detach().to(dtype).requires_grad_() for t in inputs]
    want = [plain(*given, approximate=approximate) for given in (low, exact)]
    want = [[out, *gradients([out], given)] for out, given in zip(want, (low, exact), strict=True)]
    for index, (mine, plain_one, truth) in enumerate(zip(found, *want, strict=True)):
        if dtype == torch.float32 and mine.numel():
            assert_close(mine, truth, dtype)
        elif mine.numel():
            slack = 2 * torch.finfo(dtype).eps * truth.abs().max().item()
            check_budget(f"result {index}", mine.detach(), plain_one.detach(), truth, slack)


def check(inputs, approximate="tanh"):
    out = gelu_mlp(*inputs, approximate=approximate)
    found = [out, *gradients([out], inputs)]
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in (inputs[0], *inputs)]
    compare(found, inputs, out.dtype, approximate)


SHAPES = [((2, 19, 24), 40), ((1, 16), 64), ((0, 16), 8), ((16,), 32)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shape, hidden", [*SHAPES, ((5, 7), 13)])
def test_in_steps(device, approximate, shape, hidden):
    check(make(*shape, hidden=hidden, device=device), approximate)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape, hidden", SHAPES)
def test_with_epilogues(epilogues, shape, hidden, bias):
    check(make(*shape, hidden=hidden, bias=bias))


@pytest.mark.parametrize(
    "served, dtype, sizes, options",
    [
        (True, torch.float16, (16, 24), {}),
        (True, torch.bfloat16, (16, 24), {}),
        (False, torch.float32, (16, 24), {}),
        (False, torch.bfloat16, (12, 24), {}),
        (False, torch.bfloat16, (16, 20), {}),
        (False, torch.bfloat16, (0, 24), {}),
        (False, torch.bfloat16, (16, 24), {"approximate": "none"}),
        (False, torch.bfloat16, (16, 24), {"in_steps": True}),
    ],
)
def test_what_cublaslt_serves(epilogues, monkeypatch, served, dtype, sizes, options):
    monkeypatch.setattr(mlp, "_DTYPES", HALF)
    calls = []
    monkeypatch.setattr(mlp, "_gelu_mlp", lambda x, *rest: calls.append(x) or (x, None, None))
    dim, hidden = sizes
    shapes = (3, dim), (hidden, dim), (hidden,), (dim, hidden)
    gelu_mlp(*(torch.zeros(shape, dtype=dtype) for shape in shapes), **options)
    assert len(calls) == served


def test_cublaslt_is_of_cuda():
    assert not cublaslt.is_available(torch.device("cpu"))
    assert not cublaslt.is_available(torch.device("meta"))


@pytest.mark.parametrize(
    "shape, strides, expected",
    [
        ((6, 16), (16, 1), (False, 16, 6, 16)),  # rows: its transpose by columns
        ((6, 16), (40, 1), (False, 16, 6, 40)),  # a slice of wider rows, or every other row
        ((16, 6), (1, 16), (True, 16, 6, 16)),  # weight.T
        ((16, 6), (1, 24), (True, 16, 6, 24)),
        ((1, 16), (3, 1), (False, 16, 1, 16)),  # one row: any stride
        ((1, 16), (1, 1), (False, 16, 1, 16)),
        ((6, 16), (0, 1), None),  # one row six times
        ((6, 16), (8, 1), None),  # rows overlap
        ((6, 16), (20, 1), None),  # 40 bytes between rows
        ((6, 16), (1, 6), None),
        ((6, 16), (32, 2), None),
    ],
)
def test_layout(shape, strides, expected):
    assert cublaslt.layout(shape, strides) == expected


@pytest.mark.parametrize("shape, strides", [((6, 16), (40, 1)), ((16, 6), (1, 24))])
def test_a_layout_has_the_values_of_the_matrix(shape, strides):
    """Read as cuBLAS reads: element (row, column) of what is stored at row + column * ld."""
    values = torch.arange(400.0)
    matrix = values.as_strided(shape, strides)
    is_transposed, rows, cols, ld = cublaslt.layout(shape, strides)
    stored = values.as_strided((rows, cols), (1, ld))
    assert torch.equal(stored.T if is_transposed else stored, matrix.T)


def test_an_operand_is_copied_where_it_must_be():
    matrix = torch.randn(6, 32).bfloat16()
    assert cublaslt._operand(matrix)[0] is matrix
    for part in (
        matrix[:, 1:17],  # begins at 2 bytes
        matrix[:, ::2],
        matrix[:1].expand(6, 32),
        torch.randn(32, 6).bfloat16().T,  # columns of 12 bytes
    ):
        copy, found = cublaslt._operand(part)
        assert torch.equal(copy, part) and copy.data_ptr() % 16 == 0
        assert found == (False, part.shape[1], 6, part.shape[1])


def test_a_refusal_names_the_product(monkeypatch):
    library = types.SimpleNamespace(
        cublasLtMatmulDescCreate=lambda *arguments: 7, cublasLtMatmulDescDestroy=None
    )
    monkeypatch.setattr(cublaslt, "_library", lambda: library)
    x, weight, bias = (torch.zeros(shape).half() for shape in ((2, 8), (16, 8), (16,)))
    with pytest.raises(RuntimeError, match="cublasLtMatmulDescCreate .* got 7") as caught:
        cublaslt.linear_gelu(x, weight, bias)
    assert caught.value.__notes__ == ["in (2, 8) @ (8, 16), torch.float16, epilogue 164"]


@pytest.mark.parametrize("shape", [(1, 8), (37, 300), (2500, 16), (0, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_column_sums(shape, dtype):
    """2,500 rows are several tiles a program."""
    x = torch.randn(shape[::-1]).to(dtype).T  # any strides
    found = torch.ops.flash_kernels.column_sums(x, torch.float32)
    torch.testing.assert_close(found, x.double().sum(0).float(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("by_epilogues", [False, True])
def test_autocast(request, by_epilogues):
    """Products and result in bfloat16, gradients in the parameters' float32."""
    if by_epilogues:
        request.getfixturevalue("epilogues")
    inputs = make(9, 16, hidden=32)
    with torch.autocast("cpu", torch.bfloat16):
        out = gelu_mlp(*inputs)
    assert out.dtype == torch.bfloat16
    found = gradients([out], inputs)
    assert {g.dtype for g in found} == {torch.float32}
    compare([out, *found], inputs, torch.bfloat16)


def test_flops_and_gradients_that_nobody_needs(epilogues):
    """A product is 2 rows dim hidden: two forward, four backward, two of them the weights'."""
    product = 2 * 6 * 16 * 32
    for frozen, products in ((False, 6), (True, 4)):
        inputs = make(6, 16, hidden=32)
        for parameter in inputs[1:]:
            parameter.requires_grad_(not frozen)
        with FlopCounterMode(display=False) as counter:
            gelu_mlp(*inputs).sum().backward()
        assert counter.get_total_flops() == products * product


def test_opcheck(epilogues):
    inputs = make(6, 16, hidden=32)
    operators = torch.ops.flash_kernels
    # Without gradients: it would differentiate the hidden units, which are results.
    given = [t.detach() for t in inputs]
    for bias in (given[-1], None):
        torch.library.opcheck(operators.gelu_mlp, (*given[:4], bias))
    out, _, pre = operators.gelu_mlp(*given)
    torch.library.opcheck(operators.matmul_dgelu, (out, given[3], pre))
    torch.library.opcheck(operators.column_sums, (pre, torch.bfloat16))


@pytest.mark.parametrize("by_epilogues", [False, True])
def test_torch_func(request, by_epilogues):
    """Gradients, of samples too; forward mode is an error and no 0; second ones are an error."""
    if by_epilogues:
        request.getfixturevalue("epilogues")
    x, *rest = (t.detach() for t in make(5, 16, hidden=32))

    def loss(function):
        return lambda x, rest: function(x, *rest).square().sum()

    found, wanted = (torch.func.grad(loss(f), (0, 1))(x, rest) for f in (gelu_mlp, plain))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    samples = torch.randn(3, 5, 16)
    found, wanted = (
        torch.func.vmap(torch.func.grad(loss(f), (0, 1)), (0, None))(samples, rest)
        for f in (gelu_mlp, plain)
    )
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(lambda x: gelu_mlp(x, *rest), (x,), (x,))

    x.requires_grad_()
    (gradient,) = torch.autograd.grad(gelu_mlp(x, *rest).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives: differentiate once"):
        gradient.square().sum().backward()
    with pytest.raises(RuntimeError, match="no second derivatives: differentiate once"):
        torch.func.grad(lambda x: torch.func.grad(loss(gelu_mlp))(x, rest).square().sum())(
            x.detach()
        )


@pytest.mark.parametrize("by_epilogues", [False, True])
def test_compiles_whole(request, by_epilogues):
    """In one graph, to the eager results; under autocast, as models train."""
    if by_epilogues:
        request.getfixturevalue("epilogues")
    inputs = make(2, 6, 16, hidden=32)
    weights = torch.randn(2, 6, 16)

    def step(*inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return (gelu_mlp(*inputs).float() * weights).sum()

    want = torch.autograd.grad(step(*inputs), inputs)
    found = torch.autograd.grad(torch.compile(step, fullgraph=True)(*inputs), inputs)
    for got, wanted in zip(found, want, strict=True):
        torch.testing.assert_close(got, wanted, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("by_epilogues", [False, True])
def test_one_graph_serves_any_number_of_rows(request, by_epilogues):
    """Packed images have another number of pixels in every step."""
    if by_epilogues:
        request.getfixturevalue("epilogues")
    x, *weights = make(6, 16, hidden=32)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: gelu_mlp(x, *weights), dynamic=True, backend=backend)
    for rows in (6, 7, 9, 20):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(compiled(x), gelu_mlp(x, *weights))
    assert len(graphs) == 1


@pytest.mark.parametrize(
    "change, message",
    [
        ({0: (3, 15)}, r"x must end in \(16,\) where up_weight is \(32, 16\), got \(15,\)"),
        ({2: (31,)}, r"up_bias must be \(32,\) .*, got \(31,\)"),
        ({3: (32, 16)}, r"down_weight must be \(16, 32\) .*, got \(32, 16\)"),
        ({4: (32,)}, r"down_bias must be \(16,\) .*, got \(32,\)"),
    ],
)
def test_errors(change, message):
    shapes = [(3, 16), (32, 16), (32,), (16, 32), (16,)]
    with pytest.raises(ValueError, match=message):
        gelu_mlp(*(torch.zeros(change.get(i, shape)) for i, shape in enumerate(shapes)))


def test_errors_of_place_and_kind():
    inputs = make(3, 16, hidden=32)
    with pytest.raises(ValueError, match="none or tanh, got 'erf'"):
        gelu_mlp(*inputs, approximate="erf")
    with pytest.raises(ValueError, match="on one GPU, got cpu, meta"):
        gelu_mlp(inputs[0], inputs[1].to("meta"), *inputs[2:])
