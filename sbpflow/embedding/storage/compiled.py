"""Defines loops over rows and ids that numba compiles for the CPU. Requires numba.

Terms are added in batch order, with fused multiply-add (fma) wherever torch's kernels use it, so
that sums, SGD, and state without square roots are bit-equal to those of ``TorchStorage``. Results
that involve a square root differ by at most one unit in the last place, because torch's vector math
library does not round square roots correctly. Arrays must be C-contiguous. Each function is
compiled on first use for its argument types and cached in the user's cache directory.
"""

from collections.abc import Callable
from typing import cast

import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from sbpflow.runtime.compute.compiled import DISTANCE, Array, Node, compiled, prefetch
from sbpflow.runtime.compute.row_vectors import (
    add_row,
    add_scaled_row,
    add_scaled_to_rows,
    add_to_rows,
    add_two_rows,
    copy_row,
    sum_of_rows,
    sum_of_scaled_rows,
)
from sbpflow.runtime.random.streams import GAMMA, MIX_1, MIX_2

U64 = np.uint64
GAMMA_64, _MIX_1, _MIX_2 = (np.uint64(n % (1 << 64)) for n in (GAMMA, MIX_1, MIX_2))
_DIGIT_BITS, _DIGITS = 11, 1 << 11
# Operations on lists of rows pay off only for rows that fit in the registers at once, and only for
# lists of at least this many rows.
MOST_COLUMNS, LEAST_LIST = 16, 3


@intrinsic
def _fma(_: Node, a: Node, b: Node, c: Node) -> Node:
    def generate(_context: Node, builder: Node, _signature: Node, values: Node) -> Node:
        return builder.fma(*values)

    return a(a, b, c), generate


# ``fma`` returns a * b + c in the arguments' floating-point type and rounds once.
fma = cast("Callable[[float, float, float], float]", _fma)


@intrinsic
def _cttz(_: Node, bits: Node) -> Node:
    def generate(_context: Node, builder: Node, _signature: Node, values: Node) -> Node:
        return builder.cttz(values[0], ir.Constant(ir.IntType(1), 0))

    return bits(bits), generate


# ``trailing_zeros`` returns the position of the lowest set bit of an integer, or its number of bits
# if it is 0.
trailing_zeros = cast("Callable[[np.uint64], np.uint64]", _cttz)


@compiled
def take_rows(block: Array, at: Array, out: Array) -> None:
    """Copy the rows ``at`` [n] of ``block`` to ``out`` [n, width]."""
    for i in range(at.size):
        if i + DISTANCE < at.size:
            prefetch(block, at[i + DISTANCE])
        copy_row(out, i, block, np.intp(at[i]))


@compiled
def _popcount(v: np.uint64) -> np.uint64:
    v = v - ((v >> U64(1)) & U64(0x5555555555555555))
    v = (v & U64(0x3333333333333333)) + ((v >> U64(2)) & U64(0x3333333333333333))
    v = (v + (v >> U64(4))) & U64(0x0F0F0F0F0F0F0F0F)
    return (v * U64(0x0101010101010101)) >> U64(56)


@compiled
def index_by_bits(
    addresses: Array, words: Array, before: Array, rows: Array, inverse: Array
) -> int:
    """Write the unique ``addresses`` to ``rows``, ascending, and the index of each address to
    ``inverse``.

    Return the number of unique addresses. ``rows`` needs room for two more addresses. ``words``
    (uint64) has one bit per possible address; all bits must be 0, and are 0 again on return.
    ``before`` (int32) is scratch memory for the number of bits set in preceding words.
    """
    # A bitmap sorts and deduplicates in one go: set the bit of each address, then scan the set
    # bits.
    for i in range(addresses.size):
        a = U64(addresses[i])
        words[a >> U64(6)] |= U64(1) << (a & U64(63))
    count = 0
    for w in range(words.size):
        bits, place = words[w], count
        before[w] = count
        count += np.int64(_popcount(bits))
        # Most words have at most two bits. Two addresses are written without branches, which the
        # CPU would often predict wrongly; the next words overwrite the surplus ones.
        while True:
            rows[place] = w * 64 + np.int64(trailing_zeros(bits))
            bits &= bits - U64(1)
            rows[place + 1] = w * 64 + np.int64(trailing_zeros(bits))
            bits &= bits - U64(1)
            place += 2
            if place >= count:
                break
    # The index of an address is the number of set bits below its own.
    for i in range(addresses.size):
        a = U64(addresses[i])
        lower = (U64(1) << (a & U64(63))) - U64(1)
        inverse[i] = before[a >> U64(6)] + np.int32(_popcount(words[a >> U64(6)] & lower))
    words[:] = U64(0)
    return int(count)


@compiled
def _sort_by_digits(keys: Array, places: Array) -> None:
    """Radix-sort non-negative ``keys`` and apply the same permutation to ``places``."""
    other_keys, other_places = np.empty_like(keys), np.empty_like(places)
    highest = keys.max() if keys.size else 0
    shift = 0
    while (highest >> shift) > 0:
        starts = np.zeros(_DIGITS + 1, np.int64)
        for i in range(keys.size):
            starts[((keys[i] >> shift) & (_DIGITS - 1)) + 1] += 1
        for digit in range(_DIGITS):
            starts[digit + 1] += starts[digit]
        for i in range(keys.size):
            digit = (keys[i] >> shift) & (_DIGITS - 1)
            other_keys[starts[digit]], other_places[starts[digit]] = keys[i], places[i]
            starts[digit] += 1
        keys[:], places[:] = other_keys, other_places
        shift += _DIGIT_BITS


@compiled
def index_by_hash(addresses: Array, rows: Array, inverse: Array) -> int:
    """Like ``index_by_bits``, but with memory proportional to the batch instead of the table."""
    # The hash table uses linear probing and is at most half full; ``shift`` keeps log2(size) hash
    # bits.
    size, shift = 2, U64(63)
    while size < 2 * addresses.size:
        size, shift = 2 * size, shift - U64(1)
    table = np.full(size, -1, np.int32)
    count = 0
    for i in range(addresses.size):
        place = (U64(addresses[i]) * GAMMA_64) >> shift
        slot = table[place]
        while slot >= 0 and rows[slot] != addresses[i]:
            place = (place + U64(1)) & U64(size - 1)
            slot = table[place]
        if slot < 0:
            slot = count
            table[place] = slot
            rows[slot] = addresses[i]
            count += 1
        inverse[i] = slot
    # So far, ``rows`` is in order of first use. Sort it, and map the old indices to the new
    # indices.
    original = np.arange(count).astype(np.int32)
    _sort_by_digits(rows[:count], original)
    rank = np.empty(count, np.int32)
    for j in range(count):
        rank[original[j]] = j
    for i in range(addresses.size):
        inverse[i] = rank[inverse[i]]
    return count


@compiled
def sum_rows(grads: Array, inverse: Array, sums: Array) -> None:
    """Sum ``grads`` [n, width] by row, in order, into ``sums`` [unique, width]."""
    sums[:] = 0
    for i in range(inverse.size):
        if i + DISTANCE < inverse.size:
            prefetch(sums, inverse[i + DISTANCE])
        add_row(sums, np.intp(inverse[i]), grads, i)


@compiled
def length_of_first_list(addresses: Array) -> int:
    """Return the length of the first of two ascending lists of unique addresses, or -1 if there are
    more than two.
    """
    first = addresses.size
    for i in range(1, addresses.size):
        if addresses[i] <= addresses[i - 1]:
            if first < addresses.size:
                return -1
            first = i
    return first


@compiled
def merge_rows(addresses: Array, first: int, grads: Array, rows: Array, sums: Array) -> int:
    """Merge the ascending lists ``addresses[:first]`` and ``addresses[first:]``.

    Write the unique addresses to ``rows`` [n], and the sums of their ``grads`` [n, width], in
    order, to ``sums`` [n, width]. Return the number of unique addresses.
    """
    i, j, count = 0, first, 0
    while i < first and j < addresses.size:
        a, b = addresses[i], addresses[j]
        rows[count] = min(a, b)
        add_two_rows(sums, np.intp(count), grads, np.intp(i), a <= b, np.intp(j), b <= a)
        i += a <= b
        j += b <= a
        count += 1
    rest, end = (i, first) if i < first else (j, addresses.size)
    for k in range(rest, end):
        rows[count] = addresses[k]
        add_two_rows(sums, np.intp(count), grads, np.intp(k), True, np.intp(k), False)
        count += 1
    return count


@compiled
def sum_bags(grads: Array, inverse: Array, ends: Array, weights: Array, sums: Array) -> None:
    """Sum ``grads`` [bags, width] by row, in order, into ``sums`` [unique, width].

    Address i belongs to bag b if ``ends[b] <= i < ends[b + 1]``. ``weights`` is [n], or [0] if
    there are no weights.
    """
    sums[:] = 0
    one, is_narrow = sums.dtype.type(1), sums.shape[1] <= MOST_COLUMNS
    for b in range(ends.size - 1):
        first, end = ends[b], ends[b + 1]
        _prefetch_later(sums, inverse, first, end)
        if is_narrow and end - first >= LEAST_LIST:
            if weights.size:
                add_scaled_to_rows(grads, b, sums, inverse, first, end, weights)
            else:
                add_to_rows(grads, b, sums, inverse, first, end)
        else:
            for i in range(first, end):
                if weights.size:
                    add_scaled_row(sums, np.intp(inverse[i]), grads, b, weights[i], one)
                else:
                    add_row(sums, np.intp(inverse[i]), grads, b)


@compiled
def pool(rows: Array, at: Array, ends: Array, weights: Array, out: Array) -> None:
    """Sum the rows ``at`` of each bag, in order, into ``out`` [bags, width].

    Bags and ``weights`` are as in ``sum_bags``.
    """
    for b in range(ends.size - 1):
        first, end = ends[b], ends[b + 1]
        _prefetch_later(rows, at, first, end)
        if weights.size:
            sum_of_scaled_rows(out, b, rows, at, first, end, weights)
        else:
            sum_of_rows(out, b, rows, at, first, end)


@compiled
def _prefetch_later(rows: Array, at: Array, first: int, end: int) -> None:
    """Prefetch ``rows[at[i + DISTANCE]]`` for i in ``range(first, end)``."""
    for i in range(first + DISTANCE, min(end + DISTANCE, at.size)):
        prefetch(rows, at[i])


@compiled
def squared_norm(grads: Array, row: int) -> float:
    """Return the sum of the squares of a row, adding columns in order."""
    total = grads.dtype.type(0)
    for k in range(grads.shape[1]):
        total = fma(grads[row, k], grads[row, k], total)
    return total


@compiled
def add_squares(grads: Array, squares: Array) -> None:
    """For each row of ``grads``, write the sum of squares to ``squares`` [n]."""
    for j in range(grads.shape[0]):
        squares[j] = squared_norm(grads, j)


@compiled
def mixed(z: np.uint64) -> np.uint64:
    """Apply the finalizer of SplitMix64, as ``streams.mix`` does."""
    z = (z ^ (z >> U64(30))) * _MIX_1
    z = (z ^ (z >> U64(27))) * _MIX_2
    return z ^ (z >> U64(31))


@compiled
def fill_uniform_rows(out: Array, counters: Array, bounds: Array, first_column: int) -> None:
    """Fill ``out`` with the values of ``streams.uniform_rows``, with one bound per row in
    ``bounds``.
    """
    for r in range(out.shape[0]):
        _uniform_row(out, np.intp(r), U64(counters[r]), bounds[r], first_column)


@compiled
def _uniform_row(out: Array, row: np.intp, counter: np.uint64, bound: float, first: int) -> None:
    scale = 2.0 * bound / 9007199254740992.0
    for c in range(out.shape[1]):
        unit = mixed(counter + U64(first + c) * GAMMA_64) & U64(9007199254740991)
        out[row, c] = np.float64(np.int64(unit)) * scale - bound


@compiled
def put_uniform_rows(
    block: Array,
    at: Array,
    rows: Array,
    bases: Array,
    offsets: Array,
    bounds: Array,
    stride: int,
    first_column: int,
) -> None:
    """Set ``block[at]`` to the initial values of ``rows``.

    The shards begin at the ascending ``bases``. In shard s, the counter of a row's first column is
    ``stride`` times the row plus ``offsets[s]``.
    """
    for i in range(rows.size):
        if i + DISTANCE < rows.size:
            prefetch(block, at[i + DISTANCE])
        row = rows[i]
        shard, end = 0, bases.size
        while end - shard > 1:
            middle = (shard + end) >> 1
            if bases[middle] <= row:
                shard = middle
            else:
                end = middle
        counter = U64(row) * U64(stride) + U64(offsets[shard])
        _uniform_row(block, np.intp(at[i]), counter, bounds[shard], first_column)


@compiled
def put_value(block: Array, at: Array, value: float) -> None:
    """Set every element of ``block[at]`` to ``value``."""
    for i in range(at.size):
        if i + DISTANCE < at.size:
            prefetch(block, at[i + DISTANCE])
        row = np.uintp(at[i])
        for k in range(block.shape[1]):
            block[row, k] = value
