"""Describes a table's ids by a curve (``sbpflow/costs/ids.py``) and by frequency bins. The learned
planners use DreamShard's 17 bins as features (utils.py and tools/gen_dlrm_data.py at 73128ed). The
bins group rows by their number of lookups in a batch of 65,536 samples: bin 0 for one lookup, bin j
for (2^(j-1), 2^j], and bin 16 for more than 2^15.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from sbpflow.costs.ids import Floats, IdCurve, curve_of
from sbpflow.errors import ConfigError

NUM_BINS = 17
BIN_SAMPLES = 65_536
_DRAWS = tuple(float(2**k) for k in range(4, 31, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class IdStats(IdCurve):
    """The curve of a table's distinct ids, and the distribution of lookups over rows. ``bin_rows``
    and ``bin_lookups`` are the fractions of distinct rows and of lookups in each of the 17 bins.
    """

    bin_rows: tuple[float, ...]
    bin_lookups: tuple[float, ...]


def from_histogram(rows: Sequence[float], mass: Sequence[float], ids_per_sample: float) -> IdStats:
    """Compute statistics from groups of equally frequent rows: the ``rows[i]`` rows of group i
    together receive lookups in proportion to ``mass[i]``.

    ``mass`` does not need to sum to 1. ``curve_of`` computes the number of rows that a batch
    touches.
    """
    count = np.asarray(rows, dtype=np.float64)
    share = np.asarray(mass, dtype=np.float64)
    used = (count > 0) & (share > 0)
    if not used.any():
        raise ConfigError(
            "ids: no row has any lookups; use, for example, rows [100] and mass [1.0]"
        )
    count, share = count[used], share[used] / share[used].sum()
    each = share / count
    bin_rows, bin_lookups = _expected_bins(count, each, BIN_SAMPLES * ids_per_sample)
    curve = asdict(curve_of(count, share, _DRAWS))
    return IdStats(**curve, bin_rows=bin_rows, bin_lookups=bin_lookups)


def _expected_bins(
    count: Floats, each: Floats, lookups: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the fractions of touched rows and of lookups by bin, for Poisson lookups."""
    expected = each * lookups
    edges = np.array([0.0, *(2.0**j for j in range(NUM_BINS - 1))])
    in_bin = np.diff(_up_to(edges, expected), axis=1) * count[:, None]
    # For a Poisson distribution, the sum of k P(k) for k up to n is the mean times P(k < n).
    lookups_in = np.diff(_up_to(edges - 1, expected), axis=1) * (expected * count)[:, None]
    by_rows, by_lookups = in_bin.sum(0), lookups_in.sum(0)
    return _fractions(by_rows), _fractions(by_lookups)


def _fractions(values: Sequence[float] | Floats) -> tuple[float, ...]:
    """Divide the values by their sum; if all values are 0, the result is 0."""
    array = np.asarray(values, dtype=np.float64)
    return tuple((array / max(float(array.sum()), 1e-300)).tolist())


def _up_to(edges: Floats, means: Floats) -> Floats:
    """Return the Poisson probabilities of values up to each edge; the last column is 1."""
    k = torch.from_numpy(np.maximum(edges, 0.0) + 1.0)
    at_most = torch.special.gammaincc(k[None, :], torch.from_numpy(means)[:, None]).numpy()
    at_most = np.where(edges[None, :] < 0, 0.0, at_most)
    return np.concatenate([at_most, np.ones((len(means), 1))], axis=1)


def zipf_mandelbrot(num_rows: int, s: float, q: float, ids_per_sample: float) -> IdStats:
    """Compute statistics of a table with lookups of row k >= 1 proportional to (k + q) ** -s."""
    edges = np.unique(np.geomspace(1, num_rows + 1, 120).astype(np.int64))
    rows = np.diff(edges).astype(np.float64)
    first, last = edges[:-1], edges[1:] - 1
    ends = 0.5 * ((first + q) ** -s + (last + q) ** -s)
    return from_histogram(rows.tolist(), (rows * ends).tolist(), ids_per_sample)


def from_bins(
    bin_rows: Sequence[float], bin_lookups: Sequence[float], ids_per_sample: float
) -> IdStats:
    """Compute statistics from the published bins of a batch of 65,536 samples.

    The bins omit rows that the batch did not touch, so larger batches are assumed to touch the same
    rows. The number of rows follows from the lookups, because the share of a few frequent rows may
    be rounded to 0.
    """
    if len(bin_rows) != NUM_BINS or len(bin_lookups) != NUM_BINS:
        raise ConfigError(
            f"ids: bins.rows and bins.lookups must have {NUM_BINS} values each, got "
            f"{len(bin_rows)} and {len(bin_lookups)}"
        )
    lookups = BIN_SAMPLES * ids_per_sample
    per_row = np.array([1.0, *(1.5 * 2.0 ** (j - 1) for j in range(1, NUM_BINS))])
    fractions = _fractions(bin_lookups)
    rows = np.asarray(fractions) * lookups / per_row
    stats = from_histogram(rows.tolist(), fractions, ids_per_sample)
    return replace(stats, bin_rows=_fractions(bin_rows), bin_lookups=fractions)


def from_sample(ids: Sequence[int] | NDArray[np.int64], ids_per_sample: float) -> IdStats:
    """Compute statistics from a sample of the table's ids, in lookup order."""
    drawn = np.asarray(ids)
    if drawn.size < 2:
        raise ConfigError(
            f"ids: a sample must have 2 or more ids, got {drawn.size}; use more ids, or a whole "
            "batch"
        )
    sizes = np.unique(np.geomspace(2, drawn.size, 16).astype(np.int64))
    unique = [float(len(np.unique(drawn[:n]))) for n in sizes]
    _, times = np.unique(drawn, return_counts=True)
    stats = from_histogram([1.0] * len(times), times.tolist(), ids_per_sample)
    return replace(
        stats,
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
) -> IdStats:
    """Compute statistics from the numbers of distinct ids per lookup that ``sbpflow stats``
    measures for several batch sizes.
    """
    draws = [size * ids_per_sample for size in sorted(ratios)]
    unique = [max(ratios[size] * size * ids_per_sample, 1e-9) for size in sorted(ratios)]
    return IdStats(
        draws=tuple(draws),
        unique=tuple(np.maximum.accumulate(unique).tolist()),
        distinct=distinct,
        bin_rows=_fractions(bin_rows),
        bin_lookups=_fractions(bin_lookups),
    )
