"""Attention over the blocks of a named pattern (arXiv 2205.14135, section 3.3), for the trainer.

`attention=block_sparse` chooses it; `attention/pattern=butterfly` (or sliding_window, local_global,
bigbird, strided, fixed) the pattern. The weights do not know of it: a dense checkpoint fine-tunes
under a pattern, and back.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:  # triton is not everywhere
    from flash_kernels import BlockMask

PATTERNS = ("butterfly", "sliding_window", "local_global", "bigbird", "strided", "fixed")


class BlockSparseAttention:
    """A function with flash_kernels.flash_attention's signature, on a GPU.

    Args:
        pattern: one of PATTERNS under "name", and the options of that builder in
            flash_kernels.block_patterns: {"name": "butterfly", "block_size": 128}.
        max_seqlen: tokens that the pattern is laid out for. Shorter inputs take its top left.
        layers: patterns by layer, repeated over a deeper model; None is `pattern` in all.

    Raises:
        ValueError: no such pattern, or one that does not know an option.
    """

    __name__ = "block_sparse"

    def __init__(
        self,
        pattern: Mapping[str, Any],
        max_seqlen: int,
        layers: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.max_seqlen = max_seqlen
        self.patterns = [dict(p) for p in (layers or [pattern])]
        self._masks: dict[tuple[int, torch.device], BlockMask] = {}
        for index in range(len(self.patterns)):
            self.mask(index, torch.device("cpu"))  # refuses wrong options before anything heavy

    def for_layer(self, layer: int) -> "_LayerAttention":
        """The attention function of one layer."""
        return _LayerAttention(self, layer % len(self.patterns))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return self.for_layer(0)(q, k, v, **options)

    def mask(self, index: int, device: torch.device) -> "BlockMask":
        """BlockMask of pattern `index` on a device, made once."""
        if (index, device) not in self._masks:
            self._masks[index, device] = _build(self.patterns[index], self.max_seqlen, device)
        return self._masks[index, device]

    def pictures(self) -> dict[str, str]:
        """name -> SVG of each pattern, as it is laid out for max_seqlen tokens."""
        single = len(self.patterns) == 1
        return {
            str(pattern["name"]) + f"_{index}" * (not single): self.mask(
                index, torch.device("cpu")
            ).plot()
            for index, pattern in enumerate(self.patterns)
        }


class _LayerAttention:
    """Pattern `index` of a BlockSparseAttention, as one layer calls it."""

    __name__ = "block_sparse"

    def __init__(self, attention: BlockSparseAttention, index: int) -> None:
        self.attention = attention
        self.index = index

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        from flash_kernels import block_sparse_attention

        # The mask counts positions from the first key. Queries of a KV cache are the last ones:
        # rows before them put them there (wasteful, but a sample is short).
        missing = k.shape[1] - q.shape[1]
        if missing > 0:
            q = F.pad(q, (0, 0, 0, 0, missing, 0))
        out = block_sparse_attention(q, k, v, self.attention.mask(self.index, q.device), **options)
        return out[:, missing:] if missing > 0 else out

    def packed(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, **options: Any
    ) -> Tensor:
        """Self-attention within packed sequences (total, nheads, headdim), each under the pattern
        from its own start."""
        from flash_kernels import block_sparse_attention_varlen

        return block_sparse_attention_varlen(
            q,
            k,
            v,
            self.attention.mask(self.index, q.device),
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=max_seqlen,
            max_seqlen_k=max_seqlen,
            **options,
        )


def _build(pattern: Mapping[str, Any], seqlen: int, device: torch.device) -> "BlockMask":
    from flash_kernels import block_patterns

    options = dict(pattern)
    name = options.pop("name", None)
    if name not in PATTERNS:
        raise ValueError(f"a pattern's name must be one of {', '.join(PATTERNS)}, got {name!r}")
    try:
        return getattr(block_patterns, name)(seqlen, device=device, **options)
    except TypeError as error:
        raise ValueError(f"the pattern {name} got a wrong option: {error}") from None


def layer_attention(attention: Callable[..., Tensor], layer: int) -> Callable[..., Tensor]:
    """What layer `layer` calls: attention itself, or its own pattern of it."""
    for_layer = getattr(attention, "for_layer", None)
    return attention if for_layer is None else for_layer(layer)


def layer_mask(attention: Callable[..., Tensor], device: torch.device) -> "BlockMask | None":
    """BlockMask of what layer_attention gave; None if it is no block-sparse attention."""
    if not isinstance(attention, _LayerAttention):
        return None
    return attention.attention.mask(attention.index, device)
