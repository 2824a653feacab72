"""What is known of a table's ids: their curve (``sbpflow/costs/ids.py``), and features of it.

The frequency bins and the mass of the top rows are features of learned models. The 17 bins are
DreamShard's (utils.py and tools/gen_dlrm_data.py at 73128ed): rows by their lookups in one batch of
65,536 samples, bin 0 for once, bin j for (2^(j-1), 2^j], bin 16 for more than 2^15.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from sbpflow.costs.ids import Floats, IdCurve, curve_of
from sbpflow.errors import ConfigError

NUM_BINS = 17
BIN_SAMPLES = 65_536
TOP = (1, 16, 1024, 65_536)
_DRAWS = tuple(float(2**k) for k in range(4, 31, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class IdStats(IdCurve):
    """The curve of a table, and how its lookups fall on its rows.

    ``bin_rows`` and ``bin_lookups`` are fractions (of distinct rows, of lookups) by the 17 bins;
    ``top_mass`` is the fraction of lookups that fall on the 1, 16, 1024 and 65,536 hottest rows.
    Raises ConfigError for values that cannot be.
    """

    bin_rows: tuple[float, ...]
    bin_lookups: tuple[float, ...]
    top_mass: tuple[float, ...]

    def __post_init__(self) -> None:
        IdCurve.__post_init__(self)
        for name, values in (("bin_rows", self.bin_rows), ("bin_lookups", self.bin_lookups)):
            if len(values) != NUM_BINS:
                raise ConfigError(f"ids: {name} has {len(values)} values; it takes {NUM_BINS}")


def from_histogram(rows: Sequence[float], mass: Sequence[float], ids_per_sample: float) -> IdStats:
    """From groups of rows that are looked up alike: ``rows[i]`` of them share ``mass[i]``.

    ``mass`` is normalised here, and rows are touched as ``curve_of`` has it.
    """
    count = np.asarray(rows, dtype=np.float64)
    share = np.asarray(mass, dtype=np.float64)
    kept = (count > 0) & (share > 0)
    if not kept.any():
        raise ConfigError("ids: no row has any lookup; give rows [100], mass [1.0] for an even law")
    count, share = count[kept], share[kept] / share[kept].sum()
    each = share / count
    curve = curve_of(count, share, _DRAWS)
    bin_rows, bin_lookups = _expected_bins(count, each, BIN_SAMPLES * ids_per_sample)
    order = np.argsort(-each)
    rows_before = np.concatenate([[0.0], np.cumsum(count[order])])
    mass_before = np.concatenate([[0.0], np.cumsum(share[order])])
    top = tuple(float(np.interp(k, rows_before, mass_before)) for k in TOP)
    return IdStats(
        draws=curve.draws,
        unique=curve.unique,
        distinct=curve.distinct,
        bin_rows=bin_rows,
        bin_lookups=bin_lookups,
        top_mass=top,
    )


def _expected_bins(
    count: Floats, each: Floats, lookups: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Fractions of touched rows and of lookups by bin, lookups of a row being Poisson."""
    expected = each * lookups
    edges = np.array([0.0, *(2.0**j for j in range(NUM_BINS - 1))])
    in_bin = np.diff(_up_to(edges, expected), axis=1) * count[:, None]
    # The sum of k P(k) up to an edge is the mean times the distribution up to the edge before.
    lookups_in = np.diff(_up_to(edges - 1, expected), axis=1) * (expected * count)[:, None]
    by_rows, by_lookups = in_bin.sum(0), lookups_in.sum(0)
    return (
        tuple((by_rows / max(float(by_rows.sum()), 1e-300)).tolist()),
        tuple((by_lookups / max(float(by_lookups.sum()), 1e-300)).tolist()),
    )


def _up_to(edges: Floats, means: Floats) -> Floats:
    """[means, edges + 1]: probability of at most each edge, and of anything, if Poisson."""
    k = torch.from_numpy(np.maximum(edges, 0.0) + 1.0)
    found = torch.special.gammaincc(k[None, :], torch.from_numpy(means)[:, None]).numpy()
    found = np.where(edges[None, :] < 0, 0.0, found)
    return np.concatenate([found, np.ones((len(means), 1))], axis=1)


def zipf_mandelbrot(num_rows: int, s: float, q: float, ids_per_sample: float) -> IdStats:
    """Row k of ``num_rows`` has a share proportional to (k + q) ** -s, k from 1."""
    edges = np.unique(np.geomspace(1, num_rows + 1, 120).astype(np.int64))
    rows = np.diff(edges).astype(np.float64)
    first, last = edges[:-1], edges[1:] - 1
    ends = 0.5 * ((first + q) ** -s + (last + q) ** -s)
    return from_histogram(rows.tolist(), (rows * ends).tolist(), ids_per_sample)


def from_bins(
    bin_rows: Sequence[float], bin_lookups: Sequence[float], ids_per_sample: float
) -> IdStats:
    """From the published bins: rows and lookups by bin of one batch of 65,536 samples.

    Rows that the batch did not touch are not in the bins, so lookups of more than that batch touch
    no further row.
    """
    if len(bin_rows) != NUM_BINS or len(bin_lookups) != NUM_BINS:
        raise ConfigError(
            f"ids: bins have {len(bin_rows)} and {len(bin_lookups)} values; they take {NUM_BINS}"
        )
    lookups = BIN_SAMPLES * ids_per_sample
    per_row = np.array([1.0, *(1.5 * 2.0 ** (j - 1) for j in range(1, NUM_BINS))])
    share = np.asarray(bin_lookups, dtype=np.float64)
    share = share / max(float(share.sum()), 1e-300)
    rows = np.where(np.asarray(bin_rows) > 0, share * lookups / per_row, 0.0)
    found = from_histogram(rows.tolist(), share.tolist(), ids_per_sample)
    fractions = np.asarray(bin_rows, dtype=np.float64)
    return replace(
        found,
        bin_rows=tuple((fractions / max(float(fractions.sum()), 1e-300)).tolist()),
        bin_lookups=tuple(share.tolist()),
    )


def from_sample(ids: Sequence[int] | NDArray[np.int64], ids_per_sample: float) -> IdStats:
    """From lookups in the order they came: a sample of the table's ids."""
    drawn = np.asarray(ids)
    if drawn.size < 2:
        raise ConfigError(f"ids: a sample of {drawn.size}; give 2 or more, best a whole batch")
    sizes = np.unique(np.geomspace(2, drawn.size, 16).astype(np.int64))
    unique = [float(len(np.unique(drawn[:n]))) for n in sizes]
    _, times = np.unique(drawn, return_counts=True)
    found = from_histogram([1.0] * len(times), times.tolist(), ids_per_sample)
    return replace(
        found,
        draws=tuple(float(n) for n in sizes),
        unique=tuple(np.maximum.accumulate(unique).tolist()),
        distinct=math.inf,
    )


def from_ratios(
    ratios: Mapping[int, float],
    ids_per_sample: float,
    *,
    distinct: float,
    bin_rows: Sequence[float],
    bin_lookups: Sequence[float],
    top_mass: Sequence[float],
) -> IdStats:
    """From distinct ids per lookup by batch size, as ``sbpflow stats`` measures them."""
    draws = [size * ids_per_sample for size in sorted(ratios)]
    unique = [max(ratios[size] * size * ids_per_sample, 1e-9) for size in sorted(ratios)]
    rows, lookups = np.asarray(bin_rows, float), np.asarray(bin_lookups, float)
    return IdStats(
        draws=tuple(draws),
        unique=tuple(np.maximum.accumulate(unique).tolist()),
        distinct=distinct,
        bin_rows=tuple((rows / max(float(rows.sum()), 1e-300)).tolist()),
        bin_lookups=tuple((lookups / max(float(lookups.sum()), 1e-300)).tolist()),
        top_mass=tuple(top_mass),
    )
