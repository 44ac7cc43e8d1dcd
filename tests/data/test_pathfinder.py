"""data/pathfinder.py: the reference's statistics, determinism, images, snake ids.

Expected numbers were measured on the reference generator of 2019, hard level if not said.
Tolerances are about four standard errors of the sample sizes here.
"""

import hashlib

import numpy as np
import pytest

from data.pathfinder import (
    PathfinderSpec,
    dense_target,
    make_scenes,
    marker_positions,
    render,
    render_snake_ids,
)
from data.pathfinder_grow import start_rectangles
from data.pathfinder_sprites import GEOMETRIES, sprite_tables

FROZEN_SAMPLES = {32: "3d1940e9", 64: "ae21bb8b", 128: "1381ffed", 256: "0fb4efa8"}
NUM = {32: 500, 64: 48, 128: 112, 256: 160}
# attempts, distractors placed, of, non-zero pixels, mean, standard deviation, marker distances
EXPECTED = {
    32: (328, 1.16, 5, 0.341, 0.079, 0.200, 13.2, 12.7),
    64: (4100, 2.62, 5, 0.261, 0.053, 0.162, 32.4, 29.2),
    128: (360, 7.7, 8, 0.137, 0.031, 0.140, 76.2, 74.4),
    256: (8.2, 7.0, 7, 0.039, 0.0116, 0.0947, 125, 126),
}


@pytest.fixture(scope="module", params=NUM)
def hard(request):
    """(spec, scenes, images) of one size."""
    spec = PathfinderSpec(request.param)
    scenes = make_scenes(spec, "train", np.arange(NUM[request.param]))
    return spec, scenes, render(spec, scenes)


def reference_attempts(spec, scenes):
    """Attempts including those that the reference gives up at their first direction."""
    margins = GEOMETRIES[spec.size].margins
    usable = {m: len(start_rectangles(spec.size, sprite_tables(spec.size, m))) for m in margins}
    return scenes["attempts"] * 360 / np.vectorize(usable.get)(scenes["margin"])


def test_hard_scenes_have_the_reference_s_statistics(hard):
    spec, scenes, images = hard
    attempts, placed, most, nonzero, mean, std, *_ = EXPECTED[spec.size]
    got = reference_attempts(spec, scenes)
    # Attempts are geometric: as wide as their mean; wider where two margins are mixed.
    width = 1.6 if spec.size == 128 else 1.0
    assert got.mean() == pytest.approx(attempts, rel=4 * width / len(scenes) ** 0.5)
    assert spec.max_distractors == most
    assert scenes["num_distractors"].mean() == pytest.approx(placed, rel=0.12)
    assert (images > 0).mean() == pytest.approx(nonzero, rel=0.04)
    assert images.mean() / 255 == pytest.approx(mean, rel=0.05)
    assert images.std() / 255 == pytest.approx(std, rel=0.025)


def test_hard_markers_are_as_far_apart_as_the_reference_s(hard):
    spec, scenes, _ = hard
    places = marker_positions(scenes)
    apart = np.hypot(*(places[:, 0] - places[:, 1]).T)
    for label, expected in zip((1, 0), EXPECTED[spec.size][6:], strict=True):
        of_label = apart[scenes["label"] == label]
        assert of_label.mean() == pytest.approx(
            expected, abs=4 * apart.std() / len(of_label) ** 0.5
        )


@pytest.mark.parametrize(
    "size,level,num,attempts,foreground,num_distractors",
    [
        (32, 6, 400, 21.5, 232, 10),
        (32, 9, 300, 63, 272, 6),
        (64, 6, 200, 11.6, 815, 11),
        (64, 9, 150, 196, 895, 7),
        (128, 6, 150, 1.8, 1798, 17),
        (128, 9, 100, 10.7, 1970, 11),
        (256, 6, 60, 1.5, 1965, 15),
        (256, 9, 60, 2.4, 2209, 10),
    ],
)
def test_easier_levels(size, level, num, attempts, foreground, num_distractors):
    spec = PathfinderSpec(size, level)
    scenes = make_scenes(spec, "train", np.arange(num))
    width = 1.8 if size == 128 else 1.0
    got = reference_attempts(spec, scenes).mean()
    assert got == pytest.approx(attempts, rel=4 * width / num**0.5)
    images = render(spec, scenes)
    assert (images > 0).sum(axis=(1, 2)).mean() == pytest.approx(foreground, rel=0.03)
    assert spec.max_distractors == num_distractors


def test_foreground_stays_below_the_reference_s_maximum(hard):
    spec, _, images = hard
    largest = {32: 497, 64: 1387, 128: 2494, 256: 2745}[spec.size]
    assert (images > 0).sum(axis=(1, 2)).max() <= 1.03 * largest


def test_images_are_stretched_and_strokes_have_the_reference_s_brightness(hard):
    spec, scenes, images = hard
    assert (images.max(axis=(1, 2)) == 255).all() and (images.min(axis=(1, 2)) == 0).all()
    peaks = {32: 0.70, 64: 0.66, 128: 0.87, 256: 1.0}  # of long snakes before stretching
    geometry = GEOMETRIES[spec.size]
    strokes = [sprite_tables(spec.size, m).stroke[360:].max(axis=(1, 2)) for m in geometry.margins]
    peak = np.concatenate(strokes).mean() / 255 * geometry.long_contrast / 20
    assert peak == pytest.approx(peaks[spec.size], abs=0.03)


@pytest.mark.parametrize("size", [32, 128])
def test_a_sample_is_a_function_of_seed_split_and_index(size):
    spec = PathfinderSpec(size, 6)
    whole = make_scenes(spec, "val", np.arange(20))
    alone = [make_scenes(spec, "val", [i]) for i in (3, 19)]
    assert np.concatenate(alone).tobytes() == whole[[3, 19]].tobytes()
    assert make_scenes(spec, "val", np.arange(20)[::-1]).tobytes() == whole[::-1].tobytes()
    for other in (
        make_scenes(spec, "train", np.arange(20)),
        make_scenes(PathfinderSpec(size, 6, seed=1), "val", np.arange(20)),
    ):
        same = (other["long_y"] == whole["long_y"]).all(axis=(1, 2))
        assert not same.any()


def test_samples_are_frozen():
    # A change here makes other scenes of old seeds: raise data.pathfinder.VERSION.
    digests = {}
    for size in NUM:
        spec = PathfinderSpec(size, 6)
        scenes = make_scenes(spec, "test", np.arange(8))
        payload = scenes.tobytes() + render(spec, scenes).tobytes()
        digests[size] = hashlib.sha256(payload).hexdigest()[:8]
    assert digests == FROZEN_SAMPLES


def test_labels_and_start_snakes_are_fair_independent_coins():
    scenes = make_scenes(PathfinderSpec(256, 6, num_distractors=0), "train", np.arange(600))
    coins = 2 * scenes["label"].astype(int) + scenes["start_snake"]
    # Binomial(600, 1/4): mean 150, standard deviation 10.6.
    assert np.abs(np.bincount(coins, minlength=4) - 150).max() < 4 * 10.6


def test_number_of_distractors_leaves_the_long_snakes_alone():
    few = make_scenes(PathfinderSpec(64, 6, num_distractors=2), "train", np.arange(6))
    usual = make_scenes(PathfinderSpec(64, 6), "train", np.arange(6))
    assert (few["long_y"] == usual["long_y"]).all() and few["short_y"].shape[1:] == (2, 2)
    assert (few["label"] == usual["label"]).all() and (few["num_distractors"] <= 2).all()


@pytest.mark.parametrize("size", [32, 64, 128, 256])
def test_discs_lie_on_the_ends_of_the_snakes(size):
    spec = PathfinderSpec(size, 6)
    scenes = make_scenes(spec, "train", np.arange(30))
    images, ids = render(spec, scenes), render_snake_ids(spec, scenes)
    for scene, image, id_map, ends in zip(
        scenes, images, ids, marker_positions(scenes), strict=True
    ):
        for end in ends.tolist():
            # The brightest value is the disc's, but for distractors that cross at 32 pixels.
            assert image[*end] >= 255 * 20 // 40
        start = id_map[tuple(slice(max(0, p - 1), p + 2) for p in ends[0])]
        tip = id_map[tuple(slice(max(0, p - 1), p + 2) for p in ends[1])]
        assert 1 in start
        assert (1 if scene["label"] else 2) in tip


def test_snake_ids_cover_the_strokes_and_targets_follow():
    spec = PathfinderSpec(128, 9)
    scenes = make_scenes(spec, "train", np.arange(12))
    images, ids = render(spec, scenes), render_snake_ids(spec, scenes)
    assert set(np.unique(ids)) == {0, 1, 2, 3}
    assert (images[ids > 0] > 0).all()
    # Both long snakes are of nine paddles.
    area = [(ids == i).sum(axis=(1, 2)) for i in (1, 2)]
    assert np.mean(area[0]) == pytest.approx(np.mean(area[1]), rel=0.05)
    target = dense_target(ids, scenes["label"])
    positive = scenes["label"] == 1
    assert (target[positive][ids[positive] == 1] == 2).all()
    assert (target[~positive] < 2).all()
    assert (target[ids == 2] == 1).all() and (target[(ids == 0) | (ids == 3)] == 0).all()


def test_a_tiny_scene_is_rendered_as_by_hand():
    spec = PathfinderSpec(32, 6, num_distractors=0)
    scene = make_scenes(spec, "train", [0])
    tables = sprite_tables(32, 1)
    canvas = np.zeros((64, 64))
    for sprite, y, x in zip(
        *(scene[f"long_{n}"].reshape(-1).tolist() for n in ("sprite", "y", "x")), strict=True
    ):
        window = canvas[16 + y - 4 : 16 + y + 5, 16 + x - 4 : 16 + x + 5]
        np.maximum(window, tables.stroke[sprite] / 255 * 2 * 0.75, out=window)
    image = canvas[16:48, 16:48]
    for y, x in marker_positions(scene)[0].tolist():
        image[y, x] = max(image[y, x], 1.0)
    away = np.ones((32, 32), bool)
    for y, x in marker_positions(scene)[0].tolist():
        away[max(0, y - 6) : y + 7, max(0, x - 6) : x + 7] = False
    expected = np.floor(image * (255 / max(image.max(), 1.0)) + 0.5)
    assert np.abs(expected - render(spec, scene)[0])[away].max() <= 1


@pytest.mark.parametrize("size, level", [(32, 3), (32, 4), (128, 3), (128, 8)])
def test_short_snakes_are_the_easy_start(size, level):
    """Both labels; discs at the ends of snakes of so many paddles, and nothing else drawn."""
    spec = PathfinderSpec(size, level, num_distractors=0)
    scenes = make_scenes(spec, "train", np.arange(64))
    assert scenes["long_sprite"].shape == (64, level, 2) and set(scenes["label"]) == {0, 1}
    assert not scenes["num_distractors"].any() and scenes["short_sprite"].shape[1] == 0
    ids, markers = render_snake_ids(spec, scenes), marker_positions(scenes)
    assert set(np.unique(ids)) == {0, 1, 2}, "background and two snakes"
    near = [
        {*ids[i, max(0, y - 2) : y + 3, max(0, x - 2) : x + 3].ravel()} - {0}
        for i in range(64) for y, x in markers[i]
    ]  # fmt: skip
    joined = np.array([bool(one & two) for one, two in zip(near[::2], near[1::2], strict=True)])
    assert joined[scenes["label"] == 1].all(), "the discs of label 1 lie on one snake"
    assert joined[scenes["label"] == 0].mean() < 0.5


def test_refusals():
    with pytest.raises(ValueError, match="size must be one of"):
        PathfinderSpec(100)
    with pytest.raises(ValueError, match="level must be one of"):
        PathfinderSpec(32, 15)
    with pytest.raises(ValueError, match="a balanced set must have a level of .6, 9, 14., got 3"):
        PathfinderSpec(32, 3, balanced=True)
    with pytest.raises(ValueError, match="num_distractors must not be negative"):
        PathfinderSpec(32, num_distractors=-1)
    with pytest.raises(ValueError, match="split must be one of"):
        make_scenes(PathfinderSpec(32, 6), "dev", [0])
    with pytest.raises(ValueError, match="indices must not be negative"):
        make_scenes(PathfinderSpec(32, 6), "train", [-1])
