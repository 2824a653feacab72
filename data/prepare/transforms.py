"""Transform dense values, including missing values; each convention has its own function.

Each function accepts a column's values as float32 [n] (integers are exact below 2^24) and a mask
[n] of missing values. A function returns float32 [n] and the number of clipped values for the
report.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from sbpflow.data.format.schema import MISSING_ID, NUM_RESERVED_IDS, DenseColumn

Values = NDArray[np.float32]
Mask = NDArray[np.bool_]
Transform = Callable[[Values, Mask], tuple[NDArray[np.float32], int]]


def _log_shifted(values: Values, missing: Mask, shift: float, lowest: float) -> tuple[Values, int]:
    """Return ln(x + shift); ``missing`` values become 0, like the value ``1 - shift``."""
    values = np.where(missing, np.float32(1.0 - shift), values)
    clamped = int(np.count_nonzero(values < lowest))
    np.maximum(values, np.float32(lowest), out=values)
    values += np.float32(shift)
    return np.log(values, out=values), clamped


def log3(values: Values, missing: Mask) -> tuple[NDArray[np.float32], int]:
    """Return ln(max(x, -2) + 3), 0 for missing values, and the number of values below -2.

    Criteo's smallest value is -2 (column I2), which becomes ln 1 = 0 like a missing cell.
    Source: NVIDIA DeepLearningExamples DLRM, preproc_NVTabular.py at 729963dd.
    """
    return _log_shifted(values, missing, 3.0, -2.0)


def log1(values: Values, missing: Mask) -> tuple[NDArray[np.float32], int]:
    """Return ln(max(x, 0) + 1), 0 for missing values, and the number of negative values.

    Source: facebookresearch/dlrm, dlrm_data_pytorch.py at 090956ee.
    """
    return _log_shifted(values, missing, 1.0, 0.0)


def squared_log(values: Values, missing: Mask) -> tuple[NDArray[np.float32], int]:
    """Return floor(ln(x)^2) for x above 2, other values unchanged, and 0 for missing values.

    Source: FuxiCTR, fuxictr/datasets/criteo.py at 0245987f, which uses the result as a category.
    """
    large = values > 2
    logs = np.log(np.where(large, values, 1.0).astype(np.float64))
    out = np.where(large, np.floor(logs * logs), values)
    out[missing] = 0.0
    return out.astype(np.float32), 0


def identity(values: Values, missing: Mask) -> tuple[NDArray[np.float32], int]:
    """Return the values unchanged, and 0 for missing values."""
    return np.where(missing, 0.0, values).astype(np.float32), 0


def standardise(
    values: Values, missing: Mask, mean: float, std: float
) -> tuple[NDArray[np.float32], int]:
    """Return (x - mean) / std with the train part's mean and std, and 0 for missing values."""
    out = np.where(missing, 0.0, (values.astype(np.float64) - mean) / std)
    limit = float(np.finfo(np.float32).max)
    clamped = int(np.count_nonzero(np.abs(out) > limit))
    return np.clip(out, -limit, limit).astype(np.float32), clamped


def transform(
    column: DenseColumn, name: str, values: Values, missing: Mask, fitted: Mapping[str, float]
) -> tuple[NDArray[np.float32], int]:
    """Return a column's clipped and transformed values and the number of clipped values."""
    clamped = 0
    if column.clip is not None:
        low, high = (np.float32(end) for end in column.clip)
        clamped = int(np.count_nonzero(((values < low) | (values > high)) & ~missing))
        values = np.clip(values, low, high)
    if name == "standardise":
        out, more = standardise(values, missing, fitted["mean"], fitted["std"])
    else:
        out, more = FUNCTIONS[name](values, missing)
    return out, clamped + more


def bucket_ids(values: Values, missing: Mask, bounds: Sequence[float]) -> NDArray[np.int32]:
    """Return the values' quantile bucket ids, which start at 2, and MISSING_ID where missing."""
    edges = np.array(bounds, dtype=np.float32)
    ids = np.searchsorted(edges, values, side="right").astype(np.int32)
    return np.where(missing, np.int32(MISSING_ID), ids + np.int32(NUM_RESERVED_IDS))


FUNCTIONS: dict[str, Transform] = {
    "log3": log3,
    "log1": log1,
    "squared_log": squared_log,
    "identity": identity,
}
TRANSFORMS = (*FUNCTIONS, "standardise")
