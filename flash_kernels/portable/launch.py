"""What every launcher needs to know about one call: shapes, strides, flags, dropout keys."""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..block_lists import BlockLists
from . import tile_choice, tiles
from .kernel_launch import Bounded, Launch
from .tile_choice import Tile
from .tile_search import Run, searched_tile

# Windows beyond this see everything; the bound keeps row + shift + window inside int32.
MAX_WINDOW = 2**30
# Keys and values of the heads that run together should stay in the L2 cache (50 MB on H100, 40 MB
# on A100).
_GROUP_BYTES = 16 * 2**20
_NO_GUARD: contextlib.AbstractContextManager = contextlib.nullcontext()
# Of one call: backwards differ by the strides of their gradients.
_MAX_LAUNCHES = 64


# Of rows and of columns, int32 (seqlen,), of packed sequences (total,): where they lie in their
# sequence, for the dropout mask of a call that holds some of it. None: they count from its start.
Positions = tuple[Tensor, Tensor] | None


class WalkedMask(NamedTuple):
    """What the kernels need of a block mask; token_masks bool (num_patterns, block_m, block_n)."""

    rows: BlockLists
    cols: BlockLists
    token_masks: Tensor
    block_m: int
    block_n: int


def _lists(direction: BlockLists, token_masks: Tensor) -> tuple:
    """Argument of the kernels; a mask of one batch entry or one head serves all: stride 0."""
    bounds = direction.bounds
    strides = [bounds.stride(i) if bounds.shape[i] > 1 else 0 for i in range(2)]
    return (*direction._replace(), token_masks.view(torch.int8), *strides)


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. triton.cdiv costs several microseconds a call."""
    return -(-a // b)


@functools.cache
def block_d(headdim: int) -> int:
    """Width that a head is padded to inside the kernels."""
    return max(16, triton.next_power_of_2(headdim))


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
        blocks: WalkedMask | None = None,
        positions: Positions = None,
        autotune: bool = False,
    ) -> None:
        self._set_tensors(
            q, k, v, cu_seqlens_q, cu_seqlens_k, lengths_k, alibi_slopes, dropout_seed, blocks,
            positions,
        )  # fmt: skip
        self.device_index = q.device.index if q.is_cuda else None
        # 3 and 3.0 are equal in the key of a kept Problem, but not to Triton.
        self.softmax_scale, self.softcap = float(softmax_scale), float(softcap)
        self.dropout_p = float(dropout_p)
        self.has_left, self.has_right = window_left is not None, window_right is not None
        self.window = tuple(int(min(side or 0, MAX_WINDOW)) for side in (window_left, window_right))
        self.is_varlen = cu_seqlens_q is not None
        self.nheads, self.headdim = q.shape[-2], q.shape[-1]
        self.nheads_k = k.shape[-2]
        self.group_size = self.nheads // self.nheads_k
        out_row = self.nheads * self.headdim
        self.lse_shape: tuple[int, ...]
        self.column_shape: tuple[int, ...]
        if cu_seqlens_q is not None:
            self.batch = cu_seqlens_q.shape[0] - 1
            self.seqlen_q, self.seqlen_k = int(max_seqlen_q), int(max_seqlen_k)
            self.lse_shape = (self.nheads, q.shape[0])
            self.out_strides = (0, out_row, self.headdim)
            self.lse_strides = (0, q.shape[0])
            self.column_shape = (self.nheads, k.shape[0])
            self.column_strides = (0, k.shape[0])
        else:
            self.batch, self.seqlen_q, self.seqlen_k = q.shape[0], q.shape[1], k.shape[1]
            self.lse_shape = (self.batch, self.nheads, self.seqlen_q)
            self.out_strides = (self.seqlen_q * out_row, out_row, self.headdim)
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

        self.autotune = autotune
        # What was decided about the call, shared by all with_tensors.
        self.launches = Bounded(_MAX_LAUNCHES)
        self.families: dict[tuple, str] = {}
        self.tiles: dict[str, Tile] = {}

    def _set_tensors(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None, lengths_k: Tensor | None = None,
        alibi_slopes: Tensor | None = None, dropout_seed: Tensor | None = None,
        blocks: WalkedMask | None = None, positions: Positions = None,
    ) -> None:  # fmt: skip
        self.q, self.k, self.v = q, k, v
        self.cu_seqlens_q, self.cu_seqlens_k = cu_seqlens_q, cu_seqlens_k
        self.lengths_k, self.alibi_slopes, self.dropout_seed = lengths_k, alibi_slopes, dropout_seed
        self.positions_q = None if positions is None else positions[0]
        self.positions_k = None if positions is None else positions[1]
        # Of a block mask: what the kernels walk (sparse.py), by query row and by key column.
        self.mask = blocks
        self.row_lists = self.col_lists = None
        if blocks is not None:
            self.row_lists = _lists(blocks.rows, blocks.token_masks)
            self.col_lists = _lists(blocks.cols, blocks.token_masks)

    def with_tensors(self, *tensors: Any) -> "Problem":
        """The same call on other tensors (_set_tensors) of the same shapes, strides, dtypes and
        alignment, on the same device."""
        other = object.__new__(Problem)
        other.__dict__.update(self.__dict__)
        other._set_tensors(*tensors)
        return other

    def launch(self, make: Callable[..., Launch], *arguments: Any) -> Launch:
        """make(self, *arguments), kept from the first call on."""
        key = (make, arguments)
        known = self.launches.get(key)
        return known or self.launches.keep(key, make(self, *arguments))

    def choose_tile(self, kernel: str, run: Run) -> Tile:
        """use_tiles' tile if one is set, the search's with autotune, else the table's."""
        if kernel in tile_choice.overrides:
            return tile_choice.overrides[kernel]
        if kernel in self.tiles:
            return self.tiles[kernel]
        family = tile_choice.gpu_family(self.q.device)
        tile = tile_choice.table_tile(
            kernel, family, self.headdim, self.q.dtype, self.dropout_p > 0.0
        )
        if not self.autotune:
            self.tiles[kernel] = tile
        elif family != "interpreter":  # there a tile's time says nothing
            key = (kernel, self.q.device, self.q.dtype, self.group_size, *self.flags().items())
            return searched_tile(key, tile, run)
        return tile

    def fit(self, tile: Tile) -> Tile:
        """The tile itself, or with a block mask the largest part of it that divides a block."""
        if self.mask is None:
            return tile
        block_m = math.gcd(tile.block_m, self.mask.block_m)
        block_n = math.gcd(tile.block_n, self.mask.block_n)
        warps = tile.num_warps if block_m * block_n == tile.block_m * tile.block_n else 4
        return Tile(block_m, block_n, min(warps, tile.num_warps), tile.num_stages)

    def strides(self, of_tensor: tuple[int, ...]) -> tuple[int, ...]:
        """(batch, row, head) strides; a packed tensor moves by rows only."""
        return (0, *of_tensor[:2]) if self.is_varlen else of_tensor[:3]

    def qkv_strides(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self.strides(t.stride()) for t in (self.q, self.k, self.v))

    def index_tensors(self) -> tuple[Tensor | None, ...]:
        return self.cu_seqlens_q, self.cu_seqlens_k, self.lengths_k, self.alibi_slopes

    def flags(self) -> dict[str, int | bool]:
        """Compile-time arguments that all kernels take."""
        return {
            "HEADDIM": self.headdim,
            "BLOCK_D": block_d(self.headdim),
            "IS_VARLEN": self.is_varlen,
            "HAS_LENGTHS": self.lengths_k is not None,
            "HAS_LEFT": self.has_left,
            "HAS_RIGHT": self.has_right,
            "HAS_SOFTCAP": self.softcap > 0.0,
            "HAS_ALIBI": self.alibi_slopes is not None,
            "HAS_DROPOUT": self.dropout_p > 0.0,
            "PRECISE": self.q.dtype == torch.float32,
            "PTX": uses_ptx(self.q.device),
            "MASK_M": 0 if self.mask is None else self.mask.block_m,
            "MASK_N": 0 if self.mask is None else self.mask.block_n,
            "HAS_TOKENS": self.mask is not None and self.mask.token_masks.shape[0] > 0,
        }

    def device_guard(self) -> contextlib.AbstractContextManager:
        """Triton launches on the current device."""
        if self.device_index is None or self.device_index == torch.cuda.current_device():
            return _NO_GUARD
        return torch.cuda.device(self.device_index)


def uses_ptx(device: torch.device) -> bool:
    """False for AMD GPUs and for the interpreter."""
    return device.type == "cuda" and torch.version.hip is None


def heads_per_group(problem: Problem) -> int:
    """Query heads that tiles.program_order interleaves.

    Without a right bound all tiles take the same time, and head after head is best for the cache.
    """
    p = problem
    if not p.has_right:
        return 1
    bytes_per_head_k = 2 * max(p.seqlen_k, 1) * p.headdim * p.q.element_size()
    return max(1, min(p.batch * p.nheads, _GROUP_BYTES // bytes_per_head_k * p.group_size))
