"""Defines loops over ids that numba compiles; they make fewer passes than torch operations.

Import this module only if numba is installed. Results are identical to those of the torch code next
to each call. Arrays must be C-contiguous.
"""

import numpy as np
import torch

from sbpflow.runtime.compute.compiled import Array, compiled

# With at least this many boundaries between row parts, a binary search is faster than a comparison
# with every boundary.
_MOST_COMPARED = 32
_BLOCK = 256  # Loops over a matrix handle about this many ids at once.


@compiled
def join_lists(
    values: Array,
    bases: Array,
    offsets: Array,
    limits: Array,
    most: Array,
    weights: Array,
    lengths: Array,
    out: Array,
    out_weights: Array,
) -> bool:
    """Interleave lists stored feature by feature into lists stored sample by sample.

    Sample i of feature f has ``values[bases[f] + offsets[f, i] : bases[f] + offsets[f, i + 1]]``:
    at most ``most[f]`` ids, each in ``range(limits[f])``. If the input breaks this rule, return
    False; the outputs are then undefined. The outputs are ``lengths`` [samples, features], and
    ``out`` and ``out_weights``, shaped like ``values``. If there are no weights, ``out_weights``
    has size 0.
    """
    features, samples = offsets.shape[0], offsets.shape[1] - 1
    for f in range(features):
        if offsets[f, 0] != 0 or offsets[f, samples] != bases[f + 1] - bases[f]:
            return False
        for i in range(samples):
            length = offsets[f, i + 1] - offsets[f, i]
            if length < 0 or length > most[f]:
                return False
            lengths[i, f] = length
    at = 0
    good = True
    for i in range(samples):
        for f in range(features):
            start, limit = bases[f] + offsets[f, i], limits[f]
            for k in range(start, start + lengths[i, f]):
                value = values[k]
                good &= (value >= 0) & (value < limit)
                out[at] = value
                if out_weights.size:
                    out_weights[at] = weights[k]
                at += 1
    return good


@compiled
def _part_of(value: int, firsts: Array, use: int) -> int:
    """Return how many elements of the ascending ``firsts[use]`` are at most ``value``."""
    part, stop = 0, firsts.shape[1]
    while part < stop:
        middle = (part + stop) >> 1
        if value >= firsts[use, middle]:
            part = middle + 1
        else:
            stop = middle
    return part


@compiled
def owner_addresses(
    values: Array, lengths: Array, firsts: Array, totals: Array, out: Array, offsets: Array
) -> None:
    """Write addresses to ``out`` [ids] and the end of each list to ``offsets`` [lists + 1].

    An address is the id plus ``totals[use, part]``, where ``part`` is the number of elements of
    ``firsts[use]`` that are at most the id.
    """
    samples, uses = lengths.shape
    parts = firsts.shape[1]
    at, bag = 0, 0
    offsets[0] = 0
    for i in range(samples):
        for u in range(uses):
            stop = at + lengths[i, u]
            if parts == 0:
                for k in range(at, stop):
                    out[k] = values[k] + totals[u, 0]
            elif parts == 1:
                first, before, after = firsts[u, 0], totals[u, 0], totals[u, 1]
                for k in range(at, stop):
                    out[k] = values[k] + (after if values[k] >= first else before)
            elif parts < _MOST_COMPARED:
                for k in range(at, stop):
                    part = 0
                    for p in range(parts):
                        part += values[k] >= firsts[u, p]
                    out[k] = values[k] + totals[u, part]
            else:
                for k in range(at, stop):
                    out[k] = values[k] + totals[u, _part_of(values[k], firsts, u)]
            at = stop
            bag += 1
            offsets[bag] = at


@compiled
def are_in_range(ids: Array, last: Array) -> bool:
    """Return True if every id in ``ids`` [samples, columns] is from 0 to ``last[column]``."""
    flat, lasts = ids.reshape(-1), _repeated(last.reshape(1, -1))[0]
    signs = np.int64(0)
    for start in range(0, flat.size, max(lasts.size, 1)):
        block = flat[start : start + lasts.size]
        for k in range(block.size):
            value = np.int64(block[k])
            signs |= value | (lasts[k] - value)  # the sign bit is set if value < 0 or value > last
    return bool(signs >= 0)


@compiled
def _repeated(table: Array) -> Array:
    """Return ``table`` [rows, columns] with its columns repeated as often as fits into ``_BLOCK``
    columns, but at least once.

    LLVM vectorizes a loop over these columns, but not one over the columns of a usual batch.
    """
    columns = table.shape[1]
    out = np.empty((table.shape[0], columns * max(_BLOCK // max(columns, 1), 1)), table.dtype)
    for row in range(out.shape[0]):
        for k in range(out.shape[1]):
            out[row, k] = table[row, k % columns]
    return out


@compiled
def matrix_addresses(ids: Array, shift: Array, firsts: Array, steps: Array, out: Array) -> None:
    """Write the addresses of ``ids`` [samples, columns] to ``out``, in its dtype.

    An address is the id plus ``shift[column]``, plus ``steps[part, column]`` for each part whose
    ``firsts[part, column]`` is at most the id.
    """
    flat, flat_out, shifts = ids.reshape(-1), out.reshape(-1), _repeated(shift.reshape(1, -1))[0]
    bounds, changes = _repeated(firsts), _repeated(steps)
    for start in range(0, flat.size, max(shifts.size, 1)):
        block, total = flat[start : start + shifts.size], flat_out[start : start + shifts.size]
        for k in range(block.size):
            total[k] = block[k] + shifts[k]
        for part in range(bounds.shape[0]):
            for k in range(block.size):
                total[k] += changes[part, k] if block[k] >= bounds[part, k] else 0


@compiled
def local_matrix_addresses(
    ids: Array, shift: Array, firsts: Array, lasts: Array, out: Array, ends: Array
) -> int:
    """Like ``local_addresses``, for ids [samples, columns] with tables [columns] (int64).

    ``ends[n]`` is set to the number of ids that were written of the first n ids.
    """
    count, place = 0, 0
    ends[0] = 0
    for i in range(ids.shape[0]):
        for u in range(ids.shape[1]):
            value = np.int64(ids[i, u])
            out[count] = value + shift[u]  # always written, to avoid a branch
            count += (value >= firsts[u]) & (value <= lasts[u])
            place += 1
            ends[place] = count
    return count


@compiled
def local_addresses(
    values: Array,
    lengths: Array,
    shift: Array,
    firsts: Array,
    lasts: Array,
    weights: Array,
    out: Array,
    out_weights: Array,
    offsets: Array,
) -> int:
    """Add ``shift[use]`` to the ids that are between ``firsts[use]`` and ``lasts[use]``, and write
    the sums to ``out``. Return how many ids were written.

    The end of each list is written to ``offsets``, or the end of each sample if ``offsets`` has
    only [samples + 1] elements. The weights of the ids are written to ``out_weights`` unless that
    array is empty.
    """
    samples, uses = lengths.shape
    pooled, has_weights = offsets.size == samples + 1 and uses != 1, out_weights.size > 0
    at, count, bag = 0, 0, 0
    offsets[0] = 0
    for i in range(samples):
        for u in range(uses):
            low, high, more = firsts[u], lasts[u], shift[u]
            stop = at + lengths[i, u]
            # Always write the id, but advance the position only if this rank owns the row. A branch
            # would often be mispredicted.
            for k in range(at, stop):
                value = values[k]
                out[count] = value + more
                if has_weights:
                    out_weights[count] = weights[k]
                count += (value >= low) & (value <= high)
            at = stop
            if not pooled:
                bag += 1
                offsets[bag] = count
        if pooled:
            bag += 1
            offsets[bag] = count
    return count


def warm_up_matrix(ids_dtype: torch.dtype, address_dtype: torch.dtype) -> None:
    """Compile the loops over a matrix, or load them from the cache, before the first step."""
    ids = torch.zeros(1, 1, dtype=ids_dtype).numpy()
    one = torch.zeros(1, 1, dtype=address_dtype).numpy()
    number, ends = np.zeros(1, np.int64), np.zeros(2, np.int64)
    are_in_range(ids, number)
    local_matrix_addresses(ids, number, number, number, number.copy(), ends)
    matrix_addresses(ids, one[0], one, one, one.copy())


def warm_up(ids_dtype: torch.dtype, address_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Compile the loops over lists, or load them from the cache, before the first step."""
    ids = torch.zeros(1, dtype=ids_dtype).numpy()
    weights, none = torch.zeros(1, dtype=dtype).numpy(), torch.zeros(0, dtype=dtype).numpy()
    lengths = np.ones((1, 1), np.int32)
    one, ends = np.ones(1, np.int64), np.zeros(2, np.int64)
    both = np.arange(2)
    join_lists(ids, both, both.reshape(1, 2), one, one, none, lengths, ids, none)
    addresses = torch.zeros(1, 1, dtype=address_dtype).numpy()
    out = addresses.reshape(-1).copy()
    owner_addresses(ids, lengths, addresses[:, :0].copy(), addresses, out, ends)
    local_addresses(ids, lengths, one, one, one, weights, one.copy(), weights, ends)
