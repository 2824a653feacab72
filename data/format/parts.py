"""What lies beside the words of a shard: lists of ids and the columns that are no features.

``words`` [rows, 1 + dense + fixed ids] int32 is the shard's own file; every other part is a file
of its own, there only where the set has such columns. Row i of a part belongs to row i of words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Role = Literal["weight", "group", "time", "row_key", "label"]
Parts = dict[str, "NDArray[Any]"]
"""Arrays by the names of parts."""
SideType = Literal["float32", "int64", "uint64", "string"]
ROLES: Mapping[Role, tuple[SideType, ...]] = {
    "weight": ("float32",),
    "group": ("uint64",),
    "time": ("int64",),
    "row_key": ("int64", "string"),
    "label": ("float32",),
}
"""The columns beside the features, and what their values may be. ``label`` is of further labels,
of which there may be several; of the others there is one at most."""

LENGTH_TYPES = ("|u1", "<u2")
COUNTED_PARTS = ("values", "value_weights", "row_key_bytes")
"""Parts whose length the number of rows does not say."""
PLACES_IN_SHARD = ("starts", "row_key_ends")
"""Parts that count from the first row of their shard: the same rows in other shards differ here."""


@dataclass(frozen=True, slots=True)
class SideColumn:
    """A column that is no feature; ``type`` is of the values as they are stored."""

    name: str
    role: Role
    type: SideType


@dataclass(frozen=True, slots=True)
class PartType:
    """A file of a shard: its dtype, and its shape but for the first dimension.

    That is the number of rows, plus ``extra``; or ``counted``, a number that the manifest gives.
    """

    dtype: str
    tail: tuple[int, ...] = ()
    extra: int = 0
    counted: bool = False

    def shape(self, num_rows: int, count: int | None) -> tuple[int, ...]:
        """The shape of the part in a shard of ``num_rows`` rows."""
        first = (count or 0) if self.counted else num_rows + self.extra
        return (first, *self.tail)


def part_types(
    num_lists: int, length_type: str, weighted: bool, side: Sequence[SideColumn]
) -> dict[str, PartType]:
    """Every part that the shards of a set have, by name."""
    types: dict[str, PartType] = {}
    if num_lists:
        types["lengths"] = PartType(length_type, (num_lists,))
        types["starts"] = PartType("<i8", extra=1)
        types["values"] = PartType("<i4", counted=True)
        if weighted:
            types["value_weights"] = PartType("<f4", counted=True)
    labels = [column for column in side if column.role == "label"]
    if labels:
        types["labels"] = PartType("<f4", (len(labels),))
    for column in side:
        if column.role == "label":
            continue
        if column.type == "string":
            types[f"{column.role}_ends"] = PartType("<i8")
            types[f"{column.role}_bytes"] = PartType("|u1", counted=True)
        else:
            types[column.role] = PartType(_NUMPY[column.type])
    return types


_NUMPY: Mapping[SideType, str] = {"float32": "<f4", "int64": "<i8", "uint64": "<u8"}


def chosen_parts(parts: Parts, here: NDArray[np.bool_]) -> Parts:
    """The parts of the chosen rows."""
    chosen: Parts = {}
    for name, array in parts.items():
        if name == "starts":
            chosen[name] = starts_of(parts["lengths"][here])
        elif name in ("values", "value_weights"):
            chosen[name] = array[np.repeat(here, np.diff(parts["starts"]))]
        elif name == "row_key_ends":
            chosen[name] = np.cumsum(np.diff(array, prepend=0)[here])
        elif name == "row_key_bytes":
            chosen[name] = array[np.repeat(here, np.diff(parts["row_key_ends"], prepend=0))]
        else:
            chosen[name] = array[here]
    return chosen


def starts_of(lengths: "NDArray[Any]") -> NDArray[np.int64]:
    """Where the values of each row begin, and the end of the last; ``lengths`` [rows, lists]."""
    ends = np.cumsum(lengths.sum(axis=1, dtype=np.int64))
    return np.concatenate([np.zeros(1, dtype=np.int64), ends])
