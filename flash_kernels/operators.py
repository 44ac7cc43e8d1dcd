"""The custom operators flash_kernels::attention_forward and attention_backward: what torch's
machinery sees.

Registered with fake implementations (torch.compile without graph breaks) and autograd; flops.py
adds their FLOP formulas. Arguments are checked by the public functions in attention.py; these
operators trust them.
"""

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .block_lists import BlockLists
from .hopper.rule import choose_family
from .portable.attention_backward import attention_backward as portable_backward
from .portable.attention_forward import attention_forward as portable_forward
from .portable.checks import cu_seqlens_hold
from .portable.decode import attention_decode as portable_decode
from .portable.kernel_launch import Bounded
from .portable.launch import Problem, WalkedMask

_LIBRARY = torch.library.Library("flash_kernels", "DEF")
_PLAIN = (Tensor, torch.nn.Parameter)
# Problems without their tensors, by all that their launches depend on.
_problems = Bounded(512)

NO_BLOCKS = (*(None,) * 7, 0, 0)  # the operators' arguments without a block mask
_NUM_TENSORS = 15  # the leading arguments of attention_forward
# What both operators take after their tensors; None in a window is unbounded.
_OPTIONS = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? lengths_k, "
    "Tensor? alibi_slopes, Tensor? dropout_seed, "
    "Tensor? row_bounds, Tensor? row_indices, Tensor? row_patterns, Tensor? col_bounds, "
    "Tensor? col_indices, Tensor? col_patterns, Tensor? token_masks, SymInt block_m, "
    "SymInt block_n, SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, float softcap, "
    "SymInt? window_left, SymInt? window_right, float dropout_p, str? kernel, "
    "bool autotune"
)
_LIBRARY.define(f"attention_forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)")
_LIBRARY.define(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
    f"Tensor lse, {_OPTIONS}) -> (Tensor, Tensor, Tensor)"
)


_LIBRARY.define(
    "check_cu_seqlens(Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt total_q, SymInt total_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k) -> ()"
)
_LIBRARY.define(
    "attention_decode(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor cache_lengths, "
    "Tensor? k, Tensor? v, Tensor? alibi_slopes, float softmax_scale, float softcap, "
    "SymInt? window_left, SymInt? window_right, SymInt? num_splits) -> (Tensor, Tensor)"
)
_LIBRARY.define("check_cache_lengths(Tensor cache_lengths, SymInt longest) -> ()")


def metadata(q, k, v, cu_seqlens_q, cu_seqlens_k, *tensors) -> tuple:
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
    q, k, v, cu_seqlens_q, cu_seqlens_k, lengths_k, alibi_slopes, dropout_seed, row_bounds,
    row_indices, row_patterns, col_bounds, col_indices, col_patterns, token_masks, block_m, block_n,
    max_seqlen_q, max_seqlen_k, softmax_scale, softcap, window_left, window_right, dropout_p,
    autotune,
) -> Problem:  # fmt: skip
    blocks = None
    if row_bounds is not None:
        rows = BlockLists(row_bounds, row_indices, row_patterns)
        cols = BlockLists(col_bounds, col_indices, col_patterns)
        blocks = WalkedMask(rows, cols, token_masks, block_m, block_n)
    index_tensors = (cu_seqlens_q, cu_seqlens_k, lengths_k, alibi_slopes, dropout_seed)
    key = (
        metadata(
            q, k, v, *index_tensors, row_bounds, row_indices, row_patterns, col_bounds,
            col_indices, col_patterns, token_masks,
        ),
        block_m, block_n, max_seqlen_q, max_seqlen_k, softmax_scale, softcap, window_left,
        window_right, dropout_p, autotune,
    )  # fmt: skip
    known = _problems.get(key)
    if known is not None:
        return known.with_tensors(q, k, v, *index_tensors, blocks)
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
        autotune=autotune,
    )
    _problems.keep(key, problem.with_tensors(None, None, None))
    return problem


def _family(problem: Problem, kernel: str | None, direction: str) -> str:
    key = (kernel, direction, torch.are_deterministic_algorithms_enabled())
    if key not in problem.families:
        problem.families[key] = choose_family(problem, kernel, direction)
    return problem.families[key]


def known_problem(*inputs) -> Problem:
    """What attend takes as `known`, for all calls whose inputs differ in nothing but the contents
    and addresses of tensors."""
    *inputs, _, autotune = inputs
    return _problem(*inputs, autotune).with_tensors(None, None, None)


def forward(q, k, v, *options) -> tuple[Tensor, Tensor]:
    *options, kernel, autotune = options
    return _forward(_problem(q, k, v, *options, autotune), kernel)


def _forward(problem: Problem, kernel: str | None) -> tuple[Tensor, Tensor]:
    if _family(problem, kernel, "forward") == "portable":
        return portable_forward(problem)
    # Only here: Gluon is not there on every machine.
    from .hopper.launch import attention_forward as hopper_forward

    return hopper_forward(problem)


def backward(dout, dlse, q, k, v, out, lse, *options) -> tuple[Tensor, Tensor, Tensor]:
    *options, kernel, autotune = options
    if dout.dtype != q.dtype:  # launches are kept by the dtype of q
        raise ValueError(f"dout must be {q.dtype} like q, got {dout.dtype}")
    problem = _problem(q, k, v, *options, autotune)
    if _family(problem, kernel, "backward") == "portable":
        return portable_backward(problem, dout, dlse, out, lse)
    from .hopper.launch import attention_backward as hopper_backward

    return hopper_backward(problem, dout, dlse, out, lse)


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
    q, k_cache, v_cache, cache_lengths, k, v, alibi_slopes, softmax_scale, softcap, window_left,
    window_right, num_splits,
):  # fmt: skip
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


def _check_cu_seqlens(cu_seqlens_q, cu_seqlens_k, total_q, total_k, max_seqlen_q, max_seqlen_k):
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


def check_cu_seqlens(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *numbers: int) -> None:
    """flash_kernels::check_cu_seqlens."""
    if is_eager(cu_seqlens_q, cu_seqlens_q, cu_seqlens_k):
        _check_cu_seqlens(cu_seqlens_q, cu_seqlens_k, *numbers)
    else:
        torch.ops.flash_kernels.check_cu_seqlens(cu_seqlens_q, cu_seqlens_k, *numbers)


def _check_cache_lengths(cache_lengths, longest):
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
    _LIBRARY.impl("attention_forward", forward, _key)
    _LIBRARY.impl("attention_backward", backward, _key)
    _LIBRARY.impl("attention_decode", _decode, _key)
    _LIBRARY.impl("check_cache_lengths", _check_cache_lengths, _key)
    _LIBRARY.impl("check_cu_seqlens", _check_cu_seqlens, _key)


@torch.library.register_fake("flash_kernels::attention_forward")
def _forward_fake(q, k, v, cu_seqlens_q, *_):
    if cu_seqlens_q is not None:
        lse_shape = (q.shape[1], q.shape[0])
    else:
        lse_shape = (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty(q.shape), q.new_empty(lse_shape, dtype=torch.float32)


@torch.library.register_fake("flash_kernels::attention_backward")
def _backward_fake(dout, dlse, q, k, v, *_):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@torch.library.register_fake("flash_kernels::attention_decode")
def _decode_fake(q, *_):
    return q.new_empty(q.shape), q.new_empty(
        (q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32
    )


@torch.library.register_fake("flash_kernels::check_cache_lengths")
@torch.library.register_fake("flash_kernels::check_cu_seqlens")
def _check_fake(*_):
    return None


def _save_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:_NUM_TENSORS])
    ctx.options = inputs[_NUM_TENSORS:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dlse, operator=torch.ops.flash_kernels.attention_backward):
    q, k, v, out, lse, *index_tensors = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * (_NUM_TENSORS + len(ctx.options))
    if dout is None:
        dout = torch.zeros_like(out)
    gradients = operator(dout, dlse, q, k, v, out, lse, *index_tensors, *ctx.options)
    return (*gradients, *(None,) * (_NUM_TENSORS - 3 + len(ctx.options)))


torch.library.register_autograd(
    "flash_kernels::attention_forward",
    _differentiate,
    setup_context=_save_for_backward,
    lib=_LIBRARY,
)


class _FuncAttention(torch.autograd.Function):
    """The same for torch.func.grad, vjp and jacrev, which register_autograd does not serve."""

    @staticmethod
    def forward(*inputs):
        return torch.ops.flash_kernels.attention_forward(*inputs)

    setup_context = staticmethod(_save_for_backward)
    backward = staticmethod(_differentiate)

    @staticmethod
    def vmap(info, in_dims, *inputs):
        """Fold the mapped dimension into the batch: dense calls without dropout."""
        q, k, v, cu_seqlens_q, _, lengths_k, alibi_slopes, dropout_seed, row_bounds, *_ = inputs
        if any(t is not None for t in (cu_seqlens_q, dropout_seed, row_bounds)):
            raise NotImplementedError(
                "torch.func.vmap of attention serves dense calls without dropout, packed "
                "sequences and block masks: loop over them instead"
            )
        size = info.batch_size
        batch = q.shape[1 if in_dims[0] == 0 else 0]

        def fold(tensor, dim, per_batch=True):
            if tensor is None:
                return None
            tensor = (
                tensor[None].expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            )
            if not per_batch:
                tensor = tensor[:, None].expand(size, batch, *tensor.shape[1:])
            return tensor.flatten(0, 1)

        slopes_dims = 0 if alibi_slopes is None else alibi_slopes.dim() - (in_dims[6] is not None)
        folded = [
            *(fold(t, d) for t, d in zip((q, k, v), in_dims, strict=False)), None, None,
            fold(lengths_k, in_dims[5]), fold(alibi_slopes, in_dims[6], slopes_dims == 2),
        ]  # fmt: skip
        out, lse = _FuncAttention.apply(*folded, *inputs[7:])
        return (out.unflatten(0, (size, batch)), lse.unflatten(0, (size, batch))), (0, 0)


class _EagerAttention(torch.autograd.Function):
    """The same for plain tensors: without the dispatcher and without a separate setup_context,
    which together take as long as the launch."""

    @staticmethod
    def forward(ctx, q, k, v, others, known):
        if known is None:
            output = forward(q, k, v, *others)
        else:
            output = _forward(known.with_tensors(q, k, v, *others[:5]), others[-2])
        _save_for_backward(ctx, (q, k, v, *others), output)
        return output

    @staticmethod
    def backward(ctx, dout, dlse):
        if torch.is_grad_enabled():  # create_graph
            return _eager_backward_once(ctx, dout, dlse)
        return _eager_backward(ctx, dout, dlse)


def _eager_backward(ctx, dout, dlse):
    if is_in_torch_dispatch_mode():
        gradients = _differentiate(ctx, dout, dlse)
    else:
        gradients = _differentiate(ctx, dout, dlse, backward)
    return *gradients[:3], None, None


_eager_backward_once = once_differentiable(_eager_backward)
# Without what Function.apply does for the tensors that is_eager leaves out.
_apply = super(torch.autograd.Function, _EagerAttention).apply


def is_eager(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether nothing of torch's machinery but autograd looks at the call."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or is_in_torch_dispatch_mode()
        or type(q) not in _PLAIN
        or type(k) not in _PLAIN
        or type(v) not in _PLAIN
        # What a transform of torch.func left behind; it hides its storage.
        or is_functorch_wrapped_tensor(q)
        or is_functorch_wrapped_tensor(k)
        or is_functorch_wrapped_tensor(v)
    )


def attend(q, k, v, *others, known: Problem | None = None) -> tuple[Tensor, Tensor]:
    """flash_kernels::attention_forward, also below the transforms of torch.func.

    known: of an eager call, known_problem of an earlier one like it.
    """
    if known is not None:
        return _apply(q, k, v, others, known)
    if torch.compiler.is_compiling():
        return torch.ops.flash_kernels.attention_forward(q, k, v, *others)
    if torch._C._are_functorch_transforms_active():
        return _FuncAttention.apply(q, k, v, *others)
    if is_in_torch_dispatch_mode() or any(type(t) not in _PLAIN for t in (q, k, v)):
        return torch.ops.flash_kernels.attention_forward(q, k, v, *others)
    return _EagerAttention.apply(q, k, v, others, None)
