"""Converts a task to the form that a published planner needs, and the planner's answer to a plan.

Most published planners place whole tables and return a device number for each table.
``Setting.whole`` converts these numbers into an assignment with the ``columns`` exchange. This
exchange corresponds to the all-to-all of pooled vectors in the papers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sbpflow.embedding.plan.tables import TableConfig
from sbpflow.errors import PlanError
from sbpflow.planner.costs.features import NUM_BINS
from sbpflow.planner.search.problem import (
    BYTES,
    Assignment,
    Floats,
    Ints,
    Move,
    Option,
    Problem,
)
from sbpflow.planner.shapes import COPIED, WHOLE, option_number
from sbpflow.planner.task import Shape, Task

NUM_FEATURES = 4 + NUM_BINS


@dataclass(frozen=True)
class Setting:
    """A task, and the search problem that prices its plans."""

    task: Task
    problem: Problem
    seed: int = 0

    @cached_property
    def tables(self) -> tuple[TableConfig, ...]:
        """Return the tables to place, in the problem's order."""
        by_name = {table.name: table for table in self.task.tables}
        return tuple(by_name[name] for name in self.problem.names)

    @property
    def num_ranks(self) -> int:
        return self.problem.num_ranks

    @property
    def _whole_shape(self) -> Shape:
        return WHOLE if self.num_ranks > 1 else COPIED

    @property
    def whole_allowed(self) -> bool:
        """Return whether every table may be stored whole on one rank."""
        numbers = [option_number(options, self._whole_shape) for options in self.problem.options]
        return None not in numbers

    @cached_property
    def whole_option(self) -> tuple[int, ...]:
        """Return each table's option to store it whole on one rank; raise PlanError without one."""
        numbers: list[int] = []
        for name, options in zip(self.problem.names, self.problem.options, strict=True):
            number = option_number(options, self._whole_shape)
            if number is None:
                raise PlanError(
                    f"table {name}: this planner needs {self._whole_shape}, which is not allowed; "
                    "use --planner auto"
                )
            numbers.append(number)
        return tuple(numbers)

    @cached_property
    def _whole(self) -> list[Option]:
        """Return each table's option that stores the table whole on one rank."""
        pairs = zip(self.problem.options, self.whole_option, strict=True)
        return [options[number] for options, number in pairs]

    @cached_property
    def rows(self) -> Floats:
        """Return the loads [T, 5] that whole tables add to their ranks.

        The times of transfers can be negative, because a rank sends nothing to itself.
        """
        return np.stack([o.shards[0] if o.num_shards else o.home for o in self._whole])

    @cached_property
    def transfer_ms(self) -> float:
        """Return the total transfer time of whole tables, summed over all ranks, in ms."""
        loads = [o.shards.sum(axis=0) + self.num_ranks * o.home for o in self._whole]
        return float(np.sum(loads, axis=0)[1:BYTES].sum())

    @cached_property
    def held_bytes(self) -> Floats:
        """Return the bytes [T] that each whole table occupies on its rank."""
        return self.rows[:, BYTES]

    @cached_property
    def room_bytes(self) -> Floats:
        """Return the bytes [ranks] that are left for whole tables after a plan's fixed memory."""
        home = sum((option.home for option in self._whole), start=self.problem.base)
        return self.problem.limit_bytes - home[:, BYTES]

    @cached_property
    def dims(self) -> Floats:
        return np.array([float(table.dim * len(table.features)) for table in self.tables])

    @cached_property
    def table_rows(self) -> Floats:
        return np.array([float(table.num_rows) for table in self.tables])

    @cached_property
    def pooling(self) -> Floats:
        """Return the ids per sample [T]."""
        batch = self.task.batch_size
        return np.array([self.task.lookups(table) / batch for table in self.tables])

    @cached_property
    def features(self) -> Floats:
        """Return features [T, 21] in DreamShard's order: dim, rows, pooling, size, 17 bins."""
        bins = np.array([self.task.stats[table.name].bin_rows for table in self.tables])
        columns = (self.dims, self.table_rows, self.pooling, self.dims * self.table_rows)
        return np.concatenate([np.stack(columns, axis=1), bins], axis=1)

    def whole(self, devices: Sequence[int] | Ints) -> Assignment:
        """Return the plan with each table whole on its device."""
        return tuple(
            Move(number, (int(device),) if self.num_ranks > 1 else ())  # one rank has copies
            for number, device in zip(self.whole_option, devices, strict=True)
        )

    def option(self, table: int, shape: Shape) -> Option | None:
        """Return the table's option with this shape, or None if the shape is not allowed."""
        options = self.problem.options[table]
        number = option_number(options, shape)
        return None if number is None else options[number]
