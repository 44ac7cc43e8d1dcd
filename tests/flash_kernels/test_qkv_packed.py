"""Attention of one tensor of queries, keys and values equals that of its parts, to the bit."""

import pytest
import torch

from flash_kernels import flash_attention, flash_attention_qkvpacked, flash_attention_varlen
from model.attention import Packing, qkv_attention

GPU = pytest.mark.gpu
CU_SEQLENS = [0, 5, 5, 19]
# Of one option each; seqlen 19, 2 heads.
OPTIONS = [
    {"causal": True},
    {"window": (3, 2), "softcap": 5.0, "alibi_slopes": [0.5, 0.25]},
    {"lengths_k": [7, 0], "dropout_p": 0.2, "dropout_seed": 3},
]


def options_on(device, options):
    return {
        name: torch.tensor(value, device=device) if isinstance(value, list) else value
        for name, value in options.items()
    }


def make(device, dtype, *shape):
    torch.manual_seed(0)
    return torch.randn(*shape, device=device).to(dtype).requires_grad_()


def assert_equal(qkv, whole, parts, exact=True):
    """Results and gradients of two functions of qkv, each (out, lse)."""
    found, wanted = whole(qkv), parts(qkv)
    weights = [torch.randn_like(t) for t in wanted]
    grads = []
    for results in (found, wanted):
        finite = [torch.where(t.isfinite(), t, 0) for t in results]  # lse of rows that see nothing
        total = sum((t * w).sum() for t, w in zip(finite, weights, strict=True))
        grads.append(torch.autograd.grad(total, qkv)[0])
    assert grads[0].is_contiguous()
    for got, want in zip((*found, grads[0]), (*wanted, grads[1]), strict=True):
        if exact:
            assert torch.equal(got, want)
        else:  # dq is added up in any order
            torch.testing.assert_close(got.float(), want.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("options", OPTIONS)
def test_dense(options):
    options = options_on("cpu", options)
    # Every second row of a longer tensor: strides of its own.
    qkv = make("cpu", torch.float32, 2, 38, 3, 2, 16)
    assert_equal(
        qkv,
        lambda t: flash_attention_qkvpacked(t[:, ::2], return_lse=True, **options),
        lambda t: flash_attention(*t[:, ::2].unbind(2), return_lse=True, **options),
    )


def test_packed_sequences():
    cu_seqlens = torch.tensor(CU_SEQLENS, dtype=torch.int32)
    both = {"causal": True, "return_lse": True}
    qkv = make("cpu", torch.float16, 19, 3, 2, 16)
    assert_equal(
        qkv,
        lambda t: flash_attention_qkvpacked(t, cu_seqlens=cu_seqlens, max_seqlen=14, **both),
        lambda t: flash_attention_varlen(
            *t.unbind(1), cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=14,
            max_seqlen_k=14, **both,
        ),
    )  # fmt: skip


@GPU
@pytest.mark.parametrize("kernel", ["portable", "hopper"])
@pytest.mark.parametrize("headdim", [64, 128])
def test_on_a_gpu(kernel, headdim):
    """Both families; each writes three gradients into one tensor."""
    if kernel == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper kernels need an sm_90 GPU")
    for options in ({"causal": True}, {"lengths_k": [700, 3]}, {"dropout_p": 0.2}):
        options = options_on("cuda", {**options, "dropout_seed": 5})
        qkv = make("cuda", torch.bfloat16, 2, 700, 3, 3, headdim)
        both = {**options, "kernel": kernel, "return_lse": True}
        assert_equal(
            qkv,
            lambda t, both=both: flash_attention_qkvpacked(t, **both),
            lambda t, both=both: flash_attention(*t.unbind(2), **both),
            exact=kernel == "portable",
        )
    cu_seqlens = torch.tensor([0, 300, 301, 1400], dtype=torch.int32, device="cuda")
    assert_equal(
        make("cuda", torch.bfloat16, 1400, 3, 3, headdim),
        lambda t: flash_attention_qkvpacked(
            t, cu_seqlens=cu_seqlens, max_seqlen=1099, kernel=kernel, return_lse=True
        ),
        lambda t: flash_attention_varlen(
            *t.unbind(1), cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=1099,
            max_seqlen_k=1099, kernel=kernel, return_lse=True,
        ),
        exact=kernel == "portable",
    )  # fmt: skip


def test_opcheck():
    qkv = make("cpu", torch.float32, 1, 7, 3, 1, 16)
    rest = (*(None,) * 12, 0, 0, 7, 7, 0.25, 0.0, None, 0, 0.0, "portable", False)
    operators = torch.ops.flash_kernels
    torch.library.opcheck(operators.attention_qkv_forward, (qkv, *rest))
    with torch.no_grad():
        out, lse = operators.attention_qkv_forward(qkv, *rest)
    inputs = (torch.ones_like(out), None, qkv.detach(), out, lse, *rest)
    torch.library.opcheck(operators.attention_qkv_backward, inputs)


def test_only_the_result_or_only_the_lse_may_be_used():
    qkv = make("cpu", torch.float32, 1, 7, 3, 1, 16)
    for index in (0, 1):
        whole, parts = (
            torch.autograd.grad(results[index].sum(), qkv)[0]
            for results in (
                flash_attention_qkvpacked(qkv, return_lse=True),
                flash_attention(*qkv.unbind(2), return_lse=True),
            )
        )
        assert torch.equal(whole, parts)


@pytest.mark.parametrize("packed", [False, True])
def test_compiled_models_have_no_copy_of_the_gradients(packed):
    """The graphs call the operator that takes the projection whole, and stack nothing."""
    qkv = make("cpu", torch.float32, 1, 19, 3, 2, 16)
    packing = Packing(torch.tensor(CU_SEQLENS, dtype=torch.int32), 14) if packed else None
    called = []

    def watch(graph, inputs):
        called.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    def step(qkv):
        return qkv_attention(flash_attention, qkv, packing, causal=True)

    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=watch, bw_compiler=watch)
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    gradients = [torch.autograd.grad(f(qkv).square().sum(), qkv)[0] for f in (compiled, step)]
    assert torch.equal(*gradients)
    for name in ("attention_qkv_forward", "attention_qkv_backward"):
        assert sum(name in target for target in called) == 1
    assert not any("stack" in target or "cat" in target.split(".") for target in called)


def test_errors():
    with pytest.raises(ValueError, match=r"qkv must be \(batch, seqlen, 3, nheads, headdim\)"):
        flash_attention_qkvpacked(torch.zeros(1, 7, 2, 1, 16))
    with pytest.raises(ValueError, match=r"qkv must be \(total, 3, nheads, headdim\)"):
        flash_attention_qkvpacked(
            torch.zeros(1, 7, 3, 1, 16),
            cu_seqlens=torch.tensor([0, 7], dtype=torch.int32),
            max_seqlen=7,
        )
