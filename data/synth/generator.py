"""Generate blocks of rows with labels and click probabilities."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from sbpflow.data.synth.columns import BLOCK_ROWS, Columns, Rows
from sbpflow.data.synth.options import SynthOptions
from sbpflow.data.synth.signal import Signal
from sbpflow.data.synth.tails import Floats


class Generator:
    """Generates rows, labels and click probabilities, which depend only on the options."""

    def __init__(self, options: SynthOptions) -> None:
        self.columns = Columns(options.seed, options.vocab_scale, dict(options.skew), options.drift)
        self.signal = Signal(self.columns, options)

    def block(self, index: int) -> tuple[Rows, Floats, NDArray[np.bool_]]:
        """Return the rows, the click probabilities and the labels of one block."""
        rows = self.columns.block(index)
        probability = self.signal.probability(rows)
        return rows, probability, rows.label_draw < probability


def block_ranges(start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield (block, first, last) for each block that overlaps rows [start, stop), where [first,
    last) is the overlap, counted from the start of the block.
    """
    for block in range(start // BLOCK_ROWS, -(-stop // BLOCK_ROWS)):
        base = block * BLOCK_ROWS
        yield block, max(start - base, 0), min(stop - base, BLOCK_ROWS)
