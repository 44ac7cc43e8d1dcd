"""Gradients of flash_kernels::attention_forward, and the way by which a call reaches it: through
the dispatcher, below the transforms of torch.func, or past both for plain tensors.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .gradients import once
from .operators import LIBRARY, NUM_TENSORS, PLAIN, backward, forward, forward_of
from .portable.launch import Problem

_attention_backward = once("attention_backward")


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:NUM_TENSORS])
    ctx.options = inputs[NUM_TENSORS:]
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any,
    dout: Tensor | None,
    dlse: Tensor | None,
    operator: Callable[..., tuple[Tensor, ...]] = _attention_backward,
) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *index_tensors = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * (NUM_TENSORS + len(ctx.options))
    if dout is None:
        dout = torch.zeros_like(out)
    gradients = operator(dout, dlse, q, k, v, out, lse, *index_tensors, *ctx.options)
    return (*gradients, *(None,) * (NUM_TENSORS - 3 + len(ctx.options)))


torch.library.register_autograd(
    "flash_kernels::attention_forward",
    _differentiate,
    setup_context=_save_for_backward,
    lib=LIBRARY,
)


class _FuncAttention(torch.autograd.Function):
    """The same for torch.func.grad, vjp and jacrev, which register_autograd does not serve."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        return torch.ops.flash_kernels.attention_forward(*inputs)

    setup_context = staticmethod(_save_for_backward)
    backward = staticmethod(_differentiate)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *inputs: Any
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """Fold the mapped dimension into the batch: dense calls without dropout."""
        q, k, v, cu_seqlens_q, _, lengths_k, alibi_slopes, dropout_seed, row_bounds, *_ = inputs
        if any(t is not None for t in (cu_seqlens_q, dropout_seed, row_bounds)):
            raise NotImplementedError(
                "torch.func.vmap of attention serves dense calls without dropout, packed "
                "sequences and block masks: loop over them instead"
            )
        size = info.batch_size
        batch = q.shape[1 if in_dims[0] == 0 else 0]

        def fold(tensor: Tensor | None, dim: int | None, per_batch: bool = True) -> Tensor | None:
            if tensor is None:
                return None
            tensor = (
                tensor[None].expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            )
            if not per_batch:
                tensor = tensor[:, None].expand(size, batch, *tensor.shape[1:])
            return tensor.flatten(0, 1)

        slopes_dims = 0 if alibi_slopes is None else alibi_slopes.dim() - (in_dims[6] is not None)
        folded = [
            *(fold(t, d) for t, d in zip((q, k, v), in_dims, strict=False)), None, None,
            fold(lengths_k, in_dims[5]), fold(alibi_slopes, in_dims[6], slopes_dims == 2),
        ]  # fmt: skip
        out, lse = _FuncAttention.apply(*folded, *inputs[7:])
        return (out.unflatten(0, (size, batch)), lse.unflatten(0, (size, batch))), (0, 0)


class _EagerAttention(torch.autograd.Function):
    """The same for plain tensors: without the dispatcher and without a separate setup_context,
    which together take as long as the launch."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, others: tuple, known: Problem | None
    ) -> tuple[Tensor, Tensor]:
        if known is None:
            output = forward(q, k, v, *others)
        else:
            output = forward_of(known.with_tensors(q, k, v, *others[:5]), others[-2])
        _save_for_backward(ctx, (q, k, v, *others), output)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph
            return _eager_backward_once(ctx, dout, dlse)
        return _eager_backward(ctx, dout, dlse)


def _eager_backward(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor | None, ...]:
    if is_in_torch_dispatch_mode():
        gradients = _differentiate(ctx, dout, dlse)
    else:
        gradients = _differentiate(ctx, dout, dlse, backward)
    return *gradients[:3], None, None


_eager_backward_once = once_differentiable(_eager_backward)
# Without what Function.apply does for the tensors that is_eager leaves out.
_apply = super(torch.autograd.Function, _EagerAttention).apply


def attend_checked(
    q: Tensor, k: Tensor, v: Tensor, *others: Any, known: Problem | None = None
) -> tuple[Tensor, Tensor]:
    """flash_kernels::attention_forward, also below the transforms of torch.func.

    known: of an eager call, known_problem of an earlier one like it.
    """
    if known is not None:
        return _apply(q, k, v, others, known)
    if torch.compiler.is_compiling():
        return torch.ops.flash_kernels.attention_forward(q, k, v, *others)
    if torch._C._are_functorch_transforms_active():
        return _FuncAttention.apply(q, k, v, *others)
    if is_in_torch_dispatch_mode() or any(type(t) not in PLAIN for t in (q, k, v)):
        return torch.ops.flash_kernels.attention_forward(q, k, v, *others)
    return _EagerAttention.apply(q, k, v, others, None)
