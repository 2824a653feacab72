"""A whole run from the command line on a rehearsed device: loader, loop, checks, evaluation."""

import json

import pytest

from tests.training.conftest import synth_set  # noqa: F401 -- a fixture
from tests.training.test_run import CONFIG


def run_of_one_rank(world, arguments):
    """Exit code, and how often the host waited within the last training steps, by line."""
    import train
    from sbpflow.training.trainer import Trainer
    from tests.rehearsal.journal import journal

    waits, real = [], Trainer.step

    def step(self, *args):
        with journal() as made:
            loss = real(self, *args)
        waits.append([entry.where for entry in made.syncs])
        return loss

    Trainer.step = step
    try:
        status = train.main(["--config", CONFIG, *arguments])
    finally:
        Trainer.step = real
    return status, waits


@pytest.mark.parametrize("table_dtype", ["float32", "bfloat16"])
def test_a_run_from_memory_maps_waits_in_no_step(
    rehearsed_ranks,
    synth_set,  # noqa: F811
    tmp_path,
    table_dtype,
):
    arguments = [
        f"data.path={synth_set}",
        f"run.dir={tmp_path}",
        "data.loader=memmap",
        "data.batch_size=500",
        "model.hidden=[16]",
        "train.max_steps=6",
        "parallel.device=cuda",
        f"parallel.table_dtype={table_dtype}",
        "parallel.kernel=torch",
        "checkpoint.background=false",  # a second thread is not rehearsed
    ]
    ((status, waits),) = rehearsed_ranks(1, run_of_one_rank, arguments)
    assert status == 0
    assert waits == [[]] * 6
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert 0.4 < json.loads(lines[-1])["auc"] <= 1.0
