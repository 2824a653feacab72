"""Computes the cost of a plan: counts of work times the prices measured on this machine.

A rank's time in a phase is a sum of counts (``work.py``) with non-negative weights. A correction
learned from fused work, bounded and increasing in every count, is applied to the sum. The step is
simulated from the phases of all ranks (``simulate.py``). All functions take batches of plans, so a
search can try thousands of moves a second.
"""

import hashlib
import json
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass

import numpy as np

from sbpflow.costs.counts import BUFFERS, INDEX, MEMORY, Key
from sbpflow.costs.ids import Floats
from sbpflow.embedding.plan.tables import TableConfig
from sbpflow.planner.costs.kernels import work_factors
from sbpflow.planner.costs.profile import Profile
from sbpflow.planner.costs.simulate import step_ms
from sbpflow.planner.costs.work import ShapeCost, base_work, shape_work
from sbpflow.planner.task import Choice, Shape, Task
from sbpflow.training.step_schedule import OVERLAPPED, SERIAL

_BY_KERNEL = [
    INDEX[name]
    for name in (
        *("read_rows", "read_elements", "read_touched"),
        *("update_ids", "update_elements", "step_rows", "step_elements"),
    )
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicts a plan's step in ms, its ``phases`` [ranks, phases] in ms, and the bytes of each
    rank.

    ``spread_ms`` is the standard deviation of the step over the ensemble's members.
    """

    step_ms: float
    spread_ms: float
    phases: Floats
    memory_bytes: tuple[int, ...]
    sent_bytes: tuple[int, ...]


class TaskCost:
    """Prices one task with a profile, in the form that a search uses.

    ``totals`` are a rank's counts [.., F]: ``base()`` plus the shard and home counts of every
    table. The columns of keys count the distinct keys.
    """

    def __init__(self, profile: Profile, task: Task) -> None:
        self.profile = profile
        self.task = task
        self.linear = profile.weights_for(task.world_size)
        self._shapes: dict[tuple[str, Hashable], ShapeCost] = {}

    @property
    def prices_digest(self) -> str:
        """Return a digest of the profile, independent of the task; caches use it in file names."""
        prices = json.dumps(asdict(self.profile), sort_keys=True)
        return hashlib.sha256(prices.encode()).hexdigest()

    @property
    def bounds(self) -> tuple[Floats, Floats]:
        """Return [P] smallest and largest factors of the learned correction."""
        return self.profile.correction_bounds()

    def base(self) -> Floats:
        """Return the counts [F] of every rank without any table."""
        return base_work(self.task)

    def shape_cost(self, table: TableConfig, shape: Shape) -> ShapeCost:
        """Return the counts that the table adds in this shape; computed once per table and
        shape.
        """
        key = (table.name, shape)
        if key not in self._shapes:
            cost = shape_work(self.task, table, shape)
            factor = self.profile.step_factor(self.task.optimizer_of(table).name)
            for values in (cost.shards, cost.home):
                values[..., INDEX["step_rows"]] *= factor
                values[..., INDEX["step_elements"]] *= factor
                of_shards = np.atleast_2d(values)  # a view
                of_shards[:, _BY_KERNEL] *= work_factors(
                    self.profile, self.task, table, shape, of_shards
                )
            self._shapes[key] = cost
        return self._shapes[key]

    def totals(self, plan: Mapping[str, Choice]) -> Floats:
        """Return the counts [D, F] of a whole plan."""
        total = np.tile(self.base(), (self.task.world_size, 1))
        keys: set[Key] = set()
        for table in self.task.tables:
            choice = plan[table.name]
            cost = self.shape_cost(table, choice.shape)
            total += cost.home
            if len(cost.shards):
                np.add.at(total, list(choice.ranks), cost.shards)
            keys.update(cost.keys(choice.ranks))
        for key in keys:
            total[:, key[0]] += 1.0
        return total

    def memory(self, totals: Floats) -> Floats:
        """Return [..] bytes: rows, optimizer state, dense part, and buffers in flight."""
        return totals[..., MEMORY] + self.profile.buffer_factor * totals[..., BUFFERS]

    def rank_ms(self, totals: Floats, *, member: int | None = None) -> Floats:
        """Return [.., P] ms of each phase from [.., F] counts, separately for each rank.

        ``member`` selects one member of the ensemble; by default, the mean of all members is used.
        """
        linear = np.maximum(totals @ self.linear, 0.0)
        return self.profile.corrected(totals, linear, member) if self.profile.members else linear

    def rough_ms(self, totals: Floats) -> Floats:
        """Compute ``rank_ms`` with the first member only, to compare ranks and options before
        pricing.
        """
        return self.rank_ms(totals, member=0)

    def combine(self, phases: Floats) -> Floats:
        """Return [N] ms of a step from [N, D, P]; the result increases with every phase."""
        schedule = OVERLAPPED if self.task.overlap else SERIAL
        return step_ms(phases, self.profile.hidden, schedule, batches=self.task.accumulate)

    def predict(self, plan: Mapping[str, Choice]) -> Prediction:
        """Predict the step, phases, memory and traffic of one plan."""
        totals = self.totals(plan)
        phases = self.rank_ms(totals)
        steps = [
            float(self.combine(self.rank_ms(totals, member=member)[None])[0])
            for member in range(len(self.profile.members))
        ]
        sent = sum(
            totals[:, INDEX[name]]
            for name in ("ids_bytes", "counted_bytes", "vector_bytes", "gradient_bytes")
        )
        return Prediction(
            step_ms=float(self.combine(phases[None])[0]),
            spread_ms=float(np.std(steps)) if steps else 0.0,
            phases=phases,
            memory_bytes=tuple(int(x) for x in self.memory(totals)),
            sent_bytes=tuple(int(x) for x in np.asarray(sent)),
        )
