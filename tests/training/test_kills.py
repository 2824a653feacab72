"""Runs a short version of ``benchmarks/faults.py``: interrupts, kills and resumes a run of two
ranks.
"""

import random
import signal

import pytest

from benchmarks import faults
from benchmarks.faults import EVERY, Campaign, start, steps_done, wait
from tests.deadlines import Deadline


@pytest.mark.slow
@pytest.mark.parametrize(("deltas", "keys"), [(0, False), (3, False), (3, True)])
def test_interrupted_and_killed_runs_equal_an_uninterrupted_run(
    synth_set, tmp_path, monkeypatch, deltas, keys
):
    monkeypatch.setattr(faults, "STEPS", 60)
    if keys:
        synth_set = tmp_path / "set"
        faults.make_set(synth_set, keys=True)
    expected = faults.uninterrupted(synth_set, tmp_path / "whole", 2, keys=keys)
    run = Campaign(synth_set, tmp_path / "run", 2, random.Random(3), deltas=deltas, keys=keys)
    growing = [faults.GROWING] if keys else []
    ranks = start(synth_set, run.folder, run.log, 2, f"checkpoint.deltas={deltas}", *growing)
    assert wait(ranks, lambda: steps_done(run.folder) > EVERY, 120.0)
    ranks.signal(signal.SIGTERM)
    assert ranks.codes(60.0) == [130, 130]
    saved = max(int(path.name[5:]) for path in run.folder.glob("checkpoints/step-*"))
    assert saved == steps_done(run.folder), "it was saved after the step under way"
    for kind in ("one", "save") if deltas else ("one",):
        run.kill(kind)
    run.finish()
    assert faults.events(run.folder) == expected
    assert run.left_over() == []


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_a_signal_to_one_rank_saves_for_all_and_ends_them_in_seconds(synth_set, tmp_path, who):
    """The signal simulates the preemption of one machine."""
    run = Campaign(synth_set, tmp_path / "run", 2, random.Random(3))
    ranks = start(synth_set, run.folder, run.log, 2, "train.max_steps=5000", "train.epochs=1000")
    assert wait(ranks, lambda: steps_done(run.folder) > EVERY, 120.0)
    ranks.processes[who].send_signal(signal.SIGTERM)
    deadline = Deadline(15)
    codes = ranks.codes(60.0)
    assert not deadline.over(), "it trained on"
    assert codes == ([130, 3] if who == 0 else [3, 130])
    saved = max(int(path.name[5:]) for path in run.folder.glob("checkpoints/step-*"))
    assert saved == steps_done(run.folder), "it was saved after the step under way"
    assert run.log.read_text().count("stopped by SIGTERM") == 1
