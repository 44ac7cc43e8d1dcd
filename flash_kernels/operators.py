"""The custom operators flash_kernels::attention_forward and attention_backward: what torch's
machinery sees.

Registered with fake implementations (torch.compile without graph breaks); autograd.py adds their
gradients, flops.py their FLOP formulas. Arguments are checked by the public functions in
attention.py; these operators trust them.
"""

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .block_lists import BlockLists
from .hopper.rule import choose_family
from .portable.attention_backward import attention_backward as portable_backward
from .portable.attention_forward import attention_forward as portable_forward
from .portable.checks import cu_seqlens_hold
from .portable.decode import attention_decode as portable_decode
from .portable.kernel_launch import Bounded
from .portable.launch import Positions, Problem, WalkedMask

LIBRARY = torch.library.Library("flash_kernels", "DEF")
PLAIN = (Tensor, torch.nn.Parameter)
Gradients = tuple[Tensor, Tensor, Tensor]
# Problems without their tensors, by all that their launches depend on.
_problems = Bounded(512)

NO_BLOCKS = (*(None,) * 7, 0, 0)  # the operators' arguments without a block mask
NUM_TENSORS = 15  # the leading arguments of attention_forward
# What the operators take after their first tensors; None in a window is unbounded.
OPTIONS = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? lengths_k, "
    "Tensor? alibi_slopes, Tensor? dropout_seed, "
    "Tensor? row_bounds, Tensor? row_indices, Tensor? row_patterns, Tensor? col_bounds, "
    "Tensor? col_indices, Tensor? col_patterns, Tensor? token_masks, SymInt block_m, "
    "SymInt block_n, SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, float softcap, "
    "SymInt? window_left, SymInt? window_right, float dropout_p, str? kernel, "
    "bool autotune"
)
LIBRARY.define(f"attention_forward(Tensor q, Tensor k, Tensor v, {OPTIONS}) -> (Tensor, Tensor)")
LIBRARY.define(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
    f"Tensor lse, {OPTIONS}) -> (Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "check_cu_seqlens(Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt total_q, SymInt total_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k) -> ()"
)
LIBRARY.define(
    "attention_decode(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor cache_lengths, "
    "Tensor? k, Tensor? v, Tensor? alibi_slopes, float softmax_scale, float softcap, "
    "SymInt? window_left, SymInt? window_right, SymInt? num_splits) -> (Tensor, Tensor)"
)
LIBRARY.define("check_cache_lengths(Tensor cache_lengths, SymInt longest) -> ()")


def is_eager(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether nothing of torch's machinery but autograd looks at the call."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or is_in_torch_dispatch_mode()
        or type(q) not in PLAIN
        or type(k) not in PLAIN
        or type(v) not in PLAIN
        # What a transform of torch.func left behind; it hides its storage.
        or is_functorch_wrapped_tensor(q)
        or is_functorch_wrapped_tensor(k)
        or is_functorch_wrapped_tensor(v)
    )


def metadata(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    *tensors: Tensor | None,
) -> tuple:  # fmt: skip
    """All that checks and launches read of tensors, but for their contents."""
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16,
        cu_seqlens_q is cu_seqlens_k,
        *[
            t if t is None else (t.shape, t.stride(), t.dtype, t.device)
            for t in (cu_seqlens_q, cu_seqlens_k, *tensors)
        ],
    )  # fmt: skip


def _problem(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    lengths_k: Tensor | None, alibi_slopes: Tensor | None, dropout_seed: Tensor | None,
    row_bounds: Tensor | None, row_indices: Tensor, row_patterns: Tensor, col_bounds: Tensor,
    col_indices: Tensor, col_patterns: Tensor, token_masks: Tensor, block_m: int, block_n: int,
    max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, softcap: float,
    window_left: int | None, window_right: int | None, dropout_p: float, *, autotune: bool,
    positions: Positions = None,
) -> Problem:  # fmt: skip
    """row_bounds and the six behind it are None together: no block mask."""
    blocks = None
    if row_bounds is not None:
        rows = BlockLists(row_bounds, row_indices, row_patterns)
        cols = BlockLists(col_bounds, col_indices, col_patterns)
        blocks = WalkedMask(rows, cols, token_masks, block_m, block_n)
    index_tensors = (cu_seqlens_q, cu_seqlens_k, lengths_k, alibi_slopes, dropout_seed)
    key = (
        metadata(
            q, k, v, *index_tensors, row_bounds, row_indices, row_patterns, col_bounds,
            col_indices, col_patterns, token_masks, *(positions or ()),
        ),
        block_m, block_n, max_seqlen_q, max_seqlen_k, softmax_scale, softcap, window_left,
        window_right, dropout_p, autotune,
    )  # fmt: skip
    known = _problems.get(key)
    if known is not None:
        return known.with_tensors(q, k, v, *index_tensors, blocks, positions)
    problem = Problem(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        lengths_k=lengths_k,
        alibi_slopes=alibi_slopes,
        dropout_seed=dropout_seed,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        softcap=softcap,
        window_left=window_left,
        window_right=window_right,
        dropout_p=dropout_p,
        blocks=blocks,
        positions=positions,
        autotune=autotune,
    )
    _problems.keep(key, problem.with_tensors(None, None, None))
    return problem


def _family(problem: Problem, kernel: str | None, direction: str) -> str:
    key = (kernel, direction, torch.are_deterministic_algorithms_enabled())
    if key not in problem.families:
        problem.families[key] = choose_family(problem, kernel, direction)
    return problem.families[key]


def known_problem(*inputs: Any) -> Problem:
    """What attend_checked takes as `known`, for all calls whose inputs differ in nothing but the
    contents and addresses of tensors."""
    *before, _, autotune = inputs
    return _problem(*before, autotune=autotune).with_tensors(None, None, None)


def forward(
    q: Tensor, k: Tensor, v: Tensor, *options: Any, positions: Positions = None
) -> tuple[Tensor, Tensor]:
    *before, kernel, autotune = options
    problem = _problem(q, k, v, *before, autotune=autotune, positions=positions)
    return forward_of(problem, kernel)


def forward_of(problem: Problem, kernel: str | None) -> tuple[Tensor, Tensor]:
    if _family(problem, kernel, "forward") == "portable":
        return portable_forward(problem)
    # Only here: Gluon is not there on every machine.
    from .hopper.launch import attention_forward as hopper_forward

    return hopper_forward(problem)


def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    *options: Any, positions: Positions = None, into: Gradients | None = None,
) -> Gradients:  # fmt: skip
    """into: what dq, dk and dv are written to; None makes them."""
    *before, kernel, autotune = options
    if dout.dtype != q.dtype:  # launches are kept by the dtype of q
        raise ValueError(f"dout must be {q.dtype} like q, got {dout.dtype}")
    problem = _problem(q, k, v, *before, autotune=autotune, positions=positions)
    if _family(problem, kernel, "backward") == "portable":
        return portable_backward(problem, dout, dlse, out, lse, into=into)
    from .hopper.launch import attention_backward as hopper_backward

    return hopper_backward(problem, dout, dlse, out, lse, into=into)


def dense_options(
    seqlen_q: int, seqlen_k: int, seed: Tensor | None, softmax_scale: float,
    window_right: int | None, dropout_p: float, kernel: str | None, blocks: tuple = NO_BLOCKS,
) -> tuple:  # fmt: skip
    """What forward and backward take after their tensors in a dense call."""
    return (
        None, None, None, None, seed, *blocks, seqlen_q, seqlen_k, softmax_scale, 0.0, None,
        window_right, dropout_p, kernel, False,
    )  # fmt: skip


def packed_options(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    seed: Tensor | None, softmax_scale: float, window_right: int | None, dropout_p: float,
    kernel: str | None,
) -> tuple:  # fmt: skip
    """The same in a packed call."""
    return (
        cu_seqlens_q, cu_seqlens_k, None, None, seed, *NO_BLOCKS, max_seqlen_q, max_seqlen_k,
        softmax_scale, 0.0, None, window_right, dropout_p, kernel, False,
    )  # fmt: skip


def _decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_lengths: Tensor, k: Tensor | None,
    v: Tensor | None, alibi_slopes: Tensor | None, softmax_scale: float, softcap: float,
    window_left: int | None, window_right: int | None, num_splits: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return portable_decode(
        q,
        k_cache,
        v_cache,
        cache_lengths,
        k,
        v,
        alibi_slopes,
        softmax_scale=softmax_scale,
        softcap=softcap,
        window_left=window_left,
        window_right=window_right,
        num_splits=num_splits,
    )


def _check_cu_seqlens(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, total_q: int, total_k: int, max_seqlen_q: int,
    max_seqlen_k: int,
) -> None:  # fmt: skip
    """Assert what is documented of cu_seqlens: at once on the CPU, on the device elsewhere."""
    holds = cu_seqlens_hold(
        cu_seqlens_q, cu_seqlens_k, total_q, total_k, max_seqlen_q, max_seqlen_k
    )
    message = (
        "cu_seqlens_q and cu_seqlens_k must start at 0, never fall, end at total_q = "
        f"{total_q} and total_k = {total_k}, and no sequence may be longer than max_seqlen_q = "
        f"{max_seqlen_q} or max_seqlen_k = {max_seqlen_k}"
    )
    _assert(holds, message, cu_seqlens_q, cu_seqlens_k)


def check_cu_seqlens(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *numbers: Any) -> None:
    """flash_kernels::check_cu_seqlens."""
    if is_eager(cu_seqlens_q, cu_seqlens_q, cu_seqlens_k):
        _check_cu_seqlens(cu_seqlens_q, cu_seqlens_k, *numbers)
    else:
        torch.ops.flash_kernels.check_cu_seqlens(cu_seqlens_q, cu_seqlens_k, *numbers)


def _check_cache_lengths(cache_lengths: Tensor, longest: int) -> None:
    if cache_lengths.numel() > 0:
        holds = (cache_lengths.amin() >= 0) & (cache_lengths.amax() <= longest)
        message = f"cache_lengths must be between 0 and capacity - seqlen_new = {longest}"
        _assert(holds, message, cache_lengths)


def _assert(holds: Tensor, message: str, *values: Tensor) -> None:
    if holds.device.type != "cpu":
        torch._assert_async(holds, message)
    elif not holds:
        got = " and ".join(str(v.tolist()) for v in values)
        raise ValueError(f"{message}, got {got}")


# CPU tensors reach the kernels only under Triton's interpreter; attention.py refuses them
# otherwise.
for _key in ("CUDA", "CPU"):
    LIBRARY.impl("attention_forward", forward, _key)
    LIBRARY.impl("attention_backward", backward, _key)
    LIBRARY.impl("attention_decode", _decode, _key)
    LIBRARY.impl("check_cache_lengths", _check_cache_lengths, _key)
    LIBRARY.impl("check_cu_seqlens", _check_cu_seqlens, _key)


@torch.library.register_fake("flash_kernels::attention_forward")
def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor]:
    if cu_seqlens_q is not None:
        lse_shape: tuple[int, ...] = (q.shape[1], q.shape[0])
    else:
        lse_shape = (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty(q.shape), q.new_empty(lse_shape, dtype=torch.float32)


@torch.library.register_fake("flash_kernels::attention_backward")
def _backward_fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@torch.library.register_fake("flash_kernels::attention_decode")
def _decode_fake(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(
        (q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32
    )


@torch.library.register_fake("flash_kernels::check_cache_lengths")
@torch.library.register_fake("flash_kernels::check_cu_seqlens")
def _check_fake(*_: Any) -> None:
    return None
