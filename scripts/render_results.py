"""Write the tables of README.md from the records under scripts/results/.

python -m scripts.render_results            rewrite the tables between the README's markers
python -m scripts.render_results --check    fail if README.md does not match the records
"""

import argparse
import json
import sys
from pathlib import Path

from scripts.accuracy_tables import accuracy_table, readme_title
from scripts.attention_tables import speed_table
from scripts.trained_tables import loss_verdict

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "scripts" / "results"
BEGIN = "<!-- results: python -m scripts.render_results -->"
END = "<!-- end of results -->"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def origin(record: dict) -> str:
    """One line: where and how the numbers were made."""
    gpu = (record["hardware"]["gpus"] or ["CPU"])[0]
    versions = record["versions"]
    return (
        f"`{record['command']}` on {gpu}, torch {versions['torch']}, triton {versions['triton']}, "
        f"{record['date'][:10]}."
    )


def compare_attention(record: dict) -> str:
    rows = [
        [
            row["model"],
            row["attention"],
            f"{row['tokens_per_s']:,.0f}",
            f"{row['mfu_full']:.1%} / {row['mfu_causal']:.1%}",
            f"{row['peak_gib']:.1f}",
            f"{row['first_loss']:.4f}",
            f"{row['last_loss']:.4f}",
        ]
        for row in record["rows"]
        if "tokens_per_s" in row
    ]
    header = ["experiment", "attention", "tokens/s", "MFU full / causal", "peak GiB"]
    text = table([*header, "first loss", "last loss"], rows)
    verdicts = [loss_verdict(curve) for curve in record["loss_curves"]]
    steps, batch = record["settings"]["steps"], record["settings"]["batch_tokens"]
    title = (
        f"**The same training run with our kernels and with torch's SDPA**: {steps} steps of "
        f"{batch:,} tokens, one GPU, no dropout."
    )
    return "\n\n".join([title, text, " ".join(verdicts), origin(record)])


LENGTHS = (" 1,024", " 16,384")  # of the table of attention


def benchmark_attention(record: dict) -> str:
    title = (
        "**Attention alone**: bf16, 16,384 tokens, 32 heads of 64 or 16 heads of 128; only visible "
        "pairs count as work, the backward 2.5 forwards. `python -m scripts.report` has the "
        "lengths between."
    )
    header, rows = speed_table(record)
    rows = [row for row in rows if row[0].endswith(LENGTHS)]
    return "\n\n".join([title, table(header, rows), origin(record)])


def long_range_accuracy(record: dict) -> str:
    return "\n\n".join([readme_title(record), table(*accuracy_table(record)), origin(record)])


SECTIONS = {
    "benchmark_attention": benchmark_attention,
    "compare_attention": compare_attention,
    "long_range_accuracy": long_range_accuracy,
}


def rendered() -> str:
    """The results section: one table a record that has a renderer, in the order of SECTIONS."""
    parts = ["## Results"]
    for name, render in SECTIONS.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            parts.append(render(json.loads(path.read_text())))
    return "\n\n".join(parts) if len(parts) > 1 else ""


def updated(readme: str) -> str:
    before, rest = readme.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{rendered()}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing, compare")
    args = parser.parse_args()
    path = ROOT / "README.md"
    readme = path.read_text()
    new = updated(readme)
    if args.check and new != readme:
        sys.exit("README.md does not match scripts/results: run python -m scripts.render_results")
    if not args.check:
        path.write_text(new)


if __name__ == "__main__":
    main()
