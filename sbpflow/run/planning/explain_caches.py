"""Describes the cached tables of a run: slots, memory, and rows fetched per step."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sbpflow.embedding.cache.slot_planner import planning_bytes
from sbpflow.run.planning.cache_forecast import Forecast, cached_stacks, record_bytes
from sbpflow.run.planning.plan import RunPlan
from sbpflow.run.planning.text import columns, format_size


def describe_caches(plan: RunPlan, forecast: Forecast | None = None) -> list[dict[str, Any]]:
    """Return one JSON-ready dictionary per rank for each stack of cached tables.

    ``forecast`` comes from ``cache_forecast.forecast``, in rows per step.
    """
    found: list[dict[str, Any]] = []
    for _, stack, storage in cached_stacks(plan):
        for rank in stack.holders():
            rows = stack.num_rows(rank)
            slots = storage.num_slots(rows)
            record = record_bytes(plan, stack, rank)
            facts: dict[str, Any] = {
                "rank": rank,
                "tables": [shard.table.name for shard in stack.shards(rank)],
                "kind": storage.kind,
                "rows": rows,
                "slots": slots,
                "slot_bytes": slots * record,
                "outside_bytes": rows * record,
                "planning_bytes": planning_bytes(rows, slots),
            }
            per_step = (forecast or {}).get(stack.tables[0].name, {}).get(rank)
            if per_step is not None:
                facts["rows_per_step"] = dict(per_step)
                facts["read_bytes_per_step"] = round(per_step["read"] * record)
                facts["written_bytes_per_step"] = round(per_step["written"] * record)
            found.append(facts)
    return found


def cache_lines(caches: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the result of ``describe_caches`` as lines of text; [] if there are no caches."""
    if not caches:
        return []
    rows: list[tuple[str, ...]] = [
        ("cached on rank", "tables", "slots", "of rows", "memory", "planning", "stored in")
    ]
    lines: list[str] = []
    for cache in caches:
        first, *others = cache["tables"]
        name = f"{first} + {len(others)}" if others else first
        sizes = (format_size(cache[key]) for key in ("slot_bytes", "planning_bytes"))
        outside = f"{cache['kind']}, {format_size(cache['outside_bytes'])}"
        counts = (f"{cache['slots']:,}", f"{cache['rows']:,}")
        rows.append((str(cache["rank"]), name, *counts, *sizes, outside))
        if "rows_per_step" in cache:
            lines.append(_forecast_line(cache, name))
    on_servers = sum(cache["outside_bytes"] for cache in caches if cache["kind"] == "servers")
    if on_servers:
        lines.append(f"embedding servers: {format_size(on_servers)} in total, divided equally")
    return ["", *columns(rows), *lines]


def _forecast_line(cache: Mapping[str, Any], name: str) -> str:
    rows = cache["rows_per_step"]
    read, written = (format_size(cache[f"{key}_bytes_per_step"]) for key in ("read", "written"))
    return (
        f"rank {cache['rank']}, {name}: a batch has {rows['unique']:,.0f} distinct rows; "
        f"{rows['fetched']:,.0f} of them are fetched, of which {rows['read']:,.0f} are read from "
        f"storage ({read}); {rows['written']:,.0f} rows are written ({written}); at one batch "
        f"per second, {_rates(cache)}"
    )


def rate_lines(
    caches: Sequence[Mapping[str, Any]], batches_per_s: float, folder: Path
) -> list[str]:
    """Return the rates that the storage must sustain at the speed of the run in ``folder``."""
    lines = [f"at {batches_per_s:.3g} batches/s, the median of the run in {folder}:"]
    for cache in caches:
        if "rows_per_step" in cache:
            rates = _rates(cache, batches_per_s)
            lines.append(f"rank {cache['rank']}, {cache['tables'][0]}: {rates}")
    return lines


def _rates(cache: Mapping[str, Any], batches_per_s: float = 1.0) -> str:
    sizes = [batches_per_s * cache[f"{key}_bytes_per_step"] for key in ("read", "written")]
    return (
        f"the storage must sustain {format_size(max(sizes))}/s, or {format_size(sum(sizes))}/s if "
        "reads and writes share a link"
    )
