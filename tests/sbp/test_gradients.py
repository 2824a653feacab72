"""Tests gradients beyond the conversion grids: seeds, ``grad_sbp``, leaves, ranks without parts."""

import itertools

import pytest
import torch

from sbpflow.boxing.dry_run import DryBoxing
from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import plan_boxing
from sbpflow.errors import SbpError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Partial, Split, parse_nd_sbp
from sbpflow.tensor import ops
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.tensor.gradient_sync import GradientSync, sync_gradients
from tests import oracle
from tests.meter import Meter
from tests.ranks import RanksFailed
from tests.sbp.conversions import (
    check_conversion,
    check_parts,
    check_products,
    one_axis,
    sum_over_ranks,
    whole_numbers,
)

B, P, S0, S1 = Broadcast(), Partial(), Split(0), Split(1)


def _leaf(world, boxing, full, layout):
    parts = oracle.shares(full, layout, seed=3)
    part = parts.get(world.rank, full.new_empty(0)).clone()
    return GlobalTensor.from_local(part, layout, tuple(full.shape), boxing).requires_grad_()


def _seeds(world, ranks, nd_sbp, loss_sbp):
    boxing = Boxing(world)
    placement = Placement.of("cpu", ranks)
    full = whole_numbers((6, 4), torch.float64)
    x = _leaf(world, boxing, full, Layout(placement, parse_nd_sbp(nd_sbp)))
    loss = ops.reduce_sum(ops.mul(x.to("S(0)") if "P" in nd_sbp else x, _like(x, full)))
    loss = loss.to(loss_sbp)
    loss.backward()
    check_parts(world, x.part.grad, x.layout.dual(), full + 1, f"gradient of {nd_sbp}")
    return loss.item(), x.part.grad.abs().sum().item()


def _like(x, full):
    everywhere = Layout(x.layout.placement, (B,) * x.layout.placement.ndim)
    return GlobalTensor.from_full(full + 1, everywhere, x.boxing)


@pytest.mark.parametrize("loss_sbp", ["B", "P"])
@pytest.mark.parametrize("nd_sbp", ["S(0)", "S(1)", "B", "P"])
@pytest.mark.parametrize("line", [[0, 1, 2], [2, 0]], ids=str)
def test_a_replicated_loss_counts_only_once(ranks, line, nd_sbp, loss_sbp):
    """The gradient dL/dx equals the gradient in one process, for any number of ranks that store the
    loss."""
    full = whole_numbers((6, 4), torch.float64)
    values = ranks(3, _seeds, line, nd_sbp, loss_sbp)
    assert {loss for loss, _ in values} == {(full * (full + 1)).sum().item()}


def _seeds_on_grid(world):
    boxing = Boxing(world)
    grid = Placement.of("cpu", [[0, 1], [2, 3]])
    full = whole_numbers((6, 4), torch.float64)
    for nd_sbp, loss_sbp in itertools.product(["(B, S(0))", "(S(0), P)"], ["(B, B)", "(P, B)"]):
        x = _leaf(world, boxing, full, Layout(grid, parse_nd_sbp(nd_sbp)))
        loss = ops.reduce_sum(ops.scale(x, 3.0)).to(loss_sbp)
        loss.backward()
        expected = torch.full_like(full, 3.0)
        check_parts(world, x.part.grad, x.layout.dual(), expected, f"{nd_sbp} to {loss_sbp}")


def test_a_replicated_loss_counts_only_once_on_a_grid(ranks):
    ranks(4, _seeds_on_grid)


def _backward_of_many(world):
    boxing = Boxing(world)
    x = _leaf(world, boxing, whole_numbers((6, 4), torch.float64), _line(world, S0))
    x.backward()


def test_backward_starts_from_one_element(ranks):
    with pytest.raises(
        AssertionError, match=r"backward\(\) needs a tensor with one element.*reduce_mean"
    ):
        ranks(2, _backward_of_many)


def _line(world, *nd_sbp):
    return Layout(Placement.line("cpu", world.size), nd_sbp)


def _overrides(world):
    boxing = Boxing(world)
    shape, products = (5, 7), []
    for (a,), (b,) in itertools.product(one_axis([0, 1]), repeat=2):
        for override in [b] if isinstance(b, Split) else [B, P]:
            check_conversion(
                world,
                boxing,
                _line(world, a),
                _line(world, b),
                shape,
                torch.float64,
                (override,),
                products,
            )
    check_products(world, products)


@pytest.mark.parametrize("world_size", [2, 3])
def test_grad_sbp(ranks, world_size):
    """For every legal choice, the gradient must be exact in the layout that the consumer
    declares.
    """
    ranks(world_size, _overrides)


def _overrides_on_grid(world):
    boxing = Boxing(world)
    grid = Placement.of("cpu", [[0, 1], [2, 3]])
    starts = [parse_nd_sbp(t) for t in ("(S(0), S(1))", "(P, S(0))", "(B, P)", "(S(1), B)")]
    ends, products = list(itertools.product([S0, B, P], [S1, B, P])), []
    for src, dst in itertools.product(starts, ends):
        choices = [[s] if isinstance(s, Split) else [B, P] for s in dst]
        for override in itertools.product(*choices):
            layouts = Layout(grid, src), Layout(grid, dst)
            check_conversion(world, boxing, *layouts, (6, 4), torch.float64, override, products)
    check_products(world, products)


def test_grad_sbp_on_a_grid(ranks):
    ranks(4, _overrides_on_grid)


@pytest.mark.parametrize(
    ("src", "dst", "grad_sbp", "message"),
    [
        ("B", "S(0)", "S(1)", r"grad_sbp S\(1\) does not fit a S\(0\) result"),
        ("B", "B", "P(max)", r"grad_sbp P\(max\): a gradient is a sum, .* use B"),
        ("S(0)", "B", "P(min)", r"grad_sbp P\(min\): a gradient is a sum"),
        ("B", "P(max)", "B", r"grad_sbp B .* P\(max\) result, .* omit grad_sbp"),
    ],
)
@pytest.mark.parametrize("trains", [True, False])
def test_impossible_gradient_layouts_are_refused(src, dst, grad_sbp, message, trains):
    """An illegal ``grad_sbp`` is refused on every rank, even if no tensor requires a gradient."""
    layout = Layout(Placement.line("cpu", 2), parse_nd_sbp(src))
    part = torch.empty(layout.part_shape((4, 4), 0), device="meta", requires_grad=trains)
    x = GlobalTensor(part, layout, (4, 4), DryBoxing(2))
    with pytest.raises(SbpError, match=message):
        x.to(dst, grad_sbp=grad_sbp)


def _second_derivative(world, src, dst):
    boxing = Boxing(world)
    layout = _line(world, *parse_nd_sbp(src))
    x = GlobalTensor.from_full(torch.tensor([1.0, 2, 3, 4]), layout, boxing).requires_grad_()
    y = x.to(dst).part
    (gradient,) = torch.autograd.grad((y**3).sum(), x.part, create_graph=True)
    with pytest.raises(SbpError, match=r"@\[0, 1\] has no second derivative"):
        torch.autograd.grad((gradient * x.part).sum(), x.part)


@pytest.mark.parametrize(
    ("src", "dst"), [("S(0)", "B"), ("B", "S(0)"), ("P(max)", "B"), ("S(0)", "P(max)")]
)
def test_a_second_derivative_is_refused(ranks, src, dst):
    """The error is raised even if other terms have a derivative; first derivatives work with and
    without create_graph.
    """
    ranks(2, _second_derivative, src, dst)


def _round_trip(world, nd_sbp):
    """Convert local -> global -> another layout -> back -> local, with a local loss on every
    rank.
    """
    boxing = Boxing(world)
    layout = _line(world, *parse_nd_sbp(nd_sbp))
    full = whole_numbers((6, 4), torch.float64)
    x = _leaf(world, boxing, full, layout)
    again = x.to("S(1)").to(nd_sbp)
    cotangent = oracle.shares(full + 2, layout.dual(), seed=4)[world.rank]
    (again.part * cotangent).sum().backward()
    check_parts(world, x.part.grad, layout.dual(), full + 2, f"dual of {nd_sbp}")


@pytest.mark.parametrize("nd_sbp", ["S(0)", "B", "P"])
def test_local_parts_get_gradients_in_the_dual_layout(ranks, nd_sbp):
    ranks(3, _round_trip, nd_sbp)


def _first_replica(world):
    boxing = Boxing(world)
    mine = torch.full((2, 3), float(world.rank + 5), requires_grad=True)
    x = GlobalTensor.from_local(mine, _line(world, B), (2, 3), boxing, replicas="first")
    (x.part * (world.rank + 1)).sum().backward()
    return x.part.detach().unique().tolist(), mine.grad.unique().tolist()


def test_broadcast_takes_the_first_ranks_data(ranks):
    """All ranks get rank 0's values; the gradient on rank 0 is the sum, and the gradients on other
    ranks are zero.
    """
    assert ranks(3, _first_replica) == [([5.0], [6.0]), ([5.0], [0.0]), ([5.0], [0.0])]


def _through_other_ranks(world, stops):
    boxing = Boxing(world)
    full = whole_numbers((6, 4), torch.float64)
    x = _leaf(world, boxing, full, Layout(Placement.of("cpu", stops[0]), (S0,)))
    w = _leaf(world, boxing, full[:4], Layout(Placement.of("cpu", stops[1]), (B,)))
    y = x
    for number, stop in enumerate(stops[1:]):
        y = y.to(Layout(Placement.of("cpu", stop), (S0,)))
        if number == 0:
            y = ops.matmul(y, w)
    loss = ops.reduce_sum(y)
    loss.backward()
    total = loss.item()
    wanted_x = torch.ones(6, 4, dtype=torch.float64) @ full[:4].T
    wanted_w = full.T @ torch.ones(6, 4, dtype=torch.float64)
    check_parts(world, x.part.grad, x.layout.dual(), wanted_x, "gradient of x")
    check_parts(world, w.part.grad, w.layout.dual(), wanted_w, "gradient of w")
    return total


@pytest.mark.parametrize(
    "stops", [[[0, 1], [2, 3]], [[0], [1, 2, 3], [0]], [[3], [1], [0, 2]]], ids=str
)
def test_ranks_outside_a_placement_join_the_backward(ranks, stops):
    full = whole_numbers((6, 4), torch.float64)
    values = ranks(4, _through_other_ranks, stops)
    assert values == [(full @ full[:4]).sum().item()] * 4


def _starts_outside(world, outside):
    """Start from a leaf on ranks 0 and 1 whose gradient comes from all three ranks; rank 2 has no
    gradient.
    """
    boxing = Boxing(world)
    layout = Layout(Placement.of("cpu", [0, 1]), S0)
    inside = world.rank < 2
    part = torch.full((3,), float(world.rank), requires_grad=True) if inside else None
    x = GlobalTensor.from_local(part, layout, (6,), boxing, **({} if inside else outside))
    y = x.to(Layout(Placement.line("cpu", 3), S0))
    ops.reduce_sum(ops.relu(y)).backward()
    return x.part.grad.tolist()


def test_ranks_without_a_part_declare_requires_grad(ranks):
    values = ranks(3, _starts_outside, {"requires_grad": True})
    assert values == [[0.0] * 3, [1.0] * 3, []]


@pytest.mark.checked
def test_ranks_with_different_requires_grad_are_named(ranks):
    """In checked mode, every rank raises an error at the conversion; otherwise, the other ranks
    would wait.
    """
    with pytest.raises(RanksFailed) as caught:
        ranks(3, _starts_outside, {})
    assert len(caught.value.errors) == 3
    for error in caught.value.errors.values():
        assert "rank 1 is at to/fwd (all_to_all with gradient, " in error
        assert "rank 2 is at to/fwd (all_to_all, " in error
        assert "and requires_grad_() on the same tensors, even on" in error


def _outside_unchecked(world):
    """Without checked mode, only rank 2 raises the error; in this test, the other ranks do not
    wait.
    """
    world.checked = False
    try:
        if world.rank == 2:
            x = GlobalTensor.from_local(
                None, Layout(Placement.of("cpu", [0]), B), (), Boxing(world)
            )
            with pytest.raises(SbpError, match=r"on rank 2, no input of .* where the part is None"):
                ops.relu(x).backward(x)
    finally:
        world.checked = True


def test_backward_without_grad_is_refused(ranks):
    ranks(3, _outside_unchecked)


def _plain(world, side):
    boxing = Boxing(world)
    for a, b in itertools.product(["S(0)", "S(1)", "B", "P"], repeat=2):
        src, dst = _line(world, *parse_nd_sbp(a)), _line(world, *parse_nd_sbp(b))
        steps = plan_boxing(src, dst, (side, side), torch.float32, id="x", backend="gloo")
        for run in (boxing.run, lambda *given: boxing.start(*given).wait()):
            part = torch.ones(src.part_shape((side, side), world.rank), requires_grad=True)
            out = run(steps, part)
            assert not out.requires_grad, f"{a} -> {b}"
            assert out.grad_fn is None, f"{a} -> {b}"
            assert part.requires_grad, f"{a} -> {b}"


@pytest.mark.parametrize("side", [4, 1200])
def test_boxing_has_no_autograd(ranks, side):
    """Neither a slice of a part that requires grad nor a received part may have autograd
    history.
    """
    ranks(2, _plain, side)


def _sync(world, grid, specs, bucket_bytes):
    """Sync the gradients of several parameters; the synced gradient of sum(c * w) must be c."""
    boxing = Boxing(world)
    placement = Placement.of("cpu", grid)
    parameters, cotangents = [], []
    for number, (shape, nd_sbp) in enumerate(specs):
        full = whole_numbers(shape, torch.float64, step=number + 2)
        parameters.append(_leaf(world, boxing, full, Layout(placement, parse_nd_sbp(nd_sbp))))
        cotangents.append(full * 2 + 1)
    for parameter, cotangent in zip(parameters, cotangents, strict=True):
        gradients = oracle.shares(cotangent, parameter.layout.dual(), seed=6)
        parameter.part.grad = gradients.get(world.rank, cotangent.new_empty(0)).clone()
    sync = GradientSync(parameters, bucket_bytes=bucket_bytes)
    with Meter() as meter:
        sync.run()
    for parameter, cotangent in zip(parameters, cotangents, strict=True):
        check_parts(world, parameter.part.grad, parameter.layout, cotangent, "synced gradient")
    mine = [step for step in sync.plan.steps if step.group_of(world.rank)]
    assert meter.names == [step.collective for step in mine]
    assert meter.bytes_sent == pytest.approx(sum(s.bytes_sent(world.rank) for s in mine), abs=16)
    return meter.names


LINE_SPECS = [((5, 3), "B"), ((4,), "B"), ((6, 2), "S(0)"), ((3, 7), "B"), ((5, 6), "S(1)")]
GRID_SPECS = [((6, 3), "(S(0), B)"), ((5, 4), "(S(1), B)"), ((4,), "(B, B)"), ((7, 4), "(S(0), B)"),
              ((5, 5), "(S(0), S(1))")]  # fmt: skip


def test_gradients_of_many_parameters_share_a_collective(ranks):
    assert ranks(3, _sync, [0, 1, 2], LINE_SPECS, 1 << 20) == [["all_reduce"]] * 3
    assert ranks(3, _sync, [2, 0], LINE_SPECS, 1 << 20)[1] == []


def test_buckets_have_a_size(ranks):
    assert ranks(2, _sync, [0, 1], LINE_SPECS, 200) == [["all_reduce"] * 2] * 2


def test_buckets_on_a_grid(ranks):
    """The three (S, B) parameters share one bucket, (B, B) has another, and (S, S) needs none."""
    assert ranks(4, _sync, [[0, 1], [2, 3]], GRID_SPECS, 1 << 20) == [["all_reduce"] * 2] * 4


def _unused(world, sbp):
    boxing = Boxing(world)
    used, unused = (
        _leaf(world, boxing, whole_numbers((4, 2), torch.float64), _line(world, sbp)) for _ in "ab"
    )
    ops.reduce_sum(used).backward()
    sync_gradients([used, unused])
    return used.part.grad.unique().tolist(), unused.part.grad.unique().tolist()


@pytest.mark.parametrize("sbp", [B, Split(0)], ids=str)
def test_a_parameter_without_gradient_gets_zeros(ranks, sbp):
    assert ranks(2, _unused, sbp) == [([1.0], [0.0])] * 2


def _extremum(world, op, dst):
    boxing = Boxing(world)
    terms = torch.tensor([[[1.0, 5], [3, 3]], [[4, 5], [3, 2]], [[4, 0], [9, 3]]])
    best = terms.amax(0) if op == "max" else terms.amin(0)
    layout = _line(world, Partial(op))
    x = GlobalTensor.from_local(terms[world.rank].clone(), layout, (2, 2), boxing).requires_grad_()
    with Meter() as meter:
        y = x.to(dst)
    check_parts(world, y.part.detach(), y.layout, best, f"P({op}) to {dst}")
    cotangent = torch.tensor([[1.0, 10], [100, 1000]])
    everywhere = GlobalTensor.from_full(cotangent, _line(world, B), boxing)
    y.backward(everywhere)
    return meter.names, x.part.grad.tolist()


@pytest.mark.parametrize(("dst", "names"), [("B", ["all_reduce"]), ("S(0)", ["all_to_all"])])
def test_the_holder_of_a_maximum_gets_the_gradient(ranks, dst, names):
    if dst == "S(0)":
        dst = (Split(0, (1, 0, 1)),)
    values = ranks(3, _extremum, "max", dst)
    assert [n for n, _ in values] == [names] * 3
    # Two ranks share each maximum: ranks 1 and 2 at (0, 0), 0 and 1 at (0, 1), 0 and 2 at (1, 1).
    # The first of them gets the gradient.
    assert [g for _, g in values] == [
        [[0, 10], [0, 1000]],
        [[1, 0], [0, 0]],
        [[0, 0], [100, 0]],
    ]


def test_the_holder_of_a_minimum_gets_the_gradient(ranks):
    values = ranks(3, _extremum, "min", "B")
    assert [g for _, g in values] == [
        [[1, 0], [100, 0]],
        [[0, 0], [0, 1000]],
        [[0, 10], [0, 0]],
    ]


def _into_extremum(world, nd_sbp, dtype_name):
    boxing = Boxing(world)
    dtype = getattr(torch, dtype_name)
    full = whole_numbers((3, 2), dtype)
    x = _leaf_or_value(world, boxing, full, _line(world, *parse_nd_sbp(nd_sbp)))
    with Meter() as meter:
        y = x.to("P(max)")
        back = y.to("B")
    assert torch.equal(back.part, full)
    if dtype.is_floating_point:
        ops.reduce_sum(back).backward()
        check_parts(world, x.part.grad, x.layout.dual(), torch.ones_like(full), "into P(max)")
    return meter.names, y.part.min().item()


def _leaf_or_value(world, boxing, full, layout):
    x = GlobalTensor.from_full(full, layout, boxing)
    return x.requires_grad_() if full.dtype.is_floating_point else x


@pytest.mark.parametrize("nd_sbp", ["S(0)", "B"])
def test_converting_to_a_maximum_pads_with_the_lowest_value(ranks, nd_sbp):
    values = ranks(3, _into_extremum, nd_sbp, "float64")
    assert [names for names, _ in values] == [["all_reduce"]] * 3
    assert values[1][1] == float("-inf")
    whole = ranks(3, _into_extremum, nd_sbp, "int32")
    assert whole[1][1] == torch.iinfo(torch.int32).min


def _extremum_elsewhere(world, src, dst):
    boxing = Boxing(world)
    full = whole_numbers((3, 2), torch.float64)
    here = Layout(Placement.of("cpu", [0, 2]), parse_nd_sbp(src))
    there = Layout(Placement.of("cpu", [1, 2]), parse_nd_sbp(dst))
    x = GlobalTensor.from_full(full, here, boxing).requires_grad_()
    with Meter() as meter:
        y = x.to(there)
    assert torch.equal(y.full(), full)
    ops.reduce_sum(y.to("B")).backward()
    got = torch.zeros(3, 2, dtype=torch.float64)
    if world.rank in here.placement:
        oracle.cut(got, oracle.extent(here, (3, 2), world.rank)).add_(x.part.grad)
    copies = 2 if src == "P" else 1  # each term of a sum gets the whole gradient
    assert torch.equal(sum_over_ranks(world, got), torch.full_like(full, copies))
    return meter.names


@pytest.mark.parametrize("src", ["S(0)", "B", "P", "P(max)", "P(min)"])
def test_conversions_to_a_maximum_have_gradients(ranks, src):
    """Values are sent once, or not at all if the new owner already stores them."""
    names = [] if src == "B" else ["all_to_all"]
    assert ranks(3, _extremum_elsewhere, src, "P(max)") == [names] * 3


def _reductions_change(world):
    boxing = Boxing(world)
    terms = torch.tensor([2.0, 7.0])
    x = GlobalTensor.from_local(terms[world.rank].view(1).expand(4).clone(),
                                _line(world, Partial("max")), (4,), boxing)  # fmt: skip
    y = x.to("P")
    return y.full().tolist()


def test_from_one_reduction_to_another(ranks):
    assert ranks(2, _reductions_change) == [[7.0] * 4] * 2
