"""The attention functions that a model can be given, and packed sequences for any of them.

An attention function has the signature of flash_kernels.flash_attention: q (batch, seqlen_q,
nheads, headdim), k and v (batch, seqlen_k, nheads_k, headdim), options by keyword. The choices:

    auto_attention                 flash on CUDA tensors, sdpa elsewhere (the default)
    flash_kernels.flash_attention  our kernels, GPU only
    sdpa_attention                 torch.nn.functional.scaled_dot_product_attention
    reference_attention            the kernels' oracle: every option, stored score matrix, slow
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Attention = Callable[..., Tensor]


def sdpa_attention(
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
    dropout_seed: int | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    kernel: str | None = None,
) -> Tensor:
    """Softmax attention by torch's scaled_dot_product_attention, on any device.

    Args:
        q: (batch, seqlen_q, nheads, headdim), any floating dtype.
        k, v: (batch, seqlen_k, nheads_k, headdim), dtype and device of q; nheads_k divides nheads.
        causal: hide later keys; the last query sees the last key (bottom-right alignment).
        softmax_scale: factor on q @ k.T; default headdim ** -0.5.
        lengths_k: integers (batch,): keys from lengths_k[b] on are padding, seen by no query.
        dropout_p: probability of dropping a probability, drawn from torch's global generator.
        deterministic: served on CPU, and on CUDA under torch.use_deterministic_algorithms(True).

    Returns:
        (batch, seqlen_q, nheads, headdim), dtype of q. A row that sees no key is zero.

    Raises:
        ValueError: nheads is not a multiple of nheads_k.
        NotImplementedError: window, softcap, alibi_slopes, dropout_seed, return_lse or kernel is
            set, or deterministic cannot be promised.
    """
    refused = {
        "window": window[0] is not None or window[1] is not None,
        "softcap": softcap != 0.0,
        "alibi_slopes": alibi_slopes is not None,
        "dropout_seed": dropout_seed is not None,
        "return_lse": return_lse,
        "kernel": kernel is not None,
    }
    for option, is_set in refused.items():
        if is_set:
            raise NotImplementedError(
                f"sdpa_attention does not serve {option}; use flash_kernels.flash_attention on a "
                "GPU or model.attention.reference_attention anywhere"
            )
    if deterministic and q.is_cuda and not torch.are_deterministic_algorithms_enabled():
        raise NotImplementedError(
            "sdpa_attention is deterministic on CUDA only under "
            "torch.use_deterministic_algorithms(True); call that, or use "
            "flash_kernels.flash_attention"
        )
    seqlen_q, nheads = q.shape[1], q.shape[2]
    seqlen_k, nheads_k = k.shape[1], k.shape[2]
    if nheads % nheads_k != 0:
        raise ValueError(f"nheads ({nheads}) must be a multiple of nheads_k ({nheads_k})")

    # The first seqlen_q - seqlen_k rows see no key; torch leaves such rows undefined.
    num_blind = max(seqlen_q - seqlen_k, 0) if causal else 0
    if num_blind:
        q = q[:, num_blind:]
    if softmax_scale is not None and softmax_scale <= 0.0:
        # torch scales after masking with -inf, which gives NaN or the wrong sign here.
        q, softmax_scale = q * softmax_scale, 1.0
    keep_mask = None
    if causal and 1 < seqlen_q < seqlen_k:  # torch's is_causal is top-left aligned
        keep_mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device)
        keep_mask = keep_mask.tril(seqlen_k - seqlen_q)
    if lengths_k is not None:
        is_real = torch.arange(seqlen_k, device=q.device) < lengths_k[:, None]
        # Where no key is real torch's rows and gradients are undefined: let them see padding; their
        # result becomes zero below.
        is_real = (is_real | (lengths_k == 0)[:, None])[:, None, None, :]
        if causal and keep_mask is None and seqlen_q >= seqlen_k:
            shape = (q.shape[1], seqlen_k)
            keep_mask = torch.ones(shape, dtype=torch.bool, device=q.device).tril()
        keep_mask = is_real if keep_mask is None else keep_mask & is_real
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=keep_mask,
        dropout_p=dropout_p,
        is_causal=causal and seqlen_q >= seqlen_k and keep_mask is None,
        scale=softmax_scale,
        enable_gqa=nheads != nheads_k,
    ).transpose(1, 2)
    if lengths_k is not None:
        out = out.masked_fill((lengths_k == 0)[:, None, None, None], 0.0)
    return F.pad(out, (0, 0, 0, 0, num_blind, 0)) if num_blind else out


def auto_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """flash_kernels.flash_attention for CUDA tensors, sdpa_attention elsewhere; same arguments."""
    if q.is_cuda:
        # Imported on use: flash_kernels needs triton, which not every platform has.
        from flash_kernels import flash_attention

        return flash_attention(q, k, v, **options)
    return sdpa_attention(q, k, v, **options)


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    **options: Any,
) -> Tensor:
    """flash_kernels.reference.flash_attention, any device; same arguments.

    Where no dropout_seed is given it is drawn as flash_attention draws it, from torch's global
    generator of the device: under one seed of torch both drop the same probabilities.
    """
    from flash_kernels.reference import flash_attention

    if dropout_p > 0.0 and dropout_seed is None:
        dropout_seed = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=q.device)
    return flash_attention(q, k, v, dropout_p=dropout_p, dropout_seed=dropout_seed, **options)


def is_flash(attention: Attention, q: Tensor) -> bool:
    """Whether a call with q goes to flash_kernels.flash_attention."""
    if attention is auto_attention:
        return q.is_cuda
    return getattr(attention, "__module__", "").startswith("flash_kernels.attention")


class Packing(NamedTuple):
    """Where sequences lie that are packed one after the other.

    Attributes:
        cu_seqlens: int32 (batch + 1,), starts at 0, ends at the number of tokens.
        max_seqlen: at least the longest sequence.
    """

    cu_seqlens: Tensor
    max_seqlen: int

    @property
    def lengths(self) -> Tensor:
        """(batch,) int32."""
        return self.cu_seqlens.diff()

    def sequence_ids(self, num_tokens: int) -> Tensor:
        """(num_tokens,) int64: the sequence of each token."""
        ids = torch.arange(len(self.cu_seqlens) - 1, device=self.cu_seqlens.device)
        # The size is given, so that nothing waits for the device to tell it.
        return ids.repeat_interleave(self.lengths, output_size=num_tokens)

    def positions(self, num_tokens: int) -> Tensor:
        """(num_tokens,) int64: the place of each token in its sequence."""
        starts = self.cu_seqlens[self.sequence_ids(num_tokens)]
        return torch.arange(num_tokens, device=starts.device) - starts


def pack(padded: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Real tokens of a padded batch, and where each sequence starts.

    Args:
        padded: (batch, seqlen, ...), padding at the right end.
        lengths: (batch,) integers.

    Returns:
        (total, ...) and cu_seqlens (batch + 1,) int32.
    """
    is_real = torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]
    return padded[is_real], F.pad(lengths.cumsum(0), (1, 0)).int()


def qkv_attention(
    attention: Attention, qkv: Tensor, packing: Packing | None = None, **options: Any
) -> Tensor:
    """Self-attention of a fused projection.

    In compiled code flash_kernels' function takes it whole, so that its gradient is one tensor and
    no copy. Elsewhere finding that operator takes longer than the copy.

    Args:
        attention: function with flash_kernels.flash_attention's signature.
        qkv: (batch, seqlen, 3, nheads, headdim); packed sequences are (1, total, ...).
        packing: of qkv.
        options: of `attention`.

    Returns:
        qkv's shape without the 3.
    """
    if torch.compiler.is_compiling() and is_flash(attention, qkv):
        from flash_kernels import flash_attention_qkvpacked

        if packing is None:
            return flash_attention_qkvpacked(qkv, **options)
        return flash_attention_qkvpacked(
            qkv[0], cu_seqlens=packing.cu_seqlens, max_seqlen=packing.max_seqlen, **options
        )[None]
    q, k, v = qkv.unbind(2)
    if packing is None:
        return attention(q, k, v, **options)
    return packed_attention(attention, q[0], k[0], v[0], packing, **options)[None]


def packed_attention(
    attention: Attention, q: Tensor, k: Tensor, v: Tensor, packing: Packing, **options: Any
) -> Tensor:
    """Self-attention within packed sequences.

    Where `attention` is flash_kernels' the packed kernel runs, where it has a method `packed` that
    does. Any other function gets the sequences padded to max_seqlen and lengths_k: slower, equal.

    Args:
        attention: function with flash_kernels.flash_attention's signature.
        q, k, v: (total, nheads, headdim).
        packing: of q, and of k and v.
        options: of `attention`.

    Returns:
        (total, nheads, headdim), dtype of q.
    """
    cu_seqlens, max_seqlen = packing
    if hasattr(attention, "packed"):
        return attention.packed(q, k, v, cu_seqlens, max_seqlen, **options)
    if is_flash(attention, q):
        from flash_kernels import flash_attention_varlen

        return flash_attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=max_seqlen,
            max_seqlen_k=max_seqlen,
            **options,
        )
    batch, total = len(cu_seqlens) - 1, q.shape[0]
    sequence, slot = packing.sequence_ids(total), packing.positions(total)
    padded = []
    for packed in (q, k, v):
        rows = packed.new_zeros(batch, max_seqlen, *packed.shape[1:])
        padded.append(rows.index_put((sequence, slot), packed))
    return attention(*padded, lengths_k=packing.lengths, **options)[sequence, slot]
