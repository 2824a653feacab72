"""Rounding at random: to a neighbour, right on average, and never out of range."""

import pytest
import torch

from sbpflow.embedding.plan.optimizer import SparseOptimizer
from sbpflow.embedding.storage.access import Access
from sbpflow.embedding.storage.rounding import HALF_DTYPES, round_randomly
from sbpflow.embedding.storage.torch_storage import TorchStorage


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_values_go_to_a_neighbour_and_are_right_on_average(dtype):
    generator = torch.Generator().manual_seed(1)
    values = torch.tensor([1.0, 1.0001, -0.3333, 3e4, 1e-3, 0.0]).repeat(40_000, 1)
    rounded = round_randomly(values, dtype, generator).float()
    step = values.abs().clamp(min=1e-30) * torch.finfo(dtype).eps
    assert ((rounded - values).abs() <= step).all()
    # The mean of 40,000 draws, each within a step: five standard errors are 0.0125 steps.
    assert ((rounded.mean(0) - values[0]).abs() <= 0.0125 * step[0]).all()
    assert (rounded[:, [0, 5]] == values[:, [0, 5]]).all()


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_infinities_stay_and_finite_values_stay_finite(dtype):
    top = torch.finfo(dtype).max
    values = torch.tensor([float("inf"), float("-inf"), float("nan"), top, -top])
    rounded = round_randomly(values, dtype, torch.Generator().manual_seed(2)).float()
    assert torch.equal(rounded[[0, 1, 3, 4]], values[[0, 1, 3, 4]])
    assert rounded[2].isnan()


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_steps_smaller_than_half_a_unit_add_up(dtype):
    rule = SparseOptimizer(name="sgd", lr=1e-4)
    storage = TorchStorage(
        64,
        64,
        dim=64,
        optimizer=rule,
        dtype=torch.float32,
        row_dtype=dtype,
        device=torch.device("cpu"),
    )
    storage.weights.fill_(1.0)
    access = Access(torch.arange(64))
    for _ in range(100):
        storage.update(access, torch.ones(64, 64), 1e-4)
    # 100 steps of 1e-4 from 1.0; rounding to the nearest would leave every weight at 1.0.
    assert float(storage.weights.float().mean()) == pytest.approx(0.99, abs=1e-3)
