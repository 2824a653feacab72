"""Compares the numbers of rows fetched by cache policies of equal capacity: MIN, LRU, LFU, Bagpipe,
and ours.

A trace is a list of batches, and each batch is an array of unique rows. During the training step on
a batch, all of its rows are cached; the policies differ only in which rows they evict. A row that
no earlier batch used still has its initial values, so fetching it reads nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sbpflow.embedding.cache.slot_planner import SlotPlanner

Array = np.ndarray[Any, Any]
Trace = Sequence[Array]


@dataclass(frozen=True, slots=True)
class Fetches:
    """Rows per step, averaged over the trace."""

    fetched: float
    read: float  # fetched rows that an earlier batch used


def belady(trace: Trace, num_rows: int, capacity: int) -> Fetches:
    """Evict the rows with the latest next use; no policy fetches fewer rows."""
    nexts: list[Array] = []
    following = np.full(num_rows, len(trace), np.int64)
    for number in reversed(range(len(trace))):
        nexts.append(following[trace[number]])
        following[trace[number]] = number
    nexts.reverse()

    def rank(values: Array, rows: Array, number: int) -> None:
        values[rows] = -nexts[number]

    return _simulate(trace, num_rows, capacity, rank)


def lru(trace: Trace, num_rows: int, capacity: int) -> Fetches:
    """Evict the least recently used rows."""

    def rank(values: Array, rows: Array, number: int) -> None:
        values[rows] = number

    return _simulate(trace, num_rows, capacity, rank)


def lfu(trace: Trace, num_rows: int, capacity: int) -> Fetches:
    """Evict the least frequently used rows; among equally frequent rows, evict the least recently
    used.
    """

    def rank(values: Array, rows: Array, number: int) -> None:
        values[rows] = np.floor(values[rows]) + 1 + number / (len(trace) + 1)

    return _simulate(trace, num_rows, capacity, rank)


def _simulate(
    trace: Trace, num_rows: int, capacity: int, rank: Callable[[Array, Array, int], None]
) -> Fetches:
    """Simulate a policy: ``rank`` updates the values of a batch's rows, and rows that the batch
    does not use are evicted in ascending order of value.
    """
    cached, touched = np.zeros(num_rows, bool), np.zeros(num_rows, bool)
    values = np.zeros(num_rows)
    fetched, read, size = 0, 0, 0
    for number, rows in enumerate(trace):
        missing = rows[~cached[rows]]
        fetched += missing.size
        read += int(touched[missing].sum())
        touched[rows] = True
        size += missing.size
        cached[rows] = False
        if size > capacity:
            idle = np.flatnonzero(cached)
            leaving = idle[np.argpartition(values[idle], size - capacity - 1)[: size - capacity]]
            cached[leaving] = False
            size = capacity
        cached[rows] = True
        rank(values, rows, number)
    return Fetches(fetched / len(trace), read / len(trace))


def bagpipe(trace: Trace, num_rows: int, capacity: int) -> tuple[Fetches, int]:
    """Return the fetches under Bagpipe's rule, and the largest lookahead that fits.

    With lookahead L, a row stays after its batch if one of the next L - 1 batches uses it again,
    and otherwise leaves immediately. The size of the cache therefore follows from L.
    """
    previous = np.full(num_rows, -1, np.int64)
    since: list[Array] = []  # batches since each row's previous use; 0: first use
    for number, rows in enumerate(trace):
        since.append(np.where(previous[rows] < 0, 0, number - previous[rows]))
        previous[rows] = number
    sizes = np.array([rows.size for rows in trace])
    # held[gap, batch]: number of rows that stay cached during this batch without being used, and
    # whose previous and next uses are ``gap`` batches apart.
    held = np.zeros((len(trace) + 1, len(trace) + 1), np.int64)
    for number, gaps in enumerate(since):
        for gap, count in enumerate(np.bincount(gaps)):
            if gap > 1 and count:
                held[gap, number - gap + 1 : number] += count
    # needed[gap]: cache size if rows are kept between uses up to ``gap`` batches apart
    needed = (sizes + held[:, : len(trace)].cumsum(0)).max(1)
    longest = int(np.searchsorted(needed, capacity, side="right")) - 1
    longest = min(longest, len(trace) - 1)
    first = sum(int((gaps == 0).sum()) for gaps in since)
    again = sum(int((gaps > longest).sum()) for gaps in since)
    return Fetches((first + again) / len(trace), again / len(trace)), longest + 1


def planned(
    trace: Trace, num_rows: int, capacity: int, *, known: int, ahead: int
) -> tuple[Fetches, int]:
    """Run ``SlotPlanner`` with ``known`` batches announced in advance, of which ``ahead`` are
    admitted.

    Also return how often an early fetch did not fit. Raises SystemExit if the rows that the planner
    fetches or reads differ from those computed from the trace and the evicted rows.
    """
    planner = SlotPlanner(num_rows, capacity)
    cached, touched = np.zeros(num_rows, bool), np.zeros(num_rows, bool)
    fetched, read, shrunk = 0, 0, 0
    for step in range(len(trace)):
        while planner.num_announced < min(step + known + 1, len(trace)):
            planner.announce(trace[planner.num_announced])
        while planner.num_admitted < min(step + ahead + 1, planner.num_announced):
            found = planner.admit()
            if isinstance(found, int):
                if planner.num_admitted == step:
                    raise SystemExit(f"a batch needs {found} slots, but there are only {capacity}")
                shrunk += 1
                break
            rows = trace[planner.num_admitted - 1]
            missing = rows[~cached[rows]]
            fetched += missing.size
            read += int(touched[missing].sum())
            expected = (missing[touched[missing]], missing[~touched[missing]])
            rows_of = zip(expected, (found.stored, found.new), strict=True)
            if not all(np.array_equal(np.sort(one), np.sort(other)) for one, other in rows_of):
                raise SystemExit(
                    f"batch {step}: the planner fetches or reads rows other than the expected ones"
                )
            cached[found.evicted] = False
            cached[rows] = touched[rows] = True
            if planner.num_leased > capacity:
                raise SystemExit(
                    f"{planner.num_leased} rows are leased, but there are only {capacity} slots"
                )
        planner.release()
    return Fetches(fetched / len(trace), read / len(trace)), shrunk
