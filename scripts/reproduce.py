"""The paper's tables measured again on this machine, a verdict a row: python -m scripts.reproduce
--help

    python -m scripts.reproduce table11      forward and backward with dropout and key padding
    python -m scripts.reproduce table21      memory
    python -m scripts.reproduce table7       against Apex's FMHA, whose times are the paper's alone
    python -m scripts.reproduce table4       what it says, and the commands that train its rows

table9 to table20 are runtimes, table21 memory, at batch 16, 8 heads of 64, fp16, from 128 to 65,536
tokens. Machines differ, so what is compared is a ratio: PyTorch's unfused attention over ours, with
the paper's own. A stopped measurement continues where it was when started again. figure1 and
figure2 time the attention of GPT-2 medium; figure3 is table20 and table21 as curves. table1 to
table6 train for hours to weeks: shown are the paper's numbers, what the records under
scripts/results and outputs hold of them, and the commands that train them.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flash_kernels import BlockMask, block_sparse_attention, flash_attention
from model.run import environment
from scripts import fmha_table
from scripts.paper_numbers import (
    FIGURES,
    FMHA_SEQLENS,
    MEMORY_MB,
    RUNTIME_MS,
    RUNTIME_TABLES,
    SEQLENS,
    TRAINING,
    verdict,
)
from scripts.records import make_record, write_record
from scripts.timing import Made, time_in_turns
from scripts.trained_tables import results

BATCH, NHEADS, HEADDIM, DROPOUT, PADDING = 16, 8, 64, 0.1, 20
IMPLEMENTATIONS = ("pytorch", "flash", "block_sparse")
_LONGEST_UNFUSED = 8192
# Attention of GPT-2 medium, of which figures 1 and 2 tell.
GPT2_SEQLEN, GPT2_SHAPE = 1024, dict(batch=64, nheads=16, causal=True)
RECORDS = (Path(__file__).parent / "results", Path("outputs"))  # of tables that are trained


def paper_mask(seqlen: int) -> BlockMask:
    """One block-sparse mask of the paper's density as far as its tables tell it: an eighth of the
    keys, at most 256 a query, here in blocks of 128 x 128 (the diagonal and its left neighbour)."""
    num_blocks = -(-seqlen // 128)
    visible = max(1, min(seqlen // 8, 256) // 128)
    index = torch.arange(num_blocks, device="cuda")
    distance = (index[:, None] - index[None, :]) % num_blocks
    return BlockMask.from_dense(distance < visible, 128, 128, seqlen_q=seqlen, seqlen_k=seqlen)


def make(
    impl: str,
    seqlen: int,
    has_dropout: bool,
    is_padded: bool,
    seed: int,
    *,
    batch: int = BATCH,
    nheads: int = NHEADS,
    causal: bool = False,
) -> Made:
    """(function that computes the output, q, k and v): what scripts.timing times."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (batch, seqlen, nheads, HEADDIM)
    q, k, v = leaves = [
        torch.randn(shape, generator=generator, device="cuda").half().requires_grad_()
        for _ in range(3)
    ]
    dropout_p, lengths = DROPOUT if has_dropout else 0.0, None
    if is_padded:
        lengths = torch.randint(
            seqlen - PADDING, seqlen + 1, (batch,), generator=generator, device="cuda"
        )
    options: dict[str, Any] = dict(lengths_k=lengths, dropout_p=dropout_p, causal=causal)
    if impl == "flash":
        return (lambda: flash_attention(q, k, v, **options)), leaves
    if impl == "block_sparse":
        mask = paper_mask(seqlen)
        return (lambda: block_sparse_attention(q, k, v, mask, **options)), leaves
    keep = None
    if lengths is not None:
        keep = (torch.arange(seqlen, device="cuda") < lengths[:, None])[:, None, None, :]
    q, k, v = (t.transpose(1, 2) for t in leaves)

    def unfused() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(
                q, k, v, attn_mask=keep, dropout_p=dropout_p, is_causal=causal
            )

    return unfused, leaves


def measure_runtime(
    seqlen: int,
    options: tuple[bool, bool],
    implementations: tuple[str, ...] = IMPLEMENTATIONS,
    **shape: Any,
) -> dict:
    """Milliseconds of each implementation: forward, backward, both."""
    names = [i for i in implementations if i != "pytorch" or seqlen <= _LONGEST_UNFUSED]
    times, failures = time_in_turns(
        {name: partial(make, name, seqlen, *options, **shape) for name in names}
    )
    row: dict[str, Any] = {"seqlen": seqlen, "failures": failures}
    for name in implementations:
        forward, backward = (times.get((name, d)) for d in ("forward", "backward"))
        both = None if forward is None or backward is None else forward + backward
        row[name] = {"forward": forward, "backward": backward, "both": both}
    torch.cuda.empty_cache()
    return row


def measure_memory(seqlen: int) -> dict:
    """Peak MB (10^6 bytes) of a forward and backward, inputs and gradients included."""
    row: dict[str, Any] = {"seqlen": seqlen, "failures": {}}
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
    direction = ""
    paper: dict[str, Any]
    if name in FIGURES:
        direction, times, _ = FIGURES[name]
        paper = {i: dict.fromkeys(range(len(SEQLENS)), t) for i, t in times.items()}
    elif is_memory:
        paper = MEMORY_MB
    else:
        options, direction = RUNTIME_TABLES[name]
        paper = RUNTIME_MS[options][direction]
    unit = "MB" if is_memory else "ms"
    table = Table(
        "tokens", "", f"paper, {unit}", f"here, {unit}", "PyTorch / it: paper", "here", ""
    )
    verdicts = []
    for row in rows:
        at = SEQLENS.index(row["seqlen"])
        here = {i: row[i] if is_memory else row[i][direction] for i in paper}
        for impl in paper:
            ratios = [
                numbers["pytorch"] / numbers[impl]
                if numbers["pytorch"] and numbers[impl] else None
                for numbers in ({i: paper[i][at] for i in paper}, here)
            ]  # fmt: skip
            if name in FIGURES and impl != "pytorch":
                ratios[0] = FIGURES[name][2]
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


def show_trained(name: str, console: Console) -> None:
    """Print a table that is trained, with what the records hold of it and how to run the rest."""
    paths = sorted(path for folder in RECORDS for path in folder.glob("*.json"))
    records = [json.loads(path.read_text()) for path in paths]
    table = Table("", "paper", "here", "verdict", title=name)
    for row, here, word in results(name, [r for r in records if "rows" in r]):
        paper = ", ".join(f"{what} {number:g}" for what, number in row.paper.items())
        table.add_row(row.name, paper or "-", here or "-", word.replace("`", ""))
    console.print(table)
    if name == "table4":
        print("At the size of one GPU: python -m scripts.compare_contexts --help")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["table7", *RUNTIME_TABLES, "table21", *TRAINING, *FIGURES, "figure3"]
    parser.add_argument("name", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="up to 2,048 tokens")
    parser.add_argument("--output", type=Path, help="default: outputs/reproduce/NAME.json")
    args = parser.parse_args()
    console = Console(width=130)
    if args.name in TRAINING:
        show_trained(args.name, console)
        return
    if not torch.cuda.is_available():
        raise SystemExit(f"{args.name} needs a GPU, none is visible")
    if args.name == "figure3" and args.output:
        raise SystemExit("figure3 writes the records of table20 and table21: leave out --output")
    for name in ("table20", "table21") if args.name == "figure3" else (args.name,):
        output = args.output or Path("outputs/reproduce") / f"{name}.json"
        measure(name, output, args.quick, console)


def measure(name: str, output: Path, is_quick: bool, console: Console) -> None:
    """Measure a table or figure, or what is missing of it, write the record and show it."""
    seqlens = [n for n in SEQLENS if n <= 2048 or not is_quick]
    settings = dict(batch=BATCH, nheads=NHEADS, headdim=HEADDIM, dtype="float16")
    if name in FIGURES:
        seqlens, settings = [GPT2_SEQLEN], {**settings, **GPT2_SHAPE}
    if name == "table7":
        seqlens, settings = list(FMHA_SEQLENS), {**settings, **fmha_table.SHAPE}
    where = environment()
    rows = []
    if output.exists():
        before = json.loads(output.read_text())
        if all(before[key] == where[key] for key in ("hardware", "versions", "git_revision")):
            rows = before["measured"]
    done = {row["seqlen"] for row in rows}
    for seqlen in track([n for n in seqlens if n not in done], name):
        if name == "table21":
            rows.append(measure_memory(seqlen))
        elif name == "table7":
            names = fmha_table.IMPLEMENTATIONS
            rows.append(measure_runtime(seqlen, (True, True), names, **fmha_table.SHAPE))
        elif name in FIGURES:
            rows.append(
                measure_runtime(seqlen, (True, False), tuple(FIGURES[name][1]), **GPT2_SHAPE)
            )
        else:
            rows.append(measure_runtime(seqlen, RUNTIME_TABLES[name][0]))
        record = make_record(
            "reproduce", [], settings, omit="--output", name=f"reproduce_{name}", where=where,
            measured=rows,
        )  # fmt: skip
        write_record(output, record)
    rows.sort(key=lambda row: row["seqlen"])
    if name == "table7":
        verdicts = fmha_table.table_rows(rows, where["hardware"]["gpus"][0])
        fmha_table.show_rows(verdicts, console)
    else:
        verdicts = show(name, rows, console)
    record = json.loads(output.read_text())
    write_record(output, {**record, "rows": verdicts})
    print(f"record {output}")


if __name__ == "__main__":
    main()
