"""Runs the whole search: seeds, local search from the best seeds, and an exact model in between.

By the model's prices, the result is never worse than any seed. The same problem, seed and effort
give the same plan, because budgets limit insertions instead of seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sbpflow.planner.search.exact import cheapest_options, linear_optimum
from sbpflow.planner.search.insertion import Inserter
from sbpflow.planner.search.linear import linearized
from sbpflow.planner.search.local import LocalSearch, lay_out, weights_of
from sbpflow.planner.search.problem import Assignment, Priced, Problem, check_assignment, price_of
from sbpflow.planner.search.seeds import (
    bytes_of,
    families,
    greedy,
    heaviest_first,
    homogeneous,
    mixed,
    narrowed,
    partly_copied,
)

STARTS = 4  # number of seeds that local search improves before it continues with the best
MIXED = 3  # number of the best shapes that are tried in pairs
# limit of shards x ranks over all options; above it, only a table's cheapest options are tried
LARGE = 800_000
MANY_TABLES = 400  # above this number of tables, only the fastest seeds are used


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Configures how long to search: ``insertions`` of local search, and time for the exact model.

    ``exact_time`` is in CP-SAT's deterministic units (about a second each); 0 skips the model.
    """

    insertions: int
    exact_time: float

    @staticmethod
    def of(problem: Problem) -> "Effort":
        """Return the default: about 10 s for 200 tables x 16 ranks, 60 s for 1000 x 128, on one
        core.
        """
        size = problem.num_tables * problem.num_ranks
        most = max(2000, 6_400_000 // size)
        insertions = max(800, min(4000, 40 * problem.num_tables, most))
        return Effort(insertions=insertions, exact_time=0.5 if size <= 800 else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Contains the best plan, every seed by name (``plans``), and the seeds' prices (``seeds``).

    ``others`` are the next best plans of the search; measurements can help to choose among them.
    """

    assignment: Assignment
    priced: Priced
    seeds: Mapping[str, Priced]
    plans: Mapping[str, Assignment]
    others: tuple[Assignment, ...]


def search(
    problem: Problem,
    *,
    seed: int = 0,
    effort: Effort | None = None,
    given: Mapping[str, Assignment] | None = None,
) -> Found:
    """Find the fastest plan that fits, or the plan with the smallest excess if none fits.

    ``given`` contains additional plans to start from, by name.
    """
    effort = effort or Effort.of(problem)
    inserter = _inserter(problem)
    weights = weights_of(problem, inserter)
    plans: dict[str, Assignment] = {}
    for name, plan in (given or {}).items():
        check_assignment(problem, plan)
        plans[name] = plan
    plans |= greedy(problem, weights, inserter)
    if problem.num_tables <= MANY_TABLES:
        alike = dict(homogeneous(problem, weights))
        rank = {name: price_of(problem, plan).rank for name, plan in alike.items()}
        pairs = zip(families(problem), alike, strict=True)
        order = sorted(pairs, key=lambda pair: rank[pair[1]])
        leading = [shape for shape, _ in order[:MIXED]]
        plans |= alike
        plans |= partly_copied(problem, weights, leading)
        plans |= mixed(problem, weights, leading)
    priced = {name: price_of(problem, plan) for name, plan in plans.items()}
    local = LocalSearch(problem, inserter, weights, seed)
    best = _starts(plans, priced)
    pool = [local.improve(plan, effort.insertions // 8) for plan in best]
    if effort.exact_time:
        leader = min(pool, key=lambda plan: price_of(problem, plan).rank)
        exact = linear_optimum(problem, leader, exact_time=effort.exact_time, seed=seed)
        if exact is not None:
            pool.append(exact.assignment)
    pool.sort(key=lambda plan: price_of(problem, plan).rank)
    pool.insert(0, local.improve(pool[0], effort.insertions - local.insertions))
    pool += best
    unique = sorted(dict.fromkeys(pool), key=lambda plan: price_of(problem, plan).rank)
    return Found(
        assignment=unique[0],
        priced=price_of(problem, unique[0]),
        seeds=priced,
        plans=plans,
        others=tuple(unique[1:]),
    )


def _inserter(problem: Problem) -> Inserter:
    """Return an inserter for all options; for large problems, only for the cheapest on the mean
    rank.
    """
    inserter = Inserter(problem)
    if inserter.num_rows * problem.num_ranks <= LARGE:
        return inserter
    whole = [[option.shape for option in mine if option.whole] for mine in problem.options]
    order = heaviest_first(bytes_of(problem))
    first = lay_out(problem, narrowed(problem, whole), order).assignment()
    linear = linearized(problem, first)
    cheapest = [
        tuple(cheapest_options(problem, linear, table, first[table].option))
        for table in range(problem.num_tables)
    ]
    return Inserter(problem, tuple(cheapest), most_priced=8)


def _starts(plans: Mapping[str, Assignment], priced: Mapping[str, Priced]) -> list[Assignment]:
    """Return the best seeds with different prices, so that no plan appears under two names."""
    chosen: list[Assignment] = []
    seen: set[tuple[float, float]] = set()
    for name in sorted(plans, key=lambda name: priced[name].rank):
        rank = priced[name].rank
        place = (round(rank[0], 3), round(rank[1], 9))
        if place not in seen:
            seen.add(place)
            chosen.append(plans[name])
        if len(chosen) == STARTS:
            break
    return chosen
