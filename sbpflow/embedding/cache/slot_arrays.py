"""Plans slots and copies rows with numpy, for machines without numba; see ``slot_loops``."""

import numpy as np

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
    Array,
)


def select(addresses: Array, lane: int, mask: int, out: Array) -> int:
    """Like ``slot_loops.select``."""
    mine = addresses[((addresses >> 6) & mask) == lane]
    out[: mine.size] = mine
    return mine.size


def announce(
    addresses: Array,
    start: int,
    count: int,
    batch: int,
    oldest: int,
    records: Array,
    _seen: Array,
    rows: Array,
    nexts: Array,
    candidates: Array,
    num_candidates: Array,
) -> tuple[int, int]:
    """Like ``slot_loops.announce``, but list either all rows or none."""
    ring, num_rows = rows.shape[0], records.shape[0] - 1
    at = batch % ring
    _, first = np.unique(addresses, return_index=True)
    wanted = addresses[np.sort(first)]
    wanted = wanted[wanted < num_rows]
    if wanted.size > rows.shape[1]:
        return start, count
    last = records[wanted, LAST]
    in_flight = last >= oldest
    nexts[last[in_flight] % ring, records[wanted[in_flight], PLACE]] = batch
    idle = wanted[~in_flight & (records[wanted, SLOT] >= 0)]
    records[idle, NEXT] = batch
    _push(candidates, num_candidates, at, idle)
    records[wanted, LAST] = batch
    records[wanted, PLACE] = np.arange(wanted.size)
    rows[at, : wanted.size] = wanted
    nexts[at, : wanted.size] = NEVER
    return addresses.size, wanted.size


def count_missing(
    batch: int, wanted: Array, records: Array, stored: Array, new: Array
) -> tuple[int, int, int]:
    """Like ``slot_loops.count_missing``."""
    slot = records[wanted, SLOT]
    added = int(((slot < 0) | (records[wanted, NEXT] >= batch)).sum())
    found = [wanted[slot == STORED], wanted[slot == NEW]]
    for rows, out in zip(found, (stored, new), strict=True):
        out[: rows.size] = rows
    return found[0].size, found[1].size, added


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
    """Like ``slot_loops.admit``."""
    state[LEASED] += added
    missing = np.concatenate([stored[:num_stored], new[:num_new]])
    num_missing = missing.size
    records[wanted, NEXT] = batch
    unused = min(num_missing, int(state[FREE]))
    state[FREE] -= unused
    slots[:unused] = free[state[FREE] : state[FREE] + unused][::-1]
    victims = _victims(
        num_missing - unused, batch, newest, records, candidates, num_candidates, queue, state
    )
    slots[unused:num_missing] = records[victims, SLOT]
    records[victims, SLOT] = STORED
    evicted[: victims.size] = victims
    records[missing, SLOT] = slots[:num_missing]
    return victims.size


def _victims(
    count: int,
    batch: int,
    newest: int,
    records: Array,
    candidates: Array,
    num_candidates: Array,
    queue: Array,
    state: Array,
) -> Array:
    """Return ``count`` rows to evict: first rows that no announced batch uses, starting with the
    least recently used, and then rows whose next use is furthest away.
    """
    victims: list[Array] = [np.empty(0, np.int32)]
    while count and state[HEAD] < state[TAIL]:
        head = int(state[HEAD])
        stop = min(head + 2 * count, int(state[TAIL]))
        entries = queue[head:stop]
        valid = np.flatnonzero(_is_idle(records, entries))[:count]
        victims.append(entries[valid, 0])
        count -= valid.size
        state[HEAD] = stop if count else head + int(valid[-1]) + 1
    for use in range(newest, batch, -1):
        if not count:
            break
        at = use % candidates.shape[0]
        rows = candidates[at, : num_candidates[at]]
        valid = np.flatnonzero((records[rows, SLOT] >= 0) & (records[rows, NEXT] == use))[::-1]
        valid = valid[:count]
        victims.append(rows[valid])
        count -= valid.size
        num_candidates[at] = valid[-1] if not count else 0
    return np.concatenate(victims)


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
    """Like ``slot_loops.release``."""
    ends = (records[wanted, SLOT] >= 0) & (records[wanted, NEXT] == batch)
    rows, use = wanted[ends], nexts[ends]
    records[rows, NEXT] = use
    if is_admitted:
        state[LEASED] -= rows.size
    idle = rows[use == NEVER]
    tail = int(state[TAIL])
    queue[tail : tail + idle.size, 0], queue[tail : tail + idle.size, 1] = idle, batch
    state[TAIL] += idle.size
    for number in np.unique(use[use != NEVER]):
        _push(candidates, num_candidates, number % candidates.shape[0], rows[use == number])


def compact(records: Array, queue: Array, state: Array) -> None:
    """Like ``slot_loops.compact``."""
    entries = queue[int(state[HEAD]) : int(state[TAIL])]
    valid = entries[_is_idle(records, entries)]
    queue[: len(valid)] = valid
    state[HEAD], state[TAIL] = 0, len(valid)


def translate(addresses: Array, records: Array, slots: Array) -> int:
    """Like ``slot_loops.translate``."""
    slots[:] = records[addresses, SLOT]
    return int((slots < 0).sum())


def take(source: Array, rows: Array, out: Array, first: int) -> None:
    """Like ``slot_loops.take``."""
    out[:, first : first + source.shape[1]] = source[rows]


def put(target: Array, rows: Array, values: Array, first: int) -> None:
    """Like ``slot_loops.put``."""
    target[rows] = values[:, first : first + target.shape[1]]


def _is_idle(records: Array, entries: Array) -> Array:
    row = records[entries[:, 0]]
    return (row[:, SLOT] >= 0) & (row[:, NEXT] == NEVER) & (row[:, LAST] == entries[:, 1])


def _push(candidates: Array, num_candidates: Array, at: int, rows: Array) -> None:
    count = int(num_candidates[at])
    candidates[at, count : count + rows.size] = rows
    num_candidates[at] += rows.size
