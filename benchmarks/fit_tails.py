"""Fits the generator's column profile to measured aggregates: ``python -m benchmarks.fit_tails F``.

For each column, the profile contains the measured masses of the first ranks, followed by decreasing
power-law segments. The segments match the measured mass of the first 100 and 1000 ranks, and the
numbers of distinct values and singletons in a sample of the measured size. The program writes
``data/synth/criteo_profile.json``.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from sbpflow.data.synth.tails import Segment
from sbpflow.runtime.files.json_file import object_of, read_json

_SLOPES = (0.001, 0.4, 0.8, 1.2, 2.0, 3.0, 5.0)
PROFILE = Path(__file__).parents[1] / "data" / "synth" / "criteo_profile.json"


def density_at(segment: Segment, rank: float) -> float:
    """Return the mass per rank at ``rank``."""
    power = 1.0 - segment.slope
    return (
        segment.mass * power * rank**-segment.slope / (segment.stop**power - segment.start**power)
    )


def meeting(start: float, stop: float, mass: float, density: float) -> Segment:
    """Return the segment whose initial density is as close to ``density`` as slopes in [-3, 12]
    allow.
    """
    low, high = -3.0, 12.0
    for _ in range(60):
        slope = (low + high) / 2
        too_low = density_at(Segment(start, stop, mass, slope + 1e-9), start) < density
        low, high = (slope, high) if too_low else (low, slope)
    return Segment(start, stop, mass, (low + high) / 2 + 1e-9)


def expected_counts(
    head: list[float], segments: list[Segment], num_rows: float
) -> tuple[float, float]:
    """Return the expected numbers of distinct values and of singletons in a sample of ``num_rows``
    rows.
    """
    lam = num_rows * np.array(head)
    distinct, singles = float((1 - np.exp(-lam)).sum()), float((lam * np.exp(-lam)).sum())
    for segment in segments:
        edges = np.geomspace(segment.start, segment.stop, 60)
        lam = num_rows * np.diff(segment.cdf(edges)) / np.diff(edges)
        distinct += float(((1 - np.exp(-lam)) * np.diff(edges)).sum())
        singles += float((lam * np.exp(-lam) * np.diff(edges)).sum())
    return distinct, singles


def fit(column: dict[str, Any], num_rows: int) -> tuple[list[float], list[Segment]]:
    """Fit the head masses and tail segments of one column."""
    head: list[float] = column["head_mass"]
    size: int = column["full_cardinality"]
    if column["distinct_in_sample"] <= len(head):
        total = sum(head)
        return [mass / total for mass in head], []
    present = num_rows * (1 - column["missing"])
    knots = [k for k in (100, 1000) if str(k) in column["cum_mass"] and k < size]
    segments: list[Segment] = []
    before, density, start = sum(head), float(np.mean(head[-5:])), float(len(head))
    for knot in knots:
        mass = column["cum_mass"][str(knot)] - before
        segments.append(meeting(start, knot, mass, density))
        density = density_at(segments[-1], knot)
        before, start = before + mass, float(knot)
    options = _last(start, float(size), 1 - before, density)
    wanted = column["distinct_in_sample"], column["singletons"]

    def error(last: list[Segment]) -> float:
        expected = expected_counts(head, segments + last, present)
        return sum(((f - w) / (w + 3)) ** 2 for f, w in zip(expected, wanted, strict=True))

    return head, segments + min(options, key=error)


def _last(start: float, size: float, mass: float, density: float) -> list[list[Segment]]:
    """Return candidate tails. Each divides the remaining mass between two decreasing segments; the
    candidates differ in the boundary between the segments, the first segment's share, and the
    slopes.
    """
    options: list[list[Segment]] = []
    for middle in np.geomspace(start * 1.05, size * 0.98, 30):
        for share in np.linspace(0.04, 0.96, 24):
            for slope in _SLOPES:
                first = Segment(start, float(middle), mass * share, slope)
                if density_at(first, start) > 1.2 * density:
                    continue
                end = density_at(first, float(middle))
                seconds = (Segment(float(middle), size, mass * (1 - share), s) for s in _SLOPES)
                options += [[first, s] for s in seconds if density_at(s, float(middle)) <= end]
    return options or [[meeting(start, size, mass, density)]]


def main() -> None:
    """Fit every column of the given statistics and write the profile."""
    stats = object_of(read_json(Path(sys.argv[1])), sys.argv[1])["kaggle_train_sample"]
    columns: dict[str, Any] = {}
    for name, column in stats["cat"].items():
        head, segments = fit(column, stats["rows"])
        present = stats["rows"] * (1 - column["missing"])
        distinct, singles = expected_counts(head, segments, present)
        sys.stderr.write(
            f"{name}: distinct {column['distinct_in_sample']} {distinct:.0f} "
            f"singles {column['singletons']} {singles:.0f}\n"
        )
        columns[name] = {
            "size": column["full_cardinality"],
            "missing": column["missing"],
            "measured": {
                "distinct": column["distinct_in_sample"],
                "singletons": column["singletons"],
                "cum_mass": column["cum_mass"],
            },
            "head": [round(mass, 7) for mass in head],
            "segments": [
                [round(v, 7) for v in (s.start, s.stop, s.mass, s.slope)] for s in segments
            ],
        }
    ints = {
        name: {key: c[key] for key in ("missing", "neg", "zero", "quantile_pct", "quantile")}
        for name, c in stats["int"].items()
    }
    profile = {"rows": stats["rows"], "ctr": stats["ctr"], "int": ints, "cat": columns}
    PROFILE.write_text(json.dumps(profile) + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
