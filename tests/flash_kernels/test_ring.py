"""Ring attention: each process's share equals its part of the whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flash_kernels import BlockMask
from flash_kernels.ring import ring_attention, ring_attention_varlen, zigzag_positions
from flash_kernels.ring_blocks import check_chunks, step_masks
from flash_kernels.ring_shares import held_cu_seqlens, held_positions, parts

ROOT = Path(__file__).parents[2]


def run_ring(size: int, folder: Path, cases: list[dict]) -> None:
    script = ROOT / "tests/flash_kernels/ring_process.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(size), folder, json.dumps(cases)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )
        for rank in range(size)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_a_share_is_its_part_of_the_whole(size, tmp_path):
    cases = [dict(causal=True, nheads_k=2, dropout_p=0.0)]
    if size == 4:
        cases += [
            dict(causal=False, nheads_k=4, dropout_p=0.0, lengths=[3, 0, 9, 4]),
            dict(causal=False, nheads_k=2, dropout_p=0.3),
            dict(causal=True, nheads_k=4, dropout_p=0.3, blocks=[16, 16]),
            dict(causal=False, nheads_k=2, dropout_p=0.3, blocks=[32, 16]),
        ]
    if size == 2:
        cases += [
            dict(causal=False, nheads_k=4, dropout_p=0.0),
            dict(causal=True, nheads_k=4, dropout_p=0.3),
            # Sequences end within chunks, span several, fill none.
            dict(causal=True, nheads_k=2, dropout_p=0.3, lengths=[3, 0, 9, 4]),
            dict(causal=True, nheads_k=2, dropout_p=0.3, lengths=[3, 0, 5, 4, 4], lines=2),
            dict(causal=True, nheads_k=2, dropout_p=0.3, blocks=[16, 32]),
            dict(causal=False, nheads_k=4, dropout_p=0.0, blocks=[16, 16]),
        ]
    run_ring(size, tmp_path, cases)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_zigzag_shares_are_a_partition_with_equal_work(size):
    shares = [zigzag_positions(40, rank, size) for rank in range(size)]
    assert torch.equal(torch.cat(shares).sort().values, torch.arange(40))
    # Position p sees p + 1 keys.
    assert len({int(share.sum()) for share in shares}) == 1
    assert all((share.diff() > 0).all() for share in shares)


def test_the_batches_must_agree():
    q = torch.zeros(2, 8, 2, 16)
    with pytest.raises(ValueError, match=r"the same batch and rows, .*got \(2, 8\) and \(1, 8\)"):
        ring_attention(q, q[:1], q[:1])
    with pytest.raises(ValueError, match=r"dropout an even number of rows, got \(2, 7\) and"):
        ring_attention(*(q[:, :7],) * 3, dropout_p=0.1)


def test_shares_hold_runs_of_every_sequence():
    cu_seqlens = torch.tensor([0, 5, 5, 24, 32], dtype=torch.int32)
    sequence = torch.arange(4).repeat_interleave(cu_seqlens.diff())
    for rank in range(4):
        positions = zigzag_positions(32, rank, 4)
        for part in (slice(0, 8), slice(0, 4), slice(4, 8)):
            rows = positions[part]
            held = torch.bincount(sequence[rows], minlength=4)
            assert held_cu_seqlens(cu_seqlens, rank, 4, 8, part).diff().tolist() == held.tolist()
            found = held_positions(cu_seqlens, rank, 4, 8, part, torch.empty(1, 8))
            assert found.tolist() == (rows - cu_seqlens[sequence[rows]]).tolist()
            assert found.dtype == torch.int32


@pytest.mark.parametrize("causal", [False, True])
def test_steps_together_have_the_blocks_of_the_mask(causal):
    size, seqlen = 2, 256
    tokens = torch.rand(seqlen, seqlen, generator=torch.Generator().manual_seed(1)) < 0.1
    tokens[64:128] = False
    mask = BlockMask.from_dense(torch.ones(8, 4) > 0, 32, 64, token_mask=tokens)
    found = torch.zeros(seqlen, seqlen, dtype=torch.bool)
    shares = [zigzag_positions(seqlen, rank, size) for rank in range(size)]
    for rank in range(size):
        steps = step_masks(mask, rank, size, seqlen, causal)
        assert step_masks(mask, rank, size, seqlen, causal) is steps
        for source, step in enumerate(steps):
            rows, cols, is_causal = parts(rank, source, seqlen // size, causal)
            seen = step.to_token_mask()[0, 0]
            found[shares[rank][rows, None], shares[source][cols]] = (
                seen.tril() if is_causal else seen
            )
    assert torch.equal(found, tokens.tril() if causal else tokens)


@pytest.mark.parametrize(
    "block_m, block_n, seqlen, message",
    [
        (32, 48, 128, "on a ring of 2 .* a multiple of 384 tokens, got 128 and blocks of 32 x 48"),
        (64, 64, 128, "a multiple of 256 tokens, got 128 and blocks of 64 x 64: take smaller"),
        (16, 16, 256, "seqlen_q must be at most 192"),
    ],
)
def test_blocks_must_divide_the_chunks(block_m, block_n, seqlen, message):
    blocks = torch.ones(192 // block_m, 192 // block_n, dtype=torch.bool)
    with pytest.raises(ValueError, match=message):
        check_chunks(BlockMask.from_dense(blocks, block_m, block_n), seqlen, 2)


def test_zigzag_needs_two_chunks_a_process():
    with pytest.raises(ValueError, match="on a ring of 3 must have a multiple of 6 tokens, got 40"):
        zigzag_positions(40, 0, 3)


def test_packed_shares_are_checked():
    q = torch.zeros(7, 2, 16)
    with pytest.raises(ValueError, match="the same even number of rows, got .7,. and .7,."):
        ring_attention_varlen(q, q, q, cu_seqlens=torch.tensor([0, 7]), max_seqlen=7)
    with pytest.raises(ValueError, match="cu_seqlens must be int32 of shape .*got torch.int64"):
        ring_attention_varlen(q[:6], q[:6], q[:6], cu_seqlens=torch.tensor([0, 6]), max_seqlen=6)
