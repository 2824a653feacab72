"""What a run says at its end: values that are not in the set as they were in the input."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

_LOG = logging.getLogger(__name__)

_SAID = (
    ("dense", "clamped", "values clamped to the range of their transform"),
    ("fields", "cut", "values cut off, beyond the most of a row"),
    ("fields", "collisions", "strings with the 64-bit key of another, which have the rare id"),
)


def report_values(content: Mapping[str, Any], *, has_own_ids: bool) -> None:
    """Say the counts of a manifest's ``content``, and how vocabularies have grown.

    Of a set that has the ids of another, also how many lookups were of values without one.
    """
    said = list(_SAID)
    if not has_own_ids:
        said.append(("fields", "rare", "lookups of values without an id of their own"))
    for entries, key, text in said:
        counts = {entry["name"]: entry[key] for entry in content[entries] if entry.get(key)}
        if counts:
            each = ", ".join(f"{name} {number:,}" for name, number in counts.items())
            _LOG.info("%s: %s", text, each)
    _report_growth(content["fields"])


def _report_growth(fields: Sequence[Mapping[str, Any]]) -> None:
    for entry in fields:
        if grown := entry.get("grown"):
            _LOG.info(
                "%s: %d new values, %d in spare ids, %d behind the old rows; with these the "
                "fullest eighth of the table has %.2f times the mean lookups",
                entry["name"], grown["values"], grown["spare"], grown["behind"],
                grown["load_percent"] / 100,
            )  # fmt: skip
