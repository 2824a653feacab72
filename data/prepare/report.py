"""Report the numbers of changed and dropped input values."""

import logging
from collections.abc import Mapping
from typing import Any

_LOG = logging.getLogger(__name__)

_COUNTED = (
    ("dense", "clamped", "values clamped to `clip` or to the input range of their transform"),
    ("fields", "clamped", "values clamped to `clip` in columns with buckets"),
    ("fields", "cut", "values dropped because a row had too many of them"),
    (
        "fields",
        "collisions",
        "64-bit keys that several strings share (all but one of these strings have the rare id)",
    ),
)


def report_values(content: Mapping[str, Any], *, has_own_ids: bool) -> None:
    """Log the counts in the ``content`` of a manifest, and the growth of the vocabularies.

    Unless ``has_own_ids`` is true, also log the number of lookups of values that have no id in the
    existing set.
    """
    counted = list(_COUNTED)
    if not has_own_ids:
        counted.append(("fields", "rare", "lookups of values without their own id"))
    for entries, key, text in counted:
        counts = {entry["name"]: entry[key] for entry in content[entries] if entry.get(key)}
        if counts:
            by_name = ", ".join(f"{name} {number:,}" for name, number in counts.items())
            _LOG.info("%s: %s", text, by_name)
    for entry in content["fields"]:
        if grown := entry.get("grown"):
            _LOG.info(
                "%s: %d new values, %d with spare ids, %d with ids after the old rows; the "
                "busiest eighth of the table now has %.2f times the mean number of lookups",
                entry["name"], grown["values"], grown["spare"], grown["behind"],
                grown["load_percent"] / 100,
            )  # fmt: skip
