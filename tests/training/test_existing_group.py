"""Tests runs in a program that has already created torch's process group, as Ray's workers do."""

import json

import torch.distributed as dist

from sbpflow.commands.train import run_rank
from sbpflow.errors import ConfigError


def two_runs_in_a_group(world, folder, data) -> str:
    """Make two runs in the ranks' existing group; return the error of a run with different
    seeds.
    """
    words = [f"data.path={data}", "data.batch_size=64", "model.hidden=[8]", "train.max_steps=3"]
    for run in ("a", "b"):
        run_rank("configs/scheme3.yaml", [*words, f"run.dir={folder}/{run}"])
    assert dist.is_initialized()
    assert dist.get_world_size() == 2
    if world.rank == 1:
        words.append("run.seed=8")
    try:
        run_rank("configs/scheme3.yaml", [*words, f"run.dir={folder}/c"])
    except ConfigError as error:
        return str(error)
    return ""


def test_runs_use_the_process_group_that_a_program_has_created(ranks, synth_set, tmp_path):
    errors = ranks(2, two_runs_in_a_group, tmp_path, synth_set)
    assert all("rank 1 differs from rank 0 (run.seed: " in error for error in errors), errors
    results = [(tmp_path / run / "metrics.jsonl").read_text().splitlines() for run in "ab"]
    losses = [[json.loads(line).get("loss") for line in lines] for lines in results]
    assert losses[0] == losses[1]
