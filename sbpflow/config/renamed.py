"""Lists renamed keys.

Old names are rejected in users' configurations, but accepted in saved files.
"""

from collections.abc import Mapping
from typing import Any, cast

RENAMED = {"exchange_dtype": "comm_dtype", "row_capacity": "row_buffer_fraction"}
"""Maps the old name of a key to its new name. The keys are in ``parallel`` or in a rule of
``parallel.tables``; a name is the last part of a dotted key.
"""


def current_key(key: str) -> str:
    """Return the current name of a dotted key of a saved run."""
    group, _, name = key.rpartition(".")
    is_renamed = group.startswith("parallel") and name in RENAMED
    return f"{group}.{RENAMED[name]}" if is_renamed else key


def with_current_keys(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration tree of a saved run, with current key names."""
    parallel: object = tree.get("parallel")
    if not isinstance(parallel, Mapping):
        return dict(tree)
    current = _rename(cast("Mapping[str, Any]", parallel))
    tables: object = current.get("tables")
    if isinstance(tables, Mapping):
        rules = cast("Mapping[str, Any]", tables).items()
        current["tables"] = {
            pattern: _rename(cast("Mapping[str, Any]", rule)) if isinstance(rule, Mapping) else rule
            for pattern, rule in rules
        }
    return {**tree, "parallel": current}


def _rename(group: Mapping[str, Any]) -> dict[str, Any]:
    return {RENAMED.get(name, name): value for name, value in group.items()}
