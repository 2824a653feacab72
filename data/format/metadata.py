"""Copy a set's manifest and vocabularies, which a run needs to encode new rows."""

import re
import shutil

from sbpflow.data.format.manifest import MANIFEST, Manifest
from sbpflow.data.format.manifest_check import VOCABULARY_FOLDER
from sbpflow.data.format.vocabulary import fetch_vocabularies, vocabulary_files
from sbpflow.errors import ConfigError, DataError
from sbpflow.runtime.files.own_files import other_file
from sbpflow.runtime.files.remote_path import AnyPath, RemotePath

_COPIED = re.compile(f"{re.escape(MANIFEST)}|{VOCABULARY_FOLDER}")


def check_metadata_folder(key: str, target: AnyPath) -> None:
    """Raise ConfigError if ``target`` exists but is not a copy that ``copy_metadata`` made: a copy
    has no rows and no other files, except hidden ones, which file managers create.
    """
    if isinstance(target, RemotePath):
        names = [name.partition("/")[0] for name in target.sizes()]
    else:
        names = [path.name for path in target.iterdir()] if target.is_dir() else []
    if other := other_file(names, _COPIED):
        raise ConfigError(
            f"{key}: {target} contains {other}, but a run replaces {target.name}/ in this "
            f"folder with its own files; use another folder, such as {key}={target.parent / 'run'}"
        )


def copy_metadata(manifest: Manifest, target: AnyPath) -> None:
    """Copy the manifest and the vocabularies to ``target``, unless ``target`` already has them.

    A local folder is created atomically; in an object store, the manifest is written last.
    """
    raw = (manifest.path / MANIFEST).read_bytes()
    try:
        existing = target / MANIFEST
        if existing.is_file() and existing.read_bytes() == raw:
            return
        fetch_vocabularies(manifest)
        if isinstance(target, RemotePath):
            for name in vocabulary_files(manifest):
                with (manifest.path / name).open("rb") as file:
                    (target / name).upload(file.fileno())
            existing.write_bytes(raw)
            return
        partial = target.with_name(f".{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        for name in (MANIFEST, *vocabulary_files(manifest)):
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(manifest.path / name, partial / name)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise DataError(
            f"the vocabularies of {manifest.origin} cannot be stored in {target} ({reason}); free "
            "some space, or set another checkpoint.dir"
        ) from error
