"""New rows with the ids of a set: all of them its test part, with or without labels."""

from collections.abc import Sequence
from pathlib import Path

from sbpflow.data.format.manifest import Manifest, load_manifest
from sbpflow.data.prepare.content import options_like
from sbpflow.data.prepare.machines import Part
from sbpflow.data.prepare.options import PrepareOptions
from sbpflow.data.prepare.prepare import prepare
from sbpflow.data.prepare.remote import InputPath
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
    part: Part | None = None,
) -> Manifest | None:
    """A set in ``output`` of the rows of ``inputs``, with ids and constants of the set ``like``.

    Of that one the manifest and the vocabularies are read, no rows. Raises what ``prepare`` raises,
    and returns what it returns; ``part`` is this machine's of several.
    """
    if output.resolve() == like.resolve():
        raise ConfigError(
            f"--output {output}: is the set of --like, which the new rows would replace; choose "
            "another"
        )
    options = PrepareOptions(
        inputs=tuple(inputs),
        output=output,
        split=SplitRule("test"),
        workers=workers,
        max_bad_fraction=max_bad_fraction,
        overwrite=overwrite,
        part=part or Part(),
        is_encode=True,
    )
    return prepare(options_like(load_manifest(like, "--like"), options))
