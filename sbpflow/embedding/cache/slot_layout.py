"""Defines the arrays that slot planners use: a planning record for each row, and the planner's
state.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# Columns of a row's 16-byte record. ``SLOT`` is the row's slot, ``LAST`` the last announced batch
# that uses it, ``PLACE`` its position in that batch's list, and ``NEXT`` the batch of its current
# or next use.
SLOT, LAST, PLACE, NEXT = range(4)
RECORD_BYTES = 16
# Values of ``SLOT`` for rows without a slot: never written, or in slower memory.
NEW, STORED = -1, -2
NEVER = 2**31 - 1  # Value of ``NEXT`` for a row that no announced batch uses.

# Positions in the state: the number of free slots, the number of rows in admitted batches, and both
# ends of the queue of rows without a next use.
FREE, LEASED, HEAD, TAIL = range(4)


def find_loops(*, compiled: bool | None = None) -> Any:  # noqa: ANN401 (a module)
    """Return the module ``slot_loops`` if numba is installed, else ``slot_arrays``."""
    if compiled is None:
        compiled = find_spec("numba") is not None
    return import_module(f"sbpflow.embedding.cache.{'slot_loops' if compiled else 'slot_arrays'}")


def warm_up_copies(*blocks: Array, rows: Array | None = None) -> None:
    """Compile ``take`` and ``put`` before training, for the types of ``blocks`` [rows, words] and
    ``rows`` (int32 by default).
    """
    loops, none = find_loops(), np.empty(0, np.int32) if rows is None else rows
    for block in blocks:
        loops.take(block, none, np.empty_like(block[:0]), 0)
        loops.put(block, none, np.empty_like(block[:0]), 0)
