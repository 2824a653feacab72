"""Describes the storage of a table whose rows are not all in device memory."""

import math
from dataclasses import dataclass
from typing import Literal

Outside = Literal["host", "file", "servers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStorage:
    """Places all rows in storage ``kind``; a fraction ``share`` of the rows fits in slots on the
    device.

    ``key`` is the configuration key of the rule.
    """

    kind: Outside
    share: float
    key: str

    def num_slots(self, num_rows: int) -> int:
        """Return the number of slots of a rank with ``num_rows`` rows."""
        return min(num_rows, math.ceil(num_rows * self.share))
