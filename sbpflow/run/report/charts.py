"""Draws inline SVG charts: line charts, stacked bars, and calibration plots."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from xml.etree import ElementTree

Point = tuple[float, float]
# Six colors of the color-blind-safe palette by Okabe and Ito, and brown.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31")
WIDTH, HEIGHT = 460, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 10, 36
_MOST_DOTS = 400  # of a line; a browser could not show a dot for each interval of a long run
_MIN_RANGE = 1e-100  # values in a range of at most this size are drawn as equal


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a chart; ``number`` selects its color, and ``dashed`` distinguishes two lines of
    the same run.
    """

    name: str
    points: Sequence[Point]
    number: int
    dashed: bool = False

    @property
    def color(self) -> str:
        return COLORS[self.number % len(COLORS)]


@dataclass(frozen=True, slots=True)
class _Frame:
    """Maps data coordinates to positions on the page."""

    x: tuple[float, float]
    y: tuple[float, float]
    width: int = WIDTH
    height: int = HEIGHT

    def at(self, point: Point) -> Point:
        (x0, x1), (y0, y1) = self.x, self.y
        across, up = (point[0] - x0) / (x1 - x0), (point[1] - y0) / (y1 - y0)
        inner = self.width - LEFT - RIGHT, self.height - TOP - BOTTOM
        return LEFT + across * inner[0], TOP + (1.0 - up) * inner[1]


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Return about ``count`` round numbers from ``low`` to ``high``."""
    step = 10.0 ** math.floor(math.log10((high - low) / count))
    step *= next(m for m in (1, 2, 5, 10) if (high - low) / (m * step) <= count)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


def show_number(value: float) -> str:
    """Format a number briefly, for axes and tables."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.4g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.4g}k"
    return f"{value:.5g}" if abs(value) >= 1e-4 else f"{value:.1e}"


def line_chart(title: str, x_label: str, series: Sequence[Series], *, zero: bool = False) -> str:
    """Draw all series that have points; return "" if all series are empty."""
    drawn = [line for line in series if line.points]
    if not drawn:
        return ""
    xs = [x for line in drawn for x, _ in line.points]
    ys = [y for line in drawn for _, y in line.points] + ([0.0] if zero else [])
    frame = _Frame(_range(xs, tight=True), _range(ys))
    return _figure(title, frame, _axes(frame, x_label), drawn)


def calibration_chart(title: str, series: Sequence[Series]) -> str:
    """Plot observed rates against predicted probabilities, with the diagonal of perfect
    calibration.
    """
    drawn = [line for line in series if line.points]
    if not drawn:
        return ""
    limit = max(max(point) for line in drawn for point in line.points) or 1.0
    frame = _Frame((0.0, limit), (0.0, limit), width=360, height=340)
    (x0, y0), (x1, y1) = frame.at((0.0, 0.0)), frame.at((limit, limit))
    diagonal = f'<line class="even" x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"/>'
    return _figure(title, frame, [*_axes(frame, "mean predicted probability"), diagonal], drawn)


def _show_ms(value: float) -> str:
    return f"{value:.2f} ms"


def stacked_bars(
    title: str,
    bars: Sequence[tuple[str, Sequence[tuple[str, float]]]],
    show: Callable[[float], str] = _show_ms,
    width: int = 940,
) -> str:
    """Draw one stacked bar per (name, parts). Parts with the same name have the same color."""
    longest = max((sum(value for _, value in parts) for _, parts in bars), default=0.0)
    if longest <= 0.0:
        return ""
    names = list(dict.fromkeys(name for _, parts in bars for name, _ in parts))
    shades = {name: _shade(place, len(names)) for place, name in enumerate(names)}
    bar, left = (30, 150) if width > WIDTH else (16, 120)
    size = "full" if width > WIDTH else "half"
    body: list[str] = []
    for row, (label, parts) in enumerate(bars):
        y, x = row * (bar + 12) + 6, float(left)
        middle = y + bar / 2 + 5
        body.append(
            f'<text x="{left - 8}" y="{middle:.0f}" text-anchor="end">{escape(label)}</text>'
        )
        for name, value in parts:
            length = (width - left - 90) * value / longest
            tooltip = f"<title>{escape(f'{label}, {name}: {show(value)}')}</title>"
            body.append(
                f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="{bar}" '
                f'fill="{shades[name]}">{tooltip}</rect>'
            )
            x += length
        total = sum(value for _, value in parts)
        body.append(f'<text x="{x + 6:.1f}" y="{middle:.0f}">{show(total)}</text>')
    height = len(bars) * (bar + 12) + 6
    legend = _legend([(name, shades[name], False) for name in names])
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {width} {height}" class="{size}">{"".join(body)}</svg>{legend}</figure>'
    )


_PICTURE_STYLE = (
    "text { fill: #222; font: 11px system-ui, sans-serif; } .title { font-weight: 600; } "
    ".axis { fill: #666; } .grid { stroke: #ddd; } polyline { fill: none; stroke-width: 1.8; }"
)


def picture(title: str, figures: Sequence[str]) -> str:
    """Combine charts into one SVG file with two columns."""
    gap, tops, body = 20, [40, 40], list[str]()
    for figure in filter(None, figures):
        element = ElementTree.fromstring(figure)
        caption, svg = element[0].text or "", element[1]
        place = tops.index(min(tops))
        x, y = gap + place * (WIDTH + gap), tops[place]
        width, height = (int(part) for part in svg.attrib["viewBox"].split()[2:])
        inner = "".join(ElementTree.tostring(child, encoding="unicode") for child in svg)
        body.append(f'<text class="title" x="{x}" y="{y + 12}">{escape(caption)}</text>')
        body.append(f'<svg x="{x}" y="{y + 20}" width="{width}" height="{height}">{inner}</svg>')
        y, at = y + height + 36, x
        for entry in element[2]:
            name, color = "".join(entry.itertext()), entry[0].attrib["style"].split(" ", 3)[-1]
            body.append(f'<rect x="{at}" y="{y - 8}" width="14" height="4" fill="{color}"/>')
            body.append(f'<text x="{at + 18}" y="{y - 2}">{escape(name)}</text>')
            at += 32 + 7 * len(name)
        tops[place] = y + gap
    width, height = 2 * WIDTH + 3 * gap, max(tops)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}"><style>{_PICTURE_STYLE}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/>'
        f'<text class="title" x="{gap}" y="24">{escape(title)}</text>{"".join(body)}</svg>\n'
    )


def _shade(place: int, count: int) -> str:
    if count <= len(COLORS):  # bars use the same colors as lines if there are enough colors
        return COLORS[place]
    return f"hsl({round(360 * place / count + 205) % 360} 50% {48 + 14 * (place % 2)}%)"


def _range(values: Sequence[float], *, tight: bool = False) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low <= max(_MIN_RANGE, 1e-9 * max(abs(low), abs(high))):  # nearly equal values
        spread = max(abs(low), abs(high)) / 10
        spread = spread if spread > _MIN_RANGE else 1.0
        return low - spread, high + spread
    margin = 0.0 if tight else 0.05 * (high - low)
    return low - margin, high + margin


def _axes(frame: _Frame, x_label: str) -> list[str]:
    parts: list[str] = []
    for value in ticks(*frame.y):
        _, y = frame.at((frame.x[0], value))
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{frame.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{show_number(value)}</text>'
        )
    floor = frame.height - BOTTOM
    for value in ticks(*frame.x):
        x, _ = frame.at((value, frame.y[0]))
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{floor}" y2="{floor + 4}"/>'
            f'<text x="{x:.1f}" y="{floor + 17}" text-anchor="middle">{show_number(value)}</text>'
        )
    parts.append(
        f'<text x="{(LEFT + frame.width - RIGHT) / 2}" y="{frame.height - 3}" '
        f'text-anchor="middle" class="axis">{escape(x_label)}</text>'
    )
    return parts


def _line(frame: _Frame, line: Series) -> str:
    positions = [frame.at(point) for point in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in positions)
    dash = ' stroke-dasharray="5 3"' if line.dashed else ""
    radius = 2.5 if len(positions) < 60 else 1.2
    every = -(-len(positions) // _MOST_DOTS)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{line.color}">'
        f"<title>{escape(line.name)}: {at:.6g}, {value:.6g}</title></circle>"
        for (x, y), (at, value) in list(zip(positions, line.points, strict=True))[::-every]
    )
    return f'<polyline points="{path}" stroke="{line.color}"{dash}/>{dots}'


def _legend(entries: Sequence[tuple[str, str, bool]]) -> str:
    parts = (
        f'<span><i style="border-top: 3px {"dashed" if dashed else "solid"} {color}"></i>'
        f"{escape(name)}</span>"
        for name, color, dashed in entries
    )
    return f'<div class="legend">{"".join(parts)}</div>'


def _figure(title: str, frame: _Frame, axes: Sequence[str], lines: Sequence[Series]) -> str:
    body = "".join([*axes, *(_line(frame, line) for line in lines)])
    svg = f'<svg viewBox="0 0 {frame.width} {frame.height}">{body}</svg>'
    legend = _legend([(line.name, line.color, line.dashed) for line in lines])
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg}{legend}</figure>"
