"""Compiled hash map from the addresses of keys to rows, or to the counts of keys without a row.

The address of a key is an invertible mix of its bits, so addresses are uniform whatever the keys
are. Slots are in address order: the home slot of an address is proportional to the address, and
linear probing moves a key only to later slots. A bucket of keys is therefore a range of slots, and
the map can grow gradually. To grow, ``migrate`` moves a few slots at a time to a larger array.
Deletion shifts later keys back instead of leaving tombstones, so lookups never slow down.

A slot contains everything that a batch needs to know about a key: its address, the batch of its
last use, and its row or count. A lookup therefore usually reads a single cache line.
"""

from typing import Any, NamedTuple

import numpy as np

from sbpflow.embedding.plan.growth import NUM_BUCKETS
from sbpflow.embedding.storage.compiled import mixed
from sbpflow.runtime.compute.compiled import Array, compiled, prefetch_to_write

U64, I64, I32 = np.uint64, np.int64, np.int32
SHIFT = 64 - (NUM_BUCKETS.bit_length() - 1)
HALF = NUM_BUCKETS // 2  # Addresses are signed.
PAD = 4096  # Number of slots after the last home slot.
MAX_SLOTS = 2**31 - 1  # With more slots, the product in ``home`` would exceed int64.
IN_NEW = 1 << 40  # Bit that marks a place in the array that the map migrates to.
LOW_32 = (1 << 32) - 1
ADDRESS, VALUE = 0, 1  # Columns of slots and logs.
# Elements of ``state``. ``EDGE`` is the first slot that has not yet migrated.
SLOTS, EDGE, NEW_SLOTS, SCALE, NEW_SCALE, FIRST, ENTRIES = 0, 1, 2, 3, 4, 5, 6
NEXT_ROW, FREE_ROWS, NOW, STEP_START = 7, 8, 9, 10
FIRST_BUCKET, FIRST_ROW, ADMIT_COUNT, IS_LFU, PENDING_LIMIT = 11, 12, 13, 14, 15
STATE_SIZE = 16


class Arrays(NamedTuple):
    """The arrays of a vocabulary, which are passed together to the loops of this package.

    ``slots`` and ``new_slots`` are [n, 2] int64: an address, and a value (see ``value_of``), which
    is 0 in an empty slot. ``row_counts`` contains the counts of keys with rows if evictions depend
    on counts. ``free_rows`` is a stack. ``live`` is the number of used rows in each bucket, and
    ``room`` is the maximum for each bucket. ``victims`` [buckets, n, 2] contains, between ``heads``
    and ``tails``, the next keys to evict, in the form of slots.
    """

    state: Array
    slots: Array
    new_slots: Array
    row_counts: Array
    free_rows: Array
    live: Array
    room: Array
    victims: Array
    heads: Array
    tails: Array

    @property
    def migrates(self) -> bool | None:
        """Return True if some keys are in ``new_slots``, else None (see ``observe``)."""
        return True if self.state[EDGE] else None


@compiled
def address_of(key: int) -> Any:  # noqa: ANN401 (numba types)
    """Return the address of a key, computed as in ``streams.mix``."""
    return I64(mixed(U64(key)))


@compiled
def bucket_of(state: Array, address: int) -> int:
    """Return the bucket of an address, counted from this part's first bucket."""
    return (address >> SHIFT) + HALF - state[FIRST_BUCKET]


def buckets_of(addresses: Array) -> Array:
    """Return the buckets of addresses, counted from the first bucket of all parts."""
    return (addresses >> SHIFT) + HALF


@compiled
def home(address: int, scale: int, first: int) -> int:
    """Return the home slot of an address."""
    return (((address >> 32) - first) * scale) >> 32


@compiled
def prefetch_home(flat: Array, address: int, scale: int, first: int) -> None:
    """Prefetch the home slot of an address and the slots after it, which may be in the next cache
    line. ``flat`` contains the slots as one dimension.
    """
    at = 2 * home(address, scale, first)
    prefetch_to_write(flat, at)
    prefetch_to_write(flat, at + 4)


@compiled
def value_of(last: int, content: int) -> Any:  # noqa: ANN401 (numba types)
    """Pack the value of a key last used in batch ``last``. The content of a value is row + 1, or
    -count.
    """
    return (I64(last) << 32) | (I64(content) & LOW_32)


@compiled
def content_of(value: int) -> Any:  # noqa: ANN401 (numba types)
    """Return the content of a value: row + 1, or -count, or 0 for an empty slot."""
    return I64(I32(value))


@compiled
def probe(array: Array, place: int, address: int) -> int:
    """Search from slot ``place`` for an address; return its slot, or the empty slot where it
    belongs.

    The last slot is always empty, so the search ends.
    """
    while array[place, VALUE] != 0 and array[place, ADDRESS] != address:
        place += 1
    return place


@compiled
def place_of(state: Array, slots: Array, new_slots: Array, address: int) -> int:
    """Return the place of an address: its slot, or the empty slot where it belongs."""
    place = home(address, state[SCALE], state[FIRST])
    if place >= state[EDGE]:
        return probe(slots, place, address)
    return probe(new_slots, home(address, state[NEW_SCALE], state[FIRST]), address) + IN_NEW


@compiled
def value_at(slots: Array, new_slots: Array, place: int) -> int:
    """Return the value at a place."""
    return new_slots[place - IN_NEW, VALUE] if place >= IN_NEW else slots[place, VALUE]


@compiled
def set_slot(slots: Array, new_slots: Array, place: int, address: int, value: int) -> None:
    """Set the address and the value at a place."""
    if place >= IN_NEW:
        new_slots[place - IN_NEW, ADDRESS], new_slots[place - IN_NEW, VALUE] = address, value
    else:
        slots[place, ADDRESS], slots[place, VALUE] = address, value


@compiled
def remove_at(state: Array, slots: Array, new_slots: Array, place: int) -> None:
    """Empty a place, and move later keys back, so that probing still finds them."""
    array, scale = slots, state[SCALE]
    if place >= IN_NEW:
        array, scale, place = new_slots, state[NEW_SCALE], place - IN_NEW
    hole, later = place, place + 1
    while array[later, VALUE] != 0:
        if home(array[later, ADDRESS], scale, state[FIRST]) <= hole:
            array[hole, ADDRESS], array[hole, VALUE] = array[later, ADDRESS], array[later, VALUE]
            hole = later
        later += 1
    array[hole, VALUE] = 0
    state[ENTRIES] -= 1


@compiled
def migrate(state: Array, slots: Array, new_slots: Array, count: int) -> bool:
    """Move at least ``count`` slots to the new array; return True once all have moved."""
    edge, end = state[EDGE], slots.shape[0]
    stop = min(edge + count, end)
    # Stop only at an empty slot: then every key after the edge also has its home slot after the
    # edge.
    while edge < end and (edge < stop or slots[edge, VALUE] != 0):
        value = slots[edge, VALUE]
        if value != 0:
            address = slots[edge, ADDRESS]
            place = home(address, state[NEW_SCALE], state[FIRST])
            while new_slots[place, VALUE] != 0:
                place += 1
            new_slots[place, ADDRESS], new_slots[place, VALUE] = address, value
        edge += 1
    state[EDGE] = edge
    return edge == end
