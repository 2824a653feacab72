"""Compressed text: gzip, bzip2, xz and zstd as files of decompressed bytes that end only where they
end.

A compressed file that is cut short raises: nobody knows how many rows it lost.
"""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO

from sbpflow.errors import ConfigError, DataError

_READ_BYTES = 1 << 20


class _Zstd(io.RawIOBase):
    """The decompressed bytes of the zstd frames in a file, one after the other."""

    def __init__(self, compressed: IO[bytes]) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise ConfigError(
                "a .zst file needs the package zstandard (`pip install zstandard`); or unpack it "
                "with `zstd -d`"
            ) from error
        self._compressed, self._zstd = compressed, zstandard
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._began, self._waiting = False, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:
        target = memoryview(buffer).cast("B")
        while not self._waiting and self._unpack_more():
            pass
        taken = self._waiting[: len(target)]
        target[: len(taken)] = taken
        self._waiting = self._waiting[len(taken) :]
        return len(taken)

    def _unpack_more(self) -> bool:
        """Unpack some more; False at the end of the last frame."""
        if self._frame.eof:
            compressed = self._frame.unused_data or self._compressed.read(_READ_BYTES)
            if not compressed:
                return False
            self._frame = self._zstd.ZstdDecompressor().decompressobj()
        else:
            compressed = self._compressed.read(_READ_BYTES)
            if not compressed:
                raise EOFError("it ends within a frame" if self._began else "it has no bytes")
        self._began = True
        try:
            self._waiting = self._frame.decompress(compressed)
        except self._zstd.ZstdError as error:
            raise zlib.error(str(error)) from error
        return True


def _gzip(compressed: IO[bytes]) -> IO[bytes]:
    return gzip.GzipFile(fileobj=compressed)


def _bz2(compressed: IO[bytes]) -> IO[bytes]:
    return bz2.BZ2File(compressed)


def _xz(compressed: IO[bytes]) -> IO[bytes]:
    return lzma.LZMAFile(compressed)


def _zstd(compressed: IO[bytes]) -> IO[bytes]:
    return io.BufferedReader(_Zstd(compressed), _READ_BYTES)


DECOMPRESS: Mapping[str, Callable[[IO[bytes]], IO[bytes]]] = {
    ".gz": _gzip,
    ".bz2": _bz2,
    ".xz": _xz,
    ".zst": _zstd,
}
"""By the suffix of a name."""


def decompressed(compressed: IO[bytes], suffix: str) -> IO[bytes]:
    """The decompressed bytes; EOFError for no bytes, which some take for an empty text."""
    if not compressed.read(1):
        raise EOFError("it has no bytes")
    compressed.seek(0)
    return DECOMPRESS[suffix](compressed)


@contextmanager
def decompress_errors(path: object, suffix: str) -> Iterator[None]:
    """A DataError for what a file that is cut short or damaged raises."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise _damaged(path, suffix, error) from error
    except OSError as error:
        if error.errno is not None:  # of the system, not of bz2
            raise
        raise _damaged(path, suffix, error) from error


def _damaged(path: object, suffix: str, error: Exception) -> DataError:
    name = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}[suffix]
    return DataError(
        f"{path}: the {name} file is cut short or damaged ({error}); rows are lost, fetch it again"
    )
