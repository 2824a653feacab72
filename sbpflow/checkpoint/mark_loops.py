"""The marks of an undo log in one pass, compiled by numba; imported only where it is."""

import numpy as np

from sbpflow.runtime.compute.compiled import Array, compiled


@compiled
def take_marked(rows: Array, marks: Array, found: Array) -> int:
    """Those of ``rows`` that are marked, each once, into ``found`` int64, and their marks off.

    Returns how many. Rows behind the last mark have none.
    """
    count = 0
    for i in range(rows.size):
        row = np.uint64(rows[i])
        if row < marks.size and marks[row]:
            marks[row] = False
            found[count] = rows[i]
            count += 1
    return count
