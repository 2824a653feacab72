"""Counts the work that each table of a task, in a given shape, adds to the ranks."""

from collections.abc import Callable, Collection
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from sbpflow.costs.counts import (
    INDEX,
    INDEX_ITEM,
    NUM_FEATURES,
    Facts,
    Key,
    join_counts,
    vector_of,
)
from sbpflow.costs.ids import Floats
from sbpflow.embedding.cache.slot_layout import RECORD_BYTES
from sbpflow.embedding.cache.slot_planner import SLOT_BYTES
from sbpflow.embedding.plan.exchanges import exchange_for
from sbpflow.embedding.plan.group_plan import Exchange, Member
from sbpflow.embedding.plan.tables import TableConfig
from sbpflow.planner.search.problem import Option
from sbpflow.planner.task import Shape, Task
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import balanced_sizes, parse_nd_sbp


def base_work(task: Task) -> Floats:
    """Return the counts [F] of every rank without tables: its samples, dense part, and ids."""
    samples = task.batch_size / task.world_size
    ids = sum(task.mean_ids.values())
    item, parameters = task.dtype.itemsize, task.dense.parameters
    width = sum(output.width for output in task.outputs)
    return vector_of(
        {
            "always": 1.0,
            "dense_macs": samples * task.dense.macs_per_sample,
            "dense_elements": samples * task.dense.elements_per_sample,
            "dense_parameters": float(parameters),
            "batch_ids": samples * ids,
            # four values: a parameter, its gradient, and Adam's two states
            "memory_bytes": 4.0 * item * parameters,
            # ids, the outputs, and their gradients
            "buffer_bytes": samples * (_window(task) * 4 * ids + 2 * item * width),
        }
    )


def _window(task: Task) -> int:
    """Return the number of batches whose ids are in memory at the same time."""
    return task.accumulate + task.lookahead


def joins_work(task: Task) -> Floats:
    """Return the counts [outputs, F] of every rank for joining the parts of each output, if its
    tables are in several groups.
    """
    samples = task.batch_size / task.world_size
    joins = [join_counts(samples, output.width, task.dtype.itemsize) for output in task.outputs]
    return np.array([vector_of(counts) for counts in joins])


def keys_work(task: Task, keys: Collection[Key]) -> Floats:
    """Return the counts [F] of every rank for the distinct keys of a plan: one for each key, and
    the joins of the outputs with several groups.
    """
    features = np.array([feature for feature, _ in keys], dtype=np.int64)
    counts = np.bincount(features, minlength=NUM_FEATURES + len(task.outputs))
    return counts[:NUM_FEATURES] + (counts[NUM_FEATURES:] > 1) @ joins_work(task)


def shape_work(task: Task, table: TableConfig, shape: Shape) -> Option:
    """Return the option to store ``table`` in ``shape``, with counts [F] instead of loads."""
    size = task.world_size
    layout, most = _layout(shape, task.device_type, size), task.most_lookups(table)
    exchange = exchange_for(table, layout, shape.exchange, most, size)
    facts = _facts(task, table, exchange, shape.parts[0] if exchange.even else size)
    home = vector_of(exchange.home(facts, shape.parts))
    rows, widths = map(balanced_sizes, (table.num_rows, table.dim), shape.parts)
    parts = [] if exchange.copies or exchange.even else list(product(rows, widths))
    counts = {part: vector_of(exchange.part(facts, shape.parts, *part)) for part in set(parts)}
    return Option(
        shape=shape,
        shards=np.array([counts[part] for part in parts]).reshape(-1, NUM_FEATURES),
        home=home,
        keys=_keys(task, table, shape, exchange),
    )


@cache
def _layout(shape: Shape, device_type: str, world_size: int) -> Layout:
    """Return the layout of a shape on the first ranks of the world, or on all ranks for a copy."""
    nd_sbp = parse_nd_sbp(shape.sbp)
    ranks = tuple(range(world_size if shape.copied else shape.num_shards))
    grid = shape.parts if len(nd_sbp) > 1 else (len(ranks),)
    return Layout(Placement(device_type, ranks, grid), nd_sbp)


def _facts(task: Task, table: TableConfig, exchange: Exchange, hosts: int) -> Facts:
    lookups, stats, output = task.lookups(table), task.stats[table.name], task.output_of[table.name]
    # The tables of a group send one sum per sample; they are assumed to share one group.
    pooled = output.sums and exchange.pools
    uses = sum(len(each.features) for each in output.tables) if pooled else 1
    rule, is_ragged = task.optimizer_of(table), task.ragged(table)
    weights = task.dtype.itemsize / 4 if is_ragged and task.sends_weights else 0
    slot_share = 1.0 if table.storage is None else table.storage.share
    # With CUDA, slots are planned in the host's memory.
    plans_slots = table.storage is not None and task.device_type == "cpu"
    return Facts(
        world_size=task.world_size,
        batch_size=task.batch_size,
        num_rows=table.num_rows,
        dim=table.dim,
        vectors=len(table.features) / uses,
        lookups=lookups,
        most_lookups=task.most_lookups(table),
        sent_ids=lookups * (1 + weights) + task.batch_size * len(table.features) * is_ragged,
        touched=stats.touched(lookups),
        wanted=stats.touched(lookups / task.world_size),
        host_wanted=stats.touched(lookups / hosts),
        item=task.dtype.itemsize,
        row_item=task.row_dtype.itemsize,
        sent_item=(task.comm_dtype or task.dtype).itemsize,
        window=_window(task),
        index_item=INDEX_ITEM[task.device_type],
        sorts_ahead=task.device_type == "cuda",
        batches=task.accumulate,
        state=rule.state_counts,
        slot_share=slot_share,
        slot_bytes=(RECORD_BYTES + SLOT_BYTES * slot_share) if plans_slots else 0.0,
        shares_state=rule.shares_row_state,
        step_share=stats.step_share(lookups, task.accumulate),
    )


def _keys(
    task: Task, table: TableConfig, shape: Shape, exchange: Exchange
) -> Callable[[tuple[int, ...]], tuple[Key, ...]]:
    output, rule, ragged = task.output_of[table.name], task.optimizer_of(table), task.ragged(table)
    # As a string, because strings cache their hash.
    grows = table.growth is not None
    stored = (repr((table.dim, ragged, rule, table.kernel, grows, table.storage)),)
    number = [each.name for each in task.outputs].index(output.name)

    @cache
    def keys(ranks: tuple[int, ...]) -> tuple[Key, ...]:
        member = Member(
            ranks=ranks,
            grid=shape.parts,
            columns=(ranks, shape.parts) if shape.splits_columns else None,
            sums=output.sums,
            stored=stored,
        )
        group = (output.name, type(exchange).__qualname__, *exchange.group_key(member))
        stack = (*group, *member.stack_key)
        result: list[tuple[Any, ...]] = [
            *((INDEX[name], group, number) for number, name in enumerate(exchange.calls)),
            (INDEX["num_stacks"], stack),
            (NUM_FEATURES + number, group),
        ]
        if exchange.looks_up_all:
            result.append((INDEX["num_id_calls"], "lists" if ragged else "matrix"))
        if shape.splits_columns and rule.shares_row_state:
            result.append((INDEX["num_squares"], stack))
        # Use strings, because a search looks up keys millions of times, and strings cache their
        # hash.
        return tuple((feature, repr(rest)) for feature, *rest in result)

    return keys
