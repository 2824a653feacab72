"""Trains and exports a small bundle to serve."""

from pathlib import Path

from sbpflow.runtime.ranks.world import World
from tests.serving.bundles import MODELS, config_of, export, make_set, train


def run_and_export(world: World, folder: Path, name: str) -> None:
    """Prepare a set, train a model, and export it to ``folder/model``."""
    config = config_of(make_set(folder), MODELS[name])
    train(world, folder / "run", config)
    export(folder / "run", config, folder / "model")
