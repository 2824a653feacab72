"""Tests that the settings in docs/training.md are valid, and that the page's tracker program runs
as printed.
"""

import json
import re
import sys
import types
from pathlib import Path

import pytest
import yaml

from sbpflow.config.load import load_config
from sbpflow.models.registry import MODELS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "training.md").read_text()
SETTINGS = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
INLINE = re.findall(r"`((?:train|optimizer)\.[\w.]+: [^`]+)`", PAGE)
(PROGRAM,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_settings_on_the_page_are_valid(tmp_path, number):
    tree = yaml.safe_load(SETTINGS[number])
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(tree))
    load_config(tmp_path / "a.yaml", models=MODELS)


@pytest.mark.parametrize("words", INLINE)
def test_the_keys_in_the_text_are_known(tmp_path, words):
    key, _, value = words.partition(": ")
    (tmp_path / "a.yaml").write_text("")
    load_config(tmp_path / "a.yaml", [f"{key}={value}"], models=MODELS)


def test_the_page_has_settings_to_check():
    assert len(SETTINGS) >= 4
    assert len(INLINE) >= 2


def test_trackers_get_the_same_calls_as_the_report(synth_set, tmp_path, monkeypatch):
    names = {"__name__": "page"}
    monkeypatch.setitem(sys.modules, "page", types.ModuleType("page"))
    exec(compile(PROGRAM, "training.md", "exec"), names)
    monkeypatch.chdir(tmp_path)
    words = [f"data.path={synth_set}", f"run.dir={tmp_path / 'run'}", "data.batch_size=500"]
    train, config = names["train"], str(ROOT / "configs/demo.yaml")
    assert train(config, [*words, "train.max_steps=4"], tracker=names["Lines"]) == 0
    tracked = [json.loads(line) for line in (tmp_path / "tracked.jsonl").read_text().splitlines()]
    written = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    steps = [(e["step"], e["loss"]) for e in written if e["event"] == "step"]
    assert [(e["step"], e["loss"]) for e in tracked if "loss" in e] == steps
    assert len(steps) == 2
    scores = [e["auc"] for e in written if e["event"] == "eval"]
    assert [e.get("val/auc", e.get("test/auc")) for e in tracked if "loss" not in e] == scores
