"""Self-attention around an injected attention function, and the functions that can be injected.

An attention function has the signature of flash_kernels.flash_attention: q (batch, seqlen_q,
nheads, headdim), k and v (batch, seqlen_k, nheads_k, headdim), options by keyword. The choices:

    auto_attention                 flash on CUDA tensors, sdpa elsewhere (the default)
    flash_kernels.flash_attention  our kernels, GPU only
    sdpa_attention                 torch.nn.functional.scaled_dot_product_attention
    reference_attention            the kernels' oracle: every option, stored score matrix, slow
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.positions import rotate

Attention = Callable[..., Tensor]
# Queries of one call that the decoding kernels take: one tile of theirs.
_MAX_DECODED = 16


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


def auto_attention(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
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
    **options,
) -> Tensor:
    """flash_kernels.reference.flash_attention, any device; same arguments.

    Where no dropout_seed is given it is drawn as flash_attention draws it, from torch's global
    generator of the device: under one seed of torch both drop the same probabilities.
    """
    from flash_kernels.reference import flash_attention

    if dropout_p > 0.0 and dropout_seed is None:
        dropout_seed = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=q.device)
    return flash_attention(q, k, v, dropout_p=dropout_p, dropout_seed=dropout_seed, **options)


class KVCache:
    """Keys and values of the tokens seen so far; buffers of full length, one pair a layer.

    The buffers are allocated when a layer first writes, so they take the dtype that attention sees
    (bf16 under autocast).

    Args:
        max_seqlen: tokens that the buffers hold.
    """

    def __init__(self, max_seqlen: int) -> None:
        self.max_seqlen = max_seqlen
        self.length = 0  # tokens already in every layer
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._lengths: Tensor | None = None

    def buffers(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's keys and values (batch, max_seqlen, nheads, headdim), with room for k, v."""
        end = self.length + k.shape[1]
        if end > self.max_seqlen:
            raise ValueError(
                f"the KV cache holds {self.max_seqlen} tokens, got {end}; reset() it and pass a "
                "shorter context"
            )
        if layer not in self._layers:
            shape = (k.shape[0], self.max_seqlen, *k.shape[2:])
            self._layers[layer] = (k.new_empty(shape), v.new_empty(shape))
        return self._layers[layer]

    def lengths(self, batch: int, device: torch.device) -> Tensor:
        """`length` for each sequence, int32 (batch,), kept on the device."""
        if self._lengths is None:
            self._lengths = torch.full((batch,), self.length, dtype=torch.int32, device=device)
        return self._lengths

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v (batch, seqlen, nheads, headdim) after the tokens held; return all so far."""
        keys, values = self.buffers(layer, k, v)
        end = self.length + k.shape[1]
        keys[:, self.length : end] = k
        values[:, self.length : end] = v
        return keys[:, :end], values[:, :end]

    def advance(self, num_tokens: int) -> None:
        """Count the tokens that every layer has just appended."""
        self.length += num_tokens
        if self._lengths is not None:
            self._lengths += num_tokens

    def reset(self) -> None:
        """Forget the tokens and keep the buffers."""
        self.length = 0
        self._lengths = None


def is_flash(attention: Attention, q: Tensor) -> bool:
    """Whether a call with q goes to flash_kernels.flash_attention."""
    if attention is auto_attention:
        return q.is_cuda
    return getattr(attention, "__module__", "").startswith("flash_kernels.attention")


def _serves_cache(attention: Attention, q: Tensor) -> bool:
    """Whether this call goes to flash_kernels' decoding kernels: few queries, keys split."""
    return q.shape[1] <= _MAX_DECODED and is_flash(attention, q)


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


def packed_attention(
    attention: Attention, q: Tensor, k: Tensor, v: Tensor, packing: Packing, **options
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


class SelfAttention(nn.Module):
    """Multi-head self-attention: fused QKV projection, injected attention, output projection.

    Args:
        dim: model width.
        nheads: number of heads.
        headdim: width of a head; None means dim / nheads.
        causal: hide later tokens.
        dropout: probability of dropping an attention probability, in training only.
        attention: function with flash_kernels.flash_attention's signature.
        bias: biases on both projections.
        softmax_scale: factor on q @ k.T; None means headdim ** -0.5.
        layer: index of this layer in a KV cache.

    Raises:
        ValueError: no headdim is given and dim is not a multiple of nheads.
    """

    def __init__(
        self,
        dim: int,
        nheads: int,
        *,
        headdim: int | None = None,
        causal: bool,
        dropout: float = 0.0,
        attention: Attention = auto_attention,
        bias: bool = True,
        softmax_scale: float | None = None,
        layer: int = 0,
    ) -> None:
        super().__init__()
        if headdim is None and dim % nheads != 0:
            raise ValueError(f"dim ({dim}) must be a multiple of nheads ({nheads})")
        self.nheads = nheads
        self.causal = causal
        self.dropout = dropout
        self.attention = attention
        self.softmax_scale = softmax_scale
        self.layer = layer
        width = dim if headdim is None else nheads * headdim
        self.qkv = nn.Linear(dim, 3 * width, bias=bias)  # rows: q, k, v; heads contiguous in each
        self.out = nn.Linear(width, dim, bias=bias)

    def forward(
        self,
        x: Tensor,
        *,
        kv_cache: KVCache | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        lengths_k: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """x (batch, seqlen, dim) -> (batch, seqlen, dim).

        Args:
            kv_cache: holds earlier tokens and receives these.
            rotary: cosines and sines that turn q and k; see model.positions.rotate.
            lengths_k: integers (batch,): real tokens of each sequence; later ones are not seen.
            packing: of x (1, total, dim), which then holds sequences one after the other.
        """
        # Views of one tensor, stride(-1) == 1: nothing is copied before the kernel.
        q, k, v = self.qkv(x).unflatten(-1, (3, self.nheads, -1)).unbind(2)
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        if kv_cache is not None:
            if _serves_cache(self.attention, q):
                out = self._decode(q, k, v, kv_cache)
                return self.out(out.flatten(2))
            k, v = kv_cache.append(self.layer, k, v)
        options = {
            "causal": self.causal,
            "softmax_scale": self.softmax_scale,
            "dropout_p": self.dropout if self.training else 0.0,
        }
        if packing is not None:
            out = packed_attention(self.attention, q[0], k[0], v[0], packing, **options)[None]
        else:
            if lengths_k is not None:
                options["lengths_k"] = lengths_k
            out = self.attention(q, k, v, **options)
        return self.out(out.flatten(2))

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, kv_cache: KVCache) -> Tensor:
        """q over the cache and k, v, which the kernels append to it."""
        from flash_kernels import flash_attention_with_kv_cache

        keys, values = kv_cache.buffers(self.layer, k, v)
        return flash_attention_with_kv_cache(
            q,
            keys,
            values,
            cache_lengths=kv_cache.lengths(q.shape[0], q.device),
            k=k,
            v=v,
            causal=self.causal,
            softmax_scale=self.softmax_scale,
        )
