"""Plans and runs the lookups of a bundle, with one gather per store."""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sbpflow.serving.cells import mixed_bits
from sbpflow.serving.columns import Array
from sbpflow.serving.encoder import Encoded
from sbpflow.serving.row_store import Store


class Lookup(NamedTuple):
    """The lookup of one feature's ids in one table of a store."""

    feature: str
    first: int
    rows: int
    columns: tuple[int, int] | None
    """The range of the feature's columns in ``Encoded.ids``, or None for a ragged feature."""
    averages: bool


class Segment(NamedTuple):
    """A part of an output's columns: the vectors [start, stop) that a store's gather returns, or
    the pooled vector of a ragged feature.
    """

    store: int
    start: int
    stop: int
    pools: bool
    """Whether the vectors belong to several ids of one feature and must be pooled."""
    lookup: Lookup


class Gather:
    """Reads the rows of all lookups in one store with a single gather.

    ``loops`` is the module ``encoder_loops``, or None to use torch.
    """

    def __init__(self, lookups: Sequence[Lookup], loops: ModuleType | None = None) -> None:
        self._loops = loops
        fixed = [
            (each, column) for each in lookups if each.columns for column in range(*each.columns)
        ]
        self.columns = np.array([column for _, column in fixed], dtype=np.int64)
        self._first = np.array([each.first for each, _ in fixed], dtype=np.int64)
        self._limit = np.array([each.rows for each, _ in fixed], dtype=np.int64)
        self._names = [each.feature for each, _ in fixed]
        self.ragged = [each for each in lookups if each.columns is None]

    def __call__(
        self, store: Store, ids: Array, encoded: Encoded, policy: str
    ) -> tuple[Tensor, dict[tuple[str, int], Tensor]]:
        """Return the vectors of features with a fixed number of ids ([n, ids, dim]), and the
        vectors of ragged features by (feature, first row of the table).
        """
        if self._loops is not None and not self.ragged and store.arrays and ids.dtype == np.int32:
            base = store.arrays[0]
            shape = len(ids), len(self.columns), base.shape[1]
            out = np.empty((len(ids), shape[1] * shape[2]), dtype=base.dtype)
            if self.read(store, np.ascontiguousarray(ids), out, 0):
                return torch.from_numpy(out.reshape(shape)), {}
        given = ids[:, self.columns].astype(np.int64)
        rows = _legal(given, self._limit, policy, self._names) + self._first
        if not self.ragged:
            flat = store.gather(torch.from_numpy(rows.reshape(-1)))
            return flat.view(*rows.shape, flat.shape[-1]), {}
        parts = [rows.reshape(-1)]
        for lookup in self.ragged:
            values = encoded.bags[lookup.feature][0].astype(np.int64)
            parts.append(_legal(values, lookup.rows, policy, lookup.feature) + lookup.first)
        vectors = store.gather(torch.from_numpy(np.concatenate(parts)))
        first, *others = vectors.split([len(part) for part in parts])
        ragged = {
            (each.feature, each.first): own for each, own in zip(self.ragged, others, strict=True)
        }
        return first.view(*rows.shape, vectors.shape[-1]), ragged

    def read(self, store: Store, ids: Array, out: Array, start: int) -> bool:
        """Write the vectors of ``ids`` (int32 [n, columns]) to ``out`` ([n, width]) in one compiled
        call. The vectors of row i of ``ids`` are written to row i of ``out``, starting at column
        ``start``. Returns False without ``loops``, if an id is not a row of its table, or if the
        store must convert its rows.
        """
        arrays = store.arrays
        if self._loops is None or arrays is None or ids.dtype != np.int32:
            return False
        return self._loops.gather_rows(
            ids, self.columns, self._first, self._limit, *arrays, out, start
        )


def _legal(ids: Array, limit: Any, policy: str, names: Any) -> Array:
    """Apply the model's policy for out-of-range ids."""
    outside = (ids < 0) | (ids >= limit)
    if not outside.any():
        return ids
    if policy == "clamp":
        return ids.clip(0, limit - 1)
    if policy == "hash":
        mixed = mixed_bits(np.ascontiguousarray(ids).view(np.uint64)).view(np.int64) % limit
        return np.where(outside, mixed, ids)
    if policy == "error":
        at = np.argwhere(outside)[0]
        name = names if isinstance(names, str) else names[at[1]]
        raise IndexError(
            f"{name}: the id {ids[tuple(at)]} in row {at[0]} is not a row of its table"
        )
    raise ValueError(f"out_of_range must be clamp, hash, or error, got {policy!r}")


def bag_vectors(lookup: Lookup, vectors: Tensor, encoded: Encoded, dtype: torch.dtype) -> Tensor:
    """Pool a ragged feature's vectors ([values, dim]) to one vector per row ([n, dim])."""
    _, lengths, *weights = (torch.from_numpy(part) for part in encoded.bags[lookup.feature])
    if weights:
        vectors = vectors * weights[0].to(dtype).unsqueeze(1)
    sample = torch.repeat_interleave(lengths.long())
    pooled = vectors.new_zeros(len(lengths), vectors.shape[1]).index_add(0, sample, vectors)
    return pooled / lengths.clamp(min=1).to(pooled).unsqueeze(1) if lookup.averages else pooled


def plan_lookups(
    content: Mapping[str, Any], loops: ModuleType | None = None
) -> tuple[tuple[Gather, ...], dict[str, tuple[Segment, ...]]]:
    """Return the gather of each store, and the segments of each output.

    Adjacent features with one id each share a segment.
    """
    lookups: list[list[Lookup]] = [[] for _ in content["stores"]]
    ends = [0] * len(lookups)
    segments: dict[str, tuple[Segment, ...]] = {}
    for output in content["outputs"]:
        own: list[Segment] = []
        for name in output["tables"]:
            table = content["tables"][name]
            number = table["store"]
            for feature in table["features"]:
                at = content["columns"].get(feature)
                columns = None if at is None else (at[0], at[1])
                averages = table["pooling"] == "mean"
                lookup = Lookup(feature, table["first"], table["rows"], columns, averages)
                lookups[number].append(lookup)
                start = ends[number]
                ends[number] += 0 if columns is None else columns[1] - columns[0]
                segment = Segment(number, start, ends[number], ends[number] > start + 1, lookup)
                last = own[-1] if own else None
                if last and _joins(last, segment):
                    own[-1] = last._replace(stop=segment.stop)
                else:
                    own.append(segment)
        segments[output["name"]] = tuple(own)
    return tuple(Gather(own, loops) for own in lookups), segments


def _joins(last: Segment, segment: Segment) -> bool:
    single = segment.lookup.columns is not None and not segment.pools
    other = last.lookup.columns is not None and not last.pools
    return single and other and (last.store, last.stop) == (segment.store, segment.start)
