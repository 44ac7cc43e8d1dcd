"""What a report says of each kind of record under scripts/results/: text, tables, plots."""

from collections import defaultdict
from itertools import product
from typing import Any

from scripts import benchmark_fused, benchmark_generation, benchmark_long_range
from scripts.accuracy_tables import accuracy_blocks
from scripts.attention_tables import IMPLEMENTATION_NAMES, RIVAL_NAMES, speed_table
from scripts.block_sparse_tables import block_sparse_blocks
from scripts.hbm_tables import hbm_blocks
from scripts.paper_numbers import (
    MEMORY_MB,
    OPTION_NAMES,
    RUNTIME_MS,
    RUNTIME_TABLES,
    SEQLENS,
    TRAINING,
    verdict,
)
from scripts.report_page import Block, Section, Table
from scripts.svg_plot import Plot
from scripts.trained_tables import PAPER_TOKENS, loss_verdict, results
from scripts.training_tables import report_blocks

_LAST_SUITES = ("host",)
_COLOURS = {name: i for i, name in enumerate(IMPLEMENTATION_NAMES.values())}
_SECTIONS = {"count_hbm": "HBM traffic"}
_TITLES = {**RIVAL_NAMES, "fmha": "FMHA of Apex"}
# The plots of a table that scripts.reproduce measured: no more lines than there are colours.
_PANELS = {
    "": ("pytorch", "flash", "block_sparse", "fmha"),
    ": other exact attentions": ("flash", "sdpa_math", "sdpa_flash2", "sdpa_cudnn", "flex", "fa4"),
    ": approximate attentions": ("flash", "local", "linformer", "performer"),
}
_PAPER_NAMES = {"sdpa_math": "pytorch", "flash_portable": "flash", "flash_hopper": "flash"}


def section_of(record: dict) -> Section:
    """One record; of a kind that is not known its rows as they are."""
    rows = record["rows"]
    title = _SECTIONS.get(record["name"], record["name"].replace("_", " "))
    make = next((f for fits, f in _KINDS if any(fits(record, row) for row in rows)), plain_blocks)
    return Section(title[:1].upper() + title[1:], make(record), facts_of(record))


def trained_section(records: list[dict]) -> Section:
    """Tables 1 to 6, row by row."""
    blocks: list[Block] = []
    for name in TRAINING:
        cells = []
        for row, here, word in results(name, records):
            paper = ", ".join(f"{what} {number:g}" for what, number in row.paper.items())
            cells.append([row.name, paper or "-", here or "-", word])
        blocks.append(Table(["", "paper", "here", "verdict"], cells, _table_name(name)))
    return Section("Tables that need training", blocks)


def facts_of(record: dict) -> dict[str, str]:
    """How and where a record was made."""
    hardware, versions = record["hardware"], record["versions"]
    gpus = hardware["gpus"]
    machine = f"{len(gpus)} x {gpus[0]}" if gpus else f"CPU, {hardware['machine']}"
    revision = (record.get("git_revision") or "not recorded")[:12]
    facts = {
        "command": f"`{record['command']}`",
        "date": record["date"][:16].replace("T", " ") + " UTC",
        "hardware": machine + (f", CUDA {hardware['cuda']}" if gpus else ""),
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
        "revision": revision + (" with changes" if record.get("git_dirty") else ""),
    }
    if record.get("settings"):
        facts["settings"] = ", ".join(f"{k} {_plain(v)}" for k, v in record["settings"].items())
    return facts


def attention_blocks(record: dict) -> list[Block]:
    """Speed against rivals, the paper's own benchmark with its numbers, the other suites."""
    suites = defaultdict(list)
    for row in sorted(record["rows"], key=lambda row: _LAST_SUITES.count(row["suite"])):
        suites[row["suite"]].append(row)
    blocks: list[Block] = []
    for suite, rows in suites.items():
        if suite == "speed":
            header, cells = speed_table(record)
            blocks.append(Table(header, cells, "Attention alone, the fastest of a case in bold"))
            blocks += _speed_plots(rows)
        elif suite == "paper":
            blocks += _paper_suite(rows)
        elif suite == "host":
            cells = [[r["impl"], r["direction"], f"{r['host_us']:.0f}"] for r in rows]
            blocks.append(Table(["", "direction", "us of the host a call"], cells, "Host time"))
        else:
            blocks.append(_suite_table(suite, rows))
    return blocks


def _speed_plots(rows: list[dict]) -> list[Plot]:
    plots = []
    for headdim, causal, direction in dict.fromkeys(
        (r["headdim"], r["causal"], r["direction"]) for r in rows
    ):
        lines = defaultdict(list)
        for row in rows:
            same = (row["headdim"], row["causal"], row["direction"]) == (headdim, causal, direction)
            if same and row["tflops"] and row["impl"] in IMPLEMENTATION_NAMES:
                lines[IMPLEMENTATION_NAMES[row["impl"]]].append((row["seqlen"], row["tflops"]))
        title = f"{direction}, headdim {headdim}, {'causal' if causal else 'full'}"
        ordered = {name: sorted(line) for name, line in lines.items()}
        if ordered:
            plots.append(Plot(title, "tokens", "TFLOP/s", ordered, colours=_COLOURS))
    return plots


def _suite_table(suite: str, rows: list[dict]) -> Table:
    """forward / backward TFLOP/s, a case a row."""
    names = list(dict.fromkeys(row["impl"] for row in rows))
    cells: dict[str, dict] = defaultdict(dict)
    for row in rows:
        case = f"headdim {row['headdim']}, {'causal' if row['causal'] else 'full'}, "
        case += f"{row['seqlen']:,}" + ", packed" * row["packed"] + ", padded" * row["padded"]
        case += f", dropout {row['dropout_p']}" if row["dropout_p"] else ""
        cells[case][row["impl"], row["direction"]] = row["tflops"]
    table = [
        [case, *(_pair(found.get((n, "forward")), found.get((n, "backward"))) for n in names)]
        for case, found in cells.items()
    ]
    header = ["forward / backward, TFLOP/s", *(IMPLEMENTATION_NAMES.get(n, n) for n in names)]
    return Table(header, table, f"Suite {suite}")


def _paper_suite(rows: list[dict]) -> list[Block]:
    """Tables 9 to 21 as far as the suite measures them: ours beside the paper's, and ratios."""
    blocks: list[Block] = [
        "The paper's benchmark (appendix E.6: batch 16, 8 heads of 64, fp16) was run on an A100 of "
        "40 GB. Machines differ, so a verdict compares ratios: PyTorch's unfused attention over "
        "ours, here and in the paper."
    ]
    for options in dict.fromkeys((r["dropout_p"] > 0, r["padded"]) for r in rows):
        same = [r for r in rows if (r["dropout_p"] > 0, r["padded"]) == options]
        for name, (table_options, direction) in RUNTIME_TABLES.items():
            if table_options != options or direction == "both":
                continue
            here = _by_seqlen([r for r in same if r["direction"] == direction], "ms")
            if not here:
                continue
            blocks.append(
                _beside(name, direction, options, here, RUNTIME_MS[options][direction], "ms")
            )
            lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
            for seqlen, found in here.items():
                for impl, ms in found.items():
                    lines[f"{_TITLES[impl]}, here"].append((seqlen, ms))
            for impl in ("pytorch", "flash"):
                numbers = zip(SEQLENS, RUNTIME_MS[options][direction][impl], strict=True)
                lines[f"{_TITLES[impl]}, paper"] = [(n, ms) for n, ms in numbers if ms]
            title = f"{_table_name(name)}: {direction}"
            blocks.append(_beside_plot(title, "ms", lines))
        memory = _by_seqlen([r for r in same if r.get("peak_gib")], "peak_gib", 2**30 / 1e6)
        if memory:
            blocks.append(_beside("table21", "memory", (False, False), memory, MEMORY_MB, "MB"))
    return blocks


def _by_seqlen(rows: list[dict], key: str, factor: float = 1.0) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row["impl"] in _PAPER_NAMES and row[key]:
            impl, value = _PAPER_NAMES[row["impl"]], row[key] * factor
            found[row["seqlen"]][impl] = min(value, found[row["seqlen"]].get(impl, value))
    return found


def _beside(name: str, what: str, options: tuple, here: dict, paper: dict, unit: str) -> Table:
    """A table of the paper with ours in it."""
    rows = []
    for seqlen, found in here.items():
        printed = {impl: paper[impl][SEQLENS.index(seqlen)] for impl in ("pytorch", "flash")}
        ours, theirs = (
            numbers["pytorch"] / numbers["flash"]
            if numbers.get("pytorch") and numbers.get("flash")
            else None
            for numbers in (found, printed)
        )
        is_measured = {"pytorch", "flash"} <= found.keys()
        word = verdict(ours, theirs) if is_measured else "PyTorch's is not measured"
        numbers = [printed["pytorch"], printed["flash"], found.get("pytorch"), found.get("flash")]
        rows.append([f"{seqlen:,}", *map(_number, [*numbers, theirs, ours]), word])
    header = ["tokens", f"PyTorch, paper, {unit}", f"flash, paper, {unit}"]
    header += [f"PyTorch, here, {unit}", f"flash, here, {unit}", "ratio, paper", "ratio, here", ""]
    return Table(header, rows, f"{_table_name(name)}: {what}, {OPTION_NAMES[options]}")


def reproduced_blocks(record: dict) -> list[Block]:
    """A table that scripts.reproduce measured, a verdict a row."""
    name = record["name"].removeprefix("reproduce_")
    rows = record["rows"]
    unit = rows[0]["unit"]
    cells = [
        [
            f"{r['seqlen']:,} {_title(r)}",
            *map(_number, (r["paper"], r["here"], r["paper_ratio"], r["here_ratio"])),
            r["verdict"],
        ]
        for r in rows
    ]
    header = ["tokens", f"paper, {unit}", f"here, {unit}"]
    against = rows[0].get("against", "PyTorch")
    scaled = ", scaled to this GPU" * (against != "PyTorch")
    header += [f"{against} / it, paper", f"{against} / it, here{scaled}", ""]
    title = _table_name(name)
    blocks: list[Block] = [Table(header, cells, title)]
    for panel, implementations in _PANELS.items():
        lines = defaultdict(list)
        for r, where in product(rows, ("here", "paper")):
            if r[where] and r["impl"] in implementations:
                lines[f"{_title(r)}, {where}"].append((r["seqlen"], r[where]))
        shown = set(implementations) - ({"flash"} if panel else set())
        if any(r["here"] and r["impl"] in shown for r in rows):
            blocks.append(
                Plot(title + panel, "tokens", unit, dict(lines), log_y=True)
                if panel
                else _beside_plot(title, unit, lines)
            )
    return blocks


def _beside_plot(title: str, unit: str, lines: dict[str, list[tuple[float, float]]]) -> Plot:
    """Ours and the paper's over the length; an implementation has two shades of one colour."""
    shades = [("flash", 0, 5), ("PyTorch", 1, 4), ("block-sparse", 2, 3), ("FMHA", 6, 6)]
    colours = {
        name: next(
            (paper if name.endswith("paper") else here)
            for start, here, paper in shades
            if name.startswith(start)
        )
        for name in lines
    }
    return Plot(title, "tokens", unit, dict(lines), log_y=True, colours=colours)


def _title(row: dict) -> str:
    return _TITLES[row["impl"]] + (f", {row['direction']}" if "direction" in row else "")


def training_blocks(record: dict) -> list[Block]:
    """Speed of training runs, and the days that the paper's number of tokens would take."""
    days = {
        "gpt2_" + row.name[:2].lower(): row.paper["days"]
        for row in TRAINING["table4"]
        if "days" in row.paper
    }
    days["gpt2_medium_1k"] = TRAINING["table2"][3].paper["days"]
    cells = []
    for row in (r for r in record["rows"] if r.get("tokens_per_s")):
        projected = PAPER_TOKENS / row["tokens_per_s"] / 86400
        paper = days.get(row["model"])
        cells.append(
            [
                f"{row['model']}, {row.get('attention', row.get('impl', ''))}",
                f"{row['tokens_per_s']:,.0f}",
                " / ".join(f"{row[k]:.1%}" if row.get(k) else "-" for k in _MFU),
                _number(row.get("peak_gib")),
                *(f"{row[k]:.4f}" if row.get(k) else "-" for k in ("first_loss", "last_loss")),
                f"{projected:.1f}",
                f"{8 * paper:.1f}" if paper else "-",
            ]
        )
    header = ["run", "tokens/s", "MFU full / causal", "peak GiB", "first loss", "last loss"]
    header += ["GPU-days, projected", "A100-days, paper"]
    caption = "Training; days of the paper's run: 400,000 steps of 524,288 tokens (tables 2 and 4)"
    blocks: list[Block] = [Table(header, cells, caption)]
    curves = record.get("loss_curves", [])
    blocks += [loss_verdict(curve) for curve in curves]
    return blocks + [_loss_plot(curve) for curve in curves if curve.get("curves")]


def _loss_plot(curve: dict) -> Plot:
    """The loss curves of several attentions, one on the other."""
    dropout = f", dropout {curve['dropout_p']:g}" if curve["dropout_p"] else ""
    return Plot(
        f"{curve['model']}{dropout}: training loss",
        "steps",
        "nats",
        {name: [tuple(point) for point in points] for name, points in curve["curves"].items()},
        from_zero=False,
        log_x=False,
        overlaid=True,
    )


def perplexity_blocks(record: dict) -> list[Block]:
    """Perplexity against context, beside table 4."""
    paper = {
        int(row.name[0]) * 1024: row.paper["perplexity"]
        for row in TRAINING["table4"]
        if "perplexity" in row.paper
    }
    cells = []
    lines: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in record["rows"]:
        schedule = row.get("schedule") or "throughout"
        kind = "throughout" if schedule in ("throughout", str(row["seqlen"])) else "warm-up"
        same = row.get("same_target_ppl") or row["val_ppl"]
        lines[kind][row["seqlen"]].append(same)
        cells.append(
            [f"{row['model']}, {row['seqlen']:,}", schedule, str(row.get("seed", "-")),
             f"{row['tokens']:,}", f"{row['val_ppl']:.2f}", f"{same:.2f}",
             _number(paper.get(row["seqlen"])), _number(row.get("seconds"))]
        )  # fmt: skip
    means: dict[str, list[tuple[float, float]]] = {
        kind: sorted((seqlen, sum(v) / len(v)) for seqlen, v in found.items())
        for kind, found in lines.items()
    }
    header = ["run", "schedule of contexts", "seed", "tokens", "perplexity", "on equal targets"]
    header += ["paper, OpenWebText", "seconds"]
    title = "Perplexity on equal targets, mean of seeds"
    return [
        Table(header, cells, "Perplexity against context (the paper's table 4: 18.2 to 17.5)"),
        Plot(title, "context, tokens", "perplexity", means, from_zero=False),
        *_perplexity_curves(record["rows"]),
    ]


def _perplexity_curves(rows: list[dict]) -> list[Plot]:
    """Of the first seed of each schedule, without the first quarter, which would flatten all."""
    curves: dict[str, list] = {}
    for row in rows:
        curve = row.get("curve") or []
        name = f"{row['seqlen']:,}" + " warm-up" * (
            row.get("schedule", "throughout") != "throughout"
        )
        if curve:
            curves.setdefault(name, [tuple(point) for point in curve[len(curve) // 4 :]])
    kinds = [n for n in curves if "warm-up" not in n], [n for n in curves if "warm-up" in n]
    return [
        Plot(
            "Perplexity while training" + ", with a warm-up" * is_warmup,
            "tokens",
            "perplexity",
            {name: curves[name] for name in names},
            from_zero=False,
            log_x=False,
        )
        for is_warmup, names in enumerate(kinds)
        if names
    ]


def plain_blocks(record: dict) -> list[Block]:
    """Every field of every row."""
    columns = list(dict.fromkeys(key for row in record["rows"] for key in row))
    cells = [[_plain(row.get(column)) for column in columns] for row in record["rows"]]
    return [Table(columns, cells)] if cells else ["The record has no rows."]


_MFU = ("mfu_full", "mfu_causal")
# What a kind of record is known by, in the order in which they are tried.
_KINDS = [
    (lambda record, row: record["name"].startswith("reproduce_") and "verdict" in row,
     reproduced_blocks),
    (lambda record, row: "suite" in row, attention_blocks),
    (lambda record, row: "times_proportional" in row, block_sparse_blocks),
    (lambda record, row: "val_ppl" in row, perplexity_blocks),
    (lambda record, row: record["name"] == "count_hbm", hbm_blocks),
    (lambda record, row: record["name"] == "benchmark_training", report_blocks),
    (lambda record, row: record["name"] == "benchmark_generation",
     benchmark_generation.report_blocks),
    (lambda record, row: record["name"] == "benchmark_fused",
     benchmark_fused.report_blocks),
    (lambda record, row: record["name"] == "benchmark_long_range",
     benchmark_long_range.report_blocks),
    (lambda record, row: "accuracy" in row and "task" in row, accuracy_blocks),
    (lambda record, row: "tokens_per_s" in row, training_blocks),
]  # fmt: skip


def _table_name(name: str) -> str:
    return name.replace("table", "Table ").replace("figure", "Figure ")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _pair(forward: float | None, backward: float | None) -> str:
    return " / ".join("-" if v is None else f"{v:.0f}" for v in (forward, backward))


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_plain, value)) or "none"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    return f"{value:.6g}" if isinstance(value, float) else str(value)
