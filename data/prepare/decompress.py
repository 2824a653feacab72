"""Read gzip, bzip2, xz and zstd files as streams of decompressed bytes.

A truncated file raises an error, because the number of lost rows is unknown.
"""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, NamedTuple

from sbpflow.errors import ConfigError, DataError

_READ_BYTES = 1 << 20


class _Streams(io.RawIOBase):
    """A stream of the decompressed bytes of all bzip2 or xz streams, or zstd frames, in a file.

    ``BZ2File`` and ``LZMAFile`` end without an error at a stream whose header is damaged, so the
    rows of this and all later streams would be lost. Here, only zeros may follow the last stream.
    ``limit`` is the maximum number of bytes to decompress at a time, which zstd does not have.
    """

    def __init__(
        self, compressed: IO[bytes], new: Callable[[], Any], error: type[Exception], *limit: int
    ) -> None:
        self._compressed, self._new, self._error, self._limit = compressed, new, error, limit
        self._stream = new()
        self._has_begun, self._waiting = False, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:
        target = memoryview(buffer).cast("B")
        while not self._waiting and self._decompress_more():
            pass
        taken = self._waiting[: len(target)]
        target[: len(taken)] = taken
        self._waiting = self._waiting[len(taken) :]
        return len(taken)

    def _decompress_more(self) -> bool:
        """Decompress the next bytes. Return False at the end of the last stream."""
        if self._stream.eof:
            compressed = self._stream.unused_data.lstrip(b"\0")
            while not compressed:
                if not (compressed := self._compressed.read(_READ_BYTES)):
                    return False
                compressed = compressed.lstrip(b"\0")
            self._stream = self._new()
        elif not getattr(self._stream, "needs_input", True):
            compressed = b""  # there is more output of the bytes read last
        else:
            compressed = self._compressed.read(_READ_BYTES)
            if not compressed:
                raise EOFError("ends inside a stream" if self._has_begun else "empty file")
        self._has_begun = True
        try:
            self._waiting = memoryview(self._stream.decompress(compressed, *self._limit))
        except self._error as error:
            raise zlib.error(str(error)) from error
        return True


def _streams(
    compressed: IO[bytes], new: Callable[[], Any], error: type[Exception], *limit: int
) -> io.BufferedReader:
    return io.BufferedReader(_Streams(compressed, new, error, *limit), _READ_BYTES)


def _zstd(compressed: IO[bytes]) -> io.BufferedReader:
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError(
            "a .zst file needs the package zstandard; run `pip install zstandard`, or "
            "decompress the file with `zstd -d`"
        ) from error
    return _streams(
        compressed, lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError
    )


class Compression(NamedTuple):
    """A compression. ``disk_factor`` is the peak disk use of ``prepare`` in bytes per input byte;
    ``magic`` are the first bytes of every file, or b"" if they differ.
    """

    name: str
    open: Callable[[IO[bytes]], Any]
    disk_factor: float
    magic: bytes = b""


def _bz2(compressed: IO[bytes]) -> io.BufferedReader:
    return _streams(compressed, bz2.BZ2Decompressor, OSError, _READ_BYTES)


def _xz(compressed: IO[bytes]) -> io.BufferedReader:
    return _streams(compressed, lzma.LZMADecompressor, lzma.LZMAError, _READ_BYTES)


COMPRESSIONS: Mapping[str, Compression] = {
    ".gz": Compression("gzip", lambda raw: gzip.GzipFile(fileobj=raw), 4.5, b"\x1f\x8b"),
    ".bz2": Compression("bzip2", _bz2, 6.0, b"BZh"),
    ".xz": Compression("xz", _xz, 8.0, b"\xfd7zXZ"),
    ".zst": Compression("zstd", _zstd, 6.0),  # a file may start with a skippable frame
}
"""The compressions of text files, by file name suffix"""


@contextmanager
def decompressed(path: object, compressed: IO[bytes], suffix: str) -> Iterator[IO[bytes]]:
    """Open a stream of the decompressed bytes of ``compressed``, the content of ``path``.

    Raises DataError if the file is truncated, damaged, or empty, even if its format allows empty
    files.
    """
    try:
        if not compressed.read(1):
            raise EOFError("empty file")
        compressed.seek(0)
        yield COMPRESSIONS[suffix].open(compressed)
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # bz2 errors have no errno
            raise
        raise DataError(
            f"{path}: the {COMPRESSIONS[suffix].name} file is truncated or damaged ({error}); get "
            "a complete copy of the file"
        ) from error
