"""The order of samples: a pure function of (seed, epoch, index), with random access.

An epoch visits the samples 0 ... num_samples - 1 in a pseudo-random permutation that is computed
index by index, never stored, from integer arithmetic alone, so that it is the same on every machine
and for every number of processes. Positions count samples since the start of the run: position p
is index p % num_samples of epoch p // num_samples.

Permutation: the swap-or-not shuffle (Hoang, Morris, Rogaway, CRYPTO 2012), exact for any size.
A round with key k pairs x with k - x mod num_samples and swaps the two if a hash bit of the pair,
salted by round, is set.
"""

from __future__ import annotations

import hashlib

import numpy as np

# 6 log2(n) rounds hide all structure (Theorem 1 of the paper); 96 serve up to 2**16 samples at that
# strength, and far more samples at the strength that shuffling needs.
NUM_ROUNDS = 96


def permute(indices: np.ndarray, *, seed: int, epoch: int, num_samples: int) -> np.ndarray:
    """Sample ids at `indices` of an epoch.

    Args:
        indices: any shape, integers in [0, num_samples).
        seed, epoch: choose the permutation.
        num_samples: size of the permuted set, at least 1.
    Returns:
        int64, shape of `indices`; over all indices each id in [0, num_samples) comes exactly once.
    Raises:
        ValueError: num_samples < 1, or an index is out of range.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}")
    given = np.array(indices, dtype=np.int64)
    if given.size and (given.min() < 0 or given.max() >= num_samples):
        raise ValueError(
            f"indices must be in [0, {num_samples}), got {given.min()} to {given.max()}"
        )
    ids = given.astype(np.uint64).reshape(-1)  # numpy warns of wrap-around in scalars only
    size = np.uint64(num_samples)
    keys, salts = _round_keys(seed, epoch)
    for key, salt in zip(keys % size, salts, strict=True):
        partner = (key + (size - ids)) % size
        high = np.maximum(ids, partner)
        ids = np.where(_mix(high ^ salt) >> np.uint64(63), partner, ids)
    return ids.astype(np.int64).reshape(np.shape(indices))


def sample_ids(position: int, count: int, *, seed: int, num_samples: int) -> np.ndarray:
    """Ids of the samples at positions [position, position + count), across epoch edges.

    Returns:
        (count,) int64. Within one epoch no id comes twice.
    """
    if position < 0 or count < 0:
        raise ValueError(f"position and count must not be negative, got {position} and {count}")
    pieces = [np.empty(0, dtype=np.int64)]
    end = position + count
    while position < end:
        epoch, index = divmod(position, num_samples)
        stop = min(end - epoch * num_samples, num_samples)
        indices = np.arange(index, stop)
        pieces.append(permute(indices, seed=seed, epoch=epoch, num_samples=num_samples))
        position += stop - index
    return np.concatenate(pieces)


def rank_sample_ids(
    position: int, *, batch_size: int, rank: int, world_size: int, seed: int, num_samples: int
) -> np.ndarray:
    """This rank's share of the global batch that starts at `position`.

    The global batch is positions [position, position + batch_size); rank r takes the r-th of
    world_size equal runs, so that the shares joined in rank order are the same for any world_size.

    Returns:
        (batch_size // world_size,) int64.
    Raises:
        ValueError: batch_size is no multiple of world_size, or rank is out of range.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, world_size), got {rank} of {world_size}")
    if batch_size % world_size:
        raise ValueError(
            f"the global batch must divide evenly over processes, got {batch_size} sequences on "
            f"{world_size}: choose a multiple"
        )
    share = batch_size // world_size
    return sample_ids(position + rank * share, share, seed=seed, num_samples=num_samples)


def _round_keys(seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and hash salts of all rounds, each (NUM_ROUNDS,) uint64."""
    digest = hashlib.shake_256(f"sample order, seed {seed}, epoch {epoch}".encode())
    words = np.frombuffer(digest.digest(16 * NUM_ROUNDS), dtype="<u8").astype(np.uint64)
    return words[:NUM_ROUNDS], words[NUM_ROUNDS:]


def _mix(words: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): each bit reaches all 64 bits."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
