"""Tests gathering from tables with infinite and NaN values."""

import torch
import torch.nn.functional as F

from sbpflow.boxing.executor import Boxing
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Split
from sbpflow.tensor import ops
from sbpflow.tensor.global_tensor import GlobalTensor


def _table_and_cotangent():
    table, cotangent = torch.arange(8.0).view(4, 2), torch.ones(4, 2)
    table[0], table[2] = torch.inf, torch.nan  # the first row of each of two ranks
    cotangent[1], cotangent[3] = torch.inf, torch.nan
    return table, cotangent


def _gathered(world):
    boxing, line = Boxing(world), Placement.line("cpu", world.size)
    everywhere = Layout(line, Broadcast())
    table, cotangent = _table_and_cotangent()
    rows = GlobalTensor.from_full(table, Layout(line, Split(0)), boxing).requires_grad_()
    y = ops.gather(rows, GlobalTensor.from_full(torch.arange(4), everywhere, boxing))
    y.backward(GlobalTensor.from_full(cotangent, everywhere, boxing))
    gradient = GlobalTensor(rows.part.grad, rows.layout, rows.shape, boxing)
    return y.full().numpy(), gradient.full().numpy()


def test_rows_of_other_ranks_do_not_become_nan(ranks):
    """Each rank computes zeros for rows of other ranks, even if its own rows are not finite."""
    table, cotangent = _table_and_cotangent()
    table.requires_grad_()
    y = F.embedding(torch.arange(4), table)
    y.backward(cotangent)
    for got, gradient in ranks(2, _gathered):
        assert torch.equal(torch.from_numpy(got).nan_to_num(), y.detach().nan_to_num())
        assert torch.equal(torch.from_numpy(gradient).nan_to_num(), table.grad.nan_to_num())
