"""Tests the server: its formats, refusals, limits, metrics, workers, and deltas."""

import json
import os
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.serving_load import load as send_load
from benchmarks.serving_load import request
from benchmarks.serving_tools import Chain, Server, name_of, serving
from sbpflow.commands.serve import folders_of, serve
from sbpflow.errors import ConfigError, DataError
from sbpflow.serving import server as server_module
from sbpflow.serving.bodies import ARROW, JSON, TEXT
from sbpflow.serving.scorer import Model, load
from tests.data.tables import write_csv
from tests.deadlines import Deadline, output_of
from tests.launch.time_slices import LINUX_SINCE_6_12, time_slice_ns
from tests.serving.bundles import good_rows
from tests.serving.test_metrics import values


@pytest.fixture(scope="module")
def model(exported) -> Model:
    return load(exported / "model")


@pytest.fixture(scope="module")
def server(exported):
    limits = ("--max-rows", 50, "--max-body-bytes", 60_000)
    with serving(f"a={exported / 'model'}", f"b={exported / 'model'}", *limits) as running:
        yield running


def stream_of(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


TWICE = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])


def rows_of(model: Model, count: int, seed: int = 3) -> list[dict]:
    """Return rows as in JSON, with the columns that the model needs."""
    names = [column.name for column in model.columns if column.required]
    rows = [{name: row[name] for name in names} for row in good_rows(2 * count, seed)[:count]]
    bad = (float("inf"), float("nan"))
    return [{n: None if str(v) in map(str, bad) else v for n, v in row.items()} for row in rows]


def text_of(folder: Path, count: int, seed: int = 3) -> bytes:
    return write_csv(folder / "rows.csv", good_rows(2 * count, seed)[:count]).read_bytes()


def test_json_and_arrow_give_the_scores_of_the_bundle(server, model):
    rows = rows_of(model, 20)
    wanted = model.score(rows)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    answer = server.request("POST", "/score", json.dumps(rows), JSON)
    assert answer.status == 200, answer.body
    found = json.loads(answer.body)
    assert np.float32(found["scores"]).tolist() == wanted.tolist()
    assert (found["model"], found["version"]) == ("a", answer.headers["x-model-version"])
    answer = server.request("POST", "/models/b/score", json.dumps({"columns": columns}), JSON)
    assert np.float32(json.loads(answer.body)["scores"]).tolist() == wanted.tolist()
    answer = server.request("POST", "/score", stream_of(pa.table(columns)), ARROW)
    assert answer.status == 200, answer.body
    scores = pa.ipc.open_stream(answer.body).read_all()["score"].to_numpy()
    assert np.array_equal(scores, wanted)


def test_text_gives_the_scores_of_the_bundle(server, model, tmp_path):
    text = text_of(tmp_path, 20)
    for kind in (TEXT, ""):
        answer = server.request("POST", "/score", text, kind)
        assert answer.status == 200, answer.body
        assert np.float32(answer.body.split()).tolist() == model.score(text).tolist()


def test_rows_of_text_are_limited(server, tmp_path):
    answer = server.request("POST", "/score", text_of(tmp_path, 51), TEXT)
    assert answer.status == 413
    assert "has 51 rows, but the server accepts at most 50" in json.loads(answer.body)["error"]


def test_the_open_inference_protocol(server, model):
    assert json.loads(server.request("GET", "/v2").body)["name"] == "sbpflow"
    assert server.request("GET", "/v2/health/live").status == 200
    assert server.request("GET", "/v2/health/ready").status == 200
    metadata = json.loads(server.request("GET", "/v2/models/a").body)
    (version,) = metadata["versions"]
    names = [column["name"] for column in metadata["inputs"]]
    assert metadata["outputs"] == [{"name": "score", "datatype": "FP32", "shape": [-1]}]
    rows = rows_of(model, 8)
    assert set(names) == rows[0].keys()
    columns = {name: [text_cell(name, row[name]) for row in rows] for name in names}
    inputs = [
        {"name": name, "shape": [8], "datatype": "BYTES", "data": data}
        for name, data in columns.items()
    ]
    body = json.dumps({"id": "x", "inputs": inputs})
    wanted = model.score(columns)
    for path in ("/v2/models/a/infer", f"/v2/models/a/versions/{version}/infer"):
        answer = server.request("POST", path, body, JSON)
        assert answer.status == 200, answer.body
        found = json.loads(answer.body)
        assert (found["model_name"], found["model_version"], found["id"]) == ("a", version, "x")
        (output,) = found["outputs"]
        assert (output["shape"], output["data"]) == ([8], wanted.tolist())
    assert server.request("GET", f"/v2/models/a/versions/{version}/ready").status == 200
    assert server.request("POST", "/v2/models/a/versions/9/infer", body, JSON).status == 404


def text_cell(name: str, value: object) -> str | None:
    if isinstance(value, list):
        return (";" if name == "genre" else "|").join(map(str, value))
    return None if value is None else str(value)


def test_a_bad_row_is_refused_with_its_row_column_and_a_value_that_would_pass(server, model):
    rows = rows_of(model, 5)
    rows[3]["shop"] = "seven"
    answer = server.request("POST", "/score", json.dumps(rows), JSON)
    assert answer.status == 400
    found = json.loads(answer.body)
    assert (found["row"], found["column"], found["value"]) == (3, "shop", "seven")
    assert "row 3, column 'shop'" in found["error"]
    assert "such as 7" in found["error"]
    del rows[3]["shop"]
    found = json.loads(server.request("POST", "/score", json.dumps(rows), JSON).body)
    assert (found["row"], found["column"]) == (3, "shop")


@pytest.mark.parametrize(
    ("method", "path", "kind", "body", "status", "words"),
    [
        ("GET", "/scores", "", None, 404, "is not a path of this server; use POST /score"),
        ("POST", "/models/c/score", JSON, "[]", 404, "the names are a, b"),
        ("GET", "/score", "", None, 405, "GET /score is not supported; use POST"),
        ("POST", "/metrics", "", "", 405, "use GET"),
        ("POST", "/score", "image/png", "x", 415, "'image/png' is not supported; use text/tab"),
        ("POST", "/score", f"{TEXT}; charset=latin-1", "x", 415, "use charset=utf-8"),
        ("POST", "/score", ARROW, stream_of(TWICE), 400, "the column 'a' occurs twice"),
        ("POST", "/score", JSON, "{", 400, "the body is not JSON"),
        ("POST", "/score", JSON, "[{}]", 400, "lacks this column"),
        ("POST", "/score", TEXT, "a,b\n1,2\n", 400, "lacks this column"),
        ("POST", "/score", JSON, '{"columns": {}}', 400, "lacks this column"),
        (
            "POST",
            "/score",
            JSON,
            "[" + "{}," * 50 + "{}]",
            413,
            "has 51 rows, but the server accepts",
        ),
        ("POST", "/score", JSON, " " * 60_001, 413, "more than 60,000 bytes"),
        ("POST", "/v2/models/a/infer", JSON, "{}", 400, "inputs"),
        ("POST", "/v2/models/a", JSON, "{}", 405, "use GET"),
        ("GET", "/v2/models/a/config", JSON, None, 404, "is not a path"),
    ],
)
def test_a_bad_request_is_refused_with_the_rule(server, method, path, kind, body, status, words):
    answer = server.request(method, path, body, kind)
    assert answer.status == status, answer.body
    assert words in json.loads(answer.body)["error"]


def test_chunked_bodies_are_limited_too(server):
    def chunks():
        for _ in range(70):
            yield b" " * 1000

    assert server.request("POST", "/score", chunks(), JSON).status == 413


def test_a_refused_large_request_gets_its_answer_on_a_connection_that_stays_usable(server):
    sent = [request("/score", b" " * (1 << 20), JSON), request("/none", b"")]
    found = send_load(server.port, sent, 0.5, 1)
    assert {(number, status) for number, _, status, _ in found.bodies} == {(0, 413), (1, 404)}
    assert found.lost == []


def test_answers_do_not_wait_for_acknowledgments(server):
    found = send_load(server.port, [request("/none", b"")], 0.5, 1)
    assert found.latency.min() < 0.03  # seconds; a delayed acknowledgment takes 0.04


@pytest.mark.parametrize(
    "sent",
    [b"GARBAGE\r\n\r\n", b"POST /score HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n"],
)
def test_malformed_http_ends_the_connection(server, sent):
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(sent)
        assert b" 400 " in connection.recv(4096)
    assert server.request("GET", "/ready").status == 200


@LINUX_SINCE_6_12
def test_the_thread_that_answers_can_interrupt_the_thread_that_applies_deltas(server):
    pid = server.workers()[0]
    tids = [int(tid) for tid in os.listdir(f"/proc/{pid}/task")]
    low = [tid for tid in tids if os.getpriority(os.PRIO_PROCESS, tid) == 19]
    assert len(low) == 1
    assert pid not in low
    assert time_slice_ns(pid) == 100_000 < time_slice_ns(low[0])


@pytest.mark.slow
def test_metrics_count_what_the_server_did(exported, model):
    rows = rows_of(model, 6)
    rows[0]["city"] = "a city that no row has"
    bundle = exported / "model"
    with serving(f"a={bundle}", f"b={bundle}", "--shadow", "b", workers=2) as server:
        for _ in range(10):  # enough requests that every worker answers some
            assert server.request("POST", "/score", json.dumps(rows), JSON).status == 200
        server.request("POST", "/score", "[{}]", JSON)
        server.request("GET", "/nothing")
        deadline = Deadline(20)
        while True:  # the shadow model and the counts are updated after the response
            found = values(server.request("GET", "/metrics").body.decode())
            refused = ('{model="a",status="400"}', '{model="",status="404"}')
            counted = all(f"sbpflow_requests_total{labels}" in found for labels in refused)
            if counted and found['sbpflow_shadow_rows_total{model="a"}'] == 60:
                break
            assert not deadline.over(), found
            time.sleep(0.05)
    assert found['sbpflow_requests_total{model="a",status="200"}'] == 10
    assert found['sbpflow_requests_total{model="a",status="400"}'] == 1
    assert found['sbpflow_requests_total{model="",status="404"}'] == 1
    assert found['sbpflow_request_seconds_count{model="a"}'] == 11
    assert found['sbpflow_rows_total{model="a"}'] == 60
    assert found['sbpflow_score_count{model="a"}'] == 60
    assert found['sbpflow_score_sum{model="a"}'] == pytest.approx(10 * model.score(rows).sum())
    assert found['sbpflow_unknown_values_total{model="a",column="city"}'] == 10
    encoded = model.encode(rows)
    for name, number in encoded.missing.items():
        key = f'sbpflow_missing_values_total{{model="a",column="{name}"}}'
        assert found[key] == 10 * number, name
    # Both models give equal scores.
    assert found['sbpflow_shadow_difference_bucket{model="a",le="1e-06"}'] == 60
    assert found['sbpflow_staleness_seconds{model="a"}'] < 1e5
    assert sum(n for key, n in found.items() if key.startswith("sbpflow_model_workers")) == 4


def wait_for(server: Server, model: Model) -> None:
    """Wait until all workers serve a version."""
    deadline = Deadline(30)
    while not server.serve_version(model):
        assert not deadline.over()
        time.sleep(0.05)


def stop(server: Server) -> str:
    """Send SIGTERM, and return what the server printed."""
    server.process.terminate()
    return output_of(server.process, 30)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.fixture
def chain(exported, tmp_path) -> Chain:
    shutil.copytree(exported / "model", tmp_path / "out" / "step-5")
    return Chain(tmp_path / "out" / "step-5", load(tmp_path / "out" / "step-5"))


def start_following(chain: Chain, workers: int = 1):
    return serving(f"a={chain.bundle.parent}", "--poll-seconds", "0.05", workers=workers)


def scores_of(server: Server, rows: list[dict]) -> np.ndarray:
    answer = server.request("POST", "/score", json.dumps(rows), JSON)
    assert answer.status == 200, answer.body
    return np.array(json.loads(answer.body)["scores"])


def test_deltas_are_applied_and_faults_keep_the_model(chain, model):
    rows = rows_of(model, 20)
    first = chain.write(1)
    with start_following(chain) as server:
        assert np.allclose(scores_of(server, rows), first.score(rows), rtol=0, atol=1e-6)
        second = chain.write(2)
        wait_for(server, second)
        assert np.allclose(scores_of(server, rows), second.score(rows), rtol=0, atol=1e-6)
        assert not np.allclose(second.score(rows), first.score(rows), rtol=0, atol=1e-3)
        before = values(server.request("GET", "/metrics").body.decode())
        damage_next(chain)
        deadline = Deadline(20)
        while True:
            found = values(server.request("GET", "/metrics").body.decode())
            if found['sbpflow_delta_errors_total{model="a"}'] == 1:
                break
            assert not deadline.over()
            time.sleep(0.05)
        assert np.allclose(scores_of(server, rows), second.score(rows), rtol=0, atol=1e-6)
        key = 'sbpflow_staleness_seconds{model="a"}'
        assert found[key] > before[key]
        time.sleep(0.3)  # several polls, which must not report the error again
        later = values(server.request("GET", "/metrics").body.decode())
        assert later['sbpflow_delta_errors_total{model="a"}'] == 1
        printed = stop(server)
    assert "is damaged" in printed
    assert "is kept" in printed


def damage_next(chain: Chain) -> None:
    """Publish a delta with damaged values by renaming its folder."""
    folder = chain.bundle / "deltas"
    hidden = chain.bundle.with_name("hidden")
    shutil.copytree(chain.bundle, hidden)
    other = Chain(hidden, chain.model)
    other.base, other.last, other.number = chain.base, chain.last, chain.number
    other.write(3)
    name = f"{other.number:06d}"
    damage(hidden / "deltas" / name / "values.safetensors")
    (hidden / "deltas" / name).rename(folder / name)
    shutil.rmtree(hidden)


@pytest.mark.slow
def test_a_newer_bundle_replaces_the_older_one_and_its_deltas(chain, model, exported):
    rows = rows_of(model, 20)
    with start_following(chain) as server:
        wait_for(server, chain.write(1))
        newer = chain.bundle.parent / "step-9"
        partial = chain.bundle.parent / ".step-9.partial"
        shutil.copytree(exported / "model", partial)
        content = json.loads((partial / "model.json").read_text())
        content["origin"]["step"] = 9
        (partial / "model.json").write_text(json.dumps(content))
        partial.rename(newer)
        shutil.rmtree(chain.bundle)  # `export --follow` removes the old bundle
        wait_for(server, load(newer))
        assert np.allclose(scores_of(server, rows), model.score(rows), rtol=0, atol=1e-6)
        last = Chain(newer, load(newer)).write(4)
        wait_for(server, last)
        assert np.allclose(scores_of(server, rows), last.score(rows), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_every_answer_is_one_version_while_deltas_faults_and_kills_happen(chain, model, tmp_path):
    """A short version of ``benchmarks.serving soak``."""
    bodies = [json.dumps(rows_of(model, count, seed)).encode() for count, seed in ((1, 3), (7, 4))]
    sent = [request("/score", body, JSON) for body in bodies]
    sent += [request("/score", b"{", JSON), request("/none", b""), b"GARBAGE\r\n\r\n"]
    versions = {name_of(model): model}
    answers = []
    with start_following(chain, workers=2) as server:
        client = threading.Thread(
            target=lambda: answers.append(send_load(server.port, sent, 6.0, 4, rate=300.0))
        )
        client.start()
        for seed in range(4):
            time.sleep(1.0)
            changed = chain.write(seed)
            versions[name_of(changed)] = changed
            if seed == 1:
                os.kill(server.workers()[0], signal.SIGKILL)
        wait_for(server, changed)
        client.join()
        assert server.process.poll() is None
        stop(server)
    (found,) = answers
    assert len(found.lost) <= 4, "only connections of the killed worker"
    seen = set()
    for number, version, status, body in found.bodies:
        assert status == (200, 200, 400, 404, 400)[number], body
        if status == 200:
            wanted = versions[version].score(json.loads(bodies[number]))
            got = json.loads(body)
            assert got["version"] == version
            assert np.allclose(got["scores"], wanted, rtol=0, atol=1e-6)
            seen.add(version)
    assert seen == versions.keys()
    assert len(found.latency) > 300


@pytest.mark.slow
def test_requests_in_flight_are_answered_after_sigterm(exported, model):
    body = json.dumps(rows_of(model, 7)).encode()
    sent = request("/score", body, JSON)
    with serving(exported / "model") as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(sent[:-5])
            time.sleep(0.3)  # the worker has read the headers
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            connection.sendall(sent[-5:])
            answer = connection.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" in answer.lower()
        stop(server)
        assert server.process.returncode == 0


def test_concurrent_requests_are_scored_together_and_separately_answered(server, model):
    bodies = [json.dumps(rows_of(model, count, count)).encode() for count in range(1, 9)]
    found = send_load(server.port, [request("/score", b, JSON) for b in bodies], 1.0, 8)
    assert found.bodies
    for number, _, status, body in found.bodies:
        assert status == 200
        wanted = model.score(json.loads(bodies[number]))
        assert np.allclose(json.loads(body)["scores"], wanted, rtol=0, atol=1e-6)


def test_a_damaged_bundle_is_refused_at_the_start(exported, tmp_path):
    shutil.copytree(exported / "model", tmp_path / "model")
    sample = json.loads((tmp_path / "model" / "sample.json").read_text())
    sample["scores"][0] += 0.1
    (tmp_path / "model" / "sample.json").write_text(json.dumps(sample))
    with pytest.raises(RuntimeError, match="row 0 must score"), serving(tmp_path / "model"):
        pass


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("model.json", {"origin": None}, "must be a mapping, not NoneType"),
        ("model.json", {"tables": {}}, r"the key '\S+' is missing"),
        ("sample.json", {"scores": None}, "'NoneType' object is not iterable"),
    ],
)
def test_a_bundle_with_wrong_json_is_refused_at_the_start(exported, tmp_path, file, change, words):
    bundle = tmp_path / "model"
    shutil.copytree(exported / "model", bundle)
    content = json.loads((bundle / file).read_text())
    (bundle / file).write_text(json.dumps({**content, **change}))
    rule = r"model\.json or sample\.json is damaged"
    with pytest.raises(DataError, match=rf"{rule} \(.*{words}\); export the run again"):
        server_module.asgi_app({"a": bundle})
    del content[next(iter(change))]
    (bundle / file).write_text(json.dumps(content))
    with pytest.raises(DataError, match=rf"{rule} \(the key '{next(iter(change))}' is missing\)"):
        server_module.asgi_app({"a": bundle})
    (bundle / file).write_text("[]")
    with pytest.raises(DataError, match=f"{file} is not a JSON object; export the bundle again"):
        server_module.asgi_app({"a": bundle})


def test_column_names_that_need_quotes_are_served(exported, tmp_path):
    shutil.copytree(exported / "model", tmp_path / "model")
    for file in ("model.json", "sample.json"):
        path = tmp_path / "model" / file
        path.write_text(path.read_text().replace('"price"', json.dumps('price, "EUR"')))
    server_module._compile(load(tmp_path / "model"))


@pytest.mark.parametrize(
    ("models", "words"),
    [
        (["a b=x"], "'a b' cannot be part of a path; use only letters, digits"),
        (["../x/..=y"], r"'..=y' cannot be part of a path; .* \(for example, main=../x/..=y\)"),
        (["a=x", "a=y"], "the name 'a' is used twice"),
    ],
)
def test_names_of_models_are_checked(models, words):
    with pytest.raises(ConfigError, match=words):
        folders_of(models)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--workers", "0", "--workers must be between 1 and .*, got 0"),
        ("--poll-seconds", "inf", "must be between 0.001 and 1,000,000,000, got inf"),
        ("--poll-seconds", "nan", "must be between 0.001 and 1,000,000,000, got nan"),
        ("--grace-seconds", "-5", "--grace-seconds must be between 0 and 1,000,000,000, got -5"),
        ("--host", "", "--host is empty; use 127.0.0.1"),
        ("--port", "70000", "--port must be between 0 and 65535"),
    ],
)
def test_values_that_cannot_work_are_refused(option, value, words):
    with pytest.raises(ConfigError, match=words):
        serve(["bundle", option, value])


def test_a_folder_without_a_name_is_named_after_itself(tmp_path):
    assert folders_of([str(tmp_path / "clicks")]) == {"clicks": tmp_path / "clicks"}
    day = tmp_path / "day=7" / "model"
    assert folders_of([str(day), f"other={day}"]) == {"model": day, "other": day}
