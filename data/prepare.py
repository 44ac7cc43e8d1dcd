"""Turn a source into a finished token store: parallel, resumable, the same whatever the workers.

Work is committed in parts: a training shard and the held-out documents met meanwhile. A part counts
once progress.json lists it; a killed run starts again after the last such part. The manifest comes
last, so that an unfinished folder can never be taken for a finished one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import rich.progress

from data.parallel_encode import EncodedBatch, encode_in_order
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
from data.tokenizer import Tokenizer

PAPER_VAL_FRACTION = 0.0005  # what the paper's code holds out of OpenWebText, with this seed
SPLIT_SEED = 2357
SHARD_TOKENS = 100_000_000
_SMALL_VAL_FRACTION = 0.05
_USEFUL_VAL_TOKENS = 500_000
_BYTES_PER_TOKEN = 4.0  # English under GPT-2's BPE has 4.3, C code 2.2
_PARALLEL_FROM_BYTES = 32 << 20  # below this, starting processes takes longer than the work
_PROGRESS_NAME = "progress.json"
_OUR_FILES = re.compile(r"progress\.json|(train|val)[-.].*\.bin(\.tmp)?|.*\.json\.tmp|val\.bin")

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What determines the content of a store."""

    source: Source
    tokenizer: Tokenizer
    val_fraction: float | None
    split_seed: int
    shard_tokens: int

    def key(self) -> str:
        settings = {
            "format_version": FORMAT_VERSION,
            "source": self.source.identity(),
            "tokenizer": [self.tokenizer.name, self.tokenizer.sha256],
            "val_fraction": self.val_fraction,
            "split_seed": self.split_seed,
            "shard_tokens": self.shard_tokens,
        }
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def store_folder(
    root: str | os.PathLike[str],
    source: Source,
    *,
    tokenizer: Tokenizer,
    val_fraction: float | None = None,
    split_seed: int = SPLIT_SEED,
    shard_tokens: int = SHARD_TOKENS,
) -> Path:
    """Where the store of these settings is cached: root/NAME-TOKENIZER-KEY."""
    key = _Plan(source, tokenizer, val_fraction, split_seed, shard_tokens).key()
    return Path(root) / f"{source.name}-{tokenizer.name}-{key}"


def prepare(
    source: Source,
    folder: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer,
    val_fraction: float | None = None,
    split_seed: int = SPLIT_SEED,
    shard_tokens: int = SHARD_TOKENS,
    workers: int | None = None,
    progress: bool = True,
) -> TokenStore:
    """Tokenize `source` into `folder`, or open what is there already.

    The end-of-text id follows each document. A document is held out if a hash of (split_seed, its
    text) falls into the fraction; if that holds out nothing, the end of the last shard is taken.

    Args:
        folder: made if missing; an unfinished one is continued. Another process that prepares the
            same folder is waited for.
        val_fraction: of documents, in [0, 1); None is 0.0005 as the paper's code, or more for small
            sources: what gives about 500,000 tokens, at most 0.05. 0 holds out nothing.
        shard_tokens: a training shard ends at the first document end after so many tokens.
        workers: tokenizing processes; None is one a core, or none for a source below 32 MiB.
        progress: show a bar with documents, tokens and tokens/s.
    Raises:
        ValueError: the source has no text, or the folder holds something else.
        OSError: the disk is too small, or full (what was finished is kept).
    """
    if val_fraction is not None and not 0 <= val_fraction < 1:
        raise ValueError(f"val_fraction must be in [0, 1), got {val_fraction}")
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens must be at least 1, got {shard_tokens}")
    if workers is not None and workers < 0:
        raise ValueError(f"workers must not be negative, got {workers}")
    folder = Path(folder)
    plan = _Plan(source, tokenizer, val_fraction, split_seed, shard_tokens)
    key = plan.key()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder):
        if is_finished(folder):
            store = TokenStore(folder)
            if store.manifest["key"] != key:
                raise ValueError(
                    f"{folder} must be new or hold the same data, got a store of other settings or "
                    "of a source that changed since: choose another folder or delete it"
                )
            return store
        with _clear_disk_errors(folder):
            _run(plan, key, folder, workers, progress)
    return TokenStore(folder)


def _run(plan: _Plan, key: str, folder: Path, workers: int | None, progress: bool) -> None:
    tokenizer = plan.tokenizer
    parts = _Parts(folder, key, tokenizer.vocab_size)
    num_bytes = plan.source.estimated_bytes()
    _check_disk(folder, num_bytes, parts, tokenizer)
    if workers is None:
        workers = 0 if (num_bytes or 0) < _PARALLEL_FROM_BYTES else _num_cores()
    fraction = plan.val_fraction
    if fraction is None:
        fraction = _default_val_fraction(num_bytes)
    threshold = int(fraction * 2**64)
    try:
        batches = encode_in_order(
            plan.source.pieces(),
            tokenizer=tokenizer,
            seed=plan.split_seed,
            workers=workers,
            skip_documents=parts.num_documents,
        )
        with contextlib.closing(batches):
            for batch in _show(batches, num_bytes, parts, progress):
                parts.add(batch, threshold, plan.shard_tokens)
        parts.commit()
    finally:
        parts.abandon()
    report = plan.source.report
    for line in report.warnings():
        logger.warning("%s: %s", plan.source.name, line)
    if not parts.num_documents:
        shutil.rmtree(folder)
        raise ValueError(
            f"source {plan.source.name!r} must hold text, got none ({report.empty_documents} empty "
            f"documents, {report.malformed_lines} malformed lines): check the path and text_field"
        )
    splits = _finish_splits(folder, parts, fraction, tokenizer.vocab_size)
    files = {
        name: entry
        for shards in splits.values()
        for s in shards
        for name, entry in s["files"].items()
    }
    counts = _count_tokens(folder, splits["train"], tokenizer.vocab_size)
    files["train.counts.bin"] = write_atomically(folder / "train.counts.bin", counts.tobytes())
    write_manifest(
        folder,
        {
            "key": key,
            "source": {**plan.source.identity(), "report": dataclasses.asdict(report)},
            "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.sha256},
            "vocab_size": tokenizer.vocab_size,
            "eot": tokenizer.eot,
            "dtype": token_dtype(tokenizer.vocab_size).name,
            "split": {
                "rule": "a document is held out if blake2b(its text, key 'split SEED') / 2**64 < "
                "val_fraction; if none is, the end of the last training shard",
                "val_fraction": fraction,
                "seed": plan.split_seed,
            },
            "splits": {
                name: [{k: s[k] for k in ("stem", "num_tokens", "num_documents")} for s in shards]
                for name, shards in splits.items()
            },
            "files": files,
        },
    )
    for path in folder.iterdir():
        if path.name != "manifest.json" and path.name not in files:
            path.unlink()


class _Parts:
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
        for writer in self._writers.values():
            writer.abandon()
        self._writers = {}

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
        progress = (
            json.loads(path.read_bytes()) if path.exists() else {"key": self._key, "parts": []}
        )
        if progress["key"] != self._key:
            raise ValueError(
                f"{self._folder} must be new or hold the same data, got an unfinished store "
                "of other settings or of a source that changed since: choose another or delete it"
            )
        intact = []
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


def _finish_splits(
    folder: Path, parts: _Parts, fraction: float, vocab_size: int
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
    cut = len(ids) - max(1, round(len(ids) * max(fraction, _SMALL_VAL_FRACTION)))
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


def _count_tokens(folder: Path, shards: list[dict[str, Any]], vocab_size: int) -> np.ndarray:
    counts = np.zeros(vocab_size, dtype="<i8")
    for shard in shards:
        ids, _ = _read_shard(folder, shard, vocab_size)
        for start in range(0, len(ids), 1 << 24):
            counts += np.bincount(ids[start : start + (1 << 24)], minlength=vocab_size)
    return counts


def _default_val_fraction(num_bytes: int | None) -> float:
    if not num_bytes:
        return PAPER_VAL_FRACTION
    useful = _USEFUL_VAL_TOKENS / (num_bytes / _BYTES_PER_TOKEN)
    return max(PAPER_VAL_FRACTION, min(_SMALL_VAL_FRACTION, useful))


def _check_disk(folder: Path, num_bytes: int | None, parts: _Parts, tokenizer: Tokenizer) -> None:
    if num_bytes is None:
        return
    itemsize = token_dtype(tokenizer.vocab_size).itemsize
    tokens_left = max(0.0, num_bytes / _BYTES_PER_TOKEN - parts.num_tokens())
    needed = int(tokens_left * itemsize)
    free = shutil.disk_usage(folder).free
    size = f"{needed / 2**30:.2f} GiB"
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"preparing {folder} takes about {size} of disk, got {free / 2**30:.2f} GiB free: "
            "free some space or choose a folder on another disk",
        )
    logger.info("preparing %s: about %s of disk (%.1f GiB free)", folder, size, free / 2**30)


@contextlib.contextmanager
def _clear_disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or "preparing" in str(error):
            raise
        raise OSError(
            error.errno,
            f"the disk is full while preparing {folder}; finished shards are kept, the rest "
            "is not: free some space and run the same command to continue",
        ) from error


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`; the system frees it if its holder is killed."""
    lock = filelock.FileLock(folder.parent / f".{folder.name}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        logger.warning("another process is preparing %s: waiting for it", folder)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _show(
    batches: Iterator[EncodedBatch], num_bytes: int | None, parts: _Parts, progress: bool
) -> Iterator[EncodedBatch]:
    """Pass batches through, with a progress bar over their text."""
    columns = (
        "preparing",
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        "{task.fields[counts]}",
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, disable=not progress) as bar:
        task = bar.add_task("", total=num_bytes, counts="")
        num_tokens = 0
        for batch in batches:
            yield batch
            num_tokens += len(batch.ids)
            elapsed = bar.tasks[0].elapsed or 0.0
            rate = num_tokens / elapsed if elapsed else 0.0
            counts = (
                f"{parts.num_documents:,} documents, {parts.num_tokens():,} tokens, "
                f"{rate:,.0f} tokens/s"
            )
            bar.update(task, advance=batch.num_chars, counts=counts)


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
