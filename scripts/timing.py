"""Timing of rival implementations on a GPU: in turns, on rotated inputs, medians of CUDA events."""

import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch._dynamo
import torch._functorch.config
from rich.progress import track
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

DIRECTIONS = ("forward", "backward")
_MEASURED_MS = 150.0  # time spent on one implementation and direction, about
_SHORT_MS = 2.0  # calls below this could wait for the host
_LONG_MS = 100.0  # calls above this vary little: few repeats
_MOST_PROCESSES = 14
_HOLD_CYCLES = 6_000_000  # about 3 ms on an H200: longer than the host needs to queue these:
_HELD_AT_ONCE = 4

# Function that computes the output, or several; its inputs that need gradients.
Made = tuple[Callable[[], Any], list[Tensor]]
Maker = Callable[[int], Made]  # of a seed
K = TypeVar("K", bound=Hashable)  # what an implementation is called by


class Contender:
    """One implementation: sets of inputs that take turns, and what to run in each direction."""

    def __init__(self, make: Maker, num_sets: int = 2) -> None:
        self.sets = []
        for seed in range(num_sets):
            function, leaves = make(seed)
            outs = _outputs(function)
            self.sets.append((function, leaves, outs, [torch.randn_like(out) for out in outs]))

    def run(self, direction: str, turn: int) -> None:
        function, leaves, outs, douts = self.sets[turn % len(self.sets)]
        if direction == "forward":
            function()
        else:
            torch.autograd.grad(outs, leaves, douts, retain_graph=True)


def _outputs(function: Callable[[], Any]) -> tuple[Tensor, ...]:
    out = function()
    return out if isinstance(out, tuple) else (out,)


@functools.cache
def compiled_flex() -> Callable[..., Tensor]:
    """FlexAttention as its documentation tells to use it, compiled once a shape."""
    torch._dynamo.config.recompile_limit = 64
    # A donated buffer is used up by one backward; here the same graph runs many.
    torch._functorch.config.donated_buffer = False
    return torch.compile(flex_attention, dynamic=False)


def compile_ahead(makers: Sequence[Maker]) -> None:
    """Run each maker's two directions once, in as many processes as there are cores, so that the
    caches on disk hold what the compilers make. What fails here is reported when it is timed.

    The makers have to be picklable: functools.partial of a module's functions.
    """
    workers = min(len(makers), os.cpu_count() or 1, _MOST_PROCESSES)
    if workers < 2:
        return
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        done = pool.map(_run_once, makers)
        for _ in track(done, "compiling", total=len(makers)):
            pass


def _run_once(make: Maker) -> None:
    with contextlib.suppress(Exception):
        function, leaves = make(0)
        outs = _outputs(function)
        torch.autograd.grad(outs, leaves, [torch.randn_like(out) for out in outs])
        torch.cuda.synchronize()


def time_in_turns(
    makers: Mapping[K, Maker], num_sets: int = 2
) -> tuple[dict[tuple[K, str], float], dict[K, str]]:
    """({(name, direction): median milliseconds}, {name: why it cannot run}).

    The GPU is kept busy until a turn is queued, so that what is timed is kernels, not the host. One
    set of inputs is enough where it does not fit the GPU's L2 cache.
    """
    contenders, failures = {}, {}
    for name, make in makers.items():
        try:
            contender = Contender(make, num_sets)
            for direction in DIRECTIONS:
                contender.run(direction, 0)
            contenders[name] = contender
        except (RuntimeError, ImportError, NotImplementedError) as error:
            failures[name] = (str(error).splitlines() or [type(error).__name__])[0][:120]
    medians = {}
    for direction in DIRECTIONS if contenders else ():
        events: dict[K, list[tuple]] = {name: [] for name in contenders}
        repeats, is_short, turn = 8, True, 0
        while turn < repeats:
            for at, (name, contender) in enumerate(contenders.items()):
                if is_short and at % _HELD_AT_ONCE == 0:
                    torch.cuda._sleep(_HOLD_CYCLES)
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                contender.run(direction, turn)
                end.record()
                events[name].append((start, end))
            turn += 1
            if turn == 5:  # as many turns as fit the time
                torch.cuda.synchronize()
                first = min(a.elapsed_time(b) for a, b in next(iter(events.values())))
                least = 8 if first < _LONG_MS else 5
                repeats = int(min(100, max(least, _MEASURED_MS / max(first, 1e-3))))
                is_short = first < _SHORT_MS
        torch.cuda.synchronize()
        for name, pairs in events.items():
            medians[name, direction] = statistics.median(a.elapsed_time(b) for a, b in pairs[2:])
    return medians, failures


def host_us(make: Maker, calls: int = 300) -> dict[str, float]:
    """direction -> microseconds that one eager call keeps the host. Give small inputs: the queue
    of the GPU must not fill."""
    contender, found = Contender(make), {}
    for direction in DIRECTIONS:
        for turn in range(20):
            contender.run(direction, turn)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for turn in range(calls):
            contender.run(direction, turn)
        found[direction] = (time.perf_counter() - start) / calls * 1e6
        torch.cuda.synchronize()
    return found
