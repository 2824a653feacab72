"""Inputs on other file systems, by the URLs that fsspec knows: s3://, gs://, hdfs://, memory://.

Text is read directly from there; ``fetch`` downloads table files.
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
    """A file or folder given by URL, with the part of pathlib.Path's interface that inputs need."""

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return PurePosixPath(self.url).name

    @property
    def suffix(self) -> str:
        """The suffix of the name, with its dot."""
        return PurePosixPath(self.url).suffix

    @property
    def stem(self) -> str:
        """The name without its suffix."""
        return PurePosixPath(self.url).stem

    def _find(self) -> tuple[Any, str]:
        """The file system and the path on it."""
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise ConfigError(
                f"--input {self.url}: needs the package fsspec (`pip install fsspec`)"
            ) from error
        try:
            return url_to_fs(self.url)
        except ImportError as error:  # fsspec names the package that this kind of URL needs
            raise ConfigError(f"--input {self.url}: {error}") from error
        except ValueError as error:
            raise ConfigError(
                f"--input {self.url}: {error}; use a URL that fsspec reads"
            ) from error

    def is_dir(self) -> bool:
        """Whether it is a folder."""
        system, path = self._find()
        return system.isdir(path)

    def is_file(self) -> bool:
        """Whether it is a file."""
        system, path = self._find()
        return system.isfile(path)

    def iterdir(self) -> Iterator["RemotePath"]:
        """The entries of the folder."""
        system, path = self._find()
        for inside in system.ls(path, detail=False):
            yield RemotePath(system.unstrip_protocol(inside))

    def open(self, mode: str) -> IO[bytes]:
        """Open the file."""
        system, path = self._find()
        return system.open(path, mode)

    @property
    def num_bytes(self) -> int:
        """Size of the file in bytes."""
        system, path = self._find()
        return system.size(path)

    @property
    def version(self) -> str:
        """A value that changes with the file, if its file system can tell."""
        system, path = self._find()
        return system.ukey(path)

    @property
    def written(self) -> object:
        """When the file was last written; None if its file system does not say."""
        system, path = self._find()
        system.invalidate_cache()
        try:
            return system.modified(path)
        except NotImplementedError:
            return None

    def fetch(self, target: Path) -> None:
        """Download the file; ``target`` appears only when it is complete."""
        system, path = self._find()
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".partial")
        system.get_file(path, str(partial))
        os.replace(partial, target)


InputPath = Path | RemotePath


def input_path(text: str) -> InputPath:
    """Parse a path or URL; a ``file://`` URL is a path on this machine.

    PathError for text that is not a valid path.
    """
    if not _URL.match(text):
        return plain_path(text)
    parts = urlsplit(text)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return plain_path(unquote(parts.path))
    return RemotePath(text.rstrip("/"))


def identity(path: InputPath) -> tuple[object, ...]:
    """A value that is equal for two names of the same file."""
    if isinstance(path, RemotePath):
        return (path.url,)
    stat = path.stat()
    return (stat.st_dev, stat.st_ino)


def version(path: InputPath) -> tuple[object, ...]:
    """The file and its state, which changes when the file is written."""
    if isinstance(path, RemotePath):
        return (path.url, path.version)
    return (str(path.resolve()), path.stat().st_mtime_ns)


def written(path: InputPath) -> tuple[int, object]:
    """Size and modification time, which change when the file is written but not when it is read.

    ``version`` cannot promise the latter on every file system.
    """
    if isinstance(path, RemotePath):
        time = path.written  # drops cached metadata, so it comes before the size
        return path.num_bytes, time
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def size_of(path: InputPath) -> int:
    """Size of the file in bytes."""
    return path.num_bytes if isinstance(path, RemotePath) else path.stat().st_size
