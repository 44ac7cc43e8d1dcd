"""Pictures of a block mask: an SVG drawing and a sketch in text. Neither needs another package."""

import torch
from torch import Tensor

_PANEL_PX = 480
_GAP_PX = 36
_MAX_PANELS = 12
_PANELS_PER_LINE = 4
_TEXT_CELLS = 32
_SHADES = "·░▒▓█"
_COLOURS = {1: "#f0a030", 2: "#205090"}  # partial, full


def draw_svg(kinds: Tensor, title: str) -> str:
    """An SVG of the mask, one panel for each batch entry and head, at most 12.

    kinds: integers (mask_batch, mask_heads, rows, cols): 0 hidden, 1 partial, 2 full.
    """
    _, num_heads, num_rows, num_cols = kinds.shape
    panels = kinds.flatten(0, 1).cpu()
    num_panels = min(panels.shape[0], _MAX_PANELS)
    scale = _PANEL_PX / max(num_rows, num_cols, 1)
    across, down = num_cols * scale + _GAP_PX, num_rows * scale + _GAP_PX
    columns = min(num_panels, _PANELS_PER_LINE)
    lines = -(-num_panels // _PANELS_PER_LINE)
    width, height = max(columns * across, _PANEL_PX) + _GAP_PX, lines * down + 2 * _GAP_PX
    note = "" if num_panels == panels.shape[0] else f" (first {num_panels} of {panels.shape[0]})"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="sans-serif" font-size="13">',
        f'<rect width="100%" height="100%" fill="white"/><text x="{_GAP_PX}" y="22">'
        f"{title}{note}; rows: queries, columns: keys; "
        f'<tspan fill="{_COLOURS[2]}">■ full</tspan> <tspan fill="{_COLOURS[1]}">■ partial</tspan>'
        "</text>",
    ]
    for index in range(num_panels):
        x = _GAP_PX + index % _PANELS_PER_LINE * across
        y = 2 * _GAP_PX + index // _PANELS_PER_LINE * down
        label = f"batch {index // num_heads}, head {index % num_heads}" * (panels.shape[0] > 1)
        parts.append(f'<text x="{x:.1f}" y="{y - 6:.1f}">{label}</text>')
        parts.append(f'<g transform="translate({x:.1f} {y:.1f}) scale({scale:.4f})">')
        parts.append(f'<rect width="{num_cols}" height="{num_rows}" fill="#eeeeee"/>')
        for kind, colour in _COLOURS.items():
            path = "".join(
                f"M{col} {row}h{length}v1h-{length}z"
                for row, col, length in _runs(panels[index] == kind).tolist()
            )
            parts.append(f'<path fill="{colour}" d="{path}"/>')
        parts.append("</g>")
    return "\n".join(parts) + "\n</svg>\n"


def _runs(cells: Tensor) -> Tensor:
    """(num_runs, 3): row, first column and length of each run of True along the rows."""
    edges = torch.nn.functional.pad(cells.to(torch.int8), (1, 1)).diff(dim=1)
    starts, ends = (edges == 1).nonzero(), (edges == -1).nonzero()
    return torch.cat([starts, ends[:, 1:] - starts[:, 1:]], 1)


def draw_text(kinds: Tensor) -> str:
    """A sketch of at most 32 x 32 cells: · hidden, █ full, shades between.

    kinds: integers (rows, cols): 0 hidden, 1 partial, 2 full.
    """
    size = (min(kinds.shape[0], _TEXT_CELLS), min(kinds.shape[1], _TEXT_CELLS))
    if 0 in size:
        return ""
    shade = torch.nn.functional.adaptive_avg_pool2d(kinds[None].cpu().double() / 2, size)[0]
    # Only what is wholly hidden or wholly full gets the end of the scale.
    levels = torch.where(shade == 0, 0, torch.where(shade == 1, 4, 1 + (shade * 3).int()))
    # Two characters to a cell, about as wide as one is high.
    return "\n".join("".join(2 * _SHADES[i] for i in line) for line in levels.tolist())
