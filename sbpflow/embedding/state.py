"""The logical names of a collection's state: what is saved, whatever the layout.

``tables/T`` are the rows of table T, ``tables/T/STATE`` what its optimizer keeps. Each has a full
shape, and the ranks hold rectangles of it. Of a table with rows by key there is ``tables/T/keys``,
too, and the order of its rows is that of the addresses of their keys.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.embedding.plan.table_batch import TableBatch
from sbpflow.embedding.plan.tables import Shard, shards_of
from sbpflow.embedding.storage.keyed import KEYS, KeyedStore, TrainedKeys, TrainedRows
from sbpflow.embedding.storage.store import WEIGHTS, RowStore


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows [start, stop) of one tensor of a store that gives no views; read and written on demand.

    ``is_column``: the numbers that a store keeps per row, as a column of a logical tensor.
    """

    store: RowStore | TrainedRows | TrainedKeys
    key: str  # ``WEIGHTS``, or a name of state
    start: int
    stop: int
    is_column: bool = False

    def __getitem__(self, rows: slice) -> "StoredRows":
        start, stop, _ = rows.indices(self.stop - self.start)
        stop = max(start, stop)
        return replace(self, start=self.start + start, stop=self.start + stop)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def shape(self) -> torch.Size:
        rest = (1,) if self.is_column else self._like().shape[1:]
        return torch.Size((self.stop - self.start, *rest))

    @property
    def dtype(self) -> torch.dtype:
        return self._like().dtype

    @property
    def itemsize(self) -> int:
        return self._like().itemsize

    def numel(self) -> int:
        """How many numbers these are."""
        return self.shape.numel()

    def split(self, count: int) -> Iterator["StoredRows"]:
        """``count`` rows at a time."""
        for first in range(0, self.stop - self.start, count):
            yield self[first : first + count]

    def read(self) -> Tensor:
        """The rows, copied."""
        like = self._like()
        into = torch.empty(self.stop - self.start, *like.shape[1:], dtype=like.dtype)
        self.store.read(slice(self.start, self.stop), {self.key: into})
        return into.view(self.shape)

    def write(self, values: Tensor) -> None:
        """Set the rows."""
        if isinstance(self.store, TrainedRows | TrainedKeys):
            raise TypeError(f"{type(self.store).__name__} are rows of one moment: read them")
        shape = (self.stop - self.start, *self._like().shape[1:])
        self.store.write(slice(self.start, self.stop), {self.key: values.view(shape)})

    def _like(self) -> Tensor:
        return self.store.read(slice(0, 0))[self.key]


Values = Tensor | StoredRows


def read_values(values: Values) -> Tensor:
    """A tensor as it is, or what a store reads; a large one is better read by parts."""
    return values if isinstance(values, Tensor) else values.read()


@dataclass(frozen=True, slots=True)
class StoredShard:
    """One shard as this rank holds it."""

    shard: Shard
    store: RowStore | TrainedRows

    @property
    def rows(self) -> slice:
        """Its rows in the store."""
        return slice(self.shard.base, self.shard.base + self.shard.num_rows)

    @property
    def weights(self) -> Tensor:
        """[rows, columns]; a view if the store is in place, or else a copy."""
        return self.store.read(self.rows)[WEIGHTS]

    @property
    def state(self) -> dict[str, Tensor]:
        """By name of optimizer state, [rows] or [rows, columns]; as ``weights``."""
        found = self.store.read(self.rows)
        return {name: values for name, values in found.items() if name != WEIGHTS}

    def values(self) -> dict[str, Values]:
        """By name, ``WEIGHTS`` first: views, or rows that are read on demand."""
        if self.store.is_in_place:
            return {**self.store.read(self.rows)}
        start, stop = self.rows.start, self.rows.stop
        names = self.store.read(slice(0, 0))
        return {name: StoredRows(self.store, name, start, stop) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """``values`` are [row_start:row_stop, col_start:col_stop] of a logical tensor: a view, or what
    a store reads.

    A tensor of one number per row has no columns to split: ``values`` are [row_start:row_stop].
    """

    row_start: int
    row_stop: int
    col_start: int
    col_stop: int
    values: Values


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalTensor:
    """A named tensor of the state, of full ``shape``, and this rank's rectangles of it.

    Ranks may hold equal rectangles: copies of B tables, and the state of rows whose columns are
    spread over ranks. ``column_starts`` is there for state of one number per row and column shard:
    where the shards start in the table's columns.

    Of a table with rows by key (``by_key``) no rank knows the full shape: ``shape`` and rectangle
    are of the rows of this rank, behind which come those of the next. ``keyed`` is their store.
    """

    name: str
    shape: tuple[int, ...]
    rectangles: tuple[Rectangle, ...]
    column_starts: tuple[int, ...] | None = None
    by_key: bool = False
    keyed: KeyedStore | None = None


def logical_state(plan: EmbeddingPlan, stored: list[StoredShard]) -> dict[str, LogicalTensor]:
    """Every tensor of the collection's state by name, the same names on all ranks.

    With ``row_state: per_shard`` the state of rowwise Adagrad is [rows, column shards]. Rows by key
    are those of the batches trained, their keys first, with which a restore begins.
    """
    mine = {one.shard.table.name: one for one in stored}
    found: list[LogicalTensor] = []
    for group in plan.groups:
        for stack in group.stacks:
            for table, layout in zip(stack.tables, stack.layouts, strict=True):
                held = mine.get(table.name)
                name, (num_rows, dim) = f"tables/{table.name}", table.shape
                tensor: Callable[..., LogicalTensor] = LogicalTensor
                if table.by_key:
                    keyed = held.store if held and isinstance(held.store, KeyedStore) else None
                    held, keys = _trained(held, keyed)
                    num_rows = sum(one.row_stop for one in keys)
                    tensor = partial(LogicalTensor, by_key=True, keyed=keyed)
                    found.append(tensor(name=f"{name}/{KEYS}", shape=(num_rows,), rectangles=keys))
                parts = () if held is None else (_weights(held),)
                found.append(tensor(name=name, shape=(num_rows, dim), rectangles=parts))
                starts = sorted({shard.col_start for shard in shards_of(table, layout)})
                for key in stack.optimizer.state:
                    parts = () if held is None else (_state(held, key, starts, stack),)
                    shape = stack.optimizer.state_shape(key, num_rows, dim)
                    column_starts = None
                    if _is_per_shard(stack, shape):
                        shape, column_starts = (num_rows, len(starts)), tuple(starts)
                    found.append(
                        tensor(
                            name=f"{name}/{key}",
                            shape=shape,
                            rectangles=parts,
                            column_starts=column_starts,
                        )
                    )
    return {tensor.name: tensor for tensor in found}


def _trained(
    held: StoredShard | None, keyed: KeyedStore | None
) -> tuple[StoredShard | None, tuple[Rectangle, ...]]:
    """A rank's part of a table with rows by key, as one shard of the rows trained, and its keys."""
    if held is None or keyed is None:
        return None, ()
    rows = keyed.trained()
    stop = rows.num_rows
    values = StoredRows(TrainedKeys(rows), KEYS, 0, stop)
    keys = Rectangle(row_start=0, row_stop=stop, col_start=0, col_stop=1, values=values)
    return StoredShard(replace(held.shard, row_start=0, row_stop=stop), rows), (keys,)


def _is_per_shard(stack: TableBatch, shape: tuple[int, ...]) -> bool:
    return len(shape) == 1 and not stack.optimizer.shares_row_state


def _weights(held: StoredShard) -> Rectangle:
    shard = held.shard
    return Rectangle(
        row_start=shard.row_start,
        row_stop=shard.row_stop,
        col_start=shard.col_start,
        col_stop=shard.col_stop,
        values=held.values()[WEIGHTS],
    )


def _state(held: StoredShard, key: str, starts: list[int], stack: TableBatch) -> Rectangle:
    shard, values = held.shard, held.values()[key]
    first, last = shard.col_start, shard.col_stop
    if values.ndim == 1:
        first, last = 0, 1
        if not stack.optimizer.shares_row_state:
            first = starts.index(shard.col_start)
            last, values = first + 1, _as_column(values)
    return Rectangle(
        row_start=shard.row_start,
        row_stop=shard.row_stop,
        col_start=first,
        col_stop=last,
        values=values,
    )


def _as_column(values: Values) -> Values:
    if isinstance(values, Tensor):
        return values.unsqueeze(1)
    return replace(values, is_column=True)
