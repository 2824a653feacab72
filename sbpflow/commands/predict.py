"""``sbpflow predict``: score rows with a trained model."""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from sbpflow.commands.saved_run import add_model, saved_run
from sbpflow.runtime.files.local_path import local_path
from sbpflow.runtime.processes.launch import ArgumentParser

if TYPE_CHECKING:
    from sbpflow.checkpoint.read import Checkpoint
    from sbpflow.config.schema import Config
    from sbpflow.data import RowLoader
    from sbpflow.data.predictions import Scoring
    from sbpflow.data.score_blocks import ScoreBlocks
    from sbpflow.run.execution.job import Job
    from sbpflow.run.model.spec import ModelSpec
    from sbpflow.run.planning.plan import RunPlan
    from sbpflow.runtime.ranks.topology import Topology

_BLOCK_ROWS = 1_000_000


def predict(argv: Sequence[str]) -> int:
    """Score rows with a trained model; under torchrun, score on several ranks."""
    parser = ArgumentParser(
        prog="sbpflow predict",
        description="Score raw rows or a prepared set; write Parquet, CSV, or TSV.",
    )
    add_model(parser)
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="raw rows, or one prepared set")
    text = "a .parquet, .csv or .tsv file, or a folder of Parquet files (no suffix)"
    add("--output", type=local_path, required=True, metavar="PATH", help=text)
    text = f"rows per file of a folder (default {_BLOCK_ROWS:,})"
    add("--block-rows", type=int, default=_BLOCK_ROWS, metavar="N", help=text)
    add("--split", default="test", choices=("train", "val", "test"), help="split of a prepared set")
    add(
        "--max-bad-fraction",
        type=float,
        default=0.0,
        help="fraction of raw rows that may be skipped",
    )
    add("--overwrite", action="store_true", help="replace existing scores")
    args = parser.parse_intermixed_args(argv)

    from sbpflow.checkpoint.folder import data_folder
    from sbpflow.data import load_manifest
    from sbpflow.data.predictions import Scoring
    from sbpflow.run.execution.start import closing
    from sbpflow.run.saved.saved_model import weights_text
    from sbpflow.training.report import setup_logging

    if args.block_rows < 1:
        parser.error(f"--block-rows: {args.block_rows} must be 1 or more")
    checkpoint, config = saved_run(args)
    like = load_manifest(data_folder(checkpoint.path), cache=config.data.cache)
    scoring = Scoring(args.input, args.output, args.split, like, overwrite=args.overwrite)
    blocks = None
    if scoring.is_folder:
        blocks = blocks_of(scoring, args.block_rows, checkpoint, config)

    def joined(rank: int) -> None:
        setup_logging(rank)
        logging.getLogger(__name__).info("%s", weights_text(checkpoint))

    with closing() as opened:
        job, loader = open_rows(
            checkpoint,
            config,
            scoring,
            opened,
            bad=args.max_bad_fraction,
            joined=joined,
            blocks=blocks,
        )
        if blocks is None:
            write_scores(job, loader, scoring)
        else:
            write_blocks(job, loader, scoring, blocks, checkpoint)
    return 0


def blocks_of(
    scoring: "Scoring", block_rows: int, checkpoint: "Checkpoint", config: "Config"
) -> "ScoreBlocks":
    """Return the blocks of an output folder, identified by the weights and the scoring settings."""
    from sbpflow.checkpoint.format import to_json
    from sbpflow.config.load import config_facts
    from sbpflow.data.score_blocks import ScoreBlocks

    facts = json.dumps([to_json(checkpoint.index), config_facts(config, ("results",))])
    return ScoreBlocks(scoring, block_rows, hashlib.sha256(facts.encode()).hexdigest())


def write_blocks(
    job: "Job",
    loader: "RowLoader",
    scoring: "Scoring",
    blocks: "ScoreBlocks",
    checkpoint: "Checkpoint",
) -> None:
    """Score the rows that earlier starts have not scored; every rank writes its own blocks."""
    from sbpflow.run.execution.predict import on_rank_0, predict_ranges, unfinished

    manifest, num_rows = scoring.manifest(), scoring.manifest().splits[scoring.split]
    every = blocks.blocks(manifest)
    todo = unfinished(job.boxing, every, blocks.is_finished)
    scored = predict_ranges(job.trainer, loader, job.boxing, todo, job.plan.batch_size, num_rows)
    for index, scores, labels in scored:
        blocks.write(manifest, todo[index], scores, labels)
    loader.close()
    on_rank_0(job.boxing, lambda: None)  # every rank has written its files
    on_rank_0(job.boxing, lambda: blocks.finish(manifest, every, checkpoint.run, checkpoint.step))


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
    blocks: "ScoreBlocks | None" = None,
) -> "tuple[Job, RowLoader]":
    """Load a saved model and encode the rows to score, as one rank of the environment.

    ``bad`` is the fraction of raw rows that may be skipped. ``joined(rank)`` is called once all
    ranks have joined. Closing ``opened`` closes everything that this function has opened. With
    ``blocks``, every rank encodes some of the input files.
    """
    from sbpflow.data import fields_of, open_loader
    from sbpflow.run.execution.job import build_job
    from sbpflow.run.execution.predict import on_rank_0, rank_0_says, together
    from sbpflow.run.execution.start import join_ranks, plan_for_ranks
    from sbpflow.run.planning.build_plan import plan_run
    from sbpflow.run.planning.kernels import with_measured_kernels
    from sbpflow.run.saved.saved_model import load_values, saved_layouts, saved_plan
    from sbpflow.runtime.ranks.rendezvous import device_type_of, world_size_of_environment

    world_size = world_size_of_environment()
    config, planned = saved_layouts(checkpoint, config, world_size)
    device_type = device_type_of(config.parallel.device)
    few = world_size == 1 and scoring.is_small(config.data.batch_size)
    config = _for_few_rows(config) if few else config

    def make(topology: "Topology") -> "tuple[RunPlan, ModelSpec]":
        spec, plan = plan_run(
            config,
            fields_of(scoring.like),
            world_size=world_size,
            device_type=device_type,
            planned=planned,
            topology=topology,
            traced=not few,
        )
        return plan, spec

    plan, spec = plan_for_ranks(config, device_type, make)
    boxing = join_ranks(config, plan, data_set=f"{scoring} by {checkpoint.path.name}")
    world = boxing.world
    opened.callback(world.close)
    if joined is not None:
        joined(world.rank)
    on_rank_0(boxing, lambda: open_output(scoring, blocks, bad, opened))
    if blocks is None:
        on_rank_0(boxing, lambda: scoring.encode(bad))
    elif not rank_0_says(boxing, blocks.is_encoded):
        together(boxing, lambda: scoring.encode(bad, world.rank, world.size))
        on_rank_0(boxing, blocks.encoded)
    manifest = scoring.manifest()
    if not few:
        request = config.parallel.kernel
        plan = saved_plan(checkpoint, plan, request) or with_measured_kernels(plan, request, boxing)
    job = build_job(config, spec, plan, boxing, training=False)
    load_values(job, checkpoint)
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
        max_maps=0 if blocks else None,  # mapped pages would count toward the memory of the process
    )
    opened.callback(loader.close)
    return job, loader


def _for_few_rows(config: "Config") -> "Config":
    """Choose the kernels and loaders that start fastest, without compilation and with few imports.

    Lookups of all kernels give equal results.
    """
    parallel, data = config.parallel, config.data
    return replace(
        config,
        parallel=replace(parallel, kernel="torch") if parallel.kernel == "auto" else parallel,
        data=replace(data, loader="memmap") if data.loader == "auto" else data,
    )


def open_output(
    scoring: "Scoring", blocks: "ScoreBlocks | None", bad: float, opened: ExitStack
) -> None:
    """Check that the output can be written. An output folder is locked, and its earlier files are
    compared with this prediction."""
    from sbpflow.data.prepare.workspace import only_run

    scoring.open()
    if blocks is not None:
        opened.enter_context(only_run(scoring.output))
        rows = scoring.manifest().fingerprint if scoring.is_set else scoring.inputs_digest(bad)
        blocks.open(rows)
