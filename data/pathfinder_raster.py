"""Drawing on small 8-bit canvases as Pillow does, in integers and the same on every machine."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

ANTIALIAS = 2  # sprites are drawn at this scale, then reduced


def draw_line(half: int, angle: float, length: float, thickness: float) -> np.ndarray:
    """A dash from the centre of a canvas, at ANTIALIAS times the scale, as Pillow draws lines.

    Args:
        half: the canvas is (2 * half + 1) squared.
        angle, length, thickness: of the dash; thickness * ANTIALIAS is an integer.
    Returns:
        uint8, 0 or 255.
    """
    # The sum's rounding counts: at 32 pixels -120 degrees end one cell beyond the exact place.
    dy = math.ceil(half + length * ANTIALIAS * math.sin(angle)) - half
    dx = math.ceil(half + length * ANTIALIAS * math.cos(angle)) - half
    width = round(thickness * ANTIALIAS)
    canvas = np.zeros((2 * half + 1, 2 * half + 1), np.uint8)
    if width == 1:
        for y, x in _bresenham(dy, dx):
            canvas[half + y, half + x] = 255
        return canvas
    # Pillow's wide line: a quadrilateral whose long sides are shifted by whole pixels.
    up, down = (_half_up((width - 1) / 2), _half_down((width - 1) / 2))
    norm = math.hypot(dy, dx)
    dxmin, dxmax = _half_down(down / norm * dy), _half_down(up / norm * dy)
    dymin, dymax = _half_up(down / norm * dx), _half_up(up / norm * dx)
    shifts = [(dymax, -dxmin), (dy + dymax, dx - dxmin), (dy - dymin, dx + dxmax), (-dymin, dxmax)]
    corners = [(half + y, half + x) for y, x in shifts]  # rounding of halves depends on the sign
    edges = [_Edge(*a, *b) for a, b in zip(corners, corners[1:] + corners[:1], strict=True)]
    for y in range(min(c[0] for c in corners), max(c[0] for c in corners) + 1):
        level = [edge for edge in edges if edge.y0 == edge.y1 == y]
        crossings: list[float] = [x for edge in level for x in (edge.x0, edge.x1)]
        slanted = [e for e in edges if e.y0 != e.y1 and e.top <= y <= e.bottom]
        crossings += [_crossing(edge, slanted[:i], y) for i, edge in enumerate(slanted)]
        left, right = _half_up(min(crossings)), _half_down(max(crossings))
        canvas[y, left : right + 1] = 255
    return canvas


class _Edge(NamedTuple):
    y0: int
    x0: int
    y1: int
    x1: int

    @property
    def top(self) -> int:
        return min(self.y0, self.y1)

    @property
    def bottom(self) -> int:
        return max(self.y0, self.y1)

    def x(self, y: int) -> float:
        return self.x0 + (y - self.y0) * (self.x1 - self.x0) / (self.y1 - self.y0)


def _crossing(edge: _Edge, earlier: list[_Edge], y: int) -> float:
    """Where `edge` meets row y; a sharp corner is widened until it touches the row beside it.

    That rule is Pillow's (since 8.3); it decides which first directions are usable at 64 pixels.
    """
    here = edge.x(y)
    if y not in (edge.top, edge.bottom) or edge.x0 == edge.x1:
        return here
    beside = y - 1 if y == edge.bottom else y + 1
    for other in earlier:
        meets = y in (other.top, other.bottom) and other.x0 != other.x1
        if not meets or _half_up(here) != _half_up(other.x(y)):
            continue
        if other.top <= beside <= other.bottom:
            near, far = sorted((edge.x(beside), other.x(beside)))
            if here > far + 1:
                return _half_up(far) + 1
            if here < near - 1:
                return _half_up(near) - 1
        break
    return here


def lanczos_reduce(image: np.ndarray, side: int) -> np.ndarray:
    """Resize a square 8-bit image to `side` by Lanczos-3 in fixed point, as Pillow does.

    Rows first, then columns, each rounded to 8 bits.
    """
    weights = _lanczos_weights(len(image), side)
    for _ in range(2):
        sums = (image.astype(np.int64) @ weights.T + (1 << 21)) >> 22
        image = np.clip(sums, 0, 255).T
    return image.astype(np.uint8)


@functools.cache
def _lanczos_weights(old: int, new: int) -> np.ndarray:
    """(new, old) int64, rows add up to about 2**22."""
    scale = old / new
    support = 3 * scale
    weights = np.zeros((new, old), np.int64)
    for i in range(new):
        centre = (i + 0.5) * scale
        first = max(int(centre - support + 0.5), 0)
        last = min(int(centre + support + 0.5), old)
        x = (np.arange(first, last) - centre + 0.5) / scale
        kernel = np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0.0)
        weights[i, first:last] = np.rint(kernel / kernel.sum() * (1 << 22))
    return weights


def dilate(image: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """The largest value at any of `offsets`, (n, 2), from each pixel; beyond the image it is 0."""
    width = int(np.abs(offsets).max())
    wide = np.pad(image, width)
    rows, columns = image.shape
    shifted = [wide[y : y + rows, x : x + columns] for y, x in (offsets + width).tolist()]
    return np.maximum.reduce(shifted)


def disc_offsets(radius: int) -> np.ndarray:
    """Cells within `radius` of (0, 0): (n, 2) int64."""
    line = np.arange(-radius, radius + 1)
    return np.argwhere(line[:, None] ** 2 + line**2 <= radius**2) - radius


def _bresenham(dy: int, dx: int) -> list[tuple[int, int]]:
    """Cells of a one pixel wide line from (0, 0) to (dy, dx)."""
    long, short = max(abs(dy), abs(dx)), min(abs(dy), abs(dx))
    cells, side, error = [], 0, 2 * short - long
    for along in range(long + 1):
        y, x = (side, along) if abs(dx) > abs(dy) else (along, side)
        cells.append((y * (1 if dy >= 0 else -1), x * (1 if dx >= 0 else -1)))
        if error >= 0:
            side += 1
            error -= 2 * long
        error += 2 * short
    return cells


def _half_up(value: float) -> int:
    return int(math.copysign(math.floor(abs(value) + 0.5), value))


def _half_down(value: float) -> int:
    return int(math.copysign(math.ceil(abs(value) - 0.5), value))
