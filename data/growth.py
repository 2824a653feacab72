"""Measure how evenly lookups of a grown vocabulary are spread over the parts of a row-split table,
and compare the row limits of growing tables with the number of keys in a set.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sbpflow.data.format.manifest import Manifest
from sbpflow.data.format.vocabulary import open_vocabularies
from sbpflow.data.stats import load_stats


def growth_of(manifest: Manifest, tables: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each row-split table with a grown vocabulary, return the number of new values and the
    load balance.

    ``tables`` comes from ``run.planning.explain.describe``. ``max_over_mean`` is the maximum number
    of train lookups per part, divided by the mean; 1 means perfect balance.
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
    """Format the result of ``growth_of`` with one line per table."""
    lines = [
        f"  {entry['table']} has {entry['new_values']:,} new values: {entry['in_spare_ids']:,} in "
        f"spare rows and {entry['behind_the_old']:,} in rows after the old ones; its rows are "
        f"split into {entry['parts']} parts, of which the busiest has "
        f"{entry['max_over_mean']:.2f} times the mean load"
        for entry in entries
    ]
    return "\n".join(["grown vocabularies:", *lines]) if lines else ""


def growing_of(manifest: Manifest, tables: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the limits of each growing table, and the number of distinct keys in train
    (``train_keys``) of the field that has the most.

    ``tables`` comes from ``run.planning.explain.describe``. ``train_keys`` is None for encoded
    rows, which have no statistics.
    """
    stats = load_stats(manifest) if manifest.content.get("stats") else []
    keys = {field.name: field.distinct for field in stats}
    return [
        {
            "table": table["name"],
            "fields": table["features"],
            **table["growth"],
            "train_keys": max((keys[f] for f in table["features"] if f in keys), default=None),
        }
        for table in tables
        if table["growth"]
    ]


def growing_text(entries: Sequence[Mapping[str, Any]]) -> str:
    """Format the result of ``growing_of`` with one line per table."""
    lines = [f"  {entry['table']}: {_limits(entry)}" for entry in entries]
    return "\n".join(["growing tables:", *lines]) if lines else ""


def _limits(entry: Mapping[str, Any]) -> str:
    evict, keys = entry["evict"], entry["train_keys"]
    count, forget = entry["admit_count"], entry["forget_after_samples"]
    parts = [f"a key gets a row after {count} occurrence{'s' * (count > 1)}"]
    parts[0] += f", at most {forget:,} samples apart" if forget else ""
    parts.append(f"at most {evict['max_rows']:,} rows, then {evict['policy']} eviction")
    if evict["idle_samples"]:
        parts.append(f"eviction after {evict['idle_samples']:,} samples without use")
    if evict["idle_time"]:
        parts.append(f"eviction after an event time of {evict['idle_time']:,.15g} without use")
    if keys is not None:
        text = f"train has {keys:,} keys"
        if keys > evict["max_rows"] and count == 1:
            text += ", so an epoch evicts keys (raise evict.max_rows or admit_count to avoid this)"
        parts.append(text)
    return "; ".join(parts)
