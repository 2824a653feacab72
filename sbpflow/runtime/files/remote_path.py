"""Reads and writes files and objects at URLs (s3://, gs://, hdfs://, memory://) through fsspec.

``RemotePath`` has those methods of ``pathlib.Path`` that are used for both local and remote paths.
Objects cannot be renamed, so each object is written as a whole, and a folder's index is written
last to mark the folder as complete. fsspec is imported when a URL is used. Temporary failures are
retried. Messages contain no credentials, and URLs with credentials are accepted only for inputs.
"""

import errno
import io
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from sbpflow.errors import ConfigError, StoreError
from sbpflow.runtime.files.atomic_file import replacing
from sbpflow.runtime.files.local_path import PathError, plain_path

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z].*)?:/")
# Matches only with a password: in abfs://container@account, the part before "@" is not a secret.
_USER = re.compile(r"://[^/\s@:]*:[^/\s@]*@")
_QUERY = re.compile(r"(://[^\s?'\"]*)\?[^\s'\")]*")
_BUFFER_BYTES = 8 << 20
# Maximum number of tries per request, and the time in seconds after which no further try starts.
# Some store libraries also retry internally, so a single try can take minutes.
TRIES, RETRY_S = 5, 60.0
_FIRST_PAUSE_S = 0.2
_FINAL = (PermissionError, NotImplementedError, ValueError, KeyError)
_BUGS = (TypeError, AttributeError, NameError)

Result = TypeVar("Result")


class RemoteStat(NamedTuple):
    """The size of an object, and when it was last modified (seconds since 1970)."""

    st_size: int
    st_mtime: float


class RemotePath:
    """The URL of a file or folder; ``facts`` is its entry in a listing, which makes further
    requests unnecessary.

    ``str`` replaces a user with a password, and a query, with ``***``: they may be credentials.
    """

    __slots__ = ("facts", "url")

    def __init__(self, url: str, facts: Mapping[str, Any] | None = None) -> None:
        self.url = url
        self.facts = facts

    def __str__(self) -> str:
        return redacted(self.url)

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self.url == other.url

    def __lt__(self, other: "RemotePath") -> bool:
        return self.url < other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self.url.rstrip('/')}/{name}")

    @property
    def _pure(self) -> PurePosixPath:
        return PurePosixPath(_QUERY.sub(r"\1", self.url))

    @property
    def name(self) -> str:
        """Return the last part of the URL."""
        return self._pure.name

    @property
    def suffix(self) -> str:
        """Return the suffix of the name, including the dot."""
        return self._pure.suffix

    @property
    def stem(self) -> str:
        """Return the name without its suffix."""
        return self._pure.stem

    @property
    def parent(self) -> "RemotePath":
        """Return the URL of the folder that contains this file or folder."""
        return RemotePath(self.url.rstrip("/").rpartition("/")[0])

    def resolve(self) -> "RemotePath":
        """Return this path: URLs are absolute."""
        return self

    absolute = resolve

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing, because a folder exists if it contains objects."""

    def fresh(self) -> "RemotePath":
        """Return the same URL without cached facts, so that the next access sends a request."""
        return RemotePath(self.url)

    def info(self) -> Mapping[str, Any]:
        """Return the object store's metadata of the file, from ``facts`` or by a request.

        Raises FileNotFoundError or StoreError.
        """
        if self.facts is None:
            self.facts = self._call("found", lambda system, path: system.info(path))
        return self.facts

    def exists(self) -> bool:
        """Return whether a file or folder exists at the URL."""
        try:
            self.info()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Return whether this is a folder, that is, whether objects exist below it."""
        return self.exists() and self.info()["type"] == "directory"

    def is_file(self) -> bool:
        """Return whether this is a file."""
        return self.exists() and self.info()["type"] == "file"

    @property
    def num_bytes(self) -> int:
        """Return the size of the file in bytes."""
        return int(self.info()["size"] or 0)

    @property
    def state(self) -> object:
        """Return a value that changes when the file is written, or None if none is known."""
        names = ("ETag", "etag", "md5Hash", "generation", "LastModified", "last_modified", "mtime")
        info = self.info()
        value = next((info[name] for name in (*names, "created") if info.get(name)), None)
        if isinstance(value, datetime):  # in a listing, this time may be a number
            value = value.timestamp()
        if isinstance(value, str):  # some servers quote the ETag in only one kind of response
            return value.strip('"')
        return f"{value:.6f}" if isinstance(value, float) else value

    def stat(self) -> RemoteStat:
        """Return the size and modification time of the file; the time is 0 if unknown."""
        info = self.info()
        names = ("LastModified", "last_modified", "mtime", "updated", "created")
        time_of = next((info[name] for name in names if info.get(name)), 0.0)
        if isinstance(time_of, datetime):
            time_of = time_of.timestamp()
        return RemoteStat(self.num_bytes, time_of if isinstance(time_of, float | int) else 0.0)

    def iterdir(self) -> Iterator["RemotePath"]:
        """Yield the folder's entries with their facts."""

        def listed(system: Any, path: str) -> list[Mapping[str, Any]]:  # noqa: ANN401
            system.invalidate_cache()
            return system.ls(path, detail=True)

        for entry in self._call("listed", listed):
            name = str(entry["name"]).rstrip("/").rpartition("/")[2]
            if name and name != self.name:
                yield RemotePath((self / name).url, entry)

    def sizes(self) -> dict[str, int]:
        """Return {relative name: size in bytes} for all files below this folder."""

        def found(system: Any, path: str) -> dict[str, int]:  # noqa: ANN401
            system.invalidate_cache()
            start = len(path.rstrip("/")) + 1
            entries = system.find(path, detail=True).items()
            return {str(name)[start:]: int(entry["size"] or 0) for name, entry in entries}

        try:
            return self._call("listed", found)
        except FileNotFoundError:
            return {}

    def read_bytes(self) -> bytes:
        """Return the content of the file."""
        return self._call("read", lambda system, path: system.cat_file(path))

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop), all of which must exist."""

        def read(system: Any, path: str) -> bytes:  # noqa: ANN401
            data = system.cat_file(path, start=start, end=stop)
            if len(data) != stop - start:
                raise OSError(errno.EIO, f"got {len(data):,} bytes instead of {stop - start:,}")
            return data

        return self._call("read", read) if stop > start else b""

    def open(self, mode: str) -> IO[bytes]:
        """Open the file for sequential reading; use ``read`` for random access."""
        if mode != "rb":
            raise ValueError(f"open: a URL can be opened only with mode 'rb', got {mode!r}")
        return io.BufferedReader(_Reader(self), _BUFFER_BYTES)

    def write_bytes(self, data: bytes) -> None:
        """Write the file in one request, so that readers see either the new or the old content."""
        self._call("written", lambda system, path: system.pipe_file(path, data))
        self.facts = None

    def upload(self, file: int, wrote: Callable[[], None] = lambda: None) -> None:
        """Upload an open local file, in parts if it is large; call ``wrote`` after each part."""

        def write(system: Any, path: str) -> None:  # noqa: ANN401
            at, out = 0, system.open(path, "wb")
            try:
                while data := os.pread(file, _BUFFER_BYTES, at):
                    out.write(data)
                    at += len(data)
                    wrote()
            except BaseException:
                # Discard the upload: closing the file, even by garbage collection, completes it.
                if hasattr(out, "discard"):
                    out.discard()
                out.closed = True
                raise
            out.close()

        self._call("written", write)
        self.facts = None
        if self.num_bytes != (expected := os.fstat(file).st_size):
            raise StoreError(f"{self} has {self.num_bytes:,} bytes instead of {expected:,}")

    def download(self, target: Path) -> None:
        """Write the content of the file to ``target``, replacing any existing file."""
        self._call("read", lambda system, path: system.get_file(path, str(target)))

    def fetch(self, target: Path) -> None:
        """Download the file. ``target`` changes only after a complete download."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as partial:
            self.download(partial)

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Remove the file."""
        try:
            self._call("removed", lambda system, path: system.rm_file(path))
        except FileNotFoundError:
            if not missing_ok:
                raise
        self.facts = None

    def remove_tree(self, *, first: str | None = None) -> None:
        """Remove all files below this folder, starting with the file named ``first``."""
        names = sorted(self.sizes(), key=lambda name: (name != first, name))
        for name in names:
            (self / name).unlink(missing_ok=True)

    def _find(self) -> tuple[Any, str]:
        """Return the URL's file system, and the path on this file system."""
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            text = f"{self} needs the package fsspec, which is not installed"
            raise ConfigError(f"{text}; run `pip install fsspec`") from error
        try:
            return url_to_fs(self.url, use_listings_cache=False)
        except ImportError as error:  # fsspec's message names the package for the URL scheme
            raise ConfigError(f"{self}: {error}") from error
        except ValueError as error:
            reason = redacted(str(error))
            raise ConfigError(f"{self}: {reason}; use a URL that fsspec can read") from None

    def _call(self, verb: str, function: Callable[[Any, str], Result]) -> Result:
        """Return the result of a request; retry temporary failures.

        Raises FileNotFoundError, or a StoreError that gives the reason.
        """
        system, path = self._find()
        start, pause_s = time.monotonic(), _FIRST_PAUSE_S
        for number in range(1, TRIES + 1):
            try:
                return function(system, path)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                text = "no such file or folder"
                raise FileNotFoundError(errno.ENOENT, text, str(self)) from None
            except _BUGS:
                raise
            except Exception as error:  # noqa: BLE001 (libraries of stores have their own classes)
                spent_s = time.monotonic() - start
                is_final = isinstance(error, _FINAL) or "Credentials" in type(error).__name__
                if is_final or number == TRIES or spent_s > RETRY_S:
                    tries = f"{number} tries in {spent_s:.0f} s" if number > 1 else "1 try"
                    # ``from None`` hides the library's error, which may contain a signed URL.
                    text = f"{self} cannot be {verb} ({tries}: {_reason(error)})"
                    raise StoreError(text) from None
            time.sleep(pause_s)
            pause_s *= 2
        raise RuntimeError("not reached")


class _Reader(io.RawIOBase):
    """Reads a remote file in order, one request per buffer."""

    def __init__(self, path: RemotePath) -> None:
        self._path, self._at = path, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position and return it."""
        starts = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._path.num_bytes}
        self._at = starts[whence] + offset
        return self._at

    def tell(self) -> int:
        """Return the position in bytes."""
        return self._at

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401
        """Read the next bytes with one request; return the number of bytes read."""
        stop = min(self._at + len(buffer), self._path.num_bytes)
        data = self._path.read(self._at, stop)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


AnyPath = Path | RemotePath


def any_path(given: str | AnyPath) -> AnyPath:
    """Return a local path, or the URL of a folder or file without credentials.

    Raises PathError for other text. A ``file://`` URL becomes a local path.
    """
    if isinstance(given, RemotePath):
        return given
    text = str(given).strip()
    if not _URL.match(text):
        return plain_path(str(given))
    if (path := _file_path(text)) is not None:
        return path
    shown, (scheme, _, rest) = redacted(text), text.partition(":/")
    if not rest.startswith("/"):
        raise PathError(
            f"{shown!r} is a URL with one slash instead of two, as Path writes it; use "
            f"{scheme}://.. as a string, or an absolute path for a local folder of that name"
        )
    if "::" in scheme:
        raise PathError(
            f"{shown!r} is a chain of URLs, which is not supported; use a single URL, such as "
            "s3://bucket/set"
        )
    if shown != text:
        raise PathError(
            f"{shown!r} contains a password or a query, which would be stored with the run; pass "
            "credentials in the environment or in fsspec's configuration, and use a URL such as "
            "s3://bucket/set"
        )
    return RemotePath(text.rstrip("/"))


def input_path(text: str) -> AnyPath:
    """Parse the path or URL of input rows. A ``file://`` URL becomes a local path. Raises PathError
    for text that is not a valid path.
    """
    if "://" not in text or not _URL.match(text):
        return plain_path(text)
    path = _file_path(text)
    return RemotePath(text.rstrip("/")) if path is None else path


def _file_path(text: str) -> Path | None:
    parts = urlsplit(text)
    if parts.scheme == "file" and text.startswith("file://") and parts.netloc in ("", "localhost"):
        return plain_path(unquote(parts.path))
    return None


def redacted(text: str) -> str:
    """Return text with passwords, their users, and queries in its URLs replaced with ``***``."""
    return _QUERY.sub(r"\1?***", _USER.sub("://***@", text))


def _reason(error: Exception) -> str:
    text = redacted(str(error)) or "no reason given"
    return f"{text[:300]} ({type(error).__name__})"
