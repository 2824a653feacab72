"""Define the parts of a shard other than its words: keys, lists of ids, and non-feature columns.

The shard's own file contains ``words`` (int32 [rows, 1 + dense + fixed ids]). Each part is a
separate file, which exists only if the set has such columns. In parts with one entry per row,
entry i belongs to row i of the words.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Role = Literal["weight", "group", "time", "row_key", "label"]
Parts = dict[str, "NDArray[Any]"]
"""Arrays by part name"""
SideType = Literal["float32", "int64", "uint64", "string"]
ROLES: Mapping[Role, tuple[SideType, ...]] = {
    "weight": ("float32",),
    "group": ("uint64",),
    "time": ("int64",),
    "row_key": ("int64", "string"),
    "label": ("float32",),
}
"""The roles of non-feature columns, with the types of their values. Several columns may have the
role ``label`` (additional labels); at most one column has each of the other roles.
"""

LENGTH_TYPES = ("|u1", "<u2")
COUNTED_PARTS = ("values", "value_weights", "row_key_bytes")
"""Parts whose length does not depend on the number of rows"""
PLACES_IN_SHARD = ("starts", "row_key_ends")
"""Parts that contain offsets from the start of their shard, so that the values for equal rows
differ between shards
"""


@dataclass(frozen=True, slots=True)
class SideColumn:
    """A non-feature column. ``type`` is the type of its stored values."""

    name: str
    role: Role
    type: SideType


@dataclass(frozen=True, slots=True)
class PartType:
    """The dtype of a part, and its shape without the first dimension.

    The first dimension is the number of rows plus ``extra`` or, if ``counted`` is true, the
    ``count`` in the manifest.
    """

    dtype: str
    tail: tuple[int, ...] = ()
    extra: int = 0
    counted: bool = False

    def shape(self, num_rows: int, count: int | None) -> tuple[int, ...]:
        """Return the shape of the part in a shard of ``num_rows`` rows."""
        first = (count or 0) if self.counted else num_rows + self.extra
        return (first, *self.tail)


SIDE_TYPES: Mapping[SideType, str] = {"float32": "<f4", "int64": "<i8", "uint64": "<u8"}
"""The dtypes of non-feature columns whose values are not strings"""


def chosen_parts(parts: Parts, chosen: NDArray[np.bool_]) -> Parts:
    """Return the parts of the rows where ``chosen`` [rows] is True."""
    selected: Parts = {}
    for name, array in parts.items():
        if name == "starts":
            selected[name] = starts_of(parts["lengths"][chosen])
        elif name in ("values", "value_weights"):
            selected[name] = array[np.repeat(chosen, np.diff(parts["starts"]))]
        elif name == "row_key_ends":
            selected[name] = np.cumsum(np.diff(array, prepend=0)[chosen])
        elif name == "row_key_bytes":
            selected[name] = array[np.repeat(chosen, np.diff(parts["row_key_ends"], prepend=0))]
        else:
            selected[name] = array[chosen]
    return selected


def starts_of(lengths: "NDArray[Any]") -> NDArray[np.int64]:
    """Return the offsets [rows + 1] of the rows' values, given ``lengths`` [rows, lists]."""
    ends = np.cumsum(lengths.sum(axis=1, dtype=np.int64))
    return np.concatenate([np.zeros(1, dtype=np.int64), ends])
