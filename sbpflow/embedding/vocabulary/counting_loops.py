"""Compiled loops over the keys of a batch: find rows, and count keys without a row."""

import torch

from sbpflow.embedding.cache.prefetch import DISTANCE, prefetch
from sbpflow.embedding.vocabulary.entries import free_counter, log_change, take_pending
from sbpflow.embedding.vocabulary.key_map import (
    ADMIT_COUNT,
    COUNT,
    EDGE,
    ENTRIES,
    FIRST,
    FIRST_ROW,
    HIGH,
    IS_LFU,
    LAST,
    LOW,
    LOW_32,
    NOW,
    PENDING,
    SCALE,
    U64,
    Arrays,
    address_at,
    address_of,
    entry_of,
    home,
    joined,
    place_of,
    set_address,
    set_slot,
    slot_at,
    slot_of,
)
from sbpflow.runtime.compute.compiled import Array, compiled
from sbpflow.runtime.random.streams import unmix


@compiled
def _log_use(uses: Array, n: int, entry: int, last: int, count: int) -> int:
    uses[n, 0], uses[n, 1], uses[n, 2] = entry, last, count
    return n + 1


@compiled
def _begin_to_count(
    state: Array,
    slots: Array,
    new_slots: Array,
    pending: Array,
    place: int,
    p: int,
    address: int,
    count: int,
) -> None:
    set_address(pending, p, address)
    pending[p, LAST], pending[p, COUNT] = state[NOW], count
    set_slot(slots, new_slots, place, slot_of(address, PENDING + p))
    state[ENTRIES] += 1


@compiled
def observe(  # noqa: C901 - searching in a function of its own takes four times as long
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

    ``counts`` is [n], or [0] for single occurrences. ``sizes`` gets the numbers of ``uses`` (old
    last uses and counts), ``log`` entries, ``candidates`` for admission (counters), and
    ``unresolved`` places of keys without rows.
    """
    state, slots, new_slots, rows, row_counts = t.state, t.slots, t.new_slots, t.rows, t.row_counts
    pending, free_pending = t.pending, t.free_pending
    now, admit_count, is_lfu = state[NOW], state[ADMIT_COUNT], state[IS_LFU]
    first, scale, edge, first_row = state[FIRST], state[SCALE], state[EDGE], state[FIRST_ROW]
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
                if slot >> U64(32) == tag and address_at(rows, pending, entry) == address:
                    break
                place += 1
                slot = slots[place, 0]
                entry = entry_of(slot)
        else:
            place = place_of(state, slots, new_slots, rows, pending, address)
            entry = entry_of(slot_at(slots, new_slots, place))
        if entry < 0:
            p, op = take_pending(state, free_pending)
            _begin_to_count(state, slots, new_slots, pending, place, p, address, count)
            num_log = log_change(log, num_log, op, PENDING + p, address, 0, 0)
            is_candidate = count >= admit_count
        elif entry >= PENDING:
            p = entry - PENDING
            before = pending[p, COUNT]
            is_first = pending[p, LAST] != now
            if is_first:
                num_uses = _log_use(uses, num_uses, -p - 1, pending[p, LAST], before)
                pending[p, LAST] = now
            pending[p, COUNT] = min(before + count, 2**30)
            is_candidate = before + count >= admit_count and (is_first or before < admit_count)
        else:
            if rows[entry, LAST] != now:
                before = int(row_counts[entry]) if is_lfu else 0
                num_uses = _log_use(uses, num_uses, entry, rows[entry, LAST], before)
                rows[entry, LAST] = now
            if is_lfu:
                row_counts[entry] = min(row_counts[entry] + count, 2**30)
            out[i] = entry + first_row
            continue
        if is_candidate:
            candidates[num_candidates] = p
            num_candidates += 1
        out[i] = p
        unresolved[num_unresolved] = i
        num_unresolved += 1
    sizes[0], sizes[1], sizes[2], sizes[3] = num_uses, num_log, num_candidates, num_unresolved


@compiled
def resolve(
    t: Arrays, counts: Array, unresolved: Array, admitted: Array, out: Array, sizes: Array
) -> None:
    """Write the rows of admitted keys to ``out``, and row 0 for other keys; count the latter."""
    state, pending, free_pending = t.state, t.pending, t.free_pending
    num_pending = num_refused = 0
    for j in range(unresolved.size):
        i = unresolved[j]
        known = pending[out[i], COUNT]
        if known < 0:
            out[i] = -1 - known + state[FIRST_ROW]
            continue
        count = counts[i] if counts.size else 1
        if known >= state[ADMIT_COUNT]:
            num_refused += count
        else:
            num_pending += count
        out[i] = 0
    for j in range(admitted.size):
        free_counter(state, pending, free_pending, admitted[j])
    sizes[0], sizes[1] = num_pending, num_refused


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
def addresses_of(keys: Array, out: Array) -> None:
    """Write the address of each key to ``out``."""
    for i in range(keys.size):
        out[i] = address_of(keys[i])


def keys_of(addresses: Array) -> Array:
    """Return the keys that have these addresses."""
    return unmix(torch.from_numpy(addresses.copy())).numpy()
