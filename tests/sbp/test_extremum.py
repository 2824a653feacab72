"""Tests gradients through P(max) and P(min), on grids and with ``grad_sbp``, against torch."""

import itertools
from unittest.mock import patch

import pytest
import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.runtime.ranks.shared_memory import SharedChannel
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Partial, Split, parse_nd_sbp
from sbpflow.tensor import ops
from sbpflow.tensor.global_tensor import GlobalTensor
from tests import oracle
from tests.quick import diagonal, quick
from tests.sbp.conversions import check_parts, sum_over_ranks

B, P, S0, S1 = Broadcast(), Partial(), Split(0), Split(1)
GRIDS = [[[0, 1], [2, 3]], [[3, 1], [0, 2]], [[0, 1, 2, 3]], [[1], [2], [0]]]


def _distinct(shape):
    """Return distinct whole numbers in scrambled order."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) * 7 % 37).view(shape).double()


def _destinations(grid):
    """Yield all layouts of one dim on the grid, and some on other placements."""
    for nd_sbp in itertools.product([S0, B, P], repeat=grid.ndim):
        yield Layout(grid, nd_sbp)
    for line in ([2, 0], [1]):
        for sbp in (S0, B, P):
            yield Layout(Placement.of("cpu", line), (sbp,))


def _reduced(world, ranks):
    boxing = Boxing(world)
    grid = Placement.of("cpu", ranks)
    full = _distinct((4, 8))
    cases = itertools.product((0, 1), itertools.product([S0, S1, B], repeat=2))
    for number, (dim, nd_sbp) in enumerate(cases):
        plain = full.clone().requires_grad_()
        best = plain.amax(dim)
        weights = torch.arange(1.0, 1 + len(best), dtype=torch.float64)
        (best * weights).sum().backward()
        # Test a third of the destinations per case; every destination occurs in some cases.
        for dst in list(_destinations(grid))[number % 3 :: 3]:
            x = GlobalTensor.from_full(full, Layout(grid, nd_sbp), boxing).requires_grad_()
            y = ops.reduce_max(x, [dim])
            what = f"max over {dim} of {x.layout}, {y.layout} -> {dst}"
            y = y.to(dst)
            everywhere = Layout(dst.placement, (B,) * dst.placement.ndim)
            factor = GlobalTensor.from_full(weights, everywhere, boxing)
            ops.reduce_sum(ops.mul(y, factor)).backward()
            check_parts(world, x.part.grad, x.layout.dual(), plain.grad, f"gradient of {what}")


@pytest.mark.parametrize("ranks_of", quick([GRIDS[0], GRIDS[3]], lambda n: n == 1), ids=str)
def test_a_replicated_maximum_counts_only_once_on_every_grid(ranks, ranks_of):
    """Copies along B axes represent one value, so the sum of their gradients equals the gradient in
    one process.
    """
    ranks(4, _reduced, ranks_of)


def _terms(world, ranks, op):
    """Convert leaves that are already P(op), with ties; the first of equal terms gets the whole
    gradient.
    """
    boxing = Boxing(world)
    grid = Placement.of("cpu", ranks)
    extremum = Partial(op)
    best_of = torch.amax if op == "max" else torch.amin
    for number, nd_sbp in enumerate(itertools.product([S0, B, extremum], repeat=2)):
        layout = Layout(grid, nd_sbp)
        if not layout.has_extremum:
            continue
        count = [n if s == extremum else 1 for s, n in zip(nd_sbp, grid.shape, strict=True)]
        terms = (torch.arange(8 * count[0] * count[1]) * 5 % 3).view(*count, 8).double()
        best = best_of(terms, (0, 1))
        first = (terms == best).reshape(-1, 8).int().argmax(0)
        weights = torch.arange(1.0, 9, dtype=torch.float64)
        # Test half of the destinations per layout; every destination occurs with some layouts.
        for dst in list(_destinations(grid))[number % 2 :: 2]:
            part = torch.zeros(0, dtype=torch.float64)
            if world.rank in grid:
                at = [c if n > 1 else 0 for c, n in zip(grid.coord(world.rank), count, strict=True)]
                part = oracle.cut(terms[*at], oracle.extent(layout, (8,), world.rank))
            x = GlobalTensor.from_local(part.clone(), layout, (8,), boxing).requires_grad_()
            y = x.to(dst)
            check_parts(world, y.part.detach(), dst, best, f"{layout} -> {dst}")
            everywhere = Layout(Placement.of("cpu", [0]), (B,))
            y.backward(GlobalTensor.from_full(weights, everywhere, boxing))
            got = torch.zeros(*count, 8, dtype=torch.float64)
            if world.rank in grid:
                oracle.cut(got[*at], oracle.extent(layout, (8,), world.rank)).add_(x.part.grad)
            expected = torch.zeros(count[0] * count[1], 8, dtype=torch.float64)
            expected[first, torch.arange(8)] = weights
            got = sum_over_ranks(world, got).view(-1, 8)
            assert torch.equal(got, expected), f"{layout} -> {dst}: {got.tolist()}"


@pytest.mark.few(2)
@pytest.mark.parametrize(("ranks_of", "op"), diagonal(GRIDS, ["max", "min"]), ids=str)
def test_the_first_holder_gets_the_gradient_of_all_copies(ranks, ranks_of, op):
    ranks(4, _terms, ranks_of, op)


def _into(world, ranks):
    boxing = Boxing(world)
    grid = Placement.of("cpu", ranks)
    full, weights = _distinct((4, 8)), _distinct((4, 8)) + 1
    extremum = Partial("max")
    for src in itertools.product([S0, B], [S1, B]):
        for dst in itertools.product([src[0], extremum], [src[1], extremum]):
            if extremum not in dst:
                continue
            x = GlobalTensor.from_full(full, Layout(grid, src), boxing).requires_grad_()
            y = x.to(dst).to((B, B))
            y.backward(GlobalTensor.from_full(weights, y.layout, boxing))
            check_parts(world, x.part.grad, x.layout.dual(), weights, f"{src} -> {dst} -> B")


def _with_nan(world, src, shape):
    """Convert terms of which only those of the last rank contain NaN, without shared memory."""
    layout = Layout(Placement.of("cpu", [[0, 1], [2, 3]]), src)
    term = torch.full(shape, float(world.rank))
    if world.rank == 3:
        term[-1] = torch.nan
    x = GlobalTensor.from_local(term, layout, shape, Boxing(world))
    refuse = patch.multiple(SharedChannel, connects=lambda *_: False, takes=lambda *_: False)
    with refuse:
        return [x.to(dst).full() for dst in ("(B, B)", "(S(0), B)", "(B, S(0))")]


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("size", [4, 40_000])
def test_a_term_with_nan_makes_the_value_nan(ranks, op, size):
    expected = torch.full((size,), {"max": 3.0, "min": 0.0}[op])
    expected[-1] = torch.nan
    for values in ranks(4, _with_nan, (Partial(op),) * 2, (size,)):
        for value in values:
            torch.testing.assert_close(value, expected, rtol=0, atol=0, equal_nan=True)


def _infinite_gradients(world):
    layout = Layout(Placement.line("cpu", 2), parse_nd_sbp("P(max)"))
    part = torch.tensor([torch.nan, 4.0, 2.0]) if world.rank else torch.tensor([1.0, 5.0, 1.0])
    x = GlobalTensor.from_local(part, layout, (3,), Boxing(world)).requires_grad_()
    (x.to("B").part * torch.tensor([torch.nan, torch.inf, torch.inf])).sum().backward()
    return x.part.grad.tolist()


def test_an_infinite_gradient_reaches_only_the_first_holder(ranks):
    """Other terms get 0, not NaN, and so do all terms of an element whose value is NaN."""
    assert ranks(2, _infinite_gradients) == [[0.0, torch.inf, 0.0], [0.0, 0.0, torch.inf]]


@pytest.mark.parametrize("ranks_of", GRIDS, ids=str)
def test_converting_to_a_maximum_and_back_is_the_identity(ranks, ranks_of):
    ranks(4, _into, ranks_of)


def _promised(world, grad_sbp):
    """Return this rank's gradient of a P(max) leaf. The gradients that two ranks pass back are
    added up, so each is a half, unless ``grad_sbp`` is B.
    """
    boxing = Boxing(world)
    layout = Layout(Placement.line("cpu", 2), parse_nd_sbp("P(max)"))
    part = torch.tensor([1.0, 2]) if world.rank else torch.tensor([3.0, 1])
    x = GlobalTensor.from_local(part, layout, (2,), boxing).requires_grad_()
    share = 0.5 if grad_sbp in (None, "P") else 1.0
    (x.to("B", grad_sbp=grad_sbp).part * share).sum().backward()
    return x.part.grad.tolist()


@pytest.mark.parametrize("grad_sbp", [None, "P", "B"])
def test_grad_sbp_works_from_a_maximum(ranks, grad_sbp):
    assert ranks(2, _promised, grad_sbp) == [[1.0, 0.0], [0.0, 1.0]]


def _from_terms(world, ranks, dst_ranks, op):
    """Compare P -> P(op) -> B with P -> B; value and gradient must be the same."""
    boxing = Boxing(world)
    src = Layout(Placement.of("cpu", ranks), (P,) * Placement.of("cpu", ranks).ndim)
    there = Placement.of("cpu", dst_ranks)
    full, weights = _distinct((5,)), _distinct((5,)) + 1
    part = oracle.shares(full, src, seed=1).get(world.rank, torch.empty(0, dtype=full.dtype))
    x = GlobalTensor.from_local(part, src, (5,), boxing).requires_grad_()
    y = x.to(Layout(there, (Partial(op),) * there.ndim))
    assert torch.equal(y.full(), full)
    everywhere = Layout(Placement.line("cpu", world.size), (B,))
    y.to(everywhere).backward(GlobalTensor.from_full(weights, everywhere, boxing))
    check_parts(world, x.part.grad, src.dual(), weights, f"gradient of {src} -> {y.layout}")


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ([0, 1], [0, 1]),
        ([0, 1], [0, 1, 2]),
        ([1, 2, 0], [2, 1]),
        ([0], [1, 2]),
        (GRIDS[0], GRIDS[0]),
        (GRIDS[0], GRIDS[1]),
        (GRIDS[0], [0, 1]),
    ],
    ids=str,
)
def test_terms_of_a_sum_become_a_maximum_with_the_gradient_of_the_sum(ranks, src, dst, op):
    ranks(4, _from_terms, src, dst, op)
