"""Tests reductions in dtypes whose sums may overflow and in dtypes without addition."""

import pytest
import torch
import torch.nn.functional as F

from sbpflow.boxing.executor import Boxing
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import parse_nd_sbp
from sbpflow.tensor import ops
from sbpflow.tensor.global_tensor import GlobalTensor
from tests import oracle

HALVES = ["float16", "bfloat16"]
# Each of the two ranks contributes one half-precision term, rounded once, with an error of at most
# one unit in the last place.
HALF_ULPS = 2.0


def _lay_out(world, full, sbp, boxing):
    layout = Layout(Placement.line("cpu", world.size), parse_nd_sbp(sbp))
    return GlobalTensor.from_full(full, layout, boxing)


def _mean(world, sbp, dtype, dims):
    """Return the mean, the gradient, and the bytes that this rank sent."""
    boxing = Boxing(world)
    dtype = getattr(torch, dtype)
    full = torch.full((4096, 16), 2.0, dtype=dtype)
    full[::3] = 3.0
    x = _lay_out(world, full, sbp, boxing).requires_grad_()
    y = ops.reduce_mean(x, dims)
    assert y.dtype == dtype
    world.log.records.clear()
    world.log.enabled = True
    whole = y.to("B")
    world.log.enabled = False
    sent = sum(record.bytes_sent for record in world.log.records)
    y.backward(GlobalTensor.from_full(torch.ones(y.shape, dtype=dtype), whole.layout, boxing))
    gradient = GlobalTensor(x.part.grad, x.layout.dual(), x.shape, boxing).full()
    return whole.part.detach().double().numpy(), gradient.double().numpy(), sent


@pytest.mark.parametrize("dims", [None, 0, 1], ids=str)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("sbp", ["S(0)", "S(1)", "B", "P", "S(0)[4000, 96]"])
def test_a_mean_of_half_types_does_not_overflow(ranks, sbp, dtype, dims):
    full = torch.full((4096, 16), 2.0, dtype=torch.float64)
    full[::3] = 3.0
    mean = full.mean() if dims is None else full.mean(dims)
    count = full.numel() // mean.numel()
    eps = torch.finfo(getattr(torch, dtype)).eps
    for got, gradient, _ in ranks(2, _mean, sbp, dtype, dims):
        assert torch.allclose(torch.from_numpy(got), mean, rtol=HALF_ULPS * eps, atol=0.0)
        # 1 / 65536 is subnormal in float16 but exact, because it is a power of two.
        assert torch.equal(torch.from_numpy(gradient), torch.full_like(full, 1 / count))


def test_terms_of_a_mean_have_its_dtype(ranks):
    for _, _, sent in ranks(2, _mean, "S(0)", "float16", 0):
        assert sent == 16 * 2  # each rank sends half of its 16 terms, then half of the result


def _loss(world, sbp):
    boxing = Boxing(world)
    logits, labels = _logits()
    x, y = (_lay_out(world, full, sbp, boxing) for full in (logits, labels))
    return ops.bce_with_logits(x, y).full().double().item()


def _logits():
    logits = torch.full((131072,), 3.0, dtype=torch.float16)
    return logits, (torch.arange(131072) % 64 == 0).to(torch.float16)


@pytest.mark.parametrize("sbp", ["S(0)", "B"])
def test_a_loss_of_many_half_logits_is_finite(ranks, sbp):
    logits, labels = _logits()
    expected = F.binary_cross_entropy_with_logits(logits.double(), labels.double()).item()
    assert F.binary_cross_entropy_with_logits(logits, labels, reduction="sum").isinf()
    for loss in ranks(2, _loss, sbp):
        # The loss of each element is rounded, too; most losses are equal, so errors do not cancel.
        assert loss == pytest.approx(expected, rel=2 * HALF_ULPS * torch.finfo(torch.float16).eps)


def _flags():
    return torch.tensor([[0, 0, 1], [0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0]]).bool()


def _any(world, nd_sbp, ranks, dims, dtype):
    boxing = Boxing(world)
    layout = Layout(Placement.of("cpu", ranks), parse_nd_sbp(nd_sbp))
    full = _flags().to(getattr(torch, dtype))
    y = ops.reduce_max(GlobalTensor.from_full(full, layout, boxing), dims)
    assert not oracle.has_partial(y.layout)
    return y.full().tolist()


@pytest.mark.parametrize("dims", [None, 0, 1], ids=str)
@pytest.mark.parametrize(
    ("ranks_", "nd_sbp"),
    [
        ([0, 1], "S(0)"),
        ([0, 1], "S(1)"),
        ([0, 1], "B"),
        ([0, 1], "S(0)[5, 0]"),
        ([[0, 1], [2, 3]], "(S(0), S(1))"),
        ([[0, 1], [2, 3]], "(B, S(0)[4, 1])"),
    ],
)
def test_bool_maximum_without_partial(ranks, ranks_, nd_sbp, dims):
    """bool does not support P(max), so another layout is chosen."""
    expected = _flags().amax(() if dims is None else dims).tolist()
    size = 4 if isinstance(ranks_[0], list) else 2
    assert ranks(size, _any, nd_sbp, ranks_, dims, "bool") == [expected] * size
