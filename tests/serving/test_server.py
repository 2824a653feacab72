"""Tests the server: its formats, refusals, limits, metrics, workers, and deltas."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from sbpflow.serving.bodies import ARROW, JSON
from sbpflow.serving.scorer import Model, load
from tests.deadlines import Deadline
from tests.serving.bundles import good_rows
from tests.serving.running import Chain, Server, run_and_export, serving
from tests.serving.test_metrics import values


@pytest.fixture(scope="module")
def exported(_cpu_ranks, tmp_path_factory) -> Path:  # noqa: PT019  (``ranks`` has no module scope)
    folder = tmp_path_factory.mktemp("served")
    _cpu_ranks(1, run_and_export, folder, "wdl")
    return folder


@pytest.fixture(scope="module")
def model(exported) -> Model:
    return load(exported / "model")


@pytest.fixture(scope="module")
def server(exported):
    limits = ("--max-rows", 50, "--max-body-bytes", 60_000)
    with serving(f"a={exported / 'model'}", f"b={exported / 'model'}", *limits) as running:
        yield running


def rows_of(model: Model, count: int, seed: int = 3) -> list[dict]:
    """Return rows of the table as JSON has them, without columns that the model does not need."""
    names = [column.name for column in model.columns if column.required]
    found = []
    for row in good_rows(2 * count, seed)[:count]:
        cells = {name: row[name] for name in names}
        found.append({n: None if v != v or v in (float("inf"),) else v for n, v in cells.items()})
    return found


def test_all_formats_give_the_scores_of_the_bundle(server, model):
    rows = rows_of(model, 20)
    wanted = model.score(rows)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    answer = server.request("POST", "/score", json.dumps(rows), JSON)
    assert answer.status == 200, answer.body
    found = json.loads(answer.body)
    assert found["scores"] == wanted.tolist()
    assert (found["model"], found["version"]) == ("a", answer.headers["x-model-version"])
    answer = server.request("POST", "/models/b/score", json.dumps({"columns": columns}), JSON)
    assert json.loads(answer.body)["scores"] == wanted.tolist()
    sink = pa.BufferOutputStream()
    table = pa.table(columns)
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    answer = server.request("POST", "/score", sink.getvalue().to_pybytes(), ARROW)
    assert answer.status == 200, answer.body
    scores = pa.ipc.open_stream(answer.body).read_all()["score"].to_numpy()
    assert np.array_equal(scores, wanted)
