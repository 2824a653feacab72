"""Tests that the numbers in docs/criteo.md follow from the records, and that its commands run."""

import gzip
import json
import re
from pathlib import Path
from statistics import mean

import pytest

from tests.models.test_models import rows_of
from tests.pages import Page, follow

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "criteo.md").read_text()
PAGE = Page("docs/criteo.md")
KAGGLE, TERABYTE = 45_840_617, 4_373_472_329  # rows
TERABYTE_TRAIN = 4_195_197_692  # training rows: all days but the last
KAGGLE_TEXT = 11.1e9  # bytes
TEXT_ROW = KAGGLE_TEXT / KAGGLE
RATE = 35_000  # rows per second
MLPERF_ROWS = sum(rows_of(204_184_588, 26).values())


def records(name: str, **wanted: object) -> list[dict]:
    lines = (ROOT / "benchmarks" / "results" / name).read_text().splitlines()
    return [line for line in map(json.loads, lines) if wanted.items() <= line.items()]


def cells(title: str) -> list[str]:
    """Return the cells of each table row with this title."""
    return [
        [cell.strip() for cell in row.split("|")]
        for row in re.findall(rf"^\| {re.escape(title)} \| (.+) \|$", TEXT, re.M)
    ]


def test_the_rates_are_the_recorded_ones():
    (prepare,) = records("data.jsonl", benchmark="prepare", megabytes=2002.38036)
    (full,) = records("faithful.jsonl", vocab_scale=1.0)
    found = {"benchmark": "criteo_auc", "model": "sbpflow", "sparse": "rowwise_adagrad"}
    runs = records("cpu_criteo.jsonl", **found)
    assert cells("`prepare`")[2][0] == f"{prepare['mb_per_s']:.0f} MB/s of text"
    assert cells("memory of `prepare`")[0][0].startswith(f"{prepare['peak_memory_gb']:.2f} GB")
    rate = full["rows"] / full["run_s"]
    rows = full["table_rows"] / 1e6
    (shown,) = cells("training, including start and scoring")
    assert shown[0] == f"{rate:,.0f} rows/s with {rows:.1f} million table rows"
    (shown,) = cells("training, 400-400 as above")
    of_model = mean(run["samples_per_s"] for run in runs)
    assert shown[0].startswith(f"{of_model:,.0f} rows/s")
    assert RATE < min(rate, of_model)


def test_the_estimates_follow_from_the_rates():
    for rows, trained, text, distinct, (prepare, train), unit in (
        (KAGGLE, 0.8 * KAGGLE, KAGGLE_TEXT, 33.8e6, steps(0), ("min", 60)),
        (TERABYTE, TERABYTE_TRAIN, TEXT_ROW * TERABYTE, 4.2e6, steps(1), ("h", 3600)),
    ):
        name, seconds = unit
        assert prepare[0] == f"{text / 131e6 / seconds:.1f} {name}"
        assert prepare[1] == f"{0.76 + distinct * 100 / 1e9:.1f} GB"
        big = name == "h"
        disk = [1.4 * text / (1e12 if big else 1e9), rows * 160 / (1e12 if big else 1e9)]
        peak, end = re.findall(r"([\d.]+) [GT]B", prepare[2])
        assert float(peak) == pytest.approx(disk[0], rel=0.03)
        assert float(end) == pytest.approx(disk[1], rel=0.01)
        assert train[0] == f"{trained / RATE / seconds:.0f} {name}"
    # 16 deep columns and 1 wide column; one number of optimizer state per deep row and wide row
    weights, states = MLPERF_ROWS * 17 * 4, MLPERF_ROWS * 2 * 4
    assert cells("`train`, 1 epoch")[1][1] == f"{(weights + states) / 1e9:.1f} GB of tables"
    assert f"{MLPERF_ROWS * 128 * 4 / 1e9:.1f} GB of weights" in TEXT
    assert f"{33.8e6 * 17 * 4 / 1e9:.1f} GB of weights" in TEXT
    assert f"{KAGGLE:,} | {TERABYTE:,}" in TEXT


def steps(number: int) -> tuple[list[str], list[str]]:
    return cells("`prepare`")[number], cells("`train`, 1 epoch")[number]


@pytest.mark.slow
def test_the_commands_run(tmp_path):
    """Use generated rows and small hashed tables."""
    names = [step.command.split()[1] for step in PAGE.steps]
    kaggle = ["prepare", "stats", "explain", "train", "report"]
    assert names == [*kaggle, "prepare", "explain", "train"]
    PAGE.save_files(tmp_path)
    (tmp_path / "terabyte").mkdir()
    for day in ("20", "22", "23"):
        words = f"synth --format tsv --rows 3000 --vocab-scale 0.001 --seed {day} --output rows.txt"
        follow(f"sbpflow {words}", tmp_path)
        text = (tmp_path / "rows.txt").read_bytes()
        (tmp_path / f"terabyte/day_{day}.gz").write_bytes(gzip.compress(text))
        (tmp_path / "rows.txt").replace(tmp_path / "train.txt")
    for step in PAGE.steps:
        follow(step.command.replace("40000000", "4000"), tmp_path)
    for run in ("kaggle", "terabyte"):
        assert '"final"' in (tmp_path / "runs" / run / "metrics.jsonl").read_text()
    splits = json.loads((tmp_path / "out/terabyte/manifest.json").read_text())["splits"]
    assert {"train", "val", "test"} <= set(splits)
