"""Plans that were chosen, on disk: the ranks of a machine choose once, and a run that starts again
does not choose at all.

A file is named by everything that a choice depends on: the task, the prices, the seed, and the code
that chooses, with the packages that it searches by. Who finds it held waits, so that ranks which
share cores do not all search.
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
from sbpflow.planner.calibration.records import plan_of_tree, plan_tree
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.task import Plan, Task
from sbpflow.runtime.compute.versions import dist_version
from sbpflow.runtime.files.cache_dir import cache_dir, make_private
from sbpflow.runtime.files.file_lock import hold
from sbpflow.runtime.files.json_file import JsonError, object_of, parse_json

LOG = logging.getLogger(__name__)
KEPT = 100  # plans, the newest
MOST_CHARACTERS = 2**26


def chosen_once(cost: TaskCost, seed: int, choose: Callable[[], Plan]) -> Plan:
    """What ``choose`` gives for these prices and this seed, called by one process of this machine.

    What ``choose`` raises is raised, and nothing is kept. Without a folder that can be written
    every process chooses for itself, with a warning. What is kept and is no plan of the task is
    chosen anew.
    """
    path = cache_dir() / "plans" / f"{_digest(cost, seed)}.json"
    try:
        make_private(path.parent)
        file = hold(path, wait=True)
    except OSError as error:
        LOG.warning("%s: no plan is kept, so every rank chooses its own (%s)", path, error)
        return choose()
    with file:
        plan = _read(file, cost.task)
        if plan is None:
            plan = choose()
            _keep(file, path, plan)
        return plan


def _read(file: IO[str], task: Task) -> Plan | None:
    """The task's plan in it; None for a new file and, with a warning, for a damaged one."""
    file.seek(0)
    try:
        text = file.read(MOST_CHARACTERS)
        if not text:
            return None
        content = object_of(parse_json(text), "the file")
        if content.get("sha256") != _digest_of(content.get("plan")):
            raise JsonError("its checksum does not fit")
        plan = plan_of_tree(content["plan"])
        task.check(plan)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        LOG.warning("%s: is not a plan that was kept (%s); it is chosen again", file.name, error)
        return None
    return plan


def _keep(file: IO[str], path: Path, plan: Plan) -> None:
    try:
        # Past the buffer of ``file``, which would be written once more when it is closed.
        os.ftruncate(file.fileno(), 0)
        content = {"sha256": _digest_of(plan_tree(plan)), "plan": plan_tree(plan)}
        os.write(file.fileno(), json.dumps(content).encode())
        _forget_oldest(path.parent)
    except OSError as error:
        LOG.warning("%s: the plan is not kept (%s)", path, error)


def _forget_oldest(folder: Path) -> None:
    dated: list[tuple[float, Path]] = []
    for path in folder.glob("*.json"):
        with suppress(FileNotFoundError):  # another process forgot it first
            dated.append((path.stat().st_mtime, path))
    for _, old in sorted(dated)[:-KEPT]:
        with suppress(OSError):  # of another user, or no file
            old.unlink()


def _digest_of(tree: object) -> str:
    return hashlib.sha256(json.dumps(tree).encode()).hexdigest()


def _digest(cost: TaskCost, seed: int) -> str:
    packages = " ".join(f"{name} {dist_version(name)}" for name in ("numpy", "torch", "ortools"))
    facts = "\n".join((_code(), packages, repr(cost.task), cost.prices_digest, str(seed)))
    return hashlib.sha256(facts.encode()).hexdigest()[:32]


@cache
def _code() -> str:
    """A digest of all sources that a choice may go through."""
    found = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(str(sbpflow.__file__)).parent):
        for path in sorted(folder.rglob("*.py")):
            found.update(str(path.relative_to(folder)).encode())
            found.update(path.read_bytes())
    return found.hexdigest()
