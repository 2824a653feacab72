"""Compiled steps that take and free the rows and counters of a vocabulary, and log this."""

from typing import Any

from sbpflow.embedding.plan.growth import NUM_BUCKETS
from sbpflow.embedding.vocabulary.key_map import (
    COUNT,
    FIRST_BUCKET,
    FREE_PENDING,
    FREE_ROWS,
    LAST,
    NEXT_PENDING,
    NEXT_ROW,
    SHIFT,
    remove,
)
from sbpflow.runtime.compute.compiled import Array, compiled

# Operations in a log of changes: an entry was taken from the stack of free entries, was taken from
# the end of the used entries, or was removed.
TAKEN, NEW, REMOVED = 0, 1, 2
HALF = NUM_BUCKETS // 2  # addresses are signed


@compiled
def bucket_of(state: Array, address: int) -> int:
    """Return the bucket of an address, counted from this part's first bucket."""
    return (address >> SHIFT) + HALF - state[FIRST_BUCKET]


@compiled
def log_change(log: Array, n: int, op: int, entry: int, address: int, last: int, count: int) -> int:
    log[n, 0], log[n, 1], log[n, 2], log[n, 3], log[n, 4] = op, entry, address, last, count
    return n + 1


@compiled
def take_pending(state: Array, free_pending: Array) -> tuple[Any, int]:
    if state[FREE_PENDING]:
        state[FREE_PENDING] -= 1
        return free_pending[state[FREE_PENDING]], TAKEN
    state[NEXT_PENDING] += 1
    return state[NEXT_PENDING] - 1, NEW


@compiled
def take_row(state: Array, free_rows: Array) -> tuple[Any, int]:
    if state[FREE_ROWS]:
        state[FREE_ROWS] -= 1
        return free_rows[state[FREE_ROWS]], TAKEN
    state[NEXT_ROW] += 1
    return state[NEXT_ROW] - 1, NEW


@compiled
def free_row(
    state: Array,
    slots: Array,
    new_slots: Array,
    rows: Array,
    pending: Array,
    free_rows: Array,
    live: Array,
    row: int,
    address: int,
) -> None:
    remove(state, slots, new_slots, rows, pending, address)
    rows[row, LAST] = -1
    free_rows[state[FREE_ROWS]] = row
    state[FREE_ROWS] += 1
    live[bucket_of(state, address)] -= 1


@compiled
def free_counter(state: Array, pending: Array, free_pending: Array, p: int) -> None:
    pending[p, LAST], pending[p, COUNT] = -1, 0
    free_pending[state[FREE_PENDING]] = p
    state[FREE_PENDING] += 1
