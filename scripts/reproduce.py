"""The paper's tables measured again on this machine, a verdict a row: python -m scripts.reproduce
--help

    python -m scripts.reproduce table11      forward and backward with dropout and key padding
    python -m scripts.reproduce table21      memory
    python -m scripts.reproduce table20 --implementations pytorch flash sdpa_cudnn
    python -m scripts.reproduce table7       against Apex's FMHA, whose times are the paper's alone
    python -m scripts.reproduce table4       what it says, and the commands that train its rows

table9 to table20 are runtimes, table21 memory, at batch 16, 8 heads of 64, fp16, from 128 to 65,536
tokens, of PyTorch's unfused attention in fp16 (as the paper ran it) and all its rivals here, exact
and approximate, which take turns. What cannot serve a table, or runs out of memory, says so.
Machines differ, so what is compared is a ratio: PyTorch's attention over it, with the paper's own.
A stopped measurement continues where it was when started again, and the three tables of one case
(forward, backward, both) share theirs. figure1 and figure2 time the attention of GPT-2 medium;
figure3 is table20 and table21 as curves. table1 to table6 train for hours to weeks: shown are the
paper's numbers, what the records under scripts/results and outputs hold of them, and the commands
that train them.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from model.run import environment
from scripts import fmha_table
from scripts.attention_tables import RIVAL_NAMES
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
from scripts.rivals import (
    BATCH,
    HEADDIM,
    IMPLEMENTATIONS,
    NHEADS,
    compile_flex,
    estimated_minutes,
    measure_memory,
    measure_runtime,
)
from scripts.trained_tables import results

# Attention of GPT-2 medium, of which figures 1 and 2 tell.
GPT2_SEQLEN, GPT2_SHAPE = 1024, dict(batch=64, nheads=16, causal=True)
RECORDS = (Path(__file__).parent / "results", Path("outputs"))  # of tables that are trained
_QUICK = 2048


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
        here: dict[str, Any] = {
            i: row[i] if is_memory else row[i][direction] for i in IMPLEMENTATIONS if i in row
        }
        printed: dict[str, Any] = {
            i: paper[i][at] if i in paper else None for i in {"pytorch": 0, **here}
        }
        for impl in here:
            ratios = [
                numbers["pytorch"] / numbers[impl]
                if numbers.get("pytorch") and numbers[impl] else None
                for numbers in (printed, here)
            ]  # fmt: skip
            if name in FIGURES and impl != "pytorch":
                ratios[0] = FIGURES[name][2]
            text = _verdict(impl, here, ratios, row.get("failures", {}), impl in paper)
            verdicts.append(
                dict(
                    seqlen=row["seqlen"], impl=impl, unit=unit, paper=printed[impl],
                    here=here[impl], paper_ratio=ratios[0], here_ratio=ratios[1], verdict=text,
                )
            )  # fmt: skip
            numbers = (printed[impl], here[impl], *ratios)
            table.add_row(
                f"{row['seqlen']:,}", RIVAL_NAMES[impl],
                *("-" if n is None else f"{n:.3g}" for n in numbers), text,
            )  # fmt: skip
        table.add_section()
    console.print(table)
    return verdicts


def _verdict(
    impl: str, here: dict, ratios: Sequence[float | None], failures: dict[str, str], has_paper: bool
) -> str:
    """Of one row, from the ratios in the paper and here."""
    if here[impl] is None:
        return f"not run: {failures.get(impl, 'no time')}"
    if impl == "pytorch":
        return ""
    if not has_paper:
        return "no number of the paper's to compare with"
    if here.get("pytorch") is None:
        return f"no ratio: PyTorch's {failures.get('pytorch', 'is not measured')}"
    return verdict(ratios[1], ratios[0])


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


def estimates() -> str:
    """For --help: minutes of each case on an H200."""
    lines = ["minutes on an H200 by estimate, of all implementations / of --quick:"]
    cases: dict[tuple[bool, bool], list[str]] = {}
    for name, (options, _) in RUNTIME_TABLES.items():
        cases.setdefault(options, []).append(name)
    for options, names in cases.items():
        full, quick = (
            estimated_minutes([n for n in SEQLENS if n <= longest], options, IMPLEMENTATIONS)
            for longest in (SEQLENS[-1], _QUICK)
        )
        lines.append(f"  {', '.join(names)} together {full:.0f} / {quick:.0f}")
    lines.append("  table21 2 / 1; table7, figure1, figure2 1")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=estimates(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ["table7", *RUNTIME_TABLES, "table21", *TRAINING, *FIGURES, "figure3"]
    parser.add_argument("name", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help=f"up to {_QUICK:,} tokens")
    parser.add_argument(
        "--implementations", nargs="+", choices=IMPLEMENTATIONS, metavar="NAME",
        help=f"of table9 to table21 and figure3, default all: {', '.join(IMPLEMENTATIONS)}",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, help="default: outputs/reproduce/NAME.json")
    args = parser.parse_args()
    console = Console(width=130)
    if args.implementations and args.name not in (*RUNTIME_TABLES, "table21", "figure3"):
        parser.error(f"--implementations is of table9 to table21 and figure3, not of {args.name}")
    if args.name in TRAINING:
        show_trained(args.name, console)
        return
    if not torch.cuda.is_available():
        raise SystemExit(f"{args.name} needs a GPU, none is visible")
    if args.name == "figure3" and args.output:
        raise SystemExit("figure3 writes the records of table20 and table21: leave out --output")
    for name in ("table20", "table21") if args.name == "figure3" else (args.name,):
        output = args.output or Path("outputs/reproduce") / f"{name}.json"
        measure(name, output, args.quick, console, args.implementations or IMPLEMENTATIONS)


def measured_before(name: str, output: Path, where: dict) -> dict[int, dict]:
    """seqlen -> row that this machine and revision measured, for this table or one of its case."""
    options = RUNTIME_TABLES[name][0] if name in RUNTIME_TABLES else None
    same = [n for n, (o, _) in RUNTIME_TABLES.items() if o == options]
    paths = [output.with_name(f"{n}.json") for n in same if n != name] + [output]
    found: dict[int, dict] = {}
    for path in paths:
        before = json.loads(path.read_text()) if path.exists() else None
        if before and all(before[k] == where[k] for k in ("hardware", "versions", "git_revision")):
            for row in before.get("measured", []):
                other = found.get(row["seqlen"], {})
                if other.keys() <= row.keys():
                    found[row["seqlen"]] = row
    return found


def measure(
    name: str,
    output: Path,
    is_quick: bool,
    console: Console,
    implementations: Sequence[str] = IMPLEMENTATIONS,
) -> None:
    """Measure a table or figure, or what is missing of it, write the record and show it."""
    seqlens = [n for n in SEQLENS if n <= _QUICK or not is_quick]
    settings = dict(batch=BATCH, nheads=NHEADS, headdim=HEADDIM, dtype="float16")
    options = RUNTIME_TABLES[name][0] if name in RUNTIME_TABLES else (name in FIGURES, False)
    shape: dict[str, Any] = {}
    if name in FIGURES:
        seqlens, shape, implementations = [GPT2_SEQLEN], GPT2_SHAPE, tuple(FIGURES[name][1])
    if name == "table7":
        seqlens, shape, options = list(FMHA_SEQLENS), fmha_table.SHAPE, (True, True)
        implementations = fmha_table.IMPLEMENTATIONS
    settings |= shape
    where = environment()
    rows = measured_before(name, output, where)
    missing = [n for n in seqlens if not set(implementations) <= rows.get(n, {}).keys()]
    if missing:
        if name in RUNTIME_TABLES:
            minutes = estimated_minutes(missing, options, implementations)
            console.print(f"{name}: about {minutes:.0f} minutes on an H200")
        compile_flex(missing, options, implementations)
    for seqlen in track(missing, name):
        # What a row had is measured again beside what it lacks: they are to take turns.
        together = [i for i in IMPLEMENTATIONS if i in implementations or i in rows.get(seqlen, {})]
        if name == "table21":
            rows[seqlen] = measure_memory(seqlen, together)
        else:
            rows[seqlen] = measure_runtime(seqlen, options, together, **shape)
        write_record(output, _record(name, settings, where, rows))
    ordered = [rows[seqlen] for seqlen in sorted(rows)]
    if name == "table7":
        verdicts = fmha_table.table_rows(ordered, where["hardware"]["gpus"][0])
        fmha_table.show_rows(verdicts, console)
    else:
        verdicts = show(name, ordered, console)
    write_record(output, {**_record(name, settings, where, rows), "rows": verdicts})
    print(f"record {output}")


def _record(name: str, settings: dict, where: dict, rows: dict[int, dict]) -> dict:
    return make_record(
        "reproduce", [], settings, omit="--output", name=f"reproduce_{name}", where=where,
        measured=[rows[seqlen] for seqlen in sorted(rows)],
    )  # fmt: skip


if __name__ == "__main__":
    main()
