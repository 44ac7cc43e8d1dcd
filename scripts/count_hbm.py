"""Bytes between HBM and the chip, the paper's point: counted from tile sizes, and by hardware.

    python -m scripts.count_hbm                        figure 2's attention: GPT-2 medium
    python -m scripts.count_hbm seqlen=4096 batch=16   another size

Computed: what the kernels load and store by their tile sizes, as if there were no cache, and what
theorem 2 and the paper's algorithms say for the SRAM of the GPU. Measured: dram__bytes_read.sum and
dram__bytes_write.sum of every kernel, by Nsight Compute (ncu), where it is installed and may read
counters. What is measured of ours lies between the computed and the inputs and outputs once: the
L2 cache, of which the paper's count knows nothing, serves loads that tiles repeat. Without ncu
every number shown is computed, and the output says so. Timed, where there is a GPU: each of them,
by CUDA events, so that runtime stands against the tile as in the middle of figure 2.
"""

import dataclasses
import json
import sys
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from flash_kernels import flash_attention
from flash_kernels.portable.tile_choice import Tile, gpu_family, table_tile, use_tiles
from scripts import hbm_counts as counts
from scripts import ncu_counters
from scripts.arguments import fail, option, parse_arguments
from scripts.hbm_counts import Traffic
from scripts.paper_numbers import HBM_GB, verdict
from scripts.records import make_record, write_record
from scripts.rivals import DROPOUT, HEADDIM, make
from scripts.timing import Made, time_in_turns

SIZE = 2  # bytes of an fp16 element
KERNELS = ("forward", "dk_dv", "dq")
# Beside the table's: more queries a tile mean fewer loads of the keys.
TILES = {
    f"{block_m}x64": Tile(block_m, 64, warps, 2)
    for block_m, warps in ((16, 4), (32, 4), (64, 4), (128, 8), (256, 8))
}
_SRAM_KIB = 227  # of a block on an H100 or H200


@dataclasses.dataclass
class Options:
    batch: int = option("sequences", default=64)
    nheads: int = option("heads, of 64 dims", default=16)
    seqlen: int = option("tokens", default=1024)
    causal: bool = option("hide later keys", default=True)
    dropout: bool = option("drop a tenth of the probabilities", default=True)
    sram_kib: int | None = option("SRAM of theorem 2; none: the GPU's, or 227", default=None)
    measure: bool = option("use ncu where it is there", default=True)
    time: bool = option("time each, where there is a GPU", default=True)
    out: str = option("the record", default="outputs/reproduce/count_hbm.json")
    profile: str = option("used by this script itself, under ncu", default="")


def default_tiles(options: Options) -> dict[str, Tile]:
    """The table's tiles of each kernel, for the GPU at hand or an H200."""
    family = gpu_family(torch.device("cuda")) if torch.cuda.is_available() else "hopper"
    return {k: table_tile(k, family, HEADDIM, torch.float16, options.dropout) for k in KERNELS}


def cases(options: Options) -> dict[str, dict[str, Tile] | None]:
    """Name of an implementation -> its tiles, None where it has none."""
    own = {"flash, its own tiles": default_tiles(options)}
    others = {f"flash, tiles {name}": dict.fromkeys(KERNELS, tile) for name, tile in TILES.items()}
    return {"standard": None, **own, **others}


def computed(options: Options, tiles: dict[str, Tile] | None) -> dict[str, Traffic]:
    """direction -> bytes of all heads."""
    shape = (options.seqlen, HEADDIM, SIZE)
    if tiles is None:
        forward, backward = counts.standard_forward(*shape), counts.standard_backward(*shape)
    else:
        flags = dict(causal=options.causal, has_dropout=options.dropout)
        sizes = {kernel: (tile.block_m, tile.block_n) for kernel, tile in tiles.items()}
        forward = counts.flash_forward(*shape, sizes["forward"], **flags)
        backward = counts.flash_backward(*shape, sizes["dk_dv"], sizes["dq"], **flags)
    return _of_all_heads(options, forward, backward)


def bounds(options: Options, sram_kib: int) -> dict[str, dict[str, Traffic]]:
    """name -> direction -> bytes: of the paper's algorithms with blocks that fill the SRAM, and of
    every input and output once."""
    shape = (options.seqlen, HEADDIM, SIZE)
    paper = [
        count(*shape, sram_kib * 1024, causal=options.causal)
        for count in (counts.paper_forward, counts.paper_backward)
    ]
    once = counts.once_forward(*shape), counts.once_backward(*shape)
    return {
        f"algorithms 1 and 4, SRAM of {sram_kib} KiB": _of_all_heads(options, *paper),
        "inputs and outputs once": _of_all_heads(options, *once),
    }


def _of_all_heads(options: Options, forward: Traffic, backward: Traffic) -> dict[str, Traffic]:
    heads = options.batch * options.nheads
    found = {"forward": forward.times(heads), "backward": backward.times(heads)}
    return {**found, "both": found["forward"] + found["backward"]}


def sram_of_gpu() -> int:
    """KiB of shared memory that a block can have."""
    if not torch.cuda.is_available():
        return _SRAM_KIB
    properties = torch.cuda.get_device_properties(0)
    return getattr(properties, "shared_memory_per_block_optin", _SRAM_KIB * 1024) // 1024


def run_under_ncu(options: Options) -> None:
    """The program that ncu watches: a section forward and a section backward of each case.

    Writes which sections there are, or why a case cannot run, to the file options.profile.
    """
    ready, failures = [], {}
    for name, tiles in cases(options).items():
        function, leaves = _made(options, tiles, 0)
        guard = use_tiles(**tiles) if tiles else nullcontext()
        try:
            with guard:  # compiles
                dout = torch.randn_like(function())
                torch.autograd.grad(function(), leaves, dout)
            ready.append((name, function, leaves, dout, tiles))
        except Exception as error:  # a tile may be too large for the shared memory
            failures[name] = (str(error).splitlines() or [type(error).__name__])[0][:120]
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for _, function, leaves, dout, tiles in ready:
        with use_tiles(**tiles) if tiles else nullcontext():
            out = function()
            ncu_counters.mark()
            torch.autograd.grad(out, leaves, dout)
            ncu_counters.mark()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    sections = [[name, d] for name, *_ in ready for d in ("forward", "backward")]
    Path(options.profile).write_text(json.dumps({"sections": sections, "failures": failures}))


def _made(options: Options, tiles: dict[str, Tile] | None, seed: int) -> Made:
    """Standard attention, or ours; the tiles are those that are set when it is called."""
    shape: dict[str, Any] = dict(batch=options.batch, nheads=options.nheads, causal=options.causal)
    function, leaves = make("pytorch", options.seqlen, options.dropout, False, seed, **shape)
    if tiles is None:
        return function, leaves
    dropout_p = DROPOUT if options.dropout else 0.0
    settings: dict[str, Any] = dict(causal=options.causal, dropout_p=dropout_p, kernel="portable")
    q, k, v = leaves
    return (lambda: flash_attention(q, k, v, **settings)), leaves


def timed(options: Options) -> tuple[dict[tuple[str, str], float], dict[str, str]]:
    """({(implementation, direction): milliseconds}, {implementation: why it cannot run})."""
    if not options.time or not torch.cuda.is_available():
        return {}, {}
    found: dict[tuple[str, str], float] = {}
    failures: dict[str, str] = {}
    for name, tiles in cases(options).items():
        try:
            with use_tiles(**tiles) if tiles else nullcontext():
                ms, failed = time_in_turns({name: partial(_made, options, tiles)})
        except Exception as error:  # of Triton: a tile may be too large for the shared memory
            ms, failed = {}, {name: (str(error).splitlines() or [type(error).__name__])[0][:120]}
        failures |= failed
        found |= ms
        if ms:
            found[name, "both"] = sum(ms.values())
    return found, failures


def measured(options: Options) -> tuple[dict[tuple[str, str], Traffic], dict[str, str], str]:
    """({(implementation, direction): bytes}, {implementation: why it cannot run}, why nothing is
    measured or "")."""
    ncu = ncu_counters.find_ncu()
    if not options.measure:
        return {}, {}, "measure=false"
    if ncu is None:
        return {}, {}, "ncu (Nsight Compute) is not installed"
    if not torch.cuda.is_available():
        return {}, {}, "no GPU is visible"
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "sections.json"
        command = [sys.executable, "-m", "scripts.count_hbm", f"profile={told}"]
        command += [f"{k}={getattr(options, k)}" for k in ("batch", "nheads", "seqlen")]
        command += [f"{k}={str(getattr(options, k)).lower()}" for k in ("causal", "dropout")]
        try:
            found = ncu_counters.profile(ncu, command, Path(folder) / "ncu.csv")
            listed = json.loads(told.read_text())
        except (RuntimeError, OSError, ValueError) as error:
            return {}, {}, str(error)
    if len(found) != len(listed["sections"]):
        return {}, {}, f"ncu saw {len(found)} sections, not {len(listed['sections'])}"
    traffic = {}
    for (name, direction), kernels in zip(listed["sections"], found, strict=True):
        traffic[name, direction] = sum((k.traffic for k in kernels), Traffic(0, 0))
    for name in {name for name, _ in traffic}:
        traffic[name, "both"] = traffic[name, "forward"] + traffic[name, "backward"]
    return traffic, listed["failures"], ""


def table_rows(
    options: Options,
    sram_kib: int,
    traffic: dict[tuple[str, str], Traffic],
    failures: dict[str, str],
    ms: dict[tuple[str, str], float],
) -> list[dict]:
    """A row an implementation and direction, in bytes and ms; measured ones are None where there
    is none.

    `standard_ratio`: standard attention's measured bytes over these.
    """
    counted = {name: computed(options, tiles) for name, tiles in cases(options).items()}
    counted |= bounds(options, sram_kib)
    rows = []
    for name, directions in counted.items():
        for direction, count in directions.items():
            found = traffic.get((name, direction))
            standard = traffic.get(("standard", direction))
            rows.append(
                dict(
                    impl=name, direction=direction, tiles=_tile_sizes(cases(options).get(name)),
                    computed_read=count.read, computed_written=count.written,
                    measured_read=found and found.read, measured_written=found and found.written,
                    standard_ratio=standard.total / found.total if found and standard else None,
                    ms=ms.get((name, direction)), failure=failures.get(name),
                )
            )  # fmt: skip
    return rows


def _tile_sizes(tiles: dict[str, Tile] | None) -> dict[str, str] | None:
    if tiles is None:
        return None
    return {k: f"{tile.block_m}x{tile.block_n}" for k, tile in tiles.items()}


def show(options: Options, rows: list[dict], why_not: str, theorem: float | None) -> None:
    console = Console(width=130)
    table = Table(
        "", "", "computed: read", "written", "MEASURED: read", "written", "ms",
        "standard / it, measured",
        title=f"GB of HBM traffic, batch {options.batch}, {options.nheads} heads of {HEADDIM}, "
        f"{options.seqlen:,} tokens, fp16" + ", causal" * options.causal
        + ", dropout" * options.dropout,
    )  # fmt: skip
    keys = ("computed_read", "computed_written", "measured_read", "measured_written")
    for row in rows:
        cells = ["-" if row[key] is None else f"{row[key] / 1e9:.3f}" for key in keys]
        ratio = row["failure"] or (f"{row['standard_ratio']:.1f}" if row["standard_ratio"] else "-")
        cells.append("-" if row["ms"] is None else f"{row['ms']:.3f}")
        table.add_row(row["impl"], row["direction"], *cells, ratio)
    console.print(table)
    if why_not:
        print(f"No bytes here were measured: {why_not}. They are computed from formulas.")
    heads = options.batch * options.nheads
    print(
        "Theorem 2, N^2 d^2 / M: "
        + (
            f"{theorem * heads / 1e9:.3f} GB forward, without its constant"
            if theorem
            else "M is outside d <= M <= N d, the SRAM holds all keys of a head"
        )
    )
    paper = HBM_GB["standard"] / HBM_GB["flash"]
    print(
        f"The paper's figure 2, both directions on an A100: {HBM_GB['standard']} GB standard, "
        f"{HBM_GB['flash']} GB FlashAttention, {paper:.1f} times less"
    )
    own = next(r for r in rows if r["impl"].startswith("flash") and r["direction"] == "both")
    if own["standard_ratio"]:
        print(
            f"Here {own['standard_ratio']:.1f} times less: {verdict(own['standard_ratio'], paper)}"
        )


def main(arguments: list[str]) -> None:
    options = parse_arguments(Options, arguments, __doc__)
    for name in ("batch", "nheads", "seqlen"):
        if getattr(options, name) < 1:
            fail(f"{name} must be at least 1, got {getattr(options, name)}")
    if options.profile:
        run_under_ncu(options)
        return
    sram_kib = options.sram_kib or sram_of_gpu()
    traffic, failures, why_not = measured(options)
    ms, too_large = timed(options)
    rows = table_rows(options, sram_kib, traffic, {**too_large, **failures}, ms)
    theorem = counts.theorem_2(options.seqlen, HEADDIM, SIZE, sram_kib * 1024)
    show(options, rows, why_not, theorem)
    settings = dict(
        batch=options.batch, nheads=options.nheads, headdim=HEADDIM, seqlen=options.seqlen,
        causal=options.causal, dropout_p=DROPOUT * options.dropout, dtype="float16",
        sram_kib=sram_kib, not_measured=why_not or None,
    )  # fmt: skip
    write_record(options.out, make_record("count_hbm", rows, settings, omit="out"))
    print(f"record {options.out}")


if __name__ == "__main__":
    main(sys.argv[1:])
