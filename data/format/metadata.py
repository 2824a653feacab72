"""Copy a set's manifest and vocabularies, because a run needs both to encode new rows."""

import shutil
from pathlib import Path

from sbpflow.data.format.manifest import MANIFEST, Manifest
from sbpflow.data.format.manifest_check import VOCABULARY_FOLDER
from sbpflow.errors import DataError


def copy_metadata(manifest: Manifest, target: Path) -> None:
    """Copy manifest and vocabularies to ``target`` atomically, unless they already exist."""
    existing = target / MANIFEST
    if existing.is_file() and existing.read_bytes() == (manifest.path / MANIFEST).read_bytes():
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
        reason = (error.strerror or str(error)).lower()
        raise DataError(
            f"{target}: cannot store the vocabularies of {manifest.path} ({reason}); free some "
            "space, or set another checkpoint.dir"
        ) from error
