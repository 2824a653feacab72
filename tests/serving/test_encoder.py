"""Tests that a bundle encodes rows exactly as ``sbpflow encode`` does, with numpy and with compiled
loops.
"""

import csv
import tempfile
from decimal import Decimal
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
import yaml
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from sbpflow.data import load_manifest, open_loader
from sbpflow.data.__main__ import main
from sbpflow.data.bundle_input import SavedKeys, input_content, write_vocabularies
from sbpflow.data.format.schema import DenseColumn
from sbpflow.data.prepare.cells import _dense
from sbpflow.data.prepare.keys import key_of, with_string_keys
from sbpflow.data.prepare.new_rows import encode
from sbpflow.data.prepare.tables import plain_types
from sbpflow.serving import cells
from sbpflow.serving import encoder as encoder_module
from sbpflow.serving.cells import clip_of
from sbpflow.serving.columns import RawRows, RowError, read_list
from sbpflow.serving.encoder import Cells, Encoder, Vocabularies
from sbpflow.serving.row_store import Tensors

ODD = ["NA", "", " ", "5", "+5", "-5", " 5", "5 ", "-", "007", "0x5", "1e1", "1.0", "-.5", "5.",
       ".", "1,5", "1.0,5", "1e", "1e-3", "1e400", "nan", "-NaN", "inf", "-Infinity", "-0",
       "2147483647", "2147483648",
       "-2147483648", "99999999999", "9223372036854775807", "9223372036854775808",
       "-9223372036854775808", "0" * 5000 + "7", "0123abCD", "0123abcg", "\u0665", "a,b", 'say "x"',
       "two\nlines", "p|q", "a:b", "3.4028236e38", "123456789012345678", "1_0",
       "1e+-5"]  # fmt: skip
TYPED = [None, 0, 1, -1, 7, 2**31, -(2**63), 2**63 - 1, 2**32 - 1]
FLOATS = [None, float("nan"), 0.0, -0.0, 7.0, 7.5, 1e300, -1e39, float("inf"), 2.0**63, -(2.0**63)]
TEXT = st.one_of(st.sampled_from(ODD), st.text(max_size=6))


@pytest.fixture(scope="module")
def encoder_loops():
    pytest.importorskip("numba", reason="the loops need numba")
    return import_module("sbpflow.serving.encoder_loops")


@pytest.fixture(scope="module", params=["numpy", "loops"])
def loops(request):
    """Return the ``loops`` argument of an ``Encoder``: None for numpy, or the compiled loops."""
    return None if request.param == "numpy" else request.getfixturevalue("encoder_loops")


def encoder_of(manifest, growing, folder, loops=None) -> Encoder:
    content = input_content(manifest, growing)
    write_vocabularies(manifest, growing, folder / "vocabulary")
    words = Tensors(folder / "vocabulary")
    arrays = (words.array(name) for name in ("keys", "ids", "checks"))
    crossed = range(sum(field.hot for field in manifest.fixed))
    vocabularies = Vocabularies(content["vocabularies"], *arrays)
    return Encoder(content, vocabularies, loops, crossed)


def saved_keys(manifest) -> dict[str, SavedKeys]:
    """Return every second key of each keyed field, as if the other keys had no rows."""
    growing = {}
    names, matrix, lists = batch_of(manifest, "train")
    for field in manifest.fields:
        if field.keyed:
            at = [number for number, name in enumerate(names) if name == field.name]
            keys = np.unique(lists[field.name][0] if field.ragged else matrix[:, at])[::2]
            growing[field.name] = SavedKeys(
                fields=(field.name,), num_keys=len(keys), read=partial(np.copy, keys)
            )
    return growing


def batch_of(manifest, split):
    """Return the names of the matrix's columns, the matrix, and the values and lengths of each
    list.
    """
    size = manifest.splits[split]
    loader = open_loader(manifest, split=split, batch_size=size, backend="memmap", shuffle="none")
    (batch,) = loader.epoch(0)
    names = [field.name for field in manifest.fixed for _ in range(field.hot)]
    lists = {}
    for number, field in enumerate(manifest.lists):
        found = batch.ids.lists.take(torch.tensor([number]))
        lists[field.name] = found.values.numpy().copy(), found.lengths.numpy().copy()
    matrix = (batch.ids if not manifest.lists else batch.ids.matrix).numpy().copy()
    loader.close()
    return names, matrix, lists


def ids_of(field, values, growing):
    """Return the ids that a bundle gives to the ids or keys of a prepared set."""
    if not field.keyed:
        return values.tolist()
    keys = growing[field.name].read().tolist()
    found = [
        0 if v == cells.MISSING_KEY else keys.index(v) + 2 if v in keys else 1
        for v in values.reshape(-1).tolist()
    ]
    return np.reshape(found, values.shape).tolist()


def found(rule, cell, *more):
    """Apply a rule of ``cells``; return its result, None for a missing value, or "misfit"."""
    if cells.is_missing(cell):
        return None
    try:
        return rule(cell, *more)
    except cells.Misfit:
        return "misfit"


def columns_of_one(values):
    if all(value is None or isinstance(value, str) for value in values):
        return pl.Series("c", values, dtype=pl.String).replace("", None)
    return (
        pl.Series("c", values, strict=False).fill_nan(None)
        if any(isinstance(value, float) for value in values)
        else pl.Series("c", values)
    )


@pytest.mark.parametrize("kind", ["hex", "integer", "string"])
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(values=st.one_of(
    st.lists(TEXT, min_size=1, max_size=8),
    st.lists(st.sampled_from(TYPED), min_size=1, max_size=5),
    st.lists(st.sampled_from(FLOATS), min_size=1, max_size=5),
    st.lists(st.sampled_from([None, True, False]), min_size=1, max_size=3),
))  # fmt: skip
@example(values=ODD)
def test_keys_equal_those_of_prepare(kind, values):
    try:
        series = columns_of_one(values)
        keys = key_of(series, kind)
        if kind == "string":
            pair = with_string_keys(keys.to_frame(), ["c"])
            got = [None if k is None else (k, c) for k, c in pair.rows()]
        else:
            got = [None if key is None else (key, 0) for key in keys.to_list()]
    except UnicodeEncodeError:
        assume(False)
    misfit = (series.is_not_null() & keys.is_null()).to_list()
    wanted = ["misfit" if bad else key for bad, key in zip(misfit, got, strict=True)]
    assert [found(cells.key_of, value, kind) for value in values] == wanted


@pytest.mark.parametrize(("whole", "decimal"), [(True, "."), (False, "."), (False, ",")])
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(values=st.one_of(
    st.lists(TEXT, min_size=1, max_size=8),
    st.lists(st.sampled_from(TYPED), min_size=1, max_size=5),
    st.lists(st.sampled_from(FLOATS), min_size=1, max_size=5),
))  # fmt: skip
def test_numbers_equal_those_of_prepare(whole, decimal, values):
    series, faults = columns_of_one(values), {}
    typed = _dense(series, DenseColumn(name="c", whole=whole, clip=(0, 1), decimal=decimal), faults)
    bad = np.any([flags.to_numpy() for flags in faults.values()], axis=0)
    typed = typed.cast(pl.Float32).to_list()
    wanted = ["misfit" if b else v for b, v in zip(bad, typed, strict=True)]
    rule, more = (cells.whole_number, ()) if whole else (cells.real_number, (decimal,))
    got = [found(rule, value, *more) for value in values]
    with np.errstate(over="ignore"):
        got = [v if v in (None, "misfit") else float(np.float32(v)) for v in got]
    assert [None if v != v else v for v in got] == wanted


@pytest.mark.parametrize("kind", ["hex", "integer", "string"])
@pytest.mark.parametrize("scale", [0, 2])
def test_decimals_are_read_as_by_prepare(kind, scale):
    numbers = ["7", "7.5", "-3"] if scale else [7, -3, 2**53 + 1, 2**63, 2**64]
    values = [*map(Decimal, numbers), None]
    series = plain_types(pl.Series("c", values, dtype=pl.Decimal(38, scale)).to_frame())["c"]
    assert [found(cells.real_number, v) for v in values] == series.cast(pl.Float64).to_list()
    keys = key_of(series, kind)
    assert scale or kind == "hex" or int(keys[2]) == 2**53 + 1
    misfit = (series.is_not_null() & keys.is_null()).to_list()
    if kind == "string":
        keys = with_string_keys(keys.to_frame(), ["c"])["c"]
    wanted = ["misfit" if bad else key for bad, key in zip(misfit, keys, strict=True)]
    got = [found(cells.key_of, value, kind) for value in values]
    assert [key[0] if isinstance(key, tuple) else key for key in got] == wanted


def raw_rows(name: str, kind: str) -> RawRows:
    """Return the format of rows with one column."""
    columns = [{"name": name, "kind": kind, "required": True}]
    return RawRows(
        {"columns": columns, "separator": ",", "quote": None, "header": True, "missing_values": []}
    )


@pytest.mark.parametrize("dtype", ["Int64", "UInt64"])
def test_large_integers_next_to_missing_values_are_exact(dtype):
    frame = pd.DataFrame({"key": pd.array([2**53 + 1, None], dtype=dtype)})
    raw = raw_rows("key", "integer")
    assert raw.columns_of(frame)["key"] == [2**53 + 1, pd.NA]
    assert isinstance(raw.columns_of(frame[:1])["key"], np.ndarray)


def test_tables_with_a_repeated_column_name_are_refused():
    frame = pd.DataFrame([[1, 2]], columns=["key", "key"])
    for table in (frame, pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["key", "key"])):
        with pytest.raises(RowError, match=r"row 0, column 'key': .* names this column twice"):
            raw_rows("key", "integer").columns_of(table)


def test_pairs_of_a_list_must_be_a_value_and_then_its_weight():
    options = {"separator": "|", "most": 3, "beyond": "error", "weights": None, "inline": ":"}
    entry = {"name": "c", "kind": "integer", "list": options}
    lists = read_list(entry, {"c": [[], [{"value": 7, "weight": 2.0}]]})
    assert (lists.values, lists.weights.tolist()) == ([7], [2.0])
    for wrong in ({"Weight": 2, "value": 7}, {"value": 7}, {"value": 7, "weight": 2, "more": 1}):
        with pytest.raises(RowError, match=r"row 1, column 'c': .* not a value and then its"):
            read_list(entry, {"c": [[], [wrong]]})


NAMES = st.sampled_from("abcdefgh")
DENSE = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.just("integer"),
        "transform": st.sampled_from(["log1", "log3", "squared_log", "identity", "standardise"]),
        "clip": st.just([-3, 40.5]),
        "buckets": st.sampled_from([2, 4]),
        "missing": st.just("indicator"),
    },
).filter(lambda d: "buckets" not in d or not {"transform", "missing"} & d.keys())
KIND = st.sampled_from(["hex", "integer", "string"])
LIST = st.fixed_dictionaries(
    {"kind": KIND},
    optional={
        "weights": st.just({"after": ":"}),
        "beyond": st.sampled_from(["first", "last", "error"]),
    },
)
GOOD = {"hex": ["05db9164", "FFFFFFFF", "00000000", ""], "integer": ["7", "-12", "0", "007", ""],
        "string": ["red", "K\u00f6ln", "a" * 300, "x y", ""]}  # fmt: skip


@st.composite
def tables(draw):
    """Sample a schema, options for prepare, good rows to train on, and arbitrary rows to encode."""
    dense = {f"d{n}": each for n, each in enumerate(draw(st.lists(DENSE, max_size=3)))}
    singles = {
        f"s{n}": {"kind": k} for n, k in enumerate(draw(st.lists(KIND, min_size=1, max_size=3)))
    }
    lists = {f"l{n}": {"max": 3, **each} for n, each in enumerate(draw(st.lists(LIST, max_size=2)))}
    if lists and draw(st.booleans()):
        spec = lists["l0"]
        cuts = spec.get("beyond", "error") != "error"
        spec["width"] = draw(st.sampled_from([1, 3])) if cuts else 3
        del spec["max"]
        spec.pop("weights", None)
    cells_of = {}
    for name, spec in dense.items():
        cells_of[name] = ["", "3", "-2", "0", "17"] + ([] if "kind" in spec else ["1.5", "-.25e1"])
    for name, spec in singles.items():
        cells_of[name] = GOOD[spec["kind"]]
    for name, spec in lists.items():
        one = [v for v in GOOD[spec["kind"]] if v]
        ends = (":0.5", ":2") if "weights" in spec else ("", "")
        cells_of[name] = ["", one[0] + ends[0], f"{one[1]}{ends[0]}|{one[0]}{ends[1]}"]
    options, can_have_keys = [], [*lists]
    if draw(st.booleans()):
        options += ["--hash-size", "s0=13"]
    elif len(singles) > 1:
        can_have_keys.append("s0")
    if len(singles) > 1:
        options += ["--crosses", "s0xs1"]
        can_have_keys.append("s0xs1")
    else:
        options += ["--crosses", "none"]
    keyed = draw(st.lists(st.sampled_from(can_have_keys), unique=True)) if can_have_keys else []
    hashed = {"s0"} if "--hash-size" in options else set()
    if {*can_have_keys, *singles} - hashed - {*keyed} and keyed:  # some field has a vocabulary
        options += ["--keys", ",".join(keyed)]
    good = {name: st.sampled_from(values) for name, values in cells_of.items()}
    rows = draw(st.lists(st.fixed_dictionaries(good), min_size=12, max_size=24))
    odd = {
        name: st.one_of(st.sampled_from(v), st.sampled_from(v), TEXT)
        for name, v in cells_of.items()
    }
    new = draw(st.lists(st.fixed_dictionaries(odd), min_size=1, max_size=8))
    new = [row for row in new if not any("\r" in c or "\x00" in c for c in row.values())]
    schema = {"label": "y", "separator": ",", "quote": '"', "dense": dense,
              **draw(st.sampled_from([{}, {"missing_values": ["NA", "-"]}])),
              "sparse": {**singles, **lists}}  # fmt: skip
    names = [*dense, *singles, *lists]
    return schema, options, *([{n: row[n] for n in names} for row in each]
                              for each in (rows, rows[:2] + new))  # fmt: skip


def lines_of(path: Path, rows) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([number % 2, *row.values()] for number, row in enumerate(rows))


def line(row) -> str:
    with tempfile.TemporaryFile("w+", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerow(row.values())
        file.seek(0)
        return file.read()


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=tables())
def test_ids_equal_those_of_encode(loops, drawn):
    schema, options, rows, new = drawn
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            lines_of(folder / "t.csv", rows)
            lines_of(folder / "new.csv", new)
        except UnicodeEncodeError:
            assume(False)
        (folder / "s.yaml").write_text(yaml.safe_dump(schema, sort_keys=False))
        words = ["--input", folder / "t.csv", "--output", folder / "set"]
        words += ["--schema", folder / "s.yaml", "--max-bad-fraction", "0.9", *options]
        assert main(["prepare", *map(str, words)]) == 0
        like = load_manifest(folder / "set")
        manifest = encode([folder / "new.csv"], folder / "new", like=like.path, workers=1,
                          max_bad_fraction=1.0)  # fmt: skip
        growing = saved_keys(like)
        # Columns with keys must not contain the key of missing values.
        assume(not growing or not any(str(cells.MISSING_KEY) in str(row.values()) for row in new))
        encoder = encoder_of(like, growing, folder, loops)
        good = []
        for row in new:
            try:
                encoder.encode(line(row))
                good.append(row)
            except RowError:
                continue
        assert len(good) == manifest.splits["test"]
        loader = open_loader(manifest, split="test", batch_size=len(good), backend="memmap",
                             shuffle="none")  # fmt: skip
        (batch,) = loader.epoch(0)
        for got in (encoder.encode("".join(map(line, good))), encoder.encode(good)):
            check_equal(got, batch, manifest, growing)
        loader.close()


def test_values_are_clipped_before_their_bucket_is_found(tmp_path, loops):
    dense = {"d": {"clip": [0, 10], "buckets": 4}, "e": {"transform": "identity"}}
    schema = {"label": "y", "separator": ",", "dense": dense, "sparse": {"s": "string"}}
    lines_of(tmp_path / "t.csv", [{"d": n - 20, "e": n, "s": "a"} for n in range(40)])
    new = [{"d": d, "e": 1, "s": "a"} for d in ("-5", "0", "10", "11", "inf", "-inf", "")]
    lines_of(tmp_path / "new.csv", new)
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(schema, sort_keys=False))
    words = ["--input", tmp_path / "t.csv", "--output", tmp_path / "set"]
    words += ["--schema", tmp_path / "s.yaml", "--split", "time:1,0,0", "--crosses", "none"]
    assert main(["prepare", *map(str, words)]) == 0
    like = load_manifest(tmp_path / "set")
    (entry,) = (entry for entry in like.content["fields"] if entry["name"] == "d")
    assert entry["clamped"] == 20 + 9
    manifest = encode([tmp_path / "new.csv"], tmp_path / "new", like=like.path, workers=1,
                      max_bad_fraction=0.0)  # fmt: skip
    names, matrix, _ = batch_of(manifest, "test")
    low, high = matrix[1:3, names.index("d")]
    assert low != high
    assert matrix[:, names.index("d")].tolist() == [low, low, high, high, high, low, 0]
    got = encoder_of(like, {}, tmp_path, loops).encode(new)
    assert got.ids.tolist() == matrix.tolist()
    old = {"clip": [0, 10], "bounds": [0.0]}  # from a set whose buckets were not clipped
    assert (clip_of(old), clip_of({**old, "clips": True})) == (None, [0, 10])


def check_equal(got, batch, manifest, growing):
    matrix = batch.ids if not manifest.lists else batch.ids.matrix
    column = 0
    for field in manifest.fixed:
        own = matrix[:, column : column + field.hot].numpy()
        assert got.ids[:, column : column + field.hot].tolist() == ids_of(field, own, growing)
        if field.keyed and field.hot == 1:
            assert got.keys[column].tolist() == own[:, 0].tolist()
        column += field.hot
    np.testing.assert_array_max_ulp(got.dense, batch.dense.numpy(), maxulp=1)
    for number, field in enumerate(manifest.lists):
        lists = batch.ids.lists.take(torch.tensor([number]))
        values, lengths, *weights = got.bags[field.name]
        assert lengths.tolist() == lists.lengths.reshape(-1).tolist()
        assert values.tolist() == ids_of(field, lists.values.numpy(), growing)
        if weights:
            assert weights[0].tolist() == lists.weights.tolist()


@pytest.fixture(scope="module")
def plain_encoders(tmp_path_factory, encoder_loops):
    """Return encoders with and without compiled loops for a set without lists."""
    folder = tmp_path_factory.mktemp("plain")
    dense = {"whole": {"kind": "integer"}, "real": {}}
    dense = {name: {"transform": "identity", **spec} for name, spec in dense.items()}
    sparse = {kind: {"kind": kind} for kind in ("hex", "integer", "string")}
    schema = {"label": "y", "separator": ",", "dense": dense, "sparse": sparse}
    keys = [(f"{n:08x}", n, f"s{n}") for n in range(5)]
    rows = [
        {"whole": n, "real": n / 4, **dict(zip(sparse, keys[n % 5], strict=True))}
        for n in range(40)
    ]
    lines_of(folder / "t.csv", rows)
    (folder / "s.yaml").write_text(yaml.safe_dump(schema, sort_keys=False))
    words = ["--input", folder / "t.csv", "--output", folder / "set", "--min-count", "1",
             "--schema", folder / "s.yaml", "--crosses", "none"]  # fmt: skip
    assert main(["prepare", *map(str, words)]) == 0
    manifest = load_manifest(folder / "set")
    return [encoder_of(manifest, {}, folder, loops) for loops in (encoder_loops, None)]


CELL = st.one_of(
    st.sampled_from([*ODD, *TYPED, *FLOATS, True, "s1", "00000003", "3", "a\tb"]), TEXT
)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=st.lists(st.fixed_dictionaries({
    "whole": st.one_of(st.integers(-9, 9), CELL), "real": st.one_of(st.floats(-9, 9), CELL),
    "hex": st.one_of(st.sampled_from(["00000001", None, ""]), CELL),
    "integer": st.one_of(st.integers(0, 5), CELL), "string": st.one_of(st.just("s1"), CELL),
}), min_size=1, max_size=3))  # fmt: skip
def test_rows_are_encoded_alike_with_and_without_loops(plain_encoders, rows):
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    for given_rows in (rows, columns):
        found = []
        for encoder in plain_encoders:
            try:
                got = encoder.encode(given_rows)
                found.append((got.ids.tolist(), got.dense.tolist(), got.missing, got.unknown))
            except (RowError, UnicodeEncodeError) as error:
                found.append((type(error), str(error)))
        assert found[0] == found[1]


def test_dicts_of_common_types_need_no_python_per_cell(plain_encoders, monkeypatch):
    encoder, parsed = plain_encoders[0], []
    monkeypatch.setattr(
        encoder_module, "_read_numbers", lambda *args: parsed.append(args[1]["name"])
    )
    monkeypatch.setattr(encoder_module, "_read_keys", lambda *args: parsed.append(args[1]))
    row = {"whole": -3, "real": 0.25, "hex": "0000000A", "integer": 3, "string": "\u00e9 x"}
    rows = [row, {**row, "whole": None, "real": "1e-3", "hex": "", "integer": "4", "more": 1}]
    encoder.encode(rows)
    assert parsed == []
    for name, cell in (("hex", 12345678), ("string", 1), ("whole", True), ("string", "a\tb"),
                       ("string", "a\nb"), ("real", float("nan"))):  # fmt: skip
        encoder.encode([row, {**row, name: cell}])
        assert name in parsed
        parsed.clear()
    with pytest.raises(RowError, match="lacks this column"):
        encoder.encode([row, {name: row[name] for name in ("whole", "real")}])


def test_lists_of_common_types_need_no_python_per_cell(plain_encoders):
    compiled = plain_encoders[0]._compiled
    columns = {"whole": [-3, None], "real": [0.25, "1e-3"], "hex": ["0000000A", ""],
               "integer": [3, "4"], "string": ["\u00e9 x", "s1"]}  # fmt: skip

    def read(**changes):
        return compiled.read_lists({**columns, **changes}, Cells.empty(2, 2, 3))

    assert read() == set(columns)
    assert read(real=np.array([0.25, 0.5])) == columns.keys() - {"real"}
    for name, cell in (("hex", 12345678), ("string", 1), ("whole", True), ("integer", None)):
        kept = columns.keys() if cell is None else columns.keys() - {name}
        assert read(**{name: [columns[name][0], cell]}) == kept, name
    for name, cell in (("string", "a\tb"), ("string", "a\nb"), ("real", float("nan"))):
        cells = Cells.empty(2, 2, 3)
        assert not compiled.read_lists({**columns, name: [columns[name][0], cell]}, cells)
        assert not any(part.any() for part in cells), "the cells must be read again"


def test_an_exponent_with_two_signs_is_not_a_number(plain_encoders):
    row = {"whole": 1, "real": "1e+5", "hex": "0000000A", "integer": 3, "string": "s1"}
    for encoder in plain_encoders:
        assert encoder.encode([row]).dense.tolist() == [[1.0, 1e5]]
        with pytest.raises(RowError, match=r"row 1, column 'real': '1e\+-5' must be a number"):
            encoder.encode([row, {**row, "real": "1e+-5"}])


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=st.text(max_size=300))
def test_compiled_string_keys_are_blake2b(encoder_loops, text):
    try:
        raw = np.frombuffer(text.encode() + b"\n", dtype=np.uint8)
    except UnicodeEncodeError:
        assume(False)
    first, second = import_module("sbpflow.serving.text_loops").digest(raw, 0, len(raw) - 1)
    assert (first, second & 0xFFFFFFFF) == cells.string_key(text)
