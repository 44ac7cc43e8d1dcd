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
from scripts.training_tables import speed_table as training_table

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
    steps, batch = record["settings"]["steps"], record["settings"]["batch_tokens"]
    rates = [p for p in record["settings"].get("dropout", []) if p]
    dropout = f"and with dropout {' and '.join(f'{p:g}' for p in rates)}" if rates else "dropout"
    title = (
        f"**The same training run with our attention and with torch's SDPA**, {steps} steps of "
        f"{batch:,} tokens without {dropout}."
    )
    verdicts = [loss_verdict(curve) for curve in record["loss_curves"]]
    return " ".join([title, *verdicts, origin(record)])


def benchmark_training(record: dict) -> str:
    tokens = record["settings"]["tokens"]
    title = (
        f"**Training, {tokens:,} tokens a step** on one GPU, bf16, the optimizer's step counted; "
        "dropout is 0.1 in all three places. The plain recipe is the same model compiled, with "
        "torch's attention, norms and loss; a bf16 stream is `model.residual_in_fp32=false`."
    )
    return "\n\n".join([title, table(*training_table(record)), origin(record)])


def benchmark_block_sparse(record: dict) -> str:
    title = (
        "**Block-sparse attention** on masks of 128 x 128 blocks: how many times faster than ours "
        "on all blocks, and in brackets than FlexAttention on the same mask."
    )
    rows = []
    for seqlen, pattern, density in _shown_masks(record["rows"]):
        cells = [f"{seqlen:,}, {pattern}, density 1/{1 / density:.3g}"]
        for headdim in (64, 128):
            pair = []
            for direction in ("forward", "backward"):
                case = {"headdim": headdim, "seqlen": seqlen, "direction": direction}
                same = [r for r in record["rows"] if case.items() <= r.items()]
                mask = {"pattern": pattern, "density": density}
                ms = {r["impl"]: r["ms"] for r in same if mask.items() <= r.items()}
                dense = next(r["ms"] for r in same if r["impl"] == "dense")
                ours = ms["block_sparse"]
                pair.append(f"{dense / ours:.1f} ({ms['flex'] / ours:.2f})")
            cells.append(" / ".join(pair))
        rows.append(cells)
    header = ["tokens, mask", "headdim 64, forward / backward", "headdim 128"]
    return "\n\n".join([title, table(header, rows), origin(record)])


def _shown_masks(rows: list[dict]) -> list[tuple[int, str, float]]:
    """(seqlen, pattern, density) of the butterfly."""
    shown = {(r["seqlen"], r["pattern"], r["density"]) for r in rows if r["impl"] == "block_sparse"}
    return sorted(mask for mask in shown if mask[1] == "butterfly")


LENGTHS = (" 16,384",)  # of the table of attention


def benchmark_attention(record: dict) -> str:
    title = (
        "**Attention alone**: bf16, 16,384 tokens, 32 heads of 64 or 16 heads of 128; only visible "
        "pairs count as work, the backward 2.5 forwards. `python -m scripts.report` has the other "
        "lengths, and plots."
    )
    header, rows = speed_table(record)
    rows = [row for row in rows if row[0].endswith(LENGTHS)]
    return "\n\n".join([title, table(header, rows), origin(record)])


def long_range_accuracy(record: dict) -> str:
    return "\n\n".join([readme_title(record), table(*accuracy_table(record)), origin(record)])


SECTIONS = {
    "benchmark_attention": benchmark_attention,
    "benchmark_block_sparse": benchmark_block_sparse,
    "benchmark_training": benchmark_training,
    "compare_attention": compare_attention,
    "compare_attention_dropout": compare_attention,
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
