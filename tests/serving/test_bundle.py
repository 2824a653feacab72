"""Tests that bundles score raw rows as the run does, in a process with only torch and numpy."""

from pathlib import Path

import numpy as np
import pytest

from sbpflow.serving.scorer import load
from tests.serving.bundles import MODELS, config_of, export, make_set, train


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    return make_set(tmp_path_factory.mktemp("bundle"))


def _run(world, prepared: Path, folder: Path, name: str):
    config = config_of(prepared, MODELS[name])
    scores, _ = train(world, folder / "run", config)
    export(folder / "run", config, folder / "model")
    return scores


@pytest.mark.parametrize("name", MODELS)
def test_a_bundle_scores_raw_rows_as_the_run(ranks, prepared, tmp_path, name):
    (wanted,) = ranks(1, _run, prepared, tmp_path, name)
    model = load(tmp_path / "model")
    text = (prepared.parent / "t.csv").read_text()
    scores = model.score(text)
    np.testing.assert_allclose(scores[-len(wanted) :], wanted, rtol=0, atol=1e-6)
