"""Reads the data of a run's report page from the files in the run's folder."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from sbpflow.config.parse import brief
from sbpflow.config.yaml_text import load_yaml
from sbpflow.errors import ConfigError, DataError
from sbpflow.run.planning.explain import describe
from sbpflow.run.planning.plan import RunPlan
from sbpflow.run.planning.plan_file import plan_from_json
from sbpflow.run.report.charts import Point
from sbpflow.run.report.events import Event, check_event, time_of
from sbpflow.runtime.files.json_file import JsonError, parse_json, read_end, read_text
from sbpflow.runtime.files.run_folder import PLAN_FILE
from sbpflow.training.report import METRICS_FILE, START_FILE

_END_BYTES = 1 << 20  # far more than the final event


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run's events in chronological order, its plan as ``explain`` describes it, and its
    settings. If the folder has no plan that this version can read, ``plan`` is empty and a note
    says so.
    """

    name: str
    events: tuple[Event, ...]
    plan: Mapping[str, Any] = field(default_factory=dict[str, Any])
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: tuple[str, ...] = ()

    def of(self, kind: str) -> list[Event]:
        """Return the events of one kind."""
        return [event for event in self.events if event["event"] == kind]

    @property
    def final(self) -> Event:
        """Return the run's final event, or {} if the run did not finish."""
        return next(iter(self.of("final")), {})

    def minutes(self, event: Event) -> float:
        """Return the minutes since the first event."""
        return (time_of(event) - time_of(self.events[0])).total_seconds() / 60

    def curve(self, key: str, *, split: str | None = None, by: str = "step") -> list[Point]:
        """Return the points (step or minutes, value) of the step events, or of the evaluations of
        ``split``, that have a value for ``key``."""
        events = self.of("step" if split is None else "eval")
        if by not in ("step", "time"):
            raise ValueError(f"by must be step or time, got {by!r}")
        # Sort by step, because a run that restores its best weights at the end evaluates the
        # earlier step of these weights again.
        return sorted(
            (float(event["step"]) if by == "step" else self.minutes(event), float(event[key]))
            for event in events
            if event.get(key) is not None and event.get("split") == split
        )

    def last(self, kind: str, split: str) -> list[Event]:
        """Return the events of one kind from the last evaluation of a split."""
        last: list[Event] = []
        for event in self.events:
            if event.get("split") == split and event["event"] in ("eval", kind):
                last = [] if event["event"] == "eval" else [*last, event]
        return last


def read_runs(folders: list[Path]) -> list[Run]:
    """Read runs, naming each by the shortest unique suffix of its path.

    Raises ConfigError or DataError if a folder is given twice, or has no run with events.
    """
    paths = [folder.resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ConfigError(f"report: {twice} is given twice; give each run only once")
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    runs = [
        read_run(folder, "/".join(path.parts[-depth:]))
        for folder, path in zip(folders, paths, strict=True)
    ]
    for run, folder in zip(runs, folders, strict=True):
        if not run.events:
            raise ConfigError(
                f"report: {folder / METRICS_FILE} has no events yet; wait until step 2 of the run, "
                "or use another run"
            )
    return runs


def read_run(folder: Path, name: str) -> Run:
    """Read the run whose ``run.dir`` is ``folder``."""
    events, notes = _events(_metrics_file(folder))
    plan, plan_note = _plan(folder / PLAN_FILE)
    settings, settings_note = _settings(folder / START_FILE)
    notes += [note for note in (plan_note, settings_note) if note]
    return Run(name=name, events=events, plan=plan, settings=settings, notes=tuple(notes))


def read_final(folder: Path) -> Event:
    """Return the final event of the run in ``folder``, or {} if the run did not finish.

    Only the end of metrics.jsonl is read, because the file of a long run can be very large.
    """
    file = _metrics_file(folder)
    try:
        end = read_end(file, _END_BYTES)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise DataError(f"{file}: the file cannot be read ({reason})") from error
    try:
        event = check_event(parse_json(end.splitlines()[-1])) if end else {}
    except JsonError as error:
        if not end.endswith("\n"):  # the run was killed
            return {}
        raise DataError(
            f"{file}: the last line is not a valid event ({error}); restore the file"
        ) from error
    return event if event.get("event") == "final" else {}


def _metrics_file(folder: Path) -> Path:
    file = folder / METRICS_FILE
    if not file.is_file():
        runs = sorted(str(path.parent) for path in folder.glob(f"*/{METRICS_FILE}"))
        hint = f"did you mean {' or '.join(runs[:3])}?" if runs else "use the run.dir of a run"
        raise ConfigError(f"{folder} has no {METRICS_FILE}, so it is not a run folder; {hint}")
    return file


def batches_per_s(folder: Path, plan: RunPlan) -> float | None:
    """Return the median batches/s of the run in ``folder``.

    Returns None if the folder has no run or no recorded speed, or if the world size or the batch
    size differs from the plan's.
    """
    try:
        run = read_run(folder, folder.name)
    except (ConfigError, DataError):  # the folder has no run, or the file is damaged
        return None
    speeds = [event["samples_per_s"] for event in run.of("step") if event["samples_per_s"]]
    same = all(run.plan.get(key) == getattr(plan, key) for key in ("world_size", "batch_size"))
    return statistics.median(speeds) / plan.batch_size if speeds and same else None


def _events(file: Path) -> tuple[tuple[Event, ...], list[str]]:
    """Read the events; also return notes on defects, such as a last line that is incomplete because
    the run was killed.
    """
    try:
        *lines, last = read_text(file).split("\n")
    except JsonError as error:
        raise DataError(
            f"{error}; restore the file, or run `sbpflow report` on another run"
        ) from error
    events: list[Event] = []
    notes: list[str] = []
    for number, line in enumerate(lines, 1):
        try:
            events.append(check_event(parse_json(line)))
        except JsonError as error:
            raise DataError(
                f"{file}: line {number} is not a valid event ({error}), so the file was changed "
                "or written by another program; restore the file, or run `sbpflow report` on "
                "another run"
            ) from error
    if last:  # the file does not end in a newline
        try:
            events.append(check_event(parse_json(last)))
        except JsonError:
            notes.append(f"the last line of {METRICS_FILE}, line {len(lines) + 1}, is truncated")
    if not events or events[-1]["event"] != "final":
        notes.append("the run has not finished")
    return tuple(events), notes


def _plan(file: Path) -> tuple[dict[str, Any], str]:
    try:
        return describe(plan_from_json(read_text(file))), ""
    except FileNotFoundError:
        return {}, f"layouts and planned memory are not shown: there is no {PLAN_FILE}"
    except (JsonError, DataError) as error:
        return {}, f"{PLAN_FILE} is not shown: {error}"


def _settings(file: Path) -> tuple[dict[str, str], str]:
    """Return the run's configuration at its start as {dotted key: value}, and notes."""
    try:
        text = read_text(file)
    except FileNotFoundError:
        return {}, ""
    except JsonError as error:
        return {}, f"{START_FILE} is not shown: {error}"
    lines = iter(text.splitlines())
    for line in lines:
        if line == "config:":
            break
    block = takewhile(lambda line: line.startswith("  "), lines)
    try:
        tree = load_yaml("\n".join(line[2:] for line in block)) or {}
    except ConfigError as error:
        return {}, f"the configuration in {START_FILE} is not shown: {error}"
    if not isinstance(tree, dict):
        return {}, f"the configuration in {START_FILE} is not shown: it is {brief(tree)}"
    return dict(_flat("", tree)), ""


def _flat(key: str, value: object) -> list[tuple[str, str]]:
    """Flatten a tree into (dotted key, text) pairs."""
    if isinstance(value, dict) and value:
        items = value.items()
        return [pair for n, item in items for pair in _flat(f"{key}.{n}" if key else str(n), item)]
    return [(key, str(value))]
