"""A small Wide & Deep on logical tensors: same losses and weights on any number of ranks."""

import pytest
import torch

from sbpflow import ops
from sbpflow.boxing import Boxing
from sbpflow.global_tensor import GlobalTensor
from sbpflow.gradients import GradientSync
from sbpflow.layout import Layout
from sbpflow.placement import Placement
from sbpflow.sbp import Split, parse_nd_sbp

BATCH, FIELDS, ROWS, WIDTH, DENSE, HIDDEN = 11, 3, 9, 5, 4, 8


def _train(world, ids_sbp, table_sbp, w1_sbp, b1_sbp, w2_sbp):
    torch.manual_seed(0)
    boxing = Boxing(world)
    line = Placement.line("cpu", world.size)

    def lay(value, sbp):
        return GlobalTensor.from_full(value.double(), Layout(line, parse_nd_sbp(sbp)), boxing)

    inputs = FIELDS * WIDTH + DENSE
    table = lay(torch.randn(ROWS, WIDTH), table_sbp).requires_grad_()
    wide = lay(torch.randn(ROWS, 1), "S(0)").requires_grad_()
    w1 = lay(torch.randn(HIDDEN, inputs) * 0.3, w1_sbp).requires_grad_()
    b1 = lay(torch.randn(HIDDEN), b1_sbp).requires_grad_()
    w2 = lay(torch.randn(1, HIDDEN), w2_sbp).requires_grad_()
    b2 = lay(torch.randn(1), "B").requires_grad_()
    parameters = [table, wide, w1, b1, w2, b2]
    sync = GradientSync(parameters)
    optimizer = torch.optim.SGD([p.part for p in parameters], lr=0.5)
    losses = []
    for _ in range(4):
        ids_full = torch.randint(0, ROWS, (BATCH, FIELDS))
        dense_full, labels_full = torch.randn(BATCH, DENSE), torch.randint(0, 2, (BATCH, 1))
        split = Layout(line, (Split(0),))
        ids = GlobalTensor.from_full(ids_full, split, boxing).to(ids_sbp)
        dense = GlobalTensor.from_full(dense_full.double(), split, boxing)
        labels = GlobalTensor.from_full(labels_full.double(), split, boxing)
        deep = ops.gather(table, ids).to("S(0)")
        x = ops.concat([ops.reshape(deep, (BATCH, -1)), dense], 1)
        hidden = ops.relu(ops.linear(x, w1, b1))
        logit = ops.linear(hidden, w2, b2)
        shallow = ops.reduce_sum(ops.gather(wide, ids), [1])
        logit = ops.add(logit, shallow.to("S(0)"))
        loss = ops.bce_with_logits(logit, labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        sync.run()
        optimizer.step()
    return losses, [p.full().detach().numpy() for p in parameters]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(
    "layouts",
    [
        ("S(0)", "B", "B", "B", "B"),
        ("B", "S(1)", "B", "B", "B"),
        ("B", "S(0)", "B", "B", "B"),
        ("B", "S(0)", "S(0)", "S(0)", "S(1)"),
    ],
    ids=["dp", "scheme1", "scheme2", "column-then-row"],
)
def test_wide_and_deep_equals_one_rank(ranks, world_size, layouts):
    ((losses, weights),) = ranks(1, _train, "S(0)", "B", "B", "B", "B")
    for other_losses, other_weights in ranks(world_size, _train, *layouts):
        assert losses == pytest.approx(other_losses, rel=1e-10)
        for mine, theirs in zip(weights, other_weights, strict=True):
            assert abs(mine - theirs).max() < 1e-10
