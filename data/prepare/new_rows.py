"""Encode new rows with the ids of an existing set: all are test rows, with or without labels."""

from collections.abc import Sequence
from pathlib import Path

from sbpflow.data.format.manifest import Manifest, load_manifest
from sbpflow.data.prepare.content import options_like
from sbpflow.data.prepare.machines import MachinePart
from sbpflow.data.prepare.options import PrepareOptions
from sbpflow.data.prepare.prepare import prepare
from sbpflow.data.prepare.remote import InputPath
from sbpflow.data.prepare.source import check_exists
from sbpflow.data.prepare.split import SplitRule
from sbpflow.errors import ConfigError


def encode(
    inputs: Sequence[InputPath],
    output: Path,
    *,
    like: Path,
    workers: int,
    max_bad_fraction: float,
    overwrite: bool = False,
    part: MachinePart | None = None,
) -> Manifest | None:
    """Write the rows of ``inputs`` into ``output`` with the ids and constants of the set ``like``.

    Reads the manifest and the vocabularies of ``like``, but no rows. ``part`` is this machine's
    share of the work. Raises and returns the same as ``prepare``.
    """
    if output.resolve() == like.resolve():
        raise ConfigError(
            f"--output {output}: is the set of --like, which the new rows would replace; choose "
            "another folder"
        )
    check_exists(inputs)  # before the vocabularies of ``like``, which the user may not have named
    options = PrepareOptions(
        inputs=tuple(inputs),
        output=output,
        split=SplitRule("test"),
        workers=workers,
        max_bad_fraction=max_bad_fraction,
        overwrite=overwrite,
        part=part or MachinePart(),
        is_encode=True,
    )
    return prepare(options_like(load_manifest(like, "--like"), options))
