"""Context parallelism: one sequence on several processes, each with a share of its tokens.

Everything but attention works on a token at a time, so a share needs no one else for it. Two ways
to attend over the whole sequence:

    heads  an all-to-all before attention gives a process all tokens of some heads, one behind it
           the tokens back (DeepSpeed Ulysses, arXiv 2309.14509). Any attention function, with
           options that are the same for all heads; nheads must divide by the number of processes.
    ring   keys and values travel around (flash_kernels.ring): any number of heads, and their
           transfer hides behind the attention of the step before. Our kernels: flash attention,
           also of packed documents, and block-sparse attention of whole sequences.

Dropout of attention drops on a ring what one process would with the seeds of the group's first.
Over heads, and everywhere else in the model, each process draws for what it computes.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from model.attention import Attention, Packing, is_flash, packed_attention
from model.block_sparse import layer_mask
from model.gpt import GPT
from model.transformer import Block

METHODS = ("heads", "ring")
# A pattern counts from each document's start, where no chunk's blocks begin.
_NOT_PACKED = (
    "context_parallel.method=ring attends within documents with attention=flash alone: use "
    "method=heads"
)


class ContextParallel:
    """Which share of a sequence this process has; groups of `size` neighbouring ranks share one.

    Args:
        size: processes of a group, at least 1.
        method: "heads" or "ring".

    Raises:
        ValueError: size or method is out of its range.
    """

    def __init__(self, size: int, method: str) -> None:
        if size < 1:
            raise ValueError(f"context_parallel.size must be at least 1, got {size}")
        if method not in METHODS:
            raise ValueError(
                f"context_parallel.method must be one of {', '.join(METHODS)}, got {method!r}"
            )
        self.size = size
        self.method = method
        self._group: dist.ProcessGroup | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """Made on first use, which all processes must come to at the same time: connect()."""
        if self._group is None:
            if dist.get_world_size() % self.size:
                raise ValueError(
                    f"context_parallel.size={self.size} must divide the number of processes, "
                    f"{dist.get_world_size()}"
                )
            self._group, _ = dist.new_subgroups(self.size)
        return self._group

    def connect(self) -> None:
        """Make the groups; torch.distributed is initialised."""
        _ = self.group

    @property
    def rank(self) -> int:
        """Place in the group."""
        return dist.get_rank(self.group)

    def positions(self, seqlen: int) -> Tensor:
        """Positions of this process's tokens, int64 (seqlen / size,), rising.

        With heads one piece of the sequence; with a ring two, so that under a causal mask all
        processes have the same work.

        Raises:
            ValueError: seqlen does not divide.
        """
        if self.method == "ring":
            from flash_kernels.ring import zigzag_positions

            return zigzag_positions(seqlen, self.rank, self.size)
        check_seqlen(seqlen, self.size)
        return torch.arange(seqlen).view(self.size, -1)[self.rank]

    def attention(self, inner: Attention) -> Attention:
        """What a layer calls on its shares of q, k and v in place of `inner`."""
        return (_OverHeads if self.method == "heads" else _OverRing)(inner, self)


class _OverHeads:
    """`inner` on the whole sequence, for this process's part of the heads."""

    def __init__(self, inner: Attention, context: ContextParallel) -> None:
        self.inner = inner
        self.context = context

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        q, k, v = (_all_to_all(t, self.context, to_heads=True) for t in (q, k, v))
        return _all_to_all(self.inner(q, k, v, **options), self.context, to_heads=False)

    def packed(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, **options: Any
    ) -> Tensor:
        """Self-attention within documents that are packed in rows of max_seqlen tokens.

        q, k, v: (rows * max_seqlen / size, nheads, headdim), this process's share of each row.
        cu_seqlens: int32, where the documents of the whole rows start, row after row.
        """

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
            packing = Packing(cu_seqlens, max_seqlen)
            out = packed_attention(self.inner, q, k, v, packing, **options)
            return out.unflatten(0, (-1, max_seqlen))

        rows = (t.unflatten(0, (-1, max_seqlen // self.context.size)) for t in (q, k, v))
        return _OverHeads(attend, self.context)(*rows).flatten(0, 1)


class _OverRing:
    """flash_kernels.ring for what `inner` computes: flash or block-sparse attention."""

    def __init__(self, inner: Attention, context: ContextParallel) -> None:
        self.inner = inner
        self.context = context

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        from flash_kernels.ring import ring_attention

        mask = layer_mask(self.inner, q.device)
        if mask is None and not is_flash(self.inner, q):
            raise NotImplementedError(
                "context_parallel.method=ring works with attention=flash and block_sparse: use "
                "method=heads"
            )
        return ring_attention(q, k, v, block_mask=mask, group=self.context.group, **options)

    def packed(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, **options: Any
    ) -> Tensor:
        """As _OverHeads.packed."""
        from flash_kernels.ring import ring_attention_varlen

        if not is_flash(self.inner, q):
            raise NotImplementedError(_NOT_PACKED)
        rows = (t.unflatten(0, (-1, max_seqlen // self.context.size)) for t in (q, k, v))
        out = ring_attention_varlen(
            *rows, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, group=self.context.group, **options
        )
        return out.flatten(0, 1)


def check_seqlen(seqlen: int, parts: int) -> None:
    if seqlen % parts:
        raise ValueError(
            f"data.seqlen={seqlen} must be a multiple of {parts} to be split over the processes "
            "of context_parallel"
        )


def split_sequences(
    model: GPT, size: int, method: str, seqlen: int, *, packed: bool = False
) -> ContextParallel:
    """Let each process of a group of `size` hold a share of every sequence; changes the model.

    packed: rows hold documents that do not see each other.

    Raises:
        ValueError: the model is none that can be split, or its heads, its block masks or seqlen do
            not divide.
        NotImplementedError: packed, block-sparse and on a ring.
    """
    context = ContextParallel(size, method)
    if not isinstance(model, GPT):
        raise ValueError(f"context_parallel splits a GPT's sequences, got {type(model).__name__}")
    nheads = model.config["nheads"]
    if method == "heads" and nheads % size:
        raise ValueError(
            f"context_parallel.size={size} must divide the model's {nheads} heads; method=ring "
            "serves any number"
        )
    check_seqlen(seqlen, size if method == "heads" else 2 * size)
    for block in model.blocks:
        assert isinstance(block, Block)
        inner = block.attention.attention
        mask = layer_mask(inner, torch.device("cpu")) if method == "ring" else None
        if mask is not None:
            from flash_kernels.ring_blocks import check_chunks

            if packed:
                raise NotImplementedError(_NOT_PACKED)
            check_chunks(mask, seqlen, size)
        block.attention.attention = context.attention(inner)
    return context


def _all_to_all(x: Tensor, context: ContextParallel, *, to_heads: bool) -> Tensor:
    """(batch, seqlen / size, nheads, headdim) to (batch, seqlen, nheads / size, headdim), or back.

    A process gets the group's h-th part of the heads, h its place in the group.
    """
    size = context.size
    if to_heads:  # (process that gets it, batch, rows, its heads, headdim)
        sent = x.unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4)
    else:
        sent = x.unflatten(1, (size, -1)).permute(1, 0, 2, 3, 4)
    received = _Exchange.apply(sent, context.group)
    if to_heads:  # by the process that it came from, which is the order of the rows
        return received.permute(1, 0, 2, 3, 4).flatten(1, 2)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


class _Exchange(torch.autograd.Function):
    """Piece i of dimension 0 goes to process i of the group; its own inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(gradient, ctx.group), None
