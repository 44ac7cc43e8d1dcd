"""Labelled sequences on disk: bytes, pixels, symbols or token ids, with one label or several.

A finished store is a folder with, for each split,

    SPLIT.tokens.bin    uint8, or another type of the manifest: all sequences end to end
    SPLIT.offsets.bin   int64, (num_sequences + 1,): where each one starts
    SPLIT.labels.bin    uint8, (num_examples,), or (num_examples, num_labels) of 0 and 1

and manifest.json, written last. An example is one sequence, or two that follow each other.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import rich.progress

from data.token_store import (
    MANIFEST_NAME,
    check_file_entry,
    fsync_folder,
    is_finished,
    sha256_file,
    write_atomically,
)

_FORMAT = "labelled sequences 1"

# One or two (length,) integers, and the label, or (num_labels,) of 0 and 1.
Example = tuple[tuple[np.ndarray, ...], int | np.ndarray]
Splits = Mapping[str, Callable[[], Iterable[Example]]]


def write_sequences(
    folder: str | os.PathLike[str],
    identity: Mapping[str, Any],
    splits: Splits,
    *,
    dtype: np.dtype | str = "u1",
    num_labels: int | None = None,
    facts: Callable[[], Mapping[str, Any]] | None = None,
    progress: bool = True,
) -> SequenceStore:
    """Write all examples, or open what is there already.

    Args:
        folder: made if missing. Another process that writes the same folder is waited for.
        identity: plain values that determine the content; goes into the manifest.
        splits: for each split, what gives its examples.
        dtype: of the tokens.
        num_labels: where an example has several labels, how many there are.
        facts: plain values that go into the manifest, known when all examples have been read.
        progress: show a bar.
    Raises:
        ValueError: the folder holds something else, or a split gives no example.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder.parent / f".{folder.name}.lock"):
        if not is_finished(folder):
            files = {}
            for split, examples in splits.items():
                files.update(_write_split(folder, split, examples(), np.dtype(dtype), progress))
            manifest = {
                "format": _FORMAT,
                "identity": dict(identity),
                "files": files,
                "dtype": np.dtype(dtype).str,
                "num_labels": num_labels,
                "facts": {} if facts is None else dict(facts()),
            }
            payload = json.dumps(manifest, indent=2) + "\n"
            write_atomically(folder / MANIFEST_NAME, payload.encode())
        store = SequenceStore(folder)
        if store.manifest["identity"] != json.loads(json.dumps(dict(identity))):
            raise ValueError(
                f"{folder} must be new or hold the same data, got {store.manifest['identity']}: "
                "choose another folder or delete it"
            )
        return store


def _write_split(
    folder: Path, split: str, examples: Iterable[Example], dtype: np.dtype, progress: bool
) -> dict[str, dict[str, Any]]:
    """Returns the manifest entries of the split's files."""
    ends, labels, digest = [0], [], hashlib.sha256()
    temporary = folder / f"{split}.tokens.bin.tmp"
    with open(temporary, "wb") as file:
        for sequences, label in rich.progress.track(examples, f"{split}:", disable=not progress):
            for sequence in sequences:
                payload = np.ascontiguousarray(sequence, dtype=dtype).tobytes()
                digest.update(payload)
                file.write(payload)
                ends.append(ends[-1] + len(sequence))
            labels.append(label)
        file.flush()
        os.fsync(file.fileno())
    if not labels:
        temporary.unlink()
        raise ValueError(f"the {split} split of {folder.name} must hold examples, got none")
    os.replace(temporary, folder / f"{split}.tokens.bin")
    fsync_folder(folder)
    num_bytes = ends[-1] * dtype.itemsize
    entries = {f"{split}.tokens.bin": {"bytes": num_bytes, "sha256": digest.hexdigest()}}
    for name, array in (("offsets", np.array(ends, "<i8")), ("labels", np.array(labels, "u1"))):
        file_name = f"{split}.{name}.bin"
        entries[file_name] = write_atomically(folder / file_name, array.tobytes())
    return entries


class SequenceStore:
    """A finished store, opened read-only. Pickles as its folder.

    Attributes:
        manifest: the parsed manifest.json.
        fingerprint: hex digest of its files; equal data have equal fingerprints.
    Raises:
        FileNotFoundError: no manifest: unfinished, or no store.
        ValueError: another format, or a file is missing or has the wrong size.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if not is_finished(self.folder):
            raise FileNotFoundError(f"{folder} must have a {MANIFEST_NAME}: prepare it (again)")
        advice = f"delete {folder} and prepare it again"
        self._arrays: dict[str, np.ndarray] = {}
        try:
            self.manifest: dict[str, Any] = json.loads((self.folder / MANIFEST_NAME).read_bytes())
            self._open(advice)
        except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise ValueError(f"{folder} has a damaged manifest ({error!r}): {advice}") from error

    def _open(self, advice: str) -> None:
        if self.manifest.get("format") != _FORMAT:
            raise ValueError(
                f"{self.folder} must hold {_FORMAT!r}, got {self.manifest.get('format')!r}: "
                f"{advice}"
            )
        # Stores of bytes may be older than the two last entries.
        types = {"tokens": self.manifest.get("dtype", "u1"), "offsets": "<i8", "labels": "u1"}
        if np.dtype(types["tokens"]).kind not in "ui":
            raise ValueError(f"{self.folder} must hold integers, got {types['tokens']!r}: {advice}")
        num_labels = self.manifest.get("num_labels")
        for name, entry in self.manifest["files"].items():
            check_file_entry(name, entry)
            path = self.folder / name
            if not path.is_file() or path.stat().st_size != entry["bytes"]:
                raise ValueError(f"{path} must have {entry['bytes']} bytes: {advice}")
            kind = name.split(".")[1]
            if kind == "tokens":
                self._arrays[name] = np.memmap(path, dtype=types[kind], mode="r")
            else:
                self._arrays[name] = np.fromfile(path, dtype=types[kind])
            if kind == "labels" and num_labels is not None:
                self._arrays[name] = self._arrays[name].reshape(-1, num_labels)
        digests = {name: entry["sha256"] for name, entry in self.manifest["files"].items()}
        payload = json.dumps(digests, sort_keys=True).encode()
        self.fingerprint = hashlib.sha256(payload).hexdigest()[:32]

    def __reduce__(self) -> tuple[Any, ...]:
        return SequenceStore, (self.folder,)

    def labels(self, split: str) -> np.ndarray:
        """uint8 (num_examples,) or (num_examples, num_labels); empty if the split is not there."""
        return self._arrays.get(f"{split}.labels.bin", np.empty(0, np.uint8))

    def lengths(self, split: str) -> np.ndarray:
        """(num_sequences,) int64."""
        return np.diff(self._arrays.get(f"{split}.offsets.bin", np.zeros(1, np.int64)))

    def num_sequences(self, split: str) -> int:
        return max(0, len(self._arrays.get(f"{split}.offsets.bin", ())) - 1)

    def sequence(self, split: str, index: int) -> np.ndarray:
        """(length,) of the store's type.

        Raises:
            IndexError: no such sequence.
        """
        if not 0 <= index < self.num_sequences(split):
            raise IndexError(f"{split} has {self.num_sequences(split)} sequences, not {index}")
        start, end = self._arrays[f"{split}.offsets.bin"][index : index + 2].tolist()
        return np.asarray(self._arrays[f"{split}.tokens.bin"][start:end])

    def verify(self) -> None:
        """Compare every file with its SHA-256.

        Raises:
            ValueError: a file's content is not what was written.
        """
        for name, entry in self.manifest["files"].items():
            if sha256_file(self.folder / name) != entry["sha256"]:
                raise ValueError(
                    f"{self.folder / name} must have SHA-256 {entry['sha256']}: the file is "
                    f"damaged; delete {self.folder} and prepare it again"
                )
