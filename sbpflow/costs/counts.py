"""What a table asks of the ranks: rows, elements, bytes. Counts, no milliseconds.

An exchange has them from ``Facts``: ``part`` is what a shard adds to the rank that holds it, and
``home`` what a table adds to every rank, for the samples it feeds. Both add up over tables. What is
there once however many tables share it (a group, a stack, a transfer) is a ``Key``: a rank's total
of such a feature is the number of distinct keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from sbpflow.costs.ids import Floats
from sbpflow.sbp.sbp import balanced_sizes

FEATURES = (
    "memory_bytes",  # rows and optimizer state
    "buffer_bytes",  # ids, vectors, gradients in flight
    "always",
    "dense_macs",  # of this rank's samples
    "dense_elements",  # of this rank's samples, that dense layers read and write
    "dense_parameters",
    "batch_ids",  # this rank's samples' ids, of all features
    "home_sort",  # ids deduplicated before they travel
    "home_unique",
    "seen_ids",  # of the whole batch, looked through for those that are here
    "searched_ids",  # of these, those of tables whose rows are cut: only some are here
    "read_rows",
    "read_elements",
    "read_touched",  # elements of the distinct rows among them: the first use of each misses caches
    "out_elements",  # looked-up vectors as they leave
    "home_elements",  # vectors or terms as they come home
    "expand_rows",
    "expand_elements",
    "repeat_elements",  # gradients copied for every rank
    "whole_elements",  # gradients of whole tables
    "update_ids",
    "update_elements",
    "step_rows",  # rows that the optimizer changes
    "step_elements",
    "step_passes",  # elements again, once for each number of its state
    "copied_bytes",  # into buffers of transfers and out of them
    "square_bytes",  # squares of gradients that ranks sharing a row add up
    "ids_bytes",  # sent by this rank, here and below
    "counted_bytes",
    "vector_bytes",
    "gradient_bytes",
    "vector_in_bytes",  # received by this rank
    "gradient_in_bytes",
    "num_dense_groups",  # vectors of owners go home as they are; from here on distinct keys
    "num_summed_groups",  # terms of vectors are added up on their way home
    "num_whole_groups",  # gradients of whole tables are added up
    "num_row_transfers",  # single rows between owners and home, there and back
    "num_row_gathers",  # single rows to all ranks
    "num_stacks",
    "num_squares",
    "num_id_calls",
)
INDEX = {name: place for place, name in enumerate(FEATURES)}
NUM_FEATURES = len(FEATURES)
MEMORY, BUFFERS = INDEX["memory_bytes"], INDEX["buffer_bytes"]
SENT = [INDEX[name] for name in ("ids_bytes", "counted_bytes", "vector_bytes", "gradient_bytes")]

Counts = Mapping[str, float]  # by feature; what is not named is 0
Key = tuple[Any, ...]  # the place of a feature, then what makes it distinct
Cut = tuple[float, int]  # into how many parts rows and columns are cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A table in a step: whatever the counts of an exchange depend on, beside how it is cut.

    Of ``lookups`` ids of a batch ``touched`` are distinct, and of a single rank's ``wanted``.
    ``vectors`` of a sample travel. Numbers are of so many bytes: those computed with (``item``),
    stored rows, and vectors and gradients on their way. ``window`` batches have their ids in
    memory. ``state`` counts the optimizer's numbers by row and by element.
    """

    world_size: int
    batch_size: int
    num_rows: int
    dim: int
    vectors: float
    lookups: float
    touched: float
    wanted: float
    sent_ids: float  # of the lookups, those that no other table has sent where owners look up all
    item: float = 4.0
    row_item: float = 4.0
    vector_item: float = 4.0
    gradient_item: float = 4.0
    window: int = 1
    state: tuple[int, int] = (0, 0)
    shares_state: bool = False  # by ranks that hold different columns of a row

    @property
    def samples(self) -> float:
        """Of one rank."""
        return self.batch_size / self.world_size

    @property
    def mine(self) -> float:
        """Lookups of one rank's samples."""
        return self.lookups / self.world_size

    def stored(self, rows: float, width: float) -> float:
        """Bytes of a shard: its rows, and the state of its optimizer."""
        by_row, by_element = self.state
        return rows * (width * self.row_item + (by_row + by_element * width) * self.item)

    def steps(self, rows: float, width: float) -> dict[str, float]:
        """An optimizer step on so many rows."""
        elements = rows * width
        passes = elements * max(1, sum(self.state))
        return {"step_rows": rows, "step_elements": elements, "step_passes": passes}

    @property
    def both_ways(self) -> float:
        """Bytes of a number of a vector and of its gradient, as they travel."""
        return self.vector_item + self.gradient_item

    def squares(self, rows: float, cut: Cut) -> dict[str, float]:
        """Sums over the ranks that share ``rows``, there and back."""
        return {"square_bytes": 8.0 * rows if cut[1] > 1 and self.shares_state else 0.0}


class Counted(Protocol):
    """An exchange as costs see it; ``copies`` has all of it at home and no parts."""

    copies: ClassVar[bool]

    def home(self, facts: Facts, cut: Cut) -> Counts: ...
    def part(self, facts: Facts, cut: Cut, rows: float, width: float) -> Counts: ...


def vector_of(counts: Counts) -> Floats:
    """[F]"""
    values = np.zeros(NUM_FEATURES)
    for name, value in counts.items():
        values[INDEX[name]] = value
    return values


def work_of(exchange: Counted, facts: Facts, cut: tuple[int, int]) -> tuple[Floats, Floats]:
    """([S, F] of the shards in row-major order, [F] of every rank) of a table that is cut evenly.

    Shards of one size are counted once: a thousand of them have two sizes a dimension at most.
    """
    home = vector_of(exchange.home(facts, cut))
    if exchange.copies:
        return np.zeros((0, NUM_FEATURES)), home
    rows, widths = balanced_sizes(facts.num_rows, cut[0]), balanced_sizes(facts.dim, cut[1])
    known = {
        (row, width): vector_of(exchange.part(facts, cut, row, width))
        for row in set(rows)
        for width in set(widths)
    }
    return np.stack([known[row, width] for row in rows for width in widths]), home
