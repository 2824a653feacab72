"""Formats the parts of a plan as text: aligned columns, short lists of ranks, and sizes."""

import re
from collections.abc import Sequence

MANY = 8  # longer lists are shortened


def short_lists(text: str) -> str:
    """Shorten lists of more than eight numbers to ranges and repeats: [0..255], [64 x 4]."""

    def shorten(match: "re.Match[str]") -> str:
        numbers = [int(number) for number in match[1].split(", ")]
        return f"[{', '.join(_runs(numbers))}]" if len(numbers) > MANY else match[0]

    return re.sub(r"\[(\d+(?:, \d+)*)\]", shorten, text)


def _runs(numbers: Sequence[int]) -> list[str]:
    """Shorten three or more consecutive numbers to ``a..b``, and n >= 3 equal ones to ``n x a``."""
    shown: list[str] = []
    start = 0
    while start < len(numbers):
        rise, same = start + 1, start + 1
        while rise < len(numbers) and numbers[rise] == numbers[rise - 1] + 1:
            rise += 1
        while same < len(numbers) and numbers[same] == numbers[start]:
            same += 1
        stop = max(rise, same)
        if stop - start < 3:
            stop = start + 1
            shown.append(str(numbers[start]))
        elif rise >= same:
            shown.append(f"{numbers[start]}..{numbers[rise - 1]}")
        else:
            shown.append(f"{same - start} x {numbers[start]}")
        start = stop
    return shown


def columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Left-align columns. A row with an empty first cell is printed as its second cell."""
    rows = [tuple(short_lists(cell) for cell in row) for row in rows]
    full = [row for row in rows if row[0]]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    return ["  ".join(map(str.ljust, row, widths) if row[0] else [row[1]]).rstrip() for row in rows]


def format_size(num_bytes: float) -> str:
    """Return a number of bytes with a binary unit, such as 1.50 MiB."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes:.0f} B"
