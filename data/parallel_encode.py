"""Tokenize pieces of documents in order, in this process or in several others.

What comes out does not depend on the number of processes: batches go out and come back in order.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

import numpy as np

from data.text_files import Piece
from data.token_store import token_dtype
from data.tokenizer import AnyTokenizer, load_tokenizer

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
    tokenizer: AnyTokenizer,
    seed: int,
    workers: int,
    skip_documents: int = 0,
) -> Generator[EncodedBatch, None, None]:
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
    pool: list[_Worker] = []
    try:
        pool += [_Worker(tokenizer.name) for _ in range(workers)]
        pending: collections.deque[_Worker] = collections.deque()
        for number, batch in enumerate(batches):
            # Two batches a worker are out at most: the bound on memory. Turns keep the order.
            if len(pending) == 2 * workers:
                yield pending.popleft().receive()
            worker = pool[number % workers]
            worker.send(batch, seed)
            pending.append(worker)
        while pending:
            yield pending.popleft().receive()
    finally:
        for worker in pool:
            worker.kill()


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


def _encode(
    tokenizer: AnyTokenizer, batch: list[tuple[str, bool, bool]], seed: int
) -> EncodedBatch:
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


class _Worker:
    """A tokenizing process. It ends when killed or when this process is gone."""

    def __init__(self, tokenizer_name: str) -> None:
        # No fork: it would copy the locks of the caller's threads, and is unsafe after CUDA. Nor
        # multiprocessing's spawn, which imports the caller's program again: seconds and 400 MB.
        self._connection, theirs = multiprocessing.Pipe()
        program = "import sys; from data.parallel_encode import serve; serve(*sys.argv[1:])"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, str(theirs.fileno()), tokenizer_name],
            pass_fds=[theirs.fileno()],
            env=child_environment(),
        )
        theirs.close()

    def send(self, batch: list[tuple[str, bool, bool]], seed: int) -> None:
        try:
            self._connection.send((batch, seed))
        except OSError as error:
            raise self._death() from error

    def receive(self) -> EncodedBatch:
        try:
            result = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._death() from error
        if isinstance(result, BaseException):
            raise result
        return result

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _death(self) -> RuntimeError:
        return RuntimeError(
            "a tokenizing process died, perhaps for lack of memory: run again with fewer workers; "
            "finished shards are kept"
        )


def child_environment() -> dict[str, str]:
    """Of a process that is to import this package."""
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def serve(descriptor: str, tokenizer_name: str) -> None:
    """What a tokenizing process does: answers batches on the socket of this number."""
    connection = multiprocessing.connection.Connection(int(descriptor))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends the workers
    tasks: queue.SimpleQueue[tuple[list[tuple[str, bool, bool]], int]] = queue.SimpleQueue()
    threading.Thread(target=_take_in, args=(connection, tasks), daemon=True).start()
    tokenizer = load_tokenizer(tokenizer_name)
    while True:
        batch, seed = tasks.get()
        try:
            result: EncodedBatch | Exception = _encode(tokenizer, batch, seed)
        except Exception as error:
            result = error
        connection.send(result)


def _take_in(connection: multiprocessing.connection.Connection, tasks: queue.SimpleQueue) -> None:
    """Receive at all times: were both sides to send large messages at once, both would wait."""
    while True:
        try:
            tasks.put(connection.recv())
        except (EOFError, OSError):  # the parent is gone
            os._exit(1)
