"""Tests slot planning: capacity, one slot per row, Belady's MIN, and equal decisions with numba and
with numpy.
"""

import numpy as np
import pytest

from sbpflow.embedding.cache import slot_planner
from sbpflow.embedding.cache.slot_layout import find_loops
from sbpflow.embedding.cache.slot_planner import Admission, SlotPlanner

ROWS = 300


@pytest.fixture(params=[True, False], ids=["numba", "numpy"])
def compiled(request) -> bool:
    if request.param:
        pytest.importorskip("numba")
    return request.param


def trace(seed, num_batches=60, size=40):
    """Return batches of skewed rows with duplicates; some batches contain the absent address."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, size, num_batches)
    return [
        (rng.random(n) ** 3 * (ROWS + 1)).astype(np.int32 if n % 2 else np.int64) for n in sizes
    ]


def unique(batch):
    return set(batch.tolist()) - {ROWS}


class Mirror:
    """Tracks the slots as the store would fill them, and checks them after every admission."""

    def __init__(self, num_slots):
        self.num_slots, self.slot_of, self.stored = num_slots, {}, set()
        self.fetched = self.new = 0

    def apply(self, found: Admission):
        for row, slot in zip(found.evicted.tolist(), found.evicted_slots.tolist(), strict=True):
            assert self.slot_of.pop(row) == slot
            self.stored.add(row)
        assert self.stored.issuperset(found.stored.tolist())
        assert self.stored.isdisjoint(found.new.tolist())
        missing = [*found.stored.tolist(), *found.new.tolist()]
        slots = [*found.stored_slots.tolist(), *found.new_slots.tolist()]
        for row, slot in zip(missing, slots, strict=True):
            assert row not in self.slot_of
            self.slot_of[row] = slot
        assert len(set(self.slot_of.values())) == len(self.slot_of) <= self.num_slots
        assert all(0 <= slot < self.num_slots for slot in self.slot_of.values())
        self.fetched += found.num_rows
        self.new += found.new.size


def run(batches, num_slots, known, ahead, compiled, cancel_from=None, num_threads=1):
    """Train with ``known`` announced batches, of which up to ``ahead`` are admitted early."""
    planner = SlotPlanner(ROWS, num_slots, compiled=compiled, num_threads=num_threads)
    mirror = Mirror(num_slots)
    decisions = []
    for step in range(len(batches)):
        while planner.num_announced < min(step + known + 1, len(batches)):
            batch = batches[planner.num_announced]
            assert planner.announce(batch) == len(unique(batch))
        if cancel_from is not None and step >= cancel_from:
            planner.release()
            continue
        while planner.num_admitted <= min(step + ahead, planner.num_announced - 1):
            found = planner.admit()
            if isinstance(found, int):
                leased = set().union(*map(unique, batches[step : planner.num_admitted + 1]))
                assert found == len(leased) > num_slots
                assert planner.num_admitted > step, "one batch fits"
                break
            decisions.append([array.copy() for array in found])
            mirror.apply(found)
        assert planner.num_leased == len(
            set().union(*map(unique, batches[step : planner.num_admitted]))
        )
        slots = np.empty(batches[step].size, np.int64)
        assert planner.translate(batches[step], slots) == 0
        for row, slot in zip(batches[step].tolist(), slots.tolist(), strict=True):
            assert slot == (num_slots if row == ROWS else mirror.slot_of[row])
        planner.release()
    return planner, mirror, decisions


@pytest.mark.parametrize("seed", range(12))
def test_capacity_holds_and_every_row_has_one_slot(compiled, seed):
    rng = np.random.default_rng(1000 + seed)
    batches = trace(seed)
    most = max(len(unique(batch)) for batch in batches)
    num_slots = most + int(rng.integers(0, 60))
    known, ahead = int(rng.integers(1, 30)), int(rng.integers(0, 3))
    planner, mirror, _ = run(batches, num_slots, known, ahead, compiled)
    assert planner.num_leased == 0
    assert mirror.fetched > mirror.new > 0


@pytest.mark.parametrize("num_threads", [3, 4])
def test_lanes_plan_in_parallel(monkeypatch, compiled, num_threads):
    monkeypatch.setattr(slot_planner, "LEAST_LANE", 32)
    batches = trace(num_threads, size=30)
    planner, mirror, _ = run(batches, 200, 9, 1, compiled, num_threads=num_threads)
    assert len(planner._lanes) == {3: 2, 4: 4}[num_threads]
    assert planner.num_leased == 0
    assert mirror.stored
    assert mirror.fetched > mirror.new > 0


@pytest.mark.parametrize("seed", range(6))
def test_lanes_are_merged_if_a_batch_does_not_fit_in_them(monkeypatch, compiled, seed):
    monkeypatch.setattr(slot_planner, "LEAST_LANE", 8)
    batches = trace(seed, 80)
    num_slots = max(len(unique(batch)) for batch in batches) + 3
    planner, mirror, _ = run(batches, num_slots, 1 + 3 * seed, seed % 3, compiled, num_threads=4)
    assert len(planner._lanes) == 1
    assert planner.num_leased == 0
    assert mirror.fetched > mirror.new > 0


@pytest.mark.parametrize("seed", range(6))
def test_numba_and_numpy_make_the_same_decisions(seed):
    pytest.importorskip("numba")
    batches = trace(seed, 80)
    results = [
        run(batches, 50 + 5 * seed, 1 + 4 * seed, seed % 3, form)[2] for form in (True, False)
    ]
    for one, other in zip(*results, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def belady(batches, num_slots):
    """Return how many rows MIN fetches; MIN keeps a batch's rows, and evicts the other rows whose
    next use is furthest away.
    """
    cached, fetched = set(), 0
    uses = {}
    for number, batch in enumerate(batches):
        for row in unique(batch):
            uses.setdefault(row, []).append(number)
    for number, batch in enumerate(batches):
        wanted = unique(batch)
        fetched += len(wanted - cached)
        cached |= wanted
        excess = len(cached) - num_slots
        if excess > 0:
            after = {
                row: min((u for u in uses[row] if u > number), default=10**9) for row in cached
            }
            idle = sorted(cached - wanted, key=after.__getitem__)
            cached -= set(idle[len(idle) - excess :])
    return fetched


@pytest.mark.parametrize("seed", range(4))
def test_fetches_are_minimal_if_all_batches_are_known(compiled, seed):
    batches = trace(seed)
    for num_slots in (45, 70, 120):
        _, mirror, _ = run(batches, num_slots, len(batches), 0, compiled)
        assert mirror.fetched == belady(batches, num_slots)


def test_the_longest_unused_row_leaves_first():
    planner = SlotPlanner(10, 4)
    for rows in ([0, 1], [2, 3], [4], [5]):
        planner.announce(np.array(rows))
        found = planner.admit()
        planner.release()
    assert found.evicted.tolist() == [1]
    planner.announce(np.array([0]))
    assert planner.admit().evicted.tolist() == [2]


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.int16, np.uint8])
def test_rows_are_copied_to_and_from_columns(compiled, dtype):
    loops, rng = find_loops(compiled=compiled), np.random.default_rng(1)
    source = rng.integers(0, 200, (90, 3)).astype(dtype)
    for rows in (rng.permutation(90)[:50].astype(np.int32), np.arange(0), np.array([89, 0])):
        records = np.full((rows.size, 7), 201).astype(dtype)
        loops.take(source, rows, records, 2)
        assert np.array_equal(records[:, 2:5], source[rows])
        assert (np.delete(records, np.s_[2:5], 1) == np.array(201).astype(dtype)).all()
        target = np.zeros_like(source)
        loops.put(target, rows, records, 2)
        assert np.array_equal(target[rows], source[rows])
        assert target.any(1).sum() <= rows.size


def test_canceled_batches_leave_no_lease(compiled):
    batches = trace(3)
    planner, mirror, _ = run(batches, 60, 8, 1, compiled, cancel_from=30)
    assert planner.num_leased == 0
    assert planner.num_released == planner.num_announced == len(batches)
    for batch in trace(4, 20):
        planner.announce(batch)
        mirror.apply(planner.admit())
        planner.release()
    assert planner.num_leased == 0
