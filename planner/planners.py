"""The planners by name, behind one function: ours, and the published ones to compare with.

``auto`` searches all layouts under the cost model. Of the others, those that learn are trained when
they are first asked for, on tasks drawn by ``planner.workloads`` for the same world and batch,
priced as the task is; that takes up to a minute, and what they learned is kept.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from sbpflow.errors import ConfigError
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.published.autoshard import AutoShard
from sbpflow.planner.published.dreamshard import DreamShard
from sbpflow.planner.published.embark import embark
from sbpflow.planner.published.greedy import (
    dim_greedy,
    lookup_greedy,
    random_placement,
    size_greedy,
    size_lookup_greedy,
)
from sbpflow.planner.published.model_cache import keep, path_of, recall
from sbpflow.planner.published.neuroshard import NeuroShard
from sbpflow.planner.published.setting import Setting
from sbpflow.planner.search.auto import Effort, Found, search
from sbpflow.planner.search.problem import Assignment, Priced, Problem, price_of
from sbpflow.planner.shapes import assignment_of, plan_of, problem_of, table_wise
from sbpflow.planner.task import Plan
from sbpflow.planner.workloads import random_task

LOG = logging.getLogger(__name__)

PlannerName = Literal[
    "auto",
    "random",
    "size",
    "dim",
    "lookup",
    "size-lookup",
    "embark",
    "neuroshard",
    "dreamshard",
    "autoshard",
]
PLANNERS: tuple[PlannerName, ...] = get_args(PlannerName)
GREEDY: Mapping[str, Callable[[Setting], Assignment]] = {
    "random": random_placement,
    "size": size_greedy,
    "dim": dim_greedy,
    "lookup": lookup_greedy,
    "size-lookup": size_lookup_greedy,
}
LEARNED: Mapping[str, type[DreamShard] | type[NeuroShard] | type[AutoShard]] = {
    "neuroshard": NeuroShard,
    "dreamshard": DreamShard,
    "autoshard": AutoShard,
}
MOST_FOR_EMBARK = 2000  # tables x ranks, beyond which its 189 placements take seconds
MOST_FOR_SEARCHES = 2000  # tables x ranks, beyond which there is no time for seeds by search
UNCORRECTED = "without corrections"  # the seed found by prices that leave them out
UNSPLIT = "no table split"  # the seed found among whole and copied tables
TRAINING_TASKS = 30
TRAINING_TABLES = (10, 60)  # of a training task, from .. to


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A planner's answer: the plan, its price, and what ``auto`` tells beside."""

    planner: str
    plan: Plan
    assignment: Assignment
    priced: Priced
    problem: Problem
    seconds: float
    found: Found | None = None


def planner_of(name: str) -> PlannerName:
    """ConfigError for a name that is none."""
    if name not in PLANNERS:
        raise ConfigError(f"--planner: {name!r}; use {', '.join(PLANNERS)}")
    return name


def make_plan(
    name: PlannerName, cost: TaskCost, *, seed: int = 0, effort: Effort | None = None
) -> Planned:
    """A plan for the cost's task. The best of least excess where nothing fits: ``priced`` says."""
    start = time.perf_counter()
    problem = problem_of(cost)
    setting = Setting(cost.task, problem, seed)
    found: Found | None = None
    if name == "auto":
        found = search(problem, seed=seed, effort=effort, given=seeds_of(setting, effort))
        assignment = found.assignment
    else:
        assignment = published(name, [cost], seed)(setting)
    return Planned(
        planner=name,
        plan=plan_of(cost.task, problem, assignment),
        assignment=assignment,
        priced=price_of(problem, assignment),
        problem=problem,
        seconds=time.perf_counter() - start,
        found=found,
    )


def seeds_of(setting: Setting, effort: Effort | None = None) -> dict[str, Assignment]:
    """What ``auto`` starts from beside its own seeds: the published heuristics that need no
    training, and what it finds where a search gets stuck less: among plans that split no table,
    and by the same prices without learned corrections.
    """
    seeds, cost = published_seeds(setting), setting.problem.pricing
    small = len(setting.tables) * setting.num_ranks <= MOST_FOR_SEARCHES
    if not small or not isinstance(cost, TaskCost):
        return seeds
    # Without the exact model, which the search that starts from them has.
    effort = replace(effort or Effort.of(setting.problem), exact_time=0.0)
    searched: dict[str, Assignment] = {}
    if not any(_lacks_whole(setting)):
        narrow = problem_of(cost, table_wise)
        best = search(narrow, seed=setting.seed, effort=effort).assignment
        searched[UNSPLIT] = assignment_of(setting.problem, plan_of(cost.task, narrow, best))
    if cost.profile.members:
        plain = TaskCost(replace(cost.profile, members=()), cost.task, cost.objective)
        found = search(problem_of(plain), seed=setting.seed, effort=effort, given=seeds)
        searched[UNCORRECTED] = found.assignment
    return seeds | searched


def published_seeds(setting: Setting) -> dict[str, Assignment]:
    """Of every published heuristic that needs no training."""
    if any(_lacks_whole(setting)):
        return {}
    plans = {f"{name} greedy": plan(setting) for name, plan in GREEDY.items() if name != "random"}
    if len(setting.tables) * setting.num_ranks <= MOST_FOR_EMBARK:
        plans["embark"] = embark(setting)
    return plans


def _lacks_whole(setting: Setting) -> list[bool]:
    from sbpflow.planner.shapes import COPIED, WHOLE

    shape = WHOLE if setting.num_ranks > 1 else COPIED
    return [setting.option(table, shape) is None for table in range(len(setting.tables))]


def published(
    name: PlannerName, like: Sequence[TaskCost], seed: int
) -> Callable[[Setting], Assignment]:
    """A published planner, for tasks like those given.

    One that learns is trained, or taken from where it was kept when it was last.
    """
    if name in GREEDY:
        return GREEDY[name]
    if name == "embark":
        return embark
    if name not in LEARNED:
        others = ", ".join(PLANNERS[1:])
        raise ConfigError(f"--planner: {name!r} is not a published one; use {others}")
    kind, path = LEARNED[name], path_of(name, like, seed)
    model = kind.blank(like[0].task.world_size)
    if not recall(model, path):
        LOG.info("%s learns from %d drawn tasks", name, TRAINING_TASKS)
        model = kind.train(training_settings(like, seed), seed)
        keep(model, path)
    return model.plan


def training_settings(like: Sequence[TaskCost], seed: int) -> list[Setting]:
    """Tasks to train on: tables from the half of the pool that no comparison draws from."""
    random = np.random.default_rng(seed)
    settings: list[Setting] = []
    for number in range(TRAINING_TASKS):
        one = like[number % len(like)]
        task = random_task(
            seed * TRAINING_TASKS + number,
            num_tables=int(random.integers(TRAINING_TABLES[0], TRAINING_TABLES[1] + 1)),
            world_size=one.task.world_size,
            held_out=False,
            batch_size=one.task.batch_size,
        )
        task = replace(task, overlap=one.task.overlap)
        settings.append(Setting(task, problem_of(TaskCost(one.profile, task, one.objective)), seed))
    return settings
