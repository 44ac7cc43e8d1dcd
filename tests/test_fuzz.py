"""Whatever bytes the files of stores, runs and checkpoints hold: a clear error or their content.

No crash, no hang, no memory beyond the size of the files. 10,000 inputs, the same in every run.
"""

import json
import random
import resource
import time
import warnings
from functools import partial

import numpy as np
import pytest
import safetensors.torch
import torch

from data.prepare import prepare
from data.sequence_store import SequenceStore, write_sequences
from data.sources import open_source
from data.store_parts import StoreParts
from data.token_store import TokenStore, write_manifest
from data.token_stream import Marks
from data.tokenizer import load_tokenizer
from flash_kernels import BlockMask
from model.checkpoint import AtomicCheckpointIO, load_run, newest_intact
from model.gpt import GPT
from model.hf_files import read_own, read_weights
from model.run import plan_run

VALUES = [
    None,
    True,
    0,
    -1,
    2**63,
    1e308,
    "",
    "../x",
    "\x00",
    [],
    {},
    [[]],
    [0],
    {"a": 1},
    "9" * 99,
]
PIECES = [b"", b"\x00" * 8, b"\xff" * 8, b"{", b"]", b'"', b"-1", b"1e999", b"null", b"PK\x03\x04"]


def mutated(raw: bytes, draw: random.Random) -> bytes:
    """Cut, flipped, overwritten, repeated or extended, one to four times."""
    data = bytearray(raw)
    for _ in range(draw.randint(1, 4)):
        start = draw.randrange(len(data) + 1)
        end = min(len(data), start + draw.choice([1, 1, 2, 8, 64, len(data)]))
        kind = draw.randrange(5)
        if kind == 0 and start < len(data):
            data[start] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[start:end] = draw.randbytes(end - start)
        elif kind == 2:
            data[start:end] = draw.choice(PIECES)
        elif kind == 3:
            data[start:start] = data[start:end]
        else:
            del data[start:end]
    return bytes(data)


def edited(content, draw: random.Random):
    """A JSON document with one value replaced, removed or added."""
    content = json.loads(json.dumps(content))
    node, key = content, None
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            break
        key = draw.choice(keys)
        if not isinstance(node[key], dict | list) or not node[key] or draw.random() < 0.2:
            break
        node = node[key]
    if key is None or draw.random() < 0.1:
        return draw.choice(VALUES)
    if draw.random() < 0.2:
        del node[key]
    elif isinstance(node, dict) and draw.random() < 0.1:
        node[draw.choice(["", "../x.bin", "x"])] = node[key]
    else:
        node[key] = draw.choice(VALUES)
    return content


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def survive(inputs, write, read, clear=(ValueError, FileNotFoundError)) -> int:
    """Write and read every input; returns how many were read as if nothing was."""
    read_well = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for content in inputs:
        write(content)
        began = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read()
            read_well += 1
        except clear as error:
            assert str(error)
        assert time.perf_counter() - began < 5.0, content[:1000]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000, "KiB"
    return read_well


def make_token_store(folder):
    (folder / "a.txt").write_text("The whale swims and the ship sails. " * 9)
    options = {"workers": 0, "progress": False, "val_fraction": 0.1}
    source = open_source(str(folder / "a.txt"))
    return prepare(source, folder / "s", tokenizer=load_tokenizer(), **options)


def test_manifest_of_a_token_store(tmp_path):
    store = make_token_store(tmp_path)
    path, draw = store.folder / "manifest.json", random.Random(0)
    raw = path.read_bytes()
    read = partial(TokenStore, store.folder)
    survive((mutated(raw, draw) for _ in range(1500)), path.write_bytes, read)
    signed = {k: v for k, v in store.manifest.items() if k != "manifest_sha256"}

    def write_signed(content):  # as someone would who knows the format
        if isinstance(content, dict):
            write_manifest(store.folder, content)
        else:
            path.write_text(json.dumps(content))

    def read_all():
        opened = TokenStore(store.folder)
        for split in (opened.train, opened.val):
            split.read(0, min(split.num_tokens, 10**6))
            split.document_offsets()
        opened.train_counts()

    survive((edited(signed, draw) for _ in range(1500)), write_signed, read_all)


def test_manifest_of_a_sequence_store(tmp_path):
    examples = [((np.arange(5),), 1), ((np.arange(3),), 0)]
    write_sequences(tmp_path / "s", {"name": "x"}, {"train": lambda: examples}, progress=False)
    path, draw = tmp_path / "s/manifest.json", random.Random(1)
    raw = path.read_bytes()

    def read():
        store = SequenceStore(tmp_path / "s")
        for index in range(store.num_sequences("train")):
            store.sequence("train", index)

    survive((mutated(raw, draw) for _ in range(1000)), path.write_bytes, read)
    contents = (edited(json.loads(raw), draw) for _ in range(1000))
    survive(contents, lambda content: path.write_text(json.dumps(content)), read)


def test_progress_of_an_unfinished_store(tmp_path):
    entry = {"stem": "train-00000", "num_tokens": 1, "num_documents": 1}
    entry["files"] = {"train-00000.bin": {"bytes": 2, "sha256": "0"}}
    progress = {"key": "k", "parts": [{"num_documents": 1, "train": entry, "val": None}]}
    path, draw = tmp_path / "progress.json", random.Random(2)
    raw = json.dumps(progress).encode()
    read = partial(StoreParts, tmp_path, "k", 10)
    survive((mutated(raw, draw) for _ in range(500)), path.write_bytes, read)
    contents = (edited(progress, draw) for _ in range(500))
    survive(contents, lambda content: path.write_text(json.dumps(content)), read)


def test_marks_of_a_stream(tmp_path):
    content = {"key": "k", "places": {"0": [0, 0, 0], "1": [0, 3, 7]}, "sha256": {"0": "0"}}
    path, draw = tmp_path / "marks.json", random.Random(7)
    raw, read = json.dumps(content).encode(), partial(Marks, tmp_path, "k")
    inputs = (mutated(raw, draw) for _ in range(300))
    assert survive(inputs, path.write_bytes, read, clear=()) == 300  # or the first mark alone
    contents = (edited(content, draw) for _ in range(300))
    survive(contents, lambda content: path.write_text(json.dumps(content)), read, clear=())


def save_model(folder):
    torch.manual_seed(0)
    model = GPT(vocab_size=7, max_seqlen=4, depth=1, dim=4, nheads=1, vocab_multiple=1)
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    content = {"global_step": 1, "model_config": model.config, "state_dict": state}
    AtomicCheckpointIO().save_checkpoint(content, folder / "step-00000001.ckpt")
    return folder / "step-00000001.ckpt"


def test_manifest_of_checkpoints(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    save_model(folder)
    path, draw = folder / "manifest.json", random.Random(3)
    raw = path.read_bytes()
    survive(
        (mutated(raw, draw) for _ in range(500)), path.write_bytes, partial(newest_intact, folder)
    )
    contents = (edited(json.loads(raw), draw) for _ in range(500))
    write = lambda content: path.write_text(json.dumps(content))  # noqa: E731
    survive(contents, write, partial(newest_intact, folder))
    # The record of a run: a resume needs none.
    raw = b'{"run_id": "run-12345678", "started": "2026-01-01"}'
    resume = partial(plan_run, "run", str(tmp_path), resume="auto")
    path.unlink()
    save_model(folder)
    inputs = (mutated(raw, draw) for _ in range(500))
    assert survive(inputs, (folder.parent / "run.json").write_bytes, resume) == 500


def test_checkpoint_files(tmp_path):
    path, draw = save_model(tmp_path), random.Random(4)
    raw = path.read_bytes()
    path = tmp_path / "unlisted.ckpt"
    pickled = raw.index(b"data.pkl")
    for _ in range(1500):
        data = mutated(raw, draw)
        if draw.random() < 0.7:  # where the structure is, past the archive's header
            data = (
                raw[:pickled] + mutated(raw[pickled : pickled + 900], draw) + raw[pickled + 900 :]
            )
        survive([data], path.write_bytes, partial(load_run, path))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "own.safetensors"])
def test_weights_of_other_programs(tmp_path, name):
    path, draw, tensors = tmp_path / name, random.Random(5), {"a": torch.ones(4)}
    read = partial(read_weights, tmp_path)
    if name == "pytorch_model.bin":
        torch.save(tensors, path)
    else:
        safetensors.torch.save_file(tensors, path, metadata={"gpt": '{"depth": 1}'})
    if name == "own.safetensors":
        read = partial(read_own, path, "gpt", "it")
    raw = path.read_bytes()
    survive((mutated(raw, draw) for _ in range(400)), path.write_bytes, read)


def test_files_of_block_masks(tmp_path):
    path, draw = tmp_path / "mask.pt", random.Random(6)
    mask = BlockMask.from_dense(torch.ones(2, 2, dtype=torch.bool), 16, 16)
    mask.save(path)
    raw = path.read_bytes()
    survive(
        (mutated(raw, draw) for _ in range(400)), path.write_bytes, partial(BlockMask.load, path)
    )
