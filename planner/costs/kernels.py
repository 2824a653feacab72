"""Compares a table's kernels on this machine, by optimizer, and selects the fastest one.

Calibration measures whole steps with the default kernel. Kernel choice is local to a rank and a
storage, so it is not searched: each table is priced with the fastest kernel that supports it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sbpflow.costs.counts import INDEX
from sbpflow.costs.ids import Floats
from sbpflow.embedding.plan.tables import TableConfig
from sbpflow.embedding.storage.choose import (
    KERNEL_NAMES,
    StackFacts,
    kernel_faults,
)
from sbpflow.embedding.storage.measure import StackShape
from sbpflow.planner.costs.profile import Profile
from sbpflow.planner.task import Choice, Shape, Task, embedding_plan
from sbpflow.sbp.sbp import balanced_sizes

# the smallest batch that was timed; prices cannot compare kernels for smaller batches
LEAST_IDS = 2_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageKernel:
    """Lists the predicted ``ms`` of a batch for one storage of a plan by kernel, fastest first.

    ``tables`` are the storage's tables on the rank that has the most of them.
    """

    group: str
    tables: tuple[str, ...]
    ms: Mapping[str, float]


def work_factors(
    profile: Profile, task: Task, table: TableConfig, shape: Shape, work: Floats
) -> Floats:
    """Return [S, 1] ratios of each shard's time with its kernel to its time with the calibrated
    one.

    ``work`` [S, F] contains the counts of the shards, or is [1, F] for a copied table. If the
    requested kernel does not support the table, the torch kernel is used, as in a run.
    """
    rule = task.optimizer_of(table)
    prices = profile.kernels.get(rule.name)
    ids = work[:, INDEX["update_ids"]]
    if not prices or not ids.any():
        return np.ones((len(work), 1))
    widths = balanced_sizes(table.dim, shape.parts[1])
    facts = StackFacts(
        width=next((width for width in sorted(widths) if width % 4), min(widths)),
        optimizer=rule,
        dtype=task.dtype,
        row_dtype=task.row_dtype,
        column_split=shape.parts[1] > 1,
        device_type=task.device_type,
    )
    request = table.kernel or task.kernel
    faults = kernel_faults(facts, {})
    names = [name for name in KERNEL_NAMES if name in prices and faults[name] is None]
    if request != "auto":
        names = [request if request in names else "torch"]
    elements = work[:, INDEX["update_elements"]]
    ms = np.stack([kernel_ms(prices[name], ids, elements) for name in names])
    return (ms.min(0) / kernel_ms(next(iter(prices.values())), ids, elements))[:, None]


def kernel_ms(price: tuple[float, float, float], ids: Floats, elements: Floats) -> Floats:
    """Return the ms of a lookup and an update of ``ids`` ids with ``elements`` numbers in total.

    Fewer than ``LEAST_IDS`` ids cost as much per id as ``LEAST_IDS``. The cost of a call comes from
    a line fitted to large batches and may be 0, which would make that kernel win on small batches.
    """
    always, per_id, per_element = price
    more = np.maximum(LEAST_IDS / np.maximum(ids, 1e-3), 1.0)
    return always + more * (per_id * ids + per_element * elements)


def kernels_of(profile: Profile, task: Task, plan: Mapping[str, Choice]) -> list[StorageKernel]:
    """Return the predicted times of the supported kernels for every storage of a plan.

    The result is empty if the profile has no kernel times (for example, a profile of a machine in
    ``clusters.MACHINES``).
    """
    storages: list[StorageKernel] = []
    if not profile.kernels:
        return storages
    engine = embedding_plan(task, plan)
    for group in engine.groups:
        for stack in group.stacks:
            shape = StackShape.of(group, stack, task.batch_size, task.row_dtype)
            prices = profile.kernels.get(stack.optimizer.name)
            if shape is None or prices is None:
                continue
            faults = kernel_faults(StackFacts.of(engine, stack), {})
            counts = np.array([shape.ids]), np.array([shape.ids * shape.width])
            ms = {
                name: float(kernel_ms(prices[name], *counts)[0])
                for name in KERNEL_NAMES
                if name in prices and faults[name] is None
            }
            tables = tuple(table.name for table in stack.tables)
            ordered = dict(sorted(ms.items(), key=lambda item: item[1]))
            storages.append(StorageKernel(group=group.name, tables=tables, ms=ordered))
    return storages
