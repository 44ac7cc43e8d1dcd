"""One process of a ring, run by test_ring.py: RANK WORLD_SIZE FOLDER and JSON cases.

Checks its share of ring_attention, forward and backward, against the whole sequence in float64.
"""

import itertools
import json
import sys

import torch
import torch.distributed as dist

from flash_kernels import reference, testing
from flash_kernels.ring import pair_seed, parts, ring_attention, zigzag_positions


def main(rank: int, size: int, folder: str, cases: list[dict]) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    for case in cases:
        check(rank, size, **case)


def check(rank: int, size: int, *, causal: bool, nheads_k: int, dropout_p: float) -> None:
    seqlen = 8 * size
    whole = testing.make_qkv(2, seqlen, seqlen, 4, 16, nheads_k=nheads_k, dtype=torch.float32)
    dout = torch.randn(whole[0].shape, generator=torch.Generator().manual_seed(7))
    positions = zigzag_positions(seqlen, rank, size)
    if not causal:
        positions = torch.arange(seqlen).view(size, -1)[rank]
    share = [t.detach()[:, positions].requires_grad_() for t in whole]
    out = ring_attention(*share, causal=causal, dropout_p=dropout_p, dropout_seed=11 + rank)
    grads = torch.autograd.grad(out, share, dout[:, positions])
    truth = [t.detach().double().requires_grad_() for t in whole]
    if dropout_p:
        keep = whole_mask(size, causal, whole[0], dropout_p)
        expected = attend_kept(*truth, keep, dropout_p)
    else:
        expected = reference.flash_attention(*truth, causal=causal)
    exact = (expected, *torch.autograd.grad(expected, truth, dout.double()))
    for found, whole_exact in zip((out, *grads), exact, strict=True):
        torch.testing.assert_close(found.double(), whole_exact[:, positions], rtol=1e-5, atol=1e-5)


def whole_mask(size: int, causal: bool, q: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """What each pair of processes keeps, at its place: bool (batch, nheads, seqlen, seqlen)."""
    batch, seqlen, nheads, _ = q.shape
    keep = torch.zeros(batch, nheads, seqlen, seqlen, dtype=torch.bool)
    shares = [zigzag_positions(seqlen, rank, size) for rank in range(size)]
    for rank, source in itertools.product(range(size), repeat=2):
        rows, cols, _ = parts(rank, source, seqlen // size, causal)
        rows, cols = shares[rank][rows], shares[source][cols]
        seed = int(pair_seed(torch.tensor([11 + rank]), source))
        keep[:, :, rows[:, None], cols] = reference.dropout_keep_mask(
            seed, batch, nheads, len(rows), len(cols), dropout_p, "cpu"
        )
    return keep


def attend_kept(q, k, v, keep: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Causal attention with a given dropout mask, nheads = nheads_k."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    probs = scores.masked_fill(later, -torch.inf).softmax(-1)
    return (probs * keep / (1 - dropout_p) @ v).transpose(1, 2)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
