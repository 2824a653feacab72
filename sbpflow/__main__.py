"""``python -m sbpflow explain | report | doctor | predict | export | checkpoint``.

A composition root: it may import every package.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from sbpflow.runtime.launch import ArgumentParser, dispatch, run_main
from sbpflow.runtime.local_path import local_path

if TYPE_CHECKING:
    from data import Manifest
    from sbpflow.checkpoint.read import Checkpoint
    from sbpflow.config.schema import Config
    from sbpflow.run.plain_model import PlainModel
    from sbpflow.run.row_formats import RowFormat
    from sbpflow.runtime.doctor import Finding

_FORMS = "pt2,safetensors"


def _need_checkout(command: str) -> None:
    """ConfigError where the packages beside sbpflow are not to be found."""
    missing = [name for name in ("data", "models") if find_spec(name) is None]
    if missing:
        from sbpflow.errors import ConfigError

        raise ConfigError(
            f"{command} needs {' and '.join(missing)} of the checkout; run it in its folder"
        )


def explain(argv: Sequence[str]) -> int:
    """Print what a run would do, without starting its ranks."""
    parser = ArgumentParser(
        prog="python -m sbpflow explain",
        description="Print tables, layouts, shards, boxing steps, bytes and memory of a run.",
    )
    parser.add_argument(
        "--config", type=local_path, required=True, help="a YAML file, such as configs/scheme1.yaml"
    )
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

    _need_checkout("explain")
    from data import fields_of, load_manifest
    from data.growth import growth_of, growth_text
    from models.registry import MODELS

    if args.world_size < 1:
        raise ConfigError(f"--world-size: {args.world_size} ranks; for example --world-size 2")
    config = load_config(args.config, args.overrides, models=MODELS)
    manifest = load_manifest(data_path(config))
    fields = fields_of(manifest)
    device = config.parallel.device  # a plan for GPUs needs no GPU
    device_type = device_type_of(device) if device == "auto" else device
    planned = None
    if config.parallel.plan == "auto":
        from data.stats import load_stats
        from planner.for_run import plan_tables

        planned = plan_tables(
            config,
            fields,
            load_stats(manifest),
            manifest.splits["train"],
            world_size=args.world_size,
            device_type=device_type,
        ).rules
    _, plan = plan_run(
        config, fields, world_size=args.world_size, device_type=device_type, planned=planned
    )
    plan = with_known_kernels(plan, config.parallel.kernel)
    facts = describe(plan)
    growth = growth_of(manifest, facts["tables"])
    if args.json:
        json.dump(facts | {"growth": growth}, sys.stdout, indent=1)
        print()
    else:
        print("\n\n".join(part for part in (format_plan(plan), growth_text(growth)) if part))
    return 0


def report(argv: Sequence[str]) -> int:
    """Write a page of curves and tables of one or more runs, and say where."""
    parser = ArgumentParser(
        prog="python -m sbpflow report",
        description="Write one HTML file that shows runs side by side and needs no network.",
    )
    parser.add_argument(
        "runs", nargs="+", type=local_path, metavar="RUN", help="folder of a run (its run.dir)"
    )
    parser.add_argument(
        "--output", type=local_path, help="the file; RUN/report.html of the first run"
    )
    args = parser.parse_args(argv)

    from sbpflow.run.report_page import write_report

    print(write_report(args.runs, args.output))
    return 0


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    saved = "a checkpoint, or the folder of a run: its newest good one"
    add("--checkpoint", type=local_path, required=True, metavar="DIR", help=saved)
    own = "the class of a model of your own, which is imported if it is named here"
    add("--model", metavar="package.module:Class", help=own)
    own = "the class of an optimizer of your own for tables, likewise; once for each"
    add("--optimizer", metavar="package.module:Class", action="append", default=[], help=own)
    instead = "in place of the run's, such as data.batch_size=4096"
    add("overrides", nargs="*", metavar="key=value", help=instead)


def _saved_run(args: argparse.Namespace) -> "tuple[Checkpoint, Config]":
    """The checkpoint that a command names, and the configuration of its run."""
    from models.registry import MODELS
    from sbpflow.run.saved_model import find_checkpoint, saved_config

    checkpoint = find_checkpoint(args.checkpoint)
    return checkpoint, saved_config(
        checkpoint,
        args.overrides,
        models=MODELS,
        own_model=args.model,
        own_optimizers=args.optimizer,
    )


def predict(argv: Sequence[str]) -> int:
    """Score rows with a trained model; on several ranks under torchrun."""
    parser = ArgumentParser(
        prog="python -m sbpflow predict",
        description="Score raw rows or a prepared set into a Parquet file.",
    )
    _add_model(parser)
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="raw rows, or one prepared set")
    add("--output", type=local_path, required=True, metavar="FILE", help="such as scores.parquet")
    add("--split", default="test", choices=("train", "val", "test"), help="of a prepared set")
    add("--max-bad-fraction", type=float, default=0.0, help="raw rows that may be left out")
    add("--overwrite", action="store_true", help="replace the file that is there")
    args = parser.parse_intermixed_args(argv)

    _need_checkout("predict")
    from data import fields_of, load_manifest, open_loader
    from data.predictions import Scoring
    from sbpflow.boxing.executor import Boxing
    from sbpflow.checkpoint.folder import data_folder
    from sbpflow.run.build_plan import plan_run
    from sbpflow.run.job import build_job
    from sbpflow.run.kernels import with_measured_kernels
    from sbpflow.run.predict import on_rank_0, predictions
    from sbpflow.run.saved_model import (
        load_values,
        saved_layouts,
        saved_plan,
    )
    from sbpflow.run.start import start_topology, start_world
    from sbpflow.runtime.world import device_type_of, world_size_of_environment
    from sbpflow.training.health import on_all_or_none
    from sbpflow.training.report import setup_logging

    checkpoint, config = _saved_run(args)
    like = load_manifest(data_folder(checkpoint.path))
    scoring = Scoring(args.input, args.output, args.split, like, overwrite=args.overwrite)
    world_size = world_size_of_environment()
    config, planned = saved_layouts(checkpoint, config, world_size)
    device_type = device_type_of(config.parallel.device)
    spec, plan = plan_run(
        config,
        fields_of(like),
        world_size=world_size,
        device_type=device_type,
        planned=planned,
        topology=start_topology(config, device_type),
    )
    world = start_world(config, plan, data_set=f"{scoring} by {checkpoint.path.name}")
    setup_logging(world.rank)
    boxing = Boxing(world)
    on_all_or_none(boxing, lambda: scoring.open(world.rank))
    request = config.parallel.kernel
    kept = saved_plan(checkpoint, plan, request)
    plan = kept or with_measured_kernels(plan, request, boxing)
    job = build_job(config, spec, plan, boxing)
    load_values(job, checkpoint)
    on_rank_0(boxing, lambda: scoring.encode(args.max_bad_fraction))
    manifest = scoring.manifest()
    loader = open_loader(
        manifest,
        split=scoring.split,
        batch_size=config.data.batch_size,
        rank=world.rank,
        world_size=world.size,
        backend=config.data.loader,
        shuffle="none",
        device=world.device,
        crosses=spec.hashed_columns,
    )
    for probabilities, labels in predictions(job.trainer, loader, boxing):
        scoring.write(probabilities, labels)
    loader.close()
    on_all_or_none(boxing, scoring.close)
    world.close()
    return 0


def export(argv: Sequence[str]) -> int:
    """Write a trained model in forms that need no sbpflow."""
    parser = ArgumentParser(
        prog="python -m sbpflow export",
        description="Write a trained model for torch alone, and for programs without torch.",
    )
    _add_model(parser)
    add = parser.add_argument
    add("--output", type=local_path, required=True, metavar="DIR", help="a new folder")
    add("--forms", default=_FORMS, help=f"some of {_FORMS} (default both)")
    add("--rows", default="as_trained", help="of tables: as_trained, float16 or int8")
    add("--score", type=local_path, metavar="SET", help="a labelled set; also with rows as they "
        "were trained, for what fewer bits cost (default: that of the run, if there)")  # fmt: skip
    add("--split", default="test", choices=("train", "val", "test"), help="of --score")
    args = parser.parse_intermixed_args(argv)

    _need_checkout("export")
    from data import fields_of, load_manifest, open_loader
    from data.predictions import check_ids
    from sbpflow.checkpoint.folder import data_folder
    from sbpflow.errors import ConfigError
    from sbpflow.run.build_plan import plan_run
    from sbpflow.run.export import facts_of, parse_forms, parse_rows, score_plain, write_model
    from sbpflow.run.plain_model import plain_model
    from sbpflow.run.saved_model import saved_layouts

    forms, row_format = parse_forms(args.forms), parse_rows(args.rows)
    checkpoint, config = _saved_run(args)
    like = load_manifest(data_folder(checkpoint.path))
    fields = fields_of(like)
    config, planned = saved_layouts(checkpoint, config, 1)
    spec, plan = plan_run(config, fields, world_size=1, device_type="cpu", planned=planned)

    def make(rows: "RowFormat") -> "PlainModel":
        return plain_model(
            spec,
            plan.embeddings,
            checkpoint.tensor,
            saved=checkpoint.tensors,
            num_dense=len(fields.dense),
            seed=config.run.seed,
            row_format=rows,
        )

    def score(
        scored: "Manifest", rows: "RowFormat", model: "PlainModel"
    ) -> dict[str, float | None]:
        loader = open_loader(
            scored,
            split=args.split,
            batch_size=config.data.batch_size,
            backend="memmap",
            shuffle="none",
            crosses=spec.hashed_columns,
        )
        found = score_plain(model, loader.epoch(0))
        loader.close()
        rate = f"AUC {found.auc}, logloss {found.logloss:.6f}"
        print(f"rows {rows}: {rate} ({found.num_rows} rows, {args.split} of {path})")
        return {"auc": found.auc, "logloss": found.logloss}

    path = args.score or config.data.path
    scored = load_manifest(path) if path is not None and path.is_dir() else None
    if scored is None and row_format != "as_trained":
        raise ConfigError(
            f"--score: rows of {row_format} cost some AUC, and {path} is no set to measure it on; "
            "name one with labels"
        )
    model = make(row_format)
    facts = facts_of(checkpoint, like.vocabulary_digest)
    if scored is not None:
        check_ids(scored, like)
        facts["scores"] = {row_format: score(scored, row_format, model)}
        if row_format != "as_trained":
            facts["scores"]["as_trained"] = score(scored, "as_trained", make("as_trained"))
    for file in write_model(args.output, model, facts, forms):
        print(f"{file}: {file.stat().st_size:,} bytes")
    return 0


def checkpoint(argv: Sequence[str]) -> int:
    """List, check, compare and remove checkpoints."""
    parser = ArgumentParser(prog="python -m sbpflow checkpoint", description=checkpoint.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("ls", "one line each"), ("verify", "read and check every byte")):
        one = commands.add_parser(name, help=text)
        one.add_argument(
            "path", type=local_path, help="a checkpoint, a folder of some, or of a run"
        )
    diff = commands.add_parser("diff", help="what two checkpoints do not have in common")
    diff.add_argument("left", type=local_path)
    diff.add_argument("right", type=local_path)
    prune = commands.add_parser("prune", help="remove all but the newest good ones")
    prune.add_argument("path", type=local_path)
    prune.add_argument("--keep", type=int, required=True, help="how many stay")
    prune.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    args = parser.parse_args(argv)

    from sbpflow.checkpoint import commands as run

    good = True
    if args.command == "ls":
        text = run.list_text(args.path)
    elif args.command == "verify":
        text, good = run.verify_text(args.path)
    elif args.command == "diff":
        text, good = run.diff_text(args.left, args.right)
    elif args.command == "prune":
        text = "\n".join(run.prune(args.path, args.keep, dry_run=args.dry_run))
    else:
        raise ValueError(f"checkpoint {args.command}; use ls, verify, diff or prune")
    print(text)
    return 0 if good else 1


def doctor(argv: Sequence[str]) -> int:
    """What of this environment works, on the ranks that it runs on."""
    from sbpflow.runtime import doctor

    def moving(folder: Path) -> "Sequence[Finding]":
        from sbpflow.run.machine_checks import checks  # torch, which may be broken

        return checks(folder)

    return doctor.main(argv, moving)


def main() -> int:
    """Dispatch on the first word."""
    commands = {
        "explain": explain,
        "report": report,
        "doctor": doctor,
        "predict": predict,
        "export": export,
        "checkpoint": checkpoint,
    }
    return dispatch("python -m sbpflow", commands, sys.argv[1:])


if __name__ == "__main__":
    run_main(main)
