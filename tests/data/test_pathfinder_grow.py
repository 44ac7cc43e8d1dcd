"""data/pathfinder_grow.py and what it is made of, against a painter that does it the slow way."""

import math

import numpy as np
import pytest

from data.pathfinder_extend import Paddles, attempt_keys, below, mix, random_words, snake_ends
from data.pathfinder_grow import dead_ends, grow_long_snakes, start_rectangles
from data.pathfinder_raster import draw_line, lanczos_reduce
from data.pathfinder_sprites import GEOMETRIES, MIN_WEIGHT, NUM_FIRST, marker_sprite, sprite_tables

SIZES_AND_MARGINS = [(32, 1), (64, 1), (128, 2), (128, 3), (256, 3)]
FROZEN_TABLES = ["5878dc6b", "ec1c8efa", "c73edf89", "7b3733d0", "0a7e760c"]


def paint_attempt(size, level, margin, key):
    """One attempt with a painted occupancy and plain floats: (success, [snake 1, snake 2])."""
    geometry, tables = GEOMETRIES[size], sprite_tables(size, margin)
    starts = start_rectangles(size, tables)
    offsets = np.stack([tables.offset_y, tables.offset_x], axis=1).tolist()
    length, reach, padding = geometry.paddle_length, tables.reach, geometry.padding

    def draw(counter, bound):
        return int(below(random_words(key[None], counter), bound)[0])

    def angle(sprite):
        return math.radians(sprite - 180) if sprite < NUM_FIRST else math.atan2(*offsets[sprite])

    def move(place, towards, distance):
        dy, dx = distance * math.sin(towards), distance * math.cos(towards)
        return math.ceil(place[0] + dy), math.ceil(place[1] + dx)

    def cells(place, half):
        for dy in range(-half, half + 1):
            for dx in range(-half, half + 1):
                y, x = place[0] + dy, place[1] + dx
                if 0 <= y < size and 0 <= x < size:
                    yield y, x, dy, dx

    occupancy = np.full((size, size), 255)
    occupancy[padding : size - padding, padding : size - padding] = 0
    sprite, least_y, num_y, least_x, num_x = starts[draw(0, len(starts))].tolist()
    first = (least_y + draw(1, num_y), least_x + draw(2, num_x))
    around = math.radians(draw(3, 360) - 180)
    moves = [geometry.seed_distance * f(around) for f in (math.sin, math.cos)]
    second = tuple(round(p + round(m, 9)) for p, m in zip(first, moves, strict=True))
    snakes = [[(sprite, *first)], [(draw(4, 360), *second)]]
    pivots = []
    for snake in snakes:
        towards = angle(snake[0][0])
        head = move(snake[0][1:], towards, length)
        pivots.append(move(head, towards + math.pi, length + margin))
    for count in range(2, 2 * level):
        snake = snakes[count % 2]
        sprite, *place = snake[-1]
        pivot = move(pivots[count % 2], angle(sprite), length + 2 * margin)
        weights = []
        for candidate in range(NUM_FIRST, len(offsets)):
            y, x = (p + o for p, o in zip(pivot, offsets[candidate], strict=True))
            if not (0 <= y < size and 0 <= x < size):
                weights.append(0)
                continue
            turn = abs(angle(candidate) - angle(sprite))
            turn = min(min(turn, 2 * math.pi - turn) * geometry.continuity, math.pi / 2)
            disc = [
                occupancy[i, j]
                for i, j, dy, dx in cells((y, x), margin)
                if dy * dy + dx * dx <= margin * margin
            ]
            weights.append(round(math.cos(turn) ** 2 * 2**20) * (255 - int(max(disc))))
        if sum(weights) < MIN_WEIGHT:
            return False, snakes
        for attempt in range(3):
            ticket = draw(5 + 3 * (count - 2) + attempt, sum(weights))
            chosen = NUM_FIRST + int(np.searchsorted(np.cumsum(weights), ticket, side="right"))
            new = tuple(p + o for p, o in zip(pivot, offsets[chosen], strict=True))
            mask = tables.mask[chosen].astype(int)
            if all(
                occupancy[y, x] + mask[dy + reach, dx + reach] < 459
                for y, x, dy, dx in cells(new, reach)
            ):
                break
        else:
            return False, snakes
        for y, x, dy, dx in cells(place, reach):
            value = tables.mask[sprite, dy + reach, dx + reach]
            occupancy[y, x] = max(occupancy[y, x], value)
        snake.append((chosen, *new))
        pivots[count % 2] = pivot
    return True, snakes


@pytest.mark.parametrize("size,margin,level,num", [(32, 1, 9, 14), (64, 1, 6, 8), (128, 3, 6, 3)])
def test_scenes_are_the_first_attempts_that_a_slow_painter_finishes(size, margin, level, num):
    keys = mix(np.arange(num).astype(np.uint64) + np.uint64(77))
    found, attempts = grow_long_snakes(size, level, sprite_tables(size, margin), keys)
    for scene in range(num):
        for attempt in range(1, attempts[scene] + 1):
            key = attempt_keys(keys[scene : scene + 1], np.array([attempt]))[0]
            succeeded, snakes = paint_attempt(size, level, margin, key)
            assert succeeded == (attempt == attempts[scene])
        paddles = np.stack([found.sprite[scene], found.y[scene], found.x[scene]], axis=1)
        assert [[tuple(p) for p in paddles[i::2].tolist()] for i in (0, 1)] == snakes


@pytest.mark.parametrize("num_lanes", [7, 300])
def test_how_many_attempts_are_tried_at_once_changes_nothing(num_lanes):
    keys = mix(np.arange(40).astype(np.uint64))
    tables = sprite_tables(32, 1)
    whole, attempts = grow_long_snakes(32, 6, tables, keys)
    again, again_attempts = grow_long_snakes(32, 6, tables, keys[::-1], num_lanes=num_lanes)
    assert (attempts == again_attempts[::-1]).all()
    assert (whole.y == again.y[::-1]).all() and (whole.sprite == again.sprite[::-1]).all()


def test_refused_pairs_count_as_failed_attempts():
    keys = mix(np.arange(30).astype(np.uint64))
    tables = sprite_tables(256, 3)
    seen = []

    def accept(scenes, attempt_streams, ends):
        seen.append(ends)
        return ends[:, 0, 0, 0] < 128  # the first snake starts in the upper half

    found, _ = grow_long_snakes(256, 6, tables, keys, accept=accept)
    assert (snake_ends(found)[:, 0, 0, 0] < 128).all()
    assert (np.concatenate(seen)[:, 0, 0, 0] >= 128).any()


def test_usable_first_directions_are_the_reference_s():
    expected = {
        (32, 1): range(-150, -120),
        (64, 1): [d for d in range(-180, -84) if d != -135],
        (128, 2): [d for d in range(-180, 180) if not -59 <= d <= -54],
        (128, 3): range(-180, 180),
        (256, 3): range(-180, 180),
    }
    for place in SIZES_AND_MARGINS:
        usable = np.flatnonzero(sprite_tables(*place).is_usable) - 180
        assert usable.tolist() == list(expected[place])


def test_candidates_and_starting_squares_have_the_reference_s_sizes():
    candidates = [len(sprite_tables(*place).stroke) - NUM_FIRST for place in SIZES_AND_MARGINS]
    assert candidates == [18, 38, 41, 49, 49]
    for (size, margin), frame in zip(SIZES_AND_MARGINS, (14, 24, 40, 40, 54), strict=True):
        starts = start_rectangles(size, sprite_tables(size, margin))
        assert (starts[:, [1, 3]] >= frame - 11).all()
        assert (starts[:, [1, 3]] + starts[:, [2, 4]] <= size - frame + 11).all()


def test_a_snake_along_the_border_drifts_as_the_sums_of_floats_do():
    tables = sprite_tables(32, 1)
    is_down = (tables.offset_x == 0) & (tables.offset_y > 0)
    down = int(np.flatnonzero(is_down)[0])
    moves = tables.advance[down, :, 1]  # 2 + 4 * cos(pi / 2) is above 2, 5 + the same is not
    assert moves[[2 + 16, 5 + 16, 31 + 16]].tolist() == [1, 0, 0]


def test_dead_ends_hold_no_way_on():
    dead, tables = dead_ends(64, 1), sprite_tables(64, 1)
    radius = tables.radius
    right = NUM_FIRST + int(np.argmax(tables.offset_x[360:]))
    assert not dead[0, right - NUM_FIRST, 32 + radius, 32 + radius]
    assert dead[0, right - NUM_FIRST, 32 + radius, 58 + radius]
    assert (dead[1:] >= dead[:-1]).all(), "who cannot go one step cannot go two"


def test_tables_are_frozen():
    # A change here makes other scenes of old seeds: raise data.pathfinder.VERSION.
    digests = [sprite_tables(*place).sha256()[:8] for place in SIZES_AND_MARGINS]
    assert digests == FROZEN_TABLES


@pytest.mark.parametrize("size", [32, 64, 128, 256])
def test_rasters_equal_pillow_s(size):
    image, draw = pytest.importorskip("PIL.Image"), pytest.importorskip("PIL.ImageDraw")
    geometry = GEOMETRIES[size]
    half = 2 * geometry.reach
    for angle in np.radians(np.arange(-180, 180, 3)).tolist():
        ours = draw_line(half, angle, geometry.paddle_length, geometry.thickness)
        theirs = image.new("L", (2 * half + 1, 2 * half + 1), 0)
        end = [
            math.ceil(half + 2 * geometry.paddle_length * f(angle)) for f in (math.cos, math.sin)
        ]
        width = round(2 * geometry.thickness)
        draw.Draw(theirs).line([(half, half), tuple(end)], fill=255, width=width)
        assert (ours == np.asarray(theirs)).all()
        small = theirs.resize((half + 1, half + 1), image.LANCZOS)
        assert (lanczos_reduce(ours, half + 1) == np.asarray(small)).all()


def test_marker_is_a_disc_reduced_by_lanczos():
    image = pytest.importorskip("PIL.Image")
    y, x = np.ogrid[-40:88, -40:88]
    disc = np.where(y * y + x * x <= 36, 255, 0).astype(np.uint8)  # radius 3 at twice the scale
    theirs = np.asarray(image.fromarray(disc).resize((64, 64), image.LANCZOS))
    ours = marker_sprite(128)
    half = len(ours) // 2
    assert (ours == theirs[20 - half : 21 + half, 20 - half : 21 + half]).all()
    assert theirs.astype(int).sum() == ours.astype(int).sum(), "nothing lies outside the sprite"


def test_paddles_are_told_apart_by_row():
    paddles = Paddles.nowhere(3, 2)
    paddles.put(np.array([0, 2]), 1, Paddles(*(np.array([i, i + 1]) for i in (5, 7, 9))))
    assert paddles.y[:, 1].tolist()[0::2] == [7, 8] and paddles.y[1, 1] < -100
