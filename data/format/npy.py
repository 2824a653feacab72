"""The .npy files of a set: written whole or not at all, compared with what they must be, mapped.

The header is written here and not by numpy, whose padding differs between versions: so a file's
bytes are a function of its array, and a damaged header is found by comparing.
"""

import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sbpflow.errors import DataError

HEADER_BYTES = 128
_PAGE_BYTES = 4096
_MAPPED_BYTES = 1 << 24
_AGAIN = "prepare the set again"


def header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The first 128 bytes of a .npy file (format 1.0) of ``dtype`` (such as ``<i4``)."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape!r}, }}"
    head = b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little")
    return head + text.ljust(HEADER_BYTES - 11).encode("ascii") + b"\n"


def type_name(dtype: DTypeLike) -> str:
    """How headers call a dtype: ``<i4``, ``|u1``."""
    return np.dtype(dtype).newbyteorder("<").str


def write_array(path: Path, array: "NDArray[Any]") -> int:
    """Write ``array`` as ``path`` in one step; returns the crc32 of the file."""
    array = np.ascontiguousarray(array, dtype=type_name(array.dtype))
    head = header(array.dtype.str, array.shape)
    partial = path.with_name(path.name + ".partial")
    data = array.reshape(-1).view(np.uint8).data if array.size else b""
    with partial.open("wb") as file:
        file.write(head)
        file.write(data)
    os.replace(partial, path)
    return zlib.crc32(data, zlib.crc32(head))


def file_crc32(path: Path) -> int:
    """zlib.crc32 of a whole file."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def check_array(path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    """DataError unless the file has the header and the size of such an array."""
    try:
        with path.open("rb") as file:
            found = file.read(HEADER_BYTES)
            num_bytes = file.seek(0, os.SEEK_END)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}); {_AGAIN}") from error
    wanted = HEADER_BYTES + num_items(shape) * np.dtype(dtype).itemsize
    if found != header(dtype, shape) or num_bytes != wanted:
        what = f"{shape[0]} rows x {shape[1]}" if len(shape) == 2 else f"{shape[0]}"
        raise DataError(
            f"{path}: is not the .npy of {what} {np.dtype(dtype).name} ({wanted} bytes) "
            f"that the manifest names; it was changed or cut short, {_AGAIN}"
        )


def check_file(path: Path, dtype: str, shape: tuple[int, ...], crc32: int) -> None:
    """DataError unless the file is, byte for byte, the one that ``crc32`` was taken of."""
    check_array(path, dtype, shape)
    if file_crc32(path) != crc32:
        raise DataError(f"{path}: checksum differs from the manifest; {_AGAIN}")


def num_items(shape: tuple[int, ...]) -> int:
    """Items of an array of this shape."""
    total = 1
    for size in shape:
        total *= size
    return total


def map_array(path: Path, dtype: str, shape: tuple[int, ...]) -> "NDArray[Any]":
    """A private map of a checked file: writing into it changes no file.

    By torch, whose maps hold no file descriptor; numpy's hold one each, and a set may have more
    files than a process may have open.
    """
    import torch  # here, so that prepare and verify do without

    check_array(path, dtype, shape)
    size = HEADER_BYTES + num_items(shape) * np.dtype(dtype).itemsize
    try:
        raw = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).numpy()
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"{path}: cannot be mapped into memory ({error}); free some memory, or raise the limit "
            "on maps (sysctl vm.max_map_count)"
        ) from error
    return raw[HEADER_BYTES:].view(dtype).reshape(shape)


def read_array(
    path: Path, dtype: str, shape: tuple[int, ...], start: int, stop: int
) -> "NDArray[Any]":
    """Rows [start, stop) of a file as a new array; nothing is kept open."""
    out = np.empty((stop - start, *shape[1:]), dtype=dtype)
    row_bytes = num_items(shape[1:]) * out.itemsize
    try:
        with path.open("rb") as file:
            file.seek(HEADER_BYTES + start * row_bytes)
            num_bytes = file.readinto(out.reshape(-1).view(np.uint8).data) if out.size else 0
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}); {_AGAIN}") from error
    if num_bytes != out.nbytes:
        raise DataError(f"{path}: was cut short while it was read; {_AGAIN}")
    return out


def open_array(path: Path, dtype: str, shape: tuple[int, ...]) -> "NDArray[Any]":
    """A whole file, read-only: mapped where it is large, so that only what is used is in memory.

    A map by numpy holds a file descriptor, of which a process has few: not for small files.
    """
    check_array(path, dtype, shape)
    if num_items(shape) * np.dtype(dtype).itemsize < _MAPPED_BYTES:
        return read_array(path, dtype, shape, 0, shape[0])
    return np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES, shape=shape)


def touch(array: "NDArray[Any]") -> None:
    """Have the pages of a contiguous mapped array read."""
    if array.size:
        array.reshape(-1)[:: max(1, _PAGE_BYTES // array.itemsize)].max()
