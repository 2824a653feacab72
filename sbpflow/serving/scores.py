"""Writes scores as text and counts them, with compiled loops if numba is installed."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

# Nine digits identify a float32 exactly, and formatting them takes a third as long as formatting
# the exact decimal number.
_NUMBER = b"%.9g"


@cache
def _loops() -> ModuleType | None:
    return import_module("sbpflow.serving.score_loops") if find_spec("numba") else None


def written(scores: NDArray[np.float32], separator: bytes) -> bytes:
    """Return ``scores`` [n] as text, each followed by ``separator``; raise ValueError for NaN,
    which JSON cannot express.
    """
    if (loops := _loops()) and (text := loops.text_of(scores, separator)) is not None:
        return text
    if not (finite := np.isfinite(scores)).all():
        raise ValueError(f"the score of row {int(finite.argmin())} is not a number")
    return (_NUMBER + separator) * len(scores) % tuple(scores.tolist())


def count_values(
    values: NDArray[np.float32], bounds: NDArray[np.float64], cells: NDArray[np.float64]
) -> None:
    """Add ``values`` [n] to a histogram: cell i counts the values up to ``bounds[i]``, the next
    cell counts larger values and NaN, and the last cell is the sum of all values.
    """
    if loops := _loops():
        loops.count_values(values, bounds, cells)
        return
    cells[:-1] += np.bincount(bounds.searchsorted(values), minlength=len(cells) - 1)
    cells[-1] += values.sum(dtype=np.float64)
