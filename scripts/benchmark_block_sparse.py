"""Block-sparse attention against the density of its mask: python -m
scripts.benchmark_block_sparse --help

Masks of 128 x 128 blocks, one for all heads: random ones with the same number of blocks in every
row, and the butterfly (Pixelfly, the paper's pattern). Beside ours on the same mask: FlexAttention,
compiled, and dense attention (ours). "x proportional" is time / (density * dense time): 1 is speed
in proportion to the work.
"""

import argparse
import functools
from functools import partial
from operator import itemgetter
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from flash_kernels import BlockMask, block_patterns, block_sparse_attention, flash_attention
from scripts.records import appended, make_record, read_earlier, write_record
from scripts.timing import DIRECTIONS, Made, compile_ahead, compiled_flex, time_in_turns

BLOCK = 128
SHAPES = ((32, 64), (16, 128))  # heads, headdim


@functools.cache
def build_mask(seqlen: int, pattern: str, density: float | None) -> BlockMask:
    """The butterfly, or a mask with round(density * blocks) random blocks in each row."""
    if density is None:
        return block_patterns.butterfly(seqlen, device="cuda")
    num_blocks = seqlen // BLOCK
    order = torch.rand(num_blocks, num_blocks, generator=torch.Generator().manual_seed(0))
    blocks = order.argsort(-1) < round(density * num_blocks)
    return BlockMask.from_dense(blocks.cuda(), BLOCK, BLOCK)


def masks_of(seqlen: int) -> list[tuple[int, str, float | None]]:
    """Arguments of build_mask: densities that leave a block a row, and the butterfly."""
    densities = [2.0**-i for i in range(1, 7)]
    masks = [(seqlen, "random", density) for density in densities if density * seqlen >= BLOCK]
    return [*masks, (seqlen, "butterfly", None)]


def make(
    impl: str, mask_arguments: tuple, batch: int, nheads: int, headdim: int, seed: int
) -> Made:
    mask, seqlen = build_mask(*mask_arguments), mask_arguments[0]
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (batch, seqlen, nheads, headdim)
    q, k, v = leaves = [
        torch.randn(shape, generator=generator, device="cuda").bfloat16().requires_grad_()
        for _ in range(3)
    ]
    if impl == "dense":
        return (lambda: flash_attention(q, k, v)), leaves
    if impl == "dense_portable":
        return (lambda: flash_attention(q, k, v, kernel="portable")), leaves
    if impl.startswith("block_sparse"):
        kernel = "portable" if impl.endswith("portable") else None
        return (lambda: block_sparse_attention(q, k, v, mask, kernel=kernel)), leaves
    flex_mask, heads_first = mask.to_flex(), [t.transpose(1, 2) for t in leaves]
    return (lambda: compiled_flex()(*heads_first, block_mask=flex_mask)), leaves


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seqlens", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--tokens", type=int, default=16384, help="batch x seqlen, at least")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmark_block_sparse.json"))
    parser.add_argument(
        "--append",
        action="store_true",
        help="keep the lengths that the record has and this run lacks",
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmark_block_sparse needs a GPU, none is visible")
    rows = []
    earlier = read_earlier(args.output, args.append)
    cases = [
        (nheads, headdim, mask_arguments)
        for seqlen in args.seqlens
        for mask_arguments in masks_of(seqlen)
        for nheads, headdim in SHAPES
    ]
    implementations = ["dense", "dense_portable", "block_sparse", "block_sparse_portable", "flex"]
    # Of the kernels, one mask for each; FlexAttention compiles each length.
    compile_ahead(
        [
            partial(make, impl, (seqlen, "butterfly", None), 1, nheads, headdim)
            for nheads, headdim in SHAPES
            for seqlen in args.seqlens
            for impl in (implementations if seqlen == args.seqlens[0] else ["flex"])
        ]
    )
    for number, case in enumerate(track(cases, "block-sparse attention")):
        nheads, headdim, mask_arguments = case
        mask, (seqlen, name, _) = build_mask(*mask_arguments), mask_arguments
        batch = max(1, args.tokens // seqlen)
        makers = {
            i: partial(make, i, mask_arguments, batch, nheads, headdim) for i in implementations
        }
        times, failures = time_in_turns(makers)
        for direction in DIRECTIONS:
            dense = times.get(("dense", direction))
            for impl in implementations:
                ms, density = times.get((impl, direction)), mask.density
                density = 1.0 if impl.startswith("dense") else density
                rows.append(
                    dict(
                        impl=impl, batch=batch, nheads=nheads, nheads_k=nheads, headdim=headdim,
                        seqlen=seqlen, causal=False, dropout_p=0.0, dtype="bfloat16",
                        direction=direction, pattern=name, density=density, ms=ms,
                        times_proportional=ms / (density * dense) if ms and dense else None,
                        failure=failures.get(impl),
                    )
                )  # fmt: skip
        settings = dict(block=BLOCK, seqlens=args.seqlens, tokens=args.tokens)
        record = make_record("benchmark_block_sparse", rows, settings, omit="--output")
        to_come = {arguments[0] for *_, arguments in cases[number + 1 :]}
        record = appended(earlier, record, key=itemgetter("seqlen"), unfinished=to_come)
        write_record(args.output, record)  # what is measured is kept
    render(record, Console(width=150))
    print(f"record {args.output}")


def render(record: dict, console: Console) -> None:
    """x proportional of ours and FlexAttention, and the speedup over dense attention."""
    table = Table(
        "mask", "density", "ours", "FlexAttention", "dense / ours", title="x proportional"
    )
    cells: dict[tuple, dict] = {}
    for row in record["rows"]:
        if row["impl"] in ("block_sparse", "flex"):
            label = f"D{row['headdim']} {row['seqlen']} {row['pattern']} {row['direction']}"
            cells.setdefault((label, row["density"]), {})[row["impl"]] = row["times_proportional"]
    for (label, density), found in cells.items():
        ours, flex = found.get("block_sparse"), found.get("flex")
        numbers = (density, ours, flex, ours and 1.0 / (ours * density))
        table.add_row(label, *("-" if n is None else f"{n:.3g}" for n in numbers))
    console.print(table)


if __name__ == "__main__":
    main()
