"""Block-sparse attention against the density of its mask: a row a mask, and plots."""

import statistics
from collections import defaultdict
from typing import NamedTuple

from scripts.report_page import Block, Table
from scripts.svg_plot import Plot

_LINES = {
    "block_sparse": "ours",
    "block_sparse_portable": "ours, portable",
    "flex": "FlexAttention",
}
_DENSE = {"dense": "block_sparse", "dense_portable": "block_sparse_portable"}
_COLOURS = {"ours": 1, "ours, portable": 0, "FlexAttention": 4}
_DIRECTIONS = ("forward", "backward")


class Case(NamedTuple):
    """What masks are measured on."""

    headdim: int
    seqlen: int
    direction: str


def block_sparse_blocks(record: dict) -> list[Block]:
    """Plots of the longest sequences, and a table of all masks."""
    rows = [row for row in record["rows"] if row.get("ms") is not None and row.get("density")]
    ms: dict[Case, dict] = defaultdict(lambda: defaultdict(list))
    proportional = {}
    for row in rows:
        case = Case(row["headdim"], row["seqlen"], row["direction"])
        mask = "" if row["impl"] in _DENSE else row["pattern"]
        ms[case][row["impl"], mask, row["density"]].append(row["ms"])
        if row["impl"] == "block_sparse":
            proportional[case, mask, row["density"]] = row["times_proportional"]
    times = {
        case: {key: statistics.median(found) for key, found in measured.items()}
        for case, measured in ms.items()
    }
    longest = max(case.seqlen for case in times)
    plots = [_plot(case, measured) for case, measured in times.items() if case.seqlen == longest]
    text = (
        "A random mask of whole blocks; at density 1 stands our attention without a mask. Where "
        "time falls as the work does, a line falls by half from one density to the next."
    )
    return [text, *plots, _table(times, proportional)]


def _plot(case: Case, measured: dict[tuple[str, str, float], float]) -> Plot:
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for (impl, pattern, density), ms in measured.items():
        impl = _DENSE.get(impl, impl)
        if pattern != "butterfly" and impl in _LINES:
            lines[_LINES[impl]].append((density, ms))
    title = f"{case.direction}, headdim {case.headdim}, {case.seqlen:,} tokens"
    ordered = {name: sorted(line) for name, line in lines.items()}
    return Plot(title, "density of the mask", "ms", ordered, log_y=True, colours=_COLOURS)


def _table(times: dict[Case, dict], proportional: dict) -> Table:
    masks = dict.fromkeys(
        (case.headdim, case.seqlen, pattern, density)
        for case, measured in times.items()
        for _, pattern, density in measured
        if pattern
    )
    cells = []
    for headdim, seqlen, pattern, density in sorted(masks):
        pair = [Case(headdim, seqlen, direction) for direction in _DIRECTIONS]
        found = {
            impl: [times.get(case, {}).get((impl, pattern, density)) for case in pair]
            for impl in _LINES
        }
        dense = [times.get(case, {}).get(("dense", "", 1.0)) for case in pair]
        ours = found["block_sparse"]
        faster = [a / b if a and b else None for a, b in zip(dense, ours, strict=True)]
        cells.append(
            [
                f"headdim {headdim}, {seqlen:,}, {pattern}",
                f"1/{1 / density:.3g}",
                *(_pair(found[impl], "{:.3g}") for impl in _LINES),
                _pair(faster, "{:.1f}"),
                _pair([proportional.get((case, pattern, density)) for case in pair], "{:.2f}"),
            ]
        )
    header = ["forward / backward", "density", *(f"{name}, ms" for name in _LINES.values())]
    header += ["x faster than all blocks", "time / proportional"]
    return Table(header, cells, "All masks; proportional: time would fall as the work does")


def _pair(values: list[float | None], form: str) -> str:
    return " / ".join("-" if value is None else form.format(value) for value in values)
