"""Compute a keyed pseudo-random permutation of range(n) without storing it.

The permutation is a Feistel network on a square with side ceil(sqrt(n)), applied repeatedly to
results outside of range(n) ("cycle walking", Black and Rogaway, Ciphers with arbitrary finite
domains, CT-RSA 2002, methods 2 and 3). The cost per position does not depend on the number of rows.
"""

import math

import numpy as np
from numpy.typing import NDArray

from sbpflow.runtime.random.splitmix import MIX_1, MIX_2

_ROUNDS = 4
_SMALL_SIDE, _SMALL_ROUNDS = 64, 12  # fewer bits take more rounds to mix
_FIRST, _SECOND = np.uint64(MIX_1), np.uint64(MIX_2)
_HIGH_HALF = np.uint64(32)

Words64 = NDArray[np.uint64]


class Permutation:
    """A permutation of range(size). Equal keys give equal permutations."""

    def __init__(self, size: int, *key: int) -> None:
        if not 0 < size < 2**63:
            raise ValueError(
                f"the size of a permutation must be between 1 and 2^63 - 1, got {size}"
            )
        self._size = np.uint64(size)
        self._side = np.uint64(math.isqrt(size - 1) + 1)
        # Unlike ``Generator``, ``SeedSequence`` gives the same words in every numpy version.
        rounds = _SMALL_ROUNDS if self._side < _SMALL_SIDE else _ROUNDS
        self._keys = np.random.SeedSequence(key).generate_state(rounds, np.uint64)

    def __call__(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the images ([n]) of ``index`` ([n]), whose values are in range(size) and may
        repeat.
        """
        image = self._rounds(index.astype(np.uint64))
        # Fewer than 2 * side positions of the square are outside of range(size), so only a few
        # indices need another pass.
        while (outside := np.flatnonzero(image >= self._size)).size:
            image[outside] = self._rounds(image[outside])
        return image.astype(np.int64)

    def _rounds(self, index: Words64) -> Words64:
        left, right = np.divmod(index, self._side)
        for key in self._keys:
            total = left + self._below_side(right + key)
            total -= self._side * (total >= self._side)
            left, right = right, total
        return left * self._side + right

    def _below_side(self, word: Words64) -> Words64:
        """Map each hash word to range(side) by a multiplication, which is faster than a
        division.
        """
        word = word * _FIRST
        word ^= word >> _HIGH_HALF
        word *= _SECOND
        word >>= _HIGH_HALF
        word *= self._side
        word >>= _HIGH_HALF
        return word
