"""Defines the policies for out-of-range ids.

A policy that replaces ids consists of a name in ``OutOfRange``, its description, and a function in
this module. The policy ``error`` does not replace ids.
"""

from collections.abc import Callable
from typing import Annotated, Literal

import torch
from torch import Tensor

from sbpflow.runtime.fields.keys import Key
from sbpflow.runtime.random.streams import mix

OutOfRange = Literal["error", "clamp", "hash"]
OutOfRangeKey = Annotated[
    OutOfRange,
    Key(
        "results",
        "What to do with IDs outside the table: raise an error, use the nearest row (clamp), "
        "or use a row selected by a hash of the ID. Replaced IDs are counted.",
    ),
]


def _clamp(ids: Tensor, limits: Tensor | int) -> Tensor:
    return ids.clamp(min=0).clamp(max=limits - 1)


def _hash(ids: Tensor, limits: Tensor | int) -> Tensor:
    return torch.where((ids < 0) | (ids >= limits), mix(ids).remainder(limits), ids)


SUBSTITUTES: dict[OutOfRange, Callable[[Tensor, Tensor | int], Tensor]] = {
    "clamp": _clamp,
    "hash": _hash,
}
"""Each function takes int64 ids and numbers of rows; the two arguments are broadcast together.
Valid ids are returned unchanged.
"""
