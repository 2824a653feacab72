"""Files of table rules, as ``parallel.plan: FILE`` reads and a planner writes them.

A mapping ``tables`` with what ``parallel.tables`` takes; ``notes`` beside it are for people.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from sbpflow.config.load import read_yaml
from sbpflow.config.parse import Example, build
from sbpflow.config.table_rules import TableRule
from sbpflow.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class _TablePlan:
    tables: Annotated[Mapping[str, TableRule], Example({"*": {"sbp": "S(0)"}})]


def read_table_plan(path: Path) -> dict[str, TableRule]:
    """Rules by pattern, the last match deciding; ConfigError for what is no such file."""
    tree = read_yaml(path, "parallel.plan")
    tree.pop("notes", None)
    try:
        plan = build(_TablePlan, tree)
        for pattern, rule in plan.tables.items():
            rule.check(f"tables.{pattern}")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return dict(plan.tables)
