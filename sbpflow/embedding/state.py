"""Defines the logical state of a collection: the tensors of a checkpoint, in any layout.

``tables/T`` contains the rows of table T, and ``tables/T/STATE`` its optimizer state. Each tensor
has a full shape, and each rank stores rectangles of the tensor. For a growing table, the tensor
contains only the shared row and the rows of the keys in ``vocabularies/F/keys``, in the order of
the keys' addresses.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.embedding.plan.table_batch import TableBatch
from sbpflow.embedding.plan.tables import Place, Shard, shards_of
from sbpflow.embedding.storage.live_rows import KeyColumn, TrainedRows
from sbpflow.embedding.storage.selected_rows import SelectedRows
from sbpflow.embedding.storage.store import WEIGHTS, RowStore

if TYPE_CHECKING:  # this module needs numba
    from sbpflow.embedding.vocabulary.field_keys import FieldKeys


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows [start, stop) of a tensor in a store without views; they are read and written on demand.

    With ``is_column``, a tensor with one value per row is a column [rows, 1] of a logical tensor.
    """

    store: RowStore | SelectedRows | KeyColumn
    key: str  # ``WEIGHTS``, or the name of an optimizer state
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
        """Return the number of elements."""
        return self.shape.numel()

    def split(self, count: int) -> Iterator["StoredRows"]:
        """Yield chunks of up to ``count`` rows."""
        for first in range(0, self.stop - self.start, count):
            yield self[first : first + count]

    def read(self) -> Tensor:
        """Return a copy of the rows."""
        like = self._like()
        into = torch.empty(self.stop - self.start, *like.shape[1:], dtype=like.dtype)
        self.store.read(slice(self.start, self.stop), {self.key: into})
        return into.view(self.shape)

    def write(self, values: Tensor) -> None:
        """Set the rows."""
        if isinstance(self.store, SelectedRows | KeyColumn):
            raise TypeError(f"{type(self.store).__name__} is read-only; write to the store instead")
        shape = (self.stop - self.start, *self._like().shape[1:])
        self.store.write(slice(self.start, self.stop), {self.key: values.view(shape)})

    def _like(self) -> Tensor:
        return self.store.read(slice(0, 0))[self.key]


Values = Tensor | StoredRows
# The tensors of a growing field. ``clock`` contains the number of completed batches and, for each
# recent batch, the total number of samples up to its end. ``times`` contains the latest event
# times. Only the first owner has ``clock`` and ``times``. ``totals`` contains a row of
# ``growth.Totals`` for each owner.
KEY_TENSORS = {
    "keys": torch.int64,
    "last_uses": torch.int32,
    "counts": torch.int32,
    "pending_keys": torch.int64,
    "pending_last_uses": torch.int32,
    "pending_counts": torch.int32,
    "clock": torch.int64,
    "times": torch.int64,
    "totals": torch.int64,
}


def read_values(values: Values) -> Tensor:
    """Return a tensor unchanged, or read the rows of a store. The caller should split large values
    into chunks first.
    """
    return values if isinstance(values, Tensor) else values.read()


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A shard on this rank, with its store."""

    shard: Shard
    store: RowStore | SelectedRows

    @property
    def rows(self) -> slice:
        """Return the rows of the shard in the store."""
        return slice(self.shard.base, self.shard.base + self.shard.num_rows)

    @property
    def weights(self) -> Tensor:
        """Return the weights [rows, columns]: a view if the store is in place, else a copy."""
        return self.store.read(self.rows)[WEIGHTS]

    @property
    def state(self) -> dict[str, Tensor]:
        """Return optimizer state by name, [rows] or [rows, columns], as views or copies like
        ``weights``.
        """
        tensors = self.store.read(self.rows)
        return {name: values for name, values in tensors.items() if name != WEIGHTS}

    def values(self) -> dict[str, Values]:
        """Return all tensors by name, ``WEIGHTS`` first: views, or rows to read on demand."""
        if self.store.is_in_place:
            return {**self.store.read(self.rows)}
        start, stop = self.rows.start, self.rows.stop
        names = self.store.read(slice(0, 0))
        return {name: StoredRows(self.store, name, start, stop) for name in names}


@dataclass(frozen=True, slots=True)
class Rectangle:
    """The part ``place`` of a logical tensor: a view or ``StoredRows``.

    If the tensor has one value per row, ``values`` has shape [rows], without a dim for columns.
    """

    place: Place
    values: Values


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalTensor:
    """A named tensor of full ``shape``, and this rank's rectangles of it.

    Several ranks may have equal rectangles: copies of B tables, and the state of rows whose columns
    are split over ranks. ``column_starts`` is set for state with one value per row and column
    shard: it contains the first table column of each shard.

    No rank knows the full shape of a tensor of a growing field (``field``), so ``shape`` and the
    rectangle cover only the rows on this rank, and the rows of the next rank follow them. ``shard``
    says where the table's rows are in the store. If ``is_copy``, another rank saves the rectangle.
    """

    name: str
    shape: tuple[int, ...]
    rectangles: tuple[Rectangle, ...]
    column_starts: tuple[int, ...] | None = None
    field: "FieldKeys | None" = None
    shard: Shard | None = None
    is_copy: bool = False

    @property
    def by_key(self) -> bool:
        """Return True if the number of rows changes during training."""
        return self.field is not None

    @property
    def keys(self) -> str | None:
        """Return the name of the tensor with the keys of a growing table's rows, except the shared
        row.
        """
        if self.field is None or not self.name.startswith("tables/"):
            return None
        return f"vocabularies/{self.field.plan.name}/keys"


def logical_state(
    plan: EmbeddingPlan, stored: list[StoredShard], fields: "Sequence[FieldKeys]"
) -> dict[str, LogicalTensor]:
    """Return the collection's state by name, with the same names on all ranks.

    With ``row_state: per_shard``, the state of rowwise Adagrad is [rows, column shards]. For a
    growing table, the state contains the rows as of the last completed batch.
    """
    stored_by_table = {shard.shard.table.name: shard for shard in stored}
    by_table = {name: field for field in fields for name in field.plan.tables}
    trained = _trained_rows(stored, by_table)
    tensors: list[LogicalTensor] = [tensor for field in fields for tensor in _keys_of(field)]
    for group in plan.groups:
        for stack in group.stacks:
            for table, layout in zip(stack.tables, stack.layouts, strict=True):
                held = stored_by_table.get(table.name)
                name, (num_rows, dim) = f"tables/{table.name}", table.shape
                tensor: Callable[..., LogicalTensor] = LogicalTensor
                is_copy = False
                if (field := by_table.get(table.name)) is not None:
                    shard, num_rows = held.shard if held else None, 0
                    is_copy = held is not None and held.shard.col_start > 0
                    if held is not None:
                        rows = trained[id(held.store)]
                        num_rows, base = rows.count(table.name), rows.starts[table.name]
                        part = replace(held.shard, row_start=0, row_stop=num_rows, base=base)
                        held = StoredShard(part, rows)
                    tensor = partial(LogicalTensor, field=field, shard=shard)
                parts = () if held is None else (_rectangle(held, held.values()[WEIGHTS]),)
                tensors.append(tensor(name=name, shape=(num_rows, dim), rectangles=parts))
                starts = sorted({shard.col_start for shard in shards_of(table, layout)})
                for key in stack.optimizer.state:
                    parts = () if held is None else (_state(held, key, starts, stack),)
                    shape = stack.optimizer.state_shape(key, num_rows, dim)
                    column_starts = None
                    is_shared = len(shape) == 1 and stack.optimizer.shares_row_state
                    if len(shape) == 1 and not stack.optimizer.shares_row_state:
                        shape, column_starts = (num_rows, len(starts)), tuple(starts)
                    tensors.append(
                        tensor(
                            name=f"{name}/{key}",
                            shape=shape,
                            rectangles=parts,
                            column_starts=column_starts,
                            is_copy=is_copy and is_shared,
                        )
                    )
    return {tensor.name: tensor for tensor in tensors}


def _trained_rows(
    stored: list[StoredShard], by_table: "Mapping[str, FieldKeys]"
) -> dict[int, TrainedRows]:
    """Return a snapshot of each store with growing tables, keyed by the id() of the store."""
    by_store: dict[int, list[StoredShard]] = {}
    for one in stored:
        if one.shard.table.name in by_table:
            by_store.setdefault(id(one.store), []).append(one)
    result: dict[int, TrainedRows] = {}
    for number, members in by_store.items():
        live = [rows for one in members if (rows := by_table[one.shard.table.name].live)]
        store = members[0].store
        if not isinstance(store, SelectedRows):
            result[number] = TrainedRows.now(store, [one.shard for one in members], live)
    return result


def _keys_of(field: "FieldKeys") -> list[LogicalTensor]:
    """Return the tensors of a growing field's vocabulary (see ``KEY_TENSORS``)."""
    part, names = field.part, [f"vocabularies/{field.plan.name}/{name}" for name in KEY_TENSORS]
    if part is None:
        return [LogicalTensor(name=name, shape=(0,), rectangles=(), field=field) for name in names]
    copy = part.save()
    tensors: list[LogicalTensor] = []
    for name, kind, dtype in zip(names, KEY_TENSORS, KEY_TENSORS.values(), strict=True):
        count = copy.size(kind)
        values = StoredRows(KeyColumn(partial(copy.column, kind), dtype), WEIGHTS, 0, count)
        parts = Rectangle(Place(0, count, 0, 1), values)
        tensors.append(LogicalTensor(name=name, shape=(count,), rectangles=(parts,), field=field))
    return tensors


def _rectangle(
    held: StoredShard, values: Values, columns: tuple[int, int] | None = None
) -> Rectangle:
    """Return the rectangle of ``values``: all rows of a shard and, by default, all its columns."""
    shard = held.shard
    columns = columns or (shard.col_start, shard.col_stop)
    return Rectangle(Place(shard.row_start, shard.row_stop, *columns), values)


def _state(held: StoredShard, key: str, starts: list[int], stack: TableBatch) -> Rectangle:
    values = held.values()[key]
    if values.ndim > 1:
        return _rectangle(held, values)
    if stack.optimizer.shares_row_state:
        return _rectangle(held, values, (0, 1))
    shard_number = starts.index(held.shard.col_start)
    if isinstance(values, Tensor):
        column: Values = values.unsqueeze(1)
    else:
        column = replace(values, is_column=True)
    return _rectangle(held, column, (shard_number, shard_number + 1))
