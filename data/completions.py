"""LAMBADA and HellaSwag as texts to be continued, and their token ids.

Sources: Paperno et al. 2016 (arXiv 1606.06031) in the form that OpenAI released with GPT-2; Zellers
et al. 2019 (arXiv 1905.07830). What is context and what is scored, down to the space between them,
follows EleutherAI's lm-evaluation-harness, so that accuracies can be compared with those that are
published from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from data.rows import field, open_rows
from data.tokenizer import AnyTokenizer

LAMBADA_HUB, HELLASWAG_HUB = "EleutherAI/lambada_openai", "Rowan/hellaswag"


class Completion(NamedTuple):
    """Attributes:
    context: text that is given.
    endings: texts that may follow it, each with its leading space.
    label: index of the right ending.
    """

    context: str
    endings: tuple[str, ...]
    label: int


class Encoded(NamedTuple):
    """A context with one ending.

    Attributes:
        ids: (num_tokens,) int64.
        num_scored: tokens of the ending, the last ones of ids.
    """

    ids: np.ndarray
    num_scored: int


def read_lambada(source: str = "hf") -> Iterator[Completion]:
    """Passages without their last word, which is the one ending: 5,153 in OpenAI's test set.

    Args:
        source: "hf" (EleutherAI/lambada_openai), or a file with a passage a row in `text`.
    Raises:
        ValueError: a passage of a single word, and what open_rows raises.
    """
    for row in open_rows(source, hub=LAMBADA_HUB, config="default", split="test"):
        context, space, word = field(row, "text", str).strip().rpartition(" ")
        if not space:
            raise ValueError(f"{row[0]} must hold a passage of two words or more, got {word!r}")
        yield Completion(context, (" " + word,), 0)


def read_hellaswag(source: str = "hf") -> Iterator[Completion]:
    """Descriptions and four endings: 10,042 in the validation set, whose labels are public.

    Args:
        source: "hf" (Rowan/hellaswag), or a file with its fields activity_label, ctx_a, ctx_b,
            endings and label, as the release's hellaswag_val.jsonl.
    Raises:
        ValueError: a row without a label (the test set), and what open_rows raises.
    """
    for row in open_rows(source, hub=HELLASWAG_HUB, split="validation"):
        activity, first, second = (
            field(row, name, str) for name in ("activity_label", "ctx_a", "ctx_b")
        )
        endings = tuple(" " + _clean(ending) for ending in field(row, "endings", list))
        label = str(field(row, "label", str, int))
        if not label.isdigit() or int(label) >= len(endings):
            raise ValueError(
                f"{row[0]} must have the index of one of {len(endings)} endings as label, got "
                f"{label!r}: take the validation set"
            )
        context = _clean(f"{activity}: {first} {second.capitalize()}")
        yield Completion(context, endings, int(label))


def _clean(text: str) -> str:
    """Without what WikiHow's pages put in brackets; a title ends a sentence."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def encode(tokenizer: AnyTokenizer, completion: Completion) -> list[Encoded]:
    """Each ending behind the context, encoded as one text; no end-of-text token before it.

    What follows the tokens of the context alone is scored, at least one token; spaces at the end of
    a context belong to what follows.
    """
    start = len(tokenizer.encode(completion.context.rstrip()))
    encoded = []
    for ending in completion.endings:
        ids = np.array(tokenizer.encode(completion.context + ending), dtype=np.int64)
        encoded.append(Encoded(ids, max(1, len(ids) - start)))
    return encoded
