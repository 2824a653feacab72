"""What a dense value becomes: one named function per convention, missing included.

Each takes the integers of a column as float32 (exact below 2^24) and a mask of the missing ones,
and returns float32 with the number of values it had to clamp, so that nothing is clamped silently.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]
Mask = NDArray[np.bool_]
Transform = Callable[[Values, Mask], tuple[NDArray[np.float32], int]]


def _log_shifted(values: Values, missing: Mask, shift: float, lowest: float) -> tuple[Values, int]:
    """``missing`` values become ln 1 = 0, as does ``1 - shift``."""
    values = np.where(missing, np.float32(1.0 - shift), values)
    clamped = int(np.count_nonzero(values < lowest))
    np.maximum(values, np.float32(lowest), out=values)
    values += np.float32(shift)
    return np.log(values, out=values), clamped


def log3(values: Values, missing: Mask) -> tuple[NDArray[np.float32], int]:
    """ln(x + 3), missing -> 0, x below -2 taken as -2 and counted.

    Criteo's smallest value is -2 (column I2), which becomes ln 1 = 0 like a missing cell.
    Source: NVIDIA DeepLearningExamples DLRM, preproc_NVTabular.py at 729963dd.
    """
    return _log_shifted(values, missing, 3.0, -2.0)


def log1(values: Values, missing: Mask) -> tuple[NDArray[np.float32], int]:
    """ln(max(x, 0) + 1), missing -> 0; negative values are counted.

    Source: facebookresearch/dlrm, dlrm_data_pytorch.py at 090956ee.
    """
    return _log_shifted(values, missing, 1.0, 0.0)


def squared_log(values: Values, missing: Mask) -> tuple[NDArray[np.float32], int]:
    """floor(ln(x)^2) above 2, x itself otherwise, missing -> 0.

    Source: FuxiCTR, fuxictr/datasets/criteo.py at 0245987f (there a category, here a number).
    """
    large = values > 2
    logs = np.log(np.where(large, values, 1.0).astype(np.float64))
    out = np.where(large, np.floor(logs * logs), values)
    out[missing] = 0.0
    return out.astype(np.float32), 0


def identity(values: Values, missing: Mask) -> tuple[NDArray[np.float32], int]:
    """The value as it is, missing -> 0."""
    return np.where(missing, 0.0, values).astype(np.float32), 0


TRANSFORMS: dict[str, Transform] = {
    "log3": log3,
    "log1": log1,
    "squared_log": squared_log,
    "identity": identity,
}
