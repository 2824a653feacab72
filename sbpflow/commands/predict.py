"""``sbpflow predict``: score rows with a trained model."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from sbpflow.commands.saved_run import add_model, saved_run
from sbpflow.runtime.files.local_path import local_path
from sbpflow.runtime.processes.launch import ArgumentParser

if TYPE_CHECKING:
    from sbpflow.checkpoint.read import Checkpoint
    from sbpflow.config.schema import Config
    from sbpflow.data import RowLoader
    from sbpflow.data.predictions import Scoring
    from sbpflow.run.execution.job import Job
    from sbpflow.run.model.spec import ModelSpec
    from sbpflow.run.planning.plan import RunPlan
    from sbpflow.runtime.ranks.topology import Topology


def predict(argv: Sequence[str]) -> int:
    """Score rows with a trained model; under torchrun, score on several ranks."""
    parser = ArgumentParser(
        prog="sbpflow predict",
        description="Score raw rows or a prepared set; write Parquet, CSV, or TSV.",
    )
    add_model(parser)
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="raw rows, or one prepared set")
    text = "a .parquet, .csv or .tsv file"
    add("--output", type=local_path, required=True, metavar="FILE", help=text)
    add("--split", default="test", choices=("train", "val", "test"), help="split of a prepared set")
    add("--max-bad-fraction", type=float, default=0.0, help="share of raw rows that may be skipped")
    add("--overwrite", action="store_true", help="replace an existing file")
    args = parser.parse_intermixed_args(argv)

    from sbpflow.checkpoint.folder import data_folder
    from sbpflow.data import load_manifest
    from sbpflow.data.predictions import Scoring
    from sbpflow.run.execution.start import closing
    from sbpflow.run.saved.saved_model import weights_text
    from sbpflow.training.report import setup_logging

    checkpoint, config = saved_run(args)
    like = load_manifest(data_folder(checkpoint.path))
    scoring = Scoring(args.input, args.output, args.split, like, overwrite=args.overwrite)

    def joined(rank: int) -> None:
        setup_logging(rank)
        logging.getLogger(__name__).info("%s", weights_text(checkpoint))

    with closing() as opened:
        job, loader = open_rows(
            checkpoint, config, scoring, opened, bad=args.max_bad_fraction, joined=joined
        )
        write_scores(job, loader, scoring)
    return 0


def write_scores(job: "Job", loader: "RowLoader", scoring: "Scoring") -> None:
    """Score the rows and write the file of ``scoring``."""
    from sbpflow.run.execution.predict import on_rank_0, predictions

    for probabilities, labels in predictions(job.trainer, loader, job.boxing):
        scoring.write(probabilities, labels)
    loader.close()
    on_rank_0(job.boxing, scoring.close)


def open_rows(
    checkpoint: "Checkpoint",
    config: "Config",
    scoring: "Scoring",
    opened: ExitStack,
    *,
    bad: float,
    joined: Callable[[int], None] | None = None,
) -> "tuple[Job, RowLoader]":
    """Load a saved model and encode the rows to score, as one rank of the environment.

    ``bad`` is the share of raw rows that may be skipped. ``joined(rank)`` is called once all ranks
    have joined. Closing ``opened`` closes everything that this function has opened.
    """
    from sbpflow.data import fields_of, open_loader
    from sbpflow.run.execution.job import build_job
    from sbpflow.run.execution.predict import on_rank_0
    from sbpflow.run.execution.start import join_ranks, plan_for_ranks
    from sbpflow.run.planning.build_plan import plan_run
    from sbpflow.run.planning.kernels import with_measured_kernels
    from sbpflow.run.saved.saved_model import load_values, saved_layouts, saved_plan
    from sbpflow.runtime.ranks.world import device_type_of, world_size_of_environment

    world_size = world_size_of_environment()
    config, planned = saved_layouts(checkpoint, config, world_size)
    device_type = device_type_of(config.parallel.device)

    def make(topology: "Topology") -> "tuple[RunPlan, ModelSpec]":
        spec, plan = plan_run(
            config,
            fields_of(scoring.like),
            world_size=world_size,
            device_type=device_type,
            planned=planned,
            topology=topology,
        )
        return plan, spec

    plan, spec = plan_for_ranks(config, device_type, make)
    boxing = join_ranks(config, plan, data_set=f"{scoring} by {checkpoint.path.name}")
    world = boxing.world
    opened.callback(world.close)
    if joined is not None:
        joined(world.rank)
    on_rank_0(boxing, scoring.open)
    request = config.parallel.kernel
    plan = saved_plan(checkpoint, plan, request) or with_measured_kernels(plan, request, boxing)
    job = build_job(config, spec, plan, boxing)
    load_values(job, checkpoint)
    on_rank_0(boxing, lambda: scoring.encode(bad))
    loader = open_loader(
        scoring.manifest(),
        split=scoring.split,
        batch_size=config.data.batch_size,
        rank=world.rank,
        world_size=world.size,
        backend=config.data.loader,
        shuffle="none",
        device=world.device,
        crosses=spec.hashed_columns,
    )
    opened.callback(loader.close)
    return job, loader
