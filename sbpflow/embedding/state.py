"""The logical names of a collection's state: what is saved, whatever the layout.

``tables/T`` are the rows of table T, ``tables/T/STATE`` what its optimizer keeps. Each has a full
shape, and the ranks hold rectangles of it.
"""

from dataclasses import dataclass

from torch import Tensor

from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.embedding.plan.stack import Stack
from sbpflow.embedding.plan.tables import Shard, shards_of


@dataclass(frozen=True, slots=True)
class StoredShard:
    """One shard as this rank holds it: views into its storage, by name of optimizer state."""

    shard: Shard
    weights: Tensor  # [rows, columns]
    state: dict[str, Tensor]  # [rows] or [rows, columns]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """``values`` are [row_start:row_stop, col_start:col_stop] of a logical tensor, a view.

    A tensor of one number per row has no columns to split: ``values`` are [row_start:row_stop].
    """

    row_start: int
    row_stop: int
    col_start: int
    col_stop: int
    values: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalTensor:
    """A named tensor of the state, of full ``shape``, and this rank's rectangles of it.

    Ranks may hold equal rectangles: copies of B tables, and the state of rows whose columns are
    spread over ranks. ``column_starts`` is there for state of one number per row and column shard:
    where the shards start in the table's columns.
    """

    name: str
    shape: tuple[int, ...]
    rectangles: tuple[Rectangle, ...]
    column_starts: tuple[int, ...] | None = None


def logical_state(plan: EmbeddingPlan, stored: list[StoredShard]) -> dict[str, LogicalTensor]:
    """Every tensor of the collection's state by name, the same names on all ranks.

    With ``row_state: per_shard`` the state of rowwise Adagrad is [rows, column shards].
    """
    mine = {one.shard.table.name: one for one in stored}
    found: list[LogicalTensor] = []
    for group in plan.groups:
        for stack in group.stacks:
            for table, layout in zip(stack.tables, stack.layouts, strict=True):
                held = mine.get(table.name)
                name = f"tables/{table.name}"
                parts = () if held is None else (_weights(held),)
                found.append(LogicalTensor(name=name, shape=table.shape, rectangles=parts))
                starts = sorted({shard.col_start for shard in shards_of(table, layout)})
                for key in stack.optimizer.state:
                    parts = () if held is None else (_state(held, key, starts, stack),)
                    shape = stack.optimizer.state_shape(key, *table.shape)
                    column_starts = None
                    if _is_per_shard(stack, shape):
                        shape, column_starts = (table.num_rows, len(starts)), tuple(starts)
                    found.append(
                        LogicalTensor(
                            name=f"{name}/{key}",
                            shape=shape,
                            rectangles=parts,
                            column_starts=column_starts,
                        )
                    )
    return {tensor.name: tensor for tensor in found}


def _is_per_shard(stack: Stack, shape: tuple[int, ...]) -> bool:
    return len(shape) == 1 and not stack.optimizer.shares_row_state


def _weights(held: StoredShard) -> Rectangle:
    shard = held.shard
    return Rectangle(
        row_start=shard.row_start,
        row_stop=shard.row_stop,
        col_start=shard.col_start,
        col_stop=shard.col_stop,
        values=held.weights,
    )


def _state(held: StoredShard, key: str, starts: list[int], stack: Stack) -> Rectangle:
    shard, values = held.shard, held.state[key]
    first, last = shard.col_start, shard.col_stop
    if values.ndim == 1:
        first, last = 0, 1
        if not stack.optimizer.shares_row_state:
            first = starts.index(shard.col_start)
            last, values = first + 1, values.unsqueeze(1)
    return Rectangle(
        row_start=shard.row_start,
        row_stop=shard.row_stop,
        col_start=first,
        col_stop=last,
        values=values,
    )
