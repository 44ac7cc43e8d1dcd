"""The parts that Pathfinder scenes are made of: sizes, dashes ("paddles") and their tables.

Directions are finite: a snake's first paddle points along one of 360 whole degrees, each further
one along one of a few dozen offsets. Every stroke, mask and table that growing a snake needs is
therefore drawn once, by integer rasterisers of our own, so that no library version changes a scene.

Parameters and rules follow the generator of Linsley et al. (NeurIPS 2018, the version of 2019) as
the Long Range Arena calls it (Tay et al., arXiv 2011.04006, section 2.4). Lengths are in pixels,
angles grow from +x towards +y, coordinates are (y, x).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math

import numpy as np

from data.pathfinder_raster import ANTIALIAS, dilate, disc_offsets, draw_line, lanczos_reduce

NUM_FIRST = 360  # sprites 0 ... 359 are first paddles of -180 ... 179 degrees; extensions follow
FREE_MAX = 76  # occupancy up to 0.3 counts as free, in 255ths
CLASH_SUM = 459  # occupancy + mask from 1.8 on is a clash, in 255ths
WEIGHT_ONE = 1 << 20  # a candidate's weight 1.0; times an occupancy in 255ths it fits 32 bits
MIN_WEIGHT = round(1e-4 * WEIGHT_ONE * 255)  # of all candidates together
_LEAST_COORDINATE, _EXACT_FROM = -16, 31
_COORDINATES = np.arange(_LEAST_COORDINATE, _EXACT_FROM + 1)[:, None]


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What the Long Range Arena sets for one image size.

    Attributes:
        padding: width of the border that no paddle may enter.
        paddle_length: of a dash, between the centres of its ends.
        thickness: of a dash.
        margins: half the gap between dashes; one is drawn for each image.
        seed_distance: between the starts of the two long snakes.
        marker_radius: of the discs.
        continuity: factor on turning angles; larger is straighter.
        long_contrast, short_contrast: brightness of long snakes and of distractors, in 20ths.
        distractor_budget: distractor paddles of an image, about.
    """

    padding: int
    paddle_length: int
    thickness: float
    margins: tuple[int, ...]
    seed_distance: int
    marker_radius: float
    continuity: float
    long_contrast: int
    short_contrast: int
    distractor_budget: int

    @property
    def reach(self) -> int:
        """Half the side of a sprite with the widest margin."""
        return self.paddle_length + math.ceil(self.thickness) + max(self.margins)


GEOMETRIES = {
    32: Geometry(1, 2, 0.5, (1,), 7, 1.5, 1.0, 30, 40, 20),
    64: Geometry(1, 5, 1.0, (1,), 12, 2.5, 1.8, 16, 16, 22),
    128: Geometry(1, 5, 1.5, (2, 3), 20, 3.0, 1.8, 18, 18, 35),
    256: Geometry(22, 5, 2.0, (3,), 27, 5.0, 1.8, 20, 20, 30),
}


@dataclasses.dataclass(frozen=True)
class SpriteTables:
    """Everything about the paddles of one size and margin. K sprites: 360 first, then extensions.

    Tables named *_y, *_x come in pairs, int64. J is the most candidates a paddle has, C the most
    cells of a mask that can clash; places beyond the last candidate or cell do nothing.

    Attributes:
        margin: half the gap between dashes.
        reach: half the side of a sprite, R.
        stroke, mask: (K, 2R + 1, 2R + 1) uint8, the drawn dash and the room it takes, around the
            cell where the paddle is placed.
        first_head, first_pivot: (360, 48, 2), from a first paddle to its head, pivot; see `walk`.
        advance: (K, 48, 2), from a paddle's pivot to the next one; see `walk`.
        offset_y, offset_x: (K,), from the pivot of an extension to its cell.
        near: (J, K) int64, the candidates after each paddle, as sprites, by row then column.
        near_weight: (J, K) int32, their weights before occupancy, WEIGHT_ONE = 1.
        near_y, near_x: (J, K), their cells relative to the pivot.
        near_cell: (J, K) int64, the same as index into `dilated`; see `place`.
        forward_y, forward_x: (K,), the middle of the candidates relative to the pivot.
        radius: of the circle of candidates, paddle_length + margin.
        near_limit: a paddle whose middle is farther from `forward` touches no candidate.
        wide: half the side of `dilated` and `wide_mask`, W: no index leaves them.
        dilated: (K * (2W + 1)**2,) uint8, largest mask within a disc of `margin`.
        wide_mask: (K * (2W + 1)**2,) uint8, `mask` in a wider square.
        core_cell: (C, K) int64, cells whose mask can clash, as index into `wide_mask`.
        core_needs: (C, K) int16, what another mask must have there to clash.
        core_top, core_bottom, core_left, core_right: (K,) int64, the box of those cells.
        centre_y, centre_x: (K,), the middle of the dash relative to its cell.
        clash_limit: paddles whose middles are farther apart cannot clash.
        footprint: list of 360 (F, 2) int64, cells that must be free where a first paddle starts,
            relative to the start; one pixel down and right of the paddle, as in the reference.
        footprint_cells: (360, most F, 2) int64, the same, filled up with repetitions.
        is_usable: (360,) bool, first directions for which the reference ever finds a start.
    """

    margin: int
    reach: int
    stroke: np.ndarray
    mask: np.ndarray
    first_head: np.ndarray
    first_pivot: np.ndarray
    advance: np.ndarray
    offset_y: np.ndarray
    offset_x: np.ndarray
    near: np.ndarray
    near_weight: np.ndarray
    near_y: np.ndarray
    near_x: np.ndarray
    near_cell: np.ndarray
    forward_y: np.ndarray
    forward_x: np.ndarray
    radius: int
    near_limit: int
    wide: int
    dilated: np.ndarray
    wide_mask: np.ndarray
    core_cell: np.ndarray
    core_needs: np.ndarray
    core_top: np.ndarray
    core_bottom: np.ndarray
    core_left: np.ndarray
    core_right: np.ndarray
    centre_y: np.ndarray
    centre_x: np.ndarray
    clash_limit: int
    footprint: list[np.ndarray]
    footprint_cells: np.ndarray
    is_usable: np.ndarray

    def place(self, sprite: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> np.ndarray:
        """Index into `dilated` and `wide_mask` of the cell at (dy, dx) from a paddle's own."""
        side = 2 * self.wide + 1
        return (sprite * side + dy + self.wide) * side + dx + self.wide

    def sha256(self) -> str:
        """Of all that determines a scene: equal hashes draw and grow the same snakes."""
        digest = hashlib.sha256()
        moves = (self.first_head, self.first_pivot, self.advance, self.offset_y, self.offset_x)
        sprites = (self.stroke, self.mask, self.near, self.near_weight)
        for table in (*sprites, *moves, *self.footprint):
            digest.update(repr(table.shape).encode() + table.astype("<i8").tobytes())
        return digest.hexdigest()


def walk(
    steps: np.ndarray, sprite: np.ndarray, y: np.ndarray, x: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Take each paddle's step from (y, x): all (n,) int64.

    The reference rounds coordinate + distance * sine up. For small coordinates the sum keeps a
    sine such as 6e-17 that should be 0, and a snake along the border drifts off by one: steps are
    tabulated for each coordinate up to where such sums are exact.
    """
    row = np.minimum(np.maximum(y, _LEAST_COORDINATE), _EXACT_FROM) - _LEAST_COORDINATE
    column = np.minimum(np.maximum(x, _LEAST_COORDINATE), _EXACT_FROM) - _LEAST_COORDINATE
    return y + steps[sprite, row, 0], x + steps[sprite, column, 1]


@functools.cache
def sprite_tables(size: int, margin: int) -> SpriteTables:
    """The tables of one image size and margin; made once a process, in about 0.1 s."""
    geometry = GEOMETRIES[size]
    length, thickness = geometry.paddle_length, geometry.thickness
    reach = length + math.ceil(thickness) + margin
    offsets = _candidate_offsets(length + margin)
    degrees = np.radians(np.arange(-180, 180))
    angles = np.concatenate([degrees, np.arctan2(offsets[:, 0], offsets[:, 1])])
    # A first paddle is drawn along its direction; a later one from its head back to its pivot.
    drawn = np.where(np.arange(len(angles)) < NUM_FIRST, angles, angles + np.pi)
    lines = [draw_line(reach * ANTIALIAS, a, length, thickness) for a in drawn]
    stroke = np.stack([lanczos_reduce(line, 2 * reach + 1) for line in lines])
    disc = disc_offsets(margin * ANTIALIAS)
    mask = np.stack([lanczos_reduce(dilate(line, disc), 2 * reach + 1) for line in lines])
    offset = np.concatenate([np.zeros((NUM_FIRST, 2), np.int64), offsets])
    near, near_weight = _near_candidates(angles, geometry.continuity)
    near_cells = offset[near]  # [J, K, 2]
    forward = (near_cells * near_weight[..., None]).sum(0) // near_weight.sum(0)[:, None]
    heads = _moved(_COORDINATES, degrees, length)
    back = np.where(degrees + np.pi < np.pi, degrees + np.pi, degrees - np.pi)
    pivots = _moved(heads, back, length + margin)
    centre = _moved(np.zeros((1, 1), np.int64), drawn, length)[:, 0] // 2
    dilated = np.stack([dilate(np.pad(m, margin), disc_offsets(margin)) for m in mask])
    cells = [np.argwhere(m >= CLASH_SUM - 255) - reach for m in mask]
    needs = [
        CLASH_SUM - m.astype(np.int64)[tuple((c + reach).T)]
        for m, c in zip(mask, cells, strict=True)
    ]
    core = _padded(cells, 0).swapaxes(0, 1)
    box = np.array([[*c[:, 0], *c[:, 1]] for c in map(_extremes, cells)]).T
    # How far things reach, for the limits below.
    core_radius = max(_farthest(c, m) for c, m in zip(cells, centre, strict=True))
    dilated_cells = [np.argwhere(d) - reach - margin for d in dilated]
    dilated_radius = max(_farthest(c, m) for c, m in zip(dilated_cells, centre, strict=True))
    is_candidate = near_weight > 0
    middle = forward[is_candidate.nonzero()[1]]
    spread = _farthest(near_cells[is_candidate], middle)
    centre_spread = _farthest((near_cells + centre[near])[is_candidate], middle)
    near_limit = math.ceil(max(spread + dilated_radius, centre_spread + 2 * core_radius))
    wide = near_limit + reach + 2 * (length + margin)
    side = 2 * wide + 1
    footprints = [_footprint(m, reach, length + margin) for m in mask[:NUM_FIRST]]
    most = max(map(len, footprints))
    return SpriteTables(
        margin=margin,
        reach=reach,
        stroke=stroke,
        mask=mask,
        first_head=heads - _COORDINATES,
        first_pivot=pivots - _COORDINATES,
        advance=_moved(_COORDINATES, angles, length + 2 * margin) - _COORDINATES,
        offset_y=offset[:, 0].copy(),
        offset_x=offset[:, 1].copy(),
        near=near,
        near_weight=near_weight.astype(np.int32),
        near_y=near_cells[..., 0].copy(),
        near_x=near_cells[..., 1].copy(),
        near_cell=near_cells[..., 0] * side + near_cells[..., 1],
        forward_y=forward[:, 0].copy(),
        forward_x=forward[:, 1].copy(),
        radius=length + margin,
        near_limit=near_limit,
        wide=wide,
        dilated=_in_zeros(dilated, wide),
        wide_mask=_in_zeros(mask, wide),
        core_cell=core[..., 0] * side + core[..., 1],
        core_needs=_padded(needs, 999).T.astype(np.int16),
        core_top=box[0].copy(),
        core_bottom=box[1].copy(),
        core_left=box[2].copy(),
        core_right=box[3].copy(),
        centre_y=centre[:, 0].copy(),
        centre_x=centre[:, 1].copy(),
        clash_limit=math.ceil(2 * core_radius),
        footprint=footprints,
        footprint_cells=np.stack([np.resize(f, (most, 2)) for f in footprints]),
        is_usable=np.array([_is_usable(f) for f in footprints]),
    )


@functools.cache
def marker_sprite(size: int) -> np.ndarray:
    """The disc, (2R + 1, 2R + 1) uint8 with peak 255.

    Drawn on the grid of twice the scale, where image pixel i covers 2i and 2i + 1 and the disc
    stands on the first of the two, as in the reference.
    """
    radius = GEOMETRIES[size].marker_radius
    reach = math.ceil(radius) + 3  # the Lanczos kernel reaches three pixels
    side = 2 * reach + 1
    line = np.arange(side * ANTIALIAS) - reach * ANTIALIAS
    inside = line[:, None] ** 2 + line**2 <= (radius * ANTIALIAS) ** 2
    return lanczos_reduce(np.where(inside, 255, 0), side)


def _moved(coordinates: np.ndarray, angles: np.ndarray, distance: float) -> np.ndarray:
    """Coordinates, (.., c, 1 or 2), moved along each angle, rounded up: (len(angles), c, 2) int64.

    Sines are the C library's, one at a time: numpy's vectorised ones differ between processors.
    """
    sines = [[math.sin(angle), math.cos(angle)] for angle in angles.tolist()]
    return np.ceil(coordinates + distance * np.array(sines)[:, None]).astype(np.int64)


def _candidate_offsets(radius: int) -> np.ndarray:
    """Cells of a circle sampled every pixel of arc, towards zero from a large centre: (n, 2)."""
    arcs = np.radians(np.arange(0, 360, 360 / (2 * radius * np.pi)))
    circle = np.stack([radius * np.sin(arcs), radius * np.cos(arcs)], axis=1)
    return np.unique(np.floor(np.round(circle, 9)).astype(np.int64), axis=0)


def _near_candidates(angles: np.ndarray, continuity: float) -> tuple[np.ndarray, np.ndarray]:
    turn = np.abs(angles[:, None] - angles[NUM_FIRST:])
    turn = np.minimum(np.minimum(turn, 2 * np.pi - turn) * continuity, np.pi / 2)
    weight = np.rint(np.cos(turn) ** 2 * WEIGHT_ONE).astype(np.int64)
    found = [np.flatnonzero(row) for row in weight]
    rows = [row[f] for row, f in zip(weight, found, strict=True)]
    return _padded([f + NUM_FIRST for f in found], NUM_FIRST).T, _padded(rows, 0).T


def _footprint(mask: np.ndarray, reach: int, limit: int) -> np.ndarray:
    cells = np.argwhere(mask == 255) - reach + 1
    return cells[(np.abs(cells) <= limit).all(axis=1)]


def _is_usable(footprint: np.ndarray) -> bool:
    """Whether the footprint has a cell in each closed quadrant.

    Where it has none, some cell of the image sees no part of the footprint. OpenCV's dilation gives
    minus the largest double there, and the reference takes that for "no free cell anywhere".
    """
    y, x = footprint.T
    return all(((a * y >= 0) & (b * x >= 0)).any() for a in (1, -1) for b in (1, -1))


def _padded(rows: list[np.ndarray], fill: int) -> np.ndarray:
    longest = max(len(row) for row in rows)
    out = np.full((len(rows), longest, *rows[0].shape[1:]), fill, np.int64)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def _in_zeros(images: np.ndarray, half: int) -> np.ndarray:
    """Images, (K, 2r + 1, 2r + 1), each in a square of 2 * half + 1, flattened."""
    rim = half - images.shape[1] // 2
    return np.pad(images, ((0, 0), (rim, rim), (rim, rim))).reshape(-1)


def _farthest(cells: np.ndarray, centre: np.ndarray) -> float:
    return float(np.hypot(*(cells - centre).T).max())


def _extremes(cells: np.ndarray) -> np.ndarray:
    return np.stack([cells.min(axis=0), cells.max(axis=0)])
