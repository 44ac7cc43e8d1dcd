"""Losses of BERT's pre-training, as sums and counts: masked tokens and next sentence.

As in loss.py, callers add sums and counts over micro-batches and ranks, then divide once. BERT's
total loss is MLM sum / masked tokens + NSP sum / pairs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from model.bert import BERT
from model.loss import IGNORE, next_token_loss


class Sums(NamedTuple):
    """Scalars on the device: losses float32, in nats; counts int64."""

    mlm_loss: Tensor
    num_masked: Tensor
    mlm_correct: Tensor
    nsp_loss: Tensor
    num_pairs: Tensor
    nsp_correct: Tensor


def masked_positions(labels: Tensor) -> Tensor:
    """Where labels (any shape) are not -100, as int64 indices of labels.flatten().

    On a GPU this waits for the device, to know how many there are.
    """
    return (labels.flatten() != IGNORE).nonzero().squeeze(1)


def mlm_loss(
    model: BERT,
    hidden: Tensor,
    labels: Tensor,
    *,
    positions: Tensor | None = None,
    chunk_tokens: int = 8192,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy of the masked tokens, whose logits alone are computed.

    Logits exist for one chunk at a time and are made again in the backward.

    Args:
        model: has an MLM head.
        hidden: as model.hidden returned it, (..., dim).
        labels: int64, hidden's shape without the last axis; -100 where nothing is predicted.
        positions: masked_positions(labels), if known.
        chunk_tokens: masked tokens whose logits exist at once.

    Returns:
        Summed loss (float32, nats; 0 where nothing is masked), number of masked tokens and of
        correct predictions (int64).

    Raises:
        ValueError: the shapes differ, or chunk_tokens < 1.
    """
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels must have hidden's shape without the last axis, {tuple(hidden.shape[:-1])}, "
            f"got {tuple(labels.shape)}"
        )
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    if positions is None:
        positions = masked_positions(labels)
    # With nothing masked one empty chunk remains: every parameter keeps a gradient, of zero.
    states = model.mlm_states(hidden, positions)
    targets = labels.flatten()[positions]

    def chunk_loss(part: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = model.decoder(part)
        loss, _ = next_token_loss(logits, target)
        return loss, (logits.argmax(-1) == target).sum()

    pieces = list(zip(states.split(chunk_tokens), targets.split(chunk_tokens), strict=True))
    if len(pieces) == 1:  # nothing to save
        sums = [chunk_loss(*pieces[0])]
    else:
        sums = [  # no dropout in the decoder
            checkpoint(chunk_loss, *piece, use_reentrant=False, preserve_rng_state=False)
            for piece in pieces
        ]
    losses, correct = zip(*sums, strict=True)
    return torch.stack(losses).sum(), (labels != IGNORE).sum(), torch.stack(correct).sum()


def nsp_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy of next-sentence prediction.

    Args:
        logits: (batch, 2), any floating dtype.
        labels: (batch,) int64: 0 where segment B follows A, 1 where it is random, -100 for no loss.

    Returns:
        Summed loss (float32, nats), number of pairs and of correct predictions (int64).
    """
    loss, num_pairs = next_token_loss(logits[:, None], labels[:, None])
    return loss, num_pairs, (logits.argmax(-1) == labels).sum()


def bert_loss(
    model: BERT,
    batch: dict[str, Any],
    *,
    chunk_tokens: int = 8192,
    hidden: Callable[..., Tensor] | None = None,
) -> Sums:
    """Forward pass and both losses of one batch.

    Args:
        model: with an MLM head; without an NSP head the NSP sums are 0.
        batch: input_ids, labels and segment_ids, (batch, seqlen) with lengths (batch,), or (total,)
            with cu_seqlens (batch + 1,) and max_seqlen; nsp_labels (batch,) for the NSP head. See
            data/masked_lm.py. masked_positions, as with_host_counts adds it, spares a wait.
        chunk_tokens: see mlm_loss.
        hidden: computes model.hidden, compiled for instance; None is model.hidden itself.
    """
    layout = {key: batch[key] for key in ("lengths", "cu_seqlens", "max_seqlen") if key in batch}
    segment_ids = batch.get("segment_ids") if model.config["num_segments"] > 1 else None
    states = (hidden or model.hidden)(batch["input_ids"], segment_ids=segment_ids, **layout)
    sums = mlm_loss(
        model,
        states,
        batch["labels"],
        positions=batch.get("masked_positions"),
        chunk_tokens=chunk_tokens,
    )
    if model.nsp is None:
        zero = torch.zeros((), device=states.device)
        return Sums(*sums, zero, zero.long(), zero.long())
    pooled = model.pooled(states, cu_seqlens=layout.get("cu_seqlens"))
    return Sums(*sums, *nsp_loss(model.nsp_logits(pooled), batch["nsp_labels"]))


def with_host_counts(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch on the CPU with what `piece_of` reads there; no piece waits for a GPU then.

    Added are masked_positions, and two arrays on the host, (batch + 1,) int64: `starts`, the first
    token of each sequence in labels.flatten(), and `masked_starts`, the masked tokens before it.
    """
    labels = batch["labels"]
    if "cu_seqlens" in batch:
        starts = batch["cu_seqlens"].long()
    else:
        starts = torch.arange(len(labels) + 1) * labels.shape[1]
    positions = masked_positions(labels)
    return {
        **batch,
        "masked_positions": positions,
        "starts": starts.numpy(),
        "masked_starts": torch.searchsorted(positions, starts).numpy(),
    }


def piece_of(batch: dict[str, Any], rows: slice) -> dict[str, Any]:
    """Sequences rows.start to rows.stop of a batch, as views; Sums of all pieces add up to its own.

    batch: as bert_loss takes it, padded or packed, through with_host_counts.
    """
    first, last = int(batch["starts"][rows.start]), int(batch["starts"][rows.stop])
    masked = slice(*(int(batch["masked_starts"][row]) for row in (rows.start, rows.stop)))
    piece = {"masked_positions": batch["masked_positions"][masked] - first}
    if "cu_seqlens" in batch:
        piece["cu_seqlens"] = batch["cu_seqlens"][rows.start : rows.stop + 1] - first
        piece["max_seqlen"] = batch["max_seqlen"]
        tokens = slice(first, last)
    else:
        tokens = rows
    piece |= {key: batch[key][tokens] for key in ("input_ids", "labels", "segment_ids")}
    piece |= {key: batch[key][rows] for key in ("lengths", "nsp_labels") if key in batch}
    return piece
