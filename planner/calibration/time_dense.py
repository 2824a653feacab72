"""Times dense parts alone: layers of many widths over one small table, with the engine's trainer.

Tasks of a calibration all have the same narrow layers, so that their steps tell of the tables. What
wide ones cost per multiply-add, and narrow ones per number read, only nets alone tell apart.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from sbpflow.boxing.agreement import gather_texts
from sbpflow.boxing.executor import Boxing
from sbpflow.config.parse import build
from sbpflow.costs.counts import NUM_FEATURES
from sbpflow.costs.ids import Floats
from sbpflow.embedding.plan.tables import FeatureConfig, OutputConfig, TableConfig
from sbpflow.embedding.rules.sgd import Sgd
from sbpflow.errors import ConfigError
from sbpflow.planner.calibration.design import Law, Sample, draw_batches
from sbpflow.planner.calibration.measure import dense_work_of, make_trainer, phases_of, time_moves
from sbpflow.planner.costs.features import zipf_mandelbrot
from sbpflow.planner.costs.simulate import PHASE
from sbpflow.planner.costs.work import base_work
from sbpflow.planner.task import Choice, Shape, Task
from sbpflow.runtime.fields.ranges import Range

DENSE_MOVES = ("forward", "backward", "send_dense", "receive_dense", "update_dense")
# (width of the table, hidden widths), the least work first.
NETS = ((64, (64,)), (128, (32, 32, 32)), (256, (128, 64)), (416, (400, 400)), (512, (512, 256)))
SAMPLES = (128, 512, 2048)  # of a rank
STEPS = 5
_NUM_ROWS = 100
Size = Annotated[int, Range(low=1, below=2**31)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseTime:
    """``ms`` of each of ``DENSE_MOVES`` on the slowest rank, for one net and ``samples`` a rank."""

    width: Size
    hidden: tuple[Size, ...]
    samples: Size
    ms: Mapping[str, Annotated[float, Range(low=0, below=1e12)]]


def dense_time_of(tree: Mapping[str, Any]) -> DenseTime:
    """From JSON; ConfigError for anything else."""
    found = build(DenseTime, tree)
    if set(found.ms) != set(DENSE_MOVES):
        raise ConfigError(f"dense: ms has not the moves {', '.join(DENSE_MOVES)}")
    return found


def time_dense(
    boxing: Boxing,
    *,
    seconds: float,
    nets: Sequence[tuple[int, tuple[int, ...]]] = NETS,
    samples: Sequence[int] = SAMPLES,
) -> list[DenseTime]:
    """Each net at each number of samples, as far as ``seconds`` reach; every rank gets the same.

    The narrowest net is timed always. Every rank calls it.
    """
    start = time.monotonic()
    found: list[DenseTime] = []
    for width, hidden in nets:
        for count in samples:
            found.append(_timed(boxing, width, hidden, count))
            over = json.dumps(time.monotonic() - start > seconds)
            if json.loads(gather_texts(boxing, over)[0]):
                return found
    return found


def dense_examples(times: Sequence[DenseTime], move: str) -> tuple[Floats, Floats]:
    """([n, F] counts, [n] ms) of the dense parts in ``move``, as a fit takes them; else none."""
    if move not in DENSE_MOVES:
        return np.zeros((0, NUM_FEATURES)), np.zeros(0)
    rows = [base_work(_task(one.width, one.hidden, one.samples, 1)) for one in times]
    return (
        np.array(rows).reshape(len(rows), NUM_FEATURES),
        np.array([one.ms[move] for one in times]),
    )


def _timed(boxing: Boxing, width: int, hidden: tuple[int, ...], samples: int) -> DenseTime:
    world = boxing.world
    task = _task(width, hidden, samples, world.size, world.device.type)
    plan = {"t": Choice(Shape("B", "local"), tuple(range(world.size)))}
    trainer = make_trainer(boxing, task, plan, hidden=hidden)
    drawn = Sample(task=task, laws={"t": Law(s=0.8, q=2.0)})
    mine = time_moves(boxing, trainer, draw_batches(drawn, world.rank, 2, world.device), STEPS)
    ranks = phases_of([json.loads(text) for text in gather_texts(boxing, json.dumps(mine))])
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
