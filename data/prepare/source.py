"""Find and order the input files, and read their bytes in pieces of whole lines.

Piece k of a plain file consists of the lines that start in bytes [k * size, (k + 1) * size). A
piece of a compressed file, or of text with quotes, consists of the next ``size`` bytes of text and
the rest of the last record. Pieces therefore depend only on the input and ``size``.
"""

import io
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, NamedTuple

from sbpflow.data.prepare.decompress import COMPRESSIONS, decompressed
from sbpflow.data.prepare.remote import identity
from sbpflow.errors import ConfigError, DataError
from sbpflow.runtime.files.local_path import is_utf8
from sbpflow.runtime.files.remote_path import AnyPath, RemotePath

_LOG = logging.getLogger(__name__)
MAX_LINE_BYTES = 1 << 24
_START_BYTES = 1 << 20  # Enough to decompress the first bytes of a file.
_REST_BYTES = 1 << 16  # Read past the end of a remote file's piece to complete its last line.
_MAX_SHOWN = 8
_COMPRESSION_RATIO = 3
"""Ratio of the size of Criteo's text to the size of its .gz files"""
TABLE_SUFFIXES = (".parquet", ".arrow", ".feather", ".ipc")
SUFFIXES = (".tsv", ".txt", ".csv", *COMPRESSIONS, *TABLE_SUFFIXES)
_PARTS = re.compile(r"(day|part)[-_]\d+")
"""Pattern of the names of data files without a suffix; the 1TB logs unpack to day_0 ... day_23"""

_FORMATS = {
    b"PAR1": "is Parquet; rename it to end in .parquet",
    b"\x1f\x8b": "is a gzip file; rename it to end in .gz",
    b"ARROW1": "is an Arrow file; rename it to end in .arrow",
    b"PK\x03\x04": "is a zip archive; unpack it first",
    b"BZh": "is a bzip2 file; rename it to end in .bz2",
    b"\x28\xb5\x2f\xfd": "is a zstd file; rename it to end in .zst",
    b"\xfd7zXZ": "is an xz file; rename it to end in .xz",
    b"\xff\xfe": "is UTF-16 text; convert it with `iconv -f UTF-16 -t UTF-8`",
    b"\xfe\xff": "is UTF-16 text; convert it with `iconv -f UTF-16 -t UTF-8`",
    b"\xef\xbb\xbf": "starts with a byte order mark; remove it with `tail -c +4`",
}
"""The first bytes of files that are not plain text tables, with advice for each format"""


@dataclass(frozen=True, slots=True)
class Input:
    """An input file. ``order`` is the position of the file among the inputs."""

    order: int
    path: AnyPath
    num_bytes: int

    @property
    def is_compressed(self) -> bool:
        """Return True if the suffix denotes compressed text."""
        return self.path.suffix.lower() in COMPRESSIONS

    @property
    def text_bytes(self) -> int:
        """Return the approximate size of the file's text in bytes."""
        return self.num_bytes * (_COMPRESSION_RATIO if self.is_compressed else 1)

    @property
    def is_table(self) -> bool:
        """Return True if the suffix denotes Parquet or Arrow."""
        return self.path.suffix.lower() in TABLE_SUFFIXES


def find_inputs(paths: Sequence[AnyPath], log: bool = True) -> tuple[Input, ...]:
    """Return the files in ``paths`` and, in natural order, the data files in the folders in
    ``paths``.

    Unless ``log`` is False, logs which files in the folders are not read. Raises ConfigError if no
    file is found, a file is given twice, or a format is not supported.
    """
    check_exists(paths)
    files: list[AnyPath] = []
    for path in paths:
        if path.is_dir():
            entries = list(path.iterdir())
            inside = sorted(filter(is_data, entries), key=_natural)
            if log:
                _log_skipped(path, entries, inside)
            if not inside:
                raise ConfigError(
                    f"--input {path}: this folder contains no file whose name ends in one of "
                    f"{', '.join(SUFFIXES)} or looks like day_0; list files with other names "
                    "individually"
                )
            files += inside
        else:
            files.append(path)
    inputs = tuple(Input(i, path, path.stat().st_size) for i, path in enumerate(files))
    known: dict[tuple[object, ...], Input] = {}
    for source in inputs:
        other = known.setdefault(identity(source.path), source)
        if other is not source:
            raise ConfigError(
                f"--input {source.path} is the same file as {other.path}, so its rows would be "
                "duplicated; name each file once"
            )
        if not is_utf8(source.path.name):
            raise ConfigError(
                f"--input {str(source.path)!r}: the name is not UTF-8, so a manifest cannot "
                "contain it; rename the file"
            )
        _check_start(source)
    return inputs


def check_exists(paths: Sequence[AnyPath]) -> None:
    """Raise ConfigError for the first path that does not exist."""
    for path in paths:
        try:
            exists = path.is_file() or path.is_dir()
        except ConfigError as error:  # the package for URLs of this scheme is not installed
            raise ConfigError(f"--input {error}") from error
        if not exists:
            raise ConfigError(f"--input {path}: no such file or folder")


def is_data(path: AnyPath) -> bool:
    """Return True if ``prepare`` reads this entry of an input folder."""
    named = path.suffix.lower() in SUFFIXES or _PARTS.fullmatch(path.name) is not None
    return named and path.is_file() and not path.name.startswith(".")


def _log_skipped(folder: AnyPath, entries: Sequence[AnyPath], taken: Sequence[AnyPath]) -> None:
    """Log the entries of a folder that are not read, because they may contain rows."""
    skipped = sorted(path.name for path in entries if path not in taken)
    if skipped:
        more = f" and {len(skipped) - _MAX_SHOWN} more" if len(skipped) > _MAX_SHOWN else ""
        _LOG.warning(
            "%s: entries that are not read: %d (%s%s); to read one of them, name the file itself",
            folder, len(skipped), ", ".join(skipped[:_MAX_SHOWN]), more,
        )  # fmt: skip


def _check_start(source: Input) -> None:
    """Raise ConfigError if the first bytes of a file do not fit its suffix or, after decompression,
    indicate a format other than text.
    """
    if source.is_table:
        return
    suffix = source.path.suffix.lower()
    with _open_start(source) as raw:
        compression = COMPRESSIONS.get(suffix)
        start = raw.read(len(compression.magic)) if compression else b""
        if compression and start and not compression.magic.startswith(start):
            raise ConfigError(
                f"--input {source.path}: the suffix is {suffix}, but this is not a "
                f"{compression.name} file (it starts with {start!r}); if it is plain text, "
                f"rename it to {source.path.stem}"
            )
        raw.seek(0)
        with _text_of(source.path, raw) as text:
            start = text.file.read(6)
    for magic, advice in _FORMATS.items():
        if start.startswith(magic):
            how = " with gunzip" if suffix == ".gz" else ""
            first = f"decompress it{how}; its content " if source.is_compressed else ""
            raise ConfigError(f"--input {source.path}: {first}{advice}")


def _open_start(source: Input) -> IO[bytes]:
    """Open a file to read its start. For a remote file, this takes a single request."""
    if not isinstance(source.path, RemotePath):
        return source.path.open("rb")
    return io.BytesIO(source.path.read(0, min(source.num_bytes, _START_BYTES)))


def _natural(path: AnyPath) -> list[tuple[int, str]]:
    return [(int(p) if p.isdecimal() else -1, p) for p in re.split(r"(\d+)", path.name)]


def fetch_table(source: Input, work: Path) -> Input:
    """Return ``source`` or, for a remote Parquet or Arrow file, a local copy in the work folder,
    because such files can be read only if they are local. An existing copy is reused.
    """
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


def read_piece(path: AnyPath, index: int, size: int) -> bytes:
    """Return the bytes of piece ``index`` of a plain file."""
    if isinstance(path, RemotePath):
        return _read_remote_piece(path, index * size, (index + 1) * size)
    with path.open("rb") as file:
        start = _line_start(file, path, index * size)
        stop = _line_start(file, path, (index + 1) * size)
        file.seek(start)
        return file.read(stop - start)


def _read_remote_piece(path: RemotePath, start: int, stop: int) -> bytes:
    """Return the lines that start in [start, stop), usually in one request."""
    low, end = max(0, start - 1), path.num_bytes
    high = min(stop + _REST_BYTES, end)
    data = path.read(low, high)
    while b"\n" not in data[stop - 1 - low :] and high < end:
        if len(data) > stop - low + MAX_LINE_BYTES:
            raise no_line_end(path)
        more = min(high + MAX_LINE_BYTES, end)
        data, high = data + path.read(high, more), more
    first = data.find(b"\n") + 1 if start else 0
    if start and (not first or low + first >= stop):
        return b""
    last = data.find(b"\n", stop - 1 - low) + 1
    return data[first : last or len(data)]


def _line_start(file: IO[bytes], path: AnyPath, offset: int) -> int:
    """Return the offset of the first line that starts at ``offset`` or later."""
    if offset == 0:
        return 0
    file.seek(offset - 1)
    return offset - 1 + len(read_line(file, path))


def read_line(file: IO[bytes], path: AnyPath) -> bytes:
    """Read up to the end of a line; raise DataError if the line is too long."""
    line = file.readline(MAX_LINE_BYTES)
    if len(line) == MAX_LINE_BYTES:
        raise no_line_end(path)
    return line


def no_line_end(path: AnyPath) -> DataError:
    """Return the error for a line that is too long, as in a file without newlines."""
    return DataError(
        f"{path}: a line is longer than {MAX_LINE_BYTES >> 20} MiB; use a text file with one row "
        "per line"
    )


class Text(NamedTuple):
    """A stream of decompressed bytes, and the original file, whose position shows the progress."""

    file: IO[bytes]
    raw: IO[bytes]


@contextmanager
def open_text(path: AnyPath) -> Iterator[Text]:
    """Open the text of a file. The suffix determines whether the file is decompressed."""
    with path.open("rb") as raw, _text_of(path, raw) as text:
        yield text


@contextmanager
def _text_of(path: AnyPath, raw: IO[bytes]) -> Iterator[Text]:
    suffix = path.suffix.lower()
    if suffix not in COMPRESSIONS:
        yield Text(raw, raw)
        return
    with decompressed(path, raw, suffix) as file:
        yield Text(file, raw)
