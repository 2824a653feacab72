"""Tests how kernel times change the price of a table and the report of a plan."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sbpflow.costs.counts import INDEX
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.embedding.storage.choose import StackFacts, choose_kernel, missing_kernels
from sbpflow.planner.calibration.records import empty_profile
from sbpflow.planner.calibration.time_kernels import measure_kernels
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.costs.kernels import kernel_ms, kernels_of
from sbpflow.planner.costs.profile import load, weights_from
from sbpflow.planner.task import Choice, Shape
from tests.planner.tasks import make_task

TASK = make_task(world_size=2, batch_size=1000, rows=(4000, 500), dim=8)
PRICES = {
    "rowwise_adagrad": {
        "numba": (0.1, 1e-4, 1e-5),
        "torch": (0.0, 4e-4, 4e-5),
        "fbgemm": (1.0, 0.0, 1e-6),
    }
}
READ = {"lookup": {"read_rows": 1e-3}, "update": {"update_ids": 1e-3}, "vectors": {}}


def cost(task, kernels=PRICES):
    profile = replace(empty_profile(2, "gloo"), weights=weights_from(READ), kernels=kernels)
    return TaskCost(profile, task)


def reads(task, shape, **given):
    return cost(task, **given).shape_cost(task.tables[0], shape).shards[:, INDEX["read_rows"]]


def test_every_usable_kernel_is_measured_the_default_first():
    shapes = [(200, 4), (2000, 4), (2000, 16)]
    kernels = measure_kernels(torch.device("cpu"), ["sgd", "ftrl"], shapes, rows=1000)
    assert set(kernels) == {"sgd", "ftrl"}
    facts = StackFacts(
        width=4,
        optimizer=sparse_optimizer("sgd", lr=0.1),
        dtype=torch.float32,
        row_dtype=torch.float32,
        column_split=False,
        device_type="cpu",
    )
    assert next(iter(kernels["sgd"])) == choose_kernel("auto", facts, missing_kernels("auto")).name
    assert "fbgemm" not in kernels["ftrl"]  # FBGEMM has no FTRL
    for prices in kernels.values():
        assert "torch" in prices
        for price in prices.values():
            assert min(price) >= 0.0
            assert kernel_ms(price, np.array([2000]), np.array([32000]))[0] > 0.0


def test_a_table_is_priced_by_its_fastest_usable_kernel():
    whole = Shape("B", "columns")
    plain = reads(TASK, whole, kernels={})
    # For 2,000 ids of 8 columns, numba (which was calibrated) takes 0.46 ms, FBGEMM 1.016 and torch
    # 1.44.
    np.testing.assert_allclose(reads(TASK, whole), plain)
    requested = replace(TASK, kernel="torch")
    np.testing.assert_allclose(reads(requested, whole), plain * 1.44 / 0.46)
    many = replace(TASK, batch_size=100_000)  # numba 18.1, FBGEMM 1.8
    np.testing.assert_allclose(
        reads(many, whole), reads(many, whole, kernels={}) * 1.8 / 18.1, rtol=1e-6
    )


def test_a_kernel_without_a_price_per_call_does_not_win_small_batches():
    """The torch price for 10 ids would be 0.007 ms, although a numba call alone takes 0.1 ms."""
    few = replace(TASK, batch_size=10)
    whole = Shape("B", "columns")
    np.testing.assert_allclose(reads(few, whole), reads(few, whole, kernels={}))
    (stored, *_) = kernels_of(cost(few).profile, few, {
        table.name: Choice(whole, (0,)) for table in few.tables
    })  # fmt: skip
    assert next(iter(stored.ms)) == "numba"


def test_tables_that_fbgemm_cannot_serve_are_not_priced_by_it():
    many = replace(make_task(world_size=2, rows=(4000,), dim=6), batch_size=100_000)
    whole = Shape("B", "columns")  # 6 columns are not a multiple of 4
    np.testing.assert_allclose(reads(many, whole), reads(many, whole, kernels={}))
    split = Shape("S(1)", "columns", (1, 2))  # the rows' state spans ranks
    wide = replace(make_task(world_size=2, rows=(4000,), dim=16), batch_size=100_000)
    np.testing.assert_allclose(reads(wide, split), reads(wide, split, kernels={}))
    requested = replace(wide, kernel="fbgemm")  # torch then stores this table
    factor = (100_000 * 4e-4 + 800_000 * 4e-5) / (0.1 + 100_000 * 1e-4 + 800_000 * 1e-5)
    np.testing.assert_allclose(reads(requested, split), reads(wide, split) * factor)


@pytest.mark.parametrize("kernel", ["numba", "torch"])
def test_a_table_may_request_its_own_kernel(kernel):
    first = replace(TASK.tables[0], kernel=kernel)
    output = replace(TASK.outputs[0], tables=(first, *TASK.tables[1:]))
    task, whole = replace(TASK, outputs=(output,)), Shape("B", "columns")
    requested = replace(TASK, kernel=kernel)
    np.testing.assert_allclose(reads(task, whole), reads(requested, whole))


def test_the_kernels_of_a_plans_storages_are_compared():
    world = (0, 1)
    plan = {
        "t0": Choice(Shape("S(0)", "unique", (2, 1)), world),
        "t1": Choice(Shape("B", "columns"), (1,)),
    }
    storages = kernels_of(cost(TASK).profile, TASK, plan)
    assert sorted(storage.tables for storage in storages) == [("t0",), ("t1",)]
    for storage in storages:
        assert list(storage.ms.values()) == sorted(storage.ms.values())
        assert set(storage.ms) == {"numba", "torch", "fbgemm"}
    assert kernels_of(cost(TASK, {}).profile, TASK, plan) == []


def test_a_profile_keeps_the_order_of_kernels(tmp_path):
    profile = replace(empty_profile(2, "gloo"), kernels=PRICES)
    profile.save(tmp_path / "profile.json")
    again = load(tmp_path / "profile.json")
    assert {name: dict(kernels) for name, kernels in again.kernels.items()} == PRICES
    assert list(again.kernels["rowwise_adagrad"]) == list(PRICES["rowwise_adagrad"])
