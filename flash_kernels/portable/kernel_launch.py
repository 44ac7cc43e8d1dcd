"""Launching a kernel again on other tensors, without the search for its compiled form.

Triton finds the compiled kernel of every launch anew, from the type, value and alignment of all
arguments: tens of microseconds, more than a short sequence takes on the GPU. A Launch fixes all of
them but the addresses. What is left to choose by is which of these are multiples of 16 bytes, and
the compiled kernel is called as triton.JITFunction.run calls it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

from .versions import is_served


class Bounded(dict):
    """A cache that forgets everything once it is full. Safe between threads, like a dict."""

    def __init__(self, max_entries: int) -> None:
        super().__init__()
        self._max_entries = max_entries

    def keep(self, key: Any, value: Any) -> Any:
        if len(self) >= self._max_entries:
            self.clear()
        self[key] = value
        return value


class Launch:
    """A kernel on one device, but for its tensors.

    Args:
        kernel: a triton.jit or gluon.jit function whose parameters are tensors, numbers and
            compile-time constants, in this order.
        grid: its size.
        numbers: the arguments behind the tensors.
        constants: compile-time arguments and options such as num_warps, by name.
        describe: makes the TMA descriptor of each of the first tensors, called once.

    Calls pass the tensors, None and tuples among them. From call to call only addresses may differ:
    a Launch is kept under a key that fixes dtypes and numbers, also those in the tuples.
    """

    def __init__(
        self,
        kernel: Any,
        grid: int,
        numbers: tuple,
        constants: dict[str, int | bool],
        describe: tuple[Callable, ...] = (),
    ) -> None:
        self._kernel, self._grid, self._numbers, self._constants = kernel, grid, numbers, constants
        self._describe = describe
        self._descriptors: list = []
        self._in_order = (*numbers, *(constants[n] for n in kernel.arg_names if n in constants))
        self._compiled: dict[tuple, tuple] = {}

    def __call__(self, *tensors: Any) -> None:
        """Launch on the current device and stream."""
        described: Sequence = ()
        if self._describe:
            described, tensors = self._described(tensors)
        addresses, misaligned = _addresses(tensors)
        # What Triton reads beside the arguments.
        key = (misaligned, knobs.runtime.debug, knobs.compilation.instrumentation_mode)
        known = self._compiled.get(key)
        if known is None or _is_observed():
            compiled = self._kernel[(self._grid,)](
                *described, *tensors, *self._numbers, **self._constants
            )
            if _is_repeatable(compiled):
                device = driver.active.get_current_device()
                self._compiled[key] = compiled, compiled.run, compiled.function, device
            return
        compiled, run, function, device = known
        run(
            self._grid, 1, 1, driver.active.get_current_stream(device), function,
            compiled.packed_metadata, None, None, None, *described, *addresses, *self._in_order,
        )  # fmt: skip

    def _described(self, tensors: tuple) -> tuple[list, tuple]:
        """Descriptors of the first tensors, and the other tensors."""
        if not self._descriptors:
            made = [make(t) for make, t in zip(self._describe, tensors, strict=False)]
            self._descriptors = [_on(d, None) for d in made]  # keeps no tensor alive
        described = [_on(d, t) for d, t in zip(self._descriptors, tensors, strict=False)]
        return described, tensors[len(described) :]


def _on(descriptor: Any, tensor: Tensor | None) -> Any:
    """The descriptor of another tensor of the same kind, without the checks of its class."""
    other = object.__new__(type(descriptor))
    other.__dict__.update(descriptor.__dict__)
    other.base = tensor
    return other


def _addresses(arguments: tuple, misaligned: int = 0) -> tuple[tuple, int]:
    """The arguments with addresses for tensors, and `misaligned` with a bit more for each: set if
    it is no multiple of 16 bytes, which Triton compiles another kernel for."""
    addresses = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            argument = argument.data_ptr()
            misaligned = 2 * misaligned + (argument % 16 != 0)
        elif type(argument) is tuple:
            argument, misaligned = _addresses(argument, misaligned)
        addresses.append(argument)
    return tuple(addresses), misaligned


def _is_observed() -> bool:
    """Whether a profiler or the like wants to see each launch, or changes how kernels compile."""
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if getattr(hook, "calls", hook):
            return True
    return getattr(runtime, "add_stages_inspection_hook", None) is not None


def _is_repeatable(compiled: Any) -> bool:
    """Whether alignment alone decides about the compiled kernel, and how it is called is known: not
    on AMD GPUs, whose kernels also depend on the size of a tensor's storage, nor in the
    interpreter, which compiles nothing, nor with releases of Triton that have not been tried.

    A kernel that was only compiled (tests without a GPU) has no module."""
    return (
        isinstance(compiled, CompiledKernel)
        and is_served(triton.__version__)
        and compiled.metadata.target.backend == "cuda"
        and compiled.module is not None
    )
