"""Tests that updates whose learning rate and step are in device memory equal updates with host
numbers.
"""

import pytest
import torch

from sbpflow.embedding.plan.tables import Shard, TableConfig
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.embedding.storage.lookup import Lookup
from sbpflow.embedding.storage.rounding import RowNoise
from sbpflow.embedding.storage.torch_storage import TorchStorage

ROWS, WIDTH = 23, 5
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RULES = {
    "sgd": sparse_optimizer("sgd", lr=0.1, weight_decay=0.3),
    "adagrad": sparse_optimizer("adagrad", lr=0.1),
    "rowwise_adagrad": sparse_optimizer("rowwise_adagrad", lr=0.1),
    "lazy_adam": sparse_optimizer("lazy_adam", lr=0.1),
    "ftrl": sparse_optimizer("ftrl", lr=0.1, beta=1.0, l1=0.01, l2=0.1),
}


def noise() -> RowNoise:
    table = TableConfig(name="t", features=("t",), num_rows=ROWS, dim=WIDTH)
    shard = Shard(
        table=table, rank=0, row_start=0, row_stop=ROWS, col_start=0, col_stop=WIDTH, base=0
    )
    return RowNoise([shard], 7, DEVICE)


def storages(optimizer, dtype, row_dtype=None, kind=TorchStorage):
    """Return two equal storages; the second keeps its learning rate and step number on the
    device.
    """
    start = torch.rand(ROWS, WIDTH, dtype=dtype) - 0.5
    made = []
    for _ in range(2):
        storage = kind(
            ROWS,
            WIDTH,
            dim=WIDTH,
            optimizer=optimizer,
            dtype=dtype,
            device=DEVICE,
            row_dtype=row_dtype,
            noise=noise() if row_dtype else None,
            fixed_size=True,
        )
        storage.weights.copy_(start)
        made.append(storage)
    made[1].keep_numbers()
    return made


def update_both(made, steps=(1, 2, 7)):
    for step in steps:
        lookup = Lookup(torch.randint(0, ROWS, (40,), device=DEVICE))
        grads = torch.randn(40, WIDTH, dtype=made[0].dtype, device=DEVICE)
        for storage in made:
            storage.update(lookup, grads, 0.1 / step, step)


@pytest.mark.parametrize("rule", RULES)
def test_device_numbers_give_equal_steps(rule):
    made = storages(RULES[rule], torch.float64)
    update_both(made)
    host, device = made
    # A fused multiply-add rounds once instead of twice.
    torch.testing.assert_close(device.weights, host.weights, rtol=1e-13, atol=1e-13)
    for name, state in host.state.items():
        assert torch.equal(device.state[name], state)


def test_device_numbers_give_equal_rounding():
    rows = torch.arange(ROWS, device=DEVICE)
    by_number = noise().draw(rows, WIDTH, 123_456_789)
    assert torch.equal(
        noise().draw(rows, WIDTH, torch.tensor(123_456_789, device=DEVICE)), by_number
    )
    made = storages(RULES["ftrl"], torch.float32, torch.bfloat16)  # FTRL's learning rate is fixed
    update_both(made)
    assert torch.equal(made[0].weights, made[1].weights)


@pytest.mark.few(2)
@pytest.mark.parametrize("rule", RULES)
def test_triton_gives_equal_steps_with_device_numbers(rule):
    pytest.importorskip("triton")
    from sbpflow.embedding.storage.triton_storage import TritonStorage

    made = storages(RULES[rule], torch.float32, torch.bfloat16, TritonStorage)
    update_both(made)
    host, device = made
    assert torch.equal(device.weights, host.weights)
    for name, state in host.state.items():
        assert torch.equal(device.state[name], state)
