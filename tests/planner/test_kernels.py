"""Kernels measured, and what they change in the price of a table and in a plan's report."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sbpflow.costs.counts import INDEX
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.embedding.storage.choose import StackFacts, choose_kernel, missing_kernels
from sbpflow.planner.calibration.records import empty_profile
from sbpflow.planner.calibration.time_kernels import measure_kernels
from sbpflow.planner.costs.cost import CostModel
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
    return CostModel(profile).of(task)


def reads(task, shape, **given):
    return cost(task, **given).shape_cost(task.tables[0], shape).shards[:, INDEX["read_rows"]]


def test_every_kernel_that_serves_an_optimizer_is_measured_the_one_taken_first():
    shapes = [(200, 4), (2000, 4), (2000, 16)]
    found = measure_kernels(torch.device("cpu"), ["sgd", "ftrl"], shapes, rows=1000)
    assert set(found) == {"sgd", "ftrl"}
    facts = StackFacts(
        width=4,
        optimizer=sparse_optimizer("sgd", lr=0.1),
        dtype=torch.float32,
        row_dtype=torch.float32,
        column_split=False,
        device_type="cpu",
    )
    assert next(iter(found["sgd"])) == choose_kernel("auto", facts, missing_kernels("auto")).name
    assert "fbgemm" not in found["ftrl"]  # has no FTRL
    for prices in found.values():
        assert "torch" in prices
        for price in prices.values():
            assert min(price) >= 0.0
            assert kernel_ms(price, np.array([2000]), np.array([32000]))[0] > 0.0


def test_a_table_is_priced_by_the_fastest_kernel_that_may_serve_it():
    whole = Shape("B", "columns")
    plain = reads(TASK, whole, kernels={})
    # As of 2,000 ids of 8 columns: numba 0.46 ms, which was calibrated, FBGEMM 1.016, torch 1.44.
    np.testing.assert_allclose(reads(TASK, whole), plain)
    asked = replace(TASK, kernel="torch")
    np.testing.assert_allclose(reads(asked, whole), plain * 1.44 / 0.46)
    many = replace(TASK, batch_size=100_000)  # numba 18.1, FBGEMM 1.8
    np.testing.assert_allclose(
        reads(many, whole), reads(many, whole, kernels={}) * 1.8 / 18.1, rtol=1e-6
    )


def test_a_line_that_gives_a_call_nothing_does_not_make_small_batches_free():
    """Of 10 ids torch would be priced at 0.007 ms, where numba's call alone is 0.1."""
    few = replace(TASK, batch_size=10)
    whole = Shape("B", "columns")
    np.testing.assert_allclose(reads(few, whole), reads(few, whole, kernels={}))
    (stored, *_) = kernels_of(cost(few).profile, few, {
        table.name: Choice(whole, (0,)) for table in few.tables
    })  # fmt: skip
    assert next(iter(stored.ms)) == "numba"


def test_what_fbgemm_cannot_serve_is_not_priced_by_it():
    many = replace(make_task(world_size=2, rows=(4000,), dim=6), batch_size=100_000)
    whole = Shape("B", "columns")  # 6 columns are no multiple of 4
    np.testing.assert_allclose(reads(many, whole), reads(many, whole, kernels={}))
    split = Shape("S(1)", "columns", (1, 2))  # its rows' state spans ranks
    wide = replace(make_task(world_size=2, rows=(4000,), dim=16), batch_size=100_000)
    np.testing.assert_allclose(reads(wide, split), reads(wide, split, kernels={}))
    asked = replace(wide, kernel="fbgemm")  # torch serves it then
    factor = (100_000 * 4e-4 + 800_000 * 4e-5) / (0.1 + 100_000 * 1e-4 + 800_000 * 1e-5)
    np.testing.assert_allclose(reads(asked, split), reads(wide, split) * factor)


@pytest.mark.parametrize("kernel", ["numba", "torch"])
def test_a_table_may_ask_for_a_kernel_of_its_own(kernel):
    first = replace(TASK.tables[0], kernel=kernel)
    output = replace(TASK.outputs[0], tables=(first, *TASK.tables[1:]))
    task, whole = replace(TASK, outputs=(output,)), Shape("B", "columns")
    asked = replace(TASK, kernel=kernel)
    np.testing.assert_allclose(reads(task, whole), reads(asked, whole))


def test_a_plan_names_the_kernels_of_its_storages():
    world = (0, 1)
    plan = {
        "t0": Choice(Shape("S(0)", "unique", (2, 1)), world),
        "t1": Choice(Shape("B", "columns"), (1,)),
    }
    found = kernels_of(cost(TASK).profile, TASK, plan)
    assert sorted(one.tables for one in found) == [("t0",), ("t1",)]
    for one in found:
        assert list(one.ms.values()) == sorted(one.ms.values())
        assert set(one.ms) == {"numba", "torch", "fbgemm"}
    assert kernels_of(cost(TASK, {}).profile, TASK, plan) == []


def test_prices_of_kernels_are_kept_in_their_order(tmp_path):
    profile = replace(empty_profile(2, "gloo"), kernels=PRICES)
    profile.save(tmp_path / "profile.json")
    again = load(tmp_path / "profile.json")
    assert {name: dict(one) for name, one in again.kernels.items()} == PRICES
    assert list(again.kernels["rowwise_adagrad"]) == list(PRICES["rowwise_adagrad"])
