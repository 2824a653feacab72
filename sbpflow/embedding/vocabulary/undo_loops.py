"""Compiled loops that undo logged changes, and load saved keys."""

from sbpflow.embedding.cache.prefetch import DISTANCE, prefetch
from sbpflow.embedding.vocabulary.entries import NEW, REMOVED, TAKEN, bucket_of
from sbpflow.embedding.vocabulary.key_map import (
    COUNT,
    ENTRIES,
    FIRST,
    FREE_PENDING,
    FREE_ROWS,
    IS_LFU,
    LAST,
    NEXT_PENDING,
    NEXT_ROW,
    PENDING,
    SCALE,
    U64,
    Arrays,
    home,
    insert,
    remove,
    set_address,
    slot_of,
)
from sbpflow.runtime.compute.compiled import Array, compiled


@compiled
def undo_log(t: Arrays, log: Array, with_map: bool) -> None:
    """Undo a log of changes, in reverse order; without the map, only rows and counters."""
    state, slots, new_slots, rows, row_counts = t.state, t.slots, t.new_slots, t.rows, t.row_counts
    free_rows, pending, free_pending, live = t.free_rows, t.pending, t.free_pending, t.live
    for i in range(log.shape[0] - 1, -1, -1):
        op, entry, address, last, count = log[i]
        is_row = entry < PENDING
        if op == REMOVED:
            if is_row:
                set_address(rows, entry, address)
                rows[entry, LAST] = last
                if state[IS_LFU]:
                    row_counts[entry] = count
            else:
                set_address(pending, entry - PENDING, address)
                pending[entry - PENDING, LAST] = last
                pending[entry - PENDING, COUNT] = count
        elif is_row:
            rows[entry, LAST] = -1
        else:
            pending[entry - PENDING, LAST] = -1
            pending[entry - PENDING, COUNT] = 0
        if not with_map:
            continue
        step = 1 if op == REMOVED else -1
        if op == REMOVED:
            insert(state, slots, new_slots, rows, pending, address, entry)
        else:
            remove(state, slots, new_slots, rows, pending, address)
        if is_row:
            live[bucket_of(state, address)] += step
        which = FREE_ROWS if is_row else FREE_PENDING
        if op == NEW:
            state[NEXT_ROW if is_row else NEXT_PENDING] -= 1
        elif op == TAKEN:
            stack = free_rows if is_row else free_pending
            stack[state[which]] = entry if is_row else entry - PENDING
            state[which] += 1
        else:
            state[which] -= 1


@compiled
def undo_uses(t: Arrays, uses: Array) -> None:
    """Restore old last uses and counts."""
    state, rows, row_counts, pending = t.state, t.rows, t.row_counts, t.pending
    for i in range(uses.shape[0]):
        entry, last, count = uses[i]
        if entry < 0:
            pending[-entry - 1, LAST], pending[-entry - 1, COUNT] = last, count
        else:
            rows[entry, LAST] = last
            if state[IS_LFU]:
                row_counts[entry] = count


@compiled
def load_rows(t: Arrays, addresses: Array, lasts: Array, counts: Array) -> None:
    """Give rows 0, 1, ... to the addresses of an empty vocabulary, whose map does not migrate."""
    state, slots, rows, row_counts, live = t.state, t.slots, t.rows, t.row_counts, t.live
    first, scale = state[FIRST], state[SCALE]
    for row in range(addresses.size):
        if row + DISTANCE < addresses.size:
            prefetch(slots, home(addresses[row + DISTANCE], scale, first))
        address = addresses[row]
        set_address(rows, row, address)
        rows[row, LAST] = lasts[row]
        if state[IS_LFU]:
            row_counts[row] = counts[row]
        place = home(address, scale, first)
        while slots[place, 0] != U64(0):
            place += 1
        slots[place, 0] = slot_of(address, row)
        live[bucket_of(state, address)] += 1
    state[ENTRIES] += addresses.size
    state[NEXT_ROW] = addresses.size


@compiled
def load_pending(t: Arrays, addresses: Array, lasts: Array, counts: Array) -> None:
    """Add the pending keys of a saved vocabulary."""
    state, slots, new_slots, rows, pending = t.state, t.slots, t.new_slots, t.rows, t.pending
    for p in range(addresses.size):
        set_address(pending, p, addresses[p])
        pending[p, LAST], pending[p, COUNT] = lasts[p], counts[p]
        insert(state, slots, new_slots, rows, pending, addresses[p], PENDING + p)
    state[NEXT_PENDING] = addresses.size
