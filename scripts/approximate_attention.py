"""The approximate attentions of the paper's tables in plain PyTorch: rivals to time, not to train.

Local attention sees a window of keys around a query, Linformer (arXiv 2006.04768, equation 7)
projects the keys and values to a fixed number, Performer (arXiv 2009.14794, FAVOR+, section 2)
replaces the softmax by the inner product of random features. Each takes and returns
(batch, seqlen, nheads, headdim), sees earlier and later keys alike and scales by headdim ** -0.5.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad


def visible_keys(seqlen: int) -> int:
    """Keys that a query sees: by the paper a ratio of 1/8 or 256, whichever is smaller."""
    return max(1, min(seqlen // 8, 256))


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    radius: int,
    lengths_k: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Softmax attention of query i over the keys i - radius to i + radius.

    Queries go by chunks of `radius`, each beside its own chunk of keys and the two next to it.

    Args:
        q, k, v: (batch, seqlen, nheads, headdim), one dtype.
        radius: at least 1; from seqlen - 1 on the attention is exact.
        lengths_k: (batch,), keys from there on are padding; default none.
        dropout_p: of the probabilities.

    Returns:
        (batch, seqlen, nheads, headdim). A query that sees no key is zero.
    """
    if radius < 1:
        raise ValueError(f"radius must be at least 1, got {radius}")
    seqlen, headdim = q.shape[1], q.shape[3]
    chunk = min(radius, seqlen)
    num_chunks = -(-seqlen // chunk)
    rest = num_chunks * chunk - seqlen
    queries = pad(q.transpose(1, 2), (0, 0, 0, rest)).unflatten(2, (num_chunks, chunk))
    keys, values = (  # (batch, nheads, num_chunks, headdim, 3 * chunk)
        pad(t.transpose(1, 2), (0, 0, chunk, rest + chunk)).unfold(2, 3 * chunk, chunk)
        for t in (k, v)
    )
    scores = (queries * headdim**-0.5) @ keys
    starts = torch.arange(num_chunks, device=q.device)[:, None, None] * chunk
    rows = starts + torch.arange(chunk, device=q.device)[:, None]
    cols = starts + torch.arange(-chunk, 2 * chunk, device=q.device)
    keep = ((rows - cols).abs() <= radius) & (cols >= 0) & (cols < seqlen)
    if lengths_k is not None:
        keep = keep & (cols < lengths_k[:, None, None, None, None])
    # Rows without a key are kept finite, for a NaN would reach the gradients of their chunk.
    probs = scores.masked_fill_(~keep, torch.finfo(scores.dtype).min).softmax(-1)
    if lengths_k is not None:
        probs = probs.masked_fill(~keep, 0.0)
    out = dropout(probs, dropout_p) @ values.transpose(-2, -1)
    return out.flatten(2, 3)[:, :, :seqlen].transpose(1, 2)


def linformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    project_k: Tensor,
    project_v: Tensor,
    *,
    lengths_k: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """softmax(q @ (project_k @ k).T) @ (project_v @ v), a head at a time.

    Args:
        q, k, v: (batch, seqlen, nheads, headdim), one dtype.
        project_k, project_v: (num_projected, seqlen), shared by the heads; of a model its weights.
            Identities make the attention exact.
        lengths_k: (batch,), keys and values from there on are zeroed before they are projected, as
            a projected key has no position to mask; default none.
        dropout_p: of the probabilities.

    Returns:
        (batch, seqlen, nheads, headdim).
    """
    seqlen, headdim = q.shape[1], q.shape[3]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if lengths_k is not None:
        is_padding = torch.arange(seqlen, device=q.device) >= lengths_k[:, None]
        k, v = (t.masked_fill(is_padding[:, None, :, None], 0.0) for t in (k, v))
    scores = (q * headdim**-0.5) @ (project_k @ k).transpose(-2, -1)
    out = dropout(scores.softmax(-1), dropout_p) @ (project_v @ v)
    return out.transpose(1, 2)


def performer_attention(
    q: Tensor, k: Tensor, v: Tensor, features: Tensor, *, lengths_k: Tensor | None = None
) -> Tensor:
    """phi(q) @ (phi(k).T @ v) / (phi(q) @ phi(k).T @ 1), phi(x) = exp(features @ x - |x|^2 / 2).

    The expectation of phi(q) @ phi(k).T over the features is exp(q @ k.T): positive features, the
    paper's lemma 1. There are no probabilities, so no dropout of them.

    Args:
        q, k, v: (batch, seqlen, nheads, headdim), float32 (its sums overflow in half precision).
        features: (num_features, headdim), float32, from `orthogonal_features`.
        lengths_k: (batch,), keys from there on are padding; default none.

    Returns:
        (batch, seqlen, nheads, headdim).
    """
    seqlen, scale = q.shape[1], q.shape[3] ** -0.25
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    log_q, log_k = (
        (x @ features.T) - x.square().sum(-1, keepdim=True) / 2 for x in (q * scale, k * scale)
    )
    if lengths_k is not None:
        is_padding = torch.arange(seqlen, device=q.device) >= lengths_k[:, None]
        log_k = log_k.masked_fill(is_padding[:, None, :, None], -math.inf)
    # Any factor a query, and any factor a head of the keys, cancels in the quotient.
    phi_q = (log_q - log_q.amax(-1, keepdim=True).detach()).exp()
    phi_k = (log_k - log_k.amax((-2, -1), keepdim=True).detach()).exp()
    numerator = phi_q @ (phi_k.transpose(-2, -1) @ v)
    denominator = phi_q @ phi_k.sum(-2)[..., None]
    return (numerator / denominator).transpose(1, 2)


def orthogonal_features(num_features: int, headdim: int, generator: torch.Generator) -> Tensor:
    """Gaussian directions, orthogonal within each block of headdim of them (FAVOR+'s O).

    Args:
        num_features: rows, any number.
        headdim: columns.
        generator: of the device on which the features are made.

    Returns:
        (num_features, headdim), float32; each row has the length of a Gaussian vector.
    """
    options: dict[str, Any] = dict(generator=generator, device=generator.device)
    blocks = -(-num_features // headdim)
    gaussian = torch.randn(blocks, headdim, headdim, **options)
    directions, triangular = torch.linalg.qr(gaussian)
    # Signs that make the orthogonal matrices uniformly distributed, whatever QR's convention.
    directions = directions * triangular.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
    lengths = torch.randn(blocks * headdim, headdim, **options).norm(dim=-1, keepdim=True)
    return (directions.transpose(-2, -1).reshape(-1, headdim) * lengths)[:num_features]
