"""Makes a table with every kind of column, its schema, and writers for CSV and Parquet."""

import csv
import datetime
import random
from pathlib import Path

import polars as pl

SCHEMA = """
separator: ","
header: true
quote: '"'
label: click
labels: [buy]
dense:
  price: {transform: standardise, missing: indicator}
  age: {clip: [0, 100]}
  score: {buckets: 4}
sparse:
  city: string
  shop: integer
  tags: {kind: string, max: 3, beyond: first, weights: tag_weights}
  genre: {kind: string, separator: ";", width: 2, beyond: last}
  more: {kind: integer, max: 300}
weight: w
group: user
time: ts
row_key: id
"""
SPLIT = "time:ts<2024-04-21,ts<2024-04-25"
CITIES = ["K\u00f6ln, Deutz", 'say "hi"', "Paris", "two\nlines", "\u6771\u4eac", None]
NAN, INF = float("nan"), float("inf")


def table(num_rows: int, seed: int = 0) -> list[dict[str, object]]:
    """Return one row per hour from 2024-04-01 on; one price in fifty is infinite."""
    rng = random.Random(seed)
    rows: list[dict[str, object]] = []
    for number in range(num_rows):
        tags = [rng.choice(["a", "b", "c", "d\u00e9", ""]) for _ in range(rng.randrange(6))]
        tags = [] if tags == [""] else tags
        price = rng.choice([None, 1.5, 2e3, -7.25, NAN, 3.0])
        rows.append({
            "click": rng.randrange(2),
            "buy": rng.choice([0, 1, None]),
            "price": INF if rng.random() < 0.02 else price,
            "age": rng.choice([5.5, 200.0, -1.0, None, INF]),
            "score": rng.choice([None, *(number / 7 for number in range(30))]),
            "city": rng.choice(CITIES),
            "shop": rng.choice([None, *range(9)]),
            "tags": tags,
            "tag_weights": [round(rng.random(), 3) for _ in tags],
            "genre": [rng.choice("xyz") for _ in range(rng.randrange(4))],
            "more": [rng.randrange(50) for _ in range(rng.randrange(5))],
            "w": rng.random() * 3,
            "user": rng.choice(["u1", "u2", "u3"]),
            "ts": datetime.datetime(2024, 4, 1) + datetime.timedelta(hours=number),
            "id": f"row-{number}",
        })  # fmt: skip
    return rows


def write_csv(path: Path, rows: list[dict[str, object]]) -> Path:
    """Write typical CSV: a line of column names, and quotes around cells that need them."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(list(rows[0]))
        for row in rows:
            writer.writerow([_cell(name, value) for name, value in row.items()])
    return path


def _cell(name: str, value: object) -> str:
    if isinstance(value, list):
        return (";" if name == "genre" else "|").join(map(str, value))
    return "" if value is None else str(value)


def write_parquet(path: Path, rows: list[dict[str, object]]) -> Path:
    """Write the same rows to Parquet with typed columns: lists, floats, times."""
    types = {"buy": pl.Int64, "shop": pl.Int64, "tags": pl.List(pl.String),
             "tag_weights": pl.List(pl.Float64), "genre": pl.List(pl.String),
             "more": pl.List(pl.Int64)}  # fmt: skip
    types = {name: kind for name, kind in types.items() if name in rows[0]}
    pl.DataFrame(rows, schema_overrides=types).write_parquet(path)
    return path
