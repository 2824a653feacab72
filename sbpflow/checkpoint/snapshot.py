"""Writes a snapshot of one rank's share of the state while training keeps changing it.

Tables are written through an undo log; everything else is copied at construction.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from sbpflow.checkpoint.changes import Stores, stored_tensors
from sbpflow.checkpoint.format import BLOCK_BYTES, Piece
from sbpflow.checkpoint.spill import SpillFile
from sbpflow.checkpoint.undo import RowLog
from sbpflow.checkpoint.write import Part, PieceFile, PieceWriter, bytes_of, write_part
from sbpflow.embedding.state import StoredRows
from sbpflow.embedding.storage.live_rows import TrainedRows
from sbpflow.embedding.storage.selected_rows import SelectedRows
from sbpflow.embedding.storage.store import WEIGHTS, RowStore
from sbpflow.runtime.files.remote_path import AnyPath

RANGE_BYTES = BLOCK_BYTES  # A tensor is copied and written in ranges of this many bytes.
# After each range, the writing thread pauses for ``REST`` times as long as the range took, so that
# training slows down less. During a pause, it empties segments of the log every ``_REST_S``
# seconds.
REST = 2.0
_REST_S = 0.01


@dataclass(frozen=True, slots=True)
class SaveCost:
    """The cost of a background save, on one rank. ``log_bytes`` and ``extra_bytes`` are peaks.

    * ``log_bytes``: memory for the old values of rows that changed before they were written.
    * ``extra_bytes``: all memory of the save, including ``log_bytes``.
    * ``spilled_bytes``: size of the rows that went through a file.
    * ``logging_s``: seconds that the training thread spent on logging.
    """

    log_bytes: int
    extra_bytes: int
    spilled_bytes: int
    logging_s: float


@dataclass(frozen=True, slots=True)
class _Span:
    """Rows [start, stop) of a store's tensor, written as one part."""

    key: str
    start: int
    stop: int
    part: Part


@dataclass(slots=True)
class _Logged:
    """A store whose changes are logged, and its spans to write."""

    store: RowStore
    log: RowLog
    range_rows: int
    spans: list[_Span] = field(default_factory=list[_Span])


class Snapshot:
    """Preserves ``parts`` as they are at construction; another thread may call ``write``.

    Until ``end``, the stores notify the snapshot before rows change.
    """

    def __init__(self, parts: Sequence[Part], stores: Stores) -> None:
        places = stored_tensors(stores)
        spans: dict[int, tuple[RowStore | SelectedRows, list[_Span]]] = {}
        self._rest: list[Part] = []
        for part in parts:
            if isinstance(part.values, StoredRows) and isinstance(part.values.store, SelectedRows):
                rows = part.values
                if rows.start == rows.stop:
                    self._rest.append(part)
                    continue
                span = _Span(rows.key, rows.start, rows.stop, part)
                spans.setdefault(id(rows.store), (part.values.store, []))[1].append(span)
                continue
            if part.name not in places:
                # Any ``StoredRows`` here hold keys, which do not change and need no copy.
                if not isinstance(part.values, StoredRows):
                    part = replace(part, values=part.values.detach().clone())
                self._rest.append(part)
                continue
            store, key, shard = places[part.name]
            start = part.place.row_start - shard.row_start + shard.base
            span = _Span(key, start, start + part.place.num_rows, part)
            spans.setdefault(id(store), (store, []))[1].append(span)
        self._spilled_bytes = 0
        self._hurried = threading.Event()
        self._logged = [_watch(store, of_store) for store, of_store in spans.values()]

    @property
    def cost(self) -> SaveCost:
        """Return the cost so far."""
        logs = [logged.log for logged in self._logged]
        copies = sum(part.num_bytes for part in self._rest)
        return SaveCost(
            log_bytes=sum(log.kept_bytes for log in logs),
            extra_bytes=sum(log.extra_bytes for log in logs) + copies,
            spilled_bytes=self._spilled_bytes,
            logging_s=sum(log.logging_s for log in logs),
        )

    def write(
        self, path: AnyPath, wrote: Callable[[], None] = lambda: None
    ) -> list[tuple[str, Piece]]:
        """Write all parts into a new file, and sync it; call ``wrote`` after each write."""
        spill = SpillFile(path.parent)
        try:
            with PieceFile(path, wrote) as file:
                logged = [pair for one in self._logged for pair in self._write(file, one, spill)]
                return logged + [(part.name, write_part(file, part)) for part in self._rest]
        finally:
            spill.close()
            self._spilled_bytes = spill.num_bytes

    def _write(self, file: PieceFile, logged: _Logged, spill: SpillFile) -> list[tuple[str, Piece]]:
        spans, rows = logged.spans, logged.range_rows
        writers = [PieceWriter(file, span.part.place, span.part.num_bytes) for span in spans]
        first, last = min(span.start for span in spans), max(span.stop for span in spans)
        for number in range(first // rows, -(-last // rows)):
            begin = time.perf_counter()
            self._drain(spill)
            values = logged.log.read(number, spill)
            start = number * rows
            for span, writer in zip(spans, writers, strict=True):
                top, bottom = max(start, span.start), min(start + rows, span.stop)
                if top < bottom:
                    writer.write(bytes_of(values[span.key][top - start : bottom - start]))
            self._pause(REST * (time.perf_counter() - begin), spill)
        return [
            (span.part.name, writer.done()) for span, writer in zip(spans, writers, strict=True)
        ]

    def _pause(self, seconds: float, spill: SpillFile) -> None:
        end = time.perf_counter() + seconds
        while (remaining := end - time.perf_counter()) > 0.0:
            if not all(logged.log.has_room for logged in self._logged):
                return
            if self._hurried.wait(min(remaining, _REST_S)):
                return
            self._drain(spill, spare_last=True)

    def _drain(self, spill: SpillFile, *, spare_last: bool = False) -> None:
        for logged in self._logged:
            logged.log.drain(spill, spare_last=spare_last)

    def hurry(self) -> None:
        """Write without pauses from now on, because a thread is waiting for the save."""
        self._hurried.set()

    def end(self) -> None:
        """Stop listening to the stores."""
        for logged in self._logged:
            logged.store.kernel.listeners.remove(logged.log.before_update)
            logged.log.close()


def _watch(source: RowStore | SelectedRows, spans: list[_Span]) -> _Logged:
    order = source if isinstance(source, SelectedRows) else None
    store = source.store if isinstance(source, SelectedRows) else source
    pending = torch.zeros(store.num_rows, dtype=torch.bool)
    if isinstance(source, TrainedRows):
        # Marking needs no order, so the sorting is left to the writing thread.
        pending[source.unsorted()] = True
    else:
        for span in spans:
            rows = slice(span.start, span.stop)
            pending[rows if order is None else order.numbers(rows)] = True
    item = store.read(slice(0, 0))[WEIGHTS].itemsize
    rows = max(1, RANGE_BYTES // max(1, store.width * item))
    log = RowLog(store, pending, rows, order)
    store.kernel.listeners.append(log.before_update)
    return _Logged(store, log, rows, spans)
