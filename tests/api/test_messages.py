"""Tests that errors from the Python API name its arguments, not command-line options."""

import pytest

import sbpflow
from sbpflow.errors import ConfigError, DataError
from tests.api.test_api import CONFIG, SCHEMA, rows


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
    with pytest.raises(ConfigError) as caught:
        sbpflow.load(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path} has no metrics.jsonl, so it is not a run")
