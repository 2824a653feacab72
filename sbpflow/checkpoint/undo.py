"""Rows of a storage as they were at one moment, while training goes on changing them.

An undo log: the first change of a row that is still to be written copies it before. Two threads
meet here, the one that trains and the one that writes. The writer copies a range without a lock,
so some of its rows may be half changed; those are in the log by then, and are put right from it.
"""

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

_Kept = tuple[Tensor, dict[str, Tensor]]  # rows, and what they were by key


class RowLog:
    """``tensors`` have one row, or number, per row of the storage; all as they are now.

    ``pending`` [rows] bool says which rows will be read; it is taken over. On a CUDA device copies
    are made in the stream that is current here, which is the one that trains.
    """

    def __init__(self, tensors: Mapping[str, Tensor], pending: Tensor) -> None:
        self._tensors = dict(tensors)
        self._pending = pending
        self._lock = threading.Lock()
        self._new: list[_Kept] = []  # not seen by the writer yet
        self._sorted: list[_Kept] = []  # by row; the writer's
        self._copies: dict[str, Tensor] = {}
        self._stream = torch.cuda.current_stream(pending.device) if pending.is_cuda else None
        self._held_bytes = 0
        self.most_kept_bytes = 0  # that the log had at a time

    def before_update(self, rows: Tensor) -> None:
        """These rows, each named once, are about to change."""
        with self._lock:
            # A storage of fixed size names one row behind all others, which holds nothing.
            mine = rows[rows < self._pending.numel()].to(torch.int64)
            mine = mine[self._pending[mine]]
            if not mine.numel():
                return
            self._pending[mine] = False
            values = {key: tensor.index_select(0, mine) for key, tensor in self._tensors.items()}
            self._new.append((mine, values))
            self._held_bytes += _num_bytes(values)
            self.most_kept_bytes = max(self.most_kept_bytes, self._held_bytes)

    def read(self, start: int, stop: int) -> dict[str, Tensor]:
        """Rows [start, stop) as they were, on the CPU, good until the next are read.

        Each row is read once, by one thread, in rising ranges.
        """
        with torch.cuda.stream(self._stream):
            found = {key: self._copy(key, start, stop) for key in self._tensors}
            with self._lock:  # what changes from here on was copied above
                self._pending[start:stop] = False
                new, self._new = self._new, []
            for rows, values in new:
                order = rows.argsort()
                kept = {key: value.index_select(0, order) for key, value in values.items()}
                self._sorted.append((rows[order], kept))
            self._put_right(found, start, stop)
            return {key: value.cpu() for key, value in found.items()}

    def _copy(self, key: str, start: int, stop: int) -> Tensor:
        """In memory that is used again: fresh pages cost the thread that trains more than this."""
        source = self._tensors[key][start:stop]
        target = self._copies.get(key)
        if target is None or target.shape[0] < stop - start:
            target = self._copies[key] = torch.empty_like(source)
        return target[: stop - start].copy_(source)

    def _put_right(self, found: dict[str, Tensor], start: int, stop: int) -> None:
        bounds = torch.tensor([start, stop], device=self._pending.device)
        inside: list[_Kept] = []
        for number, (rows, values) in enumerate(self._sorted):
            first, last = torch.searchsorted(rows, bounds).tolist()
            if first < last:
                part = {key: value[first:last] for key, value in values.items()}
                inside.append((rows[first:last], part))
            if last and 2 * last >= rows.numel():  # ranges rise: these are not asked for again
                left = {key: value[last:].clone() for key, value in values.items()}
                self._sorted[number] = rows[last:].clone(), left
                with self._lock:
                    self._held_bytes -= _num_bytes(values) - _num_bytes(left)
        if inside:
            places = torch.cat([rows for rows, _ in inside]) - start
            for key, value in found.items():
                value.index_copy_(0, places, torch.cat([values[key] for _, values in inside]))


def _num_bytes(values: Mapping[str, Tensor]) -> int:
    return sum(value.numel() * value.itemsize for value in values.values())
