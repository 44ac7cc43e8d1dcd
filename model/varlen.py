"""Attention over sequences of different lengths: padded with lengths_k, or packed with cu_seqlens.

The two functions that model.bert calls have the signatures of flash_kernels.flash_attention and
flash_kernels.flash_attention_varlen, which serve CUDA tensors. Elsewhere plain PyTorch does.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from model.attention import sdpa_attention


def padded_attention(
    q: Tensor, k: Tensor, v: Tensor, *, lengths_k: Tensor | None = None, **options
) -> Tensor:
    """flash_kernels.flash_attention for CUDA tensors, masked SDPA elsewhere.

    Args:
        q: (batch, seqlen_q, nheads, headdim). k, v: (batch, seqlen_k, nheads_k, headdim).
        lengths_k: integers (batch,): keys from lengths_k[b] on are padding, seen by no query.
        options: as flash_attention; off the GPU those of model.attention.sdpa_attention, and with
            lengths_k only softmax_scale, dropout_p and causal=False.

    Returns:
        As q. A row that sees no key is zero.

    Raises:
        NotImplementedError: an option that SDPA does not serve.
    """
    if q.is_cuda:
        # Imported on use: flash_kernels needs triton, which not every platform has.
        from flash_kernels import flash_attention

        return flash_attention(q, k, v, lengths_k=lengths_k, **options)
    if lengths_k is None:
        return sdpa_attention(q, k, v, **options)
    return _masked_attention(q, k, v, lengths_k, **options)


def _masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths_k: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    **refused,
) -> Tensor:
    if causal or refused:
        asked = ", ".join(["causal"] * causal + sorted(refused))
        raise NotImplementedError(
            f"lengths_k without a GPU is served for full attention only, got {asked}; use "
            "model.attention.reference_attention"
        )
    is_real = torch.arange(k.shape[1], device=k.device) < lengths_k[:, None]
    # SDPA leaves rows without a key undefined: such rows see padding, and become zero.
    sees_nothing = lengths_k == 0
    keep_mask = (is_real | sees_nothing[:, None])[:, None, None, :]
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=keep_mask,
        dropout_p=dropout_p,
        scale=softmax_scale,
        enable_gqa=q.shape[2] != k.shape[2],
    ).transpose(1, 2)
    return out.masked_fill(sees_nothing[:, None, None, None], 0.0)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options,
) -> Tensor:
    """flash_kernels.flash_attention_varlen for CUDA tensors, SDPA one sequence at a time elsewhere.

    Args:
        q: (total_q, nheads, headdim). k, v: (total_k, nheads_k, headdim).
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), see flash_attention_varlen.
        max_seqlen_q, max_seqlen_k: at least the longest sequence.
        options: as flash_attention_varlen; off the GPU those of model.attention.sdpa_attention.

    Returns:
        (total_q, nheads, headdim), dtype of q.

    Raises:
        NotImplementedError: an option that SDPA does not serve.
        ValueError: cu_seqlens do not end at the number of rows.
    """
    if q.is_cuda:
        from flash_kernels import flash_attention_varlen

        return flash_attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            **options,
        )
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    if ends_q[-1] != len(q) or ends_k[-1] != len(k):
        raise ValueError(
            f"cu_seqlens must end at the number of packed rows, {len(q)} and {len(k)}, got "
            f"{ends_q[-1]} and {ends_k[-1]}"
        )
    out = [q.new_empty(0, *q.shape[1:])]
    for i in range(len(ends_q) - 1):
        rows, cols = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
        if rows.start == rows.stop:
            continue
        if cols.start == cols.stop:
            out.append(torch.zeros_like(q[rows]))
            continue
        out.append(sdpa_attention(q[None, rows], k[None, cols], v[None, cols], **options)[0])
    return torch.cat(out)


def packed_positions(cu_seqlens: Tensor, total: int) -> Tensor:
    """Position of each packed token in its sequence, (total,) int64, without a host wait."""
    tokens = torch.arange(total, device=cu_seqlens.device)
    # Ends, not starts: among empty sequences the last start at or before a token is its own.
    sequence = torch.searchsorted(cu_seqlens[1:].long(), tokens, right=True)
    return tokens - cu_seqlens.long()[sequence]


def pack(padded: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Real tokens of a padded batch, and where each sequence starts.

    Args:
        padded: (batch, seqlen, ...).
        lengths: (batch,) integers.

    Returns:
        (total, ...) and cu_seqlens (batch + 1,) int32.
    """
    is_real = torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]
    return padded[is_real], F.pad(lengths.cumsum(0), (1, 0)).int()
