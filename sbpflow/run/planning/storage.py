"""Applies ``parallel.storage`` to the tables of a run, and rejects tables that cannot be cached."""

from dataclasses import replace

import torch

from sbpflow.config.model_tables import check_matches, last_matches
from sbpflow.config.schema import Config
from sbpflow.config.table_rules import DTYPES
from sbpflow.embedding.cache.slot_layout import RECORD_BYTES
from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.embedding.plan.row_storage import RowStorage
from sbpflow.embedding.plan.tables import OutputConfig, TableConfig
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.errors import ConfigError
from sbpflow.training.step_schedule import EARLY_LOOKAHEAD

# In a benchmark with 22,000 slots, steps are equally fast with 16 to 64 known batches
# (docs/results/cache.md).
AUTO_LOOKAHEAD = 64


def with_storage(
    outputs: tuple[OutputConfig, ...], config: Config, world_size: int, device_type: str
) -> tuple[OutputConfig, ...]:
    """Set the storage of the tables whose names match; the last matching pattern wins."""
    rules = config.parallel.storage
    tables = [table for output in outputs for table in output.tables]
    check_matches("parallel.storage", rules, [table.name for table in tables], "table")
    patterns = list(rules)
    last = last_matches(patterns, [table.name for table in tables])
    chosen = {name: patterns[place] for name, place in last.items()}
    dtype = DTYPES[config.parallel.dtype]
    row_dtype = DTYPES[config.parallel.table_dtype or config.parallel.dtype]
    storages: dict[str, RowStorage] = {}
    for pattern, rule in rules.items():
        key = f"parallel.storage.{pattern}"
        if rule.kind == "device":
            continue
        if rule.kind == "host" and device_type == "cpu":
            raise ConfigError(
                f"{key}.kind: host is not supported on cpu, where the device's memory is the "
                "host's memory; use kind: file, or parallel.device: cuda"
            )
        own = [table for table in tables if chosen.get(table.name) == pattern]
        if not own:  # later patterns apply to all of the tables
            continue
        total = 0
        for table in own:
            optimizer = table.optimizer or config.optimizer.sparse
            num_bytes = row_bytes(table.dim, optimizer, row_dtype, dtype)
            if num_bytes <= RECORD_BYTES:
                raise ConfigError(
                    f"{key}: a row of table {table.name} and its optimizer state have {num_bytes} "
                    f"bytes, but tracking the row in a cache takes {RECORD_BYTES} bytes; exclude "
                    "the table, or use kind: device"
                )
            total += table.num_rows * num_bytes
        share = rule.share(key, total / world_size)
        storages[pattern] = RowStorage(kind=rule.kind, share=share, key=key)

    def stored(table: TableConfig) -> TableConfig:
        storage = storages.get(chosen.get(table.name, ""))
        return table if storage is None else replace(table, storage=storage)

    return tuple(replace(out, tables=tuple(map(stored, out.tables))) for out in outputs)


def row_bytes(
    width: int, optimizer: SparseOptimizer, row_dtype: torch.dtype, dtype: torch.dtype
) -> int:
    """Return the bytes of ``width`` columns of a row and of their optimizer state."""
    by_row, by_element = optimizer.state_counts
    return width * row_dtype.itemsize + (by_row + by_element * width) * dtype.itemsize


def check_storage(plan: EmbeddingPlan) -> None:
    """Raise ConfigError if a cached table is replicated on several ranks."""
    for group in plan.groups:
        for table in group.tables:
            if table.storage is not None and group.kind.copies and plan.world.size > 1:
                raise ConfigError(
                    f"{table.storage.key}: table {table.name} is replicated (B) on "
                    f"{plan.world.size} ranks, and replicated tables cannot be cached; use S(0), "
                    "or kind: device"
                )


def lookahead_of(config: Config, plan: EmbeddingPlan) -> int:
    """Return the lookahead; raise ConfigError if it is too short for the cached tables."""
    given = config.train.lookahead
    key = next((t.storage.key for g in plan.groups for t in g.tables if t.storage), None)
    if given == "auto":
        early = any(group.early_rows for group in plan.groups)
        return AUTO_LOOKAHEAD if key is not None else EARLY_LOOKAHEAD if early else 1
    if key is not None and given < 2:
        raise ConfigError(
            f"train.lookahead: {given} is too small with {key}, because rows are fetched before "
            "the step that uses them; use 2 or more, or auto"
        )
    return given
