"""Compiled loops that transpose a rank's keys, deduplicate them, and group them by owner."""

import numpy as np

from sbpflow.embedding.plan.growth import NUM_BUCKETS
from sbpflow.embedding.vocabulary.key_map import SHIFT, U64, address_of
from sbpflow.runtime.compute.compiled import Array, compiled


@compiled
def transpose(matrix: Array, out: Array) -> None:
    """Write the transpose of ``matrix`` [n, m] to ``out`` [m, n], in blocks of 16 x 16."""
    n, m = matrix.shape
    for i in range(0, n, 16):
        for j in range(0, m, 16):
            for column in range(j, min(j + 16, m)):
                for row in range(i, min(i + 16, n)):
                    out[column, row] = matrix[row, column]


@compiled
def by_owner(keys: Array, first_buckets: Array) -> tuple[Array, Array, Array, Array]:
    """Return the unique keys ordered by owner, their counts, the index of each of ``keys`` among
    them, and the number of unique keys of each owner.

    ``first_buckets`` are the first buckets of the owners, ascending.
    """
    size = 16
    while size < 2 * keys.size:
        size *= 2
    table, n, num_owners = np.full(size, -1, np.int32), keys.size, first_buckets.size
    unique, owner = np.empty(n, np.int64), np.empty(n, np.int32)
    counts, inverse = np.zeros(n, np.int64), np.empty(n, np.int64)
    sizes = np.zeros(num_owners, np.int64)
    count = 0
    for i in range(n):
        address = address_of(keys[i])
        place = np.int64(U64(address) & U64(size - 1))
        at = table[place]
        while at >= 0 and unique[at] != keys[i]:
            place = (place + 1) & (size - 1)
            at = table[place]
        if at < 0:
            at = count
            table[place], unique[at] = at, keys[i]
            bucket = (address >> SHIFT) + NUM_BUCKETS // 2
            low, high = 0, num_owners
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if first_buckets[middle] <= bucket else (low, middle)
            owner[at] = low
            sizes[low] += 1
            count += 1
        counts[at] += 1
        inverse[i] = at
    starts, places = np.cumsum(sizes) - sizes, np.empty(count, np.int64)
    ordered, ordered_counts = np.empty(count, np.int64), np.empty(count, np.int64)
    for at in range(count):
        place = starts[owner[at]]
        starts[owner[at]] += 1
        places[at], ordered[place], ordered_counts[place] = place, unique[at], counts[at]
    for i in range(n):
        inverse[i] = places[inverse[i]]
    return ordered, ordered_counts, inverse, sizes
