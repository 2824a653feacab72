"""Tests that the commands in docs/first_run.md run in order and print the output shown there."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.pages import Page, follow, missing_lines

ROOT = Path(__file__).resolve().parents[2]
PAGE = Page("docs/first_run.md")
RECORD = ROOT / "benchmarks" / "results" / "demo.jsonl"


def test_the_page_has_the_expected_files_and_commands():
    assert list(PAGE.files) == ["demo.yaml"]
    names = [step.command.split()[1] for step in PAGE.steps]
    assert names == ["synth", "explain", "train", "train", "report"]
    assert [bool(step.shown) for step in PAGE.steps] == [False, True, True, False, False]


def test_the_page_runs_the_configuration_of_make_demo():
    demo = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())
    here = yaml.safe_load(PAGE.files["demo.yaml"])
    del demo["run"], here["run"], demo["data"]["path"], here["data"]["path"]
    assert here == demo
    makefile = (ROOT / "Makefile").read_text()
    rows, scale = re.findall(r"--rows (\d+) --vocab-scale (\S+)", PAGE.steps[0].command)[0]
    assert f"DEMO_ROWS ?= {rows}" in makefile
    assert f"--vocab-scale {scale} --output .demo/data" in makefile


def test_the_shown_scores_are_the_recorded_ones():
    events = [json.loads(line) for line in RECORD.read_text().splitlines()]
    (event,) = [event for event in events if event["run"] == "wide & deep"]
    shown = PAGE.steps[2].shown
    assert f"auc                 {event['auc']:.6f}\n" in shown
    assert f"best_auc            {event['best_auc']:.6f}\n" in shown


@pytest.mark.slow
def test_the_commands_run_and_print_what_the_page_shows(tmp_path):
    """The test uses fewer rows, so numbers are not compared."""
    PAGE.save_files(tmp_path)
    losses = []
    for command, shown in PAGE.steps:
        printed = follow(command.replace("--rows 300000", "--rows 20000"), tmp_path)
        assert missing_lines(printed, shown) == [], command
        if command.startswith("sbpflow train"):
            folder = re.search(r"run\.dir=(\S+)", command)
            metrics = tmp_path / (folder[1] if folder else "demo/run") / "metrics.jsonl"
            events = [json.loads(line) for line in metrics.read_text().splitlines()]
            losses.append([e["loss"] for e in events if e["event"] == "step"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4), "a layout changes no result"
    assert (tmp_path / "demo/run/report.html").is_file()
    assert {"metrics.jsonl", "start.txt", "checkpoints"} <= {
        path.name for path in (tmp_path / "demo/run").iterdir()
    }
