"""Input factories and the error budget, for tests/ and scripts/.

Budget: at most twice the error that plain PyTorch makes in the same dtype, both against float64,
plus two units in the last place of the largest value (so that an exact zero of one does not condemn
the other). dq and dk are sums over differences dP - delta; where such a difference is zero, its two
terms, summed in different orders, are not, so one unit of float32 of their bound comes on top.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from . import attention, block_sparse, reference


def make_qkv(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    nheads: int,
    headdim: int,
    *,
    nheads_k: int | None = None,
    dtype: torch.dtype = torch.float16,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normal q, k and v in the layout of flash_attention, requiring grad."""
    generator = torch.Generator(device).manual_seed(seed)

    def make(seqlen: int, nheads: int) -> Tensor:
        shape = (batch, seqlen, nheads, headdim)
        return torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_()

    nheads_k = nheads_k or nheads
    return make(seqlen_q, nheads), make(seqlen_k, nheads_k), make(seqlen_k, nheads_k)


def make_cu_seqlens(lengths: list[int], device: str = "cpu") -> Tensor:
    """int32 (len(lengths) + 1,)."""
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


@contextlib.contextmanager
def nan_memory() -> Iterator[None]:
    """Outputs start as NaN: what a kernel forgets to write shows."""
    empty, empty_like = torch.empty, torch.empty_like

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def fill(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else -(2**30))

        return fill

    torch.empty, torch.empty_like = poisoned(empty), poisoned(empty_like)
    try:
        yield
    finally:
        torch.empty, torch.empty_like = empty, empty_like


def _run(
    function: Callable[..., Any],
    tensors: Sequence[Tensor],
    dtype: torch.dtype,
    dout: Tensor,
    dlse: Tensor | None,
    options: dict[str, Any],
) -> list[Tensor]:
    """out, lse, dq, dk, dv of a public function on copies of the tensors in `dtype`."""
    leaves = [_like(t, t.detach().to(dtype)).requires_grad_() for t in tensors]
    out, lse = function(*leaves, return_lse=True, **options)
    loss = (out * dout.to(dtype)).sum()
    if dlse is not None:
        # Rows that see no key have lse = -inf, which no sum survives.
        loss = loss + (lse.masked_fill(lse.isinf(), 0.0) * dlse.to(lse.dtype)).sum()
    gradients = torch.autograd.grad(loss, leaves)
    return [out.detach(), lse.detach(), *gradients]


def _like(original: Tensor, values: Tensor) -> Tensor:
    """`values` with the strides of `original`."""
    return torch.empty_strided(
        original.shape, original.stride(), dtype=values.dtype, device=values.device
    ).copy_(values)


def _longest_row(tensor: Tensor) -> float:
    """Largest Euclidean norm along the head dimension; what is not finite counts as zero."""
    finite = tensor.detach().double().nan_to_num(0.0, 0.0, 0.0)
    return finite.norm(dim=-1).amax().item() if tensor.numel() else 0.0


def _largest(tensor: Tensor) -> float:
    """Largest absolute value; what is not finite counts as zero."""
    return tensor.nan_to_num(0.0, 0.0, 0.0).abs().amax().item() if tensor.numel() else 0.0


def assert_matches_reference(
    name: str,
    qkv: tuple[Tensor, Tensor, Tensor],
    *,
    lse_gradient: bool = False,
    seed: int = 1,
    **options: Any,
) -> None:
    """Compare output, LSE and gradients of flash_kernels.NAME with reference.NAME under the error
    budget.

    `options` go to both. With dropout give dropout_seed. lse_gradient adds a gradient of the LSE.
    """
    q = qkv[0]
    function = getattr(attention, name, None) or getattr(block_sparse, name)
    oracle = getattr(reference, name)
    generator = torch.Generator(q.device.type).manual_seed(seed)
    dout = torch.randn(q.shape, generator=generator, device=q.device).to(q.dtype)
    lse_shape = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
    dlse = torch.randn(lse_shape, generator=generator, device=q.device) if lse_gradient else None
    with nan_memory():
        ours = _run(function, qkv, q.dtype, dout, dlse, options)
    plain = _run(oracle, qkv, q.dtype, dout, dlse, options)
    truth = _run(oracle, qkv, torch.float64, dout, dlse, options)
    largest = max([1.0] + [t[t.isfinite()].abs().max().item() for t in truth if t.isfinite().any()])
    scale = options.get("softmax_scale")
    scale = q.shape[-1] ** -0.5 if scale is None else abs(scale)
    dout_row, q_row, k_row, v_row = (_longest_row(t) for t in (dout, *qkv))
    keep_scale = 1.0 / (1.0 - min(options.get("dropout_p", 0.0), 0.5))
    difference = torch.finfo(torch.float32).eps * keep_scale * scale * dout_row * v_row
    rounding = 0.0
    if q.dtype == torch.float32:  # 16 bits round by far more
        most = _run(oracle, qkv, torch.float64, dout.abs(), None, options)[4]
        rounding = 2 * torch.finfo(torch.float32).eps * _largest(truth[1]) * _largest(most)
    for label, ours_i, plain_i, truth_i in zip(
        ("out", "lse", "dq", "dk", "dv"), ours, plain, truth, strict=True
    ):
        slack = 2 * torch.finfo(ours_i.dtype).eps * largest
        slack += difference * {"dq": k_row, "dk": q_row}.get(label, 0.0)
        # The backward makes probabilities of the LSE, whose rounding is a factor of a whole row: at
        # most this in dv, were dout positive.
        slack += rounding if label == "dv" else 0.0
        check_budget(label, ours_i, plain_i, truth_i, slack)


def check_budget(label: str, ours: Tensor, plain: Tensor, truth: Tensor, slack: float) -> None:
    """Assert max|ours - truth| <= 2 max|plain - truth| + slack; infinities must coincide."""
    if ours.shape != truth.shape:
        raise AssertionError(f"{label}: shape {tuple(ours.shape)}, expected {tuple(truth.shape)}")
    if ours.isnan().any():
        raise AssertionError(f"{label}: {int(ours.isnan().sum())} of {ours.numel()} values are NaN")
    finite = truth.isfinite()
    if not torch.equal(ours.isfinite(), finite):
        raise AssertionError(f"{label}: infinite in other places than the reference")
    if not finite.any():
        return
    error = (ours.double() - truth)[finite].abs().max().item()
    budget = 2 * (plain.double() - truth)[finite].abs().max().item() + slack
    if not error <= budget:
        raise AssertionError(f"{label}: error {error:.3e} against float64, budget {budget:.3e}")
