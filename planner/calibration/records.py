"""Plans as they were measured, each with the counts of its work: what a profile is fitted to.

Plans of a task that were measured together have one session. A machine drifts between sessions by
more than plans differ, so a session's steps are scaled by a plan that was measured in both.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from sbpflow.config.parse import brief
from sbpflow.costs.counts import NUM_FEATURES
from sbpflow.costs.ids import Floats
from sbpflow.embedding.plan.exchanges import exchange_names
from sbpflow.errors import ConfigError
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.costs.profile import Profile
from sbpflow.planner.costs.simulate import NUM_PHASES
from sbpflow.planner.task import Choice, Plan, Shape, Task
from sbpflow.runtime.files.json_file import is_count, is_number, object_of

AGAIN = "again"  # a plan that was measured before, measured once more: "again SESSION NAME"
PICKED = "pick"  # by a model that was fitted before: "pick SESSION.NUMBER"
_SESSION = re.compile(r"(pick \d{1,9}\.\d{1,9}|again \d{1,9} .*)$", re.DOTALL)
_MOST_MS = 1e12


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
    """0 for drawn plans, else the round of candidates."""
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


def plan_of_tree(tree: object) -> Plan:
    """The plan that ``plan_tree`` wrote; ConfigError for anything else."""
    plan: Plan = {}
    for name, given in object_of(tree, "plan").items():
        entry = cast("list[Any]", given)
        if not isinstance(given, list) or len(entry) != 4:
            raise ConfigError(f"plan: {brief(name)} is not [sbp, exchange, parts, ranks]")
        sbp, exchange, parts, ranks = entry
        known = isinstance(sbp, str) and exchange in exchange_names()
        counts = [counted for counted in (parts, ranks) if _are_counts(counted)]
        if not known or len(counts) != 2 or len(parts) != 2:
            raise ConfigError(f"plan: {brief(name)} cannot be {brief(entry)}")
        plan[name] = Choice(Shape(sbp, exchange, (parts[0], parts[1])), tuple(ranks))
    return plan


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(map(is_count, cast("list[object]", value)))


def check_entry(entry: Mapping[str, Any]) -> None:
    """ConfigError unless a line of a journal has the figures of one plan."""
    fits = {
        "sample": is_count(entry.get("sample")),
        "name": isinstance(entry.get("name"), str) and _has_session(entry["name"]),
        "step_ms": _is_time(entry.get("step_ms")),
        "rounds_ms": isinstance(entry.get("rounds_ms"), list)
        and all(map(_is_time, entry["rounds_ms"])),
        "peak_bytes": isinstance(entry.get("peak_bytes"), list)
        and all(map(is_number, entry["peak_bytes"])),
        "phases": _are_phases(entry.get("phases")),
    }
    if wrong := [key for key, fit in fits.items() if not fit]:
        raise ConfigError(f"{wrong[0]}: {brief(entry.get(wrong[0]))} is not what was measured")
    plan_of_tree(entry.get("plan"))


def _has_session(name: str) -> bool:
    return not name.startswith((PICKED, AGAIN)) or _SESSION.match(name) is not None


def _is_time(value: object) -> bool:
    return is_number(value) and 0 < cast("float", value) < _MOST_MS


def _are_phases(value: object) -> bool:
    return (
        isinstance(value, list)
        and value != []
        and all(map(_are_of_a_rank, cast("list[object]", value)))
    )


def _are_of_a_rank(value: object) -> bool:
    times = cast("list[object]", value) if isinstance(value, list) else []
    return len(times) == NUM_PHASES and all(
        is_number(ms) and 0 <= cast("float", ms) < _MOST_MS for ms in times
    )
