"""Long documents as batches: token ids of whole documents, packed, with one label or several."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Unpack

import numpy as np
import torch

from data.classification import Batch, ClassificationData, Examples, LoadingOptions
from data.document_sources import DocumentSource
from data.document_tokenizer import DocumentTokenizer, load_document_tokenizer
from data.order import permute
from data.sequence_store import SequenceStore, write_sequences
from data.stepped import Comparison
from data.token_store import token_dtype


class LongDocumentData(ClassificationData):
    """ECtHR, MIMIC-III and stand-ins; see data.document_sources.

    A batch holds whole documents one after the other: `input_ids` (total,) int64, each document
    [CLS] text [SEP], or <s> text </s>, cut to seqlen tokens; `cu_seqlens` (batch + 1,) int32;
    `max_seqlen`, seqlen whatever the batch holds; `labels` (batch,) int64, or (batch, num_classes)
    of 0 and 1 where a document may have several.

    The store keeps whole documents: every seqlen reads the same one. Held-out documents come in a
    fixed mixed order, so that a limit takes them from the whole split.

    Attributes:
        stand_in: what stands in for the paper's data, to be shown beside every result; "" where
            these are used.
        multi_label: whether a document may have several labels.

    Args:
        task, source, num_classes, text_field, label_field, label_pattern, piece_tokens: see
            DocumentSource.
        source_config: of LexGLUE on the hub: ecthr_b (alleged violations) or ecthr_a (found ones).
        tokenizer: of the encoder: "bert-base-uncased", a folder with tokenizer.json, a hub id.
        seqlen: most tokens of a document; what is behind them is not seen.
        root: folder under which prepared stores are cached.
        val_batch_size, loading: see ClassificationData.
    Raises:
        ValueError: sizes that do not fit together, or an unknown task.
        FileNotFoundError, ConnectionError: no such source or tokenizer.
    """

    def __init__(
        self,
        *,
        task: str,
        source: str | None = None,
        source_config: str = "ecthr_b",
        num_classes: int,
        tokenizer: str,
        text_field: str = "text",
        label_field: str | None = None,
        label_pattern: str | None = None,
        piece_tokens: int | None = None,
        seqlen: int,
        root: str = "outputs/data",
        val_batch_size: int = 4,
        **loading: Unpack[LoadingOptions],
    ) -> None:
        super().__init__(seqlen=seqlen, val_batch_size=val_batch_size, **loading)
        if seqlen < 3:
            raise ValueError(f"seqlen must be at least 3, [CLS] text [SEP], got {seqlen}")
        self._source = DocumentSource(
            task,
            source,
            config=source_config,
            num_classes=num_classes,
            text_field=text_field,
            label_field=label_field,
            label_pattern=label_pattern,
            piece_tokens=piece_tokens,
        )
        self._tokenizer: DocumentTokenizer = load_document_tokenizer(tokenizer)
        self.vocab_size = self._tokenizer.vocab_size
        self.num_classes = num_classes
        self.multi_label = self._source.multi_label
        self.stand_in = self._source.stand_in
        self._identity = {**self._source.identity, "tokenizer": self._tokenizer.sha256}
        key = hashlib.sha256(json.dumps(self._identity, sort_keys=True).encode()).hexdigest()
        self._folder = Path(root) / f"documents-{task}-{key[:12]}"

    @property
    def store(self) -> SequenceStore:
        """The prepared data; its manifest's facts name the labels."""
        return SequenceStore(self._folder)

    def prepare_data(self) -> None:
        """Make the store if it is missing. Called on one process of each machine."""
        splits = {
            split: partial(self._source.examples, split, self._tokenizer)
            for split in ("train", "val", "test")
        }
        write_sequences(
            self._folder,
            self._identity,
            splits,
            dtype=token_dtype(self.vocab_size),
            num_labels=self.num_classes if self.multi_label else None,
            facts=lambda: {"classes": self._source.classes()},
        )

    def open_examples(self) -> Examples:
        if self.stand_in:
            print(f"stand-in data: {self.stand_in}")
        return _DocumentExamples(self.store, self._tokenizer.cls, self._tokenizer.sep, self.seqlen)

    def comparison(self, split: str) -> Comparison | None:
        """The best constant prediction, and that a stand-in is one."""
        places = np.arange(self.num_held_out(split))
        held_out = self._targets(split)[_mixed(places, self.examples.num_examples(split))]
        hits, predicted, actual = constant_prediction(
            self._targets("train"), held_out, most=self.num_classes if self.multi_label else 1
        )
        micro = 2 * hits / max(1, predicted + actual)
        what = "the commonest labels" if self.multi_label else "the commonest label"
        line = f"{what} for every document: micro-F1 {micro:.2%}"
        if self.stand_in:
            line += f"; stand-in data, not comparable with published results: {self.stand_in}"
        return Comparison(line, {"constant_micro_f1": micro})

    def _targets(self, split: str) -> np.ndarray:
        """(num_examples, num_classes) of 0 and 1."""
        labels = self.store.labels(split)
        return labels if self.multi_label else np.eye(self.num_classes, dtype=np.uint8)[labels]


def constant_prediction(
    train: np.ndarray, held_out: np.ndarray, *, most: int
) -> tuple[int, int, int]:
    """Hits, predicted and actual labels on held-out documents of the set of labels that, given to
    every document, has the best micro-F1 in training: the commonest ones, so many as are best.

    Args:
        train, held_out: (num_examples, num_classes) of 0 and 1.
        most: labels that the set may have.
    """
    counts = train.sum(0, dtype=np.int64)
    order = np.argsort(-counts, kind="stable")[:most]
    sizes = np.arange(1, len(order) + 1)
    scores = 2 * counts[order].cumsum() / (sizes * len(train) + counts.sum())
    chosen = order[: int(scores.argmax()) + 1]
    hits = held_out[:, chosen].sum(dtype=np.int64)
    return int(hits), len(chosen) * len(held_out), int(held_out.sum(dtype=np.int64))


def _mixed(places: np.ndarray, num_documents: int) -> np.ndarray:
    """Which held-out documents are at `places`, whatever the order of the source."""
    return permute(places, seed=0, epoch=0, num_samples=num_documents)


class _DocumentExamples:
    def __init__(self, store: SequenceStore, cls: int, sep: int, seqlen: int) -> None:
        self.fingerprint = store.fingerprint
        self._store = store
        self._cls, self._sep, self._seqlen = cls, sep, seqlen

    def num_examples(self, split: str) -> int:
        return len(self._store.labels(split))

    def batch(self, split: str, ids: np.ndarray, *, positions: np.ndarray | None = None) -> Batch:
        if split != "train":
            ids = _mixed(ids, self.num_examples(split))
        documents = []
        for index in ids.tolist():
            text = self._store.sequence(split, index)[: self._seqlen - 2]
            documents.append(np.concatenate([[self._cls], text.astype(np.int64), [self._sep]]))
        ends = np.cumsum([0] + [len(document) for document in documents])
        return {
            "input_ids": torch.from_numpy(np.concatenate(documents)),
            "cu_seqlens": torch.from_numpy(ends.astype(np.int32)),
            "max_seqlen": self._seqlen,
            "labels": torch.from_numpy(self._store.labels(split)[ids].astype(np.int64)),
        }
