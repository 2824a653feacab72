"""Times dense parts alone: layers of many widths over one small table, run by the engine's trainer.

The tasks of a calibration share narrow layers, so their step times mostly depend on the tables.
Timing networks alone separates the cost of a multiply-add, which dominates wide layers, from the
cost of reading a number.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from sbpflow.boxing.executor import Boxing
from sbpflow.config.parse import build
from sbpflow.costs.counts import NUM_FEATURES
from sbpflow.costs.ids import Floats
from sbpflow.embedding.plan.tables import FeatureConfig, OutputConfig, TableConfig
from sbpflow.embedding.rules.sgd import Sgd
from sbpflow.errors import ConfigError
from sbpflow.planner.calibration.design import Law, Sample, draw_batches
from sbpflow.planner.calibration.measure import (
    dense_work_of,
    from_all_ranks,
    from_first_rank,
    make_trainer,
    phases_of,
    time_moves,
)
from sbpflow.planner.costs.features import zipf_mandelbrot
from sbpflow.planner.costs.simulate import PHASE
from sbpflow.planner.costs.work import base_work
from sbpflow.planner.task import Choice, Shape, Task
from sbpflow.runtime.fields.ranges import Range

DENSE_MOVES = ("forward", "backward", "send_dense", "receive_dense", "update_dense")
# These are (table width, hidden widths), in ascending order of work.
NETS = ((64, (64,)), (128, (32, 32, 32)), (256, (128, 64)), (416, (400, 400)), (512, (512, 256)))
SAMPLES = (128, 512, 2048)  # per rank
STEPS = 5
_NUM_ROWS = 100
Size = Annotated[int, Range(low=1, below=2**31)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseTime:
    """Stores the ``ms`` of ``DENSE_MOVES`` on the slowest rank; ``samples`` are per rank."""

    width: Size
    hidden: tuple[Size, ...]
    samples: Size
    ms: Mapping[str, Annotated[float, Range(low=0, below=1e12)]]


def dense_time_of(tree: Mapping[str, Any]) -> DenseTime:
    """Return a dense time from JSON; raise ConfigError for any other value."""
    time = build(DenseTime, tree)
    if set(time.ms) != set(DENSE_MOVES):
        raise ConfigError(f"dense: ms has {sorted(time.ms)}; use the keys {', '.join(DENSE_MOVES)}")
    return time


def time_dense(
    boxing: Boxing,
    *,
    seconds: float,
    nets: Sequence[tuple[int, tuple[int, ...]]] = NETS,
    samples: Sequence[int] = SAMPLES,
) -> list[DenseTime]:
    """Time each network with each number of samples until ``seconds`` have passed; the same on
    every rank.

    The narrowest network is always timed. Every rank calls this function.
    """
    start = time.monotonic()
    times: list[DenseTime] = []
    for width, hidden in nets:
        for count in samples:
            times.append(_timed(boxing, width, hidden, count))
            if from_first_rank(boxing, time.monotonic() - start > seconds):
                return times
    return times


def dense_examples(times: Sequence[DenseTime], move: str) -> tuple[Floats, Floats]:
    """Return ([n, F] counts, [n] ms) of the dense parts in ``move``, for a fit; empty for other
    moves.
    """
    if move not in DENSE_MOVES:
        return np.zeros((0, NUM_FEATURES)), np.zeros(0)
    rows = [base_work(_task(net.width, net.hidden, net.samples, 1)) for net in times]
    counts = np.array(rows).reshape(len(rows), NUM_FEATURES)
    return counts, np.array([net.ms[move] for net in times])


def _timed(boxing: Boxing, width: int, hidden: tuple[int, ...], samples: int) -> DenseTime:
    world = boxing.world
    task = _task(width, hidden, samples, world.size, world.device.type)
    plan = {"t": Choice(Shape("B", "local"), tuple(range(world.size)))}
    trainer = make_trainer(boxing, task, plan, hidden=hidden)
    drawn = Sample(task=task, laws={"t": Law(s=0.8, q=2.0)})
    mine = time_moves(boxing, trainer, draw_batches(drawn, world.rank, 2, world.device), STEPS)
    ranks = phases_of(from_all_ranks(boxing, mine))
    slowest = {name: max(phases[PHASE[name]] for phases in ranks) for name in DENSE_MOVES}
    return DenseTime(width=width, hidden=hidden, samples=samples, ms=slowest)


def _task(
    width: int, hidden: tuple[int, ...], samples: int, world_size: int, device_type: str = "cpu"
) -> Task:
    table = TableConfig(name="t", features=("f",), num_rows=_NUM_ROWS, dim=width)
    return Task(
        outputs=(OutputConfig(name="fields", tables=(table,)),),
        features=(FeatureConfig(name="f"),),
        stats={"t": zipf_mandelbrot(_NUM_ROWS, 0.8, 2.0, 1.0)},
        world_size=world_size,
        batch_size=samples * world_size,
        optimizer=Sgd(lr=0.05),
        device_type=device_type,
        dense=dense_work_of(width, hidden),
    )
