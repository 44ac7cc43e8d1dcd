"""An unfinished token store: parts committed one by one, then joined into the two splits.

A part is a training shard and the held-out documents met meanwhile. It counts once progress.json
lists it; a killed run starts again after the last part that is listed and intact.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np

from data.parallel_encode import EncodedBatch
from data.token_store import (
    ShardWriter,
    check_file_entry,
    sha256_file,
    token_dtype,
    write_atomically,
)

SMALL_VAL_FRACTION = 0.05  # of the tokens, where whole documents cannot be held out
_PROGRESS_NAME = "progress.json"
_OUR_FILES = re.compile(r"(progress|manifest)\.json(\.tmp)?|(train|val)[-.][0-9a-z.]*bin(\.tmp)?")

logger = logging.getLogger(__name__)


class StoreParts:
    """The committed parts of an unfinished store, and the one being written."""

    def __init__(self, folder: Path, key: str, vocab_size: int) -> None:
        self._folder = folder
        self._key = key
        self._vocab_size = vocab_size
        self._writers: dict[str, ShardWriter] = {}
        self._open_documents = 0
        self._split = "train"
        self.committed: list[dict[str, Any]] = self._recover()

    @property
    def num_documents(self) -> int:
        return sum(part["num_documents"] for part in self.committed) + self._open_documents

    def num_tokens(self) -> int:
        done = [
            part[s]["num_tokens"] for part in self.committed for s in ("train", "val") if part[s]
        ]
        return sum(done) + sum(writer.num_tokens for writer in self._writers.values())

    def shards(self, split: str) -> list[dict[str, Any]]:
        return [part[split] for part in self.committed if part[split]]

    def add(self, batch: EncodedBatch, threshold: int, shard_tokens: int) -> None:
        """Write a batch; documents that drew less than `threshold` are held out.

        Commits where a training shard reaches `shard_tokens`.
        """
        start = 0
        for i, end in enumerate(batch.ends.tolist()):
            if batch.is_first[i]:
                self._split = "val" if int(batch.draws[i]) < threshold else "train"
            if self._split not in self._writers:
                stem = self._stem(self._split)
                self._writers[self._split] = ShardWriter(self._folder, stem, self._vocab_size)
            writer = self._writers[self._split]
            writer.append(batch.ids[start:end])
            start = end
            if batch.is_last[i]:
                writer.end_document()
                self._open_documents += 1
                if self._split == "train" and writer.num_tokens >= shard_tokens:
                    self.commit()

    def commit(self) -> None:
        """Make everything so far durable, then list it."""
        if not self._open_documents:
            return
        part: dict[str, Any] = {"num_documents": self._open_documents, "train": None, "val": None}
        for split, writer in list(self._writers.items()):
            part[split] = {"stem": self._stem(split), **writer.commit()}
            del self._writers[split]
        self.committed.append(part)
        self._open_documents = 0
        self._write_progress(self.committed)

    def abandon(self) -> None:
        """Drop what is not committed."""
        for writer in self._writers.values():
            writer.abandon()
        self._writers = {}

    def remove_leftovers(self, keep: set[str]) -> None:
        """Delete what only an unfinished store needs."""
        for path in self._folder.iterdir():
            if path.name not in keep and _OUR_FILES.fullmatch(path.name):
                path.unlink()

    def _stem(self, split: str) -> str:
        return f"{split}-{len(self.committed):05d}"

    def _write_progress(self, parts: list[dict[str, Any]]) -> None:
        progress = {"key": self._key, "parts": parts}
        write_atomically(self._folder / _PROGRESS_NAME, json.dumps(progress).encode())

    def _recover(self) -> list[dict[str, Any]]:
        """The parts that an earlier run committed and whose files are still as it wrote them."""
        self._folder.mkdir(exist_ok=True)
        foreign = [p.name for p in self._folder.iterdir() if not _OUR_FILES.fullmatch(p.name)]
        if foreign:
            raise ValueError(
                f"{self._folder} must be new, empty or an unfinished store, got files such as "
                f"{min(foreign)!r}: choose another folder"
            )
        path = self._folder / _PROGRESS_NAME
        progress: dict[str, Any] = {"key": self._key, "parts": []}
        if path.exists():
            try:
                progress = json.loads(path.read_bytes())
                _check_progress(progress)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                logger.warning("%s is damaged (%r): all is done again", path, error)
                progress = {"key": self._key, "parts": []}
        if progress["key"] != self._key and progress["parts"]:
            raise ValueError(
                f"{self._folder} must be new or hold the same data, got an unfinished store "
                "of other settings or of a source that changed since: choose another or delete it"
            )
        intact: list[dict[str, Any]] = []
        for part in progress["parts"]:
            if not all(self._is_intact(part[split]) for split in ("train", "val") if part[split]):
                logger.warning("%s: part %d is damaged and redone", self._folder, len(intact))
                break
            intact.append(part)
        self._write_progress(intact)
        for temporary in self._folder.glob("*.tmp"):
            temporary.unlink()
        if intact:
            logger.info("%s: continuing after %d finished parts", self._folder, len(intact))
        return intact

    def _is_intact(self, shard: dict[str, Any]) -> bool:
        paths = {self._folder / name: entry["sha256"] for name, entry in shard["files"].items()}
        return all(path.is_file() and sha256_file(path) == sha for path, sha in paths.items())


def _check_progress(progress: dict[str, Any]) -> None:
    for part in progress["parts"]:
        shards = [part[split] for split in ("train", "val") if part[split] is not None]
        counts = [part["num_documents"]]
        for shard in shards:
            counts += [shard["num_tokens"], shard["num_documents"]]
            for name, entry in shard["files"].items():
                check_file_entry(name, entry)
            # What the entries say is what is joined later.
            if set(shard["files"]) != {f"{shard['stem']}.bin", f"{shard['stem']}.offsets.bin"}:
                raise ValueError(f"files of {shard['stem']}")
        if any(type(count) is not int for count in counts) or not isinstance(progress["key"], str):
            raise TypeError("counts must be integers and the key text")


def finish_splits(
    folder: Path, parts: StoreParts, fraction: float, vocab_size: int
) -> dict[str, list[dict[str, Any]]]:
    """Join the held-out pieces into val.bin; take the end of the last shard if there are none."""
    train, pieces = parts.shards("train"), parts.shards("val")
    if not train:
        raise ValueError(
            f"the training split must hold a document, but val_fraction={fraction} held out all "
            f"{parts.num_documents}: lower it"
        )
    if not pieces and fraction > 0:
        train[-1], tail = _hold_out_tail(folder, train[-1], fraction, vocab_size)
        return {"train": train, "val": [tail]}
    if not pieces:
        return {"train": train, "val": []}
    writer = ShardWriter(folder, "val", vocab_size)
    try:
        for piece in pieces:
            ids, ends = _read_shard(folder, piece, vocab_size)
            _copy_documents(writer, ids, ends)
        return {"train": train, "val": [{"stem": "val", **writer.commit()}]}
    finally:
        writer.abandon()


def _hold_out_tail(
    folder: Path, shard: dict[str, Any], fraction: float, vocab_size: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Cut the last tokens off a training shard, inside a document if need be."""
    ids, ends = _read_shard(folder, shard, vocab_size)
    if len(ids) < 2:
        raise ValueError(f"the source must hold at least 2 tokens to hold one out, got {len(ids)}")
    cut = len(ids) - max(1, round(len(ids) * max(fraction, SMALL_VAL_FRACTION)))
    cut = max(cut, 1)
    stems = {"val": (ids[cut:], ends[ends > cut] - cut)}
    stems[shard["stem"]] = (ids[:cut], np.append(ends[ends < cut], cut))
    entries = []
    for stem, (kept, kept_ends) in stems.items():
        writer = ShardWriter(folder, stem, vocab_size)
        try:
            _copy_documents(writer, kept, kept_ends)
            entries.append({"stem": stem, **writer.commit()})
        finally:
            writer.abandon()
    return entries[1], entries[0]


def _read_shard(folder: Path, shard: dict[str, Any], vocab_size: int) -> tuple[Any, np.ndarray]:
    """Mapped ids, and where each document ends."""
    ids = np.memmap(folder / f"{shard['stem']}.bin", dtype=token_dtype(vocab_size), mode="r")
    return ids, np.fromfile(folder / f"{shard['stem']}.offsets.bin", dtype="<i8")[1:]


def _copy_documents(writer: ShardWriter, ids: np.ndarray, ends: np.ndarray) -> None:
    start = 0
    for end in ends.tolist():
        writer.append(ids[start:end])
        writer.end_document()
        start = end


def count_tokens(folder: Path, shards: list[dict[str, Any]], vocab_size: int) -> np.ndarray:
    counts = np.zeros(vocab_size, dtype="<i8")
    for shard in shards:
        ids, _ = _read_shard(folder, shard, vocab_size)
        for start in range(0, len(ids), 1 << 24):
            counts += np.bincount(ids[start : start + (1 << 24)], minlength=vocab_size)
    return counts
