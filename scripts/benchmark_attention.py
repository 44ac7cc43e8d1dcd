"""Attention speed and memory, all rivals side by side: python -m scripts.benchmark_attention --help

Suites: speed (D64 x 32 heads, D128 x 16 heads, 16,384 tokens), dropout (what dropout costs), packed
(varlen against dense), paper (arXiv 2205.14135, appendix E.6: batch 16, 8 heads, D64, fp16, dropout
0.1, padding of up to 20 keys; memory without dropout and padding). What is compared, in a suite the
implementations and the case without dropout or packing, takes turns on rotated inputs, and a time
is a median of CUDA events, the GPU kept busy until a turn is queued: it is the kernels' time. What
a call costs the host, where it is alone, is the suite host (batch 1, 8 heads, D64, 128 tokens).
FLOPs: forward 4 * batch * nheads * seqlen^2 * headdim, half of it causal, backward 2.5 times.
"""

import argparse
import dataclasses
import itertools
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention

from flash_kernels import flash_attention, flash_attention_varlen
from scripts.attention_tables import plot, render
from scripts.records import appended, make_record, read_earlier, write_record
from scripts.rivals import why_no_fa4
from scripts.timing import (
    DIRECTIONS,
    Made,
    compile_ahead,
    compiled_flex,
    host_us,
    time_in_turns,
)

OURS = ("flash_portable", "flash_hopper")
# Rows that are alike in these are measured in turns, or one after the other.
JOB = ("suite", "headdim", "causal", "seqlen", "padded")
SUITES = ("speed", "dropout", "packed", "paper", "host")


@dataclasses.dataclass(frozen=True)
class Case:
    batch: int
    nheads: int
    headdim: int
    seqlen: int
    causal: bool
    dropout_p: float = 0.0
    dtype: str = "bfloat16"
    padded: bool = False  # the last up to 20 keys of each sequence are padding
    packed: bool = False

    def flops(self, direction: str) -> float:
        forward = 4.0 * self.batch * self.nheads * self.seqlen**2 * self.headdim
        return forward * (0.5 if self.causal else 1.0) * (2.5 if direction == "backward" else 1.0)


def jobs_of(suite: str, quick: bool) -> list[tuple[list[Case], list[str]]]:
    """Cases that are measured in turns, as their rows are compared, and the implementations."""
    seqlens = (1024, 4096) if quick else (1024, 2048, 4096, 8192, 16384)
    shapes = ((32, 64), (16, 128))
    grid = [
        Case(16384 // seqlen, nheads, headdim, seqlen, causal)
        for nheads, headdim in shapes
        for causal in (True, False)
        for seqlen in seqlens
    ]
    if suite == "speed":
        rivals = ["sdpa_flash2", "sdpa_cudnn", "flex"]
        rivals += ["fa4"] * (why_no_fa4() is None)
        return [([case], [*OURS, *rivals] + ["sdpa_math"] * (case.seqlen <= 4096)) for case in grid]
    if suite == "dropout":
        return [
            ([case, dataclasses.replace(case, dropout_p=0.1)], [*OURS, "sdpa_flash2"])
            for case in grid
        ]
    if suite == "packed":
        return [([case, dataclasses.replace(case, packed=True)], list(OURS)) for case in grid]
    longest = 4096 if quick else 65536
    jobs = []
    for seqlen in (2**i for i in range(7, 17) if 2**i <= longest):
        implementations = ["flash_portable", "sdpa_flash2"] + ["sdpa_math"] * (seqlen <= 4096)
        jobs.append(
            ([Case(16, 8, 64, seqlen, False, 0.1, "float16", padded=True)], ["flash_portable"])
        )
        jobs.append(([Case(16, 8, 64, seqlen, False, 0.0, "float16")], implementations))
    return jobs


def make_forward(impl: str, case: Case, seed: int) -> Made:
    """What scripts.timing times."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (case.batch, case.seqlen, case.nheads, case.headdim)
    leaves = [
        torch.randn(shape, generator=generator, device="cuda").to(getattr(torch, case.dtype))
        for _ in range(3)
    ]
    if case.packed:
        leaves = [t.flatten(0, 1) for t in leaves]
    leaves = [t.requires_grad_() for t in leaves]
    q, k, v = leaves
    if impl in OURS:
        kernel = impl.removeprefix("flash_")
        options: dict[str, Any] = dict(causal=case.causal, dropout_p=case.dropout_p, kernel=kernel)
        if case.packed:
            steps = torch.arange(case.batch + 1, dtype=torch.int32, device="cuda") * case.seqlen
            options.update(cu_seqlens_q=steps, cu_seqlens_k=steps)
            options.update(max_seqlen_q=case.seqlen, max_seqlen_k=case.seqlen)
            return (lambda: flash_attention_varlen(q, k, v, **options)), leaves
        if case.padded:
            options["lengths_k"] = torch.randint(
                case.seqlen - 20, case.seqlen + 1, (case.batch,), generator=generator, device="cuda"
            )
        return (lambda: flash_attention(q, k, v, **options)), leaves
    if impl == "fa4":
        from flash_attn.cute import flash_attn_func

        return (lambda: flash_attn_func(q, k, v, causal=case.causal)[0]), leaves
    heads_first = [t.transpose(1, 2) for t in leaves]
    if impl == "flex":
        block_mask = None
        if case.causal:
            block_mask = create_block_mask(
                lambda b, h, i, j: i >= j, None, None, case.seqlen, case.seqlen, device="cuda"
            )
        return (lambda: compiled_flex()(*heads_first, block_mask=block_mask)), leaves
    backend = {
        "sdpa_flash2": SDPBackend.FLASH_ATTENTION,
        "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
        "sdpa_math": SDPBackend.MATH,
    }[impl]

    q, k, v = heads_first

    def sdpa() -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                q, k, v, dropout_p=case.dropout_p, is_causal=case.causal
            )

    return sdpa, leaves


def measure(cases: list[Case], implementations: list[str]) -> list[dict]:
    """Rows of the record: one per case, implementation and direction; ms is None where it cannot
    run."""
    names = list(itertools.product(cases, implementations))
    times, failures = time_in_turns(
        {name: partial(make_forward, name[1], name[0]) for name in names}
    )
    rows = []
    for direction, (case, impl) in itertools.product(DIRECTIONS, names):
        ms = times.get(((case, impl), direction))
        rows.append(
            dict(
                impl=impl, **dataclasses.asdict(case), nheads_k=case.nheads, direction=direction,
                ms=ms, tflops=None if ms is None else case.flops(direction) / ms / 1e9,
                failure=failures.get((case, impl)),
            )
        )  # fmt: skip
    return rows


def kinds_to_compile(jobs: list[tuple[str, list[Case], list[str]]]) -> list[partial[Made]]:
    """One maker for each kernel that the jobs need, of the shortest sequence."""
    kinds: dict[tuple, partial[Made]] = {}
    for _, cases, implementations in jobs:
        compiled = set(implementations) - {"sdpa_flash2", "sdpa_cudnn", "sdpa_math"}
        for case, impl in itertools.product(cases, compiled):
            of_any_length = dataclasses.replace(case, batch=0, seqlen=int(case.seqlen > 2048))
            key = case if impl == "flex" else of_any_length
            kinds.setdefault((impl, key), partial(make_forward, impl, case))
    return list(kinds.values())


def measure_host(impl: str) -> list[dict]:
    """Rows of the suite host: of an input that the GPU hardly notices."""
    case = Case(1, 8, 64, 128, True)
    found = host_us(partial(make_forward, impl, case))
    return [
        dict(impl=impl, **dataclasses.asdict(case), direction=direction, host_us=us)
        for direction, us in found.items()
    ]


def peak_gib(case: Case, impl: str) -> float | None:
    """Peak memory of one forward and backward, inputs and gradients included."""
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    try:
        function, leaves = make_forward(impl, case, 0)
        out = function()
        torch.autograd.grad(out, leaves, torch.randn_like(out))
    except (RuntimeError, torch.OutOfMemoryError):
        return None
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--suites", nargs="+", default=list(SUITES), choices=SUITES)
    parser.add_argument("--quick", action="store_true", help="1K and 4K only: about a minute")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmark_attention.json"))
    parser.add_argument(
        "--append",
        action="store_true",
        help="keep the cases that the record has and this run lacks",
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmark_attention needs a GPU, none is visible")
    rows = []
    earlier = read_earlier(args.output, args.append)
    kernels = [suite for suite in args.suites if suite != "host"]
    jobs = [(suite, *job) for suite in kernels for job in jobs_of(suite, args.quick)]
    compile_ahead(kinds_to_compile(jobs))
    if "host" in args.suites:
        for impl in ("flash_portable", "flash_hopper", "sdpa_flash2", "flex"):
            rows += [dict(row, suite="host") for row in measure_host(impl)]
    for suite, cases, implementations in track(jobs, "attention"):
        measured = measure(cases, implementations)
        if suite == "paper" and not cases[0].dropout_p:
            for row in measured:
                row["peak_gib"] = (
                    peak_gib(cases[0], row["impl"]) if row["direction"] == "forward" else None
                )
        rows += [dict(row, suite=suite) for row in measured]
        torch.cuda.empty_cache()
        settings = dict(suites=args.suites, quick=args.quick, cudnn=torch.backends.cudnn.version())
        record = make_record("benchmark_attention", rows, settings, omit="--output")
        record = appended(earlier, record, key=itemgetter(*JOB))
        write_record(args.output, record)  # what is measured is kept
    console = Console(width=160)
    for path in plot(record, args.output.parent):
        console.print(f"plot {path}")
    console.print(f"record {args.output}")
    render(record, console)


if __name__ == "__main__":
    main()
