"""Tables and plots of scripts.benchmark_training's record."""

from rich.console import Console
from rich.table import Table

from scripts.report_page import Block
from scripts.report_page import Table as ReportTable
from scripts.svg_plot import Plot
from scripts.training_contestants import CONTESTANTS

TRAINER = "trainer"
TITLES = {**{name: who.title for name, who in CONTESTANTS.items()}, TRAINER: "ours, train.py"}
# Who is how far ahead: (ours, rival).
RATIOS = (("ours", "plain"), ("ours_bf16", "plain"), ("ours_dropout", "plain_dropout"),
          ("ours_dropout", "hf_eager"), (TRAINER, "ours"), ("bert", "bert_hf_compiled"),
          ("bert", "bert_hf_sdpa"), ("bert", "bert_hf_eager"))  # fmt: skip


def speed_table(record: dict) -> tuple[list[str], list[list[str]]]:
    """(Header, rows): thousand tokens a second and GiB of each contestant, then the ratios."""
    cells = {(r["model"], r["seqlen"], r["impl"]): r for r in record["rows"]}
    names = [name for name in TITLES if any(key[2] == name for key in cells)]
    ratios = [pair for pair in RATIOS if set(pair) <= set(names)]
    header = ["thousand tokens/s (GiB)", *(TITLES[name] for name in names)]
    header += [f"{TITLES[a]} / {TITLES[b]}" for a, b in ratios]
    lines = []
    models = list(dict.fromkeys(key[0] for key in cells))
    for model, seqlen in sorted({key[:2] for key in cells}, key=lambda k: (models.index(k[0]), k)):
        found = {name: cells.get((model, seqlen, name), {}) for name in names}
        rates = {name: row.get("tokens_per_s") for name, row in found.items()}
        line = [f"{model}, {seqlen:,}"]
        for name, rate in rates.items():
            gib = found[name].get("peak_gib")
            memory = f" ({gib:.1f})" if gib else ""
            line.append(f"{rate / 1000:.4g}{memory}" if rate else "-")
        for a, b in ratios:
            rival = found[b].get("sustained_tokens_per_s") if a == TRAINER else rates[b]
            line.append(f"{rates[a] / rival:.2f}" if rates[a] and rival else "-")
        lines.append(line)
    return header, lines


def report_blocks(record: dict) -> list[Block]:
    """The table and, for each model, the rates over the context."""
    header, lines = speed_table(record)
    rows = [row for row in record["rows"] if row["tokens_per_s"]]
    blocks: list[Block] = [ReportTable(header, lines, "An optimizer step, medians")]
    for model in dict.fromkeys(row["model"] for row in rows):
        series = {
            TITLES[name]: sorted(
                (row["seqlen"], row["tokens_per_s"] / 1000)
                for row in rows
                if (row["model"], row["impl"]) == (model, name)
            )
            for name in TITLES
        }
        series = {name: points for name, points in series.items() if len(points) > 1}
        if series:
            blocks.append(Plot(f"Training {model}", "context", "thousand tokens/s", series))
    return blocks


def render(record: dict, console: Console) -> None:
    header, lines = speed_table(record)
    table = Table(*header, title="training")
    for line in lines:
        table.add_row(*line)
    console.print(table)
    for row in record["rows"]:
        if row.get("samples_per_s"):
            console.print(
                f"{row['impl']}, {row['model']} {row['seqlen']}: {row['samples_per_s']:.1f} "
                f"sequences/s of {row['mean_length']:.1f} tokens"
            )
        if row["failure"]:
            console.print(f"{row['impl']}, {row['model']} {row['seqlen']}: {row['failure']}")
        for name, ms in row.get("kernels_ms", {}).items():
            console.print(f"{row['impl']}, {row['model']} {row['seqlen']}: {ms:8.3f} ms {name}")
