"""The two kernels do the same: values, weights and state after several updates."""

import pytest
import torch

from sbpflow.embedding.optimizers import SparseOptimizer
from sbpflow.embedding.storage import Access, FbgemmStorage, TorchStorage

pytest.importorskip("fbgemm_gpu", reason="FBGEMM is not installed")
CPU = torch.device("cpu")
RULES = [
    SparseOptimizer(name="sgd", lr=0.1),
    SparseOptimizer(name="adagrad", lr=0.1, eps=1e-3, initial_accumulator=0.2),
    SparseOptimizer(name="rowwise_adagrad", lr=0.1, eps=1e-2, initial_accumulator=0.1),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_fbgemm_and_torch_agree(rule):
    torch.manual_seed(0)
    plain = TorchStorage(50, 8, dim=8, optimizer=rule, dtype=torch.float32, device=CPU)
    fused = FbgemmStorage(50, 8, optimizer=rule, device=CPU)
    start = torch.randn(50, 8)
    for storage in (plain, fused):
        storage.weights.copy_(start)
        assert all(bool((s == rule.initial_accumulator).all()) for s in storage.state.values())
    for step in range(6):
        addresses = torch.randint(0, 40, (30,))
        offsets = torch.tensor([0, 0, 7, 8, 30, 30]) if step % 2 else None
        one, two = Access(addresses, offsets), Access(addresses, offsets)
        torch.testing.assert_close(plain.lookup(one), fused.lookup(two), rtol=0, atol=1e-5)
        grads = torch.randn(one.num_bags, 8)
        if step == 4:  # an update without its lookup, as of rows that other ranks looked up
            two = Access(addresses, offsets)
        plain.update(one, grads)
        fused.update(two, grads)
    # six float32 updates of rows up to 4: rounding of a few 1e-7 each
    torch.testing.assert_close(plain.weights, fused.weights, rtol=1e-5, atol=1e-5)
    assert plain.state.keys() == fused.state.keys()
    for name, value in plain.state.items():
        torch.testing.assert_close(value, fused.state[name], rtol=1e-5, atol=1e-5)
    assert torch.equal(plain.weights[40:], start[40:])
    assert torch.equal(fused.weights[40:], start[40:])
