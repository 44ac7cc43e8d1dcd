"""Sources of the Long Range Arena's token tasks: ListOps, Text, Retrieval, Image; not Pathfinder.

Each task has its published data, and for Text, Retrieval and Image a stand-in of another origin for
machines that cannot have those. A stand-in says so wherever its results are shown: its numbers
cannot be compared with published ones.

    listops     "generated", or the release's folder with basic_{train,val,test}.tsv
    text        "hf" (IMDb), a folder aclImdb/{train,test}/{pos,neg}/*.txt;
                stand-in: a .zip of {pos,neg}/*.txt (as NLTK's movie_reviews.zip)
    retrieval   the release's folder with new_aan_pairs.{train,eval,test}.tsv;
                stand-in: a .jsonl of long documents (with .xz, .gz or .zst): same one or not?
    image       "hf" (CIFAR-10), a folder with cifar-10-batches-py;
                stand-in: a folder with Fashion-MNIST's {train,t10k}-images-idx3-ubyte.gz

Each also takes "random": a few random values and labels, to see that a run works.

Text is bytes, cut to the task's length; images are grey values, row by row.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from data import lra_readers, lra_stand_ins
from data.listops import NUM_EXAMPLES, SYMBOLS, ListOpsSpec, listops_examples
from data.sequence_store import Example, Splits

SHUFFLE_SEED = 0


@dataclasses.dataclass(frozen=True)
class TokenTask:
    """One task and where its examples come from; nothing is read yet.

    Attributes:
        name: "listops", "text", "retrieval" or "image".
        stand_in: what it is that stands in for the published data; "" where these are used.
        vocab_size: of the token ids that a batch holds.
        first_id: added to a stored value to give its id; ids below are padding.
        num_classes: of labels.
        num_towers: sequences of an example, 1 or 2.
        identity: plain values that determine the content.
        splits: for "train", "val" and "test", what gives the examples, in a fixed order.
    """

    name: str
    stand_in: str
    vocab_size: int
    first_id: int
    num_classes: int
    num_towers: int
    identity: dict[str, Any]
    splits: Splits


def open_task(name: str, source: str | None = None, *, max_length: int) -> TokenTask:
    """The task from the source that the module's table names.

    Args:
        source: None is "generated" for listops and "hf" for text and image.
        max_length: longer texts are cut to so many bytes; of ListOps and images it is a bound that
            the model must reach.
    Raises:
        ValueError: an unknown task, or a length below that of its sequences.
        FileNotFoundError: the source is missing or has no such files.
    """
    makers = {"listops": _listops, "text": _text, "retrieval": _retrieval, "image": _image}
    if name not in makers:
        raise ValueError(f"task must be one of {[*makers]}, got {name!r}")
    if source is None:
        source = {"listops": "generated", "retrieval": ""}.get(name, "hf")
    if source == "random":
        return _random(name, max_length)
    if source not in ("generated", "hf") and (not source or not Path(source).exists()):
        raise FileNotFoundError(
            f"the source of {name} must be an existing file or folder, got {source!r}: see "
            "data/lra_files.py for what each task reads"
        )
    return makers[name](source, max_length)


def _random(name: str, max_length: int) -> TokenTask:
    vocab_size, first_id, num_classes, num_towers = {
        "listops": (len(SYMBOLS), 0, 10, 1),
        "text": (257, 1, 2, 1),
        "retrieval": (257, 1, 2, 2),
        "image": (256, 0, 10, 1),
    }[name]
    lengths = (max_length if name == "image" else max_length // 4, max_length)
    options: dict[str, Any] = {
        "num_values": vocab_size - first_id,
        "num_classes": num_classes,
        "num_towers": num_towers,
        "lengths": lengths,
    }
    splits = {
        split: partial(lra_stand_ins.random_examples, split, **options)
        for split in ("train", "val", "test")
    }
    return TokenTask(
        name,
        "random values and labels: nothing can be learned",
        vocab_size,
        first_id,
        num_classes,
        num_towers,
        _named(name, {"source": "random", "max_length": max_length}),
        splits,
    )


def _listops(source: str, max_length: int) -> TokenTask:
    if max_length < 1999:
        raise ValueError(f"ListOps has up to 1999 symbols, got max_length={max_length}")
    splits: Splits
    if source == "generated":
        spec = ListOpsSpec()

        def generate(split: str) -> Iterator[Example]:
            for tokens, label in listops_examples(spec, split, NUM_EXAMPLES[split]):
                yield (tokens,), label

        splits = {split: _bound(generate, split) for split in NUM_EXAMPLES}
        identity: dict[str, Any] = {"source": "generated", **dataclasses.asdict(spec)}
    else:
        paths = lra_readers.listops_paths(source)
        splits = {s: _bound(lra_readers.read_listops, p) for s, p in paths.items()}
        identity = {"source": "release", "files": _stats(paths.values())}
    return TokenTask("listops", "", len(SYMBOLS), 0, 10, 1, _named("listops", identity), splits)


def _text(source: str, max_length: int) -> TokenTask:
    stand_in = ""
    if source == "hf":
        parts = {s: _bound(lra_readers.read_imdb_hub, s, max_length) for s in ("train", "test")}
        identity: dict[str, Any] = {"source": "hf:stanfordnlp/imdb"}
    elif source.endswith(".zip"):
        stand_in = "labelled reviews of another corpus instead of IMDb"
        parts = {
            split: _bound(lra_stand_ins.read_review_zip, source, split, max_length)
            for split in ("train", "test")
        }
        identity = {"source": "reviews", "files": _stats([Path(source)])}
    else:
        folders = lra_readers.imdb_folders(source)
        parts = {s: _bound(lra_readers.read_imdb, f, max_length) for s, f in folders.items()}
        identity = {"source": "aclImdb", "files": _stats(folders.values())}
    # The arena has no validation set here: the test set doubles as one.
    splits = {"train": parts["train"], "val": parts["test"], "test": parts["test"]}
    identity["max_length"] = max_length
    return TokenTask("text", stand_in, 257, 1, 2, 1, _named("text", identity), splits)


def _retrieval(source: str, max_length: int) -> TokenTask:
    stand_in = ""
    splits: Splits
    if Path(source).is_file():
        stand_in = "two chunks of one document or of two, instead of citing papers (AAN)"
        splits = {
            split: _bound(lra_stand_ins.read_chunk_pairs, source, split, max_length)
            for split in ("train", "val", "test")
        }
        identity: dict[str, Any] = {"source": "chunks", "files": _stats([Path(source)])}
    else:
        paths = lra_readers.aan_paths(source)
        splits = {s: _bound(lra_readers.read_aan, p, max_length) for s, p in paths.items()}
        identity = {"source": "release", "files": _stats(paths.values())}
    identity["max_length"] = max_length
    return TokenTask("retrieval", stand_in, 257, 1, 2, 2, _named("retrieval", identity), splits)


def _image(source: str, max_length: int) -> TokenTask:
    stand_in, pixels = "", 1024
    if source == "hf":
        read: Callable[[str], Iterator[Example]] = lra_readers.read_cifar_hub
        identity: dict[str, Any] = {"source": "hf:uoft-cs/cifar10"}
    elif lra_stand_ins.has_fashion_mnist(source):
        stand_in, pixels = "Fashion-MNIST (28 x 28) instead of CIFAR-10", 784
        read = _bound(lra_stand_ins.read_fashion_mnist, source)
        identity = {"source": "fashion-mnist"}
    else:
        folder = lra_readers.cifar_folder(source)
        read = _bound(lra_readers.read_cifar, folder)
        identity = {"source": "cifar-10-batches-py", "files": _stats(folder.glob("*_batch*"))}
    if max_length < pixels:
        raise ValueError(f"these images have {pixels} pixels, got max_length={max_length}")
    held_out = 5_000  # of the training images, the last after a shuffle, as 45k/5k/10k

    def train() -> Iterator[Example]:
        return iter(_shuffled(read("train"))[:-held_out])

    def val() -> Iterator[Example]:
        return iter(_shuffled(read("train"))[-held_out:])

    splits = {"train": train, "val": val, "test": _bound(read, "test")}
    return TokenTask("image", stand_in, 256, 0, 10, 1, _named("image", identity), splits)


def _shuffled(examples: Iterator[Example]) -> list[Example]:
    kept = list(examples)
    random.Random(SHUFFLE_SEED).shuffle(kept)
    return kept


def _bound(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """`function` with its first arguments given; closures in a loop would share the last ones."""
    return lambda *more: function(*arguments, *more)


def _named(name: str, identity: dict[str, Any]) -> dict[str, Any]:
    return {"task": name, **identity}


def _stats(paths: Any) -> list[list[Any]]:
    """Names and sizes: enough to tell one release from another."""
    files = [f for p in paths for f in (sorted(p.glob("*/*.txt")) if p.is_dir() else [p])]
    if len(files) > 100:
        return [["files", len(files), sum(f.stat().st_size for f in files)]]
    return [[f.name, f.stat().st_size] for f in sorted(files)]
