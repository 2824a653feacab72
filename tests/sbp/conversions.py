"""Runs conversions on real ranks, and compares values, gradients and traffic with the oracle.

Every check is local or uses torch's plain all-reduce, never the code under test.
"""

import itertools

import torch
import torch.distributed as dist

from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import last_linear_layout, plan_boxing
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Partial, Split, format_nd_sbp
from sbpflow.tensor.global_tensor import GlobalTensor
from tests import oracle
from tests.meter import Meter


def whole_numbers(shape, dtype, step=7):
    """Return small whole numbers, which are exact in every dtype, even in sums of a few numbers."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) * step % 31 - 15).view(shape).to(dtype)


def on_device(world, parts, layout, dtype):
    """Return this rank's part, or an empty part, on the device of the layout."""
    part = parts.get(world.rank, torch.empty(0, dtype=dtype))
    return part.clone().to(Boxing(world).device_of(layout))


def sum_over_ranks(world, tensor):
    dist.all_reduce(tensor, group=world.link(range(world.size), "oracle").group)
    return tensor


def check_parts(world, part, layout, full, what, tolerance=0.0):
    """Check this rank's part of ``full`` with ``layout``; P parts must add up to ``full`` in each
    replica.

    Whole numbers are compared exactly. ``tolerance`` allows for functions such as exp, whose last
    bit depends on an element's position in a vector register.
    """
    assert part.device == Boxing(world).device_of(layout), f"{what}: on {part.device}"
    part = part.cpu()
    inside = world.rank in layout.placement
    extent = oracle.extent(layout, full.shape, world.rank) if inside else [(0, 0)]
    shape = tuple(stop - start for start, stop in extent)
    assert tuple(part.shape) == shape, f"{what}: shape {tuple(part.shape)}, not {shape}"
    assert part.dtype == full.dtype, f"{what}: dtype {part.dtype}"
    if not oracle.has_partial(layout):
        expected = oracle.cut(full, extent) if inside else part
        assert _same(part, expected, tolerance), f"{what}: wrong values on rank {world.rank}"
        return
    if layout.has_extremum:
        _check_extremum(world, part, layout, full, what)
        return
    replicas, mine = _cells(world.rank, layout, Broadcast)
    terms, my_term = _cells(world.rank, layout, (Split, Partial))
    # For each replica, sum its terms; for each term, sum its replicas.
    sums = torch.zeros((len(replicas) + len(terms), *full.shape), dtype=torch.float64)
    if inside:
        oracle.cut(sums[mine], extent).add_(part)
        oracle.cut(sums[len(replicas) + my_term], extent).add_(part)
    sum_over_ranks(world, sums)
    for replica, total in zip(replicas, sums, strict=False):
        right = _same(total, full.double(), tolerance)
        assert right, f"{what}: terms of replica {replica} do not add up"
    # Ranks that differ only along B axes have equal terms, so each term equals their mean.
    if inside:
        mean = oracle.cut(sums[len(replicas) + my_term], extent) / len(replicas)
        assert torch.allclose(mean, part.double()), f"{what}: replicas of a term differ"


def _check_extremum(world, part, layout, full, what):
    """Check that the extremum over each replica's terms is the value, and that replicas of a term
    are equal.
    """
    sign = 1.0 if oracle.reduction(layout) == "max" else -1.0
    replicas, mine = _cells(world.rank, layout, Broadcast)
    terms, my_term = _cells(world.rank, layout, (Split, Partial))
    # Compute each replica's maximum, and each term's maximum and minimum (as the maximum of -term).
    best = torch.full((len(replicas) + 2 * len(terms), *full.shape), -torch.inf).double()
    extent = oracle.extent(layout, full.shape, world.rank) if mine is not None else None
    if extent is not None:
        signed = sign * part.double()
        oracle.cut(best[mine], extent).copy_(signed)
        oracle.cut(best[len(replicas) + my_term], extent).copy_(signed)
        oracle.cut(best[len(replicas) + len(terms) + my_term], extent).copy_(-signed)
    dist.all_reduce(best, dist.ReduceOp.MAX, group=world.link(range(world.size), "oracle").group)
    for replica, value in zip(replicas, best, strict=False):
        right = torch.equal(value, sign * full.double())
        assert right, f"{what}: the extremum of replica {replica} is another"
    if extent is not None:
        highest, lowest = best[len(replicas) :].view(2, len(terms), *full.shape)[:, my_term]
        same = torch.equal(oracle.cut(highest, extent), -oracle.cut(lowest, extent))
        assert same, f"{what}: replicas of a term differ"


def _cells(rank, layout, kinds):
    """Return all coordinates along the axes whose sbp is one of ``kinds``, and the coordinate of
    ``rank``.
    """
    sizes = [
        size if isinstance(sbp, kinds) else 1
        for sbp, size in zip(layout.nd_sbp, layout.placement.shape, strict=True)
    ]
    cells = list(itertools.product(*map(range, sizes)))
    coord = oracle.coordinate(layout, rank)
    if coord is None:
        return cells, None
    here = tuple(0 if size == 1 else at for at, size in zip(coord, sizes, strict=True))
    return cells, cells.index(here)


def _same(a, b, tolerance):
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance) if tolerance else torch.equal(a, b)


def check_conversion(world, boxing, src, dst, shape, dtype, grad_sbp=None, products=None):
    """Check the forward's values, local parts, collectives and bytes, and the backward's exact
    gradient and adjoint identity.

    The two inner products of the identity are added to ``products``, for ``check_products`` to
    compare. The gradient of P(max) has the placement of the terms, because it comes from a consumer
    of the value.
    """
    what = f"{src} -> {dst} {dtype} {list(shape)}"
    full = whole_numbers(shape, dtype)
    shares = oracle.shares(full, src, seed=1)
    part = on_device(world, shares, src, dtype)
    differentiable = dtype.is_floating_point
    x = GlobalTensor.from_local(part, src, shape, boxing)
    if differentiable:
        x.requires_grad_()
    with Meter() as forward:
        y = x.to(dst, grad_sbp)
    check_parts(world, y.part.detach(), dst, full, what)
    stop = src
    if differentiable and dst.has_extremum and src != dst:
        stop = last_linear_layout(src, dst, shape, dtype)
    planned = [
        step
        for a, b in [(src, stop), (stop, dst)]
        for step in plan_boxing(a, b, shape, dtype, id="to")
    ]
    check_traffic(world, forward, planned, what)
    if differentiable:
        if dst.has_extremum:
            y = y.to(tuple(Broadcast() if isinstance(s, Partial) else s for s in dst.nd_sbp))
        grad_layout = Layout(dst.placement, grad_sbp) if grad_sbp else y.layout.dual()
        cotangent = whole_numbers(shape, dtype, step=5)
        if src.has_extremum:
            check_holders(world, x, y, shares, cotangent, what)
            return forward.names
        sides = check_gradient(world, x, y, grad_layout, cotangent, what)
        pairs = [] if products is None else products
        if grad_layout == y.layout.dual():
            pairs.append((what, sides))
        if products is None:
            check_products(world, pairs)
    return forward.names


def check_products(world, pairs):
    """Check <Ax, y> = <x, A'y> for every conversion, in one sum over the ranks."""
    if pairs:
        totals = sum_over_ranks(world, torch.stack([sides for _, sides in pairs])).tolist()
        for (what, _), (left, right) in zip(pairs, totals, strict=True):
            assert left == right, f"{what}: <Ax, y> = {left}, <x, A'y> = {right}"


def check_traffic(world, meter, steps, what):
    """Check that c10d's collectives send the bytes of this rank's plan."""
    mine = [step for step in steps if step.group_of(world.rank)]
    assert meter.names == [step.collective for step in mine], f"{what}: ran {meter.names}"
    planned = sum(step.bytes_sent(world.rank) for step in mine)
    # An all-reduce's ring may divide sizes unevenly; the difference is below one element per rank.
    assert abs(meter.bytes_sent - planned) < 16 * (1 + len(mine)), f"{what}: {meter.calls}"


def check_gradient(world, x, y, grad_layout, cotangent, what):
    """Check dL/dx for L = <y, c>, with c in the layout dual(src); return this rank's shares of <Ax,
    c> and <x, A'c>.
    """
    seed, gradient = _propagate(world, x, y, grad_layout, cotangent, what)
    check_parts(world, gradient, x.layout.dual(), cotangent, f"gradient of {what}")
    products = [(y.part.detach(), seed), (x.part.detach(), gradient)]
    return torch.stack([(a.double() * b.double()).sum().cpu() for a, b in products])


def _propagate(world, x, y, grad_layout, cotangent, what):
    seeds = oracle.shares(cotangent, grad_layout, seed=2)
    seed = on_device(world, seeds, grad_layout, cotangent.dtype)
    torch.autograd.backward([y.part], [seed])
    gradient = x.part.grad
    assert gradient is not None, f"{what}: no gradient"
    return seed, gradient


def check_holders(world, x, y, shares, cotangent, what):
    """Check dL/dx for L = <y, c> and x in P(max): the first term that has the extremum gets all of
    c, and gradients of copies along B axes add up to c.
    """
    _, gradient = _propagate(world, x, y, y.layout.dual(), cotangent, what)
    assert gradient.shape == x.part.shape, f"{what}: a gradient of {list(gradient.shape)}"
    places = len(_cells(world.rank, x.layout, Partial)[0])
    value = whole_numbers(x.shape, x.dtype)
    holds = torch.zeros((places, *x.shape), dtype=torch.bool)
    got = torch.zeros((places, *x.shape), dtype=torch.float64)
    for rank, share in shares.items():
        extent = oracle.extent(x.layout, x.shape, rank)
        _, place = _cells(rank, x.layout, Partial)
        oracle.cut(holds[place], extent).copy_(share == oracle.cut(value, extent))
        if rank == world.rank:
            oracle.cut(got[place], extent).add_(gradient.cpu())
    first = holds & (holds.int().cumsum(0) == 1)
    right = torch.equal(sum_over_ranks(world, got), first * cotangent.double())
    assert right, f"gradient of {what}: not with the first holder"


def convert_all(world, src_ranks, dst_ranks, values, shapes, dtype_names, expected=None):
    """Convert every pair of ``values`` between the placements; ``expected`` names the
    collectives.
    """
    boxing = Boxing(world)
    products = []
    count = 0
    for shape, name in itertools.product(shapes, dtype_names):
        dtype = getattr(torch, name)
        for a, b in itertools.product(values, repeat=2):
            src = Layout(Placement.of(world.device.type, src_ranks), a)
            dst = Layout(Placement.of(world.device.type, dst_ranks), b)
            names = check_conversion(world, boxing, src, dst, shape, dtype, products=products)
            if expected is not None and world.rank in src.placement:
                wanted = expected[format_nd_sbp(a), format_nd_sbp(b)]
                assert names == wanted, f"{src} -> {dst} {list(shape)} ran {names}, not {wanted}"
            count += 1
    check_products(world, products)
    return count


def one_axis(dims, partial=True):
    """Return the 1-D layouts: S for each of ``dims``, B, and, if ``partial``, P."""
    values = [(Split(dim),) for dim in dims] + [(Broadcast(),)]
    return values + ([(Partial(),)] if partial else [])


# The collectives that gloo runs to convert between two layouts on the same placement of several
# ranks. The table is written by hand, for readers; no change to the planner may change it.
NONE, GATHER, EXCHANGE, REDUCE = [], ["all_gather"], ["all_to_all"], ["all_reduce"]
SAME_PLACEMENT = {
    ("S", "S"): NONE,
    ("S", "S'"): EXCHANGE,
    ("S", "B"): GATHER,
    ("S", "P"): NONE,
    ("B", "S"): NONE,
    ("B", "B"): NONE,
    ("B", "P"): NONE,
    ("P", "S"): EXCHANGE,
    ("P", "B"): REDUCE,
    ("P", "P"): NONE,
}


def expected_names(values):
    """Return ``SAME_PLACEMENT`` for given 1-D layouts, by their text."""
    table = {}
    for (a,), (b,) in itertools.product(values, repeat=2):
        kinds = (str(a)[0], str(b)[0] if a == b or str(b)[0] != "S" else "S'")
        if kinds[0] != "S" and kinds[1] == "S'":
            kinds = (kinds[0], "S")
        table[str(a), str(b)] = SAME_PLACEMENT[kinds]
    return table
