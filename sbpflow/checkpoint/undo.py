"""Rows of a storage as they were at one moment, while training goes on changing them.

An undo log: the first change of a row that is still to be written copies it before. Two threads
meet here, the one that trains and the one that writes; both hold the lock while they copy.
"""

import threading
from collections.abc import Mapping

import torch
from torch import Tensor


class RowLog:
    """``tensors`` have one row, or number, per row of the storage; all as they are now.

    ``pending`` [rows] bool says which rows will be read; it is taken over. On a CUDA device copies
    are made in the stream that is current here, which is the one that trains.
    """

    def __init__(self, tensors: Mapping[str, Tensor], pending: Tensor) -> None:
        self._tensors = dict(tensors)
        self._pending = pending
        self._lock = threading.Lock()
        self._kept: list[tuple[Tensor, dict[str, Tensor]]] = []
        self._stream = torch.cuda.current_stream(pending.device) if pending.is_cuda else None
        self.num_kept_bytes = 0

    def before_update(self, rows: Tensor) -> None:
        """These rows, each named once, are about to change."""
        with self._lock:
            # A storage of fixed size names one row behind all others, which holds nothing.
            mine = rows[rows < self._pending.numel()].to(torch.int64)
            mine = mine[self._pending[mine]].sort().values
            if not mine.numel():
                return
            self._pending[mine] = False
            values = {key: tensor.index_select(0, mine) for key, tensor in self._tensors.items()}
            self._kept.append((mine, values))
            self.num_kept_bytes += sum(v.numel() * v.itemsize for v in values.values())

    def read(self, start: int, stop: int) -> dict[str, Tensor]:
        """Rows [start, stop) as they were, on the CPU; each row is read once."""
        with self._lock, torch.cuda.stream(self._stream):
            self._pending[start:stop] = False
            found = {key: tensor[start:stop].clone() for key, tensor in self._tensors.items()}
            bounds = torch.tensor([start, stop], device=self._pending.device)
            for rows, values in self._kept:
                first, last = torch.searchsorted(rows, bounds).tolist()
                if first < last:
                    places = rows[first:last] - start
                    for key, value in values.items():
                        found[key].index_copy_(0, places, value[first:last])
            return {key: value.cpu() for key, value in found.items()}
