"""The bytes of the inputs in pieces of whole lines: which files, which pieces, in which order.

Piece k of a plain file is the lines that start in [k * size, (k + 1) * size); a compressed file is
read in order, ``size`` bytes and the rest of the line at a time. So pieces depend on the input
alone.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, NamedTuple

from sbpflow.data.prepare.decompress import DECOMPRESS, decompress_errors, decompressed
from sbpflow.data.prepare.remote import InputPath, identity, size_of
from sbpflow.errors import ConfigError, DataError

_LOG = logging.getLogger(__name__)
MAX_LINE_BYTES = 1 << 24
_SHOWN = 8
_COMPRESSED_TIMES = 3
"""Criteo's text is so many times as large as its .gz files."""
TABLE_SUFFIXES = (".parquet", ".arrow", ".feather", ".ipc")
SUFFIXES = (".tsv", ".txt", ".csv", *DECOMPRESS, *TABLE_SUFFIXES)
_PARTS = re.compile(r"(day|part)[-_]\d+")
"""Names without a suffix that are data in a folder: the 1TB logs unpack to day_0 ... day_23."""

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
"""First bytes of files that are no plain text table, and what to do about each."""

_MAGIC = {".gz": b"\x1f\x8b", ".bz2": b"BZh", ".xz": b"\xfd7zXZ"}
_KINDS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz"}
"""First bytes and names of compressed files, by suffix; a .zst may start with a skippable frame."""


@dataclass(frozen=True, slots=True)
class Input:
    """One input file; ``order`` is its place among the inputs."""

    order: int
    path: InputPath
    num_bytes: int

    @property
    def is_compressed(self) -> bool:
        """Whether the name says that it is compressed text."""
        return self.path.suffix.lower() in DECOMPRESS

    @property
    def text_bytes(self) -> int:
        """About how much text there is in it."""
        return self.num_bytes * (_COMPRESSED_TIMES if self.is_compressed else 1)

    @property
    def is_table(self) -> bool:
        """Whether the name says Parquet or Arrow."""
        return self.path.suffix.lower() in TABLE_SUFFIXES


def find_inputs(paths: Sequence[InputPath]) -> tuple[Input, ...]:
    """Files as given, folders as their data files in natural order.

    Raises ConfigError if there is none, one is given twice, or one starts like another format.
    """
    files: list[InputPath] = []
    for path in paths:
        if path.is_dir():
            inside = sorted((p for p in path.iterdir() if _is_data(p)), key=_natural)
            _name_skipped(path, inside)
            if not inside:
                raise ConfigError(
                    f"--input {path}: no file in it ends in {', '.join(SUFFIXES)}, and none is "
                    "called like day_0; name the files themselves if they are called otherwise"
                )
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise ConfigError(f"--input {path}: no such file or folder")
    inputs = tuple(Input(i, path, size_of(path)) for i, path in enumerate(files))
    known: dict[tuple[object, ...], Input] = {}
    for source in inputs:
        other = known.setdefault(identity(source.path), source)
        if other is not source:
            raise ConfigError(
                f"--input {source.path}: is {other.path} again, its rows would count twice; name "
                "each file once"
            )
        _check_start(source)
    return inputs


def _is_data(path: InputPath) -> bool:
    named = path.suffix.lower() in SUFFIXES or _PARTS.fullmatch(path.name) is not None
    return named and path.is_file() and not path.name.startswith(".")


def _name_skipped(folder: InputPath, taken: Sequence[InputPath]) -> None:
    """Say which entries of a folder are not read: a file called otherwise may hold rows."""
    skipped = sorted(path.name for path in folder.iterdir() if path not in taken)
    if skipped:
        more = f" and {len(skipped) - _SHOWN} more" if len(skipped) > _SHOWN else ""
        _LOG.warning(
            "%s: %d of its entries are not read (%s%s); name a file itself to have it read",
            folder, len(skipped), ", ".join(skipped[:_SHOWN]), more,
        )  # fmt: skip


def _check_start(source: Input) -> None:
    """Refuse a file whose first bytes (decompressed, if gzip) say that it is no text table."""
    if source.is_table:
        return
    suffix = source.path.suffix.lower()
    if suffix in _MAGIC:
        with source.path.open("rb") as raw:
            start = raw.read(len(_MAGIC[suffix]))
        if start and not _MAGIC[suffix].startswith(start):
            raise ConfigError(
                f"--input {source.path}: is named {suffix} and is no {_KINDS[suffix]} file (it "
                f"starts with {start!r}); rename it to {source.path.stem} if it is plain text"
            )
    with open_text(source.path) as text:
        start = text.file.read(6)
    for magic, advice in _FORMATS.items():
        if start.startswith(magic):
            how = " with gunzip" if source.path.suffix.lower() == ".gz" else ""
            first = f"decompress it{how}; what is in it " if source.is_compressed else ""
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
    """Where the first line that starts at ``offset`` or later starts."""
    if offset == 0:
        return 0
    file.seek(offset - 1)
    line = file.readline(MAX_LINE_BYTES)
    if len(line) == MAX_LINE_BYTES:
        raise no_line_end(path)
    return offset - 1 + len(line)


def no_line_end(path: InputPath) -> DataError:
    """What is wrong with a text whose line does not end."""
    return DataError(
        f"{path}: no line end within {MAX_LINE_BYTES >> 20} MiB; this is not a text table"
    )


class Text(NamedTuple):
    """The decompressed bytes of a file, and the file, whose position says how far they go."""

    file: IO[bytes]
    raw: IO[bytes]


@contextmanager
def open_text(path: InputPath) -> Iterator[Text]:
    """The text of a file, decompressed where its name says that it is compressed."""
    suffix = path.suffix.lower()
    if suffix not in DECOMPRESS:
        with path.open("rb") as file:
            yield Text(file, file)
        return
    with decompress_errors(path, suffix), path.open("rb") as raw, decompressed(raw, suffix) as file:
        yield Text(file, raw)
