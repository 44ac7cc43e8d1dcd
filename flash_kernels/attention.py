"""Public attention functions: documentation and checks.

Which kernel family serves a call is the rule of hopper/rule.py, which `kernel` overrides.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from .autograd import attend_checked
from .block_mask import BlockMask
from .operators import NO_BLOCKS, check_cu_seqlens, is_eager, known_problem, metadata
from .portable.attention_forward import attention_forward_kernel
from .portable.kernel_launch import Bounded

MAX_HEADDIM = 256
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Triton decides at decoration whether a kernel is compiled or interpreted.
_IS_INTERPRETED = not isinstance(attention_forward_kernel, triton.JITFunction)

# Eager calls that were checked: what attend_checked takes as `known`.
_known = Bounded(512)

# With return_lse the pair (out, lse); typed so that whoever leaves it alone has a tensor.
Output = Tensor | Any
Window = tuple[int | None, int | None]
Seed = int | Tensor | torch.Generator | None


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    lengths_k: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Seed = None,
    deterministic: bool = False,
    return_lse: bool = False,
    kernel: str | None = None,
    autotune: bool = False,
) -> Output:
    """Exact softmax attention without storing the score matrix (arXiv 2205.14135).

    Args:
        q: (batch, seqlen_q, nheads, headdim), fp16, bf16 or fp32, on a GPU. Any strides with
            stride(-1) == 1, so views of a fused QKV projection need no copy. headdim is at most
            256, padded inside to a power of two. fp32 multiplies in IEEE precision on the FMA
            units, far slower than bf16.
        k, v: (batch, seqlen_k, nheads_k, headdim), dtype and device of q; nheads must be a multiple
            of nheads_k, and query head h reads key head h // (nheads // nheads_k).
        causal: hide later keys; the last query sees the last key. Kept at seqlen_q=2, seqlen_k=4:
            1 1 1 0
            1 1 1 1
        window: (left, right) keys that a query sees beside its own, inclusive; None is unbounded.
            Aligned like causal, which is right = 0.
        softmax_scale: factor on q @ k.T; default headdim ** -0.5.
        softcap: scores become softcap * tanh(scores / softcap); 0 is off.
        alibi_slopes: float32 (nheads,) or (batch, nheads): subtracts slope * |i + seqlen_k -
            seqlen_q - j| from the score of query i and key j. No gradient.
        lengths_k: integers (batch,): keys from lengths_k[b] on are padding, seen by no query. The
            alignment of causal and window still goes by seqlen_k.
        dropout_p: probability of dropping an attention probability; the kept ones are scaled by 1 /
            (1 - dropout_p).
        dropout_seed: int, int64 tensor of one element on q's device, or torch.Generator. None draws
            one from torch's default generator, without a host synchronisation. The mask is a
            function of (seed, batch, head, row, column); reference.dropout_keep_mask gives it.
            Unused when dropout_p is 0.
        deterministic: results that repeat bit for bit, which the portable kernels always give. The
            Hopper backward adds up dq in any order, so that True takes the portable kernels.
        return_lse: also return the log-sum-exp, which is differentiable.
        kernel: None lets the rule of hopper/rule.py choose; "portable" takes the Triton kernels,
            which serve every call; "hopper" the ones for sm_90 GPUs.
        autotune: search the tile sizes of the portable kernels on this GPU, instead of taking them
            from the table in portable/tile_choice.py: about a minute at the first call with a new
            combination of options, head dim and dtype, forward and backward each.

    Returns:
        out (batch, seqlen_q, nheads, headdim), dtype of q, contiguous; a query that sees no key
        gets zeros. With return_lse also the log-sum-exp of the scaled scores, natural, float32,
        (batch, nheads, seqlen_q), -inf where nothing is seen. Under autocast q, k and v are cast
        first.

    Raises:
        ValueError: shapes, dtypes, devices or options disagree.
        NotImplementedError: no GPU, or kernel="hopper" for a call that it does not serve.
    """
    q, k, v = autocast(q, k, v)
    out, lse = attend(
        q, k, v, None, None, None, None, causal, window, softmax_scale, softcap, alibi_slopes,
        lengths_k, dropout_p, dropout_seed, deterministic, kernel, autotune,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    window: Window = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    lengths_k: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Seed = None,
    deterministic: bool = False,
    return_lse: bool = False,
    kernel: str | None = None,
    autotune: bool = False,
) -> Output:
    """flash_attention over sequences of different lengths, packed one after the other.

    Args:
        q: (total_q, nheads, headdim). k, v: (total_k, nheads_k, headdim).
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), contiguous, on q's device: sequence b has
            rows cu_seqlens[b] ... cu_seqlens[b + 1] - 1. They start at 0, never fall (empty
            sequences are fine; repeat the last value to pad the list) and end at total_q, total_k.
        max_seqlen_q, max_seqlen_k: at least the longest sequence; the grid is sized by them.
        The rest as in flash_attention, within each sequence.

    Returns:
        out (total_q, nheads, headdim); with return_lse also (nheads, total_q) float32.

    Raises:
        As flash_attention. Wrong values in cu_seqlens, or a sequence longer than max_seqlen, raise
        ValueError in the interpreter; on a GPU they stop the kernels by an assertion on the device,
        because reading them would wait.
    """
    q, k, v = autocast(q, k, v)
    out, lse = attend(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window,
        softmax_scale, softcap, alibi_slopes, lengths_k, dropout_p, dropout_seed, deterministic,
        kernel, autotune,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def check_kernel(kernel: str | None, deterministic: bool) -> str | None:
    """The argument `kernel` as the rule takes it: deterministic=True means the portable kernels."""
    if kernel not in (None, "portable", "hopper"):
        raise ValueError(f'kernel must be None, "portable" or "hopper", got {kernel!r}')
    if not deterministic:
        return kernel
    if kernel == "hopper":
        raise NotImplementedError(
            'kernel="hopper" has no deterministic backward: pass kernel="portable" or None'
        )
    return "portable"


def attend(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None, max_seqlen_k: int | None, causal: bool, window: Window,
    softmax_scale: float | None, softcap: float, alibi_slopes: Tensor | None,
    lengths_k: Tensor | None, dropout_p: float, dropout_seed: Seed, deterministic: bool,
    kernel: str | None, autotune: bool, block_mask: BlockMask | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Check the arguments, except block_mask, complete them and call the operator."""
    inputs, known = complete(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window,
        softmax_scale, softcap, alibi_slopes, lengths_k, dropout_p, dropout_seed, deterministic,
        kernel, autotune, block_mask,
    )  # fmt: skip
    return attend_checked(*inputs, known=known)


def complete(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None, max_seqlen_k: int | None, causal: bool, window: Window,
    softmax_scale: float | None, softcap: float, alibi_slopes: Tensor | None,
    lengths_k: Tensor | None, dropout_p: float, dropout_seed: Seed, deterministic: bool,
    kernel: str | None, autotune: bool, block_mask: BlockMask | None = None,
) -> tuple[tuple, Any]:  # fmt: skip
    """The operator's arguments, checked, and what attend_checked takes as `known`.

    Eager calls that differ in nothing but the contents and addresses of tensors are checked once:
    the checks take longer than a launch.
    """
    left, right = window
    key = known = None
    if block_mask is None and is_eager(q, k, v):
        key = (
            metadata(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, lengths_k),
            max_seqlen_q, max_seqlen_k, causal, left, right, softmax_scale, softcap, dropout_p,
            deterministic, kernel, autotune,
        )  # fmt: skip
        known = _known.get(key)
    if known is None:
        batch = check_inputs(q, k, v, cu_seqlens_q, cu_seqlens_k)
        check_options(dropout_p, softcap, window)
        if alibi_slopes is not None:
            check_slopes(alibi_slopes, q, batch)
        if lengths_k is not None:
            _check_lengths(lengths_k, q, batch)
    kernel = check_kernel(kernel, deterministic)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        max_seqlen_q, max_seqlen_k = q.shape[1], k.shape[1]
    else:
        check_cu_seqlens(
            cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0], max_seqlen_q, max_seqlen_k
        )
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.detach().contiguous()
    if lengths_k is not None:
        lengths_k = lengths_k.contiguous()
    seed = seed_tensor(dropout_seed, q.device) if dropout_p > 0.0 else None
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    blocks = NO_BLOCKS if block_mask is None else _block_arguments(block_mask)
    inputs = (
        q, k, v, cu_seqlens_q, cu_seqlens_k, lengths_k, alibi_slopes, seed, *blocks, max_seqlen_q,
        max_seqlen_k, softmax_scale, softcap, left, 0 if causal else right, dropout_p, kernel,
        autotune,
    )  # fmt: skip
    if key is not None and known is None:
        known = _known.keep(key, known_problem(*inputs))
    return inputs, known


def _block_arguments(block_mask: BlockMask) -> tuple:
    """The operators' arguments for a block mask: lists by row and by column, token masks, sizes."""
    m = block_mask
    return (*m.rows, *m.cols, m.token_masks, m.block_m, m.block_n)


def check_options(dropout_p: float, softcap: float, window: Window) -> None:
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be between 0 and 1, got {dropout_p}")
    if not 0.0 <= softcap < float("inf"):
        raise ValueError(f"softcap must be finite and not negative, 0 is off, got {softcap}")
    left, right = window
    if (left is not None and left < 0) or (right is not None and right < 0):
        raise ValueError(
            f"window must hold two numbers of keys, None for unbounded, got {window}: "
            "pass None instead of -1"
        )


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    device_type = "cuda" if q.is_cuda else q.device.type  # which takes longer
    if not torch.is_autocast_enabled(device_type):
        return q, k, v
    dtype = torch.get_autocast_dtype(device_type)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def check_qkv(q: Tensor, k: Tensor, v: Tensor, dim: int, layout: str) -> None:
    if q.dim() != dim or k.dim() != dim or v.dim() != dim:
        shapes = [tuple(t.shape) for t in (q, k, v)]
        raise ValueError(f"q, k and v must be {layout}, got shapes {shapes}")
    if k.shape != v.shape:
        raise ValueError(
            f"k and v must have the same shape, got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    nheads, headdim = q.shape[-2], q.shape[-1]
    if k.shape[-1] != headdim:
        raise ValueError(f"q and k must have the same headdim, got {headdim} and {k.shape[-1]}")
    if not 1 <= headdim <= MAX_HEADDIM:
        raise ValueError(f"headdim must be at least 1 and at most {MAX_HEADDIM}, got {headdim}")
    if k.shape[-2] == 0 or nheads % k.shape[-2] != 0:
        raise ValueError(
            f"nheads of q must be a multiple of nheads of k, got {nheads} and {k.shape[-2]}"
        )
    if q.dtype not in _DTYPES:
        raise ValueError(f"q must be float16, bfloat16 or float32, got {q.dtype}: cast it")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"q, k and v must have the same dtype, got {q.dtype}, {k.dtype} and {v.dtype}"
        )
    if k.device != q.device or v.device != q.device:
        raise ValueError(
            f"q, k and v must be on the same device, got {q.device}, {k.device} and {v.device}"
        )
    if q.device.type == "cpu" and not _IS_INTERPRETED:
        raise NotImplementedError(
            "flash attention needs tensors on a GPU, got cpu: move them there, or choose the "
            "sdpa attention (attention=sdpa, torch.nn.functional.scaled_dot_product_attention)"
        )
    if _IS_INTERPRETED and q.dtype == torch.bfloat16:
        raise NotImplementedError(
            "Triton's interpreter multiplies bfloat16 wrongly: use float16 or float32 "
            "with TRITON_INTERPRET=1"
        )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
            raise ValueError(
                f"{name} must have stride 1 in its last dimension, got strides "
                f"{tuple(tensor.stride())}: call .contiguous()"
            )


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> int:
    """The batch size, once everything but the values of cu_seqlens is checked."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        check_qkv(q, k, v, 4, "(batch, seqlen, nheads, headdim)")
        batch = q.shape[0]
        if k.shape[0] != batch:
            raise ValueError(f"q and k must have the same batch size, got {batch} and {k.shape[0]}")
        return batch
    check_qkv(q, k, v, 3, "(total, nheads, headdim)")
    check_packed_layout("cu_seqlens_q", cu_seqlens_q, q.device)
    check_packed_layout("cu_seqlens_k", cu_seqlens_k, q.device)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must have the same length, "
            f"got {cu_seqlens_q.shape[0]} and {cu_seqlens_k.shape[0]}"
        )
    return cu_seqlens_q.shape[0] - 1


def check_packed_layout(name: str, cu_seqlens: Tensor, device: torch.device) -> None:
    """Raise ValueError unless a list of starts can be one, whatever its values."""
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype != torch.int32:
        raise ValueError(
            f"{name} must be int32 of shape (batch + 1,) with batch >= 1, "
            f"got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        )
    if cu_seqlens.device != device:
        raise ValueError(f"{name} must be on {device} like q, got {cu_seqlens.device}")
    if not cu_seqlens.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got stride {cu_seqlens.stride(0)}")


def check_slopes(slopes: Tensor, q: Tensor, batch: int) -> None:
    nheads = q.shape[-2]
    if slopes.dtype != torch.float32 or slopes.shape not in ((nheads,), (batch, nheads)):
        raise ValueError(
            f"alibi_slopes must be float32 of shape ({nheads},) or ({batch}, {nheads}), "
            f"got {slopes.dtype} {tuple(slopes.shape)}"
        )
    if slopes.device != q.device:
        raise ValueError(f"alibi_slopes must be on {q.device} like q, got {slopes.device}")


def _check_lengths(lengths: Tensor, q: Tensor, batch: int) -> None:
    if lengths.dtype not in (torch.int32, torch.int64) or lengths.shape != (batch,):
        raise ValueError(
            f"lengths_k must be int32 or int64 of shape ({batch},), "
            f"got {lengths.dtype} {tuple(lengths.shape)}"
        )
    if lengths.device != q.device:
        raise ValueError(f"lengths_k must be on {q.device} like q, got {lengths.device}")


def seed_tensor(seed: Seed, device: torch.device) -> Tensor:
    """int64 (1,) on the device, made without a host synchronisation."""
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != device:
            raise ValueError(
                f"dropout_seed must be an int64 tensor of one element on {device}, "
                f"got {seed.dtype} {tuple(seed.shape)} on {seed.device}"
            )
        return seed.reshape(1)
    if seed is None or isinstance(seed, torch.Generator):
        return torch.randint(
            -(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device, generator=seed
        )
    if not 0 <= seed < 2**63:
        raise ValueError(f"dropout_seed must be between 0 and 2**63 - 1, got {seed}")
    return torch.full((1,), seed, dtype=torch.int64, device=device)
