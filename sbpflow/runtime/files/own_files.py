"""Finds files that do not belong to this program in a folder whose files it is about to replace."""

import re
from collections.abc import Iterable


def other_file(names: Iterable[str], owned: re.Pattern[str]) -> str | None:
    """Return the first of the relative ``names``, sorted, that does not match ``owned``, or None.
    Hidden files, which file managers create, do not count.
    """
    others = (name for name in names if not name.rpartition("/")[2].startswith("."))
    return min((name for name in others if not owned.fullmatch(name)), default=None)
