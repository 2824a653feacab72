"""Tests that pages that list parts of the project are complete and correct."""

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_keys_is_up_to_date():
    page = runpy.run_path(str(ROOT / ".ci" / "configuration.py"))["page"]()
    committed = (ROOT / "docs" / "configuration.md").read_text()
    assert committed == page, "run PYTHONPATH=. python .ci/configuration.py"
