"""A set without its rows: the manifest and the vocabularies, which a run keeps for rows to come."""

import shutil
from pathlib import Path

from sbpflow.data.format.manifest import MANIFEST, Manifest
from sbpflow.data.format.manifest_check import VOCABULARY_FOLDER
from sbpflow.errors import DataError


def copy_metadata(manifest: Manifest, target: Path) -> None:
    """Copy them into the folder ``target``, whole or not at all; one of the same set stays."""
    there = target / MANIFEST
    if there.is_file() and there.read_bytes() == (manifest.path / MANIFEST).read_bytes():
        return
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        shutil.copyfile(manifest.path / MANIFEST, partial / MANIFEST)
        if (manifest.path / VOCABULARY_FOLDER).is_dir():
            shutil.copytree(manifest.path / VOCABULARY_FOLDER, partial / VOCABULARY_FOLDER)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise DataError(
            f"{target}: the vocabularies of {manifest.path} cannot be kept there ({why}); make "
            "room, or give another checkpoint.dir"
        ) from error
