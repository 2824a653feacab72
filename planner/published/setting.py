"""What a published planner sees of a task, and how its answer becomes a plan.

Most know whole tables on one rank each: device numbers per table. ``Setting.whole`` turns those
into an assignment, with the ``columns`` exchange, which is the all-to-all of pooled vectors that
their papers have.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sbpflow.embedding.plan.tables import TableConfig
from sbpflow.errors import PlanError
from sbpflow.planner.costs.features import NUM_BINS
from sbpflow.planner.costs.simulate import PHASE, PHASES, TRANSFERS
from sbpflow.planner.search.problem import (
    Assignment,
    Floats,
    Ints,
    Move,
    Option,
    Priced,
    Problem,
    price_of,
)
from sbpflow.planner.shapes import COPIED, WHOLE, option_number
from sbpflow.planner.task import Shape, Task

NUM_FEATURES = 4 + NUM_BINS
_BACKWARD = (
    "backward",
    "send_grads",
    "send_dense",
    "receive_grads",
    "update",
    "receive_dense",
    "update_dense",
)
BACKWARD = [PHASE[name] for name in _BACKWARD]
EXCHANGE = [PHASE[name] for name in TRANSFERS]
FORWARD = [n for n in range(len(PHASES)) if n not in BACKWARD and n not in EXCHANGE]


@dataclass(frozen=True)
class Setting:
    """A task with the problem that its plans are priced by."""

    task: Task
    problem: Problem
    seed: int = 0

    @cached_property
    def tables(self) -> tuple[TableConfig, ...]:
        """Those to be placed, in the order of the problem."""
        by_name = {table.name: table for table in self.task.tables}
        return tuple(by_name[name] for name in self.problem.names)

    @property
    def num_ranks(self) -> int:
        return self.problem.num_ranks

    @cached_property
    def whole_option(self) -> tuple[int, ...]:
        """Per table, the option that is whole on one rank; PlanError if it is not allowed."""
        found: list[int] = []
        for name, options in zip(self.problem.names, self.problem.options, strict=True):
            shape = WHOLE if self.num_ranks > 1 else COPIED
            number = option_number(options, shape)
            if number is None:
                raise PlanError(f"table {name}: {shape} is not allowed, and this planner needs it")
            found.append(number)
        return tuple(found)

    @cached_property
    def rows(self) -> Floats:
        """[T, features] that a whole table adds to its rank."""
        found: list[Floats] = []
        for table, number in enumerate(self.whole_option):
            option = self.problem.options[table][number]
            found.append(option.shards[0] if option.num_shards else option.home)
        return np.stack(found)

    @cached_property
    def held_bytes(self) -> Floats:
        """[T] of a whole table on its rank."""
        return np.asarray(self.problem.pricing.memory(self.rows))

    @cached_property
    def room_bytes(self) -> Floats:
        """[ranks] left for tables, with what every plan of whole tables has on every rank."""
        home = sum(
            (self.problem.options[t][n].home for t, n in enumerate(self.whole_option)),
            start=self.problem.base,
        )
        return self.problem.limit_bytes - self.problem.pricing.memory(home)

    @cached_property
    def dims(self) -> Floats:
        return np.array([float(table.dim * len(table.features)) for table in self.tables])

    @cached_property
    def table_rows(self) -> Floats:
        return np.array([float(table.num_rows) for table in self.tables])

    @cached_property
    def pooling(self) -> Floats:
        """[T] ids per sample."""
        batch = self.task.batch_size
        return np.array([self.task.lookups(table) / batch for table in self.tables])

    @cached_property
    def features(self) -> Floats:
        """[T, 21] in DreamShard's order: dim, rows, pooling, size, 17 bins of rows by frequency."""
        bins = np.array([self.task.stats[table.name].bin_rows for table in self.tables])
        columns = (self.dims, self.table_rows, self.pooling, self.dims * self.table_rows)
        return np.concatenate([np.stack(columns, axis=1), bins], axis=1)

    def whole(self, devices: Sequence[int] | Ints) -> Assignment:
        """The plan of whole tables on these ranks."""
        return tuple(
            Move(number, (int(device),) if self.problem.options[t][number].num_shards else ())
            for t, (number, device) in enumerate(zip(self.whole_option, devices, strict=True))
        )

    def measure(self, assignment: Assignment) -> "Measured":
        """What the plan takes, as the problem's pricing has it."""
        priced = price_of(self.problem, assignment)
        return Measured(
            forward=priced.phases[:, FORWARD].sum(axis=1),
            exchange=priced.phases[:, EXCHANGE].sum(axis=1),
            backward=priced.phases[:, BACKWARD].sum(axis=1),
            priced=priced,
        )

    def option(self, table: int, shape: Shape) -> Option | None:
        """A table's option of that shape, if it is allowed."""
        options = self.problem.options[table]
        number = option_number(options, shape)
        return None if number is None else options[number]


@dataclass(frozen=True, slots=True)
class Measured:
    """[ranks] milliseconds in the three parts that DreamShard tells apart, and the whole."""

    forward: Floats
    exchange: Floats
    backward: Floats
    priced: Priced
