"""Tests random schemas and cells: no tracebacks, no lost rows, and equal results for text and
Parquet.
"""

import csv
import io
import random
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sbpflow.data.format.verify import verify_set
from sbpflow.data.prepare.csv_text import parse_table
from sbpflow.data.prepare.schema_file import read_schema
from sbpflow.data.prepare.split import parse_split
from sbpflow.data.prepare.tables import table_piece
from tests.data.rows import folder_bytes, run_prepare
from tests.data.tables import SCHEMA, SPLIT, table, write_csv
from tests.quick import quick

QUIET = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
# fmt: off
CELLS = st.one_of(
    st.sampled_from([
        "", "0", "1", "1.5", "-2e-3", "nan", "-inf", "1e39", "1e-50", "abcd0123", "7|8", "|",
        "a||b", '"', '""', 'x"y', "a,b", "\n", "K\u00f6ln", "2024-05-01", "2024-05-01 10:00:00",
        " 5", "+5", "a:1|b:0.5", "7:1e-3", ":2", "a:x", "a:1||b:2", "a:b:3", ":",
    ]),
    st.text(alphabet="ab01.,|\"e+- \n\u00e9\u6771", max_size=6),
)
# fmt: on
SPARSE = st.one_of(
    st.sampled_from(["hex", "string", "integer"]),
    st.fixed_dictionaries(
        {"kind": st.sampled_from(["string", "integer"])},
        optional={"max": st.integers(1, 3), "beyond": st.sampled_from(["error", "first", "last"])},
    ),
    st.fixed_dictionaries({"kind": st.just("string"), "width": st.integers(1, 3)}),
    st.fixed_dictionaries(
        {"kind": st.sampled_from(["string", "integer"]), "weights": st.just({"after": ":"})},
        optional={"max": st.integers(1, 2), "beyond": st.sampled_from(["first", "last"])},
    ),
    st.fixed_dictionaries(
        {"kind": st.just("string"), "vocabulary": st.just("shared")}, optional={"max": st.just(2)}
    ),
)
DENSE = st.one_of(
    st.none(),
    st.sampled_from(["log1", "log3", "identity", "squared_log", "standardise"]),
    st.fixed_dictionaries({"buckets": st.integers(2, 5)}),
    st.fixed_dictionaries({"clip": st.just([-1, 3]), "missing": st.just("indicator")}),
    st.fixed_dictionaries({"kind": st.just("integer")}),
)
SCHEMAS = st.fixed_dictionaries(
    {
        "sparse": st.dictionaries(st.sampled_from(["C1", "C2", "C3"]), SPARSE, min_size=1),
        "dense": st.dictionaries(st.sampled_from(["d1", "d2"]), DENSE),
    },
    optional={
        "weight": st.just("w"),
        "group": st.just({"g": "integer"}),
        "time": st.just("t"),
        "row_key": st.just("k"),
        "labels": st.just(["l2"]),
    },
)


def schema_of(folder: Path, raw: dict[str, object], **more: object):
    path = folder / "schema.yaml"
    path.write_text(yaml.safe_dump({**raw, "separator": ",", "quote": '"', **more}))
    return read_schema(path)


@QUIET
@given(raw=SCHEMAS, data=st.data())
def test_any_cells_of_any_schema_give_the_same_from_text_and_parquet(tmp_path, raw, data):
    schema = schema_of(tmp_path, raw)
    row = st.lists(CELLS, min_size=len(schema.columns), max_size=len(schema.columns))
    rows = data.draw(st.lists(row, min_size=1, max_size=6))
    for cells in rows:
        cells[0] = "1" if len(cells[0]) % 3 else cells[0]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerows(rows)
    piece = parse_table(text.getvalue().encode(), schema.columns, schema)
    frame = pl.DataFrame(rows, schema=dict.fromkeys(schema.columns, pl.String), orient="row")
    frame.write_parquet(tmp_path / "r.parquet")
    binary = table_piece(tmp_path / "r.parquet", 0, schema)
    assert piece.num_lines == binary.num_lines == len(rows)
    assert piece.bad.counts == binary.bad.counts
    assert len(piece.frame) + piece.bad.total == len(rows)
    assert piece.frame.equals(binary.frame)
    for name, values in piece.lists.items():
        assert values.equals(binary.lists[name])
        assert values["row"].n_unique() == (piece.frame[name] > 0).sum()
    assert piece.cut == binary.cut


@QUIET
@given(raw=SCHEMAS, lines=st.lists(CELLS.map(str.encode), max_size=12), seed=st.integers(0, 99))
def test_any_lines_are_rows_or_counted(tmp_path, raw, lines, seed):
    schema = schema_of(tmp_path, raw)
    rng = random.Random(seed)
    text = b""
    for line in lines:
        cells = [line if rng.random() < 0.3 else b"1" for _ in schema.columns]
        text += b",".join(cells[: rng.choice([len(cells), len(cells), len(cells) - 1])]) + b"\n"
    piece = parse_table(text, schema.columns, schema)
    assert len(piece.frame) + piece.bad.total + piece.bad.blank == piece.num_lines
    assert piece.num_lines <= text.count(b"\n")


@settings(QUIET, max_examples=15)
@given(raw=SCHEMAS, seed=st.integers(0, 2**32))
@example(raw={"sparse": dict.fromkeys(["C1", "C2", "C3"], "hex"), "dense": {}}, seed=0)  # all bad
def test_any_schema_gives_a_set_that_passes_verification(tmp_path_factory, raw, seed):
    folder = tmp_path_factory.mktemp("any")
    schema = schema_of(folder, raw, header=True)
    rng = random.Random(seed)
    pool = ["", "1", "2", "0", "abcd0123", "1|2", "2024-05-01", "1.5", "1:2|2:1", "1:0.5"]
    fitting = {"t": "2024-05-01", "w": "2", "g": "3", "k": "key", schema.label: "1", "l2": "0"}
    with (folder / "t.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(schema.columns)
        for _ in range(40):
            writer.writerow([fitting.get(name) or rng.choice(pool) for name in schema.columns])
    number = sum(1 for _ in (folder / "t.csv").open()) - 1
    settings = {"schema": schema, "crosses": (), "max_bad_fraction": 1.0}
    piece = parse_table((folder / "t.csv").read_bytes(), schema.columns, schema, skip=1)
    if len(piece.frame) == 0:
        with pytest.raises(ValueError, match="every line is bad"):
            run_prepare(folder / "set", folder / "t.csv", **settings)
        return
    manifest = run_prepare(folder / "set", folder / "t.csv", **settings)
    verify_set(manifest, 1)
    bad = sum(manifest.content["bad_lines"].values())
    assert sum(manifest.splits.values()) + bad == manifest.content["lines"] == number


QUOTES = [
    (b'1,"a,b",x\n', 1, {}),
    (b'1,"a""b",x\n', 1, {}),
    (b'1,"a\nb",x\n', 1, {}),
    (b'1,a"b,x\n0,c,d\n', 1, {"a quote does not enclose a whole cell": 1}),
    (b'1,"a,x\n0,c,d\n0,c,d\n', 2, {"a quote does not enclose a whole cell": 1}),
    (b'1,a"b,x\n0,c,d\n0,c"d,e\n', 1, {"a quote does not enclose a whole cell": 2}),
    (b'1,"a"b,x\n', 0, {"a quote does not enclose a whole cell": 1}),
    (b'1,"a",x,"y"\n', 0, {"4 fields instead of 3": 1}),
    (b'1,"a"\n', 0, {"2 fields instead of 3": 1}),
    (b'1,"",x\n\n0,b,x\n', 2, {"blank line": 1}),
    (b'1,a,x\r\n0,"b",x\r\n', 2, {}),
    (b"1,a\rb,x\n", 0, {"stray carriage return": 1}),
    (b"1,\xff,x\n0,a,b\n", 1, {"broken encoding": 1}),
]


@pytest.mark.parametrize(("text", "num_rows", "counts"), QUOTES)
def test_quotes_enclose_whole_cells_or_the_line_is_bad(tmp_path, text, num_rows, counts):
    schema = schema_of(tmp_path, {"sparse": {"C1": "string", "C2": "string"}})
    piece = parse_table(text, schema.columns, schema)
    assert (len(piece.frame), piece.bad.counts) == (num_rows, counts)


@pytest.mark.slow
@pytest.mark.parametrize("piece_bytes", quick([300, 1000, 1 << 20], lambda n: n == 0))
def test_the_set_does_not_depend_on_where_pieces_end(tmp_path, piece_bytes):
    """Even if pieces end inside quoted cells, rows and ids must equal the result for a single
    piece."""
    source = write_csv(tmp_path / "t.csv", table(150))
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    schema = read_schema(tmp_path / "schema.yaml")
    settings = {"schema": schema, "crosses": (), "max_bad_fraction": 0.1}
    settings["split"] = replace(parse_split(SPLIT), times=("2024-04-05", "2024-04-06"))
    single = run_prepare(tmp_path / "single", source, piece_bytes=1 << 24, **settings)
    several = run_prepare(tmp_path / "several", source, piece_bytes=piece_bytes, **settings)
    for key in ("fields", "fitted", "dense", "lines", "bad_lines", "vocabulary"):
        assert single.content[key] == several.content[key], key
    for name, raw in folder_bytes(single.path).items():
        if name.startswith("vocabulary"):
            assert folder_bytes(several.path)[name] == raw
