"""Cross-entropy of next-token prediction, as a sum and a count.

A mean of means is wrong where micro batches or ranks hold different numbers of labelled tokens:
callers add sums and counts, then divide once.

At GPT-2's vocabulary the logits are the largest tensor of a training step: 65,536 tokens take
6.6 GB in bf16, and their float32 softmax and gradient twice that each. `linear_next_token_loss`
never holds more than one chunk of them.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

IGNORE = -100


def next_token_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy in nats and the number of labelled tokens.

    Args:
        logits: (batch, seqlen, vocab_size), any floating dtype; the softmax is in float32.
        labels: (batch, seqlen) int64, already shifted: labels[b, t] is the token after position t.
            -100 marks a position without loss.

    Returns:
        Loss, a float32 scalar (0 where nothing is labelled), and the count, an int64 scalar.

    Raises:
        ValueError: the leading shapes differ.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels must have the logits' shape without the last axis, {tuple(logits.shape[:-1])},"
            f" got {tuple(labels.shape)}"
        )
    loss = F.cross_entropy(
        logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    return loss, (labels != IGNORE).sum()


def linear_next_token_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, vocab_size: int, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """next_token_loss(hidden @ weight[:vocab_size].T, labels), logits held a chunk at a time.

    The gradients of a chunk are made in the forward, while its logits are there, and multiplied by
    the incoming gradient in the backward: each product is done once, as without chunks. On a GPU by
    a kernel (flash_kernels.fused.cross_entropy), elsewhere by torch.

    Args:
        hidden: (batch, seqlen, dim).
        weight: (at least vocab_size, dim); rows from vocab_size on are padding, their gradient 0.
            The products include them: without, their sizes would not suit tensor cores.
        labels: (batch, seqlen) int64, -100 for no loss.
        chunk_tokens: rows of logits that exist at once.

    Returns:
        As next_token_loss. Under autocast the products are in its dtype, softmax and sums in
        float32.

    Raises:
        ValueError: the leading shapes differ.
    """
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels must have hidden's shape without the last axis, {tuple(hidden.shape[:-1])}, "
            f"got {tuple(labels.shape)}"
        )
    if hidden.is_cuda and torch.is_grad_enabled():
        from flash_kernels.fused.cross_entropy import linear_cross_entropy

        loss = linear_cross_entropy(
            hidden,
            weight,
            labels,
            vocab_size=vocab_size,
            ignore_index=IGNORE,
            chunk_tokens=chunk_tokens,
        )
        return loss, (labels != IGNORE).sum()
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
    rows, targets = hidden.flatten(0, -2), labels.flatten()
    if torch.is_grad_enabled():
        loss = _LinearCrossEntropy.apply(rows, weight, targets, vocab_size, chunk_tokens, dtype)
    else:
        loss = torch.zeros((), device=hidden.device)
        matrix = weight.to(dtype)
        for part, target in _chunks(rows, targets, chunk_tokens):
            loss += next_token_loss((part.to(dtype) @ matrix.T)[:, :vocab_size], target)[0]
    return loss, (labels != IGNORE).sum()


def _chunks(rows: Tensor, targets: Tensor, chunk_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(rows.split(chunk_tokens), targets.split(chunk_tokens), strict=True)


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of the cross-entropy of rows (num_tokens, dim) @ weight.T, gradients made on the way."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        chunk_tokens: int,
        dtype: torch.dtype,
    ) -> Tensor:
        matrix = weight.to(dtype)
        loss = torch.zeros((), device=rows.device)
        dweight = torch.zeros_like(weight)
        is_padding = torch.arange(len(weight), device=rows.device) >= vocab_size
        drows = []
        for part, target in _chunks(rows.to(dtype), targets, chunk_tokens):
            logits = part @ matrix.T
            if logits.dtype in (torch.float16, torch.bfloat16):
                logits = logits.float()
            if len(weight) > vocab_size:
                logits = logits.masked_fill(is_padding, float("-inf"))
            counted = (target != IGNORE)[:, None].to(logits.dtype)
            column = target.clamp(min=0)[:, None]
            logits.sub_(logits.amax(-1, keepdim=True))
            picked = logits.gather(1, column)
            probs = logits.exp_()
            total = probs.sum(-1, keepdim=True)
            # Sums out of place: compiled by torch 2.11, gradients of sums in place are wrong.
            loss = loss + ((total.log() - picked) * counted).sum(dtype=torch.float32)
            # d loss / d logits = softmax - one-hot of the target
            dlogits = probs.mul_(counted / total).scatter_add_(1, column, -counted).to(dtype)
            drows.append(dlogits @ matrix)
            dweight = dweight + dlogits.T @ part
        ctx.save_for_backward(torch.cat(drows).to(rows.dtype), dweight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        drows, dweight = ctx.saved_tensors
        return drows * dloss, dweight * dloss, None, None, None, None
