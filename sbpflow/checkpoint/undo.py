"""Defines an undo log, for reading a store's rows as of one moment while training changes them.

Before a row that is not yet written changes for the first time, its old value is logged. Two
threads use the log. The training thread appends rows to segments right before it updates them,
which also brings the rows into the CPU cache for the update. The writing thread copies a range of
rows without a lock, so some copied rows may be half updated. The writing thread then replaces these
rows with their old values from the log, which contains them by then. (If the store moves rows in
the meantime, ``RowStore.read`` still finds them.) The writing thread also empties segments into
slabs, sorted by range, and spills rows to a file when the slabs are full. If it does not empty
segments fast enough, training waits.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sbpflow.checkpoint.marks import choose_take_marked
from sbpflow.checkpoint.slabs import Ints, Slabs
from sbpflow.checkpoint.spill import Extent, SpillFile
from sbpflow.checkpoint.write import bytes_of
from sbpflow.embedding.storage import huge_pages
from sbpflow.embedding.storage.selected_rows import SelectedRows
from sbpflow.embedding.storage.store import RowStore

# Memory limits of the log, as shares of a store's rows; docs/decisions/state.md has the
# measurements behind them.
SLAB_SHARE, SEGMENT_SHARE = 0.05, 0.015
MIN_SLAB_ROWS = 2**14  # The slabs have room for at least this many rows.
SEGMENT_ROWS, MIN_SEGMENTS = 2**14, 3  # Segments of a small store have fewer rows.
# Up to ``PIECE_ROWS`` rows are logged at a time. ``READY_SEGMENTS`` free segments with mapped pages
# are kept ready.
PIECE_ROWS = 2**12
READY_SEGMENTS = 2

_CPU = torch.device("cpu")


@dataclass(slots=True)
class _Segment:
    """Row numbers, and the rows' old values by tensor name. The first ``num_rows`` entries are in
    use.
    """

    rows: Tensor
    values: dict[str, Tensor]
    num_rows: int = 0

    def filled(self) -> tuple[Tensor, dict[str, Tensor]]:
        return self.rows[: self.num_rows], {
            key: value[: self.num_rows] for key, value in self.values.items()
        }


class RowLog:
    """Preserves the rows of ``store`` as they are at construction.

    ``pending`` (bool [rows], on the CPU) marks the rows that will be read; the log takes ownership
    of these marks. Rows are read in ranges of ``range_rows``. ``order``, if given, selects the rows
    and their order; only the writing thread uses ``order``. On CUDA, copies run in the stream that
    is current at construction, which is the training stream. The log itself is in host memory.
    """

    def __init__(
        self,
        store: RowStore,
        pending: Tensor,
        range_rows: int,
        order: SelectedRows | None = None,
    ) -> None:
        self._store, self._order = store, order
        # Sort the tensors by decreasing item size. When they are spilled in this order, each starts
        # at a multiple of its item size.
        empty = store.read(slice(0, 0)).items()
        self._like = dict(sorted(empty, key=lambda item: -item[1].itemsize))
        self._pending: np.ndarray[tuple[int], np.dtype[np.bool_]] = pending.numpy()
        self._range_rows = range_rows
        num_rows = self._num_rows = self._pending.size if order is None else order.num_rows
        self._row_bytes = 8 + sum(
            tensor.shape[1:].numel() * tensor.itemsize for tensor in self._like.values()
        )
        places = min(num_rows, max(MIN_SLAB_ROWS, int(SLAB_SHARE * num_rows)))
        self._slabs = Slabs(places, -(-num_rows // range_rows), range_rows)
        self._sorted = self._new_segment(self._slabs.num_places)  # the rows stored in the slabs
        self._spilled: dict[int, list[Extent]] = {}
        self._copies: dict[str, Tensor] = {}
        device = next(iter(self._like.values())).device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        # The lock protects the data that both threads use: the marks (``_pending``) and the lists
        # of segments.
        self._lock = threading.Condition()
        self._full: list[_Segment] = []  # only the last segment still receives rows
        self._free: list[_Segment] = []
        self._num_segments = 0
        # A job may have many small stores, so small stores use small segments.
        self._segment_rows = min(SEGMENT_ROWS, max(num_rows // 16, min(PIECE_ROWS, num_rows)))
        self._max_segments = max(MIN_SEGMENTS, int(SEGMENT_SHARE * num_rows) // SEGMENT_ROWS)
        self._closed = False
        self._take_marked = choose_take_marked()
        self.logging_s = 0.0  # time spent by the training thread

    @property
    def kept_bytes(self) -> int:
        """Return the peak memory of logged rows."""
        rows = self._num_segments * self._segment_rows + self._slabs.touched_places
        return rows * self._row_bytes

    @property
    def has_room(self) -> bool:
        """Return True if the slabs have enough room for the writer to pause."""
        return self._slabs.used_share < 0.8

    @property
    def extra_bytes(self) -> int:
        """Return ``kept_bytes`` plus the size of the marks and the writer's copies."""
        copies = sum(copy.numel() * copy.itemsize for copy in self._copies.values())
        return self.kept_bytes + self._pending.size + copies

    def before_update(self, rows: Tensor) -> None:
        """Log the old values of these rows, which are about to change."""
        start = time.perf_counter()
        ids: Ints = rows.cpu().numpy()
        for first in range(0, ids.size, PIECE_ROWS):
            self._log(ids[first : first + PIECE_ROWS])
        self.logging_s += time.perf_counter() - start

    def _log(self, rows: Ints) -> None:
        with self._lock:
            # ``rows`` may contain duplicates; each row is taken only once.
            count = min(rows.size, self._num_rows)
            while (segment := self._with_room(count)) is None:
                self._lock.wait()
            if self._closed:
                return
            # ``rows`` may contain padding: the number after the last row, which is never marked.
            start = segment.num_rows
            count = self._take_marked(rows, self._pending, segment.rows.numpy()[start:])
            segment.num_rows = stop = start + count
            if count:
                into = {key: value[start:stop] for key, value in segment.values.items()}
                self._store.read(segment.rows[start:stop], into)

    def _with_room(self, count: int) -> _Segment | None:
        """Return a segment with room for ``count`` rows, or ``None`` if the writer must first free
        one.
        """
        if self._full and self._full[-1].num_rows + count <= self._segment_rows:
            return self._full[-1]
        if not self._free:
            if self._num_segments == self._max_segments:
                return None
            self._num_segments += 1
            self._free.append(self._new_segment(self._segment_rows))
        self._full.append(self._free.pop())
        return self._full[-1]

    def _new_segment(self, count: int) -> _Segment:
        values = {
            key: huge_pages.zeros((count, *tensor.shape[1:]), tensor.dtype, _CPU)
            for key, tensor in self._like.items()
        }
        return _Segment(huge_pages.zeros((count,), torch.int64, _CPU), values)

    def read(self, number: int, spill: SpillFile) -> dict[str, Tensor]:
        """Return the old rows of range ``number``, on the CPU; they are valid until the next call.

        Each range must be read exactly once, always by the same thread.
        """
        start = number * self._range_rows
        stop = min(start + self._range_rows, self._num_rows)
        numbers = slice(start, stop)
        if self._order is not None:
            numbers = self._order.numbers(numbers)
        # The order matters: copy, then clear the marks, then correct the copy from the log. A row
        # that changes during the copy is still marked, so its old value is in the log.
        copies = self._copy(numbers, stop - start)
        with self._lock:
            self._pending[numbers if isinstance(numbers, slice) else numbers.numpy()] = False
        self.drain(spill)
        for rows, values in self._logged(number, spill):
            for key, copy in copies.items():
                copy.index_copy_(0, rows - start, values[key])
        return copies

    def drain(self, spill: SpillFile, *, spare_last: bool = False) -> None:
        """Empty the segments into the slabs; the writing thread calls this method often.

        This method also allocates free segments in advance. With ``spare_last``, skip the last
        segment, which may still have room.
        """
        with self._lock:
            count = max(len(self._full) - spare_last, 0)
            full, self._full = self._full[:count], self._full[count:]
            missing = READY_SEGMENTS - len(self._free) - len(full)
            new = min(max(missing, 0), self._max_segments - self._num_segments)
            self._num_segments += new
        for _ in range(new):
            segment = self._new_segment(self._segment_rows)
            for tensor in (segment.rows, *segment.values.values()):
                # Touch the pages, so that they are mapped before training needs them.
                tensor.zero_()
            self._release(segment)
        for segment in full:
            self._sort_in(segment, spill)
            self._release(segment)

    def close(self) -> None:
        """Stop logging, and wake up the training thread if it is waiting."""
        with self._lock:
            self._closed = True
            self._max_segments += 1  # so that a waiting thread gets a segment
            self._lock.notify_all()

    def _release(self, segment: _Segment) -> None:
        segment.num_rows = 0
        with self._lock:
            self._free.append(segment)
            self._lock.notify_all()

    def _sort_in(self, segment: _Segment, spill: SpillFile) -> None:
        """Move the rows of a segment to the slabs of their ranges."""
        rows, values = segment.filled()
        if self._order is not None:
            rows = self._order.places(rows)
        # A stable sort is fast here, because the rows consist of ascending runs.
        order = rows.numpy().argsort(kind="stable")
        for first in range(0, order.size, self._slabs.sure_rows):
            part = order[first : first + self._slabs.sure_rows]
            ascending = rows.numpy()[part]
            while (places := self._slabs.place(ascending)) is None:
                self._spill_range(spill)
            at, source = torch.from_numpy(places), torch.from_numpy(part)
            self._sorted.rows[at] = rows[source]
            for key, value in values.items():
                self._sorted.values[key].index_copy_(0, at, value[source])

    def _spill_range(self, spill: SpillFile) -> None:
        """Spill the rows of the range with the most slabs to the file."""
        number = self._slabs.fullest()
        rows, values = self._take(number)
        parts = [bytes_of(part) for part in (rows, *values.values())]
        self._spilled.setdefault(number, []).append(spill.append(parts))

    def _logged(self, number: int, spill: SpillFile) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Remove the rows of a range from the log, both in memory and in the file, and yield
        them.
        """
        yield self._take(number)
        for extent in self._spilled.pop(number, ()):
            yield self._unpack(spill.read(extent))

    def _take(self, number: int) -> tuple[Tensor, dict[str, Tensor]]:
        at = torch.from_numpy(self._slabs.take(number))
        values = {key: rows.index_select(0, at) for key, rows in self._sorted.values.items()}
        return self._sorted.rows[at], values

    def _unpack(self, data: bytearray) -> tuple[Tensor, dict[str, Tensor]]:
        count = len(data) // self._row_bytes
        flat = torch.frombuffer(data, dtype=torch.uint8)
        offset, values = 8 * count, dict[str, Tensor]()
        for key, tensor in self._like.items():
            shape = torch.Size((count, *tensor.shape[1:]))
            end = offset + shape.numel() * tensor.itemsize
            values[key] = flat[offset:end].view(tensor.dtype).view(shape)
            offset = end
        return flat[: 8 * count].view(torch.int64), values

    def _copy(self, numbers: slice | Tensor, count: int) -> dict[str, Tensor]:
        """Copy rows of the store into reusable buffers."""
        if not self._copies:
            rows = min(self._range_rows, self._num_rows)
            self._copies = {
                key: torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype)
                for key, tensor in self._like.items()
            }
        copies = {key: copy[:count] for key, copy in self._copies.items()}
        with torch.cuda.stream(self._stream):
            self._store.read(numbers, copies)
        return copies
