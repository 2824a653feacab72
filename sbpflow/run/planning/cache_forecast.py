"""Forecasts the rows that caches will fetch, by planning the cache slots of the first batches."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sbpflow.embedding.cache.mover import AHEAD
from sbpflow.embedding.cache.slot_planner import SlotPlanner, cache_for, name_tables
from sbpflow.embedding.ids.batch_ids import BatchIds
from sbpflow.embedding.ids.reader import IdReader
from sbpflow.embedding.plan.group_plan import GroupPlan
from sbpflow.embedding.plan.row_storage import RowStorage
from sbpflow.embedding.plan.table_batch import TableBatch
from sbpflow.embedding.storage.live_rows import check_numba
from sbpflow.errors import ConfigError
from sbpflow.run.planning.plan import RunPlan
from sbpflow.run.planning.storage import row_bytes

BATCHES = 100
Ids = NDArray[np.integer[Any]]
# maps table, rank, and name to rows per step
Forecast = Mapping[str, Mapping[int, Mapping[str, float]]]


def cached_stacks(plan: RunPlan) -> Iterator[tuple[GroupPlan, TableBatch, RowStorage]]:
    """Yield the stacks whose rows are not all stored on the device, with their groups."""
    for group in plan.embeddings.groups:
        for stack in group.stacks:
            if (storage := stack.tables[0].storage) is not None:
                yield group, stack, storage


def record_bytes(plan: RunPlan, stack: TableBatch, rank: int) -> int:
    """Return the size in bytes of a row in the store of a rank, with its optimizer state."""
    tables = plan.embeddings
    return row_bytes(stack.width(rank), stack.optimizer, tables.row_dtype, tables.dtype)


def forecast(plan: RunPlan, batches: Iterable[Tensor | BatchIds]) -> Forecast:
    """Return the mean numbers of rows per step over the second half of the first 100 ``batches``,
    for each stack (named after its first table) and each rank.

    ``batches`` contains the ids of global batches. The counts are ``unique``, ``fetched``,
    ``read``, and ``written``. Stacks with ragged features are omitted. Growing tables start without
    keys, as in a new run. Raises ConfigError if a cache is too small for the rows that it
    must hold at once, or if there are growing tables but numba is not installed, and DataError for
    an invalid id, unless ``plan.embeddings.out_of_range`` replaces it.
    """
    reader = IdReader(plan.embeddings, 0, torch.device("cpu"), compiled=False)
    matrices: list[Ids] = [reader.read(ids).matrix.numpy() for ids in islice(batches, BATCHES)]
    _replace_keys(plan, matrices)
    found: dict[str, dict[int, Mapping[str, float]]] = {}
    for group, stack, storage in cached_stacks(plan):
        if stack.ragged or not matrices:
            continue
        counts, shortages = dict[int, Mapping[str, float]](), list[_Shortage]()
        for rank in stack.holders():
            num_slots = storage.num_slots(stack.num_rows(rank))
            result = _dry_run(plan, group, stack, rank, num_slots, matrices)
            while isinstance(result, _Shortage):  # later batches may need even more slots
                shortages.append(result)
                result = _dry_run(plan, group, stack, rank, result.needed, matrices)
            counts[rank] = result
        if shortages:
            raise ConfigError(_too_small(stack, storage, max(shortages, key=_Shortage.share)))
        found[stack.tables[0].name] = counts
    return found


def _replace_keys(plan: RunPlan, matrices: list[Ids]) -> None:
    """Replace the keys of growing fields with the rows that their owners assign to them."""
    if not plan.embeddings.vocabularies:
        return
    check_numba(plan.embeddings.vocabularies[0].name)
    from sbpflow.embedding.vocabulary.vocabulary import Vocabulary

    for field in plan.embeddings.vocabularies:
        # ``batches`` have no event times.
        evict = replace(field.growth.evict, idle_time=None)
        growth = replace(field.growth, evict=evict)
        parts = [Vocabulary(growth, field.num_rows, *buckets) for _, *buckets in field.owners]
        columns = list(field.columns)
        for index, ids in enumerate(matrices if columns else ()):
            keys, inverse, occurrences = np.unique(
                ids[:, columns].astype(np.int64), return_inverse=True, return_counts=True
            )
            rows = np.zeros(keys.size, np.int64)
            for part in parts:
                own = np.isin(keys, part.owned(keys), assume_unique=True)
                rows[own], _ = part.announce(keys[own], occurrences[own], ids.shape[0])
                part.release()
            matrices[index] = ids = ids.copy()
            ids[:, columns] = rows[inverse].reshape(-1, len(columns))


@dataclass(frozen=True, slots=True)
class _Shortage:
    """A cache that is too small: batches ``first`` to ``last`` need more slots than it has."""

    rank: int
    num_rows: int  # Number of rows of the stack on this rank.
    needed: int
    first: int
    last: int

    def share(self) -> float:
        """Return the number of needed slots as a share of the rank's rows."""
        return self.needed / self.num_rows


def _too_small(stack: TableBatch, storage: RowStorage, largest: _Shortage) -> str:
    batches = f"batches {largest.first} to {largest.last} need"
    if largest.first == largest.last:
        batches = f"batch {largest.last} needs"
    name = name_tables(table.name for table in stack.tables)
    return (
        f"{storage.key}.cache: the cache of {name} has {storage.num_slots(largest.num_rows):,} "
        f"slots for rows on rank {largest.rank}, but {batches} {largest.needed:,}; use "
        f"{cache_for(largest.needed, largest.num_rows)} or more"
    )


def _dry_run(
    plan: RunPlan,
    group: GroupPlan,
    stack: TableBatch,
    rank: int,
    num_slots: int,
    matrices: list[Ids],
) -> Mapping[str, float] | _Shortage:
    """Plan the slots of one rank; return the mean counts, or the first shortage. Early rows also
    need slots for the next batch, and late gradients need slots for the previous batch.
    """
    num_rows = stack.num_rows(rank)
    planner = SlotPlanner(num_rows, num_slots)
    counts = np.zeros((len(matrices), 4), np.int64)
    for step in range(len(matrices)):
        last = min(step + plan.lookahead, len(matrices))
        while planner.num_announced < max(last, step + 1):
            number = planner.num_announced
            counts[number, 0] = planner.announce(_rows(stack, rank, matrices[number]))
        while planner.num_admitted < min(step + AHEAD + 1, planner.num_announced):
            result = planner.admit()
            if isinstance(result, int):
                needed = min(step + 1 + group.early_rows, planner.num_announced)
                if planner.num_admitted >= needed:
                    break
                return _Shortage(
                    rank, num_rows, result, planner.num_released + 1, planner.num_admitted + 1
                )
            counts[planner.num_admitted - 1, 1:] = (
                result.num_rows,
                result.stored.size,
                result.evicted.size,
            )
        if (step + 1) % plan.accumulate == 0 and (step or not group.late_gradients):
            for _ in range(plan.accumulate):
                planner.release()
    means = counts[len(matrices) // 2 :].mean(0).tolist()
    return dict(zip(("unique", "fetched", "read", "written"), means, strict=True))


def _rows(stack: TableBatch, rank: int, ids: Ids) -> Ids:
    """Return the rows of a rank's store that a batch looks up, including duplicates."""
    shards = {shard.table.name: shard for shard in stack.shards(rank)}
    parts: list[Ids] = []
    for use in stack.uses:
        shard = shards.get(use.table.name)
        if shard is not None:
            own = ids[:, list(use.columns)].reshape(-1)
            own = own[(own >= shard.row_start) & (own < shard.row_stop)]
            parts.append(own + (shard.base - shard.row_start))
    return np.concatenate(parts).astype(np.int64)
