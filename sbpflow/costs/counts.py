"""Counts the work of a table on each rank in rows, elements, and bytes; time is not considered.

Exchanges compute the counts from ``Facts``. ``part`` counts the work of a shard on the rank that
stores it, and ``home`` counts the work of a table on each rank for that rank's own samples. A rank
adds up the counts of all tables. Work that several tables share (for a group, a stack, or a
transfer) has a ``Key``, and a rank counts each distinct key once.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sbpflow.costs.ids import Floats

FEATURES = (
    # ``memory_bytes`` counts rows and optimizer state; ``buffer_bytes`` counts ids, vectors, and
    # gradients in flight, and their sums.
    "memory_bytes",
    "buffer_bytes",
    "always",
    "dense_macs",  # Multiply-adds for this rank's samples.
    "dense_elements",  # Elements that dense layers read and write for this rank's samples.
    "dense_parameters",
    # ``batch_ids`` counts the ids of this rank's samples for all features, and ``home_sort`` counts
    # the ids that are deduplicated before sending.
    "batch_ids",
    "home_sort",
    "home_unique",
    "seen_ids",  # Ids of the global batch, which this rank scans for ids of its own rows.
    "searched_ids",  # The number of ``seen_ids`` that belong to row-split tables.
    "read_rows",
    "read_elements",
    "out_elements",  # Elements of the vectors that owners look up and send.
    "home_elements",  # Elements of vectors or partial sums received for this rank's samples.
    "expand_rows",
    "expand_elements",
    "repeat_elements",  # Gradient elements that this rank gathers from all ranks.
    "whole_elements",  # Elements of all-reduced dense gradients.
    "update_ids",
    "update_elements",
    "step_rows",  # Rows that the optimizer changes.
    "step_elements",
    "step_passes",  # ``step_elements`` times the number of optimizer states (at least 1).
    "copied_bytes",  # Bytes copied into and out of transfer buffers.
    # Bytes that this rank sends in rings: in all-reduces of squared gradients, which ranks that
    # share rows sum, and of dense gradients of copied tables, and in all-gathers of gradients.
    "reduced_bytes",
    "ids_bytes",  # Bytes of ids that this rank sends.
    "counted_bytes",  # Bytes of row ids that this rank sends after exchanging their counts.
    "vector_bytes",  # Bytes of vectors that this rank sends.
    "gradient_bytes",  # Bytes of gradients that this rank sends.
    # Except ``reduced_bytes``, the sent bytes above are spread evenly over all other ranks. In a
    # two-hop exchange, each hop uses its own link, so the bytes of each hop have their own feature.
    "host_bytes",  # Bytes that this rank sends within its host.
    "network_bytes",  # Bytes that this rank sends to other hosts.
    # Each feature below counts distinct keys (see ``Key``).
    "num_dense_groups",  # Groups in which owners send vectors.
    "num_summed_groups",  # Groups whose partial sums are added in transit.
    "num_whole_groups",  # Groups with all-reduced dense gradients.
    "num_row_transfers",  # Round trips of individual rows between requesters and owners.
    "num_row_gathers",  # Exchanges of individual rows that all ranks gather.
    "num_stacks",
    "num_squares",
    "num_id_calls",
)
INDEX = {name: place for place, name in enumerate(FEATURES)}
NUM_FEATURES = len(FEATURES)
MEMORY, BUFFERS = INDEX["memory_bytes"], INDEX["buffer_bytes"]

Ints = NDArray[np.int64]
Counts = Mapping[str, float]  # Counts by feature; missing features count as 0.
Key = tuple[int, str]  # Index of a feature, and a string; equal keys are counted once.
Cut = tuple[float, int]  # (row parts, column parts)


# Bytes that a lookup's address and its place among the unique rows take, by device type: on CPU,
# three 4-byte numbers of the compiled loops (torch's kernel needs 38 bytes); on CUDA, the tensors
# of ``SortedSegments``, which were counted but not measured.
INDEX_ITEM = {"cpu": 12.0, "cuda": 48.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts about a table and a step from which an exchange computes counts. Only the cut (the
    numbers of row and column parts) and the size of a shard are passed separately.

    The global batch has ``lookups`` ids (at most ``most_lookups``), of which ``touched`` are
    distinct. A single rank needs ``wanted`` distinct ids, and all ranks of a host together need
    ``host_wanted`` (the same as ``wanted`` if the layout does not distinguish hosts). ``vectors``
    is the number of vectors sent per sample. An element has ``item`` bytes in arithmetic,
    ``row_item`` bytes in stored rows, and ``sent_item`` bytes in sent vectors and gradients.
    ``window`` is the number of batches whose ids are in memory at the same time. A lookup's address
    and its place among the unique rows take ``index_item`` bytes. A step has ``batches`` batches.
    ``state`` contains the number of optimizer state values per row and the number per element.
    With ``sorts_ahead``, ids are sorted when they are received; otherwise, in the update.
    """

    world_size: int
    batch_size: int
    num_rows: int
    dim: int
    vectors: float
    lookups: float
    most_lookups: float
    touched: float
    wanted: float
    host_wanted: float
    # ids, and weights and lengths of lists, sent to owners, except those sent for another table, in
    # units of 4 bytes
    sent_ids: float
    item: float = 4.0
    row_item: float = 4.0
    sent_item: float = 4.0
    window: int = 1
    index_item: float = INDEX_ITEM["cpu"]
    sorts_ahead: bool = False
    batches: int = 1
    state: tuple[int, int] = (0, 0)
    slot_share: float = 1.0  # Share of rows that are on the device.
    slot_bytes: float = 0.0  # Bytes per row that the planning of cache slots takes on the device.
    # True if ranks that store different columns of a row share its state.
    shares_state: bool = False
    # The distinct ids of all batches of a step, divided by the sum of those of each batch.
    step_share: float = 1.0

    @property
    def samples(self) -> float:
        """Return the number of samples per rank."""
        return self.batch_size / self.world_size

    @property
    def local_lookups(self) -> float:
        """Return the number of lookups for one rank's samples."""
        return self.lookups / self.world_size

    @property
    def bags(self) -> float:
        """Return the number of bags with offsets in the global batch; a bag of one id has none."""
        bags = self.batch_size * self.vectors
        return 0.0 if self.lookups == bags else bags

    @property
    def received(self) -> int:
        """Return the number of batches whose ids have been received at the same time."""
        return max(self.batches, self.window - 1)

    def stored(self, rows: float, width: float) -> float:
        """Return the bytes that a shard and its optimizer state occupy on the device."""
        by_row, by_element = self.state
        each = width * self.row_item + (by_row + by_element * width) * self.item
        return rows * (self.slot_share * each + self.slot_bytes)

    def steps(self, rows: float, width: float) -> dict[str, float]:
        """Return the work counts of an optimizer step on ``rows``, divided by its batches. Each
        batch has ``rows`` rows; rows of several batches take one step.
        """
        rows *= self.step_share
        elements = rows * width
        passes = elements * max(1, sum(self.state))
        return {"step_rows": rows, "step_elements": elements, "step_passes": passes}

    def address_bytes(self, ids: float, bags: float) -> float:
        """Return the bytes of the addresses (int64) of ``ids`` and of the offsets of ``bags``, in
        all received batches.
        """
        ahead = self.index_item if self.sorts_ahead else 0.0
        return self.received * ((8.0 + ahead) * ids + 8.0 * bags)

    def request_bytes(self, ids: float) -> float:
        """Return the bytes of the addresses (int32) and the index of requested ``ids``."""
        ahead = self.index_item if self.sorts_ahead else 4.0
        return ids * (self.batches * self.index_item + (self.received - self.batches) * ahead)

    def update_index(self, ids: float) -> float:
        """Return the bytes of the index of ``ids`` that only the update of a batch needs."""
        return 0.0 if self.sorts_ahead else self.index_item * ids

    def sums_bytes(self, rows: float, width: float, out: float, padded: float = 0.0) -> float:
        """Return by how many bytes the summed gradients in an update, with their squares if there
        is state per row, exceed the vectors and gradients of this rank's samples, which are freed
        before the update. Each batch has ``rows`` rows. ``out`` is the number of elements of these
        vectors for the tables that this rank updates, if all ranks update equally many. To sum
        squares over ranks, a copy of ``padded`` squares and the other ranks' squares are needed.
        """
        summed = self.batches * self.step_share * rows * (width + bool(self.state[0]))
        return self.item * (summed + 2 * padded - 2 * out)

    def collected_bytes(
        self, elements: float, ids: float, sums: float, index: float = 0.0
    ) -> float:
        """Return the bytes of the gradients of a step, and of their ``sums`` in its update. Each
        batch has ``ids`` ids and gradients with ``elements`` elements; the update needs ``index``
        bytes for each batch. The gradients of several batches are joined while the parts are still
        in memory. The joined ids (8 bytes each) have an index of their own.
        """
        gradients = self.batches * elements * self.item
        if self.batches == 1:
            return gradients + max(sums + index, 0.0)
        joined = self.batches * ids * (8 + self.index_item)
        return gradients + max(gradients, max(sums, 0.0) + joined) + self.batches * index

    def squares(self, rows: float, cut: Cut) -> dict[str, float]:
        """Return the bytes that are sent to sum squared gradients over the ranks that share
        ``rows``, divided by the batches of the step; padding counts as rows.

        In a ring of N ranks, each rank sends (N - 1) / N of the 4-byte values twice.
        """
        sent = 8.0 * rows * (cut[1] - 1) / cut[1]
        return {"reduced_bytes": sent if self.shares_state else 0.0}


def looked_up(rows: float, width: float) -> dict[str, float]:
    """Return the work of reading ``rows`` and of summing their gradients in the update."""
    return {
        "read_rows": rows,
        "read_elements": rows * width,
        "update_ids": rows,
        "update_elements": rows * width,
    }


def expanded(lookups: float, unique: float, width: float) -> dict[str, float]:
    """Return the work of finding the ``unique`` ids of ``lookups`` and of expanding their rows to
    one vector per lookup.
    """
    return {
        "home_sort": lookups,
        "home_unique": unique,
        "expand_rows": lookups,
        "expand_elements": lookups * width,
    }


def join_counts(samples: float, width: int, item: int) -> Counts:
    """Return what a rank copies to join the parts of several groups into one output [samples,
    width] with items of this size, and to split its gradient: the output is joined (read and
    written), its columns are reordered, and the gradient is split.
    """
    return {"copied_bytes": 5.0 * samples * width * item}


def vector_of(counts: Counts) -> Floats:
    """Return the counts of all ``FEATURES`` as an array [F]; missing counts are 0."""
    values = np.zeros(NUM_FEATURES)
    for name, value in counts.items():
        values[INDEX[name]] = value
    return values
