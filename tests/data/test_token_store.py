"""data/token_store.py: what was written comes back, and what was altered is refused."""

import hashlib
import json
import pickle

import numpy as np
import pytest

from data.token_store import (
    ShardWriter,
    TokenStore,
    is_finished,
    token_dtype,
    write_atomically,
    write_manifest,
)

SHARDS = {
    "train-00000": [[1, 2, 3], [4]],
    "train-00001": [[5, 6]],
    "val": [[7, 8, 9]],
}


def write_store(folder, vocab_size=10, change=None):
    """A store of SHARDS; `change` edits the manifest before its checksum is taken."""
    folder.mkdir(exist_ok=True)
    files, splits = {}, {"train": [], "val": []}
    for stem, documents in SHARDS.items():
        writer = ShardWriter(folder, stem, vocab_size)
        for document in documents:
            writer.append(np.array(document))
            writer.end_document()
        entry = writer.commit()
        files.update(entry.pop("files"))
        splits[stem.split("-")[0]].append({"stem": stem, **entry})
    counts = np.bincount([1, 2, 3, 4, 5, 6], minlength=vocab_size).astype("<i8")
    files["train.counts.bin"] = write_atomically(folder / "train.counts.bin", counts.tobytes())
    manifest = {
        "key": "0",
        "tokenizer": {"name": "test", "sha256": "0"},
        "vocab_size": vocab_size,
        "eot": 0,
        "dtype": token_dtype(vocab_size).name,
        "splits": splits,
        "files": files,
    }
    if change is not None:
        change(manifest)
    write_manifest(folder, manifest)
    return folder


def test_tokens_cross_shard_edges(tmp_path):
    store = TokenStore(write_store(tmp_path / "s"))
    assert (store.train.num_tokens, store.train.num_documents) == (6, 3)
    assert store.train.read(0, 6).tolist() == [1, 2, 3, 4, 5, 6]
    assert store.train.read(3, 2).tolist() == [4, 5]
    assert store.train.read(4, 2).tolist() == [5, 6]
    assert store.train.read(6, 0).tolist() == []
    assert store.train.read(0, 6).dtype == np.int64
    assert store.train.document_offsets().tolist() == [0, 3, 4, 6]
    assert store.val.read(1, 2).tolist() == [8, 9]
    assert store.val.document_offsets().tolist() == [0, 3]
    assert store.train_counts().tolist() == [0, 1, 1, 1, 1, 1, 1, 0, 0, 0]
    store.verify()


@pytest.mark.parametrize("start,length", [(-1, 2), (5, 2), (0, 7), (0, -1)])
def test_reading_outside_is_refused(tmp_path, start, length):
    with pytest.raises(IndexError, match=r"must lie in \[0, 6\)"):
        TokenStore(write_store(tmp_path / "s")).train.read(start, length)


@pytest.mark.parametrize("vocab_size,itemsize", [(10, 2), (65536, 2), (65537, 4), (70000, 4)])
def test_dtype_holds_every_id(tmp_path, vocab_size, itemsize):
    assert token_dtype(vocab_size).itemsize == itemsize
    writer = ShardWriter(tmp_path, "train-00000", vocab_size)
    writer.append(np.array([0, vocab_size - 1], dtype=np.uint32))
    writer.end_document()
    writer.commit()
    raw = (tmp_path / "train-00000.bin").read_bytes()
    assert raw == b"\0" * itemsize + (vocab_size - 1).to_bytes(itemsize, "little")
    assert [p.name for p in tmp_path.glob("*.tmp")] == []


@pytest.mark.parametrize("bad", [-1, 10, 65536])
def test_ids_outside_the_vocabulary_never_reach_the_file(tmp_path, bad):
    writer = ShardWriter(tmp_path, "train-00000", 10)
    with pytest.raises(ValueError, match=r"must be in \[0, 10\)"):
        writer.append(np.array([1, bad]))
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


def test_store_without_manifest_is_unfinished(tmp_path):
    folder = write_store(tmp_path / "s")
    (folder / "manifest.json").unlink()
    assert not is_finished(folder)
    with pytest.raises(FileNotFoundError, match="not finished; prepare it"):
        TokenStore(folder)


@pytest.mark.parametrize("name", ["train-00001.bin", "val.offsets.bin", "train.counts.bin"])
@pytest.mark.parametrize("change", ["truncated", "longer", "missing"])
def test_wrong_sizes_are_refused(tmp_path, name, change):
    path = write_store(tmp_path / "s") / name
    raw = path.read_bytes()
    path.unlink()
    if change != "missing":
        path.write_bytes(raw[:-1] if change == "truncated" else raw + b"\0")
    with pytest.raises(
        ValueError, match=f"{name} must have {len(raw)} bytes, got .*prepare it again"
    ):
        TokenStore(path.parent)


def test_flipped_bit_is_found_by_verify(tmp_path):
    path = write_store(tmp_path / "s") / "val.bin"
    raw = bytearray(path.read_bytes())
    raw[2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ValueError, match="val.bin must have SHA-256"):
        TokenStore(path.parent).verify()


def test_altered_manifest_is_refused(tmp_path):
    path = write_store(tmp_path / "s") / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"eot": 0', '"eot": 1'))
    with pytest.raises(ValueError, match="was altered"):
        TokenStore(path.parent)
    path.write_text(text.replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(ValueError, match="must have format_version 1, got 2"):
        TokenStore(path.parent)


def test_any_damage_to_the_manifest_is_a_clear_error(tmp_path):
    path = write_store(tmp_path / "s") / "manifest.json"
    raw = path.read_bytes()
    random = np.random.default_rng(0)
    damaged = [b"", b"null", b"[]", b"{}", b"\xff", b"[" * 100_000, raw[: len(raw) // 2]]
    for _ in range(300):
        flipped = bytearray(raw)
        flipped[random.integers(len(raw) - 1)] ^= 1 << random.integers(8)
        damaged.append(bytes(flipped))
    for content in damaged:
        path.write_bytes(content)
        try:  # white space may change and the meaning stay
            store = TokenStore(path.parent)
        except ValueError as error:
            assert "prepare it again" in str(error)
        else:
            assert store.manifest == json.loads(raw)


def edit_name(manifest):
    manifest["files"]["../x.bin"] = manifest["files"]["val.bin"]


def edit_count(manifest):
    manifest["splits"]["train"][0]["num_tokens"] += 1


def edit_documents(manifest):
    manifest["splits"]["val"][0]["num_documents"] = 0


def edit_dtype(manifest):
    manifest["vocab_size"] = 70000


def edit_missing(manifest):
    del manifest["splits"]["val"]


@pytest.mark.parametrize(
    "change", [edit_name, edit_count, edit_documents, edit_dtype, edit_missing]
)
def test_contradictory_manifest_is_refused(tmp_path, change):
    folder = write_store(tmp_path / "s", change=change)
    with pytest.raises(ValueError, match="contradicts itself"):
        TokenStore(folder)


def test_fingerprint_follows_the_data(tmp_path):
    first = TokenStore(write_store(tmp_path / "a")).fingerprint
    assert TokenStore(write_store(tmp_path / "b")).fingerprint == first

    def other_tokenizer(manifest):
        manifest["tokenizer"]["sha256"] = "1"

    other = write_store(tmp_path / "c", change=other_tokenizer)
    assert TokenStore(other).fingerprint != first


def test_pickles_as_its_folder(tmp_path):
    store = TokenStore(write_store(tmp_path / "s"))
    store.train.read(0, 6)  # maps the files
    payload = pickle.dumps(store)
    assert len(payload) < 500
    assert pickle.loads(payload).train.read(2, 3).tolist() == [3, 4, 5]


def test_entry_hash_is_that_of_the_file(tmp_path):
    entry = write_atomically(tmp_path / "x", b"abc")
    assert entry == {"bytes": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
