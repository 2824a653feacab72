"""How evenly a grown vocabulary loads the ranks of a split table."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sbpflow.data.format.manifest import Manifest
from sbpflow.data.format.vocabulary import open_vocabularies


def growth_of(manifest: Manifest, tables: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each table split by rows whose field has grown: new values, and the load of its parts.

    ``tables`` as ``run.explain.describe`` gives them. ``max_over_mean`` is of the train lookups of
    the values, over the parts of the table; 1 is even.
    """
    grown = {entry["name"]: entry["grown"] for entry in manifest.content["fields"]
             if entry.get("grown", {}).get("values")}  # fmt: skip
    if not grown:
        return []
    vocabularies = open_vocabularies(manifest)
    found: list[dict[str, Any]] = []
    for table in tables:
        names = [name for name in table["features"] if name in grown]
        starts = sorted({shard["rows"][0] for shard in table["shards"]})
        if not names or len(starts) < 2:
            continue
        vocabulary = vocabularies[names[0]]
        loads = np.zeros(len(starts), dtype=np.int64)
        part = np.searchsorted(starts, vocabulary.ids, side="right") - 1
        np.add.at(loads, part, vocabulary.counts)
        said = grown[names[0]]
        found.append(
            {
                "table": table["name"],
                "new_values": said["values"],
                "in_spare_ids": said["spare"],
                "behind_the_old": said["behind"],
                "parts": len(starts),
                "max_over_mean": round(float(loads.max() / max(loads.mean(), 1e-9)), 3),
            }
        )
    return found


def growth_text(found: Sequence[Mapping[str, Any]]) -> str:
    """A line per table; empty without any."""
    lines = [
        f"  {one['table']}: {one['new_values']:,} new values, {one['in_spare_ids']:,} in spare ids "
        f"and {one['behind_the_old']:,} behind the old rows; the fullest of {one['parts']} parts "
        f"has {one['max_over_mean']:.2f} times the mean lookups"
        for one in found
    ]
    return "\n".join(["grown vocabularies:", *lines]) if lines else ""
