"""Compiled loops that undo logged changes and load saved keys."""

from sbpflow.embedding.vocabulary.key_map import (
    ADDRESS,
    ENTRIES,
    FIRST,
    IS_LFU,
    NEXT_ROW,
    SCALE,
    VALUE,
    Arrays,
    content_of,
    home,
    place_of,
    prefetch_home,
    remove_at,
    set_slot,
    value_at,
    value_of,
)
from sbpflow.runtime.compute.compiled import DISTANCE, Array, compiled


@compiled
def undo(t: Arrays, log: Array, log_counts: Array) -> None:
    """Restore the keys that a batch logged; ``free_rows`` and ``live`` do not change.

    Removed keys are restored before new keys are removed. The map has room for both, because the
    batch began with enough room for all of its keys to be new.
    """
    state, slots, new_slots, row_counts = t.state, t.slots, t.new_slots, t.row_counts
    for i in range(log.shape[0] - 1, -1, -1):
        address, before = log[i, ADDRESS], log[i, VALUE]
        place = place_of(state, slots, new_slots, address)
        if before == 0:
            remove_at(state, slots, new_slots, place)
            continue
        state[ENTRIES] += value_at(slots, new_slots, place) == 0
        set_slot(slots, new_slots, place, address, before)
        row = content_of(before) - 1
        if state[IS_LFU] and row >= 0:
            row_counts[row] = log_counts[i]


@compiled
def load_rows(t: Arrays, addresses: Array, lasts: Array, counts: Array) -> None:
    """Add keys with the given addresses and with rows 0, 1, ... to an empty vocabulary whose map
    does not migrate.

    The caller sets ``live``.
    """
    state, slots, row_counts = t.state, t.slots, t.row_counts
    first, scale, flat = state[FIRST], state[SCALE], slots.reshape(-1)
    for row in range(addresses.size):
        if row + DISTANCE < addresses.size:
            prefetch_home(flat, addresses[row + DISTANCE], scale, first)
        address = addresses[row]
        if state[IS_LFU]:
            row_counts[row] = counts[row]
        place = home(address, scale, first)
        while slots[place, VALUE] != 0:
            place += 1
        slots[place, ADDRESS], slots[place, VALUE] = address, value_of(lasts[row], row + 1)
    state[ENTRIES] += addresses.size
    state[NEXT_ROW] = addresses.size


@compiled
def load_pending(t: Arrays, addresses: Array, lasts: Array, counts: Array) -> None:
    """Add the keys without rows of a saved vocabulary."""
    state, slots, new_slots = t.state, t.slots, t.new_slots
    for i in range(addresses.size):
        place = place_of(state, slots, new_slots, addresses[i])
        set_slot(slots, new_slots, place, addresses[i], value_of(lasts[i], -counts[i]))
    state[ENTRIES] += addresses.size
