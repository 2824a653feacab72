"""Tests that stochastic rounding picks a neighboring value, is unbiased, stays in range, and is
equal in any layout.
"""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from sbpflow.embedding.plan.tables import HALF_DTYPES, Shard, TableConfig
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.embedding.storage.lookup import Lookup
from sbpflow.embedding.storage.rounding import RowNoise, round_randomly
from sbpflow.embedding.storage.torch_storage import TorchStorage
from tests.embedding.cases import Spec, join_outputs, join_tables, train
from tests.embedding.test_equality import ALL, make_case

CPU = torch.device("cpu")
ROWS = torch.arange(40_000)


def noise_of(num_rows: int, dim: int, *cut: int, seed: int = 1) -> RowNoise:
    """Return the rounding noise of a table or, with ``cut``, of its rows cut[0]:cut[1] and columns
    cut[2]:cut[3], stored after the rows of another table.
    """
    table = TableConfig(name="t", features=("t",), num_rows=num_rows, dim=dim)
    row_start, row_stop, col_start, col_stop = cut or (0, num_rows, 0, dim)
    columns = {"col_start": col_start, "col_stop": col_stop}
    other = Shard(table=replace(table, name="u"), rank=0, row_start=0, row_stop=7, **columns)
    rows = {"row_start": row_start, "row_stop": row_stop}
    mine = Shard(table=table, rank=0, **rows, **columns, base=7 if cut else 0)
    return RowNoise([other, mine] if cut else [mine], seed, CPU)


def test_noise_depends_on_the_element_and_not_on_its_store():
    whole = noise_of(50, 10).draw(torch.arange(50), 10, 3)
    assert whole.min() >= 0
    assert whole.max() <= 0xFFFF
    for first, last in ((0, 10), (3, 9), (4, 8), (6, 7)):
        part = noise_of(50, 10, 20, 45, first, last)
        drawn = part.draw(torch.arange(7, 32), last - first, 3)
        assert torch.equal(drawn, whole[20:45, first:last])
    others = [
        noise_of(50, 10).draw(torch.arange(50), 10, 4),  # another step
        noise_of(50, 10, seed=2).draw(torch.arange(50), 10, 3),  # another seed
        noise_of(50, 10, 0, 50, 0, 10).draw(torch.arange(7), 10, 3),  # another table
    ]
    for other in others:  # 500 draws from 65,536 values: a few can coincide
        assert (other == whole[: len(other)]).sum() <= 3


def test_noise_is_uniform_and_uncorrelated():
    noise = noise_of(40_000, 8).draw(ROWS, 8, 5).double()
    # The limits are five standard errors of the mean of 320,000 samples and of the correlation of
    # 40,000 samples.
    assert abs(float(noise.mean()) - 32767.5) < 5 * 65536 / 12**0.5 / 320_000**0.5
    correlation = np.corrcoef(noise.T.numpy()) - np.eye(8)
    assert np.abs(correlation).max() < 5 / 40_000**0.5
    steps = [noise_of(40_000, 8).draw(ROWS, 1, step).double().view(-1) for step in (1, 2, 3)]
    correlation = np.corrcoef(torch.stack(steps).numpy()) - np.eye(3)
    assert np.abs(correlation).max() < 5 / 40_000**0.5


LAYOUTS = {
    "dp": ("dp", "dp", {}),
    "1": ("reduce", "columns", {}),
    "2": ("reduce", "reduce", {}),
    "3": ("unique", "unique", {}),
    "mixed": (
        "reduce",
        "columns",
        {"deep_a": Spec("S(0)", "unique"), "deep_b": Spec("B", "local"), "wide_b": ALL["unique"]},
    ),
}


@pytest.mark.few(8)
@pytest.mark.parametrize("rule", ["sgd", "rowwise_adagrad"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_rows_are_rounded_equally_in_any_layout(ranks, dtype, name, rule):
    """The order of float64 sums hardly ever changes a rounding, so stored rows are bit-equal."""
    wide, deep, changes = LAYOUTS[name]
    case = replace(make_case("dp", "dp", rule), row_dtype=dtype)
    (alone,) = ranks(1, train, case)
    want = join_tables(case, [alone])
    case = replace(make_case(wide, deep, rule, **changes), row_dtype=dtype)
    for world_size in (1, 2, 3):
        if world_size == 3 and find_spec("numba"):
            case = replace(case, kernel="numba")
        results = ranks(world_size, train, case)
        for table, (weights, _) in join_tables(case, results).items():
            np.testing.assert_array_equal(weights, want[table][0], err_msg=table)
        for step, first in zip(join_outputs(results), join_outputs([alone]), strict=True):
            for output, value in first.items():
                np.testing.assert_allclose(step[output], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", LAYOUTS)
def test_float32_losses_differ_only_by_summation_order(ranks, name):
    """In a different summation order, about one weight in 1e5 is rounded to its other neighbor in
    bf16, at most 5e-4 away for weights below 0.1. The mean of an output changes by less than 1e-5.
    """
    wide, deep, changes = LAYOUTS[name]
    options = {"row_dtype": torch.bfloat16, "dtype": torch.float32}
    (alone,) = ranks(1, train, replace(make_case("dp", "dp", "adagrad"), **options))
    case = replace(make_case(wide, deep, "adagrad", **changes), **options)
    for world_size in (2, 3):
        steps = join_outputs(ranks(world_size, train, case))
        for step, first in zip(steps, join_outputs([alone]), strict=True):
            for output, value in first.items():
                assert abs(step[output].mean() - value.mean()) < 1e-5


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_rounding_is_to_a_neighbor_and_unbiased(dtype):
    values = torch.tensor([1.0, 1.0001, -0.3333, 3e4, 1e-3, 0.0]).repeat(40_000, 1)
    rounded = round_randomly(values, dtype, noise_of(40_000, 6).draw(ROWS, 6, 1)).float()
    step = values.abs().clamp(min=1e-30) * torch.finfo(dtype).eps
    assert ((rounded - values).abs() <= step).all()
    # Each of the 40,000 samples is one of two neighbors, a step of the dtype apart, so the standard
    # deviation is at most half a step. Five standard errors of the mean are at most 0.0125 steps.
    assert ((rounded.mean(0) - values[0]).abs() <= 0.0125 * step[0]).all()
    assert (rounded[:, [0, 5]] == values[:, [0, 5]]).all()


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_infinities_stay_infinite_and_finite_values_stay_finite(dtype):
    top = torch.finfo(dtype).max
    values = torch.tensor([float("inf"), float("-inf"), float("nan"), top, -top])
    rounded = round_randomly(values, dtype, torch.full((5,), 0xFFFF, dtype=torch.int32)).float()
    assert torch.equal(rounded[[0, 1, 3, 4]], values[[0, 1, 3, 4]])
    assert rounded[2].isnan()


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_steps_below_half_a_unit_accumulate(dtype):
    rule = sparse_optimizer("sgd", lr=1e-4)
    storage = TorchStorage(
        64,
        64,
        dim=64,
        optimizer=rule,
        dtype=torch.float32,
        row_dtype=dtype,
        device=CPU,
        noise=noise_of(64, 64),
    )
    storage.weights.fill_(1.0)
    lookup = Lookup(torch.arange(64))
    for step in range(1, 101):
        storage.update(lookup, torch.ones(64, 64), 1e-4, step)
    # Weights start at 1.0 and take 100 steps of 1e-4; rounding to nearest would leave them at 1.0.
    assert float(storage.weights.float().mean()) == pytest.approx(0.99, abs=1e-3)
