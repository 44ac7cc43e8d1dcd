"""data/order.py: the order of samples is a permutation that nothing but its seed changes."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.order import NUM_ROUNDS, permute, rank_sample_ids, sample_ids

fast = settings(max_examples=20, deadline=None, database=None)


def scalar_permute(index, seed, epoch, num_samples):
    """The definition in plain integers, one index at a time."""
    digest = hashlib.shake_256(f"sample order, seed {seed}, epoch {epoch}".encode())
    raw = digest.digest(16 * NUM_ROUNDS)
    words = [int.from_bytes(raw[i : i + 8], "little") for i in range(0, len(raw), 8)]
    mask = 2**64 - 1
    for key, salt in zip(words[:NUM_ROUNDS], words[NUM_ROUNDS:], strict=True):
        partner = (key % num_samples + num_samples - index) % num_samples
        z = max(index, partner) ^ salt
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
        index = partner if z >> 63 else index
    return index


@fast
@given(st.integers(1, 2000), st.integers(-(2**70), 2**70), st.integers(0, 10**6))
def test_every_sample_comes_exactly_once(num_samples, seed, epoch):
    ids = permute(np.arange(num_samples), seed=seed, epoch=epoch, num_samples=num_samples)
    assert sorted(ids.tolist()) == list(range(num_samples))


@fast
@given(st.integers(1, 2**62), st.integers(0, 1000), st.integers(0, 50), st.data())
def test_any_index_alone_matches_the_definition(num_samples, seed, epoch, data):
    index = data.draw(st.integers(0, num_samples - 1))
    got = permute(np.array([[index]]), seed=seed, epoch=epoch, num_samples=num_samples)
    assert got.shape == (1, 1) and got.dtype == np.int64
    assert got[0, 0] == scalar_permute(index, seed, epoch, num_samples)


def test_order_is_frozen():
    # A change here means that old checkpoints continue on other samples than they would have.
    assert sample_ids(0, 8, seed=1111, num_samples=5).tolist() == [2, 1, 0, 3, 4, 0, 3, 1]


def test_small_permutations_are_uniform():
    counts = np.zeros((4, 4))
    for seed in range(800):
        ids = permute(np.arange(4), seed=seed, epoch=0, num_samples=4)
        counts[np.arange(4), ids] += 1
    # Binomial(800, 1/4): mean 200, standard deviation 12.2.
    assert np.abs(counts - 200).max() < 5 * 12.2


def test_neighbours_are_scattered_and_epochs_differ():
    n = 10_000
    first = permute(np.arange(n), seed=1, epoch=0, num_samples=n)
    second = permute(np.arange(n), seed=1, epoch=1, num_samples=n)
    other = permute(np.arange(n), seed=2, epoch=0, num_samples=n)
    # Fixed points of a random permutation are Poisson(1); correlations are about 1 / sqrt(n).
    for a, b in [(first, np.arange(n)), (first, second), (first, other)]:
        assert (a == b).sum() < 10
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.05
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.05


@fast
@given(st.integers(1, 50), st.integers(0, 200), st.lists(st.integers(1, 40), max_size=8))
def test_batch_splits_and_epoch_edges_give_one_sequence(num_samples, position, counts):
    whole = sample_ids(position, sum(counts), seed=3, num_samples=num_samples)
    parts, at = [], position
    for count in counts:
        parts.append(sample_ids(at, count, seed=3, num_samples=num_samples))
        at += count
    assert np.concatenate([np.empty(0, int), *parts]).tolist() == whole.tolist()


def test_no_repeat_within_an_epoch_across_its_edge():
    ids = sample_ids(0, 30, seed=5, num_samples=10)
    for epoch in range(3):
        assert sorted(ids[10 * epoch : 10 * epoch + 10].tolist()) == list(range(10))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_together_consume_the_same_bytes(world_size):
    options = dict(batch_size=8, world_size=world_size, seed=7, num_samples=21)
    shares = [
        np.concatenate([rank_sample_ids(8 * s, rank=r, **options) for r in range(world_size)])
        for s in range(6)
    ]
    whole = sample_ids(0, 48, seed=7, num_samples=21)
    assert np.concatenate(shares).tobytes() == whole.tobytes()


def test_refusals():
    with pytest.raises(ValueError, match="num_samples must be at least 1"):
        permute(np.arange(0), seed=0, epoch=0, num_samples=0)
    with pytest.raises(ValueError, match=r"in \[0, 3\), got 0 to 3"):
        permute(np.arange(4), seed=0, epoch=0, num_samples=3)
    with pytest.raises(ValueError, match="9 sequences on 2"):
        rank_sample_ids(0, batch_size=9, rank=0, world_size=2, seed=0, num_samples=3)
    with pytest.raises(ValueError, match="got 2 of 2"):
        rank_sample_ids(0, batch_size=8, rank=2, world_size=2, seed=0, num_samples=3)
    with pytest.raises(ValueError, match="must not be negative"):
        sample_ids(-1, 2, seed=0, num_samples=3)
