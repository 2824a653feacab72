"""Pages that list parts of the tree are complete and correct."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DECIDED = (ROOT / "docs" / "architecture.md").read_text().split("## Where is it decided\n")[1]
ROWS = re.findall(r"^\| ([^|`]+) \| `([\w/.]+)`, `([\w.]+)` \|$", DECIDED.split("\n## ")[0], re.M)


def test_the_page_of_modules_is_up_to_date():
    page = runpy.run_path(str(ROOT / ".ci" / "modules.py"))["page"]()
    assert (ROOT / "docs" / "modules.md").read_text() == page, "run python .ci/modules.py"


def test_the_page_of_keys_is_up_to_date():
    page = runpy.run_path(str(ROOT / ".ci" / "configuration.py"))["page"]()
    committed = (ROOT / "docs" / "configuration.md").read_text()
    assert committed == page, "run PYTHONPATH=. python .ci/configuration.py"


def test_the_table_of_decisions_is_parsed():
    assert len(ROWS) >= 15


@pytest.mark.parametrize(("what", "file", "name"), ROWS, ids=[row[0] for row in ROWS])
def test_each_decision_is_made_where_the_page_says(what, file, name):
    text = (ROOT / file).read_text()
    last = name.split(".")[-1]
    assert re.search(rf"(def|class) {last}\b|^ *(self\.)?{last}\b[^\n]* = ", text, re.M), name
