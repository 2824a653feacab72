"""What one rank writes of a state that goes on changing: tables through an undo log, the rest
copied at once.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from sbpflow.checkpoint.format import BLOCK_BYTES, Piece
from sbpflow.checkpoint.spill import SpillFile
from sbpflow.checkpoint.undo import RowLog
from sbpflow.checkpoint.write import Part, PieceFile, PieceWriter, bytes_of, row_chunks
from sbpflow.embedding.plan.tables import Shard
from sbpflow.embedding.state import StoredRows
from sbpflow.embedding.storage.keyed import TrainedRows
from sbpflow.embedding.storage.store import WEIGHTS, RowStore

Stores = Callable[[], Iterable[tuple[RowStore, Sequence[Shard]]]]
RANGE_BYTES = BLOCK_BYTES  # of a tensor, copied and written at a time
_REST_S = 0.01  # at a time: segments of the log are to come back soon
REST = 2.0  # between ranges, of the time that one took: steps lose less to a thread that rests


@dataclass(frozen=True, slots=True)
class SaveCost:
    """What a save beside training took of it on one rank, in bytes at most at a time and seconds.

    ``log_bytes`` are of rows that changed before they were written; ``extra_bytes`` are all memory
    that the save had, with these; ``spilled_bytes`` went through a file.
    """

    log_bytes: int
    extra_bytes: int
    spilled_bytes: int
    logging_s: float


@dataclass(frozen=True, slots=True)
class _Span:
    """Rows [start, stop) of a tensor of a store that make one part."""

    key: str
    start: int
    stop: int
    part: Part


@dataclass(slots=True)
class _Logged:
    """A store whose changes are watched, and what is to be written of it."""

    store: RowStore
    log: RowLog
    range_rows: int
    spans: list[_Span] = field(default_factory=list[_Span])


class Snapshot:
    """``parts`` as they are when this is made; ``write`` may be called by another thread.

    Until ``end`` it listens to the stores for rows that are about to change.
    """

    def __init__(self, parts: Sequence[Part], stores: Stores) -> None:
        places: dict[str, tuple[RowStore, str, Shard]] = {}
        for store, shards in stores():
            for shard in shards:
                name = f"tables/{shard.table.name}"
                for key in store.read(slice(0, 0)):
                    places[name if key == WEIGHTS else f"{name}/{key}"] = store, key, shard
        spans: dict[int, tuple[RowStore | TrainedRows, list[_Span]]] = {}
        self._rest: list[Part] = []
        for part in parts:
            if part.name not in places:
                if not isinstance(part.values, StoredRows):  # keys, which do not change
                    part = replace(part, values=part.values.detach().clone())
                self._rest.append(part)
                continue
            store, key, shard = places[part.name]
            start = part.place.row_start - shard.row_start + shard.base
            if isinstance(part.values, StoredRows) and isinstance(part.values.store, TrainedRows):
                store, start = part.values.store, part.values.start
            span = _Span(key, start, start + part.place.num_rows, part)
            spans.setdefault(id(store), (store, []))[1].append(span)
        self._spilled_bytes = 0
        self._hurried = threading.Event()
        self._logged = [_watch(store, some) for store, some in spans.values()]

    @property
    def cost(self) -> SaveCost:
        """Up to now."""
        logs = [logged.log for logged in self._logged]
        copies = sum(part.num_bytes for part in self._rest)
        return SaveCost(
            log_bytes=sum(log.kept_bytes for log in logs),
            extra_bytes=sum(log.extra_bytes for log in logs) + copies,
            spilled_bytes=self._spilled_bytes,
            logging_s=sum(log.logging_s for log in logs),
        )

    def write(self, path: Path) -> list[tuple[str, Piece]]:
        """All parts into a new file, which is on disk when this returns."""
        file, spill = PieceFile(path), SpillFile(path.parent)
        try:
            found = [pair for logged in self._logged for pair in self._write(file, logged, spill)]
            for part in self._rest:
                writer = PieceWriter(file, part.place, part.num_bytes)
                for chunk in row_chunks(part.values):
                    writer.write(bytes_of(chunk))
                found.append((part.name, writer.done()))
            file.close()
        finally:
            file.close(sync=False)
            spill.close()
            self._spilled_bytes = spill.num_bytes
        return found

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
        while (left := end - time.perf_counter()) > 0.0:
            if not all(logged.log.has_room for logged in self._logged):
                return
            if self._hurried.wait(min(left, _REST_S)):
                return
            self._drain(spill, spare_last=True)

    def _drain(self, spill: SpillFile, *, spare_last: bool = False) -> None:
        for logged in self._logged:
            logged.log.drain(spill, spare_last=spare_last)

    def hurry(self) -> None:
        """Somebody waits for what is being written: no rest from here on."""
        self._hurried.set()

    def end(self) -> None:
        """No longer listen to the stores."""
        for logged in self._logged:
            logged.store.listeners.remove(logged.log.before_update)
            logged.log.close()


def _watch(source: RowStore | TrainedRows, spans: list[_Span]) -> _Logged:
    order = source if isinstance(source, TrainedRows) else None
    store = source.store if isinstance(source, TrainedRows) else source
    pending = torch.zeros(source.num_rows, dtype=torch.bool)
    for span in spans:
        pending[span.start : span.stop] = True
    item = store.read(slice(0, 0))[WEIGHTS].itemsize
    rows = max(1, RANGE_BYTES // max(1, store.width * item))
    log = RowLog(store, pending, rows, order)
    store.listeners.append(log.before_update)
    return _Logged(store, log, rows, spans)
