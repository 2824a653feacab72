"""Tests that pages that list parts of the project are complete and correct."""

import re
import runpy
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_keys_is_up_to_date():
    page = runpy.run_path(str(ROOT / ".ci" / "configuration.py"))["page"]()
    committed = (ROOT / "docs" / "configuration.md").read_text()
    assert committed == page, "run PYTHONPATH=. python .ci/configuration.py"


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_yaml_examples_can_be_parsed(page):
    for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        assert yaml.safe_load(block) is not None, block
