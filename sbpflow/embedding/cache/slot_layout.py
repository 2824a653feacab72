"""The arrays of slot planning: columns of a row's record, and positions in the state."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# Columns of the 16-byte record of a row: its slot; the last batch announced for it, and its place
# in the list of that batch; and the batch that uses it next, or uses it now.
SLOT, LAST, PLACE, NEXT = range(4)
RECORD_BYTES = 16
NEW, STORED = -1, -2  # slots of rows without one: never written, and in slower memory
NEVER = 2**31 - 1  # the next use of a row that no announced batch uses

# Unused slots; rows of admitted batches; and the ends of the queue of rows without a next use.
FREE, LEASED, HEAD, TAIL = range(4)
