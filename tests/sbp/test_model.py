"""Tests that a small Wide & Deep on global tensors gives the same losses and weights on any number
of ranks.

Only the layouts differ: the schemes of the WDL article, and an MLP with column-parallel and
row-parallel layers.
"""

import pytest
import torch

from sbpflow.boxing.dry_run import DryBoxing
from sbpflow.boxing.executor import Boxing
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import parse_nd_sbp
from sbpflow.tensor import ops
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.tensor.gradient_sync import GradientSync
from tests.meter import Meter

BATCH, FIELDS, ROWS, WIDTH, DENSE, HIDDEN = 11, 3, 9, 5, 4, 8
STEPS = 4

# ids, wide table, deep table, first weight, first bias, second weight
LAYOUTS = {
    "dp": ("S(0)", "B", "B", "B", "B", "B"),
    "scheme 1": ("B", "S(0)", "S(1)", "B", "B", "B"),
    "scheme 2": ("B", "S(0)", "S(0)", "B", "B", "B"),
    "column then row": ("B", "S(0)", "S(0)", "S(0)", "S(0)", "S(1)"),
    "row then column": ("S(0)", "B", "B", "S(1)", "B", "S(0)"),
}


def _model(x, ids, dense, seed=None):
    """Return the logits ([BATCH, 1]); ops insert all conversions except the two for the vectors."""
    deep = ops.gather(x["deep"], ids, id="deep").to("S(0)", id="deep/vectors")
    features = ops.concat([ops.flatten(deep, 1), dense], 1)
    hidden = ops.relu(ops.linear(features, x["w1"], x["b1"], id="mlp.0"))
    hidden = ops.dropout(hidden, 0.0 if seed is None else 0.3, seed or 0)
    logit = ops.linear(hidden, x["w2"], x["b2"], id="mlp.1")
    wide = ops.reduce_sum(ops.gather(x["wide"], ids, id="wide"), [1])
    return ops.add(logit, wide.to("S(0)", id="wide/vectors"), id="logits")


def _parameters(lay, layouts):
    _, wide, deep, w1, b1, w2 = layouts
    inputs = FIELDS * WIDTH + DENSE
    shapes = {
        "wide": ((ROWS, 1), wide),
        "deep": ((ROWS, WIDTH), deep),
        "w1": ((HIDDEN, inputs), w1),
        "b1": ((HIDDEN,), b1),
        "w2": ((1, HIDDEN), "B" if w2 == "S(0)" else w2),
        "b2": ((1,), "B"),
    }
    return {
        name: lay(torch.randn(shape) * 0.3, sbp).requires_grad_()
        for name, (shape, sbp) in shapes.items()
    }


def _layer(boxing, device):
    """Return a function that makes a global tensor from values known on every rank."""
    line = Placement.line(PLACED[device.type], boxing.world.size)

    def lay(value, sbp):
        value = value if value.dtype == torch.int64 else value.double()
        return GlobalTensor.from_full(value.to(device), Layout(line, parse_nd_sbp(sbp)), boxing)

    return lay


PLACED = {"cpu": "cpu", "cuda": "cuda", "meta": "cpu"}


def _step(lay, parameters, sync, ids_sbp, seed=None):
    """Run one forward and backward pass; the gradients have the layouts of their parameters."""
    ids = lay(torch.randint(0, ROWS, (BATCH, FIELDS)), "S(0)").to(ids_sbp, id="ids")
    dense = lay(torch.randn(BATCH, DENSE), "S(0)")
    labels = lay(torch.randint(0, 2, (BATCH, 1)).float(), "S(0)")
    loss = ops.bce_with_logits(_model(parameters, ids, dense, seed), labels)
    loss.backward()
    sync.run()
    return loss


def train(world, *layouts):
    """Return the losses of STEPS steps of SGD, and the full weights at the end."""
    torch.manual_seed(0)
    lay = _layer(Boxing(world), world.device)
    parameters = _parameters(lay, layouts)
    sync = GradientSync(list(parameters.values()))
    optimizer = torch.optim.SGD([p.part for p in parameters.values()], lr=0.5)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(_step(lay, parameters, sync, layouts[0]).item())
        optimizer.step()
    return losses, [p.full().cpu().numpy() for p in parameters.values()]


@pytest.mark.few(5)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("layouts", LAYOUTS.values(), ids=LAYOUTS)
def test_wide_and_deep_equals_one_rank(ranks, world_size, layouts):
    """Values are float64; the bound covers sums in a different order over four steps."""
    ((losses, weights),) = ranks(1, train, *LAYOUTS["dp"])
    assert losses[0] != losses[-1]
    for other_losses, other_weights in ranks(world_size, train, *layouts):
        assert losses == pytest.approx(other_losses, rel=1e-12)
        for mine, theirs in zip(weights, other_weights, strict=True):
            assert abs(mine - theirs).max() < 1e-12


def _traffic(world, *layouts):
    """Return the logged traffic of one step, after checking that it agrees with the calls to
    c10d.
    """
    lay = _layer(Boxing(world), world.device)
    parameters = _parameters(lay, layouts)
    sync = GradientSync(list(parameters.values()))
    world.log.records.clear()
    with Meter() as meter:
        _step(lay, parameters, sync, layouts[0], seed=1)
    records = world.log.records
    assert [record.collective for record in records] == meter.names
    assert sum(r.bytes_sent for r in records) == pytest.approx(meter.bytes_sent, abs=64)
    return [(r.step_id, r.collective, r.group, r.bytes_sent) for r in records]


EXPECTED = {
    "dp": [("dense/bwd/0", "all_reduce")],
    "scheme 1": [
        ("ids/fwd", "all_gather"),
        ("deep/vectors/fwd", "all_to_all"),
        ("wide/vectors/fwd", "all_to_all"),
        ("wide/vectors/bwd", "all_gather"),
        ("deep/vectors/bwd", "all_to_all"),
        ("dense/bwd/0", "all_reduce"),
    ],
    "scheme 2": [
        ("ids/fwd", "all_gather"),
        ("deep/vectors/fwd", "all_to_all"),
        ("wide/vectors/fwd", "all_to_all"),
        ("wide/vectors/bwd", "all_gather"),
        ("deep/vectors/bwd", "all_gather"),
        ("dense/bwd/0", "all_reduce"),
    ],
}


@pytest.mark.parametrize("scheme", EXPECTED)
def test_a_scheme_runs_exactly_its_conversions(ranks, scheme):
    for ran in ranks(3, _traffic, *LAYOUTS[scheme]):
        assert [(step_id, collective) for step_id, collective, _, _ in ran] == EXPECTED[scheme]


@pytest.mark.parametrize("layouts", LAYOUTS.values(), ids=LAYOUTS)
def test_dry_runs_predict_the_log(ranks, layouts):
    """The log contains the ids, collectives, groups, and bytes on every rank, for the forward and
    backward passes, with dropout.
    """
    for rank, ran in enumerate(ranks(3, _traffic, *layouts)):
        boxing = DryBoxing(3, rank)
        lay = _layer(boxing, torch.device("meta"))
        parameters = _parameters(lay, layouts)
        sync = GradientSync(list(parameters.values()))
        boxing.trace.clear()
        _step(lay, parameters, sync, layouts[0], seed=1)
        assert ran == [
            (step.id, step.collective, step.group_of(rank), step.bytes_sent(rank))
            for step in boxing.trace
            if step.groups
        ]
