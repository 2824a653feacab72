"""Describes how often the ids of features repeat, according to the statistics of a data set.

Mappings named ``known`` contain the statistics of each feature that has some.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sbpflow.costs.ids import IdCurve, click_curve, curve_of, exponent_of
from sbpflow.embedding.plan.tables import FeatureConfig, TableConfig


@dataclass(frozen=True)
class IdFrequencies:
    """The id statistics of one field.

    Each of the ``bins`` is (rows, lookups); rows in the same bin are assumed to be equally
    frequent. ``per_sample`` is the mean number of ids per sample.
    """

    bins: tuple[tuple[int, int], ...]
    per_sample: float

    @cached_property
    def curve(self) -> IdCurve:
        return curve_of([rows for rows, _ in self.bins], [lookups for _, lookups in self.bins])

    def overlap(self, first: float, second: float, uses: float = 1.0) -> tuple[float, float]:
        """Return the mean number of rows used by ``first`` samples, and how many of these rows are
        also used by ``second`` other samples of the same epoch.

        An epoch reads every sample once, so a row that is looked up only once in the epoch is never
        used by both sets of samples. If several fields with the same ids share a table, ``uses`` is
        the number of these fields, and each row has ``uses`` times as many lookups.
        """
        rows, lookups = np.asarray(self.bins, dtype=np.float64).reshape(-1, 2).T
        rows, lookups = rows[rows > 0], lookups[rows > 0]
        samples = max(lookups.sum() / max(self.per_sample, 1e-9), first + second)
        absent, absent_second, absent_both = (
            (1 - share / samples) ** (uses * lookups / rows)
            for share in (first, second, first + second)
        )
        own = float((rows * (1 - absent)).sum())
        return own, float((rows * (1 - absent - absent_second + absent_both)).sum())


def ids_per_sample(feature: FeatureConfig, known: Mapping[str, IdFrequencies]) -> float:
    """Return the mean number of ids per sample; without statistics, return the maximum."""
    frequencies = known.get(feature.name)
    return float(feature.hotness) if frequencies is None else frequencies.per_sample


def curve_of_table(table: TableConfig, known: Mapping[str, IdFrequencies]) -> IdCurve:
    """Return the id curve of the table's feature with the most distinct ids.

    The other features of the table are assumed to use the same ids. Without statistics, return
    ``click_curve``.
    """
    curves = [known[name].curve for name in table.features if name in known]
    return max(curves, key=lambda curve: curve.distinct, default=click_curve(table.num_rows))


def exponent_of_table(
    table: TableConfig, batch_size: int, known: Mapping[str, IdFrequencies]
) -> float | None:
    """Return the exponent of the table's ids (see ``costs.ids``), if statistics are known: the
    average over its features, weighted by their numbers of ids and rounded to a multiple of 0.5.
    """
    frequencies = [known[name] for name in table.features if name in known]
    draws = [batch_size * each.per_sample for each in frequencies]
    if sum(draws) == 0:
        return None
    weighted = sum(
        count * exponent_of(each.curve, table.num_rows, count)
        for each, count in zip(frequencies, draws, strict=True)
    )
    return round(2 * weighted / sum(draws)) / 2
