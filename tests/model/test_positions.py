"""Positions: what they add, what they turn, and how they grow with an image."""

import pytest
import torch

from model.positions import (
    POSITIONS,
    ROTARY,
    Positions,
    extend_positions,
    resize_positions,
    rotate,
    sinusoids,
)


def positions(kind, size=6, headdim=8, **options):
    torch.manual_seed(0)
    return Positions(kind, size * size, 10, width=size, headdim=headdim, **options)


@pytest.mark.parametrize("kind", POSITIONS)
def test_index_selects_the_positions_that_order_gives(kind):
    layer, x = positions(kind), torch.randn(2, 36, 10)
    index = torch.stack([torch.randperm(36), torch.randperm(36)])
    added = layer.add(torch.zeros_like(x), None)
    torch.testing.assert_close(layer.add(torch.zeros_like(x), index)[0], added[0, index[0]])
    if kind in ROTARY:
        assert layer.add(x, index) is x
        whole, chosen = layer.rotary(36, None), layer.rotary(36, index)
        for a, b in zip(whole, chosen, strict=True):
            assert a.shape == (1, 36, 1, 4) and b.shape == (2, 36, 1, 4)
            torch.testing.assert_close(b[1], a[0, index[1]])
    else:
        assert layer.rotary(36, None) is None and added.std() > 0


def test_learned_2d_is_a_vector_a_row_plus_one_a_column():
    layer = positions("learned_2d")
    added = layer.add(torch.zeros(1, 36, 10), None)[0].unflatten(0, (6, 6))
    torch.testing.assert_close(added[2, 5], layer.rows.weight[2] + layer.columns.weight[5])


@pytest.mark.parametrize("shift", [(0, 3), (5, 0), (7, 11)])
def test_rotary_scores_do_not_change_when_both_pixels_move(shift):
    size = 24
    layer = positions("rotary_2d", size, wavelengths=(3.0, 40.0))
    q, k = torch.randn(2, 1, 9, 3, 8).unbind(0)
    places = torch.randint(0, 12, (9, 2))
    scores = []
    for offset in (torch.tensor([0, 0]), torch.tensor(shift)):
        y, x = (places + offset).unbind(1)
        turn = layer.rotary(9, (y * size + x)[None])
        scores.append(torch.einsum("bihd,bjhd->bhij", rotate(q, *turn), rotate(k, *turn)))
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rotate(q, *turn).norm(dim=-1), q.norm(dim=-1))
    other = rotate(k, *layer.rotary(9, (places[:, 1] * size + places[:, 0])[None]))
    moved = torch.einsum("bihd,bjhd->bhij", rotate(q, *turn), other)
    assert (moved - scores[0]).abs().max() > 0.1, "places do matter"


def test_rotary_in_one_dimension_turns_with_the_place_alone():
    """After equation 34 of arXiv 2104.09864: plane i by place * frequency i."""
    layer = positions("rotary", headdim=8, wavelengths=(4.0, 256.0))
    cos, sin = layer.rotary(36, None)
    waves = torch.tensor([4.0, 16.0, 64.0, 256.0])
    angles = 2 * torch.pi * torch.arange(36)[:, None] / waves
    torch.testing.assert_close(cos[0, :, 0], angles.cos(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sin[0, :, 0], angles.sin(), atol=1e-5, rtol=1e-5)


def test_rotary_of_a_larger_image_is_the_same_function_of_the_place():
    small, large = (positions("rotary_2d", size).rotary(size * size, None) for size in (6, 12))
    for a, b in zip(small, large, strict=True):
        corner = b[0].unflatten(0, (12, 12))[:6, :6].flatten(0, 1)
        torch.testing.assert_close(a[0], corner)


def test_sinusoids_start_with_zero_and_one():
    table = sinusoids(5, 6)
    assert table[0].tolist() == [0, 0, 0, 1, 1, 1]
    torch.testing.assert_close(
        table[3, [0, 3]],
        torch.tensor([3.0]).sin().new_tensor([torch.tensor(3.0).sin(), torch.tensor(3.0).cos()]),
    )
    assert sinusoids(4, 5).shape == (4, 5)


def test_grown_positions_repeat_each_vector_over_its_block():
    table = torch.randn(4 * 6, 3)
    grown = resize_positions(table, 4, 6, 2).unflatten(0, (8, 12))
    old = table.unflatten(0, (4, 6))
    for y in range(8):
        for x in range(12):
            assert torch.equal(grown[y, x], old[y // 2, x // 2])
    with pytest.raises(ValueError, match="4 x 5 rows, got 24"):
        resize_positions(table, 4, 5, 2)
    with pytest.raises(ValueError, match="factor must be at least 1"):
        resize_positions(table, 4, 6, 0)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"kind": "absolute"}, "positions must be one of learned, .*got 'absolute'"),
        ({"kind": "rotary_2d", "width": None}, "rotary_2d needs an image"),
        ({"kind": "learned_2d", "width": None}, "learned_2d needs an image"),
        ({"kind": "rotary_2d", "headdim": 6}, "rotary_2d needs a headdim .* multiple of 4, got 6"),
        ({"kind": "rotary", "headdim": 5}, "rotary needs a headdim .* multiple of 2, got 5"),
        ({"kind": "rotary_2d", "wavelengths": (0.0, 4.0)}, "must be positive and rise"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        Positions(**{"seqlen": 16, "dim": 4, "width": 4, "headdim": 4, **options})


def test_learned_table_grows_by_tiling_or_interpolation():
    table = torch.tensor([[0.0, 9.0], [3.0, 6.0], [6.0, 3.0]])
    tiled = extend_positions(table, 7)[:, 0].tolist()
    assert tiled == [0, 3, 6, 0, 3, 6, 0]
    stretched = extend_positions(table.half(), 7, "interpolate")
    assert stretched.dtype == torch.float16
    assert stretched.tolist() == [[x, 9 - x] for x in range(7)]
    for how in ("tile", "interpolate"):
        assert torch.equal(extend_positions(table, 2, how), table[:2])
        assert torch.equal(extend_positions(table, 3, how), table)
    with pytest.raises(ValueError, match="must be one of tile, interpolate, got 'repeat'"):
        extend_positions(table, 7, "repeat")
