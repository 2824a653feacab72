"""Encode new rows, with or without labels, as the test split of a new set with the ids of an
existing set.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sbpflow.data.engine import EngineOptions
from sbpflow.data.format.manifest import Manifest, load_manifest
from sbpflow.data.prepare.content import options_like
from sbpflow.data.prepare.options import PrepareOptions
from sbpflow.data.prepare.pieces import with_text_format
from sbpflow.data.prepare.prepare import prepare
from sbpflow.data.prepare.source import check_exists, find_inputs
from sbpflow.data.prepare.split import SplitRule
from sbpflow.runtime.files.remote_path import AnyPath


def encode(
    inputs: Sequence[AnyPath],
    output: Path,
    *,
    like: AnyPath,
    workers: int | None,
    max_bad_fraction: float,
    overwrite: bool = False,
    engine: EngineOptions | None = None,
) -> Manifest:
    """Encode the rows of ``inputs`` into ``output`` with the ids and constants of the set ``like``,
    whose rows are not read.

    Return the same value and raise the same errors as ``prepare``.
    """
    # inputs are checked first, so that an error in ``like`` does not hide a missing input
    check_exists(inputs)
    options = PrepareOptions(
        inputs=tuple(inputs),
        output=output,
        split=SplitRule("test"),
        workers=workers,
        max_bad_fraction=max_bad_fraction,
        overwrite=overwrite,
        engine=engine or EngineOptions(),
        is_encode=True,
    )
    options = options_like(load_manifest(like, "--like"), options)
    schema = with_text_format(find_inputs(inputs, log=False), options.schema)
    return prepare(replace(options, schema=schema))
