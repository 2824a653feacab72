"""A digest of what a set holds, regardless of its inputs and of where its shards are divided.

It needs only the checksums of the files, so no row is read. The crc32 of a concatenation follows
from the crc32 and length of its parts (zlib's crc32_combine, here vectorized over the parts), and
the crc32 of an array follows from that of its file, whose header is known.
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

_POLYNOMIAL = np.uint32(0xEDB88320)  # of crc32; as in zlib, the lowest power is the highest bit
_ONE = np.uint32(1 << 31)
_ORDER = (1 << 32) - 1
"""The period of the powers of x modulo the polynomial, which is primitive."""


def digest(facts: object) -> str:
    """sha256 of the canonical JSON of ``facts``."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def rows_crc32(dtype: str, shapes: Sequence[tuple[int, ...]], crc32s: Sequence[int]) -> int:
    """crc32 of the concatenated items of .npy files, from the crc32 of each whole file."""
    itemsize = np.dtype(dtype).itemsize
    sizes = np.array([itemsize * prod(shape) for shape in shapes], dtype=np.int64)
    heads = np.array([zlib.crc32(header(dtype, shape)) for shape in shapes], dtype=np.uint32)
    files = np.array(crc32s, dtype=np.uint32)
    return joined_crc32(files ^ _times(_power(sizes), heads), sizes)


def joined_crc32(crc32s: Words, sizes: NDArray[np.int64]) -> int:
    """crc32 of concatenated parts, from the crc32 [n] uint32 and the size in bytes [n] of each."""
    following = sizes[::-1].cumsum()[::-1] - sizes
    return int(np.bitwise_xor.reduce(_times(_power(following), crc32s), initial=0))


def _power(sizes: NDArray[np.int64]) -> Words:
    """x to the power of the bits in ``sizes`` bytes; multiplying by it shifts a crc32 past them."""
    exponents = (sizes % _ORDER) * 8 % _ORDER
    powers = np.full(len(sizes), _ONE)
    for bit, factor in enumerate(_squares()):
        chosen = np.flatnonzero(exponents >> bit & 1)
        if len(chosen):
            powers[chosen] = _times(powers[chosen], factor)
    return powers


@cache
def _squares() -> tuple[Words, ...]:
    """x, x^2, x^4, x^8, ...: each is the square of the previous one."""
    squares = [np.array([1 << 30], dtype=np.uint32)]
    while len(squares) < 32:
        squares.append(_times(squares[-1], squares[-1]))
    return tuple(squares)


def _times(a: Words, b: Words) -> Words:
    """Products of polynomials over GF(2), modulo the polynomial of crc32."""
    product = np.zeros(np.broadcast_shapes(a.shape, b.shape), dtype=np.uint32)
    for bit in range(31, -1, -1):
        product ^= b * (a >> np.uint32(bit) & np.uint32(1))
        b = (b >> np.uint32(1)) ^ (_POLYNOMIAL * (b & np.uint32(1)))
    return product
