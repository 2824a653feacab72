"""What one rank writes of a state that goes on changing: tables through an undo log, the rest
copied at once.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from sbpflow.checkpoint.format import BLOCK_BYTES, Piece
from sbpflow.checkpoint.undo import RowLog
from sbpflow.checkpoint.write import Part, PieceFile, PieceWriter, bytes_of, row_chunks
from sbpflow.embedding.plan.tables import Shard
from sbpflow.embedding.storage.base import Storage

Storages = Callable[[], Iterable[tuple[Storage, Sequence[Shard]]]]
_WEIGHTS = ""


@dataclass(frozen=True, slots=True)
class _Span:
    """Rows [start, stop) of a tensor of a storage that make one part."""

    key: str
    start: int
    stop: int
    part: Part


@dataclass(slots=True)
class _Logged:
    """A storage whose changes are watched, and what is to be written of it."""

    storage: Storage
    log: RowLog
    spans: list[_Span] = field(default_factory=list[_Span])


class Snapshot:
    """``parts`` as they are when this is made; ``write`` may be called by another thread.

    Until ``end`` the storages tell of each row before its first change.
    """

    def __init__(self, parts: Sequence[Part], storages: Storages) -> None:
        places: dict[str, tuple[int, str, Shard]] = {}
        listed = list(storages())
        for number, (storage, shards) in enumerate(listed):
            for shard in shards:
                name = f"tables/{shard.table.name}"
                places[name] = number, _WEIGHTS, shard
                places |= {f"{name}/{key}": (number, key, shard) for key in storage.state}
        spans: dict[int, list[_Span]] = {}
        self._rest: list[Part] = []
        for part in parts:
            if part.name not in places:
                copy = part.values.detach().clone()
                self._rest.append(Part(name=part.name, place=part.place, values=copy))
                continue
            number, key, shard = places[part.name]
            start = part.place.row_start - shard.row_start + shard.base
            span = _Span(key, start, start + part.place.num_rows, part)
            spans.setdefault(number, []).append(span)
        self._logged = [_watch(listed[number][0], some) for number, some in spans.items()]

    @property
    def most_kept_bytes(self) -> int:
        """Of rows that changed before they were written, at a time."""
        return sum(logged.log.most_kept_bytes for logged in self._logged)

    def write(self, path: Path) -> list[tuple[str, Piece]]:
        """All parts into a new file, which is on disk when this returns."""
        file = PieceFile(path)
        try:
            found = [
                (name, piece) for logged in self._logged for name, piece in _write(file, logged)
            ]
            for part in self._rest:
                writer = PieceWriter(file, part.place, part.num_bytes)
                for chunk in row_chunks(part.values):
                    writer.write(bytes_of(chunk))
                found.append((part.name, writer.done()))
            file.close()
        finally:
            file.close(sync=False)
        return found

    def end(self) -> None:
        """No longer watch the storages."""
        for logged in self._logged:
            logged.storage.before_update = None


def _watch(storage: Storage, spans: list[_Span]) -> _Logged:
    tensors: dict[str, Tensor] = {_WEIGHTS: storage.weights, **storage.state}
    pending = torch.zeros(storage.weights.shape[0], dtype=torch.bool, device=storage.weights.device)
    for span in spans:
        pending[span.start : span.stop] = True
    log = RowLog(tensors, pending)
    storage.before_update = log.before_update
    return _Logged(storage, log, spans)


def _write(file: PieceFile, logged: _Logged) -> list[tuple[str, Piece]]:
    writers = [PieceWriter(file, span.part.place, span.part.num_bytes) for span in logged.spans]
    weights = logged.storage.weights
    rows = max(1, BLOCK_BYTES // max(1, weights.shape[1] * weights.itemsize))
    first = min(span.start for span in logged.spans)
    last = max(span.stop for span in logged.spans)
    for start in range(first, last, rows):
        stop = min(start + rows, last)
        values = logged.log.read(start, stop)
        for span, writer in zip(logged.spans, writers, strict=True):
            top, bottom = max(start, span.start), min(stop, span.stop)
            if top < bottom:
                writer.write(bytes_of(values[span.key][top - start : bottom - start]))
    return [
        (span.part.name, writer.done()) for span, writer in zip(logged.spans, writers, strict=True)
    ]
