"""Defines how a cell becomes a number, or a key and the key's id.

``data.prepare`` applies the same rules to whole files with Polars expressions, and bundles apply
these functions to rows with numpy. This module needs only numpy, because it is part of a bundle's
``scorer.py``. An empty cell, None, and NaN are missing values. Masks are True where a value is
missing.
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbpflow.runtime.random.splitmix import GAMMA, MIX_1, MIX_2

MISSING_ID, RARE_ID, NUM_RESERVED_IDS = 0, 1, 2
MISSING_KEY = -(2**63)
"""The key of missing values in fields with keys: the smallest int64, which NumPy also uses for "not
a time". 0 cannot be used, because it is a valid key.
"""
INTEGER_PATTERN = r" *([+-]?)0*([0-9]{1,10})"
"""Matches the integers that all parsers must accept: leading blanks and a plus sign are allowed, as
in Polars.

Numbers of more than ten digits after leading zeros do not match, because they cannot fit in 32 bits
and Python refuses to convert thousands of digits.
"""
REAL_PATTERN = r" *\+?(-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
NAN_PATTERN = r"(?i) *[+-]?nan"
INFINITE_PATTERN = r"(?i) *([+-]?)inf(?:inity)?"
KEY_PATTERNS = {"hex": r"[0-9a-fA-F]{8}", "integer": r"(-?)0*([0-9]{1,19})"}
KEY_BYTES, CHECK_BYTES = 8, 4
FLOAT32_MAX = float(np.finfo(np.float32).max)
EXPECTED = {"hex": "eight hex digits", "integer": "an integer", "string": "a string"}
EXAMPLES = {"hex": "05db9164", "integer": "7", "string": "red"}

Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]
Words = NDArray[np.uint64]
_INTEGER, _REAL, _NAN, _INFINITE, _KEY = (
    re.compile(p)
    for p in (INTEGER_PATTERN, REAL_PATTERN, NAN_PATTERN, INFINITE_PATTERN, KEY_PATTERNS["integer"])
)
_HEX = re.compile(KEY_PATTERNS["hex"])
_ALL_BITS = (1 << 64) - 1
_DECIMAL_DIGITS = 38  # maximum number of digits of decimals in Parquet and Arrow files
_INT32, _INT64, _UINT32 = range(-(1 << 31), 1 << 31), range(-(1 << 63), 1 << 63), range(1 << 32)


class Misfit(ValueError):
    """Raised for a cell that is not missing but does not fit its column."""


def is_missing(cell: object) -> bool:
    """Return True for None, NaN, an empty string, and pandas' NA (recognized by its class name)."""
    if cell is None:
        return True
    if isinstance(cell, str):  # comparing NA or an array with "" does not return a bool
        return cell == ""
    if isinstance(cell, float):
        return math.isnan(cell)
    if isinstance(cell, Decimal):
        return cell.is_nan()
    return type(cell).__name__ == "NAType"


def real_number(cell: object, decimal: str = ".") -> float:
    """Return the number in a cell that is not missing, or NaN for the text "nan"."""
    if isinstance(cell, str):
        if decimal == ",":  # 1.234,5 is rejected: digit grouping is not supported
            cell = cell.replace(".", "?").replace(",", ".", 1)
        if match := _REAL.fullmatch(cell):
            return float(match[1])
        if match := _INFINITE.fullmatch(cell):
            return -math.inf if match[1] == "-" else math.inf
        if _NAN.fullmatch(cell):
            return math.nan
        raise Misfit
    if isinstance(cell, bool | int | float | Decimal):
        try:
            return float(cell)
        except OverflowError as error:
            raise Misfit from error
    raise Misfit


def whole_number(cell: object) -> float:
    """Return the 32-bit integer in a cell that is not missing."""
    if isinstance(cell, str):
        match = _INTEGER.fullmatch(cell)
        if match is None or (number := int(match[1] + match[2])) not in _INT32:
            raise Misfit
        return number
    number = real_number(cell)
    if not number.is_integer() or int(number) not in _INT32:
        raise Misfit
    return number


def key_of(cell: object, kind: str) -> tuple[int, int]:
    """Return the 64-bit key of a category that is not missing, and its check value, which is 0
    unless ``kind`` is string.
    """
    if isinstance(cell, Decimal):  # ``prepare`` also reads decimals with a point as float64
        exponent = cell.as_tuple().exponent
        is_whole = isinstance(exponent, int) and 0 <= exponent <= _DECIMAL_DIGITS
        cell = int(cell) if is_whole else float(cell)
    if isinstance(cell, int | float):
        cell = _number_text(cell, kind)
        if isinstance(cell, int):
            return cell & _ALL_BITS, 0
    if not isinstance(cell, str):
        raise Misfit
    if kind == "string":
        return string_key(cell)
    if kind == "hex":
        if not _HEX.fullmatch(cell):
            raise Misfit
        return int(cell, 16), 0
    if kind == "integer":
        match = _KEY.fullmatch(cell)
        if match is None or (number := int(match[1] + match[2])) not in _INT64:
            raise Misfit
        return number & _ALL_BITS, 0
    raise ValueError(f"the kind must be hex, integer, or string, got {kind!r}")


def _number_text(cell: float, kind: str) -> int | str:
    """Return a numeric cell as an integer key, or as text if ``kind`` is string."""
    if isinstance(cell, bool):
        if kind != "string":
            raise Misfit
        return str(cell).lower()
    if isinstance(cell, float) and not cell.is_integer():  # 7.0 is the category 7, but 7.5 is not
        raise Misfit
    number, legal = int(cell), {"hex": _UINT32, "integer": _INT64}.get(kind, _INT64)
    is_wide = kind == "string" and isinstance(cell, int) and number in range(1 << 64)
    if number not in legal and not is_wide:
        raise Misfit
    return str(number) if kind == "string" else number


def string_digest(text: str) -> bytes:
    """Return the blake2b hash of a string's UTF-8 bytes, which consists of the string's key and
    check.
    """
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES + CHECK_BYTES).digest()


def string_key(text: str) -> tuple[int, int]:
    """Return the key (64 bits) and the check (32 bits) of a string, read as little-endian
    integers.
    """
    try:
        digest = string_digest(text)
    except UnicodeEncodeError as error:
        raise Misfit from error
    return int.from_bytes(digest[:KEY_BYTES], "little"), int.from_bytes(
        digest[KEY_BYTES:], "little"
    )


def pair_keys(a: Words, b: Words, both_hex: bool) -> Words:
    """Return a 64-bit key for each pair of keys ([n]). The pair keys of two hex columns never
    collide.
    """
    if both_hex:
        return (a << np.uint64(32)) | b
    return (a * np.uint64(GAMMA)) ^ (b + (a >> np.uint64(29)))


def hash_salt(seed: int, name: str) -> int:
    """Return the salt that ``hashed_key_ids`` uses for the field ``name``, which has no
    vocabulary.
    """
    return int(np.random.SeedSequence([seed, *name.encode()]).generate_state(1, np.uint64)[0])


def hashed_key_ids(keys: NDArray[Any], num_rows: int, salt: int) -> NDArray[np.int32]:
    """Hash keys to ids from 2 to ``num_rows - 1`` with MurmurHash3's finalizer and a modulo."""
    mixed = keys.astype(np.uint64) ^ np.uint64(salt)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        mixed ^= mixed >> np.uint64(33)
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(33)
    size = np.uint64(num_rows - NUM_RESERVED_IDS)
    return (mixed % size).astype(np.int32) + np.int32(NUM_RESERVED_IDS)


def mixed_bits(state: Words) -> Words:
    """Apply SplitMix64's finalizer."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(MIX_1)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(MIX_2)
    return state ^ (state >> np.uint64(31))


def hashed_ids(
    parts: Sequence[NDArray[Any]], rows: int, missing: Sequence[int] | None = None
) -> NDArray[np.int32]:
    """Hash the ids or keys of several columns to ids below ``rows`` (int32 [n]): 2 + hash % (rows -
    2). The id is 0 (missing) where any part equals its entry in ``missing`` (by default, 0). The
    hash depends on the order of the parts.
    """
    state = np.zeros(len(parts[0]), dtype=np.uint64)
    for ids in parts:
        state = mixed_bits((state + np.uint64(GAMMA)) ^ ids.astype(np.uint64))
    state %= np.uint64(rows - NUM_RESERVED_IDS)
    ids = state.astype(np.int32) + np.int32(NUM_RESERVED_IDS)
    for part, value in zip(parts, missing or [MISSING_ID] * len(parts), strict=True):
        ids[part == value] = MISSING_ID
    return ids


def bucket_ids(values: Floats, missing: Mask, bounds: Sequence[float]) -> NDArray[np.int32]:
    """Return the id, 2 or more, of each value's quantile bucket, or MISSING_ID for missing
    values.
    """
    edges = np.array(bounds, dtype=np.float32)
    ids = np.searchsorted(edges, values, side="right").astype(np.int32)
    return np.where(missing, np.int32(MISSING_ID), ids + np.int32(NUM_RESERVED_IDS))


def _log_shifted(values: Floats, missing: Mask, shift: float, lowest: float) -> tuple[Floats, int]:
    """Return ln(max(x, lowest) + shift), or 0 for missing values, and the number of values below
    ``lowest``.

    The logarithm is computed in float64, because numpy's float32 logarithm is off by up to 3 units
    in the last place and depends on the CPU.
    """
    values = np.where(missing, np.float32(1.0 - shift), values)
    clamped = int(np.count_nonzero(values < lowest))
    shifted = np.maximum(values, np.float32(lowest)) + np.float32(shift)
    return np.log(shifted.astype(np.float64)).astype(np.float32), clamped


def squared_log(values: Floats, missing: Mask) -> tuple[Floats, int]:
    """Return floor(ln(x)^2) for x above 2, x for other values, and 0 for missing values.

    The formula is from FuxiCTR (fuxictr/datasets/criteo.py at 0245987f), which uses the result as a
    category.
    """
    large = values > 2
    logs = np.log(np.where(large, values, 1.0).astype(np.float64))
    out = np.where(large, np.floor(logs * logs), values)
    out[missing] = 0.0
    return out.astype(np.float32), 0


def identity(values: Floats, missing: Mask) -> tuple[Floats, int]:
    """Return the values unchanged, or 0 for missing values, and 0 as the number of clipped
    values.
    """
    return np.where(missing, 0.0, values).astype(np.float32), 0


def standardise(values: Floats, missing: Mask, mean: float, std: float) -> tuple[Floats, int]:
    """Return (x - mean) / std, or 0 for missing values, and the number of results clipped to
    float32. ``mean`` and ``std`` are from the train split.
    """
    out = np.where(missing, 0.0, (values.astype(np.float64) - mean) / std)
    clamped = int(np.count_nonzero(np.abs(out) > FLOAT32_MAX))
    return np.clip(out, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32), clamped


def clip_of(entry: Mapping[str, Any]) -> Sequence[float] | None:
    """Return the limits of a dense column of a bundle. Bundles of sets whose buckets were not
    clipped lack ``clips``.
    """
    return entry["clip"] if entry["bounds"] is None or entry.get("clips") else None


def clipped(values: Floats, clip: Sequence[float] | None) -> Floats:
    """Return the values, limited to the two numbers ``clip`` unless it is None."""
    if clip is None:
        return values
    return np.clip(values, np.float32(clip[0]), np.float32(clip[1]))


def transform(
    name: str,
    clip: Sequence[float] | None,
    values: Floats,
    missing: Mask,
    fitted: Mapping[str, float],
) -> tuple[Floats, int]:
    """Return a column's clipped and transformed values, and the number of clipped values."""
    inside = clipped(values, clip)
    clamped = int(np.count_nonzero((inside != values) & ~missing))
    if name == "standardise":
        out, more = standardise(inside, missing, fitted["mean"], fitted["std"])
    else:
        out, more = FUNCTIONS[name](inside, missing)
    return out, clamped + more


FUNCTIONS: dict[str, Callable[[Floats, Mask], tuple[Floats, int]]] = {
    # Criteo's smallest value is -2 (column I2), which becomes ln 1 = 0, like a missing cell. The
    # formula is from DLRM in NVIDIA's DeepLearningExamples (preproc_NVTabular.py at 729963dd).
    "log3": partial(_log_shifted, shift=3.0, lowest=-2.0),
    # The formula is from facebookresearch/dlrm (dlrm_data_pytorch.py at 090956ee).
    "log1": partial(_log_shifted, shift=1.0, lowest=0.0),
    "squared_log": squared_log,
    "identity": identity,
}
TRANSFORMS = (*FUNCTIONS, "standardise")


def cell_pattern(separator: str, quote: str | None) -> str:
    """Return a pattern that matches a quoted or plain text cell. Because of its possessive
    quantifiers, the matching time is linear in the length of the cell.
    """
    if quote is None:
        return f"[^{re.escape(separator)}]*+"
    mark, gap = re.escape(quote), re.escape(separator)
    return f"(?:{mark}(?:[^{mark}]|{mark}{mark})*+{mark}|[^{gap}{mark}]*+)"
