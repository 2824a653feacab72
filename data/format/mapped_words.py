"""Pieces of equal size copied from anywhere in a set's maps, at a price that knows no shards.

A call of numpy for each shard, or for each piece, takes longer than copying a run of 16 rows: a
split of thousands of shards has about one run of a batch in each. So the words of all maps are
addressed from the first of them on, as items that begin at every word, and numpy copies a list of
items in one call. The caller passes only offsets of pieces that lie in one map.
"""

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

Words = NDArray[np.int32]

_WORD_BYTES = 4
_CHUNK_BYTES = 1 << 17
"""Copied at a time: numpy copies twice here, the second time from the cache that way."""


class MappedWords:
    """The int32 words of ``maps``; ``offsets[i]`` is where map i begins, in words."""

    def __init__(self, maps: Sequence[Words]) -> None:
        starts = np.array([words.ctypes.data for words in maps], dtype=np.int64)
        self._lowest = maps[int(starts.argmin())].reshape(-1) if len(maps) else None
        self.offsets: NDArray[np.int64] = (starts - starts.min(initial=1 << 62)) // _WORD_BYTES
        self._num_words = int((self.offsets + [words.size for words in maps]).max(initial=0))

    def copy(self, offsets: NDArray[np.int64], out: Words, num_words: int) -> None:
        """Copy ``num_words`` words from each offset on, one after the other, into ``out``."""
        if self._lowest is None:
            raise ValueError("copy: no maps, they were closed")
        item = np.dtype((np.void, num_words * _WORD_BYTES))
        items = as_strided(
            self._lowest[:num_words].view(item),
            shape=(self._num_words - num_words + 1,),
            strides=(_WORD_BYTES,),
        )
        target = out.reshape(-1).view(item)
        step = max(1, _CHUNK_BYTES // item.itemsize)
        for at in range(0, len(offsets), step):
            target[at : at + step] = items[offsets[at : at + step]]
