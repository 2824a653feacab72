"""Where the rows of a table are stored, if not all of them in the memory of the device."""

import math
from dataclasses import dataclass
from typing import Literal

Outside = Literal["host", "file"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStorage:
    """All rows are in ``kind`` of memory; slots on the device hold ``share`` of them.

    ``key`` is the configuration key that says so.
    """

    kind: Outside
    share: float
    key: str

    def num_slots(self, num_rows: int) -> int:
        """Slots of a rank with ``num_rows`` rows."""
        return min(num_rows, math.ceil(num_rows * self.share))
