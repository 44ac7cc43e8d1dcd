"""Checkpoints are whole or absent; a damaged one is noticed and passed over."""

import errno
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from model import checkpoint as ckpt
from model.checkpoint import (
    AtomicCheckpointIO,
    find_checkpoint,
    is_intact,
    load_run,
    newest_intact,
    read_manifest,
)
from model.gpt import GPT

ROOT = Path(__file__).parents[2]


def save(folder, step):
    path = folder / f"step-{step:08d}.ckpt"
    content = {"global_step": step, "weights": torch.arange(1000.0) + step}
    AtomicCheckpointIO().save_checkpoint(content, path)
    return path


def test_saved_checkpoint_is_listed_intact_and_loads(tmp_path):
    path = save(tmp_path, 5)
    assert is_intact(path)
    loaded = AtomicCheckpointIO().load_checkpoint(path)
    assert torch.equal(loaded["weights"], torch.arange(1000.0) + 5)


def damage_flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def damage_empty(path):
    path.write_bytes(b"")


def damage_remove(path):
    path.unlink()


@pytest.mark.parametrize("damage", [damage_flip, damage_truncate, damage_empty, damage_remove])
def test_damaged_newest_falls_back_to_the_one_before(tmp_path, damage):
    older, newest = save(tmp_path, 5), save(tmp_path, 10)
    assert newest_intact(tmp_path) == newest
    damage(newest)
    with pytest.warns(UserWarning, match="step-00000010.ckpt is damaged"):
        assert newest_intact(tmp_path) == older


def test_file_that_the_manifest_does_not_list_is_never_loaded(tmp_path):
    save(tmp_path, 5)
    (tmp_path / "step-00000009.ckpt").write_bytes((tmp_path / "step-00000005.ckpt").read_bytes())
    assert newest_intact(tmp_path).name == "step-00000005.ckpt"


def test_full_disk_leaves_the_older_checkpoint_and_no_fragment(tmp_path, monkeypatch):
    older = save(tmp_path, 5)

    class FullDisk:
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

        def flush(self):
            pass

    real = ckpt._HashingFile
    monkeypatch.setattr(ckpt, "_HashingFile", lambda file: real(FullDisk()))
    with pytest.warns(UserWarning, match="was not saved .*No space left"):
        save(tmp_path, 10)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["manifest.json", older.name]
    assert newest_intact(tmp_path) == older


def test_malicious_pickle_is_refused(tmp_path):
    class Malice:
        def __reduce__(self):
            return (os.system, ("true",))

    torch.save({"global_step": 1, "x": Malice()}, tmp_path / "bad.ckpt")
    with pytest.raises(ValueError, match="opens with weights_only=True.*it calls posix.system"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "bad.ckpt", weights_only=False)


SAVES_FOR_EVER = """
import os, sys, time, torch
from pathlib import Path
from model.checkpoint import AtomicCheckpointIO
folder = Path(sys.argv[1])
def last():
    return max([int(p.stem[5:]) for p in folder.glob("step-*.ckpt")], default=0)
def save(step):
    content = {"global_step": step, "state_dict": {"w": torch.full((100_000,), float(step))}}
    AtomicCheckpointIO().save_checkpoint(content, folder / f"step-{step:08d}.ckpt")
save(1)
began = time.monotonic()
save(2)
one_save = time.monotonic() - began
for share in sys.argv[2:]:
    before = last()
    child = os.fork()
    while child == 0:
        save(last() + 1)
    deadline = time.monotonic() + 60
    while last() == before:  # however slow the machine is now
        time.sleep(0.001)
        assert time.monotonic() < deadline, "no save came"
    time.sleep(float(share) * one_save)
    os.kill(child, 9)
    os.waitpid(child, 0)
    print(last(), flush=True)
"""


def test_50_kills_while_saving_lose_at_most_the_save_under_way(tmp_path):
    """TMPDIR is another file system, or none: nothing is written there."""
    shares = np.random.default_rng(0).uniform(0.0, 2.0, 50)  # of the time that a save takes
    command = [sys.executable, "-c", SAVES_FOR_EVER, str(tmp_path), *map(str, shares)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": "/dev/shm"}
    environment["OMP_NUM_THREADS"] = "1"  # a pool of threads does not outlive a fork
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    with process.stdout as lines:
        written = [int(line) for line in lines]
    assert process.wait() == 0 and len(written) == 50 and written[-1] > 50
    manifest = read_manifest(tmp_path)
    for step in range(1, written[-1] + 1):
        path = tmp_path / f"step-{step:08d}.ckpt"
        if path.name in manifest:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            assert digest == manifest[path.name]["sha256"]
        else:  # killed between the two renames: the next process wrote the step after it
            assert step in written
    loaded = AtomicCheckpointIO().load_checkpoint(newest_intact(tmp_path))
    assert loaded["global_step"] >= written[-1] - 1
    assert torch.all(loaded["state_dict"]["w"] == loaded["global_step"])


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"../x.ckpt": {}}'])
def test_damaged_manifest_costs_no_checkpoint(tmp_path, content):
    older, newest = save(tmp_path, 5), save(tmp_path, 10)
    damage_flip(newest)
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.warns(UserWarning, match="manifest.json is damaged"):
        assert newest_intact(tmp_path) == older


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    older = save(tmp_path, 5)
    weights = {"fine": torch.ones(2), "bad": torch.tensor([1.0, float("nan")])}
    content = {"global_step": 10, "state_dict": weights}
    with pytest.warns(
        UserWarning, match="step-00000010.ckpt was not saved .NaN or infinity in bad"
    ):
        AtomicCheckpointIO().save_checkpoint(content, tmp_path / "step-00000010.ckpt")
    assert newest_intact(tmp_path) == older


SIZES = {"vocab_size": 7, "max_seqlen": 4, "depth": 1, "dim": 4, "nheads": 1}


def write_model(path, config=None, change=None):
    """A checkpoint of a small GPT; other options in its configuration, other tensors."""
    model = GPT(**SIZES)
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    state |= change or {}
    torch.save({"model_config": {**model.config, **(config or {})}, "state_dict": state}, path)
    return path


@pytest.mark.parametrize(
    "config, change, message",
    [
        ({"_target_": "os.system"}, {}, "must hold options of a model.*'_target_'"),
        ({"attention": "os.system"}, {}, "must hold options of a model.*'attention'"),
        ({"bias": {"_target_": "os.system"}}, {}, "must hold plain values"),
        ({"colour": 3}, {}, "has options that a GPT has not: colour"),
        ({"depth": 10**9}, {}, "holds 1 blocks, its model_config 1000000000"),
        ({"dim": 2**20}, {}, "contradicts itself"),
        ({}, {"model.norm.bias": torch.zeros(1).expand(2**40)}, "more than its bytes"),
        ({}, {"model.norm.bias": "text"}, "must hold a state dict of tensors"),
    ],
)
def test_what_a_checkpoint_says_of_its_model_is_checked(tmp_path, config, change, message):
    model, _ = load_run(write_model(tmp_path / "good.ckpt"))
    assert model(torch.zeros(1, 4, dtype=torch.long)).shape == (1, 4, 7)
    with pytest.raises(ValueError, match=message):
        load_run(write_model(tmp_path / "bad.ckpt", config, change))


def test_compressed_archive_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb.ckpt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb/data.pkl", b"\0" * 10**6)
    with pytest.raises(ValueError, match="compressed entries"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "bomb.ckpt")


def test_find_checkpoint_by_name_folder_and_file(tmp_path):
    folder = tmp_path / "runs" / "mine" / "checkpoints"
    path = save(folder, 7)
    root = str(tmp_path / "runs")
    assert find_checkpoint("mine", "best", root) == path  # nothing was validated yet
    assert find_checkpoint(folder.parent, "last") == path
    assert find_checkpoint(path) == path
    best = folder / "best-00000007.ckpt"
    best.write_bytes(b"torn")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {best.name: manifest[path.name]}))
    with pytest.warns(UserWarning, match="best-00000007.ckpt is damaged"):
        assert find_checkpoint("mine", "best", root) == path
    with pytest.raises(ValueError, match="best-00000007.ckpt is damaged"):
        find_checkpoint(best)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(FileNotFoundError, match="no run at theirs"):
        find_checkpoint("theirs", runs_root=root)
    path.unlink()
    with (
        pytest.warns(UserWarning, match="damaged"),
        pytest.raises(FileNotFoundError, match="no intact checkpoint"),
    ):
        find_checkpoint("mine", "last", root)
