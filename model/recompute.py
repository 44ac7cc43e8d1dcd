"""Activation checkpointing (Chen et al., arXiv 1604.06174): what a block computed on the way
forward is made again on the way back, for less memory.

Of a GPT of width d under bf16 autocast, a token and layer keep 36 d bytes without it (as
scripts/plan.py counts). "full" keeps the block's inputs, the residual stream and what is still to
be added to it, 6 d bytes, and runs the whole block twice. "selective" also keeps what matrix
products and attention gave, 24 d bytes in all, so that only norms, GELU, dropout and sums run
twice.
"""

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

RECOMPUTE = ("none", "selective", "full")
_KEPT = {
    "aten": ("mm", "addmm", "bmm", "baddbmm", "linear"),
    "flash_kernels": ("attention_forward", "ring_forward", "ring_seed"),
}


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    namespace, name = operator.name().split("::")
    name = name.split(".")[0]
    is_attention = namespace == "aten" and name.startswith("_scaled_dot_product")
    if is_attention or name in _KEPT.get(namespace, ()):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class Recomputing(nn.Module):
    """A block whose `compute` may run again in the backward, with the same dropout.

    A subclass defines compute in the place of forward. Inside the module, so that what FSDP2 does
    around its call is done around both.
    """

    #: One of RECOMPUTE.
    recompute = "none"

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As compute."""
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self.compute(*args, **kwargs)
        options: dict[str, Any] = {}
        if self.recompute == "selective":
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(self.compute, *args, use_reentrant=False, **options, **kwargs)


def set_recompute(model: Any, how: str) -> None:
    """How the blocks of a model save memory in training.

    Raises:
        ValueError: `how` is not one of RECOMPUTE.
    """
    if how not in RECOMPUTE:
        raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE)}, got {how!r}")
    for block in model.blocks:
        block.recompute = how
