"""What stands in for the Long Range Arena's data where those cannot be had; see data.lra_files."""

from __future__ import annotations

import gzip
import hashlib
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np

from data.lra_readers import as_values
from data.sequence_store import Example
from data.text_files import Report, read_file

_NUM_PAIRS = {"train": 20_000, "val": 2_000, "test": 2_000}
_NUM_RANDOM = 64
_FASHION = {"train": "train", "test": "t10k"}


def read_review_zip(path: str, split: str, max_length: int) -> Iterator[Example]:
    """Reviews in folders pos and neg of a .zip; those whose name hashes to 0 mod 5 are the test."""
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            parts = PurePosixPath(name).parts
            if not name.endswith(".txt") or len(parts) < 2 or parts[-2] not in ("neg", "pos"):
                continue
            is_test = hashlib.sha256("/".join(parts[-2:]).encode()).digest()[0] % 5 == 0
            if is_test == (split == "test"):
                yield (as_values(archive.read(name), max_length),), int(parts[-2] == "pos")


def read_chunk_pairs(path: str, split: str, max_length: int) -> Iterator[Example]:
    """Pairs of chunks: label 1 if both are of one document, and they do not overlap.

    Documents of the three splits are different ones: by a hash of the text, 80, 10 and 10 %.
    """
    documents = []
    report = Report()
    pieces: list[str] = []
    for piece, is_last in read_file(Path(path), "text", report):
        pieces.append(piece)
        if is_last:
            payload = "".join(pieces).encode()
            pieces = []
            if _split_of(payload) == split and len(payload) >= 4 * max_length:
                documents.append(payload)
    if len(documents) < 2:
        raise ValueError(
            f"{path} must hold at least two documents of {4 * max_length} bytes for its {split} "
            f"split, got {len(documents)}: use a larger corpus or shorter chunks"
        )
    draw = random.Random(f"chunk pairs {split}").random
    for index in range(_NUM_PAIRS[split]):
        first = int(draw() * len(documents))
        second = (first + 1 + int(draw() * (len(documents) - 1))) % len(documents)
        label = index % 2
        if label:
            # Halves of the document, so that the two chunks never overlap.
            middle = len(documents[first]) // 2
            halves = documents[first][:middle], documents[first][middle:]
            texts = halves if draw() < 0.5 else halves[::-1]
        else:
            texts = documents[first], documents[second]
        starts = [int(draw() * (len(text) - max_length)) for text in texts]
        chunks = [t[s : s + max_length] for t, s in zip(texts, starts, strict=True)]
        yield tuple(as_values(chunk, max_length) for chunk in chunks), label


def has_fashion_mnist(folder: str) -> bool:
    return (Path(folder) / "train-images-idx3-ubyte.gz").is_file()


def read_fashion_mnist(folder: str, split: str) -> Iterator[Example]:
    """28 x 28 grey values, row by row."""
    stem = _FASHION[split]
    images = _read_idx(Path(folder) / f"{stem}-images-idx3-ubyte.gz", 3)
    labels = _read_idx(Path(folder) / f"{stem}-labels-idx1-ubyte.gz", 1)
    for image, label in zip(images, labels.tolist(), strict=True):
        yield (image.reshape(-1),), label


def random_examples(
    split: str, *, num_values: int, num_classes: int, num_towers: int, lengths: tuple[int, int]
) -> Iterator[Example]:
    """Random values and labels of a task's form: to see that it runs, or how fast.

    Args:
        num_values: what a stored value is below.
        lengths: shortest and longest sequence.
    """
    rng = np.random.default_rng([len(split), lengths[1]])
    for _ in range(_NUM_RANDOM):
        sizes = rng.integers(lengths[0], lengths[1] + 1, num_towers)
        sequences = [rng.integers(0, num_values, size, dtype=np.uint8) for size in sizes]
        yield tuple(sequences), int(rng.integers(num_classes))


def _read_idx(path: Path, num_axes: int) -> np.ndarray:
    with gzip.open(path, "rb") as file:
        payload = file.read()
    header = np.frombuffer(payload, ">i4", 1 + num_axes)
    if header[0] != 0x800 + num_axes:
        raise ValueError(f"{path} is no idx file of {num_axes} axes of bytes: fetch it again")
    return np.frombuffer(payload, np.uint8, offset=4 * (1 + num_axes)).reshape(header[1:])


def _split_of(payload: bytes) -> str:
    draw = hashlib.sha256(payload).digest()[0]  # of 256
    return "test" if draw < 26 else "val" if draw < 52 else "train"
