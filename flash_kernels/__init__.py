"""FlashAttention in Triton: exact, memory linear in the sequence length, forward and backward."""

from .attention import flash_attention, flash_attention_varlen

__all__ = ["flash_attention", "flash_attention_varlen"]
