"""data/pathfinder_store.py and data/pathfinder_release.py: sets on disk, whole or not at all."""

import json

import numpy as np
import pytest

import data.pathfinder_store as pathfinder_store
from data.pathfinder import PathfinderSpec, make_scenes, render, render_snake_ids
from data.pathfinder_release import PathfinderRelease, export_release
from data.pathfinder_store import PathfinderStore, pathfinder_folder, prepare_pathfinder
from data.png import encode_png, read_png

SPEC = PathfinderSpec(32, 6)
NUM = {"train": 50, "val": 7, "test": 9}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(pathfinder_store, "_PART_SCENES", 16)


def prepare(folder, **options):
    return prepare_pathfinder(SPEC, folder, NUM, **{"workers": 0, "progress": False, **options})


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_set_holds_the_samples_of_its_spec(tmp_path):
    store = prepare(tmp_path / "set")
    assert [store.num_images(s) for s in ("train", "val", "test")] == [50, 7, 9]
    ids = np.array([3, 49, 17])
    scenes = make_scenes(SPEC, "train", ids)
    assert store.scenes("train", ids).tobytes() == scenes.tobytes()
    assert (store.images("train", ids) == render(SPEC, scenes)).all()
    assert (store.snake_ids("train", ids) == render_snake_ids(SPEC, scenes)).all()
    store.verify()
    assert sorted(contents(tmp_path / "set")) == [
        "manifest.json",
        "test.bin",
        "train.bin",
        "val.bin",
    ]


def test_a_stopped_run_is_continued_to_the_same_bytes(tmp_path, monkeypatch):
    whole = prepare(tmp_path / "whole")
    made = []

    def stop_at_third(spec, split, indices):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(split)
        return make_scenes(spec, split, indices)

    with monkeypatch.context() as patch:
        patch.setattr(pathfinder_store, "make_scenes", stop_at_third)
        with pytest.raises(KeyboardInterrupt):
            prepare(tmp_path / "set")
    with pytest.raises(FileNotFoundError, match="must have a manifest.json"):
        PathfinderStore(tmp_path / "set")
    redone = []
    monkeypatch.setattr(
        pathfinder_store, "make_scenes", lambda *a: redone.append(a[2][0]) or make_scenes(*a)
    )
    store = prepare(tmp_path / "set")
    assert len(redone) == 6 - 2, "four, one and one parts, of which two were there"
    assert contents(tmp_path / "set") == contents(tmp_path / "whole")
    assert store.fingerprint == whole.fingerprint


@pytest.mark.slow
def test_workers_change_nothing(tmp_path):
    prepare(tmp_path / "one")
    prepare(tmp_path / "two", workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_damage_and_other_sets_are_refused(tmp_path):
    folder = tmp_path / "set"
    prepare(folder)
    with pytest.raises(ValueError, match="must be new or hold the same set"):
        prepare_pathfinder(SPEC, folder, {"train": 5}, workers=0, progress=False)
    payload = bytearray((folder / "val.bin").read_bytes())
    payload[0] ^= 1
    (folder / "val.bin").write_bytes(payload)
    with pytest.raises(ValueError, match="SHA-256"):
        PathfinderStore(folder).verify()
    (folder / "val.bin").write_bytes(payload[:-1])
    with pytest.raises(ValueError, match="truncated or altered"):
        PathfinderStore(folder)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest["identity"]["tables_sha256"] = "0"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="other sprites"):
        PathfinderStore(folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="got files such as 'notes.txt'"):
        prepare(tmp_path / "other")
    with pytest.raises(ValueError, match="must give numbers for"):
        prepare_pathfinder(SPEC, tmp_path / "new", {"dev": 5})


def test_folders_differ_by_what_they_hold(tmp_path):
    specs = [SPEC, PathfinderSpec(32, 9), PathfinderSpec(32, 6, balanced=True)]
    folders = {pathfinder_folder(tmp_path, spec) for spec in specs}
    folders.add(pathfinder_folder(tmp_path, SPEC, NUM))
    assert len(folders) == 4


def test_png_round_trip(tmp_path):
    pytest.importorskip("PIL")
    image = np.random.default_rng(0).integers(0, 256, (5, 7), dtype=np.uint8)
    (tmp_path / "a.png").write_bytes(encode_png(image))
    assert (read_png(tmp_path / "a.png") == image).all()
    (tmp_path / "b.png").write_bytes(encode_png(image)[:40])
    with pytest.raises(ValueError, match="damaged image"):
        read_png(tmp_path / "b.png")
    with pytest.raises(ValueError, match="uint8"):
        encode_png(image.astype(int))


def test_release_round_trip_through_nested_folders(tmp_path):
    pytest.importorskip("PIL")
    scenes = make_scenes(SPEC, "train", np.arange(12))
    folder = export_release(
        SPEC, [scenes[:5], scenes[5:]], tmp_path / "lra_release" / "lra_release"
    )
    assert folder.relative_to(tmp_path / "lra_release/lra_release").as_posix() == (
        "pathfinder32/curv_baseline"
    )
    for root in (tmp_path, tmp_path / "lra_release", folder, folder.parent):
        release = PathfinderRelease(root, 32, 6)
        assert release.labels.tolist() == scenes["label"].tolist()
    ids = np.array([11, 0, 7])
    assert (release.images(ids) == render(SPEC, scenes[ids])).all()
    line = (folder / "metadata" / "0.npy").read_text().splitlines()[7]
    label = int(scenes["label"][7])
    # continuity, contour and distractor length, paddle length, thickness, margin, contrasts
    assert line == f"imgs/0 sample_7.png 7 {label} 1.0 6 2 2 0.5 1 1"


def test_release_skips_the_empty_image_and_reads_real_arrays(tmp_path):
    scenes = make_scenes(SPEC, "train", np.arange(6))
    folder = export_release(SPEC, [scenes], tmp_path)
    (folder / "imgs" / "0" / "sample_2.png").write_bytes(b"")
    release = PathfinderRelease(tmp_path, 32, 6)
    assert release.num_skipped == 1 and len(release.paths) == 5
    assert release.labels.tolist() == np.delete(scenes["label"], 2).tolist()
    rows = [line.split() for line in (folder / "metadata" / "0.npy").read_text().splitlines()]
    np.save(folder / "metadata" / "0.npy", np.array(rows))
    assert PathfinderRelease(tmp_path, 32, 6).labels.tolist() == release.labels.tolist()
    with pytest.raises(FileNotFoundError, match="must hold pathfinder64/curv_baseline"):
        PathfinderRelease(tmp_path, 64, 6)
    (folder / "metadata" / "0.npy").write_text("imgs/0 sample_0.png 0 7\n")
    with pytest.raises(ValueError, match="rows of folder, file, number, label"):
        PathfinderRelease(tmp_path, 32, 6)


def test_metadata_files_are_ordered_by_number(tmp_path):
    folder = export_release(SPEC, [make_scenes(SPEC, "train", np.arange(3))], tmp_path)
    rows = (folder / "metadata" / "0.npy").read_text().splitlines(keepends=True)
    for number, row in zip((0, 2, 10), rows, strict=True):
        (folder / "metadata" / f"{number}.npy").write_text(row)
    release = PathfinderRelease(tmp_path, 32, 6)
    assert [path.name for path in release.paths] == [f"sample_{i}.png" for i in range(3)]


def test_split_of_a_release_is_a_partition(tmp_path):
    export_release(SPEC, [make_scenes(SPEC, "train", np.arange(40))], tmp_path)
    release = PathfinderRelease(tmp_path, 32, 6)
    splits = [release.split_ids(split) for split in ("train", "val", "test")]
    assert [len(ids) for ids in splits] == [32, 4, 4]
    assert sorted(np.concatenate(splits).tolist()) == list(range(40))
