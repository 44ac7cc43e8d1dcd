"""Attention of queries, keys and values that are one tensor, as a fused projection makes them.

The forward is that of flash_attention on views of it. The backward writes the three gradients into
one tensor, where autograd would copy them together.
"""

from typing import Any

import torch
from torch import Tensor

from .attention import Output, Seed, Window, complete
from .autograd import attend_checked
from .operators import LIBRARY, NUM_TENSORS, OPTIONS, backward, forward

LIBRARY.define(f"attention_qkv_forward(Tensor qkv, {OPTIONS}) -> (Tensor, Tensor)")
LIBRARY.define(
    "attention_qkv_backward(Tensor dout, Tensor? dlse, Tensor qkv, Tensor out, Tensor lse, "
    f"{OPTIONS}) -> Tensor"
)


def flash_attention_qkvpacked(
    qkv: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    causal: bool = False,
    window: Window = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    lengths_k: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Seed = None,
    deterministic: bool = False,
    return_lse: bool = False,
    kernel: str | None = None,
    autotune: bool = False,
) -> Output:
    """flash_attention(*qkv.unbind(2), ...), or flash_attention_varlen(*qkv.unbind(1), ...) where
    cu_seqlens is given; the gradient of qkv is one contiguous tensor.

    Args:
        qkv: (batch, seqlen, 3, nheads, headdim), or packed (total, 3, nheads, headdim); any strides
            with a unit last one.
        cu_seqlens, max_seqlen: of queries and keys.
        The rest as in flash_attention.

    Returns, raises:
        As flash_attention and flash_attention_varlen.
    """
    dim = 5 if cu_seqlens is None else 4
    if qkv.dim() != dim or qkv.shape[-3] != 3:
        layout = "(batch, seqlen, 3" if cu_seqlens is None else "(total, 3"
        raise ValueError(f"qkv must be {layout}, nheads, headdim), got {tuple(qkv.shape)}")
    if torch.is_autocast_enabled(qkv.device.type):
        qkv = qkv.to(torch.get_autocast_dtype(qkv.device.type))
    q, k, v = qkv.unbind(-3)
    inputs, known = complete(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal, window,
        softmax_scale, softcap, alibi_slopes, lengths_k, dropout_p, dropout_seed, deterministic,
        kernel, autotune,
    )  # fmt: skip
    if torch._C._are_functorch_transforms_active():
        out, lse = attend_checked(*inputs, known=known)
    else:
        out, lse = torch.ops.flash_kernels.attention_qkv_forward(qkv, *inputs[3:])
    return (out, lse) if return_lse else out


def _forward(qkv: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return forward(*qkv.unbind(-3), *options)


def _backward(
    dout: Tensor, dlse: Tensor | None, qkv: Tensor, out: Tensor, lse: Tensor, *options: Any
) -> Tensor:
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    dq, dk, dv = dqkv.unbind(-3)
    backward(dout, dlse, *qkv.unbind(-3), out, lse, *options, into=(dq, dk, dv))
    return dqkv


for _key in ("CUDA", "CPU"):  # CPU: under Triton's interpreter
    LIBRARY.impl("attention_qkv_forward", _forward, _key)
    LIBRARY.impl("attention_qkv_backward", _backward, _key)


@torch.library.register_fake("flash_kernels::attention_qkv_forward")
def _forward_fake(qkv: Tensor, cu_seqlens_q: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    *rows, _, nheads, headdim = qkv.shape
    batch = rows[:-1] if cu_seqlens_q is None else []
    lse = qkv.new_empty((*batch, nheads, rows[-1]), dtype=torch.float32)
    return qkv.new_empty((*rows, nheads, headdim)), lse


@torch.library.register_fake("flash_kernels::attention_qkv_backward")
def _backward_fake(dout: Tensor, dlse: Tensor | None, qkv: Tensor, *_: Any) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    num_tensors = NUM_TENSORS - 2
    ctx.save_for_backward(inputs[0], *output, *inputs[1:num_tensors])
    ctx.options = inputs[num_tensors:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    qkv, out, lse, *index_tensors = ctx.saved_tensors
    rest = (None,) * (NUM_TENSORS - 3 + len(ctx.options))
    if dout is None and dlse is None:
        return None, *rest
    if dout is None:
        dout = torch.zeros_like(out)
    dqkv = torch.ops.flash_kernels.attention_qkv_backward(
        dout, dlse, qkv, out, lse, *index_tensors, *ctx.options
    )
    return dqkv, *rest


torch.library.register_autograd(
    "flash_kernels::attention_qkv_forward",
    _differentiate,
    setup_context=_save_for_backward,
    lib=LIBRARY,
)
