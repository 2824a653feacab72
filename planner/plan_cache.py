"""Caches chosen plans on disk, so one rank per machine searches, and a restarted run does not
search again.

The file's name is a digest of everything that affects the choice: the task, the prices, the seed,
the source code, and the versions of the packages that the search uses. A process that finds the
file locked waits, so that ranks that share cores do not all search.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO

import sbpflow
from sbpflow.config.parse import plain
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.task import Plan, Task, plan_of_tree
from sbpflow.runtime.compute.versions import dist_version
from sbpflow.runtime.files.cache_dir import cache_dir, make_private
from sbpflow.runtime.files.file_lock import hold
from sbpflow.runtime.files.json_file import JsonError, json_digest, object_of, parse_json

LOG = logging.getLogger(__name__)
MOST_PLANS = 100  # only this many of the newest plans are kept
MOST_CHARACTERS = 2**26


def chosen_once(cost: TaskCost, seed: int, choose: Callable[[], Plan]) -> Plan:
    """Return the plan that ``choose`` computes for these prices and this seed; processes that share
    the cache call ``choose`` only once.

    An exception from ``choose`` propagates, and nothing is cached. If the cache folder is not
    writable, every process chooses its own plan and logs a warning. Damaged files are replaced.
    """
    path = cache_dir() / "plans" / f"{_digest(cost, seed)}.json"
    try:
        make_private(path.parent)
        file = hold(path, wait=True)
    except OSError as error:
        LOG.warning("%s: cannot cache plans, so every rank chooses its own (%s)", path, error)
        return choose()
    with file:
        plan = _read(file, cost.task)
        if plan is None:
            plan = choose()
            _write(file, path, plan)
        return plan


def _read(file: IO[str], task: Task) -> Plan | None:
    """Return the cached plan, or None if the file is empty or, with a warning, damaged."""
    file.seek(0)
    try:
        text = file.read(MOST_CHARACTERS)
        if not text:
            return None
        content = object_of(parse_json(text), "the file")
        if content.get("sha256") != json_digest(content.get("plan")):
            raise JsonError("its checksum does not match")
        plan = plan_of_tree(content["plan"])
        task.check(plan)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        LOG.warning("%s: not a valid cached plan (%s); planning again", file.name, error)
        return None
    return plan


def _write(file: IO[str], path: Path, plan: Plan) -> None:
    try:
        # Bypass the buffer of ``file``, because its content would be written again on close.
        os.ftruncate(file.fileno(), 0)
        content = {"sha256": json_digest(plain(plan)), "plan": plain(plan)}
        os.write(file.fileno(), json.dumps(content).encode())
        _delete_oldest(path.parent)
    except OSError as error:
        LOG.warning("%s: the plan is not cached (%s)", path, error)


def _delete_oldest(folder: Path) -> None:
    dated: list[tuple[float, Path]] = []
    for path in folder.glob("*.json"):
        with suppress(FileNotFoundError):  # another process may have deleted the file
            dated.append((path.stat().st_mtime, path))
    for _, old in sorted(dated)[:-MOST_PLANS]:
        with suppress(OSError):  # another user owns the file, or it is not a regular file
            old.unlink()


def _digest(cost: TaskCost, seed: int) -> str:
    packages = " ".join(f"{name} {dist_version(name)}" for name in ("numpy", "torch"))
    rules = {cost.task.optimizer_of(table) for table in cost.task.tables}
    # These properties of a user's rule are not in the text of the task.
    stored = sorted(f"{rule} {rule.state_counts} {rule.shares_row_state}" for rule in rules)
    parts = (_code(), packages, repr(cost.task), *stored, cost.prices_digest, str(seed))
    facts = "\n".join(parts)
    return hashlib.sha256(facts.encode()).hexdigest()[:32]


@cache
def _code() -> str:
    """Return a digest of all source files that a choice may depend on."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(str(sbpflow.__file__)).parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(path.relative_to(folder)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
