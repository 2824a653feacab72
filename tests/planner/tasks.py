"""Defines small tasks and plans for the planner's tests."""

import numpy as np

from sbpflow.embedding.plan.tables import FeatureConfig, OutputConfig, TableConfig
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.planner.calibration.design import Law, Sample
from sbpflow.planner.costs.features import zipf_mandelbrot
from sbpflow.planner.task import Choice, Plan, Shape, Task

WORLD = (0, 1, 2, 3)


def make_task(
    world_size=4, batch_size=512, rows=(4000, 50, 900, 3000, 700, 6000, 800, 100, 1200), dim=8
):
    """Return a task with one skewed table per entry of ``rows``; the second table has three ids per
    sample.
    """
    tables = tuple(
        TableConfig(name=f"t{n}", features=(f"f{n}",), num_rows=count, dim=dim)
        for n, count in enumerate(rows)
    )
    hotness = [3 if n == 1 else 1 for n in range(len(rows))]
    return Task(
        outputs=(OutputConfig(name="fields", tables=tables),),
        features=tuple(FeatureConfig(name=f"f{n}", hotness=h) for n, h in enumerate(hotness)),
        stats={
            table.name: zipf_mandelbrot(table.num_rows, 0.9, 5.0, float(h))
            for table, h in zip(tables, hotness, strict=True)
        },
        world_size=world_size,
        batch_size=batch_size,
        optimizer=sparse_optimizer("rowwise_adagrad", lr=0.05),
    )


def laws_of(task):
    """Return the task with the id distributions from which ``make_task`` computes statistics."""
    return Sample(task=task, laws={table.name: Law(s=0.9, q=5.0) for table in task.tables})


def every_shape() -> list[Choice]:
    """Return choices of every kind, on four ranks."""
    return [
        Choice(Shape("B", "local"), WORLD),
        Choice(Shape("B", "local"), WORLD),
        Choice(Shape("B", "columns"), (1,)),
        Choice(Shape("S(0)", "reduce", (2, 1)), (0, 2)),
        Choice(Shape("S(0)", "unique", (4, 1)), WORLD),
        Choice(Shape("S(1)", "columns", (1, 4)), WORLD),
        Choice(Shape("(S(0), S(1))", "reduce", (2, 2)), WORLD),
        Choice(Shape("S(0)", "unique", (1, 1)), (3,)),
        Choice(Shape("S(1)", "unique", (1, 4)), WORLD),
    ]


def mixed_plan(task) -> Plan:
    """Return a plan with the choices of ``every_shape``, table by table."""
    return dict(zip((table.name for table in task.tables), every_shape(), strict=True))


def random_plan(task, seed) -> Plan:
    """Return a plan with random choices of ``every_shape``."""
    random, shapes = np.random.default_rng(seed), every_shape()
    return {t.name: shapes[int(random.integers(len(shapes)))] for t in task.tables}
