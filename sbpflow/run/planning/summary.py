"""Summarizes a plan for ``explain``, and suggests settings that would lower its cost.

``explain.format_plan`` also shows every transfer and the moves of a step.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sbpflow.config.schema import Config
from sbpflow.config.table_rules import TableRule
from sbpflow.embedding.plan.price import Price, price_plan
from sbpflow.errors import ConfigError, PlanError
from sbpflow.run.model.spec import Fields
from sbpflow.run.planning.build_plan import frequencies_of, plan_run
from sbpflow.run.planning.cache_forecast import Forecast
from sbpflow.run.planning.explain import (
    compared_lines,
    describe,
    rank_lines,
    table_lines,
    topology_lines,
)
from sbpflow.run.planning.explain_caches import cache_lines
from sbpflow.run.planning.plan import RunPlan
from sbpflow.run.planning.text import columns, format_size

WIDTH = 120  # target line width; long names may exceed it
NUM_LARGEST = 3
_HELPS = 0.95  # a setting is suggested if it lowers a cost below this share of the plan's cost
_CHANGES = {"scheme": "auto", "comm_dtype": "bfloat16", "table_dtype": "bfloat16"}


def format_summary(
    plan: RunPlan, helps: list[str], *, shards: bool = False, forecast: Forecast | None = None
) -> str:
    """Return one line per table, totals per rank and link, and the largest transfers. ``helps``
    comes from ``what_helps``, and ``forecast`` from ``cache_forecast.forecast``.
    """
    facts = describe(plan, forecast)
    lines = [
        f"{facts['world_size']} ranks, {facts['backend']}, batch {facts['batch_size']:,} rows",
        *topology_lines(facts["topology"]),
        *compared_lines(facts["compared"], width=WIDTH),
        "",
        *table_lines(facts["tables"], shards=shards, reasons=False),
        "",
        *rank_lines(facts["ranks"]),
        f"ids: an upper bound for the {1 + plan.lookahead} batches in the lookahead window; "
        "activations and buffers are not included",
        *cache_lines(facts["caches"]),
        *[_early_line(group) for group in facts["early_rows"] if not group["reason"]],
        *_link_lines(facts),
        *_largest_lines(facts),
        *helps,
    ]
    return "\n".join(lines)


def _early_line(group: Mapping[str, Any]) -> str:
    """Describe how many bytes a group with early rows is expected to send."""
    early, critical = format_size(group["early_bytes"]), format_size(group["critical_bytes"])
    line = f"early rows of {group['group']}: {early} early, {critical} in the step"
    if group["late_reason"]:
        return line
    late, urgent = format_size(group["late_bytes"]), format_size(group["urgent_bytes"])
    return f"{line}; gradients: {urgent} in the step, {late} late"


def _link_lines(facts: Mapping[str, Any]) -> list[str]:
    bound = "" if all(step["exact"] for step in facts["steps"]) else "at most "
    return [
        f"sent {where} in an iteration: {bound}{format_size(link['bytes'])} by all ranks in "
        f"{link['transfers']} transfers, {bound}{link['ms']:.1f} ms if sequential"
        for where, link in facts["links"].items()
    ]


def _largest_lines(facts: Mapping[str, Any]) -> list[str]:
    steps = sorted(facts["steps"], key=lambda step: -step["total_bytes"])[:NUM_LARGEST]
    rows = [("largest transfers", "phase", "collective", "bytes", "share")]
    for step in steps:
        if step["total_bytes"]:
            size = format_size(step["total_bytes"])
            share = f"{100 * step['total_bytes'] / facts['bytes_per_iteration']:.0f} %"
            bound = "" if step["exact"] else "<= "
            rows.append((step["id"], step["phase"], step["collective"], bound + size, share))
    return columns(rows) if len(rows) > 1 else []


def what_helps(
    config: Config,
    fields: Fields,
    plan: RunPlan,
    *,
    device_type: str,
    planned: Mapping[str, TableRule] | None = None,
) -> list[str]:
    """Try other settings, one at a time, and return a line for each that lowers a cost by more than
    5 %, or one line if none does. ``planned`` contains the rules that produced ``plan``.
    """
    before, lines = _costs(plan, fields), list[str]()
    for key, value in _CHANGES.items():
        if getattr(config.parallel, key) == value or (key == "scheme" and config.parallel.plan):
            continue
        changed = replace(config, parallel=replace(config.parallel, **{key: value}))
        try:
            _, other = plan_run(
                changed,
                fields,
                world_size=plan.world_size,
                device_type=device_type,
                planned=planned,
                topology=plan.topology,
            )
        except (ConfigError, PlanError):  # not supported by this model, or no plan fits
            continue
        after = _costs(other, fields)
        if any(after[cost] < _HELPS * before[cost] for cost in before):
            texts = [
                f"{cost} {_show(cost, before[cost])} -> {_show(cost, after[cost])}"
                for cost in before
                if abs(after[cost] - before[cost]) > (1 - _HELPS) * before[cost]
            ]
            lines.append(f"would help: parallel.{key}={value}: {', '.join(texts)}")
    tried = ", ".join(f"parallel.{key}={value}" for key, value in _CHANGES.items())
    return lines or [f"none of the settings {tried} would save more than 5 %"]


def expected_traffic(plan: RunPlan, fields: Fields) -> dict[str, int]:
    """Return the expected bytes of ids, rows, and row gradients that the busiest rank sends in an
    iteration, by link.
    """
    price = _price(plan, fields)
    near = price.sent_bytes - price.network_bytes
    return {"on a host": near, "between hosts": price.network_bytes}


def traffic_lines(expected: Mapping[str, int]) -> list[str]:
    """Describe the result of ``expected_traffic``."""
    texts = [f"{format_size(size)} {where}" for where, size in expected.items() if size]
    if not texts:
        return []
    text = " and ".join(texts)
    return [f"expected table traffic per iteration, from id frequencies: {text} per rank"]


def _costs(plan: RunPlan, fields: Fields) -> dict[str, float]:
    facts, price = describe(plan), _price(plan, fields)
    held = [sum(rank.values()) - rank["rank"] - rank["sent_bytes"] for rank in facts["ranks"]]
    return {
        "table ms": price.ms,
        "sent": float(facts["bytes_per_iteration"]),
        "memory": float(max(held)),
    }


def _price(plan: RunPlan, fields: Fields) -> Price:
    frequencies = frequencies_of(fields)
    return price_plan(plan.embeddings, plan.batch_size, plan.topology, frequencies, plan.accumulate)


def _show(cost: str, value: float) -> str:
    return f"{value:.1f}" if cost == "table ms" else format_size(value)
