"""Compute a digest of a set's rows that does not depend on input files or shard boundaries.

The digest is computed from the checksums of the files, without reading rows. The crc32 of a
concatenation follows from the crc32 and the length of each part (zlib's crc32_combine, here
vectorized over the parts). The crc32 of an array follows from the crc32 of its file, because the
header is known.
"""

import hashlib
import json
import zlib
from collections.abc import Sequence
from functools import cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from sbpflow.data.format.npy import header

Words = NDArray[np.uint32]

# The crc32 polynomial; as in zlib, the highest bit is the coefficient of the lowest power.
_POLYNOMIAL = np.uint32(0xEDB88320)
_ONE = np.uint32(1 << 31)
_ORDER = (1 << 32) - 1
"""The period of the powers of x modulo the crc32 polynomial, which is primitive"""


def digest(facts: object) -> str:
    """Return the sha256 of the canonical JSON of ``facts``."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def rows_crc32(dtype: str, shapes: Sequence[tuple[int, ...]], crc32s: Sequence[int]) -> int:
    """Compute the crc32 of the concatenated items of .npy files from the crc32 of each file."""
    itemsize = np.dtype(dtype).itemsize
    sizes = np.array([itemsize * prod(shape) for shape in shapes], dtype=np.int64)
    heads = np.array([zlib.crc32(header(dtype, shape)) for shape in shapes], dtype=np.uint32)
    files = np.array(crc32s, dtype=np.uint32)
    return joined_crc32(files ^ _times(_power(sizes), heads), sizes)


def joined_crc32(crc32s: Words, sizes: NDArray[np.int64]) -> int:
    """Compute the crc32 of concatenated parts from their crc32 values (uint32 [n]) and their sizes
    in bytes ([n]).
    """
    following = sizes[::-1].cumsum()[::-1] - sizes
    return int(np.bitwise_xor.reduce(_times(_power(following), crc32s), initial=0))


def _power(sizes: NDArray[np.int64]) -> Words:
    """Return x ** (8 * size) for each of ``sizes``: the factor that shifts a crc32 by that many
    bytes.
    """
    exponents = (sizes % _ORDER) * 8 % _ORDER
    powers = np.full(len(sizes), _ONE)
    for bit, factor in enumerate(_squares()):
        chosen = np.flatnonzero(exponents >> bit & 1)
        if len(chosen):
            powers[chosen] = _times(powers[chosen], factor)
    return powers


@cache
def _squares() -> tuple[Words, ...]:
    """Return x, x^2, x^4, x^8, ... by repeated squaring."""
    squares = [np.array([1 << 30], dtype=np.uint32)]
    while len(squares) < 32:
        squares.append(_times(squares[-1], squares[-1]))
    return tuple(squares)


def _times(a: Words, b: Words) -> Words:
    """Return the products of polynomials over GF(2) modulo the crc32 polynomial."""
    product = np.zeros(np.broadcast_shapes(a.shape, b.shape), dtype=np.uint32)
    for bit in range(31, -1, -1):
        product ^= b * (a >> np.uint32(bit) & np.uint32(1))
        b = (b >> np.uint32(1)) ^ (_POLYNOMIAL * (b & np.uint32(1)))
    return product
