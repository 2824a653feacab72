"""Compiled loops over the keys of a batch, which find rows and count keys without rows."""

import numpy as np
import torch

from sbpflow.embedding.plan.growth import MAX_COUNT
from sbpflow.embedding.vocabulary.key_map import (
    ADDRESS,
    ADMIT_COUNT,
    EDGE,
    ENTRIES,
    FIRST,
    FIRST_ROW,
    I64,
    IN_NEW,
    IS_LFU,
    NEW_SCALE,
    NOW,
    PENDING_LIMIT,
    SCALE,
    U64,
    VALUE,
    Arrays,
    address_of,
    content_of,
    home,
    prefetch_home,
    value_of,
)
from sbpflow.runtime.compute.compiled import DISTANCE, Array, compiled
from sbpflow.runtime.random.streams import unmix

ONE, TWO = U64(1), U64(2)


@compiled
def addresses_of(keys: Array, out: Array) -> None:
    """Write the address of each key to ``out``."""
    for i in range(keys.size):
        out[i] = address_of(keys[i])


@compiled
def observe(
    t: Arrays, keys: Array, counts: Array, out: Array, log: Array, log_counts: Array,
    candidates: Array, unresolved: Array, sizes: Array, migrates: bool | None, repeats: bool | None,
) -> None:  # fmt: skip
    """Count the occurrences of ``keys`` [n]. For each key that has a row, write the row to ``out``,
    which may be the same array as ``keys``.

    ``counts`` is [n], or [0] if each key counts once. For keys without rows, ``out`` contains the
    place of the key in the map. ``log`` receives the address of each key and its value before this
    batch, ``candidates`` receives the addresses (possibly repeated) of keys that can be admitted,
    and ``unresolved`` receives the position and address of each key without a row. The number of
    entries in each of these lists, the number of new keys, and the number of keys whose count
    restarts are written to ``sizes``. The old counts of rows are written to ``log_counts`` if
    evictions depend on counts. The count of a key without a row restarts if the key was last used
    before batch ``PENDING_LIMIT``. ``migrates`` is None unless the map migrates: for None, numba
    compiles a loop that ignores the second array and is a third faster. ``repeats`` is None unless
    most keys are expected to repeat keys of the batch.
    """
    state, row_counts = t.state, t.row_counts
    # An index into two dimensions would be multiplied by a length at run time.
    slots, new_slots = t.slots.reshape(-1), t.new_slots.reshape(-1)
    log, unresolved = log.reshape(-1), unresolved.reshape(-1)
    now, admit_count, is_lfu = state[NOW], state[ADMIT_COUNT], state[IS_LFU]
    pending_limit = state[PENDING_LIMIT]
    first, first_row, edge = state[FIRST], state[FIRST_ROW], state[EDGE]
    scale, new_scale, n = state[SCALE], state[NEW_SCALE], keys.size
    # Places and positions are unsigned, so that numba generates no code for negative indices.
    num_log = num_new = num_candidates = num_unresolved = num_restarted = U64(0)
    addresses_of(keys, out)  # kept in ``out`` while the cache lines that they map to are loaded
    for i in range(min(DISTANCE, n)):
        prefetch_home(slots, out[i], scale, first)
    for i in range(n):
        if i + DISTANCE < n:
            prefetch_home(slots, out[i + DISTANCE], scale, first)
            if migrates is not None:
                prefetch_home(new_slots, out[i + DISTANCE], new_scale, first)
        address = out[i]
        count = counts[i] if counts.size else 1
        array, place, offset = slots, U64(home(address, scale, first)), 0
        if migrates is not None:
            if place < U64(edge):
                array, place = new_slots, U64(home(address, new_scale, first))
                offset = IN_NEW
        value = array[TWO * place + ONE]
        while (value != 0) & (array[TWO * place] != address):
            place += ONE
            if place == U64(array.size // 2 - 1):
                raise IndexError("the key map has no free slot at its end; this is a bug")
            value = array[TWO * place + ONE]
        content = content_of(value)
        has_row = content > 0
        if repeats is not None:
            if ((value >> 32) == now) & has_row & (not is_lfu):
                out[i] = content - 1 + first_row
                continue
        # The processor could not predict branches on the key, so the rest of the loop has none,
        # except for LFU counts. Entries are always written to the logs and lists, but the position
        # advances only past those that are needed, so the next entry overwrites an unneeded one.
        log[TWO * num_log], log[TWO * num_log + ONE] = address, value
        if is_lfu and has_row:
            log_counts[num_log] = row_counts[content - 1]
            row_counts[content - 1] = min(row_counts[content - 1] + count, MAX_COUNT)
        num_log += U64((value >> 32) != now)
        num_new += U64(value == 0)
        restarts = (content < 0) & ((value >> 32) < pending_limit)
        num_restarted += U64(restarts)
        counted = 0 if restarts else content
        new_content = content if has_row else max(counted - count, -MAX_COUNT)
        array[TWO * place], array[TWO * place + ONE] = address, value_of(now, new_content)
        candidates[num_candidates] = address
        num_candidates += U64(-new_content >= admit_count)
        at = TWO * num_unresolved
        unresolved[at], unresolved[at + ONE] = i, address
        num_unresolved += U64(not has_row)
        out[i] = content - 1 + first_row if has_row else I64(place) + offset
    state[ENTRIES] += I64(num_new)
    sizes[0], sizes[1], sizes[2], sizes[3] = num_log, num_new, num_candidates, num_unresolved
    sizes[4] = num_restarted


@compiled
def resolve(
    t: Arrays, candidates: Array, unresolved: Array, counts: Array, out: Array, sizes: Array
) -> None:
    """Replace the places in ``out``, which ``observe`` wrote, with the rows of the keys, or with 0
    for keys without a row.

    The numbers of occurrences of pending keys and of refused keys are written to ``sizes``.
    ``unresolved`` is overwritten.
    """
    state, slots, new_slots = t.state, t.slots, t.new_slots
    # A filter with one bit per hash of a candidate. Most keys are not candidates, and a lookup of
    # their slots would take longer than the rest of this loop.
    bits = np.zeros(1024, np.uint64)
    for j in range(candidates.size):
        bit = U64(candidates[j]) & U64(0xFFFF)
        bits[bit >> U64(6)] |= U64(1) << (bit & U64(63))
    # Keep the keys that pass the filter, as in ``observe``, without branches.
    left = unresolved.reshape(-1)
    num_left, num_pending = U64(0), 0
    for j in range(unresolved.shape[0]):
        i, address = left[2 * j], left[2 * j + 1]
        bit = U64(address) & U64(0xFFFF)
        passes = (bits[bit >> U64(6)] >> (bit & U64(63))) & ONE
        left[TWO * num_left], left[TWO * num_left + ONE] = i, address
        num_left += passes
        out[i] &= -I64(passes)
        num_pending += counts[i] if counts.size else 1
    num_refused = 0
    for j in range(I64(num_left)):
        i, address = left[2 * j], left[2 * j + 1]
        count, place = counts[i] if counts.size else 1, out[i]
        array = slots
        if place >= IN_NEW:
            array, place = new_slots, place - IN_NEW
        # Evictions may have moved the key to an earlier slot.
        while array[place, ADDRESS] != address or array[place, VALUE] == 0:
            place -= 1
        content = content_of(array[place, VALUE])
        out[i] = content - 1 + state[FIRST_ROW] if content > 0 else 0
        if content > 0:
            num_pending -= count
        elif -content >= state[ADMIT_COUNT]:
            num_pending -= count
            num_refused += count
    sizes[0], sizes[1] = num_pending, num_refused


@compiled
def find_all(t: Arrays, keys: Array, out: Array, migrates: bool | None) -> None:
    """Write to ``out``, for each key, its row + 1, or -count if it has no row, or 0 if it is
    unknown.

    ``migrates`` is as in ``observe``.
    """
    state, slots, new_slots, n = t.state, t.slots, t.new_slots, keys.size
    first, scale, new_scale, edge = state[FIRST], state[SCALE], state[NEW_SCALE], state[EDGE]
    flat = slots.reshape(-1)
    for i in range(min(DISTANCE, n)):
        out[i] = address_of(keys[i])
        prefetch_home(flat, out[i], scale, first)
    for i in range(n):
        if i + DISTANCE < n:
            out[i + DISTANCE] = address_of(keys[i + DISTANCE])
            prefetch_home(flat, out[i + DISTANCE], scale, first)
        address = out[i]
        array, place = slots, home(address, scale, first)
        if migrates is not None:
            if place < edge:
                array, place = new_slots, home(address, new_scale, first)
        value = array[place, VALUE]
        while value != 0 and array[place, ADDRESS] != address:
            place += 1
            value = array[place, VALUE]
        out[i] = content_of(value)


def keys_of(addresses: Array) -> Array:
    """Return the keys that have these addresses."""
    return unmix(torch.from_numpy(addresses.copy())).numpy()
