"""Tests that errors from the Python API name its arguments, not command-line options, and that it
keeps no copies of tables.
"""

import numpy as np
import pytest

import sbpflow
from sbpflow.api import _series
from sbpflow.checkpoint.folder import DATA_FOLDER
from sbpflow.data.frames import prepared_set
from sbpflow.data.prepare.new_rows import encode
from sbpflow.errors import ConfigError, DataError
from tests.api.test_api import CONFIG, SCHEMA, fit, rows


def test_mistakes_are_explained_for_python(tmp_path):
    given = {"data": rows(100), "run": {"dir": tmp_path / "run"}}
    with pytest.raises(ConfigError) as caught:
        sbpflow.fit(CONFIG, **given)
    message = str(caught.value)
    assert message.startswith("data: this table needs a schema. Check the proposal below and")
    assert 'schema="auto"' in message
    assert "clicked" in message
    assert "--" not in message
    assert "rows.arrow > " not in message
    with pytest.raises(DataError, match=r"^schema: no row has a clicked that is 7, .*label, write"):
        sbpflow.fit(CONFIG, schema={**SCHEMA, "label": {"clicked": 7}}, **given)
    mixed = rows(100).assign(city=["a", 1] * 50)
    with pytest.raises(DataError, match=r"^data cannot be read as a table: column 'city': "):
        sbpflow.fit(CONFIG, **{**given, "data": mixed}, schema=SCHEMA)
    with pytest.raises(ConfigError, match=r"^schema: a value of type list .* as a mapping, or "):
        sbpflow.fit(CONFIG, schema=[SCHEMA], **given)
    for unused in ({"schema": SCHEMA}, {"prepare": {"min_count": 1}}):
        with pytest.raises(ConfigError, match=rf"^{next(iter(unused))} has no effect without data"):
            sbpflow.fit(CONFIG, run=given["run"], **unused)
    with pytest.raises(ConfigError) as caught:
        sbpflow.load(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path} has no metrics.jsonl, so it is not a run")


def test_the_copy_of_a_table_is_removed_once_its_rows_are_prepared(tmp_path):
    parts = {"train": rows(100), "val": rows(50, 1)}
    prepared_set(parts, tmp_path, SCHEMA, {})
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == ["set"]


def test_a_table_as_the_configuration_is_refused():
    with pytest.raises(ConfigError, match=r"^config: a value of type DataFrame .* table as data$"):
        sbpflow.fit(rows(9), schema=SCHEMA)


def test_one_optimizer_must_be_in_a_tuple():
    with pytest.raises(ConfigError, match=r"use \('my_rules:Momentum',\)$"):
        sbpflow.load("runs/notebook", optimizers="my_rules:Momentum")


@pytest.mark.parametrize("values", [rows(9)[["user"]], np.ones((2, 2)), [[1, 2]], "3", [1, "a"]])
def test_values_that_are_not_a_column_are_refused(values):
    with pytest.raises(ConfigError, match=r"^values must be a column or a list of values of one"):
        _series(values)


def test_an_export_does_not_ignore_its_split(tmp_path):
    run = fit(tmp_path / "run")
    with pytest.raises(ConfigError, match="split: test needs a labeled set to score"):
        run.export(tmp_path / "new", split="test")
    rows(50).to_parquet(tmp_path / "rows.parquet")
    like = run.dir / "checkpoints" / DATA_FOLDER
    scored = encode(
        [tmp_path / "rows.parquet"], tmp_path / "set", like=like, workers=1, max_bad_fraction=0.0
    )
    with pytest.raises(ConfigError, match="split: 'tset' is not a split of a prepared set"):
        run.export(tmp_path / "new", split="tset", score=scored.path)


@pytest.mark.parametrize(
    ("data", "prepare", "message"),
    [
        (rows(99), {"output": "x"}, "prepare: output is not an option"),
        (rows(99), {"help": True}, "prepare: help is not an option"),
        ({"train": rows(99)}, {"split": "ratio:.8,.1,.1"}, "prepare: split has no effect"),
    ],
    ids=["output", "help", "split"],
)
def test_fit_refuses_options_of_prepare_that_its_arguments_replace(
    tmp_path, data, prepare, message
):
    with pytest.raises(ConfigError, match=message):
        fit(tmp_path / "run", data, prepare=prepare)


def test_an_arrow_table_that_cannot_be_read_is_refused(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    twice = arrow.table([[1, 2], [3, 4]], names=["user", "user"])
    with pytest.raises(DataError, match=r"^data cannot be read as a table: "):
        fit(tmp_path / "run", twice)


def test_a_column_of_arrays_of_several_types_is_refused(tmp_path):
    arrays = [np.array(["a"]), np.array([])]  # NumPy's type of an empty list is float64
    table = rows(2).assign(tags=arrays)
    message = r"^data cannot be read as a table: column 'tags': .* a single type$"
    with pytest.raises(DataError, match=message):
        fit(tmp_path / "run", table)
