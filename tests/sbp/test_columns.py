"""Tests conversions between parts whose columns have another order than the full tensor's."""

from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from sbpflow.boxing import program
from sbpflow.boxing.columns import block_width
from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import plan_boxing
from sbpflow.errors import SbpError
from sbpflow.runtime.ranks.shared_memory import SharedChannel
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Partial, Split

# Widths of the ranks' columns, and the place of each column in the samples' order.
ORDERS = {
    "dealt in turn": ((6, 4), (0, 1, 4, 5, 8, 9, 2, 3, 6, 7)),
    "columns of every table": ((4, 4), (0, 1, 4, 5, 2, 3, 6, 7)),
    "any tables": ((5, 3, 4), (3, 4, 0, 8, 9, 1, 2, 5, 6, 7, 10, 11)),
    "single columns in reverse": ((3, 2), (4, 3, 2, 1, 0)),
    "a rank without columns": ((3, 0, 2), (2, 3, 4, 0, 1)),
    "blocks of two widths at equal distances": ((5, 4), (0, 1, 3, 6, 7, 2, 4, 5, 8)),
}
PATHS = ["directly", "apart", "through buffers"]


def convert(world, path, order, batch, dtype_name):
    """Convert vectors to samples and back; return both results, and what they should be."""
    widths, places = ORDERS[order]
    dtype = getattr(torch, dtype_name)
    line = Placement.line("cpu", world.size)
    src, dst = Layout(line, (Split(1, widths),)), Layout(line, (Split(0),))
    # in the order of the samples
    values = torch.arange(batch * len(places)).view(batch, len(places)).to(dtype)
    dealt = values[:, list(places)]
    shape = tuple(values.shape)
    vectors = dealt[src.part_slices(shape, world.rank)]
    samples = values[dst.part_slices(shape, world.rank)]
    there = plan_boxing(src, dst, shape, dtype, id="there", backend="gloo")
    back = plan_boxing(dst, src, shape, dtype, id="back", backend="gloo")
    there = (*there[:-1], replace(there[-1], dst_columns=places))
    back = (replace(back[0], src_columns=places), *back[1:])
    with ExitStack() as stack:
        if path != "through buffers":
            stack.enter_context(patch.object(program, "APART_BYTES", 0))
        if path != "directly":
            stack.enter_context(patch.object(SharedChannel, "connects", lambda *_: False))
        boxing = Boxing(world)
        out = boxing.run(there, vectors)
        # A transposed gradient is not contiguous.
        returned = boxing.run(back, samples.t().contiguous().t())
    return torch.equal(out, samples), torch.equal(returned, vectors), out.dtype == dtype


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("order", ORDERS)
def test_columns_are_moved_to_their_places(ranks, order, path):
    size = len(ORDERS[order][0])
    for batch, dtype in [(7, "float32"), (8, "bfloat16"), (1, "float64"), (0, "float32")]:
        assert ranks(size, convert, path, order, batch, dtype) == [(True, True, True)] * size


def sum_on_grid(world, batch):
    """Convert partial sums on a grid of 2 x 2 ranks to samples."""
    places = (0, 1, 4, 5, 2, 3, 6, 7)
    grid = Placement("cpu", (0, 1, 2, 3), (2, 2))
    src, dst = Layout(grid, (Partial(), Split(1))), Layout(Placement.line("cpu", 4), (Split(0),))
    values = torch.arange(batch * 8.0).view(batch, 8)
    dealt = values[:, list(places)]
    part = dealt[:, :4] if world.rank % 2 == 0 else dealt[:, 4:]
    steps = plan_boxing(src, dst, (batch, 8), values.dtype, id="sum", backend="gloo")
    steps = (*steps[:-1], replace(steps[-1], dst_columns=places))
    out = Boxing(world).run(steps, part.contiguous())
    return torch.equal(out, 2 * values[dst.part_slices((batch, 8), world.rank)])


def test_partial_sums_on_a_grid(ranks):
    assert ranks(4, sum_on_grid, 9) == [True] * 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"src_columns": (1, 0, 2)},  # the source splits the columns
        {"dst_columns": (0, 1)},
        {"dst_columns": (0, 0, 1)},
        {"src": Layout(Placement.line("cpu", 2), (Split(0),)), "src_columns": (0, 1, 2)}
        | {"dst_columns": (1, 0, 2)},
    ],
    ids=["split columns", "too few", "one twice", "both"],
)
def test_wrong_orders_of_columns_are_rejected(wrong):
    line = Placement.line("cpu", 2)
    src, dst = Layout(line, (Split(1),)), Layout(line, (Split(0),))
    (step,) = plan_boxing(src, dst, (4, 3), torch.float32, id="x", backend="gloo")
    with pytest.raises(SbpError, match=r"^x: "):
        replace(step, **wrong)


@pytest.mark.parametrize(
    ("order", "width"),
    [
        ((), 1),
        (range(12), 12),
        ((4, 5, 6, 7, 0, 1, 2, 3), 4),
        ((0, 1, 4, 5, 2, 3, 6, 7), 2),
        ((0, 1, 2, 3, 6, 7, 4, 5), 2),
        ((2, 3, 4, 0, 1), 1),
        ((1, 0), 1),
        ((3, 4, 5, 0, 1, 2, 6), 1),
    ],
)
def test_columns_move_in_the_widest_blocks(order, width):
    order = tuple(order)
    assert block_width(order) == width
    blocks = [order[start : start + width] for start in range(0, len(order), width)]
    assert all(b == tuple(range(b[0], b[0] + width)) and b[0] % width == 0 for b in blocks)
