"""Makes small prepared sets in which dense column 0 is the row number, so that rows are
recognizable.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sbpflow.data.format.manifest import (
    SPLITS,
    Manifest,
    load_manifest,
    write_manifest,
)
from sbpflow.data.format.shards import write_shard


def make_set(folder: Path, num_rows: int, shard_rows: int = 1000) -> Manifest:
    """Make a set of ``num_rows`` train rows: dense I1 = row number, ids = row * 10 + field."""
    folder.mkdir(parents=True)
    shards = {}
    for name, rows in zip(SPLITS, (num_rows, 17, 5), strict=True):
        shards[name] = []
        for start in range(0, rows, shard_rows):
            number = np.arange(start, min(start + shard_rows, rows))
            words = np.empty((len(number), 6), dtype=np.int32)
            words[:, :3].view(np.float32)[:] = np.stack([number % 2, number, -number], axis=1)
            words[:, 3:] = number[:, None] * 10 + np.arange(3)
            shards[name].append(write_shard(folder, f"{name}-{start}.npy", words))
    content = {
        "source": "test",
        "dense": [{"name": "I1"}, {"name": "I2"}],
        "fields": [
            {"name": "C1", "rows": num_rows * 10},
            {"name": "C2", "rows": num_rows * 10},
            {"name": "C1xC2", "rows": num_rows * 10, "parts": ["C1", "C2"]},
        ],
        "splits": shards,
    }
    write_manifest(folder, content)
    return load_manifest(folder)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks so small that a read of a small set uses several blocks of several batches."""
    monkeypatch.setattr("sbpflow.data.read.blocks.BLOCK_BYTES", 50_000)


@pytest.fixture(scope="session")
def row_set(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Manifest]:
    """Return a function that calls ``make_set`` for a number of train rows, once per session and
    number, and returns the set.
    """
    sets: dict[int, Manifest] = {}

    def get(num_rows: int) -> Manifest:
        if num_rows not in sets:
            sets[num_rows] = make_set(tmp_path_factory.mktemp("rows") / str(num_rows), num_rows)
        return sets[num_rows]

    return get
