"""Scores of a GPT on given text: perplexity at any context length, and likelihoods of endings.

A perplexity depends on how much of the text a token's prediction may see. Here every context length
scores the same tokens: windows of `context` tokens move over the text by `stride`, and of each only
the tokens that no window before it has scored count.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.gpt import GPT
from model.loss import IGNORE
from model.positions import extend_positions


class Window(NamedTuple):
    """Inputs tokens[start : start + length], whose last num_scored successors are the targets."""

    start: int
    length: int
    num_scored: int


def windows(num_tokens: int, context: int, stride: int) -> Iterator[Window]:
    """Windows over a text of num_tokens tokens, whose first one is given and not predicted.

    Every later token is the target of one window. It sees all tokens before it, or at least
    context - stride + 1 of them; the last window lies at the end, so that its tokens see more.

    Args:
        num_tokens: at least 1.
        context: most tokens that a prediction sees.
        stride: tokens that a window moves by, from 1 to context.

    Raises:
        ValueError: numbers out of their range.
    """
    if num_tokens < 1:
        raise ValueError(f"a text must have a token to start from, got {num_tokens} tokens")
    if not 1 <= stride <= context:
        raise ValueError(f"stride must be from 1 to context = {context}, got {stride}")
    end = min(context, num_tokens - 1)
    if end:
        yield Window(0, end, end)
    while end < num_tokens - 1:
        moved = min(end + stride, num_tokens - 1)
        yield Window(moved - context, context, moved - end)
        end = moved


def extend_context(model: GPT, max_seqlen: int, how: str = "tile") -> None:
    """Give a GPT a longer position table, in place; see positions.extend_positions."""
    table = model.embeddings.positions
    if max_seqlen > model.max_seqlen:
        table.weight = nn.Parameter(extend_positions(table.weight.detach(), max_seqlen, how))
        table.num_embeddings = max_seqlen
        model.max_seqlen = model.config["max_seqlen"] = max_seqlen


class Losses(NamedTuple):
    """Attributes:
    nll: summed negative log-likelihood of the targets, nats.
    num_tokens: number of targets.
    """

    nll: float
    num_tokens: int


@torch.no_grad()
def text_losses(
    model: GPT,
    documents: Sequence[np.ndarray],
    *,
    context: int,
    stride: int,
    skip: int = 0,
    batch_tokens: int = 16384,
    chunk_tokens: int = 4096,
    on_tokens: Callable[[int], None] | None = None,
) -> Losses:
    """Loss of a GPT on documents, none of which sees another one.

    Args:
        model: on its device, in eval mode; autocast is the caller's.
        documents: (num_tokens,) integers each, whose first token is given: an end of text, for
            example.
        context, stride: see windows.
        skip: first targets of each document that are seen and not scored; the same at any context.
        batch_tokens: tokens of one forward pass; at least one window.
        chunk_tokens: targets whose logits exist at once.
        on_tokens: called with the number of targets that each pass has scored, for a progress bar.

    Raises:
        ValueError: context is longer than the model's positions, or nothing is left to score.
    """
    if context > model.max_seqlen:
        raise ValueError(
            f"context must be at most the model's {model.max_seqlen} positions, got {context}; "
            "shorten it, or extend the positions"
        )
    rows = [
        (document, window)
        for document in documents
        for window in windows(len(document), context, stride)
        if window.start + window.length > skip
    ]
    # Windows of one length in one batch: no padding but at the ends of documents.
    rows.sort(key=lambda row: -row[1].length)
    total = torch.zeros((), dtype=torch.float64, device=model.head_weight.device)
    num_tokens = 0
    at = 0
    while at < len(rows):
        number = max(1, batch_tokens // rows[at][1].length)
        batch = _padded([_inputs_and_labels(*row, skip) for row in rows[at : at + number]])
        at += number
        nll, _ = scored_tokens(model, *batch, chunk_tokens=chunk_tokens)
        total += nll.double().sum()
        num_tokens += len(nll)
        if on_tokens is not None:
            on_tokens(len(nll))
    if not num_tokens:
        raise ValueError(f"a document must be longer than skip + 1 = {skip + 1} tokens, none is")
    return Losses(float(total), num_tokens)


def _inputs_and_labels(document: np.ndarray, window: Window, skip: int) -> tuple[Tensor, Tensor]:
    """(length,) int64 each; labels are -100 where nothing is scored."""
    start, length, num_scored = window
    tokens = torch.from_numpy(np.asarray(document[start : start + length + 1], dtype=np.int64))
    labels = tokens[1:].clone()
    # Target i of the document follows its token i.
    labels[: max(length - num_scored, skip - start)] = IGNORE
    return tokens[:-1], labels


def _padded(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Stacked; what is behind the end of a row is not seen by its tokens, and has no label."""
    longest = max(len(ids) for ids, _ in rows)
    input_ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    labels = torch.full((len(rows), longest), IGNORE)
    for row, (ids, row_labels) in enumerate(rows):
        input_ids[row, : len(ids)] = ids
        labels[row, : len(ids)] = row_labels
    return input_ids, labels


@torch.no_grad()
def scored_tokens(
    model: GPT, input_ids: Tensor, labels: Tensor, *, chunk_tokens: int = 4096
) -> tuple[Tensor, Tensor]:
    """How likely a GPT finds the labels.

    Args:
        input_ids, labels: (batch, seqlen) int64, labels already shifted and -100 where nothing is
            scored. They are moved to the model's device.
        chunk_tokens: labels whose logits exist at once.

    Returns:
        Of the labels that are not -100, in the order of labels.flatten(): negative log-likelihoods
        in nats, float32, and whether each is the likeliest token, bool; both (num_scored,).
    """
    device = model.head_weight.device
    input_ids, labels = input_ids.to(device), labels.to(device)
    is_scored = labels != IGNORE
    hidden, targets = model.hidden(input_ids)[is_scored], labels[is_scored]
    nll, is_likeliest = [], []
    for part, target in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True):
        # GPT-2's logits lie near -100, where bf16 has steps of 0.5: float32 under autocast too.
        with torch.autocast(device.type, enabled=False):
            logits = model.logits(part.float())
        nll.append(F.cross_entropy(logits, target, reduction="none"))
        is_likeliest.append(logits.argmax(-1) == target)
    return torch.cat(nll), torch.cat(is_likeliest)


class Score(NamedTuple):
    """Attributes:
    nll: of all tokens of the ending, nats.
    is_greedy: whether each of them is the likeliest after those before it.
    """

    nll: float
    is_greedy: bool


def score_endings(
    model: GPT,
    texts: Sequence[tuple[np.ndarray, int]],
    *,
    batch_tokens: int = 16384,
    on_texts: Callable[[int], None] | None = None,
) -> list[Score]:
    """How likely a GPT finds the ends of texts.

    Args:
        model: on its device, in eval mode; autocast is the caller's.
        texts: ids (num_tokens,) and how many of them, at the end, are scored. A text of more than
            max_seqlen + 1 tokens loses its first ones. At least one token must precede the scored.
        batch_tokens: tokens of one forward pass, padding included; at least one text.
        on_texts: called with the number of texts that each pass has scored, for a progress bar.

    Returns:
        A Score a text.

    Raises:
        ValueError: a text without a token before its end, or an end longer than max_seqlen.
    """
    rows = []
    for ids, num_scored in texts:
        if not 1 <= num_scored <= min(len(ids) - 1, model.max_seqlen):
            raise ValueError(
                "an ending must be of 1 token or more, with one before it, and fit the model's "
                f"{model.max_seqlen} positions; got {num_scored} of {len(ids)} tokens"
            )
        ids = ids[-model.max_seqlen - 1 :]
        window = Window(0, len(ids) - 1, num_scored)
        rows.append(_inputs_and_labels(ids, window, 0))
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
    scores: dict[int, Score] = {}
    at = 0
    while at < len(order):
        chosen = order[at : at + max(1, batch_tokens // len(rows[order[at]][0]))]
        at += len(chosen)
        nll, is_likeliest = scored_tokens(model, *_padded([rows[i] for i in chosen]))
        counts = [texts[i][1] for i in chosen]
        parts = zip(nll.cpu().split(counts), is_likeliest.cpu().split(counts), strict=True)
        for i, (losses, likeliest) in zip(chosen, parts, strict=True):
            scores[i] = Score(float(losses.double().sum()), bool(likeliest.all()))
        if on_texts is not None:
            on_texts(len(chosen))
    return [scores[i] for i in range(len(rows))]
