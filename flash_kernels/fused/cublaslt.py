"""Two matrix products of cuBLASLt with GELU in their epilogues, by ctypes: torch brings the library
along and offers neither.

GELU is its approximation by tanh. cuBLAS's matrices lie by columns: a tensor that lies by rows is
its own transpose there, and a @ b is asked for as its transpose, b.T @ a.T. Numbers of attributes
and epilogues: cublasLt.h; meanings: NVIDIA's cuBLAS documentation, "Using the cuBLASLt API".
"""

import ctypes
import functools
from collections.abc import Sequence
from ctypes import byref, c_float, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..portable.kernel_launch import Bounded
from .launch import on_device

_DATA_TYPES = {torch.float16: 2, torch.bfloat16: 14}
_FLOAT32, _FLOAT32_SUMS = 0, 68  # of alpha and beta, of the products
_TRANSPOSE_A, _TRANSPOSE_B, _EPILOGUE, _BIAS, _AUX, _AUX_LD = 3, 4, 7, 8, 11, 12  # of a product
_MAX_WORKSPACE, _ALIGNMENTS = 1, (5, 6, 7, 8)  # preferences; least alignments of A, B, C, D
_GELU_AUX_BIAS, _DGELU = 164, 192
_WORKSPACE_BYTES = 32 << 20  # what NVIDIA recommends for Hopper
_ONE, _ZERO = c_float(1.0), c_float(0.0)
_plans = Bounded(512)


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("opaque", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("state", c_int32),
        ("waves", c_float),
        ("reserved", c_int32 * 4),
    ]


class Layout(NamedTuple):
    """A matrix's transpose as cuBLAS finds it: a column-major (rows, cols), transposed or not."""

    is_transposed: bool
    rows: int
    cols: int
    ld: int  # elements between columns


def layout(shape: Sequence[int], strides: Sequence[int]) -> Layout | None:
    """Of a matrix; None where it must be copied: no unit stride, or columns that overlap or do not
    begin at multiples of 16 bytes, as tensor cores' loads do."""
    if strides[1] == 1:
        found = Layout(False, shape[1], shape[0], strides[0])
    elif strides[0] == 1:
        found = Layout(True, shape[0], shape[1], strides[1])
    else:
        return None
    if found.cols == 1:  # its stride means nothing
        found = found._replace(ld=found.rows)
    return found if found.ld >= found.rows and found.ld % 8 == 0 else None


@torch.compiler.assume_constant_result
def is_available(device: torch.device) -> bool:
    """Whether torch's cuBLASLt can be loaded and has the products for a device: sm_80 and up."""
    if device.type != "cuda" or _library() is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(gelu(pre), pre) of pre = x @ weight.T + bias, both rounded from float32.

    Args:
        x: (rows, dim), float16 or bfloat16, any strides.
        weight: (hidden, dim), x's dtype; hidden and dim are multiples of 8, not 0.
        bias: (hidden,), x's dtype.

    Raises:
        RuntimeError: cuBLASLt refuses.
    """
    pre = x.new_empty(len(x), len(weight))
    return _matmul(x, weight.T, _GELU_AUX_BIAS, pre, bias), pre


def matmul_dgelu(dout: Tensor, weight: Tensor, pre: Tensor) -> Tensor:
    """(dout @ weight) * gelu'(pre), rounded from float32; sizes, dtypes, errors as above.

    Args:
        dout: (rows, dim).
        weight: (dim, hidden).
        pre: (rows, hidden).
    """
    return _matmul(dout, weight, _DGELU, _dense(pre))


class _Descriptor:
    """An object of the library's, destroyed with this one."""

    def __init__(self, kind: str, *arguments: Any) -> None:
        self._kind = kind
        self._destroy = getattr(_library(), f"cublasLt{kind}Destroy")
        self._as_parameter_ = c_void_p()  # what ctypes passes
        _call(f"{kind}Create", byref(self._as_parameter_), *arguments)

    def set(self, attribute: int, value: Any) -> None:
        size = c_size_t(ctypes.sizeof(value))
        _call(f"{self._kind}SetAttribute", self, attribute, byref(value), size)

    def __del__(self) -> None:
        if self._as_parameter_:
            self._destroy(self)


def _matmul(a: Tensor, b: Tensor, epilogue: int, aux: Tensor, bias: Tensor | None = None) -> Tensor:
    """a (m, k) @ b (k, n) through an epilogue that reads or writes aux (m, n)."""
    (a, a_layout), (b, b_layout) = _operand(a), _operand(b)
    out = torch.empty_like(aux)
    m, n = out.shape
    if m == 0:
        return out
    try:
        with on_device(a):
            # It holds addresses: of this call alone, so that threads share none.
            product = _Descriptor("MatmulDesc", _FLOAT32_SUMS, _FLOAT32)
            product.set(_TRANSPOSE_A, c_int32(b_layout.is_transposed))
            product.set(_TRANSPOSE_B, c_int32(a_layout.is_transposed))
            product.set(_EPILOGUE, c_uint32(epilogue))
            product.set(_AUX, c_void_p(aux.data_ptr()))
            product.set(_AUX_LD, c_int64(n))
            if bias is not None:
                bias = _dense(bias)
                product.set(_BIAS, c_void_p(bias.data_ptr()))
            matrices = b, a, out
            layouts = b_layout, a_layout, Layout(False, n, m, n)
            alignments = [min(256, t.data_ptr() & -t.data_ptr()) for t in matrices]
            key = (a.device, a.dtype, epilogue, *layouts, *alignments)
            plan = _plans.get(key)
            if plan is None:
                plan = _plan(a.device, a.dtype, product, layouts, alignments)
                _plans.keep(key, plan)
            workspace = a.new_empty(plan.algorithm.workspace_bytes, dtype=torch.uint8)
            b_ptr, a_ptr, out_ptr = (c_void_p(t.data_ptr()) for t in matrices)
            _call(
                "Matmul", _handle(a.device.index), product, byref(_ONE), b_ptr, plan.b,
                a_ptr, plan.a, byref(_ZERO), out_ptr, plan.out, out_ptr, plan.out,
                byref(plan.algorithm), c_void_p(workspace.data_ptr()), c_size_t(len(workspace)),
                c_void_p(torch.cuda.current_stream(a.device).cuda_stream),
            )  # fmt: skip
    except RuntimeError as error:
        error.add_note(f"in {tuple(a.shape)} @ {tuple(b.shape)}, {a.dtype}, epilogue {epilogue}")
        raise
    return out


class _Plan(NamedTuple):
    """Of products that differ in addresses only; threads share it."""

    b: _Descriptor
    a: _Descriptor
    out: _Descriptor
    algorithm: _Algorithm


def _plan(
    device: torch.device, dtype: torch.dtype, product: _Descriptor, layouts: Sequence[Layout],
    alignments: Sequence[int],
) -> _Plan:  # fmt: skip
    """With the algorithm that cuBLASLt takes for the fastest. None is timed: every run has it."""
    b, a, out = (
        _Descriptor("MatrixLayout", _DATA_TYPES[dtype], c_uint64(rows), c_uint64(cols), c_int64(ld))
        for _, rows, cols, ld in layouts
    )
    preference = _Descriptor("MatmulPreference")
    preference.set(_MAX_WORKSPACE, c_uint64(_WORKSPACE_BYTES))
    for attribute, alignment in zip(_ALIGNMENTS, (*alignments, alignments[2]), strict=True):
        preference.set(attribute, c_uint32(alignment))
    algorithm, count = _Algorithm(), c_int32()
    _call(
        "MatmulAlgoGetHeuristic", _handle(device.index), product, b, a, out, out, preference, 1,
        byref(algorithm), byref(count),
    )  # fmt: skip
    assert count.value == 1, "where cuBLASLt has no algorithm it returns another status than 0"
    return _Plan(b, a, out, algorithm)


def _dense(tensor: Tensor) -> Tensor:
    """Contiguous and at a multiple of 16 bytes."""
    if tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _operand(matrix: Tensor) -> tuple[Tensor, Layout]:
    """A matrix, or a copy of it that cuBLAS can read, and its layout."""
    found = layout(matrix.shape, matrix.stride())
    if found is None or matrix.data_ptr() % 16:
        matrix = matrix.clone(memory_format=torch.contiguous_format)
        found = layout(matrix.shape, matrix.stride())
    assert found is not None, "widths are multiples of 8"
    return matrix, found


@functools.cache
def _library() -> ctypes.CDLL | None:
    if torch.version.cuda is None:
        return None
    try:  # the copy that torch has loaded
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None


@functools.cache
def _handle(device_index: int) -> c_void_p:
    """Of the current device; never destroyed. Threads share it."""
    handle = c_void_p()
    _call("Create", byref(handle))
    return handle


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_library(), f"cublasLt{name}")(*arguments)
    if status:
        raise RuntimeError(f"cublasLt{name} must return status 0, got {status}")
