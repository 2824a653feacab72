"""Trains and exports one small model for all tests of servers; tests change copies of it."""

from pathlib import Path

import pytest

from sbpflow.runtime.ranks.world import World
from tests.serving.bundles import MODELS, config_of, export, make_set, train


def _run_and_export(world: World, folder: Path) -> None:
    config = config_of(make_set(folder), MODELS["wdl"])
    train(world, folder / "run", config)
    export(folder / "run", config, folder / "model")


@pytest.fixture(scope="session")
def exported(_cpu_ranks, tmp_path_factory) -> Path:
    """Return a folder with ``t.csv``, ``run``, and the bundle ``model``."""
    folder = tmp_path_factory.mktemp("served")
    _cpu_ranks(1, _run_and_export, folder)
    return folder
