"""FlashAttention in Triton: exact, memory linear in the sequence length, forward and backward.

What is imported by itself: ring (a sequence on several processes), fused (steps around attention).
"""

from . import block_patterns, flops  # noqa: F401  (flops registers formulas)
from .attention import flash_attention, flash_attention_varlen
from .block_mask import BlockMask
from .block_sparse import block_sparse_attention, block_sparse_attention_varlen
from .kv_cache import flash_attention_with_kv_cache
from .qkv_packed import flash_attention_qkvpacked

__all__ = [
    "BlockMask",
    "block_patterns",
    "block_sparse_attention",
    "block_sparse_attention_varlen",
    "flash_attention",
    "flash_attention_qkvpacked",
    "flash_attention_varlen",
    "flash_attention_with_kv_cache",
]
