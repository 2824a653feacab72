"""The cost of a plan: counts of work, priced by what this machine was measured to take for them.

A rank's time in a phase is a sum of counts (``work.py`` beside this) with non-negative weights,
times a correction learned from fused work that is bounded and rises with every count; the step is
simulated from the phases of all ranks (``simulate.py``). Everything takes batches of plans, so that
a search can try thousands of moves a second.
"""

import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from sbpflow.costs.counts import BUFFERS, FEATURES, INDEX, MEMORY, NUM_FEATURES, Key
from sbpflow.costs.ids import Floats
from sbpflow.embedding.plan.tables import TableConfig
from sbpflow.errors import unknown_value
from sbpflow.planner.costs.kernels import work_factors
from sbpflow.planner.costs.profile import Profile
from sbpflow.planner.costs.simulate import (
    PHASES,
    SCHEDULES,
    TRANSFERS,
    max_of_sums,
    step_ms,
    sum_of_maxima,
)
from sbpflow.planner.costs.work import ShapeCost, base_work, shape_work
from sbpflow.planner.task import Choice, Plan, Shape, Task

Objective = Literal["step", "sum_of_maxima", "max_of_sums"]
_BY_KERNEL = [
    INDEX[name]
    for name in (
        *("read_rows", "read_elements", "read_touched"),
        *("update_ids", "update_elements", "step_rows", "step_elements"),
    )
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a plan is expected to take; ``phases`` [ranks, phases] in ms, bytes per rank.

    ``spread_ms`` is the standard deviation of the step over the ensemble's members.
    """

    step_ms: float
    spread_ms: float
    phases: Floats
    memory_bytes: tuple[int, ...]
    sent_bytes: tuple[int, ...]

    def fits(self, device_bytes: int | None) -> bool:
        return device_bytes is None or max(self.memory_bytes) <= device_bytes


class TaskCost:
    """A profile's prices for one task: the calls a search makes.

    ``totals`` are a rank's counts [.., F]: ``base()`` plus the shard and home counts of every
    table, and in the columns of keys the number of distinct ones.
    """

    def __init__(self, profile: Profile, task: Task, objective: Objective = "step") -> None:
        self.profile = profile
        self.task = task
        self.objective: Objective = objective
        self.linear = profile.weights_for(task.world_size)
        self._terms = profile.fusion
        self._shapes: dict[tuple[str, Hashable], ShapeCost] = {}

    @property
    def phases(self) -> tuple[str, ...]:
        """The names of the P phases; ``KINDS`` of ``simulate.py`` says what each is a part of."""
        return PHASES

    @property
    def prices_digest(self) -> str:
        """Equal for equal profiles and objectives, whatever the task: a name for what is kept."""
        prices = json.dumps([asdict(self.profile), self.objective], sort_keys=True)
        return hashlib.sha256(prices.encode()).hexdigest()

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the F counts."""
        return FEATURES

    @property
    def num_features(self) -> int:
        return NUM_FEATURES

    @property
    def bounds(self) -> tuple[Floats, Floats]:
        """[P] least and most factors of the learned correction."""
        return self.profile.correction_bounds()

    def base(self) -> Floats:
        """[F] of every rank before any table."""
        return base_work(self.task)

    def shape_cost(self, table: TableConfig, shape: Shape) -> ShapeCost:
        """What the table in that shape adds; kept, so that equal calls are free."""
        key = (table.name, shape)
        found = self._shapes.get(key)
        if found is None:
            made = shape_work(self.task, table, shape)
            factor = self.profile.step_factor(self.task.optimizer_of(table).name)
            for values in (made.shards, made.home):
                values[..., INDEX["step_rows"]] *= factor
                values[..., INDEX["step_elements"]] *= factor
                of_shards = np.atleast_2d(values)  # a view
                of_shards[:, _BY_KERNEL] *= work_factors(
                    self.profile, self.task, table, shape, of_shards
                )
            found = self._shapes[key] = made
        return found

    def totals(self, plan: Mapping[str, Choice]) -> Floats:
        """[D, F] of a whole plan."""
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
            total[:, feature_of(key)] += 1.0
        return total

    def memory(self, totals: Floats) -> Floats:
        """[..] bytes: rows, optimizer state, dense part, and what is in flight."""
        return totals[..., MEMORY] + self.profile.buffer_factor * totals[..., BUFFERS]

    def rank_ms(
        self, totals: Floats, *, corrected: bool = True, member: int | None = None
    ) -> Floats:
        """[.., P] ms of each phase from [.., F], rank by rank.

        ``member`` is one of the ensemble; without it, the mean of all.
        """
        linear = np.maximum(totals @ self.linear, 0.0)
        if not corrected or not self._terms:
            return linear
        return self.profile.corrected(totals, linear, member)

    def rough_ms(self, totals: Floats) -> Floats:
        """As ``rank_ms`` by one member alone, for comparing ranks and options before pricing."""
        return self.rank_ms(totals, member=0)

    def combine(self, phases: Floats) -> Floats:
        """[N] ms of a step from [N, D, P]; rises with every phase."""
        if self.objective == "sum_of_maxima":
            return sum_of_maxima(phases)
        if self.objective == "max_of_sums":
            return max_of_sums(phases)
        if self.objective == "step":
            schedule = SCHEDULES[self.task.overlap]
            return step_ms(phases, self.profile.hidden, schedule, batches=self.task.accumulate)
        raise unknown_value("objective", self.objective, Objective)

    def cost(self, plans: Sequence[Mapping[str, Choice]]) -> Floats:
        """[N] ms of whole plans."""
        totals = np.stack([self.totals(plan) for plan in plans])
        return self.combine(self.rank_ms(totals))

    def predict(self, plan: Mapping[str, Choice]) -> Prediction:
        """Everything about one plan."""
        totals = self.totals(plan)
        phases = self.rank_ms(totals)
        steps = [
            float(self.combine(self.rank_ms(totals, member=member)[None])[0])
            for member in range(self.profile.num_members)
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


class CostModel:
    """A profile as a model of any task."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    def of(self, task: Task, objective: Objective = "step") -> TaskCost:
        """The prices for one task."""
        return TaskCost(self.profile, task, objective)

    def predict(self, task: Task, plan: Plan) -> Prediction:
        return self.of(task).predict(plan)


def feature_of(key: Key) -> int:
    """The column of totals that counts a key."""
    place = key[0]
    if not isinstance(place, int) or not 0 <= place < NUM_FEATURES:
        raise ValueError(f"{key}: a key begins with a place in FEATURES")
    return place


__all__ = ["PHASES", "TRANSFERS", "CostModel", "Prediction", "TaskCost", "feature_of"]
