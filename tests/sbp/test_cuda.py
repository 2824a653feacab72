"""Tests conversions on CUDA, as on CPU: with one rank, with several ranks over NCCL, and between
CPU and CUDA.

On a machine with one GPU, all NCCL ranks share this GPU; ``tests/ranks.py`` gives each rank its own
host ID.
"""

import itertools
from importlib import import_module

import pytest
import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.runtime.random.streams import stream_key
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Split, parse_nd_sbp
from sbpflow.tensor import ops
from sbpflow.tensor.global_tensor import GlobalTensor
from tests.sbp.conversions import check_conversion, convert_all, one_axis
from tests.sbp.test_model import LAYOUTS, train

SHAPES = [(8, 12), (5, 7), (0, 4)]


@pytest.mark.gpu
def test_one_rank(nccl_ranks):
    nccl_ranks(1, convert_all, [0], [0], one_axis([0, 1]), SHAPES, ["float32", "bfloat16", "int64"])


@pytest.mark.gpu
def test_between_cpu_and_cuda(nccl_ranks):
    nccl_ranks(1, _across_devices, [0], [0])


def _across_devices(world, src_ranks, dst_ranks):
    boxing = Boxing(world)
    for a, b in itertools.product(one_axis([0, 1]), repeat=2):
        for here, there in (("cpu", "cuda"), ("cuda", "cpu")):
            src = Layout(Placement.of(here, src_ranks), a)
            dst = Layout(Placement.of(there, dst_ranks), b)
            check_conversion(world, boxing, src, dst, (5, 7), torch.float64)


def _dropped(world, shape):
    """Return dropout applied to ones, and its gradient."""
    boxing = Boxing(world)
    layout = Layout(Placement.of("cuda", [0]), parse_nd_sbp("B"))
    part = torch.ones(shape, device=world.device, requires_grad=True)
    y = ops.dropout(GlobalTensor(part, layout, shape, boxing), 0.25, 7, id="here")
    y.part.sum().backward()
    return y.part.detach().cpu().numpy(), part.grad.cpu().numpy()


@pytest.mark.gpu
def test_dropout_matches_its_counted_masks(nccl_ranks):
    shape = (300, 70)
    counts = import_module("sbpflow.tensor.ops.dropout")
    key = torch.tensor(stream_key(7, "here"))
    kept = counts.counted(key, shape, (slice(0, 300), slice(0, 70))) < counts.threshold_of(0.25)
    ((y, gradient),) = nccl_ranks(1, _dropped, shape)
    assert (y == torch.where(kept, torch.ones(shape) * (1 / 0.75), 0.0).numpy()).all()
    assert (y == gradient).all()


@pytest.mark.nccl
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "int64", "int32", "int16"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_one_axis(nccl_ranks, world_size, dtype):
    line = list(range(world_size))
    nccl_ranks(world_size, convert_all, line, line, one_axis([0, 1]), SHAPES, [dtype])


@pytest.mark.nccl
@pytest.mark.parametrize(("src", "dst"), [([0, 1], [1, 2]), ([0], [0, 1, 2]), ([2, 0, 1], [1])])
def test_placements(nccl_ranks, src, dst):
    nccl_ranks(3, convert_all, src, dst, one_axis([0, 1]), SHAPES, ["float64"])
    nccl_ranks(3, _across_devices, src, dst)


@pytest.mark.nccl
def test_grids(nccl_ranks):
    nccl_ranks(4, _grid_pairs)


def _grid_pairs(world):
    boxing = Boxing(world)
    grid = Placement.of("cuda", [[0, 1], [2, 3]])
    values = [parse_nd_sbp(t) for t in ("(S(0), S(1))", "(S(1), S(0))", "(P, S(0))", "(B, P)",
                                        "(S(0), S(0))", "(B, B)")]  # fmt: skip
    for a, b in itertools.product(values, repeat=2):
        check_conversion(world, boxing, Layout(grid, a), Layout(grid, b), (8, 6), torch.float64)


@pytest.mark.nccl
def test_partial_to_split_is_one_reduce_scatter(nccl_ranks):
    assert nccl_ranks(2, _reduce_scatter) == [["reduce_scatter"]] * 2


def _reduce_scatter(world):
    boxing = Boxing(world)
    line = Placement.line("cuda", 2)
    src, dst = Layout(line, parse_nd_sbp("P")), Layout(line, (Split(0),))
    return check_conversion(world, boxing, src, dst, (8, 4), torch.float64)


@pytest.mark.nccl
@pytest.mark.parametrize("layouts", LAYOUTS.values(), ids=LAYOUTS)
def test_wide_and_deep_equals_one_rank(nccl_ranks, layouts):
    ((losses, weights),) = nccl_ranks(1, train, *LAYOUTS["dp"])
    for other_losses, other_weights in nccl_ranks(2, train, *layouts):
        assert losses == pytest.approx(other_losses, rel=1e-8)
        for mine, theirs in zip(weights, other_weights, strict=True):
            assert abs(mine - theirs).max() < 1e-8
