"""Tests that the running statistics of batch norms can be restored on a different number of
ranks.
"""

from pathlib import Path

import numpy as np
import pytest

from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.run.saved.save import Saver
from tests.models.twins import config_of
from tests.training.wdl_case import make_batches, make_job

BEFORE, AFTER = 3, 3


def steps(world, job, first, count):
    batches = make_batches(BEFORE + AFTER, 30)[first : first + count]
    return [float(job.trainer.step(batch.part(world.rank, world.size))) for batch in batches]


def until_saved(world, folder):
    job = make_job(world, config_of("dlrm", "3"))
    steps(world, job, 0, BEFORE)
    Saver(Path(folder), job.boxing, job.state, run="norms", deadline_s=60).save(BEFORE, {})


def from_there(world, folder):
    job = make_job(world, config_of("dlrm", "1"))
    if folder is None:
        steps(world, job, 0, BEFORE)
    else:
        job.restore(open_checkpoint(Path(folder) / f"step-{BEFORE}"))
    losses = steps(world, job, BEFORE, AFTER)
    return losses, {name: buffer.part.numpy().copy() for name, buffer in job.model.buffers.items()}


@pytest.mark.slow
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_running_statistics_are_restored(ranks, memory, size):
    ranks(2, until_saved, str(memory))
    names = open_checkpoint(memory / f"step-{BEFORE}").tensors
    assert {f"dense/bottom.0.norm.running_{what}" for what in ("mean", "var")} <= set(names)
    ((losses, buffers),) = ranks(1, from_there, None)
    for found, statistics in ranks(size, from_there, str(memory)):
        np.testing.assert_allclose(found, losses, rtol=1e-11)
        assert statistics.keys() == buffers.keys()
        for name, value in statistics.items():
            np.testing.assert_allclose(value, buffers[name], rtol=1e-10, atol=1e-12)
