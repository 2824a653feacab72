"""Stores measured plans with the counts of their work; a profile is fitted to these records.

The plans of a task that were measured together form a session. The drift of a machine between
sessions exceeds the differences between plans, so a session's steps are scaled by a plan that was
measured in both sessions.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, cast

import numpy as np

from sbpflow.config.parse import brief, build
from sbpflow.costs.counts import NUM_FEATURES
from sbpflow.costs.ids import Floats
from sbpflow.embedding.plan.exchanges import exchange_names
from sbpflow.errors import ConfigError
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.costs.profile import Profile
from sbpflow.planner.costs.simulate import NUM_PHASES
from sbpflow.planner.task import Choice, Plan, Shape, Task
from sbpflow.runtime.fields.ranges import Range
from sbpflow.runtime.files.json_file import is_count, object_of

# A plan that is measured again is named "again SESSION NAME", and a plan that a fitted model picks
# is named "pick SESSION.NUMBER".
AGAIN = "again"
PICKED = "pick"
_SESSION = re.compile(r"(pick \d{1,9}\.\d{1,9}|again \d{1,9} .*)$", re.DOTALL)
_MOST_MS = 1e12
_StepMs = Annotated[float, Range(above=0, below=_MOST_MS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Describes one measured plan: ``totals`` [D, F] counts and ``phases`` [D, P] ms.

    ``rounds_ms`` contains its step time in each round with the other plans of the ``session``.
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
        """Return the relative standard deviation over the rounds; 0 for fewer than two rounds."""
        if len(self.rounds_ms) < 2:
            return 0.0
        return float(np.std(self.rounds_ms, ddof=1) / np.mean(self.rounds_ms))


def record_of(entry: Mapping[str, Any], task: Task) -> Record:
    """Return the record in one line of a calibration's journal."""
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
    """Return 0 for random plans, otherwise the number of the round of candidates."""
    if not name.startswith((PICKED, AGAIN)):
        return 0
    return int(name.split()[1].partition(".")[0])


def drift_of(records: Sequence[Record]) -> dict[tuple[int, int], float]:
    """Return {(sample, session): the ratio of its step times to the first session's}."""
    first = {(record.sample, record.name): record.step_ms for record in records}
    drift: dict[tuple[int, int], float] = {}
    for record in records:
        before = first.get((record.sample, record.name.split(" ", 2)[-1]))
        if record.name.startswith(AGAIN) and before is not None:
            drift[record.sample, record.session] = record.step_ms / before
    return drift


def on_one_clock(records: Sequence[Record]) -> list[Record]:
    """Return the records with the steps of later sessions scaled to the first session."""
    drift = drift_of(records)
    return [
        replace(record, step_ms=record.step_ms / drift.get((record.sample, record.session), 1.0))
        for record in records
    ]


def empty_profile(world_size: int, backend: str) -> Profile:
    """Return a profile with all prices 0, for counting work."""
    zero = tuple((0.0,) * NUM_PHASES for _ in range(NUM_FEATURES))
    return Profile(weights=zero, world_size=world_size, backend=backend)


def count_work(task: Task, plan: Mapping[str, Choice]) -> Floats:
    """Return the counts [D, F] of a plan."""
    return TaskCost(empty_profile(task.world_size, task.backend), task).totals(plan)


def plan_tree(plan: Plan) -> dict[str, list[Any]]:
    """Convert the plan to a tree that ``json.dumps`` accepts."""
    return {
        name: [c.shape.sbp, c.shape.exchange, list(c.shape.parts), list(c.ranks)]
        for name, c in plan.items()
    }


def plan_of_tree(tree: object) -> Plan:
    """Return the plan that ``plan_tree`` wrote; raise ConfigError for any other tree."""
    plan: Plan = {}
    for name, given in object_of(tree, "plan").items():
        entry = cast("list[Any]", given)
        if not isinstance(given, list) or len(entry) != 4:
            raise ConfigError(f"plan: {brief(name)}: use [sbp, exchange, parts, ranks]")
        sbp, exchange, parts, ranks = entry
        known = isinstance(sbp, str) and exchange in exchange_names()
        counts = [counted for counted in (parts, ranks) if _are_counts(counted)]
        if not known or len(counts) != 2 or len(parts) != 2:
            raise ConfigError(
                f"plan: {brief(name)}: {brief(entry)} is not [sbp, exchange, [row parts, column "
                "parts], [ranks]] with a known exchange"
            )
        plan[name] = Choice(Shape(sbp, exchange, (parts[0], parts[1])), tuple(ranks))
    return plan


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(map(is_count, cast("list[object]", value)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """Describes the measurement in a line of a journal, without its plan."""

    sample: Annotated[int, Range(low=0)]
    name: str
    step_ms: _StepMs
    rounds_ms: tuple[_StepMs, ...]
    peak_bytes: tuple[float, ...]
    phases: tuple[tuple[Annotated[float, Range(low=0, below=_MOST_MS)], ...], ...]


def check_entry(entry: Mapping[str, Any]) -> None:
    """Raise ConfigError unless a journal's line contains the measurement of one plan."""
    keys = [field.name for field in fields(_Entry) if field.name in entry]
    measured = build(_Entry, {key: entry[key] for key in keys})
    if {len(row) for row in measured.phases} != {NUM_PHASES}:
        raise ConfigError(f"phases: use a list of {NUM_PHASES} times for each rank")
    if measured.name.startswith((PICKED, AGAIN)) and not _SESSION.match(measured.name):
        raise ConfigError(f"name: {brief(measured.name)}; use a name such as {PICKED} 1.0")
    plan_of_tree(entry.get("plan"))
