"""Time tile candidates of the portable attention kernels on this GPU: python -m
scripts.tune_attention --help

Every candidate is compiled and checked against the reference in a worker process (a wrong or
crashing one costs nothing else), then the survivors are timed in turns, at full size, on rotated
inputs. The winners go by hand into flash_kernels/portable/tile_choice.py.
"""

import argparse
import concurrent.futures
import itertools
import json
import multiprocessing
import os
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from flash_kernels import reference, testing
from flash_kernels.portable import attention_backward as backward
from flash_kernels.portable import attention_forward as forward
from flash_kernels.portable.dropout import column_keys
from flash_kernels.portable.launch import Problem
from flash_kernels.portable.tile_choice import Tile, table_tile

# (block_m query rows, block_n keys, num_warps, num_stages)
CANDIDATES = {
    ("forward", 64): [
        (128, 128, 4, 3), (128, 128, 4, 2), (128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 4, 3),
        (128, 64, 4, 4), (64, 128, 4, 3), (64, 128, 4, 2), (64, 64, 4, 3), (256, 64, 8, 3), (256,
        128, 8, 2), (256, 128, 8, 3), (128, 64, 8, 3), (128, 256, 8, 2),
    ],
    ("forward", 128): [
        (128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 4, 3),
        (128, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (64, 64, 4, 2), (256, 64, 8, 2),
        (128, 128, 8, 1),
    ],
    ("dk_dv", 64): [
        (64, 128, 8, 3), (64, 128, 8, 2), (64, 128, 4, 3), (64, 64, 4, 3), (64, 64, 4, 2), (32,
        128, 4, 3), (32, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 2), (64, 64, 8, 3), (32, 64, 4,
        3), (128, 64, 4, 2), (64, 128, 8, 4), (64, 64, 4, 4),
    ],
    ("dk_dv", 128): [
        (64, 128, 8, 2), (32, 128, 8, 2), (32, 128, 8, 3), (64, 64, 8, 2), (64, 64, 8, 3), (64, 64,
        4, 2), (32, 64, 4, 3), (64, 128, 8, 3), (128, 64, 8, 2), (32, 128, 4, 2),
        (32, 128, 8, 4), (32, 64, 4, 4),
    ],
    ("dq", 64): [
        (128, 64, 4, 3), (128, 64, 4, 2), (128, 64, 8, 3), (64, 64, 4, 3), (64, 64, 4, 4), (64,
        128, 4, 3), (128, 128, 8, 2), (128, 128, 8, 3), (256, 64, 8, 2), (256, 64, 8, 3), (64,
        128, 4, 2),
    ],
    ("dq", 128): [
        (128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 8, 2), (128,
        32, 8, 3), (128, 32, 4, 3), (128, 128, 8, 1), (64, 32, 4, 3),
    ],
}  # fmt: skip
_MATMULS = {"forward": 2, "dk_dv": 4, "dq": 3}
_SEED = 2**45 + 3


def make_problem(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    headdim: int,
    causal: bool,
    dropout_p: float,
    dtype: torch.dtype,
    seed: int = 0,
) -> Problem:
    q, k, v = testing.make_qkv(
        batch, seqlen_q, seqlen_k, 2048 // headdim, headdim, dtype=dtype, device="cuda", seed=seed
    )
    return Problem(
        q.detach(),
        k.detach(),
        v.detach(),
        softmax_scale=headdim**-0.5,
        window_right=0 if causal else None,
        dropout_p=dropout_p,
        dropout_seed=torch.full((1,), _SEED, device="cuda") if dropout_p else None,
    )


class Call:
    """One kernel on one problem, what it needs made beforehand; `run(tile)` returns its outputs."""

    def __init__(self, kernel: str, problem: Problem) -> None:
        self.kernel, self.problem = kernel, problem
        if kernel == "forward":
            return
        self.dout = torch.randn_like(problem.q)
        out, lse = forward.attention_forward(problem)
        self.row_words = backward.compute_row_words(problem, self.dout, None, out, lse)
        self.keys = column_keys(problem)
        self.outputs = [torch.empty_like(problem.q) for _ in range(1 if kernel == "dq" else 2)]
        if kernel == "dk_dv":
            self.outputs = [torch.empty_like(problem.k), torch.empty_like(problem.v)]

    def run(self, tile: Tile) -> list[torch.Tensor]:
        if self.kernel == "forward":
            return list(forward.attention_forward(self.problem, tile))
        inputs = (self.problem, self.dout, self.row_words, self.keys)
        if self.kernel == "dq":
            backward.launch_dq(*inputs, self.outputs[0], tile)
        else:
            backward.launch_dk_dv(*inputs, self.outputs[0], self.outputs[1], tile)
        return self.outputs


def expected(call: Call, dtype: torch.dtype) -> list[torch.Tensor]:
    """Outputs of the call by the reference in `dtype`."""
    p = call.problem
    leaves = [t.to(dtype).requires_grad_() for t in (p.q, p.k, p.v)]
    out, lse = reference.flash_attention(
        *leaves, causal=p.has_right, dropout_p=p.dropout_p, dropout_seed=p.dropout_seed,
        return_lse=True,
    )  # fmt: skip
    if call.kernel == "forward":
        return [out, lse]
    gradients = torch.autograd.grad(out, leaves, call.dout.to(dtype))
    return [gradients[0]] if call.kernel == "dq" else list(gradients[1:])


def check(job: tuple) -> str:
    """Compile and check one candidate on a small problem: "" or what is wrong.

    The lengths are no multiples of a tile, but of 16: a kernel specialized to other divisibility
    would be compiled again for timing.
    """
    kernel, headdim, causal, dropout_p, dtype, tile = job
    try:
        torch.manual_seed(0)
        call = Call(kernel, make_problem(2, 464, 528, headdim, causal, dropout_p, dtype))
        truth, plain = expected(call, torch.float64), expected(call, dtype)
        first = [t.clone() for t in call.run(Tile(*tile))]
        for name, ours, plain_i, truth_i in zip("ab", first, plain, truth, strict=False):
            testing.check_budget(name, ours, plain_i, truth_i, 2 * torch.finfo(ours.dtype).eps)
        for _ in range(20):
            if not all(
                torch.equal(a, b) for a, b in zip(first, call.run(Tile(*tile)), strict=True)
            ):
                return "runs differ"
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}".replace("\n", " ")[:200]
    return ""


def check_all(jobs: list, workers: int) -> dict:
    """job -> what is wrong. A lost CUDA context spoils its worker: such jobs run again."""
    context = multiprocessing.get_context("spawn")
    results = {}
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = {pool.submit(check, job): job for job in jobs}
        done = concurrent.futures.as_completed(futures)
        for future in track(done, "compile and check", total=len(jobs)):
            try:
                results[futures[future]] = future.result()
            except concurrent.futures.process.BrokenProcessPool:
                results[futures[future]] = "CUDA error: worker died"
    for job, wrong in results.items():
        if "CUDA error" in wrong or "illegal" in wrong:
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
                try:
                    results[job] = pool.submit(check, job).result()
                except concurrent.futures.process.BrokenProcessPool:
                    results[job] = "worker died"
    return results


def time_candidates(calls: list[Call], tiles: list[Tile], repeats: int) -> dict[Tile, float]:
    """Median milliseconds of each tile, in turns, the inputs rotated."""
    times: dict[Tile, list] = {tile: [] for tile in tiles}
    for tile in tiles:
        for call in calls:
            call.run(tile)
    for repeat in range(repeats):
        call = calls[repeat % len(calls)]
        for tile in tiles:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call.run(tile)
            end.record()
            times[tile].append((start, end))
    torch.cuda.synchronize()
    return {tile: statistics.median(a.elapsed_time(b) for a, b in times[tile]) for tile in tiles}


def winners(rows: list[dict]) -> dict[tuple, tuple[tuple, float]]:
    """Table cell (kernel, headdim, dropout_p) -> its tile, and the geometric mean over causal or
    not and over the lengths of that tile's speed by the best tile's."""
    cells: dict[tuple, dict[tuple, list[float]]] = {}
    best: dict[tuple, float] = {}
    case_keys = ("kernel", "headdim", "dropout_p", "causal", "seqlen")
    for row in rows:
        case = tuple(row[key] for key in case_keys)
        if row["ms"]:
            best[case] = min(best.get(case, row["ms"]), row["ms"])
    for row in rows:
        case = tuple(row[key] for key in case_keys)
        share = best[case] / row["ms"] if row["ms"] else 1e-3
        cells.setdefault(case[:3], {}).setdefault(tuple(row["tile"]), []).append(share)
    means = {
        cell: {tile: statistics.geometric_mean(shares) for tile, shares in tiles.items()}
        for cell, tiles in cells.items()
    }
    return {cell: max(m.items(), key=lambda item: item[1]) for cell, m in means.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--headdims", type=int, nargs="+", default=[64, 128], choices=[64, 128])
    parser.add_argument("--kernels", nargs="+", default=["forward", "dk_dv", "dq"])
    parser.add_argument("--causal", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.0, 0.1])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--tokens", type=int, default=16384, help="batch x seqlen")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--top", type=int, default=4, help="rows shown per case")
    parser.add_argument("--output", type=Path, default=Path("outputs/tune_attention.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(
            "tune_attention needs a GPU, none is visible: run it where the kernels will run"
        )
    started = time.perf_counter()
    dtype = getattr(torch, args.dtype)
    cases = list(
        itertools.product(args.kernels, args.headdims, map(bool, args.causal), args.dropout)
    )
    jobs = [(*case, dtype, tile) for case in cases for tile in CANDIDATES[case[:2]]]
    wrong = check_all(jobs, args.workers)

    rows = []
    for case, seqlen in track(list(itertools.product(cases, args.seqlens)), "time"):
        kernel, headdim, causal, dropout_p = case
        shape = (args.tokens // seqlen, seqlen, seqlen, headdim, causal, dropout_p, dtype)
        calls = [Call(kernel, make_problem(*shape, seed=seed)) for seed in range(3)]
        good = [Tile(*tile) for tile in CANDIDATES[case[:2]] if not wrong[(*case, dtype, tile)]]
        flops = _MATMULS[kernel] * 2 * args.tokens * seqlen * 2048 * (0.5 if causal else 1.0)
        times = time_candidates(calls, good, args.repeats) if good else {}
        for tile in CANDIDATES[case[:2]]:
            ms = times.get(Tile(*tile))
            rows.append(
                dict(
                    kernel=kernel,
                    headdim=headdim,
                    causal=causal,
                    dropout_p=dropout_p,
                    seqlen=seqlen,
                    tile=tile,
                    ms=ms,
                    tflops=None if ms is None else round(flops / ms / 1e9, 1),
                    wrong=wrong[(*case, dtype, tile)],
                )  # fmt: skip
            )
        del calls
    args.output.parent.mkdir(parents=True, exist_ok=True)
    record = dict(
        name="tune_attention", hardware=torch.cuda.get_device_name(), torch=torch.__version__,
        seqlens=args.seqlens, tokens=args.tokens, dtype=args.dtype,
        seconds=round(time.perf_counter() - started, 1), rows=rows,
    )  # fmt: skip
    args.output.write_text(json.dumps(record, indent=1))

    family = "hopper" if torch.cuda.get_device_capability() == (9, 0) else "ampere"
    columns = ("kernel", "headdim", "causal", "dropout", "seqlen")
    table = Table(*columns, "block_m, block_n, warps, stages: TFLOP/s", "default")
    for case, seqlen in itertools.product(cases, args.seqlens):
        keys = ("kernel", "headdim", "causal", "dropout_p", "seqlen")
        timed = [r for r in rows if tuple(r[k] for k in keys) == (*case, seqlen)]
        ranked = sorted((r for r in timed if r["ms"]), key=lambda r: r["ms"])
        default = tuple(table_tile(case[0], family, case[1], dtype, case[3] > 0.0))
        now = next((f"{r['tflops']}" for r in timed if tuple(r["tile"]) == default), "-")
        best = "   ".join(f"{r['tile']}: {r['tflops']}" for r in ranked[: args.top])
        table.add_row(*map(str, case), str(seqlen), best, now)
    console = Console(width=200)
    for row in rows:
        if row["wrong"] and row["seqlen"] == args.seqlens[0]:
            case = [row[c] for c in ("kernel", "headdim", "causal", "dropout_p", "tile")]
            console.print(f"rejected {case}: {row['wrong']}", highlight=False)
    console.print(table)
    for (kernel, headdim, dropout_p), (tile, share) in winners(rows).items():
        console.print(
            f"{kernel} D{headdim} dropout {dropout_p}: {tile} reaches {share:.1%} of the best tile "
            "of each case and length",
            highlight=False,
        )
    console.print(f"{record['seconds']} s, written to {args.output}")


if __name__ == "__main__":
    main()
