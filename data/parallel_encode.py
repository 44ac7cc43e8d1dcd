"""Tokenize pieces of documents in order, in this process or in several others.

What comes out does not depend on the number of processes: batches go out and come back in order.
"""

from __future__ import annotations

import collections
import concurrent.futures
import concurrent.futures.process
import dataclasses
import hashlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator

import numpy as np

from data.text_files import Piece
from data.token_store import token_dtype
from data.tokenizer import Tokenizer, load_tokenizer

_BATCH_CHARS = 1 << 20  # about 0.15 s of work: large beside the cost of sending it
_BATCH_PIECES = 4096


@dataclasses.dataclass
class EncodedBatch:
    """Consecutive pieces of documents.

    Attributes:
        ids: (num_tokens,) in the store's dtype; each document's last piece ends with end-of-text.
        ends: (num_pieces,) int64, where in `ids` each piece ends.
        draws: (num_pieces,) uint64, the number drawn from a document's first piece; 0 for others.
        is_first, is_last: (num_pieces,) bool, whether the piece begins, ends its document.
        num_chars: of the text.
    """

    ids: np.ndarray
    ends: np.ndarray
    draws: np.ndarray
    is_first: np.ndarray
    is_last: np.ndarray
    num_chars: int


def encode_in_order(
    pieces: Iterable[Piece],
    *,
    tokenizer: Tokenizer,
    seed: int,
    workers: int,
    skip_documents: int = 0,
) -> Iterator[EncodedBatch]:
    """Encoded batches of `pieces` after the first `skip_documents` documents.

    Args:
        seed: keys the draw of each document, a hash of its text (of the first piece if it is cut).
        workers: processes besides this one; 0 or 1 tokenizes here.
    Raises:
        RuntimeError: a worker process died.
    """
    batches = _batches(pieces, skip_documents)
    if workers <= 1:
        for batch in batches:
            yield _encode(tokenizer, batch, seed)
        return
    # spawn: a fork would copy the threads' locks of whoever calls, and is unsafe after CUDA.
    pool = concurrent.futures.ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(tokenizer.name,),
    )
    pending: collections.deque[concurrent.futures.Future[EncodedBatch]] = collections.deque()
    try:
        for batch in batches:
            pending.append(pool.submit(_encode_here, batch, seed))
            # The bound on batches in flight is the bound on memory.
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except concurrent.futures.process.BrokenProcessPool as error:
        raise RuntimeError(
            f"one of {workers} tokenizing processes died, perhaps for lack of memory: run again "
            "with fewer workers; finished shards are kept"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _batches(
    pieces: Iterable[Piece], skip_documents: int
) -> Iterator[list[tuple[str, bool, bool]]]:
    """Runs of (text, is_first, is_last)."""
    batch: list[tuple[str, bool, bool]] = []
    num_chars = 0
    is_first = True
    for text, is_last in pieces:
        if skip_documents:
            skip_documents -= is_last
            continue
        batch.append((text, is_first, is_last))
        is_first = is_last
        num_chars += len(text)
        if num_chars >= _BATCH_CHARS or len(batch) >= _BATCH_PIECES:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _encode(tokenizer: Tokenizer, batch: list[tuple[str, bool, bool]], seed: int) -> EncodedBatch:
    texts, is_first, is_last = zip(*batch, strict=True)
    end_of_text = np.array([tokenizer.eot], dtype=np.uint32)
    arrays: list[np.ndarray] = []
    ends = np.empty(len(batch), dtype=np.int64)
    total = 0
    for i, text in enumerate(texts):
        ids = tokenizer.encode_numpy(text)
        arrays.append(ids)
        total += len(ids)
        if is_last[i]:
            arrays.append(end_of_text)
            total += 1
        ends[i] = total
    draws = [_draw(t, seed) if first else 0 for t, first in zip(texts, is_first, strict=True)]
    ids = np.concatenate(arrays)
    # The writer checks ids too, but after this cast an overflow could no longer be seen.
    if ids.max(initial=0) >= tokenizer.vocab_size:
        raise ValueError(f"ids must be below {tokenizer.vocab_size}, got {ids.max()}")
    return EncodedBatch(
        ids=ids.astype(token_dtype(tokenizer.vocab_size)),
        ends=ends,
        draws=np.array(draws, dtype=np.uint64),
        is_first=np.array(is_first),
        is_last=np.array(is_last),
        num_chars=sum(map(len, texts)),
    )


def _draw(text: str, seed: int) -> int:
    """A uniform 64-bit number that equal texts share: duplicates never straddle the split."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=f"split {seed}".encode())
    return int.from_bytes(digest.digest(), "little")


_worker_tokenizer: Tokenizer | None = None


def _start_worker(tokenizer_name: str) -> None:
    global _worker_tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends the workers
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _worker_tokenizer = load_tokenizer(tokenizer_name)


def _exit_with_parent() -> None:
    """A killed parent cannot end its workers, and they hold each other's pipes open."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_here(batch: list[tuple[str, bool, bool]], seed: int) -> EncodedBatch:
    assert _worker_tokenizer is not None
    return _encode(_worker_tokenizer, batch, seed)
