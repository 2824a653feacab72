"""What a report page shows of a run, read from the files that the run left in its folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from sbpflow.errors import ConfigError, DataError
from sbpflow.run.explain import describe
from sbpflow.run.plan_file import plan_from_json
from sbpflow.training.report import METRICS_FILE, START_FILE
from sbpflow.training.run_folder import PLAN_FILE

Event = Mapping[str, Any]
Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: its events in order of time, its plan as ``explain`` describes it, its settings.

    ``plan`` is empty where there is no plan of this version, and ``notes`` says so.
    """

    name: str
    events: tuple[Event, ...]
    plan: Mapping[str, Any] = field(default_factory=dict[str, Any])
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: tuple[str, ...] = ()

    def of(self, kind: str) -> list[Event]:
        """The events of one kind."""
        return [event for event in self.events if event["event"] == kind]

    @property
    def final(self) -> Event:
        """The last event of a run that reached its end, else an empty one."""
        return next(iter(self.of("final")), {})

    def minutes(self, event: Event) -> float:
        """Since the first event, which is when steps were first logged."""
        return (_time(event) - _time(self.events[0])).total_seconds() / 60

    def curve(self, key: str, *, split: str | None = None, by: str = "step") -> list[Point]:
        """(step or minutes, value) of every step event, or of every evaluation of ``split``."""
        events = self.of("step" if split is None else "eval")
        if by not in ("step", "time"):
            raise ValueError(f"by: {by!r}; use step or time")
        return [
            (float(event["step"]) if by == "step" else self.minutes(event), float(event[key]))
            for event in events
            if event.get(key) is not None and event.get("split") == split
        ]

    def last(self, kind: str, split: str) -> list[Event]:
        """The events of a kind that belong to the last evaluation of a split."""
        found = [event for event in self.of(kind) if event.get("split") == split]
        return [event for event in found if event["step"] == found[-1]["step"]]


def read_runs(folders: list[Path]) -> list[Run]:
    """Runs by the shortest ends of their paths that tell them apart; ConfigError or DataError."""
    paths = [folder.resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ConfigError(f"report: {twice} is there twice; name each run once")
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return [
        read_run(folder, "/".join(path.parts[-depth:]))
        for folder, path in zip(folders, paths, strict=True)
    ]


def read_run(folder: Path, name: str) -> Run:
    """The run whose ``run.dir`` is ``folder``."""
    file = folder / METRICS_FILE
    if not file.is_file():
        there = sorted(str(found.parent) for found in folder.glob(f"*/{METRICS_FILE}"))
        hint = f"; did you mean {' or '.join(there[:3])}?" if there else ""
        raise ConfigError(
            f"report: {folder} has no {METRICS_FILE}, so it is no folder of a run (run.dir){hint}"
        )
    events, notes = _events(file)
    plan, why = _plan(folder / PLAN_FILE)
    settings = _settings(folder / START_FILE)
    notes += [why] if why else []
    return Run(name=name, events=events, plan=plan, settings=settings, notes=tuple(notes))


def _events(file: Path) -> tuple[tuple[Event, ...], list[str]]:
    """The lines; of a run that was killed the last one may be cut off."""
    lines = file.read_text(encoding="ascii").splitlines()
    events: list[Event] = []
    notes: list[str] = []
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
            _time(event)
            event["event"]
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise DataError(
                    f"{file}: line {number} is no event of a run ({type(error).__name__}); it was "
                    "changed, or another program wrote it"
                ) from error
            notes.append(f"line {number} of {METRICS_FILE}, the last, is cut off")
            break
        events.append(event)
    if not events:
        raise ConfigError(f"report: {file} has no events yet; wait for step 2 of the run")
    if events[-1]["event"] != "final":
        notes.append("the run did not reach its end, or has not yet")
    return tuple(events), notes


def _plan(file: Path) -> tuple[dict[str, Any], str]:
    if not file.is_file():
        return {}, f"no {PLAN_FILE}: no layouts, no planned memory"
    try:
        return describe(plan_from_json(file.read_text(encoding="ascii"))), ""
    except DataError as error:
        return {}, f"{PLAN_FILE} is not shown: {error}"


def _settings(file: Path) -> dict[str, str]:
    """{dotted key: value} of the configuration that the run started with."""
    if not file.is_file():
        return {}
    lines = iter(file.read_text(encoding="utf-8").splitlines())
    block: list[str] = []
    for line in lines:
        if line == "config:":
            break
    for line in lines:
        if not line.startswith("  "):
            break
        block.append(line[2:])
    return dict(_flat("", yaml.safe_load("\n".join(block)) or {}))


def _flat(key: str, value: object) -> list[tuple[str, str]]:
    if isinstance(value, dict) and value:
        items = value.items()
        return [pair for n, item in items for pair in _flat(f"{key}.{n}" if key else str(n), item)]
    return [(key, str(value))]


def _time(event: Event) -> datetime:
    return datetime.fromisoformat(event["time"])
