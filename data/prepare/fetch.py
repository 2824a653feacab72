"""Download remote Parquet and Arrow files, because such files can be read only if they are local.

The copies are in the work folder and are removed with it.
"""

from dataclasses import replace
from pathlib import Path

from sbpflow.data.prepare.source import Input
from sbpflow.errors import DataError
from sbpflow.runtime.files.remote_path import RemotePath


def fetch_table(source: Input, work: Path) -> Input:
    """Return ``source`` or, for a remote table file, a local copy. An existing copy is reused."""
    if not source.is_table or not isinstance(source.path, RemotePath):
        return source
    target = work / "fetched" / f"{source.order:05d}" / source.path.name
    if not target.exists() or target.stat().st_size != source.num_bytes:
        source.path.fetch(target)
    if target.stat().st_size != source.num_bytes:
        raise DataError(
            f"{source.path} has {target.stat().st_size} bytes now but had {source.num_bytes} "
            "before; rerun this command after the file has been written completely"
        )
    return replace(source, path=target)
