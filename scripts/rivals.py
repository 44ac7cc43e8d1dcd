"""The attentions that scripts.reproduce measures side by side for the paper's tables: what each is,
what it cannot do, and as many at once as the GPU's memory holds."""

import functools
import importlib.util
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask
from torch.nn.functional import dropout, scaled_dot_product_attention

from flash_kernels import BlockMask, block_sparse_attention, flash_attention
from scripts.approximate_attention import (
    linformer_attention,
    local_attention,
    orthogonal_features,
    performer_attention,
    visible_keys,
)
from scripts.attention_tables import RIVAL_NAMES
from scripts.timing import Made, Maker, compile_ahead, compiled_flex, time_in_turns

BATCH, NHEADS, HEADDIM, DROPOUT, PADDING = 16, 8, 64, 0.1, 20
IMPLEMENTATIONS = tuple(RIVAL_NAMES)
UNFUSED = ("pytorch", "sdpa_math")
# Performer's sums overflow in half precision, and the paper ran local attention in fp32.
_FP32 = ("local", "performer")
_SDPA = {
    "sdpa_math": SDPBackend.MATH,
    "sdpa_flash2": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
}
_WARNED_BY = {"sdpa_flash2": "flash attention kernel", "sdpa_cudnn": "cudnn attention kernel"}
_NO_DROPOUT = {
    "flex": "FlexAttention has no dropout",
    "fa4": "FlashAttention-4 has no dropout",
    "performer": "Performer has no probabilities to drop",
}
_NO_PADDING = {
    "sdpa_flash2": "SDPA's flash backend takes no mask",
    "fa4": "FlashAttention-4's dense call takes no key lengths",
}
_NUM_FEATURES = 256  # of Performer: about headdim * log(headdim), its authors' choice
_FLEX_BLOCK = 128
_LONGEST_ROTATED = 2048  # longer inputs do not fit an L2 cache: one set of them is enough
_ROOM = 0.9  # of the GPU's free memory
# TFLOP/s about which to expect on an H200 of long sequences, for estimates.
_RATES = {
    "pytorch": 40, "sdpa_math": 10, "flash": 350, "sdpa_flash2": 280, "sdpa_cudnn": 400,
    "flex": 330, "fa4": 500,
}  # fmt: skip
_PASSES = 9  # forwards and backwards of a long sequence
_LONGEST_UNFUSED = 8192  # on an H200
_SECONDS_A_LENGTH = 2.0  # of an implementation: compiling, short sequences


@functools.cache
def why_no_fa4() -> str | None:
    """Why FlashAttention-4 cannot be called, None if it can."""
    if importlib.util.find_spec("flash_attn") is None:
        return "flash_attn.cute is not installed"
    try:
        importlib.import_module("flash_attn.cute")
    except Exception as error:  # whatever its own dependencies raise
        return f"flash_attn.cute cannot be imported: {type(error).__name__}"
    return None


def why_not(impl: str, has_dropout: bool, is_padded: bool) -> str | None:
    """Why an implementation cannot serve a table, None if it can be tried."""
    if impl == "fa4" and (failure := why_no_fa4()):
        return failure
    reasons = [_NO_DROPOUT.get(impl)] * has_dropout + [_NO_PADDING.get(impl)] * is_padded
    return "; ".join(reason for reason in reasons if reason) or None


def paper_mask(seqlen: int, device: str = "cuda") -> BlockMask:
    """One block-sparse mask of the paper's density as far as its tables tell it: an eighth of the
    keys, at most 256 a query, here in blocks of 128 x 128 (the diagonal and its left neighbour)."""
    num_blocks = -(-seqlen // 128)
    visible = max(1, visible_keys(seqlen) // 128)
    index = torch.arange(num_blocks, device=device)
    distance = (index[:, None] - index[None, :]) % num_blocks
    return BlockMask.from_dense(distance < visible, 128, 128, seqlen_q=seqlen, seqlen_k=seqlen)


def flex_padding_mask(lengths: Tensor, seqlen: int) -> FlexBlockMask:
    """FlexAttention's mask of keys below a length, from the lengths: its own builder goes by every
    pair of positions, 64 GiB of them at 65,536 tokens.

    Args:
        lengths: (batch,), at least 1.
        seqlen: a multiple of 128.
    """
    batch, num_blocks = len(lengths), seqlen // _FLEX_BLOCK
    index = torch.arange(num_blocks, dtype=torch.int32, device=lengths.device)
    num_full = (lengths // _FLEX_BLOCK).to(torch.int32)
    num_partial = (lengths % _FLEX_BLOCK > 0).to(torch.int32)
    # Of the partial blocks only the first of each list counts: the one that the length is in.
    partial_index = (num_full[:, None] + index) % num_blocks
    rows = (batch, 1, num_blocks)
    return FlexBlockMask.from_kv_blocks(
        num_partial[:, None, None].expand(rows).contiguous(),
        partial_index[:, None, None].expand(*rows, num_blocks).contiguous(),
        num_full[:, None, None].expand(rows).contiguous(),
        index.expand(*rows, num_blocks).contiguous(),
        BLOCK_SIZE=_FLEX_BLOCK,
        mask_mod=lambda b, h, i, j: j < lengths[b],
        seq_lengths=(seqlen, seqlen),
    )


def make(
    impl: str,
    seqlen: int,
    has_dropout: bool,
    is_padded: bool,
    seed: int,
    *,
    batch: int = BATCH,
    nheads: int = NHEADS,
    causal: bool = False,
    device: str = "cuda",
) -> Made:
    """(function that computes the output, q, k, v and weights): what scripts.timing times.

    One seed gives every implementation the same q, k, v and lengths.
    """
    generator = torch.Generator(device).manual_seed(seed)
    shape = (batch, seqlen, nheads, HEADDIM)
    dtype = torch.float32 if impl in _FP32 else torch.float16
    leaves = [
        torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_()
        for _ in range(3)
    ]
    dropout_p, lengths = DROPOUT if has_dropout else 0.0, None
    if is_padded:
        lengths = torch.randint(
            seqlen - PADDING, seqlen + 1, (batch,), generator=generator, device=device
        )
    if impl in ("flash", "block_sparse"):
        options: dict[str, Any] = dict(lengths_k=lengths, dropout_p=dropout_p, causal=causal)
        q, k, v = leaves
        if impl == "flash":
            return (lambda: flash_attention(q, k, v, **options)), leaves
        mask = paper_mask(seqlen, device)
        return (lambda: block_sparse_attention(q, k, v, mask, **options)), leaves
    if impl in ("local", "linformer", "performer"):
        if causal:
            raise NotImplementedError(f"{impl} is not causal here")
        return _approximate(impl, leaves, lengths, dropout_p, generator)
    return _exact(impl, leaves, lengths, dropout_p, causal), leaves


def _approximate(
    impl: str,
    leaves: list[Tensor],
    lengths: Tensor | None,
    dropout_p: float,
    generator: torch.Generator,
) -> Made:
    q, k, v = leaves
    seqlen = q.shape[1]
    few = visible_keys(seqlen)
    options: dict[str, Any] = dict(lengths_k=lengths, dropout_p=dropout_p)
    if impl == "local":
        radius = max(1, few // 2)
        return (lambda: local_attention(q, k, v, radius=radius, **options)), leaves
    if impl == "linformer":
        project_k, project_v = projections = [
            torch.randn(few, seqlen, generator=generator, device=generator.device)
            .mul(seqlen**-0.5).half().requires_grad_()
            for _ in range(2)
        ]  # fmt: skip
        return (
            lambda: linformer_attention(q, k, v, project_k, project_v, **options)
        ), leaves + projections
    if dropout_p:
        raise NotImplementedError(_NO_DROPOUT["performer"])
    features = orthogonal_features(_NUM_FEATURES, HEADDIM, generator)
    return (lambda: performer_attention(q, k, v, features, lengths_k=lengths)), leaves


def _exact(
    impl: str, leaves: list[Tensor], lengths: Tensor | None, dropout_p: float, causal: bool
) -> Callable[[], Tensor]:
    reason = why_not(impl, dropout_p > 0, lengths is not None)
    if reason:
        raise NotImplementedError(reason)
    q, k, v = leaves
    seqlen, device = q.shape[1], q.device
    if impl == "fa4":
        from flash_attn.cute import flash_attn_func

        return lambda: flash_attn_func(q, k, v, causal=causal)[0]
    q, k, v = (t.transpose(1, 2) for t in leaves)
    if impl == "flex":
        if causal:
            raise NotImplementedError("FlexAttention is not causal here")
        mask = None if lengths is None else flex_padding_mask(lengths, seqlen)
        return lambda: compiled_flex()(q, k, v, block_mask=mask)
    keep = None
    if lengths is not None:
        keep = (torch.arange(seqlen, device=device) < lengths[:, None])[:, None, None, :]
    if impl in _SDPA:

        def sdpa() -> Tensor:
            with sdpa_kernel(_SDPA[impl]):
                return scaled_dot_product_attention(
                    q, k, v, attn_mask=keep, dropout_p=dropout_p, is_causal=causal
                )

        return sdpa
    hidden = None if keep is None else ~keep
    if causal:
        later = torch.ones(seqlen, seqlen, dtype=torch.bool, device=device).triu(1)
        hidden = later if hidden is None else hidden | later

    def unfused() -> Tensor:
        # In fp16, as in the paper: SDPA's math makes fp16 inputs fp32, and is slow.
        scores = (q * HEADDIM**-0.5) @ k.transpose(-2, -1)
        if hidden is not None:
            scores.masked_fill_(hidden, float("-inf"))
        return dropout(scores.softmax(-1), dropout_p) @ v

    return unfused


class Memory(NamedTuple):
    """Bytes of a forward and backward, inputs and gradients included."""

    held: int  # between the two
    peak: int


def memory_of(impl: str, maker: Maker) -> Memory | str:
    """What an implementation takes when it is alone on the GPU, or why it cannot run."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            function, leaves = maker(0)
            out = function()
            dout = torch.randn_like(out)
            held = torch.cuda.memory_allocated() - before
            torch.autograd.grad(out, leaves, dout)
            torch.cuda.synchronize()
        except Exception as error:  # others' code: whatever it raises is shown, and costs no row
            return reason_of(impl, str(error), [str(w.message) for w in caught])
    return Memory(held, torch.cuda.max_memory_allocated() - before)


def reason_of(impl: str, error: str, warned: Sequence[str] = ()) -> str:
    """A failure in a few words: what could not be allocated, or SDPA's warning of why."""
    needed = re.search(r"Tried to allocate ([\d.]+ \w+)", error)
    if "out of memory" in error:
        return "out of memory" + (f" for another {needed[1]}" if needed else "")
    texts = [text.split(" (Triggered")[0].strip() for text in warned]
    backend = _WARNED_BY.get(impl)
    for text, following in zip(texts, texts[1:], strict=False):
        if backend and text.lower().startswith(f"{backend} not used because"):
            return following[:120]
    return (error.splitlines() or ["no reason given"])[0][:120]


def groups_that_fit(
    memories: Mapping[str, Memory], num_sets: int, budget: float
) -> list[list[str]]:
    """Implementations that take turns, as many at once as memory holds.

    Args:
        memories: of each alone.
        num_sets: of inputs that each holds.
        budget: bytes of all that a group holds, and of one that runs beside it. What is larger
            stands alone.
    """
    groups: list[list[str]] = []
    for name in memories:
        for group in groups:
            all_of_it = [memories[n] for n in (*group, name)]
            held = num_sets * sum(memory.held for memory in all_of_it)
            if held + max(memory.peak for memory in all_of_it) <= budget:
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def measure_runtime(
    seqlen: int,
    options: tuple[bool, bool],
    implementations: Sequence[str] = IMPLEMENTATIONS,
    **shape: Any,
) -> dict:
    """Milliseconds of each implementation: forward, backward, both.

    Args:
        options: with dropout, with key padding.
        implementations: each a key of the row; one without times has a reason in `failures`. Those
            of a list in `groups` took turns.
    """
    makers = {name: partial(make, name, seqlen, *options, **shape) for name in implementations}
    failures, memories = {}, {}
    for name, maker in makers.items():
        found = why_not(name, *options) or memory_of(name, maker)
        if isinstance(found, str):
            failures[name] = found
        else:
            memories[name] = found
    torch.cuda.empty_cache()
    num_sets = 2 if seqlen <= _LONGEST_ROTATED else 1
    groups = groups_that_fit(memories, num_sets, _ROOM * torch.cuda.mem_get_info()[0])
    times = {}
    for group in groups:
        timed, failed = time_in_turns({name: makers[name] for name in group}, num_sets)
        times.update(timed)
        failures.update({name: reason_of(name, why) for name, why in failed.items()})
        torch.cuda.empty_cache()
    row: dict[str, Any] = {"seqlen": seqlen, "failures": failures, "groups": groups}
    for name in implementations:
        forward, backward = (times.get((name, d)) for d in ("forward", "backward"))
        both = None if forward is None or backward is None else forward + backward
        row[name] = {"forward": forward, "backward": backward, "both": both}
    return row


def measure_memory(seqlen: int, implementations: Sequence[str] = IMPLEMENTATIONS) -> dict:
    """Peak MB (10^6 bytes) of a forward and backward, inputs and gradients included, without
    dropout and padding."""
    row: dict[str, Any] = {"seqlen": seqlen, "failures": {}}
    for name in implementations:
        found: str | Memory | None = why_not(name, False, False)
        for length in (128, seqlen):  # the first for what stays: workspaces of the libraries
            if not isinstance(found, str):
                found = memory_of(name, partial(make, name, length, False, False))
        if isinstance(found, str):
            row["failures"][name] = found
        row[name] = found.peak / 1e6 if isinstance(found, Memory) else None
    return row


def compile_flex(
    seqlens: Sequence[int], options: tuple[bool, bool], implementations: Sequence[str]
) -> None:
    """FlexAttention is compiled anew for every length: all of them at once, in processes."""
    if "flex" in implementations and why_not("flex", *options) is None:
        compile_ahead([partial(make, "flex", seqlen, *options) for seqlen in seqlens])


def estimated_minutes(
    seqlens: Sequence[int], options: tuple[bool, bool], implementations: Sequence[str]
) -> float:
    """Of measure_runtime on an H200, from the FLOPs of exact attention and its usual speeds."""
    seconds = 0.0
    for impl in implementations:
        if _NO_DROPOUT.get(impl) and options[0] or _NO_PADDING.get(impl) and options[1]:
            continue
        for seqlen in seqlens:
            seconds += _SECONDS_A_LENGTH
            if impl in _RATES and (impl not in UNFUSED or seqlen <= _LONGEST_UNFUSED):
                flops = 3.5 * 4 * BATCH * NHEADS * seqlen**2 * HEADDIM
                seconds += _PASSES * flops / (_RATES[impl] * 1e12)
    return seconds / 60
