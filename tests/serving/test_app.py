"""Tests the application without a server: requests that a client or a proxy must send byte by
byte, and models that tests change.
"""

import asyncio
import json
import math
import time
from typing import Any

import pyarrow as pa
import pytest
import torch

from sbpflow.serving import server
from sbpflow.serving.app import App, Limits
from sbpflow.serving.bodies import ARROW, JSON
from sbpflow.serving.scorer import Model, load
from tests.serving.test_metrics import values
from tests.serving.test_server import rows_of, stream_of, text_cell


def answer(
    app: App,
    path: str,
    body: bytes | list[bytes],
    kind: str = JSON,
    method: str = "POST",
    **headers: str,
) -> tuple[int, bytes]:
    """Return the status and the body of the response to one request, whose body may have parts."""
    sent: list[dict[str, Any]] = []
    parts = [body] if isinstance(body, bytes) else body[::-1]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": parts.pop(), "more_body": bool(parts)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def run() -> None:
        names = {"content_type": kind, **headers}
        given = [(k.replace("_", "-").encode(), v.encode()) for k, v in names.items()]
        scope = {"type": "http", "method": method, "path": path, "headers": given}
        await app(scope, receive, send)
        await asyncio.sleep(0)  # the shadow model's turn

    with torch.inference_mode():
        asyncio.run(run())
    start, content = sent
    return start["status"], content["body"]


def infer_body(rows: list[dict[str, Any]]) -> bytes:
    """Return a request of the Open Inference Protocol."""
    inputs = [
        {
            "name": name,
            "shape": [len(rows)],
            "datatype": "BYTES",
            "data": [text_cell(name, row[name]) for row in rows],
        }
        for name in rows[0]
    ]
    return json.dumps({"inputs": inputs}).encode()


def with_huge_weights(model: Model) -> Model:
    """Return a model that gives finite scores only if all numbers of a row are small."""
    weights = {name: value.clone() for name, value in model.weights.items()}
    weights["mlp.0.weight"].fill_(1e30)
    weights["mlp.1.weight"][:, ::2] *= -1
    return model.with_changes({}, weights, model.version)


def test_a_row_whose_score_is_not_a_number_is_refused(exported, monkeypatch):
    bundle, model = exported / "model", load(exported / "model")
    monkeypatch.setattr(server, "load", lambda *_, **__: with_huge_weights(model))
    app = server.asgi_app({"a": bundle})
    rows = rows_of(model, 3)
    assert answer(app, "/score", json.dumps(rows).encode())[0] == 200
    rows[1]["price"] = 3e38
    table = pa.table({name: [row[name] for row in rows] for name in rows[0]})
    requests = [
        ("/score", json.dumps(rows).encode(), JSON),
        ("/score", stream_of(table), ARROW),
        ("/v2/models/a/infer", infer_body(rows), JSON),
    ]
    for path, body, kind in requests:
        status, content = answer(app, path, body, kind)
        assert status == 400, content
        found = json.loads(content)
        assert (found["row"], found["column"], found["value"]) == (1, None, "nan")
        assert "its numbers are too large; send smaller numbers" in found["error"]
    _, text = answer(app, "/metrics", b"", method="GET")
    assert math.isfinite(values(text.decode())['sbpflow_score_sum{model="a"}'])


def test_a_shadow_score_that_is_not_a_number_is_counted_as_an_error(exported, monkeypatch):
    bundle, model = exported / "model", load(exported / "model")
    models = iter((model, with_huge_weights(model)))
    monkeypatch.setattr(server, "load", lambda *_, **__: next(models))
    app = server.asgi_app({"a": bundle, "b": bundle}, server.Settings(shadow="b"))
    rows = rows_of(model, 1)
    rows[0]["price"] = 3e38
    assert answer(app, "/score", json.dumps(rows).encode())[0] == 200
    found = values(answer(app, "/metrics", b"", method="GET")[1].decode())
    assert found['sbpflow_shadow_errors_total{model="a"}'] == 1
    assert found['sbpflow_shadow_difference_sum{model="a"}'] == 0


@pytest.mark.parametrize(
    ("size", "status"), [("0" * 5000 + "2", 200), ("9" * 5000, 413), ("1" + "0" * 18, 413)]
)
def test_a_content_length_of_many_digits_is_read(exported, size, status):
    app = server.asgi_app({"a": exported / "model"})
    assert answer(app, "/score", b"[]", content_length=size)[0] == status


def test_a_body_in_many_parts_is_read_in_linear_time(exported):
    """Otherwise, a request of 100,000 rows would copy gigabytes."""
    limits = Limits(body_bytes=1 << 24)
    app = server.asgi_app({"a": exported / "model"}, server.Settings(limits=limits))
    parts = [b"[", *[b" " * 4096] * 4000, b"]"]
    began = time.process_time()
    assert answer(app, "/score", parts)[0] == 200
    assert time.process_time() - began < 1.0


def test_binary_tensors_are_refused_with_what_to_send(exported):
    app = server.asgi_app({"a": exported / "model"})
    head = infer_body([{"price": 1.5}])
    size = {"inference_header_content_length": str(len(head))}
    status, content = answer(app, "/v2/models/a/infer", head + b"\0\0\xc0?", **size)
    assert status == 415
    assert "binary tensors are not supported; put the values" in json.loads(content)["error"]


def test_servers_that_announce_their_start_and_end_get_answers(exported):
    """Ray Serve starts no replica without an answer."""
    app = server.asgi_app({"a": exported / "model"})
    events, sent = ["startup", "shutdown"], []

    async def receive() -> dict[str, Any]:
        return {"type": f"lifespan.{events.pop(0)}"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message["type"])

    asyncio.run(app({"type": "lifespan"}, receive, send))
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
