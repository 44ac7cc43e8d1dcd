"""The process that makes the shards of a token stream ahead of training, and their readers."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import filelock
import numpy as np

from data.parallel_encode import child_environment
from data.prepare import clear_disk_errors
from data.token_store import token_dtype, write_atomically
from data.token_stream import (
    NUM_SHARDS,
    Mark,
    Marks,
    StreamPlan,
    delete,
    make_shards,
    on_disk,
    shard_name,
)

_POLL_S = 0.05
_PATIENCE_S = 60.0  # without a maker, before a reader gives up
_TAKE_OVER_S = 30.0  # in which the maker of a run that was killed ends
_STOP = b"stop\n"


class ShardMaker:
    """A process that makes the shards from `first` on. It ends with this one.

    Raises:
        RuntimeError: another process makes shards in the same folder.
    """

    def __init__(self, plan: StreamPlan, folder: Path, first: int, mark: Mark | None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "data.shard_maker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
        )
        self._sent = first
        self._send(pickle.dumps((plan, folder, first, mark, _TAKE_OVER_S)))
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().decode().strip()
        if answer != "ready":
            self.stop()
            raise RuntimeError(answer or "the process that prepares the stream did not start")

    def need(self, shard: int) -> None:
        """Say that no shard before this one will be read again."""
        if shard > self._sent:
            self._sent = shard
            self._send(f"{shard}\n".encode())

    def stop(self) -> None:
        # Said, as the end of its input would not do: forks of this process may hold its other end.
        self._send(_STOP)
        with contextlib.suppress(OSError):
            self._process.communicate()
        self._process.wait()

    def _send(self, message: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # readers say why it ended
            self._process.stdin.write(message)
            self._process.stdin.flush()


@dataclasses.dataclass(frozen=True)
class ShardReader:
    """Reads shards that a ShardMaker of this machine makes, and waits for them."""

    folder: Path
    vocab_size: int
    shard_tokens: int

    def read(self, shard: int, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) of a shard of shard_tokens + 1, (length,) int64.

        Raises:
            RuntimeError: the maker gave up, or there is none for a minute.
            ValueError: the shard has another size.
        """
        if not 0 <= start <= start + length <= self.shard_tokens + 1:
            raise IndexError(f"[{start}, {start + length}) must lie in a shard")
        path, dtype = self.folder / shard_name(shard), token_dtype(self.vocab_size)
        while True:
            with contextlib.suppress(FileNotFoundError):
                size = path.stat().st_size
                if size != (self.shard_tokens + 1) * dtype.itemsize:
                    raise ValueError(f"{path} is damaged: it has {size} bytes. Start again")
                # No map: it would keep the room of a deleted shard.
                ids = np.fromfile(path, dtype, length, offset=start * dtype.itemsize)
                return ids.astype(np.int64)
            self._wait(path)

    def _wait(self, path: Path) -> None:
        given_up = time.monotonic() + _PATIENCE_S
        while not path.exists():
            with contextlib.suppress(FileNotFoundError):
                raise RuntimeError((self.folder / "stopped.txt").read_text())
            if self._is_made():
                given_up = time.monotonic() + _PATIENCE_S
            elif time.monotonic() > given_up:
                raise RuntimeError(
                    "the stream cannot go on: the process that prepares its shards in "
                    f"{self.folder} is gone, perhaps for lack of memory"
                )
            time.sleep(_POLL_S)

    def _is_made(self) -> bool:
        """Whether a maker is alive: it holds the folder's lock."""
        lock = _lock(self.folder)
        try:
            with lock.acquire(timeout=0):
                return False
        except filelock.Timeout:
            return True


def _lock(folder: Path) -> filelock.FileLock:
    return filelock.FileLock(folder / "maker.lock")


def main() -> None:
    """The maker: gets its plan, then the numbers of needed shards, on standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # the run has a step to finish
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="%(message)s")
    plan, folder, first, mark, take_over_s = pickle.load(sys.stdin.buffer)
    try:
        lock = _lock(folder).acquire(timeout=take_over_s)
    except filelock.Timeout:
        print(f"another run reads the same stream in {folder}: give one another data.root")
        sys.exit(1)
    with lock:
        try:
            marks = Marks(folder, plan.key())
            if mark is not None and first not in marks.places:
                marks.places[first] = Mark(*mark)
                marks.write()
            shards = make_shards(plan, folder, first)
            print("ready", flush=True)  # what is on disk may be read from here on
            needed = _Needed(first)
            with clear_disk_errors(folder):
                for index in shards:
                    needed.wait_for(index, folder)
        except Exception as error:
            text = f"the stream cannot go on: {type(error).__name__}: {error}"
            write_atomically(folder / "stopped.txt", " ".join(text.split()).encode())
            raise


class _Needed:
    """The first shard that is still needed, as the training process says it."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._changed = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def wait_for(self, index: int, folder: Path) -> None:
        """Delete what is not needed, until there is room for shard `index`."""
        with self._changed:
            while True:
                for old in on_disk(folder):
                    if old < self._first:
                        delete(folder, old)
                if index < self._first + NUM_SHARDS:
                    return
                self._changed.wait()

    def _listen(self) -> None:
        for line in sys.stdin.buffer:
            if line == _STOP:
                break
            with self._changed:
                self._first = int(line)
                self._changed.notify()
        os._exit(0)  # the training process is gone, or done


if __name__ == "__main__":
    main()
