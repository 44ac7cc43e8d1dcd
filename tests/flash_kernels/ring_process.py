"""One process of a ring, run by test_ring.py: RANK WORLD_SIZE FOLDER and JSON cases.

Checks its share of ring_attention, forward and backward, against the whole sequence in float64.
"""

import itertools
import json
import sys

import torch
import torch.distributed as dist

from flash_kernels import reference, testing
from flash_kernels.ring import (
    pair_seed,
    parts,
    ring_attention,
    ring_attention_varlen,
    zigzag_positions,
)


def main(rank: int, size: int, folder: str, cases: list[dict]) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    for case in cases:
        if "lengths" in case:
            check_packed(rank, size, **case)
        else:
            check(rank, size, **case)


def check_packed(
    rank: int, size: int, *, lengths: list[int], causal: bool, nheads_k: int, dropout_p: float
) -> None:
    """Sequences of these lengths, one after the other."""
    total = sum(lengths)
    whole = testing.make_qkv(1, total, total, 4, 16, nheads_k=nheads_k, dtype=torch.float32)
    whole = [t.detach()[0] for t in whole]
    dout = torch.randn(whole[0].shape, generator=torch.Generator().manual_seed(7))
    cu_seqlens = testing.make_cu_seqlens(lengths)
    positions = zigzag_positions(total, rank, size)
    share = [t[positions].requires_grad_() for t in whole]
    out = ring_attention_varlen(
        *share, cu_seqlens=cu_seqlens, max_seqlen=max(lengths), causal=causal,
        dropout_p=dropout_p, dropout_seed=11 + rank,
    )  # fmt: skip
    grads = torch.autograd.grad(out, share, dout[positions])
    truth = [t.double().requires_grad_() for t in whole]
    keep = torch.ones(4, total, total, dtype=torch.bool)
    if dropout_p:
        keep = packed_keep(size, causal, cu_seqlens, dropout_p)
    expected = attend_packed(*truth, cu_seqlens, causal, keep, dropout_p)
    exact = (expected, *torch.autograd.grad(expected, truth, dout.double()))
    for found, whole_exact in zip((out, *grads), exact, strict=True):
        torch.testing.assert_close(found.double(), whole_exact[positions], rtol=1e-5, atol=1e-5)


def attend_packed(q, k, v, cu_seqlens, causal: bool, keep, dropout_p: float) -> torch.Tensor:
    """Attention within each sequence, with a given dropout mask (nheads, total, total)."""
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[0] // t.shape[0], 0) for t in (k, v))
    sequence = torch.arange(len(cu_seqlens) - 1).repeat_interleave(cu_seqlens.diff())
    is_seen = sequence[:, None] == sequence
    if causal:
        is_seen &= torch.ones(is_seen.shape, dtype=torch.bool).tril()
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~is_seen, -torch.inf)
    return (scores.softmax(-1) * keep / (1 - dropout_p) @ v).transpose(0, 1)


def packed_keep(size: int, causal: bool, cu_seqlens, dropout_p: float) -> torch.Tensor:
    """What each pair of processes keeps of each sequence, at its place: (nheads, total, total)."""
    total = int(cu_seqlens[-1])
    keep = torch.zeros(4, total, total, dtype=torch.bool)
    sequence = torch.arange(len(cu_seqlens) - 1).repeat_interleave(cu_seqlens.diff())
    shares = [zigzag_positions(total, rank, size) for rank in range(size)]
    for rank, source in itertools.product(range(size), repeat=2):
        rows, cols, _ = parts(rank, source, total // size, causal)
        rows, cols = shares[rank][rows], shares[source][cols]
        seed = int(pair_seed(torch.tensor([11 + rank]), source))
        for index in range(len(cu_seqlens) - 1):
            mine, theirs = rows[sequence[rows] == index], cols[sequence[cols] == index]
            if len(mine) and len(theirs):
                keep[:, mine[:, None], theirs] = reference.dropout_keep_mask(
                    seed, 1, 4, len(mine), len(theirs), dropout_p, "cpu", first_sequence=index
                )[0]
    return keep


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
