"""Write .npy files atomically, compare them with the manifest, and map them.

This module writes the headers itself, because the padding of headers differs between numpy
versions. A file's bytes therefore depend only on its array, and a damaged header differs from the
expected bytes.
"""

import os
import zlib
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sbpflow.errors import DataError
from sbpflow.runtime.files.atomic_file import replacing

HEADER_BYTES = 128
_PAGE_BYTES = 4096
_MAPPED_BYTES = 1 << 24
_AGAIN = "prepare the set again"


def header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the 128-byte header of a .npy file (format 1.0) for a ``dtype`` such as ``<i4``."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape!r}, }}"
    head = b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little")
    return head + text.ljust(HEADER_BYTES - 11).encode("ascii") + b"\n"


def file_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the size of a .npy file in bytes."""
    return HEADER_BYTES + prod(shape) * np.dtype(dtype).itemsize


def type_name(dtype: DTypeLike) -> str:
    """Return the name that headers use for a dtype, such as ``<i4`` or ``|u1``."""
    return np.dtype(dtype).newbyteorder("<").str


def write_array(path: Path, array: "NDArray[Any]") -> int:
    """Write ``array`` to ``path`` atomically; return the crc32 of the file."""
    array = np.ascontiguousarray(array, dtype=type_name(array.dtype))
    head = header(array.dtype.str, array.shape)
    data = array.reshape(-1).view(np.uint8).data if array.size else b""
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(head)
        file.write(data)
    return zlib.crc32(data, zlib.crc32(head))


def file_crc32(path: Path) -> int:
    """Return the zlib.crc32 of a whole file."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def check_array(path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    """Raise DataError if the header or the size of the file does not match this dtype and shape."""
    try:
        with path.open("rb") as file:
            head = file.read(HEADER_BYTES)
            num_bytes = file.seek(0, os.SEEK_END)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}); {_AGAIN}") from error
    wanted = file_bytes(dtype, shape)
    if head != header(dtype, shape) or num_bytes != wanted:
        size = f"{shape[0]} rows x {shape[1]}" if len(shape) == 2 else f"{shape[0]}"
        raise DataError(
            f"{path} does not match the manifest, which lists {size} {np.dtype(dtype).name} values "
            f"({wanted} bytes); the file was changed or truncated; {_AGAIN}"
        )


def check_file(path: Path, dtype: str, shape: tuple[int, ...], crc32: int) -> None:
    """Raise DataError if the file does not have this dtype, shape, and checksum."""
    check_array(path, dtype, shape)
    if file_crc32(path) != crc32:
        raise DataError(f"{path}: the checksum differs from the one in the manifest; {_AGAIN}")


def map_array(path: Path, dtype: str, shape: tuple[int, ...]) -> "NDArray[Any]":
    """Check a file and return a private map of it; writing to the map does not change the file.

    The map is made by torch, because each numpy map keeps a file descriptor open, and a set may
    have more files than a process may open.
    """
    import torch  # imported here, because prepare and verify run without torch

    check_array(path, dtype, shape)
    size = file_bytes(dtype, shape)
    try:
        raw = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).numpy()
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"{path} cannot be mapped into memory ({error}); free some memory, or raise the limit "
            "on memory maps (sysctl vm.max_map_count)"
        ) from error
    return raw[HEADER_BYTES:].view(dtype).reshape(shape)


def read_array(
    path: Path, dtype: str, shape: tuple[int, ...], start: int, stop: int
) -> "NDArray[Any]":
    """Return rows [start, stop) of a file as a new array, and close the file."""
    out = np.empty((stop - start, *shape[1:]), dtype=dtype)
    row_bytes = prod(shape[1:]) * out.itemsize
    try:
        with path.open("rb") as file:
            file.seek(HEADER_BYTES + start * row_bytes)
            num_bytes = file.readinto(out.reshape(-1).view(np.uint8).data) if out.size else 0
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}); {_AGAIN}") from error
    if num_bytes != out.nbytes:
        raise DataError(f"{path} was truncated while it was read; {_AGAIN}")
    return out


def open_array(path: Path, dtype: str, shape: tuple[int, ...]) -> "NDArray[Any]":
    """Return a file as a read-only array.

    Large files are mapped, so that only pages in use are loaded. Small files are read, because each
    numpy map keeps a file descriptor open.
    """
    check_array(path, dtype, shape)
    if prod(shape) * np.dtype(dtype).itemsize < _MAPPED_BYTES:
        return read_array(path, dtype, shape, 0, shape[0])
    return np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES, shape=shape)


def touch(array: "NDArray[Any]") -> None:
    """Page a contiguous mapped array into memory."""
    if array.size:
        array.reshape(-1)[:: max(1, _PAGE_BYTES // array.itemsize)].max()
