"""FLOP formulas of the operators, for torch.utils.flop_counter.FlopCounterMode."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import operators, qkv_packed  # noqa: F401  (define the operators)


def visible_pairs(seqlen_q: int, seqlen_k: int, left: int | None, right: int | None) -> float:
    """Query-key pairs inside the window; a causal square counts as half, as is usual."""
    if left is None and right == 0 and seqlen_q == seqlen_k:
        return seqlen_q * seqlen_k / 2
    if left is None and right is None:
        return seqlen_q * seqlen_k
    shift = seqlen_k - seqlen_q
    total = 0
    for row in range(seqlen_q):
        begin = 0 if left is None else max(0, row + shift - left)
        end = seqlen_k if right is None else min(seqlen_k, row + shift + right + 1)
        total += max(0, end - begin)
    return total


def _forward_flops(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor,
    row_bounds: Tensor | None, row_indices: Tensor, block_m: int, block_n: int, max_seqlen_q: int,
    max_seqlen_k: int, left: int | None, right: int | None,
) -> int:  # fmt: skip
    """4 * headdim a visible pair (FlashAttention-2's convention); listed blocks count whole."""
    if row_bounds is not None:
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        # A mask of one batch entry or one head serves all of them.
        times = batch // row_bounds.shape[0] * (q.shape[-2] // row_bounds.shape[1])
        return int(4 * times * row_indices.shape[0] * block_m * block_n * q.shape[-1])
    if cu_seqlens_q is None:
        pairs = q.shape[0] * visible_pairs(q.shape[1], k.shape[1], left, right)
    elif type(cu_seqlens_q) is Tensor and cu_seqlens_q.device.type != "meta":
        lengths = zip(cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist(), strict=True)
        pairs = sum(visible_pairs(m, n, left, right) for m, n in lengths)
    else:
        pairs = (cu_seqlens_q.shape[0] - 1) * visible_pairs(max_seqlen_q, max_seqlen_k, left, right)
    return int(4 * pairs * q.shape[-2] * q.shape[-1])


@register_flop_formula(torch.ops.flash_kernels.attention_forward, get_raw=True)
def _attention_forward_flops(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor,
    lengths_k: Any, alibi_slopes: Any, dropout_seed: Any, row_bounds: Tensor | None,
    row_indices: Tensor, row_patterns: Any, col_bounds: Any, col_indices: Any, col_patterns: Any,
    token_masks: Any, block_m: int, block_n: int, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float, softcap: float, window_left: int | None, window_right: int | None,
    *_: Any, out_val: Any = None,
) -> int:  # fmt: skip
    return _forward_flops(
        q, k, cu_seqlens_q, cu_seqlens_k, row_bounds, row_indices, block_m, block_n, max_seqlen_q,
        max_seqlen_k, window_left, window_right,
    )  # fmt: skip


@register_flop_formula(torch.ops.flash_kernels.attention_backward, get_raw=True)
def _attention_backward_flops(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    *options: Any, out_val: Any = None,
) -> int:  # fmt: skip
    return _attention_forward_flops(q, k, v, *options) * 5 // 2


@register_flop_formula(torch.ops.flash_kernels.attention_qkv_forward, get_raw=True)
def _attention_qkv_forward_flops(qkv: Tensor, *options: Any, out_val: Any = None) -> int:
    q, k, v = qkv.unbind(-3)
    return _attention_forward_flops(q, k, v, *options)


@register_flop_formula(torch.ops.flash_kernels.attention_qkv_backward, get_raw=True)
def _attention_qkv_backward_flops(
    dout: Tensor, dlse: Tensor | None, qkv: Tensor, out: Tensor, lse: Tensor, *options: Any,
    out_val: Any = None,
) -> int:  # fmt: skip
    q, k, v = qkv.unbind(-3)
    return _attention_forward_flops(q, k, v, *options) * 5 // 2
