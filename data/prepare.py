"""Turn a source into a finished token store: parallel, resumable, the same whatever the workers.

Work is committed in parts (see data.store_parts), and a killed run starts again after the last one.
The manifest comes last, so that an unfinished folder can never be taken for a finished one.

A core tokenizes about 3 M tokens a second of English; the process that reads, hashes and writes
takes 22 M a second from parquet and 8 M from .jsonl.xz, and so keeps up with seven cores, or three.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

import filelock
import rich.progress

from data.parallel_encode import EncodedBatch, encode_in_order
from data.sources import Source
from data.store_parts import SMALL_VAL_FRACTION, StoreParts, count_tokens, finish_splits
from data.token_store import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    TokenStore,
    is_finished,
    token_dtype,
    write_atomically,
    write_manifest,
)
from data.tokenizer import AnyTokenizer

PAPER_VAL_FRACTION = 0.0005  # what the paper's code holds out of OpenWebText, with this seed
SPLIT_SEED = 2357
SHARD_TOKENS = 100_000_000
_USEFUL_VAL_TOKENS = 500_000
_BYTES_PER_TOKEN = 4.0  # English under GPT-2's BPE has 4.3, C code 2.2
_PARALLEL_FROM_BYTES = 32 << 20  # below this, starting processes takes longer than the work

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What determines the content of a store."""

    source: Source
    tokenizer: AnyTokenizer
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
    tokenizer: AnyTokenizer,
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
    tokenizer: AnyTokenizer,
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
    with exclusive(folder):
        if is_finished(folder):
            store = TokenStore(folder)
            if store.manifest["key"] != key:
                raise ValueError(
                    f"{folder} must be new or hold the same data, got a store of other settings or "
                    "of a source that changed since: choose another folder or delete it"
                )
            return store
        with clear_disk_errors(folder):
            _run(plan, key, folder, workers, progress)
    return TokenStore(folder)


def _run(plan: _Plan, key: str, folder: Path, workers: int | None, progress: bool) -> None:
    tokenizer = plan.tokenizer
    parts = StoreParts(folder, key, tokenizer.vocab_size)
    num_bytes = plan.source.estimated_bytes()
    _check_disk(folder, num_bytes, parts, tokenizer)
    if workers is None:
        workers = 0 if (num_bytes or 0) < _PARALLEL_FROM_BYTES else num_cores()
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
        shown = _show(batches, num_bytes, parts, progress)
        with contextlib.closing(batches), contextlib.closing(shown):
            for batch in shown:
                parts.add(batch, threshold, plan.shard_tokens)
        parts.commit()
    finally:
        parts.abandon()
    report = plan.source.report
    for line in report.warnings():
        logger.warning("%s: %s", plan.source.name, line)
    if not parts.num_documents:
        parts.remove_leftovers(keep=set())
        raise ValueError(
            f"source {plan.source.name!r} must hold text, got none ({report.empty_documents} empty "
            f"documents, {report.malformed_lines} malformed lines): check the path and text_field"
        )
    splits = finish_splits(folder, parts, fraction, tokenizer.vocab_size)
    files = {
        name: entry
        for shards in splits.values()
        for s in shards
        for name, entry in s["files"].items()
    }
    counts = count_tokens(folder, splits["train"], tokenizer.vocab_size)
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
    parts.remove_leftovers(keep={MANIFEST_NAME, *files})


def _default_val_fraction(num_bytes: int | None) -> float:
    if not num_bytes:
        return PAPER_VAL_FRACTION
    useful = _USEFUL_VAL_TOKENS / (num_bytes / _BYTES_PER_TOKEN)
    return max(PAPER_VAL_FRACTION, min(SMALL_VAL_FRACTION, useful))


def _check_disk(
    folder: Path, num_bytes: int | None, parts: StoreParts, tokenizer: AnyTokenizer
) -> None:
    if num_bytes is None:
        return
    itemsize = token_dtype(tokenizer.vocab_size).itemsize
    tokens_left = max(0.0, num_bytes / _BYTES_PER_TOKEN - parts.num_tokens())
    needed = int(tokens_left * itemsize)
    free = shutil.disk_usage(folder).free
    size = f"{needed / 2**30:.2f} GiB"
    if needed > free:
        raise OSError(
            f"preparing {folder} takes about {size} of disk, got {free / 2**30:.2f} GiB free: "
            "free some space or choose a folder on another disk"
        )
    logger.info("preparing %s: about %s of disk (%.1f GiB free)", folder, size, free / 2**30)


@contextlib.contextmanager
def clear_disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            error.errno,
            f"the disk is full while preparing {folder}; finished shards are kept, the rest "
            "is not: free some space and run the same command to continue",
        ) from error


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
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
    batches: Iterator[EncodedBatch], num_bytes: int | None, parts: StoreParts, progress: bool
) -> Generator[EncodedBatch, None, None]:
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


def num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
