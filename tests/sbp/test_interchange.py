"""Tests conversion to and from DTensor, with DTensor as a second oracle for the cases it
supports.
"""

import itertools

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import Partial as DPartial

from sbpflow.boxing.executor import Boxing
from sbpflow.errors import SbpError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Partial, Split, parse_nd_sbp
from sbpflow.tensor.dtensor import chunk_sizes, from_dtensor, from_mesh, to_dtensor, to_mesh
from sbpflow.tensor.global_tensor import GlobalTensor
from tests import oracle
from tests.sbp.conversions import check_parts, one_axis, whole_numbers

THEIRS = {"S": Shard, "B": Replicate, "P": DPartial}


def _lay_out(world, boxing, full, layout):
    parts = oracle.shares(full, layout)
    part = parts.get(world.rank, full.new_empty(0))
    return GlobalTensor.from_local(part, layout, tuple(full.shape), boxing)


def _placements(nd_sbp):
    return [THEIRS[str(s)[0]](*([s.dim] if isinstance(s, Split) else [])) for s in nd_sbp]


def _out_and_back(world, grid, nd_sbps, shape):
    boxing = Boxing(world)
    placement = Placement.of("cpu", grid)
    mesh = to_mesh(placement)
    assert from_mesh(mesh) == placement
    full = whole_numbers(shape, torch.float64)
    for nd_sbp in nd_sbps:
        layout = Layout(placement, nd_sbp)
        theirs = to_dtensor(_lay_out(world, boxing, full, layout), mesh)
        assert list(theirs.placements) == _placements(nd_sbp), nd_sbp
        assert tuple(theirs.shape) == shape
        if world.rank in placement:
            assert torch.equal(theirs.full_tensor(), full), nd_sbp
        ours = from_dtensor(theirs, boxing)
        check_parts(world, ours.part, ours.layout, full, f"{nd_sbp} through a DTensor")
        assert torch.equal(ours.full(), full)


@pytest.mark.parametrize("shape", [(6, 8), (5, 7), (13, 3)], ids=str)
@pytest.mark.parametrize("line", [[0, 1, 2], [0, 2]], ids=str)
def test_round_trips_on_a_line(ranks, line, shape):
    ranks(3, _out_and_back, line, one_axis([0, 1]), shape)


def test_round_trips_on_a_grid(ranks):
    values = [(a, b) for (a,), (b,) in itertools.product(one_axis([0, 1]), repeat=2)]
    ranks(4, _out_and_back, [[0, 1], [2, 3]], values, (8, 12))


def test_chunk_sizes_are_those_of_torch():
    for size, parts in itertools.product(range(14), range(1, 6)):
        pieces = [len(piece) for piece in torch.arange(size).chunk(parts)] if size else []
        assert list(chunk_sizes(size, parts)) == pieces + [0] * (parts - len(pieces))


def _from_theirs(world):
    boxing = Boxing(world)
    mesh = to_mesh(Placement.line("cpu", 4))
    full = whole_numbers((5, 3), torch.float64)
    theirs = distribute_tensor(full, mesh, [Shard(0)])
    ours = from_dtensor(theirs, boxing)
    assert ours.layout.nd_sbp == (Split(0, (2, 2, 1, 0)),)
    assert torch.equal(ours.full(), full)


def test_dtensor_chunks_become_explicit_sizes(ranks):
    ranks(4, _from_theirs)


def _short(world):
    """Convert from DTensor and back when a dim is smaller than the number of ranks, which DTensor
    allows.
    """
    boxing = Boxing(world)
    line = Placement.line("cpu", 4)
    mesh = to_mesh(line)
    for count in range(8):
        full = whole_numbers((count, 3), torch.float64)
        theirs = distribute_tensor(full, mesh, [Shard(0)])
        ours = from_dtensor(theirs, boxing)
        check_parts(world, ours.part, ours.layout, full, f"{count} rows of a DTensor")
        back = to_dtensor(ours, mesh)
        assert torch.equal(back.to_local(), theirs.to_local())
        assert torch.equal(back.full_tensor(), full)
        mine = GlobalTensor.from_full(full, Layout(line, Split(0, (0, count, 0, 0))), boxing)
        assert torch.equal(to_dtensor(mine, mesh).full_tensor(), full)


def test_fewer_rows_than_ranks(ranks):
    ranks(4, _short)


def _agree(world, shape):
    """Check that DTensor's redistribute and ``to`` give equal parts for shapes that divide
    evenly.
    """
    boxing = Boxing(world)
    line = Placement.line("cpu", world.size)
    mesh = to_mesh(line)
    full = whole_numbers(shape, torch.float64)
    for (a,), (b,) in itertools.product(one_axis([0, 1]), repeat=2):
        if isinstance(b, Partial):
            continue  # when converting to Partial, DTensor divides by the number of ranks
        ours = _lay_out(world, boxing, full, Layout(line, (a,)))
        theirs = DTensor.from_local(ours.part, mesh, _placements((a,)), run_check=False)
        moved = theirs.redistribute(mesh, _placements((b,))).to_local()
        assert torch.equal(ours.to((b,)).part, moved), f"{a} -> {b}"


@pytest.mark.parametrize("world_size", [2, 4])
def test_conversions_agree_with_dtensor(ranks, world_size):
    ranks(world_size, _agree, (8, 12))


def _unequal_nested(world):
    boxing = Boxing(world)
    grid = Placement.of("cpu", [[0, 1], [2, 3]])
    nested = Layout(grid, parse_nd_sbp("(S(0), S(0))"))
    x = _lay_out(world, boxing, whole_numbers((5, 2), torch.float64), nested)
    to_dtensor(x)


def test_nested_splits_that_dtensor_makes_unequal_are_refused(ranks):
    with pytest.raises(
        AssertionError, match=r"splits dim 0 of \[5, 2\] twice, .*splits the dim at most once"
    ):
        ranks(4, _unequal_nested)


def test_a_mesh_over_other_ranks_is_refused(ranks):
    with pytest.raises(AssertionError, match="convert the tensor with"):
        ranks(2, _other_mesh)


def _other_mesh(world):
    everywhere = Layout(Placement.of("cpu", [0, 1]), (Broadcast(),))
    x = _lay_out(world, Boxing(world), torch.zeros(2, 2), everywhere)
    to_dtensor(x, to_mesh(Placement.of("cpu", [[0, 1]])))


class PartialOfMask(DPartial):
    """A kind of Partial whose parts are not terms, like the private one of torch's embedding."""


def _unknown_placement(world, placement):
    mesh = to_mesh(Placement.line("cpu", 2))
    theirs = DTensor.from_local(torch.ones(2), mesh, [placement], run_check=False)
    with pytest.raises(SbpError, match="has no sbp; first redistribute to Shard or Replicate"):
        from_dtensor(theirs, Boxing(world))


@pytest.mark.parametrize("placement", [DPartial("product"), PartialOfMask()], ids=str)
def test_placements_without_counterpart_are_refused(ranks, placement):
    ranks(2, _unknown_placement, placement)
