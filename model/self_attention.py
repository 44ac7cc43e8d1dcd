"""Self-attention around an injected attention function, and the cache of its keys and values."""

from typing import Any

import torch
from torch import Tensor, nn

from model.attention import (
    Attention,
    Packing,
    auto_attention,
    is_flash,
    packed_attention,
    qkv_attention,
)
from model.positions import rotate

# Queries of one call that the decoding kernels take: one tile of theirs.
_MAX_DECODED = 16


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


def _serves_cache(attention: Attention, q: Tensor) -> bool:
    """Whether this call goes to flash_kernels' decoding kernels: few queries, keys split."""
    return q.shape[1] <= _MAX_DECODED and is_flash(attention, q)


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
        options: dict[str, Any] = {
            "causal": self.causal,
            "softmax_scale": self.softmax_scale,
            "dropout_p": self.dropout if self.training else 0.0,
        }
        if lengths_k is not None and packing is None:
            options["lengths_k"] = lengths_k
        qkv = self.qkv(x).unflatten(-1, (3, self.nheads, -1))
        if rotary is None and kv_cache is None:
            return self.out(qkv_attention(self.attention, qkv, packing, **options).flatten(2))
        # Views of one tensor, stride(-1) == 1: nothing is copied before the kernel.
        q, k, v = qkv.unbind(2)
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        if kv_cache is not None:
            if _serves_cache(self.attention, q):
                out = self._decode(q, k, v, kv_cache)
                return self.out(out.flatten(2))
            k, v = kv_cache.append(self.layer, k, v)
        if packing is not None:
            out = packed_attention(self.attention, q[0], k[0], v[0], packing, **options)[None]
        else:
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
