"""Compute the global row order of an epoch, a function of (rows, shuffle, seed, epoch).

World size, rank, batch size and backend do not affect the order, so a row cursor is the complete
state of a read. Shuffling permutes runs of consecutive rows over the whole split. All runs have the
same length, which depends on the kind of shuffling, except a short run of the remaining rows. The
order is not stored; ``data.read.permutation`` computes it on request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sbpflow.data.read.permutation import Permutation

Shuffle = Literal["none", "blocks", "runs", "rows"]

RUN_ROWS: dict[Shuffle, int] = {"blocks": 4096, "runs": 16, "rows": 1}
SHUFFLES: tuple[Shuffle, ...] = ("none", *RUN_ROWS)

_PLACE_OF_SHORT_RUN = 1  # makes this random stream differ from that of the permutation of runs


class Runs(NamedTuple):
    """Runs of ``lengths[i]`` consecutive rows that start at row ``firsts[i]``. Both arrays are
    int64 [n].
    """

    firsts: NDArray[np.int64]
    lengths: NDArray[np.int64]


@dataclass(frozen=True)
class RowOrder:
    """The row order of one epoch, which maps positions to rows of the split. The rows at the end of
    the split that do not fill a run form a short run at a random position in the order.
    """

    num_rows: int
    shuffle: Shuffle
    seed: int
    epoch: int

    @cached_property
    def _run_rows(self) -> int:
        return RUN_ROWS[self.shuffle]

    @cached_property
    def _permutation(self) -> Permutation:
        return Permutation(max(1, self.num_rows // self._run_rows), self.seed, self.epoch)

    @cached_property
    def _short(self) -> tuple[int, int]:
        """Return the number of full runs before the short run, and its length."""
        num_runs, rows = divmod(self.num_rows, self._run_rows)
        key = np.random.SeedSequence((self.seed, self.epoch, _PLACE_OF_SHORT_RUN))
        word = int(key.generate_state(1, np.uint64)[0])
        return (word % (num_runs + 1) if rows else num_runs), rows

    def _slot(self, position: int) -> int:
        """Return the place, in the shuffled order, of the run that contains ``position``."""
        before, rows = self._short
        first = before * self._run_rows
        if position < first:
            return position // self._run_rows
        return before if position < first + rows else (position - rows) // self._run_rows + 1

    def runs_of(self, ranges: Sequence[tuple[int, int]]) -> Runs:
        """Return the runs of the rows at several ranges of positions, one range after another."""
        joined = [ranges[0]]
        for start, stop in ranges[1:]:
            if start == joined[-1][1]:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        pieces = [self.runs(start, stop) for start, stop in joined]
        if len(pieces) == 1:
            return pieces[0]
        firsts, lengths = zip(*pieces, strict=True)
        return Runs(np.concatenate(firsts), np.concatenate(lengths))

    def runs(self, start: int, stop: int) -> Runs:
        """Return the runs of the rows at positions [start, stop), in order. The first run and the
        last run may be cut.
        """
        if start >= stop:
            return Runs(np.empty(0, np.int64), np.empty(0, np.int64))
        if self.shuffle == "none":
            return Runs(np.array([start]), np.array([stop - start]))
        run_rows, (before, rows) = self._run_rows, self._short
        slots = np.arange(self._slot(start), self._slot(stop - 1) + 1)
        is_short = (slots == before) & bool(rows)
        is_after = (slots > before) & bool(rows)
        begins = slots * run_rows - is_after * (run_rows - rows)
        ends = begins + np.where(is_short, rows, run_rows)
        chosen = np.where(is_short, 0, slots - is_after)
        runs = np.where(is_short, self.num_rows // run_rows, self._permutation(chosen))
        low, high = np.maximum(begins, start), np.minimum(ends, stop)
        return Runs(runs * run_rows + (low - begins), high - low)
