"""Plans as they were measured, each with the counts of its work: what a profile is fitted to.

Plans of a task that were measured together have one session. A machine drifts between sessions by
more than plans differ, so a session's steps are scaled by a plan that was measured in both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sbpflow.costs.counts import NUM_FEATURES
from sbpflow.costs.ids import Floats
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.costs.profile import Profile
from sbpflow.planner.costs.simulate import NUM_PHASES
from sbpflow.planner.task import Choice, Plan, Shape, Task

AGAIN = "again"  # a plan that was measured before, measured once more: "again SESSION NAME"
PICKED = "pick"  # by a model that was fitted before: "pick SESSION.NUMBER"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One plan as it was measured: ``totals`` [D, F] counts, ``phases`` [D, P] ms.

    ``rounds_ms`` are its steps in each round of turns with the other plans of the ``session``.
    """

    sample: int
    name: str
    totals: Floats
    phases: Floats
    step_ms: float
    rounds_ms: tuple[float, ...] = ()
    session: int = 0

    @property
    def noise(self) -> float:
        """Relative standard deviation of a round; 0 for fewer than two."""
        if len(self.rounds_ms) < 2:
            return 0.0
        return float(np.std(self.rounds_ms, ddof=1) / np.mean(self.rounds_ms))


def record_of(entry: Mapping[str, Any], task: Task) -> Record:
    """From a line of a calibration's journal."""
    return Record(
        sample=entry["sample"],
        name=entry["name"],
        totals=count_work(task, plan_of_tree(entry["plan"])),
        phases=np.array(entry["phases"]),
        step_ms=entry["step_ms"],
        rounds_ms=tuple(entry["rounds_ms"]),
        session=session_of(entry["name"]),
    )


def session_of(name: str) -> int:
    """0 for drawn plans, else the round of picks."""
    if not name.startswith((PICKED, AGAIN)):
        return 0
    return int(name.split()[1].partition(".")[0])


def drift_of(records: Sequence[Record]) -> dict[tuple[int, int], float]:
    """{(sample, session): by what its steps were longer than those of the first session}."""
    first = {(one.sample, one.name): one.step_ms for one in records}
    found: dict[tuple[int, int], float] = {}
    for one in records:
        before = first.get((one.sample, one.name.split(" ", 2)[-1]))
        if one.name.startswith(AGAIN) and before is not None:
            found[one.sample, one.session] = one.step_ms / before
    return found


def on_one_clock(records: Sequence[Record]) -> list[Record]:
    """Steps of later sessions as they would have been in the first."""
    drift = drift_of(records)
    return [
        replace(one, step_ms=one.step_ms / drift.get((one.sample, one.session), 1.0))
        for one in records
    ]


def empty_profile(world_size: int, backend: str) -> Profile:
    """Prices nothing: for counting work."""
    zero = tuple((0.0,) * NUM_PHASES for _ in range(NUM_FEATURES))
    return Profile(weights=zero, world_size=world_size, backend=backend)


def count_work(task: Task, plan: Mapping[str, Choice]) -> Floats:
    """[D, F] of a plan."""
    return TaskCost(empty_profile(task.world_size, task.backend), task).totals(plan)


def plan_tree(plan: Plan) -> dict[str, list[Any]]:
    """JSON-ready."""
    return {
        name: [one.shape.sbp, one.shape.exchange, list(one.shape.parts), list(one.ranks)]
        for name, one in plan.items()
    }


def plan_of_tree(tree: Mapping[str, Sequence[Any]]) -> Plan:
    """The plan that ``plan_tree`` wrote."""
    return {
        name: Choice(Shape(sbp, exchange, (parts[0], parts[1])), tuple(ranks))
        for name, (sbp, exchange, parts, ranks) in tree.items()
    }
