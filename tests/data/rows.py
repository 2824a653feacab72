"""Generates small rows in Criteo's format and reads them in Python for comparison."""

import gzip
import os
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from sbpflow.data import load_manifest
from sbpflow.data.format.schema import CRITEO
from sbpflow.data.format.shards import SplitRows
from sbpflow.data.prepare.options import PrepareOptions
from sbpflow.data.prepare.prepare import prepare

ROOT = Path(__file__).resolve().parents[2]


def genuine_rows() -> Path:
    """Return the path to real Criteo rows outside the checkout, or skip the test."""
    default = ROOT.parent / "shared" / "data" / "criteo_kaggle_110k.tsv.gz"
    path = Path(os.environ.get("SBPFLOW_CRITEO_ROWS", default))
    if not path.exists():
        pytest.skip(f"no real Criteo rows at {path}; set SBPFLOW_CRITEO_ROWS to their path")
    return path


def text_rows(num_rows: int, seed: int = 0) -> list[list[str]]:
    """Return rows of cells: 5 values per dense column and up to 30 per sparse column; a fifth of
    the cells are empty, but never the label or C1.
    """
    rng = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        dense = [str(rng.choice([-2, -1, 0, 3, 70_000])) for _ in CRITEO.dense]
        sparse = [f"{int(30 * rng.random() ** 2) * 0x1234567:08x}" for _ in CRITEO.sparse]
        cells = [str(rng.randrange(2)), *dense, *sparse]
        rows.append([c if i in (0, 14) or rng.random() < 0.8 else "" for i, c in enumerate(cells)])
    return rows


def write_rows(path: Path, rows: list[list[str]]) -> Path:
    """Write rows as text, gzipped if the suffix is .gz."""
    text = "".join("\t".join(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def run_prepare(output: Path, *inputs: Path, **options):
    """Run prepare with pieces so small that there are several."""
    settings = {"piece_bytes": 1 << 15, "max_bad_fraction": 0.0, **options}
    return prepare(PrepareOptions(inputs=inputs, output=output, **settings))


def all_words(manifest, split):
    """Return all rows of a split as one array of words."""
    rows = SplitRows(manifest, split)
    words = np.empty((rows.num_rows, rows.num_words), dtype=np.int32)
    rows.read(0, rows.num_rows, words)
    return words


def floats(manifest, split):
    """Return the labels and dense values of a split."""
    return all_words(manifest, split)[:, : 1 + len(manifest.dense)].view(np.float32)


def ids(manifest, split):
    """Return a split's ids by field name, for the fields with one id per row."""
    words = all_words(manifest, split)[:, 1 + len(manifest.dense) :]
    return {field.name: words[:, k] for k, field in enumerate(manifest.fields)}


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Return the content of every file of a set."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def counts_of(rows: list[list[str]], name: str) -> Counter:
    """Count how often each value of a column, or each pair of a cross, occurs; skip empty
    values.
    """
    places = [CRITEO.columns.index(part) for part in name.split("x")]
    cells = (tuple(row[place] for place in places) for row in rows)
    return Counter(cell for cell in cells if all(cell))


def reopened(folder: Path):
    """Return the manifest as a different process would read it."""
    return load_manifest(folder)
