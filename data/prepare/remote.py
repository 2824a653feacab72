"""Access inputs on other file systems by fsspec URLs: s3://, gs://, hdfs://, memory://.

Text is read directly from the URL, and ``fetch`` downloads table files.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from sbpflow.errors import ConfigError
from sbpflow.runtime.files.local_path import plain_path

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z].*)?://")


@dataclass(frozen=True, slots=True)
class RemotePath:
    """Represents the URL of a file or folder, with the methods of pathlib.Path that inputs need."""

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """Return the last part of the URL."""
        return PurePosixPath(self.url).name

    @property
    def suffix(self) -> str:
        """Return the suffix of the name, including the dot."""
        return PurePosixPath(self.url).suffix

    @property
    def stem(self) -> str:
        """Return the name without its suffix."""
        return PurePosixPath(self.url).stem

    def _find(self) -> tuple[Any, str]:
        """Return the URL's file system, and the path on this file system."""
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise ConfigError(
                f"--input {self.url} needs the package fsspec; run `pip install fsspec`"
            ) from error
        try:
            return url_to_fs(self.url)
        except ImportError as error:  # the message of fsspec names the package for the URL scheme
            raise ConfigError(f"--input {self.url}: {error}") from error
        except ValueError as error:
            raise ConfigError(
                f"--input {self.url}: {error}; use a URL that fsspec reads"
            ) from error

    def is_dir(self) -> bool:
        """Return True if the path is a folder."""
        system, path = self._find()
        return system.isdir(path)

    def is_file(self) -> bool:
        """Return True if the path is a file."""
        system, path = self._find()
        return system.isfile(path)

    def iterdir(self) -> Iterator["RemotePath"]:
        """Yield the entries of the folder as paths."""
        system, path = self._find()
        for inside in system.ls(path, detail=False):
            yield RemotePath(system.unstrip_protocol(inside))

    def open(self, mode: str) -> IO[bytes]:
        """Open the file in the given mode."""
        system, path = self._find()
        return system.open(path, mode)

    @property
    def num_bytes(self) -> int:
        """Return the size of the file in bytes."""
        system, path = self._find()
        return system.size(path)

    @property
    def version(self) -> str:
        """Return a value that changes when the file changes, if the file system supports such a
        value."""
        system, path = self._find()
        return system.ukey(path)

    @property
    def written(self) -> object:
        """Return the file's modification time, or None if its file system does not report it."""
        system, path = self._find()
        system.invalidate_cache()
        try:
            return system.modified(path)
        except NotImplementedError:
            return None

    def fetch(self, target: Path) -> None:
        """Download the file; ``target`` exists only after a complete download."""
        system, path = self._find()
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".partial")
        system.get_file(path, str(partial))
        os.replace(partial, target)


InputPath = Path | RemotePath


def input_path(text: str) -> InputPath:
    """Parse a path or URL; a ``file://`` URL becomes a local path.

    Raise PathError for text that is not a valid path.
    """
    if not _URL.match(text):
        return plain_path(text)
    parts = urlsplit(text)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return plain_path(unquote(parts.path))
    return RemotePath(text.rstrip("/"))


def identity(path: InputPath) -> tuple[object, ...]:
    """Return a value that is equal for all names of the same file."""
    if isinstance(path, RemotePath):
        return (path.url,)
    stat = path.stat()
    return (stat.st_dev, stat.st_ino)


def version(path: InputPath) -> tuple[object, ...]:
    """Return the file's identity and state; the state changes when the file is written."""
    if isinstance(path, RemotePath):
        return (path.url, path.version)
    return (str(path.resolve()), path.stat().st_mtime_ns)


def written(path: InputPath) -> tuple[int, object]:
    """Return the size and the modification time, which change on writes but not on reads.

    On some file systems, ``version`` may also change when the file is read.
    """
    if isinstance(path, RemotePath):
        time = path.written  # get this before the size, because ``written`` drops cached metadata
        return path.num_bytes, time
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def size_of(path: InputPath) -> int:
    """Return the size of the file in bytes."""
    return path.num_bytes if isinstance(path, RemotePath) else path.stat().st_size
