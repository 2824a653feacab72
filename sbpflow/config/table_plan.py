"""Reads files of table rules for ``parallel.plan: FILE``, and writes them for the planner.

A file contains a mapping ``tables``, in the form of ``parallel.tables``, and optional ``notes`` for
people. The only note that the program reads is ``world_size``, the number of ranks for which the
tables were planned.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from sbpflow.config.load import read_yaml
from sbpflow.config.parse import build
from sbpflow.config.table_rules import TableRule
from sbpflow.errors import ConfigError
from sbpflow.runtime.fields.keys import Example
from sbpflow.runtime.processes.environment import env_int

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _TablePlan:
    tables: Annotated[Mapping[str, TableRule], Example({"*": {"sbp": "S(0)"}})]


def read_table_plan(path: Path, *, world_size: int | None = None) -> dict[str, TableRule]:
    """Return rules by pattern (the last match wins); raise ConfigError if the file is not a plan.
    Logs a warning if ``notes`` has a different ``world_size``.
    """
    tree = read_yaml(path, "parallel.plan")
    notes = tree.pop("notes", None)
    try:
        plan = build(_TablePlan, tree)
        for pattern, rule in plan.tables.items():
            rule.check(f"tables.{pattern}")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    planned_for = notes.get("world_size", world_size) if isinstance(notes, Mapping) else world_size
    if world_size is not None and planned_for != world_size and env_int("RANK", 0) == 0:
        _LOG.warning(
            "%s was planned for %s ranks, but this run has %d, so ranks may be idle or run out of "
            "memory; plan again",
            path,
            planned_for,
            world_size,
        )
    return dict(plan.tables)
