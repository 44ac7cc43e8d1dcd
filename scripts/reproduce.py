"""The paper's tables measured again on this machine, a verdict a row: python -m scripts.reproduce
--help

    python -m scripts.reproduce table11      forward and backward with dropout and key padding
    python -m scripts.reproduce table21      memory
    python -m scripts.reproduce table4       what it says, and the commands that train its rows

table9 to table20 are runtimes, table21 memory, at batch 16, 8 heads of 64, fp16, from 128 to 65,536
tokens; table1 to table6 train for days and are not run here. Machines differ, so what is compared
is a ratio: PyTorch's unfused attention over ours, with the paper's own. A stopped measurement
continues where it was when started again.
"""

import argparse
import datetime
import json
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flash_kernels import BlockMask, block_sparse_attention, flash_attention
from model.run import environment
from scripts.arguments import command_line
from scripts.paper_numbers import (
    MEMORY_MB,
    NO_COMMAND,
    RUNTIME_MS,
    RUNTIME_TABLES,
    SEQLENS,
    TRAINING,
    verdict,
)
from scripts.timing import time_in_turns

BATCH, NHEADS, HEADDIM, DROPOUT, PADDING = 16, 8, 64, 0.1, 20
IMPLEMENTATIONS = ("pytorch", "flash", "block_sparse")
_LONGEST_UNFUSED = 8192


def paper_mask(seqlen: int) -> BlockMask:
    """One block-sparse mask of the paper's density as far as its tables tell it: an eighth of the
    keys, at most 256 a query, here in blocks of 128 x 128 (the diagonal and its left neighbour)."""
    num_blocks = -(-seqlen // 128)
    visible = max(1, min(seqlen // 8, 256) // 128)
    index = torch.arange(num_blocks, device="cuda")
    distance = (index[:, None] - index[None, :]) % num_blocks
    return BlockMask.from_dense(distance < visible, 128, 128, seqlen_q=seqlen, seqlen_k=seqlen)


def make(impl: str, seqlen: int, has_dropout: bool, is_padded: bool, seed: int):
    """(function that computes the output, q, k and v): what scripts.timing times."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (BATCH, seqlen, NHEADS, HEADDIM)
    q, k, v = leaves = [
        torch.randn(shape, generator=generator, device="cuda").half().requires_grad_()
        for _ in range(3)
    ]
    dropout_p, lengths = DROPOUT if has_dropout else 0.0, None
    if is_padded:
        lengths = torch.randint(
            seqlen - PADDING, seqlen + 1, (BATCH,), generator=generator, device="cuda"
        )
    options = dict(lengths_k=lengths, dropout_p=dropout_p)
    if impl == "flash":
        return (lambda: flash_attention(q, k, v, **options)), leaves
    if impl == "block_sparse":
        mask = paper_mask(seqlen)
        return (lambda: block_sparse_attention(q, k, v, mask, **options)), leaves
    keep = None
    if is_padded:
        keep = (torch.arange(seqlen, device="cuda") < lengths[:, None])[:, None, None, :]
    heads_first = [t.transpose(1, 2) for t in leaves]

    def unfused():
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(*heads_first, attn_mask=keep, dropout_p=dropout_p)

    return unfused, leaves


def measure_runtime(seqlen: int, options: tuple[bool, bool]) -> dict:
    """Milliseconds of each implementation: forward, backward, both."""
    names = [i for i in IMPLEMENTATIONS if i != "pytorch" or seqlen <= _LONGEST_UNFUSED]
    times, failures = time_in_turns({name: partial(make, name, seqlen, *options) for name in names})
    row = {"seqlen": seqlen, "failures": failures}
    for name in IMPLEMENTATIONS:
        forward, backward = (times.get((name, d)) for d in ("forward", "backward"))
        both = None if forward is None or backward is None else forward + backward
        row[name] = {"forward": forward, "backward": backward, "both": both}
    torch.cuda.empty_cache()
    return row


def measure_memory(seqlen: int) -> dict:
    """Peak MB (10^6 bytes) of a forward and backward, inputs and gradients included."""
    row = {"seqlen": seqlen, "failures": {}}
    for name in IMPLEMENTATIONS:
        row[name] = None
        if name == "pytorch" and seqlen > _LONGEST_UNFUSED:
            continue
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        try:
            function, leaves = make(name, seqlen, False, False, 0)
            out = function()
            torch.autograd.grad(out, leaves, torch.randn_like(out))
            row[name] = (torch.cuda.max_memory_allocated() - before) / 1e6
            del out
        except torch.OutOfMemoryError as error:
            row["failures"][name] = str(error).splitlines()[0][:120]
        del function, leaves
    return row


def show(name: str, rows: list[dict], console: Console) -> list[dict]:
    """Print the table; the verdicts as rows for the record."""
    is_memory = name == "table21"
    options, direction = RUNTIME_TABLES.get(name, (None, None))
    paper = MEMORY_MB if is_memory else RUNTIME_MS[options][direction]
    unit = "MB" if is_memory else "ms"
    table = Table(
        "tokens", "", f"paper, {unit}", f"here, {unit}", "PyTorch / it: paper", "here", ""
    )
    verdicts = []
    for row in rows:
        at = SEQLENS.index(row["seqlen"])
        here = {i: row[i] if is_memory else row[i][direction] for i in IMPLEMENTATIONS}
        for impl in IMPLEMENTATIONS:
            ratios = [
                numbers["pytorch"] / numbers[impl]
                if numbers["pytorch"] and numbers[impl] else None
                for numbers in ({i: paper[i][at] for i in IMPLEMENTATIONS}, here)
            ]  # fmt: skip
            text = "" if impl == "pytorch" else verdict(ratios[1], ratios[0])
            verdicts.append(
                dict(
                    seqlen=row["seqlen"], impl=impl, unit=unit, paper=paper[impl][at],
                    here=here[impl], paper_ratio=ratios[0], here_ratio=ratios[1], verdict=text,
                )
            )  # fmt: skip
            numbers = (paper[impl][at], here[impl], *ratios)
            table.add_row(
                f"{row['seqlen']:,}", impl, *("-" if n is None else f"{n:.3g}" for n in numbers),
                text,
            )  # fmt: skip
    console.print(table)
    return verdicts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*RUNTIME_TABLES, "table21", *TRAINING]
    parser.add_argument("name", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="up to 2,048 tokens")
    parser.add_argument("--output", type=Path, help="default: outputs/reproduce/NAME.json")
    args = parser.parse_args()
    console = Console(width=130)
    if args.name in TRAINING:
        for row in TRAINING[args.name]:
            paper = ", ".join(f"{what} {number}" for what, number in row.paper.items())
            why = f"trains for hours to weeks; {row.command}" if row.command else NO_COMMAND
            print(f"{row.name}: {paper or 'no number in the paper'}\n    not run: {why}")
        return
    if not torch.cuda.is_available():
        raise SystemExit(f"{args.name} needs a GPU, none is visible")
    output = args.output or Path("outputs/reproduce") / f"{args.name}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    seqlens = [n for n in SEQLENS if n <= 2048 or not args.quick]
    where = environment()
    rows = []
    if output.exists():
        before = json.loads(output.read_text())
        if all(before[key] == where[key] for key in ("hardware", "versions", "git_revision")):
            rows = before["measured"]
    done = {row["seqlen"] for row in rows}
    for seqlen in track([n for n in seqlens if n not in done], args.name):
        if args.name == "table21":
            rows.append(measure_memory(seqlen))
        else:
            rows.append(measure_runtime(seqlen, RUNTIME_TABLES[args.name][0]))
        record = dict(
            name=f"reproduce_{args.name}",
            command=command_line("scripts.reproduce", omit="--output"),
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **where,
            settings=dict(batch=BATCH, nheads=NHEADS, headdim=HEADDIM, dtype="float16"),
            measured=rows,
            rows=[],
        )
        output.write_text(json.dumps(record, indent=1))
    rows.sort(key=lambda row: row["seqlen"])
    verdicts = show(args.name, rows, console)
    record = json.loads(output.read_text())
    output.write_text(json.dumps({**record, "rows": verdicts}, indent=1))
    print(f"record {output}")


if __name__ == "__main__":
    main()
