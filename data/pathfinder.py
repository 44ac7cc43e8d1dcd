"""Pathfinder (Path-32, Path-64, Path-X, Path-256): do two discs lie on the same dashed curve?

An independent generator with the distribution of the Long Range Arena's sets (Linsley et al. 2018,
"Learning long-range spatial dependencies with horizontal gated recurrent units"; Tay et al. 2021).
Two long dashed snakes start a fixed distance apart. One disc marks the start of one of them, the
other disc the far end of the same snake (label 1) or of the other (label 0). Short snakes distract.

Sample `index` of a split is a pure function of (VERSION, size, level, balanced, seed, split,
index): the same on every machine, in every order and for any number of processes. What is made and
kept is a recipe of about 250 bytes, the places of all paddles; images are rendered from recipes.

The positions of the discs alone tell much of the label: a classifier that sees nothing else reaches
67.0, 76.9, 55.6 and 67.4 % on the hard level at 32, 64, 128 and 256 pixels (data.marker_shortcut
measures it on any set). With `balanced` the labels cannot be told from them.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from data.pathfinder_balance import balance_model, balanced_start_snakes, thinning
from data.pathfinder_distractors import grow_distractors, paste
from data.pathfinder_extend import below, mix, random_words
from data.pathfinder_grow import grow_long_snakes
from data.pathfinder_sprites import GEOMETRIES, marker_sprite, sprite_tables

VERSION = 1  # raise when any recipe changes
# Paddles of a long snake, and the set's name as the reference gives one. The release has 6, 9 and
# 14; labels alone are learned from short snakes on, by small steps.
LEVELS = {n: f"curv_contour_length_{n}" for n in range(3, 15)} | {6: "curv_baseline"}
_BALANCED_LEVELS = (6, 9, 14)  # those with a fitted model
SPLITS = ("train", "val", "test")
COVERED = 38  # of 255: pixels that a paddle covers by 0.15 or more belong to it


@dataclasses.dataclass(frozen=True)
class PathfinderSpec:
    """Which set of images.

    Attributes:
        size: height and width in pixels: 32, 64, 128 (Path-X) or 256.
        level: paddles of a long snake, 3 to 14 (hard, what the Long Range Arena uses).
        balanced: thin the scenes so that the discs' positions do not tell the label.
        num_distractors: how many to try for; None is the reference's number for the size and level.
        seed: of everything.
    Raises:
        ValueError: another size or level, a level that is not balanced, or a negative number of
            distractors.
    """

    size: int
    level: int = 14
    balanced: bool = False
    num_distractors: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.size not in GEOMETRIES:
            raise ValueError(f"size must be one of {[*GEOMETRIES]}, got {self.size}")
        if self.level not in LEVELS:
            raise ValueError(f"level must be one of {[*LEVELS]}, got {self.level}")
        if self.balanced and self.level not in _BALANCED_LEVELS:
            raise ValueError(
                f"a balanced set must have a level of {_BALANCED_LEVELS}, got {self.level}"
            )
        if self.num_distractors is not None and self.num_distractors < 0:
            raise ValueError(f"num_distractors must not be negative, got {self.num_distractors}")

    @property
    def distractor_length(self) -> int:
        """Paddles of a distractor."""
        return self.level // 3

    @property
    def max_distractors(self) -> int:
        if self.num_distractors is not None:
            return self.num_distractors
        return GEOMETRIES[self.size].distractor_budget // self.distractor_length

    @property
    def recipe_dtype(self) -> np.dtype:
        """One scene, little-endian.

        label, start_snake (whose start is marked), margin, num_distractors: uint8; attempts:
        uint32, at the long snakes, without those that the reference gives up before they begin.
        Paddles as sprite (uint16), y and x (uint8): long_*, (level, 2), by paddle and snake;
        short_*, (max_distractors, distractor_length), zeros where there is none.
        """
        long, short = (self.level, 2), (self.max_distractors, self.distractor_length)
        names = ("label", "start_snake", "margin", "num_distractors")
        fields: list[tuple] = [(name, "u1") for name in names] + [("attempts", "<u4")]
        for prefix, shape in (("long", long), ("short", short)):
            fields += [(f"{prefix}_{n}", t, shape) for n, t in _PADDLE_TYPES]
        return np.dtype(fields)

    def tables_sha256(self) -> str:
        """Of the drawn parts and what thins a balanced set: recipes are only valid with them."""
        digest = hashlib.sha256(marker_sprite(self.size).tobytes())
        for margin in GEOMETRIES[self.size].margins:
            digest.update(sprite_tables(self.size, margin).sha256().encode())
        if self.balanced:
            model = balance_model(self.size, self.level)
            for part in (model.feature, model.threshold, model.leaf):
                digest.update(part.tobytes())
        return digest.hexdigest()


_PADDLE_TYPES = (("sprite", "<u2"), ("y", "u1"), ("x", "u1"))


def make_scenes(
    spec: PathfinderSpec, split: str, indices: Sequence[int] | np.ndarray
) -> np.ndarray:
    """Recipes of the samples `indices` of a split.

    Make hundreds at once: attempts run side by side, and the fewer scenes, the longer each takes.

    Args:
        split: "train", "val" or "test"; no sample of one is in another.
        indices: (n,) integers from 0; there is no last one.
    Returns:
        (n,) of spec.recipe_dtype.
    Raises:
        ValueError: another split, or a negative index.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
    indices = np.asarray(indices, dtype=np.int64).reshape(-1)
    if indices.size and indices.min() < 0:
        raise ValueError(f"indices must not be negative, got {indices.min()}")
    streams = np.stack([_keys(spec, split, indices, stream) for stream in _STREAMS])
    scenes = np.zeros(len(indices), spec.recipe_dtype)
    margins = GEOMETRIES[spec.size].margins
    scenes["margin"] = np.array(margins)[below(random_words(streams[0], 0), len(margins))]
    scenes["label"] = random_words(streams[1], 0) >> 31
    scenes["start_snake"] = random_words(streams[1], 1) >> 31
    for margin in margins:
        rows = np.flatnonzero(scenes["margin"] == margin)
        if len(rows):
            part = scenes[rows]
            _grow(spec, margin, streams[:, rows], part)
            scenes[rows] = part
    return scenes


# Coins and distractors have streams of their own, so that variants keep the long snakes.
_STREAMS = ("scene", "coins", "distractors")


def _keys(spec: PathfinderSpec, split: str, indices: np.ndarray, stream: str) -> np.ndarray:
    name = f"pathfinder {VERSION} {spec.size} {spec.level} {spec.seed} {split} {stream}"
    base = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return mix(mix(indices.astype(np.uint64)) + np.uint64(base))


def _grow(spec: PathfinderSpec, margin: int, streams: np.ndarray, scenes: np.ndarray) -> None:
    """Fill in the paddles of scenes that have one margin. In place."""
    tables = sprite_tables(spec.size, margin)
    accept = thinning(spec.size, spec.level, scenes["label"]) if spec.balanced else None
    long, scenes["attempts"] = grow_long_snakes(
        spec.size, spec.level, tables, streams[0], accept=accept
    )
    if spec.balanced:
        scenes["start_snake"] = balanced_start_snakes(streams[0], scenes["attempts"])
    short, scenes["num_distractors"] = grow_distractors(
        spec.size, spec.distractor_length, spec.max_distractors, tables, streams[2], long
    )
    is_there = np.arange(spec.max_distractors) < scenes["num_distractors"][:, None]
    for name, _ in _PADDLE_TYPES:
        field = getattr(long, name)
        scenes[f"long_{name}"] = field.reshape(scenes[f"long_{name}"].shape)
        field = getattr(short, name).reshape(scenes[f"short_{name}"].shape)
        scenes[f"short_{name}"] = np.where(is_there[..., None], field, 0)


def marker_positions(scenes: np.ndarray) -> np.ndarray:
    """Where the two discs are: (n, 2, 2) int64, start and end, each (y, x)."""
    rows = np.arange(len(scenes))
    start = scenes["start_snake"].astype(np.int64)
    end = np.where(scenes["label"] == 1, start, 1 - start)
    places = [
        [scenes[f"long_{axis}"][rows, paddle, snake] for axis in "yx"]
        for paddle, snake in ((0, start), (-1, end))
    ]
    return np.array(places, dtype=np.int64).transpose(2, 0, 1)


def render(spec: PathfinderSpec, scenes: np.ndarray) -> np.ndarray:
    """Images of recipes, (n, size, size) uint8: background 0, largest value 255.

    As the reference saves them: each image is stretched to fill 0 ... 255. Discs are cut at the
    border, where the reference's filter would also brighten their rim a little.
    """
    geometry = GEOMETRIES[spec.size]
    canvas = _Canvas(spec, scenes, np.int16)
    canvas.draw_long(geometry.long_contrast)
    canvas.draw_short(geometry.short_contrast)
    marker = marker_sprite(spec.size).astype(np.int16) * _CONTRAST_ONE
    for places in marker_positions(scenes).transpose(1, 2, 0):
        canvas.draw(np.broadcast_to(marker, (len(scenes), *marker.shape)), *places)
    values = canvas.values()
    images = np.zeros(values.shape, np.uint8)
    brightest = values.max(axis=(1, 2)).astype(np.int64)
    bright = np.nonzero(values)  # a twentieth of Path-256
    largest = brightest[bright[0]]
    images[bright] = (values[bright].astype(np.int64) * 510 + largest) // (2 * largest)
    return images


_CONTRAST_ONE = 20  # contrasts are whole numbers of 20ths


def render_snake_ids(spec: PathfinderSpec, scenes: np.ndarray) -> np.ndarray:
    """Which snake each pixel belongs to, (n, size, size) uint8.

    0: background; 1: the long snake whose start is marked, so that it joins both discs if and only
    if the label is 1; 2: the other long snake; 3: a distractor. A pixel belongs to whoever covers
    it most, by 0.15 at least; of two that cover it alike, to the smaller number.
    """
    for number, snakes in ((1, scenes["start_snake"]), (2, 1 - scenes["start_snake"]), (3, None)):
        canvas = _Canvas(spec, scenes, np.uint8)
        if snakes is None:
            canvas.draw_short(1)
        else:
            canvas.draw_long(1, only=snakes)
        cover = np.ascontiguousarray(canvas.values())
        if number == 1:
            ids, most = (cover >= COVERED).astype(np.uint8), np.maximum(cover, COVERED - 1)
            continue
        # Few pixels, so that looking each up is cheaper than comparing whole images.
        drawn = np.flatnonzero(cover >= COVERED)
        drawn = drawn[cover.reshape(-1)[drawn] > most.reshape(-1)[drawn]]
        ids.reshape(-1)[drawn] = number
        most.reshape(-1)[drawn] = cover.reshape(-1)[drawn]
    return ids


def dense_target(snake_ids: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Three classes a pixel: 0 on no long snake, 1 on one, 2 on the one that joins both discs.

    Args:
        snake_ids: (n, size, size) uint8 of `render_snake_ids`.
        labels: (n,), 0 or 1.
    Returns:
        (n, size, size) uint8. Class 2 comes in images of label 1 only.
    """
    is_joined = (snake_ids == 1) & (np.asarray(labels).reshape(-1, 1, 1) == 1)
    on_long = (snake_ids == 1) | (snake_ids == 2)
    return on_long.astype(np.uint8) + is_joined


class _Canvas:
    """Images of n scenes with a rim, onto which one paddle of each is merged at a time."""

    def __init__(self, spec: PathfinderSpec, scenes: np.ndarray, dtype: type) -> None:
        self._spec, self._scenes = spec, scenes
        marker = marker_sprite(spec.size)
        self._rim = max(GEOMETRIES[spec.size].reach, len(marker) // 2)
        side = spec.size + 2 * self._rim
        self._canvas: np.ndarray = np.zeros((len(scenes), side, side), dtype)
        margins = GEOMETRIES[spec.size].margins
        self._strokes = {m: sprite_tables(spec.size, m).stroke for m in margins}
        self._rows = {m: np.flatnonzero(scenes["margin"] == m) for m in margins}

    def draw_long(self, contrast: int, only: np.ndarray | None = None) -> None:
        """Both long snakes, or of each scene the one that `only`, (n,), says."""
        for paddle in range(self._spec.level):
            for snake in (0, 1) if only is None else (only,):
                self._draw_paddles("long", (paddle, snake), contrast)

    def draw_short(self, contrast: int) -> None:
        for distractor in range(self._spec.max_distractors):
            for paddle in range(self._spec.distractor_length):
                self._draw_paddles("short", (distractor, paddle), contrast)

    def _draw_paddles(self, kind: str, place: tuple, contrast: int) -> None:
        scenes = self._scenes
        rows = np.arange(len(scenes))
        y, x, sprite = (
            scenes[f"{kind}_{n}"][rows, *place].astype(np.int64) for n in ("y", "x", "sprite")
        )
        for margin, of_margin in self._rows.items():
            if kind == "short":
                of_margin = of_margin[scenes["num_distractors"][of_margin] > place[0]]
            strokes = self._strokes[margin][sprite[of_margin]]
            self.draw(
                strokes.astype(self._canvas.dtype) * contrast, y[of_margin], x[of_margin], of_margin
            )

    def draw(
        self, sprites: np.ndarray, y: np.ndarray, x: np.ndarray, rows: np.ndarray | None = None
    ) -> None:
        rows = np.arange(len(self._canvas)) if rows is None else rows
        paste(self._canvas, rows, sprites, y + self._rim, x + self._rim)

    def values(self) -> np.ndarray:
        return self._canvas[:, self._rim : -self._rim, self._rim : -self._rim]
