"""``sbpflow predict``: score rows with a trained model."""

import argparse
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sbpflow.commands.saved_run import add_model, config_of_run, saved_run
from sbpflow.data.engine import Cached, add_engine
from sbpflow.errors import ConfigError
from sbpflow.runtime.files.json_file import json_digest
from sbpflow.runtime.files.local_path import local_path
from sbpflow.runtime.processes.garbage import collecting_later
from sbpflow.runtime.processes.launch import ArgumentParser

if TYPE_CHECKING:
    from sbpflow.checkpoint.read import Checkpoint
    from sbpflow.config.schema import Config
    from sbpflow.data import RowLoader
    from sbpflow.data.predictions import Scoring
    from sbpflow.data.score_blocks import Block, ScoreBlocks
    from sbpflow.run.execution.job import Job
    from sbpflow.run.model.spec import ModelSpec
    from sbpflow.run.planning.plan import RunPlan
    from sbpflow.runtime.files.remote_path import AnyPath
    from sbpflow.runtime.ranks.topology import Topology

_BLOCK_ROWS, _SPLIT = 1_000_000, "test"


def predict(argv: Sequence[str]) -> int:
    """Score rows with a trained model; under torchrun, score on several ranks."""
    with collecting_later() as collect:
        return _predict(argv, collect)


def _predict(argv: Sequence[str], collect: Callable[[], None]) -> int:
    parser = ArgumentParser(
        prog="sbpflow predict",
        description="Score raw rows or a prepared set; write Parquet, CSV, or TSV.",
    )
    add_model(parser)
    add = parser.add_argument
    add("--input", nargs="+", action="extend", required=True, metavar="PATH",
        help="raw rows, or one prepared set")  # fmt: skip
    text = "a .parquet, .csv or .tsv file, or a folder of Parquet files (no suffix)"
    add("--output", type=local_path, required=True, metavar="PATH", help=text)
    text = f"rows per file if the output is a folder (default {_BLOCK_ROWS:,})"
    add("--block-rows", type=int, metavar="N", help=text)
    text = f"split of a prepared set (default {_SPLIT})"
    add("--split", choices=("train", "val", "test"), help=text)
    text = "fraction of raw rows that may be skipped (default 0)"
    add("--max-bad-fraction", type=float, metavar="F", help=text)
    add("--overwrite", action="store_true", help="replace existing scores")
    add_engine(parser, default="ranks")
    args = parser.parse_intermixed_args(argv)

    from sbpflow.checkpoint.folder import data_folder
    from sbpflow.data import load_manifest
    from sbpflow.data.predictions import Scoring
    from sbpflow.run.execution.start import closing
    from sbpflow.run.saved.saved_model import weights_text
    from sbpflow.training.report import setup_logging

    block_rows: int = _BLOCK_ROWS if args.block_rows is None else args.block_rows
    if block_rows < 1:
        parser.error(f"--block-rows must be 1 or more, got {block_rows}")
    checkpoint, config = saved_run(args)
    like = load_manifest(data_folder(checkpoint.path), cache=config.data.cache)
    split: str = args.split or _SPLIT
    scoring = Scoring(args.input, args.output, split, like, overwrite=args.overwrite)
    scoring.refuse_replaced_inputs()
    names = ("--split", "--max-bad-fraction")
    scoring.refuse_unused(args.split, args.max_bad_fraction, names)
    if args.block_rows is not None and not scoring.is_folder:
        raise ConfigError(
            f"--block-rows needs a folder as the output, but --output is the file "
            f"{scoring.output}; remove --block-rows, or use, for example, --output "
            f"{scoring.output.with_suffix('')}"
        )
    bad: float = args.max_bad_fraction or 0.0
    if args.engine != "ranks":
        collect()
        setup_logging(0)
        _predict_as_tasks(args, checkpoint, config, scoring, block_rows, bad)
        return 0
    blocks = None
    if scoring.is_folder:
        blocks = blocks_of(scoring, block_rows, checkpoint, config)

    def joined(rank: int) -> None:
        setup_logging(rank)
        logging.getLogger(__name__).info("%s", weights_text(checkpoint))

    with closing() as opened:
        job, loader = open_rows(
            checkpoint,
            config,
            scoring,
            opened,
            home=scoring.output.parent,
            bad=bad,
            joined=joined,
            blocks=blocks,
        )
        collect()
        if blocks is None:
            write_scores(job, loader, scoring)
        else:
            write_blocks(job, loader, scoring, blocks, checkpoint)
    return 0


def _predict_as_tasks(
    args: argparse.Namespace,
    checkpoint: "Checkpoint",
    config: "Config",
    scoring: "Scoring",
    block_rows: int,
    bad: float,
) -> None:
    """Encode raw rows, and score blocks as tasks of the engine that ``--engine`` names. Each worker
    loads the model.
    """
    from sbpflow.data.engine import Home, engine_options, open_engine
    from sbpflow.run.saved.saved_model import weights_text
    from sbpflow.runtime.ranks.rendezvous import world_size_of_environment

    engine_name = f"--engine {args.engine}"
    if not scoring.is_folder:
        raise ConfigError(
            f"--output must be a folder (without a suffix) if {engine_name} is used, got "
            f"{scoring.output}; for example, --output {scoring.output.with_suffix('')}"
        )
    if world_size_of_environment() > 1:
        raise ConfigError(
            f"{engine_name} starts its own workers; run it without torchrun, or remove --engine"
        )
    logger = logging.getLogger(__name__)
    logger.info("%s", weights_text(checkpoint))
    blocks, options = blocks_of(scoring, block_rows, checkpoint, config), engine_options(args)
    with ExitStack() as opened:
        open_output(scoring, blocks, bad, opened)
        if not blocks.is_encoded():
            scoring.encode(bad, options, args.workers)
            blocks.encoded()
        manifest = scoring.manifest()
        every = blocks.blocks(manifest)
        todo = [block for block in every if not blocks.is_finished(block)]
        if len(todo) < len(every):
            done = len(every) - len(todo)
            logger.info("%d of %d blocks are already finished", done, len(every))
        home = Home.of(blocks.mark)
        model = _ModelOnWorker(
            checkpoint.path.absolute(),
            *(scoring.rows.absolute(), scoring.split, scoring.output.absolute(), block_rows),
            *(args.model, tuple(args.optimizer), tuple(args.overrides)),
            home.text,
        )
        engine = opened.enter_context(open_engine(options, args.workers))
        engine.home = home
        for _ in engine.run(partial(_score, model=model), todo):
            pass
        blocks.finish(manifest, every, checkpoint.run, checkpoint.step)


@dataclass(frozen=True)
class _ModelOnWorker:
    """The arguments of a worker that scores blocks. All paths must be on shared storage."""

    checkpoint: "AnyPath"
    rows: "AnyPath"
    split: str
    output: Path
    block_rows: int
    model: str | None
    optimizer: tuple[str, ...]
    overrides: tuple[str, ...]
    plan: str
    """Identifies the weights and rows, so that a running worker reloads the model if other weights
    have been saved to the same path.
    """


def _load(model: _ModelOnWorker) -> "tuple[Job, RowLoader, ScoreBlocks, Scoring]":
    """Load a model in a worker, and open the rows and blocks of the prediction."""
    from sbpflow.checkpoint.folder import data_folder
    from sbpflow.data import load_manifest
    from sbpflow.data.predictions import Scoring
    from sbpflow.run.saved.saved_model import find_checkpoint

    checkpoint = find_checkpoint(model.checkpoint)
    names = argparse.Namespace(
        overrides=list(model.overrides), model=model.model, optimizer=list(model.optimizer)
    )
    config = config_of_run(names, checkpoint)
    like = load_manifest(data_folder(checkpoint.path), cache=config.data.cache)
    rows = Scoring([str(model.rows)], model.output, model.split, like, overwrite=True)
    job, loader = open_rows(
        checkpoint, config, rows, ExitStack(), home=model.output.parent, bad=0.0
    )
    return job, loader, blocks_of(rows, model.block_rows, checkpoint, config), rows


_on_worker = Cached(_load)
_one_at_a_time = threading.Lock()


def _score(block: "Block", *, model: _ModelOnWorker) -> None:
    """Score a block and write its file. A Dask worker may run tasks in several threads, which share
    the model and the loader, so the process scores one block at a time.
    """
    from sbpflow.run.execution.predict import predict_ranges

    with _one_at_a_time:
        job, loader, blocks, scoring = _on_worker(model)
        manifest = scoring.manifest()
        num_rows = manifest.splits[scoring.split]
        size = job.plan.batch_size
        scored = predict_ranges(job.trainer, loader, job.boxing, [block], size, num_rows)
        for _, scores, labels in scored:
            blocks.write(manifest, block, scores, labels)


def blocks_of(
    scoring: "Scoring", block_rows: int, checkpoint: "Checkpoint", config: "Config"
) -> "ScoreBlocks":
    """Return the blocks of an output folder for these weights and scoring settings."""
    from sbpflow.checkpoint.format import to_json
    from sbpflow.config.load import config_facts
    from sbpflow.data.score_blocks import ScoreBlocks

    facts = [to_json(checkpoint.index), config_facts(config, ("results",))]
    return ScoreBlocks(scoring, block_rows, json_digest(facts))


def write_blocks(
    job: "Job",
    loader: "RowLoader",
    scoring: "Scoring",
    blocks: "ScoreBlocks",
    checkpoint: "Checkpoint",
) -> None:
    """Score the rows that earlier launches did not score. Every rank writes its own blocks."""
    from sbpflow.run.execution.predict import on_rank_0, predict_ranges, unfinished

    manifest, num_rows = scoring.manifest(), scoring.manifest().splits[scoring.split]
    every = blocks.blocks(manifest)
    todo = unfinished(job.boxing, every, blocks.is_finished)
    scored = predict_ranges(job.trainer, loader, job.boxing, todo, job.plan.batch_size, num_rows)
    for index, scores, labels in scored:
        blocks.write(manifest, todo[index], scores, labels)
    loader.close()
    on_rank_0(job.boxing, lambda: None)  # wait until every rank has written its files
    on_rank_0(job.boxing, lambda: blocks.finish(manifest, every, checkpoint.run, checkpoint.step))


def write_scores(job: "Job", loader: "RowLoader", scoring: "Scoring") -> None:
    """Score the rows and write the output file of ``scoring``."""
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
    home: Path,
    bad: float,
    joined: Callable[[int], None] | None = None,
    blocks: "ScoreBlocks | None" = None,
) -> "tuple[Job, RowLoader]":
    """Load a saved model and open the encoded rows to score, on this rank.

    Files with rows of cached tables are created in ``home``, because the run's folder may have
    moved. ``bad`` is the fraction of raw rows that may be skipped. ``joined(rank)`` is called once
    all ranks have joined. Everything that this function opens is registered with ``opened``, which
    the caller must close. Rank 0 encodes raw rows for all ranks, with all CPUs of its machine.
    """
    from sbpflow.data import fields_of, open_loader
    from sbpflow.run.execution.job import build_job
    from sbpflow.run.execution.predict import answer_of_rank_0, on_rank_0
    from sbpflow.run.execution.start import join_ranks, plan_for_ranks
    from sbpflow.run.planning.build_plan import plan_run
    from sbpflow.run.planning.kernels import with_measured_kernels
    from sbpflow.run.saved.saved_model import load_values, saved_layouts, saved_plan
    from sbpflow.runtime.ranks.rendezvous import device_type_of, world_size_of_environment

    world_size = world_size_of_environment()
    device_type = device_type_of(config.parallel.device)
    config, _ = saved_layouts(checkpoint, config, world_size, device_type)
    config = replace(config, run=replace(config.run, dir=home))
    few = world_size == 1 and scoring.is_small(config.data.batch_size)
    config = _for_few_rows(config) if few else config

    def make(topology: "Topology") -> "tuple[RunPlan, ModelSpec]":
        laid, planned = saved_layouts(checkpoint, config, world_size, device_type, topology.hosts)
        spec, plan = plan_run(
            laid,
            fields_of(scoring.like),
            world_size=world_size,
            device_type=device_type,
            planned=planned,
            topology=topology,
            traced=not few,
        )
        return plan, spec

    plan, spec = plan_for_ranks(config, device_type, make)
    boxing = join_ranks(config, plan, data_set=f"{scoring} by {_weights_of(checkpoint)}")
    world = boxing.world
    opened.callback(world.close)
    if joined is not None:
        joined(world.rank)
    on_rank_0(boxing, lambda: open_output(scoring, blocks, bad, opened))
    if blocks is None:
        on_rank_0(boxing, lambda: scoring.encode(bad))
    elif not answer_of_rank_0(boxing, blocks.is_encoded):
        on_rank_0(boxing, lambda: scoring.encode(bad))
        on_rank_0(boxing, blocks.encoded)
    manifest = scoring.manifest()
    if not few:
        request = config.parallel.kernel
        plan = saved_plan(checkpoint, plan, request) or with_measured_kernels(plan, request, boxing)
    job = build_job(config, spec, plan, boxing, training=False, compiled=not few)
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
        ids_on_host=plan.embeddings.ids_on_host,
        max_maps=0 if blocks else None,  # mapped pages would count as memory of the process
    )
    opened.callback(loader.close)
    return job, loader


def _weights_of(checkpoint: "Checkpoint") -> str:
    """Return the name and the digest of a checkpoint, because machines can have different
    checkpoints at the same local path.
    """
    from sbpflow.checkpoint.format import digest_of

    return f"{checkpoint.path.name} {digest_of(checkpoint.index)[:16]}"


def _for_few_rows(config: "Config") -> "Config":
    """Choose kernels and loaders with a short startup: no compilation and few imports. The choice
    cannot change the scores, because lookups of all kernels return equal results.
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
    """Check that the output can be written.

    The output is locked, and existing files in an output folder must belong to the same prediction.
    """
    from sbpflow.data.prepare.workspace import only_run

    scoring.open()
    if blocks is not None or not scoring.is_folder:  # else a worker of the command with the lock
        opened.enter_context(only_run(scoring.output))
    if blocks is not None:
        rows = scoring.manifest().fingerprint if scoring.is_set else scoring.inputs_digest(bad)
        blocks.open(rows)
