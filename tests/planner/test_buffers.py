"""Tests that the counted buffers of each exchange are those that ranks allocate."""

import os
from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks.planner_memory import allocated_bytes, make_sample
from sbpflow.boxing.executor import Boxing
from sbpflow.costs.counts import BUFFERS
from sbpflow.planner.calibration.design import draw_batches
from sbpflow.planner.calibration.measure import make_trainer, measure_in_turns
from sbpflow.planner.costs.cost import count_work
from sbpflow.planner.task import Choice, Shape
from tests.quick import quick

pytest.importorskip("numba", reason="the bytes of its indices are counted")
CHOICES = {
    "copies": [Choice(Shape("B", "local"), (0, 1))],
    "whole": [Choice(Shape("B", "columns"), (rank,)) for rank in (0, 1)],
    "columns": [Choice(Shape("S(1)", "columns", (1, 2)), (0, 1))],
    "unique columns": [Choice(Shape("S(1)", "unique", (1, 2)), (0, 1))],
    "reduce": [Choice(Shape("S(0)", "reduce", (2, 1)), (0, 1))],
    "unique": [Choice(Shape("S(0)", "unique", (2, 1)), (0, 1))],
}
PACKED = ("whole", "columns", "reduce")
# Partial sums of four ranks; two of them store rows in "half".
SUMS = {
    "reduce": [Choice(Shape("S(0)", "reduce", (4, 1)), (0, 1, 2, 3))],
    "grid": [Choice(Shape("(S(0), S(1))", "reduce", (2, 2)), (0, 1, 2, 3))],
    "half": [Choice(Shape("S(0)", "reduce", (2, 1)), (1, 2))],
    "one part": [Choice(Shape("S(0)", "reduce", (1, 1)), (rank,)) for rank in range(4)],
}
# (tables, rows, columns, ids per sample, batch size). With 3,000 rows, the gradients of copies are
# all-reduced; with 100,000 rows, they are gathered.
FEW_ROWS, MANY_ROWS = (6, 3000, 32, 4, 8192), (6, 100_000, 32, 2, 8192)
MANY_IDS, WIDE = (4, 20_000, 16, 20, 4096), (8, 3000, 128, 1, 8192)
CASES = [
    (name, shape, dtype)
    for name in CHOICES
    for shape in (FEW_ROWS, MANY_ROWS, MANY_IDS)
    for dtype in (None, torch.bfloat16)
]


def allocated_and_counted(world, choices, shape, comm_dtype=None):
    sample = make_sample(shape, world.size)
    sample = replace(sample, task=replace(sample.task, comm_dtype=comm_dtype))
    plan = plan_of(sample.task, choices)
    measure_in_turns(Boxing(world), sample, [plan], rounds=1)  # one-time allocations
    run = partial(measure_in_turns, Boxing(world), sample, [plan], rounds=1, steps=3)
    return allocated_bytes(run), count_work(sample.task, plan)[world.rank, BUFFERS]


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "shape", "dtype"), quick(CASES, lambda n: n % 8 in (1, 4)))
def test_buffers_are_counted_as_ranks_allocate_them(ranks, name, shape, dtype):
    tables, _, dim, _, batch_size = shape
    packed = 0.0
    if name in PACKED and os.environ.get("SBPFLOW_TEST_SHARED_MEMORY", "1") != "1":
        # Without shared memory, each rank also has buffers for the vectors that it sends, and for
        # those that it receives.
        packed = 2 * batch_size / 2 * tables * dim * (dtype or torch.float32).itemsize
    for allocated, counted in ranks(2, allocated_and_counted, CHOICES[name], shape, dtype):
        assert counted + packed == pytest.approx(allocated, rel=0.1)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", quick(list(SUMS), lambda n: n < 2))
def test_buffers_of_partial_sums_are_counted_on_four_ranks(ranks, name):
    """Ranks without rows need less than counted, or more for the dense part; the others decide
    whether a plan fits.
    """
    found = ranks(4, allocated_and_counted, SUMS[name], WIDE)
    allocated, counted = map(max, zip(*found, strict=True))
    assert counted == pytest.approx(allocated, rel=0.1)


def plan_of(task, choices):
    return {table.name: choices[n % len(choices)] for n, table in enumerate(task.tables)}


def allocated_and_counted_in_a_step(world, name, num_batches):
    """Return the bytes of steps of several batches."""
    sample = make_sample(FEW_ROWS, world.size)
    task = replace(sample.task, accumulate=num_batches, lookahead=0)
    plan = plan_of(task, CHOICES[name])

    def run():
        trainer = make_trainer(Boxing(world), task, plan)
        batches = draw_batches(sample, world.rank, num_batches, world.device)
        for _ in range(2):
            trainer.step(batches)

    run()  # one-time allocations
    return allocated_bytes(run), count_work(task, plan)[world.rank, BUFFERS]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", quick(list(CHOICES), lambda n: n < 3))
def test_the_batches_of_a_step_are_in_memory_at_the_same_time(ranks, name):
    for allocated, counted in ranks(2, allocated_and_counted_in_a_step, name, 4):
        assert counted == pytest.approx(allocated, rel=0.35)
