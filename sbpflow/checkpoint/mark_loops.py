"""Defines a compiled loop over the marks of an undo log. Import this module only if numba is
installed.
"""

import numpy as np

from sbpflow.runtime.compute.compiled import Array, compiled


@compiled
def take_marked(rows: Array, marks: Array, taken: Array) -> int:
    """Like ``marks.take_marked_by_numpy``, but in one pass."""
    count = 0
    for i in range(rows.size):
        row = np.uint64(rows[i])
        if row < marks.size and marks[row]:
            marks[row] = False
            taken[count] = rows[i]
            count += 1
    return count
