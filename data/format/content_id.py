"""A digest of what a set holds, whatever its files were made from and wherever they are cut.

The checksums of a set's files are enough for it, so no row is read: the crc32 of a concatenation
follows from the crc32 and the length of its parts (zlib's crc32_combine, here for whole arrays of
parts), and that of a file's array from that of the file, whose header is known.
"""

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbpflow.data.format.npy import header, num_items

Words = NDArray[np.uint32]

_POLYNOMIAL = np.uint32(0xEDB88320)  # of crc32, its lowest power in the highest bit, as in zlib
_ONE = np.uint32(1 << 31)
_ORDER = (1 << 32) - 1
"""The powers of x repeat after so many: its order modulo the polynomial, which is primitive."""


def digest(facts: Mapping[str, Any]) -> str:
    """sha256 of the canonical JSON of ``facts``."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def rows_crc32(dtype: str, shapes: Sequence[tuple[int, ...]], crc32s: Sequence[int]) -> int:
    """crc32 of the items of .npy files, end to end, by the crc32 of each whole file."""
    itemsize = np.dtype(dtype).itemsize
    sizes = np.array([itemsize * num_items(shape) for shape in shapes], dtype=np.int64)
    heads = np.array([zlib.crc32(header(dtype, shape)) for shape in shapes], dtype=np.uint32)
    files = np.array(crc32s, dtype=np.uint32)
    return joined_crc32(files ^ _times(_power(sizes), heads), sizes)


def joined_crc32(crc32s: Words, sizes: NDArray[np.int64]) -> int:
    """crc32 of parts end to end, by the crc32 and the bytes of each."""
    behind = sizes[::-1].cumsum()[::-1] - sizes
    return int(np.bitwise_xor.reduce(_times(_power(behind), crc32s), initial=0))


def _power(sizes: NDArray[np.int64]) -> Words:
    """x to the number of bits of so many bytes: what moves a checksum past them."""
    exponents = (sizes % _ORDER) * 8 % _ORDER
    powers = np.full(len(sizes), _ONE)
    for bit, factor in enumerate(_squares()):
        chosen = np.flatnonzero(exponents >> bit & 1)
        if len(chosen):
            powers[chosen] = _times(powers[chosen], factor)
    return powers


@cache
def _squares() -> tuple[Words, ...]:
    """x, and each the square of the one before it: the powers 1, 2, 4, ... of x."""
    squares = [np.array([1 << 30], dtype=np.uint32)]
    while len(squares) < 32:
        squares.append(_times(squares[-1], squares[-1]))
    return tuple(squares)


def _times(a: Words, b: Words) -> Words:
    """Products of polynomials over the field of two elements, modulo that of crc32."""
    product = np.zeros(np.broadcast_shapes(a.shape, b.shape), dtype=np.uint32)
    for bit in range(31, -1, -1):
        product ^= b * (a >> np.uint32(bit) & np.uint32(1))
        b = (b >> np.uint32(1)) ^ (_POLYNOMIAL * (b & np.uint32(1)))
    return product
