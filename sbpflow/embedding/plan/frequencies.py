"""How often the ids of a field repeat: from the statistics of its data, or as click data do.

What lookups cost hangs on how many different rows a batch names. A set's statistics put the rows of
a table into bins of about as many lookups; within a bin all rows are taken for equally frequent.
"""

import math
from dataclasses import dataclass

CLICKS = 3.0
"""Exponent of ids that nothing is known of: the smallest id of n has a share of n ** (-2/3)."""
_SLICES = 40
_MOST = 16.0


@dataclass(frozen=True, slots=True)
class IdFrequencies:
    """Of one field: (rows, lookups) of each bin, and the mean number of ids of a sample."""

    bins: tuple[tuple[int, int], ...]
    per_sample: float

    def touched(self, draws: float) -> float:
        """Rows that ``draws`` ids name, on average."""
        total = sum(lookups for _, lookups in self.bins)
        if draws <= 0 or total == 0:
            return 0.0
        found = (
            rows * -math.expm1(-draws * lookups / total / rows)
            for rows, lookups in self.bins
            if rows and lookups
        )
        return min(sum(found), draws)


def touched(num_rows: int, draws: float, exponent: float = CLICKS) -> float:
    """Rows of a table of ``num_rows`` that ``draws`` ids name, on average, where an id is a uniform
    number from 0 to 1 to the power of ``exponent``, times the rows: 1 for equally frequent ones.
    """
    if draws <= 0 or num_rows <= 0:
        return 0.0
    total, low = 0.0, 0.0
    for number in range(1, _SLICES + 1):  # slices of the table, finer where ids are frequent
        high = (number / _SLICES) ** exponent
        rows = (high - low) * num_rows
        if rows > 0:
            total += rows * -math.expm1(-draws / _SLICES / rows)
        low = high
    return min(total, draws, float(num_rows))


def exponent_of(frequencies: IdFrequencies, num_rows: int, draws: float) -> float:
    """The exponent, in halves, under which ``draws`` ids of a table name as many rows."""
    wanted = frequencies.touched(draws)
    low, high = 1.0, _MOST
    while high - low > 0.05:
        middle = (low + high) / 2
        low, high = (middle, high) if touched(num_rows, draws, middle) > wanted else (low, middle)
    return round(2 * low) / 2
