"""Remote table files (Parquet, Arrow) fetched whole before they are read.

Their reader wants a local file; the copies lie in the work folder and end with it.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sbpflow.data.prepare.remote import RemotePath
from sbpflow.data.prepare.source import Input
from sbpflow.errors import DataError


def fetch_tables(inputs: Sequence[Input], work: Path) -> tuple[Input, ...]:
    """The inputs with remote table files as local copies; what was fetched before stays."""
    return tuple(_fetched(source, work) for source in inputs)


def _fetched(source: Input, work: Path) -> Input:
    if not source.is_table or not isinstance(source.path, RemotePath):
        return source
    target = work / "fetched" / f"{source.order:05d}" / source.path.name
    if not target.exists() or target.stat().st_size != source.num_bytes:
        source.path.fetch(target)
    if target.stat().st_size != source.num_bytes:
        raise DataError(
            f"{source.path}: has {target.stat().st_size} bytes now and had {source.num_bytes}; it "
            "changes while it is read, start again when it is complete"
        )
    return replace(source, path=target)
