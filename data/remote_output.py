"""Make a prepared set at a URL: make the set in a local folder, and then upload it.

The local folder's name depends only on the URL, so that repeating the command resumes a killed run
or upload. The folder is removed at the end.
"""

import hashlib
import json
import logging
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from sbpflow.data.format.manifest import MANIFEST, Manifest, load_manifest
from sbpflow.data.format.manifest_check import SET_FILE
from sbpflow.data.prepare.remote import version
from sbpflow.data.prepare.source import check_exists, is_data
from sbpflow.data.prepare.workspace import only_run
from sbpflow.errors import ConfigError, DataError
from sbpflow.runtime.files.cache_dir import cache_dir, make_private
from sbpflow.runtime.files.json_file import parse_json
from sbpflow.runtime.files.remote_path import AnyPath, RemotePath
from sbpflow.runtime.files.upload import check_own_files, upload

_LOG = logging.getLogger(__name__)
_JOURNAL = "uploaded"


def make_remote(
    url: RemotePath,
    words: Sequence[str],
    inputs: Sequence[AnyPath],
    others: Sequence[AnyPath],
    make: Callable[[Path], Manifest | None],
    *,
    overwrite: bool,
) -> Manifest:
    """Make the set at ``url`` and return its manifest.

    ``make`` makes the set in a local folder. ``words`` are the arguments of the command, and
    ``others`` are the files that it reads in addition to the inputs; an upload is resumed only if
    the arguments and all files are the same. Raises ConfigError if a set already exists at the URL,
    unless ``overwrite`` is true, and if the URL contains files that do not belong to a set.
    """
    name = f"{url.name}-{hashlib.sha256(url.url.encode()).hexdigest()[:12]}"
    folder = cache_dir() / "prepare" / name
    with only_run(folder, url):
        if (url / MANIFEST).exists() and not overwrite:
            raise ConfigError(
                f"--output {url}: a set already exists; use --overwrite to replace it"
            )
        check_own_files("--output", url, SET_FILE)
        check_exists(inputs)
        plan = _plan(words, inputs, others)
        make_private(folder)
        _make_and_upload(url, folder, plan, make)
    return load_manifest(url, "--output")


def _make_and_upload(
    url: RemotePath, folder: Path, plan: str, make: Callable[[Path], Manifest | None]
) -> None:
    local, journal = folder / "set", folder / _JOURNAL
    done = _uploaded(local, journal, plan)
    if done is None:
        shutil.rmtree(local, ignore_errors=True)
        journal.unlink(missing_ok=True)
        make(local)
        journal.write_text(json.dumps(plan) + "\n", encoding="ascii")
        done = []
    else:
        _LOG.info("resuming the upload of the set in %s", local)
    _LOG.info("uploading %s to %s", local, url)
    lock = threading.Lock()
    with journal.open("a", encoding="ascii") as file:

        def on_file(name: str) -> None:
            with lock:
                file.write(json.dumps(name) + "\n")
                file.flush()

        upload(local, url, owned=SET_FILE, last=(MANIFEST,), done=done, on_file=on_file)
    shutil.rmtree(folder)


def _plan(words: Sequence[str], inputs: Sequence[AnyPath], others: Sequence[AnyPath]) -> str:
    """Return a digest of the arguments, and of the versions of all files that the command reads."""
    read: list[AnyPath] = []
    for path in (*inputs, *others):
        entries = path.iterdir() if path.is_dir() else [path]
        read += filter(is_data, entries) if path.is_dir() and path in inputs else entries
    files = sorted((*map(str, version(f)), f.stat().st_size) for f in read if f.is_file())
    return hashlib.sha256(json.dumps([list(words), files]).encode()).hexdigest()


def _uploaded(local: Path, journal: Path, plan: str) -> list[str] | None:
    """Return the files of a complete local set that are already uploaded, or None if the local set
    is missing, incomplete, or made by another command or from other files.
    """
    try:
        lines = journal.read_text(encoding="ascii").splitlines()
        load_manifest(local, "--output")
        given, *done = [parse_json(line) for line in lines]
    except (FileNotFoundError, DataError, ValueError):
        return None
    return list(map(str, done)) if given == plan else None
