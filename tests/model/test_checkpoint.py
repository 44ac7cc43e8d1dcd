"""Checkpoints are whole or absent; a damaged one is noticed and passed over."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from model import checkpoint as ckpt
from model.checkpoint import AtomicCheckpointIO, find_checkpoint, is_intact, newest_intact

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
    with pytest.raises(Exception, match="[Ww]eights.only"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "bad.ckpt", weights_only=False)


@pytest.mark.slow
def test_kill_while_saving_always_leaves_a_loadable_checkpoint(tmp_path):
    program = (
        "import sys, torch; from pathlib import Path; from model.checkpoint import *\n"
        "for step in range(1, 10**6):\n"
        "    AtomicCheckpointIO().save_checkpoint({'global_step': step, 'w': torch.full((300000,),"
        " float(step))}, Path(sys.argv[1]) / f'step-{step % 3:08d}.ckpt')\n"
        "    if step == 1: print('ready', flush=True)\n"
    )
    for delay in (0.011, 0.053, 0.118):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE
        )
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        manifest = json.loads((tmp_path / "manifest.json").read_text())
        intact = [name for name in manifest if is_intact(tmp_path / name)]
        assert len(intact) >= len(manifest) - 1  # at most the one being replaced
        loaded = AtomicCheckpointIO().load_checkpoint(tmp_path / intact[0])
        assert torch.all(loaded["w"] == loaded["global_step"])


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
