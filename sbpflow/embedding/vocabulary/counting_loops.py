"""Compiled loops over the keys of a batch, which find rows and count keys without rows."""

import torch

from sbpflow.embedding.cache.prefetch import DISTANCE
from sbpflow.embedding.vocabulary.key_map import (
    ADDRESS,
    ADMIT_COUNT,
    EDGE,
    ENTRIES,
    FIRST,
    FIRST_ROW,
    IS_LFU,
    NEW_SCALE,
    NOW,
    SCALE,
    VALUE,
    Arrays,
    address_of,
    content_of,
    home,
    prefetch_home,
    value_of,
)
from sbpflow.runtime.compute.compiled import Array, compiled
from sbpflow.runtime.random.streams import unmix

MAX_COUNT = 2**30


@compiled
def observe(
    t: Arrays,
    keys: Array,
    counts: Array,
    out: Array,
    log: Array,
    log_counts: Array,
    candidates: Array,
    unresolved: Array,
    sizes: Array,
    migrates: bool | None,
) -> None:
    """Count the occurrences of ``keys`` [n], and write the row of each key with a row to ``out``.

    ``counts`` is [n], or [0] if each key counts once. The numbers written to ``sizes`` are those of
    entries in ``log`` (the address of each key, and its value before this batch), new keys,
    ``candidates`` for admission (addresses), and ``unresolved`` positions of keys without rows. The
    old counts of rows are written to ``log_counts`` if evictions depend on counts. ``migrates`` is
    None unless the map migrates: for None, numba compiles a loop without the second array; that
    loop is a third faster.
    """
    state, slots, new_slots, row_counts = t.state, t.slots, t.new_slots, t.row_counts
    now, admit_count, is_lfu = state[NOW], state[ADMIT_COUNT], state[IS_LFU]
    first, scale, new_scale = state[FIRST], state[SCALE], state[NEW_SCALE]
    edge, first_row = state[EDGE], state[FIRST_ROW]
    num_log = num_new = num_candidates = num_unresolved = 0
    n = keys.size
    # Keep addresses in ``out`` while the cache lines that they map to are loaded.
    for i in range(min(DISTANCE, n)):
        out[i] = address_of(keys[i])
        prefetch_home(slots, out[i], scale, first)
    for i in range(n):
        if i + DISTANCE < n:
            out[i + DISTANCE] = address_of(keys[i + DISTANCE])
            prefetch_home(slots, out[i + DISTANCE], scale, first)
        address = out[i]
        count = counts[i] if counts.size else 1
        array, place = slots, home(address, scale, first)
        if migrates is not None:
            if place < edge:
                array, place = new_slots, home(address, new_scale, first)
        value = array[place, VALUE]
        while value != 0 and array[place, ADDRESS] != address:
            place += 1
            if place == array.shape[0] - 1:
                raise IndexError("the key map is full at its end; this is a bug")
            value = array[place, VALUE]
        # From here on, the code does not branch on the key, except for LFU counts, because the
        # processor could not predict such a branch. Entries are always written to the logs and
        # lists, but the position advances only past those that are needed, so the next entry
        # overwrites an unneeded one.
        is_first, content = value >> 32 != now, content_of(value)
        has_row, total = content > 0, count - content
        log[num_log, ADDRESS], log[num_log, VALUE] = address, value
        if is_lfu and has_row:
            log_counts[num_log] = row_counts[content - 1]
            row_counts[content - 1] = min(row_counts[content - 1] + count, MAX_COUNT)
        num_log += is_first
        num_new += value == 0
        array[place, ADDRESS] = address
        array[place, VALUE] = value_of(now, content if has_row else -min(total, MAX_COUNT))
        candidates[num_candidates] = address
        is_candidate = total >= admit_count and (is_first or -content < admit_count)
        num_candidates += is_candidate and not has_row
        unresolved[num_unresolved] = i
        num_unresolved += not has_row
        out[i] = content - 1 + first_row
    state[ENTRIES] += num_new
    sizes[0], sizes[1], sizes[2], sizes[3] = num_log, num_new, num_candidates, num_unresolved


@compiled
def resolve(
    state: Array, contents: Array, counts: Array, places: Array, out: Array, sizes: Array
) -> None:
    """Write the rows of keys to ``places`` of ``out``, or 0 for keys without a row.

    ``contents`` is the result of ``find_all``. The numbers of occurrences of pending keys and of
    refused keys are written to ``sizes``.
    """
    num_pending = num_refused = 0
    for j in range(places.size):
        i, content = places[j], contents[j]
        out[i] = content - 1 + state[FIRST_ROW] if content > 0 else 0
        if content < 0:
            count = counts[i] if counts.size else 1
            if -content >= state[ADMIT_COUNT]:
                num_refused += count
            else:
                num_pending += count
    sizes[0], sizes[1] = num_pending, num_refused


@compiled
def find_all(t: Arrays, keys: Array, out: Array, migrates: bool | None) -> None:
    """Write to ``out``, for each key, its row + 1, or -count if it has no row, or 0 if it is
    unknown.

    ``migrates`` is as in ``observe``.
    """
    state, slots, new_slots, n = t.state, t.slots, t.new_slots, keys.size
    first, scale, new_scale, edge = state[FIRST], state[SCALE], state[NEW_SCALE], state[EDGE]
    for i in range(min(DISTANCE, n)):
        out[i] = address_of(keys[i])
        prefetch_home(slots, out[i], scale, first)
    for i in range(n):
        if i + DISTANCE < n:
            out[i + DISTANCE] = address_of(keys[i + DISTANCE])
            prefetch_home(slots, out[i + DISTANCE], scale, first)
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


@compiled
def addresses_of(keys: Array, out: Array) -> None:
    """Write the address of each key to ``out``."""
    for i in range(keys.size):
        out[i] = address_of(keys[i])


def keys_of(addresses: Array) -> Array:
    """Return the keys that have these addresses."""
    return unmix(torch.from_numpy(addresses.copy())).numpy()
