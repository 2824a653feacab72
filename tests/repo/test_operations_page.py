"""Tests that the fault table in docs/operations.md agrees with the tests."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()
TABLE = PAGE.split("\n## Faults\n")[1]
ROWS = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| `(tests/[\w/]+\.py)::(\w+)` \|$", TABLE, re.M)
WHOLLY = ("tests/launch/test_faults.py", "tests/launch/test_two_machines.py")


def sources(file: str) -> dict[str, str]:
    """Return the source of each test in a file."""
    text = (ROOT / file).read_text()
    return {
        node.name: ast.get_source_segment(text, node) or ""
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def bare(text: str) -> str:
    """Return the text without quotes, pattern escapes and line breaks."""
    return re.sub(r"[\\\"']|\bf(?=\")|\s+", "", text).lower()


def test_every_row_of_the_table_is_parsed():
    lines = [line for line in TABLE.splitlines() if line.startswith("| ")]
    assert len(ROWS) == len(lines) - 1 >= 20  # without the head
    assert len({name for *_, name in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("seen", "file", "name"), [(r[1], r[3], r[4]) for r in ROWS])
def test_the_messages_in_a_row_occur_in_its_test(seen, file, name):
    source = bare(sources(file)[name])
    for message in re.findall(r"`([^`]+)`", seen):
        if not message.startswith(("python -m", "data.", "parallel.", "--")):  # a remedy
            assert bare(message) in source, message


@pytest.mark.parametrize("file", WHOLLY)
def test_every_test_of_a_fault_has_a_row(file):
    assert set(sources(file)) <= {row[4] for row in ROWS if row[3] == file}
