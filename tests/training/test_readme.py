"""The commands of the README are complete and work with a prepared data set."""

import re
import shlex
from pathlib import Path

import pytest

from sbpflow.commands.explain import explain
from sbpflow.config.load import load_config
from sbpflow.models.registry import MODELS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text().replace("\\\n", " ")
EXPLAIN = re.findall(r"`sbpflow (explain [^`]*)`", TEXT)
TRAIN = re.findall(r"^torchrun [^`\n]*train_wdl\.py (--config [^`\n]*)$", TEXT, re.M)


def _words(command: str) -> list[str]:
    """Its arguments, with the configuration found from any folder."""
    words = shlex.split(command.split("#")[0])
    return [str(ROOT / word) if word.startswith("configs/") else word for word in words]


def test_the_commands_are_found():
    assert len(EXPLAIN) >= 1
    assert len(TRAIN) >= 3


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
    assert str(load_config(config, overrides, models=MODELS).data.path) == "out/criteo"
