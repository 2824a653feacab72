"""Compiled loops over the keys of a batch: count, admit, evict, forget, and undo."""

import numpy as np
import torch

from sbpflow.embedding.cache.prefetch import DISTANCE, prefetch
from sbpflow.embedding.plan.growth import NUM_BUCKETS
from sbpflow.embedding.vocabulary.key_map import (
    ADMIT_COUNT,
    COUNT,
    EDGE,
    ENTRIES,
    FIRST,
    FIRST_BUCKET,
    FREE_PENDING,
    FREE_ROWS,
    HIGH,
    IN_NEW,
    IS_LFU,
    LAST,
    LOW,
    LOW_32,
    NEW_SCALE,
    NEXT_PENDING,
    NEXT_ROW,
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
    insert,
    joined,
    place_of,
    remove,
    remove_at,
    set_address,
    set_slot,
    slot_at,
    slot_of,
)
from sbpflow.runtime.compute.compiled import Array, compiled
from sbpflow.runtime.random.streams import unmix

# Operations in a log of changes: an entry was taken from the stack of free entries, was taken from
# the end of the used entries, or was removed.
TAKEN, NEW, REMOVED = 0, 1, 2
HALF = NUM_BUCKETS // 2  # addresses are signed


@compiled
def bucket_of(state: Array, address: int) -> int:
    """Return the bucket of an address, counted from this part's first bucket."""
    return (address >> SHIFT) + HALF - state[FIRST_BUCKET]


@compiled
def _log(log: Array, n: int, op: int, entry: int, address: int, last: int, count: int) -> int:
    log[n, 0], log[n, 1], log[n, 2], log[n, 3], log[n, 4] = op, entry, address, last, count
    return n + 1


@compiled
def _take_pending(state: Array, free_pending: Array) -> tuple[int, int]:
    if state[FREE_PENDING]:
        state[FREE_PENDING] -= 1
        return free_pending[state[FREE_PENDING]], TAKEN
    state[NEXT_PENDING] += 1
    return state[NEXT_PENDING] - 1, NEW


@compiled
def _take_row(state: Array, free_rows: Array) -> tuple[int, int]:
    if state[FREE_ROWS]:
        state[FREE_ROWS] -= 1
        return free_rows[state[FREE_ROWS]], TAKEN
    state[NEXT_ROW] += 1
    return state[NEXT_ROW] - 1, NEW


@compiled
def observe(
    t: Arrays,
    keys: Array,
    counts: Array,
    out: Array,
    uses: Array,
    log: Array,
    candidates: Array,
    unresolved: Array,
    sizes: Array,
) -> None:
    """Count the occurrences of ``keys`` [n], and write the row of each key that has one to ``out``.

    ``counts`` is [n], or [0] if every key occurs once. The numbers of written ``uses`` (old last
    uses and counts), ``log`` entries, ``candidates`` for admission (counters), and ``unresolved``
    places of keys without rows are written to ``sizes``.
    """
    state, slots, new_slots, rows, row_counts = t.state, t.slots, t.new_slots, t.rows, t.row_counts
    pending, free_pending = t.pending, t.free_pending
    now, admit_count, is_lfu = state[NOW], state[ADMIT_COUNT], state[IS_LFU]
    first, scale, edge = state[FIRST], state[SCALE], state[EDGE]
    num_uses = num_log = num_candidates = num_unresolved = 0
    n = keys.size
    # The search is written out here and in ``find_all``: as a function of several arrays it takes
    # four times as long. Slots and entries are prefetched, one after the other.
    for i in range(n):
        if i + 2 * DISTANCE < n:
            prefetch(slots, home(address_of(keys[i + 2 * DISTANCE]), scale, first))
        if i + DISTANCE < n:
            ahead = entry_of(slots[home(address_of(keys[i + DISTANCE]), scale, first), 0])
            if ahead >= PENDING:
                prefetch(pending, ahead - PENDING)
            elif ahead >= 0:
                prefetch(rows, ahead)
        address = address_of(keys[i])
        count = counts[i] if counts.size else 1
        place, tag = home(address, scale, first), U64(address) & U64(LOW_32)
        if place >= edge:
            slot = slots[place, 0]
            entry = entry_of(slot)
            while entry >= 0:
                if slot >> U64(32) == tag:
                    if entry < PENDING:
                        other = joined(rows[entry, HIGH], rows[entry, LOW])
                    else:
                        p = entry - PENDING
                        other = joined(pending[p, HIGH], pending[p, LOW])
                    if other == address:
                        break
                place += 1
                slot = slots[place, 0]
                entry = entry_of(slot)
        else:
            place = place_of(state, slots, new_slots, rows, pending, address)
            entry = entry_of(slot_at(slots, new_slots, place))
        if entry < 0:
            p, op = _take_pending(state, free_pending)
            entry = PENDING + p
            set_address(pending, p, address)
            pending[p, LAST], pending[p, COUNT] = now, count
            set_slot(slots, new_slots, place, slot_of(address, entry))
            state[ENTRIES] += 1
            num_log = _log(log, num_log, op, entry, address, 0, 0)
            is_candidate = count >= admit_count
        elif entry >= PENDING:
            p = entry - PENDING
            before = pending[p, COUNT]
            is_first = pending[p, LAST] != now
            if is_first:
                uses[num_uses, 0] = -p - 1
                uses[num_uses, 1], uses[num_uses, 2] = pending[p, LAST], before
                num_uses += 1
                pending[p, LAST] = now
            pending[p, COUNT] = min(before + count, 2**30)
            is_candidate = before + count >= admit_count and (is_first or before < admit_count)
        else:
            if rows[entry, LAST] != now:
                uses[num_uses, 0], uses[num_uses, 1] = entry, rows[entry, LAST]
                uses[num_uses, 2] = row_counts[entry] if is_lfu else 0
                num_uses += 1
                rows[entry, LAST] = now
            if is_lfu:
                row_counts[entry] = min(row_counts[entry] + count, 2**30)
            out[i] = entry
            continue
        if is_candidate:
            candidates[num_candidates] = p
            num_candidates += 1
        out[i] = p
        unresolved[num_unresolved] = i
        num_unresolved += 1
    sizes[0], sizes[1], sizes[2], sizes[3] = num_uses, num_log, num_candidates, num_unresolved


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
        p, address = candidates[order[i]], addresses[order[i]]
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
            num_log = _log(log, num_log, REMOVED, victim, evicted, last, count)
            _free_row(state, slots, new_slots, rows, pending, free_rows, live, victim, evicted)
            num_evicted += 1
        row, op = _take_row(state, free_rows)
        last, count = pending[p, LAST], pending[p, COUNT]
        num_log = _log(log, num_log, REMOVED, PENDING + p, address, last, count)
        num_log = _log(log, num_log, op, row, address, 0, 0)
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
def _free_row(
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
def _free_pending(state: Array, pending: Array, free_pending: Array, p: int) -> None:
    pending[p, LAST], pending[p, COUNT] = -1, 0
    free_pending[state[FREE_PENDING]] = p
    state[FREE_PENDING] += 1


@compiled
def resolve(
    t: Arrays, counts: Array, unresolved: Array, admitted: Array, out: Array, sizes: Array
) -> None:
    """Write the rows of admitted keys to ``out``, and -1 for other keys; count the latter."""
    state, pending, free_pending = t.state, t.pending, t.free_pending
    num_pending = num_refused = 0
    for j in range(unresolved.size):
        i = unresolved[j]
        known = pending[out[i], COUNT]
        if known < 0:
            out[i] = -1 - known
            continue
        count = counts[i] if counts.size else 1
        if known >= state[ADMIT_COUNT]:
            num_refused += count
        else:
            num_pending += count
        out[i] = -1
    for j in range(admitted.size):
        _free_pending(state, pending, free_pending, admitted[j])
    sizes[0], sizes[1] = num_pending, num_refused


@compiled
def sweep(
    t: Arrays, first: int, last: int, row_limit: int, pending_limit: int, log: Array, sizes: Array
) -> None:
    """Remove keys of buckets [first, last) that were last used before the batch of a limit."""
    state, slots, new_slots, rows, row_counts = t.state, t.slots, t.new_slots, t.rows, t.row_counts
    free_rows, pending, free_pending, live = t.free_rows, t.pending, t.free_pending, t.live
    num_log = num_evicted = num_forgotten = 0
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
                num_log = _log(log, num_log, REMOVED, entry, address, used, count)
                remove_at(state, slots, new_slots, rows, pending, at + (IN_NEW if is_new else 0))
                _free_pending(state, pending, free_pending, p)
                num_forgotten += 1
            else:
                count = row_counts[entry] if state[IS_LFU] else 0
                used = rows[entry, LAST]
                num_log = _log(log, num_log, REMOVED, entry, address, used, count)
                _free_row(state, slots, new_slots, rows, pending, free_rows, live, entry, address)
                num_evicted += 1
    sizes[0], sizes[1], sizes[2] = num_log, num_evicted, num_forgotten


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
def find_all(t: Arrays, keys: Array, out: Array) -> None:
    """Write the row of each key to ``out``, or -1."""
    state, slots, new_slots, rows, pending = t.state, t.slots, t.new_slots, t.rows, t.pending
    n = keys.size
    first, scale, edge = state[FIRST], state[SCALE], state[EDGE]
    for i in range(n):
        if i + 2 * DISTANCE < n:
            prefetch(slots, home(address_of(keys[i + 2 * DISTANCE]), scale, first))
        if i + DISTANCE < n:
            ahead = entry_of(slots[home(address_of(keys[i + DISTANCE]), scale, first), 0])
            if 0 <= ahead < PENDING:
                prefetch(rows, ahead)
        address = address_of(keys[i])
        place, tag = home(address, scale, first), U64(address) & U64(LOW_32)
        if place < edge:
            place = place_of(state, slots, new_slots, rows, pending, address)
            entry = entry_of(slot_at(slots, new_slots, place))
            out[i] = entry if entry < PENDING else -1
            continue
        slot = slots[place, 0]
        entry = entry_of(slot)
        while entry >= 0:
            # A counter means -1, too, so its address is not compared.
            if slot >> U64(32) == tag and entry < PENDING:
                if joined(rows[entry, HIGH], rows[entry, LOW]) == address:
                    break
            place += 1
            slot = slots[place, 0]
            entry = entry_of(slot)
        out[i] = entry


@compiled
def load_rows(t: Arrays, addresses: Array, lasts: Array, counts: Array) -> None:
    """Give rows 0, 1, ... to the addresses of an empty vocabulary."""
    state, slots, new_slots, rows, row_counts = t.state, t.slots, t.new_slots, t.rows, t.row_counts
    pending, live = t.pending, t.live
    for row in range(addresses.size):
        set_address(rows, row, addresses[row])
        rows[row, LAST] = lasts[row]
        if state[IS_LFU]:
            row_counts[row] = counts[row]
        insert(state, slots, new_slots, rows, pending, addresses[row], row)
        live[bucket_of(state, addresses[row])] += 1
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


@compiled
def addresses_of(keys: Array, out: Array) -> None:
    """Write the address of each key to ``out``."""
    for i in range(keys.size):
        out[i] = address_of(keys[i])


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


def keys_of(addresses: Array) -> Array:
    """Return the keys that have these addresses."""
    return unmix(torch.from_numpy(addresses.copy())).numpy()
