"""Gluon's names as the kernels use them: the one file that knows how they differ between releases.

Served: Triton 3.6, 3.7 and 3.8. Importing this module needs one of them; rule.py asks first.
"""

import triton
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .versions import is_served

if not is_served(triton.__version__):
    raise ImportError(f"the Hopper kernels do not know Gluon of Triton {triton.__version__}")

jit = gluon.jit
mbarrier = hopper.mbarrier
fence_async_shared = hopper.fence_async_shared
warpgroup_mma = hopper.warpgroup_mma
warpgroup_mma_wait = hopper.warpgroup_mma_wait
store_wait = hopper.tma.store_wait
# Renamed in 3.8, which still has the old names; later releases drop them.
_NEW_NAMES = hasattr(hopper.tma, "async_load")
tma_load = hopper.tma.async_load if _NEW_NAMES else hopper.tma.async_copy_global_to_shared
tma_store = hopper.tma.async_store if _NEW_NAMES else hopper.tma.async_copy_shared_to_global
cp_async = (
    hopper.async_copy.async_load
    if hasattr(hopper.async_copy, "async_load")
    else hopper.async_copy.async_copy_global_to_shared
)

if hasattr(hopper.tma, "async_atomic_add"):
    tma_reduce_add = hopper.tma.async_atomic_add
else:

    @_core.builtin
    def tma_reduce_add(desc, coord, source, _semantic=None):
        """Add a tile of shared memory to global memory (cp.reduce.async.bulk.tensor)."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, desc.handle, coord, source.handle)


@gluon.jit
def arrive_threads(barrier):
    """One arrival of every thread of the partition, so a count is 128 for each warpgroup.

    mbarrier.arrive would synchronise the warpgroup first, to arrive once for all. This one also
    waits, without blocking the thread, for the thread's own earlier cp.async copies.
    """
    hopper.async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def ring(index, STAGES: gl.constexpr):
    """(stage, phase) of the index-th use of a ring of buffers: phase flips with every round."""
    return index % STAGES, (index // STAGES) & 1


_KEEP_ABOVE = gl.constexpr("""{
.reg .pred above;
setp.gt.s32 above, $1, $2;
selp.f32 $0, $3, 0f00000000, above;
}""")


@gluon.jit
def keep_above(numbers, threshold, values):
    """values (float32) where numbers (int32) > threshold, else 0.

    where() in assembly: LLVM moves where() behind the rounding to 16 bits, whose halves it then
    selects and packs one by one.
    """
    return gl.inline_asm_elementwise(
        _KEEP_ABOVE, "=f,r,r,f", [numbers, threshold, values], gl.float32, is_pure=True, pack=1
    )


__all__ = [
    "TensorDescriptor", "arrive_threads", "cp_async", "fence_async_shared", "gl", "jit",
    "keep_above", "mbarrier", "ring", "store_wait", "tma_load", "tma_reduce_add", "tma_store",
    "warpgroup_mma", "warpgroup_mma_wait",
]  # fmt: skip
