"""Plain PyTorch attention with the signatures of the library: the oracle of its tests, for any
device and dtype.

Everything is computed in the dtype of the inputs, so that float64 gives the truth and float16 the
error that plain PyTorch makes. The whole score matrix is stored. Gradients come from autograd.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .block_mask import BlockMask

Output = Tensor | Any  # as in attention.py
_PHILOX_KEYS = (0x9E3779B9, 0xBB67AE85)
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_LOW = 0xFFFFFFFF


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """(high, low) 32 bits of an unsigned product; int64 wraps, the mask removes the sign."""
    product = a * b
    return (product >> 32) & _LOW, product & _LOW


def philox(seed: int, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, ...]:
    """Philox-4x32-10 (Salmon et al. 2011): four words from four 32-bit counters, in int64."""
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        high_0, low_0 = _multiply(c0, _PHILOX_MULTIPLIERS[0])
        high_2, low_2 = _multiply(c2, _PHILOX_MULTIPLIERS[1])
        c0, c1, c2, c3 = high_2 ^ c1 ^ k0, low_2, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + _PHILOX_KEYS[0]) & _LOW, (k1 + _PHILOX_KEYS[1]) & _LOW
    return c0, c1, c2, c3


def dropout_keys(
    dropout_seed: int | Tensor,
    batch: int,
    nheads: int,
    seqlen_q: int,
    seqlen_k: int,
    device: torch.device | str = "cpu",
    first_sequence: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Row keys and odd row multipliers (batch, nheads, seqlen_q) and column keys (batch, nheads,
    seqlen_k).

    int64 tensors of unsigned 32-bit values, those of portable/dropout.py.
    """
    seed = int(dropout_seed)
    heads = torch.arange(batch * nheads, device=device)[:, None] + first_sequence * nheads
    rows = torch.arange(seqlen_q, device=device)[None, :]
    zeros = torch.zeros_like(heads + rows)
    row_keys, multipliers, _, _ = philox(seed, zeros + rows, zeros + heads, zeros, zeros)

    zeros = torch.zeros_like(heads)
    head_keys = philox(seed, zeros, heads, zeros + 1, zeros)
    columns = torch.arange(seqlen_k, device=device)[None, :] ^ head_keys[0]
    for shift, multiplier, key in (
        (16, 0x7FEB352D, head_keys[1]),
        (15, 0x846CA68B, head_keys[2]),
        (16, 0x9E3779B1, head_keys[3]),
    ):
        columns = (_multiply(columns ^ (columns >> shift), multiplier)[1] + key) & _LOW
    columns = columns ^ (columns >> 15)
    shape = (batch, nheads, -1)
    return row_keys.view(shape), (multipliers | 1).view(shape), columns.view(shape)


def dropout_keep_mask(
    dropout_seed: int | Tensor,
    batch: int,
    nheads: int,
    seqlen_q: int,
    seqlen_k: int,
    dropout_p: float,
    device: torch.device | str = "cpu",
    first_sequence: int = 0,
) -> Tensor:
    """The kernels' dropout mask, bit for bit: bool (batch, nheads, seqlen_q, seqlen_k), True =
    kept.

    In a packed batch rows and columns count from the start of their sequence; first_sequence is its
    index.
    """
    row_keys, multipliers, columns = dropout_keys(
        dropout_seed, batch, nheads, seqlen_q, seqlen_k, device, first_sequence
    )
    words = columns[:, :, None, :] * multipliers[:, :, :, None] + row_keys[:, :, :, None]
    # The kernel compares as signed numbers.
    signed = ((words & _LOW) ^ 2**31) - 2**31
    return signed > max(round(dropout_p * 2**32) - 2**31 - 1, -(2**31))


def visible_keys(
    seqlen_q: int,
    seqlen_k: int,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    device: torch.device | str = "cpu",
) -> Tensor:
    """bool (seqlen_q, seqlen_k): True where the query may attend the key."""
    left, right = window
    if causal:
        right = 0
    distance = torch.arange(seqlen_k, device=device)[None, :] - (
        torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    )
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if right is not None:
        visible &= distance <= right
    if left is not None:
        visible &= distance >= -left
    return visible


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: tuple[int | None, int | None],
    softmax_scale: float | None,
    softcap: float,
    alibi_slopes: Tensor | None,
    lengths_k: Tensor | None,
    dropout_p: float,
    dropout_seed: int | Tensor | None,
    first_sequence: int = 0,
    keep_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a dense batch.

    keep_mask: bool (1 or batch, 1 or nheads, seqlen_q, seqlen_k), True = attend.
    """
    batch, seqlen_q, nheads, headdim = q.shape
    seqlen_k, nheads_k = k.shape[1], k.shape[2]
    if softmax_scale is None:
        softmax_scale = headdim**-0.5
    visible = visible_keys(seqlen_q, seqlen_k, causal=causal, window=window, device=q.device)
    visible = visible.expand(batch, 1, seqlen_q, seqlen_k)
    if lengths_k is not None:
        cols = torch.arange(seqlen_k, device=q.device)
        visible = visible & (cols < lengths_k[:, None])[:, None, None, :]
    if keep_mask is not None:
        visible = visible & keep_mask
    # Keys that no query sees must not reach a product: 0 * inf is not 0.
    is_used = visible.any(2).transpose(1, 2)[..., None]
    k = torch.where(is_used, k.repeat_interleave(nheads // nheads_k, 2), 0.0)
    v = torch.where(is_used, v.repeat_interleave(nheads // nheads_k, 2), 0.0)

    scores = torch.einsum("bihd,bjhd->bhij", q, k) * softmax_scale
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        rows = torch.arange(seqlen_q, device=q.device)[:, None] + seqlen_k - seqlen_q
        distance = (rows - torch.arange(seqlen_k, device=q.device)).abs().to(scores.dtype)
        slopes = alibi_slopes.to(scores.dtype).expand(batch, nheads)
        scores = scores - slopes[:, :, None, None] * distance
    sees_nothing = ~visible.any(-1, keepdim=True)
    scores = scores.masked_fill(~visible, -math.inf).masked_fill(sees_nothing, 0.0)
    probs = torch.softmax(scores, -1).masked_fill(sees_nothing, 0.0)
    lse_dtype = torch.promote_types(scores.dtype, torch.float32)
    if seqlen_k > 0:
        lse = torch.logsumexp(scores.to(lse_dtype), -1)
        lse = lse.masked_fill(sees_nothing[..., 0], -math.inf)
    else:
        lse = torch.full((batch, nheads, seqlen_q), -math.inf, dtype=lse_dtype, device=q.device)
    if dropout_p > 0.0:
        if dropout_seed is None:
            raise ValueError("dropout_seed must be given to the reference, got None")
        keep = dropout_keep_mask(
            dropout_seed, batch, nheads, seqlen_q, seqlen_k, dropout_p, q.device, first_sequence
        )
        probs = probs * keep / (1.0 - dropout_p) if dropout_p < 1.0 else probs * 0.0
    return torch.einsum("bhij,bjhd->bihd", probs, v), lse


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    lengths_k: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    kernel: str | None = None,
) -> Output:
    """flash_kernels.flash_attention in plain PyTorch.

    Dropout needs a dropout_seed. deterministic and kernel change nothing here. lse: float32, or
    float64 with it.
    """
    out, lse = _attention(
        q,
        k,
        v,
        causal=causal,
        window=window,
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        lengths_k=lengths_k,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
    )
    return (out, lse) if return_lse else out


def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    lengths_k: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    kernel: str | None = None,
) -> Output:
    """flash_kernels.flash_attention_varlen in plain PyTorch: one sequence after the other."""
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    outs, lses = [], []
    for i in range(len(starts_q) - 1):
        rows, cols = slice(starts_q[i], starts_q[i + 1]), slice(starts_k[i], starts_k[i + 1])
        slopes = alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[i : i + 1]
        out, lse = _attention(
            q[None, rows],
            k[None, cols],
            v[None, cols],
            causal=causal,
            window=window,
            softmax_scale=softmax_scale,
            softcap=softcap,
            alibi_slopes=slopes,
            lengths_k=None if lengths_k is None else lengths_k[i : i + 1],
            dropout_p=dropout_p,
            dropout_seed=dropout_seed,
            first_sequence=i,
        )
        outs.append(out[0])
        lses.append(lse[0])
    out, lse = torch.cat(outs), torch.cat(lses, 1)
    return (out, lse) if return_lse else out


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_mask: BlockMask,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    lengths_k: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    kernel: str | None = None,
) -> Output:
    """Attention with the hidden tokens of block_mask at -inf, beside the options of
    flash_attention: the paper's section 3.3 with the whole score matrix.

    block_mask: BlockMask for at least these lengths, whose mask_batch and mask_heads are 1 or the
    batch size and the number of query heads. A row that sees nothing is zero, its lse -inf.
    """
    batch, seqlen_q, nheads, _ = q.shape
    for name, got, expected in (
        ("mask_batch", block_mask.mask_batch, batch),
        ("mask_heads", block_mask.mask_heads, nheads),
    ):
        if got not in (1, expected):
            raise ValueError(
                f"{name} of block_mask must be 1 or {expected}, got {got}: build it for this shape"
            )
    keep_mask = block_mask.restricted(seqlen_q=seqlen_q, seqlen_k=k.shape[1]).to_token_mask()
    out, lse = _attention(
        q,
        k,
        v,
        causal=causal,
        window=window,
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        lengths_k=lengths_k,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        keep_mask=keep_mask.to(q.device),
    )
    return (out, lse) if return_lse else out


def flash_attention_with_kv_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_lengths: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    causal: bool = True,
    window: tuple[int | None, int | None] = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
    num_splits: int | None = None,
) -> Output:
    """flash_kernels.flash_attention_with_kv_cache in plain PyTorch, sequence by sequence."""
    outs, lses = [], []
    for i, length in enumerate(cache_lengths.tolist()):
        end = length
        if k is not None and v is not None:
            end = length + k.shape[1]
            k_cache[i, length:end] = k[i]
            v_cache[i, length:end] = v[i]
        slopes = alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[i : i + 1]
        out, lse = flash_attention(
            q[i : i + 1],
            k_cache[i : i + 1, :end],
            v_cache[i : i + 1, :end],
            causal=causal,
            window=window,
            softmax_scale=softmax_scale,
            softcap=softcap,
            alibi_slopes=slopes,
            return_lse=True,
        )
        outs.append(out)
        lses.append(lse)
    out, lse = torch.cat(outs), torch.cat(lses)
    return (out, lse) if return_lse else out
