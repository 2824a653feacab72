"""The short form of ``benchmarks/faults.py``: interrupted and killed on two ranks, and gone on."""

import random
import signal

import pytest

from benchmarks import faults
from benchmarks.faults import EVERY, Campaign, start, steps_done, wait


@pytest.mark.slow
def test_a_run_that_is_interrupted_and_killed_is_the_run_that_is_not(
    synth_set, tmp_path, monkeypatch
):
    monkeypatch.setattr(faults, "STEPS", 60)
    expected = faults.uninterrupted(synth_set, tmp_path / "whole", 2)
    run = Campaign(synth_set, tmp_path / "run", 2, random.Random(3))
    ranks = start(synth_set, run.folder, run.log, 2)
    assert wait(ranks, lambda: steps_done(run.folder) > EVERY, 120.0)
    ranks.signal(signal.SIGTERM)
    assert ranks.codes(60.0) == [130, 130]
    saved = max(int(path.name[5:]) for path in run.folder.glob("checkpoints/step-*"))
    assert saved == steps_done(run.folder), "it was saved after the step under way"
    run.kill("one")
    run.finish()
    assert faults.events(run.folder) == expected
    assert run.left_over() == []
