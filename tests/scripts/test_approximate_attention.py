import pytest
import torch

from flash_kernels import reference
from scripts.approximate_attention import (
    linformer_attention,
    local_attention,
    orthogonal_features,
    performer_attention,
    visible_keys,
)

LENGTHS = torch.tensor([37, 20])


def make_qkv(seqlen=37, headdim=8, scale=1.0):
    generator = torch.Generator().manual_seed(1)
    shape = (2, seqlen, 3, headdim)
    return [
        (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_()
        for _ in range(3)
    ]


def assert_same(function, expected, leaves):
    """Outputs and gradients, in float64."""
    out, wanted = function(), expected()
    torch.testing.assert_close(out, wanted)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
    torch.testing.assert_close(
        torch.autograd.grad(out, leaves, dout), torch.autograd.grad(wanted, leaves, dout)
    )


@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("radius", [36, 37, 1000])
def test_local_attention_over_everything_is_exact(radius, lengths):
    q, k, v = leaves = make_qkv()
    assert_same(
        lambda: local_attention(q, k, v, radius=radius, lengths_k=lengths),
        lambda: reference.flash_attention(q, k, v, lengths_k=lengths),
        leaves,
    )


@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("radius", [1, 5, 12, 30])
def test_local_attention_is_exact_attention_under_the_band(radius, lengths):
    """Queries 25 to 36 of the second sequence see no key at radius 5: zero, and no NaN."""
    q, k, v = leaves = make_qkv()
    assert_same(
        lambda: local_attention(q, k, v, radius=radius, lengths_k=lengths),
        lambda: reference.flash_attention(q, k, v, window=(radius, radius), lengths_k=lengths),
        leaves,
    )


def test_local_attention_needs_a_radius():
    with pytest.raises(ValueError, match="radius must be at least 1, got 0"):
        local_attention(*make_qkv(), radius=0)


def test_linformer_with_identities_is_exact():
    q, k, v = leaves = make_qkv()
    identity = torch.eye(37, dtype=torch.float64)
    assert_same(
        lambda: linformer_attention(q, k, v, identity, identity),
        lambda: reference.flash_attention(q, k, v),
        leaves,
    )


def test_linformer_projects_keys_and_values_by_their_own_matrices():
    """Against exact attention over keys and values that are projected beforehand."""
    q, k, v = leaves = make_qkv()
    projections = torch.randn(2, 5, 37, generator=torch.Generator().manual_seed(3)).double()
    keep = (torch.arange(37) < LENGTHS[:, None]).double()

    def expected():
        few = [
            torch.einsum("fn,bn,bnhd->bfhd", p, keep, t)
            for p, t in zip(projections, (k, v), strict=True)
        ]
        return reference.flash_attention(q, *few)

    assert_same(
        lambda: linformer_attention(q, k, v, *projections, lengths_k=LENGTHS), expected, leaves
    )


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_performer_converges_to_softmax_attention(lengths):
    """A Monte Carlo estimate: 64 times the features, about an eighth of the error."""
    q, k, v = make_qkv(scale=0.4)
    exact = reference.flash_attention(q, k, v, lengths_k=lengths)
    errors = []
    for num_features in (64, 4096):
        squares = []
        for seed in range(8):
            generator = torch.Generator().manual_seed(seed)
            features = orthogonal_features(num_features, 8, generator).double()
            out = performer_attention(q, k, v, features, lengths_k=lengths)
            squares.append((out - exact).square().mean())
        errors.append(torch.stack(squares).mean().sqrt().item())
    assert 5 < errors[0] / errors[1] < 11
    assert errors[1] < 0.03 * exact.square().mean().sqrt()


def test_performer_survives_inputs_whose_exponentials_overflow():
    """exp(|x|^2) of these is beyond float32; gradients stay finite too."""
    leaves = [t.float().detach().requires_grad_() for t in make_qkv(scale=20.0)]
    features = orthogonal_features(16, 8, torch.Generator().manual_seed(0))
    out = performer_attention(*leaves, features)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), leaves))
    assert out.isfinite().all()


def test_features_are_orthogonal_in_blocks_and_as_long_as_gaussian_vectors():
    """The mean square length of a Gaussian vector of 8 entries is 8, its standard deviation 4."""
    features = orthogonal_features(8 * 500 + 3, 8, torch.Generator().manual_seed(0))
    assert features.shape == (4003, 8)
    first = features[:8] @ features[:8].T
    torch.testing.assert_close(first, first.diagonal().diag(), atol=1e-5, rtol=0)
    squares = features.square().sum(-1)
    assert squares.mean().item() == pytest.approx(8, abs=4 * 4 / 4003**0.5)
    assert squares.std().item() == pytest.approx(4, rel=0.1)
    assert features.mean(0).abs().max() < 4 / 4003**0.5


@pytest.mark.parametrize("approximation", ["local", "linformer"])
def test_dropout_drops_and_scales_the_probabilities(approximation):
    """Of equal keys every probability is 1 / n, so an output is a count of ones kept."""
    q, k, v = (torch.ones(1, 32, 2, 4) for _ in range(3))
    torch.manual_seed(0)
    if approximation == "local":
        out = local_attention(q, k, v, radius=31, dropout_p=0.25)
    else:
        out = linformer_attention(q, k, v, torch.eye(32), torch.eye(32), dropout_p=0.25)
    counts = out[..., 0] * 32 * 0.75
    torch.testing.assert_close(counts, counts.round())
    assert counts.mean().item() == pytest.approx(32 * 0.75, abs=1)
    assert counts.std().item() == pytest.approx((32 * 0.75 * 0.25) ** 0.5, rel=0.3)


@pytest.mark.parametrize("seqlen,keys", [(128, 16), (1024, 128), (2048, 256), (65536, 256)])
def test_visible_keys_are_an_eighth_at_most_256(seqlen, keys):
    assert visible_keys(seqlen) == keys
