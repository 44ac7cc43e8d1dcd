"""Sharded checkpoints: read as a single file, whole or refused, under two names. Written and
continued by several processes: tests/test_distributed.py."""

import json
import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from model.checkpoint import MANIFEST, AtomicCheckpointIO, is_intact, newest_intact, refuse_damaged
from model.run import plan_run
from model.sharded import META, digest, finish, is_sharded, link, load_whole, remove


@pytest.fixture
def checkpoint(tmp_path):
    """(path of a folder that the manifest lists, what was saved)."""
    torch.manual_seed(0)
    weights = {"model.a": torch.randn(3, 2), "model.b": torch.randn(3)}
    moments = {name: {"step": torch.tensor(4.0), "exp_avg": w / 2} for name, w in weights.items()}
    groups = [{"params": ["model.b"], "lr": 0.1}, {"params": ["model.a"], "lr": 0.2}]
    optimizer = {"state": moments, "param_groups": groups}
    part, path = tmp_path / "step-00000004.ckpt.part", tmp_path / "step-00000004.ckpt"
    dcp.save({"state_dict": weights, "optimizer_0": optimizer}, checkpoint_id=part, no_dist=True)
    torch.save({"global_step": 4, "parameter_names": [*weights]}, part / META)
    entry = {"step": 4, **finish(part, path)}
    (tmp_path / MANIFEST).write_text(json.dumps({path.name: entry}))
    return path, weights


def test_one_process_reads_it_as_a_file(checkpoint):
    path, weights = checkpoint
    found = AtomicCheckpointIO().load_checkpoint(path)
    assert found["global_step"] == 4
    for name, value in weights.items():
        assert torch.equal(found["state_dict"][name], value)
    (optimizer,) = found["optimizer_states"]
    assert [group["params"] for group in optimizer["param_groups"]] == [[1], [0]]
    assert [group["lr"] for group in optimizer["param_groups"]] == [0.1, 0.2]
    assert torch.equal(optimizer["state"][0]["exp_avg"], weights["model.a"] / 2)
    assert float(optimizer["state"][1]["step"]) == 4.0


def test_it_is_whole_or_refused(checkpoint):
    path, _ = checkpoint
    assert is_sharded(path) and is_intact(path) and newest_intact(path.parent) == path
    shard = next(path.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert not is_intact(path)
    with pytest.raises(ValueError, match="step-00000004.ckpt is damaged"):
        refuse_damaged(path)


def test_a_second_name_outlives_the_first(checkpoint):
    path, _ = checkpoint
    entry, best = digest(path), path.with_name("best-00000004.ckpt")
    for _ in range(2):
        link(path, best)
    remove(path)
    remove(path)
    assert not path.exists() and digest(best) == entry


class Malice:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def list_again(path):
    entry = {"step": 4, **digest(path)}
    (path.parent / MANIFEST).write_text(json.dumps({path.name: entry}))


def test_members_of_enums_may_be_pickled_by_name(checkpoint, monkeypatch):
    """As Python 3.11.2 does, and a later one reads."""
    path, _ = checkpoint
    index = pickle.loads((path / ".metadata").read_bytes())
    (memory_format, *_) = {
        value.properties.memory_format
        for value in index.state_dict_metadata.values()
        if hasattr(value, "properties")
    }
    assert memory_format is torch.contiguous_format
    encoding = dcp.metadata._MEM_FORMAT_ENCODING
    by_name = lambda member, protocol: (getattr, (type(member), member.name))  # noqa: E731
    monkeypatch.setattr(encoding, "__reduce_ex__", by_name)
    (path / ".metadata").write_bytes(pickle.dumps(index))
    assert b"getattr" in (path / ".metadata").read_bytes()
    list_again(path)
    load_whole(path)


@pytest.mark.parametrize("place", ["index", "value", "torch's own function", "getattr"])
def test_a_malicious_one_is_refused_before_anything_of_it_runs(checkpoint, place, tmp_path):
    path, weights = checkpoint
    if place == "index":
        (path / ".metadata").write_bytes(pickle.dumps(Malice(tmp_path / "made")))
    elif place == "value":
        value = {"state_dict": weights, "optimizer_0": {"x": Malice(tmp_path / "made")}}
        dcp.save(value, checkpoint_id=path, no_dist=True)
    elif place == "getattr":
        call = b"cbuiltins\ngetattr\n(ctorch\nSize\nVnumel\ntR."  # a member of no enum
        (path / ".metadata").write_bytes(call)
    else:
        home = b"torch.distributed.checkpoint.metadata"
        (path / ".metadata").write_bytes(b"c" + home + b"\nos.mkdir\n.")
    list_again(path)
    with pytest.raises(
        ValueError, match="must be a sharded checkpoint of tensors and plain values"
    ):
        load_whole(path)
    moved = tmp_path / "runs/mine/checkpoints" / path.name
    moved.parent.mkdir(parents=True)
    path.rename(moved)
    list_again(moved)
    for options in (dict(resume="auto"), dict(ckpt_path=str(moved))):
        with pytest.raises(ValueError, match="must be a sharded checkpoint"):
            plan_run("mine", str(tmp_path / "runs"), **options)
    assert not (tmp_path / "made").exists()


def test_shards_lie_in_the_folder(checkpoint):
    path, _ = checkpoint
    index = pickle.loads((path / ".metadata").read_bytes())
    for place in index.storage_data.values():
        place.relative_path = f"../{place.relative_path}"
    (path / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ValueError, match="a shard at '../"):
        load_whole(path)
