"""One small kernel in place of a dozen tensor operations: do cu_seqlens hold what they must?"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernel_launch import Bounded, Launch

_BLOCK = 256
_launches = Bounded(512)


@triton.jit
def _holds(cu_seqlens_ptr, batch, total, longest, BLOCK: tl.constexpr):
    """1 where cu_seqlens (batch + 1,) starts at 0, never falls, ends at total, and no sequence is
    longer than `longest`; else 0."""
    first = tl.load(cu_seqlens_ptr)
    last = tl.load(cu_seqlens_ptr + batch)
    holds = ((first == 0) & (last == total)).to(tl.int32)
    for begin in range(0, batch, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        start = tl.load(cu_seqlens_ptr + index, mask=index < batch, other=0)
        end = tl.load(cu_seqlens_ptr + index + 1, mask=index < batch, other=0)
        length = end - start
        holds = holds & tl.min(((length >= 0) & (length <= longest)).to(tl.int32), 0)
    return holds


@triton.jit(do_not_specialize=["batch", "total_q", "total_k", "longest_q", "longest_k"])
def _check_kernel(
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, holds_ptr, batch, total_q, total_k, longest_q, longest_k,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (1,)."""
    holds_q = _holds(cu_seqlens_q_ptr, batch, total_q, longest_q, BLOCK)
    holds_k = _holds(cu_seqlens_k_ptr, batch, total_k, longest_k, BLOCK)
    tl.store(holds_ptr, holds_q & holds_k)


def cu_seqlens_hold(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    total_q: int,
    total_k: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> Tensor:
    """int32 (1,) on the device: 1 if both lists describe their packed sequences, else 0."""
    holds = torch.empty(1, dtype=torch.int32, device=cu_seqlens_q.device)
    numbers = (cu_seqlens_q.shape[0] - 1, total_q, total_k, max_seqlen_q, max_seqlen_k)
    key = (cu_seqlens_q.device, numbers)
    launch = _launches.get(key) or _launches.keep(
        key, Launch(_check_kernel, 1, numbers, {"BLOCK": _BLOCK, "num_warps": 1})
    )
    launch(cu_seqlens_q, cu_seqlens_k, holds)
    return holds
