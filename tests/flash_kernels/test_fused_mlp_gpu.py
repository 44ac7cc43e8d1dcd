"""The fused MLP with cuBLASLt's epilogues, on a GPU, against plain PyTorch."""

import threading

import pytest
import torch

from flash_kernels.fused import cublaslt, gelu_mlp
from tests.flash_kernels.test_fused import assert_close
from tests.flash_kernels.test_fused_mlp import HALF, SHAPES, check, make

pytestmark = pytest.mark.gpu


@pytest.fixture
def products(monkeypatch):
    """The epilogues of the products that cuBLASLt makes."""
    found, multiply = [], cublaslt._matmul

    def record(a, b, epilogue, *rest):
        found.append(epilogue)
        return multiply(a, b, epilogue, *rest)

    monkeypatch.setattr(cublaslt, "_matmul", record)
    return found


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "shape, hidden",
    [
        *SHAPES,
        ((1, 768), 3072),
        ((1023, 768), 3072),
        ((2, 500, 1600), 6400),
        ((129, 8), 24),
        ((4096, 1024), 4096),
    ],
)
def test_on_a_gpu(products, dtype, bias, shape, hidden):
    check(make(*shape, hidden=hidden, dtype=dtype, device="cuda", bias=bias))
    assert products == [164, 192]


@pytest.mark.parametrize("dtype", HALF)
def test_strides_on_a_gpu(products, dtype):
    """Copied or not, and with gradients of a result that have no strides, as of its sum."""
    base, up_weight, up_bias, down_weight, down_bias = make(
        34, 128, hidden=128, dtype=dtype, device="cuda"
    )
    rest = up_weight[:, :64], up_bias, down_weight[:64].T.contiguous().T, down_bias[:64]
    for x in (
        base[:, :64],
        base[::2, 64:],
        base[:32, :64].T.contiguous().T,  # by columns
        base[:, :64].T.contiguous().T,  # and of 68 bytes
        base[:, 1:65],
        base[:, 4:68],
        base[:, ::2],
        base[:1, :64].expand(5, 64),
    ):
        inputs = [t.detach().requires_grad_() for t in (x, *rest)]
        check(inputs)
        out, ones = gelu_mlp(*inputs), torch.ones(x.shape, dtype=dtype, device="cuda")
        found = torch.autograd.grad(out, inputs, ones[:1, :1].expand(x.shape), retain_graph=True)
        for got, want in zip(found, torch.autograd.grad(out, inputs, ones), strict=True):
            assert_close(got, want.double(), dtype)
    assert len(products) == 5 * 8


@pytest.mark.parametrize("dtype", HALF)
def test_a_gpu_repeats_itself(products, dtype):
    """Bit for bit: on another thread, on another stream, in a CUDA graph."""
    inputs = make(1023, 768, hidden=3072, dtype=dtype, device="cuda")
    weights = torch.randn(inputs[0].shape, device="cuda").to(dtype)

    def step():
        out = gelu_mlp(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, weights)]

    want, found = step(), [step()]
    thread = threading.Thread(target=lambda: found.append(step()))
    thread.start()
    thread.join()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found.append(step())
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for result in captured:
        result.zero_()
    graph.replay()
    found.append(captured)
    assert len(found) == 4 and len(products) == 2 * 5
    torch.cuda.synchronize()
    for results in found:
        for got, wanted in zip(results, want, strict=True):
            assert torch.equal(got, wanted)


def test_compiles_whole_on_a_gpu(products):
    inputs = make(2, 65, 64, hidden=256, device="cuda")
    weights = torch.randn(2, 65, 64, device="cuda").bfloat16()

    def step(*inputs):
        with torch.autocast("cuda", torch.bfloat16):
            return gelu_mlp(*inputs)

    compiled = torch.compile(step, fullgraph=True)
    found = torch.autograd.grad(compiled(*inputs), inputs, weights)
    want = torch.autograd.grad(step(*inputs), inputs, weights)
    assert products == [164, 192] * 2
    for got, wanted in zip(found, want, strict=True):
        assert_close(got, wanted.double(), torch.bfloat16)


def test_a_gpu_says_what_it_refuses():
    x, weight, bias = (torch.zeros(s, device="cuda").half() for s in ((4, 16), (32, 24), (32,)))
    with pytest.raises(RuntimeError, match="cublasLt.* must return status 0") as caught:
        cublaslt.linear_gelu(x, weight, bias)
    assert caught.value.__notes__ == ["in (4, 16) @ (24, 32), torch.float16, epilogue 164"]
