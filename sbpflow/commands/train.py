"""``sbpflow train``: train a model on a prepared set.

This file only connects the configuration, the data, the model, and the training loop.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sbpflow.runtime.files.local_path import local_path
from sbpflow.runtime.processes.garbage import collecting_later
from sbpflow.runtime.processes.launch import ArgumentParser
from sbpflow.runtime.processes.start_ranks import start_ranks

if TYPE_CHECKING:
    from sbpflow.config.schema import Config
    from sbpflow.data import Manifest, RowLoader
    from sbpflow.planner.for_run import PlannedRun
    from sbpflow.run.execution.job import Job
    from sbpflow.run.model.spec import ModelSpec
    from sbpflow.run.planning.plan import RunPlan
    from sbpflow.run.saved.resume import DataFacts, Resumed
    from sbpflow.runtime.ranks.topology import Topology
    from sbpflow.runtime.ranks.world import World
    from sbpflow.training.loop import Reporter
    from sbpflow.training.report import Report

_DESCRIPTION = "Train a model on a prepared set."


def train(argv: Sequence[str]) -> int:
    """Train on ``-n`` ranks on this machine or, without ``-n``, as one rank in this process."""
    parser = config_parser("sbpflow train", _DESCRIPTION)
    ranks_help = (
        "number of processes to start on this machine (default: one, or the number set by torchrun)"
    )
    parser.add_argument("-n", "--ranks", type=int, metavar="N", help=ranks_help)
    servers_help = "embedding servers to start on this machine (parallel.storage, kind: servers)"
    parser.add_argument("--servers", type=int, metavar="M", help=servers_help)
    args = parser.parse_intermixed_args(argv)
    words = ["train", "--config", str(args.config)]
    if args.servers is not None:
        from sbpflow.commands.local_servers import local_servers

        with local_servers(args.config, args.overrides, args.servers) as overrides:
            ranks = 1 if args.ranks is None else args.ranks
            return start_ranks([*words, *overrides], ranks, "-n")
    if args.ranks is None:
        return run_rank(args.config, args.overrides)
    return start_ranks([*words, *args.overrides], args.ranks, "-n")


def main(argv: Sequence[str] | None = None, *, prog: str = "sbpflow train") -> int:
    """Train as one rank, from the command line to the final scores."""
    args = config_parser(prog, _DESCRIPTION).parse_intermixed_args(argv)
    return run_rank(args.config, args.overrides)


def config_parser(prog: str, description: str) -> ArgumentParser:
    """Return a parser for ``--config`` and ``key=value`` overrides."""
    parser = ArgumentParser(prog=prog, description=description)
    parser.add_argument(
        "--config", type=local_path, required=True, help="a YAML file, such as configs/scheme1.yaml"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as data.path=DIR")
    return parser


def run_rank(
    path: str | Path, overrides: Sequence[str], tracker: "Callable[[int], Reporter] | None" = None
) -> int:
    """Train with the configuration at ``path`` and ``key=value`` overrides.

    ``tracker(rank)`` returns an additional reporter, which receives the run's events on every rank.
    """
    # torch is imported here so that ``--help`` is fast and ``run_main`` can report a broken
    # installation.
    with collecting_later() as collect:
        from sbpflow.config.load import load_config
        from sbpflow.models.registry import MODELS
        from sbpflow.runtime.compute.malloc import keep_freed_memory
        from sbpflow.training.report import setup_logging

        keep_freed_memory()
        config = load_config(path, overrides, models=MODELS)
        train_config(config, tracker, joined=setup_logging, ready=collect)
    return 0


def train_config(
    config: "Config",
    tracker: "Callable[[int], Reporter] | None" = None,
    *,
    joined: Callable[[int], None] = lambda _: None,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Train as one rank; the environment variables describe the world.

    ``joined(rank)`` is called once all ranks have joined, and ``ready()`` before the first step. A
    single-process run closes everything at its end, even after an error.
    """
    from sbpflow.checkpoint.folder import DATA_FOLDER
    from sbpflow.checkpoint.read import open_checkpoint
    from sbpflow.commands.follow import check_output
    from sbpflow.config.checks import check_rows, data_path
    from sbpflow.data import fields_of, load_manifest
    from sbpflow.data.format.metadata import check_metadata_folder
    from sbpflow.run.execution.job import build_job
    from sbpflow.run.execution.predict import on_rank_0, together
    from sbpflow.run.execution.start import closing, join_ranks, lock_run_folder, plan_for_ranks
    from sbpflow.run.planning.build_plan import plan_run
    from sbpflow.run.planning.kernels import with_measured_kernels
    from sbpflow.run.saved import resume
    from sbpflow.run.saved.checkpoints import lock_given_folder
    from sbpflow.run.saved.saved_model import saved_plan
    from sbpflow.runtime.ranks.rendezvous import device_type_of
    from sbpflow.training.dense_part import has_batch_norm
    from sbpflow.training.trackers import check_trackers

    manifest = load_manifest(data_path(config), cache=config.data.cache)
    device_type = device_type_of(config.parallel.device)
    check_trackers(config.train.trackers)

    def make(topology: "Topology") -> "tuple[RunPlan, tuple[ModelSpec, PlannedRun | None]]":
        planned = run_planner(config, manifest, topology.size, device_type, topology)
        spec, plan = plan_run(
            config,
            fields_of(manifest),
            world_size=topology.size,
            device_type=device_type,
            planned=planned.rules if planned else None,
            topology=topology,
        )
        return plan, (spec, planned)

    plan, (spec, planned) = plan_for_ranks(config, device_type, make)
    with closing() as opened:
        boxing = join_ranks(
            config, plan, data_set=f"{manifest.fingerprint[:16]} in {manifest.origin}"
        )
        world = boxing.world
        opened.callback(world.close)
        joined(world.rank)
        opened.callback(lock_run_folder(config, boxing).close)
        if (lock := lock_given_folder(config, boxing)) is not None:
            opened.callback(lock.close)
        copied = resume.checkpoint_dir(config) / DATA_FOLDER
        on_rank_0(boxing, lambda: check_metadata_folder("checkpoint.dir", copied))
        if (export := config.export) is not None:
            folders = config.run.dir, (copied.parent,)
            on_rank_0(boxing, lambda: check_output("export.dir", export.dir, *folders))
        data = facts_of(manifest)
        decision = resume.decide(config, data, boxing)
        # Opening the loaders of a set at a URL downloads its files.
        loaders = together(boxing, _opening(config, manifest, spec, plan, world))
        for loader in loaders.values():
            opened.callback(loader.close)
        newest, request = decision.newest, config.parallel.kernel
        saved = saved_plan(open_checkpoint(newest), plan, request) if newest else None
        plan = saved or with_measured_kernels(plan, request, boxing)
        job = build_job(config, spec, plan, boxing)
        check_rows(config, manifest.splits, batch_norm=has_batch_norm(job.model))
        start = resume.at_cursor(resume.load(decision, job, data, boxing), config, loaders["train"])
        if start.cursor is not None:  # the batch size may differ from that of the checkpoint
            left = manifest.splits["train"] - int(start.cursor["cursor"])
            check_rows(config, {"train": left}, batch_norm=has_batch_norm(job.model))
        run = resume.Resumed(decision, start, data)
        ready()
        _fit(config, manifest, job, loaders, run, planned, tracker, opened)


def _opening(
    config: "Config", manifest: "Manifest", spec: "ModelSpec", plan: "RunPlan", world: "World"
) -> "Callable[[], Mapping[str, RowLoader]]":
    """Return a function that opens the loaders of all splits."""
    from sbpflow.data.read.loaders import open_loaders

    return partial(
        open_loaders,
        manifest,
        config.data,
        world.rank,
        world.size,
        seed=config.run.seed,
        device=world.device,
        crosses=spec.hashed_columns,
        ids_on_host=plan.embeddings.ids_on_host,
    )


def facts_of(manifest: "Manifest") -> "DataFacts":
    """Return the identity of the set, which a resuming run compares with the saved identity."""
    from sbpflow.run.saved.resume import DataFacts

    return DataFacts(
        path=str(manifest.origin),
        fingerprint=manifest.fingerprint,
        content_id=manifest.content_id,
        vocabulary_digest=manifest.vocabulary_digest,
        transforms_digest=manifest.transforms_digest,
        ancestors=tuple(ancestor.digest for ancestor in manifest.ancestors),
    )


def run_planner(
    config: "Config",
    manifest: "Manifest",
    world_size: int,
    device_type: str,
    topology: "Topology | None" = None,
) -> "PlannedRun | None":
    """Plan the tables if ``parallel.plan`` is ``auto``."""
    if config.parallel.plan != "auto":
        return None
    from sbpflow.data import fields_of
    from sbpflow.data.stats import load_stats
    from sbpflow.planner.for_run import plan_tables

    return plan_tables(
        config,
        fields_of(manifest),
        load_stats(manifest),
        manifest.splits["train"],
        world_size=world_size,
        device_type=device_type,
        topology=topology,
    )


def _fit(
    config: "Config",
    manifest: "Manifest",
    job: "Job",
    loaders: "Mapping[str, RowLoader]",
    run: "Resumed",
    planned: "PlannedRun | None",
    tracker: "Callable[[int], Reporter] | None",
    opened: ExitStack,
) -> None:
    """Train, evaluate, and report, starting from the job's current state."""
    from sbpflow.checkpoint.folder import DATA_FOLDER
    from sbpflow.commands.follow import exporting
    from sbpflow.data.format.metadata import copy_metadata
    from sbpflow.run.planning.explain import format_plan
    from sbpflow.run.planning.plan_file import PLAN_FILE, plan_to_json
    from sbpflow.run.saved.checkpoints import Checkpoints
    from sbpflow.runtime.files.run_folder import TABLE_PLAN_FILE
    from sbpflow.training import health
    from sbpflow.training.loop import fit, last_step
    from sbpflow.training.move_times import StepProfiler
    from sbpflow.training.report import Report
    from sbpflow.training.trackers import open_trackers

    boxing, world, traced = job.boxing, job.boxing.world, config.train.profile
    with Report(
        config,
        rank=world.rank,
        num_steps=last_step(config.train, loaders["train"].num_steps, run.start),
        devices=health.device_names(boxing),
        sections={
            "plan": format_plan(job.plan, shards=False),
            **({"planner": planned.summary()} if planned else {}),
        },
        best=(manifest.bayes.auc, manifest.bayes.logloss) if manifest.bayes else None,
        resumed=run.start.going_on,
        trackers=partial(open_trackers, config, run.decision.run),
    ) as report:
        world.barrier()  # wait until rank 0 has moved the files of an earlier run
        report.keep(PLAN_FILE, plan_to_json(job.plan))
        if planned is not None:
            report.keep(TABLE_PLAN_FILE, planned.yaml())
        checkpoints = Checkpoints(
            config,
            job,
            loaders["train"],
            resumed=run,
            metrics_bytes=lambda: report.metrics_bytes,
            keep_set=lambda folder: copy_metadata(manifest, folder / DATA_FOLDER),
        )
        opened.callback(checkpoints.close)
        with exporting(config, run.decision.folder, world.rank):
            result = fit(
                job.trainer,
                loaders,
                config.train,
                boxing=boxing,
                watch=health.LossWatch(boxing, manifest.dense, manifest.dense_ranges),
                reporter=_reporters(config, job, report, tracker, opened),
                checkpoints=checkpoints,
                profiler=StepProfiler(*traced, config.run.dir, world) if traced else None,
            )
            health.check_replicas(job.copies, job.embeddings, boxing)
            notes = {"ids out of range": health.out_of_range_note(job.embeddings, boxing)}
            if planned is not None:
                rows = config.data.batch_size * config.train.accumulate
                ms = 1e3 * rows / result.samples_per_s
                notes |= planned.finished(job.plan, ms, result.timed_steps, boxing)
            report.final(result, notes, health.peak_memory_bytes(boxing))
            checkpoints.finished()


def _reporters(
    config: "Config",
    job: "Job",
    report: "Report",
    tracker: "Callable[[int], Reporter] | None",
    opened: ExitStack,
) -> "Reporter":
    """Combine the run's own reporter, the reporter that compares ranks, the Prometheus endpoint if
    configured, and the user's reporter.
    """
    from sbpflow.training.prometheus import PrometheusReporter
    from sbpflow.training.rank_watch import RankWatch
    from sbpflow.training.reporters import Reporters

    own = [tracker(job.boxing.world.rank)] if tracker else []
    endpoint = PrometheusReporter.of(config, job.boxing)
    if endpoint is None:
        return Reporters([report, RankWatch(job.boxing, report.ranks), *own])
    opened.callback(endpoint.close)
    watch = RankWatch(job.boxing, report.ranks, endpoint.ranks)
    return Reporters([report, watch, endpoint, *own])
