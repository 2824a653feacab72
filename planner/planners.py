"""Provides all planners by name through one function: the project's own planner and published
planners for comparison.

``auto`` searches all layouts under the cost model. The learned planners are trained on first use,
on random tasks from ``planner.workloads`` with the same world size, batch size, and profile.
Training takes up to a minute, and the trained networks are cached.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
from sbpflow.planner.published.model_cache import load_model, path_of, save_model
from sbpflow.planner.published.neuroshard import NeuroShard
from sbpflow.planner.published.setting import Setting
from sbpflow.planner.search.auto import Found, search
from sbpflow.planner.search.problem import Assignment, Priced, Problem, price_of
from sbpflow.planner.shapes import assignment_of, plan_of, problem_of
from sbpflow.planner.task import Plan
from sbpflow.planner.workloads import random_task

LOG = logging.getLogger(__name__)

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
PLANNERS = ("auto", *GREEDY, "embark", *LEARNED)
MOST_FOR_EMBARK = 2000  # limit on tables x ranks, above which EMBark takes seconds
TRAINING_TASKS = 30
TRAINING_TABLES = (10, 60)  # minimum and maximum number of tables in a training task
# memory limits of the training tasks, relative to an evenly divided plan
TRAINING_SLACKS = (None, 1.1, 1.25, 1.5, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A planner's plan and price; ``found`` is the search result of ``auto``."""

    planner: str
    plan: Plan
    assignment: Assignment
    priced: Priced
    problem: Problem
    seconds: float
    found: Found | None = None


def priced_plan(name: str, plan: Plan, cost: TaskCost, *, seconds: float = 0.0) -> Planned:
    """Price an existing plan; ``name`` says where the plan comes from."""
    problem = problem_of(cost, given=plan)
    assignment = assignment_of(problem, plan)
    return Planned(
        planner=name,
        plan=plan,
        assignment=assignment,
        priced=price_of(problem, assignment),
        problem=problem,
        seconds=seconds,
    )


def planner_of(name: str) -> str:
    """Return ``name``; raise ConfigError if no planner has this name."""
    if name not in PLANNERS:
        raise ConfigError(f"--planner must be one of {', '.join(PLANNERS)}, got {name!r}")
    return name


def make_plan(
    name: str, cost: TaskCost, *, seed: int = 0, insertions: int | None = None
) -> Planned:
    """Plan the task of ``cost``; if no plan fits, return the one with the smallest excess."""
    start = time.perf_counter()
    problem = problem_of(cost)
    setting = Setting(cost.task, problem, seed)
    found: Found | None = None
    if name == "auto":
        given = published_seeds(setting)
        found = search(problem, seed=seed, insertions=insertions, given=given)
        assignment = found.assignment
    else:
        assignment = published(name, cost, seed)(setting)
    return Planned(
        planner=name,
        plan=plan_of(cost.task, problem, assignment),
        assignment=assignment,
        priced=price_of(problem, assignment),
        problem=problem,
        seconds=time.perf_counter() - start,
        found=found,
    )


def published_seeds(setting: Setting) -> dict[str, Assignment]:
    """Return the plans of the greedy heuristics and, unless the task is large, of EMBark; empty if
    tables may not be stored whole.
    """
    if not setting.whole_allowed:
        return {}
    plans = {f"{name} greedy": plan(setting) for name, plan in GREEDY.items() if name != "random"}
    if len(setting.tables) * setting.num_ranks <= MOST_FOR_EMBARK:
        plans["embark"] = embark(setting)
    return plans


def published(name: str, like: TaskCost, seed: int) -> Callable[[Setting], Assignment]:
    """Return a published planner for tasks with the world size, batch size, and prices of ``like``.

    A learned planner is loaded from the cache or, if it is not cached, trained and cached.
    """
    if name in GREEDY:
        return GREEDY[name]
    if name == "embark":
        return embark
    kind, path = LEARNED[name], path_of(name, like, seed)
    model = kind(like.task.world_size)
    if not load_model(model, path):
        LOG.info("training %s on %d random tasks", name, TRAINING_TASKS)
        model = kind.trained(training_settings(like, seed), seed)
        save_model(model, path)
    return model.plan


def training_settings(like: TaskCost, seed: int) -> list[Setting]:
    """Return training tasks with tables from the half of the pool that comparisons do not use."""
    random = np.random.default_rng(seed)
    settings: list[Setting] = []
    for number in range(TRAINING_TASKS):
        task = random_task(
            seed * TRAINING_TASKS + number,
            num_tables=int(random.integers(TRAINING_TABLES[0], TRAINING_TABLES[1] + 1)),
            world_size=like.task.world_size,
            held_out=False,
            batch_size=like.task.batch_size,
            slack=TRAINING_SLACKS[number % len(TRAINING_SLACKS)],
        )
        settings.append(Setting(task, problem_of(TaskCost(like.profile, task)), seed))
    return settings
