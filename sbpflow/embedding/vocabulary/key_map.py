"""Compiled map from the addresses of keys to entries: rows, or counters of pending keys.

The address of a key is an invertible mix of its bits, so addresses are uniform for any keys. Slots
are in address order: the home slot of an address is its share of the address range, and linear
probing moves an entry only to later slots. A bucket of keys is therefore a range of slots, and the
map can grow gradually: ``migrate`` moves a few slots at a time to a larger array. Deletion shifts
later entries back, so lookups never slow down. A slot holds 32 bits of the address and the number
of the entry; the entry has the full address.
"""

from typing import Any, NamedTuple

import numpy as np

from sbpflow.embedding.cache.prefetch import DISTANCE, prefetch
from sbpflow.embedding.plan.growth import NUM_BUCKETS
from sbpflow.embedding.storage.compiled import mixed
from sbpflow.runtime.compute.compiled import Array, compiled

U64, I64 = np.uint64, np.int64
SHIFT = 64 - (NUM_BUCKETS.bit_length() - 1)
PENDING = 1 << 31  # entries from here on are counters, smaller ones are rows
PAD = 4096  # slots after the last home slot
IN_NEW = 1 << 40  # marks a place in the array that the map migrates to
LOW_32 = (1 << 32) - 1
LOW, HIGH, LAST, COUNT = 0, 1, 2, 3  # columns of rows and counters; rows have no COUNT
# Elements of ``state``. ``EDGE`` is the first slot that has not migrated.
SLOTS, EDGE, NEW_SLOTS, SCALE, NEW_SCALE, FIRST, ENTRIES = 0, 1, 2, 3, 4, 5, 6
NEXT_ROW, FREE_ROWS, NEXT_PENDING, FREE_PENDING, NOW, STEP_START = 7, 8, 9, 10, 11, 12
FIRST_BUCKET, FIRST_ROW, ADMIT_COUNT, IS_LFU = 13, 14, 15, 16
STATE_SIZE = 17


class Arrays(NamedTuple):
    """The arrays of a vocabulary; the loops of this room take them together.

    ``slots`` and ``new_slots`` are [n, 1] uint64. ``rows`` [n, 3] and ``pending`` [n, 4] are int32:
    the address, the batch of the last use (-1 for a free entry), and the count. ``row_counts`` has
    the counts of rows if evictions depend on them. ``free_rows`` and ``free_pending`` are stacks.
    ``live`` counts the rows of each bucket, and ``room`` limits them. ``victims`` [buckets, n, 2]
    has the next rows to evict and the batches of their last uses, between ``heads`` and ``tails``.
    """

    state: Array
    slots: Array
    new_slots: Array
    rows: Array
    row_counts: Array
    free_rows: Array
    pending: Array
    free_pending: Array
    live: Array
    room: Array
    victims: Array
    heads: Array
    tails: Array


@compiled
def address_of(key: int) -> Any:  # noqa: ANN401 (numba types)
    """Return the address of a key, as ``streams.mix``."""
    return I64(mixed(U64(key)))


@compiled
def home(address: int, scale: int, first: int) -> int:
    """Return the home slot of an address."""
    return (((address >> 32) - first) * scale) >> 32


@compiled
def joined(high: int, low: int) -> Any:  # noqa: ANN401 (numba types)
    """Return the address with these halves."""
    return (I64(high) << 32) | (I64(low) & LOW_32)


@compiled
def address_at(rows: Array, pending: Array, entry: int) -> int:
    """Return the address of an entry."""
    if entry < PENDING:
        return joined(rows[entry, HIGH], rows[entry, LOW])
    return joined(pending[entry - PENDING, HIGH], pending[entry - PENDING, LOW])


@compiled
def set_address(records: Array, at: int, address: int) -> None:
    """Store the address of a row or counter."""
    records[at, LOW] = np.int32(address & LOW_32)
    records[at, HIGH] = np.int32(address >> 32)


@compiled
def entry_of(slot: np.uint64) -> Any:  # noqa: ANN401 (numba types)
    """Return the entry in a slot, or -1 for an empty slot."""
    return I64(slot & U64(LOW_32)) - 1


@compiled
def slot_of(address: int, entry: int) -> np.uint64:
    """Return the content of the slot of an entry."""
    return (U64(address) << U64(32)) | U64(entry + 1)


@compiled
def place_of(
    state: Array, slots: Array, new_slots: Array, rows: Array, pending: Array, address: int
) -> int:
    """Return the place of an address: its slot, or the empty slot where it belongs."""
    place, tag = home(address, state[SCALE], state[FIRST]), U64(address) & U64(LOW_32)
    if place >= state[EDGE]:
        while True:
            slot = slots[place, 0]
            if slot == U64(0) or (
                slot >> U64(32) == tag and address_at(rows, pending, entry_of(slot)) == address
            ):
                return place
            place += 1
            if place == slots.shape[0]:
                raise IndexError("the key map overflows at its end")
    place = home(address, state[NEW_SCALE], state[FIRST])
    while True:
        slot = new_slots[place, 0]
        if slot == U64(0) or (
            slot >> U64(32) == tag and address_at(rows, pending, entry_of(slot)) == address
        ):
            return place + IN_NEW
        place += 1
        if place == new_slots.shape[0]:
            raise IndexError("the key map overflows at its end")


@compiled
def slot_at(slots: Array, new_slots: Array, place: int) -> np.uint64:
    """Return the content of a place."""
    return new_slots[place - IN_NEW, 0] if place >= IN_NEW else slots[place, 0]


@compiled
def set_slot(slots: Array, new_slots: Array, place: int, slot: np.uint64) -> None:
    """Set the content of a place."""
    if place >= IN_NEW:
        new_slots[place - IN_NEW, 0] = slot
    else:
        slots[place, 0] = slot


@compiled
def insert(
    state: Array,
    slots: Array,
    new_slots: Array,
    rows: Array,
    pending: Array,
    address: int,
    entry: int,
) -> None:
    """Map a new address to an entry."""
    place = place_of(state, slots, new_slots, rows, pending, address)
    set_slot(slots, new_slots, place, slot_of(address, entry))
    state[ENTRIES] += 1


@compiled
def remove_at(
    state: Array, slots: Array, new_slots: Array, rows: Array, pending: Array, place: int
) -> None:
    """Empty a place, and move later entries back so that probing still finds them."""
    array, scale = slots, state[SCALE]
    if place >= IN_NEW:
        array, scale, place = new_slots, state[NEW_SCALE], place - IN_NEW
    hole, later = place, place + 1
    while array[later, 0] != U64(0):
        address = address_at(rows, pending, entry_of(array[later, 0]))
        if home(address, scale, state[FIRST]) <= hole:
            array[hole, 0] = array[later, 0]
            hole = later
        later += 1
    array[hole, 0] = U64(0)
    state[ENTRIES] -= 1


@compiled
def remove(
    state: Array, slots: Array, new_slots: Array, rows: Array, pending: Array, address: int
) -> None:
    """Remove an existing address."""
    place = place_of(state, slots, new_slots, rows, pending, address)
    remove_at(state, slots, new_slots, rows, pending, place)


@compiled
def migrate(
    state: Array, slots: Array, new_slots: Array, rows: Array, pending: Array, count: int
) -> bool:
    """Move at least ``count`` slots to the new array; return True if all have moved."""
    edge, end = state[EDGE], slots.shape[0]
    stop = min(edge + count, end)
    # The edge must be an empty slot: then every entry after the edge also has its home after it.
    while edge < end and (edge < stop or slots[edge, 0] != U64(0)):
        if edge + DISTANCE < end:
            entry = entry_of(slots[edge + DISTANCE, 0])
            if entry >= PENDING:
                prefetch(pending, entry - PENDING)
            elif entry >= 0:
                prefetch(rows, entry)
        slot = slots[edge, 0]
        if slot != U64(0):
            address = address_at(rows, pending, entry_of(slot))
            place = home(address, state[NEW_SCALE], state[FIRST])
            while new_slots[place, 0] != U64(0):
                place += 1
            new_slots[place, 0] = slot
        edge += 1
    state[EDGE] = edge
    return edge == end
