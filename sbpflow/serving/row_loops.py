"""Gathers table rows in one compiled pass. Only ``encoder_loops`` imports this module, which needs
numba.
"""

import numpy as np

from sbpflow.runtime.compute.compiled import Array, compiled, pointer_to


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
) -> bool:
    """Write the rows of ``ids`` ([n, all columns]) to ``out`` ([n, columns, dim]); return False if
    an id is not a row of its table. ``first`` and ``limits`` are the first row and the number of
    rows of each column's table. ``slots``, ``starts``, and ``addresses`` describe the changed rows
    of a store; ``slots`` is empty if no row has changed.
    """
    num_rows, dim = base.shape
    for row in range(ids.shape[0]):
        for number in range(columns.size):
            own = np.int64(ids[row, columns[number]])
            if own < 0 or own >= limits[number]:
                return False
            at = first[number] + own
            if slots.size:
                at = np.int64(slots[at])
            if at < num_rows:
                for k in range(dim):
                    out[row, number, k] = base[at, k]
            else:
                at -= num_rows
                piece = np.searchsorted(starts, at, side="right") - 1
                changed = pointer_to(addresses[piece], base)
                start = (at - starts[piece]) * dim
                for k in range(dim):
                    out[row, number, k] = changed[start + k]
    return True
