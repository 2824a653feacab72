"""Charts as inline SVG: lines, stacked bars, and a square with a diagonal. Knows no runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]
# Okabe and Ito's colours, which stay apart for most who see colours otherwise.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31")
WIDTH, HEIGHT = 460, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 10, 36
_LEAST = 1e-100  # a range below it is a point


@dataclass(frozen=True, slots=True)
class Series:
    """A named line; ``number`` picks its colour, ``dashed`` tells two lines of one run apart."""

    name: str
    points: Sequence[Point]
    number: int
    dashed: bool = False

    @property
    def colour(self) -> str:
        return COLOURS[self.number % len(COLOURS)]


@dataclass(frozen=True, slots=True)
class _Frame:
    """Data ranges and where they lie on the page."""

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
    """Round numbers from ``low`` to ``high``, about ``count`` of them."""
    step = 10.0 ** math.floor(math.log10((high - low) / count))
    step *= next(m for m in (1, 2, 5, 10) if (high - low) / (m * step) <= count)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


def show_number(value: float) -> str:
    """Short, for axes and tables."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.4g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.4g}k"
    return f"{value:.5g}" if abs(value) >= 1e-4 else f"{value:.1e}"


def line_chart(title: str, x_label: str, series: Sequence[Series], *, zero: bool = False) -> str:
    """A figure of all series that have points; of one point it shows a dot. "" where none has."""
    drawn = [one for one in series if one.points]
    if not drawn:
        return ""
    xs = [x for one in drawn for x, _ in one.points]
    ys = [y for one in drawn for _, y in one.points] + ([0.0] if zero else [])
    frame = _Frame(_range(xs, tight=True), _range(ys))
    body = [*_axes(frame, x_label), *(_line(frame, one) for one in drawn)]
    return _figure(
        title, frame, body, _legend([(one.name, one.colour, one.dashed) for one in drawn])
    )


def calibration_chart(title: str, series: Sequence[Series]) -> str:
    """Points (chance given, share found) beside the diagonal on which both are equal."""
    drawn = [one for one in series if one.points]
    if not drawn:
        return ""
    most = max(max(point) for one in drawn for point in one.points) or 1.0
    frame = _Frame((0.0, most), (0.0, most), width=360, height=340)
    (x0, y0), (x1, y1) = frame.at((0.0, 0.0)), frame.at((most, most))
    diagonal = f'<line class="even" x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"/>'
    body = [*_axes(frame, "mean chance given"), diagonal, *(_line(frame, one) for one in drawn)]
    return _figure(title, frame, body, _legend([(one.name, one.colour, False) for one in drawn]))


def stacked_bars(title: str, bars: Sequence[tuple[str, Sequence[tuple[str, float]]]]) -> str:
    """A bar for each (name, parts); parts of one name have one colour."""
    most = max((sum(value for _, value in parts) for _, parts in bars), default=0.0)
    if most <= 0.0:
        return ""
    names = list(dict.fromkeys(name for _, parts in bars for name, _ in parts))
    shades = {name: _shade(place, len(names)) for place, name in enumerate(names)}
    width, bar, left = 940, 30, 150
    body: list[str] = []
    for row, (label, parts) in enumerate(bars):
        y, x = row * (bar + 12) + 6, float(left)
        body.append(f'<text x="{left - 8}" y="{y + 20}" text-anchor="end">{escape(label)}</text>')
        for name, value in parts:
            wide = (width - left - 90) * value / most
            tip = f"<title>{escape(f'{label}, {name}: {value:.3f} ms')}</title>"
            body.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{bar}" '
                f'fill="{shades[name]}">{tip}</rect>'
            )
            x += wide
        total = sum(value for _, value in parts)
        body.append(f'<text x="{x + 6:.1f}" y="{y + 20}">{total:.2f} ms</text>')
    height = len(bars) * (bar + 12) + 6
    legend = _legend([(name, shades[name], False) for name in names])
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {width} {height}" class="full">{"".join(body)}</svg>{legend}</figure>'
    )


def _shade(place: int, count: int) -> str:
    return f"hsl({round(360 * place / max(count, 1) + 205) % 360} 50% {48 + 14 * (place % 2)}%)"


def _range(values: Sequence[float], *, tight: bool = False) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low <= max(_LEAST, 1e-9 * max(abs(low), abs(high))):  # too near to be told apart
        spread = max(abs(low), abs(high)) / 10
        spread = spread if spread > _LEAST else 1.0
        return low - spread, high + spread
    room = 0.0 if tight else 0.05 * (high - low)
    return low - room, high + room


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


def _line(frame: _Frame, one: Series) -> str:
    places = [frame.at(point) for point in one.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dash = ' stroke-dasharray="5 3"' if one.dashed else ""
    radius = 2.5 if len(places) < 60 else 1.2
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{one.colour}">'
        f"<title>{escape(one.name)}: {at:.6g}, {value:.6g}</title></circle>"
        for (x, y), (at, value) in zip(places, one.points, strict=True)
    )
    return f'<polyline points="{path}" stroke="{one.colour}"{dash}/>{dots}'


def _legend(entries: Sequence[tuple[str, str, bool]]) -> str:
    parts = (
        f'<span><i style="border-top: 3px {"dashed" if dashed else "solid"} {colour}"></i>'
        f"{escape(name)}</span>"
        for name, colour, dashed in entries
    )
    return f'<div class="legend">{"".join(parts)}</div>'


def _figure(title: str, frame: _Frame, body: Sequence[str], legend: str) -> str:
    svg = f'<svg viewBox="0 0 {frame.width} {frame.height}">{"".join(body)}</svg>'
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg}{legend}</figure>"
