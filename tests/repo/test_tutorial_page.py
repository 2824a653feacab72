"""Tests that the files and commands of docs/tutorial.md work in the reader's order."""

import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.deadlines import run

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
FILES = {match[1]: text for _, text in BLOCKS if (match := re.match(r"# ([\w.]+)\n", text))}
COMMANDS = [
    line
    for language, text in BLOCKS
    if not language
    for line in text.replace("\\\n", " ").splitlines()
    if line.startswith(("sbpflow ", "python "))
]
RUNS = ("runs/clicks", "runs/rows")
PROGRAMS = {"sbpflow": [sys.executable, "-m", "sbpflow"], "python": [sys.executable]}


def test_the_page_has_what_the_test_runs():
    assert list(FILES) == ["make_clicks.py", "schema.yaml", "clicks.yaml"]
    words = [shlex.split(command)[1] for command in COMMANDS]
    assert words == [
        *("make_clicks.py", "schema", "prepare", "stats", "explain", "train", "train"),
        *("report", "predict", "export"),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder in which a reader has followed the page to its end."""
    folder = tmp_path_factory.mktemp("tutorial")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for command in COMMANDS:
        program, *words = shlex.split(command)
        done = run(
            [*PROGRAMS[program], *words],
            180,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return folder


def test_the_sample_is_the_start_of_the_table(folder):
    (sample,) = [text for language, text in BLOCKS if language == "none"]
    table = (folder / "clicks.csv").read_text()
    assert table.startswith(sample)
    assert "clicked" not in (folder / "tomorrow.csv").read_text()


def test_every_new_row_has_a_score(folder):
    scores = pl.read_parquet(folder / "scores.parquet")
    assert scores.columns == ["visit", "score"]
    assert scores["visit"].to_list() == list(range(20_000, 21_000))
    assert scores["score"].is_between(0, 1).all()


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


def test_the_model_has_learned_something(folder):
    (final,) = events(folder / "runs/clicks", "final")
    assert final["auc"] > 0.7


def test_both_layouts_have_the_same_losses(folder):
    first, second = ([e["loss"] for e in events(folder / run, "step")] for run in RUNS)
    assert len(first) > 3
    assert first == pytest.approx(second, rel=1e-4)


def test_the_files_that_the_page_names_are_there(folder):
    assert (folder / "runs/clicks/report.html").is_file()
    assert (folder / "out/model/model.pt2").is_file()
    assert "label rate by time" not in (folder / "out/stats.html").read_text()
    assert "Warnings" in (folder / "out/stats.html").read_text()
