"""Tests which request bodies are read, and which are rejected before memory is allocated for
them.
"""

import json
import re
import time

import numpy as np
import pyarrow as pa
import pytest

from sbpflow.serving.bodies import ARROW, JSON, TEXT, BodyError, format_of
from sbpflow.serving.cells import Misfit, real_number
from sbpflow.serving.columns import RawRows, RowError
from sbpflow.serving.inference_protocol import read_request

TEXT_ROWS = RawRows(
    {
        "columns": [{"name": "I1", "kind": "dense", "required": True}],
        "separator": ",",
        "quote": '"',
        "header": True,
        "missing_values": [],
    }
)
SCORES = np.array([0.1, 0.25], dtype=np.float32)


def refused(kind: str, body: bytes, max_rows: int = 9) -> tuple[str, int]:
    def read() -> object:
        rows = format_of(kind).read(body, max_rows)
        return rows.parsed()

    with pytest.raises(BodyError) as error:
        read()
    return str(error.value), error.value.status


def stream(table: pa.Table, codec: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("kind", [TEXT, f"{TEXT}; charset=utf-8", "Text/CSV", "", "text/plain"])
def test_text_is_forwarded(kind):
    form = format_of(kind)
    assert form.read(b"1\t2\n3\t4\n", 2) == b"1\t2\n3\t4\n"
    assert form.write(SCORES, "m", "v") == b"0.100000001\n0.25\n"


def test_json_rows_and_columns_are_read():
    form = format_of(JSON)
    rows = [{"C1": "a", "I1": None}, {"C1": "b", "I1": 2}]
    assert form.read(json.dumps(rows).encode(), 2).parsed() == rows
    assert form.read(json.dumps({"rows": rows}).encode(), 2).parsed() == rows
    columns = {"C1": ["a", "b"], "I1": [None, 2]}
    assert form.read(json.dumps({"columns": columns}).encode(), 2).parsed() == columns
    found = json.loads(form.write(SCORES, "m", "v"))
    assert np.float32(found.pop("scores")).tolist() == SCORES.tolist()
    assert found == {"model": "m", "version": "v"}


ODD_NAMES = [*(f"c{number}" for number in range(20_000)), "c19999"]


@pytest.mark.parametrize(
    "read",
    [
        lambda: TEXT_ROWS.columns_of('I1,c\n1,"' + "\n" * 5_000),
        lambda: TEXT_ROWS.columns_of(",".join(ODD_NAMES)),
        lambda: real_number("1" * 50_000 + "x"),
        lambda: format_of(ARROW).read(stream(pa.table([[1]] * 10_001, ODD_NAMES[-10_001:])), 1),
    ],
    ids=["open quote", "repeated name", "number", "repeated name in Arrow"],
)
def test_a_bad_body_is_refused_in_linear_time(read):
    """Otherwise, a request of a few kilobytes could occupy a worker for minutes."""
    began = time.process_time()
    with pytest.raises((RowError, BodyError, Misfit)):
        read()
    assert time.process_time() - began < 1.0


def test_every_bit_of_a_score_is_written():
    scores = np.random.default_rng(1).random(1000).astype(np.float32) ** 9
    text = format_of(TEXT).write(scores, "m", "v")
    assert np.float32(text.split()).tolist() == scores.tolist()


def test_scores_are_written_as_python_does():
    """Compiled loops write scores from 0.001 on; the others are left to Python."""
    first, last = np.float32([0.001, 1.0]).view(np.uint32)
    bits = np.arange(first, last, 997, dtype=np.uint32)  # 0.001 as float32 is above 0.001
    edges = [0.001, 0.01, 0.1, 0.5, 0.25, 0.0625, 0.015625, 0.001953125]
    near = np.nextafter(np.float32(edges), np.float32(1))
    below = np.nextafter(np.float32(edges[1:]), np.float32(0))
    scores = np.concatenate([bits.view(np.float32), np.float32(edges), near, below])
    wanted = [f"{score:.9g}" for score in scores.tolist()]
    assert format_of(TEXT).write(scores, "m", "v").decode().split() == wanted
    written = format_of(JSON).write(scores, "m", "v").decode()
    assert written == f'{{"scores": [{", ".join(wanted)}], "model": "m", "version": "v"}}\n'
    for score in (0.0, 1e-10, 0.00099, 1.0):
        scores = np.float32([0.5, score])
        assert format_of(TEXT).write(scores, "m", "v") == b"0.5\n%.9g\n" % scores[1]
    for kind in (TEXT, JSON):
        with pytest.raises(ValueError, match="the score of row 1 is not a number"):
            format_of(kind).write(np.float32([0.5, float("nan")]), "m", "v")
    empty = format_of(JSON).write(scores[:0], "m", "v")
    assert empty == b'{"scores": [], "model": "m", "version": "v"}\n'


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "the body is not JSON"),
        (b'[{"a": NaN}]', "NaN is not a JSON number; use null"),
        (b'[{"a": "\xff"}]', "the body is not JSON"),
        (b"[" * 100_000, "too many levels"),
        (b"[" + b"1" * 5000 + b"]", "the body is not JSON"),
        (b"7", r"rows is a number; use \[{"),
        (b'{"row": []}', r"the body has the keys \['row'\]; use"),
        (b'{"rows": [], "columns": {}}', "the body has the keys"),
        (b'{"rows": {"C1": "a"}}', r"rows is an object; use \[{"),
        (b'[{"C1": "a"}, 7]', "row 1 is a number, not an object; use"),
        (b'{"columns": {"C1": "a"}}', "columns: C1 is a string, not a list"),
    ],
)
def test_other_json_is_refused_with_its_place(body, words):
    with pytest.raises(BodyError, match=words) as error:
        format_of(JSON).read(body, 9).parsed()
    assert error.value.status == 400


def test_json_rows_are_limited():
    assert refused(JSON, b"[{}, {}, {}]", 2) == (
        "the request has 3 rows, but the server accepts at most 2 (--max-rows)",
        413,
    )
    assert refused(JSON, b'{"columns": {"C1": [1, 2, 3]}}', 2)[1] == 413


def test_arrow_streams_are_read():
    dictionary = pa.array(["x", None, "x"]).dictionary_encode()
    table = pa.table({"I1": [1, None, 3], "C1": ["a", "b", None], "C2": dictionary})
    assert format_of(ARROW).read(stream(table), 3).equals(table)
    body = format_of(ARROW).write(SCORES, "m", "v")
    answer = pa.ipc.open_stream(body).read_all()
    assert answer["score"].to_numpy().tolist() == SCORES.tolist()
    assert answer.schema.metadata == {b"model": b"m", b"version": b"v"}


def test_arrow_streams_are_limited_before_they_are_read():
    table = pa.table({"I1": list(range(10))})
    assert refused(ARROW, stream(table), 9)[1] == 413
    parts = pa.Table.from_batches(table.slice(0, 5).to_batches() * 2)
    assert refused(ARROW, stream(parts), 9)[1] == 413
    message, status = refused(ARROW, stream(table, "zstd"), 99)
    assert status == 400
    assert "compressed" in message
    words = pa.table({"C1": pa.array(["x" * 1000] * 9).dictionary_encode()})
    assert "compressed" in refused(ARROW, stream(words, "zstd"), 99)[0]


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 100, 300, -1])
def test_damaged_arrow_streams_are_refused(cut):
    body = stream(pa.table({"C1": ["a", "bb", "ccc"] * 3}))
    message, status = refused(ARROW, body[:cut])
    assert status == 400
    assert "Arrow" in message


def test_arrow_offsets_outside_of_the_body_are_refused():
    body = bytearray(stream(pa.table({"C1": ["a", "bb", "ccc"]})))
    offsets = np.array([0, 1, 3, 6], dtype=np.int32).tobytes()
    at = body.index(offsets)
    body[at + 12 : at + 16] = np.int32(1 << 30).tobytes()
    assert refused(ARROW, bytes(body))[1] == 400


@pytest.mark.parametrize(
    "kind", [pa.timestamp("s"), pa.timestamp("us", "UTC"), pa.date64(), pa.duration("s")]
)
def test_arrow_times_that_python_cannot_read_are_refused_with_their_row(kind):
    largest = 2**62 // 86_400_000 * 86_400_000  # whole days, as date64 needs
    column = pa.array([None, largest], pa.int64()).view(kind)
    table = format_of(ARROW).read(stream(pa.table({"I1": column})), 9)
    words = rf"row 1, column 'I1': '{re.escape(str(kind))}' has a cell that .*; send numbers"
    with pytest.raises(RowError, match=words):
        TEXT_ROWS.columns_of(table)


def test_unknown_content_types_are_refused():
    with pytest.raises(BodyError, match=f"'image/png' is not supported; use {TEXT}, ") as error:
        format_of("image/png")
    assert error.value.status == 415


def tensor(**changes: object) -> bytes:
    column = {"name": "C1", "shape": [2], "datatype": "BYTES", "data": ["a", None], **changes}
    return json.dumps({"id": "7", "inputs": [column]}).encode()


def test_an_inference_request_is_read_as_columns():
    assert read_request(tensor(), 2) == ("7", {"C1": ["a", None]})
    assert read_request(tensor(shape=[2, 1]), 2) == ("7", {"C1": ["a", None]})
    assert read_request(tensor(shape=[2, 1], data=[["a"], ["b"]]), 2)[1] == {"C1": ["a", "b"]}
    assert read_request(tensor(datatype="FP32", data=[1, 2.5]), 2)[1] == {"C1": [1, 2.5]}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"[]", "the body has no list"),
        (b'{"inputs": [7]}', r"inputs\[0\] is not an object"),
        (tensor(name=7), "needs a string"),
        (tensor(shape=[3]), r"shape \[3\] does not fit 2 values of 'C1'; use \[2\] or \[2, 1\]"),
        (tensor(datatype="BOOL"), "datatype 'BOOL' is not supported; use one of BYTES"),
        (tensor(datatype=[]), r"datatype \[\] is not supported"),
        (tensor(data=["a", 7]), "row 1, column 'C1': 7 is not BYTES; use null"),
        (tensor(datatype="INT64", data=[1, True]), "row 1, column 'C1': True is not INT64"),
        (tensor(datatype="INT8", data=[127, -129]), "row 1, column 'C1': -129 is not INT8"),
        (tensor(datatype="UINT64", data=[2**64 - 1, -1]), "row 1, column 'C1': -1 is not UINT64"),
        (tensor(datatype="FP16", data=[65504, 65505]), "row 1, column 'C1': 65505 is not FP16"),
        (tensor(datatype="FP32", data=[3.4028235e38, 4e38]), "row 1, .* is not FP32"),
        (tensor(datatype="FP64", data=[1e308, 10**309]), "row 1, .* is not FP64"),
        (
            tensor(shape=[2, 1], data=[["a"], ["b", "c"]]),
            r"row 1, column 'C1': \['b', 'c'\] does not fit the shape \[2, 1\]",
        ),
        (tensor(shape=[2, 1], data=[["a"], "b"]), "row 1, column 'C1': 'b' does not fit"),
        (b'{"inputs": [], "outputs": [{"name": "x"}]}', "the only output"),
        (b'{"inputs": [], "id": 7}', "id must be a string, got 7"),
    ],
)
def test_other_inference_requests_are_refused_with_their_place(body, words):
    with pytest.raises((BodyError, RowError), match=words):
        read_request(body, 9)


def test_a_bad_value_of_an_inference_request_has_its_row_and_column():
    for changes in ({"data": ["a", 7]}, {"shape": [2, 1], "data": [["a"], 7]}):
        with pytest.raises(RowError) as error:
            read_request(tensor(**changes), 9)
        assert (error.value.row, error.value.column, error.value.value) == (1, "C1", 7)


@pytest.mark.parametrize(
    "read",
    [
        lambda: read_request(tensor(datatype="INT8", data=["x" * 100_000, None]), 9),
        lambda: read_request(tensor(shape=[1] * 100_000), 9),
        lambda: read_request(tensor(datatype="x" * 100_000), 9),
        lambda: read_request(b'{"inputs": [], "id": [%s1]}' % (b"1, " * 100_000), 9),
        lambda: format_of(JSON).read(b'{"%s": 1}' % (b"x" * 100_000), 9).parsed(),
    ],
)
def test_long_values_are_cut_in_messages(read):
    with pytest.raises((BodyError, RowError)) as error:
        read()
    assert len(str(error.value)) < 300
