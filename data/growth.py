"""How evenly a grown vocabulary loads the parts of a table that is split by rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sbpflow.data.format.manifest import Manifest
from sbpflow.data.format.vocabulary import open_vocabularies


def growth_of(manifest: Manifest, tables: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each table split by rows whose field has grown: its new values and the load of its parts.

    ``tables`` comes from ``run.explain.describe``. ``max_over_mean`` compares the train lookups of
    the parts; 1 is even.
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
    """Return the result of ``growth_of`` as one line per table; empty if there are none."""
    lines = [
        f"  {entry['table']}: {entry['new_values']:,} new values, {entry['in_spare_ids']:,} with "
        f"spare ids and {entry['behind_the_old']:,} after the old rows; the most loaded of "
        f"{entry['parts']} parts has {entry['max_over_mean']:.2f} times the mean lookups"
        for entry in entries
    ]
    return "\n".join(["grown vocabularies:", *lines]) if lines else ""
