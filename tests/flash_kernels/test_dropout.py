"""The dropout mask: rate, independence, seeds; test_attention.py replays it in the kernels."""

import math

import pytest
import torch

from flash_kernels import flash_attention, operators, reference, testing
from flash_kernels.ring import zigzag_positions


def normal_scores(keep: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Mask values scaled to mean 0 and variance 1."""
    return (keep.float() - (1 - dropout_p)) / math.sqrt(dropout_p * (1 - dropout_p))


def test_philox_known_answers():
    """Random123's test vectors of Philox-4x32-10."""
    ones = 0xFFFFFFFF
    for counter, key, words in (
        ([0] * 4, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ones] * 4, ones << 32 | ones, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0 << 32 | 0xA4093822,
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ):
        got = reference.philox(key, *(torch.tensor([c]) for c in counter))
        assert [int(word) for word in got] == words


@pytest.mark.parametrize("dropout_p", [0.01, 0.1, 0.5, 0.9])
def test_rate_is_within_four_sigma(dropout_p):
    keep = reference.dropout_keep_mask(5, 2, 3, 512, 1024, dropout_p)
    kept = normal_scores(keep, dropout_p)
    assert abs(kept.sum()) / math.sqrt(keep.numel()) < 4
    # Each head, row and column on its own: sums are standard normal, and the largest of n stays
    # below 6 sigma.
    for dims, count in (((2, 3), 512 * 1024), ((3,), 1024), ((2,), 512)):
        assert (kept.sum(dims) / math.sqrt(count)).abs().max() < 6


@pytest.mark.parametrize("dropout_p", [0.1, 0.5])
def test_rows_columns_and_heads_are_uncorrelated(dropout_p):
    size = 1024
    keep = reference.dropout_keep_mask(5, 1, 2, size, size, dropout_p)[0]
    scores = normal_scores(keep, dropout_p)
    off_diagonal = ~torch.eye(size, dtype=torch.bool)
    for matrix in (scores[0], scores[0].T):
        correlation = (matrix @ matrix.T / math.sqrt(size))[off_diagonal]
        assert correlation.abs().max() < 7
        assert abs(correlation.square().mean() - 1) < 0.02
    across = scores[0] @ scores[1].T / math.sqrt(size)
    assert across.abs().max() < 7 and abs(across.square().mean() - 1) < 0.02
    # The largest singular value of independent entries tends to 2 sqrt(size) (Marchenko-Pastur): no
    # rank-one pattern.
    largest = torch.linalg.eigvalsh(scores[0] @ scores[0].T)[-1].sqrt() / math.sqrt(size)
    assert 1.9 < largest < 2.1


def test_no_row_or_column_repeats_at_64k():
    size = 65536
    row_keys, multipliers, column_keys = reference.dropout_keys(2**33 + 1, 1, 2, size, size)
    for head in range(2):
        assert torch.unique(column_keys[0, head]).numel() == size
        pairs = row_keys[0, head] * 2**31 + (multipliers[0, head] >> 1)
        assert torch.unique(pairs).numel() == size
    assert not torch.equal(row_keys[0, 0], row_keys[0, 1])
    # Masks too: 64 columns tell rows apart, and 64 rows tell columns apart.
    bits = 2 ** torch.arange(62)
    rows = reference.dropout_keep_mask(2**33 + 1, 1, 1, size, 62, 0.5)[0, 0]
    assert torch.unique(rows.long() @ bits).numel() >= size - 2
    columns = reference.dropout_keep_mask(2**33 + 1, 1, 1, 62, size, 0.5)[0, 0]
    assert torch.unique(columns.T.long() @ bits).numel() >= size - 2


def test_mask_does_not_depend_on_the_other_length():
    long = reference.dropout_keep_mask(3, 1, 2, 40, 90, 0.3)
    assert torch.equal(reference.dropout_keep_mask(3, 1, 2, 11, 20, 0.3), long[:, :, :11, :20])


def test_kernel_mask_is_the_reference_mask():
    """With equal scores and v = identity the output is the mask itself over the number of keys."""
    seqlen = 64
    q = torch.zeros(2, 40, 2, seqlen)
    v = torch.eye(seqlen)[None, :, None].expand(2, seqlen, 2, seqlen).contiguous()
    out = flash_attention(q, torch.zeros_like(v), v, dropout_p=0.4, dropout_seed=2**62 + 5)
    keep = reference.dropout_keep_mask(2**62 + 5, 2, 2, 40, seqlen, 0.4)
    assert torch.equal(out.transpose(1, 2) > 0, keep)
    torch.testing.assert_close(out.max(), torch.tensor(1 / 0.6 / seqlen))


HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a GPU of compute capability 9.0",
)


@pytest.mark.parametrize(
    "kernel", ["portable", pytest.param("hopper", marks=[pytest.mark.gpu, HOPPER])]
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_share_of_a_sequence_drops_what_the_whole_does(kernel, packed):
    """Queries of one process of a ring of two, keys of the other."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.float32
    rows, cols = (zigzag_positions(96, rank, 2).to(device) for rank in range(2))
    generator = torch.Generator().manual_seed(3)
    q, k, v, dout = torch.randn(4, 2, 48, 2, 64, generator=generator).to(device, dtype)
    seed = torch.tensor([2**62 + 5], device=device)
    keep = reference.dropout_keep_mask(seed, 2, 2, 96, 96, 0.4, device)[:, :, rows][..., cols]
    truth = [t.double().requires_grad_() for t in (q, k, v)]
    probs = torch.einsum("bihd,bjhd->bhij", *truth[:2]).mul(0.1).softmax(-1) * keep / 0.6
    expected = torch.einsum("bhij,bjhd->bihd", probs, truth[2])
    expected = [expected, *torch.autograd.grad(expected, truth, dout.double())]

    inputs, positions = [dout, q, k, v], [rows.int(), cols.int()]
    options = operators.dense_options(48, 48, seed, 0.1, None, 0.4, kernel)
    if packed:  # the two as sequences of one row
        inputs, positions = [t.flatten(0, 1) for t in inputs], [p.repeat(2) for p in positions]
        starts = torch.tensor([0, 48, 96], dtype=torch.int32, device=device)
        options = operators.packed_options(starts, starts, 48, 48, seed, 0.1, None, 0.4, kernel)
    out, lse = operators.forward(*inputs[1:], *options, positions=tuple(positions))
    grads = operators.backward(
        inputs[0], None, *inputs[1:], out, lse, *options, positions=tuple(positions)
    )
    tolerance = 1e-2 if dtype == torch.float16 else 1e-5
    for found, exact in zip((out, *grads), expected, strict=True):
        error = (found.view(exact.shape) - exact).abs().max() / exact.abs().max()
        assert error < tolerance


def test_seeds():
    q, k, v = testing.make_qkv(1, 9, 40, 1, 16)

    def run(seed):
        return flash_attention(q, k, v, dropout_p=0.5, dropout_seed=seed)

    assert torch.equal(run(7), run(7))
    assert torch.equal(run(7), run(torch.tensor([7])))
    assert not torch.equal(run(7), run(8))
    assert not torch.equal(run(7), run(7 + 2**32))
    torch.manual_seed(0)
    first, second = run(None), run(None)
    torch.manual_seed(0)
    assert torch.equal(first, run(None)) and not torch.equal(first, second)
    generator = torch.Generator().manual_seed(0)
    from_generator = run(generator)
    assert torch.equal(from_generator, run(torch.Generator().manual_seed(0)))
    assert not torch.equal(from_generator, run(generator))


def test_no_dropout_draws_no_seed():
    q, k, v = testing.make_qkv(1, 9, 9, 1, 16)
    before = torch.get_rng_state()
    out = flash_attention(q, k, v, dropout_p=0.0, dropout_seed=None)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(out, flash_attention(q, k, v))
