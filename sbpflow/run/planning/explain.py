"""Describes a run without starting a rank: tables, shards, steps, bytes, memory.

The description is made from the plan objects that a run executes.
The output is text or, for programs, a dictionary.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from sbpflow.embedding.plan.group_plan import ExchangeStep, GroupPlan, Step
from sbpflow.embedding.plan.table_batch import TableBatch
from sbpflow.embedding.plan.tables import TableConfig, shards_of
from sbpflow.errors import ConfigError
from sbpflow.run.planning.cache_forecast import Forecast
from sbpflow.run.planning.explain_caches import cache_lines, describe_caches
from sbpflow.run.planning.plan import RunPlan
from sbpflow.run.planning.text import MANY, columns, format_size, short_lists
from sbpflow.sbp.sbp import format_nd_sbp
from sbpflow.training.step_schedule import Move

_MAX_RANKS = 65_536


def check_world_size(world_size: int) -> None:
    """Raise ConfigError if ``--ranks`` is out of range."""
    if not 1 <= world_size <= _MAX_RANKS:
        raise ConfigError(
            f"--ranks must be between 1 and {_MAX_RANKS}, got {world_size}; for example, --ranks 2"
        )


def describe(plan: RunPlan, forecast: Forecast | None = None) -> dict[str, Any]:
    """Return the plan as JSON-ready values; ``forecast`` comes from ``cache_forecast.forecast``.

    The byte counts of transfers are for an iteration over ``batch_size`` rows that ends with an
    update; only one in ``accumulate`` iterations does.
    """
    steps = [_describe_step(phase, step, plan.world_size) for phase, step in plan.steps()]
    location = {
        table.name: (group, stack, table)
        for group in plan.embeddings.groups
        for stack in group.stacks
        for table in stack.tables
    }
    tables = [_describe_table(plan, *location[name]) for name in plan.layouts]
    return {
        "world_size": plan.world_size,
        "backend": plan.embeddings.backend,
        "topology": asdict(plan.topology),
        "batch_size": plan.batch_size,
        "accumulate": plan.accumulate,
        "compared": [{"plan": priced.name, "priced_ms": priced.ms} for priced in plan.priced],
        "tables": tables,
        "steps": steps,
        "lookahead": plan.lookahead,
        "schedule": [
            _describe_move(plan, *move)
            for move in plan.schedule.in_flight(plan.transfers(), plan.lookahead)
        ],
        "ranks": _describe_ranks(plan, tables, steps),
        "links": _describe_links(plan, steps),
        "caches": describe_caches(plan, forecast),
        "early_rows": [asdict(group) for group in plan.early_rows],
        "bytes_per_iteration": sum(step["total_bytes"] for step in steps),
    }


def _describe_table(
    plan: RunPlan, group: GroupPlan, stack: TableBatch, table: TableConfig
) -> dict[str, Any]:
    layout, kernel = plan.layouts[table.name], plan.kernels[table.name]
    itemsize = plan.embeddings.dtype.itemsize
    by_row, by_element = stack.optimizer.state_counts
    shards: list[dict[str, Any]] = []
    for shard in shards_of(table, layout.layout):
        rows: float = shard.num_rows
        if table.storage is not None:  # this table's share of its stack's slots
            of_stack = stack.num_rows(shard.rank)
            rows = table.storage.num_slots(of_stack) * shard.num_rows / of_stack
        state = rows * (by_row + by_element * shard.width)
        shards.append(
            {
                "rank": shard.rank,
                "rows": [shard.row_start, shard.row_stop],
                "columns": [shard.col_start, shard.col_stop],
                "table_bytes": round(rows * shard.width * plan.embeddings.row_dtype.itemsize),
                "state_bytes": round(state * itemsize),
            }
        )
    return {
        "name": table.name,
        "features": list(table.features),
        "rows": table.num_rows,
        "dim": table.dim,
        "sbp": format_nd_sbp(layout.layout.nd_sbp),
        "ranks": layout.layout.placement.nested(),
        "exchange": group.exchange,
        "kernel": kernel.name,
        "kernel_reason": kernel.reason,
        "skew": plan.skew.get(table.name),
        "storage": None if table.storage is None else asdict(table.storage),
        "growth": None if table.growth is None else asdict(table.growth),
        "shards": shards,
    }


def _describe_step(phase: str, step: Step, world_size: int) -> dict[str, Any]:
    if isinstance(step, ExchangeStep):
        what, exact = step.what, False
        by_rank, total = [step.bound_bytes] * world_size, step.total_bound_bytes
    else:
        what, exact = f"{step.src} -> {step.dst} {list(step.shape)}", True
        by_rank, total = [step.bytes_sent(rank) for rank in range(world_size)], step.total_bytes
    return {
        "phase": phase,
        "id": step.id,
        "collective": step.collective,
        "what": what,
        "groups": [list(group) for group in step.groups],
        "dtype": str(step.dtype).removeprefix("torch."),
        "exact": exact,
        "bytes_per_rank": by_rank,
        "total_bytes": total,
    }


def _describe_move(plan: RunPlan, move: Move, in_flight: Sequence[str]) -> dict[str, Any]:
    distance = plan.schedule.distance(move, plan.lookahead)
    return {
        "move": move.name,
        "batch": ("this", "next")[distance] if distance < 2 else f"+{distance}",
        "what": move.says,
        "under_way": list(in_flight),
    }


def _describe_links(
    plan: RunPlan, steps: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, float]]:
    """Return the transfers by link; a transfer among ranks on several hosts uses the link between
    hosts.

    ``ms`` is the total time of the transfers if run one after another at the link's speed and
    latency.
    """
    links: dict[str, dict[str, float]] = {}
    for step in steps:
        groups = [group for group in step["groups"] if len(group) > 1]
        if not groups:
            continue
        far = any(not plan.topology.same_host(*group) for group in groups)
        link = min(map(plan.topology.link, groups), key=lambda link: link.gb_per_s)
        facts = links.setdefault(
            "between hosts" if far else "on a host", {"transfers": 0, "bytes": 0, "ms": 0.0}
        )
        facts["transfers"] += 1
        facts["bytes"] += step["total_bytes"]
        facts["ms"] += link.latency_ms + max(step["bytes_per_rank"]) / (1e6 * link.gb_per_s)
    return links


def _describe_ranks(
    plan: RunPlan, tables: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return each rank's memory and the maximum number of bytes that it sends in an iteration."""
    itemsize = plan.embeddings.dtype.itemsize
    window_bytes = plan.window_bytes()
    ranks: dict[int, dict[str, Any]] = {}
    for rank in plan.embeddings.world.ranks:
        dense = sum(p.num_elements(rank) for p in plan.dense)
        dense_state = sum(p.num_elements(rank) * p.state_per_element for p in plan.dense)
        ranks[rank] = {  # the order matches the columns of ``rank_lines``
            "rank": rank,
            "table_bytes": 0,
            "table_state_bytes": 0,
            "dense_bytes": dense * itemsize,
            "dense_gradient_bytes": dense * itemsize,
            "dense_state_bytes": dense_state * itemsize,
            "window_bytes": window_bytes[rank],
            "sent_bytes": sum(step["bytes_per_rank"][rank] for step in steps),
        }
    for table in tables:
        for shard in table["shards"]:
            ranks[shard["rank"]]["table_bytes"] += shard["table_bytes"]
            ranks[shard["rank"]]["table_state_bytes"] += shard["state_bytes"]
    return list(ranks.values())


def plan_digest(plan: RunPlan) -> str:
    """Return a digest of tables, kernels, and transfer order, which must be equal on all ranks."""
    return hashlib.sha256(format_plan(plan).encode()).hexdigest()[:16]


def format_plan(plan: RunPlan, *, shards: bool = True, forecast: Forecast | None = None) -> str:
    """Return the plan as text: tables, transfers, the moves of a step, and memory per rank."""
    facts = describe(plan, forecast)
    lines = [
        f"{facts['world_size']} ranks, {facts['backend']}, batch {facts['batch_size']:,} rows",
        *topology_lines(facts["topology"]),
        *compared_lines(facts["compared"]),
        "",
        *table_lines(facts["tables"], shards=shards),
        "",
        *_step_lines(facts["steps"]),
        _total_line(facts),
        "",
        plan.schedule.describe(plan.transfers(), plan.lookahead),
        "",
        *rank_lines(facts["ranks"]),
        *cache_lines(facts["caches"]),
        *early_lines(facts["early_rows"]),
        f"ids: an upper bound for the {1 + plan.lookahead} batches in the lookahead window "
        f"(train.lookahead {plan.lookahead}); dense features, activations and exchange buffers "
        "are not included",
    ]
    return "\n".join(lines)


def early_lines(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines about the early rows and the late gradients of each group that could send them.
    All byte counts are expected values.
    """
    lines: list[str] = []
    for group in groups:
        early = _shares(group["early_bytes"], group["critical_bytes"], "ahead")
        late = _shares(group["late_bytes"], group["urgent_bytes"], "later")
        lines.append(f"early rows of {group['group']}: {_or_none(group['reason'], early)}")
        if not group["reason"]:
            late = _or_none(group["late_reason"], late)
            lines.append(f"late gradients of {group['group']}: {late}")
    return lines


def _or_none(reason: str, text: str) -> str:
    return f"none: {reason}" if reason else text


def _shares(hidden: int, in_step: int, when: str) -> str:
    share = f"{100 * hidden / max(hidden + in_step, 1):.0f} %"
    return (
        f"{format_size(hidden)} ({share}) is sent one batch {when}, and {format_size(in_step)} in "
        "the step (expected)"
    )


def topology_lines(topology: Mapping[str, Any]) -> list[str]:
    """Describe hosts, links, memory and speeds, each with its source."""
    hosts = topology["hosts"]
    counts = _by_rank([len(host) for host in hosts])
    title = f"{len(hosts)} host{'s' * (len(hosts) > 1)} of {counts} rank{'s' * (counts != '1')}"
    ranks = " ".join(str(list(host)) for host in hosts[:MANY]) + " .." * (len(hosts) > MANY)
    links = [("on a host", topology["host_link"]), ("between hosts", topology["network_link"])]
    link_texts = [
        f"{where} {link['gb_per_s']:g} GB/s, {link['latency_ms']:g} ms per call ({link['source']})"
        for where, link in (links if len(hosts) > 1 else links[:1])
    ]
    memory, source = topology["memory_bytes"], topology["memory_source"]
    speeds = topology["speeds"]
    sizes = "unknown" if memory is None else f"{_by_rank([m / 1e9 for m in memory])} GB ({source})"
    relative = "1 (assumed)" if speeds is None else f"{_by_rank(speeds)} (given)"
    return [
        f"{title} ({topology['hosts_source']}): {short_lists(ranks)}",
        f"links: {'; '.join(link_texts)}",
        f"memory of each rank: {sizes}; relative speed of each rank: {relative}",
    ]


def _by_rank(values: Sequence[float]) -> str:
    """List the values, or show one value if all are equal."""
    shown = [f"{value:.3g}" for value in values]
    if len(set(shown)) == 1:
        return shown[0]
    return ", ".join(shown[:MANY]) + ", .." * (len(shown) > MANY)


def compared_lines(compared: Sequence[Mapping[str, Any]], *, width: int = 400) -> list[str]:
    """Show the plan that ``scheme: auto`` chose, and those of the four next cheapest that fit on
    the line.
    """
    if not compared:
        return []
    first, *others = (f"{each['plan']} {each['priced_ms']:.1f} ms" for each in compared[:5])
    line, join = f"scheme auto, predicted time of tables and their exchange: {first}", "; then "
    for other in others:
        if len(line) + len(join) + len(other) > width:
            break
        line, join = line + join + other, ", "
    return [line]


def _total_line(facts: Mapping[str, Any]) -> str:
    bound = "" if all(step["exact"] for step in facts["steps"]) else "at most "
    size = format_size(facts["bytes_per_iteration"])
    update = ""
    if facts["accumulate"] > 1:
        update = f"; dense gradients and the update phase once per {facts['accumulate']} iterations"
    return f"all steps: {bound}{size} per iteration over all ranks{update}"


def table_lines(
    tables: Sequence[Mapping[str, Any]], *, shards: bool, reasons: bool = True
) -> list[str]:
    """Return one line per table, optionally with lines for its shards and the reason for its
    kernel."""
    rows = [("table", "rows", "dim", "layout", "exchange", "kernel", "")]
    for table in tables:
        layout = f"{table['sbp']}@{table['ranks']}"
        rows.append(
            (
                table["name"],
                f"{table['rows']:,}",
                str(table["dim"]),
                layout,
                table["exchange"],
                table["kernel"],
                table["kernel_reason"] if reasons else "",
            )
        )
        if shards:
            rows += [("", line, "", "", "", "", "") for line in _extents(table["shards"])]
    return columns(rows)


def _extents(shards: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one line per shard or, with many ranks, one line per group of adjacent shards of equal
    size."""
    runs: list[list[Mapping[str, Any]]] = []
    for shard in shards:
        last = runs[-1][-1] if runs else None
        if last is None or len(shards) <= MANY or _amount(shard) != _amount(last):
            runs.append([])
        runs[-1].append(shard)
    return [_extent(run) for run in runs]


def _amount(shard: Mapping[str, Any]) -> tuple[int, int, int]:
    (r0, r1), (c0, c1) = shard["rows"], shard["columns"]
    return r1 - r0, c1 - c0, shard["table_bytes"] + shard["state_bytes"]


def _extent(run: Sequence[Mapping[str, Any]]) -> str:
    """Describe shards of equal size: adjacent shards, or copies of a shard on several ranks."""
    (r0, _), (c0, _) = run[0]["rows"], run[0]["columns"]
    (_, r1), (_, c1) = run[-1]["rows"], run[-1]["columns"]
    num_rows, num_columns, size = _amount(run[0])
    ranks = f"rank {run[0]['rank']}"
    each = ""
    if len(run) > 1:
        ranks = f"ranks {short_lists(str([shard['rank'] for shard in run]))[1:-1]}"
        each = f" each, of {num_rows:,} x {num_columns}"
    return f"  {ranks}: rows {r0:,}..{r1:,} columns {c0}..{c1}, {format_size(size)}{each}"


def _step_lines(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [("step", "phase", "collective", "group", "bytes", "what")]
    for step in steps:
        groups = " ".join(str(group) for group in step["groups"]) or "-"
        size = format_size(step["total_bytes"])
        rows.append(
            (
                step["id"],
                step["phase"],
                step["collective"],
                groups,
                size if step["exact"] else f"<= {size}",
                step["what"],
            )
        )
    return columns(rows)


def rank_lines(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines with the memory and sent bytes of each rank.

    More than eight consecutive ranks with equal values share a line.
    """
    rows: list[tuple[str, ...]] = [
        ("rank", "tables", "their state", "dense", "gradients", "their state", "ids", "sum", "sent")
    ]
    for (*sizes, sent), equal in groupby(ranks, key=lambda rank: [*rank.values()][1:]):
        numbers = [rank["rank"] for rank in equal]
        for few in [numbers] if len(numbers) > MANY else [[number] for number in numbers]:
            name = short_lists(str(few))[1:-1]
            rows.append((name, *(format_size(size) for size in (*sizes, sum(sizes), sent))))
    return columns(rows)
