"""Cross-entropy of next-token prediction, as a sum and a count.

A mean of means is wrong where micro batches or ranks hold different numbers of labelled tokens:
callers add sums and counts, then divide once.
"""

from torch import Tensor
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
