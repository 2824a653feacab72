"""Warn about likely mistakes in a profiled set, such as leakage, constants, drift and label
shift.
"""

from collections.abc import Iterator
from math import sqrt

from sbpflow.data.profile import FeatureProfile, Profile

LEAK_AUC = 0.97
DRIFT_PSI = 0.25
"""A population stability index above 0.25 is commonly called a large shift."""
_MIN_CLASS = 50
_MAX_UNKNOWN = 0.5
_LABEL_SHIFT = 0.2
_DEVIATIONS = 4.0


def concerns(profile: Profile) -> list[str]:
    """Return one warning per problem, with the most serious kinds first."""
    return [
        *_labels(profile),
        *_leaks(profile),
        *_order(profile),
        *_constants(profile),
        *_unknown(profile),
        *_drift(profile),
    ]


def _features(profile: Profile) -> list[FeatureProfile]:
    return [*profile.dense, *profile.fields]


def _labels(profile: Profile) -> Iterator[str]:
    train = profile.splits["train"]
    for name, split in profile.splits.items():
        if split.label_rate in (0.0, 1.0):
            yield f"label: all {split.rows:,} rows of {name} have label {split.label_rate:.0f}"
    base = train.label_rate
    for name in ("val", "test"):
        split = profile.splits[name]
        if base is None or split.label_rate is None or not 0 < base < 1:
            continue
        shift = abs(split.label_rate - base)
        deviation = sqrt(base * (1 - base) * (1 / split.rows + 1 / train.rows))
        if shift > _LABEL_SHIFT * min(base, 1 - base) and shift > _DEVIATIONS * deviation:
            yield (
                f"label shift: the label rate is {split.label_rate:.2%} in {name} and {base:.2%} "
                "in train"
            )


def _leaks(profile: Profile) -> Iterator[str]:
    if min(profile.num_scored) < _MIN_CLASS:
        return
    for feature in _features(profile):
        if feature.auc is not None and feature.auc >= LEAK_AUC:
            yield (
                f"leakage: {feature.name} alone reaches an AUC of {feature.auc:.4f} on val and "
                "test; remove it unless its value is known before the label"
            )


def _order(profile: Profile) -> Iterator[str]:
    train = profile.splits["train"]
    for name in ("val", "test"):
        times = profile.splits[name].times
        if times is not None and train.times is not None and times[0] < train.times[1]:
            yield (
                f"time: {name} begins before train ends, so training sees the future; sort the "
                "rows, or split by time (--split time:COLUMN<...)"
            )


def _constants(profile: Profile) -> Iterator[str]:
    for feature in _features(profile):
        if feature.is_constant:
            yield f"constant: {feature.name} is the same in all rows of train; remove it"


def _unknown(profile: Profile) -> Iterator[str]:
    for feature in profile.fields:
        shares = {name: share for name, share in feature.unknown.items() if share > _MAX_UNKNOWN}
        if shares and not feature.is_constant:
            shown = ", ".join(f"{share:.1%} of {name}" for name, share in shares.items())
            yield (
                f"unknown: {feature.name} is rare or new in {shown}; these rows share one vector "
                "(lower --min-count, or use --hash-size)"
            )


def _drift(profile: Profile) -> Iterator[str]:
    for feature in _features(profile):
        shifts = {name: psi for name, psi in feature.psi.items() if psi > DRIFT_PSI}
        if shifts:
            shown = ", ".join(f"{psi:.2f} in {name}" for name, psi in shifts.items())
            yield f"drift: {feature.name} has a population stability index of {shown}"
