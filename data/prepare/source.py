"""The bytes of the inputs in pieces of whole lines: which files, which pieces, in which order.

Piece k of a plain file is the lines that start in [k * size, (k + 1) * size); a gzip file is read
in order, ``size`` bytes and the rest of the line at a time. So pieces depend on the input alone.
"""

import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sbpflow.errors import ConfigError, DataError

MAX_LINE_BYTES = 1 << 24
SUFFIXES = (".tsv", ".txt", ".csv", ".gz", ".parquet")
_PARTS = re.compile(r"(day|part)[-_]\d+")
"""Names without a suffix that are data in a folder: the 1TB logs unpack to day_0 ... day_23."""

_FORMATS = {
    b"PAR1": "is Parquet; name it .parquet",
    b"\x1f\x8b": "is a gzip file; name it .gz",
    b"PK\x03\x04": "is a zip archive; unpack it first",
    b"BZh": "is a bzip2 file; unpack it first, or pack it with gzip",
    b"\x28\xb5\x2f\xfd": "is a zstd file; unpack it first, or pack it with gzip",
    b"\xfd7zXZ": "is an xz file; unpack it first, or pack it with gzip",
    b"\xff\xfe": "is UTF-16 text; convert it with `iconv -f UTF-16 -t UTF-8`",
    b"\xfe\xff": "is UTF-16 text; convert it with `iconv -f UTF-16 -t UTF-8`",
    b"\xef\xbb\xbf": "starts with a byte order mark; remove it with `tail -c +4`",
}
"""First bytes of files that are no plain text table, and what to do about each."""


@dataclass(frozen=True, slots=True)
class Input:
    """One input file; ``order`` is its place among the inputs."""

    order: int
    path: Path
    num_bytes: int

    @property
    def is_gzip(self) -> bool:
        """Whether the name says gzip."""
        return self.path.suffix.lower() == ".gz"

    @property
    def is_parquet(self) -> bool:
        """Whether the name says Parquet."""
        return self.path.suffix.lower() == ".parquet"


def find_inputs(paths: Sequence[Path]) -> tuple[Input, ...]:
    """Files as given, folders as their data files in natural order.

    Raises ConfigError if there is none, one is given twice, or one starts like another format.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted((p for p in path.iterdir() if _is_data(p)), key=_natural)
            if not inside:
                raise ConfigError(
                    f"--input {path}: no .tsv, .txt, .csv, .gz or .parquet file in it, and none "
                    "called like day_0; name the files themselves if they are called otherwise"
                )
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise ConfigError(f"--input {path}: no such file or folder")
    inputs = tuple(Input(i, path, path.stat().st_size) for i, path in enumerate(files))
    known: dict[tuple[int, int], Path] = {}
    for source in inputs:
        stat = source.path.stat()
        other = known.setdefault((stat.st_dev, stat.st_ino), source.path)
        if other is not source.path:
            raise ConfigError(
                f"--input {source.path}: is {other} again, its rows would count twice; name each "
                "file once"
            )
        _check_start(source)
    return inputs


def _is_data(path: Path) -> bool:
    named = path.suffix.lower() in SUFFIXES or _PARTS.fullmatch(path.name) is not None
    return named and path.is_file() and not path.name.startswith(".")


def _check_start(source: Input) -> None:
    """Refuse a file whose first bytes (unpacked, if it is gzip) say that it is no text table."""
    if source.is_parquet:
        return
    with source.path.open("rb") as raw:
        if source.is_gzip:
            with _gzip_errors(source.path), _unpacked(raw) as file:
                start = file.read(6)
        else:
            start = raw.read(6)
    for magic, advice in _FORMATS.items():
        if start.startswith(magic):
            first = "unpack it with gunzip; what is in it " if source.is_gzip else ""
            raise ConfigError(f"--input {source.path}: {first}{advice}")


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(p) if p.isdecimal() else -1, p) for p in re.split(r"(\d+)", path.name)]


def read_piece(path: Path, index: int, size: int) -> bytes:
    """Piece ``index`` of a plain file."""
    with path.open("rb") as file:
        start = _line_start(file, path, index * size)
        stop = _line_start(file, path, (index + 1) * size)
        file.seek(start)
        return file.read(stop - start)


def _line_start(file: IO[bytes], path: Path, offset: int) -> int:
    """Where the first line that starts at ``offset`` or later starts."""
    if offset == 0:
        return 0
    file.seek(offset - 1)
    line = file.readline(MAX_LINE_BYTES)
    if len(line) == MAX_LINE_BYTES:
        raise no_line_end(path)
    return offset - 1 + len(line)


def no_line_end(path: Path) -> DataError:
    """What is wrong with a text whose line does not end."""
    return DataError(
        f"{path}: no line end within {MAX_LINE_BYTES >> 20} MiB; this is not a text table"
    )


@contextmanager
def open_text(path: Path) -> Iterator[IO[bytes]]:
    """The text of a file, unpacked where its name says that it is packed."""
    if path.suffix.lower() != ".gz":
        with path.open("rb") as file:
            yield file
        return
    with _gzip_errors(path), path.open("rb") as raw, _unpacked(raw) as file:
        yield file


def _unpacked(raw: IO[bytes]) -> gzip.GzipFile:
    """The unpacked bytes of ``raw``; EOFError for no bytes, which gzip takes for an empty text."""
    if not raw.read(1):
        raise EOFError("it has no bytes")
    raw.seek(0)
    return gzip.GzipFile(fileobj=raw)


@contextmanager
def _gzip_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}: the gzip file is cut short or damaged ({error}); rows are lost, "
            "fetch it again"
        ) from error
