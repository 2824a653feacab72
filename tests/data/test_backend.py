"""Tests which backend ``data.loader: auto`` chooses."""

import importlib.util

import pytest

from sbpflow.data.read.loader import choose_backend


@pytest.mark.parametrize(("installed", "chosen"), [(True, "dali"), (False, "memmap")])
def test_auto_is_dali_if_it_is_installed(monkeypatch, installed, chosen):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    assert choose_backend("auto") == chosen


@pytest.mark.parametrize("wanted", ["dali", "memmap"])
def test_an_explicit_backend_needs_no_search(monkeypatch, wanted):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: pytest.fail("searched"))
    assert choose_backend(wanted) == wanted
