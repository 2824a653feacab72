"""Tests writing a table's vectors with the original values of its ids."""

import re
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import sbpflow
from sbpflow.commands import embeddings as command
from sbpflow.commands.embeddings import embeddings
from sbpflow.errors import CheckpointError, ConfigError
from sbpflow.run.saved.saved_model import find_checkpoint
from sbpflow.serving.cells import MISSING_KEY, string_key

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


GROWS = {"vocabulary": "dynamic", "admit_count": 2, "evict": {"max_rows": 65_536}}


def table() -> pl.DataFrame:
    return pl.DataFrame({
        "item": [row % 40 - 20 for row in range(600)],
        "city": ["Oslo", "Aarhus", "", "Z\u00fcrich", "Oslo", "Rome"] * 100,
        "price": [row / 7 for row in range(600)],
        "click": [int(row % 3 == 0) for row in range(600)],
    })  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> "sbpflow.Run":
    return sbpflow.fit(
        CONFIG,
        data=table(),
        schema=SCHEMA,
        prepare={"min_count": 1, "keep_strings": True},
        run={"dir": tmp_path_factory.mktemp("embeddings") / "run"},
    )


@pytest.fixture(scope="module")
def growing(tmp_path_factory) -> "sbpflow.Run":
    pytest.importorskip("numba", reason="growing tables need numba")
    rare = pl.when(pl.int_range(600) < 3).then(pl.lit(-1000) - pl.int_range(600))
    return sbpflow.fit(
        {**CONFIG, "model": {**CONFIG["model"], "fields": {"*": GROWS}}},
        data=table().with_columns(rare.otherwise(pl.col("item")).alias("item")),
        schema=SCHEMA,
        prepare={"keys": ["item", "city"]},
        run={"dir": tmp_path_factory.mktemp("growing") / "run"},
    )


def test_a_growing_table_has_the_vectors_of_its_keys(growing, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_BLOCK_BYTES", 7 * 16)
    checkpoint = find_checkpoint(growing.dir)
    cities = {city: string_key(city)[0] for city in ("Oslo", "Aarhus", "Z\u00fcrich", "Rome")}
    signed = {int(np.uint64(key).view(np.int64)): city for city, key in cities.items()}
    for column in ("item", "city"):
        saved = checkpoint.tensor(f"vocabularies/{column}/keys").tolist()
        vectors = checkpoint.tensor(f"tables/deep.{column}")[1:].tolist()
        wanted = {k: v for k, v in zip(saved, vectors, strict=True) if k != MISSING_KEY}
        assert set(wanted) == (set(range(-20, 20)) if column == "item" else set(signed))
        output = tmp_path / f"{column}.parquet"
        words = [str(growing.dir), "--table", f"deep.{column}", "--output", str(output)]
        assert embeddings(words) == 0
        found = pl.read_parquet(output)
        assert found.schema[column] == pl.Int64
        assert dict(found.iter_rows()) == wanted
        keys, rows = growing.embeddings(f"deep.{column}")
        assert dict(zip(keys.tolist(), rows.tolist(), strict=True)) == wanted
    names, rows = growing.embeddings("deep.city", values=["Rome", "Atlantis", "Oslo", None])
    assert names.tolist() == ["Rome", "Oslo"]
    by_name = {signed[key]: vector for key, vector in wanted.items()}
    assert rows.tolist() == [by_name["Rome"], by_name["Oslo"]]
    items, rows = growing.embeddings("deep.item", values=[-1000, 3, -1001])
    assert items.tolist() == [3]


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


def test_a_full_disk_is_reported_with_the_output(run, tmp_path, monkeypatch):
    def full(*_):  # Polars raises OSError or this error, which is not an OSError
        raise pl.exceptions.ComputeError("parquet: No space left on device (os error 28)")

    monkeypatch.setattr(pl.LazyFrame, "sink_parquet", full)
    words = [str(run.dir), "--table", "deep.item", "--output", str(tmp_path / "x.parquet")]
    with pytest.raises(ConfigError, match=r"--output .*x\.parquet .* \(no space left on device\)"):
        embeddings(words)


def test_a_column_named_vector_keeps_its_values(run):
    frame = command._frame(
        find_checkpoint(run.dir), "tables/deep.item", "vector", np.array([5]), np.array([2])
    )
    assert frame.schema == {"vector": pl.Int64, "embedding": pl.Array(pl.Float32, 4)}
    assert frame["vector"].to_list() == [5]


@pytest.mark.parametrize("values", ["Rome", 7, [1, "Rome"]], ids=str)
def test_values_that_are_not_a_column_are_refused(run, values):
    with pytest.raises(ConfigError, match=rf"^values must be .*, got {re.escape(repr(values))}$"):
        run.embeddings("deep.city", values=values)


def test_a_checkpoint_that_was_copied_without_the_vocabularies_is_refused(run, tmp_path):
    path = find_checkpoint(run.dir).path
    shutil.copytree(path, tmp_path / path.name)
    words = ["--table", "deep.item", "--output", str(tmp_path / "x.parquet")]
    with pytest.raises(CheckpointError, match=rf"{path.name}: the folder .*/data, .* copy the"):
        embeddings([str(tmp_path / path.name), *words])


def test_mistakes_are_reported_before_anything_is_written(run, tmp_path: Path):
    def write(table: str, name: str) -> None:
        embeddings([str(run.dir), "--table", table, "--output", str(tmp_path / name)])

    with pytest.raises(ConfigError, match=r"'deep.items' is not .* \(for example, deep.item\)"):
        write("deep.items", "x.parquet")
    with pytest.raises(ConfigError, match=r"x\.csv: must end in \.parquet or \.arrow"):
        write("deep.item", "x.csv")
    (tmp_path / "x.parquet").touch()
    with pytest.raises(ConfigError, match=r"x\.parquet: already exists; remove it first, or use"):
        write("deep.item", "x.parquet")
