"""Launchers of the Hopper kernels: tiles, TMA descriptors, grids. Calls come checked by rule.py."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..portable.attention_backward import compute_row_words
from ..portable.dropout import column_keys, row_keys
from ..portable.kernel_launch import Launch
from ..portable.launch import Problem, cdiv, heads_per_group
from .addressing import END
from .backward import attention_backward_kernel
from .backward_producer import BLOCK_KEYS, KEYS
from .forward import attention_forward_kernel
from .forward_producer import ROWS
from .gluon_api import TensorDescriptor, gl
from .rounding import round_scaled
from .rule import is_packable, is_readable_by_tma
from .token_words import pack_tokens

_LARGEST = 2**31 - 2**16  # size of a dimension that no coordinate may leave
_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


class ForwardTile(NamedTuple):
    num_consumers: int  # warpgroups of 64 query rows
    block_n: int  # keys
    num_stages: int  # K and V tiles in flight
    registers: int  # of a consumer's thread


class BackwardTile(NamedTuple):
    block_m: int  # query rows
    num_stages: int  # Q and dO tiles in flight
    registers: int  # of a consumer's thread


def padded_headdim(headdim: int) -> int:
    """Width of the tiles: TMA fills the columns beyond headdim with zeros and never writes them."""
    return 64 if headdim <= 64 else 128


def forward_tile(problem: Problem) -> ForwardTile:
    """The tile sizes of a call.

    Three consumers load each key tile for 192 rows, which pays from a few tiles of rows on. They
    leave 160 registers, too few for dropout and for more than one mask, and 192 rows do not divide
    a block of a block mask.
    """
    p = problem
    if p.headdim > 64:
        return ForwardTile(2, 128, 2, 240)
    if p.dropout_p > 0.0 or p.has_left or p.mask is not None or p.seqlen_q <= 512:
        return ForwardTile(2, 128, 3, 240)
    return ForwardTile(3, 128, 3, 160)


def backward_tile(problem: Problem) -> BackwardTile:
    return BackwardTile(128 if problem.headdim <= 64 else 64, 2, 240)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Those of the GPU; of an H200 where kernels are compiled for one that is not there."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _layout(block_shape: tuple[int, ...], dtype: torch.dtype):
    return gl.NVMMASharedLayout.get_default_for(list(block_shape), _DTYPES[dtype])


def descriptor(tensor: Tensor, rows: int, columns: int, is_ragged: bool) -> TensorDescriptor:
    """TMA descriptor of q, k, v or what is shaped like them, in boxes of one head, `rows` rows and
    `columns` columns, with the dimensions that addressing.py counts by.

    Dense: (batch, nheads, seqlen, headdim). is_ragged: packed sequences, or a dense tensor whose
    sequences follow each other (is_packable).
    """
    nheads, headdim = tensor.shape[-2:]
    num_rows = tensor.numel() // (nheads * headdim)
    # The stride of a dimension of size 1 is never used, but has to be a multiple of 16 bytes.
    row_stride = tensor.stride(-3) if num_rows > 1 else 8
    head_stride = tensor.stride(-2) if nheads > 1 else 8
    if is_ragged:
        sizes = [_LARGEST, _LARGEST, nheads, END.value, headdim]
        strides = [2**34 - row_stride, row_stride, head_stride, row_stride, 1]
        box: tuple[int, ...] = (1, 1, 1, rows, columns)
    else:
        batch, seqlen = tensor.shape[:2]
        sizes = [batch, nheads, seqlen, headdim]
        strides = [
            tensor.stride(0) if batch > 1 else 8, head_stride, row_stride if seqlen > 1 else 8, 1
        ]  # fmt: skip
        box = (1, 1, rows, columns)
    return TensorDescriptor(tensor, sizes, strides, list(box), _layout(box, tensor.dtype))


def describe(*box) -> Callable[[Tensor], TensorDescriptor]:
    return lambda tensor: descriptor(tensor, *box)


def _head_strides(tensor: Tensor | None, is_varlen: bool) -> tuple[int, int]:
    """(batch, head) strides of a (batch, nheads, n) tensor, or of (nheads, n) with packed
    sequences."""
    if tensor is None:
        return 0, 0
    return (0, tensor.stride(0)) if is_varlen else (tensor.stride(0), tensor.stride(1))


def _flags(problem: Problem, block: int) -> dict[str, int | bool]:
    """Compile-time arguments of both kernels; block: keys of a tile of the walk or of a block."""
    p = problem
    is_ragged = p.is_varlen or p.lengths_k is not None
    return {
        "HEADDIM": padded_headdim(p.headdim),
        "IS_VARLEN": p.is_varlen,
        "HAS_LENGTHS": p.lengths_k is not None,
        "HAS_LEFT": p.has_left,
        "HAS_RIGHT": p.has_right,
        # A causal mask hides what a tile holds behind the last key, a block mask lists such blocks
        # as partial.
        "HAS_TAIL": p.mask is None
        and not p.has_right
        and (is_ragged or p.has_left or p.seqlen_k % block != 0),
        "HAS_DROPOUT": p.dropout_p > 0.0,
        "MASK_M": 0 if p.mask is None else p.mask.block_m,
        "MASK_N": 0 if p.mask is None else p.mask.block_n,
        "HAS_TOKENS": p.mask is not None and p.mask.token_masks.shape[0] > 0,
    }


def _lists(problem: Problem, by_column: bool) -> tuple | None:
    """row_lists or col_lists of the problem, their token masks packed."""
    p = problem
    lists = p.col_lists if by_column else p.row_lists
    if p.mask is None or lists is None:
        return None
    return (*lists[:3], pack_tokens(p.mask.token_masks, by_column), *lists[4:])


def attention_forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """The counterpart of the portable attention_forward, for calls that rule.py admits.

    Returns:
        out: shape and dtype of q, contiguous. lse: float32, (batch, nheads, seqlen_q) or (nheads,
            total_q).
    """
    p = problem
    out = torch.empty(p.q.shape, dtype=p.q.dtype, device=p.q.device)
    lse = torch.empty(p.lse_shape, dtype=torch.float32, device=p.q.device)
    if out.numel() == 0:
        return out, lse
    tile = forward_tile(p)
    with p.device_guard():
        keys = column_keys(p, tile.block_n)
        counter = None
        if not has_equal_row_tiles(p) and num_row_tiles(p, tile) > num_blocks(p, tile):
            counter = torch.zeros(1, dtype=torch.int32, device=p.q.device)
        p.launch(_forward_launch)(
            p.q, p.k, p.v, out,
            (lse, *row_keys(p), keys), (p.lse_strides, _head_strides(keys, p.is_varlen)), counter,
            (p.cu_seqlens_q, p.cu_seqlens_k, p.lengths_k, _lists(p, by_column=False)),
        )  # fmt: skip
    return out, lse


def has_equal_row_tiles(problem: Problem) -> bool:
    """Whether all row tiles of the forward see as many keys."""
    p = problem
    return not (p.has_left or p.has_right or p.is_varlen) and p.lengths_k is None and p.mask is None


def num_row_tiles(problem: Problem, tile: ForwardTile) -> int:
    """Of all heads and sequences in the forward."""
    p = problem
    return p.batch * p.nheads * cdiv(p.seqlen_q, tile.num_consumers * ROWS.value)


def num_blocks(problem: Problem, tile: ForwardTile) -> int:
    """Size of the forward's grid: as many blocks as run at once."""
    return min(num_row_tiles(problem, tile), num_multiprocessors(problem.q.device))


def _forward_launch(problem: Problem) -> Launch:
    p = problem
    tile = forward_tile(p)
    flags = _flags(p, tile.block_n)
    columns, is_ragged = flags["HEADDIM"], p.is_varlen or p.lengths_k is not None
    num_items = num_row_tiles(p, tile)
    num_heads = p.batch * p.nheads
    rows = describe(ROWS.value, columns, is_ragged)
    keys = describe(tile.block_n, columns, is_ragged)
    numbers = (
        (p.nheads, num_heads, p.seqlen_q, p.seqlen_k, num_items // num_heads, heads_per_group(p)),
        p.group_size, num_items, p.window, p.scale_log2, p.dropout_threshold, p.keep_scale,
    )  # fmt: skip
    constants = dict(
        NUM_CONSUMERS=tile.num_consumers, BLOCK_N=tile.block_n, STAGES=tile.num_stages,
        REGISTERS=tile.registers, **flags, num_warps=4,
    )  # fmt: skip
    grid = num_blocks(p, tile)
    return Launch(attention_forward_kernel, grid, numbers, constants, (rows, keys, keys, rows))


def attention_backward(
    problem: Problem,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The counterpart of the portable attention_backward, for calls that rule.py admits.

    dq is added up in a float32 tensor of q's size, in any order.

    into: laid out like one tensor of q, k and v side by side, its strides those of q, k and v.
    """
    p = problem
    is_ragged = p.is_varlen or p.lengths_k is not None
    if (
        dout.stride(-1) != 1
        or not is_readable_by_tma(dout)
        or (is_ragged and not is_packable(dout, p.is_varlen))
    ):
        dout = dout.contiguous()
    dq, dk, dv = into or (
        torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (p.q, p.k, p.v)
    )
    if p.lengths_k is not None:  # the kernel leaves out the gradients of padding
        dk.zero_()
        dv.zero_()
    if dq.numel() == 0:
        return dq, dk.zero_(), dv.zero_()
    with p.device_guard():
        keys = column_keys(p, BLOCK_KEYS.value)
        row_words = compute_row_words(p, dout, dlse, out, lse)
        dq_sum = torch.zeros(p.q.shape, dtype=torch.float32, device=p.q.device)
        p.launch(_backward_launch, dout.stride(), dk.stride())(
            p.q, dout, p.k, p.v, dk, dv, dq_sum, row_words, row_words.view(torch.int32), keys,
            p.cu_seqlens_q, p.cu_seqlens_k, p.lengths_k, _lists(p, by_column=True), p.lse_strides,
            _head_strides(keys, p.is_varlen),
        )  # fmt: skip
        p.launch(_round_launch, dq.stride(-3))(dq_sum, dq)
    return dq, dk, dv


def _round_launch(problem: Problem, row_stride: int) -> Launch:
    p = problem
    return round_scaled(
        p.softmax_scale * p.keep_scale, p.q.numel(), p.nheads * p.headdim, row_stride
    )


def _backward_launch(problem: Problem, *strides: tuple[int, ...]) -> Launch:
    p = problem
    tile = backward_tile(p)
    flags = _flags(p, BLOCK_KEYS.value)
    columns, is_ragged = flags["HEADDIM"], p.is_varlen or p.lengths_k is not None
    num_heads = p.batch * p.nheads_k
    num_col_tiles = cdiv(p.seqlen_k, BLOCK_KEYS.value)
    rows = describe(tile.block_m, columns, is_ragged)
    keys = describe(KEYS.value, columns, is_ragged)
    sums = describe(64, columns * tile.block_m // 128, is_ragged)
    numbers = (
        p.nheads, p.group_size, num_heads, p.seqlen_q, p.seqlen_k, num_col_tiles,
        max(1, heads_per_group(p) // p.group_size), p.window, p.scale_log2,
        p.softmax_scale * p.keep_scale, p.keep_scale, p.dropout_threshold,
    )  # fmt: skip
    constants = dict(
        BLOCK_M=tile.block_m, STAGES=tile.num_stages, REGISTERS=tile.registers, **flags,
        num_warps=4,
    )  # fmt: skip
    return Launch(
        attention_backward_kernel, num_heads * num_col_tiles, numbers, constants,
        (rows, rows, keys, keys, keys, keys, sums),
    )  # fmt: skip
