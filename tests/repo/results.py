"""Reads the pages with results, and the records behind their numbers."""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "benchmarks" / "results"
PAGES = {path.stem: path.read_text() for path in (ROOT / "docs" / "results").glob("*.md")}


def read(record: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RECORDS / record).read_text().splitlines()]


def rows(page: str, record: str) -> list[list[str]]:
    """Return the cells of the rows that end with the name of a record."""
    lines = re.findall(rf"^\| (.+) \| `{record}` \|$", PAGES[page], re.M)
    return [[cell.strip() for cell in line.split("|")] for line in lines]
