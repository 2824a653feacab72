"""Gathers table rows in one compiled pass. Only ``encoder_loops`` imports this module, which needs
numba.
"""

import numpy as np

from sbpflow.runtime.compute.compiled import Array, compiled, pointer_to, prefetch


@compiled
def gather_rows(
    ids: Array,
    columns: Array,
    first: Array,
    limits: Array,
    base: Array,
    slots: Array,
    starts: Array,
    addresses: Array,
    out: Array,
    start: int,
) -> bool:
    """Copy the store's vectors for the ids in ``columns`` of ``ids`` to ``out`` ([n, width]).

    The vectors of row i of ``ids`` ([n, all columns]) are written to row i of ``out``, one after
    the other, starting at column ``start``. Return False if an id is not a row of its table.
    ``first`` and ``limits`` are the first row and the number of rows of each column's table.
    ``slots``, ``starts``, and ``addresses`` describe the changed rows of a store; ``slots`` is
    empty if no row has changed.
    """
    num_rows, dim = base.shape
    for row in range(ids.shape[0]):
        if row + 1 < ids.shape[0]:  # Start loading the vectors of the next row, or their slots.
            for number in range(columns.size):
                at = np.intp(first[number] + ids[row + 1, columns[number]])
                if slots.size:
                    prefetch(slots, at)
                else:
                    prefetch(base, at)
                    prefetch(base, at + 1)  # the vector may extend into a second cache line
        to = start
        for number in range(columns.size):
            own = np.int64(ids[row, columns[number]])
            if own < 0 or own >= limits[number]:
                return False
            at = first[number] + own
            if slots.size:
                at = np.int64(slots[at])
            if at < num_rows:
                for k in range(dim):
                    out[row, to + k] = base[at, k]
            else:
                at -= num_rows
                piece = np.searchsorted(starts, at, side="right") - 1
                changed = pointer_to(addresses[piece], base)
                begin = (at - starts[piece]) * dim
                for k in range(dim):
                    out[row, to + k] = changed[begin + k]
            to += dim
    return True
