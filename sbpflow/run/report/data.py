"""What a report page shows of a run, read from the files that the run left in its folder."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sbpflow.config.parse import brief
from sbpflow.config.yaml_text import load_yaml
from sbpflow.errors import ConfigError, DataError
from sbpflow.run.planning.explain import describe
from sbpflow.run.planning.plan_file import plan_from_json
from sbpflow.run.report.events import Event, check_event, time_of
from sbpflow.runtime.files.json_file import JsonError, parse_json, read_text
from sbpflow.runtime.files.run_folder import PLAN_FILE
from sbpflow.training.report import METRICS_FILE, START_FILE

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
        return (time_of(event) - time_of(self.events[0])).total_seconds() / 60

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
    settings, what = _settings(folder / START_FILE)
    notes += [note for note in (why, what) if note]
    return Run(name=name, events=events, plan=plan, settings=settings, notes=tuple(notes))


def _events(file: Path) -> tuple[tuple[Event, ...], list[str]]:
    """The lines; of a run that was killed the last one may be cut off."""
    try:
        *lines, last = read_text(file).split("\n")
    except JsonError as error:
        raise DataError(f"{error}; restore the file, or report another run") from error
    events: list[Event] = []
    notes: list[str] = []
    for number, line in enumerate(lines, 1):
        try:
            events.append(check_event(parse_json(line)))
        except JsonError as error:
            raise DataError(
                f"{file}: line {number} is no event of a run ({error}); it was changed, or another "
                "program wrote it: restore the file, or report another run"
            ) from error
    if last:  # it does not end in a newline
        try:
            events.append(check_event(parse_json(last)))
        except JsonError:
            notes.append(f"line {len(lines) + 1} of {METRICS_FILE}, the last, is cut off")
    if not events:
        raise ConfigError(f"report: {file} has no events yet; wait for step 2 of the run")
    if events[-1]["event"] != "final":
        notes.append("the run did not reach its end, or has not yet")
    return tuple(events), notes


def _plan(file: Path) -> tuple[dict[str, Any], str]:
    try:
        return describe(plan_from_json(read_text(file))), ""
    except FileNotFoundError:
        return {}, f"no {PLAN_FILE}: no layouts, no planned memory"
    except (JsonError, DataError) as error:
        return {}, f"{PLAN_FILE} is not shown: {error}"


def _settings(file: Path) -> tuple[dict[str, str], str]:
    """{dotted key: value} of the configuration that the run started with, and what is missing."""
    try:
        text = read_text(file)
    except FileNotFoundError:
        return {}, ""
    except JsonError as error:
        return {}, f"{START_FILE} is not shown: {error}"
    lines = iter(text.splitlines())
    block: list[str] = []
    for line in lines:
        if line == "config:":
            break
    for line in lines:
        if not line.startswith("  "):
            break
        block.append(line[2:])
    try:
        tree = load_yaml("\n".join(block)) or {}
    except ConfigError as error:
        return {}, f"the configuration in {START_FILE} is not shown: {error}"
    if not isinstance(tree, dict):
        return {}, f"the configuration in {START_FILE} is not shown: it is {brief(tree)}"
    return dict(_flat("", tree)), ""


def _flat(key: str, value: object) -> list[tuple[str, str]]:
    if isinstance(value, dict) and value:
        items = value.items()
        return [pair for n, item in items for pair in _flat(f"{key}.{n}" if key else str(n), item)]
    return [(key, str(value))]
