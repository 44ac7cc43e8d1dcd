"""Cross-entropy of a linear layer's outputs, whose logits exist a chunk at a time.

At GPT-2's vocabulary the logits are the largest tensor of a training step: 65,536 tokens take
6.6 GB in bf16. Here the gradient of a chunk is made while its logits are there, in their place, by
a kernel that reads them from memory once and writes them once: the second of its two readings finds
them in the L2 cache. Each matrix product is done once, as without chunks.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gradients import refuse_second, with_gradients
from ..operators import LIBRARY
from .launch import check_device, on_device

_BLOCK, _VECTOR = 8192, 8  # columns of a program and of a thread at a time; 16 bytes of bf16
_NUM_WARPS = 16
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

LIBRARY.define(
    "linear_cross_entropy(Tensor rows, Tensor weight, Tensor labels, SymInt vocab_size, "
    "int ignore_index, SymInt chunk_tokens, ScalarType dtype) -> (Tensor, Tensor, Tensor)"
)


@triton.jit
def _load_scores(row_ptr, columns, vocab_size, MASKED: tl.constexpr):
    """Logits by log2(e), float32, -inf from vocab_size on."""
    if MASKED:
        logits = tl.load(row_ptr + columns, mask=columns < vocab_size, other=float("-inf"))
    else:
        logits = tl.load(row_ptr + columns)
    return logits.to(tl.float32) * 1.4426950408889634


@triton.jit
def _add_exponentials(maxima, sums, row_ptr, columns, vocab_size, MASKED: tl.constexpr):
    """Maxima and sums of each lane, columns (lanes, VECTOR) included."""
    scores = _load_scores(row_ptr, columns, vocab_size, MASKED)
    higher = tl.maximum(maxima, tl.max(scores, 1))
    sums = sums * tl.exp2(maxima - higher) + tl.sum(tl.exp2(scores - higher[:, None]), 1)
    return higher, sums


@triton.jit
def _store_gradient(
    row_ptr, columns, lse, label, is_counted, vocab_size, num_columns, MASKED: tl.constexpr
):
    gradient = tl.exp2(_load_scores(row_ptr, columns, vocab_size, MASKED) - lse)
    gradient = tl.where(columns == label, gradient - 1.0, gradient)
    gradient = tl.where(is_counted, gradient, 0.0).to(row_ptr.dtype.element_ty)
    if MASKED:
        tl.store(row_ptr + columns, gradient, mask=columns < num_columns)
    else:
        tl.store(row_ptr + columns, gradient)


@triton.jit
def softmax_gradient_kernel(
    logits_ptr, labels_ptr, losses_ptr, stride, vocab_size, num_columns, ignore_index,
    BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Row of logits -> softmax - one-hot of its label, in place, and its loss. Grid: (rows,).

    Columns from vocab_size on are padding: they take no part, and their gradient is 0, as is that
    of a whole row whose label is ignore_index. Only the last columns are masked: masked accesses
    are of one element each.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    label = tl.load(labels_ptr + row)
    is_counted = label != ignore_index
    # Each thread has a maximum and a sum of its own, over vectors of columns, until the end: no
    # thread waits for another on the way.
    lanes = tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    maxima = tl.full((BLOCK // VECTOR,), -3.0e38, tl.float32)  # a finite number less than any logit
    sums = tl.zeros((BLOCK // VECTOR,), tl.float32)
    end = vocab_size // BLOCK * BLOCK
    for start in range(0, end, BLOCK):
        maxima, sums = _add_exponentials(maxima, sums, row_ptr, start + lanes, vocab_size, False)
    if end < vocab_size:
        maxima, sums = _add_exponentials(maxima, sums, row_ptr, end + lanes, vocab_size, True)
    maximum = tl.max(maxima, 0)
    lse = maximum + tl.log2(tl.sum(sums * tl.exp2(maxima - maximum), 0))
    picked = _load_scores(row_ptr, tl.where(is_counted, label, 0), vocab_size, False)
    tl.store(losses_ptr + row, tl.where(is_counted, (lse - picked) * 0.6931471805599453, 0.0))
    tl.debug_barrier()  # every thread has read the label's logit
    for start in range(0, end, BLOCK):
        _store_gradient(
            row_ptr, start + lanes, lse, label, is_counted, vocab_size, num_columns, False
        )
    for start in range(end, num_columns, BLOCK):
        _store_gradient(
            row_ptr, start + lanes, lse, label, is_counted, vocab_size, num_columns, True
        )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    chunk_tokens: int = 8192,
) -> Tensor:
    """Summed cross-entropy of hidden @ weight[:vocab_size].T, with gradients of both.

    Equal to torch.nn.functional.cross_entropy(..., reduction="sum") of those logits in float32, but
    that gradients of the logits are rounded to the products' dtype. The gradients are made in the
    forward: call it where a backward follows.

    Args:
        hidden: (..., dim), float16, bfloat16 or float32, on a GPU.
        weight: (num_rows, dim), its own dtype; rows from vocab_size on belong to no class, and
            their gradient is 0: a multiple of 64 rows suits tensor cores.
        labels: integers of hidden's leading shape, in [0, vocab_size) or ignore_index: no loss.
            Others are not looked for: the loss is then undefined.
        vocab_size: classes; None: every row of weight is one.
        chunk_tokens: rows of logits that exist at once.

    Returns:
        Float32 scalar, in nats. Under autocast the products are in its dtype, else in hidden's.

    Raises:
        ValueError: shapes or dtypes do not fit, a size is out of its range, no GPU has the tensors.
    """
    num_rows, dim = weight.shape
    vocab_size = num_rows if vocab_size is None else vocab_size
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1] != dim:
        raise ValueError(
            "hidden must be (..., dim) for labels (...) and weight (num_rows, dim), got "
            f"{tuple(hidden.shape)}, {tuple(labels.shape)} and {tuple(weight.shape)}"
        )
    if not 1 <= vocab_size <= num_rows or chunk_tokens < 1:
        raise ValueError(
            f"vocab_size must be in [1, {num_rows}] and chunk_tokens at least 1, got {vocab_size} "
            f"and {chunk_tokens}"
        )
    check_device(hidden, weight, labels)
    device = hidden.device.type
    dtype = hidden.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    if dtype not in _DTYPES:
        raise ValueError(f"the products must be float16, bfloat16 or float32, got {dtype}")
    return _linear_cross_entropy(
        hidden.reshape(-1, dim), weight, labels.flatten(), vocab_size, ignore_index, chunk_tokens,
        dtype,
    )[0]  # fmt: skip


def _forward(
    rows: Tensor, weight: Tensor, labels: Tensor, vocab_size: int, ignore_index: int,
    chunk_tokens: int, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, its gradients with respect to rows and weight)."""
    # Every dtype is chosen here.
    with on_device(rows), torch.autocast(rows.device.type, enabled=False):
        num_tokens, num_columns = len(rows), len(weight)
        drows = rows.new_empty(rows.shape, dtype=dtype)
        dweight = torch.zeros_like(weight, dtype=torch.float32)
        losses = rows.new_empty(num_tokens, dtype=torch.float32)
        matrix, rows, labels = weight.to(dtype), rows.to(dtype), labels.contiguous()
        chunk_tokens = min(chunk_tokens, max(num_tokens, 1))
        buffer = rows.new_empty(chunk_tokens, num_columns)
        for start in range(0, num_tokens, chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            part = rows[chunk]
            logits = torch.mm(part, matrix.T, out=buffer[: len(part)])
            softmax_gradient_kernel[(len(part),)](
                logits, labels[chunk], losses[chunk], num_columns, vocab_size, num_columns,
                ignore_index, BLOCK=_BLOCK, VECTOR=_VECTOR,
                num_warps=_NUM_WARPS,
            )  # fmt: skip
            torch.mm(logits, matrix, out=drows[chunk])
            if dtype == torch.float32:
                dweight.addmm_(logits.T, part)
            else:  # float32 sums of low-precision products
                torch.addmm(dweight, logits.T, part, out_dtype=torch.float32, out=dweight)
        return losses.sum(), drows, dweight.to(weight.dtype)


for _key in ("CUDA", "CPU"):  # CPU: under Triton's interpreter
    LIBRARY.impl("linear_cross_entropy", _forward, _key)


@torch.library.register_fake("flash_kernels::linear_cross_entropy")
def _fake(
    rows: Tensor, weight: Tensor, labels: Tensor, vocab_size: int, ignore_index: int,
    chunk_tokens: int, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    loss = rows.new_empty((), dtype=torch.float32)
    return loss, rows.new_empty(rows.shape, dtype=dtype), torch.empty_like(weight)


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.rows_dtype = inputs[0].dtype
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, dloss: Tensor | None, *of_gradients: Tensor | None
) -> tuple[Tensor | None, ...]:
    if any(gradient is not None for gradient in of_gradients):
        refuse_second(ctx)
    if dloss is None:
        return (None,) * 7
    drows, dweight = ctx.saved_tensors
    return (drows * dloss).to(ctx.rows_dtype), dweight * dloss, *(None,) * 5


_linear_cross_entropy = with_gradients("linear_cross_entropy", _save_for_backward, _differentiate)
