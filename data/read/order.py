"""The global row order of an epoch: a function of (rows, shuffle, seed, epoch) and of nothing else.

World size, rank, batch size and back-end have no part in it, so a row cursor is the whole state of
a read. Shuffling moves blocks of consecutive rows; ``rows`` also permutes within windows of blocks,
so that reads stay sequential inside a window.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Shuffle = Literal["none", "blocks", "rows"]
SHUFFLES: tuple[Shuffle, ...] = ("none", "blocks", "rows")

BLOCK_ROWS = 4096
WINDOW_BLOCKS = 16


def _permutation(size: int, *key: int) -> NDArray[np.int64]:
    # Raw bits of PCG64 are the same in every numpy version; Generator.permutation may change.
    bits = np.random.PCG64(np.random.SeedSequence(key)).random_raw(size)
    return np.argsort(bits)


@dataclass(frozen=True)
class RowOrder:
    """Where the rows of one epoch come from: position in the order -> row of the split."""

    num_rows: int
    shuffle: Shuffle
    seed: int
    epoch: int
    block_rows: int = BLOCK_ROWS
    window_blocks: int = WINDOW_BLOCKS

    @cached_property
    def _blocks(self) -> NDArray[np.int64]:
        return _permutation(-(-self.num_rows // self.block_rows), self.seed, self.epoch, 0)

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """Position of each block in the order, and the end; only the last block may be short."""
        lengths = np.full(len(self._blocks), self.block_rows)
        lengths[self._blocks == len(self._blocks) - 1] -= (
            len(lengths) * self.block_rows - self.num_rows
        )
        return np.concatenate([[0], np.cumsum(lengths)])

    def runs(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Consecutive row ranges that make up positions [start, stop); not for ``rows``."""
        if self.shuffle == "none":
            return [(start, stop)]
        runs: list[tuple[int, int]] = []
        index = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            end = min(stop, int(self._starts[index + 1]))
            first = int(self._blocks[index]) * self.block_rows + start - int(self._starts[index])
            runs.append((first, first + end - start))
            start, index = end, index + 1
        return runs

    def rows(self, start: int, stop: int) -> NDArray[np.int64]:
        """Row number at each position of [start, stop)."""
        if self.shuffle != "rows":
            return np.concatenate([np.arange(a, b) for a, b in self.runs(start, stop)] or [_EMPTY])
        pieces: list[NDArray[np.int64]] = []
        block = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            window = block // self.window_blocks
            first, rows = _window(self, window)
            pieces.append(rows[start - first : stop - first])
            start = first + len(rows)
            block = (window + 1) * self.window_blocks
        return np.concatenate(pieces or [_EMPTY])

    def window(self, index: int) -> tuple[int, NDArray[np.int64]]:
        """First position of a shuffle window and the rows at its positions."""
        first = index * self.window_blocks
        last = min(first + self.window_blocks, len(self._blocks))
        begin, end = int(self._starts[first]), int(self._starts[last])
        unshuffled = RowOrder(self.num_rows, "blocks", self.seed, self.epoch, self.block_rows)
        rows = unshuffled.rows(begin, end)
        return begin, rows[_permutation(len(rows), self.seed, self.epoch, 1, index)]


_EMPTY: NDArray[np.int64] = np.empty(0, dtype=np.int64)


@lru_cache(maxsize=4)
def _window(order: RowOrder, index: int) -> tuple[int, NDArray[np.int64]]:
    return order.window(index)
