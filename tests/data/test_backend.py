"""Which back-end ``data.loader: auto`` is."""

import importlib.util

import pytest

from sbpflow.data.read.loader import choose_backend


@pytest.mark.parametrize(("installed", "chosen"), [(True, "dali"), (False, "memmap")])
def test_auto_is_dali_where_it_is_installed(monkeypatch, installed, chosen):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    assert choose_backend("auto") == chosen


@pytest.mark.parametrize("wanted", ["dali", "memmap"])
def test_what_is_asked_for_is_not_looked_for(monkeypatch, wanted):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: pytest.fail("looked for"))
    assert choose_backend(wanted) == wanted
