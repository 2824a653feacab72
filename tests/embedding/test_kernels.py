"""The two kernels do the same: values, weights and state after several updates."""

import pytest
import torch

from sbpflow.embedding.plan.optimizer import SparseOptimizer
from sbpflow.embedding.storage.access import Access
from sbpflow.embedding.storage.fbgemm_storage import FbgemmStorage
from sbpflow.embedding.storage.torch_storage import TorchStorage

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
    for step in range(9):
        addresses = torch.randint(0, 40, (30,), dtype=torch.int32 if step > 5 else torch.int64)
        offsets = torch.tensor([0, 0, 7, 8, 30, 30]) if step % 2 else None
        weights = torch.rand(30) if step % 3 == 0 else None
        one, two = Access(addresses, offsets, weights), Access(addresses, offsets, weights)
        lr = 0.1 * 0.9**step
        found = plain.lookup(one)
        torch.testing.assert_close(found, fused.lookup(two, lr), rtol=0, atol=1e-5)
        torch.testing.assert_close(found, fused.lookup(two), rtol=0, atol=1e-5)
        grads = torch.randn(one.num_bags, 8)
        if step == 4:  # an update without its lookup, as of rows that other ranks looked up
            two = Access(addresses, offsets, weights)
        plain.update(one, grads, lr, step + 1)
        fused.update(two, grads, lr, step + 1)
    # nine float32 updates of rows up to 4: rounding of a few 1e-7 each
    torch.testing.assert_close(plain.weights, fused.weights, rtol=1e-5, atol=1e-5)
    assert plain.state.keys() == fused.state.keys()
    for name, value in plain.state.items():
        torch.testing.assert_close(value, fused.state[name], rtol=1e-5, atol=1e-5)
    assert torch.equal(plain.weights[40:], start[40:])
    assert torch.equal(fused.weights[40:], start[40:])
