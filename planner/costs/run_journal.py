"""Corrects a calibration by the step times of training runs.

At the end of a run, rank 0 adds a line to a journal next to the calibration: the counts of the
run's plan, its step time, and the facts of its machine. All prices are then multiplied by the
median of measured / predicted over the newest runs, which does not change the order of plans
(docs/decisions/planner.md has the reasons).
"""

import json
import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import numpy as np

from sbpflow.config.parse import build
from sbpflow.costs.counts import FEATURES, NUM_FEATURES
from sbpflow.embedding.storage.measure import cpu_name
from sbpflow.errors import ConfigError
from sbpflow.planner.costs.profile import RANKS_HERE, Profile, RunPrices
from sbpflow.runtime.compute.versions import summary as version_summary
from sbpflow.runtime.fields.ranges import Range
from sbpflow.runtime.files.file_lock import hold
from sbpflow.runtime.files.json_file import JsonError, object_of, parse_json
from sbpflow.runtime.ranks.topology import Topology

LOG = logging.getLogger(__name__)
LEAST_STEPS = 20  # minimum number of timed steps of a run in the journal
MOST_LINES = 200  # only this many of the newest lines are kept
MOST_RUNS = 20  # only this many of the newest runs correct the prices
MOST_CHARACTERS = 2**26
# The facts that must match those of the calibration; the software may be newer.
_PLACE = ("world", RANKS_HERE, "hosts", "device", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    """A line of the journal. ``totals`` [D, F] counts the work of a step, ``step_ms`` is the median
    over ``steps`` steps, and ``taken`` is the time (UTC) of the run's end.
    """

    taken: str
    facts: Mapping[str, str]
    batch_size: Annotated[int, Range(low=1)]
    steps: Annotated[int, Range(low=1)]
    step_ms: Annotated[float, Range(above=0, below=1e12)]
    totals: tuple[tuple[float, ...], ...]

    def as_json(self) -> str:
        names = ("taken", "facts", "batch_size", "steps", "step_ms")
        totals = [[float(f"{count:.6g}") for count in row] for row in self.totals]
        return json.dumps({**{name: getattr(self, name) for name in names}, "totals": totals})


def facts_of(device: str, backend: str, topology: Topology) -> dict[str, str]:
    """Return the facts that make step times comparable; ``device`` is the device's name."""
    return {
        "world": f"{topology.size} {backend}",
        RANKS_HERE: str(topology.most_ranks_per_host),
        "hosts": str(topology.num_equal_hosts),
        "device": device.partition(" on ")[0],
        "cpu": cpu_name(),
        "software": ", ".join(f"{key} {value}" for key, value in version_summary().items()),
        "counts": " ".join(FEATURES),
    }


def journal_of(profile: Path) -> Path:
    """Return the path of the journal of a calibration's runs."""
    return profile.with_suffix(".runs.jsonl")


def add_run(path: Path, line: RunLine) -> list[RunLine]:
    """Add a line to the journal, and return the valid lines, oldest first. Raises OSError if the
    file cannot be written.
    """
    with hold(path, wait=True) as file:
        file.seek(0)
        text = file.read(MOST_CHARACTERS)
        lines = [*_lines(text, path), line]
        if text.count("\n") < MOST_LINES:
            # end a line that an earlier run was killed while writing
            before = "\n" if text and not text.endswith("\n") else ""
            file.write(f"{before}{line.as_json()}\n")
        else:
            lines = lines[-MOST_LINES:]
            file.truncate(0)
            file.writelines(f"{each.as_json()}\n" for each in lines)
    return lines


def _lines(text: str, path: Path) -> list[RunLine]:
    lines: list[RunLine] = []
    damaged = 0
    for each in filter(None, text.split("\n")):
        try:
            lines.append(build(RunLine, object_of(parse_json(each), "line")))
        except (JsonError, ConfigError):
            damaged += 1
    if damaged:
        LOG.warning("%s: %d lines are damaged; these runs are ignored", path, damaged)
    return lines


def belongs(profile: Profile, facts: Mapping[str, str]) -> bool:
    """Return whether a run with these facts had the ranks, hosts, and devices of the calibration.
    Facts that the profile does not contain are not compared.
    """
    about = {**profile.about, "world": f"{profile.world_size} {profile.backend}"}
    return all(about.get(key, facts.get(key)) == facts.get(key) for key in _PLACE)


def with_runs(profile: Profile, lines: Sequence[RunLine], facts: Mapping[str, str]) -> Profile:
    """Return the profile, corrected by the newest of those lines that have these facts and are
    newer than the calibration.

    The calibration counts as a run, so a single run corrects half of the error's logarithm.
    """
    shape, since = (profile.world_size, NUM_FEATURES), profile.about.get("taken", "")
    used = [
        line
        for line in lines
        if line.facts == facts and line.taken >= since and _shape(line) == shape
    ][-MOST_RUNS:]
    plain = replace(profile, runs=RunPrices())
    if not used or not belongs(profile, facts):
        return plain
    prices = plain.prices(profile.world_size)
    loads = np.stack([np.array(line.totals) @ prices for line in used])
    predicted = loads.max(axis=1).sum(axis=1)
    ratios = np.array([line.step_ms for line in used]) / predicted
    factor = math.exp(statistics.median([0.0, *np.log(ratios).tolist()]))
    return replace(profile, runs=RunPrices(count=len(used), factor=factor, newest=used[-1].taken))


def _shape(line: RunLine) -> tuple[int, int]:
    (width, *more) = {len(row) for row in line.totals} or {0}
    return len(line.totals), 0 if more else width


def origin_of(profile: Profile, facts: Mapping[str, str]) -> str:
    """Return the age of a calibration, the number of runs in its prices, and which of its facts
    differ from ``facts``, as text.
    """
    count = profile.runs.count
    parts = [f"calibration of {_age(profile.about.get('taken', ''))}"]
    parts.append(f"corrected by {count} run{'' if count == 1 else 's'}")
    if different := differences(profile.about, facts):
        parts.append(f"measured with {'; '.join(different)}")
    return ", ".join(parts)


def _age(taken: str) -> str:
    try:
        days = (datetime.now(UTC) - datetime.fromisoformat(taken)).days
    except (ValueError, TypeError):  # not a time, or a time without a zone
        return "unknown age"
    return f"{taken[:10]} ({days} days ago)"


def differences(about: Mapping[str, str], facts: Mapping[str, str]) -> list[str]:
    """Return the facts of a calibration that differ from these facts, as text."""
    result: list[str] = []
    for key in ("world", "hosts", "device", "cpu", "software"):
        before, now = (_parts(each.get(key, "")) for each in (about, facts))
        if key in about and (gone := [part for part in before if part not in now]):
            new = [part for part in now if part not in before]
            result.append(f"{key} {', '.join(gone)} (now {', '.join(new) or 'without'})")
    return result


def _parts(text: str) -> list[str]:
    """Split a list of versions; the number of threads is left out, because ``explain`` does not
    start ranks.
    """
    return [part for part in text.split(", ") if not part.endswith("torch threads")]
