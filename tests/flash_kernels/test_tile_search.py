"""The search behind autotune=True, with a clock and kernels of the test's own."""

import pytest
import torch

from flash_kernels import flash_attention, testing
from flash_kernels.portable import tile_choice, tile_search
from flash_kernels.portable.tile_choice import Tile

DEFAULT = Tile(128, 64, 4, 3)
FAST, WRONG, HUGE = tile_search.CANDIDATES[4], tile_search.CANDIDATES[5], tile_search.CANDIDATES[6]


@pytest.fixture(autouse=True)
def no_winners(monkeypatch):
    monkeypatch.setattr(tile_search, "_winners", {})


def run(tile):
    if tile == HUGE:
        raise RuntimeError("out of resource: shared memory")
    out = torch.tensor([1.0, float("-inf")], dtype=torch.float16)
    return [out * 1.5 if tile == WRONG else out]


def clock(run, tile):
    return {WRONG: 0.1, FAST: 0.5}.get(tile, 1.0)


def test_the_fastest_right_one_wins_and_is_kept():
    assert tile_search.searched_tile(("a",), DEFAULT, run, clock) == FAST

    def never(*_):
        raise AssertionError("searched again")

    assert tile_search.searched_tile(("a",), DEFAULT, never, never) == FAST


def test_the_table_stays_where_nothing_is_faster():
    assert tile_search.searched_tile(("b",), DEFAULT, run, lambda run, tile: 1.0) == DEFAULT


def test_a_lost_device_is_not_taken_for_a_tile_that_does_not_fit():
    def broken(tile):
        if tile == DEFAULT:
            return run(tile)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        tile_search.searched_tile(("c",), DEFAULT, broken, clock)


def test_other_lengths_and_batches_share_a_search(monkeypatch):
    """Through the public function, with the interpreter's tiles for candidates."""
    searches = []

    def spy(default, run, time):
        searches.append([t.shape for t in run(Tile(16, 16, 4, 1))])
        return Tile(16, 32, 4, 1)

    monkeypatch.setattr(tile_search, "_search", spy)
    monkeypatch.setattr(tile_choice, "gpu_family", lambda device: "small")
    for batch, seqlen in ((1, 20), (2, 33), (1, 47)):
        q, k, v = testing.make_qkv(batch, seqlen, seqlen, 1, 16)
        out = flash_attention(q, k, v, causal=True, autotune=True)
        torch.autograd.grad(out.sum(), (q, k, v))
    assert len(searches) == 3  # forward, dk_dv, dq
    flash_attention(q, k, v, autotune=True)
    assert len(searches) == 4  # not causal is another kernel
