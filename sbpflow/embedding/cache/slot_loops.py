"""Plans slots and copies rows in compiled loops. Import this module only if numba is installed.

``slot_arrays`` has numpy versions of these functions, which make the same decisions. The lists of
the batches in flight form a ring whose length is a power of two.
"""

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
from sbpflow.runtime.compute.compiled import DISTANCE, Array, compiled, prefetch, prefetch_to_write


@compiled
def select(addresses: Array, lane: int, mask: int, out: Array) -> int:
    """Copy the addresses of a lane to ``out``; return their number."""
    count = 0
    for i in range(addresses.size):
        out[count] = addresses[i]
        count += ((addresses[i] >> 6) & mask) == lane
    return count


@compiled
def announce(
    addresses: Array,
    start: int,
    count: int,
    batch: int,
    oldest: int,
    records: Array,
    seen: Array,
    rows: Array,
    nexts: Array,
    candidates: Array,
    num_candidates: Array,
) -> tuple[int, int]:
    """List the unique rows of a batch, and record the batch as the next use of each of them.

    Start at address number ``start``, with ``count`` rows already listed. Stop at the end or when
    the list is full; return the new ``start`` and ``count``. Until the end of the batch, ``seen``
    has the bits of all listed rows set.
    """
    mask, num_rows = rows.shape[0] - 1, records.shape[0] - 1
    at = batch & mask
    i, stop, first, width = start, addresses.size, count, rows.shape[1]
    # Most of the addresses may be duplicates. To detect duplicates, this loop reads bits, which fit
    # in a CPU cache, instead of records. A branch on duplicates would be mispredicted, so the loop
    # always writes the entry and advances only for a new row; the next write then overwrites a
    # duplicate.
    lines = seen.reshape(-1, 1)
    while i < stop and count < width:
        if i + DISTANCE < stop:
            prefetch_to_write(lines, addresses[i + DISTANCE] >> 6)
        row = addresses[i]
        bit, known = 1 << (row & 63), seen[row >> 6]
        seen[row >> 6] = known | bit
        rows[at, count] = row
        count += ((known & bit) == 0) & (row < num_rows)
        i += 1
    for n in range(first, count):
        if n + DISTANCE < count:
            prefetch_to_write(records, rows[at, n + DISTANCE])
        row = rows[at, n]
        last = records[row, LAST]
        if last >= oldest:
            nexts[last & mask, records[row, PLACE]] = batch
        elif records[row, SLOT] >= 0:
            records[row, NEXT] = batch
            candidates[at, num_candidates[at]] = row
            num_candidates[at] += 1
        records[row, LAST], records[row, PLACE] = batch, n
        nexts[at, n] = NEVER
    if i == stop:
        for n in range(count):
            seen[rows[at, n] >> 6] = 0
    return i, count


@compiled
def _evict(
    count: int,
    batch: int,
    newest: int,
    records: Array,
    candidates: Array,
    num_candidates: Array,
    queue: Array,
    state: Array,
    slots: Array,
    evicted: Array,
) -> None:
    """Evict ``count`` rows, and list them with their slots.

    First evict rows that no announced batch uses, starting with the least recently used, and then
    rows whose next use is furthest away. The caller ensures that enough rows can be evicted. Queue
    entries may be outdated; the loops overwrite outdated results instead of branching on them.
    """
    n, head, tail = 0, state[HEAD], state[TAIL]
    while n < count and head < tail:
        if head + DISTANCE < tail:
            prefetch_to_write(records, queue[head + DISTANCE, 0])
        row, last = queue[head, 0], queue[head, 1]
        head += 1
        slot = records[row, SLOT]
        leaves = (slot >= 0) & (records[row, NEXT] == NEVER) & (records[row, LAST] == last)
        evicted[n], slots[n] = row, slot
        records[row, SLOT] = STORED if leaves else slot
        n += leaves
    state[HEAD] = head
    use, mask = newest, candidates.shape[0] - 1
    while n < count and use > batch:
        at = use & mask
        left = num_candidates[at]
        while n < count and left > 0:
            left -= 1
            if left >= DISTANCE:
                prefetch_to_write(records, candidates[at, left - DISTANCE])
            row = candidates[at, left]
            slot = records[row, SLOT]
            leaves = (slot >= 0) & (records[row, NEXT] == use)
            evicted[n], slots[n] = row, slot
            records[row, SLOT] = STORED if leaves else slot
            n += leaves
        num_candidates[at] = left
        use -= 1


@compiled
def count_missing(
    batch: int, wanted: Array, records: Array, stored: Array, new: Array
) -> tuple[int, int, int]:
    """List the rows of a batch that have no slot: the stored rows, and the new rows. Return how
    many rows there are of each, and how many rows the batch would add to the leased rows.
    """
    num_stored, num_new, added = 0, 0, 0
    for i in range(wanted.size):
        if i + DISTANCE < wanted.size:
            prefetch_to_write(records, wanted[i + DISTANCE])
        row = wanted[i]
        slot = records[row, SLOT]
        lacks = slot < 0
        stored[num_stored], new[num_new] = row, row
        num_stored += slot == STORED
        num_new += slot == NEW
        added += lacks | (records[row, NEXT] >= batch)
    return num_stored, num_new, added


@compiled
def admit(
    batch: int,
    newest: int,
    wanted: Array,
    num_stored: int,
    num_new: int,
    added: int,
    records: Array,
    candidates: Array,
    num_candidates: Array,
    free: Array,
    queue: Array,
    state: Array,
    stored: Array,
    new: Array,
    slots: Array,
    evicted: Array,
) -> int:
    """Assign a slot to every row of a batch, given the result of ``count_missing``; return the
    number of evicted rows. There must be enough slots.

    ``slots`` lists the slots of the stored rows, followed by those of the new rows. The last of
    these slots are the ones that the evicted rows had.
    """
    state[LEASED] += added
    for i in range(wanted.size):
        records[wanted[i], NEXT] = batch
    num_missing = num_stored + num_new
    unused = min(num_missing, state[FREE])
    for i in range(unused):
        state[FREE] -= 1
        slots[i] = free[state[FREE]]
    num_evicted = num_missing - unused
    _evict(
        num_evicted,
        batch,
        newest,
        records,
        candidates,
        num_candidates,
        queue,
        state,
        slots[unused:],
        evicted,
    )
    for i in range(num_stored):
        records[stored[i], SLOT] = slots[i]
    for i in range(num_new):
        records[new[i], SLOT] = slots[num_stored + i]
    return num_evicted


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
    """Make the rows of a batch candidates for eviction unless another admitted batch uses them."""
    mask = candidates.shape[0] - 1
    for i in range(wanted.size):
        if i + DISTANCE < wanted.size:
            prefetch_to_write(records, wanted[i + DISTANCE])
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
            at = use & mask
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
        if i + DISTANCE < addresses.size:
            prefetch(records, addresses[i + DISTANCE])
        slot = records[addresses[i], SLOT]
        slots[i] = slot
        misses += slot < 0
    return misses


@compiled
def take(source: Array, rows: Array, out: Array, first: int) -> None:
    """Copy ``source[rows]`` to the columns of ``out`` that start at ``first``."""
    for i in range(rows.size):
        if i + DISTANCE < rows.size:
            prefetch(source, rows[i + DISTANCE])
        row = rows[i]  # read outside the inner loop, so that the compiler can vectorize it
        for column in range(source.shape[1]):
            out[i, first + column] = source[row, column]


@compiled
def put(target: Array, rows: Array, values: Array, first: int) -> None:
    """Set ``target[rows]`` to the columns of ``values`` that start at ``first``."""
    for i in range(rows.size):
        if i + DISTANCE < rows.size:
            prefetch_to_write(target, rows[i + DISTANCE])
        row = rows[i]
        for column in range(target.shape[1]):
            target[row, column] = values[i, first + column]
