"""Samples of masked language modelling, each a pure function of (seed, epoch, sample id).

Source: Devlin et al. 2019, section 3.1 and appendix A, and the released create_pretraining_data.py.
What differs: masks and pairs are drawn when a sample is read, anew in each epoch, and not stored
ten times over; "sentences" end at the tokens of ".", "!" and "?"; a random replacement is no
special token.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from data.stepped import IGNORED_LABEL
from data.token_store import TokenSplit
from data.wordpiece import SpecialIds

_MASKED, _RANDOM = 0.8, 0.1  # of the chosen tokens; the rest stays as it is
_MIN_WINDOW = 2  # a pair needs a token on either side
_TRIES = 10  # at finding another document, as in the released code


class MaskedOptions(NamedTuple):
    """What samples are made like; part of a run's identity.

    Attributes:
        seqlen: most tokens of a sample, special ones included.
        mask_fraction: share of a sample's tokens that is predicted, at least one token.
        max_masked: most predicted tokens of a sample; None is no bound.
        sentence_pairs: [CLS] A [SEP] B [SEP] with an NSP label; False is [CLS] A [SEP].
        short_fraction: share of samples that are cut to a random length, to see short ones.
    """

    seqlen: int
    mask_fraction: float
    max_masked: int | None
    sentence_pairs: bool
    short_fraction: float

    @property
    def room(self) -> int:
        """Tokens of text in the longest sample."""
        return self.seqlen - (3 if self.sentence_pairs else 2)


class Sample(NamedTuple):
    """One sequence without padding, arrays of shape (num_tokens,) int64.

    Attributes:
        input_ids: [CLS] ... [SEP], with masks.
        labels: the original id where it is to be predicted, -100 elsewhere.
        segment_ids: 0 up to the first [SEP], 1 after it.
        nsp_label: 0 where segment B follows A, 1 where it is from another document, -100 without
            pairs.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    segment_ids: np.ndarray
    nsp_label: int


class MaskedSamples:
    """The samples of a split: sample i begins with its i-th window.

    Documents are cut into windows of at most options.room tokens, which no window shares; what is
    left of a document is a shorter window, dropped if it is a single token.

    Args:
        split: documents that end with [SEP].
        special: ids that are never predicted, and never a random replacement.
        sentence_ends: ids after which a segment may begin.
        vocab_size: random replacements are below it.
        name: of the split; splits draw from separate random numbers.
    """

    def __init__(
        self,
        split: TokenSplit,
        options: MaskedOptions,
        *,
        special: SpecialIds,
        sentence_ends: tuple[int, ...],
        vocab_size: int,
        seed: int,
        name: str,
    ) -> None:
        self._split = split
        self._options = options
        self._special = special
        self._sentence_ends = np.array(sentence_ends)
        self._ordinary = np.setdiff1d(np.arange(vocab_size), np.array(special))
        self._seed = seed
        self._name = name
        offsets = split.document_offsets()
        self._starts = offsets[:-1]
        self._ends = offsets[1:] - 1  # without [SEP]
        full, left = np.divmod(self._ends - self._starts, options.room)
        windows = full + (left >= _MIN_WINDOW)
        # Windows [_first[d], _first[d + 1]) are those of document d.
        self._first = np.concatenate([np.zeros(1, np.int64), np.cumsum(windows)])

    def __len__(self) -> int:
        return int(self._first[-1])

    def sample(self, sample_id: int, epoch: int) -> Sample:
        """Sample `sample_id` in [0, len(self)) as it is in epoch `epoch`."""
        draw = _generator(self._seed, self._name, epoch, sample_id)
        document, start, end = self._window(sample_id)
        length = min(self._options.room, end - start)
        if draw.random() < self._options.short_fraction:
            length = int(draw.integers(min(_MIN_WINDOW, length), length + 1))
        first = self._split.read(start, length)
        second = None
        nsp_label = IGNORED_LABEL
        if self._options.sentence_pairs:
            cut = self._sentence_start(first, draw)
            first, second, nsp_label = first[:cut], first[cut:], 0
            other = self._other_window(document, draw) if draw.random() < 0.5 else None
            if other is not None:
                second, nsp_label = self._random_segment(other, len(second), draw), 1
        input_ids, segment_ids = self._joined(first, second)
        labels = self._mask(input_ids, draw)
        return Sample(input_ids, labels, segment_ids, nsp_label)

    def _window(self, index: int) -> tuple[int, int, int]:
        """(document, first token, end of the document) of a window."""
        document = int(np.searchsorted(self._first, index, side="right")) - 1
        start = self._starts[document] + (index - self._first[document]) * self._options.room
        return document, int(start), int(self._ends[document])

    def _sentence_start(self, tokens: np.ndarray, draw: np.random.Generator) -> int:
        """A random place in [1, len(tokens)) after the end of a sentence; any if there is none."""
        places = np.flatnonzero(np.isin(tokens[:-1], self._sentence_ends)) + 1
        if not len(places):
            return int(draw.integers(1, len(tokens)))
        return int(places[draw.integers(len(places))])

    def _other_window(self, document: int, draw: np.random.Generator) -> int | None:
        """A random window of another document, None if there is hardly another document."""
        for _ in range(_TRIES):
            index = int(draw.integers(len(self)))
            if not self._first[document] <= index < self._first[document + 1]:
                return index
        return None

    def _random_segment(self, index: int, length: int, draw: np.random.Generator) -> np.ndarray:
        """Up to `length` tokens from a sentence start of a window on: as long as the true next
        segment would be, unless the document ends before."""
        _, start, end = self._window(index)
        tokens = self._split.read(start, min(self._options.room, end - start))
        start += self._sentence_start(tokens, draw)
        return self._split.read(start, min(length, end - start))

    def _joined(
        self, first: np.ndarray, second: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens with [CLS] and [SEP], and their segments."""
        sep = np.array([self._special.sep])
        pieces = [np.array([self._special.cls]), first, sep]
        if second is not None:
            pieces += [second, sep]
        input_ids = np.concatenate(pieces)
        segment_ids = np.zeros(len(input_ids), dtype=np.int64)
        segment_ids[len(first) + 2 :] = 1
        return input_ids, segment_ids

    def _mask(self, input_ids: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        """Replace chosen tokens in place; returns the labels."""
        options = self._options
        labels = np.full(len(input_ids), IGNORED_LABEL, dtype=np.int64)
        candidates = np.flatnonzero(~np.isin(input_ids, self._special))
        count = max(1, round(options.mask_fraction * len(input_ids)))
        if options.max_masked is not None:
            count = min(count, options.max_masked)
        chosen = draw.permutation(candidates)[:count]  # fewer where most tokens are special
        labels[chosen] = input_ids[chosen]
        kind = draw.random(len(chosen))
        random_ids = self._ordinary[draw.integers(len(self._ordinary), size=len(chosen))]
        is_random = (_MASKED <= kind) & (kind < _MASKED + _RANDOM)
        input_ids[chosen[kind < _MASKED]] = self._special.mask
        input_ids[chosen[is_random]] = random_ids[is_random]
        return labels


def _generator(seed: int, name: str, epoch: int, sample_id: int) -> np.random.Generator:
    """Random numbers of one sample: of no global state, of no other sample."""
    text = f"masked sample, {name}, seed {seed}, epoch {epoch}, id {sample_id}"
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
