"""Ring attention: exact attention over a sequence that is split over processes.

Every process keeps its queries; keys and values travel once around the ring (Liu et al., arXiv
2310.01889), a step of it beside the attention of the step before. The parts are joined by their
log-sum-exps, and in the backward the kernels take the joint one, so that each part's gradients are
those of the whole: memory stays that of one process's share.

With a causal mask the shares are zigzag: of 2 * size chunks process r holds chunks r and
2 * size - 1 - r, so that every process has the same work in every step. Packed sequences are split
as one stream, wherever they begin and end: positions of a share rise, so that what it holds of a
sequence is a run of its rows, and a step is one packed call whose sequences may be empty.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from . import operators
from .attention import Seed, autocast, check_kernel, check_packed_layout, check_qkv, seed_tensor


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
    group: dist.ProcessGroup | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Seed = None,
    deterministic: bool = False,
    kernel: str | None = None,
) -> Tensor:
    """flash_attention over the sequence that the processes of `group` hold together.

    Args:
        q: (batch, seqlen / size, nheads, headdim), float16, bfloat16 or float32: this process's
            share, with causal the positions of zigzag_positions, else any.
        k, v: (batch, seqlen / size, nheads_k, headdim), the same share.
        group: None is all processes. All of them call at the same time with the same shapes.
        causal, softmax_scale, dropout_p, deterministic, kernel: as in flash_attention.
        dropout_seed: as in flash_attention, each process its own. The dropped probabilities depend
            on how the sequence is split.

    Returns:
        (batch, seqlen / size, nheads, headdim), dtype of q. It and its gradients are exact up to
        the rounding of each step's part to that dtype; a second derivative is not served.

    Raises:
        ValueError: as flash_attention; q, k and v must have the same batch and rows, with causal an
            even number of rows.
    """
    q, k, v = autocast(q, k, v)
    check_qkv(q, k, v, 4, "(batch, seqlen, nheads, headdim)")
    if q.shape[:2] != k.shape[:2] or (causal and q.shape[1] % 2):
        raise ValueError(
            "q and k must have the same batch and rows, with causal an even number of rows, "
            f"got {tuple(q.shape[:2])} and {tuple(k.shape[:2])}"
        )
    return _attend(
        q, k, v, None, group, causal, 0, softmax_scale, dropout_p, dropout_seed, deterministic,
        kernel,
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
            anywhere, also within a share.
        k, v: (total / size, nheads_k, headdim), the same share.
        cu_seqlens: int32 (batch + 1,), contiguous, on q's device, the same on all processes: where
            the sequences start in the whole, from 0 to total. Not read by the host.
        max_seqlen: at least the longest sequence.
        The rest as in ring_attention.

    Returns:
        (total / size, nheads, headdim), dtype of q.

    Raises:
        ValueError: as flash_attention_varlen; q, k and v must have the same even number of rows.
    """
    q, k, v = autocast(q, k, v)
    check_qkv(q, k, v, 3, "(total, nheads, headdim)")
    if q.shape[0] != k.shape[0] or q.shape[0] % 2:
        raise ValueError(
            f"q and k must have the same even number of rows, got {q.shape[0]} and {k.shape[0]}"
        )
    check_packed_layout("cu_seqlens", cu_seqlens, q.device)
    total = q.shape[0] * dist.get_world_size(group)
    torch.ops.flash_kernels.check_cu_seqlens(
        cu_seqlens, cu_seqlens, total, total, max_seqlen, max_seqlen
    )
    return _attend(
        q, k, v, cu_seqlens, group, causal, max_seqlen, softmax_scale, dropout_p, dropout_seed,
        deterministic, kernel,
    )  # fmt: skip


def _attend(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, group: dist.ProcessGroup | None,
    causal: bool, max_seqlen: int, softmax_scale: float | None, dropout_p: float,
    dropout_seed: Seed, deterministic: bool, kernel: str | None,
) -> Tensor:  # fmt: skip
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be between 0 and 1, got {dropout_p}")
    kernel = check_kernel(kernel, deterministic)
    seed = seed_tensor(dropout_seed, q.device) if dropout_p > 0.0 else None
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    ring = group or dist.group.WORLD
    assert ring is not None
    return torch.ops.flash_kernels.ring_forward(
        q, k, v, cu_seqlens, seed, ring.group_name, causal, max_seqlen, scale, dropout_p, kernel
    )[0]


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


def parts(rank: int, source: int, rows: int, causal: bool) -> tuple[slice, slice, bool]:
    """(query rows, keys, whether causal) of the step that holds the keys of process `source`."""
    everything = slice(0, rows)
    if not causal or source == rank:
        return everything, everything, causal
    if source < rank:  # its first chunk is before both of ours, its second one behind
        return everything, slice(0, rows // 2), False
    return slice(rows // 2, rows), everything, False


def pair_seed(seed: Tensor, source: int) -> Tensor:
    """Dropout seed of a process's queries, whose own seed is given, and the keys of `source`.

    The step is large and odd, so that consecutive seeds give no pair that of another.
    """
    step = 0x9E3779B97F4A7C15 * source % 2**64
    return seed + (step - 2**64 if step >= 2**63 else step)


def held_cu_seqlens(cu_seqlens: Tensor, source: int, size: int, rows: int, part: slice) -> Tensor:
    """Where sequences start in a part of a process's share: int32, as cu_seqlens, never falling.

    Args:
        cu_seqlens: of the whole.
        source, size: the process, of how many.
        rows: of its share.
        part: of these rows: all, or the first or second half, which are its two chunks.
    """
    half = rows // 2
    chunks = (source, 2 * size - 1 - source)[part.start // half : part.stop // half]
    first, *others = ((cu_seqlens - chunk * half).clamp(0, half) for chunk in chunks)
    return sum(others, first).int()


def _step(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, seed: Tensor | None, rank: int,
    source: int, size: int, causal: bool, max_seqlen: int, scale: float, p: float,
    kernel: str | None,
) -> tuple[slice, slice, tuple]:  # fmt: skip
    """Rows of q, of k, and what the operators take for the step with the keys of `source`."""
    num_rows = q.shape[-3]
    rows, cols, is_causal = parts(rank, source, num_rows, causal)
    seed = None if seed is None else pair_seed(seed, source)
    right = 0 if is_causal else None
    if cu_seqlens is None:
        options = operators.dense_options(q[:, rows], k[:, cols], seed, scale, right, p, kernel)
        return rows, cols, options
    cu_q = held_cu_seqlens(cu_seqlens, rank, size, num_rows, rows)
    cu_k = held_cu_seqlens(cu_seqlens, source, size, num_rows, cols)
    longest_q, longest_k = (min(max_seqlen, part.stop - part.start) for part in (rows, cols))
    options = operators.packed_options(
        cu_q, cu_k, longest_q, longest_k, seed, scale, right, p, kernel
    )
    return rows, cols, options


def _process_group(name: str) -> dist.ProcessGroup:
    # The name's own type is not in every release of torch that is served.
    return _resolve_process_group(name)  # type: ignore[arg-type]


@torch.library.custom_op("flash_kernels::ring_forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, seed: Tensor | None, group: str,
    causal: bool, max_seqlen: int, softmax_scale: float, dropout_p: float, kernel: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out (batch, rows, nheads, headdim) and lse float32 (batch, nheads, rows); of packed
    sequences both without batch."""
    ring = _process_group(group)
    rank, size = dist.get_rank(ring), dist.get_world_size(ring)
    total: Tensor | None = None
    total_lse: Tensor | None = None
    for step in range(size):
        source = (rank - step) % size
        coming = _Exchange([k, v], ring) if step + 1 < size else None
        rows, cols, options = _step(
            q, k, v, cu_seqlens, seed, rank, source, size, causal, max_seqlen, softmax_scale,
            dropout_p, kernel,
        )  # fmt: skip
        q_part, k_part, v_part = (t[..., r, :, :] for t, r in ((q, rows), (k, cols), (v, cols)))
        out, lse = operators.forward(q_part, k_part, v_part, *options)
        if total is None or total_lse is None:
            total, total_lse = out.float(), lse
        else:
            # Views: the rows of this step. Every row has seen a key in the first one.
            old, old_lse = total[..., rows, :, :], total_lse[..., rows]
            joint = torch.logaddexp(old_lse, lse)
            old.mul_(_by_row(old_lse - joint)).add_(out * _by_row(lse - joint))
            old_lse.copy_(joint)
        if coming is not None:
            k, v = coming.wait()
    assert total is not None and total_lse is not None
    return total.to(q.dtype), total_lse


def _by_row(difference: Tensor) -> Tensor:
    """exp of (..., nheads, rows), to multiply (..., rows, nheads, headdim)."""
    return difference.exp().transpose(-1, -2)[..., None]


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
    return q.new_empty(q.shape), lse


@torch.library.custom_op("flash_kernels::ring_backward", mutates_args=())
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_seqlens: Tensor | None, seed: Tensor | None, group: str, causal: bool, max_seqlen: int,
    softmax_scale: float, dropout_p: float, kernel: str | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv. The sums for dk and dv travel with their keys and come home at the end."""
    ring = _process_group(group)
    rank, size = dist.get_rank(ring), dist.get_world_size(ring)
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    arriving = None
    for step in range(size):
        source = (rank - step) % size
        coming = _Exchange([k, v], ring) if step + 1 < size else None
        rows, cols, options = _step(
            q, k, v, cu_seqlens, seed, rank, source, size, causal, max_seqlen, softmax_scale,
            dropout_p, kernel,
        )  # fmt: skip
        q_part, k_part, v_part = (t[..., r, :, :] for t, r in ((q, rows), (k, cols), (v, cols)))
        gradients = operators.backward(
            dout[..., rows, :, :], None, q_part, k_part, v_part, out[..., rows, :, :],
            lse[..., rows].contiguous(), *options,
        )  # fmt: skip
        dq[..., rows, :, :] += gradients[0]
        if arriving is None:
            dkv = [torch.zeros(k.shape, dtype=torch.float32, device=k.device) for _ in range(2)]
        else:
            dkv = arriving.wait()
        for total, part in zip(dkv, gradients[1:], strict=True):
            total[..., cols, :, :] += part
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
    q, k, v, cu_seqlens, seed, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens, seed)


def _differentiate(ctx: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.flash_kernels.ring_backward(dout, *ctx.saved_tensors, *ctx.options)
    return (*gradients, *(None,) * (2 + len(ctx.options)))


_forward.register_autograd(_differentiate, setup_context=_save)
