"""data/classification.py and data/long_range.py: batches, order, resumes, held-out examples."""

import inspect
import re

import numpy as np
import pytest
import torch

from data.classification import IGNORED_LABEL
from data.long_range import LongRangeData, PathfinderData
from data.order import sample_ids
from data.pathfinder import PathfinderSpec, make_scenes, render, render_snake_ids
from data.pathfinder_release import export_release
from tests.loading import opened, take

SIZES = {"num_train": 30, "num_val": 7, "num_test": 5}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Where the set that all tests share is made once."""
    return str(tmp_path_factory.mktemp("data"))


@pytest.fixture
def pathfinder(root):
    def make(rank=0, world_size=1, global_step=0, **options):
        options = {"size": 32, "level": 6, "batch_size": 8, "val_batch_size": 3, **options}
        data = PathfinderData(root=root, prepare_workers=0, **SIZES, **options)
        return opened(data, rank, world_size, global_step)

    return make


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    """Texts of 1 to 40 bytes in IMDb's folders."""
    folder = tmp_path_factory.mktemp("imdb")
    for split in ("train", "test"):
        for part in ("neg", "pos"):
            (folder / split / part).mkdir(parents=True)
            for i in range(10):
                (folder / split / part / f"{i}.txt").write_text("ab" * (1 + 2 * i))
    return str(folder)


def on_device(data, batch):
    """A batch as the task gets it."""
    return data.on_after_batch_transfer(batch, 0)


def equal(a, b):
    return a.keys() == b.keys() and all(
        torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a
    )


def test_pathfinder_batches_are_the_samples_of_the_order(pathfinder):
    data = pathfinder()
    scenes = make_scenes(data.spec, "train", np.arange(30))
    images = render(data.spec, scenes)
    ids = sample_ids(0, 40, seed=1111, num_samples=30)
    for step, batch in enumerate(take(data.train_dataloader(), 5)):
        assert batch["input_ids"].dtype == torch.uint8, "little to send"
        batch = on_device(data, batch)
        expected = ids[8 * step : 8 * step + 8]
        assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
        assert (batch["input_ids"].numpy() == images[expected].reshape(8, 1024)).all()
        assert (batch["labels"].numpy() == scenes["label"][expected]).all()
        assert batch["lengths"].tolist() == [1024] * 8
        assert set(batch) == {"input_ids", "labels", "lengths"}
        assert data.sample_ids(step).tolist() == expected.tolist()
    assert (data.vocab_size, data.num_classes, data.seqlen, data.batch_tokens) == (
        256,
        2,
        1024,
        8192,
    )


def test_dense_labels_and_foreground_follow_the_images(pathfinder):
    data = pathfinder(dense_target=True, foreground=True)
    ids = data.sample_ids(0)
    scenes = make_scenes(data.spec, "train", ids)
    snakes = render_snake_ids(data.spec, scenes).reshape(8, -1)
    (batch,) = take(data.train_dataloader(), 1)
    dense = batch["dense_labels"].numpy()
    assert on_device(data, batch)["dense_labels"].dtype == torch.int64
    joined = (snakes == 1) & (scenes["label"][:, None] == 1)
    assert (dense == np.isin(snakes, (1, 2)).astype(int) + joined).all()
    flat = batch["input_ids"].view(-1)
    assert batch["foreground"].tolist() == flat.nonzero()[:, 0].tolist()
    starts = batch["cu_seqlens"].tolist()
    assert batch["cu_seqlens"].dtype == torch.int32 and len(starts) == 9 and starts[0] == 0
    counts = (batch["input_ids"] > 0).sum(1).tolist()
    assert np.diff(starts).tolist() == counts and batch["max_seqlen"] == max(counts)


def test_dim_pixels_become_background(pathfinder):
    whole = take(pathfinder(dense_target=True).train_dataloader(), 1)[0]
    bright = take(pathfinder(background_up_to=96, foreground=True).train_dataloader(), 1)[0]
    expected = whole["input_ids"] * (whole["input_ids"] > 96)
    assert torch.equal(bright["input_ids"], expected) and (expected != whole["input_ids"]).any()
    assert bright["foreground"].tolist() == expected.view(-1).nonzero()[:, 0].tolist()
    with pytest.raises(ValueError, match="background_up_to must be from 0 to 254, got 255"):
        PathfinderData(size=32, batch_size=1, background_up_to=255)


def test_a_curriculum_begins_with_easier_images(pathfinder):
    """By step: wherever a run goes on, and whatever process asks."""
    options = dict(curriculum=[[3, 0, 2], [4, None, 1]], augment=True)
    data = pathfinder(**options)
    ids = sample_ids(0, 32, seed=1111, num_samples=30).reshape(4, 8)
    steps = take(data.train_dataloader(), 4)
    rungs = [(3, 0, 7), (3, 0, 7), (4, None, 7), (6, None, 30)]  # 30 / 4 images in an easier set
    for step, (level, distractors, number) in enumerate(rungs):
        spec = PathfinderSpec(32, level, num_distractors=distractors)
        scenes = make_scenes(spec, "train", ids[step] % number)
        assert steps[step]["labels"].tolist() == scenes["label"].tolist()
        # As they are, but for turns.
        sums = render(spec, scenes).reshape(8, -1).sum(1, dtype=np.int64)
        assert steps[step]["input_ids"].sum(1).tolist() == sums.tolist()
    assert equal(take(pathfinder(global_step=2, **options).train_dataloader(), 1)[0], steps[2])
    for rank in (0, 1):
        (half,) = take(pathfinder(rank, 2, 2, **options).train_dataloader(), 1)
        assert torch.equal(half["input_ids"], steps[2]["input_ids"][4 * rank : 4 * rank + 4])
    plain = pathfinder(augment=True)
    assert data.curriculum_steps == 3 and plain.curriculum_steps == 0
    # Another batch or curriculum would change the steps of this one, and none behind it.
    others = [dict(options, batch_size=4), dict(options, curriculum=[[3, 0, 3]]), {}]
    during = {pathfinder(global_step=2, **other).fingerprint for other in (options, *others)}
    assert len(during) == 4
    behind = {pathfinder(global_step=6, **other).fingerprint for other in (options, *others)}
    assert behind == {plain.fingerprint}
    for loaders in ("val_dataloader", "test_dataloader"):
        pairs = zip(getattr(data, loaders)(), getattr(plain, loaders)(), strict=True)
        assert all(equal(a, b) for a, b in pairs)


def test_augmentation_turns_images_and_targets_alike_and_by_position(pathfinder):
    plain = take(pathfinder(dense_target=True).train_dataloader(), 4)
    data = pathfinder(dense_target=True, augment=True)
    turned = take(data.train_dataloader(), 4)
    seen = set()
    for before, after in zip(plain, turned, strict=True):
        for i in range(8):
            layers = [
                torch.stack([b["input_ids"][i], b["dense_labels"][i]]) for b in (before, after)
            ]
            old, new = (layer.view(2, 32, 32) for layer in layers)
            ways = [
                (flip, turn)
                for flip in (False, True)
                for turn in range(4)
                if torch.equal(torch.rot90(old.flip(2) if flip else old, turn, (1, 2)), new)
            ]
            assert len(ways) == 1
            seen.update(ways)
        assert torch.equal(before["labels"], after["labels"])
    assert len(seen) == 8
    again = pathfinder(dense_target=True, augment=True, num_workers=2)
    assert all(map(equal, turned, take(again.train_dataloader(), 4)))
    assert equal(
        next(iter(data.val_dataloader())),
        next(iter(pathfinder(dense_target=True).val_dataloader())),
    )


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_share_the_same_batch(pathfinder, world_size):
    whole = take(pathfinder(augment=True).train_dataloader(), 4)
    shares = [
        take(pathfinder(r, world_size, augment=True).train_dataloader(), 4)
        for r in range(world_size)
    ]
    for step, batch in enumerate(whole):
        joined = torch.cat([share[step]["input_ids"] for share in shares])
        assert torch.equal(joined, batch["input_ids"])


def test_resume_continues_at_the_same_sample_with_another_batch_size(pathfinder):
    data = pathfinder()
    expected = torch.cat([b["input_ids"] for b in take(data.train_dataloader(), 6)])
    data.trainer.global_step = 3
    state = data.state_dict()
    assert state["position"] == 24
    for batch_size in (4, 8):
        resumed = pathfinder(global_step=3, batch_size=batch_size)
        resumed.load_state_dict(state)
        got = torch.cat(
            [b["input_ids"] for b in take(resumed.train_dataloader(), 24 // batch_size)]
        )
        assert torch.equal(got, expected[24:48])
    other = pathfinder(seed=2)
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="must be continued on the data"):
        other.train_dataloader()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_held_out_examples_come_once_in_batches_of_one_shape(pathfinder, world_size):
    scenes = make_scenes(pathfinder().spec, "val", np.arange(7))
    images = render(pathfinder().spec, scenes).reshape(7, -1)
    data = [pathfinder(r, world_size, batch_size=6) for r in range(world_size)]
    loaders = [d.val_dataloader() for d in data]
    assert len({len(loader) for loader in loaders}) == 1
    seen = []
    for batches in zip(*loaders, strict=True):
        for batch in batches:
            assert batch["input_ids"].shape == (3, 1024)
            real = batch["labels"] != IGNORED_LABEL
            seen += list(zip(batch["input_ids"][real], batch["labels"][real], strict=True))
    assert [label.item() for _, label in seen] == scenes["label"].tolist()
    assert all((image.numpy() == row).all() for (image, _), row in zip(seen, images, strict=True))


def test_limits_cut_held_out_splits(pathfinder):
    data = pathfinder(val_limit=4, test_limit=2)
    assert (data.num_held_out("val"), data.num_held_out("test")) == (4, 2)
    labels = torch.cat([b["labels"] for b in data.test_dataloader()])
    assert (labels != IGNORED_LABEL).sum() == 2


def test_release_is_read_by_its_own_split(tmp_path):
    pytest.importorskip("PIL")
    spec = PathfinderData(size=32, level=6, batch_size=1).spec
    scenes = make_scenes(spec, "train", np.arange(20))
    export_release(spec, [scenes], tmp_path / "lra_release")
    data = opened(
        PathfinderData(size=32, level=6, release=str(tmp_path), batch_size=4, foreground=True)
    )
    assert [data.examples.num_examples(s) for s in ("train", "val", "test")] == [16, 2, 2]
    order = torch.randperm(20, generator=torch.Generator().manual_seed(42)).numpy()
    (batch,) = take(data.train_dataloader(), 1)
    ids = order[:16][data.sample_ids(0)]
    assert (batch["input_ids"].numpy() == render(spec, scenes[ids]).reshape(4, -1)).all()
    assert (batch["labels"].numpy() == scenes["label"][ids]).all()


def test_text_is_bytes_plus_one_padded_with_zero(reviews, tmp_path):
    data = LongRangeData(
        task="text", source=reviews, seqlen=16, batch_size=4, val_batch_size=6, root=str(tmp_path)
    )
    opened(data)
    assert (data.vocab_size, data.num_classes, data.num_samples) == (257, 2, 20)
    texts, labels = [], []
    for batch in data.val_dataloader():
        for row, label, length in zip(
            *(batch[k] for k in ("input_ids", "labels", "lengths")), strict=True
        ):
            if label != IGNORED_LABEL:
                texts.append(bytes((row[:length] - 1).tolist()).decode())
                labels.append(label.item())
                assert (row[length:] == 0).all()
    assert texts == [("ab" * (1 + 2 * i))[:16] for _ in range(2) for i in range(10)]
    assert labels == [0] * 10 + [1] * 10


def test_retrieval_has_two_towers(tmp_path):
    for split in ("train", "eval", "test"):
        rows = [f"{i % 2}\tx\ty\tfirst{i}\tthe second {i}" for i in range(5)]
        (tmp_path / f"new_aan_pairs.{split}.tsv").write_text("\n".join(rows) + "\n")
    data = opened(
        LongRangeData(
            task="retrieval",
            source=str(tmp_path),
            seqlen=10,
            batch_size=2,
            val_batch_size=5,
            root=str(tmp_path),
        )
    )
    (batch,) = list(data.test_dataloader())
    assert batch["input_ids"].shape == (5, 2, 10) and batch["lengths"].tolist() == [[6, 10]] * 5
    assert bytes((batch["input_ids"][3, 0, :6] - 1).tolist()) == b"first3"
    assert batch["labels"].tolist() == [0, 1, 0, 1, 0]


def test_stand_ins_say_so(tmp_path, capsys):
    import zipfile

    with zipfile.ZipFile(tmp_path / "reviews.zip", "w") as archive:
        for i in range(40):
            archive.writestr(f"pos/{i}.txt", "good")
    data = LongRangeData(
        task="text",
        source=str(tmp_path / "reviews.zip"),
        seqlen=8,
        batch_size=2,
        root=str(tmp_path),
    )
    opened(data)
    assert "stand-in data for text" in capsys.readouterr().out and data.stand_in


def test_refusals(pathfinder, tmp_path):
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        PathfinderData(size=32, batch_size=0)
    with pytest.raises(ValueError, match="neither a dense target"):
        PathfinderData(size=32, batch_size=1, release=str(tmp_path), dense_target=True)
    with pytest.raises(ValueError, match="another number of distractors nor the sets of a curr"):
        PathfinderData(size=32, batch_size=1, release=str(tmp_path), num_distractors=0)
    for wrong in ([[3, 0]], [3, 0, 1], [[3, 0, 0]], [[3, 0, 1.5]], [[None, 0, 1]], 3):
        with pytest.raises(ValueError, match="curriculum must be null or a list of .*, got"):
            PathfinderData(size=32, batch_size=1, curriculum=wrong)
    with pytest.raises(ValueError, match="level must be"):
        PathfinderData(size=32, batch_size=1, curriculum=[[99, 0, 1]])
    with pytest.raises(ValueError, match="batch_size must be a multiple"):
        pathfinder(world_size=3)
    with pytest.raises(RuntimeError, match="must be opened first"):
        PathfinderData(size=32, batch_size=1).num_samples  # noqa: B018
    with pytest.raises(ValueError, match="num_workers must not be negative"):
        PathfinderData(size=32, batch_size=1, num_workers=-1)


def test_every_argument_is_documented():
    for kind in (LongRangeData, PathfinderData):
        for name in list(inspect.signature(kind.__init__).parameters)[1:]:
            assert name in kind.__doc__, f"{kind.__name__}: {name}"


def test_global_random_state_is_left_alone(pathfinder):
    data = pathfinder(augment=True)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    take(data.train_dataloader(), 2)
    list(data.val_dataloader())
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()


def test_pathfinder_stands_beside_its_shortcut_floor(tmp_path):
    data = PathfinderData(
        size=32,
        level=6,
        batch_size=4,
        num_train=4,
        num_val=3,
        num_test=120,
        test_limit=100,
        prepare_workers=0,
        root=str(tmp_path),
    )
    opened(data)
    line, numbers = data.comparison("test")
    found = re.fullmatch(
        r"marker-only floor on the same set: ([0-9.]+)% \+- ([0-9.]+)% \(95 %, 100 examples\)", line
    )
    assert numbers["floor"] == pytest.approx(float(found[1]) / 100, abs=1e-4)
    assert numbers["floor_ci95"] == pytest.approx(float(found[2]) / 100, abs=1e-4)
    assert numbers["floor_examples"] == 100
    line, numbers = data.comparison("val")
    assert "not measured, at least 60 examples are needed" in line and numbers == {}


def test_stand_ins_are_named_and_published_data_are_not(reviews, tmp_path):
    data = LongRangeData(task="text", source=reviews, seqlen=8, batch_size=2, root=str(tmp_path))
    assert data.comparison("test") is None
    data.stand_in = "something else"
    line, numbers = data.comparison("test")
    assert line.endswith("not comparable with published results: something else") and not numbers
