"""Causal language modelling on whole documents: packed into rows, none attends to another.

A document gives its tokens but the last as inputs and those but the first as labels. Documents of
more than seqlen inputs are cut into full rows and a rest; rests, the largest first, go to the
row with the least room that holds them (best-fit decreasing; Ding et al. 2024, "Fewer truncations
improve language modeling"). What is left of a row is padding without labels.
"""

from __future__ import annotations

import bisect
import logging
from functools import partial
from typing import NamedTuple, Unpack

import numpy as np
import torch
from torch.utils.data import DataLoader

from data.causal_lm import CausalLMData, CorpusOptions
from data.stepped import IGNORED_LABEL, Batch, MakeStep
from data.token_store import TokenSplit, TokenStore

logger = logging.getLogger(__name__)


class PackedRows(NamedTuple):
    """Which pieces of a split's documents each row holds.

    Attributes:
        first: (num_rows + 1,) int64: row r holds pieces [first[r], first[r + 1]).
        starts: (num_pieces,) int64, the place of a piece's first input in the split.
        lengths: (num_pieces,) int64, inputs of a piece.
    """

    first: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.first) - 1


def pack_documents(offsets: np.ndarray, seqlen: int, max_documents: int) -> PackedRows:
    """Pack all documents into rows of `seqlen` inputs.

    Args:
        offsets: (num_documents + 1,) int64, where each document starts in its split.
        seqlen: inputs of a row.
        max_documents: most pieces of a row.
    """
    inputs = np.maximum(np.diff(offsets) - 1, 0)  # a document of one token has none
    full, rest = np.divmod(inputs, seqlen)
    begin = np.repeat(np.cumsum(full) - full, full)
    full_starts = np.repeat(offsets[:-1], full) + (np.arange(len(begin)) - begin) * seqlen
    pieces = np.flatnonzero(rest)
    pieces = pieces[np.argsort(-rest[pieces], kind="stable")]
    rows = np.empty(len(pieces), np.int64)
    room: list[int] = []
    held: list[int] = []
    sizes: list[int] = []  # sorted: the rooms that open rows have
    open_rows: list[list[int]] = [[] for _ in range(seqlen)]  # by their room
    for i, length in enumerate(rest[pieces].tolist()):
        place = bisect.bisect_left(sizes, length)
        if place == len(sizes):
            row = len(room)
            room.append(seqlen)
            held.append(0)
        else:
            row = open_rows[sizes[place]].pop()
            if not open_rows[sizes[place]]:
                del sizes[place]
        rows[i] = row
        room[row] -= length
        held[row] += 1
        if room[row] and held[row] < max_documents:
            if not open_rows[room[row]]:
                bisect.insort(sizes, room[row])
            open_rows[room[row]].append(row)
    order = np.argsort(rows, kind="stable")
    counts = np.concatenate([np.ones(len(full_starts), np.int64), np.array(held, np.int64)])
    return PackedRows(
        np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]),
        np.concatenate([full_starts, (offsets[:-1] + full * seqlen)[pieces][order]]),
        np.concatenate([np.full(len(full_starts), seqlen), rest[pieces][order]]),
    )


class PackedDocumentsData(CausalLMData):
    """Training steps and held-out rows of one corpus, whose documents do not see each other.

    As CausalLMData, but a sample is a row of packed documents, and a batch has also
    `cu_seqlens`, (rows, max_documents + 2) int32: where the documents of each row start, then its
    padding, and seqlen from there on. Its shape never changes, so that nothing is compiled anew.
    Held-out documents are packed in the same way: perplexities do not compare with CausalLMData's,
    whose tokens see more.

    Args:
        max_documents: most documents, or pieces of them, in a row.
        val_tokens_limit: use only the held-out rows of about so many tokens; None uses all.
        corpus: see CausalLMData.
    Raises:
        ValueError: as CausalLMData.
    """

    def __init__(
        self,
        *,
        max_documents: int = 64,
        val_tokens_limit: int | None = None,
        **corpus: Unpack[CorpusOptions],
    ) -> None:
        super().__init__(val_tokens_limit=val_tokens_limit, **corpus)
        if max_documents < 1:
            raise ValueError(f"max_documents must be at least 1, got {max_documents}")
        self.max_documents = max_documents
        self._rows: dict[str, PackedRows] = {}

    @property
    def num_samples(self) -> int:
        """Rows of one epoch."""
        return self._rows["train"].num_rows

    @property
    def fingerprint(self) -> str:
        return f"{super().fingerprint}-documents{self.max_documents}"

    def setup(self, stage: str | None = None) -> None:
        """Open the store, pack its documents, and say what that wastes."""
        is_packed = bool(self._rows)
        super().setup(stage)
        if not self.num_samples:
            raise ValueError("the training split must hold a document of at least 2 tokens")
        if not is_packed:
            logger.info("%s", self.report())

    def _check_samples(self) -> None:
        for name in ("train", "val"):
            if name not in self._rows:
                offsets = getattr(self.store, name).document_offsets()
                self._rows[name] = pack_documents(offsets, self.seqlen, self.max_documents)

    def report(self) -> str:
        """One line: how many rows, and how many tokens are padding or in cut documents."""
        rows, split = self._rows["train"], self.store.train
        padding = rows.num_rows * self.seqlen - int(rows.lengths.sum())
        cut = int((np.diff(split.document_offsets()) - 1 > self.seqlen).sum())
        return (
            f"packed {split.num_documents:,} documents into {rows.num_rows:,} rows of "
            f"{self.seqlen} tokens: {padding / (rows.num_rows * self.seqlen):.2%} of the tokens "
            f"are padding, {cut:,} documents are longer than a row and cut, at most "
            f"{int(np.diff(rows.first).max())} in a row"
        )

    def _layout(self, name: str, num_rows: int) -> tuple[PackedRows, int, int]:
        rows = self._rows[name]
        return rows._replace(first=rows.first[: num_rows + 1]), self.seqlen, self.max_documents

    def train_batch(self) -> MakeStep:
        return partial(packed_batch, self.store, "train", *self._layout("train", self.num_samples))

    def val_dataloader(self) -> DataLoader | list[DataLoader]:
        """Each held-out row once over all processes; empty if nothing is held out."""
        num_rows = self._rows["val"].num_rows
        if self._val_tokens_limit is not None:
            num_rows = min(num_rows, -(-self._val_tokens_limit // self.seqlen))
        make = partial(packed_batch, self.store, "val", *self._layout("val", num_rows))
        return self.held_out_loader(make, num_rows, self._val_batch_size)


def packed_batch(
    store: TokenStore,
    split: str,
    rows: PackedRows,
    seqlen: int,
    max_documents: int,
    ids: np.ndarray,
    positions: np.ndarray | None = None,
) -> Batch:
    """Rows `ids` of a split; one that is not there is all padding."""
    tokens: TokenSplit = getattr(store, split)
    inputs = np.full((len(ids), seqlen), store.eot, dtype=np.int64)
    labels = np.full((len(ids), seqlen), IGNORED_LABEL, dtype=np.int64)
    cu_seqlens = np.full((len(ids), max_documents + 2), seqlen, dtype=np.int32)
    cu_seqlens[:, 0] = 0
    for row, i in enumerate(ids.tolist()):
        if i >= rows.num_rows:
            continue
        begin = 0
        for place, piece in enumerate(range(rows.first[i], rows.first[i + 1])):
            end = begin + int(rows.lengths[piece])
            text = tokens.read(int(rows.starts[piece]), end - begin + 1)
            inputs[row, begin:end], labels[row, begin:end] = text[:-1], text[1:]
            cu_seqlens[row, place + 1] = begin = end
    arrays = {"input_ids": inputs, "labels": labels, "cu_seqlens": cu_seqlens}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
