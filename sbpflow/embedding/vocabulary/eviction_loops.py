"""Compiled loops that admit and evict keys, and remove idle keys."""

from typing import Any

import numpy as np

from sbpflow.embedding.vocabulary.key_map import (
    ADDRESS,
    EDGE,
    FIRST,
    FIRST_BUCKET,
    FIRST_ROW,
    FREE_ROWS,
    HALF,
    IN_NEW,
    IS_LFU,
    NEW_SCALE,
    NEXT_ROW,
    NOW,
    SCALE,
    SHIFT,
    SLOTS,
    STEP_START,
    VALUE,
    Arrays,
    bucket_of,
    content_of,
    home,
    place_of,
    prefetch_home,
    remove_at,
    value_at,
    value_of,
)
from sbpflow.runtime.compute.compiled import DISTANCE, Array, compiled, prefetch, prefetch_to_write


@compiled
def _take_row(state: Array, free_rows: Array) -> Any:  # noqa: ANN401 (numba types)
    if state[FREE_ROWS]:
        state[FREE_ROWS] -= 1
        return free_rows[state[FREE_ROWS]]
    state[NEXT_ROW] += 1
    return state[NEXT_ROW] - 1


@compiled
def _free_row(state: Array, free_rows: Array, live: Array, address: int, row: int) -> None:
    free_rows[state[FREE_ROWS]] = row
    state[FREE_ROWS] += 1
    live[bucket_of(state, address)] -= 1


@compiled
def _first_address(state: Array, bucket: int) -> int:
    return (bucket + state[FIRST_BUCKET] - HALF) << SHIFT


@compiled
def _range_of(state: Array, first: int, last: int, is_new: bool) -> tuple[int, int]:
    """Return the range of home slots [start, stop) of buckets [first, last) in one of the two
    arrays.
    """
    scale = state[NEW_SCALE] if is_new else state[SCALE]
    start = home(_first_address(state, first), scale, state[FIRST])
    # Use the last address of bucket ``last - 1``: if it is the last bucket of all, the next address
    # does not fit in 64 bits.
    stop = home(_first_address(state, last) - 1, scale, state[FIRST]) + 1
    return (start if is_new else max(start, state[EDGE])), stop


@compiled
def _goes_first(
    count: int, last: int, address: int, other_count: int, other_last: int, other_address: int
) -> bool:
    """Return True if a key is evicted before another: by count (0 unless evictions depend on
    counts), then by last use, then by address.
    """
    if count != other_count:
        return count < other_count
    if last != other_last:
        return last < other_last
    return address < other_address


@compiled
def _queue_victims(
    state: Array,
    slots: Array,
    new_slots: Array,
    row_counts: Array,
    victims: Array,
    heads: Array,
    tails: Array,
    bucket: int,
) -> None:
    """Queue the keys to evict first from a bucket, excluding the keys that this step uses.

    Keys are inserted into the sorted queue without function calls that take arrays, because such a
    call takes longer than an insertion.
    """
    step_start, is_lfu = state[STEP_START], state[IS_LFU]
    queue, capacity, size = victims[bucket], victims.shape[1], 0
    for is_new in (False, True):
        if is_new and state[EDGE] == 0:
            continue
        array = new_slots if is_new else slots
        at, stop = _range_of(state, bucket, bucket + 1, is_new)
        while at < stop or (at < array.shape[0] and array[at, VALUE] != 0):
            address, value = array[at, ADDRESS], array[at, VALUE]
            at += 1
            content, last = content_of(value), value >> 32
            if content <= 0 or last >= step_start or bucket_of(state, address) != bucket:
                continue
            count, place = int(row_counts[content - 1]) if is_lfu else 0, size
            while place > 0:
                other, other_value = queue[place - 1, ADDRESS], queue[place - 1, VALUE]
                other_count = int(row_counts[content_of(other_value) - 1]) if is_lfu else 0
                if _goes_first(other_count, other_value >> 32, other, count, last, address):
                    break
                if place < capacity:
                    queue[place, ADDRESS], queue[place, VALUE] = other, other_value
                place -= 1
            if place < capacity:  # else all keys in the full queue are evicted earlier
                queue[place, ADDRESS], queue[place, VALUE] = address, value
                size = min(size + 1, capacity)
    heads[bucket], tails[bucket] = 0, size


@compiled
def _next_victim(
    state: Array,
    slots: Array,
    new_slots: Array,
    row_counts: Array,
    victims: Array,
    heads: Array,
    tails: Array,
    bucket: int,
) -> int:
    """Return the place of the next key to evict from a bucket, or -1 if this step uses all rows of
    the bucket.
    """
    for attempt in range(2):
        while heads[bucket] < tails[bucket]:
            address, value = victims[bucket, heads[bucket]]
            heads[bucket] += 1
            # Skip keys that have been used or removed since the search.
            place = place_of(state, slots, new_slots, address)
            if value_at(slots, new_slots, place) == value and value >> 32 < state[STEP_START]:
                return place
        if attempt == 0:
            _queue_victims(state, slots, new_slots, row_counts, victims, heads, tails, bucket)
    return -1


@compiled
def _prefetch_queue(t: Arrays, address: int) -> None:
    """Prefetch what ``_prefetch_victim`` reads, if the bucket of ``address`` is full."""
    bucket = bucket_of(t.state, address)
    if t.live[bucket] >= t.room[bucket]:
        flat = t.victims.reshape(-1)
        prefetch(flat, 2 * (bucket * t.victims.shape[1] + t.heads[bucket]))


@compiled
def _prefetch_victim(t: Arrays, address: int) -> None:
    """Prefetch the slot of the next key to evict, if the bucket of ``address`` is full; or the
    first slots of the bucket, if they have to be searched (the processor itself prefetches more).
    """
    bucket = bucket_of(t.state, address)
    if t.live[bucket] < t.room[bucket]:
        return
    head = t.heads[bucket]
    if head < t.tails[bucket]:
        victim = t.victims[bucket, head, ADDRESS]
        prefetch_home(t.slots.reshape(-1), victim, t.state[SCALE], t.state[FIRST])
        return
    at, stop = _range_of(t.state, bucket, bucket + 1, False)
    for slot in range(at, min(stop, at + 64) + 4, 4):
        prefetch_to_write(t.slots, slot)


@compiled
def ascending(addresses: Array, first: int, scale: int) -> Array:
    """Return the distinct addresses in ascending order.

    ``home(address, scale, first)`` divides them into as many ranges as there are addresses. They
    are uniform, so a range has few of them, which are sorted by insertion. On an AMD EPYC, numpy's
    sort takes four times as long.
    """
    n = addresses.size
    starts, out = np.zeros(n + 1, np.int64), np.empty(n, np.int64)
    for i in range(n):
        starts[home(addresses[i], scale, first) + 1] += 1
    for i in range(n):
        starts[i + 1] += starts[i]
    ends = starts.copy()
    for i in range(n):
        address, part = addresses[i], home(addresses[i], scale, first)
        place = ends[part]
        while place > starts[part] and out[place - 1] > address:
            place -= 1
        if place > starts[part] and out[place - 1] == address:
            continue
        for later in range(ends[part], place, -1):
            out[later] = out[later - 1]
        out[place] = address
        ends[part] += 1
    count = 0
    for part in range(n):
        for place in range(starts[part], ends[part]):
            out[count] = out[place]
            count += 1
    return out[:count]


@compiled
def decide(
    t: Arrays,
    candidates: Array,
    log: Array,
    log_counts: Array,
    new_rows: Array,
    admitted: Array,
    sizes: Array,
) -> None:
    """Assign rows to the keys with the addresses ``candidates``, which may repeat, in ascending
    order. A full bucket evicts one key for each distinct address, if any key can be evicted.

    ``admitted`` addresses get ``new_rows``, and evicted keys are added to ``log``; the numbers of
    admitted addresses and of evicted keys are written to ``sizes``.
    """
    state, slots, new_slots, row_counts = t.state, t.slots, t.new_slots, t.row_counts
    free_rows, live, room = t.free_rows, t.live, t.room
    victims, heads, tails = t.victims, t.heads, t.tails
    now, first, scale, edge = state[NOW], state[FIRST], state[SCALE], state[EDGE]
    num_new = num_log = 0
    # One range per candidate, as ``scale`` has one range per slot.
    candidates = ascending(candidates, first, candidates.size * scale // state[SLOTS])
    if state[IS_LFU]:
        heads[:] = tails[:]  # counts have changed, and with them the order of eviction
    for i in range(candidates.size):
        if i + DISTANCE < candidates.size:
            prefetch_to_write(slots, home(candidates[i + DISTANCE], scale, first))
            _prefetch_queue(t, candidates[i + DISTANCE])
        if i + DISTANCE // 2 < candidates.size:
            _prefetch_victim(t, candidates[i + DISTANCE // 2])
        address = candidates[i]
        bucket = bucket_of(state, address)
        if live[bucket] < room[bucket]:
            row = _take_row(state, free_rows)
            live[bucket] += 1
        else:
            place = _next_victim(state, slots, new_slots, row_counts, victims, heads, tails, bucket)
            if place < 0:
                continue
            victim, value = victims[bucket, heads[bucket] - 1]
            log[num_log, ADDRESS], log[num_log, VALUE] = victim, value
            row = content_of(value) - 1
            if state[IS_LFU]:
                log_counts[num_log] = row_counts[row]
            num_log += 1
            remove_at(state, slots, new_slots, place)
        # This search is ``place_of``, inlined by hand, because a function call takes several times
        # as long.
        array, place = slots, home(address, scale, first)
        if place < edge:
            array, place = new_slots, home(address, state[NEW_SCALE], first)
        while array[place, ADDRESS] != address or array[place, VALUE] == 0:
            place += 1
        if state[IS_LFU]:
            row_counts[row] = -content_of(array[place, VALUE])
        array[place, VALUE] = value_of(now, row + 1)
        new_rows[num_new], admitted[num_new] = row, address
        num_new += 1
    sizes[0], sizes[1] = num_new, num_log


@compiled
def sweep(
    t: Arrays, first: int, last: int, row_limit: int, pending_limit: int
) -> tuple[Array, Array, Array]:
    """Remove the keys of buckets [first, last) that were last used before batch ``row_limit`` (keys
    with rows) or ``pending_limit`` (keys without rows).

    Return the log of these keys, the counts of their rows if evictions depend on counts, and the
    freed rows.
    """
    state, slots, new_slots, row_counts = t.state, t.slots, t.new_slots, t.row_counts
    most = _count_idle(t, first, last, max(row_limit, pending_limit))
    log, freed = np.empty((most, 2), np.int64), np.empty(most, np.int64)
    log_counts = np.empty(most if state[IS_LFU] else 0, np.int32)
    num_log = num_rows = 0
    for is_new in (False, True):
        if (is_new and state[EDGE] == 0) or num_log == most:
            continue
        array = new_slots if is_new else slots
        at, stop = _range_of(state, first, last, is_new)
        while at < stop or (at < array.shape[0] and array[at, VALUE] != 0):
            address, value = array[at, ADDRESS], array[at, VALUE]
            content = content_of(value)
            limit = row_limit if content > 0 else pending_limit
            if content == 0 or value >> 32 >= limit:
                at += 1
            elif not first <= bucket_of(state, address) < last:
                at += 1
            else:
                # The removal may have moved a later key here, so look at this slot again.
                log[num_log, ADDRESS], log[num_log, VALUE] = address, value
                remove_at(state, slots, new_slots, at + (IN_NEW if is_new else 0))
                if content > 0:
                    if state[IS_LFU]:
                        log_counts[num_log] = row_counts[content - 1]
                    _free_row(state, t.free_rows, t.live, address, content - 1)
                    freed[num_rows] = content - 1 + state[FIRST_ROW]
                    num_rows += 1
                num_log += 1
    return log[:num_log], log_counts[:num_log], freed[:num_rows]


@compiled
def _count_idle(t: Arrays, first: int, last: int, limit: int) -> int:
    """Return an upper bound on the number of keys in buckets [first, last) that were last used
    before batch ``limit``.
    """
    state, slots, new_slots = t.state, t.slots, t.new_slots
    count = 0
    for is_new in (False, True):
        if is_new and state[EDGE] == 0:
            continue
        array = new_slots if is_new else slots
        at, stop = _range_of(state, first, last, is_new)
        while at < stop or (at < array.shape[0] and array[at, VALUE] != 0):
            count += array[at, VALUE] != 0 and array[at, VALUE] >> 32 < limit
            at += 1
    return count
