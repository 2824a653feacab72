"""Lists the shapes of a table that a planner tries, and converts a task to a search problem.

The shapes come from every exchange's ``cuts``: even cuts into one part per rank, or into a number
of parts that is a power of two. The search chooses the ranks of the parts.
"""

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from sbpflow.costs.counts import NUM_FEATURES
from sbpflow.costs.prices import shared
from sbpflow.embedding.plan.exchanges import EXCHANGES
from sbpflow.embedding.plan.tables import TableConfig
from sbpflow.errors import PlanError
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.costs.work import base_work, joins_work, keys_work, shape_work
from sbpflow.planner.search.problem import NO_LIMIT, Assignment, Key, Move, Option, Problem
from sbpflow.planner.task import Choice, Plan, Shape, Task

COPIED = Shape("B", "local")
WHOLE = Shape("B", "columns")


def shapes_of(task: Task, table: TableConfig) -> tuple[Shape, ...]:
    """Return all shapes to try for a table, with unsplit shapes first."""
    size = task.world_size
    if size == 1:
        return (COPIED,)
    # cached and growing tables cannot be copied
    can_copy = table.storage is None and table.growth is None
    # All tables of a growing field must split their rows in the same way: not at all, or over all
    # ranks.
    cuts = range(1, size + 1) if table.growth is None else (1, size)
    hosts = task.num_hosts if task.two_hops and table.growth is None else 1
    shapes = dict.fromkeys(
        Shape(sbp, exchange.name, parts)
        for exchange in EXCHANGES
        for sbp, parts in exchange.cuts(table.num_rows, table.dim, size, hosts)
        if parts[0] in cuts and parts[0] * parts[1] <= size and (can_copy or not exchange.copies)
    )
    return tuple(sorted(shapes, key=lambda shape: shape.num_shards > 1))


def problem_of(model: TaskCost, given: Plan | None = None) -> Problem:
    """Return the search problem for a task; pinned tables are part of the problem's base.

    The shapes of a ``given`` plan are added, because a handwritten plan may use shapes that the
    search does not try.
    """
    task, size = model.task, model.task.world_size
    base = np.tile(base_work(task) @ model.prices, (size, 1))
    present: dict[Key, None] = {}
    names: list[str] = []
    options: list[tuple[Option, ...]] = []
    for table in task.tables:
        pinned = task.pinned.get(table.name)
        if pinned is not None:
            option = _option(model, table, pinned.shape)
            ranks = pinned.ranks if option.num_shards else ()
            base += option.home
            base[list(ranks)] += option.shards
            present |= dict.fromkeys(option.keys(ranks))
            continue
        shapes = [*shapes_of(task, table)]
        if given is not None and given[table.name].shape not in shapes:
            shapes.append(given[table.name].shape)
        names.append(table.name)
        options.append(tuple(_option(model, table, shape) for shape in shapes))
    base += keys_work(task, present) @ model.prices
    return Problem(
        names=tuple(names),
        options=tuple(options),
        limit_bytes=np.array(task.device_bytes or (NO_LIMIT,) * size, dtype=np.float64),
        key_loads=np.concatenate([model.prices, joins_work(task) @ model.prices]),
        base=shared(base * model.slowness, model.ranks_per_link),
        present=tuple(present),
        slowness=model.slowness,
        ranks_per_link=model.ranks_per_link,
        first_join=NUM_FEATURES,
    )


def _option(model: TaskCost, table: TableConfig, shape: Shape) -> Option:
    counted = shape_work(model.task, table, shape)
    return replace(counted, shards=counted.shards @ model.prices, home=counted.home @ model.prices)


def plan_of(task: Task, problem: Problem, assignment: Assignment) -> Plan:
    """Return the plan that an assignment describes, with pinned tables, in the task's order."""
    plan: Plan = dict(task.pinned)
    for table, (name, move) in enumerate(zip(problem.names, assignment, strict=True)):
        plan[name] = choice_of_move(problem, table, move)
    return {table.name: plan[table.name] for table in task.tables}


def choice_of_move(problem: Problem, table: int, move: Move) -> Choice:
    """Return the shape and the ranks of a move; a copy is on all ranks."""
    shape = problem.options[table][move.option].shape
    return Choice(shape, move.ranks or tuple(range(problem.num_ranks)))


def assignment_of(problem: Problem, plan: Plan) -> Assignment:
    """Return the assignment of a plan; raise PlanError if a shape is not an option."""
    moves: list[Move] = []
    for name, options in zip(problem.names, problem.options, strict=True):
        choice = plan[name]
        number = option_number(options, choice.shape)
        if number is None:
            tried = ", ".join(str(option.shape) for option in options)
            raise PlanError(f"table {name}: {choice.shape} is not among the options: {tried}")
        moves.append(Move(number, choice.ranks if options[number].num_shards else ()))
    return tuple(moves)


def option_number(options: Collection[Option], shape: Shape) -> int | None:
    """Return the number of the first option with this shape."""
    return next((n for n, option in enumerate(options) if option.shape == shape), None)
