"""Tests conversions on grids: all pairs on 2 x 2, cycles, nested splits, lines to grids and
back.
"""

import itertools
import random

import pytest
import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import plan_boxing
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Partial, parse_nd_sbp
from tests.sbp.conversions import check_conversion, check_products, expected_names, one_axis

GRID = [[0, 1], [2, 3]]


def two_axes(dims):
    return list(itertools.product([s for (s,) in one_axis(dims)], repeat=2))


def _convert_pairs(world, pairs, shape, dtype_name="float64"):
    """Convert ``pairs`` of ((ranks, nd_sbp), (ranks, nd_sbp)); return the collectives in order."""
    boxing = Boxing(world)
    dtype = getattr(torch, dtype_name)
    products = []
    names = [
        check_conversion(
            world, boxing, _layout(*src), _layout(*dst), shape, dtype, products=products
        )
        for src, dst in pairs
    ]
    check_products(world, products)
    return names


def _layout(ranks, nd_sbp):
    return Layout(Placement.of("cpu", ranks), nd_sbp)


@pytest.mark.parametrize("share", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("src", two_axes([0, 1]), ids=lambda s: f"({s[0]},{s[1]})")
def test_all_pairs_on_a_grid(ranks, src, share):
    ends = list(two_axes([0, 1]))
    pairs = [((GRID, src), (GRID, dst)) for dst in ends[ends.index(src) % share :: share]]
    names = ranks(4, _convert_pairs, pairs, (8, 8, 16))[0]
    single = expected_names(one_axis([0, 1]))
    for (_, (_, dst)), ran in zip(pairs, names, strict=True):
        changed = [(str(a), str(b)) for a, b in zip(src, dst, strict=True) if a != b]
        wanted = [single[pair] for pair in changed]
        nested = src[0] == src[1] or dst[0] == dst[1]
        if not any(wanted) and not nested:
            assert ran == [], f"{src} -> {dst} needs no traffic, ran {ran}"
        if len(wanted) == 1 and not nested:
            assert ran == wanted[0], f"{src} -> {dst} changes one axis, ran {ran}"
        assert len(ran) <= 1, f"{src} -> {dst} is one collective at this size, ran {ran}"


@pytest.mark.parametrize("share", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("src", two_axes([2, 4]), ids=lambda s: f"({s[0]},{s[1]})")
def test_later_dims_on_a_grid(ranks, src, share):
    ends = list(two_axes([2, 4]))
    pairs = [((GRID, src), (GRID, dst)) for dst in ends[ends.index(src) % share :: share]]
    ranks(4, _convert_pairs, pairs, (4, 8, 4, 8, 4))


MIXED = [[2], [0, 1], [1, 2, 3], [0, 1, 2, 3], [[0, 1, 2, 3]], GRID]
COLUMN = [[2], [3]]


def _both(grid, values):
    ndim = 2 if isinstance(grid[0], list) else 1
    return [(grid, nd) for nd in values if len(nd) == ndim]


# By default, only a twelfth of the cases of an uneven shape is tested.
@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("shape", "share"),
    [
        ((17, 13, 19), 12),
        pytest.param((17, 13, 19), 1, marks=pytest.mark.slow),
        pytest.param((12, 24), 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("src", MIXED, ids=str)
def test_lines_and_grids(ranks, src, shape, share):
    lines = one_axis([0, 1])
    grids = [parse_nd_sbp(t) for t in ("(S(0), S(1))", "(S(1), S(1))", "(B, S(0))", "(P, S(1))",
                                       "(S(0), P)", "(P, B)", "(B, B)", "(P, P)")]  # fmt: skip
    starts = _both(src, lines + grids)
    ends = [end for dst in [*MIXED, COLUMN] for end in _both(dst, lines + grids)]
    pairs = list(itertools.product(starts, ends))
    ranks(4, _convert_pairs, random.Random(7).sample(pairs, len(pairs) // share), shape)


CYCLES = [
    ("(S(0), S(1))", "(S(1), S(0))"),
    ("(P, S(0))", "(S(0), S(0))"),
    ("(S(0), P)", "(S(0), S(0))"),
    ("(B, S(0))", "(S(0), S(0))"),
    ("(S(0), S(0))", "(B, S(0))"),
    ("(S(0), S(0))", "(S(0), S(1))"),
]


@pytest.mark.parametrize(("src", "dst"), CYCLES)
@pytest.mark.parametrize("shape", [(8, 4), (5, 7), (9, 6)], ids=str)
def test_cycles_and_nested_splits(ranks, src, dst, shape):
    src, dst = parse_nd_sbp(src), parse_nd_sbp(dst)
    names = ranks(4, _convert_pairs, [((GRID, src), (GRID, dst))], shape)
    assert names == [[["all_to_all"]]] * 4


def test_three_axes(ranks):
    cube = [[[0, 1]], [[2, 3]]]
    values = [parse_nd_sbp(t) for t in ("(S(0), S(1), S(1))", "(S(1), B, S(0))", "(P, S(0), B)",
                                        "(B, P, S(1))", "(B, B, B)")]  # fmt: skip
    pairs = [((cube, a), (cube, b)) for a, b in itertools.product(values, repeat=2)]
    ranks(4, _convert_pairs, pairs, (6, 5))


def test_large_tensors_take_the_route_that_sends_least():
    """From P on p1 ranks to B on p2 others, T bytes per copy: reducing to a split and then copying
    sends (p1 - 1) T + p2 T; sending every term to every rank would send p1 * p2 * T.
    """
    src = _layout([0, 1], (Partial(),))
    dst = _layout([2, 3, 4], (Broadcast(),))
    steps = plan_boxing(src, dst, (1024, 1024), torch.float32, id="x", backend="gloo")
    size = 1024 * 1024 * 4
    assert [step.collective for step in steps] == ["all_to_all", "all_to_all"]
    assert abs(sum(step.total_bytes for step in steps) - (2 + 3 - 1) * size) < 16384
    small = plan_boxing(src, dst, (4, 4), torch.float32, id="x", backend="gloo")
    assert [step.collective for step in small] == ["all_to_all"]


def test_a_plan_is_a_chain_that_prints():
    src, dst = _layout([[0, 1]], parse_nd_sbp("(B, P)")), _layout([2, 3, 4], parse_nd_sbp("B"))
    steps = plan_boxing(src, dst, (4096, 64), torch.float32, id="x/fwd", backend="gloo")
    assert len(steps) > 1
    assert steps[0].src == src
    assert steps[-1].dst == dst
    for number, (step, following) in enumerate(itertools.pairwise(steps)):
        assert step.dst == following.src
        assert step.id == f"x/fwd.{number}"
    text = str(steps[0])
    assert "(B, P)@[[0, 1]]" in text
    assert f"{steps[0].total_bytes:,} B" in text
    assert steps[0].collective in text
