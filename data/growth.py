"""Measure how evenly a grown vocabulary loads the parts of a row-split table."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sbpflow.data.format.manifest import Manifest
from sbpflow.data.format.vocabulary import open_vocabularies


def growth_of(manifest: Manifest, tables: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the new values and part loads of each row-split table with a grown vocabulary.

    ``tables`` comes from ``run.explain.describe``. ``max_over_mean`` is the ratio of the maximum to
    the mean of the parts' train lookups, and 1 means even.
    """
    grown = {entry["name"]: entry["grown"] for entry in manifest.content["fields"]
             if entry.get("grown", {}).get("values")}  # fmt: skip
    if not grown:
        return []
    vocabularies = open_vocabularies(manifest)
    entries: list[dict[str, Any]] = []
    for table in tables:
        names = [name for name in table["features"] if name in grown]
        starts = sorted({shard["rows"][0] for shard in table["shards"]})
        if not names or len(starts) < 2:
            continue
        vocabulary = vocabularies[names[0]]
        loads = np.zeros(len(starts), dtype=np.int64)
        part = np.searchsorted(starts, vocabulary.ids, side="right") - 1
        np.add.at(loads, part, vocabulary.counts)
        growth = grown[names[0]]
        entries.append(
            {
                "table": table["name"],
                "new_values": growth["values"],
                "in_spare_ids": growth["spare"],
                "behind_the_old": growth["behind"],
                "parts": len(starts),
                "max_over_mean": round(float(loads.max() / max(loads.mean(), 1e-9)), 3),
            }
        )
    return entries


def growth_text(entries: Sequence[Mapping[str, Any]]) -> str:
    """Format the result of ``growth_of`` as one line per table."""
    lines = [
        f"  {entry['table']}: {entry['new_values']:,} new values, {entry['in_spare_ids']:,} with "
        f"spare ids and {entry['behind_the_old']:,} after the old rows; the maximum load of the "
        f"{entry['parts']} parts is {entry['max_over_mean']:.2f} times the mean"
        for entry in entries
    ]
    return "\n".join(["grown vocabularies:", *lines]) if lines else ""
