"""Token shards on disk: written whole or not at all, read through memory maps.

A finished store is a folder with

    train-00000.bin ...       token ids of the training split, little-endian, documents end to end
    train-00000.offsets.bin   int64, (num_documents + 1,): where each document of the shard starts
    val.bin, val.offsets.bin  the held-out split (absent if nothing is held out)
    train.counts.bin          int64, (vocab_size,): how often each id comes in the training split
    manifest.json             what the files are and their SHA-256; written last

The files of a folder without manifest.json are unfinished work of data.prepare and are never read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*\.bin")


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 where every id below `vocab_size` fits, uint32 otherwise; little-endian."""
    if not 1 <= vocab_size <= 2**32:
        raise ValueError(f"vocab_size must be in [1, 2**32], got {vocab_size}")
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def fsync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, payload: bytes) -> dict[str, Any]:
    """Write a file under a temporary name, flush it, rename it. Returns its manifest entry."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync_folder(path.parent)
    return {"bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}


def sha256_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ShardWriter:
    """One .bin file and its .offsets.bin, under temporary names until `commit`.

    Args:
        folder: existing folder.
        stem: "train-00000" gives train-00000.bin and train-00000.offsets.bin.
        vocab_size: ids must be below it; chooses the dtype.
    """

    def __init__(self, folder: Path, stem: str, vocab_size: int) -> None:
        self.num_tokens = 0
        self._folder = folder
        self._stem = stem
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size)
        self._offsets = [0]
        self._sha256 = hashlib.sha256()
        self._temporary = folder / f"{stem}.bin.tmp"
        self._file = open(self._temporary, "wb", buffering=1 << 20)

    @property
    def num_documents(self) -> int:
        return len(self._offsets) - 1

    def append(self, ids: np.ndarray) -> None:
        """Add ids, (num_tokens,) of any integer dtype, to the current document.

        Raises:
            ValueError: an id is outside [0, vocab_size).
        """
        if not ids.size:
            return
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            raise ValueError(
                f"token ids must be in [0, {self._vocab_size}), got {ids.min()} to {ids.max()}: "
                "the tokenizer and the store's vocab_size disagree"
            )
        payload = np.ascontiguousarray(ids, dtype=self._dtype).data
        self._sha256.update(payload)
        self._file.write(payload)
        self.num_tokens += len(ids)

    def end_document(self) -> None:
        self._offsets.append(self.num_tokens)

    def commit(self) -> dict[str, Any]:
        """Flush and rename both files.

        Returns:
            {"num_tokens", "num_documents", "files": {name: {"bytes", "sha256"}}}.
        """
        assert self._offsets[-1] == self.num_tokens, "commit inside a document"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        offsets = write_atomically(
            self._folder / f"{self._stem}.offsets.bin", np.array(self._offsets, "<i8").tobytes()
        )
        os.replace(self._temporary, self._folder / f"{self._stem}.bin")
        fsync_folder(self._folder)
        tokens = {
            "bytes": self.num_tokens * self._dtype.itemsize,
            "sha256": self._sha256.hexdigest(),
        }
        return {
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "files": {f"{self._stem}.bin": tokens, f"{self._stem}.offsets.bin": offsets},
        }

    def abandon(self) -> None:
        """Close and remove the temporary file."""
        try:
            self._file.close()
        except OSError:  # a full disk refuses the buffered rest once more
            pass
        self._temporary.unlink(missing_ok=True)


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Add the manifest's own checksum and write it: from here on the store is finished."""
    manifest = {"format_version": FORMAT_VERSION, **manifest}
    manifest["manifest_sha256"] = _manifest_sha256(manifest)
    write_atomically(folder / MANIFEST_NAME, (json.dumps(manifest, indent=2) + "\n").encode())


def check_file_entry(name: str, entry: dict[str, Any]) -> None:
    """Raise for an entry {"bytes", "sha256"} of a file that is none, or lies in another folder."""
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"file name {name!r}")
    if type(entry["bytes"]) is not int or not isinstance(entry["sha256"], str):
        raise TypeError(f"entry of {name}")


def is_finished(folder: str | os.PathLike[str]) -> bool:
    """Whether `folder` holds a finished store (its content is checked when it is opened)."""
    return (Path(folder) / MANIFEST_NAME).is_file()


class TokenStore:
    """A finished store, opened read-only. Pickles as its folder: each worker maps the files anew.

    Attributes:
        train, val: TokenSplit.
        manifest: the parsed manifest.json.
        fingerprint: hex digest of tokenizer and token files; equal data have equal fingerprints.
    Raises:
        FileNotFoundError: no manifest: unfinished, or no store.
        ValueError: the manifest was altered, has another format version, or a file is missing or
            has the wrong size.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.manifest = _read_manifest(self.folder)
        self.vocab_size: int = self.manifest["vocab_size"]
        self.eot: int = self.manifest["eot"]
        self.dtype = token_dtype(self.vocab_size)
        for name, entry in self.manifest["files"].items():
            self._check_size(name, entry["bytes"])
        self.train = TokenSplit(self.folder, self.manifest["splits"]["train"], self.dtype)
        self.val = TokenSplit(self.folder, self.manifest["splits"]["val"], self.dtype)
        identity = {
            "tokenizer": self.manifest["tokenizer"],
            "files": {name: e["sha256"] for name, e in self.manifest["files"].items()},
        }
        self.fingerprint = hashlib.sha256(_canonical(identity)).hexdigest()[:32]

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore, (self.folder,)

    def train_counts(self) -> np.ndarray:
        """How often each id comes in the training split, (vocab_size,) int64."""
        return np.fromfile(self.folder / "train.counts.bin", dtype="<i8")

    def verify(self) -> None:
        """Compare every file with its SHA-256. Reads the whole store.

        Raises:
            ValueError: a file's content is not what was written.
        """
        for name, entry in self.manifest["files"].items():
            got = sha256_file(self.folder / name)
            if got != entry["sha256"]:
                raise ValueError(
                    f"{self.folder / name} must have SHA-256 {entry['sha256']}, got {got}: the "
                    f"file is damaged; delete {self.folder} and prepare it again"
                )

    def _check_size(self, name: str, num_bytes: int) -> None:
        path = self.folder / name
        got = path.stat().st_size if path.is_file() else None
        if got != num_bytes:
            came = "no such file" if got is None else f"{got} bytes"
            raise ValueError(
                f"{path} must have {num_bytes} bytes, got {came}: the store is truncated or "
                f"altered; delete {self.folder} and prepare it again"
            )


class TokenSplit:
    """The documents of one split end to end: one array of tokens whatever the number of shards.

    Attributes:
        num_tokens, num_documents: totals over the shards.
    """

    def __init__(self, folder: Path, shards: list[dict[str, Any]], dtype: np.dtype) -> None:
        self.num_tokens = sum(shard["num_tokens"] for shard in shards)
        self.num_documents = sum(shard["num_documents"] for shard in shards)
        self._dtype = dtype
        self._paths = [folder / f"{shard['stem']}.bin" for shard in shards]
        self._offset_paths = [folder / f"{shard['stem']}.offsets.bin" for shard in shards]
        self._maps: list[np.ndarray | None] = [None] * len(shards)
        # _starts[i] is the position of shard i's first token; the last entry is num_tokens.
        self._starts = np.cumsum([0] + [shard["num_tokens"] for shard in shards], dtype=np.int64)

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length), (length,) int64.

        Raises:
            IndexError: the range leaves the split.
        """
        if start < 0 or length < 0 or start + length > self.num_tokens:
            raise IndexError(
                f"tokens [{start}, {start + length}) must lie in [0, {self.num_tokens})"
            )
        out = np.empty(length, dtype=np.int64)
        filled = 0
        while filled < length:
            shard = int(np.searchsorted(self._starts, start + filled, side="right")) - 1
            first = start + filled - int(self._starts[shard])
            tokens = self._map(shard)[first : first + length - filled]
            out[filled : filled + len(tokens)] = tokens
            filled += len(tokens)
        return out

    def document_offsets(self) -> np.ndarray:
        """Where each document starts, and num_tokens last: (num_documents + 1,) int64."""
        pieces = [np.zeros(1, dtype=np.int64)]
        for path, start in zip(self._offset_paths, self._starts, strict=False):
            pieces.append(np.fromfile(path, dtype="<i8")[1:] + start)
        return np.concatenate(pieces)

    def _map(self, shard: int) -> np.ndarray:
        mapped = self._maps[shard]
        if mapped is None:
            mapped = np.memmap(self._paths[shard], dtype=self._dtype, mode="r")
            self._maps[shard] = mapped
        return mapped


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise FileNotFoundError(
            f"a token store must have a {MANIFEST_NAME}, found none in {folder}: it was never "
            "prepared or not finished; prepare it (again) with python -m scripts.prepare_data"
        )
    advice = f"delete {folder} and prepare it again"
    try:
        manifest = json.loads(path.read_bytes())
        version, checksum = manifest["format_version"], manifest["manifest_sha256"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not a token store's manifest ({error!r}): {advice}") from error
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} must have format_version {FORMAT_VERSION}, got {version!r}: {advice}"
        )
    if checksum != _manifest_sha256(manifest):
        raise ValueError(f"{path} must match its manifest_sha256, but was altered: {advice}")
    try:
        _check_consistency(manifest)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} contradicts itself ({error!r}): {advice}") from error
    return manifest


def _check_consistency(manifest: dict[str, Any]) -> None:
    """Sizes in the file list follow from the counts, and no name points out of the folder."""
    files = manifest["files"]
    for name, entry in files.items():
        check_file_entry(name, entry)
    texts = [manifest["key"], manifest["tokenizer"]["name"], manifest["tokenizer"]["sha256"]]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("key and tokenizer must be text")
    if type(manifest["eot"]) is not int or not 0 <= manifest["eot"] < manifest["vocab_size"]:
        raise ValueError(f"eot {manifest['eot']!r}")
    itemsize = token_dtype(manifest["vocab_size"]).itemsize
    if manifest["dtype"] != token_dtype(manifest["vocab_size"]).name:
        raise ValueError(f"dtype {manifest['dtype']!r} for vocab_size {manifest['vocab_size']}")
    for shard in [*manifest["splits"]["train"], *manifest["splits"]["val"]]:
        if any(type(shard[name]) is not int for name in ("num_tokens", "num_documents")):
            raise TypeError(f"counts of {shard['stem']}")
        if files[f"{shard['stem']}.bin"]["bytes"] != shard["num_tokens"] * itemsize:
            raise ValueError(f"size of {shard['stem']}.bin")
        if files[f"{shard['stem']}.offsets.bin"]["bytes"] != 8 * (shard["num_documents"] + 1):
            raise ValueError(f"size of {shard['stem']}.offsets.bin")
    if files["train.counts.bin"]["bytes"] != 8 * manifest["vocab_size"]:
        raise ValueError("size of train.counts.bin")


def _manifest_sha256(manifest: dict[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    return hashlib.sha256(_canonical(rest)).hexdigest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
