"""Pieces of equal size copied from anywhere in a set's maps, at a price that knows no shards.

A call for each shard, or for each piece, takes longer than copying a run of 16 rows: a split of
thousands of shards has about one run of a batch in each. So the words of all maps are addressed
from the lowest of them on, as one overlapping view in which a row begins at every word, and torch
copies a list of its rows in one call. Between the maps lies memory that is not ours: the caller
passes only offsets of pieces that lie in one map.
"""

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

Words = NDArray[np.int32]

_WORD_BYTES = 4


class MappedWords:
    """The int32 words of ``maps``; ``offsets[i]`` is where map i begins, in words."""

    def __init__(self, maps: Sequence[Words]) -> None:
        starts = np.array([words.ctypes.data for words in maps], dtype=np.int64)
        self._lowest = maps[int(starts.argmin())].reshape(-1) if len(maps) else None
        self.offsets: NDArray[np.int64] = (starts - starts.min(initial=1 << 62)) // _WORD_BYTES
        self._num_words = int((self.offsets + [words.size for words in maps]).max(initial=0))

    def copy(self, offsets: NDArray[np.int64], out: Words, num_words: int) -> None:
        """Copy ``num_words`` words from each offset on, one after the other, into ``out``."""
        import torch  # here, so that prepare and verify do without

        if self._lowest is None:
            raise ValueError("copy: there are no maps, they were closed")
        pieces = as_strided(
            self._lowest,
            shape=(self._num_words - num_words + 1, num_words),
            strides=(_WORD_BYTES, _WORD_BYTES),
        )
        target = torch.from_numpy(out.reshape(len(offsets), num_words))
        torch.index_select(torch.from_numpy(pieces), 0, torch.from_numpy(offsets), out=target)
