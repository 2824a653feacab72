"""Compiled loops that transpose a rank's keys, deduplicate them, and group them by owner."""

import numpy as np

from sbpflow.embedding.plan.growth import NUM_BUCKETS
from sbpflow.embedding.vocabulary.key_map import SHIFT, U64, address_of
from sbpflow.runtime.compute.compiled import Array, compiled

LINE = 8  # number of int64 values in a cache line


def empty_columns(num_columns: int, length: int) -> Array:
    """Return an uninitialized [num_columns, length or more] array for ``write_columns``.

    The distance between columns is an odd number of cache lines: with a power of two, as a batch
    size often is, the values of a row would compete for the same few lines of the cache.
    """
    num_lines = -(-length // LINE) | 1
    return np.empty((num_columns, num_lines * LINE), np.int64)


@compiled
def write_columns(matrix: Array, columns: Array) -> None:
    """Write the columns of ``matrix`` [n, m] to ``columns`` [m, n or more]."""
    n, m = matrix.shape
    for row in range(n):
        for column in range(m):
            columns[column, row] = matrix[row, column]


@compiled
def read_columns(columns: Array, matrix: Array) -> None:
    """Write ``columns`` [m, n or more] to the columns of ``matrix`` [n, m]."""
    n, m = matrix.shape
    for row in range(n):
        for column in range(m):
            matrix[row, column] = columns[column, row]


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
