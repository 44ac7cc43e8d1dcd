"""data/lra_files.py, its readers and stand-ins, and data/sequence_store.py, on small files."""

import gzip
import json
import pickle
import zipfile

import numpy as np
import pytest

from data.listops import evaluate
from data.lra_files import open_task
from data.lra_readers import grey_values
from data.sequence_store import SequenceStore, write_sequences


def examples(task, split):
    return [([s.tobytes() for s in sequences], label) for sequences, label in task.splits[split]()]


def test_listops_release_keeps_its_brackets(tmp_path):
    folder = tmp_path / "lra_release" / "lra_release" / "listops-1000"
    folder.mkdir(parents=True)
    for split, text in (("train", "( ( ( [MAX 3 ) 4 ) ] )"), ("val", "7"), ("test", "7")):
        value = {"train": 4}.get(split, 7)
        (folder / f"basic_{split}.tsv").write_text(f"Source\tTarget\n{text}\t{value}\n")
    task = open_task("listops", str(tmp_path), max_length=2000)
    ((tokens,), label), *rest = task.splits["train"]()
    assert tokens.tolist() == [12, 4, 5, 15] and label == 4 and not rest
    assert (task.vocab_size, task.first_id, task.num_classes, task.stand_in) == (16, 0, 10, "")
    (folder / "basic_val.tsv").write_text("Source\tTarget\n7\tx\n")
    with pytest.raises(ValueError, match="line 2 must end in a digit"):
        list(task.splits["val"]())


def test_listops_is_generated_by_default():
    task = open_task("listops", max_length=2000)
    (tokens,), label = next(iter(task.splits["test"]()))
    assert 500 < len(tokens) < 2000 and evaluate(tokens) == label


def test_aan_pairs_are_bytes_of_both_texts(tmp_path):
    rows = ["1\ta\tb\tfirst text\tsecond", "0.0\tc\td\t\"quoted\"\tb'printed bytes'"]
    for split in ("train", "eval", "test"):
        (tmp_path / f"new_aan_pairs.{split}.tsv").write_text("\n".join(rows) + "\n")
    task = open_task("retrieval", str(tmp_path), max_length=8)
    expected = [([b"first te", b"second"], 1), ([b"quoted", b"printed "], 0)]
    assert examples(task, "val") == expected
    assert (task.num_towers, task.vocab_size, task.first_id) == (2, 257, 1)
    (tmp_path / "new_aan_pairs.test.tsv").write_text("1\ta\tb\tonly one\n")
    with pytest.raises(ValueError, match="line 1 must have 5 fields, got 4"):
        examples(task, "test")


def test_imdb_folder_and_its_test_set_as_validation(tmp_path):
    for split in ("train", "test"):
        for part in ("neg", "pos"):
            (tmp_path / "aclImdb" / split / part).mkdir(parents=True)
            (tmp_path / "aclImdb" / split / part / "0_1.txt").write_bytes(
                b"caf\xc3\xa9 " + part.encode()
            )
    task = open_task("text", str(tmp_path), max_length=7)
    assert examples(task, "train") == [([b"caf\xc3\xa9 n"], 0), ([b"caf\xc3\xa9 p"], 1)]
    assert examples(task, "val") == examples(task, "test")
    assert task.stand_in == ""


def test_reviews_stand_in_splits_by_name(tmp_path):
    path = tmp_path / "reviews.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for part in ("neg", "pos"):
            for i in range(200):
                archive.writestr(f"movie_reviews/{part}/cv{i:03}.txt", f"{part} {i}")
        archive.writestr("movie_reviews/README", "no review")
    task = open_task("text", str(path), max_length=100)
    train, test = examples(task, "train"), examples(task, "test")
    assert len(train) + len(test) == 400 and not {t[0][0] for t in train} & {t[0][0] for t in test}
    assert all(text[0].startswith(b"pos") == (label == 1) for text, label in train + test)
    assert len(test) == pytest.approx(80, abs=4 * 8)  # Binomial(400, 1/5)
    assert "instead of IMDb" in task.stand_in


def test_chunk_pairs_stand_in(tmp_path):
    generator = np.random.default_rng(0)
    with gzip.open(tmp_path / "books.jsonl.gz", "wt") as file:
        for i in range(60):
            words = generator.permutation(2000)
            text = " ".join(f"{i:02}{w:04}" for w in words)
            file.write(json.dumps({"text": text}) + "\n")
    task = open_task("retrieval", str(tmp_path / "books.jsonl.gz"), max_length=70)
    books = {}
    for split in ("val", "test", "train"):
        pairs = examples(task, split)[:200]
        for (first, second), label in pairs:
            names = [sorted(set(w[:2] for w in t.split(b" ")[1:-1])) for t in (first, second)]
            assert all(len(n) == 1 for n in names) and (names[0] == names[1]) == (label == 1)
            assert len(first) == len(second) == 70
            assert label == 0 or not set(first.split(b" ")[1:-1]) & set(second.split(b" ")[1:-1])
            books.setdefault(split, set()).update(n[0] for n in names)
        assert np.mean([label for _, label in pairs]) == 0.5
    assert not books["val"] & books["test"] and not books["val"] & books["train"]
    assert "instead of" in task.stand_in
    with pytest.raises(ValueError, match="at least two documents of 40000 bytes"):
        next(
            iter(
                open_task("retrieval", str(tmp_path / "books.jsonl.gz"), max_length=10000).splits[
                    "val"
                ]()
            )
        )


def write_cifar(folder):
    folder.mkdir()
    generator = np.random.default_rng(0)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        number = 1200 if name != "test_batch" else 3
        pixels = generator.integers(0, 256, (number, 3072), dtype=np.uint8)
        batch = {b"data": pixels, b"labels": [i % 10 for i in range(number)]}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return pixels


def test_cifar_is_grey_and_splits_off_5000(tmp_path):
    pixels = write_cifar(tmp_path / "cifar-10-batches-py")
    task = open_task("image", str(tmp_path), max_length=1024)
    assert len(examples(task, "val")) == 5000 and len(examples(task, "train")) == 1000
    test = list(task.splits["test"]())
    red, green, blue = pixels[1].reshape(3, 1024).astype(float)
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    assert np.abs(test[1][0][0] - luma).max() <= 0.5 + 1e-9 and test[1][1] == 1
    assert (task.vocab_size, task.first_id) == (256, 0)
    evil = {b"data": print, b"labels": []}
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(pickle.dumps(evil, protocol=2))
    with pytest.raises(pickle.UnpicklingError, match="hold arrays"):
        examples(task, "test")


def test_grey_of_grey_is_itself():
    grey = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1).repeat(3, axis=3)
    assert (grey_values(grey)[0] == np.arange(256)).all()


def test_fashion_mnist_stand_in(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (5004, 28, 28), dtype=np.uint8)
    for stem, number in (("train", 5004), ("t10k", 3)):
        for kind, array in (
            ("images-idx3", images[:number]),
            ("labels-idx1", np.arange(number) % 10),
        ):
            header = np.array([0x800 + array.ndim, *array.shape], ">i4").tobytes()
            path = tmp_path / f"{stem}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes(), 1))
    task = open_task("image", str(tmp_path), max_length=1024)
    assert len(examples(task, "train")) == 4 and len(examples(task, "val")) == 5000
    assert examples(task, "test")[2] == ([images[2].tobytes()], 2)
    assert "instead of CIFAR-10" in task.stand_in


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="task must be one of"):
        open_task("sorting", max_length=10)
    with pytest.raises(FileNotFoundError, match="source of retrieval must be an existing"):
        open_task("retrieval", max_length=10)
    for task, name in (("listops", "basic_train.tsv"), ("retrieval", "new_aan_pairs.train.tsv")):
        with pytest.raises(FileNotFoundError, match=f"must hold {name}"):
            open_task(task, str(tmp_path), max_length=2000)
    with pytest.raises(FileNotFoundError, match="unpack aclImdb"):
        open_task("text", str(tmp_path), max_length=10)
    with pytest.raises(FileNotFoundError, match="unpack cifar-10"):
        open_task("image", str(tmp_path), max_length=1024)
    with pytest.raises(ValueError, match="1999 symbols"):
        open_task("listops", max_length=1000)


def test_store_round_trip_and_damage(tmp_path):
    sequences = [np.arange(n, dtype=np.uint8) for n in (3, 1, 5, 2)]
    pairs = [((sequences[0], sequences[1]), 1), ((sequences[2], sequences[3]), 0)]
    splits = {"train": lambda: pairs, "test": lambda: pairs[:1]}
    store = write_sequences(tmp_path / "store", {"task": "x"}, splits, progress=False)
    assert store.labels("train").tolist() == [1, 0] and store.num_sequences("train") == 4
    assert [len(store.sequence("train", i)) for i in range(4)] == [3, 1, 5, 2]
    assert not len(store.labels("val")) and not store.num_sequences("val")
    store.verify()
    assert pickle.loads(pickle.dumps(store)).fingerprint == store.fingerprint
    with pytest.raises(IndexError):
        store.sequence("test", 2)
    with pytest.raises(ValueError, match="hold the same data"):
        write_sequences(tmp_path / "store", {"task": "y"}, splits, progress=False)
    with pytest.raises(ValueError, match="must hold examples"):
        write_sequences(tmp_path / "empty", {}, {"train": lambda: []}, progress=False)
    with pytest.raises(FileNotFoundError, match="must have a manifest.json"):
        SequenceStore(tmp_path / "empty")
    payload = (tmp_path / "store" / "train.tokens.bin").read_bytes()
    (tmp_path / "store" / "train.tokens.bin").write_bytes(b"\x09" + payload[1:])
    with pytest.raises(ValueError, match="SHA-256"):
        SequenceStore(tmp_path / "store").verify()
    (tmp_path / "store" / "train.tokens.bin").write_bytes(payload[1:])
    with pytest.raises(ValueError, match="must have 11 bytes"):
        SequenceStore(tmp_path / "store")
