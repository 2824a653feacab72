"""Tests that every public name is on one page of the API reference, and that every name there
exists.
"""

import re
from importlib import import_module
from pathlib import Path

import pytest

import sbpflow

PAGES = Path(__file__).resolve().parents[2] / "docs" / "api"
NAMES = [
    name
    for path in sorted(PAGES.glob("*.md"))
    for name in re.findall(r"^\.\. auto\w+:: (\S+)$", path.read_text(), re.M)
]


def resolve(dotted: str) -> object:
    """Return a module, or the module's attribute named by the last part of the name."""
    try:
        return import_module(dotted)
    except ModuleNotFoundError:
        home, _, name = dotted.rpartition(".")
        return getattr(import_module(home), name)


def test_every_public_name_appears_on_exactly_one_page():
    assert len(NAMES) == len(set(NAMES))
    here = {name.removeprefix("sbpflow.") for name in NAMES if name.count(".") == 1}
    assert here == {*sbpflow.__all__} - {"ops"}
    assert "sbpflow.tensor.ops" in NAMES
    data = {name.removeprefix("sbpflow.data.") for name in NAMES if ".data." in name}
    assert data == set(import_module("sbpflow.data").__all__)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_the_reference_exists_and_is_documented(name):
    assert resolve(name).__doc__
