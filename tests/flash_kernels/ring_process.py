"""One process of a ring, run by test_ring.py: RANK WORLD_SIZE FOLDER and JSON cases.

Checks its share of ring_attention, forward and backward, against the whole sequence in float64.
"""

import json
import sys

import torch
import torch.distributed as dist

from flash_kernels import reference, testing
from flash_kernels.ring import ring_attention, zigzag_positions


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
    if dropout_p:
        # The output is linear in v for a given mask: <dout, out> = <dv, v>, over all processes.
        sums = torch.stack([(out * dout[:, positions]).sum(), (grads[2] * share[2]).sum()])
        dist.all_reduce(sums)
        torch.testing.assert_close(sums[0], sums[1])
        assert not torch.allclose(out, ring_attention(*share, causal=causal))
        return
    truth = [t.detach().double().requires_grad_() for t in whole]
    expected = reference.flash_attention(*truth, causal=causal)
    exact = (expected, *torch.autograd.grad(expected, truth, dout.double()))
    for found, whole_exact in zip((out, *grads), exact, strict=True):
        torch.testing.assert_close(found.double(), whole_exact[:, positions], rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
