"""Tests that the extras, make targets and versions in docs/install.md match the project."""

import re
import tomllib
from pathlib import Path

from sbpflow.runtime.compute.versions import FBGEMM_OF_TORCH

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "install.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_table_of_extras_is_complete():
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, re.M)
    assert sorted(rows) == sorted(PROJECT["optional-dependencies"])
    for extra in re.findall(r'pip install "\.\[(.+?)\]"', PAGE)[0].split(","):
        assert extra in rows


def test_the_targets_of_make_exist():
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"^make (\w+)", PAGE, re.M))
    assert named == {"demo", "test", "docs", "help", "gpu"}
    assert named <= targets


def test_the_versions_are_those_of_the_project():
    low, high = re.search(r"Python (3\.\d+) to (3\.\d+)", PAGE).groups()
    assert PROJECT["requires-python"] == f">={low},<3.{int(high[2:]) + 1}"
    torch = next(one for one in PROJECT["dependencies"] if one.startswith("torch"))
    low, high = re.search(r"PyTorch (2\.\d+) to (2\.\d+)", PAGE).groups()
    assert torch == f"torch>={low},<2.{int(high[2:]) + 1}"
    words = " ".join(PAGE.split())
    for torch, fbgemm in FBGEMM_OF_TORCH.items():
        assert re.search(rf"{fbgemm} with (torch )?{torch}\b", words)
