"""Ring attention: exact attention over a sequence that is split over processes.

Every process keeps its queries; keys and values travel once around the ring (Liu et al., arXiv
2310.01889), a step of it beside the attention of the step before. The parts are joined by their
log-sum-exps, and in the backward the kernels take the joint one, so that each part's gradients are
those of the whole: memory stays that of one process's share.

With a causal mask the shares are zigzag: of 2 * size chunks process r holds chunks r and
2 * size - 1 - r, so that every process has the same work in every step. Packed sequences are split
as one stream, wherever they begin and end: positions of a share rise, so that what it holds of a
sequence is a run of its rows, and a step is one packed call whose sequences may be empty. Of a
block mask each step walks the blocks of its queries and keys; without one it computes nothing. The
dropout mask is that of one process: the kernels are told where rows and columns lie.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from . import operators
from .attention import Seed, autocast, check_kernel, check_packed_layout, check_qkv, seed_tensor
from .block_mask import BlockMask
from .block_sparse import check_mask
from .portable.launch import Positions
from .ring_blocks import step_masks
from .ring_shares import held_cu_seqlens, held_positions, parts

_LISTS = 7  # tensors of a step's block mask
_LEAST = torch.finfo(torch.float32).min


def zigzag_positions(seqlen: int, rank: int, size: int) -> Tensor:
    """Positions of process `rank`'s share of a causal sequence, int64 (seqlen / size,), rising.

    Raises:
        ValueError: seqlen is no multiple of 2 * size.
    """
    if seqlen % (2 * size):
        raise ValueError(
            f"a sequence on a ring of {size} must have a multiple of {2 * size} tokens, "
            f"got {seqlen}"
        )
    chunks = torch.arange(seqlen).view(2 * size, -1)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_mask: BlockMask | None = None,
    group: dist.ProcessGroup | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Seed = None,
    deterministic: bool = False,
    kernel: str | None = None,
) -> Tensor:
    """flash_attention or block_sparse_attention over the sequence that the processes of `group`
    hold together.

    Args:
        q: (batch, seqlen / size, nheads, headdim), float16, bfloat16 or float32: this process's
            share, with causal, dropout or a block mask the positions of zigzag_positions, else any.
        k, v: (batch, seqlen / size, nheads_k, headdim), the same share.
        block_mask: as in block_sparse_attention, of the whole sequence, the same on all processes.
            Each cuts out what it needs at the first call and keeps that with the mask. seqlen is a
            multiple of 2 * size blocks, in rows and in columns.
        group: None is all processes. All of them call at the same time with the same shapes.
        causal, softmax_scale, dropout_p, deterministic, kernel: as in flash_attention.
        dropout_seed: as in flash_attention, the same on all processes; None takes what the first
            of them draws. The dropped probabilities are those of the whole sequence on one process.

    Returns:
        (batch, seqlen / size, nheads, headdim), dtype of q. It and its gradients are exact up to
        the rounding of each step's part to that dtype; a second derivative is not served.

    Raises:
        ValueError: as flash_attention and block_sparse_attention; q, k and v must have the same
            batch and rows, with causal or dropout an even number; blocks must divide the chunks.
    """
    q, k, v = autocast(q, k, v)
    check_qkv(q, k, v, 4, "(batch, seqlen, nheads, headdim)")
    if q.shape[:2] != k.shape[:2] or ((causal or dropout_p > 0.0) and q.shape[1] % 2):
        raise ValueError(
            "q and k must have the same batch and rows, with causal or dropout an even number of "
            f"rows, got {tuple(q.shape[:2])} and {tuple(k.shape[:2])}"
        )
    steps = []
    if block_mask is not None:
        check_mask(block_mask, q, q.shape[0])
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        steps = step_masks(block_mask, rank, size, q.shape[1] * size, causal)
    return _attend(
        q, k, v, None, steps, group, causal, 0, softmax_scale, dropout_p, dropout_seed,
        deterministic, kernel,
    )  # fmt: skip


def ring_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    group: dist.ProcessGroup | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Seed = None,
    deterministic: bool = False,
    kernel: str | None = None,
) -> Tensor:
    """flash_attention_varlen over packed sequences that the processes of `group` hold together.

    Args:
        q: (total / size, nheads, headdim): this process's share of the packed rows, causal or not
            the positions of zigzag_positions(total, rank, size). Sequences may begin and end
            anywhere, also within a share. Or (lines, length / size, nheads, headdim): of each of so
            many lines, total / length, its positions of zigzag_positions(length, rank, size); no
            sequence goes on in the next line.
        k, v: (total / size, nheads_k, headdim), or as q with lines: the same share.
        cu_seqlens: int32 (batch + 1,), contiguous, on q's device, the same on all processes: where
            the sequences start in the whole, line after line, from 0 to total. Not read by the
            host.
        max_seqlen: at least the longest sequence.
        The rest as in ring_attention.

    Returns:
        The shape and dtype of q.

    Raises:
        ValueError: as flash_attention_varlen; q, k and v must have the same even number of rows.
    """
    q, k, v = autocast(q, k, v)
    check_qkv(q, k, v, max(3, q.dim()), "(total, nheads, headdim), or the same by line")
    if q.shape[:-2] != k.shape[:-2] or q.shape[-3] % 2:
        raise ValueError(
            "q and k must have the same even number of rows, "
            f"got {tuple(q.shape[:-2])} and {tuple(k.shape[:-2])}"
        )
    check_packed_layout("cu_seqlens", cu_seqlens, q.device)
    total = q.shape[:-2].numel() * dist.get_world_size(group)
    torch.ops.flash_kernels.check_cu_seqlens(
        cu_seqlens, cu_seqlens, total, total, max_seqlen, max_seqlen
    )
    shape = q.shape
    q, k, v = (t.view(-1, *t.shape[-3:]) for t in (q, k, v))
    return _attend(
        q, k, v, cu_seqlens, [], group, causal, max_seqlen, softmax_scale, dropout_p, dropout_seed,
        deterministic, kernel,
    ).view(shape)  # fmt: skip


def _attend(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, steps: list[BlockMask],
    group: dist.ProcessGroup | None, causal: bool, max_seqlen: int, softmax_scale: float | None,
    dropout_p: float, dropout_seed: Seed, deterministic: bool, kernel: str | None,
) -> Tensor:  # fmt: skip
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be between 0 and 1, got {dropout_p}")
    kernel = check_kernel(kernel, deterministic)
    ring = group or dist.group.WORLD
    assert ring is not None
    seed = None
    if dropout_p > 0.0:
        seed = seed_tensor(dropout_seed, q.device)
        if dropout_seed is None:
            seed = torch.ops.flash_kernels.ring_seed(seed, ring.group_name)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    blocks = [t for mask in steps for t in (*mask.rows, *mask.cols, mask.token_masks)]
    sizes = (steps[0].block_m, steps[0].block_n) if steps else (0, 0)
    return torch.ops.flash_kernels.ring_forward(
        q, k, v, cu_seqlens, seed, blocks, *sizes, ring.group_name, causal, max_seqlen, scale,
        dropout_p, kernel,
    )[0]  # fmt: skip


class _Exchange:
    """Tensors on their way to the next process, while those of the one before arrive."""

    def __init__(self, tensors: list[Tensor], group: dist.ProcessGroup) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        after = dist.get_global_rank(group, (rank + 1) % size)
        before = dist.get_global_rank(group, (rank - 1) % size)
        self.sent = [tensor.contiguous() for tensor in tensors]
        self.received = [torch.empty_like(tensor) for tensor in self.sent]
        operations = [dist.P2POp(dist.isend, tensor, after, group) for tensor in self.sent]
        operations += [dist.P2POp(dist.irecv, tensor, before, group) for tensor in self.received]
        self.works = dist.batch_isend_irecv(operations)

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        return self.received


class _Step:
    """The attention of a process's `rows` to the `cols` of `source`.

    options, positions: of the operators; options None where nothing is seen.
    """

    def __init__(
        self, q: Tensor, ring: dist.ProcessGroup, source: int, cu_seqlens: Tensor | None,
        seed: Tensor | None, blocks: list[Tensor], block_m: int, block_n: int, causal: bool,
        max_seqlen: int, scale: float, dropout_p: float, kernel: str | None,
    ) -> None:  # fmt: skip
        rank, size, num_rows = dist.get_rank(ring), dist.get_world_size(ring), q.shape[1]
        self.rows, self.cols, is_causal = parts(rank, source, num_rows, causal)
        self.is_packed = cu_seqlens is not None
        self.positions: Positions = None
        if seed is not None:
            self.positions = (
                held_positions(cu_seqlens, rank, size, num_rows, self.rows, q),
                held_positions(cu_seqlens, source, size, num_rows, self.cols, q),
            )
        rest = (seed, scale, 0 if is_causal else None, dropout_p, kernel)
        seqlen_q, seqlen_k = (part.stop - part.start for part in (self.rows, self.cols))
        self.options: tuple | None
        if cu_seqlens is not None:
            cu_q, cu_k = (
                held_cu_seqlens(cu_seqlens, process, size, num_rows, part)
                for process, part in ((rank, self.rows), (source, self.cols))
            )
            longest_q, longest_k = min(max_seqlen, seqlen_q), min(max_seqlen, seqlen_k)
            self.options = operators.packed_options(cu_q, cu_k, longest_q, longest_k, *rest)
        elif blocks:
            walked = blocks[_LISTS * source : _LISTS * (source + 1)]
            self.options = None
            if walked[1].shape[0] > 0:
                mask = (*walked, block_m, block_n)
                self.options = operators.dense_options(seqlen_q, seqlen_k, *rest, mask)
        else:
            self.options = operators.dense_options(seqlen_q, seqlen_k, *rest)

    def inputs(self, tensor: Tensor, rows: slice) -> Tensor:
        """(lines, rows, nheads, headdim), of packed sequences line after line."""
        return tensor[:, rows].flatten(0, 1) if self.is_packed else tensor[:, rows]

    def qkv(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.inputs(q, self.rows), self.inputs(k, self.cols), self.inputs(v, self.cols)


def _process_group(name: str) -> dist.ProcessGroup:
    # The name's own type is not in every release of torch that is served.
    return _resolve_process_group(name)  # type: ignore[arg-type]


@torch.library.custom_op("flash_kernels::ring_seed", mutates_args=())
def _first_seed(seed: Tensor, group: str) -> Tensor:
    """The seed of the first process."""
    seed = seed.clone()
    dist.broadcast(seed, group=_process_group(group), group_src=0)
    return seed


@_first_seed.register_fake
def _(seed: Tensor, group: str) -> Tensor:
    return torch.empty_like(seed)


@torch.library.custom_op("flash_kernels::ring_forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, seed: Tensor | None,
    blocks: list[Tensor], block_m: int, block_n: int, group: str, causal: bool, max_seqlen: int,
    softmax_scale: float, dropout_p: float, kernel: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out (lines, rows, nheads, headdim) and lse float32 (lines, nheads, rows).

    blocks: of each step's mask the lists by row and by column and the token masks, or none.
    """
    ring = _process_group(group)
    rank, size = dist.get_rank(ring), dist.get_world_size(ring)
    total = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    total_lse = total.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf)
    for i in range(size):
        source = (rank - i) % size
        coming = _Exchange([k, v], ring) if i + 1 < size else None
        step = _Step(
            q, ring, source, cu_seqlens, seed, blocks, block_m, block_n, causal, max_seqlen,
            softmax_scale, dropout_p, kernel,
        )  # fmt: skip
        if step.options is not None:
            out, lse = operators.forward(
                *step.qkv(q, k, v), *step.options, positions=step.positions
            )
            # Views: the rows of this step.
            old, old_lse = total[:, step.rows], total_lse[..., step.rows]
            out = out.view(old.shape)
            if step.is_packed:
                lse = lse.unflatten(1, (len(q), -1)).transpose(0, 1)
            joint = torch.logaddexp(old_lse, lse)
            least = joint.clamp(min=_LEAST)  # of a row without a key yet: no inf - inf
            old.mul_(_by_row(old_lse - least)).add_(out * _by_row(lse - least))
            old_lse.copy_(joint)
        if coming is not None:
            k, v = coming.wait()
    return total.to(q.dtype), total_lse


def _by_row(difference: Tensor) -> Tensor:
    """exp of (lines, nheads, rows), to multiply (lines, rows, nheads, headdim)."""
    return difference.exp().transpose(1, 2)[..., None]


@_forward.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    return q.new_empty(q.shape), lse


@torch.library.custom_op("flash_kernels::ring_backward", mutates_args=())
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_seqlens: Tensor | None, seed: Tensor | None, blocks: list[Tensor], block_m: int,
    block_n: int, group: str, causal: bool, max_seqlen: int, softmax_scale: float,
    dropout_p: float, kernel: str | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv. The sums for dk and dv travel with their keys and come home at the end."""
    ring = _process_group(group)
    rank, size = dist.get_rank(ring), dist.get_world_size(ring)
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    arriving = None
    for i in range(size):
        source = (rank - i) % size
        coming = _Exchange([k, v], ring) if i + 1 < size else None
        step = _Step(
            q, ring, source, cu_seqlens, seed, blocks, block_m, block_n, causal, max_seqlen,
            softmax_scale, dropout_p, kernel,
        )  # fmt: skip
        gradients = None
        if step.options is not None:
            part_lse = lse[..., step.rows]
            if step.is_packed:
                part_lse = part_lse.transpose(0, 1).flatten(1)
            gradients = operators.backward(
                step.inputs(dout, step.rows), None, *step.qkv(q, k, v),
                step.inputs(out, step.rows), part_lse.contiguous(), *step.options,
                positions=step.positions,
            )  # fmt: skip
        if arriving is None:
            dkv = [torch.zeros(k.shape, dtype=torch.float32, device=k.device) for _ in range(2)]
        else:
            dkv = arriving.wait()
        if gradients is not None:
            parts_of = (dq[:, step.rows], *(t[:, step.cols] for t in dkv))
            for total, part in zip(parts_of, gradients, strict=True):
                total += part.view(total.shape)
        if size > 1:
            arriving = _Exchange(dkv, ring)
        if coming is not None:
            k, v = coming.wait()
    dk, dv = dkv if arriving is None else arriving.wait()
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


@_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, seed, blocks, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens, seed, *blocks)


def _differentiate(ctx: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, cu_seqlens, seed, *blocks = ctx.saved_tensors
    gradients = torch.ops.flash_kernels.ring_backward(
        dout, q, k, v, out, lse, cu_seqlens, seed, blocks, *ctx.options
    )
    return (*gradients, None, None, [None] * len(blocks), *(None,) * len(ctx.options))


_forward.register_autograd(_differentiate, setup_context=_save)
