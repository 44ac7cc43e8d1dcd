"""Gluon's names as the kernels use them: the one file that knows how they differ between releases.

Served: the releases of portable/versions.py. Importing this module needs one of them; rule.py asks
first.
"""

import triton
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..portable.versions import is_served

if not is_served(triton.__version__):
    raise ImportError(f"the Hopper kernels do not know Gluon of Triton {triton.__version__}")

jit = gluon.jit
mbarrier = hopper.mbarrier
fence_async_shared = hopper.fence_async_shared
warpgroup_mma = hopper.warpgroup_mma
warpgroup_mma_wait = hopper.warpgroup_mma_wait
store_wait = hopper.tma.store_wait
# Synchronises the threads of one partition.
partition_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
# Renamed in 3.8, which still has the old names; 3.9 does not.
_NEW_NAMES = hasattr(hopper.tma, "async_load")
tma_load = hopper.tma.async_load if _NEW_NAMES else hopper.tma.async_copy_global_to_shared
tma_store = hopper.tma.async_store if _NEW_NAMES else hopper.tma.async_copy_shared_to_global

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
def arrive_warpgroup(barrier):
    """One arrival for all threads of the partition, once they are all here.

    Never cp.async.mbarrier.arrive, by which every thread would arrive for itself: when other
    processes use the GPU and it takes a block off its multiprocessor in the middle, such an arrival
    with copies under way can get lost (seen on H200), and the block waits for ever.
    """
    partition_barrier()
    mbarrier.arrive(barrier, count=1)


# Of the hardware's 16 barriers of a block. Triton gives one to each partition, from 0 on.
FIRST_NAMED = gl.constexpr(8)
# They say that memory changes: no access moves across them.
_ARRIVE = gl.constexpr("bar.arrive $1, $2;\nmov.u32 $0, 0;")
_SYNC = gl.constexpr("bar.sync $1, $2;\nmov.u32 $0, 0;")


@gluon.jit
def _at_barrier(ASSEMBLY: gl.constexpr, number, THREADS: gl.constexpr):
    """Once in each thread of the partition."""
    lanes = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(
        ASSEMBLY, "=r,r,r,~{memory}", [lanes + number, lanes + THREADS], gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def named_arrive(number, THREADS: gl.constexpr):
    """The partition's threads arrive at the hardware's barrier `number` of THREADS threads, and go
    on. They need not wait for each other, as for the arrival at an mbarrier."""
    _at_barrier(_ARRIVE, number, THREADS)


@gluon.jit
def named_sync(number, THREADS: gl.constexpr):
    """The same, and the partition waits until THREADS threads have arrived."""
    _at_barrier(_SYNC, number, THREADS)


@gluon.jit
def ring(index, STAGES: gl.constexpr):
    """(stage, phase) of the index-th use of a ring of buffers: phase flips with every round."""
    return index % STAGES, (index // STAGES) & 1


# The number of an element, as in portable.dropout.drop; one block of assembly an element,
# because LLVM otherwise computes all numbers first, which takes a register each.
_DROPOUT_NUMBER = """{
.reg .pred kept;
.reg .s32 number;
.reg .f32 minus;
mad.lo.s32 number, $3, $4, $2;
setp.gt.s32 kept, number, $5;
"""
_ZERO_DROPPED = gl.constexpr(_DROPOUT_NUMBER + "selp.f32 $0, $1, 0f00000000, kept;\n}")
_NEGATE_DROPPED = gl.constexpr(
    _DROPOUT_NUMBER + "neg.f32 minus, $1;\nselp.f32 $0, $1, minus, kept;\n}"
)


@gluon.jit
def zero_dropped(values, row_keys, row_multipliers, column_keys, threshold):
    """values (float32) where portable.dropout.drop keeps them, else 0. The keys broadcast."""
    return gl.inline_asm_elementwise(
        _ZERO_DROPPED, "=f,f,r,r,r,r", [values, row_keys, row_multipliers, column_keys, threshold],
        gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def negate_dropped(values, row_keys, row_multipliers, column_keys, threshold):
    """values (float32) where portable.dropout.drop keeps them, else -values."""
    return gl.inline_asm_elementwise(
        _NEGATE_DROPPED, "=f,f,r,r,r,r",
        [values, row_keys, row_multipliers, column_keys, threshold],
        gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


_PACK_POSITIVE_BF16 = gl.constexpr("cvt.rn.relu.bf16x2.f32 $0, $2, $1;")
_PACK_POSITIVE_FP16 = gl.constexpr("cvt.rn.relu.f16x2.f32 $0, $2, $1;")
_DSCORES_DROPPED = gl.constexpr("""{
.reg .f32 kept, all;
max.f32 kept, $1, 0f00000000;
abs.f32 all, $1;
mul.f32 all, all, $3;
neg.f32 all, all;
fma.rn.f32 $0, kept, $2, all;
}""")


@gluon.jit
def round_positive(values, DTYPE: gl.constexpr):
    """max(values, 0) in a 16-bit DTYPE, in one instruction for two.

    Not pure, so that LLVM keeps it in its place: it would move it between the matrix instructions
    that read the result, which ptxas then separates (C7519).
    """
    if DTYPE == gl.bfloat16:
        return gl.inline_asm_elementwise(
            _PACK_POSITIVE_BF16, "=r,f,f", [values], gl.bfloat16, is_pure=False, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            _PACK_POSITIVE_FP16, "=r,f,f", [values], gl.float16, is_pure=False, pack=2
        )


@gluon.jit
def dscores_of_signed(signed_probs, dprobs, delta):
    """max(signed_probs, 0) * dprobs - |signed_probs| * delta, where delta broadcasts.

    In assembly, because LLVM otherwise keeps both functions of signed_probs in registers.
    """
    return gl.inline_asm_elementwise(
        _DSCORES_DROPPED, "=f,f,f,f", [signed_probs, dprobs, delta], gl.float32, is_pure=True,
        pack=1,
    )  # fmt: skip


__all__ = [
    "FIRST_NAMED", "TensorDescriptor", "arrive_warpgroup", "dscores_of_signed",
    "fence_async_shared", "gl", "jit", "mbarrier", "named_arrive", "named_sync", "negate_dropped",
    "partition_barrier", "ring", "round_positive", "store_wait", "tma_load", "tma_reduce_add",
    "tma_store", "warpgroup_mma", "warpgroup_mma_wait", "zero_dropped",
]  # fmt: skip
