"""The global row order of an epoch: a function of (rows, shuffle, seed, epoch) and of nothing else.

World size, rank, batch size and back-end have no part in it, so a row cursor is the whole state of
a read. Shuffling permutes runs of consecutive rows, all of one length, over the whole split; the
length is what the kinds differ in. No array of the order exists: ``data.read.permutation`` computes
the places that are asked for.
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

_PLACE_OF_SHORT_RUN = 1  # names a stream of the key, beside that of the permutation


class Runs(NamedTuple):
    """Consecutive rows of a split: ``lengths[i]`` rows from row ``firsts[i]`` on; both int64."""

    firsts: NDArray[np.int64]
    lengths: NDArray[np.int64]


@dataclass(frozen=True)
class RowOrder:
    """Where the rows of one epoch come from: position in the order -> row of the split.

    The rows that do not fill a run, at the split's end, are a run of their own, which lies
    anywhere between the others.
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
        """How many whole runs go before the short one, and its rows; after all if it has none."""
        num_runs, rows = divmod(self.num_rows, self._run_rows)
        key = np.random.SeedSequence((self.seed, self.epoch, _PLACE_OF_SHORT_RUN))
        word = int(key.generate_state(1, np.uint64)[0])
        return (word % (num_runs + 1) if rows else num_runs), rows

    def _slot(self, position: int) -> int:
        """Number, in the order, of the run that a position lies in."""
        before, rows = self._short
        first = before * self._run_rows
        if position < first:
            return position // self._run_rows
        return before if position < first + rows else (position - rows) // self._run_rows + 1

    def runs_of(self, ranges: Sequence[tuple[int, int]]) -> Runs:
        """The rows at these ranges of positions, one after the other."""
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
        """The rows at positions [start, stop), in order; the first and the last run may be cut."""
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
