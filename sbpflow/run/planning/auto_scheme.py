"""Chooses the cheapest of several complete plans, for ``parallel.scheme: auto``.

Each candidate places all tables. Tables are not priced one by one, because tables that are
exchanged together share collective calls. ``embedding/plan/price.py`` computes the prices.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from glob import escape

from sbpflow.config.table_rules import TableRule
from sbpflow.embedding.cache.slot_planner import planning_bytes
from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.embedding.plan.id_statistics import IdFrequencies, curve_of_table, ids_per_sample
from sbpflow.embedding.plan.price import Price, price_plan
from sbpflow.embedding.plan.tables import FeatureConfig, TableConfig
from sbpflow.embedding.plan.two_level import SBP as TWO_LEVEL
from sbpflow.errors import PlanError
from sbpflow.run.planning.storage import row_bytes
from sbpflow.run.planning.text import format_size
from sbpflow.runtime.ranks.topology import Topology

Rules = dict[str, TableRule]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A complete plan with its name and price."""

    name: str
    rules: Rules
    price: Price
    plan: EmbeddingPlan


def candidates(
    tables: Sequence[TableConfig],
    features: Sequence[FeatureConfig],
    world_size: int,
    batch_size: int,
    frequencies: Mapping[str, IdFrequencies] | None = None,
    *,
    two_level: bool = False,
    speeds: Sequence[float] | None = None,
) -> dict[str, Rules]:
    """Return the table rules of each candidate plan, by name. ``two_level`` adds plans that
    exchange rows in two hops, within and between hosts. A basic candidate gives all tables the same
    layout where possible, or balances whole tables over the ranks by their ``speeds`` (default: all
    are equal). The other candidates also copy small tables to every rank.
    """
    rows = TableRule(sbp="S(0)", exchange="unique")
    copies = TableRule(sbp="B", exchange="local")

    def copied(table: TableConfig) -> TableRule:  # growing tables cannot be replicated
        return copies if table.growth is None or world_size == 1 else rows

    same: dict[str, Callable[[TableConfig], TableRule]] = {"all B": copied}
    if world_size > 1:
        speeds = speeds or (1.0,) * world_size
        whole = _balanced(tables, features, speeds, batch_size, frequencies or {})
        columns = TableRule(sbp="S(1)", exchange="columns")
        unique_columns = TableRule(sbp="S(1)", exchange="unique")

        def if_wide(rule: TableRule, table: TableConfig) -> TableRule:
            return rule if table.dim >= world_size else whole[table.name]

        same |= {
            "all unique": lambda _: rows,
            "all reduce": lambda _: TableRule(sbp="S(0)", exchange="reduce"),
            "all whole": lambda table: whole[table.name],
            "all S(1)": lambda table: if_wide(columns, table),
            "all S(1), unique": lambda table: if_wide(unique_columns, table),
        }
    if two_level:
        hops = TableRule(sbp=TWO_LEVEL, exchange="unique")
        # The buckets of a growing table might not split evenly over hosts.
        same["all unique, two hops"] = lambda table: hops if table.growth is None else rows
    rules = {
        name: {escape(table.name): rule(table) for table in tables} for name, rule in same.items()
    }
    for limit in (batch_size // (2 * world_size), 2 * batch_size):
        small = [table for table in tables if table.num_rows <= limit and table.growth is None]
        if not 0 < len(small) < len(tables):
            continue
        changed = {escape(table.name): copies for table in small}
        for name in same:
            if name != "all B":
                mixed = f"B up to {limit:,} rows, else {name.removeprefix('all ')}"
                rules[mixed] = rules[name] | changed
    return rules


def _balanced(
    tables: Sequence[TableConfig],
    features: Sequence[FeatureConfig],
    speeds: Sequence[float],
    batch_size: int,
    known: Mapping[str, IdFrequencies],
) -> dict[str, TableRule]:
    """Place whole tables greedily: heaviest first, each on the rank that then finishes first."""
    by_name = {feature.name: feature for feature in features}

    def weight(table: TableConfig) -> float:
        lookups = batch_size * sum(ids_per_sample(by_name[name], known) for name in table.features)
        touched = min(curve_of_table(table, known).touched(lookups), table.num_rows)
        return (lookups + 5 * touched) * (8 + table.dim)

    loads = [0.0] * len(speeds)
    rules: dict[str, TableRule] = {}
    for table in sorted(tables, key=weight, reverse=True):
        load = weight(table)
        after = [(held + load) / speed for held, speed in zip(loads, speeds, strict=True)]
        rank = after.index(min(after))
        loads[rank] += load
        rules[table.name] = TableRule(sbp="B", ranks=(rank,), exchange="columns")
    return rules


def rank_candidates(
    rules: Mapping[str, Rules],
    plan: Callable[[Rules], EmbeddingPlan],
    *,
    batch_size: int,
    topology: Topology,
    frequencies: Mapping[str, IdFrequencies] | None = None,
    accumulate: int = 1,
) -> list[Candidate]:
    """Return the candidates that fit in all ranks' memory, cheapest first; else raise PlanError."""
    limit = math.inf if topology.memory_bytes is None else sum(topology.memory_bytes)
    fitting: list[Candidate] = []
    smallest = math.inf
    equal: dict[tuple[tuple[str, TableRule], ...], list[str]] = {}  # each plan is priced only once
    for name, chosen in rules.items():
        equal.setdefault(tuple(chosen.items()), []).append(name)
    for names in equal.values():
        planned = plan(rules[names[0]])
        size = table_bytes(planned)
        smallest = min(smallest, size)
        if size <= limit:
            price = price_plan(planned, batch_size, topology, frequencies, accumulate)
            fitting += [Candidate(name, rules[name], price, planned) for name in names]
    if not fitting:
        raise PlanError(
            f"parallel.scheme: auto: the tables take at least {format_size(smallest)} with their "
            f"state, but the ranks have {format_size(limit)}; use fewer rows, a smaller "
            "model.embedding_dim, parallel.table_dtype: bfloat16, a cache (parallel.storage), or "
            "more machines with a scheme such as parallel.scheme: row_dedup"
        )
    order = list(rules)
    return sorted(fitting, key=lambda each: (each.price.ms, order.index(each.name)))


def table_bytes(plan: EmbeddingPlan) -> int:
    """Return the total bytes of rows and optimizer state on all ranks; of cached tables, those of
    the slots and, on CPU, of their planning.
    """
    total = 0
    for group in plan.groups:
        for stack in group.stacks:
            for rank in stack.holders():
                for shard in stack.shards(rank):
                    storage = shard.table.storage
                    rows = shard.num_rows if storage is None else storage.num_slots(shard.num_rows)
                    total += rows * row_bytes(
                        shard.width, stack.optimizer, plan.row_dtype, plan.dtype
                    )
                    if storage is not None and plan.world.device_type == "cpu":
                        total += planning_bytes(shard.num_rows, rows)
    return total
