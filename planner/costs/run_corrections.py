"""Corrects a calibration by the step times of training runs.

At the end of a run, rank 0 adds the predicted and the measured step time to the profile, whose
prices are then multiplied by ``Profile.run_factor``. A common factor does not change the order of
plans (docs/decisions/planner.md has the reasons).
"""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime

from sbpflow.planner.costs.profile import RANKS_HERE, MeasuredRun, Profile
from sbpflow.runtime.compute.cpu import cpu_name
from sbpflow.runtime.compute.versions import summary as version_summary
from sbpflow.runtime.ranks.topology import Topology

LEAST_STEPS = 20  # minimum number of timed steps of a run
MOST_RUNS = 20  # a profile keeps only this many of the newest runs
# The facts that must match those of the calibration; the software may be newer.
_PLACE = ("world", RANKS_HERE, "hosts", "device", "cpu")


def facts_of(device: str, backend: str, topology: Topology) -> dict[str, str]:
    """Return the facts that make step times comparable; ``device`` is the device's name."""
    return {
        "world": f"{topology.size} {backend}",
        RANKS_HERE: str(topology.most_ranks_per_host),
        "hosts": str(topology.num_equal_hosts),
        "device": device.partition(" on ")[0],
        "cpu": cpu_name(),
        "software": ", ".join(f"{key} {value}" for key, value in version_summary().items()),
    }


def belongs(profile: Profile, facts: Mapping[str, str]) -> bool:
    """Return whether a run with these facts had the ranks, hosts, and devices of the calibration.
    Facts that the profile does not contain are not compared.
    """
    about = {**profile.about, "world": f"{profile.world_size} {profile.backend}"}
    return all(about.get(key, facts.get(key)) == facts.get(key) for key in _PLACE)


def with_run(profile: Profile, run: MeasuredRun) -> Profile:
    """Return the profile corrected by one more run. Runs with other software are dropped."""
    same = [other for other in profile.runs if other.software == run.software]
    return replace(profile, runs=(*same, run)[-MOST_RUNS:])


def origin_of(profile: Profile, facts: Mapping[str, str]) -> str:
    """Describe a calibration's age, its number of runs, and how its facts differ from these."""
    count = len(profile.runs)
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
    return f"{taken[:10]} ({days} day{'' if days == 1 else 's'} ago)"


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
