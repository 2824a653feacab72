"""A folder in memory where there is one: what is under test is no disk, and each save syncs."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def memory() -> Iterator[Path]:
    shared = Path("/dev/shm")  # noqa: S108  (made unique below)
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        yield Path(folder)
