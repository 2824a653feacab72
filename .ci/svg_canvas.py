"""Draw text, boxes and arrows in named light or dark colors, and write SVG files.

``pictures.py`` uses this canvas. The canvas does not measure text, because widths depend on
installed fonts; callers must leave enough space.
"""

from pathlib import Path
from xml.etree import ElementTree

SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'Liberation Mono', monospace"

# Each rank color must have a contrast of at least 4.5:1 with "text" in the same theme.
THEMES = {
    "light": {
        "text": "#1f2328",
        "faint": "#57606a",
        "line": "#8c959f",
        "panel": "#f3f4f6",
        "rank0": "#9cc7f5",
        "rank1": "#f6be85",
        "rank2": "#a3d9b1",
        "rank3": "#d3b5ea",
    },
    "dark": {
        "text": "#e6edf3",
        "faint": "#9da7b3",
        "line": "#6e7681",
        "panel": "#22272e",
        "rank0": "#1f5fa6",
        "rank1": "#9a5310",
        "rank2": "#27703f",
        "rank3": "#70429a",
    },
}


class Canvas:
    """A picture in one theme. Colors are names in ``THEMES``, and y increases downward."""

    def __init__(self, theme: str, width: int, height: int, title: str) -> None:
        self._colors = THEMES[theme]
        self._root = ElementTree.Element(
            "svg",
            {
                "xmlns": "http://www.w3.org/2000/svg",
                "viewBox": f"0 0 {width} {height}",
                "width": str(width),
                "height": str(height),
                "role": "img",
                "font-family": SANS,
            },
        )
        ElementTree.SubElement(self._root, "title").text = title

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 14,
        color: str = "text",
        anchor: str = "start",
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        """Draw ``words`` with the baseline at ``y``; ``anchor`` is start, middle or end."""
        style = {"x": _number(x), "y": _number(y), "font-size": _number(size)}
        style |= {"fill": self._colors[color]}
        if anchor != "start":
            style["text-anchor"] = anchor
        if bold:
            style["font-weight"] = "600"
        if mono:
            style["font-family"] = MONO
        element = ElementTree.SubElement(self._root, "text", style)
        element.set("xml:space", "preserve")
        element.text = words

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str | None = None,
        line: str | None = "line",
        dashed: bool = False,
        radius: float = 0,
    ) -> None:
        """Draw a rectangle that is filled, outlined, or both."""
        style = {"x": _number(x), "y": _number(y)}
        style |= {"width": _number(width), "height": _number(height)}
        style["fill"] = self._colors[fill] if fill else "none"
        if line:
            style["stroke"] = self._colors[line]
        if dashed:
            style["stroke-dasharray"] = "3 3"
        if radius:
            style["rx"] = _number(radius)
        ElementTree.SubElement(self._root, "rect", style)

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Draw a horizontal or vertical arrow from the first point to the second."""
        color = self._colors["line"]
        ends = {"x1": _number(x1), "y1": _number(y1), "x2": _number(x2), "y2": _number(y2)}
        ElementTree.SubElement(self._root, "line", {**ends, "stroke": color, "stroke-width": "2"})
        back = 7 if x2 > x1 or y2 > y1 else -7
        if y1 == y2:
            corners = [(x2, y2), (x2 - back, y2 - 5), (x2 - back, y2 + 5)]
        else:
            corners = [(x2, y2), (x2 - 5, y2 - back), (x2 + 5, y2 - back)]
        points = " ".join(f"{_number(x)},{_number(y)}" for x, y in corners)
        ElementTree.SubElement(self._root, "polygon", {"points": points, "fill": color})

    def save(self, path: Path) -> None:
        """Write an ASCII file with one element per line; equal pictures give equal bytes."""
        ElementTree.indent(self._root)
        path.write_bytes(ElementTree.tostring(self._root, encoding="us-ascii") + b"\n")


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
