"""Pathfinder's distractors: short snakes put wherever a finished pair of long ones leaves room."""

from __future__ import annotations

import numpy as np

from data.pathfinder_extend import NUM_DRAWS, Occupancy, Paddles, below, extend, random_words
from data.pathfinder_sprites import FREE_MAX, GEOMETRIES, NUM_FIRST, SpriteTables, walk

_NUM_TRIES = 5  # of a distractor, before there is one less
_NUM_FIRST_TRIES = 3  # of its first paddle, within a try
_MIN_FREE = 0.01  # of all cells
_RANDOM_CELLS = 48  # tried before all free cells are listed
_CELLS_AT_ONCE = 8


def grow_distractors(
    size: int,
    length: int,
    num_distractors: int,
    tables: SpriteTables,
    keys: np.ndarray,
    long_snakes: Paddles,
) -> tuple[Paddles, np.ndarray]:
    """Place distractors around the long snakes of n scenes.

    Args:
        size: of the image, in pixels.
        length: paddles of a distractor.
        num_distractors: how many to try for.
        keys: (n,) uint64, one random stream a scene, other than those of its long snakes.
        long_snakes: (n, 2 * level), those of the two snakes in turn.
    Returns:
        (n, num_distractors * length) paddles and how many distractors there are, (n,) int64; those
        placed come first.
    """
    return _Distractors(size, length, num_distractors, tables, keys, long_snakes).run()


class _Distractors:
    def __init__(
        self,
        size: int,
        length: int,
        num_distractors: int,
        tables: SpriteTables,
        keys: np.ndarray,
        long_snakes: Paddles,
    ) -> None:
        self._size, self._length, self._number = size, length, num_distractors
        self._tables, self._keys = tables, keys
        # Words of a try: extensions, directions, picks from lists, random cells.
        self._directions = NUM_DRAWS * length
        self._picks = self._directions + _NUM_FIRST_TRIES
        self._cells = self._picks + _NUM_FIRST_TRIES
        self._words_of_try = self._cells + _NUM_FIRST_TRIES * _RANDOM_CELLS
        self._num_long = long_snakes.y.shape[1]
        self._occupied = Occupancy(tables, len(keys), self._num_long + num_distractors * length)
        self._rim = tables.reach + 2  # around the image, so that footprints need no bounds check
        self._inside = np.pad(np.ones((size, size), bool), self._rim)  # outside is never in the way
        padding = GEOMETRIES[size].padding
        border = self._inside & ~np.pad(
            np.ones((size - 2 * padding,) * 2, bool), self._rim + padding
        )
        self._blocked = np.broadcast_to(border, (len(keys), *border.shape)).copy()
        largest = (tables.mask > FREE_MAX).sum(axis=(1, 2)).max()
        most = border.sum() + self._occupied.centre_y.shape[1] * largest
        self._can_be_full = most > (1 - _MIN_FREE) * size**2
        rows = np.arange(len(keys))
        # The last paddle of the first snake never joins the occupancy: an oversight of the
        # reference's, and distractors may touch it.
        for column in range(self._num_long):
            if column != self._num_long - 2:
                self._occupy(rows, column, long_snakes.take((rows, column)))

    def run(self) -> tuple[Paddles, np.ndarray]:
        placed = Paddles.nowhere(len(self._keys), self._number * self._length)
        count = np.zeros(len(self._keys), np.int64)
        for number in range(self._number):
            open_scenes = np.arange(len(self._keys))
            for attempt in range(_NUM_TRIES):
                if not len(open_scenes):
                    break
                counter = (number * _NUM_TRIES + attempt) * self._words_of_try
                done, snake = self._try(open_scenes, counter)
                scenes = open_scenes[done]
                for i in range(self._length):
                    paddle = snake.take((done, i))
                    placed.put(scenes, count[scenes] * self._length + i, paddle)
                    column = self._num_long + count[scenes] * self._length + i
                    self._occupy(scenes, column, paddle)
                count[scenes] += 1
                open_scenes = np.delete(open_scenes, done)
        return placed, count

    def _occupy(self, rows: np.ndarray, columns: int | np.ndarray, paddle: Paddles) -> None:
        self._occupied.paddles.put(rows, columns, paddle)
        self._occupied.enter(rows, columns)
        y, x = paddle.y + self._rim, paddle.x + self._rim
        line = np.arange(-self._tables.reach, self._tables.reach + 1)
        masks = self._tables.mask[paddle.sprite] > FREE_MAX
        masks &= self._inside[y[:, None, None] + line[:, None], x[:, None, None] + line]
        paste(self._blocked, rows, masks, y, x)

    def _try(self, scenes: np.ndarray, counter: int) -> tuple[np.ndarray, Paddles]:
        """Grow one distractor in each of `scenes`: which of them worked, indices, and all paddles.

        What is grown joins the occupancy for the time of the try only.
        """
        snake = Paddles.nowhere(len(scenes), self._length)
        alive, first = self._first_paddles(scenes, counter)
        snake.put(alive, 0, first)
        pivot_y, pivot_x = walk(self._tables.first_pivot, first.sprite, first.y, first.x)
        # The last columns are free until the last distractor stands: what a try puts down is there.
        scratch = self._occupied.centre_y.shape[1] - self._length
        for i in range(1, self._length):
            succeeded, new, pivot_y, pivot_x = extend(
                self._tables,
                self._size,
                self._occupied,
                scenes[alive],
                pivot_y,
                pivot_x,
                snake.sprite[alive, i - 1],
                self._keys[scenes[alive]],
                np.full(len(alive), counter + NUM_DRAWS * i),
            )
            alive, new = alive[succeeded], new.take(succeeded)
            pivot_y, pivot_x = pivot_y[succeeded], pivot_x[succeeded]
            self._occupied.paddles.put(scenes[alive], scratch + i - 1, snake.take((alive, i - 1)))
            self._occupied.enter(scenes[alive], scratch + i - 1)
            snake.put(alive, i, new)
        self._occupied.clear(scenes, slice(scratch, None))
        return alive, snake

    def _first_paddles(self, scenes: np.ndarray, counter: int) -> tuple[np.ndarray, Paddles]:
        """First paddles on free cells: which scenes have one, indices in order, and the paddles."""
        trying = np.arange(len(scenes))
        if self._can_be_full:
            free = self._inside & ~self._blocked[scenes]
            trying = np.flatnonzero(free.sum(axis=(1, 2)) >= _MIN_FREE * self._size**2)
        found = Paddles.nowhere(len(scenes), 1)
        has_one = np.zeros(len(scenes), bool)
        for attempt in range(_NUM_FIRST_TRIES):
            words = random_words(self._keys[scenes[trying]], counter + self._directions + attempt)
            sprite = below(words, NUM_FIRST)
            usable = self._tables.is_usable[sprite]  # the others end the try
            trying, sprite = trying[usable], sprite[usable]
            y, x = self._free_cells(scenes[trying], sprite, counter, attempt)
            is_free = y >= 0
            trying, paddle = trying[is_free], Paddles(sprite[is_free], y[is_free], x[is_free])
            inside = np.ones(len(trying), bool)
            for steps in (self._tables.first_head, self._tables.first_pivot):
                for place in walk(steps, paddle.sprite, paddle.y, paddle.x):
                    inside &= (place >= 0) & (place < self._size)
            has_one[trying[inside]] = True
            found.put(trying[inside], 0, paddle.take(inside))
            trying = trying[~inside]
        alive = np.flatnonzero(has_one)
        return alive, found.take((alive, 0))

    def _free_cells(
        self, scenes: np.ndarray, sprite: np.ndarray, counter: int, attempt: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """A uniform cell where the first paddle's footprint is free, (n,) each; -1 for none.

        Random cells until one is free have the same law as a draw from the list of free cells,
        which is made where they all miss.
        """
        cells_y, cells_x = np.full(len(scenes), -1), np.full(len(scenes), -1)
        keys = self._keys[scenes]
        footprint = self._tables.footprint_cells[sprite] + self._rim  # [n, F, 2]
        first_word = counter + self._cells + attempt * _RANDOM_CELLS
        misses = np.arange(len(scenes))
        for start in range(first_word, first_word + _RANDOM_CELLS, _CELLS_AT_ONCE):
            words = random_words(keys[misses, None], np.arange(start, start + _CELLS_AT_ONCE))
            y, x = np.divmod(below(words, self._size**2), self._size)  # [n, cells]
            blocked = self._blocked[
                scenes[misses][:, None, None],
                y[..., None] + footprint[misses][:, None, :, 0],
                x[..., None] + footprint[misses][:, None, :, 1],
            ].any(axis=2)
            hit = ~blocked.all(axis=1)
            which = np.argmin(blocked, axis=1)[hit]  # the first that is free
            cells_y[misses[hit]], cells_x[misses[hit]] = y[hit, which], x[hit, which]
            misses = misses[~hit]
        for i in misses.tolist():
            y, x = self._list_free(scenes[i], sprite[i])
            if len(y):
                word = random_words(keys[i : i + 1], counter + self._picks + attempt)
                pick = int(below(word, len(y))[0])
                cells_y[i], cells_x[i] = y[pick], x[pick]
        return cells_y, cells_x

    def _list_free(self, scene: int, sprite: int) -> tuple[np.ndarray, np.ndarray]:
        rim, size = self._rim, self._size
        blocked = np.zeros((size, size), bool)
        for dy, dx in (self._tables.footprint[sprite] + rim).tolist():
            blocked |= self._blocked[scene, dy : dy + size, dx : dx + size]
        y, x = np.nonzero(~blocked)
        return y, x


def paste(
    canvas: np.ndarray, rows: np.ndarray, sprites: np.ndarray, y: np.ndarray, x: np.ndarray
) -> None:
    """Merge one sprite into each of canvas[rows] by the pixelwise maximum, in place.

    Args:
        canvas: (num_scenes, height, width), any dtype that has a maximum.
        rows: (n,) int64, no scene twice.
        sprites: (n, 2r + 1, 2r + 1), of the canvas's dtype; they must fit inside.
        y, x: (n,) int64, where their middles go.
    """
    half = sprites.shape[1] // 2
    line = np.arange(-half, half + 1)
    height, width = canvas.shape[1:]
    cells = ((rows * height + y)[:, None, None] + line[:, None]) * width + x[:, None, None] + line
    flat = canvas.reshape(-1)
    flat[cells] = np.maximum(flat.take(cells), sprites)
