"""Which kernel family serves a call: the rule, in one place.

    kernel="portable"  the Triton kernels of portable/, which serve every call on every GPU.
    kernel="hopper"    the Gluon kernels of this folder; NotImplementedError, with the reason, where
                       they do not serve the call.
    kernel=None        hopper where it serves the call and was measured to be the faster one
                       (is_faster), else portable.

Hopper serves, on a GPU of compute capability 9.0 with a release of Triton in portable/versions.py:
float16 and bfloat16; headdim a multiple of 8 up to 128; dense batches, padded keys and packed
sequences; causal and other windows whose first key some query sees; dropout; grouped heads; block
masks of blocks of 128 or 256. q, k and v must be such that TMA can read them: 16-byte aligned, with
strides that are multiples of 16 bytes, and with padded keys one sequence behind the other. Softcap
and ALiBi are portable. Forward and backward decide each by itself: both families share one
contract. The backward of hopper adds up dq in any order, so that its last bits vary:
deterministic=True and torch.use_deterministic_algorithms take the portable one, or refuse
kernel="hopper".
"""

import functools
import warnings

import torch
import triton
from torch import Tensor

from ..portable.launch import Problem
from ..portable.versions import is_served

MAX_HEADDIM = 128


def choose_family(problem: Problem, kernel: str | None, direction: str) -> str:
    """The family of a call, "portable" or "hopper"; attention.py checked the argument `kernel`.

    direction: "forward" or "backward".

    Raises:
        NotImplementedError: kernel="hopper", which does not serve the call; says why.
    """
    if kernel == "portable":
        return "portable"
    if direction == "backward" and torch.are_deterministic_algorithms_enabled():
        if kernel is None:
            return "portable"
        raise NotImplementedError(
            'kernel="hopper" has no deterministic backward, which '
            'torch.use_deterministic_algorithms asks for: pass kernel="portable" or None'
        )
    if kernel is None and not is_faster(problem, direction):
        return "portable"
    reason = reason_not_served(problem)
    if reason is None:
        return "hopper"
    if kernel is None:
        return "portable"
    raise NotImplementedError(
        f'kernel="hopper" {reason}: pass kernel="portable" or None to take the portable kernels'
    )


def is_faster(problem: Problem, direction: str) -> bool:
    """Whether hopper is the faster family on an H200; `python -m scripts.benchmark_attention`
    measures both.

    At headdim 128 and with block masks it is, but for one case. At 64 (40 to 64 are padded to it)
    short rows go to the portable kernels, whose blocks are smaller, and so does the forward with
    dropout. Sequences of different lengths count as short for longer, and so do few heads.
    """
    p = problem
    if p.headdim <= 32:
        return False  # hopper would compute 64 columns
    if p.mask is not None:
        return True
    is_uneven = p.is_varlen or p.lengths_k is not None
    is_forward = direction == "forward"
    row_length = p.seqlen_k
    if p.has_left:
        row_length = min(row_length, p.window[0] + (p.window[1] if p.has_right else p.seqlen_k))
    if p.headdim > 64:
        return not (is_forward and is_uneven and p.dropout_p > 0.0) or row_length >= 1024
    if not is_forward:
        return row_length >= (1024 if p.has_right or is_uneven else 512)
    if p.dropout_p > 0.0:
        return False
    if is_uneven:
        return row_length >= (8192 if p.has_right else 2048)
    if p.has_left:
        return row_length >= 1024
    if p.has_right:
        return row_length >= (1024 if p.batch * p.nheads >= 256 else 2048)
    return row_length >= 512


def reason_not_served(problem: Problem) -> str | None:
    """None if the Hopper kernels serve the call, else what they lack."""
    p = problem
    if not _is_hopper(p.q.device):
        return f"needs a GPU of compute capability 9.0, got a tensor on {p.q.device}"
    if not _has_gluon():
        return f"does not know Triton {triton.__version__}, only 3.6 to 3.9"
    if p.q.dtype not in (torch.float16, torch.bfloat16):
        return f"serves float16 and bfloat16, got {p.q.dtype}"
    if p.headdim % 8 != 0 or p.headdim > MAX_HEADDIM:
        return f"serves head dims that are multiples of 8 up to {MAX_HEADDIM}, got {p.headdim}"
    if p.has_left and not _sees_the_first_key(p):
        return "serves windows only if some query sees the first key"
    if p.mask is not None:
        if p.mask.block_m % 128 or p.mask.block_n % 128:
            return (
                "serves block masks of 128 or 256 rows and columns, "
                f"got {p.mask.block_m} x {p.mask.block_n}"
            )
        if p.mask.rows.indices.shape[0] == 0:
            return "needs at least one block in a block mask"
    if p.softcap > 0.0 or p.alibi_slopes is not None:
        return "does not serve softcap or alibi_slopes"
    if not p.softmax_scale > 0.0:
        return f"needs a positive softmax_scale, got {p.softmax_scale}"
    if p.k.numel() == 0:
        return "needs at least one key"
    for name, tensor in (("q", p.q), ("k", p.k), ("v", p.v)):
        if not is_readable_by_tma(tensor):
            return (
                f"needs {name} 16-byte aligned with strides that are multiples of 16 bytes, "
                f"got strides {tuple(tensor.stride())} of {tensor.dtype}"
            )
        if p.lengths_k is not None and not is_packable(tensor, p.is_varlen):
            return (
                f"needs sequences of {name} that follow each other where keys are padded, "
                f"got strides {tuple(tensor.stride())} of shape {tuple(tensor.shape)}"
            )
    return None


def _sees_the_first_key(problem: Problem) -> bool:
    """Whether every key is inside the window of some query. Others, whatever they hold, would reach
    the gradients through the tile that they share with a key that is."""
    p = problem
    if p.is_varlen:
        return p.cu_seqlens_q is p.cu_seqlens_k or p.seqlen_q == p.seqlen_k == 1
    return p.seqlen_k - p.seqlen_q <= p.window[0]


def is_packable(tensor: Tensor, is_varlen: bool) -> bool:
    """Whether the rows of all sequences are evenly spaced: (batch, seqlen, ...) as packed rows."""
    return (
        is_varlen or tensor.shape[0] == 1 or tensor.stride(0) == tensor.shape[1] * tensor.stride(1)
    )


def is_readable_by_tma(tensor: Tensor) -> bool:
    """Whether a TMA descriptor can address the tensor; stride(-1) is 1 already.

    Expanded dimensions (stride 0) count as not readable.
    """
    step = 16 // tensor.element_size()
    return tensor.data_ptr() % 16 == 0 and all(
        size == 1 or (stride > 0 and stride % step == 0)
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    )


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def _has_gluon() -> bool:
    """Whether Gluon is of a release that the kernels know; warns once if not."""
    if is_served(triton.__version__):
        return True
    warnings.warn(
        f"flash_kernels: the Hopper kernels know Triton 3.6 to 3.9, got {triton.__version__}: "
        "the portable kernels serve every call",
        stacklevel=2,
    )
    return False
