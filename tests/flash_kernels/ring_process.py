"""One process of a ring, run by test_ring.py: RANK WORLD_SIZE FOLDER and JSON cases.

Checks its share of ring_attention, forward and backward, against the whole sequence in float64.
"""

import json
import sys

import torch
import torch.distributed as dist

from flash_kernels import BlockMask, reference, testing
from flash_kernels.attention import seed_tensor
from flash_kernels.ring import ring_attention, ring_attention_varlen, zigzag_positions


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
    rank: int, size: int, *, lengths: list[int], causal: bool, nheads_k: int, dropout_p: float,
    lines: int = 1,
) -> None:  # fmt: skip
    """Sequences of these lengths, one after the other, in so many lines of the same length."""
    total = sum(lengths)
    whole = testing.make_qkv(1, total, total, 4, 16, nheads_k=nheads_k, dtype=torch.float32)
    whole = [t.detach()[0] for t in whole]
    dout = torch.randn(whole[0].shape, generator=torch.Generator().manual_seed(7))
    cu_seqlens = testing.make_cu_seqlens(lengths)
    shares = [
        torch.arange(total).view(lines, -1)[:, zigzag_positions(total // lines, r, size)]
        for r in range(size)
    ]
    mine = shares[rank] if lines > 1 else shares[rank][0]
    share = [t[mine].requires_grad_() for t in whole]
    out = ring_attention_varlen(
        *share, cu_seqlens=cu_seqlens, max_seqlen=max(lengths), causal=causal,
        dropout_p=dropout_p, dropout_seed=11,
    )  # fmt: skip
    grads = torch.autograd.grad(out, share, dout[mine])
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    keep = packed_keep(lengths, dropout_p)
    truth = [t.double()[None].requires_grad_() for t in whole]
    expected = attend(*truth, sequence[:, None] == sequence, causal, keep, dropout_p)
    exact = (expected, *torch.autograd.grad(expected, truth, dout.double()[None]))
    for found, whole_exact in zip((out, *grads), exact, strict=True):
        torch.testing.assert_close(found.double(), whole_exact[0, mine], rtol=1e-5, atol=1e-5)


def packed_keep(lengths: list[int], dropout_p: float) -> torch.Tensor:
    """What one process keeps of each sequence, at its place: (1, 4, total, total)."""
    masks = [
        reference.dropout_keep_mask(11, 1, 4, n, n, dropout_p, first_sequence=index)
        for index, n in enumerate(lengths)
    ]
    heads = [torch.block_diag(*(mask[0, head] for mask in masks)) for head in range(4)]
    return torch.stack(heads)[None]


def check(
    rank: int, size: int, *, causal: bool, nheads_k: int, dropout_p: float,
    blocks: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Whole sequences, and with the sizes of `blocks` under a mask."""
    seqlen = 8 * size if blocks is None else 2 * size * max(blocks)
    batch = 2 if blocks is None or size == 4 else 1
    whole = testing.make_qkv(batch, seqlen, seqlen, 4, 16, nheads_k=nheads_k, dtype=torch.float32)
    dout = torch.randn(whole[0].shape, generator=torch.Generator().manual_seed(7))
    positions = zigzag_positions(seqlen, rank, size)
    seen, block_mask = torch.ones((), dtype=torch.bool), None
    if blocks is not None:
        block_mask = make_block_mask(batch, seqlen, *blocks)
        seen = block_mask.to_token_mask()
    elif not causal and not dropout_p:
        positions = torch.arange(seqlen).view(size, -1)[rank]
    share = [t.detach()[:, positions].requires_grad_() for t in whole]
    options = dict(block_mask=block_mask, causal=causal, dropout_p=dropout_p)
    torch.manual_seed(rank)
    out = ring_attention(*share, **options)
    grads = torch.autograd.grad(out, share, dout[:, positions])
    truth = [t.detach().double().requires_grad_() for t in whole]
    torch.manual_seed(0)  # as the first process draws
    seed = seed_tensor(None, torch.device("cpu"))
    keep = reference.dropout_keep_mask(seed, batch, 4, seqlen, seqlen, dropout_p)
    expected = attend(*truth, seen, causal, keep, dropout_p)
    exact = (expected, *torch.autograd.grad(expected, truth, dout.double()))
    for found, whole_exact in zip((out, *grads), exact, strict=True):
        torch.testing.assert_close(found.double(), whole_exact[:, positions], rtol=1e-5, atol=1e-5)


def make_block_mask(batch: int, seqlen: int, block_m: int, block_n: int) -> BlockMask:
    """Of each sequence and head another, with partial blocks. Rows of the first chunk see nothing,
    and no row sees the last quarter of the keys, so that steps have no blocks."""
    generator = torch.Generator().manual_seed(5)
    blocks = torch.rand(batch, 4, seqlen // block_m, seqlen // block_n, generator=generator) < 0.6
    blocks[:, :, : len(blocks[0, 0]) // 4] = False
    blocks[..., -(blocks.shape[-1] // 4) :] = False
    tokens = torch.rand(seqlen, seqlen, generator=generator) < 0.7
    return BlockMask.from_dense(blocks, block_m, block_n, token_mask=tokens)


def attend(q, k, v, seen, causal: bool, keep, dropout_p: float) -> torch.Tensor:
    """Plain attention to the keys that are `seen`, with a given dropout mask, both bool and
    broadcast to (batch, nheads, seqlen, seqlen)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    seen = seen & (torch.ones(scores.shape[-2:]).tril() > 0) if causal else seen
    is_blind = ~seen.expand_as(scores).any(-1, keepdim=True)
    probs = scores.masked_fill(~(seen | is_blind), -torch.inf).softmax(-1) * ~is_blind
    return (probs * keep / (1 - dropout_p) @ v).transpose(1, 2)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
