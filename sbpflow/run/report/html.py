"""Builds self-contained HTML pages of charts and tables."""

from collections.abc import Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #777; }
body { font: 14px/1.45 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin: 2em 0 .5em; }
.row { display: flex; flex-wrap: wrap; gap: 1em; }
figure { margin: 0 0 1em; flex: 1 1 400px; max-width: 480px; }
figure:has(.full) { flex-basis: 100%; max-width: none; overflow-x: auto; }
figcaption { font-weight: 600; margin-bottom: .2em; }
svg { width: 100%; height: auto; font: 11px system-ui, sans-serif; }
svg.full { min-width: 600px; } svg text { fill: currentColor; } svg .axis { fill: var(--soft); }
.grid { stroke: var(--line); } .even { stroke: var(--soft); stroke-dasharray: 2 3; }
polyline { fill: none; stroke-width: 1.8; }
.legend { display: flex; flex-wrap: wrap; gap: .2em 1.2em; font-size: 12px; }
.legend i { display: inline-block; width: 18px; margin-right: 5px; vertical-align: middle; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .2em 1em .2em 0; border-bottom: 1px solid var(--line); }
td { white-space: nowrap; } td.n { text-align: right; } th { font-weight: 600; }
.scroll { overflow-x: auto; } .note { color: var(--soft); } details { margin: .5em 0; }
"""


def document(title: str, sections: Sequence[tuple[str, str]]) -> str:
    """Return a page with all non-empty sections; a section is (heading, HTML)."""
    body = "".join(f"<section><h2>{name}</h2>{text}</section>" for name, text in sections if text)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def html_row(charts: Sequence[str]) -> str:
    """Return charts in a row, side by side if the page is wide enough."""
    drawn = "".join(charts)
    return f'<div class="row">{drawn}</div>' if drawn else ""


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of text cells that scrolls on narrow pages, or "" without rows."""
    if not rows:
        return ""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>" for cells in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
