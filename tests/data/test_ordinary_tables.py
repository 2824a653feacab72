"""Tests ordinary tables: rules for labels, columns with several uses, and original strings."""

import csv
import datetime
import random
import time

import numpy as np
import polars as pl
import pytest

from sbpflow.data import load_manifest
from sbpflow.data.__main__ import main
from sbpflow.data.format.shards import RowFiles
from sbpflow.data.format.verify import verify_set
from sbpflow.data.prepare.propose import propose
from sbpflow.data.prepare.schema_file import read_schema, schema_from
from sbpflow.data.sample_rows import encode_sample, sample_rows
from sbpflow.data.values import values_and_rows
from sbpflow.errors import ConfigError
from tests.data.rows import all_words
from tests.data.test_tables import data_files, ids_of

HEAD = "separator: ','\nheader: true\n"


def run(tmp_path, schema, source, *more):
    """Prepare the folder ``set``; return the exit status."""
    (tmp_path / "schema.yaml").write_text(schema)
    words = ["--input", source, "--schema", tmp_path / "schema.yaml", "--output", tmp_path / "set"]
    return main(["prepare", *map(str, [*words, "--split", "time:1,0,0", *more])])


def labels_of(folder):
    return all_words(load_manifest(folder), "train")[:, 0].view(np.float32).tolist()


RULES = [
    ("{y: '>50K'}", ["<=50K", ">50K", "<=50K", ">50K"], [0, 1, 0, 1]),
    ("{y: [b, c]}", ["a", "b", "c", "d"], [0, 1, 1, 0]),
    ("{y: '>= 4'}", ["3.5", "4", "4.0", "5"], [0, 1, 1, 1]),
    ("{y: '> 4.1'}", ["4.1", "4.2", "-9", "1e3"], [0, 1, 0, 1]),
    ("{y: '<-1'}", ["-1", "-2", "0", "3"], [0, 1, 0, 0]),
    ("{y: '<= 2'}", ["1", "2", "2.5", "3"], [1, 1, 0, 0]),
    ("{y: 5}", ["5", "5.0", "4", "05"], [1, 1, 0, 1]),
    ("{y: ['>50']}", [">50", "60", "<=50", "51"], [1, 0, 0, 0]),
    ("y", ["1.0", "0.0", "1", "0"], [1, 0, 1, 0]),
    ("y", ["true", "false", "True", "FALSE"], [1, 0, 1, 0]),
]


@pytest.mark.parametrize(("label", "cells", "expected"), RULES)
def test_a_rule_decides_which_cells_are_1(tmp_path, label, cells, expected):
    rows = "".join(f"{cell},c\n" for cell in cells)
    (tmp_path / "t.csv").write_text("y,c\n" + rows)
    schema = f"label: {label}\nsparse: {{c: string}}\n"
    assert run(tmp_path, HEAD + schema, tmp_path / "t.csv") == 0
    assert labels_of(tmp_path / "set") == expected
    (tmp_path / "plain.csv").write_text(rows)  # no header: read by the fast parser
    plain = "separator: ','\n" + schema
    assert run(tmp_path, plain, tmp_path / "plain.csv", "--overwrite") == 0
    assert labels_of(tmp_path / "set") == expected


@pytest.mark.parametrize(
    ("label", "cells", "expected"),
    [
        ("{y: '>= 4'}", [3.5, 4.0, 5.0], [0, 1, 1]),
        ("{y: 4}", [3, 4, 5], [0, 1, 0]),
        ("{y: b}", ["a", "b", "b"], [0, 1, 1]),
        ("{y: 'false'}", [True, False, True], [0, 1, 0]),
        ("y", [True, False, True], [1, 0, 1]),
    ],
)
def test_the_same_rules_apply_to_typed_columns(tmp_path, label, cells, expected):
    pl.DataFrame({"y": cells, "c": ["c"] * 3}).write_parquet(tmp_path / "t.parquet")
    assert run(tmp_path, f"label: {label}\nsparse: {{c: string}}\n", tmp_path / "t.parquet") == 0
    assert labels_of(tmp_path / "set") == expected


@pytest.mark.parametrize(
    ("label", "cell", "reason"),
    [("{y: '>= 4'}", "x", "y is not a number"), ("{y: '>= 4'}", "", "y is missing"),
     ("{y: b}", "", "y is missing"), ("y", "2", "y is not 0 or 1")],
)  # fmt: skip
def test_a_label_that_cannot_be_decided_is_a_bad_row(tmp_path, label, cell, reason):
    cells = ["5", "1", "b"] if label == "{y: b}" else ["5", "1"] if "4" in label else ["0", "1"]
    (tmp_path / "t.csv").write_text("y,c\n" + "".join(f"{c},c\n" for c in [*cells, cell]))
    schema = HEAD + f"label: {label}\nsparse: {{c: string}}\n"
    assert run(tmp_path, schema, tmp_path / "t.csv", "--max-bad-fraction", "0.5") == 0
    ((actual, count),) = load_manifest(tmp_path / "set").content["bad_lines"].items()
    assert actual.startswith(reason)
    assert count == 1


@pytest.mark.parametrize(
    "rule",
    ["=> 15", "=< 15", "== 15", "=15", "!= 15", "<> 15", ">15 min", ">= 15,5", "<>15", ">>15"],
)
def test_a_label_rule_that_only_looks_like_a_comparison_is_refused(tmp_path, rule):
    schema = {"label": {"y": rule}, "sparse": {"c": "string"}}
    with pytest.raises(ConfigError) as caught:
        read_schema(schema)
    text = f'label y is {rule!r}; write a comparison with a number, such as ">= 15"'
    assert text in str(caught.value)
    (tmp_path / "t.csv").write_text(f'y,c\n"{rule}",c\nb,c\n')
    literal = HEAD + f"quote: '\"'\nlabel: {{y: ['{rule}']}}\nsparse: {{c: string}}\n"
    assert run(tmp_path, literal, tmp_path / "t.csv") == 0
    assert labels_of(tmp_path / "set") == [1, 0]


def test_long_digits_in_a_label_rule_are_read_in_linear_time():
    schema = {"label": {"y": ">" + "1" * 20_000 + "x"}, "sparse": {"c": "string"}}
    began = time.process_time()
    read_schema(schema)
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    ("label", "cells", "message"),
    [
        ("{y: '>50k'}", ["<=50K", ">50K"], "no row has a y that is '>50k', so all labels "
         "would be equal; under label, write a rule that separates the values of this column "
         "(such as '<=50K', '>50K')"),
        ("{y: '>= 1'}", ["1", "2"], "every row has a y that is >= 1, so all labels would be equal"),
        ("y", ["<=50K", ">50K"], 'the schema probably needs `label: {y: "<=50K"}`'),
        ("y", ["4.5", "3"], 'the schema probably needs `label: {y: ">= 4.5"}`'),
        ("y", ["11", "-9", "0", "25", "3", "900", "14", "8", "1"],
         'the schema probably needs `label: {y: ">= 11"}`'),
        ("y", ["900", *map(str, range(2, 12)), "2", "2"],
         'the schema probably needs `label: {y: ">= 6"}`'),
        ("y", ["=> 4", "0"], 'the schema probably needs `label: {y: ["=> 4"]}`'),
    ],
)  # fmt: skip
def test_a_wrong_label_is_refused_with_the_values_of_the_column(
    tmp_path, capsys, label, cells, message
):
    (tmp_path / "t.csv").write_text("y,c\n" + "".join(f"{cell},c\n" for cell in cells))
    assert run(tmp_path, HEAD + f"label: {label}\nsparse: {{c: string}}\n", tmp_path / "t.csv") == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("label", "message"),
    [("{y: true}", "label y is True; write the value that means 1 (in quotes)"),
     ("{y: []}", "label y is []; write the value"), ("{y: 2024-05-01}", "write the value that"),
     ("{y: a, z: b}", "write NAME or {NAME: VALUE}"), ("[y]", "label is ['y']; write a column")],
)  # fmt: skip
def test_an_invalid_rule_is_refused(tmp_path, label, message):
    path = tmp_path / "schema.yaml"
    path.write_text(f"label: {label}\nsparse: {{c: string}}\n")
    with pytest.raises(ConfigError) as error:
        read_schema(path)
    assert message in str(error.value)


@pytest.mark.parametrize("schema", [{"weight": ""}, {"sparse": {"c": {"weights": ""}}}])
def test_an_empty_name_of_a_weight_is_refused(schema):
    with pytest.raises(ConfigError, match=r"weights? is ''; write a column name$"):
        read_schema({"label": "y", "sparse": {"c": "string"}, **schema})


def visits(num_rows):
    rng = random.Random(1)
    start = datetime.datetime(2024, 4, 1)
    return [
        {"y": rng.randrange(2), "user": f"u{rng.randrange(9)}", "hour": number, "size": number / 4,
         "day": start + datetime.timedelta(hours=number), "visit": 100 + number}
        for number in range(num_rows)
    ]  # fmt: skip


SEVERAL = HEAD + (
    "label: y\ndense: {hour: identity, size: identity}\nsparse: {user: string, visit: integer}\n"
    "group: user\ntime: {hour: integer}\nrow_key: {visit: integer}\n"
)


def test_a_column_can_be_a_feature_and_also_a_group_time_or_key(tmp_path):
    rows = visits(60)
    with (tmp_path / "t.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    pl.DataFrame(rows).write_parquet(tmp_path / "t.parquet")
    assert run(tmp_path, SEVERAL, tmp_path / "t.csv", "--split", "time:hour<40,hour<50") == 0
    manifest = load_manifest(tmp_path / "set")
    verify_set(manifest, 1)
    assert dict(manifest.splits) == {"train": 40, "val": 10, "test": 10}
    words, files = all_words(manifest, "train"), RowFiles(manifest, "train")
    assert words[:, 1].view(np.float32).tolist() == files.part("time", 0, 40).tolist()
    assert files.part("row_key", 0, 40).tolist() == list(range(100, 140))
    users = [row["user"] for row in rows[:40]]
    for ids in (ids_of(manifest, "user"), files.part("group", 0, 40)):
        assert len(set(zip(users, ids.tolist(), strict=True))) == len(set(users))
    csv_files = data_files(manifest)
    words = ("--split", "time:hour<40,hour<50", "--overwrite")
    assert run(tmp_path, SEVERAL, tmp_path / "t.parquet", *words) == 0
    assert data_files(load_manifest(tmp_path / "set")) == csv_files
    words = ["--like", tmp_path / "set", "--input", tmp_path / "t.csv", "--output", tmp_path / "n"]
    assert main(["encode", *map(str, words)]) == 0
    encoded = load_manifest(tmp_path / "n")
    assert RowFiles(encoded, "test").part("time", 0, 60).tolist() == list(range(60))


def test_sample_rows_fit_every_use_of_a_column(tmp_path):
    lines = [f"{n % 2},{n % 5:08x},{n},141021{n % 24:02}\n" for n in range(60)]
    (tmp_path / "t.csv").write_text("y,user,visit,hour\n" + "".join(lines))
    schema = HEAD + (
        "label: y\ndense: {visit: identity}\nsparse: {user: hex, hour: integer}\n"
        "group: user\ntime: {hour: '%y%m%d%H'}\nrow_key: visit\n"
    )
    assert run(tmp_path, schema, tmp_path / "t.csv") == 0
    manifest = load_manifest(tmp_path / "set")
    rows = sample_rows(manifest, {})
    assert encode_sample(rows, manifest, tmp_path).splits["test"] == len(rows)


@pytest.mark.parametrize(("name", "separator"), [("n.csv", ","), ("n.tsv", "\t"), ("n.txt", "|")])
def test_new_rows_in_text_are_found_by_their_header(tmp_path, name, separator):
    frame = pl.DataFrame(visits(60))
    frame.write_parquet(tmp_path / "t.parquet")
    without_format = SEVERAL.replace(HEAD, "")
    assert without_format != SEVERAL
    assert run(tmp_path, without_format, tmp_path / "t.parquet") == 0
    text = frame.select(reversed(frame.columns)).drop("y")
    text.write_csv(tmp_path / name, separator=separator)
    encoded = []
    for source in (tmp_path / "t.parquet", tmp_path / name):
        words = ["--like", tmp_path / "set", "--input", source, "--overwrite", "--output"]
        assert main(["encode", *map(str, [*words, tmp_path / "n"])]) == 0
        encoded.append(load_manifest(tmp_path / "n"))
        encoded[-1] = all_words(encoded[-1], "test")[:, 1:]
    assert np.array_equal(*encoded)


@pytest.mark.parametrize(
    ("change", "column"),
    [("group: y", "y"), ("sparse: {user: string, hour: integer}", "hour"), ("weight: size", "size"),
     ("weight: w\nrow_key: w", "w"), ("labels: [y]", "y")],
)  # fmt: skip
def test_other_columns_have_one_use(tmp_path, change, column):
    path = tmp_path / "schema.yaml"
    key = change.partition(":")[0]
    lines = [line for line in SEVERAL.splitlines() if not line.startswith(f"{key}:")]
    lines = [line for line in lines if "row_key" not in change or not line.startswith("row_key")]
    path.write_text("\n".join([*lines, change]))
    with pytest.raises(ConfigError, match=f"column '{column}' is used twice; name each column once"
                       " \\(only group, time and row_key may also"):  # fmt: skip
        read_schema(path)


def test_a_date_cannot_be_a_feature(tmp_path, capsys):
    pl.DataFrame(visits(9)).write_parquet(tmp_path / "t.parquet")
    schema = SEVERAL.replace("hour: integer", "day: date").replace("hour: identity", "day: log1")
    assert run(tmp_path, schema, tmp_path / "t.parquet") == 2
    assert "columns day (Datetime" in capsys.readouterr().err


def test_boolean_columns_are_categories(tmp_path):
    frame = pl.DataFrame({"y": [0, 1] * 4, "s": [True, None, False, False] * 2})
    frame.write_parquet(tmp_path / "t.parquet")
    schema = "label: y\nsparse: {s: string}\n"
    assert run(tmp_path, schema, tmp_path / "t.parquet", "--keep-strings") == 0
    manifest = load_manifest(tmp_path / "set")
    ids = ids_of(manifest, "s")
    assert (ids[1], len(set(ids.tolist()))) == (0, 3)
    assert set(values_of(manifest, "s")) == {"true", "false"}


STRINGS = HEAD + (
    "label: y\nsparse:\n  a: {kind: string, vocabulary: city}\n  b: {kind: string, max: 3, "
    "vocabulary: city}\n  n: integer\n  h: hex\n  s: string\n"
)
CITY = ["Lima", "K\u00f6ln", "Osaka", "Lagos"]


def strings_csv(path, first=0):
    rows = [
        f"{n % 2},{CITY[(n + first) % 3]},{CITY[n % 2]}|{CITY[1]},{n % 5 - 2},{n % 3:08x},v{n % 4}"
        for n in range(60)
    ]
    if first:
        rows += [f"1,{CITY[3]},{CITY[3]},9,0000000f,v9"] * 4
    path.write_text("y,a,b,n,h,s\n" + "\n".join(rows) + "\n", encoding="utf-8")
    return path


def values_of(manifest, name):
    values, ids = values_and_rows(manifest, name, None)
    return dict(zip(values.tolist(), ids.tolist(), strict=True))


@pytest.mark.parametrize("hashed", [False, True])
def test_kept_strings_name_every_id(tmp_path, hashed):
    source = strings_csv(tmp_path / "t.csv")
    more = ["--hash-size", "s=100"] if hashed else []
    assert run(tmp_path, STRINGS, source, "--keep-strings", *more) == 0
    manifest = load_manifest(tmp_path / "set")
    verify_set(manifest, 1)
    assert set(values_of(manifest, "a")) == set(CITY[:3])
    assert values_of(manifest, "a") == values_of(manifest, "b")
    assert set(values_of(manifest, "n")) == {-2, -1, 0, 1, 2}
    assert set(values_of(manifest, "h")) == {"00000000", "00000001", "00000002"}
    ids = ids_of(manifest, "a")
    assert [values_of(manifest, "a")[CITY[n % 3]] for n in range(60)] == ids.tolist()
    if hashed:
        with pytest.raises(
            ConfigError, match="s: the values of crosses, buckets, and hashed columns"
        ):
            values_of(manifest, "s")
        return
    assert set(values_of(manifest, "s")) == {"v0", "v1", "v2", "v3"}
    assert run(tmp_path, STRINGS, source, "--overwrite") == 0
    plain = load_manifest(tmp_path / "set")
    assert plain.content_id == manifest.content_id
    with pytest.raises(ConfigError, match="or prepare the set with --keep-strings"):
        values_of(plain, "a")


def test_strings_grow_and_are_copied(tmp_path, capsys):
    assert run(tmp_path, STRINGS, strings_csv(tmp_path / "t.csv"), "--keep-strings") == 0
    old = load_manifest(tmp_path / "set")
    new = strings_csv(tmp_path / "new.csv", 1)
    like = ["--like", old.path, "--input", new, "--output"]
    assert main(["encode", *map(str, [*like, tmp_path / "e"])]) == 0
    assert values_of(load_manifest(tmp_path / "e"), "a") == values_of(old, "a")
    assert main(["prepare", *map(str, [*like, tmp_path / "g", "--grow", "--split",
                                       "time:1,0,0"])]) == 0  # fmt: skip
    grown = load_manifest(tmp_path / "g")
    verify_set(grown, 1)
    assert {**values_of(grown, "a"), **values_of(old, "a")} == values_of(grown, "a")
    assert set(values_of(grown, "a")) == set(CITY)
    assert set(values_of(grown, "s")) == {"v0", "v1", "v2", "v3", "v9"}
    assert main(["prepare", *map(str, [*like, tmp_path / "x", "--keep-strings"])]) == 2
    assert "--keep-strings: this option is determined by the --like set" in capsys.readouterr().err


def test_the_fast_parser_also_keeps_strings(tmp_path):
    (tmp_path / "t.csv").write_text("".join(f"{n % 2},{n % 3},{'xy'[n % 2]}\n" for n in range(40)))
    schema = "separator: ','\nlabel: y\ndense: {d: {kind: integer}}\nsparse: {c: string}\n"
    assert run(tmp_path, schema, tmp_path / "t.csv", "--keep-strings") == 0
    assert set(values_of(load_manifest(tmp_path / "set"), "c")) == {"x", "y"}


def test_a_schema_with_a_rule_is_read_back_from_the_manifest(tmp_path):
    (tmp_path / "t.csv").write_text("y,c\n" + "1,c\n5,c\n" * 9)
    schema = HEAD + "label: {y: '>= 4'}\nsparse: {c: string}\n"
    assert run(tmp_path, schema, tmp_path / "t.csv") == 0
    content = load_manifest(tmp_path / "set").content["schema"]
    assert schema_from(content) == read_schema(tmp_path / "schema.yaml")


FOREIGN = """
separator: ";"
header: true
quote: '"'
missing_values: [NA, "?"]
label: {Vendu: Oui}
time: {"jour d\u00e9p\u00f4t": "%d/%m/%Y"}
row_key: r\u00e9f
dense:
  "prix (\u20ac)": {transform: identity, decimal: ","}
sparse: {"note vendeur": integer, \u00e9tat: string}
"""
SPARSE = ("note vendeur", "\u00e9tat")
FOREIGN_ROWS = [
    "r\u00e9f;jour d\u00e9p\u00f4t;prix (\u20ac);note vendeur;\u00e9tat;Vendu",
    'A1;31/01/2024;22,5;3;"bon; neuf";Oui',
    "A2;01/02/2024;NA;NA;NA;Non",
    "A3;02/02/2024;7;3;?;Oui",
]


def test_a_table_with_accents_commas_dates_and_markers_of_missing_cells(tmp_path):
    (tmp_path / "t.csv").write_text("\n".join(FOREIGN_ROWS) + "\n")
    words = ["--min-count", "1", "--split", "time:jour d\u00e9p\u00f4t<2024-02-01"]
    assert run(tmp_path, FOREIGN, tmp_path / "t.csv", *words) == 0
    manifest = load_manifest(tmp_path / "set")
    verify_set(manifest, 1)
    assert manifest.splits == {"train": 1, "val": 0, "test": 2}
    test = all_words(manifest, "test")
    assert test[:, 0].view(np.float32).tolist() == [0, 1]
    assert test[:, 1].view(np.float32).tolist() == [0, 7]
    assert [ids_of(manifest, name).tolist() for name in SPARSE] == [[2], [2]]
    assert test[:, 2:].tolist() == [[0, 0], [2, 0]]
    assert schema_from(manifest.content["schema"]).missing_values == ("NA", "?")
    values, known = values_and_rows(manifest, "note vendeur", None)
    assert (values.tolist(), known.tolist()) == ([3], [2])


def test_a_marker_of_missing_cells_may_be_empty_or_repeated(tmp_path):
    (tmp_path / "t.csv").write_text("y,c\n" + "1,a\n0,\n1,NA\n0,a\n")
    schema = HEAD + "missing_values: ['', NA, NA]\nlabel: y\nsparse: {c: string}\n"
    assert run(tmp_path, schema, tmp_path / "t.csv") == 0
    assert ids_of(load_manifest(tmp_path / "set"), "c").tolist() == [2, 0, 0, 2]


@pytest.mark.parametrize(
    ("features", "advice"),
    [
        ("sparse: {c: integer}", "column c contains words such as 'UA', 'AA'; use kind string, or, "
         "under `missing_values`, list the words"),
        ("dense: [c]\nsparse: {y2: string}", "column c contains words such as 'UA', 'AA'; make it "
         "a sparse column of kind string, or, under `missing_values`"),
    ],
)  # fmt: skip
def test_a_column_of_numbers_and_words_probably_contains_strings(
    tmp_path, capsys, features, advice
):
    (tmp_path / "t.csv").write_text("y,c,y2\n0,UA,\n1,AA,\n0,B6,\n1,UA,\n0,5,\n")
    assert run(tmp_path, HEAD + f"label: y\n{features}\n", tmp_path / "t.csv") == 2
    message = capsys.readouterr().err
    assert advice in message
    assert "stands for a missing value, add" not in message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("22,5;3", "$1,234.50;3", "t.csv:2: prix (\u20ac) is not a number: '$1,234.50'\n  prix "
         "(\u20ac): write plain numbers such as 1234.5, or make the column a sparse"),
        ("22,5;3", "1.234,5;3", "prix (\u20ac): write plain numbers"),
        ("22,5;3", "n/a;3", "if 'n/a' stands for a missing value, add `missing_values: [\"n/a\"]`"),
        ("22,5;3", "22,5;3,5", "t.csv:2: note vendeur is not an integer: '3,5'\n  note "
         "vendeur: write whole numbers, or use kind string instead of integer"),
        ("31/01", "31/13", "t.csv:2: jour d\u00e9p\u00f4t is not a time (%d/%m/%Y): "
         "'31/13/2024'\n  jour d\u00e9p\u00f4t: write dates such as 2024-05-01 12:30:00, or "),
        ("A2", "", "t.csv:3: r\u00e9f is missing (it is the row_key, which must not be empty): "),
        (', decimal: ","', "", "prix (\u20ac): for a decimal comma, write `decimal"),
    ],
)  # fmt: skip
def test_a_bad_row_names_the_column_the_cell_and_what_to_do(tmp_path, capsys, old, new, message):
    text = "\n".join(FOREIGN_ROWS) + "\n"
    assert (old in text) != (old in FOREIGN)
    (tmp_path / "t.csv").write_text(text.replace(old, new))
    assert run(tmp_path, FOREIGN.replace(old, new), tmp_path / "t.csv") == 2
    assert message in capsys.readouterr().err


def test_a_header_between_rows_is_a_bad_line_and_not_a_label(tmp_path, capsys):
    (tmp_path / "t.csv").write_text("y,c\n0,a\n1,b\ny,c\n0,a\n")
    assert run(tmp_path, HEAD + "label: y\nsparse: {c: string}\n", tmp_path / "t.csv") == 2
    error = capsys.readouterr().err
    assert "t.csv:4: y is not 0 or 1: 'y'\n  correct these rows, or skip them with" in error
    assert "label: {" not in error


def test_a_label_may_have_the_name_of_its_column(tmp_path, capsys):
    (tmp_path / "t.csv").write_text("click,c\n" + "click,a\nskip,b\nskip,b\n" * 20)
    assert run(tmp_path, HEAD + "label: click\nsparse: {c: string}\n", tmp_path / "t.csv") == 2
    assert 'label: {click: "click"}' in capsys.readouterr().err


def test_a_file_without_the_header_is_not_said_to_name_a_column_twice(tmp_path, capsys):
    (tmp_path / "t.csv").write_text("1,1,a\n0,2,b\n")
    assert run(tmp_path, HEAD + "label: y\nsparse: {c: string}\n", tmp_path / "t.csv") == 2
    assert "has no columns 'y', 'c'; its columns are 1, 1, a; the" in capsys.readouterr().err


def test_labels_with_a_decimal_comma(tmp_path, capsys):
    for cells in (("1,0", "0,0", "0,0"), ("3,5", "4,0", "2,5")):
        lines = "".join(f"{cell};{name}\n" for cell, name in zip(cells, "abc", strict=True))
        (tmp_path / "t.csv").write_text("rating;c\n" + lines * 20)
        assert "\nlabel:  #" in propose([tmp_path / "t.csv"]).text
    schema = 'separator: ";"\nheader: true\nlabel: {rating: ">= 4"}\nsparse: {c: string}\n'
    assert run(tmp_path, schema, tmp_path / "t.csv") == 2
    error = capsys.readouterr().err
    assert "rating: labels must have a decimal point; replace the commas in this column" in error
    assert "decimal:" not in error


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[NA, ", "[1.5, ", "missing_values is [1.5, '?']; write a list of cells in quotes"),
        ('decimal: ","', "decimal: ;", "dense prix (\u20ac): decimal is ';'; write '.' or ','"),
        (
            "transform: identity",
            "kind: integer",
            "integers cannot have a decimal comma; remove `decimal`",
        ),
        ('"%d/%m/%Y"', "day", 'must be one of date, integer, "%d/%m/%Y"'),
        ("note vendeur", "note, vendeur", "any of / "),
        ("note vendeur", "n" * 101, "must have at most 100 characters"),
    ],
)
def test_options_of_custom_tables_are_checked(tmp_path, old, new, message):
    (tmp_path / "schema.yaml").write_text(FOREIGN.replace(old, new))
    with pytest.raises(ConfigError) as error:
        read_schema(tmp_path / "schema.yaml")
    assert message in str(error.value)
