"""Defines the input and output of a planner: a task, and a shape and ranks for every table.

The module defines values and their file formats, and does not search or measure. The engine
compiles a plan (``embedding_plan``), so the planner and the engine accept the same plans. Plan
files contain rules in the format of ``parallel.tables``.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from glob import escape
from pathlib import Path
from typing import Any

import torch
import yaml

from sbpflow.config.parse import parse, plain
from sbpflow.config.table_layouts import resolve_table_layouts
from sbpflow.config.table_plan import read_table_plan
from sbpflow.config.table_rules import DTYPES, CommDtype, ParallelConfig, TableRule
from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan, plan_embeddings
from sbpflow.embedding.plan.exchanges import copies
from sbpflow.embedding.plan.tables import (
    FeatureConfig,
    OutputConfig,
    TableConfig,
    TableLayout,
)
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.errors import ConfigError
from sbpflow.planner.costs.features import IdStats
from sbpflow.runtime.compute.devices import backend_of_device
from sbpflow.runtime.ranks.topology import check_speeds
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Split, format_nd_sbp


@dataclass(frozen=True, slots=True)
class Shape:
    """How a table is split and how its ids and vectors are exchanged, without its ranks.

    ``parts`` is (row parts, column parts), or (hosts, ranks per host) for ``(S(0), S(0))``. ``B``
    with ``local`` is a copy on every rank of the world; ``B`` with ``columns`` is the whole table
    on one rank.
    """

    sbp: str
    exchange: str
    parts: tuple[int, int] = (1, 1)

    @property
    def copied(self) -> bool:
        """Return whether every rank stores the whole table."""
        return copies(self.exchange)

    @property
    def splits_columns(self) -> bool:
        """Return whether several ranks store different columns of a row."""
        return "S(1)" in self.sbp and self.parts[1] > 1

    @property
    def num_shards(self) -> int:
        """Return the number of shards, one per rank of a choice, or 1 for a copy on all ranks."""
        return self.parts[0] * self.parts[1]

    def __str__(self) -> str:
        parts = "" if self.num_shards == 1 else " " + "x".join(map(str, self.parts))
        return f"{self.sbp} {self.exchange}{parts}"


@dataclass(frozen=True, slots=True)
class Choice:
    """A shape and ranks: the ranks of the shards in row-major order, or all ranks for a copy."""

    shape: Shape
    ranks: tuple[int, ...]

    def rule(self) -> TableRule:
        """Return the rule for ``parallel.tables``."""
        shape = self.shape
        if shape.copied:
            return TableRule(sbp=shape.sbp, exchange=shape.exchange)
        ranks: tuple[int | tuple[int, ...], ...] = self.ranks
        if shape.sbp.startswith("("):
            width = shape.parts[1]
            ranks = tuple(
                self.ranks[start : start + width] for start in range(0, len(self.ranks), width)
            )
        return TableRule(sbp=shape.sbp, ranks=ranks, exchange=shape.exchange)


Plan = dict[str, Choice]


def choice_of(given: TableLayout, world_size: int) -> Choice:
    """Return the choice of a resolved layout; raise ConfigError for an uneven layout."""
    layout = given.layout
    if any(isinstance(sbp, Split) and sbp.sizes is not None for sbp in layout.nd_sbp):
        raise ConfigError(
            f"{given.key}: {layout} has sizes, but planners split tables evenly; remove sizes"
        )
    ranks, kinds = layout.placement.ranks, layout.nd_sbp
    if len(kinds) == 2:
        rows, columns = layout.placement.shape
        return Choice(Shape(format_nd_sbp(kinds), given.exchange, (rows, columns)), ranks)
    if isinstance(kinds[0], Split):
        parts = (len(ranks), 1) if kinds[0].dim == 0 else (1, len(ranks))
        return Choice(Shape(str(kinds[0]), given.exchange, parts), ranks)
    return Choice(Shape("B", given.exchange if world_size > 1 else "local"), ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseWork:
    """The work of a model's dense part, which is the same for all plans of a task.

    ``macs_per_sample`` is the number of multiply-adds in a forward pass. ``elements_per_sample``
    counts the numbers that the layers read and write, which is more per multiply-add for narrow
    layers than for wide ones.
    """

    macs_per_sample: float = 0.0
    elements_per_sample: float = 0.0
    parameters: int = 0


@dataclass(frozen=True, kw_only=True)
class Task:
    """A planning task: the tables of a model, a batch size, and a world.

    ``stats`` maps table names to id statistics. ``ids_per_sample`` maps the name of each ragged
    feature that averages fewer than ``hotness`` ids per sample to this average. ``device_bytes`` is
    the memory that each rank may fill, in rank order; ``None`` means no limit. ``speeds`` are the
    speeds of the ranks relative to the calibrated ones; ``None`` means 1 for all ranks.
    ``batch_size`` is global; a step consists of ``accumulate`` batches, and ids are exchanged
    ``lookahead`` batches in advance. ``pinned`` tables keep the given choice. ``num_hosts`` is 1
    unless all hosts have the same number of consecutive ranks. ``two_hops`` is False if the run
    does not support layouts with two hops.
    """

    outputs: tuple[OutputConfig, ...]
    features: tuple[FeatureConfig, ...]
    stats: Mapping[str, IdStats]
    world_size: int
    batch_size: int
    optimizer: SparseOptimizer
    ids_per_sample: Mapping[str, float] = field(default_factory=dict[str, float])
    dtype: torch.dtype = torch.float32
    row_dtype: torch.dtype = torch.float32
    comm_dtype: torch.dtype | None = None
    device_type: str = "cpu"
    device_bytes: tuple[int, ...] | None = None
    speeds: tuple[float, ...] | None = None
    dense: DenseWork = DenseWork()
    accumulate: int = 1
    lookahead: int = 1
    num_hosts: int = 1
    two_hops: bool = True
    pinned: Mapping[str, Choice] = field(default_factory=dict[str, Choice])

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.batch_size < self.world_size:
            raise ConfigError(
                f"task: {self.batch_size} samples cannot be split over {self.world_size} ranks; "
                "give each rank at least one sample (for example, 4096 samples on 4 ranks)"
            )
        if self.device_bytes is not None and len(self.device_bytes) != self.world_size:
            raise ConfigError(
                f"task: got {len(self.device_bytes)} memory limits for {self.world_size} ranks; "
                "give one limit for each rank"
            )
        if self.speeds is not None:
            check_speeds("task", self.speeds, self.world_size)
        if missing := [table.name for table in self.tables if table.name not in self.stats]:
            raise ConfigError(
                f"task: the id statistics of {', '.join(missing[:5])} are missing; give statistics "
                "for every table (for example, zipf_mandelbrot(num_rows, 1.05, 2.0, "
                "ids_per_sample=1))"
            )

    @cached_property
    def tables(self) -> tuple[TableConfig, ...]:
        """Return all tables, in the order of the outputs."""
        return tuple(table for output in self.outputs for table in output.tables)

    @cached_property
    def output_of(self) -> dict[str, OutputConfig]:
        """Map each table name to the output of the table."""
        return {table.name: output for output in self.outputs for table in output.tables}

    @cached_property
    def _feature(self) -> dict[str, FeatureConfig]:
        return {feature.name: feature for feature in self.features}

    @cached_property
    def mean_ids(self) -> dict[str, float]:
        """Map each feature name to the average number of ids per sample."""
        known = self.ids_per_sample
        return {each.name: known.get(each.name, float(each.hotness)) for each in self.features}

    @property
    def world(self) -> Placement:
        return Placement.line(self.device_type, self.world_size)

    def lookups(self, table: TableConfig) -> float:
        """Return the average number of ids in a batch."""
        return self.batch_size * sum(self.mean_ids[name] for name in table.features)

    def most_lookups(self, table: TableConfig) -> int:
        """Return the largest number of ids in a batch, as the engine counts them."""
        return self.batch_size * sum(self._feature[name].hotness for name in table.features)

    def ragged(self, table: TableConfig) -> bool:
        """Return whether the table's ids are lists."""
        return any(
            self._feature[name].ragged or self._feature[name].weighted for name in table.features
        )

    @cached_property
    def sends_weights(self) -> bool:
        """Return whether weights are sent for all lists, because some list has weights."""
        return any(feature.weighted for feature in self.features)

    def optimizer_of(self, table: TableConfig) -> SparseOptimizer:
        return table.optimizer or self.optimizer

    def check(self, plan: Mapping[str, Choice]) -> None:
        """Raise ConfigError unless the engine can run the plan of exactly the task's tables."""
        names = {table.name for table in self.tables}
        if lost := sorted(names - set(plan)) or sorted(set(plan) - names):
            raise ConfigError(
                f"plan: tables {', '.join(lost[:5])} are in only one of the task and the plan; "
                "give a choice for every table of the task, and for no other table"
            )
        embedding_plan(self, plan)


def rules(plan: Mapping[str, Choice]) -> dict[str, TableRule]:
    """Return the rules for ``parallel.tables``, with names escaped so that they match exactly."""
    return {escape(name): choice.rule() for name, choice in plan.items()}


def embedding_plan(task: Task, plan: Mapping[str, Choice]) -> EmbeddingPlan:
    """Return the engine's plan; raise ConfigError if the engine cannot run it."""
    comm_dtype: CommDtype | None = None
    if task.comm_dtype is not None and task.comm_dtype != task.dtype:
        comm_dtype = "bfloat16" if task.comm_dtype == torch.bfloat16 else "float16"
    parallel = ParallelConfig(tables=rules(plan), comm_dtype=comm_dtype)
    return plan_embeddings(
        task.outputs,
        _layouts(task, parallel),
        features=task.features,
        optimizer=task.optimizer,
        dtype=task.dtype,
        world=task.world,
        backend=backend_of_device(task.device_type),
        batch_size=task.batch_size,
        row_dtype=task.row_dtype,
    )


def plan_to_yaml(plan: Mapping[str, Choice], notes: Mapping[str, Any] | None = None) -> str:
    """Return the text of a file for ``parallel.plan``: the most frequent rule for ``*``, then the
    exceptions.

    ``notes``, such as the predicted step time, are written next to the tables; only ``world_size``
    is used when the file is read.
    """
    given = rules(plan)
    for common, count in Counter(given.values()).most_common(1):
        if count > 1:
            others = {pattern: rule for pattern, rule in given.items() if rule != common}
            given = {"*": common, **others}
    content: dict[str, Any] = {
        "tables": {
            pattern: {key: value for key, value in plain(rule).items() if value is not None}
            for pattern, rule in given.items()
        }
    }
    if notes:
        content["notes"] = dict(notes)
    return yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=120)


def plan_from_yaml(path: Path, task: Task) -> Plan:
    """Read a plan that ``plan_to_yaml`` or a person wrote; raise ConfigError if it is invalid."""
    planned = read_table_plan(path, world_size=task.world_size)
    comm_dtype = task.comm_dtype or task.dtype
    for pattern, rule in planned.items():
        if rule.comm_dtype is not None and DTYPES[rule.comm_dtype] != comm_dtype:
            raise ConfigError(
                f"{path}: tables.{pattern}.comm_dtype is {rule.comm_dtype}, but the planner "
                f"assumes that all vectors are sent as {str(comm_dtype).removeprefix('torch.')}; "
                "remove it"
            )
    layouts = _layouts(task, ParallelConfig(plan=str(path)), planned)
    return {name: choice_of(layout, task.world_size) for name, layout in layouts.items()}


def _layouts(
    task: Task, parallel: ParallelConfig, planned: Mapping[str, TableRule] | None = None
) -> dict[str, TableLayout]:
    tables = {table.name: table.shape for table in task.tables}
    size, width = task.world_size, task.world_size // task.num_hosts
    hosts = tuple(tuple(range(n, n + width)) for n in range(0, size, width))
    return resolve_table_layouts(parallel, tables, {}, size, task.device_type, planned, hosts)


def plan_of_tree(tree: object) -> Plan:
    """Return the plan that ``plain`` turned into this tree; raise ConfigError for other trees."""
    return parse(tree, Plan, "plan", None)
