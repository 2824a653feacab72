"""Arguments of the commands that start from a checkpoint, and what they name."""

import argparse
from typing import TYPE_CHECKING

from sbpflow.runtime.files.local_path import local_path

if TYPE_CHECKING:
    from sbpflow.checkpoint.read import Checkpoint
    from sbpflow.config.schema import Config


def add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    saved = "a checkpoint, or the folder of a run: its newest good one"
    add("--checkpoint", type=local_path, required=True, metavar="DIR", help=saved)
    own = "the class of a model of your own, which is imported if it is named here"
    add("--model", metavar="package.module:Class", help=own)
    own = "the class of an optimizer of your own for tables, likewise; once for each"
    add("--optimizer", metavar="package.module:Class", action="append", default=[], help=own)
    instead = "in place of the run's, such as data.batch_size=4096"
    add("overrides", nargs="*", metavar="key=value", help=instead)


def saved_run(args: argparse.Namespace) -> "tuple[Checkpoint, Config]":
    """The checkpoint that a command names, and the configuration of its run."""
    from sbpflow.models.registry import MODELS
    from sbpflow.run.saved.saved_model import find_checkpoint, saved_config

    checkpoint = find_checkpoint(args.checkpoint)
    return checkpoint, saved_config(
        checkpoint,
        args.overrides,
        models=MODELS,
        own_model=args.model,
        own_optimizers=args.optimizer,
    )
