"""Growing Pathfinder's two long snakes: many attempts side by side, each a pure function of a key.

Almost every attempt fails (341 of 342 at 128 pixels and 14 paddles), and the reference starts over
each time. Here thousands of attempts take one step together. A scene is its first attempt that
succeeds, in the order of attempt numbers, however many were tried at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from data.pathfinder_extend import (
    NUM_DRAWS,
    Occupancy,
    Paddles,
    attempt_keys,
    below,
    extend,
    random_words,
    snake_ends,
)
from data.pathfinder_sprites import (
    GEOMETRIES,
    MIN_WEIGHT,
    NUM_FIRST,
    Geometry,
    SpriteTables,
    sprite_tables,
    walk,
)

_LANES = 2048
# Paddles to look ahead. The tables' time grows with the area, and few snakes of 256 pixels fail.
_LOOK_AHEAD = {32: 6, 64: 6, 128: 6, 256: 1}

# accept(scenes (n,), keys (n,) of the attempts, ends) -> (n,) bool: which finished pairs to keep.
# ends is (n, 2, 2, 2) int64: start or tip, snake, (y, x).
Accept = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def grow_long_snakes(
    size: int,
    level: int,
    tables: SpriteTables,
    keys: np.ndarray,
    *,
    accept: Accept | None = None,
    num_lanes: int = _LANES,
) -> tuple[Paddles, np.ndarray]:
    """The two long snakes of each scene.

    Args:
        size: of the image, in pixels.
        level: paddles of a snake.
        keys: (n,) uint64, one random stream a scene.
        accept: thins out finished pairs; those it refuses count as failed attempts.
        num_lanes: attempts at a time; changes the speed, not the result.
    Returns:
        (n, 2 * level) paddles, those of the two snakes in turn, and the number of attempts each
        scene took, (n,) int64, without those whose first direction had no free cell.
    """
    return _LongSnakes(size, level, tables, keys, accept, num_lanes).run()


class _LongSnakes:
    """Lanes with one attempt each, refilled until every scene has its first success."""

    def __init__(
        self,
        size: int,
        level: int,
        tables: SpriteTables,
        keys: np.ndarray,
        accept: Accept | None,
        num_lanes: int,
    ) -> None:
        self._size, self._tables, self._keys, self._accept = size, tables, keys, accept
        self._geometry: Geometry = GEOMETRIES[size]
        self._num_paddles = 2 * level
        self._lanes = min(num_lanes, 64 * len(keys))
        self._starts = start_rectangles(size, tables)
        self._dead_ends = dead_ends(size, tables.margin)
        self._found = Paddles.nowhere(len(keys), self._num_paddles)
        self._winner = np.full(len(keys), np.iinfo(np.int64).max)  # lowest attempt that succeeded
        self._next_attempt = np.zeros(len(keys), np.int64)
        self._turn = 0
        # The state of each lane; scene -1 is idle.
        self._scene = np.full(self._lanes, -1)
        self._attempt = np.zeros(self._lanes, np.int64)
        self._key = np.zeros(self._lanes, np.uint64)
        self._count = np.zeros(self._lanes, np.int64)
        self._occupied = Occupancy(tables, self._lanes, self._num_paddles)
        self._placed = self._occupied.paddles
        self._pivot_y = np.zeros((self._lanes, 2), np.int64)
        self._pivot_x = np.zeros((self._lanes, 2), np.int64)

    def run(self) -> tuple[Paddles, np.ndarray]:
        while True:
            self._refill()
            lanes = np.flatnonzero(self._scene >= 0)
            if not len(lanes):
                return self._found, self._winner + 1
            self._step(lanes)

    def _refill(self) -> None:
        """New attempts for idle lanes, the unfinished scenes in turn."""
        idle = np.flatnonzero(self._scene < 0)
        open_scenes = np.flatnonzero(self._winner == np.iinfo(np.int64).max)
        if len(idle) * 16 < self._lanes or not len(open_scenes):  # rare calls cost less
            return
        places = self._turn + np.arange(len(idle))
        scene = open_scenes[places % len(open_scenes)]
        self._turn = (self._turn + len(idle)) % len(open_scenes)
        round_of = np.arange(len(idle)) // len(open_scenes)
        self._attempt[idle] = self._next_attempt[scene] + round_of
        np.maximum.at(self._next_attempt, scene, self._attempt[idle] + 1)
        self._scene[idle] = scene
        self._key[idle] = attempt_keys(self._keys[scene], self._attempt[idle] + 1)
        self._begin(idle)

    def _begin(self, lanes: np.ndarray) -> None:
        """The first paddle of either snake. Neither can leave the image: both start far inside."""
        tables, key = self._tables, self._key[lanes]
        words = [random_words(key, i) for i in range(5)]
        pick = below(words[0], len(self._starts))
        sprite, low_y, num_y, low_x, num_x = self._starts[pick].T
        first = Paddles(sprite, low_y + below(words[1], num_y), low_x + below(words[2], num_x))
        angle = np.arange(-180, 180) * np.pi / 180
        moves = np.stack([np.sin(angle), np.cos(angle)], axis=1) * self._geometry.seed_distance
        dy, dx = np.round(moves, 9)[below(words[3], 360)].T
        y, x = np.rint(first.y + dy).astype(np.int64), np.rint(first.x + dx).astype(np.int64)
        second = Paddles(below(words[4], NUM_FIRST), y, x)
        self._occupied.clear(lanes)
        for snake, paddle in enumerate((first, second)):
            self._placed.put(lanes, snake, paddle)
            pivot_y, pivot_x = walk(tables.first_pivot, paddle.sprite, paddle.y, paddle.x)
            self._pivot_y[lanes, snake], self._pivot_x[lanes, snake] = pivot_y, pivot_x
        self._count[lanes] = 2

    def _step(self, lanes: np.ndarray) -> None:
        count = self._count[lanes]
        snake = count % 2
        succeeded, new, pivot_y, pivot_x = extend(
            self._tables,
            self._size,
            self._occupied,
            lanes,
            self._pivot_y[lanes, snake],
            self._pivot_x[lanes, snake],
            self._placed.sprite[lanes, count - 2],
            self._key[lanes],
            5 + NUM_DRAWS * (count - 2),
        )
        self._scene[lanes[~succeeded]] = -1
        lanes, count, snake = lanes[succeeded], count[succeeded], snake[succeeded]
        self._placed.put(lanes, count, new.take(succeeded))
        self._pivot_y[lanes, snake] = pivot_y[succeeded]
        self._pivot_x[lanes, snake] = pivot_x[succeeded]
        # The paddle before joins the occupancy only now: a snake never blocks its own joint.
        self._occupied.enter(lanes, count - 2)
        self._count[lanes] = count + 1
        num_left = (self._num_paddles - 1 - count) // 2  # paddles that the snake still needs
        doomed = self._is_doomed(
            num_left, new.sprite[succeeded], pivot_y[succeeded], pivot_x[succeeded]
        )
        self._scene[lanes[doomed]] = -1
        self._collect(lanes[count + 1 == self._num_paddles])

    def _is_doomed(
        self, num_left: np.ndarray, sprite: np.ndarray, y: np.ndarray, x: np.ndarray
    ) -> np.ndarray:
        """Whether attempts are certain to fail at the border soon, (n,) bool: they stop at once."""
        depth, reach = len(self._dead_ends), self._tables.radius
        level = np.minimum(num_left, depth) - 1
        found = self._dead_ends[level, sprite - NUM_FIRST, y + reach, x + reach]
        return found & (level >= 0)

    def _collect(self, done: np.ndarray) -> None:
        """Keep successes, and stop attempts that come after one."""
        if len(done) and self._accept is not None:
            ends = snake_ends(self._placed.take(done))
            refused = ~self._accept(self._scene[done], self._key[done], ends)
            self._scene[done[refused]] = -1
            done = done[~refused]
        for lane in done.tolist():
            scene = self._scene[lane]
            if self._attempt[lane] < self._winner[scene]:
                self._winner[scene] = self._attempt[lane]
                self._found.put(scene, slice(None), self._placed.take(lane))
            self._scene[lane] = -1
        if len(done):
            late = (self._scene >= 0) & (self._attempt > self._winner[self._scene])
            self._scene[late] = -1


def start_rectangles(size: int, tables: SpriteTables) -> np.ndarray:
    """Where the first long snake may start.

    Its footprint must keep clear of a frame of twice the seed distance, so that the free cells of a
    direction form a rectangle.

    Returns:
        (usable directions, 5) int64: sprite, least y, number of y, least x, number of x.
    """
    frame = 2 * GEOMETRIES[size].seed_distance
    rows = []
    for sprite in np.flatnonzero(tables.is_usable).tolist():
        least, most = tables.footprint[sprite].min(axis=0), tables.footprint[sprite].max(axis=0)
        number = size - 2 * frame - (most - least)
        if (number > 0).all():
            (y, x), (num_y, num_x) = (frame - least).tolist(), number.tolist()
            rows.append((sprite, y, num_y, x, num_x))
    return np.array(rows)


@functools.cache
def dead_ends(size: int, margin: int) -> np.ndarray:
    """Where a snake cannot but run into the border, whatever else is in the image.

    Three of four attempts end there; knowing it some paddles ahead saves a quarter of the work.

    Returns:
        (paddles to look ahead, extension sprites, side, side) bool, by pivot, whose coordinates
        count from -radius: whether no paddle at the number d + 1 after this one can be placed.
    """
    tables = sprite_tables(size, margin)
    radius, side = tables.radius, size + 2 * tables.radius
    low = GEOMETRIES[size].padding + margin
    line = np.arange(side) - radius
    num_extensions = tables.near.shape[1] - NUM_FIRST
    dead = np.zeros((_LOOK_AHEAD[size], num_extensions, side, side), bool)
    for depth in range(len(dead)):
        for sprite in range(NUM_FIRST, NUM_FIRST + num_extensions):
            pivot_y, pivot_x = walk(tables.advance, np.full(side, sprite), line, line)
            # Clipped pivots are so far outside that no candidate is inside.
            at = np.ix_(*(np.clip(p + radius, 0, side - 1) for p in (pivot_y, pivot_x)))
            weight, is_dead = np.zeros((side, side), np.int64), np.ones((side, side), bool)
            for i in np.flatnonzero(tables.near_weight[:, sprite]):
                y, x = pivot_y + tables.near_y[i, sprite], pivot_x + tables.near_x[i, sprite]
                inside = ((y >= low) & (y < size - low))[:, None] & ((x >= low) & (x < size - low))
                weight += inside * tables.near_weight[i, sprite].astype(np.int64)
                if depth:
                    is_dead &= ~inside | dead[depth - 1, tables.near[i, sprite] - NUM_FIRST][at]
            dead[depth, sprite - NUM_FIRST] = weight * 255 < MIN_WEIGHT
            if depth:
                dead[depth, sprite - NUM_FIRST] |= is_dead
    return dead
