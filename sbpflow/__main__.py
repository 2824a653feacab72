"""``python -m sbpflow explain | report | doctor``. A composition root: may import all."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from sbpflow.runtime.launch import ArgumentParser, run_main


def explain(argv: Sequence[str]) -> int:
    """Print what a run would do, without starting its ranks."""
    parser = ArgumentParser(
        prog="python -m sbpflow explain",
        description="Print tables, layouts, shards, boxing steps, bytes and memory of a run.",
    )
    parser.add_argument("--config", required=True, help="a YAML file, such as configs/scheme1.yaml")
    parser.add_argument("--world-size", type=int, required=True, help="number of ranks")
    parser.add_argument("--json", action="store_true", help="the same facts for programs")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as data.path=DIR")
    args = parser.parse_intermixed_args(argv)

    from sbpflow.config.checks import data_path
    from sbpflow.config.load import load_config
    from sbpflow.errors import ConfigError
    from sbpflow.run.build_plan import plan_run
    from sbpflow.run.explain import describe, format_plan
    from sbpflow.run.kernels import with_known_kernels
    from sbpflow.runtime.world import device_type_of

    try:
        from data import fields_of, load_manifest
        from models.registry import MODELS
    except ImportError as error:
        raise ConfigError(
            f"explain needs data and models of the checkout ({error}); run it in its folder"
        ) from error
    if args.world_size < 1:
        raise ConfigError(f"--world-size: {args.world_size} ranks; for example --world-size 2")
    config = load_config(args.config, args.overrides, models=MODELS)
    manifest = load_manifest(data_path(config))
    fields = fields_of(manifest)
    device = config.parallel.device  # a plan for GPUs needs no GPU
    device_type = device_type_of(device) if device == "auto" else device
    _, plan = plan_run(config, fields, world_size=args.world_size, device_type=device_type)
    plan = with_known_kernels(plan, config.parallel.kernel)
    if args.json:
        json.dump(describe(plan), sys.stdout, indent=1)
        print()
    else:
        print(format_plan(plan))
    return 0


def report(argv: Sequence[str]) -> int:
    """Write a page of curves and tables of one or more runs, and say where."""
    parser = ArgumentParser(
        prog="python -m sbpflow report",
        description="Write one HTML file that shows runs side by side and needs no network.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run (its run.dir)")
    parser.add_argument("--output", type=Path, help="the file; RUN/report.html of the first run")
    args = parser.parse_args(argv)

    from sbpflow.run.report_page import write_report

    print(write_report([Path(run) for run in args.runs], args.output))
    return 0


def main() -> int:
    """Dispatch on the first word."""
    from sbpflow.errors import ConfigError
    from sbpflow.runtime import doctor

    commands = {"explain": explain, "report": report, "doctor": doctor.main}
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(f"usage: python -m sbpflow {{{','.join(commands)}}} [-h] ...")
        return 0
    if name not in commands:
        raise ConfigError(f"command {name!r} is not known; use {' or '.join(commands)}")
    return commands[name](sys.argv[2:])


if __name__ == "__main__":
    run_main(main)
