"""Times plans alternately on the ranks of this machine, so that drift affects all plans equally."""

import statistics
from collections.abc import Sequence

import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.planner.calibration.design import Sample, draw_batches
from sbpflow.planner.calibration.measure import measure_in_turns
from sbpflow.planner.tables_file import TablesFile
from sbpflow.planner.task import Plan
from sbpflow.runtime.ranks.world import World


def measure_plans(tables: TablesFile, plans: Sequence[Plan], *, rounds: int) -> list[float] | None:
    """Return the median step of each plan in ms on rank 0, None elsewhere; every rank calls
    this.
    """
    with World.start("auto") as world:
        if world.device.type == "cpu":
            torch.set_num_threads(1)
        boxing = Boxing(world)
        sample = Sample(task=tables.task(world.size, world.device.type), laws=tables.laws)
        batches = draw_batches(sample, world.rank, 2, world.device)
        measured = measure_in_turns(boxing, sample.task, plans, batches, rounds=rounds, serial=0)
        return [statistics.median(plan.rounds_ms) for plan in measured] if world.rank == 0 else None
