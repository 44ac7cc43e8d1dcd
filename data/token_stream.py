"""The tokens of a source without end, a few shards of them on disk at a time.

The training documents of a source, which begins anew whenever it ends, are one endless row of
tokens. Shard i is tokens i * n to i * n + n of it, one more than n: the last input needs a label.
What a shard holds so depends on the source, the tokenizer, the split and n alone, and one that was
deleted can be made again. While training reads, a process of its own (data.shard_maker) makes the
next ones and deletes those before. A folder holds

    shard-00000007.bin   a finished shard, as data.token_store writes one
    marks.json           where in the source each shard begins, the SHA-256 of those on disk
    stopped.txt          why the making process gave up
    manifest.json, ...   a token store whose training split is empty: held-out documents that come
                         before the end of shard 0, and how often each token comes in shard 0
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.parallel_encode import encode_in_order
from data.prepare import clear_disk_errors, exclusive, num_cores
from data.sources import Source
from data.token_store import (
    FORMAT_VERSION,
    ShardWriter,
    TokenStore,
    is_finished,
    sha256_file,
    token_dtype,
    write_atomically,
    write_manifest,
)
from data.tokenizer import load_tokenizer

NUM_SHARDS = 3  # on disk at most, the unfinished one counted: one read, one read ahead, one made

logger = logging.getLogger(__name__)


class Mark(NamedTuple):
    """A token of the training documents: the one after `tokens` others of its document, which comes
    after `documents` others (held-out ones too) of the source from file `file` on."""

    file: int
    documents: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class StreamPlan:
    """What determines the shards of a folder, and how many processes tokenize."""

    source: Source
    tokenizer: str
    shard_tokens: int
    val_fraction: float
    split_seed: int
    workers: int | None = None

    def key(self) -> str:
        settings = {
            "format_version": FORMAT_VERSION,
            "source": self.source.identity(),
            "tokenizer": [self.tokenizer, load_tokenizer(self.tokenizer).sha256],
            "val_fraction": self.val_fraction,
            "split_seed": self.split_seed,
            "stream_shard_tokens": self.shard_tokens,
        }
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


class Marks:
    """marks.json of a folder: rebuilt from nothing where it is damaged or of other settings."""

    def __init__(self, folder: Path, key: str = "") -> None:
        self._path = folder / "marks.json"
        self.key = key
        self.places: dict[int, Mark] = {0: Mark(0, 0, 0)}
        self.sha256: dict[int, str] = {}
        try:
            content = json.loads(self._path.read_bytes())
            places = {int(i): Mark(*mark) for i, mark in content["places"].items()}
            sha256 = {int(i): str(digest) for i, digest in content["sha256"].items()}
            numbers = [*places, *sha256, *(n for mark in places.values() for n in mark)]
            if any(type(n) is not int or n < 0 for n in numbers):
                raise ValueError("numbers must be integers and not negative")
            if not key or content["key"] == key:
                self.places |= places
                self.sha256 = sha256
        except FileNotFoundError:
            pass
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            logger.warning("%s is damaged (%r): the source is read from its start", folder, error)

    def write(self) -> None:
        content = {"key": self.key, "places": self.places, "sha256": self.sha256}
        write_atomically(self._path, json.dumps(content).encode())


class _Documents:
    """The training documents of a plan from `start` on, without end."""

    def __init__(self, plan: StreamPlan, start: Mark, held_out: ShardWriter | None = None) -> None:
        self._plan, self._start, self._held_out = plan, start, held_out
        self._file = self._number = self._place = 0

    def runs(self) -> Iterator[np.ndarray]:
        """Ids, (n,) with n > 0, each of one document; of the last one `mark` knows the place."""
        plan, tokenizer = self._plan, load_tokenizer(self._plan.tokenizer)
        threshold = int(plan.val_fraction * 2**64)
        workers = max(1, num_cores() // 2) if plan.workers is None else plan.workers
        self._file, skip, drop = self._start
        while True:
            has_text = False
            batches = encode_in_order(
                plan.source.pieces(self._file),
                tokenizer=tokenizer,
                seed=plan.split_seed,
                workers=workers,
                skip_documents=skip,
            )
            self._number, self._place = skip, 0
            is_train = True
            with contextlib.closing(batches):
                for batch in batches:
                    begin = 0
                    for i, end in enumerate(batch.ends.tolist()):
                        ids, begin = batch.ids[begin:end], end
                        if batch.is_first[i]:
                            is_train = int(batch.draws[i]) >= threshold
                        if is_train:
                            has_text = True
                            dropped = min(drop, len(ids))
                            drop -= dropped
                            self._place += dropped
                            if dropped < len(ids):
                                yield ids[dropped:]
                            self._place += len(ids) - dropped
                        elif self._held_out is not None:
                            self._held_out.append(ids)
                            if batch.is_last[i]:
                                self._held_out.end_document()
                        if batch.is_last[i]:
                            self._number, self._place = self._number + 1, 0
            if not has_text and not self._file and not skip:
                raise ValueError(
                    f"source {plan.source.name!r} must hold text to train on, got "
                    f"{plan.source.report.documents} documents, all held out: check the path, "
                    "text_field and val_fraction"
                )
            self._file = skip = drop = 0
            self._held_out = None  # once each, however often the source ends before shard 0

    def mark(self, offset: int) -> Mark:
        """Of the token at `offset` of the last run."""
        starts = self._plan.source.file_starts
        file = max(f for f, documents in starts.items() if documents <= self._number)
        return Mark(file, self._number - starts[file], self._place + offset)


def make_shards(
    plan: StreamPlan, folder: Path, first: int, held_out: ShardWriter | None = None
) -> Generator[int, None, None]:
    """Make shards from `first` on, as the caller asks for the next; gives each number before.

    What is on disk already and intact is kept, all else is deleted at once. Starts at the last
    shard that has a mark.
    """
    marks = Marks(folder, plan.key())
    _remove(folder, marks, keep=range(first, first + NUM_SHARDS))
    return _made(plan, folder, first, marks, held_out)


def _made(
    plan: StreamPlan, folder: Path, first: int, marks: Marks, held_out: ShardWriter | None
) -> Generator[int, None, None]:
    vocab_size, size = load_tokenizer(plan.tokenizer).vocab_size, plan.shard_tokens
    while _is_intact(folder, marks, first):
        yield first
        first += 1
    index = max(i for i in marks.places if i <= first)
    documents = _Documents(plan, marks.places[index], held_out)
    held = -1  # tokens of shard `index` so far; -1 before its turn
    writer: ShardWriter | None = None
    try:
        for ids in documents.runs():
            start = 0
            while start < len(ids):
                if held == size:
                    index, held = index + 1, -1
                    marks.places[index] = documents.mark(start)
                    if writer is not None:
                        writer.append(ids[start : start + 1])
                        writer.end_document()
                        entry = writer.commit()
                        writer = None
                        marks.sha256[index - 1] = entry["files"][shard_name(index - 1)]["sha256"]
                        marks.write()
                if held < 0:
                    held = 0
                    if index >= first:
                        yield index
                        marks.sha256 = {
                            i: marks.sha256[i] for i in on_disk(folder) if i in marks.sha256
                        }
                        writer = ShardWriter(folder, _stem(index), vocab_size)
                taken = ids[start : start + size - held]
                if writer is not None:
                    writer.append(taken)
                held += len(taken)
                start += len(taken)
    finally:
        if writer is not None:
            writer.abandon()


def _stem(index: int) -> str:
    return f"shard-{index:08d}"


def shard_name(index: int) -> str:
    return f"{_stem(index)}.bin"


def on_disk(folder: Path) -> list[int]:
    """Numbers of the finished shards in a folder, in order."""
    names = (path.name[len("shard-") : -len(".bin")] for path in folder.glob("shard-*.bin"))
    return sorted(int(name) for name in names if name.isdecimal())


def _is_intact(folder: Path, marks: Marks, index: int) -> bool:
    path = folder / shard_name(index)
    return path.is_file() and sha256_file(path) == marks.sha256.get(index)


def _remove(folder: Path, marks: Marks, keep: range) -> None:
    for temporary in folder.glob("shard-*.tmp"):
        temporary.unlink()
    for index in on_disk(folder):
        if index not in keep or not _is_intact(folder, marks, index):
            delete(folder, index)


def delete(folder: Path, index: int) -> None:
    """Delete a finished shard."""
    (folder / shard_name(index)).unlink()
    (folder / f"{_stem(index)}.offsets.bin").unlink(missing_ok=True)


def prepare_head(plan: StreamPlan, folder: Path) -> TokenStore:
    """Make shard 0 and the store of what is held out, if they were not made before.

    Raises:
        ValueError: the source has no text, or nothing of it is held out though it should be.
        OSError: the disk has no room for NUM_SHARDS shards, or gets full.
    """
    tokenizer = load_tokenizer(plan.tokenizer)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(folder):
        (folder / "stopped.txt").unlink(missing_ok=True)  # before another process waits here
        if is_finished(folder):
            return TokenStore(folder)
        folder.mkdir(exist_ok=True)
        _check_disk(plan, folder, tokenizer.vocab_size)
        for path in folder.glob("shard-*"):
            path.unlink()
        (folder / "marks.json").unlink(missing_ok=True)
        writer = ShardWriter(folder, "val", tokenizer.vocab_size)
        try:
            with (
                clear_disk_errors(folder),
                contextlib.closing(make_shards(plan, folder, 0, writer)) as shards,
            ):
                for index in shards:
                    if index == 1:
                        break
                _write_head(plan, folder, writer)
        finally:
            writer.abandon()
    return TokenStore(folder)


def _write_head(plan: StreamPlan, folder: Path, writer: ShardWriter) -> None:
    tokenizer = load_tokenizer(plan.tokenizer)
    if plan.val_fraction and not writer.num_documents:
        raise ValueError(
            f"a document must be held out before {plan.shard_tokens} tokens are through, got none: "
            "raise val_fraction or stream_tokens, or hold out nothing by val_fraction=0"
        )
    splits: dict[str, list[dict[str, Any]]] = {"train": [], "val": []}
    files: dict[str, dict[str, Any]] = {}
    if writer.num_documents:
        entry = writer.commit()
        files |= entry["files"]
        counts = {name: entry[name] for name in ("num_tokens", "num_documents")}
        splits["val"] = [{"stem": "val", **counts}]
    shard = np.memmap(folder / shard_name(0), dtype=token_dtype(tokenizer.vocab_size), mode="r")
    counted = np.zeros(tokenizer.vocab_size, dtype="<i8")
    for start in range(0, len(shard), 1 << 24):
        counted += np.bincount(shard[start : start + (1 << 24)], minlength=len(counted))
    files["train.counts.bin"] = write_atomically(folder / "train.counts.bin", counted.tobytes())
    write_manifest(
        folder,
        {
            "key": plan.key(),
            "source": plan.source.identity(),
            "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.sha256},
            "vocab_size": tokenizer.vocab_size,
            "eot": tokenizer.eot,
            "dtype": token_dtype(tokenizer.vocab_size).name,
            "split": {"val_fraction": plan.val_fraction, "seed": plan.split_seed},
            "splits": splits,
            "files": files,
        },
    )


def _check_disk(plan: StreamPlan, folder: Path, vocab_size: int) -> None:
    needed = NUM_SHARDS * (plan.shard_tokens + 1) * token_dtype(vocab_size).itemsize
    free = shutil.disk_usage(folder).free
    size = f"{needed / 2**30:.2f} GiB of disk in {folder}"
    if needed > free:
        raise OSError(
            f"the shards of a stream take {size}, got {free / 2**30:.2f} GiB free: free some space "
            "or lower stream_tokens"
        )
    logger.info("streaming %s: never more than %s", plan.source.name, size)
