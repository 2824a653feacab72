"""Defines arguments that name a checkpoint, and finds the checkpoint and its run."""

import argparse
from typing import TYPE_CHECKING, Any

from sbpflow.runtime.files.remote_path import any_path

if TYPE_CHECKING:
    from sbpflow.checkpoint.read import Checkpoint
    from sbpflow.config.schema import Config


def add_model(
    parser: argparse.ArgumentParser, name: str = "--checkpoint", *, required: bool = True
) -> None:
    """Add the arguments that name a checkpoint. ``name`` is an option such as "--checkpoint" or,
    without dashes, a positional argument.
    """
    add = parser.add_argument
    options: dict[str, Any] = {"required": required} if name.startswith("-") else {}
    text = (
        "a checkpoint, or a run folder (its best checkpoint is used, or else its newest valid one)"
    )
    add(name, type=any_path, metavar="DIR", help=text, **options)
    which = parser.add_mutually_exclusive_group()
    for name, text in (("best", "best checkpoint by val"), ("last", "newest valid checkpoint")):
        which.add_argument(
            f"--{name}",
            dest="which",
            action="store_const",
            const=name,
            help=f"use the {text}",
        )
    text = "class of a custom model, which is imported only if this option names it"
    add("--model", metavar="package.module:Class", help=text)
    add_optimizer(parser)
    text = "new value for one of the run's keys, such as data.batch_size=4096"
    add("overrides", nargs="*", metavar="key=value", help=text)


def add_optimizer(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names custom table optimizers."""
    text = (
        "class of a custom table optimizer, which is imported only if this option names it; "
        "repeat for each class"
    )
    parser.add_argument(
        "--optimizer", metavar="package.module:Class", action="append", default=[], help=text
    )


def saved_run(args: argparse.Namespace) -> "tuple[Checkpoint, Config]":
    """Return the checkpoint that a command names, and the configuration of its run."""
    from sbpflow.run.saved.saved_model import find_checkpoint

    checkpoint = find_checkpoint(args.checkpoint, args.which)
    return checkpoint, config_of_run(args, checkpoint)


def config_of_run(args: argparse.Namespace, checkpoint: "Checkpoint") -> "Config":
    """Return the configuration of a checkpoint's run, with the overrides of the command."""
    from sbpflow.models.registry import MODELS
    from sbpflow.run.saved.saved_model import saved_config

    return saved_config(
        checkpoint,
        args.overrides,
        models=MODELS,
        own_model=args.model,
        own_optimizers=args.optimizer,
    )


def own_classes(config: "Config") -> tuple[str | None, tuple[str, ...]]:
    """Return the ``package.module:Class`` names of the custom model and table optimizers."""
    optimizers = [config.optimizer.sparse, *config.optimizer.tables.values()]
    model, names = config.model.name, dict.fromkeys(each.name for each in optimizers)
    return model if ":" in model else None, tuple(name for name in names if ":" in name)
