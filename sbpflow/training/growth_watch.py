"""Reports metrics of growing tables for each log interval, and warns if a table has too few
rows.
"""

import logging
from collections.abc import Callable, Mapping

from sbpflow.embedding.plan.growth import GrowthCounts

logger = logging.getLogger(__name__)

_FULL = 0.9  # a table counts as full if more than this share of its rows have keys
_REFUSED = 0.01
"""If more than this share of an interval's lookups are for refused keys, ``evict.max_rows`` is too
low.
"""
_CHURN = 0.2
"""Evictions are compared with lookups once their number exceeds this share of the rows."""
_PER_LOOKUP = 0.1
"""With more evictions per lookup than this, a key is evicted after fewer than 10 lookups, on
average.
"""


class GrowthWatch:
    """Computes metrics of each growing field. ``counts`` returns each field's counts over all
    ranks. Each warning is logged at most once per field.
    """

    def __init__(self, counts: Callable[[], Mapping[str, GrowthCounts]], rank: int = 0) -> None:
        self._counts, self._warned, self._rank = counts, set[tuple[str, str]](), rank
        self._last = dict(counts())
        self._begin = dict(self._last)  # counts at the last comparison of evictions with lookups

    def figures(self) -> dict[str, float]:
        """Return the metrics ``growth.FIELD.NAME`` of each field, and three metrics over all
        fields.

        ``admitted``, ``evicted`` and ``forgotten`` count keys since the tables were created.
        ``pending_share`` and ``refused_share`` are shares of the lookups since the last call.
        """
        counts = self._counts()
        if not counts:
            return {}
        figures: dict[str, float] = {}
        for field, now in counts.items():
            before = self._last.get(field, now)
            lookups = max(now.lookups - before.lookups, 1)
            refused = (now.refused_lookups - before.refused_lookups) / lookups
            own = {
                **{name: getattr(now, name) for name in _COUNTED},
                "load_factor": now.load_factor,
                "pending_share": (now.pending_lookups - before.pending_lookups) / lookups,
                "refused_share": refused,
                **{f"rows_of_rank_{n}": rows for n, rows in enumerate(now.rows_per_rank)},
            }
            figures |= {f"growth.{field}.{name}": float(value) for name, value in own.items()}
            self._warn(field, now, refused)
        self._last = dict(counts)
        return figures | {
            "growth_live": float(sum(now.live for now in counts.values())),
            "growth_load_factor": max(now.load_factor for now in counts.values()),
            "growth_refused_share": max(figures[f"growth.{f}.refused_share"] for f in counts),
        }

    def _warn(self, field: str, now: GrowthCounts, refused: float) -> None:
        key, begin = f"model.fields.{field}", self._begin.setdefault(field, now)
        evicted, lookups = now.evicted - begin.evicted, now.lookups - begin.lookups
        is_compared = evicted > _CHURN * now.max_rows
        if is_compared:
            self._begin[field] = now
        if refused > _REFUSED:
            self._once(
                field,
                "refused",
                f"{key}.evict.max_rows: {now.max_rows:,} rows are too few: {refused:.1%} of the "
                "lookups since the last report read the shared row, because a batch used all rows "
                f"of their buckets; use, for example, {4 * now.max_rows}",
            )
        elif is_compared and evicted > _PER_LOOKUP * lookups:
            self._once(
                field,
                "churn",
                f"{key}: {evicted:,} keys were evicted from the {now.max_rows:,} rows during "
                f"{lookups:,} lookups, so keys are evicted after few lookups; "
                f"raise {key}.evict.max_rows (for example, to {4 * now.max_rows}), admit fewer "
                "keys with a higher admit_count, or fix the data if its format has changed, which "
                "makes old values look new",
            )
        elif now.load_factor > _FULL:
            self._once(
                field,
                "full",
                f"{key}: {now.live:,} of {now.max_rows:,} rows have keys, so new keys often "
                f"replace others; if these keys still matter, raise {key}.evict.max_rows",
            )

    def _once(self, field: str, kind: str, text: str) -> None:
        if (field, kind) not in self._warned:
            self._warned.add((field, kind))
            if self._rank == 0:  # all ranks have the same counts
                logger.warning("%s", text)


_COUNTED = ("live", "pending", "admitted", "evicted", "forgotten")
