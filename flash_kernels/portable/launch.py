"""What every launcher needs to know about one call: shapes, strides, flags, dropout keys."""

import contextlib
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from . import tiles

# Windows beyond this see everything; the bound keeps row + shift + window inside int32.
MAX_WINDOW = 2**30
# Keys and values of the heads that run together should stay in the L2 cache (50 MB on H100, 40 MB
# on A100).
_GROUP_BYTES = 16 * 2**20
_KEYS_BLOCK = 256


class Problem:
    """One attention call, checked by the caller (attention.py).

    Dense: q (batch, seqlen_q, nheads, headdim), k and v (batch, seqlen_k, nheads_k, headdim).
    Packed: q (total_q, nheads, headdim), k and v (total_k, nheads_k, headdim), with cu_seqlens_q,
    cu_seqlens_k (batch + 1,) int32 and the longest lengths in max_seqlen_q, max_seqlen_k.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        lengths_k: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        dropout_seed: Tensor | None = None,
        max_seqlen_q: int = 0,
        max_seqlen_k: int = 0,
        softmax_scale: float,
        softcap: float = 0.0,
        window_left: int | None = None,
        window_right: int | None = None,
        dropout_p: float = 0.0,
    ):
        self.q, self.k, self.v = q, k, v
        self.cu_seqlens_q, self.cu_seqlens_k = cu_seqlens_q, cu_seqlens_k
        self.lengths_k, self.alibi_slopes, self.dropout_seed = lengths_k, alibi_slopes, dropout_seed
        self.softmax_scale, self.softcap, self.dropout_p = softmax_scale, softcap, dropout_p
        self.has_left, self.has_right = window_left is not None, window_right is not None
        self.window = (min(window_left or 0, MAX_WINDOW), min(window_right or 0, MAX_WINDOW))
        self.is_varlen = cu_seqlens_q is not None
        self.nheads, self.headdim = q.shape[-2], q.shape[-1]
        self.nheads_k = k.shape[-2]
        self.group_size = self.nheads // self.nheads_k
        if self.is_varlen:
            self.batch = cu_seqlens_q.shape[0] - 1
            self.seqlen_q, self.seqlen_k = max_seqlen_q, max_seqlen_k
            self.lse_shape = (self.nheads, q.shape[0])
            self.lse_strides = (0, q.shape[0])
            self.column_shape = (self.nheads, k.shape[0])
            self.column_strides = (0, k.shape[0])
        else:
            self.batch, self.seqlen_q, self.seqlen_k = q.shape[0], q.shape[1], k.shape[1]
            self.lse_shape = (self.batch, self.nheads, self.seqlen_q)
            self.lse_strides = (self.nheads * self.seqlen_q, self.seqlen_q)
            self.column_shape = (self.batch, self.nheads, self.seqlen_k)
            self.column_strides = (self.nheads * self.seqlen_k, self.seqlen_k)
        self.scale_log2 = softmax_scale * tiles.LOG2E.value
        # Kept probabilities are scaled by 1 / (1 - p). With p = 1 none is kept, and any finite
        # factor serves.
        self.keep_scale = 1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 1.0
        self.dropout_threshold = max(round(dropout_p * 2**32) - 2**31 - 1, -(2**31))
        self.alibi_stride_batch = (
            alibi_slopes.stride(0) if alibi_slopes is not None and alibi_slopes.dim() == 2 else 0
        )

    def strides(self, tensor: Tensor) -> tuple[int, int, int]:
        """(batch, row, head) strides; a packed tensor moves by rows only."""
        if self.is_varlen:
            return (0, tensor.stride(0), tensor.stride(1))
        return (tensor.stride(0), tensor.stride(1), tensor.stride(2))

    def index_tensors(self) -> tuple[Tensor | None, ...]:
        return self.cu_seqlens_q, self.cu_seqlens_k, self.lengths_k, self.alibi_slopes

    def flags(self) -> dict[str, int | bool]:
        """Compile-time arguments that all kernels take."""
        return {
            "HEADDIM": self.headdim,
            "BLOCK_D": max(16, triton.next_power_of_2(self.headdim)),
            "IS_VARLEN": self.is_varlen,
            "HAS_LENGTHS": self.lengths_k is not None,
            "HAS_LEFT": self.has_left,
            "HAS_RIGHT": self.has_right,
            "HAS_SOFTCAP": self.softcap > 0.0,
            "HAS_ALIBI": self.alibi_slopes is not None,
            "HAS_DROPOUT": self.dropout_p > 0.0,
            "PRECISE": self.q.dtype == torch.float32,
        }

    def device_guard(self):
        """Triton launches on the current device."""
        device = self.q.device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            return torch.cuda.device(device)
        return contextlib.nullcontext()


class DropoutKeys(NamedTuple):
    """int32 keys of the mask (tiles.dropout_keep): two per query row, one per key column."""

    tensors: tuple[Tensor | None, Tensor | None, Tensor | None]
    column_strides: tuple[int, int]


def dropout_keys(problem: Problem, column_multiple: int = 1) -> DropoutKeys:
    """Keys of this call's seed: O(batch * nheads * seqlen) memory, made again in the backward.

    column_multiple: the column keys of a dense call get rows of a multiple of this length, with
    anything behind the last key.
    """
    p = problem
    if p.dropout_p == 0.0:
        return DropoutKeys((None, None, None), (0, 0))
    row_keys = torch.empty(p.lse_shape, dtype=torch.int32, device=p.q.device)
    row_multipliers = torch.empty_like(row_keys)
    column_shape, column_strides = p.column_shape, p.column_strides
    if not p.is_varlen:
        columns = triton.cdiv(p.seqlen_k, column_multiple) * column_multiple
        column_shape = (p.batch, p.nheads, columns)
        column_strides = (p.nheads * columns, columns)
    column_keys = torch.empty(column_shape, dtype=torch.int32, device=p.q.device)
    num_tiles = triton.cdiv(max(p.seqlen_q, p.seqlen_k), _KEYS_BLOCK)
    tiles.dropout_keys_kernel[(p.batch * p.nheads * num_tiles,)](
        p.dropout_seed, row_keys, row_multipliers, column_keys, p.cu_seqlens_q, p.cu_seqlens_k,
        p.lse_strides, column_strides, p.nheads, p.seqlen_q, p.seqlen_k, num_tiles,
        IS_VARLEN=p.is_varlen, BLOCK=_KEYS_BLOCK,
    )  # fmt: skip
    return DropoutKeys((row_keys, row_multipliers, column_keys), column_strides)


def heads_per_group(problem: Problem) -> int:
    """Query heads that tiles.program_order interleaves.

    Without a right bound all tiles take the same time, and head after head is best for the cache.
    """
    p = problem
    if not p.has_right:
        return 1
    bytes_per_head_k = 2 * max(p.seqlen_k, 1) * p.headdim * p.q.element_size()
    return max(1, min(p.batch * p.nheads, _GROUP_BYTES // bytes_per_head_k * p.group_size))
