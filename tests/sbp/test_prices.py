"""Tests the bytes of conversions against the published table, derivations, c10d calls and loopback
traffic.
"""

import itertools
import math
import time
from pathlib import Path
from typing import get_args

import pytest
import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import format_steps, plan_boxing
from sbpflow.boxing.step import Collective
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Partial, Split
from tests import oracle
from tests.meter import Meter
from tests.oracle import line_layout

B, P, S0, S1 = Broadcast(), Partial(), Split(0), Split(1)
# divisible by 2, 3 and 4; so large that bytes, not calls, determine the route
SHAPE = (768, 1536)
T = 768 * 1536 * 4


def _total(src, dst, backend="gloo", shape=SHAPE, dtype=torch.float32):
    steps = plan_boxing(src, dst, shape, dtype, id="x", backend=backend)
    assert all(step.collective in get_args(Collective) for step in steps)
    for step in steps:
        assert step.total_bytes == sum(step.bytes_sent(rank) for rank in range(16))
    return sum(step.total_bytes for step in steps)


def _kind(sbp):
    return str(sbp)[0]


def same_devices(a, b, p):
    """Return the cost of a -> b on one placement in OneFlow's table (sbp_infer_util.cpp), in units
    of the tensor's bytes.
    """
    if a == b:
        return 0
    return {"SS": (p - 1) / p, "SB": p - 1, "PS": p - 1, "PB": 2 * (p - 1)}.get(
        _kind(a) + _kind(b), 0
    )


def other_devices(a, b, p1, p2):
    """Return the cost of a -> b from p1 ranks to p2 other ranks, in units of the tensor's bytes;
    for example, B -> B costs p2, and B -> P and S -> P cost 1.
    """
    cost = 1 + (p2 - 1) * (_kind(b) == "B") + (p1 - 1) * (_kind(a) == "P")
    return p1 if _kind(a) == _kind(b) == "P" else cost


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("p", [2, 3, 4])
def test_conversions_on_one_placement_cost_what_the_table_says(p, backend):
    for a, b in itertools.product([S0, S1, B, P], repeat=2):
        total = _total(line_layout("cpu", p, a), line_layout("cpu", p, b), backend)
        assert total == same_devices(a, b, p) * T, f"{a} -> {b} on {p}"


@pytest.mark.parametrize(("p1", "p2"), [(2, 3), (3, 2), (1, 4), (4, 1)])
def test_conversions_between_placements_cost_what_the_table_says(p1, p2):
    src_at = Placement.of("cpu", list(range(p1)))
    dst_at = Placement.of("cpu", list(range(p1, p1 + p2)))
    for a, b in itertools.product([S0, S1, B, P], repeat=2):
        total = _total(Layout(src_at, (a,)), Layout(dst_at, (b,)))
        assert total == other_devices(a, b, p1, p2) * T, f"{a} -> {b}, {p1} to {p2}"


def test_overlap_costs_nothing():
    for a, b in itertools.product([S0, B], repeat=2):
        inside = _total(Layout(Placement.of("cpu", [0, 1]), (a,)), line_layout("cpu", 4, b))
        assert inside < other_devices(a, b, 2, 4) * T
    everywhere, one = line_layout("cpu", 4, B), Layout(Placement.of("cpu", [2]), (B,))
    assert _total(everywhere, one) == 0


def _steps(a, b, shape, p=4, backend="gloo", dtype=torch.float32, id="x"):
    src, dst = line_layout("cpu", p, a), line_layout("cpu", p, b)
    return plan_boxing(src, dst, shape, dtype, id=id, backend=backend)


def test_bytes_of_uneven_parts_include_padding():
    """An all-gather pads to the largest part; if padding would exceed a quarter, exact sizes are
    sent."""
    shape, row = (5, 8), 8 * 4
    even = _steps(S0, B, shape)[0]
    assert (even.collective, even.total_bytes) == ("all_gather", 4 * 3 * 2 * row)
    exact = _steps(Split(0, (5, 0, 0, 0)), B, shape)[0]
    assert (exact.collective, exact.total_bytes) == ("all_to_all", 3 * 5 * row)
    assert [exact.bytes_sent(rank) for rank in range(4)] == [3 * 5 * row, 0, 0, 0]


@pytest.mark.parametrize(
    ("backend", "collective"), [("gloo", "all_to_all"), ("nccl", "reduce_scatter")]
)
def test_partial_to_split_uses_the_best_collective_of_the_backend(backend, collective):
    step = _steps(P, S0, (8, 4), backend=backend)[0]
    assert (step.collective, step.total_bytes) == (collective, 3 * 8 * 4 * 4)
    assert _steps(P, S0, (7, 4), backend=backend)[0].collective == "all_to_all"


def _scheme(table_sbp, p, batch, fields, width, backend):
    """Return the bytes that a step sends for a table: ids to B, vectors to S(0), and the vectors'
    adjoint.
    """
    line = Placement.line("cpu", p)
    ids = [Layout(line, (s,)) for s in (S0, B)]
    forward = Partial() if table_sbp == S0 else Split(2)
    vectors = [Layout(line, (s,)) for s in (forward, S0)]
    shape = (batch, fields, width)
    return (
        _total(*ids, backend, (batch, fields), torch.int32),
        _total(*vectors, backend, shape),
        _total(vectors[1].dual(), vectors[0].dual(), backend, shape),
    )


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_schemes_cost_what_their_derivations_say(p, backend):
    """In total, all devices send 2 D (p-1) elements for wide tables and for deep tables of scheme
    2, and 2 D (p-1) / p for deep tables of scheme 1.

    D is the number of elements of the full vector tensor. The published comparison gives 2 D (p-1)
    / p for deep tables of scheme 2, which contradicts its own derivation. Sending the ids of B rows
    with f columns to all ranks costs B f (p-1) elements, not counting each rank's own copy.
    """
    batch, fields, width = 1024, 26, 16
    deep, wide = batch * fields * width * 4, batch * 2 * 4
    ids, there, back = _scheme(S1, p, batch, fields, width, backend)
    assert (ids, there, back) == (
        (p - 1) * batch * fields * 4,
        deep * (p - 1) // p,
        deep * (p - 1) // p,
    )
    _, there, back = _scheme(S0, p, batch, fields, width, backend)
    assert (there, back) == (deep * (p - 1), deep * (p - 1))
    _, there, back = _scheme(S0, p, batch, 2, 1, backend)
    assert (there, back) == (wide * (p - 1), wide * (p - 1))


def test_scheme_names_by_backend():
    conversions = [(Split(2), S0), (P, S0), (S0, B)]
    names = {
        backend: [
            _steps(a, b, (1024, 26, 16), backend=backend)[0].collective for a, b in conversions
        ]
        for backend in ("gloo", "nccl")
    }
    assert names["gloo"] == ["all_to_all", "all_to_all", "all_gather"]
    assert names["nccl"] == ["all_to_all", "reduce_scatter", "all_gather"]


def _loopback_bytes():
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def _carry(world, a, b, repeats):
    """Return four byte counts for ``repeats`` conversions: sent on the loopback interface, passed
    to c10d by this rank, planned for all ranks, and planned for this rank.
    """
    src, dst = line_layout("cpu", world.size, a), line_layout("cpu", world.size, b)
    full = torch.zeros(1024, 1024)
    part = oracle.shares(full, src)[world.rank]
    steps = plan_boxing(src, dst, (1024, 1024), torch.float32, id="x", backend="gloo")
    boxing = Boxing(world)
    world.checked = False  # the headers of checked mode would be counted
    shared, world._shared = world._shared, None  # new links then use the loopback
    boxing.run(steps, part, "lo")
    world.barrier()
    time.sleep(0.05)
    before = _loopback_bytes()
    world.barrier()
    with Meter() as meter:
        for _ in range(repeats):
            boxing.run(steps, part, "lo")
    world.barrier()
    carried = _loopback_bytes() - before
    world.barrier()
    world.checked, world._shared = True, shared
    planned = repeats * sum(step.total_bytes for step in steps)
    mine = repeats * sum(step.bytes_sent(world.rank) for step in steps)
    return carried, meter.bytes_sent, planned, mine


@pytest.mark.alone
@pytest.mark.skipif(
    not Path("/sys/class/net/lo/statistics/tx_bytes").exists(), reason="no counters of lo here"
)
@pytest.mark.parametrize(("a", "b"), [(S0, S1), (S0, B), (S1, B), (P, S0), (P, B)], ids=str)
def test_loopback_traffic_matches_the_plan(ranks, a, b):
    """The plan, the wrapped c10d calls, and the interface's counters, which include link headers,
    agree within 2 %.

    Other traffic on lo can only increase a measurement, so the test takes the best attempt.
    """
    best = math.inf
    for _ in range(5):
        results = ranks(2, _carry, a, b, 8)
        carried, _, planned, _ = results[0]
        for _, asked, _, mine in results:
            assert asked == pytest.approx(mine, rel=1e-6)
        assert sum(asked for _, asked, _, _ in results) == pytest.approx(planned, rel=1e-6)
        best = min(best, abs(carried / planned - 1))
        if best <= 0.02:
            return
    pytest.fail(f"{a} -> {b}: planned {planned}, loopback carried {carried}")


def test_steps_print_as_a_table():
    steps = _steps(S0, B, (8, 4), p=2, dtype=torch.int32, id="ids/fwd/0")
    text = "ids/fwd/0: S(0)@[0, 1] -> B@[0, 1] int32[8, 4]: all_gather [0, 1] 128 B"
    assert format_steps(steps) == text
    assert "nothing to do" in format_steps(())
