"""The bytes of the inputs in pieces of whole lines: which files, which pieces, in which order.

Piece k of a plain file is the lines that start in [k * size, (k + 1) * size); a gzip file is read
in order, ``size`` bytes and the rest of the line at a time. So pieces depend on the input alone.
"""

import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sbpflow.errors import ConfigError, DataError

MAX_LINE_BYTES = 1 << 24
SUFFIXES = (".tsv", ".txt", ".csv", ".gz", ".parquet")


@dataclass(frozen=True, slots=True)
class Input:
    """One input file; ``order`` is its place among the inputs."""

    order: int
    path: Path
    num_bytes: int

    @property
    def is_gzip(self) -> bool:
        """Whether the name says gzip."""
        return self.path.suffix == ".gz"

    @property
    def is_parquet(self) -> bool:
        """Whether the name says Parquet."""
        return self.path.suffix == ".parquet"


def find_inputs(paths: Sequence[Path]) -> tuple[Input, ...]:
    """Files as given, folders as their data files in natural order; ConfigError if none."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted((p for p in path.iterdir() if _is_data(p)), key=_natural)
            if not inside:
                raise ConfigError(
                    f"--input {path}: no .tsv, .txt, .csv, .gz or .parquet file in it"
                )
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise ConfigError(f"--input {path}: no such file or folder")
    return tuple(Input(i, path, path.stat().st_size) for i, path in enumerate(files))


def _is_data(path: Path) -> bool:
    return path.is_file() and path.suffix in SUFFIXES and not path.name.startswith(".")


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(p or -1) if p.isdigit() else -1, p) for p in re.split(r"(\d+)", path.name)]


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
        raise _no_line_end(path)
    return offset - 1 + len(line)


def _no_line_end(path: Path) -> DataError:
    return DataError(
        f"{path}: no line end within {MAX_LINE_BYTES >> 20} MiB; this is not a text table"
    )


def gzip_pieces(path: Path, size: int) -> Iterator[tuple[bytes, int]]:
    """The pieces of a gzip file in order, each with the compressed bytes it took."""
    try:
        with path.open("rb") as raw, gzip.GzipFile(fileobj=raw) as file:
            taken = 0
            while head := file.read(size):
                tail = b"" if head.endswith(b"\n") else file.readline(MAX_LINE_BYTES)
                if len(tail) == MAX_LINE_BYTES:
                    raise _no_line_end(path)
                yield head + tail, raw.tell() - taken
                taken = raw.tell()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}: the gzip file is cut short or damaged ({error}); rows are lost, "
            "fetch it again"
        ) from error
