"""Adds the arguments of commands that start from a checkpoint, and finds the run they name."""

import argparse
from typing import TYPE_CHECKING

from sbpflow.runtime.files.local_path import local_path

if TYPE_CHECKING:
    from sbpflow.checkpoint.read import Checkpoint
    from sbpflow.config.schema import Config


def add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "a checkpoint, or a run folder to use its best checkpoint, or else its newest good one"
    add("--checkpoint", type=local_path, required=True, metavar="DIR", help=text)
    which = parser.add_mutually_exclusive_group()
    for name, text in (("best", "best checkpoint by val"), ("last", "newest good checkpoint")):
        which.add_argument(
            f"--{name}",
            dest="which",
            action="store_const",
            const=name,
            help=f"use the {text}",
        )
    text = "class of a custom model, which is imported only if this option names it"
    add("--model", metavar="package.module:Class", help=text)
    text = "class of a custom table optimizer, imported only if named; repeat for each class"
    add("--optimizer", metavar="package.module:Class", action="append", default=[], help=text)
    text = "override of a key of the run, such as data.batch_size=4096"
    add("overrides", nargs="*", metavar="key=value", help=text)


def saved_run(args: argparse.Namespace) -> "tuple[Checkpoint, Config]":
    """Return the checkpoint that a command names, and the configuration of the checkpoint's run."""
    from sbpflow.models.registry import MODELS
    from sbpflow.run.saved.saved_model import find_checkpoint, saved_config

    checkpoint = find_checkpoint(args.checkpoint, args.which)
    return checkpoint, saved_config(
        checkpoint,
        args.overrides,
        models=MODELS,
        own_model=args.model,
        own_optimizers=args.optimizer,
    )
