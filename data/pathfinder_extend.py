"""One step of Pathfinder's snakes, for many scenes at once and without painting anything.

Occupancy is a pixelwise maximum of paddle masks, so its value at a cell is the largest value of the
few paddles near it, read from tables.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from data.pathfinder_sprites import GEOMETRIES, MIN_WEIGHT, SpriteTables, walk

NUM_DRAWS = 3  # of a head cell, before an extension fails
_FAR = -10_000  # where paddles wait that occupy nothing yet


def mix(words: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) on uint64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def random_words(keys: np.ndarray, counter: int | np.ndarray) -> np.ndarray:
    """Word number `counter` of each key's stream: 32 random bits, as int64."""
    steps = np.atleast_1d(np.asarray(counter, dtype=np.uint64)) + np.uint64(1)
    return (mix(keys + steps * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)).astype(np.int64)


def below(words: np.ndarray, bound: int | np.ndarray) -> np.ndarray:
    """Integers in [0, bound) from 32-bit words; bound up to 2**31."""
    return words * bound >> 32


def attempt_keys(keys: np.ndarray, attempts: np.ndarray) -> np.ndarray:
    """The stream of each scene's attempt, counted from 1: (n,) uint64."""
    return mix(keys ^ mix(attempts.astype(np.uint64)))


@dataclasses.dataclass
class Paddles:
    """Paddles of several scenes: each array (num_scenes, num_paddles) int64.

    Attributes:
        sprite: index into the sprite tables.
        y, x: cell where the paddle is placed.
    """

    sprite: np.ndarray
    y: np.ndarray
    x: np.ndarray

    @classmethod
    def nowhere(cls, num_scenes: int, num_paddles: int) -> Paddles:
        shape = (num_scenes, num_paddles)
        return cls(np.zeros(shape, np.int64), np.full(shape, _FAR), np.full(shape, _FAR))

    def take(self, rows: Any) -> Paddles:
        return Paddles(self.sprite[rows], self.y[rows], self.x[rows])

    def put(
        self, rows: int | np.ndarray, columns: int | slice | np.ndarray, other: Paddles
    ) -> None:
        """Copy single paddles, (len(rows),) each, into [rows, columns]."""
        self.sprite[rows, columns] = other.sprite
        self.y[rows, columns] = other.y
        self.x[rows, columns] = other.x


def snake_ends(long_snakes: Paddles) -> np.ndarray:
    """Where the long snakes start and end: (n, 2, 2, 2) int64, start or tip, snake, (y, x)."""
    places = np.stack([long_snakes.y, long_snakes.x], axis=2)
    return np.stack([places[:, :2], places[:, -2:]], axis=1)


class Occupancy:
    """Paddles, (num_scenes, num_paddles), and where the middles of those are that are in the way.

    The others wait far outside until they `enter`.
    """

    def __init__(self, tables: SpriteTables, num_scenes: int, num_paddles: int) -> None:
        self._tables = tables
        self.paddles = Paddles.nowhere(num_scenes, num_paddles)
        self.centre_y = np.full((num_scenes, num_paddles), _FAR, np.int16)
        self.centre_x = np.full((num_scenes, num_paddles), _FAR, np.int16)

    def enter(self, rows: np.ndarray, columns: int | np.ndarray) -> None:
        """From now on paddles[rows, columns], one a row, are in the way."""
        sprite = self.paddles.sprite[rows, columns]
        tables, paddles = self._tables, self.paddles
        self.centre_y[rows, columns] = paddles.y[rows, columns] + tables.centre_y[sprite]
        self.centre_x[rows, columns] = paddles.x[rows, columns] + tables.centre_x[sprite]

    def clear(self, rows: np.ndarray, columns: slice = slice(None)) -> None:
        self.centre_y[rows, columns] = _FAR

    def near(self, rows: np.ndarray, y: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, Paddles]:
        """Paddles whose middle is within near_limit of (y, x), (len(rows),) each, in y and in x.

        Returns:
            Which of `rows`, in order and possibly many times, and the paddles, one for each.
        """
        limit = self._tables.near_limit
        whole = len(rows) == len(self.centre_y)  # then rows are all of them, in order
        centre_y = self.centre_y if whole else self.centre_y[rows]
        centre_x = self.centre_x if whole else self.centre_x[rows]
        # As unsigned numbers, offsets below 0 are large: one comparison an axis.
        near = (centre_y - (y - limit).astype(np.int16)[:, None]).view(np.uint16) <= 2 * limit
        near &= (centre_x - (x - limit).astype(np.int16)[:, None]).view(np.uint16) <= 2 * limit
        index, column = np.divmod(np.flatnonzero(near), near.shape[1])
        return index, self.paddles.take((rows[index], column))


def extend(
    tables: SpriteTables,
    size: int,
    occupied: Occupancy,
    rows: np.ndarray,
    pivot_y: np.ndarray,
    pivot_x: np.ndarray,
    last: np.ndarray,
    keys: np.ndarray,
    counter: np.ndarray,
) -> tuple[np.ndarray, Paddles, np.ndarray, np.ndarray]:
    """Place the next paddle of one snake in each of n scenes.

    Args:
        occupied: what is in the way, `rows` of it: (n,) int64, ascending.
        pivot_y, pivot_x: (n,) int64, of each snake's last paddle.
        last: (n,) int64, the sprite of that paddle.
        keys, counter: (n,) uint64 and int64; words counter ... counter + 2 are used.
    Returns:
        Which scenes succeeded, (n,) bool; the new paddles; y and x of the new pivots: (n,) each.
    """
    pivot_y, pivot_x = walk(tables.advance, last, pivot_y, pivot_x)
    scene, others = occupied.near(
        rows, pivot_y + tables.forward_y[last], pivot_x + tables.forward_x[last]
    )
    weights = tables.near_weight.take(last, axis=1)  # [J, n]: candidates, scenes
    _shun_border(tables, size, weights, pivot_y, pivot_x, last)
    if len(scene):
        starts = np.flatnonzero(np.diff(scene, prepend=-1))
        counts = np.diff(starts, append=len(scene))
        at = tables.place(others.sprite, pivot_y[scene] - others.y, pivot_x[scene] - others.x)
        values = tables.dilated.take(tables.near_cell.take(last[scene], axis=1) + at)
        blocked = values[:, starts].astype(np.int32)
        for i in range(1, counts.max()):  # few scenes have more than one paddle near
            more = np.flatnonzero(counts > i)
            blocked[:, more] = np.maximum(blocked[:, more], values[:, starts[more] + i])
        reduced = weights[:, scene[starts]] * (255 - blocked)
        weights *= 255
        weights[:, scene[starts]] = reduced
    else:
        weights *= 255
    sums = weights.astype(np.int64)
    for j in range(1, len(sums)):  # np.cumsum takes four times as long along this axis
        sums[j] += sums[j - 1]
    succeeded = np.zeros(len(last), bool)
    new = Paddles(last.copy(), pivot_y.copy(), pivot_x.copy())
    trying = np.flatnonzero(sums[-1] >= MIN_WEIGHT)
    for draw in range(NUM_DRAWS):
        sums_here = sums if len(trying) == len(last) else sums[:, trying]
        ticket = below(random_words(keys[trying], counter[trying] + draw), sums_here[-1])
        pick = (sums_here <= ticket).sum(axis=0)
        sprite = tables.near[pick, last[trying]]
        new.sprite[trying] = sprite
        new.y[trying] = pivot_y[trying] + tables.offset_y[sprite]
        new.x[trying] = pivot_x[trying] + tables.offset_x[sprite]
        clash = _leaves(tables, size, new)
        if len(scene):
            clash[scene[_clashes(tables, new.take(scene), others)]] = True
        clash = clash[trying]
        succeeded[trying[~clash]] = True
        trying = trying[clash]
        if not len(trying):
            break
        if len(scene):
            keep = ~succeeded[scene]
            scene, others = scene[keep], others.take(keep)
    return succeeded, new, pivot_y, pivot_x


def _shun_border(
    tables: SpriteTables,
    size: int,
    weights: np.ndarray,
    pivot_y: np.ndarray,
    pivot_x: np.ndarray,
    last: np.ndarray,
) -> None:
    """Weigh 0 what is outside or within `margin` of the border, whose occupancy is 1. In place."""
    low = GEOMETRIES[size].padding + tables.margin
    span = size - 2 * low  # cells in [low, low + span) are inside
    safe = span - 2 * tables.radius
    is_safe = (pivot_y - (low + tables.radius)).view(np.uint64) < safe
    is_safe &= (pivot_x - (low + tables.radius)).view(np.uint64) < safe
    edge = np.flatnonzero(~is_safe)
    y = tables.near_y.take(last[edge], axis=1) + (pivot_y[edge] - low)
    x = tables.near_x.take(last[edge], axis=1) + (pivot_x[edge] - low)
    weights[:, edge] *= (y.view(np.uint64) < span) & (x.view(np.uint64) < span)


def _leaves(tables: SpriteTables, size: int, new: Paddles) -> np.ndarray:
    """Whether paddles clash with the border, (n,) bool."""
    low = GEOMETRIES[size].padding
    high = size - 1 - low
    outside = new.y + tables.core_top[new.sprite] < low
    outside |= new.y + tables.core_bottom[new.sprite] > high
    outside |= new.x + tables.core_left[new.sprite] < low
    return outside | (new.x + tables.core_right[new.sprite] > high)


def _clashes(tables: SpriteTables, new: Paddles, old: Paddles) -> np.ndarray:
    """Which of n near pairs of paddles have mask values that add up to a clash: indices."""
    dy, dx = new.y - old.y, new.x - old.x
    apart_y = dy + tables.centre_y[new.sprite] - tables.centre_y[old.sprite]
    apart_x = dx + tables.centre_x[new.sprite] - tables.centre_x[old.sprite]
    close = np.flatnonzero(apart_y**2 + apart_x**2 <= tables.clash_limit**2)
    sprite = new.sprite[close]
    at = tables.place(old.sprite[close], dy[close], dx[close])
    values = tables.wide_mask.take(tables.core_cell.take(sprite, axis=1) + at)
    return close[(values >= tables.core_needs.take(sprite, axis=1)).any(axis=0)]
