"""Tests a whole training run on a rehearsed device, from the command line: loader, loop, checks,
evaluation.
"""

import json

import pytest

from tests.training.test_run import CONFIG


def run_of_one_rank(world, arguments):
    """Return the exit code, and the places of the host waits in each training step."""
    from sbpflow.commands import train
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


@pytest.mark.parametrize(("table_dtype", "graph"), [("float32", "false"), ("bfloat16", "true")])
def test_memory_mapped_run_adds_no_waits_to_steps(
    rehearsed_ranks, synth_set, tmp_path, table_dtype, graph
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
        f"parallel.cuda_graph={graph}",
        "model.dropout=0.2",
    ]
    ((status, waits),) = rehearsed_ranks(1, run_of_one_rank, arguments)
    assert status == 0
    captures = [number for number, lines in enumerate(waits) if lines]
    assert captures == ([3] if graph == "true" else [])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert 0.4 < json.loads(lines[-1])["auc"] <= 1.0
