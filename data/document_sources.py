"""Labelled long documents: ECtHR, MIMIC-III, and stand-ins for machines that have neither.

    ecthr      "hf": LexGLUE's ECtHR (coastalcph/lex_glue, configuration ecthr_b or ecthr_a), which
               articles of the Convention a court case is about; or its rows in local files
    mimic      local files only: MIMIC-III's discharge summaries with their diagnosis and procedure
               codes are given to trained persons under a contract, and no hub may carry them
    stand_in   one .jsonl(.gz, .xz, .zst) or .parquet file of documents with one label each

Each also takes "random": a few documents of random words and labels, to see that a run works.

Local files of the first two are a folder with train, val (or dev, validation) and test as .jsonl or
.parquet, rows with `text`, a string or a list of paragraphs, and `labels`, a list of names or
numbers. A result on a stand-in says so wherever it is shown: it is not comparable with published
ones.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.document_tokenizer import DocumentTokenizer
from data.rows import Row, field, open_rows
from data.sequence_store import Example
from data.text_files import read_rows, text_format

ECTHR_HUB = "coastalcph/lex_glue"
TASKS = ("ecthr", "mimic", "stand_in")
_FILES = {"train": ("train",), "val": ("val", "dev", "validation"), "test": ("test",)}
_HELD_OUT = 0.1  # share of a label's documents that validation and test of a stand-in get each
_BATCH = 64  # documents that are tokenized together


class Document(NamedTuple):
    text: str
    labels: tuple[str, ...]


class DocumentSource:
    """The documents of a task; nothing is read before they are asked for.

    Attributes:
        stand_in: what stands in for the paper's data; "" where these are used.
        multi_label: whether a document may have any number of labels, or has one.
        identity: plain values that determine the content.

    Args:
        task: "ecthr", "mimic" or "stand_in".
        source: see the module; None is "hf" for ecthr.
        config: of LexGLUE on the hub.
        num_classes: the labels of so many that are the commonest in training are kept (MIMIC-III's
            top 50). Other labels are left out of documents with several, and with them documents
            that have one.
        text_field, label_field: of the rows; None is "labels", and "label" for a stand-in.
        label_pattern: of a stand-in: the label is this pattern's first group in the field, and rows
            where it is not found are left out.
        piece_tokens: of a stand-in: documents are cut into pieces of so many tokens, each with the
            document's label, and what is left over is dropped; None keeps them whole. Pieces of one
            document are never in two splits.
    Raises:
        ValueError: an unknown task, or options that it does not take.
        FileNotFoundError: no such files.
    """

    def __init__(
        self,
        task: str,
        source: str | None,
        *,
        config: str,
        num_classes: int,
        text_field: str = "text",
        label_field: str | None = None,
        label_pattern: str | None = None,
        piece_tokens: int | None = None,
    ) -> None:
        if task not in TASKS:
            raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
        self.multi_label = task != "stand_in"
        if self.multi_label and (label_pattern is not None or piece_tokens is not None):
            raise ValueError(
                f"label_pattern and piece_tokens are of stand_in, {task} takes neither"
            )
        if not 1 <= num_classes <= 256:
            raise ValueError(f"num_classes must be from 1 to 256, got {num_classes}")
        if piece_tokens is not None and piece_tokens < 1:
            raise ValueError(f"piece_tokens must be at least 1, got {piece_tokens}")
        self._num_classes, self._piece_tokens = num_classes, piece_tokens
        self._text_field = text_field
        self._label_field = label_field or ("labels" if self.multi_label else "label")
        self._pattern = None if label_pattern is None else re.compile(label_pattern)
        if self._pattern is not None and self._pattern.groups < 1:
            raise ValueError(
                f"label_pattern must have a group, as in '^(.+?)/', got {label_pattern}"
            )
        self._config = config
        self._paths: dict[str, Path] = {}
        if source is None and task == "ecthr":
            source = "hf"
        self._random = source == "random"
        if self._random:
            origin: list[Any] = ["random"]
        elif source == "hf" and task == "ecthr":
            origin = [f"hf:{ECTHR_HUB}", config]
        else:
            self._paths = _find_files(task, source)
            # Names and sizes: enough to tell one release from another.
            origin = [[p.name, p.stat().st_size] for p in self._paths.values()]
        self.stand_in = ""
        if self._random:
            self.stand_in = "random words and labels: nothing can be learned"
        elif task == "stand_in":
            name = next(iter(self._paths.values())).name
            self.stand_in = f"{name}, labels from {self._label_field!r}, instead of ECtHR and MIMIC"
        self.identity = {
            "task": task,
            "origin": origin,
            "num_classes": num_classes,
            "fields": [text_field, self._label_field, label_pattern],
            "piece_tokens": piece_tokens,
        }
        self._classes: list[str] = []
        self._splits: dict[str, str] = {}  # of a stand-in: digest of a document -> its split

    def classes(self) -> list[str]:
        """Names of the labels in the order of their numbers.

        Raises:
            ValueError: the training documents have fewer than num_classes.
        """
        if not self._classes:
            self._classes = self._count_labels()
        return self._classes

    def examples(self, split: str, tokenizer: DocumentTokenizer) -> Iterator[Example]:
        """((ids,), label), or (num_classes,) of 0 and 1 for several labels; no special tokens."""
        number = {name: i for i, name in enumerate(self.classes())}
        documents = self._documents(split)
        while batch := list(itertools.islice(documents, _BATCH)):
            encoded = tokenizer.encode_batch([document.text for document in batch])
            for document, ids in zip(batch, encoded, strict=True):
                labels = [number[name] for name in document.labels if name in number]
                if self.multi_label:
                    target = np.zeros(len(number), np.uint8)
                    target[labels] = 1
                    yield (np.array(ids, np.int64),), target
                elif labels:
                    for piece in self._pieces(np.array(ids, np.int64)):
                        yield (piece,), labels[0]

    def _pieces(self, ids: np.ndarray) -> list[np.ndarray]:
        size = self._piece_tokens
        if size is None:
            return [ids]
        return [ids[i : i + size] for i in range(0, len(ids) - size + 1, size)]

    def _count_labels(self) -> list[str]:
        """The commonest labels of the training documents; of a stand-in, of all its documents,
        which are split on the way."""
        if self.multi_label:
            counts = collections.Counter(
                name for document in self._documents("train") for name in document.labels
            )
        else:
            digests = collections.defaultdict(set)
            for document in self._read("all"):
                digests[document.labels[0]].add(_digest(document.text))
            counts = collections.Counter({name: len(found) for name, found in digests.items()})
        if len(counts) < self._num_classes:
            raise ValueError(
                f"the training documents must have num_classes={self._num_classes} labels, got "
                f"{len(counts)}: set data.num_classes"
            )
        kept = sorted(counts, key=lambda name: (-counts[name], name))[: self._num_classes]
        if not self.multi_label:
            for name in kept:
                self._splits |= _split(sorted(digests[name]))
        return sorted(
            kept, key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name)
        )

    def _documents(self, split: str) -> Iterator[Document]:
        if self.multi_label:
            yield from self._read(split)
            return
        self.classes()
        for document in self._read("all"):
            if self._splits.get(_digest(document.text)) == split:
                yield document

    def _read(self, split: str) -> Iterator[Document]:
        if self._random:
            yield from _random_documents(split, self._num_classes, self.multi_label)
            return
        if self._paths:
            rows = read_rows(self._paths[split])
        else:
            name = {"val": "validation"}.get(split, split)
            rows = open_rows("hf", hub=ECTHR_HUB, config=self._config, split=name)
        for row in rows:
            text = field(row, self._text_field, str, list)
            text = text if isinstance(text, str) else "\n".join(map(str, text))
            labels = self._labels(row)
            if labels or self.multi_label:
                yield Document(text, labels)

    def _labels(self, row: Row) -> tuple[str, ...]:
        if self.multi_label:
            return tuple(dict.fromkeys(str(name) for name in field(row, self._label_field, list)))
        value = str(field(row, self._label_field, str, int))
        if self._pattern is None:
            return (value,)
        found = self._pattern.search(value)
        return (found[1],) if found and found[1] else ()


def _random_documents(split: str, num_classes: int, multi_label: bool) -> Iterator[Document]:
    """Four of each label at least, of 50 to 500 words."""
    draw = random.Random(f"documents {split}")
    words = "the a of and to in is was for on with as by at from it that he she they".split()
    for index in range(4 * num_classes):
        labels = {index % num_classes}
        if multi_label:
            labels |= {draw.randrange(num_classes) for _ in range(draw.randrange(3))}
        text = " ".join(draw.choices(words, k=draw.randrange(50, 500)))
        yield Document(text, tuple(map(str, sorted(labels))))


def _find_files(task: str, source: str | None) -> dict[str, Path]:
    if source is None and task == "mimic":
        raise FileNotFoundError(
            "mimic needs local files: MIMIC-III is given to trained persons under a contract "
            "(physionet.org), and may not be passed on. Give data.source=FOLDER with train, dev "
            "and test as .jsonl, rows with text and labels"
        )
    path = Path(source or "").expanduser()
    if task == "stand_in":
        if (
            source is None
            or not path.is_file()
            or text_format(path)[0] not in (".jsonl", ".parquet")
        ):
            raise FileNotFoundError(
                f"the source of stand_in must be a .jsonl or .parquet file, got {source!r}"
            )
        return {"all": path}
    paths = {}
    for split, names in _FILES.items():
        found = sorted(
            file
            for file in (path.iterdir() if path.is_dir() else ())
            if file.name.split(".")[0] in names and text_format(file)[0] in (".jsonl", ".parquet")
        )
        if len(found) != 1:
            raise FileNotFoundError(
                f"the source of {task} must be a folder with one {' or '.join(names)}.jsonl or "
                f".parquet, got {source!r} with {len(found)}"
            )
        paths[split] = found[0]
    return paths


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", errors="replace")).hexdigest()


def _split(digests: list[str]) -> dict[str, str]:
    """Splits of one label's documents: a tenth each to val and test, one at least if it has three.

    digests: sorted, which is a shuffle that no other document changes.
    """
    held_out = max(round(_HELD_OUT * len(digests)), 1) if len(digests) > 2 else 0
    names = ["val"] * held_out + ["test"] * held_out
    names += ["train"] * (len(digests) - len(names))
    return dict(zip(digests, names, strict=True))
