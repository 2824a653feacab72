"""Tests writing the vectors of a table with the original values of its ids."""

from pathlib import Path

import polars as pl
import pytest

import sbpflow
from sbpflow.commands import embeddings as command
from sbpflow.commands.embeddings import embeddings
from sbpflow.errors import ConfigError

CONFIG = {
    "data": {"batch_size": 100, "loader": "memmap"},
    "model": {"name": "dlrm", "embedding_dim": 4, "bottom": [8], "top": [8]},
    "parallel": {"kernel": "torch", "device": "cpu"},
    "train": {"max_steps": 2, "eval_every": 0},
}
SCHEMA = {
    "label": "click",
    "dense": {"price": "log1"},
    "sparse": {"item": "integer", "city": "string"},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> "sbpflow.Run":
    table = pl.DataFrame({
        "item": [row % 40 - 20 for row in range(600)],
        "city": ["Oslo", "Aarhus", "", "Z\u00fcrich", "Oslo", "Rome"] * 100,
        "price": [row / 7 for row in range(600)],
        "click": [row % 3 == 0 for row in range(600)],
    })  # fmt: skip
    return sbpflow.fit(
        CONFIG,
        data=table.with_columns(pl.col("click").cast(pl.Int64)),
        schema=SCHEMA,
        prepare={"min_count": 1, "keep_strings": True},
        run={"dir": tmp_path_factory.mktemp("embeddings") / "run"},
    )


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("column", ["item", "city"])
def test_all_values_and_their_vectors_are_written(run, tmp_path, monkeypatch, column, suffix):
    monkeypatch.setattr(command, "_BLOCK_BYTES", 7 * 16)  # blocks of 7 rows
    output = tmp_path / f"x{suffix}"
    words = [str(run.dir), "--table", f"deep.{column}", "--output", str(output)]
    assert embeddings(words) == 0
    found = pl.read_parquet(output) if suffix == ".parquet" else pl.read_ipc(output)
    assert found.schema["vector"] == pl.Array(pl.Float32, 4)
    values, vectors = run.embeddings(f"deep.{column}")
    wanted = dict(zip(values.tolist(), vectors.tolist(), strict=True))
    assert len(wanted) > 3
    assert dict(zip(found[column].to_list(), found["vector"].to_list(), strict=True)) == wanted
    assert [path.name for path in tmp_path.iterdir()] == [output.name]


def test_mistakes_are_reported_before_anything_is_written(run, tmp_path: Path):
    def write(table: str, name: str) -> None:
        embeddings([str(run.dir), "--table", table, "--output", str(tmp_path / name)])

    with pytest.raises(ConfigError, match=r"'deep.items' is not .* \(for example, deep.item\)"):
        write("deep.items", "x.parquet")
    with pytest.raises(ConfigError, match=r"x\.csv: must end in \.parquet or \.arrow"):
        write("deep.item", "x.csv")
    (tmp_path / "x.parquet").touch()
    with pytest.raises(ConfigError, match=r"x\.parquet: already exists"):
        write("deep.item", "x.parquet")
