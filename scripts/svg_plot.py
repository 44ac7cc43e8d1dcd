"""Line plots as SVG text: axes, legend and marks that a page styles and a browser shows alone."""

import math
from dataclasses import dataclass
from html import escape

# Okabe and Ito's colours, told apart by the colour-blind, on white and on black.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c8c")
WIDTH, HEIGHT = 420, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 20, 12, 42
_CHARACTER = 6.9  # width of one in the legend, about


@dataclass(frozen=True)
class Plot:
    """Lines of points.

    Attributes:
        title: of the whole; drawn by the page, read out by a screen reader.
        x_label, y_label: what the axes count, with the unit.
        series: name -> (x, y), x rising.
        log_y: powers of ten.
        from_zero: else the axis begins below the lowest point.
        colours: name -> index into COLOURS, where one name keeps its colour over several plots.
        log_x: powers of two; else linear.
        overlaid: long curves that may be equal: points have no marks, and each line is narrower
            than the one under it.
    """

    title: str
    x_label: str
    y_label: str
    series: dict[str, list[tuple[float, float]]]
    log_y: bool = False
    from_zero: bool = True
    colours: dict[str, int] | None = None
    log_x: bool = True
    overlaid: bool = False

    def svg(self, *, is_file: bool = False) -> str:
        """The picture.

        Args:
            is_file: it stands alone, and knows no page's colour of text.
        """
        points = [point for line in self.series.values() for point in line]
        if not points:
            raise ValueError(f"a plot must have a point, {self.title!r} has none")
        is_positive = not self.log_x or min(x for x, _ in points) > 0
        if not is_positive or (self.log_y and min(y for _, y in points) <= 0):
            raise ValueError(f"logarithmic axes need positive numbers: {self.title!r}")
        legend, legend_height = self._legend()
        top = _TOP + legend_height
        scale = math.log2 if self.log_x else float
        x_values = sorted({x for x, _ in points})
        low, high = scale(x_values[0]), scale(x_values[-1])
        if low == high:
            low, high = low - 1, high + 1
        x_ticks = x_values
        if not self.log_x:
            x_ticks = [tick for tick in _linear_ticks(low, high) if low <= tick <= high]
        heights = [y for _, y in points]
        y_ticks = (
            _log_ticks(heights)
            if self.log_y
            else _linear_ticks(0.0 if self.from_zero else min(heights), max(heights))
        )
        bottom, ceiling = (math.log10(y) if self.log_y else y for y in (y_ticks[0], y_ticks[-1]))

        def place(x: float, y: float) -> tuple[float, float]:
            across = (scale(x) - low) / (high - low)
            up = ((math.log10(y) if self.log_y else y) - bottom) / (ceiling - bottom)
            return (
                _LEFT + across * (WIDTH - _LEFT - _RIGHT),
                HEIGHT - _BOTTOM - up * (HEIGHT - _BOTTOM - top),
            )

        alone = ' xmlns="http://www.w3.org/2000/svg" color="#666"' if is_file else ""
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"{alone} font-family="sans-serif" '
            'font-size="12" fill="currentColor">',
            f"<title>{escape(self.title)}</title>",
        ]
        for tick in y_ticks:
            _, y = place(x_values[0], tick)
            parts.append(
                f'<path d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}" stroke="currentColor" '
                f'stroke-opacity="0.18"/><text x="{_LEFT - 6}" y="{y + 4:.1f}" '
                f'text-anchor="end">{short(tick)}</text>'
            )
        places_x = [(place(tick, y_ticks[-1])[0], tick) for tick in x_ticks]
        for x, tick in _apart(places_x):
            parts.append(
                f'<text x="{x:.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">'
                f"{short(tick)}</text>"
            )
        middle = (HEIGHT - _BOTTOM + top) / 2
        parts.append(
            f'<text x="{(WIDTH + _LEFT) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">'
            f'{escape(self.x_label)}</text><text x="12" y="{middle:.0f}" text-anchor="middle" '
            f'transform="rotate(-90 12 {middle:.0f})">{escape(self.y_label)}</text>'
        )
        for depth, (name, line) in enumerate(self.series.items()):
            places = [place(x, y) for x, y in line]
            colour = self._colour(name)
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
            width = 2 + 2.5 * (len(self.series) - 1 - depth) if self.overlaid else 2
            parts.append(
                f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>'
            )
            if self.overlaid:
                continue
            for (x, y), (at, value) in zip(places, line, strict=True):
                hint = escape(f"{name}, {short(at)}: {value:.4g}")
                parts.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{colour}">'
                    f"<title>{hint}</title></circle>"
                )
        return "".join([*parts, legend, "</svg>"])

    def _colour(self, name: str) -> str:
        index = (self.colours or {}).get(name, list(self.series).index(name))
        return COLOURS[index % len(COLOURS)]

    def _legend(self) -> tuple[str, float]:
        """(Its marks, its height): entries in rows above the lines."""
        x, y, parts = float(_LEFT), 12.0, []
        for name in self.series:
            width = 18 + _CHARACTER * len(name) + 12
            if x + width > WIDTH and x > _LEFT:
                x, y = float(_LEFT), y + 16
            parts.append(
                f'<path d="M{x:.0f} {y - 4:.0f}h14" stroke="{self._colour(name)}" '
                f'stroke-width="3"/><text x="{x + 18:.0f}" y="{y:.0f}">{escape(name)}</text>'
            )
            x += width
        return "".join(parts), y


def short(number: float) -> str:
    """1024 -> 1K, 1/64 -> 1/64, 0.25 -> 0.25, 1500 -> 1,500, 8.7e6 -> 8.7M."""
    if 0 < number < 0.25 and math.log2(number).is_integer():
        return f"1/{1 / number:.0f}"
    if number >= 1e6:
        return f"{number / 1e6:.3g}M"
    if number >= 1024 and number % 1024 == 0:
        return f"{number // 1024:,.0f}K"
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _linear_ticks(low: float, high: float) -> list[float]:
    """Three to seven of them, round numbers from at most `low` to at least `high`."""
    span = high - low or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span))
    step = next(factor * power for factor in (0.2, 0.25, 0.5, 1, 2) if span <= 5 * factor * power)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * i for i in range(first, max(last, first + 1) + 1)]


def _log_ticks(heights: list[float]) -> list[float]:
    """1, 2, 5 of every power of ten where there are few, else powers of ten."""
    low, high = min(heights), max(heights)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 2)
    for factors in ((1, 2, 5), (1,)):
        ladder = [float(f"{factor}e{power}") for power in powers for factor in factors]
        first = max(i for i, tick in enumerate(ladder) if tick <= low)
        last = min(i for i, tick in enumerate(ladder) if tick >= high and i > first)
        if last - first <= 6:
            break
    return ladder[first : last + 1]


def _apart(places: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of (x, tick), x rising, those whose texts have room, the last one included."""
    kept: list[tuple[float, float]] = []
    for x, tick in places[::-1]:
        if not kept or kept[-1][0] - x >= _CHARACTER * (len(short(tick)) + 2):
            kept.append((x, tick))
    return kept[::-1]
