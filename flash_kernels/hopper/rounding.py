"""Rounding of the float32 sum of dq to the dtype of q."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def round_scaled_kernel(source_ptr, target_ptr, factor, num_elements, BLOCK: tl.constexpr):
    """target = source * factor. Grid: (cdiv(num_elements, BLOCK),)."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_elements
    values = tl.load(source_ptr + offsets, mask=inside, other=0.0) * factor
    tl.store(target_ptr + offsets, values.to(target_ptr.dtype.element_ty), mask=inside)


def round_scaled(source: Tensor, factor: float, target: Tensor) -> None:
    """target = source * factor, both contiguous and of one shape."""
    num_elements = source.numel()
    grid = (triton.cdiv(num_elements, _BLOCK),)
    round_scaled_kernel[grid](source, target, factor, num_elements, BLOCK=_BLOCK, num_warps=8)
