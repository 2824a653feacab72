"""Tests that the commands in the README are complete and work with a prepared data set."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from benchmarks.demo import lines
from sbpflow.__main__ import COMMANDS
from sbpflow.commands.explain import explain
from sbpflow.config.load import load_config
from sbpflow.data.prepare.schema_file import read_schema
from sbpflow.models.registry import MODELS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "README.md").read_text()
TEXT = PAGE.replace("\\\n", " ")
EXPLAIN = re.findall(r"`sbpflow (explain [^`]*)`", TEXT)
TRAIN = re.findall(
    r"^(?:torchrun [^`\n]*train_wdl\.py|sbpflow train -n 2) (--config [^`\n]*)$", TEXT, re.M
)
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
SHELL = "".join(text for language, text in BLOCKS if not language)
COMMANDS_SHOWN = re.findall(r"^sbpflow ([\w-]+)", SHELL, re.M)
SETTINGS = [text for language, text in BLOCKS if language == "yaml"]


def _words(command: str) -> list[str]:
    """Return the command's arguments, with an absolute path to the configuration."""
    words = shlex.split(command.split("#")[0])
    return [str(ROOT / word) if word.startswith("configs/") else word for word in words]


def test_the_commands_are_found():
    assert len(EXPLAIN) >= 1
    assert len(TRAIN) >= 2
    assert {"prepare", "train", "predict", "export", "doctor"} <= {*COMMANDS_SHOWN} <= {*COMMANDS}


def test_the_readme_is_short():
    assert len(PAGE.split()) < 900


@pytest.mark.parametrize("command", EXPLAIN)
def test_explain_runs_on_the_set_it_names(synth_set, capsys, command):
    words = _words(command)[1:]
    sets = [word for word in words if word.startswith("data.path=")]
    assert sets == ["data.path=.demo/data"], "the set that make demo leaves"
    assert f"--output {sets[0].removeprefix('data.path=')}" in (ROOT / "Makefile").read_text()
    assert explain([f"data.path={synth_set}" if word in sets else word for word in words]) == 0
    assert "wide" in capsys.readouterr().out


@pytest.mark.parametrize("command", TRAIN)
def test_training_names_its_data_and_known_keys(command):
    option, config, *overrides = _words(command)
    assert option == "--config"
    assert str(load_config(config, overrides, models=MODELS).data.path) == "out/clicks"


def test_the_settings_are_accepted(tmp_path, synth_set, capsys):
    scheme, rules, schema = SETTINGS
    (tmp_path / "a.yaml").write_text(scheme + rules)
    words = ["--config", str(tmp_path / "a.yaml"), "--ranks", "4", f"data.path={synth_set}"]
    assert explain(words) == 0
    assert "S(1)@[0, 1, 2, 3]" in capsys.readouterr().out
    (tmp_path / "schema.yaml").write_text(schema)
    assert read_schema(tmp_path / "schema.yaml")


def test_the_figures_of_the_demo_are_recorded():
    record = (ROOT / "benchmarks/results/demo.jsonl").read_text().splitlines()
    events = {event["run"]: event for event in map(json.loads, record)}
    assert lines(events["wide & deep"], events["wide alone"]) in PAGE
    assert all(event["device"] for event in events.values())


def test_the_versions_of_python_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    low, high = re.search(r"Python (3\.\d+) to (3\.\d+)", PAGE).groups()
    assert project["requires-python"] == f">={low},<3.{int(high[2:]) + 1}"
