"""Plans slots in compiled loops; imported only if numba is installed.

``slot_arrays`` has the same functions in numpy and makes the same decisions.
"""

from sbpflow.embedding.cache.prefetch import DISTANCE, prefetch
from sbpflow.embedding.cache.slot_layout import (
    FREE,
    HEAD,
    LAST,
    LEASED,
    NEVER,
    NEW,
    NEXT,
    PLACE,
    SLOT,
    STORED,
    TAIL,
)
from sbpflow.runtime.compute.compiled import Array, compiled


@compiled
def announce(
    addresses: Array,
    start: int,
    count: int,
    batch: int,
    oldest: int,
    records: Array,
    rows: Array,
    nexts: Array,
    candidates: Array,
    num_candidates: Array,
) -> tuple[int, int]:
    """List the unique rows of a batch, and record the batch as the next use of each row.

    Start at address ``start`` with ``count`` rows already listed. Stop at the end, or when the list
    is full; return the new ``start`` and ``count``.
    """
    ring, num_rows = rows.shape[0], records.shape[0] - 1
    at = batch % ring
    for i in range(start, addresses.size):
        if i + DISTANCE < addresses.size:
            prefetch(records, addresses[i + DISTANCE])
        row = addresses[i]
        if row >= num_rows:
            continue
        last = records[row, LAST]
        if last == batch:
            continue
        if count == rows.shape[1]:
            return i, count
        if last >= oldest:
            nexts[last % ring, records[row, PLACE]] = batch
        elif records[row, SLOT] >= 0:
            records[row, NEXT] = batch
            candidates[at, num_candidates[at]] = row
            num_candidates[at] += 1
        records[row, LAST] = batch
        records[row, PLACE] = count
        rows[at, count] = row
        nexts[at, count] = NEVER
        count += 1
    return addresses.size, count


@compiled
def _next_victim(
    batch: int,
    use: int,
    records: Array,
    candidates: Array,
    num_candidates: Array,
    queue: Array,
    state: Array,
) -> tuple[int, int]:
    """Return the row to evict next, and the batch at which the next search continues."""
    while state[HEAD] < state[TAIL]:
        head = state[HEAD]
        if head + DISTANCE < state[TAIL]:
            prefetch(records, queue[head + DISTANCE, 0])
        row, last = queue[head, 0], queue[head, 1]
        state[HEAD] = head + 1
        entry = records[row]
        if entry[SLOT] >= 0 and entry[NEXT] == NEVER and entry[LAST] == last:
            return int(row), use
    while use > batch:
        at = use % candidates.shape[0]
        while num_candidates[at] > 0:
            num_candidates[at] -= 1
            if num_candidates[at] >= DISTANCE:
                prefetch(records, candidates[at, num_candidates[at] - DISTANCE])
            row = candidates[at, num_candidates[at]]
            if records[row, SLOT] >= 0 and records[row, NEXT] == use:
                return int(row), use
        use -= 1
    return -1, use  # unreachable: the caller has counted the rows that can be evicted


@compiled
def admit(
    batch: int,
    newest: int,
    wanted: Array,
    num_slots: int,
    records: Array,
    candidates: Array,
    num_candidates: Array,
    free: Array,
    queue: Array,
    state: Array,
    missing: Array,
    is_new: Array,
    slots: Array,
    evicted: Array,
) -> tuple[int, int]:
    """Give every row of a batch a slot; return the numbers of missing and evicted rows.

    The last entries of ``slots`` are those of the evicted rows. If the rows of the batches in
    flight do not fit, change nothing and return -1 and a sufficient number of slots.
    """
    num_missing, added = 0, 0
    for i in range(wanted.size):
        if i + DISTANCE < wanted.size:
            prefetch(records, wanted[i + DISTANCE])
        row = wanted[i]
        slot = records[row, SLOT]
        if slot < 0:
            missing[num_missing], is_new[num_missing] = row, slot == NEW
            num_missing += 1
            added += 1
        elif records[row, NEXT] >= batch:
            added += 1
    if state[LEASED] + added > num_slots:
        return -1, state[LEASED] + added
    state[LEASED] += added
    for i in range(wanted.size):
        records[wanted[i], NEXT] = batch
    num_evicted, use = 0, newest
    for i in range(num_missing):
        if state[FREE] > 0:
            state[FREE] -= 1
            slot = free[state[FREE]]
        else:
            victim, use = _next_victim(
                batch, use, records, candidates, num_candidates, queue, state
            )
            slot = records[victim, SLOT]
            records[victim, SLOT] = STORED
            evicted[num_evicted] = victim
            num_evicted += 1
        records[missing[i], SLOT] = slot
        slots[i] = slot
    return num_missing, num_evicted


@compiled
def release(
    batch: int,
    is_admitted: bool,
    wanted: Array,
    nexts: Array,
    records: Array,
    candidates: Array,
    num_candidates: Array,
    queue: Array,
    state: Array,
) -> None:
    """Make rows that no other admitted batch uses candidates for eviction."""
    ring = candidates.shape[0]
    for i in range(wanted.size):
        if i + DISTANCE < wanted.size:
            prefetch(records, wanted[i + DISTANCE])
        row = wanted[i]
        if records[row, SLOT] < 0 or records[row, NEXT] != batch:
            continue
        use = nexts[i]
        records[row, NEXT] = use
        if is_admitted:
            state[LEASED] -= 1
        if use == NEVER:
            queue[state[TAIL], 0], queue[state[TAIL], 1] = row, batch
            state[TAIL] += 1
        else:
            at = use % ring
            candidates[at, num_candidates[at]] = row
            num_candidates[at] += 1


@compiled
def compact(records: Array, queue: Array, state: Array) -> None:
    """Move the valid entries of the queue to its start."""
    count = 0
    for i in range(state[HEAD], state[TAIL]):
        row, last = queue[i, 0], queue[i, 1]
        entry = records[row]
        if entry[SLOT] >= 0 and entry[NEXT] == NEVER and entry[LAST] == last:
            queue[count, 0], queue[count, 1] = row, last
            count += 1
    state[HEAD], state[TAIL] = 0, count


@compiled
def translate(addresses: Array, records: Array, slots: Array) -> int:
    """Write the slot of each address; return the number of addresses without a slot."""
    misses = 0
    for i in range(addresses.size):
        slot = records[addresses[i], SLOT]
        slots[i] = slot
        misses += slot < 0
    return misses
