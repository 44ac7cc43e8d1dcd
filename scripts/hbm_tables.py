"""What the report says of count_hbm's record: figure 2, left and middle."""

from collections.abc import Callable

from scripts.paper_numbers import HBM_GB, verdict
from scripts.report_page import Block, Table
from scripts.svg_plot import Plot


def hbm_blocks(record: dict) -> list[Block]:
    """The paper's table beside ours, and bytes and time against the queries of a tile."""
    rows, settings = record["rows"], record["settings"]
    why_not = settings.get("not_measured")
    standard, flash = (
        next(r for r in rows if r["direction"] == "both" and r["impl"].startswith(start))
        for start in ("standard", "flash")
    )
    paper = next(r for r in rows if r["direction"] == "both" and r["impl"].startswith("algo"))
    text = (
        "Bytes between HBM and the chip. Computed: every load of a tile counts, as if there were "
        "no cache; standard attention as algorithms 0 and 3 have it, whose mask and dropout are "
        f"further passes. {paper['impl'][:1].upper()}{paper['impl'][1:]}, whose order theorem 2 "
        f"states, move {_computed(paper):.2f} GB."
    )
    if why_not:
        text += f" None were measured by hardware here: {why_not}."
    cells = []
    for what, total in (("computed", _computed), ("measured", _measured)):
        theirs, ours = total(standard), total(flash)
        if theirs and ours:
            word = verdict(theirs / ours, _PAPER_RATIO) if what == "measured" else "-"
            cells.append([what, *_sizes(theirs, ours), word])
    cells.append(["paper, A100", *_sizes(HBM_GB["standard"], HBM_GB["flash"]), "-"])
    header = ["both directions", "standard, GB", "flash, GB", "standard / flash", ""]
    case = [f"{k} {settings[k]}" for k in ("batch", "nheads", "seqlen") if k in settings]
    caption = ", ".join(["Figure 2, left: attention forward and backward", *case])
    blocks: list[Block] = [text, Table(header, cells, caption)]
    title = "Figure 2, middle: the forward against the tile"
    x = "queries of a tile"
    bytes_ = {
        name: points
        for name, total in (("computed", _computed), ("measured", _measured))
        if len(points := _against_tile(rows, total)) > 1
    }
    blocks.append(Plot(title, x, "GB", bytes_))
    if len(times := _against_tile(rows, lambda row: row.get("ms"))) > 1:
        blocks.append(Plot(title, x, "ms", {"time": times}))
    return [*blocks, _all_rows(rows)]


_PAPER_RATIO = HBM_GB["standard"] / HBM_GB["flash"]


def _computed(row: dict) -> float | None:
    return (row["computed_read"] + row["computed_written"]) / 1e9


def _measured(row: dict) -> float | None:
    if row["measured_read"] is None:
        return None
    return (row["measured_read"] + row["measured_written"]) / 1e9


def _sizes(standard: float, flash: float) -> list[str]:
    return [f"{standard:.1f}", f"{flash:.1f}", f"{standard / flash:.1f}"]


def _against_tile(
    rows: list[dict], total: Callable[[dict], float | None]
) -> list[tuple[float, float]]:
    """(queries of a tile, value) of the forward, of the tiles that differ in them alone."""
    points = []
    for row in rows:
        value = total(row)
        if row["impl"].startswith("flash, tiles") and row["direction"] == "forward" and value:
            points.append((float(row["tiles"]["forward"].split("x")[0]), value))
    return sorted(points)


def _all_rows(rows: list[dict]) -> Table:
    cells = []
    for row in rows:
        sizes = [_computed(row), _measured(row), row.get("ms"), row["standard_ratio"]]
        numbers = ["-" if size is None else f"{size:.3f}" for size in sizes]
        cells.append([row["impl"], row["direction"], *numbers, row["failure"] or ""])
    header = ["", "direction", "computed, GB", "measured, GB", "ms", "standard / it, measured", ""]
    return Table(header, cells, "All counts")
