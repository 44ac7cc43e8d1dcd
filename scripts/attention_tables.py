"""Tables and plots of scripts/results/benchmark_attention.json: on the console, for README.md, as
files."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

IMPLEMENTATION_NAMES = {
    "flash_portable": "ours, portable",
    "flash_hopper": "ours, Hopper",
    "sdpa_flash2": "FlashAttention-2 (SDPA)",
    "sdpa_cudnn": "cuDNN (SDPA)",
    "flex": "FlexAttention, compiled",
    "fa4": "FlashAttention-4",
}
# What scripts.reproduce measures for the paper's tables, in the order in which it shows them.
RIVAL_NAMES = {
    "pytorch": "PyTorch",
    "flash": "flash",
    "block_sparse": "block-sparse",
    "sdpa_math": "SDPA math",
    **{name: IMPLEMENTATION_NAMES[name] for name in ("sdpa_flash2", "sdpa_cudnn", "flex", "fa4")},
    "local": "local, fp32",
    "linformer": "Linformer",
    "performer": "Performer, fp32",
}


def speed_table(record: dict) -> tuple[list[str], list[list[str]]]:
    """(Header, rows) of the suite "speed" without the unfused rows; the fastest of a case is
    **bold**."""
    rows = [row for row in record["rows"] if row["suite"] == "speed"]
    cells = {
        (r["headdim"], r["causal"], r["seqlen"], r["impl"], r["direction"]): r["tflops"]
        for r in rows
    }
    names = [
        name
        for name in IMPLEMENTATION_NAMES
        if any(key[3] == name and value for key, value in cells.items())
    ]
    header = ["forward / backward, TFLOP/s", *(IMPLEMENTATION_NAMES[name] for name in names)]
    lines = []
    for headdim, causal, seqlen in dict.fromkeys(key[:3] for key in cells):
        shown = [f"headdim {headdim}, {'causal' if causal else 'full'}, {seqlen:,}"]
        for impl in names:
            numbers = []
            for direction in ("forward", "backward"):
                values = {
                    name: cells.get((headdim, causal, seqlen, name, direction)) for name in names
                }
                best = max(value or 0.0 for value in values.values())
                value = values[impl]
                text = "-" if value is None else f"{value:.0f}"
                numbers.append(f"**{text}**" if value == best else text)
            shown.append(" / ".join(numbers))
        lines.append(shown)
    return header, lines


def render(record: dict, console: Console) -> None:
    """One table a suite: forward / backward TFLOP/s of each implementation."""
    for row in record["rows"]:
        if row["suite"] == "host":
            console.print(f"{row['impl']} {row['direction']}: {row['host_us']:.0f} us of the host")
    for suite in dict.fromkeys(row["suite"] for row in record["rows"] if row["suite"] != "host"):
        rows = [r for r in record["rows"] if r["suite"] == suite]
        if not rows:
            continue
        implementations = list(dict.fromkeys(r["impl"] for r in rows))
        table = Table("case", *implementations, title=f"{suite}: forward / backward TFLOP/s")
        keys = ("batch", "nheads", "headdim", "seqlen", "causal", "dropout_p", "padded", "packed")
        for key in dict.fromkeys(tuple(r[k] for k in keys) for r in rows):
            cells = []
            for impl in implementations:
                same = [r for r in rows if r["impl"] == impl and tuple(r[k] for k in keys) == key]
                found = {r["direction"]: r for r in same}
                numbers = [found.get(d, {}).get("tflops") for d in ("forward", "backward")]
                cell = " / ".join("-" if n is None else f"{n:.0f}" for n in numbers)
                peak = found.get("forward", {}).get("peak_gib")
                cells.append(cell + (f"  {peak * 1024:.0f} MiB" if peak else ""))
            case = dict(zip(keys, key, strict=True))
            label = f"B{case['batch']} H{case['nheads']} D{case['headdim']} {case['seqlen']}"
            label += (
                " causal" * case["causal"] + " padded" * case["padded"] + " packed" * case["packed"]
            )
            label += f" dropout {case['dropout_p']}" if case["dropout_p"] else ""
            table.add_row(label, *cells)
        console.print(table)


def plot(record: dict, folder: Path) -> list[Path]:
    """Time, TFLOP/s and memory against seqlen, if matplotlib is there."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return []
    paths = []
    panel_keys = ("headdim", "causal", "dropout_p", "direction")
    for suite, field, label in (
        ("speed", "tflops", "TFLOP/s"), ("paper", "ms", "ms"), ("paper", "peak_gib", "GiB"),
    ):  # fmt: skip
        rows = [r for r in record["rows"] if r["suite"] == suite and r.get(field)]
        panels = list(dict.fromkeys(tuple(r[k] for k in panel_keys) for r in rows))
        if not panels:
            continue
        figure, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.5), squeeze=False)
        for axis, panel in zip(axes[0], panels, strict=True):
            headdim, causal, dropout_p, direction = panel
            for impl in dict.fromkeys(r["impl"] for r in rows):
                line = [
                    (r["seqlen"], r[field])
                    for r in rows
                    if r["impl"] == impl and tuple(r[k] for k in panel_keys) == panel
                ]
                if line:
                    axis.plot(*zip(*sorted(line), strict=True), marker="o", label=impl)
            axis.set_xscale("log", base=2)
            if field != "tflops":
                axis.set_yscale("log")
            kind = "causal" if causal else "full"
            axis.set_title(f"D{headdim} {kind} p={dropout_p} {direction}", fontsize=8)
            axis.set_xlabel("seqlen")
            axis.set_ylabel(label)
        axes[0][0].legend(fontsize=7)
        figure.tight_layout()
        paths.append(folder / f"attention_{suite}_{field}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths
