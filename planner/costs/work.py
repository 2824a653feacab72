"""What a table in a shape asks of the ranks: rows, elements, bytes. Counts, no milliseconds.

The counts follow what ``sbpflow/embedding/exchange`` does in each move of a step; they add up over
tables. What is there once however many tables share it (a group's calls, a stack's) is a ``Key``:
a rank's total of such a feature is the number of distinct keys.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np

from sbpflow.embedding.plan.exchanges import Exchange
from sbpflow.embedding.plan.group_plan import whole_gradients_are_less
from sbpflow.embedding.plan.tables import TableConfig
from sbpflow.errors import unknown_value
from sbpflow.planner.costs.features import Floats
from sbpflow.planner.task import Shape, Task
from sbpflow.sbp.sbp import balanced_sizes

FEATURES = (
    "memory_bytes",  # rows and optimizer state
    "buffer_bytes",  # ids, vectors, gradients in flight
    "always",
    "dense_macs",  # of this rank's samples
    "dense_elements",  # of this rank's samples, that dense layers read and write
    "dense_parameters",
    "batch_ids",  # this rank's samples' ids, of all features
    "home_sort",  # ids deduplicated before they travel
    "home_unique",
    "seen_ids",  # of the whole batch, looked through for those that are here
    "read_rows",
    "read_elements",
    "read_touched",  # elements of the distinct rows among them: the first use of each misses caches
    "out_elements",  # looked-up vectors as they leave
    "home_elements",  # vectors or terms as they come home
    "expand_rows",
    "expand_elements",
    "repeat_elements",  # gradients copied for every rank
    "whole_elements",  # gradients of whole tables
    "update_ids",
    "update_elements",
    "step_rows",  # rows that the optimizer changes
    "step_elements",
    "square_bytes",  # squares of gradients that ranks sharing a row add up
    "ids_bytes",  # sent by this rank, here and below
    "counted_bytes",
    "vector_bytes",
    "gradient_bytes",
    "vector_in_bytes",  # received by this rank
    "gradient_in_bytes",
    "num_columns",  # groups by exchange, from here on distinct keys
    "num_reduce",
    "num_unique",
    "num_local",
    "num_whole",
    "num_stacks",
    "num_squares",
    "num_id_calls",
)
INDEX = {name: place for place, name in enumerate(FEATURES)}
NUM_FEATURES = len(FEATURES)
MEMORY, BUFFERS = INDEX["memory_bytes"], INDEX["buffer_bytes"]

Key = tuple[Hashable, ...]
"""(feature, what is counted once): its first entry is a place in ``FEATURES``."""


@dataclass(frozen=True, slots=True)
class ShapeCost:
    """``shards`` [S, F] are added to the ranks of the shards, in their order; ``home`` [F] to every
    rank; ``keys(ranks)`` are counted once per plan.
    """

    shards: Floats
    home: Floats
    keys: Callable[[tuple[int, ...]], tuple[Key, ...]]


class _Row:
    """One feature vector, filled by name."""

    def __init__(self) -> None:
        self.values = np.zeros(NUM_FEATURES)

    def add(self, **counts: float) -> None:
        for name, value in counts.items():
            self.values[INDEX[name]] += value


def _window(task: Task) -> int:
    """Batches whose ids are in memory: the one being trained and those announced behind it."""
    return 1 + task.lookahead


def base_work(task: Task) -> Floats:
    """[F] of every rank before any table: its samples, their dense part, the ids it reads."""
    row = _Row()
    samples = task.batch_size / task.world_size
    ids = sum(
        task.ids_per_sample.get(feature.name, float(feature.hotness)) for feature in task.features
    )
    item = task.dtype.itemsize
    width = sum(output.width for output in task.outputs)
    row.add(
        always=1.0,
        dense_macs=samples * task.dense.macs_per_sample,
        dense_elements=samples * task.dense.elements_per_sample,
        dense_parameters=float(task.dense.parameters),
        batch_ids=samples * ids,
        memory_bytes=4.0 * item * task.dense.parameters,  # value, gradient, two of Adam
        buffer_bytes=samples * (_window(task) * 8 * ids + 3 * item * width),
    )
    return row.values


def shape_work(task: Task, table: TableConfig, shape: Shape) -> ShapeCost:
    """What ``table`` in ``shape`` asks of the ranks of ``task``."""
    if task.world_size == 1:
        return _alone(task, table)
    if shape.exchange == "local":
        return _copied(task, table)
    if shape.exchange == "unique" and shape.parts[1] > 1:
        return _unique_columns(task, table, shape)
    if shape.exchange == "unique":
        return _unique(task, table, shape)
    if shape.exchange in ("columns", "reduce"):
        return _boxed(task, table, shape)
    raise unknown_value("exchange", shape.exchange, Exchange)


def _comm_dtype(task: Task) -> tuple[float, float]:
    """Bytes of a number of a vector and of a gradient on their way."""
    comm_dtype = task.comm_dtype or task.dtype
    return float(comm_dtype.itemsize), float(comm_dtype.itemsize)


def _memory(task: Task, table: TableConfig, rows: float, width: float) -> float:
    """Bytes of a shard: its rows, and the state of its optimizer."""
    by_row, by_element = task.optimizer_of(table).state_counts
    state = by_row + by_element * width
    return rows * (width * task.row_dtype.itemsize + state * task.dtype.itemsize)


def _uses(table: TableConfig) -> float:
    return float(len(table.features))


def _alone(task: Task, table: TableConfig) -> ShapeCost:
    lookups, dim = task.lookups(table), table.dim
    touched = task.stats[table.name].touched(lookups)
    out = task.batch_size * dim * _uses(table)
    row = _Row()
    row.add(
        memory_bytes=_memory(task, table, table.num_rows, dim),
        buffer_bytes=24 * lookups + 3 * out * task.dtype.itemsize,
        read_rows=lookups,
        read_elements=lookups * dim,
        read_touched=touched * dim,
        out_elements=out,
        home_elements=out,
        update_ids=lookups,
        update_elements=lookups * dim,
    )
    row.add(step_rows=touched, step_elements=touched * dim)
    rule, output = task.optimizer_of(table), task.output_of[table.name].name
    ragged = task.ragged(table)
    keys: tuple[Key, ...] = (
        (INDEX["num_columns"], output),
        (INDEX["num_stacks"], output, rule, dim, ragged, table.kernel),
    )
    return ShapeCost(np.zeros((0, NUM_FEATURES)), row.values, lambda _: keys)


def _boxed(task: Task, table: TableConfig, shape: Shape) -> ShapeCost:
    """``columns`` and ``reduce``: owners look up the whole batch, boxing moves dense vectors."""
    row_parts, column_parts = shape.parts
    size, batch = task.world_size, task.batch_size
    samples, lookups = batch / size, task.lookups(table)
    touched = task.stats[table.name].touched(lookups) / row_parts
    uses, item = _uses(table), task.dtype.itemsize
    vector_item, gradient_item = _comm_dtype(task)
    reads = lookups / row_parts
    others = (size - 1) / size
    shards: list[Floats] = []
    row_sizes = balanced_sizes(table.num_rows, row_parts)
    column_sizes = balanced_sizes(table.dim, column_parts)
    for rows in row_sizes:
        for width in column_sizes:
            shard = _Row()
            out = batch * width * uses
            shard.add(
                memory_bytes=_memory(task, table, rows, width),
                buffer_bytes=_window(task) * 8 * lookups
                + 16 * reads
                + out * (vector_item + gradient_item + item),
                seen_ids=lookups,
                read_rows=reads,
                read_elements=reads * width,
                read_touched=touched * width,
                out_elements=out,
                vector_bytes=others * out * vector_item,
                gradient_in_bytes=others * out * gradient_item,
                update_ids=reads,
                update_elements=reads * width,
                # Its own samples' gradients need not leave this rank.
                gradient_bytes=-samples * width * uses * gradient_item,
                vector_in_bytes=-samples * width * uses * vector_item,
                ids_bytes=-4.0 * lookups / size,
            )
            shard.add(step_rows=touched, step_elements=touched * width)
            if _shares_state(task, table, shape):
                shard.add(square_bytes=8.0 * touched)
            shards.append(shard.values)
    home = _Row()
    come = samples * table.dim * uses * row_parts
    home.add(
        home_elements=come,
        buffer_bytes=come * (vector_item + gradient_item) + 2 * samples * table.dim * uses * item,
        vector_in_bytes=come * vector_item,
        gradient_bytes=come * gradient_item,
        ids_bytes=4.0 * lookups / size * shape.num_shards,
    )
    return ShapeCost(np.stack(shards), home.values, _boxed_keys(task, table, shape))


def _shares_state(task: Task, table: TableConfig, shape: Shape) -> bool:
    return shape.parts[1] > 1 and task.optimizer_of(table).shares_row_state


def _boxed_keys(
    task: Task, table: TableConfig, shape: Shape
) -> Callable[[tuple[int, ...]], tuple[Key, ...]]:
    output = task.output_of[table.name]
    rule, ragged = task.optimizer_of(table), task.ragged(table)
    split = shape.parts[1] > 1

    def keys(ranks: tuple[int, ...]) -> tuple[Key, ...]:
        where: Hashable = None
        columns: Hashable = (ranks, shape.parts) if split else None
        if shape.exchange == "reduce":
            where = (ranks, shape.parts, columns if output.sums else None)
        group = (output.name, shape.exchange, where)
        stack = (*group, table.dim, columns, ragged, rule, table.kernel)
        found: list[Key] = [
            (INDEX[f"num_{shape.exchange}"], group),
            (INDEX["num_stacks"], stack),
            (INDEX["num_id_calls"], "lists" if ragged else "matrix"),
        ]
        if _shares_state(task, table, shape):
            found.append((INDEX["num_squares"], stack))
        return tuple(found)

    return keys


def _row_keys(
    task: Task, table: TableConfig, exchange: str, *, columns: bool = False
) -> Callable[[tuple[int, ...]], tuple[Key, ...]]:
    output, rule = task.output_of[table.name].name, task.optimizer_of(table)
    alike = (output, exchange, table.dim, task.ragged(table), rule, table.kernel)

    def keys(ranks: tuple[int, ...]) -> tuple[Key, ...]:
        # Columns travel together where every rank has equally many of them.
        group = (*alike, ranks if columns else None)
        found: list[Key] = [(INDEX[f"num_{exchange}"], group), (INDEX["num_stacks"], group)]
        if columns and rule.shares_row_state:
            found.append((INDEX["num_squares"], group))
        return tuple(found)

    return keys


def _unique(task: Task, table: TableConfig, shape: Shape) -> ShapeCost:
    """Unique rows are asked of their owners, expanded at home, their gradients pushed back."""
    parts, size, dim = shape.parts[0], task.world_size, table.dim
    stats = task.stats[table.name]
    lookups, mine = task.lookups(table), task.lookups(table) / size
    wanted = stats.touched(mine)
    item = task.dtype.itemsize
    vector_item, gradient_item = _comm_dtype(task)
    others = (size - 1) / size
    asked = size * wanted / parts  # of one owner, by all ranks
    touched = stats.touched(lookups) / parts
    home = _Row()
    home.add(
        home_sort=mine,
        home_unique=wanted,
        expand_rows=mine,
        expand_elements=mine * dim,
        counted_bytes=4.0 * wanted,
        gradient_bytes=wanted * dim * gradient_item,
        vector_in_bytes=wanted * dim * vector_item,
        buffer_bytes=_window(task) * 24 * mine
        + wanted * dim * (vector_item + gradient_item + 2 * item)
        + 3 * item * dim * task.batch_size / size * _uses(table),
    )
    shards: list[Floats] = []
    for rows in balanced_sizes(table.num_rows, parts):
        shard = _Row()
        shard.add(
            memory_bytes=_memory(task, table, rows, dim),
            buffer_bytes=asked * (12 + dim * (vector_item + gradient_item + 2 * item)),
            read_rows=asked,
            read_elements=asked * dim,
            read_touched=touched * dim,
            vector_bytes=others * asked * dim * vector_item,
            gradient_in_bytes=others * asked * dim * gradient_item,
            update_ids=asked,
            update_elements=asked * dim,
            counted_bytes=-4.0 * wanted / parts,
            gradient_bytes=-wanted / parts * dim * gradient_item,
            vector_in_bytes=-wanted / parts * dim * vector_item,
        )
        shard.add(step_rows=touched, step_elements=touched * dim)
        shards.append(shard.values)
    return ShapeCost(np.stack(shards), home.values, _row_keys(task, table, "unique"))


def _unique_columns(task: Task, table: TableConfig, shape: Shape) -> ShapeCost:
    """Unique rows are asked of all ranks, each of which has columns of every row."""
    size, dim = task.world_size, table.dim
    stats = task.stats[table.name]
    lookups, mine = task.lookups(table), task.lookups(table) / size
    wanted, touched = stats.touched(mine), stats.touched(lookups)
    item = task.dtype.itemsize
    vector_item, gradient_item = _comm_dtype(task)
    asked = size * wanted  # of each rank, by all
    home = _Row()
    home.add(
        home_sort=mine,
        home_unique=wanted,
        home_elements=wanted * dim,  # columns of each rank put side by side
        expand_rows=mine,
        expand_elements=mine * dim,
        counted_bytes=4.0 * wanted * (size - 1),
        gradient_bytes=wanted * dim * gradient_item,
        vector_in_bytes=wanted * dim * vector_item,
        buffer_bytes=_window(task) * 24 * mine
        + wanted * dim * (2 * vector_item + 2 * gradient_item + 2 * item)
        + 3 * item * dim * task.batch_size / size * _uses(table),
    )
    shards: list[Floats] = []
    for width in balanced_sizes(dim, size):
        shard = _Row()
        shard.add(
            memory_bytes=_memory(task, table, table.num_rows, width),
            buffer_bytes=asked * (12 + width * (vector_item + gradient_item + 2 * item)),
            read_rows=asked,
            read_elements=asked * width,
            read_touched=touched * width,
            vector_bytes=(size - 1) * wanted * width * vector_item,
            gradient_in_bytes=(size - 1) * wanted * width * gradient_item,
            update_ids=asked,
            update_elements=asked * width,
            # What a rank keeps of its own rows does not travel.
            gradient_bytes=-wanted * width * gradient_item,
            vector_in_bytes=-wanted * width * vector_item,
        )
        shard.add(step_rows=touched, step_elements=touched * width)
        if _shares_state(task, table, shape):
            shard.add(square_bytes=8.0 * touched)
        shards.append(shard.values)
    keys = _row_keys(task, table, "unique", columns=True)
    return ShapeCost(np.stack(shards), home.values, keys)


def _copied(task: Task, table: TableConfig) -> ShapeCost:
    """A copy everywhere: touched rows go to all, or the gradient of the whole table is reduced."""
    size, dim = task.world_size, table.dim
    stats = task.stats[table.name]
    lookups, mine = task.lookups(table), task.lookups(table) / size
    touched, wanted = stats.touched(lookups), stats.touched(mine)
    item, (_, gradient_item) = task.dtype.itemsize, _comm_dtype(task)
    out = task.batch_size / size * dim * _uses(table)
    home = _Row()
    home.add(memory_bytes=_memory(task, table, table.num_rows, dim))
    home.add(step_rows=touched, step_elements=touched * dim)
    if whole_gradients_are_less(table, _most_lookups(task, table), size):
        numbers = table.num_rows * (dim + 1.0)
        sent = 2 * (size - 1) / size * numbers * gradient_item
        home.add(
            read_rows=mine,
            read_elements=mine * dim,
            read_touched=wanted * dim,
            out_elements=out,
            home_elements=out,
            update_ids=mine,
            update_elements=mine * dim,
            whole_elements=numbers,
            gradient_bytes=sent,
            gradient_in_bytes=sent,
            buffer_bytes=24 * mine + 3 * out * item + 4 * numbers * gradient_item,
        )
        return ShapeCost(np.zeros((0, NUM_FEATURES)), home.values, _whole_keys(task, table))
    home.add(
        home_sort=mine,
        home_unique=wanted,
        read_rows=wanted,
        read_elements=wanted * dim,
        read_touched=wanted * dim,
        expand_rows=mine,
        expand_elements=mine * dim,
        repeat_elements=wanted * dim * size,
        counted_bytes=4.0 * wanted * (size - 1),
        gradient_bytes=wanted * dim * (size - 1) * gradient_item,
        gradient_in_bytes=wanted * dim * (size - 1) * gradient_item,
        update_ids=wanted * size,
        update_elements=wanted * size * dim,
        buffer_bytes=_window(task) * 24 * mine
        + 3 * out * item
        + wanted * size * (12 + dim * 3 * item),
    )
    return ShapeCost(np.zeros((0, NUM_FEATURES)), home.values, _row_keys(task, table, "local"))


def _most_lookups(task: Task, table: TableConfig) -> int:
    """As the engine counts them, by ``hotness``."""
    hotness = {feature.name: feature.hotness for feature in task.features}
    return task.batch_size * sum(hotness[name] for name in table.features)


def _whole_keys(task: Task, table: TableConfig) -> Callable[[tuple[int, ...]], tuple[Key, ...]]:
    output, rule = task.output_of[table.name].name, task.optimizer_of(table)
    group = (output, "whole")
    keys: tuple[Key, ...] = (
        (INDEX["num_whole"], group),
        (INDEX["num_stacks"], (*group, table.dim, task.ragged(table), rule, table.kernel)),
    )
    return lambda _: keys
