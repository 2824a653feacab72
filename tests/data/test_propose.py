"""Tests schemas proposed for tables with column names, and prepare without a schema."""

import csv
import random
import subprocess
from datetime import datetime, timedelta

import polars as pl
import pytest

from sbpflow.config.yaml_text import load_yaml
from sbpflow.data import load_manifest
from sbpflow.data.__main__ import main
from sbpflow.data.prepare.propose import propose
from sbpflow.data.prepare.schema_file import read_schema
from sbpflow.errors import ConfigError, DataError


def ratings(path, num_rows=400):
    """Write ratings in quotes, sorted by user."""
    rng = random.Random(3)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerow(["userId", "movieId", "title", "genres", "rating", "timestamp"])
        for number in range(num_rows):
            movie = rng.randrange(40)
            genres = "|".join(rng.sample(["Action", "Drama", "Sci-Fi"], 1 + movie % 3))
            writer.writerow([number // 8, movie, f"Movie {movie % 30}, The", genres,
                             rng.randrange(1, 11) / 2, 10**9 + rng.randrange(10**7)])  # fmt: skip
    return path


RATINGS = """\
# Proposed from 400 rows of ratings.csv. Check each line.
separator: ","
header: true
quote: '"'
label: {rating: ">= 3"}  # guess: 10 values, 0.5 to 5; 52.2% are 1
time: {timestamp: integer}  # guess: 2001-09-09 01:55 to 2001-12-31 23:35
# The rows are not in time order; to split by time, add: --split \
'time:timestamp<1008047324,timestamp<1009045973'
group: {userId: integer}  # guess, for GAUC: 50 values, 0 to 49
sparse:
  userId: integer  # 50 values, 0 to 49
  movieId: integer  # 40 values, 0 to 39
  title: string  # 30 values
  genres: {kind: string, separator: "|", max: 6}  # 3 values, lists of up to 3
"""


def census(path):
    rng = random.Random(4)
    pl.DataFrame({
        "age": [rng.randrange(17, 90) for _ in range(500)],
        "workclass": [rng.choice(["Private", "Gov", None]) for _ in range(500)],
        "capital-gain": [rng.choice([0] * 9 + [rng.randrange(9000, 99999)]) for _ in range(500)],
        "marital status": [rng.choice("abc") for _ in range(500)],
        "sex": [rng.choice(["Male", "Female"]) for _ in range(500)],
        "country": ["US"] * 500,
        "income": [rng.choice(["<=50K", "<=50K", ">50K"]) for _ in range(500)],
    }).write_parquet(path)  # fmt: skip
    return path


CENSUS = """\
# Proposed from 500 rows of census.parquet. Check each line.
label: {income: ">50K"}  # guess: '<=50K' or '>50K'; 35.0% are 1
dense:
  age: standardise  # 73 values, 17 to 89
  capital-gain: log1  # 50 values, 0 to 99,939
sparse:
  workclass: string  # 'Gov' or 'Private', 33.8% missing
  marital status: string  # 'a', 'b', 'c'
  sex: string  # 'Female' or 'Male'
# Not used:
#   country: only the value 'US'
"""


@pytest.mark.parametrize(
    ("write", "name", "expected"),
    [(ratings, "ratings.csv", RATINGS), (census, "census.parquet", CENSUS)],
)
def test_a_schema_is_proposed_for_a_table(tmp_path, capsys, write, name, expected):
    assert main(["schema", str(write(tmp_path / name))]) == 0
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(("write", "name"), [(ratings, "ratings.csv"), (census, "census.parquet")])
def test_prepare_without_a_schema_proposes_one_and_auto_accepts_it(tmp_path, capsys, write, name):
    source = write(tmp_path / name)
    words = ["prepare", "--input", str(source), "--output", str(tmp_path / "set")]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert f"`sbpflow schema {source} > schema.yaml`" in error
    assert "To accept the proposal unchanged, use --schema auto" in error
    assert "\n  ".join(propose([source]).text.splitlines()) in error
    assert not (tmp_path / "set").exists()
    assert main([*words, "--schema", "auto"]) == 0
    content = load_manifest(tmp_path / "set").content
    (tmp_path / "schema.yaml").write_text(propose([source]).text)
    assert main([*words, "--schema", str(tmp_path / "schema.yaml"), "--overwrite"]) == 0
    assert load_manifest(tmp_path / "set").content["schema"] == content["schema"]
    assert content["bad_lines"] == {}


def proposed(tmp_path, **columns):
    """Propose a schema for text with these columns; return its lines by their first word, and the
    whole proposal.
    """
    lines = [",".join(columns), *map(",".join, zip(*columns.values(), strict=True))]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    text = propose([tmp_path / "t.csv"]).text
    return {line.split()[0].strip("#:"): line.partition("  #")[0].strip()
            for line in text.splitlines() if line.strip("# ")}, text  # fmt: skip


def cycle(*cells):
    return [cells[n % len(cells)] for n in range(60)]


NUMBERS = [f"{n / 7:.3f}" for n in range(60)]


@pytest.mark.parametrize(
    ("column", "cells", "line"),
    [
        ("price", NUMBERS, "price: standardise"),
        ("gain", cycle("0", "0.5", "0", "0", "9000"), "gain: log1"),
        ("level", cycle("1", "2", "3"), "level: integer"),
        ("width", [str(n) for n in range(30, 90)], "width: standardise"),
        ("item_code", [str(n // 2) for n in range(60)], "item_code: integer"),
        ("zip", cycle("00501", "10001"), "zip: string"),
        ("on", cycle("true", "false"), '"on": string'),
        ("mixed", cycle("1", "x"), "mixed: string"),
        ("tags", cycle("a;b", "b", "a", "b;c;a"), 'tags: {kind: string, separator: ";", max: 6}'),
        ("when", [f"2024-05-{n % 30 + 1:02}" for n in range(60)], "time: when"),
        ("created", [str(1_700_000_000 + n) for n in range(60)], "time: {created: integer}"),
        ("order_id", [str(n) for n in range(60)], "row_key: {order_id: integer}"),
        ("session", [f"s{n // 3}" for n in range(60)], "group: session"),
        ("none", cycle(""), "none: no values"),
        ("note", [f"text {n}" for n in range(60)], "row_key: note"),
        ("a/b", cycle("p", "q", "r"), "a/b: rename the column; a name must start with a letter"),
        ("note vendeur", cycle("1", "2", "3"), "note vendeur: integer"),
        ("left", cycle("1", "2", "NA"), 'missing_values: ["NA"]'),
        ("left", cycle("1.5", "2", "?"), "left: standardise"),
        ("price", [f'"{n},5"' for n in range(60)], 'price: {transform: standardise, decimal: ","}'),
        ("price", [f'"{n // 2},500"' for n in range(60)], "price: string"),
        ("budget", [f'"$1,2{n // 2}.50"' for n in range(20, 80)], "budget: string"),
        (
            "budget",
            [f'"$1,2{n}.50"' for n in range(20, 80)],
            "budget: each row has a different string",
        ),
        ("day", [f"{n % 28 + 1:02}/05/2024" for n in range(60)], 'time: {day: "%d/%m/%Y"}'),
        (
            "when",
            [f"{n % 9 + 13}.05.2024 10:{n % 50 + 10}" for n in range(60)],
            'time: {when: "%d.%m.%Y %H:%M"}',
        ),
        ("when", cycle("1 May 2024", "2 May 2024"), "when: string"),
        ("size", [str(n // 2) for n in range(60)], "size: standardise"),
        ("one", cycle("x"), "one: only the value 'x'"),
    ],
)
def test_the_use_of_a_column_is_guessed(tmp_path, column, cells, line):
    _, text = proposed(tmp_path, c=cycle("p", "q", "r"), **{column: cells}, click=cycle("0", "1"))
    assert any(shown.strip("# ").startswith(line) for shown in text.splitlines()), text
    assert read_schema(load_yaml(text)).label == "click"


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        ({"c": cycle("p", "q", "r"), "flag": cycle("0", "1")}, "label: flag"),
        ({"c": cycle("p", "q", "r"), "y2": cycle("1.0", "0.0")}, "label: y2"),
        ({"click": cycle("True", "False"), "c": cycle("p", "q", "r")}, "label: click"),
        ({"c": cycle("p", "q", "r"), "out": cycle("> 5", "< 5", "< 5")}, 'label: {out: ["> 5"]}'),
        ({"c": cycle("p", "q", "r"), "stars": cycle("1", "2", "3", "4", "5")},
         'label: {stars: ">= 3"}'),
        ({"c": cycle("p", "q", "r"), "score": cycle("1234567", "1234568", "1234569")},
         'label: {score: ">= 1234569"}'),
        ({"installed": cycle("true", "false"), "c": cycle("p", "q", "r"),
          "stars": cycle("1", "2", "3", "4", "5")}, "label: installed"),
        ({"flag": cycle("0", "1"), "c": cycle("p", "q", "r")}, "label:"),
    ],
)  # fmt: skip
def test_the_label_is_guessed(tmp_path, columns, line):
    _, text = proposed(tmp_path, **columns)
    assert line in [each.partition("  #")[0].strip() for each in text.splitlines()], text


def test_a_table_without_a_likely_label_is_not_prepared(tmp_path, capsys):
    proposed(tmp_path, flag=cycle("0", "1"), c=cycle("p", "q", "r"))
    words = ["--input", tmp_path / "t.csv", "--output", tmp_path / "set", "--schema", "auto"]
    assert main(["prepare", *map(str, words)]) == 2
    error = capsys.readouterr().err
    assert "--schema auto: no column is likely to be the label; write the schema to a file" in error
    assert "flag: integer" in error
    (tmp_path / "t.csv").write_text("price,click\n0.25,0\n1.5,1\n2.25,1\n")
    assert main(["prepare", *map(str, words)]) == 2
    assert "no column is likely to contain categories; write" in capsys.readouterr().err


def test_other_separators_and_quotes_at_the_end_of_the_sample(tmp_path, monkeypatch):
    monkeypatch.setattr("sbpflow.data.prepare.sample._MAX_BYTES", 600)
    start = datetime(2024, 5, 1)
    rows = [f'{n % 2}\t"two\nlines {n % 3}"\t{start + timedelta(hours=n)}' for n in range(60)]
    (tmp_path / "t.tsv").write_text("click\ttext\tday\n" + "\n".join(rows) + "\n")
    text = propose([tmp_path / "t.tsv"]).text
    assert 'separator: "\\t"\nheader: true\nquote: ' in text
    assert "text: string  # 'two\\nlines 0', 'two\\nlines 1', 'two\\nlines 2'" in text
    assert "time: day" in text


@pytest.mark.parametrize("mark", ["\u2028", "\x85", "\U000e0001", '": \u2028\U0001f600'])
def test_names_and_values_may_contain_unprintable_characters(tmp_path, mark):
    name, value = f"a{mark}b", f"x{mark}y"
    rows = {
        name: [n / 7 for n in range(60)],
        "c": cycle("p", "q", "r"),
        f"liked{mark}b": cycle(value, "z", "z"),
    }
    pl.DataFrame(rows).write_parquet(tmp_path / "t.parquet")
    schema = read_schema(load_yaml(propose([tmp_path / "t.parquet"]).text))
    assert (schema.label, schema.label_rule.values) == (f"liked{mark}b", (value,))
    assert schema.dense == (name,)


@pytest.mark.parametrize("name", ["the day", "the $day", "it's", "the\nday", "the\u2028'day\x85"])
def test_a_proposed_split_is_one_word_of_a_shell(tmp_path, name):
    days = [datetime(2024, 5, 31 - n % 30) for n in range(60)]
    frame = pl.DataFrame({name: days, "c": cycle("p", "q", "r"), "click": cycle(0, 1)})
    frame.write_parquet(tmp_path / "t.parquet")
    line = propose([tmp_path / "t.parquet"]).text.partition("split by time, add: ")[2]
    command = f"printf %s {line.splitlines()[0].removeprefix('--split ')}"
    shown = subprocess.run(["bash", "-c", command], capture_output=True, check=True,
                           env={"LC_ALL": "C.UTF-8"}).stdout  # fmt: skip
    assert shown.decode().startswith(f"time:{name}<2024-05-")


def test_names_may_contain_line_breaks(tmp_path):
    days = [f"{n // 3},v{n % 3},2024-05-{31 - n % 30:02},{n % 2}" for n in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(['n,c,"the\nday","cli\ncked"', *days]) + "\n")
    text = propose([tmp_path / "t.csv"]).text
    assert '\nlabel: "cli\\ncked"  # guess' in text
    assert '\ntime: "the\\nday"  # guess' in text
    assert "--split $'time:the\\nday<2024-05-" in text
    words = ["--input", tmp_path / "t.csv", "--output", tmp_path / "set", "--schema", "auto"]
    assert main(["prepare", *map(str, words)]) == 0


@pytest.mark.parametrize(
    ("rows", "quote", "line"),
    [
        (['{}\t{}" wide', '{}\t"s{}'], False, "title: string  # 6 values"),
        (['{},{}" wide', "{},{}"], False, "title: string  # 6 values"),
        (['{},"{},5"', '{},{}" wide', '{},"{}'], True, "title: {transform: standardise"),
    ],
)
def test_quotes_that_do_not_enclose_whole_cells(tmp_path, rows, quote, line):
    header = "clicked\ttitle" if "\t" in rows[0] else "clicked,title"
    lines = [rows[0].format(n % 2, n % 3) for n in range(57)]
    lines[50:] = [row.format(n % 2, n % 3) for n in range(3) for row in rows]
    (tmp_path / "t.csv").write_text("\n".join([header, *lines]) + "\n")
    text = propose([tmp_path / "t.csv"]).text
    assert ("quote: '\"'" in text) == quote
    assert line in text


@pytest.mark.parametrize(
    ("mark", "rows", "text"),
    [
        (",", {100: '0,"p,"v"'}, "2,999 rows"),
        (",", {100: '0,"p,"v"', 180: '1,"q","v'}, "2,998 rows"),
        ("\t", {100: '0\t"p\tv', 185: '1\tx\tv"'}, "3,000 rows"),
        ("\t", {1: '0\t"p\tv', 45: '1\tx\tv"'}, "3,000 rows"),
    ],
)
def test_a_stray_quote_costs_at_most_its_own_row(tmp_path, mark, rows, text):
    cells = '{},"p","v{}"' if mark == "," else "{}\tp\tv{}"
    lines = [rows.get(n, cells.format(n % 2, n % 9)) for n in range(3000)]
    (tmp_path / "t.csv").write_text("\n".join([mark.join(["click", "c", "d"]), *lines]) + "\n")
    assert f"# Proposed from {text} of t.csv" in propose([tmp_path / "t.csv"]).text


@pytest.mark.parametrize("stray", [3, 30])
def test_a_stray_quote_before_the_end_of_the_sample_removes_no_more_than_half(
    tmp_path, monkeypatch, stray
):
    monkeypatch.setattr("sbpflow.data.prepare.sample._MAX_BYTES", 800)
    lines = [f'{n % 2},"p{n % 3}, or q"' for n in range(200)]
    lines[stray] = '0,"p'
    (tmp_path / "t.csv").write_text("\n".join(["click,c", *lines]) + "\n")
    num_rows = int(propose([tmp_path / "t.csv"]).text.split()[3])
    assert num_rows >= 29


def test_rows_come_from_several_files(tmp_path):
    for number in range(12):
        (tmp_path / f"day_{number}").write_text("click,c\n" + f"{number % 2},v{number}\n" * 30)
    text = propose([tmp_path]).text
    assert "# Proposed from 240 rows of day_0, day_1, day_3," in text
    assert "c: string  # 8 values" in text


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("1,2\n3,4\n", DataError, "the first line is not a list of column names; list the columns"),
        ("a,a\n1,2\n", DataError, "the header contains 'a' twice; rename one of the columns"),
        ("a,b\n", DataError, "has no rows after the line of column names"),
        ("", DataError, "the first line is not a list"),
        (
            'a,b\n"1",x"y"\n"3",x"z"\n',
            DataError,
            "none of the first rows has 2 cells with correct quotes",
        ),
        ('"a"b,"c"\n1,2\n', DataError, "the first line is not a list"),
    ],
)
def test_a_table_without_usable_names_is_refused(tmp_path, text, error, message):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(error, match=message):
        propose([tmp_path / "t.csv"])


def test_rows_with_another_number_of_cells_are_left_out(tmp_path):
    """``prepare`` skips these rows, so they must not change the kind of a column."""
    rows = ["click,price,site", *(f"{n % 2},{3 * n},s{n % 40}" for n in range(1, 400))]
    source = tmp_path / "rows.csv"
    source.write_text("\n".join(rows) + "\n")
    clean = propose([source]).text
    rows.insert(200, "Page 2 of 5")
    source.write_text("\n".join([*rows, "1,2,s3,extra", "", "Total: 400 rows"]) + "\n")
    assert propose([source]).text == clean
    assert "label: click" in clean


@pytest.mark.parametrize("first", [0, 99])
def test_a_row_with_broken_encoding_is_left_out(tmp_path, first):
    rows = [f"{n % 2},v{n % 3}".encode() for n in range(200)]
    rows[first] = b"1,caf\xe9"
    (tmp_path / "t.csv").write_bytes(b"\n".join([b"click,c", *rows]) + b"\n")
    text = propose([tmp_path / "t.csv"]).text
    assert "# Proposed from 199 rows" in text
    assert "c: string  # 'v0', 'v1', 'v2'" in text


@pytest.mark.parametrize("broken", [b"click,caf\xe9\n1,a\n", b"click,c\n" + b"1,\xe9\n0,b\n" * 60])
def test_a_table_in_another_encoding_is_refused(tmp_path, broken):
    (tmp_path / "t.csv").write_bytes(broken)
    with pytest.raises(DataError, match="the encoding of the first rows is not UTF-8; convert"):
        propose([tmp_path / "t.csv"])


def test_remote_tables_are_copied_first(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    from sbpflow.runtime.files.remote_path import input_path

    census(tmp_path / "t.parquet")
    fsspec.filesystem("memory").pipe("/p/t.parquet", (tmp_path / "t.parquet").read_bytes())
    with pytest.raises(ConfigError, match="copy one of the files, and run `sbpflow schema`"):
        propose([input_path("memory://p/t.parquet")])


@pytest.mark.parametrize(
    ("column", "cells", "remark"),
    [
        ("budget", [f'"$1,2{n}.50"' for n in range(10, 70)], "cells such as '$1,210.50' are not"),
        ("budget", [f'"$1,{n // 2}.50"' for n in range(60)], "cells such as '$1,0.50' are not"),
        ("share", [f"{n // 2} %" for n in range(60)], "cells such as '0 %' are not numbers"),
        (
            "mixed",
            cycle("1", "x"),
            "cells such as 'x' are not numbers; clean them to use the column as a dense column",
        ),
        ("day", [f"{n % 9 + 1}/5/2024" for n in range(60)], "or the format %m/%d/%Y"),
    ],
)
def test_a_doubtful_column_has_a_remark(tmp_path, column, cells, remark):
    _, text = proposed(tmp_path, c=cycle("p", "q", "r"), **{column: cells}, click=cycle("0", "1"))
    assert remark in text


def test_a_number_that_may_be_an_id_is_remarked(tmp_path):
    ids = [n // 2 for n in range(400)]
    columns = {"listener": ids, "gain": [n**2 for n in ids], "c": ["p"] * 200 + ["q"] * 200}
    pl.DataFrame({**columns, "liked": [0, 1] * 200}).write_parquet(tmp_path / "t.parquet")
    text = propose([tmp_path / "t.parquet"]).text
    assert "listener: standardise  # 200 values, 0 to 199; if they are IDs, write listener:" in text
    assert text.count("if they are IDs") == 1


def test_a_second_column_of_unique_text_and_unreadable_types_are_not_used(tmp_path):
    unique = [f"t{n}" for n in range(60)]
    pl.DataFrame({
        "play uuid": unique, "title": unique, "ctx": [{"a": n} for n in range(60)],
        "paid": pl.Series([str(n % 7) + ".25" for n in range(60)]).cast(pl.Decimal(10, 2)),
        "c": cycle("p", "q"), "liked": cycle(0, 1),
    }).write_parquet(tmp_path / "t.parquet")  # fmt: skip
    text = propose([tmp_path / "t.parquet"]).text
    assert "row_key: play uuid" in text
    assert "#   title: each row has a different string" in text
    assert "#   ctx: values of type Struct({'a': Int64}) cannot be read; convert them" in text
    assert "  paid: standardise" in text


def test_lists_of_real_numbers_are_not_categories_and_large_integers_are_shown(tmp_path):
    rows = {
        "seen": [1_000_000_000 + n // 2 for n in range(60)],
        "vector": [[n / 7, 0.5] for n in range(60)],
        "c": cycle("p", "q", "r"),
        "click": [n % 2 for n in range(60)],
    }
    pl.DataFrame(rows).write_parquet(tmp_path / "t.parquet")
    text = propose([tmp_path / "t.parquet"]).text
    assert "1,000,000,000 to 1,000,000,029" in text
    assert "#   vector: values of type List(Float64) cannot be read" in text


def test_empty_strings_of_parquet_are_missing_so_their_column_is_not_the_group(tmp_path):
    columns = {"session": ["", *(f"s{n // 3}" for n in range(59))], "size": ["", *NUMBERS[1:]]}
    frame = pl.DataFrame({**columns, "c": cycle("p", "q", "r"), "click": cycle(0, 1)})
    frame.write_parquet(tmp_path / "t.parquet")
    text = propose([tmp_path / "t.parquet"]).text
    assert "size: standardise" in text
    assert "group:" not in text
    words = ["--input", tmp_path / "t.parquet", "--output", tmp_path / "set", "--schema", "auto"]
    assert main(["prepare", *map(str, words)]) == 0


def test_types_that_differ_between_files_are_named(tmp_path):
    for number, tags in enumerate((["a"], "a")):  # integers and real numbers are joined
        frame = pl.DataFrame({"click": [0, 1], "n": [(1, 0.5)[number]] * 2, "tags": [tags] * 2})
        frame.write_parquet(tmp_path / f"day_{number}.parquet")
    message = r"day_0\.parquet, day_1\.parquet: .* differ: tags \(List\(String\), String\); write"
    with pytest.raises(DataError, match=message):
        propose([tmp_path])


@pytest.mark.parametrize(
    ("name", "cells", "line"),
    [
        ("tags", [["a"]] * 60, "tags: only the value ['a']"),
        ("tags", cycle([], ["a", "b"], ["c"] * 40_000), "tags: {kind: string, max: 65535}"),
        ("tags", cycle(["a", "b"], ["c"] * 70_000), "tags: lists of up to 70,000 values, but"),
        ("tags", pl.Series([[]] * 60, dtype=pl.List(pl.String)), "tags: no values"),
        ("tags", pl.Series(cycle([1, 2], [3, 4]), dtype=pl.Array(pl.Int64, 2)),
         "tags: {kind: integer, max: 4}"),
        ("days", [[datetime(2024, 5, 1)]] * 60, "days: values of type List(Datetime"),
        ("size", [float("inf")] * 60, "size: only the value inf"),
        ("size", cycle(0.0, 1e300), "size: fewer than two different values in the float32 range"),
        ("size", cycle(0.5, float("inf"), 2.0), "size: {transform: standardise, clip: [0.5, 2.0]}"),
        ("size", cycle(0.5, -1e300, 0.5, 1e30), "size: {transform: log1, clip: [0.5, 1.0e+30]}"),
        ("size", pl.Series(cycle(1, 2)).cast(pl.Duration), "size: values of type Duration"),
        ("size", pl.Series(cycle(1, 2**62)).cast(pl.Decimal(38, 0)), "size: integer"),
        ("size", pl.Series(cycle(1, 2**63), dtype=pl.UInt64).cast(pl.Decimal(38, 0)),
         "size: string"),
        ("size", pl.Series(cycle(1, 2**64), dtype=pl.Int128).cast(pl.Decimal(38, 0)),
         "size: standardise"),
        ("size", pl.Series(cycle(-(2**63) - 1, 5), dtype=pl.Int128).cast(pl.Decimal(38, 0)),
         "size: standardise"),
        ("size", pl.Series(cycle(1, 2**63), dtype=pl.UInt64), "size: string"),
        ("tags", pl.Series([[1], [2**63]] * 30, dtype=pl.List(pl.UInt64)), "tags: {kind: string"),
        ("tags", cycle([], ["a"]), "tags: {kind: string"),
        ("^a$", cycle("p", "q"), "^a$: rename the column"),
    ],
)  # fmt: skip
def test_unusual_columns_of_parquet(tmp_path, name, cells, line):
    frame = pl.DataFrame({name: cells, "c": cycle("p", "q", "r"), "click": cycle(0, 1)})
    frame.write_parquet(tmp_path / "t.parquet")
    text = propose([tmp_path / "t.parquet"]).text
    assert any(shown.strip("# ").startswith(line) for shown in text.splitlines()), text
    assert read_schema(load_yaml(text)).label == "click"
    words = ["--input", tmp_path / "t.parquet", "--output", tmp_path / "set", "--schema", "auto"]
    assert main(["prepare", *map(str, words)]) == 0
