"""Describes where a table is stored if not all of its rows are in device memory."""

import math
from dataclasses import dataclass
from typing import Literal

Outside = Literal["host", "file", "servers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStorage:
    """All rows are in storage ``kind``, and slots on the device hold a fraction ``share`` of them.

    ``key`` is the configuration key of the storage rule.
    """

    kind: Outside
    share: float
    key: str

    def num_slots(self, num_rows: int) -> int:
        """Return the number of slots of a rank with ``num_rows`` rows."""
        return min(num_rows, math.ceil(num_rows * self.share))
