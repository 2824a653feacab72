"""Compiled loops that admit and evict keys, and remove idle keys."""

import numpy as np

from sbpflow.embedding.vocabulary.entries import (
    HALF,
    REMOVED,
    bucket_of,
    free_counter,
    free_row,
    log_change,
    take_row,
)
from sbpflow.embedding.vocabulary.key_map import (
    COUNT,
    EDGE,
    FIRST,
    FIRST_BUCKET,
    IN_NEW,
    IS_LFU,
    LAST,
    NEW_SCALE,
    NOW,
    PENDING,
    SCALE,
    SHIFT,
    STEP_START,
    U64,
    Arrays,
    address_at,
    address_of,
    entry_of,
    home,
    place_of,
    remove_at,
    set_address,
    set_slot,
    slot_at,
    slot_of,
)
from sbpflow.runtime.compute.compiled import Array, compiled


@compiled
def _is_before(state: Array, rows: Array, row_counts: Array, a: int, b: int) -> bool:
    """Return True if row ``a`` is evicted before row ``b``."""
    if state[IS_LFU] and row_counts[a] != row_counts[b]:
        return row_counts[a] < row_counts[b]
    if rows[a, LAST] != rows[b, LAST]:
        return rows[a, LAST] < rows[b, LAST]
    return address_at(rows, rows, a) < address_at(rows, rows, b)


@compiled
def _sift_down(
    state: Array, rows: Array, row_counts: Array, heap: Array, at: int, size: int
) -> None:
    while True:
        child = 2 * at + 1
        if child >= size:
            return
        if child + 1 < size and _is_before(
            state, rows, row_counts, heap[child, 0], heap[child + 1, 0]
        ):
            child += 1
        if not _is_before(state, rows, row_counts, heap[at, 0], heap[child, 0]):
            return
        heap[at, 0], heap[child, 0] = heap[child, 0], heap[at, 0]
        at = child


@compiled
def _offer(state: Array, rows: Array, row_counts: Array, heap: Array, size: int, row: int) -> int:
    """Keep ``row`` if it is among the first rows to evict; the heap's top is the last of them."""
    if size < heap.shape[0]:
        heap[size, 0] = row
        at = size
        while at > 0 and _is_before(state, rows, row_counts, heap[(at - 1) // 2, 0], heap[at, 0]):
            above = (at - 1) // 2
            heap[at, 0], heap[above, 0] = heap[above, 0], heap[at, 0]
            at = above
        return size + 1
    if _is_before(state, rows, row_counts, row, heap[0, 0]):
        heap[0, 0] = row
        _sift_down(state, rows, row_counts, heap, 0, size)
    return size


@compiled
def _first_address(state: Array, bucket: int) -> int:
    return (bucket + state[FIRST_BUCKET] - HALF) << SHIFT


@compiled
def _range_of(state: Array, first: int, last: int, is_new: bool) -> tuple[int, int]:
    """Return the home slots [start, stop) of buckets [first, last) in one of the arrays."""
    scale = state[NEW_SCALE] if is_new else state[SCALE]
    start = home(_first_address(state, first), scale, state[FIRST])
    # The last address of the previous bucket is used, because the end of the last bucket overflows.
    stop = home(_first_address(state, last) - 1, scale, state[FIRST]) + 1
    return (start if is_new else max(start, state[EDGE])), stop


@compiled
def _queue_victims(
    state: Array,
    slots: Array,
    new_slots: Array,
    rows: Array,
    pending: Array,
    row_counts: Array,
    victims: Array,
    heads: Array,
    tails: Array,
    bucket: int,
) -> None:
    """Find the rows of a bucket that are evicted first, excluding rows used by this step."""
    heap, size = victims[bucket], 0
    for is_new in (False, True):
        if is_new and state[EDGE] == 0:
            continue
        array = new_slots if is_new else slots
        at, stop = _range_of(state, bucket, bucket + 1, is_new)
        while at < stop or (at < array.shape[0] and array[at, 0] != U64(0)):
            entry = entry_of(array[at, 0])
            if 0 <= entry < PENDING and rows[entry, LAST] < state[STEP_START]:
                if bucket_of(state, address_at(rows, pending, entry)) == bucket:
                    size = _offer(state, rows, row_counts, heap, size, entry)
            at += 1
    heads[bucket], tails[bucket] = 0, size
    while size > 1:  # sort: the top of the heap is evicted last
        size -= 1
        heap[0, 0], heap[size, 0] = heap[size, 0], heap[0, 0]
        _sift_down(state, rows, row_counts, heap, 0, size)
    for i in range(tails[bucket]):
        heap[i, 1] = rows[heap[i, 0], LAST]


@compiled
def _next_victim(
    state: Array,
    slots: Array,
    new_slots: Array,
    rows: Array,
    pending: Array,
    row_counts: Array,
    victims: Array,
    heads: Array,
    tails: Array,
    bucket: int,
) -> int:
    """Return the row to evict from a bucket, or -1 if this step uses all its rows."""
    for attempt in range(2):
        while heads[bucket] < tails[bucket]:
            row, last = victims[bucket, heads[bucket]]
            heads[bucket] += 1
            # A row that was used or reassigned since the search is no longer the next.
            if rows[row, LAST] == last and last < state[STEP_START]:
                return row
        if attempt == 0:
            _queue_victims(
                state, slots, new_slots, rows, pending, row_counts, victims, heads, tails, bucket
            )
    return -1


@compiled
def decide(
    t: Arrays, candidates: Array, log: Array, new_rows: Array, admitted: Array, sizes: Array
) -> None:
    """Admit ``candidates`` in the order of their addresses, and evict keys from full buckets.

    The counters ``admitted`` have the count -1 - row until ``resolve``. The numbers of ``log``
    entries, ``new_rows``, and evictions are written to ``sizes``.
    """
    state, slots, new_slots, rows, row_counts = t.state, t.slots, t.new_slots, t.rows, t.row_counts
    free_rows, pending, live, room, victims = t.free_rows, t.pending, t.live, t.room, t.victims
    heads, tails = t.heads, t.tails
    now, num_log, num_new, num_evicted = state[NOW], 0, 0, 0
    if state[IS_LFU]:
        heads[:] = tails[:]  # counts have changed, so the order has, too
    addresses = np.empty(candidates.size, np.int64)
    for i in range(candidates.size):
        addresses[i] = address_at(rows, pending, PENDING + candidates[i])
    order = np.argsort(addresses)
    for i in range(candidates.size):
        p, address = candidates[order[i]], int(addresses[order[i]])
        bucket = bucket_of(state, address)
        if live[bucket] >= room[bucket]:
            victim = _next_victim(
                state, slots, new_slots, rows, pending, row_counts, victims, heads, tails, bucket
            )
            if victim < 0:
                continue
            evicted = address_at(rows, pending, victim)
            count = row_counts[victim] if state[IS_LFU] else 0
            last = rows[victim, LAST]
            num_log = log_change(log, num_log, REMOVED, victim, evicted, last, count)
            free_row(state, slots, new_slots, rows, pending, free_rows, live, victim, evicted)
            num_evicted += 1
        row, op = take_row(state, free_rows)
        last, count = pending[p, LAST], pending[p, COUNT]
        num_log = log_change(log, num_log, REMOVED, PENDING + int(p), address, last, count)
        num_log = log_change(log, num_log, op, row, address, 0, 0)
        set_slot(
            slots,
            new_slots,
            place_of(state, slots, new_slots, rows, pending, address),
            slot_of(address, row),
        )
        set_address(rows, row, address)
        rows[row, LAST] = now
        if state[IS_LFU]:
            row_counts[row] = count
        live[bucket] += 1
        pending[p, COUNT] = -1 - row
        new_rows[num_new], admitted[num_new] = row, p
        num_new += 1
    sizes[0], sizes[1], sizes[2] = num_log, num_new, num_evicted


@compiled
def sweep(
    t: Arrays, first: int, last: int, row_limit: int, pending_limit: int, log: Array, sizes: Array
) -> None:
    """Remove keys of buckets [first, last) that were last used before the batch of a limit."""
    state, slots, new_slots, rows, row_counts = t.state, t.slots, t.new_slots, t.rows, t.row_counts
    free_rows, pending, free_pending, live = t.free_rows, t.pending, t.free_pending, t.live
    num_log = num_evicted = num_forgotten = p = address = 0
    for is_new in (False, True):
        if is_new and state[EDGE] == 0:
            continue
        array = new_slots if is_new else slots
        at, stop = _range_of(state, first, last, is_new)
        while at < stop or (at < array.shape[0] and array[at, 0] != U64(0)):
            entry = entry_of(array[at, 0])
            if entry >= PENDING:
                p = entry - PENDING
                is_old = pending[p, LAST] < pending_limit
            else:
                is_old = entry >= 0 and rows[entry, LAST] < row_limit
            if is_old:
                address = address_at(rows, pending, entry)
                is_old = first <= bucket_of(state, address) < last
            if not is_old:
                at += 1
                continue
            # Removal moves a later entry here, so stay at this slot.
            if entry >= PENDING:
                count, used = pending[p, COUNT], pending[p, LAST]
                num_log = log_change(log, num_log, REMOVED, entry, address, used, count)
                remove_at(state, slots, new_slots, rows, pending, at + (IN_NEW if is_new else 0))
                free_counter(state, pending, free_pending, p)
                num_forgotten += 1
            else:
                count = int(row_counts[entry]) if state[IS_LFU] else 0
                used = rows[entry, LAST]
                num_log = log_change(log, num_log, REMOVED, entry, address, used, count)
                free_row(state, slots, new_slots, rows, pending, free_rows, live, entry, address)
                num_evicted += 1
    sizes[0], sizes[1], sizes[2] = num_log, num_evicted, num_forgotten


@compiled
def count_entries(t: Arrays, first: int, last: int) -> int:
    """Return an upper bound of the number of entries in buckets [first, last)."""
    state, slots, new_slots = t.state, t.slots, t.new_slots
    count = 0
    for is_new in (False, True):
        if is_new and state[EDGE] == 0:
            continue
        array = new_slots if is_new else slots
        at, stop = _range_of(state, first, last, is_new)
        while at < stop or (at < array.shape[0] and array[at, 0] != U64(0)):
            count += array[at, 0] != U64(0)
            at += 1
    return count


@compiled
def erase(t: Arrays, keys: Array, sizes: Array) -> Array:
    """Remove keys; return their rows. The numbers of rows and counters are written to ``sizes``."""
    state, slots, new_slots, rows, free_rows = t.state, t.slots, t.new_slots, t.rows, t.free_rows
    pending, free_pending, live = t.pending, t.free_pending, t.live
    freed, num_rows = np.empty(keys.size, np.int64), 0
    for i in range(keys.size):
        address = address_of(keys[i])
        place = place_of(state, slots, new_slots, rows, pending, address)
        entry = entry_of(slot_at(slots, new_slots, place))
        if entry >= PENDING:
            remove_at(state, slots, new_slots, rows, pending, place)
            free_counter(state, pending, free_pending, entry - PENDING)
            sizes[1] += 1
        elif entry >= 0:
            free_row(state, slots, new_slots, rows, pending, free_rows, live, entry, address)
            freed[num_rows] = entry
            num_rows += 1
    sizes[0] = num_rows
    return freed[:num_rows]
