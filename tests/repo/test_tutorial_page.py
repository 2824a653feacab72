"""Tests that the files and commands in docs/tutorial.md work when followed from top to bottom."""

import json
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.pages import Page, follow, missing_lines

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "tutorial.md").read_text()
PAGE = Page("docs/tutorial.md")
RUNS = ("runs/clicks", "runs/rows")


def test_the_page_has_the_expected_files_and_commands():
    assert list(PAGE.files) == ["make_clicks.py", "schema.yaml", "clicks.yaml"]
    assert [step.command.split()[1] for step in PAGE.steps] == [
        *("make_clicks.py", "schema", "prepare", "stats", "explain", "train", "train"),
        *("report", "predict", "-c", "export"),
    ]
    assert sum(bool(step.shown) for step in PAGE.steps) == 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Follow the page's steps in a folder, compare the outputs, and return the folder."""
    folder = tmp_path_factory.mktemp("tutorial")
    PAGE.save_files(folder)
    for command, shown in PAGE.steps:
        assert missing_lines(follow(command, folder), shown) == [], command
    return folder


@pytest.mark.slow
def test_the_sample_is_the_start_of_the_table(folder):
    (sample,) = re.findall(r"^```none\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    table = (folder / "clicks.csv").read_text()
    assert table.startswith(sample)
    assert "clicked" not in (folder / "tomorrow.csv").read_text()


@pytest.mark.slow
def test_every_new_row_has_a_score(folder):
    scores = pl.read_parquet(folder / "scores.parquet")
    assert scores.columns == ["visit", "score"]
    assert scores["visit"].to_list() == list(range(20_000, 21_000))
    assert scores["score"].is_between(0, 1).all()


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


@pytest.mark.slow
def test_the_model_has_learned_something(folder):
    (final,) = events(folder / "runs/clicks", "final")
    (shown,) = re.findall(r"^  auc +([\d.]+)$", TEXT, re.MULTILINE)
    assert final["auc"] == pytest.approx(float(shown), abs=0.01)


@pytest.mark.slow
def test_both_layouts_have_the_same_losses(folder):
    first, second = ([e["loss"] for e in events(folder / run, "step")] for run in RUNS)
    assert len(first) > 3
    assert first == pytest.approx(second, rel=1e-4)


@pytest.mark.slow
def test_the_page_creates_the_files_it_names(folder):
    assert (folder / "runs/clicks/report.html").is_file()
    assert (folder / "out/model/scorer.py").is_file()
    assert "label rate by time" not in (folder / "out/stats.html").read_text()
    assert "Warnings" in (folder / "out/stats.html").read_text()
