"""Readers of the Long Range Arena's published files, one example at a time.

Every reader yields ((values, ...), label) with values (length,) uint8: bytes of text, grey values,
ListOps tokens.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data.listops import encode
from data.sequence_store import Example


def as_values(text: str | bytes, max_length: int) -> np.ndarray:
    """The first bytes of a text, (length,) uint8; a space for an empty one."""
    payload = text.encode("utf-8", errors="replace") if isinstance(text, str) else text
    return np.frombuffer(payload[:max_length] or b" ", dtype=np.uint8)


def grey_values(images: np.ndarray) -> np.ndarray:
    """Luma of (n, height, width, 3) uint8 as (n, height * width) uint8 (ITU-R BT.601)."""
    luma = images.astype(np.int64) @ np.array([299, 587, 114])
    return ((luma + 500) // 1000).astype(np.uint8).reshape(len(images), -1)


def listops_paths(root: str | Path) -> dict[str, Path]:
    """basic_{train,val,test}.tsv, wherever they are below `root`."""
    names = {split: f"basic_{split}.tsv" for split in ("train", "val", "test")}
    return _find_files(Path(root), names)


def read_listops(path: Path) -> Iterator[Example]:
    """Rows of Source and Target. The parentheses go, the closing brackets stay."""
    for number, fields in _rows(path, 2):
        if number == 1 and fields[0] == "Source":
            continue
        if not fields[1].isdigit() or int(fields[1]) > 9:
            raise ValueError(f"{path}, line {number} must end in a digit, got {fields[1]!r}")
        yield (encode(fields[0]),), int(fields[1])


def aan_paths(root: str | Path) -> dict[str, Path]:
    """new_aan_pairs.{train,eval,test}.tsv, wherever they are below `root`."""
    names = {"train": "train", "val": "eval", "test": "test"}
    return _find_files(Path(root), {s: f"new_aan_pairs.{n}.tsv" for s, n in names.items()})


def read_aan(path: Path, max_length: int) -> Iterator[Example]:
    """Rows of label, two ids and two texts, these plain, in quotes or as Python prints bytes."""
    for number, (label, _, _, first, second) in _rows(path, 5):
        if label.strip('"') not in ("0", "1", "0.0", "1.0"):
            raise ValueError(f"{path}, line {number} must start with 0 or 1, got {label!r}")
        texts = tuple(as_values(_unquoted(text), max_length) for text in (first, second))
        yield texts, int(float(label.strip('"')))


def imdb_folders(root: str | Path) -> dict[str, Path]:
    """aclImdb's train and test, where `root` is aclImdb or holds it."""
    for folder in (Path(root), Path(root) / "aclImdb"):
        if all((folder / s / p).is_dir() for s in ("train", "test") for p in ("pos", "neg")):
            return {split: folder / split for split in ("train", "test")}
    raise FileNotFoundError(
        f"IMDb must be a folder with train and test, each with pos and neg, got {root}: unpack "
        "aclImdb_v1.tar.gz there"
    )


def read_imdb(folder: Path, max_length: int) -> Iterator[Example]:
    for label, part in enumerate(("neg", "pos")):
        for path in sorted((folder / part).glob("*.txt")):
            yield (as_values(path.read_bytes(), max_length),), label


def read_imdb_hub(split: str, max_length: int) -> Iterator[Example]:
    for row in _hub("stanfordnlp/imdb", split):
        yield (as_values(row["text"], max_length),), int(row["label"])


def cifar_folder(root: str | Path) -> Path:
    """cifar-10-batches-py, which `root` is or holds."""
    for folder in (Path(root), Path(root) / "cifar-10-batches-py"):
        if (folder / "data_batch_1").is_file() and (folder / "test_batch").is_file():
            return folder
    raise FileNotFoundError(
        f"CIFAR-10 must be a folder with data_batch_1 ... 5 and test_batch, got {root}: unpack "
        "cifar-10-python.tar.gz there"
    )


def read_cifar(folder: Path, split: str) -> Iterator[Example]:
    """Images as 1024 grey values. The files are pickles, of which only arrays are let in."""
    names = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
    for name in names:
        with open(folder / name, "rb") as file:
            batch = _ArrayUnpickler(file, encoding="bytes").load()
        pixels = np.asarray(batch[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32)
        rows = grey_values(pixels.transpose(0, 2, 3, 1))
        yield from (((row,), int(y)) for row, y in zip(rows, batch[b"labels"], strict=True))


def read_cifar_hub(split: str) -> Iterator[Example]:
    for row in _hub("uoft-cs/cifar10", split):
        image = np.asarray(row["img"], dtype=np.uint8)[None]
        yield (grey_values(image)[0],), int(row["label"])


class _ArrayUnpickler(pickle.Unpickler):
    _ALLOWED = {"_reconstruct", "ndarray", "dtype", "_frombuffer"}

    def find_class(self, module: str, name: str) -> Any:
        is_array = module.split(".")[0] == "numpy" and name in self._ALLOWED
        if is_array or (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"CIFAR-10's files hold arrays, not {module}.{name}")


def _hub(name: str, split: str) -> Any:
    import datasets

    try:
        return datasets.load_dataset(name, split=split)
    except (OSError, RuntimeError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConnectionError(
            f"hf:{name} cannot be loaded ({error}): connect this machine to the network, or give "
            "local files as source; data/lra_files.py lists them, and the stand-ins"
        ) from error


def _find_files(root: Path, names: dict[str, str]) -> dict[str, Path]:
    paths = {}
    for split, name in names.items():
        found = sorted(root.rglob(name), key=lambda path: (len(path.parts), path))
        if not found:
            raise FileNotFoundError(
                f"{root} must hold {name}, found none: unpack the release there"
            )
        paths[split] = found[0]
    return paths


def _rows(path: Path, num_fields: int) -> Iterator[tuple[int, list[str]]]:
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            fields = line.rstrip("\r\n").split("\t")
            if len(fields) != num_fields:
                raise ValueError(
                    f"{path}, line {number} must have {num_fields} fields, got {len(fields)}"
                )
            yield number, fields


def _unquoted(text: str) -> str:
    for quote in ('"', "b'", 'b"', "'"):
        if len(text) > len(quote) and text.startswith(quote) and text.endswith(quote[-1]):
            return text[len(quote) : -1]
    return text
