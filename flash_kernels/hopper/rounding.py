"""Rounding of the float32 sum of dq to the dtype of q."""

import triton
import triton.language as tl

from ..portable.kernel_launch import Launch
from ..portable.launch import cdiv

_BLOCK = 4096


@triton.jit
def round_scaled_kernel(
    source_ptr, target_ptr, factor, num_elements, row_stride, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """target = source * factor. Grid: (cdiv(num_elements, BLOCK),)."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_elements
    values = tl.load(source_ptr + offsets, mask=inside, other=0.0) * factor
    if WIDTH > 0:
        offsets = offsets // WIDTH * row_stride + offsets % WIDTH
    tl.store(target_ptr + offsets, values.to(target_ptr.dtype.element_ty), mask=inside)


def round_scaled(factor: float, num_elements: int, width: int, row_stride: int) -> Launch:
    """Takes source and target, target = source * factor: rows of `width` elements, contiguous in
    the source, row_stride apart in the target."""
    grid = cdiv(num_elements, _BLOCK)
    constants = {
        "WIDTH": 0 if row_stride == width else width, "BLOCK": _BLOCK, "num_warps": 8,
    }  # fmt: skip
    return Launch(round_scaled_kernel, grid, (factor, num_elements, row_stride), constants)
