"""Rows that cache policies fetch at equal capacity: Belady's MIN, LRU, LFU, Bagpipe's rule, ours.

A trace is a list of batches, each an array of unique rows. All rows of a batch are in the cache
while it is trained; only the choice of the rows that leave differs. Of the rows fetched, those
that no earlier batch used have initial values, which need not be read.
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
    """Rows per step, on average over the trace."""

    fetched: float
    read: float  # of the rows fetched, those that an earlier batch used


def belady(trace: Trace, num_rows: int, capacity: int) -> Fetches:
    """Rows with the furthest next use leave; no policy fetches fewer."""
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
    """The least recently used rows leave."""

    def rank(values: Array, rows: Array, number: int) -> None:
        values[rows] = number

    return _simulate(trace, num_rows, capacity, rank)


def lfu(trace: Trace, num_rows: int, capacity: int) -> Fetches:
    """The least frequently used rows leave, the least recently used of them first."""

    def rank(values: Array, rows: Array, number: int) -> None:
        values[rows] = np.floor(values[rows]) + 1 + number / (len(trace) + 1)

    return _simulate(trace, num_rows, capacity, rank)


def _simulate(
    trace: Trace, num_rows: int, capacity: int, rank: Callable[[Array, Array, int], None]
) -> Fetches:
    """``rank`` updates the values of a batch's rows; the idle rows with the lowest values leave."""
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
    """Bagpipe's rule, and its largest lookahead that fits.

    With lookahead L, a row stays after a batch if one of the L batches that start with it uses the
    row again, and leaves at once otherwise. So the size of the cache follows from L.
    """
    previous = np.full(num_rows, -1, np.int64)
    since: list[Array] = []  # of each use, batches since the previous use; 0 for the first
    for number, rows in enumerate(trace):
        since.append(np.where(previous[rows] < 0, 0, number - previous[rows]))
        previous[rows] = number
    sizes = np.array([rows.size for rows in trace])
    # By the gap between two uses: how many rows a batch holds that it does not use.
    held = np.zeros((len(trace) + 1, len(trace) + 1), np.int64)
    for number, gaps in enumerate(since):
        for gap, count in enumerate(np.bincount(gaps)):
            if gap > 1 and count:
                held[gap, number - gap + 1 : number] += count
    needed = (sizes + held[:, : len(trace)].cumsum(0)).max(1)  # by the longest gap that is kept
    longest = int(np.searchsorted(needed, capacity, side="right")) - 1
    longest = min(longest, len(trace) - 1)
    first = sum(int((gaps == 0).sum()) for gaps in since)
    again = sum(int((gaps > longest).sum()) for gaps in since)
    return Fetches((first + again) / len(trace), again / len(trace)), longest + 1


def planned(
    trace: Trace, num_rows: int, capacity: int, *, known: int, ahead: int
) -> tuple[Fetches, int]:
    """``SlotPlanner`` with ``known`` batches announced ahead, and ``ahead`` of them admitted.

    Also returns how often fetch-ahead did not fit. The rows to fetch and to read follow from the
    trace and the evicted rows; SystemExit if the planner's differ.
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
                    raise SystemExit(f"a batch needs {found} slots, there are {capacity}")
                shrunk += 1
                break
            rows = trace[planner.num_admitted - 1]
            missing = rows[~cached[rows]]
            fetched += missing.size
            read += int(touched[missing].sum())
            same = np.array_equal(np.sort(found.missing), np.sort(missing))
            if not same or not np.array_equal(touched[found.missing], ~found.is_new):
                raise SystemExit(f"batch {step}: the planner fetches or reads other rows")
            cached[found.evicted] = False
            cached[rows] = touched[rows] = True
            if planner.num_leased > capacity:
                raise SystemExit(f"{planner.num_leased} rows are in {capacity} slots")
        planner.release()
    return Fetches(fetched / len(trace), read / len(trace)), shrunk
