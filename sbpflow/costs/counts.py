"""Counts the work that a table causes on the ranks: rows, elements, and bytes (not time).

An exchange derives the counts from ``Facts``. ``part`` counts the work that a shard causes on the
rank that stores it. ``home`` counts the work that a table causes on every rank for that rank's own
samples. The counts are summed over tables. Work that several tables share (a group, a stack, a
transfer) is identified by a ``Key``, and each rank counts its distinct keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from sbpflow.costs.ids import Floats
from sbpflow.sbp.sbp import balanced_sizes

FEATURES = (
    # ``memory_bytes`` counts rows and optimizer state; ``buffer_bytes`` counts ids, vectors, and
    # gradients in flight.
    "memory_bytes",
    "buffer_bytes",
    "always",
    "dense_macs",  # multiply-adds for this rank's samples
    "dense_elements",  # elements that dense layers read and write for this rank's samples
    "dense_parameters",
    # ``batch_ids`` counts the ids of this rank's samples for all features, and ``home_sort`` counts
    # the ids that are deduplicated before sending.
    "batch_ids",
    "home_sort",
    "home_unique",
    "seen_ids",  # ids of the global batch that this rank scans for its own
    "searched_ids",  # the seen_ids that belong to row-split tables
    "read_rows",
    "read_elements",
    # ``read_touched`` counts the elements of distinct rows, because the first read of a row misses
    # the CPU caches. ``out_elements`` counts the elements of the vectors that owners look up and
    # send.
    "read_touched",
    "out_elements",
    "home_elements",  # elements of vectors or partial sums received for the samples
    "expand_rows",
    "expand_elements",
    "repeat_elements",  # gradient elements copied once per rank
    "whole_elements",  # elements of dense gradients that are all-reduced whole
    "update_ids",
    "update_elements",
    "step_rows",  # rows that the optimizer changes
    "step_elements",
    "step_passes",  # step_elements times the optimizer state values per element
    # ``copied_bytes`` counts the bytes copied into and out of transfer buffers, and
    # ``square_bytes`` counts the bytes of squared gradients summed over ranks that share rows.
    "copied_bytes",
    "square_bytes",
    "ids_bytes",  # bytes of ids that this rank sends
    "counted_bytes",  # bytes of row ids that this rank sends after their counts
    "vector_bytes",  # bytes of vectors that this rank sends
    "gradient_bytes",  # bytes of gradients that this rank sends
    # The byte counts above are for bytes sent evenly to all other ranks. In a two-hop exchange,
    # each hop uses its own link, so its bytes are counted separately.
    "host_bytes",  # bytes that this rank sends within its host
    "network_bytes",  # bytes that this rank sends to other hosts
    "vector_in_bytes",  # bytes of vectors that this rank receives
    "gradient_in_bytes",  # bytes of gradients that this rank receives
    # Each of the following features is the number of its distinct keys.
    "num_dense_groups",  # groups in which owners send vectors
    "num_summed_groups",  # groups with partial sums that are added in transit
    "num_whole_groups",  # groups with all-reduced dense gradients
    "num_row_transfers",  # round trips of individual rows between requesters and owners
    "num_row_gathers",  # exchanges of individual rows that all ranks gather
    "num_stacks",
    "num_squares",
    "num_id_calls",
)
INDEX = {name: place for place, name in enumerate(FEATURES)}
NUM_FEATURES = len(FEATURES)
MEMORY, BUFFERS = INDEX["memory_bytes"], INDEX["buffer_bytes"]

Ints = NDArray[np.int64]
Counts = Mapping[str, float]  # counts by feature; missing features count as 0
Key = tuple[int, str]  # index of a feature, and a string that distinguishes its keys
Cut = tuple[float, int]  # (row parts, column parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One table in one step: every input of an exchange's counts except the cut.

    The global batch has ``lookups`` ids, of which ``touched`` are distinct. A single rank needs
    ``wanted`` distinct ids, and all ranks of a host together need ``host_wanted`` (equal to
    ``wanted`` if the layout does not distinguish hosts). ``vectors`` is the number of vectors sent
    per sample. The ``item`` fields are bytes per element: in arithmetic (``item``), in stored rows,
    and in sent vectors and gradients. ``window`` is the number of batches whose ids are in memory.
    ``state`` is the number of optimizer state values (per row, per element).
    """

    world_size: int
    batch_size: int
    num_rows: int
    dim: int
    vectors: float
    lookups: float
    touched: float
    wanted: float
    host_wanted: float
    sent_ids: float  # ids sent to owners, without those already sent for another table
    item: float = 4.0
    row_item: float = 4.0
    vector_item: float = 4.0
    gradient_item: float = 4.0
    window: int = 1
    state: tuple[int, int] = (0, 0)
    slot_share: float = 1.0  # share of rows that are on the device
    # True if ranks that store different columns of a row share its state
    shares_state: bool = False

    @property
    def samples(self) -> float:
        """Return the number of samples per rank."""
        return self.batch_size / self.world_size

    @property
    def local_lookups(self) -> float:
        """Return the number of lookups of one rank's samples."""
        return self.lookups / self.world_size

    def stored(self, rows: float, width: float) -> float:
        """Return the bytes that a shard and its optimizer state occupy on the device."""
        by_row, by_element = self.state
        rows *= self.slot_share
        return rows * (width * self.row_item + (by_row + by_element * width) * self.item)

    def steps(self, rows: float, width: float) -> dict[str, float]:
        """Return the work counts of an optimizer step on ``rows``."""
        elements = rows * width
        passes = elements * max(1, sum(self.state))
        return {"step_rows": rows, "step_elements": elements, "step_passes": passes}

    @property
    def both_ways(self) -> float:
        """Return the bytes sent per element of a vector and its gradient together."""
        return self.vector_item + self.gradient_item

    def squares(self, rows: float, cut: Cut) -> dict[str, float]:
        """Return the bytes that are sent to sum squared gradients over the ranks that share
        ``rows``.

        In a ring of N ranks, each rank sends (N - 1) / N of the 4-byte values twice.
        """
        sent = 8.0 * rows * (cut[1] - 1) / cut[1]
        return {"square_bytes": sent if self.shares_state else 0.0}


class Counted(Protocol):
    """The part of an exchange's interface that cost estimates use.

    If ``copies`` or ``even`` is true, the table has no shards, so ``part`` is not called.
    """

    copies: ClassVar[bool]
    even: ClassVar[bool]

    def home(self, facts: Facts, cut: Cut) -> Counts: ...
    def part(self, facts: Facts, cut: Cut, rows: float, width: float) -> Counts: ...


def vector_of(counts: Counts) -> Floats:
    """Return an array [F] of the counts of all features; missing counts are 0."""
    values = np.zeros(NUM_FEATURES)
    for name, value in counts.items():
        values[INDEX[name]] = value
    return values


def work_of(exchange: Counted, facts: Facts, cut: tuple[int, int]) -> tuple[Floats, Ints, Floats]:
    """Return the counts of an evenly divided table: ``kinds``, ``kind``, and ``home``.

    ``kinds`` [K, F] contains the counts of each distinct shard size; there are at most two sizes
    per dimension. Shard s, in row-major order, has the counts ``kinds[kind[s]]``. ``home`` [F]
    applies to every rank.
    """
    home = vector_of(exchange.home(facts, cut))
    if exchange.copies or exchange.even:
        return np.zeros((0, NUM_FEATURES)), np.zeros(0, dtype=np.int64), home
    rows, widths = balanced_sizes(facts.num_rows, cut[0]), balanced_sizes(facts.dim, cut[1])
    sizes = list(product(dict.fromkeys(rows), dict.fromkeys(widths)))
    kinds = [vector_of(exchange.part(facts, cut, row, width)) for row, width in sizes]
    number = {size: place for place, size in enumerate(sizes)}
    kind = np.array([number[row, width] for row in rows for width in widths], dtype=np.int64)
    return np.stack(kinds), kind, home
