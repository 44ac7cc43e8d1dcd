"""The kernels as an attention of Hugging Face transformers (nothing of which is imported here):

from transformers import AttentionInterface, AttentionMaskInterface
from flash_kernels import huggingface

AttentionInterface.register("triton_attention", huggingface.attention)
AttentionMaskInterface.register("triton_attention", huggingface.attention_mask)
model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="triton_attention")

Any name will do that does not contain "flash", which transformers takes for the flash-attn package.
"""

from typing import Any

import torch
from torch import Tensor

from .attention import flash_attention, flash_attention_varlen


def attention_mask(
    batch_size: int, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **_: Any
) -> Tensor | None:
    """What `attention` takes as its mask: bool (batch, kv_length), or None without padding."""
    if attention_mask is None:
        return None
    attention_mask = attention_mask[:, -kv_length:].bool()
    if attention_mask.shape[1] != kv_length:
        raise NotImplementedError(
            f"the padding mask must cover all {kv_length} keys, got {attention_mask.shape[1]}: "
            "use a dynamic cache"
        )
    return None if attention_mask.all() else attention_mask


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers' AttentionInterface.

    Args:
        query: (batch, nheads, seqlen_q, headdim). key, value: (batch, nheads_k, seqlen_k, headdim).
        attention_mask: bool (batch, seqlen_k) from attention_mask above, or None. Padding may stand
            anywhere; padded rows are removed before the kernel and come back as zeros.
        sliding_window: keys that a query sees, itself included.

    Returns:
        (batch, seqlen_q, nheads, headdim), and None in place of the probabilities.
    """
    for name in ("s_aux", "position_bias"):
        if others.get(name) is not None:
            raise NotImplementedError(
                f"flash_kernels does not serve {name}: load the model with "
                'attn_implementation="eager"'
            )
    options: dict[str, Any] = dict(
        causal=module.is_causal if is_causal is None else is_causal,
        window=(None if sliding_window is None else sliding_window - 1, None),
        softmax_scale=scaling,
        softcap=softcap or 0.0,
        dropout_p=dropout,
    )
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if attention_mask is None:
        return flash_attention(q, k, v, **options), None
    if attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask must be (batch, seqlen_k), got {tuple(attention_mask.shape)}: "
            "register flash_kernels.huggingface.attention_mask with AttentionMaskInterface"
        )
    is_query = attention_mask[:, -q.shape[1] :]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    out[is_query] = flash_attention_varlen(
        q[is_query],
        k[attention_mask],
        v[attention_mask],
        cu_seqlens_q=_starts(is_query),
        cu_seqlens_k=_starts(attention_mask),
        max_seqlen_q=q.shape[1],
        max_seqlen_k=k.shape[1],
        **options,
    )
    return out, None


def _starts(mask: Tensor) -> Tensor:
    """int32 (batch + 1,): where the tokens of each sequence start once padding is removed."""
    return torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).to(torch.int32)
