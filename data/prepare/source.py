"""The input files, their order, and their bytes in pieces of whole lines.

Piece k of a plain file has the lines that start in [k * size, (k + 1) * size). A compressed file is
read in order, ``size`` bytes and the rest of the line at a time. So pieces depend on the input
alone.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, NamedTuple

from sbpflow.data.prepare.decompress import (
    DECOMPRESS,
    FORMAT_NAMES,
    decompress_errors,
    decompressed,
)
from sbpflow.data.prepare.remote import InputPath, identity, size_of
from sbpflow.errors import ConfigError, DataError

_LOG = logging.getLogger(__name__)
MAX_LINE_BYTES = 1 << 24
_MAX_SHOWN = 8
_COMPRESSION_RATIO = 3
"""Size of Criteo's text relative to its .gz files."""
TABLE_SUFFIXES = (".parquet", ".arrow", ".feather", ".ipc")
SUFFIXES = (".tsv", ".txt", ".csv", *DECOMPRESS, *TABLE_SUFFIXES)
_PARTS = re.compile(r"(day|part)[-_]\d+")
"""Data files without a suffix in a folder: the 1TB logs unpack to day_0 ... day_23."""

_FORMATS = {
    b"PAR1": "is Parquet; name it .parquet",
    b"\x1f\x8b": "is a gzip file; name it .gz",
    b"ARROW1": "is an Arrow file; name it .arrow",
    b"PK\x03\x04": "is a zip archive; unpack it first",
    b"BZh": "is a bzip2 file; name it .bz2",
    b"\x28\xb5\x2f\xfd": "is a zstd file; name it .zst",
    b"\xfd7zXZ": "is an xz file; name it .xz",
    b"\xff\xfe": "is UTF-16 text; convert it with `iconv -f UTF-16 -t UTF-8`",
    b"\xfe\xff": "is UTF-16 text; convert it with `iconv -f UTF-16 -t UTF-8`",
    b"\xef\xbb\xbf": "starts with a byte order mark; remove it with `tail -c +4`",
}
"""First bytes of files that are not plain text tables, and what to do about each."""

_MAGIC = {".gz": b"\x1f\x8b", ".bz2": b"BZh", ".xz": b"\xfd7zXZ"}
"""First bytes by suffix; .zst is not listed because it may start with a skippable frame."""


@dataclass(frozen=True, slots=True)
class Input:
    """An input file; ``order`` is its position among the inputs."""

    order: int
    path: InputPath
    num_bytes: int

    @property
    def is_compressed(self) -> bool:
        """Whether the suffix is that of compressed text."""
        return self.path.suffix.lower() in DECOMPRESS

    @property
    def text_bytes(self) -> int:
        """Approximate size of its text in bytes."""
        return self.num_bytes * (_COMPRESSION_RATIO if self.is_compressed else 1)

    @property
    def is_table(self) -> bool:
        """Whether the suffix is that of Parquet or Arrow."""
        return self.path.suffix.lower() in TABLE_SUFFIXES


def find_inputs(paths: Sequence[InputPath]) -> tuple[Input, ...]:
    """The given files, and the data files of given folders in natural order.

    Raises ConfigError if there are none, one is given twice, or one starts like another format.
    """
    check_exists(paths)
    files: list[InputPath] = []
    for path in paths:
        if path.is_dir():
            inside = sorted((p for p in path.iterdir() if _is_data(p)), key=_natural)
            _log_skipped(path, inside)
            if not inside:
                raise ConfigError(
                    f"--input {path}: no file in it ends in {', '.join(SUFFIXES)} or has a name "
                    "like day_0; name files with other names one by one"
                )
            files += inside
        else:
            files.append(path)
    inputs = tuple(Input(i, path, size_of(path)) for i, path in enumerate(files))
    known: dict[tuple[object, ...], Input] = {}
    for source in inputs:
        other = known.setdefault(identity(source.path), source)
        if other is not source:
            raise ConfigError(
                f"--input {source.path}: is the same file as {other.path}, so its rows would count "
                "twice; name each file once"
            )
        _check_start(source)
    return inputs


def check_exists(paths: Sequence[InputPath]) -> None:
    """Raise ConfigError for the first path that does not exist."""
    for path in paths:
        if not (path.is_file() or path.is_dir()):
            raise ConfigError(f"--input {path}: no such file or folder")


def _is_data(path: InputPath) -> bool:
    named = path.suffix.lower() in SUFFIXES or _PARTS.fullmatch(path.name) is not None
    return named and path.is_file() and not path.name.startswith(".")


def _log_skipped(folder: InputPath, taken: Sequence[InputPath]) -> None:
    """Log the entries of a folder that are not read, because they may hold rows."""
    skipped = sorted(path.name for path in folder.iterdir() if path not in taken)
    if skipped:
        more = f" and {len(skipped) - _MAX_SHOWN} more" if len(skipped) > _MAX_SHOWN else ""
        _LOG.warning(
            "%s: %d entries are not read (%s%s); to read one of them, name the file itself",
            folder, len(skipped), ", ".join(skipped[:_MAX_SHOWN]), more,
        )  # fmt: skip


def _check_start(source: Input) -> None:
    """Refuse a file whose first bytes, once decompressed, are not those of a text table."""
    if source.is_table:
        return
    suffix = source.path.suffix.lower()
    if suffix in _MAGIC:
        with source.path.open("rb") as raw:
            start = raw.read(len(_MAGIC[suffix]))
        if start and not _MAGIC[suffix].startswith(start):
            raise ConfigError(
                f"--input {source.path}: is named {suffix} but is not a {FORMAT_NAMES[suffix]} "
                f"file (it starts with {start!r}); if it is plain text, rename it to "
                f"{source.path.stem}"
            )
    with open_text(source.path) as text:
        start = text.file.read(6)
    for magic, advice in _FORMATS.items():
        if start.startswith(magic):
            how = " with gunzip" if suffix == ".gz" else ""
            first = f"decompress it{how}; its content " if source.is_compressed else ""
            raise ConfigError(f"--input {source.path}: {first}{advice}")


def _natural(path: InputPath) -> list[tuple[int, str]]:
    return [(int(p) if p.isdecimal() else -1, p) for p in re.split(r"(\d+)", path.name)]


def read_piece(path: InputPath, index: int, size: int) -> bytes:
    """Piece ``index`` of a plain file."""
    with path.open("rb") as file:
        start = _line_start(file, path, index * size)
        stop = _line_start(file, path, (index + 1) * size)
        file.seek(start)
        return file.read(stop - start)


def _line_start(file: IO[bytes], path: InputPath, offset: int) -> int:
    """The offset of the first line that starts at ``offset`` or later."""
    if offset == 0:
        return 0
    file.seek(offset - 1)
    line = file.readline(MAX_LINE_BYTES)
    if len(line) == MAX_LINE_BYTES:
        raise no_line_end(path)
    return offset - 1 + len(line)


def no_line_end(path: InputPath) -> DataError:
    """The error for a line without an end."""
    return DataError(
        f"{path}: no line end within {MAX_LINE_BYTES >> 20} MiB; this is not a text table"
    )


class Text(NamedTuple):
    """The decompressed bytes, and the file, whose position tells how much was read."""

    file: IO[bytes]
    raw: IO[bytes]


@contextmanager
def open_text(path: InputPath) -> Iterator[Text]:
    """The text of a file, decompressed if its suffix says that it is compressed."""
    suffix = path.suffix.lower()
    if suffix not in DECOMPRESS:
        with path.open("rb") as file:
            yield Text(file, file)
        return
    with decompress_errors(path, suffix), path.open("rb") as raw, decompressed(raw, suffix) as file:
        yield Text(file, raw)
