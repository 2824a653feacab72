"""Tests random layouts, placements, shapes, sizes and dtypes, on simulated and on real ranks.

A failure prints the smallest failing case as two lines that can be pasted into Python.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.moves import elements_sent, find_moves
from sbpflow.boxing.plan import plan_boxing
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Partial, Split, balanced_sizes
from tests import oracle
from tests.quick import quick
from tests.sbp.conversions import check_conversion, whole_numbers
from tests.sbp.simulator import simulate

FLOATS = ["float64", "float32", "bfloat16"]
DTYPES = [*FLOATS, "int64", "int32", "int8"]


@st.composite
def shapes(draw):
    ndim = draw(st.integers(1, 4))
    return tuple(draw(st.lists(st.integers(0, 9), min_size=ndim, max_size=ndim)))


@st.composite
def placements(draw, world_size):
    ranks = draw(st.permutations(range(world_size)))
    shape = draw(st.sampled_from([s for s in GRIDS if s[0] * s[-1] <= world_size]))
    count = 1
    for size in shape:
        count *= size
    return Placement("cpu", tuple(ranks[:count]), shape)


GRIDS = [(1,), (2,), (3,), (4,), (5,), (1, 2), (2, 1), (2, 2), (2, 3), (3, 2)]


@st.composite
def layouts(draw, placement, shape):
    """Sample any legal layout; a dim that is split once may have explicit sizes, zeros included."""
    partial = Partial(draw(st.sampled_from(["sum", "max", "min"])))
    nd_sbp = [
        draw(st.sampled_from([Broadcast(), partial, partial, *map(Split, range(len(shape)))]))
        for _ in placement.shape
    ]
    for axis, sbp in enumerate(nd_sbp):
        if not isinstance(sbp, Split):
            continue
        once = sum(isinstance(s, Split) and s.dim == sbp.dim for s in nd_sbp) == 1
        parts = placement.shape[axis]
        short = 0 < shape[sbp.dim] < parts
        if once and (draw(st.booleans()) or short):
            nd_sbp[axis] = Split(sbp.dim, draw(cuts(shape[sbp.dim], parts)))
    return Layout(placement, tuple(nd_sbp))


@st.composite
def cuts(draw, size, parts):
    """Sample explicit sizes: any sizes, or the whole dim on one rank."""
    if draw(st.booleans()):
        holder = draw(st.integers(0, parts - 1))
        return tuple(size * (part == holder) for part in range(parts))
    inner = sorted(draw(st.lists(st.integers(0, size), min_size=parts - 1, max_size=parts - 1)))
    return tuple(b - a for a, b in zip([0, *inner], [*inner, size], strict=True))


@st.composite
def cases(draw, world_size, dtypes=DTYPES):
    shape = draw(shapes())
    origin = draw(placements(world_size))
    target = origin if draw(st.booleans()) else draw(placements(world_size))
    src, dst = draw(layouts(origin, shape)), draw(layouts(target, shape))
    return src, dst, shape, draw(st.sampled_from(dtypes))


def _reproduction(case, backend):
    src, dst, shape, dtype = case
    return (
        "from sbpflow.sbp.layout import *; from sbpflow.sbp.placement import *; "
        "from sbpflow.sbp.sbp import *; "
        "from tests.sbp.simulator import check\n"
        f"check({src!r}, {dst!r}, {shape!r}, {dtype!r}, {backend!r})"
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(case=cases(6), backend=st.sampled_from(["gloo", "nccl"]))
def test_any_conversion_on_simulated_ranks(case, backend):
    note(_reproduction(case, backend))
    simulate(*case, backend)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(case=cases(6))
def test_plans_are_chains_whose_bytes_add_up(case):
    src, dst, shape, dtype = case
    note(_reproduction(case, "gloo"))
    steps = plan_boxing(src, dst, shape, getattr(torch, dtype), id="x", backend="gloo")
    assert (steps == ()) == (src == dst)
    here = src
    for step in steps:
        assert step.src == here
        here = step.dst
        assert (step.collective == "none") == (step.groups == ()) == (step.total_bytes == 0)
        talking = [rank for group in step.groups for rank in group]
        assert len(talking) == len(set(talking))
        assert set(talking) <= {*step.src.placement.ranks, *step.dst.placement.ranks}
        assert step.total_bytes == sum(step.bytes_sent(rank) for rank in talking)
    assert here == dst
    again = plan_boxing(src, dst, shape, getattr(torch, dtype), id="x", backend="gloo")
    assert again == steps


@settings(max_examples=150, deadline=None, derandomize=True)
@given(case=cases(6))
def test_closed_form_bytes_equal_the_sum_over_transfers(case):
    """The closed form must equal the sum over transfers between ranks, and a plan must send bytes
    only if there are such transfers.
    """
    src, dst, shape, dtype = case
    expected = dict.fromkeys(range(6), 0)
    for move in find_moves(src, dst, shape):
        expected[move.src] += move.numel * (move.src != move.dst)
    sent = elements_sent(src, dst, shape)
    assert {rank: sent.get(rank, 0) for rank in range(6)} == expected
    steps = plan_boxing(src, dst, shape, getattr(torch, dtype), id="x", backend="gloo")
    assert any(step.total_bytes for step in steps) == any(sent.values())


EMPTY_GROUPS = [
    ("(S(0), S(1)[0, 5])", "(B, S(1)[0, 5])"),
    ("(S(0), S(1)[5, 0])", "(B, S(1)[5, 0])"),
    ("(P, S(1)[0, 5])", "(S(0), S(1)[0, 5])"),
    ("(S(0), S(1)[0, 5])", "(P, S(1)[0, 5])"),
    ("(S(0)[0, 13], S(1)[0, 5])", "(S(0)[13, 0], S(1)[5, 0])"),
]


def test_groups_with_empty_parts_of_unequal_shapes(ranks):
    """Split 13 rows over the rows of a 2 x 2 grid; the parts of the two ranks without columns are
    [7, 0] and [6, 0].
    """
    grid = Placement("cpu", (0, 1, 2, 3), (2, 2))
    drawn = [
        (Layout(grid, a), Layout(grid, b), (13, 5), "float32")
        for pair in EMPTY_GROUPS
        for a, b in (pair, pair[::-1])
    ]
    ranks(4, _check_all, drawn)


def _check_all(world, drawn):
    boxing = Boxing(world)
    for src, dst, shape, dtype in drawn:
        check_conversion(world, boxing, src, dst, shape, getattr(torch, dtype))


def _convert_any(ranks, world_size, examples, dtypes=DTYPES):
    """Run conversions with gradients on real ranks, several at once; return their number.

    User tensors must not leave ranks empty, so short balanced splits are omitted.
    """
    tried = 0

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn=st.lists(cases(world_size, dtypes), min_size=4, max_size=4))
    def convert(drawn):
        nonlocal tried
        legal = [case for case in drawn if _fills(case)]
        note("\n".join(_reproduction(case, "gloo") for case in legal))
        ranks(world_size, _check_all, legal)
        tried += len(legal)

    convert()
    return tried


@pytest.mark.parametrize("world_size", quick([2, 3, 4], lambda n: n == 1))
def test_any_conversion_on_real_ranks(ranks, world_size):
    assert _convert_any(ranks, world_size, 15, FLOATS) > 30


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ten_thousand_gradients_on_real_ranks(ranks, world_size):
    """Each number of ranks runs a third of the conversions."""
    tried = _convert_any(ranks, world_size, 1500, FLOATS)
    assert tried >= 3334, f"only {tried} of the cases drawn fill their ranks"


def _fills(case):
    src, dst, shape, _ = case
    try:
        src.check_user(shape)
        dst.check_user(shape)
    except ValueError:
        return False
    return True


def test_the_simulator_detects_errors():
    """A wrong part on one rank must be detected, which shows that the property test can fail."""
    line = Placement.line("cpu", 3)
    src, dst = Layout(line, (Split(0),)), Layout(line, (Broadcast(),))
    full = whole_numbers((5, 2), torch.float64)
    parts = oracle.shares(full, src)
    parts[1] = parts[1] + 1
    try:
        simulate(src, dst, (5, 2), "float64", "gloo", parts=parts)
    except AssertionError:
        return
    raise AssertionError("a wrong part went unnoticed")


def test_balanced_sizes_differ_by_at_most_one():
    for size in range(50):
        for parts in range(1, 9):
            sizes = balanced_sizes(size, parts)
            assert sum(sizes) == size
            assert max(sizes) - min(sizes) <= 1
            assert list(sizes) == sorted(sizes, reverse=True)
