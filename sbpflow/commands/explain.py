"""``sbpflow explain``: show what a run would do, without starting the run."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from sbpflow.commands.train import config_parser, run_planner


def explain(argv: Sequence[str]) -> int:
    """Print what a run would do, without starting its ranks."""
    parser = config_parser(
        "sbpflow explain",
        "Print a run's layouts, totals per rank and link, and settings that would reduce its cost.",
    )
    parser.add_argument("-n", "--ranks", type=int, required=True, help="number of ranks")
    add = parser.add_argument
    add("--shards", action="store_true", help="also print the shards of each table")
    add("--transfers", action="store_true", help="print all transfers and the moves of a step")
    add("--json", action="store_true", help="print everything as JSON")
    args = parser.parse_intermixed_args(argv)

    import torch

    from sbpflow.config.checks import data_path
    from sbpflow.config.load import load_config
    from sbpflow.data import fields_of, load_manifest
    from sbpflow.data.growth import growing_of, growing_text, growth_of, growth_text
    from sbpflow.data.read.loaders import open_loaders
    from sbpflow.models.registry import MODELS
    from sbpflow.run.planning.build_plan import plan_run
    from sbpflow.run.planning.cache_forecast import cached_stacks, forecast
    from sbpflow.run.planning.explain import check_world_size, describe, format_plan
    from sbpflow.run.planning.explain_caches import rate_lines
    from sbpflow.run.planning.kernels import with_known_kernels
    from sbpflow.run.planning.summary import (
        expected_traffic,
        format_summary,
        traffic_lines,
        what_helps,
    )
    from sbpflow.run.report.data import batches_per_s
    from sbpflow.runtime.ranks.rendezvous import device_type_of

    check_world_size(args.ranks)
    config = load_config(args.config, args.overrides, models=MODELS)
    manifest = load_manifest(data_path(config), cache=config.data.cache)
    device = config.parallel.device  # keep "cuda": planning for GPUs needs no GPU
    device_type = device_type_of(device) if device == "auto" else device
    planned = run_planner(config, manifest, args.ranks, device_type)
    fields, rules = fields_of(manifest), planned.rules if planned else None
    spec, plan = plan_run(
        config, fields, world_size=args.ranks, device_type=device_type, planned=rules
    )
    plan = with_known_kernels(plan, config.parallel.kernel)
    rows = None
    if any(cached_stacks(plan)):
        cpu, crosses = torch.device("cpu"), spec.hashed_columns
        loaders = open_loaders(
            manifest, config.data, 0, 1, seed=config.run.seed, device=cpu, crosses=crosses
        )
        rows = forecast(plan, (batch.ids for batch in loaders["train"].epoch(0)))
    facts = describe(plan, rows)
    growth = growth_of(manifest, facts["tables"])
    growing = growing_of(manifest, facts["tables"])
    folder = Path(config.run.dir)
    speed = batches_per_s(folder, plan) if rows else None
    if args.json:
        more = {
            "growth": growth,
            "growing": growing,
            "batches_per_s": speed,
            "expected_bytes": expected_traffic(plan, fields),
        }
        json.dump(facts | more, sys.stdout, indent=1)
        print()
        return 0
    if args.transfers:
        text = format_plan(plan, shards=args.shards, forecast=rows)
    else:
        helps = [
            *traffic_lines(expected_traffic(plan, fields)),
            *what_helps(config, fields, plan, device_type=device_type, planned=rules),
        ]
        text = format_summary(plan, helps, shards=args.shards, forecast=rows)
    rates = "\n".join(rate_lines(facts["caches"], speed, folder)) if speed else ""
    parts = (text, planned and planned.report(), rates, growth_text(growth), growing_text(growing))
    print("\n\n".join(part for part in parts if part))
    return 0
