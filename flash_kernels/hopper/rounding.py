"""Rounding of the float32 sum of dq to the dtype of q."""

import triton
import triton.language as tl

from ..portable.kernel_launch import Launch
from ..portable.launch import cdiv

_BLOCK = 4096


@triton.jit
def round_scaled_kernel(source_ptr, target_ptr, factor, num_elements, BLOCK: tl.constexpr):
    """target = source * factor. Grid: (cdiv(num_elements, BLOCK),)."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_elements
    values = tl.load(source_ptr + offsets, mask=inside, other=0.0) * factor
    tl.store(target_ptr + offsets, values.to(target_ptr.dtype.element_ty), mask=inside)


def round_scaled(factor: float, num_elements: int) -> Launch:
    """Takes source and target, both contiguous: target = source * factor."""
    grid = cdiv(num_elements, _BLOCK)
    constants = {"BLOCK": _BLOCK, "num_warps": 8}
    return Launch(round_scaled_kernel, grid, (factor, num_elements), constants)
